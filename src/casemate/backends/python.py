"""A function of your own as a system that answers: whatever a few lines of Python can reach."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from casemate.callables import Patience, is_async, named, takes
from casemate.errors import BackendError, ConfigError
from casemate.protocols import Target
from casemate.remote import TELLS, figures, names, told
from casemate.types import Answer, Query

NAME = "python"
EXTRA = ("client", "tenant", "k")
"""Parameters that are filled if the function has them."""


@dataclass(eq=False)
class Python(Target):
    """Calls a function with the question.

    It returns the answer's text; or a mapping with ``answer`` and, as far as it tells them, ``sources``, ``ids`` and
    ``scores``, lists of equal length, best first; or an ``Answer``. An asynchronous function is awaited where it was
    called. Any other runs in threads of its own, which end with the process: one that hangs blocks its thread, nothing
    else. A parameter behind the first that is called ``client``, ``tenant`` or ``k`` gets that of the query.

    Attributes:
        call: The function, as ``module:name``.
        tells: What it tells beside the text: some of ``sources``, ``ids`` and ``scores``.
        folder: Where the module may lie beside the installed ones.
        threads: Questions that a function which is not asynchronous gets at once.
        timeout_s: Longest time for one try.
        retries: Further tries when it raises; not after a try that was too slow.
        requests_per_s: Most calls in a second; 0: no limit. Waiting counts towards the time that an asker allows.
    """

    call: str
    tells: frozenset[str] = frozenset()
    folder: Path = Path()
    threads: int = 8
    timeout_s: float = 60.0
    retries: int = 0
    requests_per_s: float = 0.0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.tells) - TELLS)
        if unknown:
            raise ConfigError(f"python: tells={sorted(self.tells)}; tells may hold {', '.join(sorted(TELLS))}")
        self._function = named("python.call", self.call, self.folder)
        if not callable(self._function):
            raise ConfigError(f"python.call is {self.call!r}, which cannot be called")
        self._async = is_async(self._function)
        self._wanted = [name for name in EXTRA if name in takes(self._function)]
        self.can: frozenset[str] = frozenset({"clients"} if "client" in self._wanted else ())
        limits = (self.timeout_s, self.retries, self.requests_per_s, self.threads)
        self._patience = Patience(NAME, self.call, *limits)

    @property
    def requests(self) -> int:
        """Calls so far, tries included."""
        return self._patience.requests

    async def ask(self, query: Query) -> Answer:
        """Answers one query, whole.

        Raises:
            BackendError: If the function raises, takes too long, or returns what is no answer.
        """
        extra = {name: getattr(query, name) for name in self._wanted}
        value = await self._patience.returned(partial(self._function, query.text, **extra), self._async)
        try:
            return self._answer(value)
        except (ValueError, TypeError) as error:
            raise self._error(str(error)) from None

    async def stream(self, query: Query) -> AsyncIterator[str]:
        """The whole answer in one piece."""
        yield (await self.ask(query)).text

    def _answer(self, value: Any) -> Answer:
        """What the function returned, as an answer.

        Raises:
            ValueError: If it is none, or lacks what the function is said to tell.
        """
        if isinstance(value, Answer):
            return value
        found: Mapping[str, Any] = {"answer": value} if isinstance(value, str) else value
        if not isinstance(found, Mapping) or not isinstance(found.get("answer"), str):
            raise ValueError(f"returned {type(value).__name__}; need a text, an Answer, or a mapping with 'answer'")
        lacking = sorted(self.tells - found.keys())
        if lacking:
            raise ValueError(f"returned no {lacking[0]}, though it is said to tell them (tells)")
        parts = {name: found[name] for name in self.tells}
        ids, sources, scores = names(parts.get("ids")), names(parts.get("sources")), figures(parts.get("scores"))
        return told(found["answer"], ids, sources, scores)

    def _error(self, what: str) -> BackendError:
        return self._patience.error(what)
