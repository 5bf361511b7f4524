"""What the pages show of the event store: the newest events of each kind, in memory, followed while somebody looks.

A store may hold millions of events, so no page reads them all. Each kind is read backwards until what is known is
reached, at most every ``FOLLOW_S`` seconds, and nothing is read while nobody looks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

from casemate.app import App
from casemate.monitor.alerts import alert
from casemate.monitor.canaries import results
from casemate.monitor.canaries.results import Result
from casemate.monitor.watch.schedule import SLOT, Gap, gap_of
from casemate.protocols import EventStore
from casemate.types import Event

FOLLOW_S = 1.0
THREADS = 2
FIRST = 200
"""Events that are read to see what is new; more if all of them are."""
VERDICTS, RESULTS, ALERTS, SLOTS = 10_000, 10_000, 5_000, 1_000
"""Events that are kept."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seen:
    """A verdict as it was noted. See ``types.Verdict`` and ``Guard``.

    Attributes:
        id: Of the event.
        at: When.
        text: The question; empty unless ``privacy.log_text`` is set now, and was then.
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
    enforced: bool
    request: str
    client: str
    tenant: str
    text: str = field(default="", repr=False)

    @property
    def failed(self) -> bool:
        """Whether the defense itself failed."""
        return "error" in self.evidence

    @property
    def undecided(self) -> bool:
        """Whether no statement was possible."""
        return not self.failed and self.threshold is None and not self.flagged


class Tail(Generic[T]):
    """The newest events of a kind.

    Args:
        store: Where they are.
        kind: Which.
        keep: How many are kept.
        read: Makes of an event what is kept; None: nothing.
    """

    def __init__(self, store: EventStore, kind: str, keep: int, read: Callable[[Event], T | None]) -> None:
        self._store, self._kind, self.keep, self._read = store, kind, keep, read
        self._held: OrderedDict[str, T | None] = OrderedDict()
        self._all: list[T] = []

    def follow(self) -> bool:
        """Reads what is new; whether there was anything.

        Raises:
            BackendError: If the store cannot be read.
        """
        count = FIRST
        while True:
            found = self._store.latest(self._kind, min(count, self.keep))
            if len(found) < count or count >= self.keep or any(e.id in self._held for e in found[: count // 2]):
                break
            count *= 8
        fresh = [event for event in found if event.id not in self._held]
        for event in fresh:
            self._held[event.id] = self._made(event)
        while len(self._held) > self.keep:
            self._held.popitem(last=False)
        if fresh:
            self._all = [one for one in self._held.values() if one is not None]
        return bool(fresh)

    def _made(self, event: Event) -> T | None:
        try:
            return self._read(event)
        except Exception as error:  # one event of another version must not take the page down
            _log.warning("the %s event %s cannot be shown: %s", self._kind, event.id[:80], type(error).__name__)
            return None

    @property
    def all(self) -> list[T]:
        """What is kept, the oldest first. Not to be changed."""
        return self._all

    @property
    def full(self) -> bool:
        """Whether older ones may have been left out."""
        return len(self._held) >= self.keep


class Records:
    """What all pages show.

    Args:
        app: The system.

    Attributes:
        threads: On which pages are made: few, and not those on which questions are answered.
        version: Grows with every change.
    """

    def __init__(self, app: App) -> None:
        text = app.config.privacy.log_text
        self.verdicts = Tail(app.store, "verdict", VERDICTS, lambda event: seen(event, text))
        self.results: Tail[Result] = Tail(app.store, results.KIND, RESULTS, results.from_event)
        self.alerts: Tail[Event] = Tail(app.store, alert.KIND, ALERTS, lambda event: event)
        self.gaps: Tail[Gap] = Tail(app.store, SLOT, SLOTS, gap_of)
        self.version = 0
        self.threads = ThreadPoolExecutor(THREADS, "casemate-dashboard")
        self._read_at = float("-inf")
        self._lock = threading.Lock()

    def follow(self, now: bool = False) -> None:
        """Reads what is new, unless that was done just now. Blocks.

        Args:
            now: Whether to read in any case.

        Raises:
            BackendError: If the store cannot be read.
        """
        with self._lock:
            if not now and time.monotonic() - self._read_at < FOLLOW_S:
                return
            changed = [tail.follow() for tail in (self.verdicts, self.results, self.alerts, self.gaps)]
            self.version += any(changed)
            self._read_at = time.monotonic()

    @property
    def standings(self) -> list[alert.Standing]:
        """How each alert stands, the oldest first."""
        return list(alert.standings(self.alerts.all).values())


def seen(event: Event, text: bool) -> Seen:
    """A verdict of an event.

    Args:
        event: The event.
        text: Whether the question may be shown.
    """
    body = event.body
    threshold = body["threshold"]
    return Seen(
        event.id,
        event.at,
        str(body["defense"]),
        bool(body["flagged"]),
        str(body["action"]),
        float(body["score"]),
        None if threshold is None else float(threshold),
        tuple(map(str, body["hidden"])),
        dict(body["evidence"]),
        bool(body.get("enforced", True)),
        str(body.get("request", "")),
        str(body.get("client", "")),
        str(body.get("tenant", "")),
        str(body.get("text", "")) if text else "",
    )


def by_request(verdicts: Sequence[Seen]) -> list[list[Seen]]:
    """The verdicts of each request together, in the order of the first."""
    found: dict[str, list[Seen]] = {}
    for one in verdicts:
        found.setdefault(one.request or one.id, []).append(one)
    return list(found.values())
