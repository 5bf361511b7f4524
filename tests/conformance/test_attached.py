"""Attached collections satisfy the obligations of ``Index``, except for the listed ones."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from casemate.backends.collections.pgvector_table import PgvectorTable
from casemate.backends.indexes.attached import AttachedIndex
from casemate.protocols import Index
from casemate.testing import INDEX_OBLIGATIONS, MakeIndex
from casemate.testing.reference import DIM
from casemate.types import Secret
from tests.postgres import sql

NEVER = {
    "_refuses_another_embedder": "clear() deletes the sidecar only and leaves the rows of the collection",
}
NOT_WITH_A_FILE = {
    "_shows_one_moment": "in two stores, rows and moments differ during a change",
}


@pytest.fixture(params=["schema", "file"])
def made(request: pytest.FixtureRequest, vector_url: str, tmp_path: Path) -> tuple[MakeIndex, bool, str]:
    place = ["first"]

    def make(fresh: bool) -> Index:
        if fresh:
            place[0] = f"t{uuid.uuid4().hex}"
            columns = f"owner text, name text, body text, embedding vector({DIM}), doc text, title text, about json"
            sql(vector_url, f"CREATE TABLE {place[0]} ({columns}, PRIMARY KEY (owner, name))")
        table = PgvectorTable(
            Secret(vector_url), place[0], "name", "body", source="doc", title="title", metadata="about",
            tenant="owner", writable=True, connections=2,
        )  # fmt: skip
        beside = {"schema": f"s{place[0]}"} if request.param == "schema" else {}
        return AttachedIndex(table, tmp_path / place[0] / "attached.db", near_copies=0, drift=1, **beside)

    return make, True, request.param


@pytest.mark.parametrize("obligation", INDEX_OBLIGATIONS, ids=lambda o: o.__name__.strip("_"))
def test_attached(made, obligation) -> None:
    make, exact, beside = made
    why = NEVER.get(obligation.__name__) or (beside == "file" and NOT_WITH_A_FILE.get(obligation.__name__))
    if why:
        pytest.skip(why)
    obligation(make, exact)
