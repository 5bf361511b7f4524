"""Reference index: a list with exhaustive search, and comparisons with it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from casemate.maths.moments import CorpusMoments
from casemate.protocols import Index
from casemate.types import DEFAULT_TENANT, Document, Hit, Retrieval, SimilarityStats, Vector

DIM = 16
PRECISION = 1e-9


class Reference:
    """Stores documents by tenant in a list, oldest first."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[Document, Vector]]] = {}

    @property
    def tenants(self) -> list[str]:
        """All tenants with documents, sorted."""
        return sorted(tenant for tenant, rows in self._rows.items() if rows)

    def digests(self, tenant: str) -> dict[str, str]:
        """Content hash of each source."""
        return {d.source: d.digest for d, _ in self._rows.get(tenant, [])}

    def add(self, documents: Sequence[Document], vectors: Vector, tenant: str = DEFAULT_TENANT) -> None:
        """Adds documents; they replace those of the same sources."""
        self.remove({d.source for d in documents}, tenant)
        self._rows[tenant] += zip(documents, vectors, strict=True)

    def remove(self, sources: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        """Removes all documents of these sources; returns their number."""
        before = self._rows.get(tenant, [])
        self._rows[tenant] = [row for row in before if row[0].source not in sources]
        return len(before) - len(self._rows[tenant])

    def ranking(self, q: Vector, tenant: str) -> list[Hit]:
        """All documents, by decreasing float64 score, ties by age."""
        rows, x = self._rows.get(tenant, []), q.astype(np.float64)
        hits = [Hit(document, float(np.sum(vector.astype(np.float64) * x))) for document, vector in rows]
        return sorted(hits, key=lambda h: -h.score)

    def held(self, tenant: str) -> tuple[list[Document], Vector]:
        """All documents and their vectors, by age."""
        rows = self._rows.get(tenant, [])
        return [document for document, _ in rows], np.array([v for _, v in rows], np.float32).reshape(-1, DIM)

    def moments(self, tenant: str) -> CorpusMoments:
        """The moments of all vectors."""
        return CorpusMoments.of(self.held(tenant)[1])


def unit_vectors(rng: np.random.Generator, count: int) -> Vector:
    """Random directions."""
    x = rng.standard_normal((count, DIM))
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True), np.float32)


def agree(index: Index, oracle: Reference, exact: bool) -> None:
    """Asserts that an index agrees with the reference."""
    assert list(index.tenants()) == oracle.tenants, f"tenants() is {index.tenants()}, not {oracle.tenants}"
    for tenant in (*oracle.tenants, "nobody"):
        digests = dict(index.digests(tenant))
        assert digests == oracle.digests(tenant), f"the digests of {tenant!r} are {digests}, not as they were added"
        held, true = index.moments(tenant), oracle.moments(tenant)
        assert held.n == true.n, f"the moments of {tenant!r} count {held.n} documents, there are {true.n}"
        for part in ("mean", "scatter"):
            off = np.abs(getattr(held, part) - getattr(true, part)).max()
            assert off < PRECISION, f"{part} of the moments of {tenant!r} is off by {off}"
        documents, vectors = oracle.held(tenant)
        _same_scan(list(index.scan(tenant)), documents, vectors)
        _same_metadata(index.metadata(tenant), documents)
        for k, q in zip((0, 1, 5, 10_000), unit_vectors(np.random.default_rng(true.n), 4), strict=True):
            ranking = oracle.ranking(q, tenant)
            found = index.search(q, k, tenant)
            _same_background(found.similarity_stats, ranking)
            same_hits(found, ranking, min(k, len(ranking)), exact)


def _same_metadata(pairs: Iterable[tuple[str, Mapping[str, Any]]], documents: Sequence[Document]) -> None:
    """Asserts that the metadata of all documents were returned, and no others."""
    found, expected = ({repr(pair) for pair in those} for those in (pairs, ((d.source, d.metadata) for d in documents)))
    assert found == expected, f"metadata() returned {found ^ expected} too much or too little"


def _same_scan(pieces: Sequence[tuple[Sequence[Document], Vector]], documents: list[Document], vectors: Vector) -> None:
    """Asserts that a scan returned all documents by age, with the added vectors."""
    for piece, rows in pieces:
        assert len(piece) == len(rows), f"scan() gave {len(piece)} documents with {len(rows)} vectors"
        assert rows.dtype == np.float32, f"scan() gave vectors of {rows.dtype}"
    found = [document for piece, _ in pieces for document in piece]
    for one, other in zip(found, documents, strict=False):
        assert one == other, f"scan() gave {one}, next by age is {other}"
    assert len(found) == len(documents), f"scan() gave {len(found)} documents, there are {len(documents)}"
    same = np.array_equal(np.concatenate([np.empty((0, DIM)), *(rows for _, rows in pieces)]), vectors)
    assert same, "the vectors of scan() are not those that were added"


def _same_background(found: SimilarityStats, ranking: Sequence[Hit]) -> None:
    """Asserts that similarity statistics are those of all documents."""
    s = np.array([h.score for h in ranking] or [0.0])
    assert found.n == len(ranking), f"the background counts {found.n} documents, the tenant has {len(ranking)}"
    assert abs(found.mean - s.mean()) < PRECISION, f"the background's mean is {found.mean}, by scan {s.mean()}"
    assert abs(found.std - s.std()) < PRECISION, f"the background's deviation is {found.std}, by scan {s.std()}"


def same_hits(found: Retrieval, ranking: Sequence[Hit], k: int, exact: bool) -> None:
    """Asserts that a search found the first k of a ranking, up to rounding."""
    true = {h.document.id: h for h in ranking}
    for hit in found.hits:
        assert hit.document.id in true, f"{hit.document.id!r} is found and not there"
        document, score = true[hit.document.id].document, true[hit.document.id].score
        assert hit.document == document, f"{hit.document} is not as it was added: {document}"
        assert abs(hit.score - score) < PRECISION, f"the score of {document.id!r} is {hit.score}, in float64 {score}"
    ids, nearest = [h.document.id for h in found.hits], [h.document.id for h in ranking[:k]]
    if exact:
        rank = next((i for i, pair in enumerate(zip_longest(ids, nearest)) if pair[0] != pair[1]), None)
        assert rank is None, (
            f"of the {k} nearest, number {rank + 1} is {[*ids[rank:], None][0]!r}, not {[*nearest[rank:], None][0]!r}; "
            "equal vectors have equal scores (casemate.maths.nearest.inner_products), ties are ordered by age"
        )
        return
    scores = [h.score for h in found.hits]
    assert scores == sorted(scores, reverse=True), "hits are not by decreasing score"
    assert len(ids) == len(set(ids)) <= k, f"{len(ids)} hits for k = {k}, {len(set(ids))} of them different"
    near = sum(score > ranking[k - 1].score - PRECISION for score in scores)
    assert near >= 0.9 * k, f"of the {k} nearest only {near} were found"
