"""A Python function as a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from casemate.backends.target_answers import partial_answer
from casemate.errors import ConfigError
from casemate.protocols import TARGET_DETAILS, Target
from casemate.runtime.callables import FunctionCaller, import_attribute, is_async, parameter_names
from casemate.types import Answer, Query

NAME = "python"
OPTIONAL_PARAMETERS = ("client", "tenant", "k")  # passed if the function has a parameter of that name


@dataclass(eq=False)
class PythonTarget(Target):
    """Calls a function with the question.

    It returns text; or a mapping with ``answer`` and optionally ``sources``, ``ids`` and ``scores``, lists of equal
    length, best first; or an ``Answer``. An asynchronous function is awaited in the caller's loop. A synchronous one
    runs in daemon threads: one that hangs blocks its thread only. Parameters named ``client``, ``tenant`` and ``k``
    receive those of the query.

    Attributes:
        call: The function, as ``module:name``.
        tells: Details that it returns beside the text: some of ``sources``, ``ids`` and ``scores``.
        folder: Folder to import the module from, besides installed packages.
        threads: Largest number of concurrent calls of a synchronous function.
        timeout_s: Limit of one attempt.
        retries: Further attempts when it raises; none after a timeout.
        requests_per_s: Rate limit. 0: none. Waiting counts towards the caller's timeout.
    """

    call: str
    tells: frozenset[str] = frozenset()
    folder: Path = Path()
    threads: int = 8
    timeout_s: float = 60.0
    retries: int = 0
    requests_per_s: float = 0.0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.tells) - TARGET_DETAILS)
        if unknown:
            raise ConfigError(f"python: tells={sorted(self.tells)}; allowed: {', '.join(sorted(TARGET_DETAILS))}")
        self._function = import_attribute("python.call", self.call, self.folder)
        if not callable(self._function):
            raise ConfigError(f"python.call is {self.call!r}, which is not callable")
        self._async = is_async(self._function)
        self._parameters = [name for name in OPTIONAL_PARAMETERS if name in parameter_names(self._function)]
        self.can: frozenset[str] = frozenset({"clients"} if "client" in self._parameters else ())
        limits = (self.timeout_s, self.retries, self.requests_per_s, self.threads)
        self._calls = FunctionCaller(NAME, self.call, *limits)

    @property
    def requests(self) -> int:
        """Calls so far, including retries."""
        return self._calls.requests

    async def ask(self, query: Query) -> Answer:
        extra = {name: getattr(query, name) for name in self._parameters}
        value = await self._calls.call(partial(self._function, query.text, **extra), self._async)
        try:
            return self._answer(value)
        except (ValueError, TypeError) as error:
            raise self._calls.error(str(error)) from None

    def _answer(self, value: Any) -> Answer:
        """The answer that a returned value contains; ``ValueError``: none, or it lacks a detail in ``tells``."""
        if isinstance(value, Answer):
            return value
        fields: Mapping[str, Any] = {"answer": value} if isinstance(value, str) else value
        if not isinstance(fields, Mapping) or not isinstance(fields.get("answer"), str):
            raise ValueError(f"returned {type(value).__name__}; expected text, an Answer, or a mapping with 'answer'")
        missing = sorted(self.tells - fields.keys())
        if missing:
            raise ValueError(f"returned no {missing[0]}, which tells requires")
        return partial_answer(fields["answer"], **{name: fields[name] for name in self.tells})
