"""An attached collection keeps the promises of ``Index``, as far as somebody else's store can."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from casemate.backends.attached import AttachedIndex
from casemate.backends.pgvector_table import PgvectorTable
from casemate.protocols import Index
from casemate.testing import INDEX_OBLIGATIONS, MakeIndex
from casemate.testing.reference import DIM
from casemate.types import Secret

DELIBERATELY_NOT = {
    "_refuses_another_embedder": "clear() forgets what is ours and leaves the owner's rows, so none may come",
}
BY_STEPS_NOT = {
    "_shows_one_moment": "in two stores: between the steps of a change rows and moments are one step apart",
}


@pytest.fixture(scope="session")
def attached_url(postgres_url: str) -> Iterator[str]:
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


@pytest.fixture(params=["schema", "file"])
def made(request: pytest.FixtureRequest, attached_url: str, tmp_path: Path) -> tuple[MakeIndex, bool, str]:
    import psycopg

    place = ["first"]

    def make(fresh: bool) -> Index:
        if fresh:
            place[0] = f"t{uuid.uuid4().hex}"
            with psycopg.connect(attached_url, autocommit=True) as db:
                db.execute(
                    f"CREATE TABLE {place[0]} (owner text, name text, body text, embedding vector({DIM}), doc text, "
                    "title text, about json, PRIMARY KEY (owner, name))"
                )
        table = PgvectorTable(
            Secret(attached_url), place[0], "name", "body", source="doc", title="title", metadata="about",
            tenant="owner", writable=True, connections=2,
        )  # fmt: skip
        beside = {"schema": f"s{place[0]}"} if request.param == "schema" else {}
        return AttachedIndex(table, tmp_path / place[0] / "attached.db", near_copies=0, drift=1, **beside)

    return make, True, request.param


@pytest.mark.parametrize("obligation", INDEX_OBLIGATIONS, ids=lambda o: o.__name__.strip("_"))
def test_attached(made, obligation) -> None:
    make, exact, beside = made
    why = DELIBERATELY_NOT.get(obligation.__name__) or (beside == "file" and BY_STEPS_NOT.get(obligation.__name__))
    if why:
        pytest.skip(why)
    obligation(make, exact)
