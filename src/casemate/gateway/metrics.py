"""What Prometheus reads. Counts by route and by defense, never by client: who asked what stays in the event store."""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from casemate.events import EventStore, Relay
from casemate.types import Event

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
FINE = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The figures of one gateway.

    Args:
        working: Tells how many requests are at work.
        store: The event store.
        age: Tells how many seconds ago it was last read.
    """

    def __init__(self, working: Callable[[], int], store: EventStore, age: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "casemate_requests", "Requests.", ["route", "method", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "casemate_request_seconds",
            "From the request to the last byte.",
            ["route"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._first = Histogram(
            "casemate_first_piece_seconds", "To the first piece of a stream.", buckets=BUCKETS, registry=self.registry
        )
        self._broken = Counter(
            "casemate_streams_broken", "Streams that did not end well.", ["why"], registry=self.registry
        )
        self._tokens = Counter("casemate_tokens", "Tokens, as budgets count them.", registry=self.registry)
        self._verdicts = Counter(
            "casemate_verdicts", "Verdicts.", ["defense", "flagged", "enforced"], registry=self.registry
        )
        self._stages = Histogram(
            "casemate_stage_seconds", "Of one stage of an answer.", ["stage"], buckets=FINE, registry=self.registry
        )
        at_work = Gauge(
            "casemate_requests_at_work", "Requests at work, open streams among them.", registry=self.registry
        )
        at_work.set_function(working)
        dropped = Gauge("casemate_events_dropped", "Events given up because the store failed.", registry=self.registry)
        dropped.set_function(lambda: float(store.dropped))
        read = Gauge("casemate_store_age_seconds", "Since the event store was last read.", registry=self.registry)
        read.set_function(age)
        self._lock = threading.Lock()
        self._notes: dict[str, dict[str, Any]] = {}
        self._spent: dict[str, dict[str, float]] = {}

    def text(self) -> bytes:
        """All figures, as Prometheus reads them."""
        return generate_latest(self.registry)

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts a request that has ended."""
        method = method if method in {"GET", "POST", "DELETE", "HEAD", "OPTIONS"} else "other"
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        with self._lock:
            note = self._notes.setdefault(route, {"seconds": 0.0, "slowest": 0.0, "statuses": Tally()})
            note["seconds"] += seconds
            note["slowest"] = max(note["slowest"], seconds)
            note["statuses"][str(status)] += 1

    def stage(self, stage: str, seconds: float) -> None:
        """Notes how long a stage of an answer took: ``embed``, ``search``, a defense, ``generate``."""
        self._stages.labels(stage).observe(seconds)
        with self._lock:
            note = self._spent.setdefault(stage, {"count": 0, "seconds": 0.0, "slowest": 0.0})
            note["count"] += 1
            note["seconds"] += seconds
            note["slowest"] = max(note["slowest"], seconds)

    def first_piece(self, seconds: float) -> None:
        """Notes how long a stream's first piece took."""
        self._first.observe(seconds)

    def broken(self, why: str) -> None:
        """Counts a stream that broke off: ``left``, ``time`` or ``failure``."""
        self._broken.labels(why).inc()

    def tokens(self, count: int) -> None:
        """Counts tokens."""
        self._tokens.inc(count)

    def notes(self) -> dict[str, Any]:
        """What was counted by route and by stage since the last time, for the event of these seconds."""
        with self._lock:
            notes, self._notes = self._notes, {}
            spent, self._spent = self._spent, {}
        routes = {route: {**note, "statuses": dict(note["statuses"])} for route, note in notes.items()}
        return {"routes": routes, "stages": spent}

    def watching(self, store: EventStore, *others: Callable[[Event], None]) -> EventStore:
        """The store, with verdicts counted on their way, and told to others."""
        return _Watching(store, (self._verdict, *others))

    def _verdict(self, event: Event) -> None:
        labels = (event.body[name] for name in ("defense", "flagged", "enforced"))
        self._verdicts.labels(*(str(label).lower() for label in labels)).inc()


class _Watching(Relay):
    """Counts verdicts on their way."""

    def __init__(self, store: EventStore, seen: Sequence[Callable[[Event], None]]) -> None:
        super().__init__(store)
        self._seen = seen

    def append(self, event: Event) -> None:
        for seen in self._seen if event.kind == "verdict" else ():
            seen(event)
        super().append(event)
