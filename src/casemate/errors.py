"""Every error that Casemate raises, split by who can act on it.

    CasemateError
    + ConfigError         the operator wrote something wrong
    |   - UnknownName     no plug-in has that name
    |   - MissingExtra    an optional package is absent; the message is the pip command
    |   - CapabilityError a part cannot do what another needs
    + BackendError        something outside failed; has .backend and .retryable
    + DataError           a corpus, an index or a canary set cannot be used
    + QueryError          the client's question cannot be answered as it stands
    + BudgetExhausted     an attack asked more than it was given

A message says what, which value, what is allowed and what to do. A flagged query is not an error: it is a
``Verdict``, and it never reaches the client.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


class CasemateError(Exception):
    """The root: catch this to catch all that Casemate raises on purpose."""


class ConfigError(CasemateError):
    """The operator wrote something wrong: the message names file, key, value and what is allowed."""


class UnknownName(ConfigError):
    """No plug-in has that name; the message lists the known ones."""


class MissingExtra(ConfigError):
    """An optional package is absent; the message says how to install it."""


class CapabilityError(ConfigError):
    """A part was wired to one that cannot do what it needs."""


class BackendError(CasemateError):
    """Something outside failed: a server, a database, a disk.

    Attributes:
        backend: Name of the backend.
        retryable: Whether trying again later may help.
    """

    def __init__(self, message: str, *, backend: str, retryable: bool) -> None:
        super().__init__(message)
        self.backend = backend
        self.retryable = retryable

    def __reduce__(self) -> Any:  # from one process to another
        return partial(type(self), backend=self.backend, retryable=self.retryable), self.args


class DataError(CasemateError):
    """A corpus, an index or a canary set cannot be used as it is."""


class QueryError(CasemateError):
    """The client's question cannot be answered as it stands: empty, too long, or with NUL characters."""


class BudgetExhausted(CasemateError):
    """An attack has asked all the questions it was given; what it found so far counts."""


@contextmanager
def needs(install: str) -> Iterator[None]:
    """Turns a failed import inside the block into ``MissingExtra`` that says what to install.

    >>> with needs("casemate[postgres]"):
    ...     import a_package_that_is_absent
    Traceback (most recent call last):
        ...
    casemate.errors.MissingExtra: the package 'a_package_that_is_absent' is absent: pip install 'casemate[postgres]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        command = install if install.startswith("pip ") else f"pip install '{install}'"
        raise MissingExtra(f"the package {error.name!r} is absent: {command}") from error
