"""The result of asking one canary, and its form in the event store."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TypeVar

from pydantic import TypeAdapter

from casemate.runtime.stored import read_stored
from casemate.types import Event

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
RESULT_KIND = "canary"
"""Kind of the events that store one result each."""


class CanaryStatus(StrEnum):
    """Outcome of one canary. A canary that could not be asked or checked is an ERROR, not a deviation."""

    PASS = "pass"
    FAIL = "fail"
    ERROR = "error"


class Severity(StrEnum):
    """Severity of a failed canary or of an alert, in ascending order."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """Its place in the order, from 0."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Deviation:
    """One expectation that an answer did not meet.

    Attributes:
        kind: Machine-readable kind; see ``check``.
        message: Expected and measured value, in one sentence. It quotes phrases of the canary, also a forbidden phrase
            that the answer contains: treat it as raw text.
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """The outcome of one canary in one run.

    Attributes:
        run: Repetitions within a run append ``~1``, ``~2`` and so on.
        deviations: Every unmet expectation; empty unless the status is FAIL.
        error: Why there is no verdict; empty unless the status is ERROR.
        seconds: Response time of the target.
        text: The answer; stored only with ``privacy.log_text``.
        wording: Which wording was asked: 0 for ``query``, else a paraphrase, from 1.
        withheld: Ids of documents that the guard withheld from the answer.
        documents: Ids of the documents in the context, best first; ``sources`` and ``scores`` (cosines) have the
            same order.
    """

    canary: str
    run: str
    at: datetime
    status: CanaryStatus
    deviations: tuple[Deviation, ...] = ()
    error: str = ""
    seconds: float = 0.0
    documents: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    refused: bool = False
    words: int = 0
    text: str = field(default="", repr=False)
    wording: int = 0
    withheld: tuple[str, ...] = ()


_RESULT = TypeAdapter(CanaryResult)


@dataclass(frozen=True, slots=True)
class CanaryRun:
    """One run of a canary set: one result per canary, in the order of the set.

    Processes that catch up on the same scheduled run use the same id.
    """

    id: str
    results: tuple[CanaryResult, ...]

    @property
    def status(self) -> CanaryStatus:
        """FAIL if any canary failed; else ERROR if any has no verdict or none was asked; else PASS."""
        found = {r.status for r in self.results} or {CanaryStatus.ERROR}
        return next(s for s in (CanaryStatus.FAIL, CanaryStatus.ERROR, CanaryStatus.PASS) if s in found)


def result_to_event(result: CanaryResult, log_text: bool = False) -> Event:
    """Converts a result to an event. The id is derived from run and canary, so the store keeps the first result."""
    body = asdict(result)
    at = body.pop("at")
    if not log_text:
        del body["text"]
    return Event(f"{RESULT_KIND}:{result.run}:{result.canary}", at, RESULT_KIND, body)


def result_from_event(event: Event) -> CanaryResult:
    """Converts an event back to its result."""
    return read_stored(_RESULT, {**event.body, "at": event.at}, "result of a canary")


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by key, in the given order."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def base_run_id(run: str) -> str:
    """Strips the repetition suffix from a run id.

    >>> base_run_id("clinic@2026-03-01T12:00:00Z~2")
    'clinic@2026-03-01T12:00:00Z'
    """
    return run.partition("~")[0]
