"""Every index keeps the promises of ``Index``, and ``PgvectorIndex`` those it makes about its server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from casemate.backends.pgvector import PgvectorIndex
from casemate.backends.sqlite import SqliteIndex
from casemate.protocols import Index
from casemate.testing import INDEX_OBLIGATIONS, MakeIndex


@pytest.fixture(scope="session")
def vector_url(postgres_url: str) -> Iterator[str]:
    """A database of our own, with pgvector in it."""
    import psycopg

    name = f"t{uuid.uuid4().hex}"
    url = postgres_url.replace("/postgres?", f"/{name}?")
    with psycopg.connect(postgres_url, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
        with psycopg.connect(url) as db:
            db.execute("CREATE EXTENSION vector")
        yield url
        server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "sqlite-approximate", "pgvector"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[MakeIndex, bool]:
    place = ["first"]

    def make(fresh: bool) -> Index:
        if fresh:
            place[0] = f"i{uuid.uuid4().hex}"
        if request.param == "pgvector":
            return PgvectorIndex(request.getfixturevalue("vector_url"), schema=place[0])
        return SqliteIndex(tmp_path / place[0] / "index.db", 50 if "approximate" in request.param else 500_000)

    return make, request.param != "sqlite-approximate"


@pytest.mark.parametrize("obligation", INDEX_OBLIGATIONS, ids=lambda o: o.__name__.strip("_"))
def test_index(made, obligation) -> None:
    obligation(*made)
