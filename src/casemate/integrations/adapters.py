"""Base classes of the frameworks' collections and embedders."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from casemate.errors import CapabilityError, DataError
from casemate.integrations.guarded_query import CURRENT_QUERY, FrameworkDocument
from casemate.maths.vectors import cosines
from casemate.protocols import CollectionPage, Embedder, Progress, VectorCollection
from casemate.types import Document, Hit, Vector

PAGE_ROWS = 1024  # rows per page of a scan
SYMMETRY_TOLERANCE = 1e-4  # largest component difference at which questions and documents count as embedded alike
PROBE = "Where is the key of the east gate kept?"


class FrameworkCollection(VectorCollection):
    """A framework's store as a collection. Subclasses implement ``rows``, ``stored``, ``count``, ``search_store``."""

    name: str = ""
    dim: int = 0

    def open(self) -> int:
        return self.dim

    def scan(self, after: str = "") -> Iterator[CollectionPage]:
        """See ``VectorCollection.scan``. The order of the store must be stable."""
        rows = iter(self.rows())
        if after:
            for row, _ in rows:
                if row.id == after:
                    break
        while some := list(islice(rows, PAGE_ROWS)):
            yield self.page(some, some[-1][0].id)

    def page(self, rows: Sequence[tuple[FrameworkDocument, Any]], after: str = "") -> CollectionPage:
        """Rows and vectors as a page."""
        return CollectionPage(
            [document_of(row) for row, _ in rows], stack_vectors([v for _, v in rows], self.dim), after
        )

    def search(self, vector: Vector, k: int) -> Sequence[Hit]:
        """See ``VectorCollection.search``. Records the framework's hits with the current question."""
        asked = CURRENT_QUERY.get()
        if asked is None or asked.vector is None:
            return self._hits(self.search_store([float(x) for x in vector], k, {}), vector)
        own = asked.native if vector is asked.vector else [float(x) for x in vector]
        rows = self.search_store(own, k, dict(asked.options))
        asked.found.update((row.id, row) for row in rows)
        return self._hits(rows, vector)

    def cosines(self, ids: Sequence[str], vector: Vector) -> dict[str, float]:
        """Exact cosine of rows to a vector, by id. Missing rows are omitted."""
        page = self.find(ids)
        if not page.documents:
            return {}
        return dict(zip([d.id for d in page.documents], cosines(page.vectors, vector).tolist(), strict=True))

    def _hits(self, rows: Sequence[FrameworkDocument], vector: Vector) -> list[Hit]:
        unknown = [row.id for row in rows if row.cosine is None]
        known = self.cosines(unknown, vector) if unknown else {}
        if lacking := [name for name in unknown if name not in known]:
            raise DataError(f"{self.name}: document {lacking[0]!r} has no stored vector, so the guard cannot judge it")
        hits = [Hit(document_of(r), known[r.id] if r.cosine is None else r.cosine) for r in rows]
        return sorted(hits, key=lambda hit: -hit.score)

    def find(self, ids: Sequence[str]) -> CollectionPage:
        """See ``VectorCollection.find``. Stores read an empty list as all rows, or refuse it, so none gets one."""
        return self.page(list(self.stored(ids)) if ids else ())

    @abstractmethod
    def stored(self, ids: Sequence[str]) -> Iterable[tuple[FrameworkDocument, Any]]:
        """The rows with these ids, at least one, with their vectors. Missing rows are omitted."""

    @abstractmethod
    def rows(self) -> Iterable[tuple[FrameworkDocument, Sequence[float]]]:
        """All rows with their vectors, in a stable order; ``CapabilityError``: the store cannot be enumerated."""

    @abstractmethod
    def search_store(self, vector: Any, k: int, options: dict[str, Any]) -> Sequence[FrameworkDocument]:
        """Searches with the framework's own method."""

    def add(self, documents: Sequence[Document], vectors: Vector) -> None:
        """See ``VectorCollection.add``. Refused: the framework's own methods write."""
        raise CapabilityError(f"{self.name} is read-only here; add and remove documents with the framework's methods")

    def remove(self, ids: Sequence[str]) -> None:
        """See ``VectorCollection.remove``. Refused: the framework's own methods write."""
        raise CapabilityError(f"{self.name} is read-only here; add and remove documents with the framework's methods")

    def close(self) -> None:
        """See ``VectorCollection.close``. Does nothing: the application owns the store."""


class FrameworkEmbedder(Embedder):
    """A framework's embedder. It may embed questions and documents differently.

    Without a function for documents, the framework adds them. The name is that of framework and model, for the
    fingerprint.
    """

    fingerprint: str = ""
    dim: int = 0
    max_tokens: int = 1 << 20  # unknown

    def __init__(
        self,
        name: str,
        question: Callable[[str], Sequence[float]],
        documents: Callable[[list[str]], Sequence[Sequence[float]]] | None = None,
    ) -> None:
        as_question = unit_vector(question(PROBE))
        self.dim = len(as_question)
        self._question, self._documents = question, documents or (lambda texts: [question(t) for t in texts])
        self.symmetric = (
            documents is not None
            and np.abs(as_question - unit_vector(documents([PROBE])[0])).max() < SYMMETRY_TOLERANCE
        )
        self.fingerprint = f"{name}, {self.dim} dimensions"

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """Embeds questions; in one batch if questions and documents are embedded alike."""
        if self.symmetric and len(texts) > 1:
            return self.documents(texts, progress)
        found = [unit_vector(self._question(text)) for text in texts]
        if progress:
            progress(len(texts))
        return np.stack(found) if found else np.empty((0, self.dim), np.float32)

    def documents(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """Embeds texts of documents."""
        given = self._documents(list(texts)) if texts else ()
        if progress:
            progress(len(texts))
        return np.stack([unit_vector(v) for v in given]) if len(texts) else np.empty((0, self.dim), np.float32)

    def spans(self, text: str) -> Sequence[tuple[int, int]]:
        """See ``Embedder.spans``: Not available: frameworks chunk texts themselves."""
        raise CapabilityError("a framework's embedder does not report token boundaries")


def unit_vector(vector: Any) -> Vector:
    """Normalizes a vector: (dim,), float32, unit length; ``DataError``: it is not a vector, zero or not finite."""
    found = np.asarray(vector, np.float64)
    length = math.sqrt(found @ found) if found.ndim == 1 else 0.0
    if not 0 < length < math.inf:
        raise DataError("the embedder returned no finite, nonzero vector, so the question cannot be judged")
    unit_: Vector = (found / length).astype(np.float32)
    return unit_


def stack_vectors(vectors: Sequence[Any], dim: int) -> Vector:
    """Stacks stored vectors: (n, dim), float32; ``DataError``: one has another dimension."""
    wrong = next((np.shape(v) for v in vectors if np.shape(v) != (dim,)), None)
    if wrong is not None:
        raise DataError(f"the store holds a vector of shape {wrong} among those of ({dim},); embed all with one model")
    return np.asarray(vectors, np.float32).reshape(-1, dim)


def document_of(row: FrameworkDocument) -> Document:
    """Converts a framework's document for the guard."""
    return Document(row.id, row.text, source=row.source, metadata=row.metadata)


def whole_document_of(row: FrameworkDocument) -> Document:
    """Converts a framework's document with all that the framework hands over of it."""
    beside = {"related": row.related} if row.related else {}
    return replace(document_of(row), metadata={**row.metadata, **beside})
