"""Connects to SQLite or Postgres by URL, and words connection errors."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from casemate.backends.event_stores.sql.migrations import MigrationError
from casemate.errors import BackendError, ConfigError, needs
from casemate.runtime.sqlite import enable_wal, file_identity

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine

BUSY_S = 5  # timeout of one attempt: for a lock on a SQLite file, or the answer of a Postgres server
DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}


def sqlite_url(path: Path) -> URL:
    """SQLAlchemy URL of a SQLite file. Special characters in the path are escaped."""
    from sqlalchemy.engine import URL

    return URL.create("sqlite", database=str(path))


def parse_url(url: str) -> URL:
    """Parses a URL and sets the driver.

    Raises:
        ConfigError: If it is malformed. The message quotes nothing of it: a password may be anywhere.
    """
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
        raise ConfigError("the event store's url has more than one '@'; write %40 for @ in the password")
    if dialect == "sqlite" and (parsed.database or ":memory:").startswith((":memory:", "file:")):
        raise ConfigError("the event store's url must name a file: sqlite:///relative/path or sqlite:////absolute/path")
    return parsed.set(drivername=DRIVERS[dialect])


def create_file(path: Path) -> None:
    """Creates the SQLite file in WAL mode, readable by its owner only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    with closing(sqlite3.connect(path, timeout=BUSY_S)) as connection:
        enable_wal(connection, BUSY_S)


def create_lazy_engine(url: URL) -> Engine:
    """An engine that connects on first use."""
    from sqlalchemy import create_engine, event

    lite = url.drivername == "sqlite"
    with needs("casemate[postgres]"):
        engine = create_engine(
            url,
            connect_args={"timeout" if lite else "connect_timeout": BUSY_S},
            hide_parameters=True,  # no event body in an error
            json_serializer=str,  # bodies are JSON already
            pool_pre_ping=not lite,
        )
    if lite:
        # In WAL mode, NORMAL would lose the last commits in a power failure.
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=FULL").close())
    return engine


def refuse_replaced_file(engine: Engine, path: Path) -> None:
    """Lets every later transaction fail while the SQLite file is not at its path. Its connections would still work.

    Raises, in a transaction:
        BackendError: If the file was renamed, deleted or replaced.
    """
    from sqlalchemy import event

    path = Path(os.path.abspath(path))
    opened = file_identity(path)

    @event.listens_for(engine, "begin")
    def require_same_file(_: Connection) -> None:
        if file_identity(path) != opened:
            raise backend_error(
                f"the event store {path} was renamed, deleted or replaced while it was open",
                "put it back, or restart this process",
                True,
            )


def lock_event_order(connection: Connection) -> None:
    """Blocks other writers of events until the transaction ends, so sequence numbers become visible in order.

    SQLite has one writer anyway. Postgres assigns numbers at insert and shows rows at commit. The lock timeout is
    ``BUSY_S``, because the holder may be frozen. One statement: one round trip.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(
            f"SELECT set_config('lock_timeout', '{BUSY_S}s', true), pg_advisory_xact_lock(7307204)"
        )


def first_line(error: Exception) -> str:
    """The first line of the driver's message: later lines may quote a row."""
    return (str(getattr(error, "orig", None) or error) or type(error).__name__).splitlines()[0]


def advice(where: str, error: Exception) -> str:
    """What the operator can do. A new file loses events and budgets, so only a damaged one may be moved away."""
    if isinstance(error, MigrationError):
        return "upgrade Casemate to the version that wrote it"
    if not where.startswith("sqlite"):
        return "check that the server runs and that the user may log in and create tables"
    code = getattr(getattr(error, "orig", None) or error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return "the file is damaged or no event store; it can be moved away, and a new one is created"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "another process holds its lock; end that process, or try again"
    return "check that the disk works and has room, and that folder and file can be written"


def backend_error(problem: str, advice: str, retryable: bool) -> BackendError:
    """The error of the event store."""
    return BackendError(f"{problem}; {advice}", backend="sql", retryable=retryable)
