"""What is common to the collections and embedders of all frameworks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from casemate.collection import Collection, Piece, cosines
from casemate.errors import CapabilityError, DataError
from casemate.integrations.asking import ASKED, Row
from casemate.protocols import Embedder, Progress
from casemate.types import Document, Hit, Vector

PIECE = 1024
"""Rows of one piece of a scan."""
ALIKE = 1e-4
"""How far a text's vector as a question may be from its vector as a document, for the two to be the same."""
PROBE = "Where is the key of the east gate kept?"


class Foreign(Collection):
    """A framework's store. Subclasses say how it is read.

    Attributes:
        name: What messages call it.
        dim: Length of a vector.
    """

    name: str = ""
    dim: int = 0

    def open(self) -> int:
        """See ``Collection.open``."""
        return self.dim

    def scan(self, after: str = "") -> Iterator[Piece]:
        """See ``Collection.scan``. Rows come in the order of the store, which must be the same each time."""
        rows = iter(self.rows())
        if after:
            for row, _ in rows:
                if row.id == after:
                    break
        while some := list(islice(rows, PIECE)):
            yield self.piece(some, some[-1][0].id)

    def piece(self, rows: Sequence[tuple[Row, Any]], after: str = "") -> Piece:
        """Rows with their vectors as a piece."""
        return Piece([document_of(row) for row, _ in rows], stacked([v for _, v in rows], self.dim), after)

    def search(self, vector: Vector, k: int) -> Sequence[Hit]:
        """See ``Collection.search``. What the framework found is noted with the question that is being answered."""
        asked = ASKED.get()
        if asked is None or asked.vector is None:
            return self._hits(self.look([float(x) for x in vector], k, {}), vector)
        own = asked.native if vector is asked.vector else [float(x) for x in vector]
        rows = self.look(own, k, dict(asked.options))
        asked.found.update((row.id, row) for row in rows)
        return self._hits(rows, vector)

    def cosines(self, ids: Sequence[str], vector: Vector) -> dict[str, float]:
        """Exact similarity of some rows to a vector; what is not there is left out."""
        piece = self.find(ids)
        if not piece.documents:
            return {}
        return dict(zip([d.id for d in piece.documents], cosines(piece.vectors, vector).tolist(), strict=True))

    def _hits(self, rows: Sequence[Row], vector: Vector) -> list[Hit]:
        unknown = [row.id for row in rows if row.cosine is None]
        known = self.cosines(unknown, vector) if unknown else {}
        if lacking := [name for name in unknown if name not in known]:
            raise DataError(f"{self.name}: document {lacking[0]!r} was found, and has no vector to be judged by")
        hits = [Hit(document_of(r), known[r.id] if r.cosine is None else r.cosine) for r in rows]
        return sorted(hits, key=lambda hit: -hit.score)

    @abstractmethod
    def rows(self) -> Iterable[tuple[Row, Sequence[float]]]:
        """All rows with their vectors, in an order that stays.

        Raises:
            CapabilityError: If the store cannot be read through.
        """

    @abstractmethod
    def look(self, vector: Any, k: int, options: dict[str, Any]) -> Sequence[Row]:
        """The framework's own search."""

    def add(self, documents: Sequence[Document], vectors: Vector) -> None:
        """See ``Collection.add``: what is added goes through the framework's own methods."""
        raise CapabilityError(f"{self.name} is written by the framework's own methods")

    def remove(self, ids: Sequence[str]) -> None:
        """See ``Collection.remove``: what is removed goes through the framework's own methods."""
        raise CapabilityError(f"{self.name} is written by the framework's own methods")

    def close(self) -> None:
        """See ``Collection.close``: the store belongs to whoever made it."""


class Foreigner(Embedder):
    """A framework's embedder: questions and documents may be embedded differently.

    Args:
        name: Of model and framework.
        question: Embeds one question.
        documents: Embeds texts of documents; None: nobody says how, and it is not needed where the framework adds.
    """

    fingerprint: str = ""
    dim: int = 0
    max_tokens: int = 1 << 20  # frameworks do not tell

    def __init__(
        self,
        name: str,
        question: Callable[[str], Sequence[float]],
        documents: Callable[[list[str]], Sequence[Sequence[float]]] | None = None,
    ) -> None:
        as_question = unit(question(PROBE))
        self.dim = len(as_question)
        self._question, self._documents = question, documents or (lambda texts: [question(t) for t in texts])
        self.symmetric = documents is not None and np.abs(as_question - unit(documents([PROBE])[0])).max() < ALIKE
        self.fingerprint = f"{name}, {self.dim} dimensions"

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """Embeds questions: all at once if questions and documents are embedded alike."""
        if self.symmetric and len(texts) > 1:
            return self.documents(texts, progress)
        found = [unit(self._question(text)) for text in texts]
        if progress:
            progress(len(texts))
        return np.stack(found) if found else np.empty((0, self.dim), np.float32)

    def documents(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """Embeds texts of documents."""
        given = self._documents(list(texts)) if texts else ()
        if progress:
            progress(len(texts))
        return np.stack([unit(v) for v in given]) if len(texts) else np.empty((0, self.dim), np.float32)

    def spans(self, text: str) -> Sequence[tuple[int, int]]:
        """See ``Embedder.spans``: frameworks cut texts themselves."""
        raise CapabilityError("a framework's embedder does not say where its tokens end")


def unit(vector: Any) -> Vector:
    """A vector at unit length, float32.

    Raises:
        DataError: If it is no vector, or none of a length.
    """
    found = np.asarray(vector, np.float64)
    length = math.sqrt(found @ found) if found.ndim == 1 else 0.0
    if not 0 < length < math.inf:
        raise DataError("the embedder gave no vector that has a length; a question cannot be judged by it")
    unit_: Vector = (found / length).astype(np.float32)
    return unit_


def stacked(vectors: Sequence[Any], dim: int) -> Vector:
    """Vectors as they are stored, (n, dim), float32.

    Raises:
        DataError: If one has another number of dimensions, or is none.
    """
    wrong = next((np.shape(v) for v in vectors if np.shape(v) != (dim,)), None)
    if wrong is not None:
        raise DataError(f"the store holds a vector of shape {wrong} among those of ({dim},); embed all with one model")
    return np.asarray(vectors, np.float32).reshape(-1, dim)


def document_of(row: Row) -> Document:
    """A framework's document as the guard reads it."""
    return Document(row.id, row.text, source=row.source, metadata=row.metadata)
