"""The event store in SQLite or Postgres, selected by URL.

Durability: ``append`` puts a row on a queue in memory. A writer thread commits batches from its front; a quota
transaction (``acquire``) commits the waiting batch too. A failed batch returns to the front and is retried.
If its commit succeeded after all, the unique event id makes the second insert a no-op. One batch is in flight at a
time, so rows are committed in queue order, and ``flush`` waits until as many are done as were appended. Rows leave the
queue in one other way: beyond ``capacity`` the oldest are dropped, counted and logged.
"""

from __future__ import annotations

import atexit
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from casemate.backends.event_stores.sql import leases, migrations, quotas
from casemate.backends.event_stores.sql.database import (
    BUSY_S,
    advice,
    backend_error,
    create_file,
    create_lazy_engine,
    first_line,
    lock_event_order,
    parse_url,
    refuse_replaced_file,
    sqlite_url,
)
from casemate.backends.event_stores.sql.event_rows import EventRow, decode_events, encode_event, events_table, utc
from casemate.errors import require_range
from casemate.protocols import EventStore
from casemate.types import Event, QuotaGrant, QuotaRequest, Secret

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine, Insert, Select, TextClause

BATCH = 500  # rows per transaction
LINGER_S = 0.05  # how long an event waits for others to share its transaction: a commit costs more than a verdict
MAX_DOUBLINGS = 3  # the backoff grows to ``retry_s`` times two to this power
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class SqlEventStore(EventStore):
    """Events in a SQLite file or a Postgres table. Any number of processes may append to the same one.

    An event is on disk once ``flush`` returned True, and then survives a crash or a power failure. A process that exits
    normally flushes. An event whose id is stored already is not written again.

    Attributes:
        url: ``postgresql://user:password@host/database`` or ``sqlite:///path``. Empty: the SQLite file at ``path``.
        path: The SQLite file, used when ``url`` is empty.
        capacity: Events to queue in memory while the database fails. Beyond it the oldest are dropped.
        retry_s: Backoff after a failed write, in seconds. It doubles with each further failure, up to eight times.
    """

    url: Secret = field(default=Secret(""), repr=False)
    path: Path = Path(".casemate/events.db")
    capacity: int = 100_000
    retry_s: float = 1.0

    def __post_init__(self) -> None:
        require_range("sql", self, "capacity", at_least=1)
        require_range("sql", self, "retry_s", above=0)
        address = parse_url(self.url) if self.url else sqlite_url(self.path)
        self._where = address.set(query={}).render_as_string(hide_password=True)
        self._engine = self._open(address)
        self._table = events_table()
        self._changed = threading.Condition()  # guards all fields below; never held during I/O
        self._queue: deque[EventRow] = deque()
        self._appended = 0  # events ever appended
        self._done = 0  # of these, committed or dropped
        self._dropped = 0
        self._dropping = False  # since the queue was last empty
        self._closed = False  # refuses new events
        self._stopped = False  # tells the writer thread to exit
        self._urgent = threading.Event()  # a caller waits in flush()
        self._writing = threading.Lock()  # held while a batch is in flight
        self._writer = threading.Thread(target=self._write, name="casemate-events", daemon=True)
        self._writer.start()
        atexit.register(self.close)

    @property
    def dropped(self) -> int:
        return self._dropped

    def append(self, event: Event) -> None:
        """Queues an event and returns at once, even if the database is down.

        Raises:
            ValueError: If the time has no time zone, or id or kind is not 1 to 200 printable characters.
            TypeError: If the body cannot be written as JSON; the message names the key.
            BackendError: If the store is closed.
        """
        row = encode_event(event)
        with self._changed:
            self._refuse_if_closed()
            self._queue.append(row)
            self._appended += 1
            report = self._drop_overflow()
            self._changed.notify_all()
        if report:
            _log.error(
                "the queue of %d events for %s is full: the oldest are dropped until writing succeeds; "
                "check the database, or raise 'capacity'",
                self.capacity,
                self._where,
            )

    def scan(self, kind: str | None = None, since: datetime | None = None) -> Sequence[Event]:
        """Events in order of writing, including all appended before the call. See ``EventStore.scan``.

        Raises:
            ValueError: If ``since`` has no time zone.
            BackendError: If the store is closed, cannot be read, or could not write the queued events.
        """
        column = self._table.c
        query = self._selected().order_by(column.seq)
        if kind is not None:
            query = query.where(column.kind == kind)
        if since is not None:
            query = query.where(column.at >= utc(since, "since"))
        return decode_events(self._read(query))

    def latest(self, kind: str, count: int) -> Sequence[Event]:
        """The last events of a kind, including all appended before the call; errors as for ``scan``."""
        column = self._table.c
        query = self._selected().where(column.kind == kind).order_by(column.seq.desc()).limit(max(count, 0))
        return decode_events(self._read(query)[::-1])

    def read_since(self, kind: str, after: int, since: datetime | None = None) -> tuple[Sequence[Event], int]:
        """Events of a kind after an offset, and the offset of the last one; errors as for ``scan``."""
        begin = utc(since, "since") if since is not None else datetime.min.replace(tzinfo=UTC)
        rows = self._rows(self._after_offset, {"kind_is": kind, "offset": after, "begin": begin})
        return decode_events(rows), rows[-1][4] if rows else after

    @cached_property
    def _after_offset(self) -> Select[Any]:
        """The query of ``read_since``. Cached because it runs for every question."""
        from sqlalchemy import bindparam

        column = self._table.c
        query = self._selected().add_columns(column.seq).order_by(column.seq)
        offset: Any = bindparam("offset")
        begin: Any = bindparam("begin", type_=column.at.type)
        return query.where(column.kind == bindparam("kind_is"), column.seq > offset, column.at >= begin)

    def _selected(self) -> Select[Any]:
        from sqlalchemy import Text, cast, select

        column = self._table.c
        return select(column.id, column.at, column.kind, cast(column.body, Text))

    def _read(self, query: Select[Any]) -> Sequence[Any]:
        """The rows, after flushing the queue."""
        self._refuse_if_closed()
        if not self.flush():
            raise backend_error(
                f"could not write all queued events to {self._where}", "see the log for the cause", True
            )
        return self._rows(query)

    def _rows(self, query: Select[Any] | TextClause, values: Mapping[str, Any] | None = None) -> Sequence[Any]:
        from sqlalchemy.exc import SQLAlchemyError

        self._refuse_if_closed()
        try:
            with self._engine.connect() as connection:
                return connection.execute(query, values or {}).all()
        except SQLAlchemyError as error:
            raise backend_error(
                f"cannot read {self._where}: {first_line(error)}", advice(self._where, error), True
            ) from error

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Waits until all events appended so far are on disk. False: it took longer, or some were dropped."""
        with self._changed:
            target, dropped = self._appended, self._dropped
            if self._done < target:
                self._urgent.set()
                self._changed.wait_for(lambda: self._done >= target or self._dropped > dropped, timeout_s)
            return self._done >= target and self._dropped == dropped

    def receipt(self) -> Callable[[], bool]:
        """A function that returns whether all events appended by now are on disk. See ``EventStore.receipt``."""
        with self._changed:
            target, dropped = self._appended, self._dropped
        return lambda: self._done >= target and self._dropped == dropped

    def lease(self, name: str, holder: str, seconds: float) -> bool:
        """Acquires or renews a lease by the database's clock. Returns whether this holder has it now.

        Raises:
            ValueError: If seconds is not above 0, or name or holder is not 1 to 200 printable characters.
            BackendError: If the store is closed or cannot be written. A previous holder may still have the lease.
        """
        leases.require_valid(name, holder, seconds)
        with self._transaction() as connection:
            return leases.acquire(connection, name, holder, seconds)

    def release(self, name: str, holder: str) -> None:
        """Releases a lease. Does nothing if this holder does not have it; errors as for ``lease``."""
        with self._transaction() as connection:
            leases.release(connection, name, holder)

    def acquire(self, wanted: Sequence[QuotaRequest]) -> list[QuotaGrant]:
        """Consumes quotas by the database's clock. See ``EventStore.acquire``.

        Queued events are written in the same transaction, which saves one of their own.

        Raises:
            ValueError: If a name or period is not 1 to 200 printable characters, or a limit or rate is below 0.
            BackendError: If the store is closed or cannot be written.
        """
        for request in wanted:
            quotas.require_valid(request)
        with self._batch_in_flight() as batch, self._transaction() as connection:
            grants = quotas.consume(connection, wanted)
            self._add(connection, batch)
            return grants

    def quota_usage(self, prefix: str) -> Mapping[str, float]:
        """See ``EventStore.quota_usage``; errors as for ``scan``."""
        from sqlalchemy import text

        usage = text(quotas.USAGE[self._engine.dialect.name])
        return {str(name): float(used) for name, used in self._rows(usage, {"prefix": prefix})}

    def discard_quotas(self, names: Collection[str]) -> None:
        """See ``EventStore.discard_quotas``; errors as for ``acquire``."""
        from sqlalchemy import text

        rows = [{"name": name} for name in sorted(set(names))]  # one order of row locks prevents deadlocks
        if rows:
            with self._transaction() as connection:
                connection.execute(text(quotas.DISCARD), rows)

    @contextmanager
    def _batch_in_flight(self, wait: bool = False) -> Iterator[list[EventRow]]:
        """The next batch: done when the block ends, put back if it raises. Unless ``wait``, empty during another."""
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
    def _transaction(self) -> Iterator[Connection]:
        from sqlalchemy.exc import SQLAlchemyError

        self._refuse_if_closed()
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            what = f"cannot write to {self._where}: {first_line(error)}"
            raise backend_error(what, advice(self._where, error), True) from error

    def close(self) -> None:
        """Refuses new events, flushes, stops the writer thread and closes the database. Idempotent."""
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
            _log.error("%d events could not be written to %s before close; they are lost", lost, self._where)
        self._engine.dispose()

    def _write(self) -> None:
        failures = 0
        while self._await_rows():
            try:
                self._write_batch()
            except Exception as error:  # any error: the thread must survive
                if not failures:
                    _log.warning("cannot write to %s, will retry: %s", self._where, first_line(error))
                self._pause(self.retry_s * 2 ** min(failures, MAX_DOUBLINGS))
                failures += 1
            else:
                if failures:
                    _log.warning("writing to %s again; %d events dropped so far", self._where, self._dropped)
                failures = 0

    def _pause(self, seconds: float) -> None:
        """Waits before a retry, or until the store is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, seconds)

    def _write_batch(self) -> None:
        with self._batch_in_flight(wait=True) as batch:
            if batch:  # empty if a quota transaction wrote it meanwhile
                self._insert(batch)

    def _await_rows(self) -> bool:
        """Waits for rows, and ``LINGER_S`` for more unless a caller waits. False: the store is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopped)
        self._urgent.wait(LINGER_S)
        self._urgent.clear()  # the waiting caller's events are in the queue already
        return not self._stopped

    def _next_batch(self) -> list[EventRow]:
        """Removes up to ``BATCH`` rows from the front of the queue; none when the store is closed."""
        with self._changed:
            size = 0 if self._stopped else min(BATCH, len(self._queue))
            return [self._queue.popleft() for _ in range(size)]

    def _insert(self, batch: list[EventRow]) -> None:
        with self._engine.begin() as connection:
            self._add(connection, batch)

    def _add(self, connection: Connection, batch: list[EventRow]) -> None:
        if batch:
            lock_event_order(connection)
            connection.execute(self._inserting, batch)

    @cached_property
    def _inserting(self) -> Insert:
        """The insert statement, which skips stored ids."""
        if self._engine.dialect.name == "sqlite":
            from sqlalchemy.dialects.sqlite import insert
        else:
            from sqlalchemy.dialects.postgresql import insert  # type: ignore[assignment]
        return insert(self._table).on_conflict_do_nothing(index_elements=["id"])

    def _finish(self, rows: int) -> None:
        with self._changed:
            self._done += rows
            self._dropping = self._dropping and bool(self._queue)
            self._changed.notify_all()

    def _put_back(self, batch: list[EventRow]) -> None:
        with self._changed:
            self._queue.extendleft(reversed(batch))
            report = self._drop_overflow()
            self._changed.notify_all()
        if report:
            _log.error("the queue of events for %s is full: the oldest are dropped", self._where)

    def _drop_overflow(self) -> bool:
        """Drops the oldest rows beyond ``capacity``. True: these are the first of a burst. Call with the lock held."""
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
            raise backend_error(f"the event store {self._where} is closed", "open a new one", False)

    def _open(self, address: URL) -> Engine:
        from sqlalchemy.exc import OperationalError, SQLAlchemyError

        engine = None
        try:
            if address.database and address.drivername == "sqlite":
                create_file(Path(address.database))
            engine = create_lazy_engine(address)
            migrations.upgrade(engine)
            if address.database and address.drivername == "sqlite":
                refuse_replaced_file(engine, Path(address.database))
        except (OSError, sqlite3.Error, SQLAlchemyError, migrations.MigrationError) as error:
            if engine:
                engine.dispose()
            what = f"cannot open the event store {self._where}: {first_line(error)}"
            raise backend_error(what, advice(self._where, error), isinstance(error, OperationalError)) from error
        return engine
