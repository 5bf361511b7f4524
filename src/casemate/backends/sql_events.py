"""The append-only record in SQLite or Postgres, chosen by URL.

How nothing is lost: ``append`` puts a row on a queue in memory. One writer thread takes a batch off its front and
commits it. Committed, the batch counts as done. Failed, it goes back to the front and is tried again; should the
commit have succeeded after all, the unique event id makes the second insert do nothing. ``flush`` waits until as many
rows are done as had been appended. There is one other way off the queue: beyond ``capacity`` the oldest rows are
dropped, counted and reported.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from casemate import migrations
from casemate.errors import BackendError, ConfigError, needs
from casemate.protocols import EventStore
from casemate.sqlite_wal import write_ahead
from casemate.types import Event, Secret

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine, Table

Row: TypeAlias = dict[str, Any]

BATCH = 500
"""Rows in one transaction."""
BUSY_S = 5
"""How long one attempt waits for a locked SQLite file, or for a Postgres server to answer."""
DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class SqlEvents(EventStore):
    """Events in a SQLite file or a Postgres table. Any number of processes may append to the same one.

    An event is on disk once ``flush`` returned True, and then survives a crash of the process or a loss of power.
    A process that ends in the usual way flushes by itself. An id that is already there is not written again.

    Attributes:
        url: ``postgresql://user:password@host/database`` (or ``sqlite:///path``); empty: the SQLite file at ``path``.
        path: Where the SQLite file is when there is no url.
        capacity: Events that wait in memory while the database fails; beyond it the oldest are dropped.
        retry_s: Pause after a failed attempt; it doubles from one to the next, up to eightfold.
    """

    url: Secret = field(default=Secret(""), repr=False)
    path: Path = Path(".casemate/events.db")
    capacity: int = 100_000
    retry_s: float = 1.0

    def __post_init__(self) -> None:
        if self.capacity < 1 or self.retry_s <= 0:
            raise ConfigError(f"capacity={self.capacity}, retry_s={self.retry_s}: both must be above 0")
        address = _address(self.url) if self.url else _file_address(self.path)
        self._where = address.set(query={}).render_as_string(hide_password=True)
        self._engine = self._open(address)
        self._table = _table()
        self._changed = threading.Condition()  # guards all below; nobody holds it while doing I/O
        self._queue: deque[Row] = deque()
        self._appended = 0  # events ever taken
        self._done = 0  # of these: committed or dropped
        self._dropped = 0
        self._dropping = False  # since the queue was last empty
        self._closed = False  # takes no more events
        self._stopped = False  # the writer ends
        self._writer = threading.Thread(target=self._write, name="casemate-events", daemon=True)
        self._writer.start()
        atexit.register(self.close)

    @property
    def dropped(self) -> int:
        """Events given up because the database failed for too long."""
        return self._dropped

    def append(self, event: Event) -> None:
        """Takes an event in charge and returns at once, whatever the state of the database.

        Raises:
            ValueError: If the time has no zone, or id or kind are not 1 to 200 printable characters.
            TypeError: If the body cannot be written as JSON; the message names the key.
            BackendError: If the store is closed.
        """
        row = _row(event)
        with self._changed:
            self._refuse_if_closed()
            self._queue.append(row)
            self._appended += 1
            report = self._drop_overflow()
            self._changed.notify_all()
        if report:
            _log.error(
                "%d events wait for %s and no more fit: the oldest are dropped until it takes them again; "
                "see that it can be reached, or raise 'capacity'",
                self.capacity,
                self._where,
            )

    def scan(self, kind: str | None = None, since: datetime | None = None) -> Sequence[Event]:
        """Events in order of writing, after all that was appended before the call is written.

        Args:
            kind: Only of this kind.
            since: Only of this time or later; it must have a time zone.

        Raises:
            BackendError: If the store is closed, cannot be read, or could not write what waited.
        """
        from sqlalchemy import select
        from sqlalchemy.exc import SQLAlchemyError

        table = self._table.c
        query = select(table.id, table.at, table.kind, table.body).order_by(table.seq)
        if kind is not None:
            query = query.where(table.kind == kind)
        if since is not None:
            query = query.where(table.at >= _utc(since, "since"))
        self._refuse_if_closed()
        if not self.flush():
            raise _failure(f"{self._where} did not take all events that wait", "see the log for the cause", True)
        try:
            with self._engine.connect() as connection:
                rows = connection.execute(query).all()
        except SQLAlchemyError as error:
            raise _failure(f"cannot read {self._where}: {_first_line(error)}", _advice(self._where), True) from error
        return [Event(id_, _aware(at), kind_, body) for id_, at, kind_, body in rows]

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Waits until everything appended so far is on disk; False if that takes longer, or some had to be dropped."""
        with self._changed:
            target, dropped = self._appended, self._dropped
            self._changed.wait_for(lambda: self._done >= target or self._dropped > dropped, timeout_s)
            return self._done >= target and self._dropped == dropped

    def close(self) -> None:
        """Takes no more events, flushes, ends the writer and lets go of the database. May be called again."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        self.flush()
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._writer.join(BUSY_S + 1)
        if lost := self._appended - self._done:
            _log.error("%d events could not be written to %s before it was closed; they are lost", lost, self._where)
        self._engine.dispose()

    def _write(self) -> None:
        """The writer thread: a batch off the front, committed and done, or put back."""
        failures = 0
        while batch := self._next_batch():
            try:
                self._insert(batch)
            except Exception as error:  # whatever it is, this thread must live
                self._put_back(batch)
                if not failures:
                    _log.warning("cannot write to %s, will try again: %s", self._where, _first_line(error))
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped, self.retry_s * min(2**failures, 8))
                failures = min(failures + 1, 3)
            else:
                if failures:
                    _log.warning("writing to %s again; %d events dropped so far", self._where, self._dropped)
                failures = 0
                self._finish(len(batch))

    def _next_batch(self) -> list[Row]:
        """Up to ``BATCH`` rows, as soon as there is one; none when the store is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopped)
            size = 0 if self._stopped else min(BATCH, len(self._queue))
            return [self._queue.popleft() for _ in range(size)]

    def _insert(self, batch: list[Row]) -> None:
        from sqlalchemy.dialects import postgresql, sqlite

        insert = sqlite.insert if self._engine.dialect.name == "sqlite" else postgresql.insert
        with self._engine.begin() as connection:
            connection.execute(insert(self._table).on_conflict_do_nothing(index_elements=["id"]), batch)

    def _finish(self, rows: int) -> None:
        with self._changed:
            self._done += rows
            self._dropping = self._dropping and bool(self._queue)
            self._changed.notify_all()

    def _put_back(self, batch: list[Row]) -> None:
        with self._changed:
            self._queue.extendleft(reversed(batch))
            report = self._drop_overflow()
        if report:
            _log.error("no room for all events that wait for %s: the oldest are dropped", self._where)

    def _drop_overflow(self) -> bool:
        """Drops the oldest rows beyond ``capacity``; True if these are the first of a burst. The lock is held."""
        over = max(0, len(self._queue) - self.capacity)
        for _ in range(over):
            self._queue.popleft()
        self._dropped += over
        self._done += over
        first = bool(over) and not self._dropping
        self._dropping = self._dropping or first
        return first

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise _failure(f"the event store {self._where} is closed", "open a new one", False)

    def _open(self, address: URL) -> Engine:
        """Reaches the database and brings its schema up to date."""
        from alembic.util import CommandError
        from sqlalchemy.exc import OperationalError, SQLAlchemyError

        engine = None
        try:
            if address.database and address.drivername == "sqlite":
                _make_file(Path(address.database))
            engine = _engine(address)
            migrations.upgrade(engine)
        except (OSError, sqlite3.Error, SQLAlchemyError, CommandError) as error:
            if engine:
                engine.dispose()
            what = f"cannot open the event store {self._where}: {_first_line(error)}"
            raise _failure(what, _advice(self._where), isinstance(error, OperationalError)) from error
        return engine


