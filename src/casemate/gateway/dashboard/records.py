"""Recent events for the dashboard: the newest events of each kind, in memory, read only while pages are requested.

A store may contain millions of events, so no page reads them all. Each kind is read backwards until a known event is
reached, at most every ``SYNC_S`` seconds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from casemate.gateway.state import REQUEST_KIND
from casemate.guard.client_state import withheld_documents
from casemate.guard.client_state.crawl_evidence import KIND as CRAWL_KIND
from casemate.guard.client_state.crawl_evidence import SHORTENED, is_limited
from casemate.guard.client_state.reset import reset_of
from casemate.monitor.alerts import alert
from casemate.monitor.canaries import results
from casemate.monitor.canaries.results import CanaryResult
from casemate.monitor.scheduler.schedule import SLOT_KIND, ScheduleGap, gap_from_event
from casemate.protocols import EventStore
from casemate.reports.format import sample_rate
from casemate.reports.verdicts import score_figures
from casemate.runtime.bounded_dict import BoundedDict
from casemate.runtime.stored import read_stored
from casemate.system import App
from casemate.types import Event

SYNC_S = 1.0
THREADS = 2
FIRST = 200
"""Events that are read to detect news; more if all of them are new."""
MAX_VERDICTS, MAX_REQUESTS, MAX_RESULTS, MAX_ALERTS, MAX_SLOTS = 10_000, 10_000, 10_000, 5_000, 1_000
"""Events that are kept, by kind."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VerdictRecord:
    """A verdict event. See ``types.Verdict`` and ``Guard``.

    Attributes:
        text: The question; empty unless ``privacy.log_text`` is set now, and was set when it was recorded.
        limited: Whether ``crawl_limit`` limited the context.
    """

    id: str
    at: datetime
    defense: str
    flagged: bool
    action: str
    score: float
    threshold: float | None
    hidden: tuple[str, ...]
    evidence: Mapping[str, Any]
    enforced: bool = True
    request: str = ""
    client: str = ""
    tenant: str = ""
    text: str = field(default="", repr=False)
    limited: bool = False

    @property
    def failed(self) -> bool:
        """Whether the defense failed."""
        return "error" in self.evidence

    @property
    def repeated(self) -> bool:
        """Whether it only withholds again what an earlier question of the client flagged."""
        return self.flagged and self.evidence.get("reasons") == ["before"]

    @property
    def newly_flagged(self) -> bool:
        """Whether it flags something that no earlier question of the client flagged."""
        return self.flagged and not self.repeated

    @property
    def undecided(self) -> bool:
        """Whether no decision was possible."""
        return not self.failed and self.threshold is None and not self.flagged

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources that it withheld; empty if the defense reports none."""
        found = self.evidence.get("withheld")
        return tuple(map(str, found)) if isinstance(found, list | tuple) else ()

    @property
    def outcome(self) -> str:
        """``failed``, ``undecided``, ``again``, ``flagged`` or ``passed``."""
        if self.failed or self.undecided:
            return "failed" if self.failed else "undecided"
        return "again" if self.repeated else "flagged" if self.flagged else "passed"

    @property
    def outcome_chip(self) -> tuple[str, str]:
        """The outcome in words, and its tone."""
        return (OUTCOME_CHIPS if self.enforced else OUTCOME_CHIPS | OBSERVED_CHIPS)[self.outcome]

    @property
    def figures(self) -> str:
        """The score and its threshold, or what is missing."""
        missing = "no threshold" if self.threshold is None else "no score"
        return score_figures(self.defense, self.score, self.threshold) or missing


OUTCOME_CHIPS = {
    "failed": ("Failed", "critical"),
    "undecided": ("Undecided", "plain"),
    "again": ("Withheld again", "medium"),
    "flagged": ("Flagged", "high"),
    "passed": ("Passed", "good"),
}
OBSERVED_CHIPS = {"again": ("Flagged again, observe mode", "medium"), "flagged": ("Flagged, observe mode", "medium")}
"""Words and tone of each outcome of a verdict, and those that differ in observe mode."""


def withheld_phrase(verdicts: Iterable[VerdictRecord]) -> str:
    """Returns "withheld", or "would have been withheld" if all flagged verdicts are of observe mode, or both."""
    modes = {v.enforced for v in verdicts if v.flagged}
    if modes == {True, False}:
        return "withheld, or would have been in observe mode"
    return "would have been withheld" if modes == {False} else "withheld"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request to the gateway. See ``state.Gateway.record_request``.

    Attributes:
        id: Id of the request, which its verdicts contain.
        first_token: Seconds; None: the answer was not a stream.
    """

    id: str
    at: datetime
    client: str
    tenant: str
    route: str
    status: int
    seconds: float
    first_token: float | None = None
    stages: Mapping[str, float] = field(default_factory=dict)


_VERDICT, _REQUEST = TypeAdapter(VerdictRecord), TypeAdapter(RequestRecord)


