"""The append-only record in SQLite or Postgres, chosen by URL.

How nothing is lost: ``append`` puts a row on a queue in memory. One writer thread takes a batch off its front and
commits it; or ``take`` does, whose transaction carries along what waits. Committed, the batch counts as done. Failed,
it goes back to the front and is tried again; should the commit have succeeded after all, the unique event id makes the
second insert do nothing. One batch is under way at a time, so rows are done in the order of the queue, and ``flush``
waits until as many are done as had been appended. There is one other way off the queue: beyond ``capacity`` the oldest
rows are dropped, counted and reported.
"""

from __future__ import annotations

import atexit
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from casemate import migrations
from casemate.backends.sql_events import leases, tallies
from casemate.backends.sql_events.database import (
    BUSY_S,
    address_of,
    advice,
    engine_of,
    failure,
    file_address,
    first_line,
    in_order,
    make_file,
)
from casemate.backends.sql_events.rows import Row, events_of, row_of, table, utc
from casemate.errors import ConfigError
from casemate.protocols import EventStore
from casemate.types import Event, Given, Secret, Wanted

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine, Insert, Select

BATCH = 500
"""Rows in one transaction."""
LINGER_S = 0.05
"""How long an event waits for others to share its transaction; one by one, committing costs more than judging."""
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
        address = address_of(self.url) if self.url else file_address(self.path)
        self._where = address.set(query={}).render_as_string(hide_password=True)
        self._engine = self._open(address)
        self._table = table()
        self._changed = threading.Condition()  # guards all below; nobody holds it while doing I/O
        self._queue: deque[Row] = deque()
        self._appended = 0  # events ever taken
        self._done = 0  # of these: committed or dropped
        self._dropped = 0
        self._dropping = False  # since the queue was last empty
        self._closed = False  # takes no more events
        self._stopped = False  # the writer ends
        self._urgent = threading.Event()  # somebody waits for what was appended
        self._writing = threading.Lock()  # held by who has a batch under way
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
        row = row_of(event)
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
        column = self._table.c
        query = self._selected().order_by(column.seq)
        if kind is not None:
            query = query.where(column.kind == kind)
        if since is not None:
            query = query.where(column.at >= utc(since, "since"))
        return events_of(self._read(query))

    def latest(self, kind: str, count: int) -> Sequence[Event]:
        """The last so many events of a kind, in order of writing, after all that was appended before is written.

        Raises:
            BackendError: As ``scan``.
        """
        column = self._table.c
        query = self._selected().where(column.kind == kind).order_by(column.seq.desc()).limit(max(count, 0))
        return events_of(self._read(query)[::-1])

    def follow(self, kind: str, after: int, since: datetime | None = None) -> tuple[Sequence[Event], int]:
        """Events of a kind that were written behind a place, and the place behind them. See ``EventStore.follow``.

        Raises:
            BackendError: If the store is closed or cannot be read.
        """
        begin = utc(since, "since") if since is not None else datetime.min.replace(tzinfo=UTC)
        rows = self._rows(self._following, {"kind_is": kind, "place": after, "begin": begin})
        return events_of(rows), rows[-1][4] if rows else after

    @cached_property
    def _following(self) -> Select[Any]:
        """What ``follow`` reads: built once, for it is on every question's path."""
        from sqlalchemy import bindparam

        column = self._table.c
        query = self._selected().add_columns(column.seq).order_by(column.seq)
        place: Any = bindparam("place")
        begin: Any = bindparam("begin", type_=column.at.type)
        return query.where(column.kind == bindparam("kind_is"), column.seq > place, column.at >= begin)

    def _selected(self) -> Select[Any]:
        """What is read of an event."""
        from sqlalchemy import Text, cast, select

        column = self._table.c
        return select(column.id, column.at, column.kind, cast(column.body, Text))

    def _read(self, query: Select[Any]) -> Sequence[Any]:
        """The rows, once all that waits is written."""
        self._refuse_if_closed()
        if not self.flush():
            raise failure(f"{self._where} did not take all events that wait", "see the log for the cause", True)
        return self._rows(query)

    def _rows(self, query: Select[Any], values: Mapping[str, Any] | None = None) -> Sequence[Any]:
        from sqlalchemy.exc import SQLAlchemyError

        self._refuse_if_closed()
        try:
            with self._engine.connect() as connection:
                return connection.execute(query, values or {}).all()
        except SQLAlchemyError as error:
            raise failure(f"cannot read {self._where}: {first_line(error)}", advice(self._where), True) from error

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Waits until everything appended so far is on disk; False if that takes longer, or some had to be dropped."""
        with self._changed:
            target, dropped = self._appended, self._dropped
            if self._done < target:
                self._urgent.set()
                self._changed.wait_for(lambda: self._done >= target or self._dropped > dropped, timeout_s)
            return self._done >= target and self._dropped == dropped

    def receipt(self) -> Callable[[], bool]:
        """Tells when asked whether all that was appended by now is on disk. See ``EventStore.receipt``."""
        with self._changed:
            target, dropped = self._appended, self._dropped
        return lambda: self._done >= target and self._dropped == dropped

    def lease(self, name: str, holder: str, seconds: float) -> bool:
        """Takes or renews a lease, in one statement and by the database's own clock; True if it is held now.

        Raises:
            ValueError: If the time is not above 0, or name or holder are not 1 to 200 printable characters.
            BackendError: If the store is closed or cannot be written; who held the lease before may hold it still.
        """
        leases.check(name, holder, seconds)
        with self._lent() as connection:
            return leases.take(connection, name, holder, seconds)

    def release(self, name: str, holder: str) -> None:
        """Gives a lease back; nothing happens if somebody else holds it.

        Raises:
            BackendError: As ``lease``.
        """
        with self._lent() as connection:
            leases.give_back(connection, name, holder)

    def take(self, wanted: Sequence[Wanted]) -> list[Given]:
        """Takes from allowances, each in one statement and by the database's own clock. See ``EventStore.take``.

        Events that wait are written in the same transaction, which saves one of their own.

        Raises:
            ValueError: If a name or period is not 1 to 200 printable characters, or an allowance is below 0.
            BackendError: If the store is closed or cannot be written.
        """
        for one in wanted:
            tallies.check(one)
        with self._carrying() as batch, self._lent() as connection:
            given = tallies.take(connection, wanted)
            self._add(connection, batch)
            return given

    @contextmanager
    def _carrying(self, wait: bool = False) -> Iterator[list[Row]]:
        """A batch off the front, done when the block ends, or put back; none, or later, while another is under way."""
        if not self._writing.acquire(blocking=wait):
            yield []
            return
        try:
            batch = self._next_batch()
            try:
                yield batch
            except BaseException:
                self._put_back(batch)
                raise
            self._finish(len(batch))
        finally:
            self._writing.release()

    @contextmanager
    def _lent(self) -> Iterator[Connection]:
        """A transaction for a lease or a tally."""
        from sqlalchemy.exc import SQLAlchemyError

        self._refuse_if_closed()
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            what = f"cannot write to {self._where}: {first_line(error)}"
            raise failure(what, advice(self._where), True) from error

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
        self._urgent.set()
        self._writer.join(BUSY_S + 1)
        if lost := self._appended - self._done:
            _log.error("%d events could not be written to %s before it was closed; they are lost", lost, self._where)
        self._engine.dispose()

    def _write(self) -> None:
        """The writer thread."""
        failures = 0
        while self._await_rows():
            try:
                self._write_batch()
            except Exception as error:  # whatever it is, this thread must live
                if not failures:
                    _log.warning("cannot write to %s, will try again: %s", self._where, first_line(error))
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped, self.retry_s * min(2**failures, 8))
                failures = min(failures + 1, 3)
            else:
                if failures:
                    _log.warning("writing to %s again; %d events dropped so far", self._where, self._dropped)
                failures = 0

    def _write_batch(self) -> None:
        with self._carrying(wait=True) as batch:
            if batch:  # or others carried it along meanwhile
                self._insert(batch)

    def _await_rows(self) -> bool:
        """Returns soon after there are rows; False when the store is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopped)
        self._urgent.wait(LINGER_S)
        self._urgent.clear()  # whoever waits had appended before: that is in the queue
        return not self._stopped

    def _next_batch(self) -> list[Row]:
        """Up to ``BATCH`` rows off the front; none when the store is closed."""
        with self._changed:
            size = 0 if self._stopped else min(BATCH, len(self._queue))
            return [self._queue.popleft() for _ in range(size)]

    def _insert(self, batch: list[Row]) -> None:
        with self._engine.begin() as connection:
            self._add(connection, batch)

    def _add(self, connection: Connection, batch: list[Row]) -> None:
        if batch:
            in_order(connection)
            connection.execute(self._inserting, batch)

    @cached_property
    def _inserting(self) -> Insert:
        """How events are written."""
        from sqlalchemy.dialects import postgresql, sqlite

        insert = sqlite.insert if self._engine.dialect.name == "sqlite" else postgresql.insert
        return insert(self._table).on_conflict_do_nothing(index_elements=["id"])

    def _finish(self, rows: int) -> None:
        with self._changed:
            self._done += rows
            self._dropping = self._dropping and bool(self._queue)
            self._changed.notify_all()

    def _put_back(self, batch: list[Row]) -> None:
        with self._changed:
            self._queue.extendleft(reversed(batch))
            report = self._drop_overflow()
            self._changed.notify_all()
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
            raise failure(f"the event store {self._where} is closed", "open a new one", False)

    def _open(self, address: URL) -> Engine:
        """Reaches the database and brings its schema up to date."""
        from alembic.util import CommandError
        from sqlalchemy.exc import OperationalError, SQLAlchemyError

        engine = None
        try:
            if address.database and address.drivername == "sqlite":
                make_file(Path(address.database))
            engine = engine_of(address)
            migrations.upgrade(engine)
        except (OSError, sqlite3.Error, SQLAlchemyError, CommandError) as error:
            if engine:
                engine.dispose()
            what = f"cannot open the event store {self._where}: {first_line(error)}"
            raise failure(what, advice(self._where), isinstance(error, OperationalError)) from error
        return engine
