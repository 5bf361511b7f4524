"""Every event store keeps the promises of ``EventStore``, and those of ``SqlEvents`` on either database."""

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

from casemate.backends import sql_events
from casemate.backends.sql_events import SqlEvents, rows
from casemate.errors import BackendError
from casemate.types import Event, Given, Wanted
from tests.unit.monitor_stores import fresh_url

NOON = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
APPENDER = """
import sys
from datetime import UTC, datetime
import alembic.command, sqlalchemy.dialects.sqlite, sqlalchemy.dialects.postgresql, psycopg  # so that all open at once
from casemate.backends.sql_events import SqlEvents
from casemate.types import Event

url, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
store = SqlEvents(url)
for i in range(count):
    store.append(Event(f"{name}-{i}", datetime.now(UTC), name, {"i": i}))
print(store.flush(60), flush=True)
sys.stdin.readline()  # the test may kill it here
"""


url = pytest.fixture(params=["sqlite", "postgres"])(fresh_url)


@pytest.fixture
def store(url) -> Iterator[SqlEvents]:
    store = SqlEvents(url, retry_s=0.05)
    yield store
    store.close()


def event(id_: str, kind: str = "ask", at: datetime = NOON, **body: object) -> Event:
    return Event(id_, at, kind, body)


def ids(events) -> list[str]:
    return [e.id for e in events]


