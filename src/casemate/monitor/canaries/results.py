"""What a run of canaries found: the nouns of the monitor, and their form in the event store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from casemate.errors import BackendError
from casemate.protocols import EventStore
from casemate.types import Event

KIND = "canary"
"""Events of this kind hold one result each."""


class Status(StrEnum):
    """How one canary ended. Whoever could not be asked is in error, which is not a deviation."""

    PASS = "pass"
    FAIL = "fail"
    ERROR = "error"


class Severity(StrEnum):
    """How grave a deviation, or an alert, is."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Deviation:
    """One expectation that an answer did not meet.

    Attributes:
        kind: A word of the code: ``answer_mismatch``, ``missing_phrase``, ``source_mismatch`` and so on.
        message: A sentence with what was expected and what was measured. No text of the answer or of a document.
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Result:
    """One canary, asked once.

    Attributes:
        canary: Its id.
        run: The id of the run it belongs to.
        at: When it was asked.
        status: How it ended.
        deviations: All expectations that were not met; empty unless it failed.
        error: Why it could not be judged; empty unless it is in error.
        seconds: How long the target took.
        documents: Ids of the documents in the context, best first.
        sources: Their sources, in the same order.
        scores: Their cosine similarities, in the same order; empty where the target does not tell them.
        refused: Whether the answer declines to answer.
        words: Length of the answer.
        text: The answer; only kept in the store where ``privacy.log_text`` says so.
    """

    canary: str
    run: str
    at: datetime
    status: Status
    deviations: tuple[Deviation, ...] = ()
    error: str = ""
    seconds: float = 0.0
    documents: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    refused: bool = False
    words: int = 0
    text: str = field(default="", repr=False)


LISTS = frozenset({"documents", "sources", "scores"})
"""Fields that are lists in what is kept."""


@dataclass(frozen=True, slots=True)
class Run:
    """All canaries, asked once.

    Attributes:
        id: Names the run; two processes that make up for the same due run give it the same id.
        results: One for each canary, in the order of the set.
    """

    id: str
    results: tuple[Result, ...]

    @property
    def status(self) -> Status:
        """FAIL if any canary failed, else ERROR if any could not be judged, or none was asked."""
        found = {r.status for r in self.results} or {Status.ERROR}
        return next(s for s in (Status.FAIL, Status.ERROR, Status.PASS) if s in found)


def to_event(result: Result, log_text: bool = False) -> Event:
    """A result as it is kept. Its id says run and canary, so the same result is kept once."""
    body = asdict(result)
    at = body.pop("at")
    if not log_text:
        del body["text"]
    return Event(f"{KIND}:{result.run}:{result.canary}", at, KIND, body)


def from_event(event: Event) -> Result:
    """The result that was kept."""
    told: dict[str, Any] = {**event.body, "at": event.at, "status": Status(event.body["status"])}
    for name in LISTS.intersection(told):  # thousands are read at a time
        told[name] = tuple(told[name])
    told["deviations"] = tuple(Deviation(**d) for d in told["deviations"])
    return Result(**told)


def by_canary(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The history of each canary, in the order given."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.canary, []).append(result)
    return found


def passed(results: Sequence[Result]) -> list[bool]:
    """Whether each judged result passed; results in error say nothing and are left out."""
    return [r.status is Status.PASS for r in results if r.status is not Status.ERROR]


def base(run: str) -> str:
    """The run that a question belongs to: those asked again have the name of the run and a number behind it.

    >>> base("clinic@2026-03-01T12:00:00Z~2")
    'clinic@2026-03-01T12:00:00Z'
    """
    return run.partition("~")[0]


def write(store: EventStore, events: Iterable[Event]) -> None:
    """Writes events down, for good.

    Raises:
        BackendError: If the store does not take them.
    """
    for event in events:
        store.append(event)
    if not store.flush():
        raise BackendError("the event store did not take what the monitor noted", backend="store", retryable=True)
