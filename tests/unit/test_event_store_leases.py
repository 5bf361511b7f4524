"""Leases in the event store, and the index on event kinds, on SQLite and Postgres."""

from __future__ import annotations

import sqlite3
import threading
import time
from datetime import UTC, datetime

import pytest

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.errors import BackendError
from casemate.types import Event
from tests.unit.monitor_stores import fresh_url

url = pytest.fixture(params=["sqlite", "postgres"])(fresh_url)
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def stores(url):
    """Two stores on one database."""
    pair = SqlEventStore(url), SqlEventStore(url)
    yield pair
    for store in pair:
        store.close()


def test_one_holder_at_a_time_may_renew(stores):
    one, other = stores
    assert one.lease("watch", "a", 60)
    assert not other.lease("watch", "b", 60)
    assert one.lease("watch", "a", 60)
    assert not other.lease("watch", "b", 60)


def test_leases_with_other_names_are_independent(stores):
    one, other = stores
    assert one.lease("watch", "a", 60)
    assert other.lease("else", "b", 60)


def test_expired_lease_is_granted_to_another_holder(stores):
    one, other = stores
    assert one.lease("watch", "a", 0.3)
    assert not other.lease("watch", "b", 60)
    time.sleep(0.35)
    assert other.lease("watch", "b", 60)
    assert not one.lease("watch", "a", 60)


def test_renewal_restarts_the_term(stores):
    one, other = stores
    assert one.lease("watch", "a", 1.5)
    time.sleep(0.8)
    assert one.lease("watch", "a", 1.5)
    time.sleep(0.8)
    assert not other.lease("watch", "b", 60)


def test_renewal_for_less_time_shortens_the_term(stores):
    one, other = stores
    assert one.lease("watch", "a", 60)
    assert one.lease("watch", "a", 0.01)
    time.sleep(0.05)
    assert other.lease("watch", "b", 60)


def test_only_the_holder_can_release(stores):
    one, other = stores
    assert one.lease("watch", "a", 60)
    other.release("watch", "b")
    assert not other.lease("watch", "b", 60)
    one.release("watch", "a")
    assert other.lease("watch", "b", 60)
    one.release("nothing", "a")


def test_exactly_one_of_concurrent_requests_succeeds(url):
    granted, barrier = [], threading.Barrier(8)

    def work(name: str) -> None:
        store = SqlEventStore(url)
        barrier.wait()
        for number in range(5):
            if store.lease(f"watch-{number}", name, 60):
                granted.append(number)
        store.close()

    threads = [threading.Thread(target=work, args=[f"h{i}"]) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(granted) == [0, 1, 2, 3, 4]


def test_leases_use_the_clock_of_the_database(stores, monkeypatch):
    one, other = stores
    monkeypatch.setattr(time, "time", lambda: 4e9)  # a machine with a wrong clock: the year 2096
    assert one.lease("watch", "a", 60)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert not other.lease("watch", "b", 60)


@pytest.mark.parametrize(
    ("name", "holder", "seconds"),
    [("", "a", 1), ("w", "", 1), ("w", "a\0", 1), ("w", "a", 0), ("w", "a", float("nan"))],
)
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_invalid_arguments_are_refused(stores, name, holder, seconds):
    with pytest.raises(ValueError, match="lease"):
        stores[0].lease(name, holder, seconds)


def test_a_locked_file_raises_and_grants_no_lease(tmp_path, monkeypatch):
    monkeypatch.setattr("casemate.backends.event_stores.sql.database.BUSY_S", 0.1)
    store = SqlEventStore(path=tmp_path / "events.db")
    blocker = sqlite3.connect(tmp_path / "events.db", isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    with pytest.raises(BackendError, match="cannot write to sqlite.*locked") as caught:
        store.lease("watch", "a", 60)
    assert caught.value.retryable
    blocker.execute("ROLLBACK")
    blocker.close()
    assert store.lease("watch", "b", 60)
    store.close()


def test_a_closed_store_grants_no_lease(stores):
    stores[0].close()
    with pytest.raises(BackendError, match="is closed"):
        stores[0].lease("watch", "a", 60)
    with pytest.raises(BackendError, match="is closed"):
        stores[0].release("watch", "a")


def test_events_of_a_rare_kind_are_read_with_the_index(url, stores):
    store, _ = stores
    for i in range(3000):
        store.append(Event(f"v{i}", NOON, "verdict", {"i": i}))
        if not i % 100:
            store.append(Event(f"c{i}", NOON, "canary", {"i": i}))
    assert [e.body["i"] for e in store.scan("canary")] == list(range(0, 3000, 100))
    statement = (
        "SELECT id, at, kind, body FROM casemate_events WHERE kind = 'canary' AND at >= '2026-01-01' ORDER BY seq"
    )
    with store._engine.connect() as connection:
        if url.startswith("sqlite"):
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}").all()
        else:
            connection.exec_driver_sql("ANALYZE casemate_events")
            plan = connection.exec_driver_sql(f"EXPLAIN {statement}").all()
    assert "ix_casemate_events_kind_seq" in str(plan)
    assert "SCAN" not in str(plan) and "Seq Scan" not in str(plan)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_store_of_schema_version_1_is_migrated_and_keeps_its_events(url, tmp_path):
    store = SqlEventStore(url)
    store.append(Event("old", NOON, "verdict", {"n": 1}))
    store.close()
    with sqlite3.connect(tmp_path / "new" / "events.db") as connection:
        connection.execute("DROP TABLE casemate_leases")
        connection.execute("DROP TABLE casemate_quotas")
        connection.execute("DROP INDEX ix_casemate_events_kind_seq")
        connection.execute("UPDATE casemate_schema SET version_num = '0001'")
    connection.close()
    store = SqlEventStore(url)
    assert [e.id for e in store.scan()] == ["old"]
    assert store.lease("watch", "a", 60)
    store.close()
