"""Conformance suite for event stores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Protocol

from casemate.protocols import EventStore
from casemate.types import Event, QuotaRequest

NOON = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


class MakeEventStore(Protocol):
    """Opens event stores for the checks: ``make(True)`` an empty one, ``make(False)`` a second handle on the last."""

    def __call__(self, fresh: bool) -> EventStore:
        """An open event store."""
        ...


def check_event_store(make: MakeEventStore, durable: bool = True) -> None:
    """Runs every check for an event store.

    Args:
        make: Opens the stores.
        durable: Whether a second handle sees the same events. False for a store that lives in one process.
    """
    for check in EVENT_STORE_CHECKS + (SHARED_EVENT_STORE_CHECKS if durable else ()):
        check(make)


@contextmanager
def _fresh(make: MakeEventStore) -> Iterator[EventStore]:
    with closing(make(True)) as store:
        yield store


def _event(number: int, kind: str = "a") -> Event:
    return Event(f"{kind}{number}", NOON + timedelta(seconds=number), kind, {"n": number, "text": "naïve 漢字"})


def _returns_events_in_order(make: MakeEventStore) -> None:
    """``scan`` returns what was appended, unchanged and in order, by kind if one is given."""
    with _fresh(make) as store:
        events = [_event(i, "ab"[i % 2]) for i in range(20)]
        for event in events:
            store.append(event)
        assert list(store.scan()) == events, "scan() must return all events in the order in which they were appended"
        assert list(store.scan("a")) == [e for e in events if e.kind == "a"], "scan(kind) must filter by kind"
        assert list(store.latest("b", 3)) == [e for e in events if e.kind == "b"][-3:], "latest() returns the newest"
        assert list(store.scan("missing")) == [], "an unknown kind has no events"
        assert store.flush(), "flush() must return True once everything is written"
        assert store.receipt()(), "a receipt must be True after flush()"
        assert store.dropped == 0, f"{store.dropped} events were dropped"


def _reads_each_event_once(make: MakeEventStore) -> None:
    """``read_since`` misses no event and repeats none."""
    with _fresh(make) as store:
        seen: list[str] = []
        offset = 0
        for i in range(12):
            store.append(_event(i))
            store.flush()
            events, offset = store.read_since("a", offset)
            seen += [e.id for e in events]
        assert seen == [f"a{i}" for i in range(12)], f"read_since returned {seen}"
        assert list(store.read_since("a", offset)[0]) == [], "read_since repeats events"


def _leases_are_exclusive(make: MakeEventStore) -> None:
    """One holder has a lease; it can renew and release it; it expires."""
    with _fresh(make) as store:
        assert store.lease("leader", "x", 30), "a free lease must be granted"
        assert store.lease("leader", "x", 30), "the holder must be able to renew"
        assert not store.lease("leader", "y", 30), "a second holder must be refused"
        assert store.lease("other", "y", 30), "leases of other names are independent"
        store.release("leader", "y")
        assert not store.lease("leader", "y", 30), "only the holder can release a lease"
        store.release("leader", "x")
        assert store.lease("leader", "y", 0.2), "a released lease must be free"
        time.sleep(0.5)
        assert store.lease("leader", "x", 30), "a lease must expire"


def _quotas_are_not_exceeded(make: MakeEventStore) -> None:
    """Concurrent requests get no more than the quota; a negative amount returns units; a new period starts at 0."""
    with _fresh(make) as store:
        granted: list[int] = []

        def consume() -> None:
            for _ in range(10):
                granted.append(store.acquire([QuotaRequest("tokens", 3, 100)])[0].amount)

        threads = [threading.Thread(target=consume) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(granted) == 100, f"{sum(granted)} units were granted of a quota of 100"
        assert store.acquire([QuotaRequest("tokens", 5, 100)])[0].amount == 0, "an exhausted quota grants nothing"
        assert store.acquire([QuotaRequest("tokens", -10, 100)])[0].used == 90, "a negative amount returns units"
        assert store.acquire([QuotaRequest("tokens", 5, 100, period="next")])[0].used == 5, "a new period starts at 0"
        both = store.acquire([QuotaRequest("a", 1, 5), QuotaRequest("b", 1, 0)])
        assert [grant.amount for grant in both] == [1, 0], "quotas of one call are independent"
        store.acquire([QuotaRequest("part one", 2, 5), QuotaRequest("part%two", 3, 5)])
        held = store.quota_usage("part")
        assert dict(held) == {"part one": 2, "part%two": 3}, f"quota_usage() returned {held}"
        assert not store.quota_usage("part_"), "a prefix has no wildcards"
        store.discard_quotas(["part%two", "unknown"])
        assert dict(store.quota_usage("part")) == {"part one": 2}, "discard_quotas() deletes the named quotas only"
        assert store.acquire([QuotaRequest("part%two", 1, 5)])[0].used == 1, "a deleted quota begins at 0"


def _handles_share_one_store(make: MakeEventStore) -> None:
    """Events, leases and quotas of one handle are visible to another; closing loses nothing."""
    with _fresh(make) as first:
        with closing(make(False)) as second:
            first.append(_event(1))
            first.flush()
            assert [e.id for e in second.scan("a")] == ["a1"], "a second handle must see flushed events"
            assert first.lease("leader", "x", 30) and not second.lease("leader", "y", 30), "leases must be shared"
            first.acquire([QuotaRequest("tokens", 4, 5)])
            assert second.acquire([QuotaRequest("tokens", 4, 5)])[0].amount == 1, "quotas must be shared"
        with closing(make(False)) as third:
            third.append(_event(2))
        with closing(make(False)) as fourth:
            assert [e.id for e in fourth.scan("a")] == ["a1", "a2"], "close() must write what was appended"


EVENT_STORE_CHECKS: tuple[Callable[[MakeEventStore], None], ...] = (
    _returns_events_in_order,
    _reads_each_event_once,
    _leases_are_exclusive,
    _quotas_are_not_exceeded,
)
SHARED_EVENT_STORE_CHECKS: tuple[Callable[[MakeEventStore], None], ...] = (_handles_share_one_store,)
