"""Conformance suite for collections: existing vector stores that Casemate guards in place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import numpy as np

from casemate.errors import CapabilityError
from casemate.maths.vectors import cosines
from casemate.protocols import VectorCollection
from casemate.types import Document, Vector

PRECISION = 1e-5


def check_collection(
    collection: VectorCollection, rows: Sequence[Document], vectors: Vector, absent: str = "999999999"
) -> None:
    """Runs every check for a collection. Opens and closes it.

    Args:
        collection: Not opened yet. It holds exactly the rows.
        rows: At least 20 rows with text; id and text are compared.
        vectors: Their vectors, (n, dim), in the same order, as stored.
        absent: An id of the right form that no row has.
    """
    with closing(collection):
        assert isinstance(collection.name, str) and collection.name, "a collection needs a name for messages"
        dim = collection.open()
        assert dim == vectors.shape[1], f"open() returned {dim}; vectors have {vectors.shape[1]} dimensions"
        _scans_every_row_once(collection, rows, vectors)
        _searches_by_cosine(collection, rows, vectors)
        _finds_by_id(collection, rows, absent)
        _changes_rows_or_refuses(collection, rows, vectors)


def _scans_every_row_once(collection: VectorCollection, rows: Sequence[Document], vectors: Vector) -> None:
    pages = list(collection.scan())
    found = {d.id: (d.text, v) for page in pages for d, v in zip(page.documents, page.vectors, strict=True)}
    assert sum(len(page.documents) for page in pages) == len(found), "a scan must return each row once"
    assert {i: text for i, (text, _) in found.items()} == {d.id: d.text for d in rows}, "a scan must return all rows"
    for document, vector in zip(rows, vectors, strict=True):
        assert np.allclose(found[document.id][1], vector, atol=PRECISION), f"row {document.id!r} has another vector"
    rest = {d.id for page in collection.scan(pages[0].after) for d in page.documents}
    assert rest == found.keys() - {d.id for d in pages[0].documents}, "scan(after) must continue behind that page"
    assert abs(collection.count() - len(rows)) <= max(2, len(rows) // 10), "count() must be about the number of rows"


def _searches_by_cosine(collection: VectorCollection, rows: Sequence[Document], vectors: Vector) -> None:
    for vector in vectors[:5]:
        q = (vector / np.linalg.norm(vector)).astype(np.float32)
        hits = list(collection.search(q, 5))
        assert len(hits) >= min(5, len(rows)), f"search returned {len(hits)} of 5 hits"
        scores = [hit.score for hit in hits]
        assert scores == sorted(scores, reverse=True), "hits must be ordered by decreasing score"
        exact = dict(zip([d.id for d in rows], cosines(vectors, q), strict=True))
        assert all(abs(exact[hit.document.id] - hit.score) < PRECISION for hit in hits), "a score must be the cosine"
        assert scores[0] >= max(exact.values()) - PRECISION, "the nearest row must be found"


def _finds_by_id(collection: VectorCollection, rows: Sequence[Document], absent: str) -> None:
    wanted = [rows[3].id, rows[0].id]
    page = collection.find([*wanted, absent])
    assert {d.id for d in page.documents} == set(wanted), "find() must return the rows of known ids only"
    assert page.vectors.shape[0] == len(page.documents), "find() must return a vector for each row"
    assert not collection.find([]).documents, "find([]) must return nothing"


def _changes_rows_or_refuses(collection: VectorCollection, rows: Sequence[Document], vectors: Vector) -> None:
    """A writable collection adds and removes idempotently; a read-only one raises CapabilityError."""
    document, vector = rows[0], vectors[:1].astype(np.float32)
    try:
        collection.remove([document.id])
    except CapabilityError:
        try:
            collection.add([document], vector)
        except CapabilityError:
            return
        raise AssertionError("a collection that cannot remove must not add") from None
    collection.remove([document.id])
    assert not collection.find([document.id]).documents, "a removed row must be gone"
    for _ in range(2):
        collection.add([document], vector)
    assert [d.id for d in collection.find([document.id]).documents] == [document.id], "adding twice must add one row"
