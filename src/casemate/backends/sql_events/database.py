"""How a database is reached, SQLite or Postgres by URL, and what is said when it cannot be."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from casemate.errors import BackendError, ConfigError, needs
from casemate.sqlite_wal import write_ahead

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine

BUSY_S = 5
"""How long one attempt waits for a locked SQLite file, or for a Postgres server to answer."""
DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}


def file_address(path: Path) -> URL:
    """The URL of a SQLite file, whatever characters its path has."""
    from sqlalchemy.engine import URL

    return URL.create("sqlite", database=str(path))


def address_of(url: str) -> URL:
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


def make_file(path: Path) -> None:
    """Makes the file, for the owner only, and puts it in WAL mode, so that readers and the writer do not wait."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    with closing(sqlite3.connect(path, timeout=BUSY_S)) as connection:
        write_ahead(connection, BUSY_S)


def engine_of(address: URL) -> Engine:
    """Opens nothing yet."""
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


def in_order(connection: Connection) -> None:
    """Until the transaction ends nobody else adds events, so that none is seen after one of a higher number.

    SQLite has one writer anyway. Postgres gives numbers when rows are written, and shows them when they are committed.
    Nobody waits for his turn longer than ``BUSY_S``: whose it is may be frozen. One statement, for one trip.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(
            f"SELECT set_config('lock_timeout', '{BUSY_S}s', true), pg_advisory_xact_lock(7307204)"
        )


def first_line(error: Exception) -> str:
    """The driver's own message; what follows the first line may quote a row."""
    return (str(getattr(error, "orig", None) or error) or type(error).__name__).splitlines()[0]


def advice(where: str) -> str:
    """What an operator can do."""
    if where.startswith("sqlite"):
        return (
            "see that the disk has room and that folder and file can be written; a file that is damaged or no event "
            "store can be moved away, and a new one is begun"
        )
    return "see that the server runs, and that the user may log in and create tables"


def failure(what: str, advice: str, retryable: bool) -> BackendError:
    """What is raised."""
    return BackendError(f"{what}; {advice}", backend="sql_events", retryable=retryable)
