"""Where our tables beside a collection are: a SQLite file, or a schema in the collection's own database.

The statements are written once: ``@name`` is a table of ours, ``?`` a value.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from casemate.errors import BackendError, DataError
from casemate.sqlite_wal import BUSY_S, write_ahead

APPLICATION_ID = 0x43534D41  # "CSMA" in the file's header
FORMAT = "casemate attached 1"
MEMORY = ":memory:"
TABLES = """
CREATE TABLE @meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE @tenant (
    epoch BIGINT NOT NULL, name TEXT NOT NULL, revision BIGINT NOT NULL, n BIGINT NOT NULL, mean BLOB NOT NULL,
    scatter BLOB NOT NULL, PRIMARY KEY (epoch, name)
);
CREATE TABLE @known (
    age SERIAL, tenant TEXT NOT NULL, id TEXT NOT NULL, source TEXT NOT NULL, digest TEXT NOT NULL,
    ours BIGINT NOT NULL, sketch BLOB NOT NULL,
    epoch0 BIGINT NOT NULL, mark0 BIGINT NOT NULL, epoch1 BIGINT NOT NULL, mark1 BIGINT NOT NULL, UNIQUE (tenant, id)
);
CREATE TABLE @twin (
    epoch BIGINT NOT NULL, age BIGINT NOT NULL, source TEXT NOT NULL, PRIMARY KEY (epoch, age)
);
CREATE TABLE @pending (seq SERIAL, tenant TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE @touched (
    seq SERIAL, tenant TEXT NOT NULL, id TEXT NOT NULL, mark BIGINT NOT NULL, vector BLOB NOT NULL,
    stays BIGINT NOT NULL
);
INSERT INTO @meta VALUES ('format', 'casemate attached 1')
"""

INDEXES = (
    "CREATE INDEX IF NOT EXISTS known_source ON @known (tenant, source)",
    "CREATE INDEX IF NOT EXISTS known_age ON @known (tenant, age)",
)
"""Made when the first scan is through: kept up meanwhile, they would cost a tenth of it."""


class Tables(Protocol):
    """Our tables, inside one transaction.

    Attributes:
        within: The collection's own transaction, if it is the same one; else None.
    """

    within: Any

    def all(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows that a statement gives."""
        ...

    def run(self, statement: str, values: Sequence[Any] = ()) -> int:
        """Carries a statement out; how many rows it touched."""
        ...

    def put_rows(self, rows: Iterable[tuple[Any, ...]], epoch: int) -> None:
        """Puts rows (tenant, id, source, sketch, mark) in, in place of those of the same tenant and id.

        What was added by us keeps its source and digest, and every row its age.
        """
        ...


class Place(Protocol):
    """Where our tables are."""

    name: str

    def open(self) -> None:
        """Makes the tables, or verifies them."""
        ...

    def session(self, write: bool) -> AbstractContextManager[Tables]:
        """One transaction; writers wait for one another."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """For as long as the block lasts, no other process changes the collection by way of us."""
        ...

    def close(self) -> None:
        """Lets go of the file."""
        ...


UPSERT = (
    "INSERT INTO @known AS k (tenant, id, source, digest, ours, sketch, epoch{new}, mark{new}, epoch{old}, mark{old}) "
    "{rows} ON CONFLICT (tenant, id) DO UPDATE SET epoch{new} = excluded.epoch{new}, mark{new} = excluded.mark{new}, "
    "sketch = excluded.sketch, source = CASE WHEN k.ours = 1 THEN k.source ELSE excluded.source END"
)
"""Puts rows in as an epoch's scan sees them, beside what the epoch before knows of them: two take turns."""


class _SqliteTables:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.within = None

    def all(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._db.execute(statement.replace("@", ""), values).fetchall()

    def run(self, statement: str, values: Sequence[Any] = ()) -> int:
        return self._db.execute(statement.replace("@", ""), values).rowcount

    def put_rows(self, rows: Iterable[tuple[Any, ...]], epoch: int) -> None:
        values = f"VALUES (?, ?, ?, '', 0, ?, {int(epoch)}, ?, 0, 0)"
        statement = UPSERT.format(rows=values, new=epoch % 2, old=1 - epoch % 2).replace("@", "")
        self._db.executemany(statement, rows)


class FilePlace:
    """A SQLite file, readable by its owner only; ``:memory:``: nowhere, gone when the process ends."""

    def __init__(self, path: Path) -> None:
        self.name, self._path = str(path), path
        self._memory = path.name == MEMORY
        self._lock, self._turn = threading.RLock(), threading.RLock()
        self._db: sqlite3.Connection | None = None

    def open(self) -> None:
        """See ``Place.open``."""
        with self._lock, self._explained():
            if self._db is None:
                self._db = self._connect()
        with self.session(write=True) as tables:
            self._create_or_verify(tables)

    def _connect(self) -> sqlite3.Connection:
        if not self._memory:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._path.exists():
                os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        where = MEMORY if self._memory else self._path
        db = sqlite3.connect(where, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            found = db.execute("PRAGMA application_id").fetchone()[0]
            if found not in {0, APPLICATION_ID} or (not found and db.execute("SELECT 1 FROM sqlite_master").fetchone()):
                raise DataError(f"{self._path} is an SQLite file of another program; choose another path")
            if not self._memory:
                write_ahead(db)
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA secure_delete = ON")
            return db
        except BaseException:
            db.close()
            raise

    def _create_or_verify(self, tables: Tables) -> None:
        if not tables.all("SELECT 1 FROM sqlite_master"):
            text = TABLES.replace("SERIAL", "INTEGER PRIMARY KEY AUTOINCREMENT")
            for statement in text.split(";\n"):
                tables.run(statement)
            tables.run(f"PRAGMA application_id = {APPLICATION_ID}")
        _verify(tables, self.name)

    @contextmanager
    def session(self, write: bool) -> Iterator[Tables]:
        """See ``Place.session``."""
        with self._lock, self._explained():
            if self._db is None:
                raise BackendError(f"{self.name} is not open", backend="attached", retryable=False)
            self._db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                yield _SqliteTables(self._db)
                self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def alone(self) -> Iterator[None]:
        """See ``Place.alone``. The system lets go of the lock when its holder dies, however it dies."""
        with self._turn:
            if self._memory:
                yield
                return
            import fcntl

            with open(f"{self._path}-writer", "a", opener=_private) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield

    def close(self) -> None:
        """See ``Place.close``."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            what = f"{self.name}: {error}: nothing of this step was kept; see to the disk and try again"
            raise BackendError(what, backend="attached", retryable=True) from error
        except sqlite3.DatabaseError as error:
            what = f"{self.name} is damaged or none of ours ({error}): delete it and run 'casemate attach'"
            raise DataError(what) from error
        except OSError as error:
            what = f"cannot use {self.name}: {error.strerror or error}"
            raise BackendError(what, backend="attached", retryable=False) from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _verify(tables: Tables, name: str) -> None:
    held = dict(tables.all("SELECT name, value FROM @meta"))
    if held.get("format") != FORMAT:
        raise DataError(f"{name} has format {held.get('format')!r}, this version reads {FORMAT!r}; attach anew")


class _SchemaTables:
    """In Postgres, by a connection as psycopg has it."""

    def __init__(self, db: Any, schema: str) -> None:
        self.within, self._s = db, f'"{schema}".'

    def _sql(self, statement: str) -> str:
        return statement.replace("@", self._s).replace("?", "%s")

    def all(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self.within.execute(self._sql(statement), values or None).fetchall()
        return rows

    def run(self, statement: str, values: Sequence[Any] = ()) -> int:
        return int(self.within.execute(self._sql(statement), values or None).rowcount)

    def put_rows(self, rows: Iterable[tuple[Any, ...]], epoch: int) -> None:
        self.run(
            "CREATE TEMPORARY TABLE IF NOT EXISTS casemate_rows "
            "(tenant text, id text, source text, sketch bytea, mark bigint) ON COMMIT DROP"
        )
        with self.within.cursor() as cursor:
            with cursor.copy("COPY casemate_rows FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)
        chosen = f"SELECT tenant, id, source, '', 0, sketch, {int(epoch)}, mark, 0, 0 FROM pg_temp.casemate_rows"
        self.run(UPSERT.format(rows=chosen, new=epoch % 2, old=1 - epoch % 2))
        self.run("DROP TABLE pg_temp.casemate_rows")


class SchemaPlace:
    """A schema of our own in the collection's database.

    Args:
        schema: Its name; it is made when missing.
        transaction: Of the collection.
        where: The collection's name, for messages.
    """

    def __init__(self, schema: str, transaction: Callable[[bool], AbstractContextManager[Any]], where: str) -> None:
        self.name, self._schema, self._transaction = f"{where}, schema {schema}", schema, transaction
        self._turn, self._open = threading.RLock(), False

    def open(self) -> None:
        """See ``Place.open``."""
        with self._transaction(True) as db:
            tables = _SchemaTables(db, self._schema)
            tables.run("SELECT pg_advisory_xact_lock(hashtext(?))", (f"casemate.{self._schema}",))
            if tables.all("SELECT to_regclass(?)", (f'"{self._schema}".meta',)) == [(None,)]:
                if tables.all("SELECT 1 FROM pg_tables WHERE schemaname = ?", (self._schema,)):
                    raise DataError(f"{self.name} holds tables of another program; choose another schema")
                tables.run(f'CREATE SCHEMA IF NOT EXISTS "{self._schema}"')
                text = TABLES.replace("SERIAL", "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY")
                for statement in text.replace("BLOB", "bytea").split(";\n"):
                    tables.run(statement)
            _verify(tables, self.name)
        self._open = True

    @contextmanager
    def session(self, write: bool) -> Iterator[Tables]:
        """See ``Place.session``."""
        if not self._open:
            raise BackendError(f"{self.name} is not open", backend="attached", retryable=False)
        with self._transaction(write) as db:
            tables = _SchemaTables(db, self._schema)
            tables.run(f"LOCK TABLE @meta IN {'EXCLUSIVE' if write else 'ACCESS SHARE'} MODE")
            yield tables

    @contextmanager
    def alone(self) -> Iterator[None]:
        """See ``Place.alone``. Every write is one transaction that holds the lock of ``session``."""
        with self._turn:
            yield

    def close(self) -> None:
        """See ``Place.close``."""
        self._open = False