class EventTail(Generic[T]):
    """The newest events of one kind; ``convert`` returns None for those to leave out."""

    def __init__(self, store: EventStore, kind: str, keep: int, convert: Callable[[Event], T | None]) -> None:
        self._store, self._kind, self.keep, self._convert = store, kind, keep, convert
        self._known: BoundedDict[str, T | None] = BoundedDict(keep)
        self.all: list[T] = []  # the converted events, oldest first; do not modify the list

    def sync(self) -> bool:
        """Reads new events; returns whether there were any."""
        count = FIRST
        while True:
            found = self._store.latest(self._kind, min(count, self.keep))
            if len(found) < count or count >= self.keep or any(e.id in self._known for e in found[: count // 2]):
                break
            count *= 8
        fresh = [event for event in found if event.id not in self._known]
        for event in fresh:
            self._known[event.id] = self._converted(event)
        if fresh:
            self.all = [one for one in self._known.values() if one is not None]
        return bool(fresh)

    def _converted(self, event: Event) -> T | None:
        try:
            return self._convert(event)
        except Exception as error:  # one event of another version must not break the page
            _log.warning("the %s event %s cannot be shown: %s", self._kind, event.id[:80], type(error).__name__)
            return None

    @property
    def full(self) -> bool:
        """Whether older events may be missing."""
        return len(self._known) >= self.keep


class Records:
    """The events that the pages show. Raises ``BackendError`` if the store cannot be read.

    Attributes:
        threads: Threads that build pages: few, and apart from those that answer questions.
        version: Increases with every change.
    """

    def __init__(self, app: App) -> None:
        text = app.config.privacy.log_text
        self.verdicts = EventTail(app.store, "verdict", MAX_VERDICTS, lambda event: verdict_from_event(event, text))
        self.requests = EventTail(app.store, REQUEST_KIND, MAX_REQUESTS, request_from_event)
        self.results: EventTail[CanaryResult] = EventTail(
            app.store, results.RESULT_KIND, MAX_RESULTS, results.result_from_event
        )
        self.alerts: EventTail[Event] = EventTail(app.store, alert.ALERT_KIND, MAX_ALERTS, lambda event: event)
        self.gaps: EventTail[ScheduleGap] = EventTail(app.store, SLOT_KIND, MAX_SLOTS, gap_from_event)
        self.resets = EventTail(app.store, withheld_documents.KIND, MAX_VERDICTS, reset_of)
        self.cut: EventTail[str] = EventTail(
            app.store, CRAWL_KIND, MAX_VERDICTS, lambda event: event.body.get(SHORTENED)
        )
        self.version = 0
        self.threads = ThreadPoolExecutor(THREADS, "casemate-dashboard")
        self._read_at = float("-inf")
        self._lock = threading.Lock()

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs blocking work on the dashboard's own threads; those of the guard stay free for questions."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *arguments)

    def sync(self, now: bool = False) -> None:
        """Reads new events, at most every ``SYNC_S`` seconds, or ``now``. Blocks."""
        with self._lock:
            if not now and time.monotonic() - self._read_at < SYNC_S:
                return
            tails = self.verdicts, self.requests, self.results, self.alerts, self.gaps, self.resets, self.cut
            self.version += any([tail.sync() for tail in tails])
            self._read_at = time.monotonic()

    @property
    def alert_states(self) -> list[alert.AlertState]:
        """The state of each alert, oldest first."""
        return list(alert.alert_states(self.alerts.all).values())


def verdict_from_event(event: Event, text: bool) -> VerdictRecord:
    """Converts a verdict event, with the question or without."""
    body = {**event.body, "id": event.id, "at": event.at, "limited": is_limited(event.body)}
    return read_stored(_VERDICT, body if text else {**body, "text": ""}, "verdict")


def request_from_event(event: Event) -> RequestRecord:
    """Converts the event of a request."""
    return read_stored(_REQUEST, {**event.body, "id": event.body["request"], "at": event.at}, "request")


def by_request(verdicts: Sequence[VerdictRecord]) -> list[list[VerdictRecord]]:
    """Groups verdicts by request, in the order of their first verdicts."""
    return list(results.group_by(verdicts, lambda one: one.request or one.id).values())


def flagged_share(requests: Sequence[Sequence[VerdictRecord]]) -> tuple[str, str]:
    """Returns the share of newly flagged requests, and its counts; then those that only withhold again."""
    flagged = sum(any(v.newly_flagged for v in one) for one in requests)
    again = sum(only_repeated(one) for one in requests)
    rate, about = sample_rate(flagged, len(requests))
    return rate, f"{about}; {again:,} more only withheld again" if again else about


def only_repeated(verdicts: Sequence[VerdictRecord]) -> bool:
    """Whether the verdicts on a request only withhold again."""
    return any(v.repeated for v in verdicts) and not any(v.newly_flagged for v in verdicts)