def _file_address(path: Path) -> URL:
    """The URL of a SQLite file, whatever characters its path has."""
    from sqlalchemy.engine import URL

    return URL.create("sqlite", database=str(path))


def _address(url: str) -> URL:
    """The URL with the driver that we use. No message repeats it: a password may be anywhere in a malformed one."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigError("the event store's url is not of the form dialect://user:password@host/database") from None
    dialect = parsed.get_backend_name()
    if dialect not in DRIVERS:
        raise ConfigError(f"the event store's url names the dialect {dialect!r}; known: postgresql, sqlite")
    if "@" in (parsed.host or ""):
        raise ConfigError("the event store's url has more than one '@'; write the one in the password as %40")
    if dialect == "sqlite" and (parsed.database or ":memory:").startswith((":memory:", "file:")):
        raise ConfigError("the event store's url must name a file: sqlite:///relative/path or sqlite:////absolute/path")
    return parsed.set(drivername=DRIVERS[dialect])


def _make_file(path: Path) -> None:
    """Makes the file, for the owner only, and puts it in WAL mode, so that readers and the writer do not wait."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    with closing(sqlite3.connect(path, timeout=BUSY_S)) as connection:
        write_ahead(connection, BUSY_S)


def _engine(address: URL) -> Engine:
    from sqlalchemy import create_engine, event

    lite = address.drivername == "sqlite"
    with needs("casemate[postgres]"):
        engine = create_engine(
            address,
            connect_args={"timeout" if lite else "connect_timeout": BUSY_S},
            hide_parameters=True,  # no event body in an error
            json_serializer=str,  # bodies are JSON since they were appended
            pool_pre_ping=not lite,
        )
    if lite:
        # With WAL, NORMAL would lose the last commits at a power loss.
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=FULL").close())
    return engine