def appender(url: str, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", APPENDER, url, name, str(count)]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def say(process: subprocess.Popen[str], expected: str) -> None:
    """Waits for a line of the process, then lets it go on."""
    assert process.stdout.readline().strip() == expected
    process.stdin.write("\n")
    process.stdin.flush()


def test_events_come_back_as_appended_and_in_order(store):
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
    assert json.dumps(found.body, sort_keys=True) == json.dumps(body, sort_keys=True)  # tells 2.0 from 2


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


def test_events_outlive_the_store(url):
    for i in range(3):
        store = SqlEvents(url)
        store.append(event(str(i)))
        store.close()
    store = SqlEvents(url)
    assert ids(store.scan()) == ["0", "1", "2"]
    store.close()


def test_an_id_is_written_once(store):
    for body in ({"n": 1}, {"n": 2}):
        store.append(event("same", **body))
        assert store.flush()
    store.append(event("other"))
    store.append(event("same"))
    assert store.scan() == [event("same", n=1), event("other")]


def test_a_commit_whose_answer_was_lost_is_not_written_twice(store, monkeypatch):
    insert, calls = store._insert, []

    def commit_then_fail(batch):
        insert(batch)
        calls.append(len(batch))
        if len(calls) == 1:
            raise ConnectionError("the answer was lost")

    monkeypatch.setattr(store, "_insert", commit_then_fail)
    for i in range(5):
        store.append(event(str(i)))
    assert ids(store.scan()) == ["0", "1", "2", "3", "4"]
    assert len(calls) > 1
    assert store.dropped == 0


def test_taking_carries_along_what_waits_and_a_receipt_tells(url, monkeypatch):
    monkeypatch.setattr(sql_events, "LINGER_S", 60)  # the writer's own turn does not come
    with closing(SqlEvents(url)) as store, closing(SqlEvents(url)) as other:
        before = store.receipt()
        store.append(event("a"))
        receipt = store.receipt()
        assert before() and not receipt()
        assert store.take([Wanted("tokens", 3, 10)]) == [Given(3, 3.0)]
        assert receipt() and ids(other.scan()) == ["a"]
        store.append(event("b"))
        assert receipt() and not store.receipt()()


def test_what_a_failed_taking_carried_is_written_by_others(store, monkeypatch):
    def fail(*_):
        raise OperationalError("take", {}, OSError("the database is away"))

    monkeypatch.setattr(sql_events, "LINGER_S", 0.2)
    monkeypatch.setattr(sql_events.tallies, "take", fail)
    store.append(event("a"))
    with pytest.raises(BackendError, match="the database is away"):
        store.take([Wanted("tokens", 3, 10)])
    store.append(event("b"))
    assert ids(store.scan()) == ["a", "b"]


def test_a_peer_that_is_frozen_in_its_transaction_holds_nobody_up_for_long(url, monkeypatch):
    monkeypatch.setattr("casemate.backends.sql_events.database.BUSY_S", 1)
    with closing(SqlEvents(url)) as store, closing(SqlEvents(url)) as frozen:
        store.append(event("a"))
        with frozen._lent() as connection:
            frozen._add(connection, [rows.row_of(event("b"))])
            with pytest.raises(BackendError, match="lock"):
                store.take([Wanted("tokens", 3, 10)])
        assert store.take([Wanted("tokens", 3, 10)]) == [Given(3, 3.0)]
        assert store.flush() and ids(frozen.scan()) in (["a", "b"], ["b", "a"])


def test_what_a_receipt_is_for_is_seen_by_others_whoever_wrote_it(url, monkeypatch):
    monkeypatch.setattr(sql_events, "LINGER_S", 0.001)
    missed, given = [], []

    def work(name):
        for i in range(60):
            store.append(event(f"{name}{i}"))
            receipt = store.receipt()
            given.extend(store.take([Wanted("tokens", 1, 10_000)]))
            if not receipt():
                assert store.flush(60)
            missed.extend({f"{name}{i}"} - {e.id for e in other.follow("ask", 0)[0]})

    with closing(SqlEvents(url)) as store, closing(SqlEvents(url)) as other:
        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert missed == [] and sorted(g.used for g in given) == [*range(1, 241)]
        assert len(other.scan()) == 240


def test_processes_share_a_fresh_database(url):
    processes = [appender(url, name, 700) for name in "abcd"]
    for said in ("ready", "True"):
        for process in processes:
            say(process, said)
    assert [process.wait(60) for process in processes] == [0, 0, 0, 0]
    store = SqlEvents(url)
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
        store = SqlEvents(url)
        for i in range(50):
            store.append(event(f"{name}{i}"))
        store.close()

    threads = [threading.Thread(target=work, args=[name]) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = SqlEvents(url)
    assert len(store.scan()) == 200
    store.close()


def test_a_killed_process_loses_nothing_that_was_flushed(url):
    process = appender(url, "a", 600)
    say(process, "ready")
    assert process.stdout.readline().strip() == "True"
    process.kill()
    process.communicate()
    store = SqlEvents(url)
    assert ids(store.scan()) == [f"a-{i}" for i in range(600)]
    store.close()


def test_whoever_follows_sees_every_event_once_whoever_writes_it(url):
    """Two writers at once, a follower that never stops: no event of theirs is passed over, none comes twice."""
    stores = [SqlEvents(url) for _ in range(3)]
    seen, done = [], threading.Event()

    def write(store, name):
        for i in range(300):
            store.append(event(f"{name}{i}", kind="wanted" if i % 3 else "other"))
            if i % 20 == 0:
                store.flush()

    def follow():
        place = 0
        while not done.is_set() or place < last[0]:
            found, place = stores[2].follow("wanted", place)
            seen.extend(ids(found))

    last = [0]
    threads = [threading.Thread(target=write, args=(s, n)) for s, n in zip(stores, "ab", strict=False)]
    follower = threading.Thread(target=follow)
    for thread in (follower, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores[:2]:
        assert store.flush(60)
    last[0] = stores[0].follow("wanted", 0)[1]
    done.set()
    follower.join()
    assert sorted(seen) == sorted(f"{name}{i}" for name in "ab" for i in range(300) if i % 3)
    for store in stores:
        store.close()


def test_following_may_leave_out_what_is_old(store):
    for i in range(4):
        store.append(event(str(i), at=NOON + timedelta(hours=i)))
    assert store.flush()
    found, place = store.follow("ask", 0, NOON + timedelta(hours=2))
    assert ids(found) == ["2", "3"]
    assert store.follow("ask", place) == ([], place)
    assert store.follow("never", 0) == ([], 0)


def test_a_closed_store_refuses(store):
    store.append(event("e"))
    store.close()
    store.close()
    with pytest.raises(BackendError, match="is closed"):
        store.append(event("f"))
    for read in (store.scan, lambda: store.follow("ask", 0)):
        with pytest.raises(BackendError, match="is closed"):
            read()
    assert store.flush()


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_a_lost_connection_is_made_again(postgres_url, store):
    import psycopg

    store.append(event("before"))
    assert store.flush()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(pid, 9999) FROM pg_stat_activity WHERE datname LIKE 't%'")
    assert ids(store.scan()) == ["before"]
    store.append(event("after"))
    assert ids(store.scan()) == ["before", "after"]
