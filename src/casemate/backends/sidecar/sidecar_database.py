"""The sidecar database: a SQLite file, or a schema in the collection's own Postgres database.

Statements are written once for both: ``@name`` is a table, ``?`` a parameter.
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
from casemate.runtime.file_lock import lock_file
from casemate.runtime.sqlite import BUSY_S, enable_wal

APPLICATION_ID = 0x43534D41  # "CSMA" in the file's header
FORMAT = "casemate attached 1"
MEMORY = ":memory:"
TABLES = """
CREATE TABLE @meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE @tenant (
    epoch BIGINT NOT NULL, name TEXT NOT NULL, revision BIGINT NOT NULL, n BIGINT NOT NULL, mean BLOB NOT NULL,
    scatter BLOB NOT NULL, PRIMARY KEY (epoch, name)
);
CREATE TABLE @inventory (
    age SERIAL, tenant TEXT NOT NULL, id TEXT NOT NULL, source TEXT NOT NULL, digest TEXT NOT NULL,
    ours BIGINT NOT NULL, sketch BLOB NOT NULL, epoch0 BIGINT NOT NULL, checksum0 BIGINT NOT NULL,
    epoch1 BIGINT NOT NULL, checksum1 BIGINT NOT NULL, UNIQUE (tenant, id)
);
CREATE TABLE @near_duplicate (
    epoch BIGINT NOT NULL, age BIGINT NOT NULL, source TEXT NOT NULL, PRIMARY KEY (epoch, age)
);
CREATE TABLE @pending_change (seq SERIAL, tenant TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE @changed_during_scan (
    seq SERIAL, tenant TEXT NOT NULL, id TEXT NOT NULL, checksum BIGINT NOT NULL, vector BLOB NOT NULL,
    present BIGINT NOT NULL
);
INSERT INTO @meta VALUES ('format', 'casemate attached 1')
"""

INDEXES = (
    "CREATE INDEX IF NOT EXISTS inventory_source ON @inventory (tenant, source)",
    "CREATE INDEX IF NOT EXISTS inventory_age ON @inventory (tenant, age)",
)
"""Created after the first scan: maintaining them during the scan costs a tenth of its time."""


class SidecarTables(Protocol):
    """The tables, within one transaction; ``within`` is that of the collection if it is the same one."""

    within: Any

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The result rows of a statement."""

    def execute(self, statement: str, values: Sequence[Any] = ()) -> int:
        """Executes a statement. Returns the number of affected rows."""

    def upsert_rows(self, rows: Iterable[tuple[Any, ...]], epoch: int) -> None:
        """Inserts or updates rows (tenant, id, source, sketch, checksum) as an epoch's scan sees them.

        Existing rows keep their age; rows added through Casemate also keep their source and digest.
        """


class SidecarDatabase(Protocol):
    """A database with the sidecar tables."""

    name: str

    def open(self) -> None:
        """Creates or verifies the tables."""

    def transaction(self, write: bool) -> AbstractContextManager[SidecarTables]:
        """A transaction. Writers exclude one another."""

    def exclusive_writer(self) -> AbstractContextManager[None]:
        """Excludes changes of the collection through Casemate by other processes during the block."""

    def close(self) -> None:
        """Closes the database."""


UPSERT = (
    "INSERT INTO @inventory AS k (tenant, id, source, digest, ours, sketch, epoch{new}, checksum{new}, "
    "epoch{old}, checksum{old}) "
    "{rows} ON CONFLICT (tenant, id) DO UPDATE SET epoch{new} = excluded.epoch{new}, "
    "checksum{new} = excluded.checksum{new}, "
    "sketch = excluded.sketch, source = CASE WHEN k.ours = 1 THEN k.source ELSE excluded.source END"
)
"""Upserts rows for an epoch. The columns of two epochs alternate, so the previous epoch stays readable."""


class _SqliteTables:
    """Tables in a SQLite file."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.within = None

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._db.execute(statement.replace("@", ""), values).fetchall()

    def execute(self, statement: str, values: Sequence[Any] = ()) -> int:
        return self._db.execute(statement.replace("@", ""), values).rowcount

    def upsert_rows(self, rows: Iterable[tuple[Any, ...]], epoch: int) -> None:
        values = f"VALUES (?, ?, ?, '', 0, ?, {int(epoch)}, ?, 0, 0)"
        statement = UPSERT.format(rows=values, new=epoch % 2, old=1 - epoch % 2).replace("@", "")
        self._db.executemany(statement, rows)


class SqliteSidecarDatabase(SidecarDatabase):
    """A SQLite file, readable by its owner only. ``:memory:`` lasts as long as the process."""

    def __init__(self, path: Path) -> None:
        self.name, self._path = str(path), path
        self._memory = path.name == MEMORY
        self._lock, self._writer = threading.RLock(), threading.RLock()
        self._db: sqlite3.Connection | None = None

    def open(self) -> None:
        with self._lock, self._translate_errors():
            if self._db is None:
                self._db = self._connect()
        with self.transaction(write=True) as tables:
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
                enable_wal(db)
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA secure_delete = ON")
            return db
        except BaseException:
            db.close()
            raise

    def _create_or_verify(self, tables: SidecarTables) -> None:
        if not tables.query("SELECT 1 FROM sqlite_master"):
            text = TABLES.replace("SERIAL", "INTEGER PRIMARY KEY AUTOINCREMENT")
            for statement in text.split(";\n"):
                tables.execute(statement)
            tables.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        _verify(tables, self.name)

    @contextmanager
    def transaction(self, write: bool) -> Iterator[SidecarTables]:
        with self._lock, self._translate_errors():
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
    def exclusive_writer(self) -> Iterator[None]:
        """See ``SidecarDatabase.exclusive_writer``. The operating system releases the lock when the process dies."""
        with self._writer:
            if self._memory:
                yield
                return
            with lock_file(Path(f"{self._path}-writer"), wait=True):
                yield

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            what = f"{self.name}: {error}: this step was rolled back; check the disk and try again"
            raise BackendError(what, backend="attached", retryable=True) from error
        except sqlite3.DatabaseError as error:
            what = f"{self.name} is damaged, or not a sidecar database ({error}): delete it and run 'casemate attach'"
            raise DataError(what) from error
        except OSError as error:
            what = f"cannot open {self.name}: {error.strerror or error}"
            raise BackendError(what, backend="attached", retryable=False) from error


def _verify(tables: SidecarTables, name: str) -> None:
    meta = dict(tables.query("SELECT name, value FROM @meta"))
    if meta.get("format") != FORMAT:
        raise DataError(
            f"{name} has format {meta.get('format')!r}; this version reads {FORMAT!r}: "
            "delete it and run 'casemate attach'"
        )


class _PostgresTables:
    """Tables in a Postgres schema, on a psycopg connection."""

    def __init__(self, db: Any, schema: str) -> None:
        self.within, self._prefix = db, f'"{schema}".'

    def _sql(self, statement: str) -> str:
        return statement.replace("@", self._prefix).replace("?", "%s")

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self.within.execute(self._sql(statement), values or None).fetchall()
        return rows

    def execute(self, statement: str, values: Sequence[Any] = ()) -> int:
        return int(self.within.execute(self._sql(statement), values or None).rowcount)

    def upsert_rows(self, rows: Iterable[tuple[Any, ...]], epoch: int) -> None:
        self.execute(
            "CREATE TEMPORARY TABLE IF NOT EXISTS casemate_rows "
            "(tenant text, id text, source text, sketch bytea, checksum bigint) ON COMMIT DROP"
        )
        with self.within.cursor() as cursor:
            with cursor.copy("COPY casemate_rows FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)
        chosen = f"SELECT tenant, id, source, '', 0, sketch, {int(epoch)}, checksum, 0, 0 FROM pg_temp.casemate_rows"
        self.execute(UPSERT.format(rows=chosen, new=epoch % 2, old=1 - epoch % 2))
        self.execute("DROP TABLE pg_temp.casemate_rows")


class PostgresSidecarDatabase(SidecarDatabase):
    """A schema, created if missing, in the Postgres database of a collection, which begins the transactions."""

    def __init__(self, schema: str, begin: Callable[[bool], AbstractContextManager[Any]], where: str) -> None:
        self.name, self._schema, self._begin = f"{where}, schema {schema}", schema, begin
        self._writer, self._open = threading.RLock(), False

    def open(self) -> None:
        with self._begin(True) as db:
            tables = _PostgresTables(db, self._schema)
            tables.execute("SELECT pg_advisory_xact_lock(hashtext(?))", (f"casemate.{self._schema}",))
            if tables.query("SELECT to_regclass(?)", (f'"{self._schema}".meta',)) == [(None,)]:
                if tables.query("SELECT 1 FROM pg_tables WHERE schemaname = ?", (self._schema,)):
                    raise DataError(f"{self.name} has tables of another program; choose another schema")
                tables.execute(f'CREATE SCHEMA IF NOT EXISTS "{self._schema}"')
                text = TABLES.replace("SERIAL", "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY")
                for statement in text.replace("BLOB", "bytea").split(";\n"):
                    tables.execute(statement)
            _verify(tables, self.name)
        self._open = True

    @contextmanager
    def transaction(self, write: bool) -> Iterator[SidecarTables]:
        if not self._open:
            raise BackendError(f"{self.name} is not open", backend="attached", retryable=False)
        with self._begin(write) as db:
            tables = _PostgresTables(db, self._schema)
            tables.execute(f"LOCK TABLE @meta IN {'EXCLUSIVE' if write else 'ACCESS SHARE'} MODE")
            yield tables

    @contextmanager
    def exclusive_writer(self) -> Iterator[None]:
        """See ``SidecarDatabase.exclusive_writer``. Every change is one transaction, which excludes other writers."""
        with self._writer:
            yield

    def close(self) -> None:
        self._open = False