def _table() -> Table:
    """The newest schema, as ``casemate.migrations`` makes it."""
    from sqlalchemy import JSON, BigInteger, Column, DateTime, MetaData, Table, Text

    return Table(
        "casemate_events",
        MetaData(),
        Column("seq", BigInteger, primary_key=True),
        Column("id", Text),
        Column("at", DateTime(timezone=True)),
        Column("kind", Text),
        Column("body", JSON),
    )


def _row(event: Event) -> Row:
    """What is written of an event. What a database would refuse is refused here, before others wait behind it."""
    for name, value in (("id", event.id), ("kind", event.kind)):
        if not (0 < len(value) <= 200 and value.isprintable()):
            raise ValueError(f"an event's {name} must be 1 to 200 printable characters; got {value[:200]!r}")
    return {"id": event.id, "at": _utc(event.at, "at"), "kind": event.kind, "body": _json(event)}


def _json(event: Event) -> str:
    try:
        return json.dumps(dict(event.body), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        keys = [key for key, value in event.body.items() if not (isinstance(key, str) and _is_json(value))]
        raise TypeError(f"event {event.id!r}: cannot write the body's {keys} as JSON: {error}") from error


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _utc(at: datetime, name: str) -> datetime:
    if at.utcoffset() is None:
        raise ValueError(f"{name!r} has no time zone: {at.isoformat()}; use datetime.now(UTC)")
    return at.astimezone(UTC)


def _aware(at: datetime) -> datetime:
    """A time read from the database: SQLite keeps UTC without saying so, Postgres answers in the session's zone."""
    return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)


def _first_line(error: Exception) -> str:
    """The driver's own message; what follows the first line may quote a row."""
    return (str(getattr(error, "orig", None) or error) or type(error).__name__).splitlines()[0]


def _advice(where: str) -> str:
    if where.startswith("sqlite"):
        return (
            "see that the disk has room and that folder and file can be written; a file that is damaged or no event "
            "store can be moved away, and a new one is begun"
        )
    return "see that the server runs, and that the user may log in and create tables"


def _failure(what: str, advice: str, retryable: bool) -> BackendError:
    return BackendError(f"{what}; {advice}", backend="sql_events", retryable=retryable)
