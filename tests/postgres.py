"""A real Postgres server, its databases, and SQL statements."""

from __future__ import annotations

import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def postgres_server() -> Iterator[Any]:
    """A server with pgvector. Without pgserver (for Python 3.11 and 3.12), the test is skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its import warns without XDG_RUNTIME_DIR
        pgserver = pytest.importorskip("pgserver")
    folder = tempfile.mkdtemp(prefix="casemate-pg-")  # a short path for the socket, readable by the server's own user
    try:
        running = pgserver.get_server(folder, cleanup_mode="stop")
        try:
            yield running
        finally:
            running.cleanup()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sql(url: str, *statements: str) -> list:
    """Executes statements; returns the rows of the last one."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as db:
        done = [db.execute(statement) for statement in statements]
        return done[-1].fetchall() if done[-1].description else []


@contextmanager
def database(server: str, *statements: str) -> Iterator[str]:
    """The URL of a new database in which the statements were executed. It is dropped at the end."""
    name = f"t{uuid.uuid4().hex}"
    url = server.replace("/postgres?", f"/{name}?")
    sql(server, f"CREATE DATABASE {name}")
    try:
        if statements:
            sql(url, *statements)
        yield url
    finally:
        sql(server, f"DROP DATABASE {name} WITH (FORCE)")
