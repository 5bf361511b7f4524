"""Every error that Casemate raises on purpose, split by who can act on it.

    CasemateError
    ├── ConfigError             the operator must change the configuration or the installation
    │   ├── UnknownName         no plug-in has this name
    │   ├── MissingExtra        an optional package is not installed
    │   └── CapabilityError     a part lacks what another part needs of it
    ├── BackendError            an external system failed: server, database, disk; has .backend and .retryable
    ├── DataError               a corpus, an index or another file cannot be used
    ├── QueryError              the client's query cannot be answered as it is
    └── BudgetExhausted         an attack has no query left

A message states what failed, which value, what is allowed, and what to do. A flagged query is not an error: it yields a
``Verdict``, which never reaches the client.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

_USER = re.compile(r"(?<=://)(?!user:password@|\[\^)[^\s'\"]*@")
"""User and password of a URL, to the last ``@``; not those of the form that a message gives as an example."""
_SECRET_ENDS = r"(?:secret|passw(?:or)?d|pwd|passphrase|credential)s?|key|api_?keys|token|auth(?:orization)?|cookie"
_SECRET_NAME = re.compile(rf"(?:{_SECRET_ENDS})(?:\.\d+)*$", re.I)
"""Names of options and headers with secrets: ``api_key``, ``Authorization``; not ``unit_keys`` or ``max_tokens``."""
_SECRETS = (
    (re.compile(r"://.*@", re.S), "://***@"),
    (re.compile(r"[^\s:/@]{1,100}:(?!//)[^\s@]{1,200}@"), "***@"),  # a URL without its scheme; bounded: linear time
    (re.compile(rf"((?:{_SECRET_ENDS})=)[^\s&;]+", re.I), r"\1***"),  # a parameter of a URL, or of a database
)
"""Patterns of secrets in a value, with what is shown instead."""


class CasemateError(Exception):
    """Base class of all errors that Casemate raises on purpose."""


class ConfigError(CasemateError):
    """The configuration is wrong; the message names file, key, value and what is allowed.

    User and password of a URL in the message are masked.

    >>> str(ConfigError("url is 'ftp://ann:s3@cret@host/x'"))
    "url is 'ftp://***@host/x'"
    """

    def __init__(self, message: str) -> None:
        super().__init__(_USER.sub("***@", message))


class UnknownName(ConfigError):
    """No plug-in has this name; the message lists the available ones."""


class MissingExtra(ConfigError):
    """An optional package is not installed; the message contains the pip command."""


class CapabilityError(ConfigError):
    """A part lacks a capability that another part needs of it."""


class BackendError(CasemateError):
    """An external system failed: a server, a database, a disk.

    Attributes:
        backend: Name of the backend.
        retryable: Whether a retry may succeed.
    """

    def __init__(self, message: str, *, backend: str, retryable: bool) -> None:
        super().__init__(message)
        self.backend = backend
        self.retryable = retryable

    def __reduce__(self) -> Any:  # keyword-only arguments, which the default of Exception would lose in a pickle
        return partial(type(self), backend=self.backend, retryable=self.retryable), self.args


class DataError(CasemateError):
    """A corpus, an index, a calibration or a canary set cannot be used as it is."""


class QueryError(CasemateError):
    """The client's query cannot be answered as it is: empty, too long, or with NUL characters."""


class BudgetExhausted(CasemateError):
    """An attack has used up its query budget; its findings so far count."""


@contextmanager
def needs(install: str) -> Iterator[None]:
    """Turns a failed import inside the block into ``MissingExtra``.

    Args:
        install: The extra, such as ``casemate[postgres]``, or a whole pip command.

    >>> with needs("casemate[postgres]"):
    ...     import absent_package
    Traceback (most recent call last):
        ...
    casemate.errors.MissingExtra: the package 'absent_package' is not installed: pip install 'casemate[postgres]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        command = install if install.startswith("pip ") else f"pip install '{install}'"
        raise MissingExtra(f"the package {error.name!r} is not installed: {command}") from error


def require_range(owner: str, options: object, names: str, **limits: float) -> None:
    """Checks that options are finite numbers in a range.

    Args:
        owner: Name of the plug-in or section, for the error.
        options: The object with the options.
        names: Names of the options, separated by spaces.
        **limits: ``above``, ``at_least``, ``at_most``, ``below``.

    Raises:
        ConfigError: If a value is out of range.
    """
    holds = {"above": operator.gt, "at_least": operator.ge, "at_most": operator.le, "below": operator.lt}
    for name in names.split():
        value = getattr(options, name)
        if not math.isfinite(value) or not all(holds[word](value, limit) for word, limit in limits.items()):
            allowed = [f"{word.replace('_', ' ')} {limit:g}" for word, limit in limits.items()]
            allowed += [] if math.isfinite(value) else ["finite"]
            raise ConfigError(f"{owner}: {name}={value}; it must be {' and '.join(allowed)}")


def shown_value(name: str, value: object) -> str:
    """The ``repr`` of a configured value, for an error. What its name or its form shows to be secret is masked.

    >>> shown_value("max_tokens", "two"), shown_value("api_key", "s3cret"), shown_value("reader", [{"api_key": "x"}])
    ("'two'", '***', "[{'api_key': ***}]")
    >>> shown_value("headers", {"Authorization": "Bearer s3cret", "X-Pages": 5}), shown_value("unit_keys", 5)
    ("{'Authorization': ***, 'X-Pages': 5}", '5')
    >>> shown_value("timeout_s", "https://ann:s3 'c@ret@host/x")
    "'https://***@host/x'"
    >>> shown_value("k", "https://host/x?api_key=s3cret&n=5"), shown_value("k", "ann:s3cret@host:5432/db")
    ("'https://host/x?api_key=***&n=5'", "'***@host:5432/db'")
    """
    if _SECRET_NAME.search(name):
        return "***"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {shown_value(str(key), one)}' for key, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(shown_value('', one) for one in value)}]"
    if type(value) is str:  # not a Secret
        for pattern, shown in _SECRETS:
            value = pattern.sub(shown, value)
    return repr(value)


def validation_reason(error: Mapping[str, object]) -> str:
    """The reason in one of the errors of a pydantic ``ValidationError``, to follow the key and the value.

    >>> validation_reason({"msg": "Value error, Write out the name"})
    'write out the name'
    """
    reason = str(error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{reason[:1].lower()}{reason[1:]}"


def first_reason(error: Any) -> str:
    """Field and reason of the first error of a pydantic ``ValidationError``."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), validation_reason(first))))


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Second half of an error about an unknown name: the closest allowed name, if one is close, and all of them.

    >>> did_you_mean("rga", ["rag", "guard"])
    "; did you mean 'rag'? allowed: rag, guard"
    >>> did_you_mean("x", ["rag", "guard"])
    '; allowed: rag, guard'
    """
    names = list(allowed)
    close = closest_name(name, names)
    return f"; {f'did you mean {close!r}? ' if close else ''}allowed: {', '.join(names) or 'none'}"


def closest_name(name: str, allowed: Iterable[str]) -> str:
    """The allowed name that an unknown name is probably meant to be; empty if none is close."""
    return next(iter(difflib.get_close_matches(name, list(allowed), n=1)), "")


def describe_failure(error: Exception) -> str:
    """The class of an error, with the message of a `CasemateError`, else with the line that raised it.

    Messages of other errors may quote a document.
    """
    if isinstance(error, CasemateError):
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
