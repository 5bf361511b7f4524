"""A Postgres server as a patient client sees it: a pool, whole transactions, and complaints in the operator's words."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from casemate import indexing
from casemate.errors import BackendError, ConfigError, DataError, needs
from casemate.types import Secret

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg_pool import ConnectionPool

STATES = {  # what an SQLSTATE means to the operator
    "42501": "the role may not do this: grant it the schema and its tables, or let their owner do it",
    "53100": "the server's disk is full: nothing of this step was kept, earlier steps are; free space and run again",
    "57014": "a step took longer than timeout_s, or waited so long for another writer",
}
HOPELESS = re.compile("authentication failed|no password|pg_hba|does not exist|denied|certificate|does not support SSL")
"""What a server says that it will say the next time, too."""
STREAM = 60
"""How many times as long as usual a stream of rows waits for the server."""
ABSENT = {"3F000", "42703", "42P01", "42P07"}
"""No such schema, column, table; or a table that is there already."""


class Server:
    """Connections to one database with pgvector, and its transactions.

    Args:
        backend: Name of the plug-in, for errors.
        url: ``postgresql://user:password@host:port/database``.
        connections: At once, at most.
        timeout_s: For a connection, or one step on the server.
        about: What is wrong when a table or column is absent.
        place: What of the database is meant, for messages. Empty: the database is enough.
    """

    def __init__(
        self, backend: str, url: Secret, connections: int, timeout_s: float, about: str, place: str = ""
    ) -> None:
        if connections < 1 or not timeout_s > 0:
            raise ConfigError(f"{backend}: connections={connections}, timeout_s={timeout_s}; both must be > 0")
        self._backend, self._url, self._connections, self._timeout_s = backend, Secret(url), connections, timeout_s
        where, self._password = address(backend, self._url)
        self.where = f"{where}, {place}" if place else where
        self._about, self._lock = about, threading.Lock()
        self._pool: ConnectionPool[Any] | None = None

    def open(self) -> None:
        """Makes the pool, after one connection of its own that says plainly what is wrong.

        Raises:
            BackendError: If the server cannot be reached, or lacks what we need.
        """
        with needs("casemate[postgres]"):
            from pgvector.psycopg import register_vector
            from psycopg_pool import ConnectionPool
        patient, options = _patient(self._timeout_s + 1), self._options
        with self._lock, self.explained():
            if self._pool is not None:
                return
            with patient.connect(self._url, **options) as db:
                self._require_able(db)
            logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # it tells of each try; we say what comes of them
            self._pool = ConnectionPool(
                self._url, connection_class=patient, kwargs=options, configure=register_vector, min_size=1, open=True,
                max_size=self._connections, timeout=self._timeout_s, reconnect_timeout=self._timeout_s,
            )  # fmt: skip

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "autocommit": True,
            "prepare_threshold": None,  # no plan outlives another dimension, and poolers of transactions may be used
            "connect_timeout": max(2, round(self._timeout_s)),
            "fallback_application_name": "casemate",
        }

    def close(self) -> None:
        """Lets go of all connections."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _require_able(self, db: Connection[Any]) -> None:
        if db.execute("SELECT current_setting('server_encoding') = 'UTF8'").fetchone() != (True,):
            raise self.failure("the database is not in UTF8; make one with ENCODING 'UTF8'")
        if db.execute("SELECT to_regtype('vector')").fetchone() == (None,):
            raise self.failure("pgvector is missing; as superuser, in this database: CREATE EXTENSION vector")

    @contextmanager
    def session(self, mode: str) -> Iterator[Connection[Any]]:
        """A transaction on a connection of the pool, as after ``BEGIN``: kept whole, or not at all."""
        pool = self._opened()
        with self.explained():
            limit = max(1, round(self._timeout_s * 1000))
            db = self._begin(pool, f"BEGIN {mode}; SET LOCAL statement_timeout = {limit}")
            try:
                with db:
                    yield db
            finally:
                pool.putconn(db)

    @contextmanager
    def stream(self) -> Iterator[Connection[Any]]:
        """A read-only transaction on one snapshot and a connection of its own, for rows without end.

        A step takes as long as it takes; a server that is silent for ``STREAM`` times ``timeout_s`` is given up: it may
        be sorting.
        """
        self._opened()
        with self.explained():
            patient = _patient(STREAM * self._timeout_s)
            with patient.connect(self._url, **self._options) as db:
                db.execute("SET statement_timeout = 0; SET cursor_tuple_fraction = 1")  # all rows are wanted
                db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                yield db

    def _opened(self) -> ConnectionPool[Any]:
        if self._pool is None:
            raise self.failure("the index is not open")
        return self._pool

    def _begin(self, pool: ConnectionPool[Any], statement: str, *, again: bool = True) -> Connection[Any]:
        """A connection that has begun; where one has died in the pool, so have others, and all are replaced."""
        db: Connection[Any] = pool.getconn()
        try:
            db.execute(statement)
        except BaseException:
            pool.putconn(db)
            if not (again and db.broken):  # one that was given up for its silence is closed, not broken
                raise
            pool.check()
            return self._begin(pool, statement, again=False)
        return db

    def failure(self, say: str, *, retryable: bool = False) -> BackendError:
        """What to raise, with the place."""
        return BackendError(f"{self.where}: {say}", backend=self._backend, retryable=retryable)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Says in the operator's words what the server or the driver complains about."""
        import psycopg
        from psycopg_pool import PoolTimeout

        try:
            yield
        except PoolTimeout as error:
            say = f"no connection within {self._timeout_s:g} s: see that the server runs, or raise connections"
            raise self.failure(say, retryable=True) from error
        except psycopg.Error as error:
            said = " ".join(str(error).replace(self._password or "\0", "***").split())
            state = error.sqlstate or ""
            if state in ABSENT:
                raise DataError(f"{self.where} {self._about} ({said})") from error
            if isinstance(error, psycopg.DataError):
                raise DataError(f"{self.where} refuses a value: {said}") from error
            retryable = isinstance(error, psycopg.OperationalError) and not HOPELESS.search(said)
            raise self.failure(STATES.get(state, said), retryable=retryable) from error


def address(backend: str, url: str) -> tuple[str, str]:
    """Host and database, and the password. No message repeats what may be a part of a password, written wrongly.

    Raises:
        ConfigError: If the address is malformed.
    """
    with needs("casemate[postgres]"):
        import psycopg.conninfo
    try:
        parts = {name: str(value) for name, value in psycopg.conninfo.conninfo_to_dict(url).items()}
    except psycopg.Error:
        parts = {"port": "none"}
    host, port, database = (parts.get(name, "") for name in ("host", "port", "dbname"))
    if "@" in host + database or not re.fullmatch("[0-9,]*", port):
        form = "postgresql://user:password@host:port/database; in a password, @ is %40, / is %2F, : is %3A, % is %25"
        raise ConfigError(f"{backend}.url is not of the form {form}")
    return f"{host or 'localhost'}{port and ':' + port}/{database}", parts.get("password", "")


def _patient(seconds: float) -> Any:
    """The class of connections that give a server up which says nothing for so long: it may be frozen."""
    import psycopg

    class Patient(psycopg.Connection[Any]):
        def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
            try:
                return super().wait(indexing.within(gen, seconds), *args, **options)
            except TimeoutError as error:
                self.close()
                raise psycopg.OperationalError(f"the server is silent: {error}") from None

    return Patient
