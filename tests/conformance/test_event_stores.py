"""The obligations of ``EventStore``, and those of ``SqlEventStore`` on SQLite and Postgres."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone

import pytest
from sqlalchemy.exc import OperationalError

from casemate.backends.event_stores import sql
from casemate.backends.event_stores.sql import SqlEventStore, event_rows
from casemate.errors import BackendError
from casemate.types import Event, QuotaGrant, QuotaRequest
from tests.unit.monitor_stores import fresh_url

NOON = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
APPENDER = """
import sys
from datetime import UTC, datetime
import alembic.command, sqlalchemy.dialects.sqlite, sqlalchemy.dialects.postgresql, psycopg  # so that all open at once
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.types import Event

url, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
store = SqlEventStore(url)
for i in range(count):
    store.append(Event(f"{name}-{i}", datetime.now(UTC), name, {"i": i}))
print(store.flush(60), flush=True)
sys.stdin.readline()  # the test may kill it here
"""


url = pytest.fixture(params=["sqlite", "postgres"])(fresh_url)


@pytest.fixture
def store(url) -> Iterator[SqlEventStore]:
    store = SqlEventStore(url, retry_s=0.05)
    yield store
    store.close()


def event(id_: str, kind: str = "ask", at: datetime = NOON, **body: object) -> Event:
    return Event(id_, at, kind, body)


def ids(events) -> list[str]:
    return [e.id for e in events]


def appender(url: str, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", APPENDER, url, name, str(count)]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def expect(process: subprocess.Popen[str], expected: str) -> None:
    """Waits for an output line of the process, then sends it a line."""
    assert process.stdout.readline().strip() == expected
    process.stdin.write("\n")
    process.stdin.flush()


def test_events_round_trip_in_order(store):
    events = [event(f"e{i:04}", n=i, score=i / 7) for i in range(1234)]
    for e in reversed(events):
        store.append(e)
    assert store.scan() == events[::-1]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"grüße": "日本語 🦉", "quote": "\"'\\%s :x %(y)s\n"},
        {"nul": "a\0b", "half a surrogate pair": "\ud800"},
        {"float": 1e300, "whole float": 2.0, "small": 5e-324, "int": 10**40, "none": None, "bool": True},
        {"nested": {"list": [1, [2, {"x": []}]], "": ""}},
    ],
)
def test_bodies_round_trip_exactly(store, body):
    store.append(Event("e", NOON, "ask", body))
    [found] = store.scan()
    assert json.dumps(found.body, sort_keys=True) == json.dumps(body, sort_keys=True)  # distinguishes 2.0 from 2


@pytest.mark.parametrize("id_", ["x", "it's; DROP TABLE casemate_events --", "日本", "i" * 200])
def test_ids_and_kinds_round_trip(store, id_):
    store.append(event(id_, kind=id_))
    assert store.scan(kind=id_) == [event(id_, kind=id_)]


def test_times_keep_the_instant_and_are_utc(store):
    store.append(event("e", at=NOON.astimezone(timezone(timedelta(hours=-7)))))
    [found] = store.scan()
    assert found.at == NOON
    assert found.at.tzinfo is UTC


def test_scan_filters_by_kind_and_time(store):
    for i in range(6):
        store.append(event(str(i), kind="ab"[i % 2], at=NOON + i * timedelta(microseconds=1)))
    third = NOON + timedelta(microseconds=3)
    assert ids(store.scan(kind="a")) == ["0", "2", "4"]
    assert ids(store.scan(since=third)) == ["3", "4", "5"]
    assert ids(store.scan("b", third.astimezone(timezone(timedelta(hours=9))))) == ["3", "5"]
    assert store.scan(kind="none of these") == []
    with pytest.raises(ValueError, match="'since' has no time zone"):
        store.scan(since=datetime(2026, 3, 1))


def test_events_persist_after_the_store_is_closed(url):
    for i in range(3):
        store = SqlEventStore(url)
        store.append(event(str(i)))
        store.close()
    store = SqlEventStore(url)
    assert ids(store.scan()) == ["0", "1", "2"]
    store.close()


def test_an_event_id_is_written_once(store):
    for body in ({"n": 1}, {"n": 2}):
        store.append(event("same", **body))
        assert store.flush()
    store.append(event("other"))
    store.append(event("same"))
    assert store.scan() == [event("same", n=1), event("other")]


def test_a_commit_with_a_lost_reply_is_not_repeated(store, monkeypatch):
    insert, calls = store._insert, []

    def commit_then_fail(batch):
        insert(batch)
        calls.append(len(batch))
        if len(calls) == 1:
            raise ConnectionError("the reply was lost")

    monkeypatch.setattr(store, "_insert", commit_then_fail)
    for i in range(5):
        store.append(event(str(i)))
    assert ids(store.scan()) == ["0", "1", "2", "3", "4"]
    assert len(calls) > 1
    assert store.dropped == 0


def test_a_quota_transaction_writes_queued_events_and_receipts_report_it(url, monkeypatch):
    monkeypatch.setattr(sql, "LINGER_S", 60)  # the writer thread does not write
    with closing(SqlEventStore(url)) as store, closing(SqlEventStore(url)) as other:
        before = store.receipt()
        store.append(event("a"))
        receipt = store.receipt()
        assert before() and not receipt()
        assert store.acquire([QuotaRequest("tokens", 3, 10)]) == [QuotaGrant(3, 3.0)]
        assert receipt() and ids(other.scan()) == ["a"]
        store.append(event("b"))
        assert receipt() and not store.receipt()()


def test_events_of_a_failed_quota_transaction_are_written_later(store, monkeypatch):
    def fail(*_):
        raise OperationalError("take", {}, OSError("the database is down"))

    monkeypatch.setattr(sql, "LINGER_S", 0.2)
    monkeypatch.setattr(sql.quotas, "consume", fail)
    store.append(event("a"))
    with pytest.raises(BackendError, match="the database is down"):
        store.acquire([QuotaRequest("tokens", 3, 10)])
    store.append(event("b"))
    assert ids(store.scan()) == ["a", "b"]


def test_a_peer_frozen_in_a_transaction_delays_others_for_a_bounded_time(url, monkeypatch):
    monkeypatch.setattr("casemate.backends.event_stores.sql.database.BUSY_S", 1)
    with closing(SqlEventStore(url)) as store, closing(SqlEventStore(url)) as frozen:
        store.append(event("a"))
        with frozen._transaction() as connection:
            frozen._add(connection, [event_rows.encode_event(event("b"))])
            with pytest.raises(BackendError, match="lock"):
                store.acquire([QuotaRequest("tokens", 3, 10)])
        assert store.acquire([QuotaRequest("tokens", 3, 10)]) == [QuotaGrant(3, 3.0)]
        assert store.flush() and ids(frozen.scan()) in (["a", "b"], ["b", "a"])


def test_events_with_a_receipt_are_visible_to_other_stores(url, monkeypatch):
    monkeypatch.setattr(sql, "LINGER_S", 0.001)
    missed, given = [], []

    def work(name):
        for i in range(60):
            store.append(event(f"{name}{i}"))
            receipt = store.receipt()
            given.extend(store.acquire([QuotaRequest("tokens", 1, 10_000)]))
            if not receipt():
                assert store.flush(60)
            missed.extend({f"{name}{i}"} - {e.id for e in other.read_since("ask", 0)[0]})

    with closing(SqlEventStore(url)) as store, closing(SqlEventStore(url)) as other:
        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert missed == [] and sorted(g.used for g in given) == [*range(1, 241)]
        assert len(other.scan()) == 240


def test_processes_share_a_fresh_database(url):
    processes = [appender(url, name, 700) for name in "abcd"]
    for line in ("ready", "True"):
        for process in processes:
            expect(process, line)
    assert [process.wait(60) for process in processes] == [0, 0, 0, 0]
    store = SqlEventStore(url)
    for name in "abcd":
        assert ids(store.scan(name)) == [f"{name}-{i}" for i in range(700)]
    assert len(store.scan()) == 2800
    store.close()
    for process in processes:
        process.communicate()


def test_many_threads_open_a_fresh_database_and_append(url):
    barrier = threading.Barrier(4)

    def work(name):
        barrier.wait()
        store = SqlEventStore(url)
        for i in range(50):
            store.append(event(f"{name}{i}"))
        store.close()

    threads = [threading.Thread(target=work, args=[name]) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = SqlEventStore(url)
    assert len(store.scan()) == 200
    store.close()


def test_a_killed_process_loses_no_flushed_event(url):
    process = appender(url, "a", 600)
    expect(process, "ready")
    assert process.stdout.readline().strip() == "True"
    process.kill()
    process.communicate()
    store = SqlEventStore(url)
    assert ids(store.scan()) == [f"a-{i}" for i in range(600)]
    store.close()


def test_a_reader_receives_each_event_of_concurrent_writers_exactly_once(url):
    stores = [SqlEventStore(url) for _ in range(3)]
    seen, done = [], threading.Event()

    def write(store, name):
        for i in range(300):
            store.append(event(f"{name}{i}", kind="wanted" if i % 3 else "other"))
            if i % 20 == 0:
                store.flush()

    def poll():
        offset = 0
        while not done.is_set() or offset < last[0]:
            found, offset = stores[2].read_since("wanted", offset)
            seen.extend(ids(found))

    last = [0]
    threads = [threading.Thread(target=write, args=(s, n)) for s, n in zip(stores, "ab", strict=False)]
    reader = threading.Thread(target=poll)
    for thread in (reader, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores[:2]:
        assert store.flush(60)
    last[0] = stores[0].read_since("wanted", 0)[1]
    done.set()
    reader.join()
    assert sorted(seen) == sorted(f"{name}{i}" for name in "ab" for i in range(300) if i % 3)
    for store in stores:
        store.close()


def test_read_since_filters_by_time(store):
    for i in range(4):
        store.append(event(str(i), at=NOON + timedelta(hours=i)))
    assert store.flush()
    found, offset = store.read_since("ask", 0, NOON + timedelta(hours=2))
    assert ids(found) == ["2", "3"]
    assert store.read_since("ask", offset) == ([], offset)
    assert store.read_since("never", 0) == ([], 0)


def test_a_closed_store_raises(store):
    store.append(event("e"))
    store.close()
    store.close()
    with pytest.raises(BackendError, match="is closed"):
        store.append(event("f"))
    for read in (store.scan, lambda: store.read_since("ask", 0)):
        with pytest.raises(BackendError, match="is closed"):
            read()
    assert store.flush()


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_a_lost_connection_is_replaced(postgres_url, store):
    import psycopg

    store.append(event("before"))
    assert store.flush()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(pid, 9999) FROM pg_stat_activity WHERE datname LIKE 't%'")
    assert ids(store.scan()) == ["before"]
    store.append(event("after"))
    assert ids(store.scan()) == ["before", "after"]
