"""``SqlEventStore`` under failures. For the obligations of every store, see tests/conformance/test_event_stores.py."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np
import pytest

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.backends.event_stores.sql.database import advice
from casemate.errors import BackendError, ConfigError, MissingExtra
from casemate.types import Event
from tests.waiting import wait_for

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
LOGGER = "casemate.backends.event_stores.sql"


class FailingInsert:
    """Replaces the insert and fails while ``open`` is false."""

    def __init__(self, store: SqlEventStore) -> None:
        self.insert = store._insert
        self.open = False
        self.refused = threading.Event()

    def __call__(self, batch) -> None:
        if not self.open:
            self.refused.set()
            raise OSError("the database is down")
        self.insert(batch)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.db"


@pytest.fixture
def make(path) -> Iterator[type[SqlEventStore]]:
    """Creates stores and closes them at the end."""
    made = []

    def make(**options) -> SqlEventStore:
        made.append(SqlEventStore(f"sqlite:///{path}", **{"retry_s": 0.01, **options}))
        return made[-1]

    yield make
    for store in made:
        store.close()


def event(id_: object, **body: object) -> Event:
    return Event(str(id_), NOON, "ask", body)


def ids(store: SqlEventStore) -> list[str]:
    return [e.id for e in store.scan()]


def test_importing_the_module_does_not_import_sqlalchemy():
    code = f"import sys, {LOGGER}; sys.exit(bool({{'sqlalchemy', 'alembic', 'psycopg'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_failing_database_loses_no_event_and_does_not_block_append(make, monkeypatch, caplog):
    store = make()
    gate = FailingInsert(store)
    monkeypatch.setattr(store, "_insert", gate)
    for i in range(1200):
        store.append(event(i, secret="the question"))
    assert gate.refused.wait(30)
    assert not store.flush(0.05)
    store.append(event("last"))
    gate.open = True
    assert ids(store) == [*map(str, range(1200)), "last"]
    assert store.dropped == 0
    assert [r.levelname for r in caplog.records if r.name == LOGGER] == ["WARNING", "WARNING"]
    assert "the question" not in caplog.text


def test_backoff_doubles_up_to_eight_times_and_restarts_after_a_success(make, monkeypatch):
    pauses, failures = [], deque([True] * 6)
    monkeypatch.setattr(SqlEventStore, "_pause", lambda self, seconds: pauses.append(seconds))
    store = make(retry_s=0.5)
    insert = store._insert

    def flaky(batch) -> None:
        if failures:
            failures.popleft()
            raise OSError("the database is down")
        insert(batch)

    monkeypatch.setattr(store, "_insert", flaky)
    store.append(event("a"))
    assert store.flush(30)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    failures.extend([True] * 2)
    store.append(event("b"))
    assert store.flush(30)
    assert pauses[6:] == [0.5, 1.0]
    assert ids(store) == ["a", "b"]


def test_the_pause_ends_when_the_store_is_closed(make, monkeypatch):
    store = make(retry_s=60)
    gate = FailingInsert(store)
    monkeypatch.setattr(store, "_insert", gate)
    flush = store.flush
    monkeypatch.setattr(store, "flush", lambda: flush(0.05))
    store.append(event("a"))
    assert gate.refused.wait(30)
    begin = time.monotonic()
    store.close()
    assert time.monotonic() - begin < 5
    assert not store._writer.is_alive()


def test_a_locked_file_delays_events_and_loses_none(make, path, monkeypatch):
    monkeypatch.setattr("casemate.backends.event_stores.sql.database.BUSY_S", 0.1)
    store = make()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    for i in range(10):
        store.append(event(i))
    assert not store.flush(0.5)
    other.execute("ROLLBACK")
    other.close()
    assert ids(store) == [str(i) for i in range(10)]


def test_beyond_capacity_the_oldest_events_are_dropped_and_reported_once(make, monkeypatch, caplog):
    store = make(capacity=10)
    gate = FailingInsert(store)
    monkeypatch.setattr(store, "_insert", gate)
    for burst in (1, 2):
        gate.open = False
        gate.refused.clear()
        for i in range(25):
            store.append(event(f"{burst}-{i}", secret="the question"))
            assert gate.refused.wait(30)
        wait_for(lambda total=15 * burst: store.dropped == total)  # the writer may return a batch to the queue later
        gate.open = True
        assert store.flush()
    assert ids(store) == [f"{burst}-{i}" for burst in (1, 2) for i in range(15, 25)]
    assert [r.levelname for r in caplog.records if r.name == LOGGER].count("ERROR") == 2
    assert "the question" not in caplog.text


def test_flush_returns_false_for_dropped_events(make, monkeypatch):
    store = make(capacity=1)
    gate = FailingInsert(store)
    monkeypatch.setattr(store, "_insert", gate)
    store.append(event("a"))
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(store.flush(60)))
    waiter.start()
    while waiter.is_alive():
        store.append(event("b"))
        waiter.join(0.01)
    assert answers == [False]
    gate.open = True


def test_events_not_written_at_close_are_reported(make, monkeypatch, caplog):
    store = make()
    monkeypatch.setattr(store, "_insert", FailingInsert(store))
    flush = store.flush
    monkeypatch.setattr(store, "flush", lambda: flush(0.05))
    store.append(event("a"))
    with pytest.raises(BackendError, match="could not write all queued events"):
        store.scan()
    store.close()
    assert "1 events could not be written" in caplog.text
    assert not store._writer.is_alive()


@pytest.mark.parametrize(
    ("refused", "error", "words"),
    [
        (Event("e", datetime(2026, 3, 1), "ask", {}), ValueError, "'at' has no time zone"),
        (Event("", NOON, "ask", {}), ValueError, "an event's id must be"),
        (Event("e", NOON, "a\0b", {}), ValueError, "an event's kind must be"),
        (Event("\ud800", NOON, "ask", {}), ValueError, "an event's id must be"),
        (Event("x" * 201, NOON, "ask", {}), ValueError, "1 to 200"),
        (event("e", good=1, bad={1, 2}), TypeError, r"\['bad'\].*set is not JSON"),
        (event("e", score=float("nan")), TypeError, r"\['score'\]"),
        (event("e", score=np.float32(1)), TypeError, r"\['score'\]"),
        (Event("e", NOON, "ask", {"a": 1, 2: 1}), TypeError, r"\[2\]"),
    ],
)
def test_append_rejects_invalid_events(make, refused, error, words):
    store = make()
    with pytest.raises(error, match=words):
        store.append(refused)
    store.append(event("fine"))
    assert ids(store) == ["fine"]


def test_append_copies_the_body(make):
    store, body = make(), {"n": 1}
    store.append(Event("e", NOON, "ask", body))
    body["n"] = 2
    assert store.scan()[0].body == {"n": 1}


def test_close_writes_the_queue_and_leaves_no_thread(make):
    before = threading.active_count()
    store = make()
    for i in range(2000):
        store.append(event(i))
    store.close()
    assert threading.active_count() == before
    assert len(make().scan()) == 2000


def test_threads_open_separate_databases_concurrently(tmp_path):
    failures, barrier = [], threading.Barrier(8)

    def work(name: int) -> None:
        barrier.wait()
        try:
            SqlEventStore(f"sqlite:///{tmp_path}/{name}.db").close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=[name]) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_opening_waits_for_a_process_that_creates_the_same_file(path, make, monkeypatch):
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    sleeps = []

    def sleep(_: float) -> None:
        if not sleeps:
            other.execute("ROLLBACK")
        sleeps.append(True)

    monkeypatch.setattr("casemate.runtime.sqlite.time.sleep", sleep)
    make()
    other.close()
    assert sleeps


def test_a_process_that_exits_without_close_writes_all_events(make, path):
    code = (
        "import sys, datetime; from casemate.backends.event_stores.sql import SqlEventStore\n"
        "from casemate.types import Event\n"
        "store = SqlEventStore(sys.argv[1])\n"
        "for i in range(900): store.append(Event(str(i), datetime.datetime.now(datetime.UTC), 'ask', {}))\n"
    )
    subprocess.run([sys.executable, "-c", code, f"sqlite:///{path}"], check=True)
    assert ids(make()) == [str(i) for i in range(900)]


def test_a_flushed_event_is_on_disk_with_private_permissions(tmp_path):
    file = tmp_path / "new" / "events.db"
    store = SqlEventStore(f"sqlite:///{file}")
    store.append(event("e"))
    assert store.flush()
    with store._engine.connect() as connection:
        pragmas = [connection.exec_driver_sql(f"PRAGMA {p}").scalar() for p in ("journal_mode", "synchronous")]
        busy = connection.exec_driver_sql("PRAGMA busy_timeout").scalar()
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (file.parent, *file.parent.iterdir())}
    store.close()
    assert (pragmas, busy) == (["wal", 2], 5000)
    assert modes.pop("new") == 0o700
    assert set(modes.values()) == {0o600}


def test_opening_does_not_change_logging(make):
    logger, root = logging.getLogger("another.program"), logging.getLogger()
    before = (root.level, list(root.handlers), logger.disabled)
    make()
    assert (root.level, list(root.handlers), logger.disabled) == before


def test_table_definitions_match_the_migrations(make):
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    store = make()
    with store._engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), store._table.metadata)
    schema_differences = [d for d in differences if "table" in d[0] or "column" in d[0]]
    assert [(d[0], d[1].name) for d in schema_differences] == [("remove_table", "casemate_schema")]


def test_a_folder_without_write_permission_is_an_error(tmp_path):
    if os.geteuid() == 0:
        folder = "/proc/self"  # not writable, not even by root
    else:
        folder = tmp_path / "locked"
        folder.mkdir(mode=0o500)
    with pytest.raises(BackendError, match=r"cannot open the event store sqlite:.*events\.db: .*can be written"):
        SqlEventStore(f"sqlite:///{folder}/events.db")


@pytest.mark.parametrize("content", [b"this is not a database, " * 99, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_not_an_event_store_is_an_error(path, content):
    path.write_bytes(content)
    threads = threading.active_count()
    with pytest.raises(BackendError, match="cannot open the event store .* can be moved away") as caught:
        SqlEventStore(f"sqlite:///{path}")
    assert not caught.value.retryable
    assert path.read_bytes() == content
    assert threading.active_count() == threads


def test_a_database_of_a_newer_version_is_an_error(make, path):
    make().close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE casemate_schema SET version_num = '9999'")
    connection.close()
    with pytest.raises(BackendError, match="written by a newer Casemate .schema 9999.*; upgrade Casemate") as caught:
        make()
    assert "moved away" not in str(caught.value) and not caught.value.retryable


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (sqlite3.SQLITE_CORRUPT, "can be moved away"),
        (sqlite3.SQLITE_NOTADB, "can be moved away"),
        (sqlite3.SQLITE_BUSY, "try again"),
        (sqlite3.SQLITE_IOERR_READ, "disk works"),
        (sqlite3.SQLITE_READONLY, "can be written"),
        (sqlite3.SQLITE_FULL, "has room"),
    ],
)
def test_the_advice_to_move_the_file_away_is_for_damaged_files_only(code, expected):
    error = sqlite3.OperationalError("failed")
    error.sqlite_errorcode = code
    advice_text = advice("sqlite:///events.db", error)
    assert expected in advice_text and ("moved away" in advice_text) == (expected == "can be moved away")


def test_a_damaged_table_fails_reads_but_not_append(make, path):
    store = make()
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE casemate_events RENAME TO elsewhere")
    with pytest.raises(BackendError, match="cannot read sqlite:.*no such table"):
        store.scan()
    store.append(event("e", secret="the question"))
    assert not store.flush(0.05)
    connection.execute("ALTER TABLE elsewhere RENAME TO casemate_events")
    connection.close()
    assert ids(store) == ["e"]


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg", "postgresql+asyncpg"])
def test_errors_never_contain_the_password(scheme):
    with pytest.raises(BackendError, match="postgresql.psycopg://me:.*@127.0.0.1:1/db: ") as caught:
        SqlEventStore(f"{scheme}://me:s3cret@127.0.0.1:1/db?application_name=s3cret")
    assert caught.value.retryable
    assert "s3cret" not in repr(caught.value)
    assert "s3cret" not in repr(caught.value.__cause__)


def test_the_repr_does_not_contain_the_password(make, monkeypatch):
    engine = make()._engine
    monkeypatch.setattr(SqlEventStore, "_open", lambda self, address: engine)
    store = SqlEventStore("postgresql://me:s3cret@host/db")
    assert "s3cret" not in repr(store)
    store.close()
    with pytest.raises(BackendError) as caught:
        store.append(event("e"))
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3cret", "of the form"),
        ("postgresql://me:s3cret@host:s3cret/db", "of the form"),
        ("postgresql://me:s3@cret@host/db", "%40"),
        ("mysql://me:s3cret@host/db", "known: postgresql, sqlite"),
        ("sqlite://", "must name a file"),
        ("sqlite:///:memory:", "must name a file"),
        ("sqlite:///file:s3cret?mode=memory&uri=true", "must name a file"),
    ],
)
def test_invalid_urls_are_rejected(url, words):
    with pytest.raises(ConfigError, match=words) as caught:
        SqlEventStore(url)
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize("options", [{"capacity": 0}, {"retry_s": 0.0}])
def test_options_out_of_range_are_rejected(options, make):
    with pytest.raises(ConfigError, match="must be (above 0|at least 1)"):
        make(**options)


def test_without_psycopg_the_error_has_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtra, match=r"pip install 'casemate\[postgres\]'"):
        SqlEventStore("postgresql://me:s3cret@host/db")


def test_a_renamed_or_deleted_file_fails_reads_and_keeps_events_until_restored(make, path, caplog):
    """Open connections would keep writing to the renamed file, where the operator does not expect the events."""
    store = make()
    store.append(event(1))
    assert ids(store) == ["1"]
    path.rename(path.with_suffix(".old"))
    for use in (store.scan, lambda: store.lease("a", "b", 60)):
        with pytest.raises(
            BackendError, match=r"events\.db was renamed, deleted or replaced while it was open; put it"
        ):
            use()
    store.append(event(2))
    assert not store.flush(0.05)
    path.write_bytes(path.with_suffix(".old").read_bytes())  # a copy is a different file
    assert not store.flush(0.05)
    path.with_suffix(".old").replace(path)
    assert store.flush(30)
    assert ids(store) == ["1", "2"]
    assert "was renamed" in caplog.text


def test_a_migration_logs_no_info_messages_of_alembic(make, caplog):
    caplog.set_level(logging.INFO)
    make().close()
    assert not [record for record in caplog.records if record.name.startswith("alembic")]


def test_opening_a_database_with_the_latest_schema_does_not_import_alembic(make, path):
    make().close()
    code = f"import sys; from {LOGGER} import SqlEventStore; SqlEventStore('sqlite:///{path}').close()"
    code += "; sys.exit('alembic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
