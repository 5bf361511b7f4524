"""Prometheus metrics. Labels name routes and defenses, never clients; per-client usage is in the event store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from casemate.protocols import EventStore, EventStoreProxy
from casemate.types import Event

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
FINE_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS"})


class Metrics:
    """The metrics of one gateway.

    ``age`` returns the seconds since the event store was last read, ``interval`` the longest response interval of any
    key.
    """

    def __init__(
        self,
        in_progress: Callable[[], int],
        store: EventStore,
        age: Callable[[], float],
        interval: Callable[[], float],
    ) -> None:
        r = self.registry = CollectorRegistry()
        ProcessCollector(registry=r)
        self._requests = Counter("casemate_requests", "Requests.", ["route", "method", "status"], registry=r)
        self._seconds = Histogram(
            "casemate_request_seconds", "Duration of a request.", ["route"], buckets=BUCKETS, registry=r
        )
        self.first_token = Histogram(
            "casemate_time_to_first_token_seconds", "Time to first token of a stream.", buckets=BUCKETS, registry=r
        )
        self.interrupted = Counter("casemate_streams_interrupted", "Interrupted streams.", ["reason"], registry=r)
        self.tokens = Counter("casemate_tokens", "Tokens, as budgets count them.", registry=r)
        self.documents = Counter(
            "casemate_documents", "Uploaded sources: indexed, or quarantined.", ["outcome"], registry=r
        )
        self._verdicts = Counter("casemate_verdicts", "Verdicts.", ["defense", "flagged", "enforced"], registry=r)
        self._stages = Histogram(
            "casemate_stage_seconds", "Duration of a stage of an answer.", ["stage"], buckets=FINE_BUCKETS, registry=r
        )
        running = Gauge("casemate_requests_in_progress", "Requests in progress, open streams included.", registry=r)
        running.set_function(in_progress)
        dropped = Gauge("casemate_events_dropped", "Events that were lost because the store failed.", registry=r)
        dropped.set_function(lambda: float(store.dropped))
        read = Gauge("casemate_store_age_seconds", "Time since the event store was last read.", registry=r)
        read.set_function(age)
        paced = Gauge("casemate_response_interval_seconds", "Longest response interval of any key.", registry=r)
        paced.set_function(interval)

    def exposition(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def observe_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts a finished request."""
        self._requests.labels(route, method if method in METHODS else "other", str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def observe_stage(self, stage: str, seconds: float) -> None:
        """Records the duration of a stage: ``embed``, ``search``, a defense, or ``generate``."""
        self._stages.labels(stage).observe(seconds)

    def observed_store(self, store: EventStore, *observers: Callable[[Event], None]) -> EventStore:
        """Returns the store wrapped so that verdicts are counted, and passed to the observers, when appended."""
        return _ObservedStore(store, (self._count_verdict, *observers))

    def _count_verdict(self, event: Event) -> None:
        labels = (event.body[name] for name in ("defense", "flagged", "enforced"))
        self._verdicts.labels(*(str(label).lower() for label in labels)).inc()


class _ObservedStore(EventStoreProxy):
    def __init__(self, store: EventStore, observers: Sequence[Callable[[Event], None]]) -> None:
        super().__init__(store)
        self._observers = observers

    def append(self, event: Event) -> None:
        for observer in self._observers if event.kind == "verdict" else ():
            observer(event)
        super().append(event)
