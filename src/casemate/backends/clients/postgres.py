"""Postgres client: a connection pool, transactions with timeouts, and errors translated for operators."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from casemate.errors import BackendError, ConfigError, DataError, needs
from casemate.types import Secret

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg_pool import ConnectionPool

Request = TypeVar("Request")
Readiness = TypeVar("Readiness")
Result = TypeVar("Result")

STATE_ADVICE = {  # by SQLSTATE
    "42501": "the role lacks a privilege: grant it the schema and its tables, or connect as their owner",
    "53100": "the server's disk is full: this step was rolled back, earlier ones are kept; free space and run again",
    "57014": "a step took longer than timeout_s, or waited that long for another writer",
}
PERMANENT = re.compile(
    "authentication failed|no password|pg_hba|does not exist|denied|certificate|does not support SSL"
)
"""Errors that a retry does not cure."""
STREAM_TIMEOUTS = 60  # timeout of a stream of rows in multiples of ``timeout_s``: the server may sort before it answers
ABSENT_STATES = {"3F000", "42703", "42P01", "42P07"}  # no such schema, column or table; or a table that exists already


class PostgresServer:
    """A connection pool for one database with pgvector; for its options, see ``PgvectorIndex``.

    For errors: the plug-in's name (``backend``), what a missing table or column means (``if_absent``), and the part of
    the database (``place``; empty: all of it).
    """

    def __init__(
        self, backend: str, url: Secret, connections: int, timeout_s: float, if_absent: str, place: str = ""
    ) -> None:
        if connections < 1 or not timeout_s > 0:
            raise ConfigError(f"{backend}: connections={connections}, timeout_s={timeout_s}; both must be above 0")
        self._backend, self._url, self._connections, self._timeout_s = backend, Secret(url), connections, timeout_s
        where, self._password = _parse_url(backend, self._url)
        self.where = f"{where}, {place}" if place else where
        self._if_absent, self._lock = if_absent, threading.Lock()
        self._pool: ConnectionPool[Any] | None = None

    def open(self) -> None:
        """Opens the pool, after one connection of its own whose errors are precise. Idempotent.

        Raises:
            BackendError: If the server cannot be reached, or lacks UTF8 or pgvector.
        """
        with needs("casemate[postgres]"):
            from pgvector.psycopg import register_vector
            from psycopg_pool import ConnectionPool
        connection_class, options = _connection_class(self._timeout_s + 1), self._options
        with self._lock, self.translate_errors():
            if self._pool is not None:
                return
            with connection_class.connect(self._url, **options) as db:
                self._require_utf8_and_pgvector(db)
            logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # it logs each attempt; the outcome is raised
            self._pool = ConnectionPool(
                self._url, connection_class=connection_class, kwargs=options, configure=register_vector,
                min_size=1, max_size=self._connections, open=True, timeout=self._timeout_s,
                reconnect_timeout=self._timeout_s,
            )  # fmt: skip

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "autocommit": True,
            "prepare_threshold": None,  # no stale plan after a change of dimension; works behind transaction poolers
            "connect_timeout": max(2, round(self._timeout_s)),
            "fallback_application_name": "casemate",
        }

    def close(self) -> None:
        """Closes all connections."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _require_utf8_and_pgvector(self, db: Connection[Any]) -> None:
        if db.execute("SELECT current_setting('server_encoding') = 'UTF8'").fetchone() != (True,):
            raise self.error("the database is not in UTF8; create one with ENCODING 'UTF8'")
        if db.execute("SELECT to_regtype('vector')").fetchone() == (None,):
            raise self.error("pgvector is missing; as superuser, in this database: CREATE EXTENSION vector")

    @contextmanager
    def transaction(self, mode: str) -> Iterator[Connection[Any]]:
        """A transaction on a pooled connection; ``mode`` has the options of ``BEGIN``."""
        pool = self._opened()
        with self.translate_errors():
            limit = max(1, round(self._timeout_s * 1000))
            db = self._begin(pool, f"BEGIN {mode}; SET LOCAL statement_timeout = {limit}")
            try:
                with db:
                    yield db
            finally:
                pool.putconn(db)

    @contextmanager
    def stream(self) -> Iterator[Connection[Any]]:
        """A read-only transaction on one snapshot and a connection of its own, for large results.

        Steps have no time limit. The connection is closed once the server is silent for ``STREAM_TIMEOUTS`` times
        ``timeout_s``.
        """
        self._opened()
        with self.translate_errors():
            connection_class = _connection_class(STREAM_TIMEOUTS * self._timeout_s)
            with connection_class.connect(self._url, **self._options) as db:
                db.execute("SET statement_timeout = 0; SET cursor_tuple_fraction = 1")  # plan for all rows
                db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                yield db

    def _opened(self) -> ConnectionPool[Any]:
        if self._pool is None:
            raise self.error("the connection pool is not open")
        return self._pool

    def _begin(self, pool: ConnectionPool[Any], statement: str, *, retry: bool = True) -> Connection[Any]:
        """A connection in a transaction. If a pooled one is broken, all are checked, and the statement is run again."""
        db: Connection[Any] = pool.getconn()
        try:
            db.execute(statement)
        except BaseException:
            pool.putconn(db)
            if not (retry and db.broken):  # a connection closed by the silence timeout is not broken
                raise
            pool.check()
            return self._begin(pool, statement, retry=False)
        return db

    def error(self, problem: str, *, retryable: bool = False) -> BackendError:
        """A ``BackendError`` that names the location."""
        return BackendError(f"{self.where}: {problem}", backend=self._backend, retryable=retryable)

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translates errors of the server and the driver to ``BackendError`` or ``DataError``, without the password."""
        import psycopg
        from psycopg_pool import PoolTimeout

        try:
            yield
        except PoolTimeout as error:
            problem = f"no connection within {self._timeout_s:g} s: check that the server runs, or raise connections"
            raise self.error(problem, retryable=True) from error
        except psycopg.Error as error:
            message = " ".join(str(error).replace(self._password or "\0", "***").split())
            state = error.sqlstate or ""
            if state in ABSENT_STATES:
                raise DataError(f"{self.where} {self._if_absent} ({message})") from error
            if isinstance(error, psycopg.DataError):
                raise DataError(f"{self.where} rejected a value: {message}") from error
            retryable = isinstance(error, psycopg.OperationalError) and not PERMANENT.search(message)
            raise self.error(STATE_ADVICE.get(state, message), retryable=retryable) from error


def _parse_url(backend: str, url: str) -> tuple[str, str]:
    """Host and database, for messages, and the password. An error quotes nothing: the password may be anywhere."""
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


def _connection_class(seconds: float) -> Any:
    """A connection class that closes the connection when the server is silent for this long: it may be frozen."""
    import psycopg

    class TimeoutConnection(psycopg.Connection[Any]):
        def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
            try:
                return super().wait(_within(gen, seconds), *args, **options)
            except TimeoutError as error:
                self.close()
                raise psycopg.OperationalError(f"the server is silent: {error}") from None

    return TimeoutConnection


def _within(steps: Generator[Request, Readiness, Result], seconds: float) -> Generator[Request, Readiness, Result]:
    """Drives a psycopg protocol generator; "not ready" (false values) for too long raises ``TimeoutError``."""
    heard = monotonic()
    try:
        request = next(steps)
        while True:
            ready = yield request
            if ready:
                heard = monotonic()
            elif monotonic() - heard > seconds:
                raise TimeoutError(f"no answer for {seconds:g} seconds")
            request = steps.send(ready)
    except StopIteration as end:
        result: Result = end.value
        return result
