"""Databases of a real Postgres server, and statements in them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager


def sql(url: str, *statements: str) -> list:
    """Executes statements; returns the rows of the last one."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as db:
        done = [db.execute(statement) for statement in statements]
        return done[-1].fetchall() if done[-1].description else []


@contextmanager
def database(server: str, *statements: str) -> Iterator[str]:
    """The URL of a new database, in which the statements were executed. It is dropped at the end."""
    name = f"t{uuid.uuid4().hex}"
    url = server.replace("/postgres?", f"/{name}?")
    sql(server, f"CREATE DATABASE {name}")
    try:
        if statements:
            sql(url, *statements)
        yield url
    finally:
        sql(server, f"DROP DATABASE {name} WITH (FORCE)")
