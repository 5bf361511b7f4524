"""LangChain's vector stores as collections: what each is asked for its rows, its vectors and its scores.

LangChain has no common way to read a store through, or to read a stored vector. Stores that have one of their own are
known by it, not by their class, so that no vendor's package is imported here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from casemate.collection import Piece
from casemate.errors import CapabilityError, ConfigError, needs
from casemate.integrations.adapters import Foreign, Foreigner
from casemate.integrations.asking import Row
from casemate.types import Vector

with needs("casemate[langchain]"):
    from langchain_core.documents import Document
    from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

Source: TypeAlias = str | Callable[[Mapping[str, Any]], str]
"""The key of a document's metadata that names the record it was cut from, or a function of the metadata."""
Vectors: TypeAlias = Callable[[], Iterable[tuple[Document, Sequence[float]]]]
"""Reads a store through: each document, with its id, and its stored vector."""
WITH_SCORE = ("similarity_search_with_score_by_vector", "similarity_search_by_vector_with_relevance_scores")
"""What stores call a search by vector that tells scores; LangChain has no name for it."""
PAGE = 1000


class Store(Foreign):
    """A vector store, whichever.

    Args:
        store: LangChain's.
        dim: Length of a vector.
        source: See ``Source``.
    """

    def __init__(self, store: VectorStore, dim: int, source: Source) -> None:
        self.store, self.dim, self._source = store, dim, source
        self.name = type(store).__name__

    def row(self, document: Document, score: float | None = None, cosine: float | None = None) -> Row:
        """A document as it was found."""
        if document.id is None:
            raise CapabilityError(f"{self.name} returns documents without ids; only those with ids can be guarded")
        metadata, text = document.metadata, document.page_content
        return Row(document.id, text, metadata, self._record(metadata), document, score, cosine)

    def _record(self, metadata: Mapping[str, Any]) -> str:
        """The record that a document was cut from. Loaders of tables and JSON say which row beside the file."""
        if callable(self._source):
            return self._source(metadata)
        source, number = metadata.get(self._source), metadata.get("row", metadata.get("seq_num"))
        if not isinstance(source, str):
            return ""
        return source if number is None else f"{source}#{number}"

    def look(self, vector: Any, k: int, options: dict[str, Any]) -> Sequence[Row]:
        """See ``Foreign.look``."""
        for name in WITH_SCORE:
            if hasattr(self.store, name):
                return [self.row(d, float(s)) for d, s in getattr(self.store, name)(vector, k=k, **options)]
        return [self.row(d) for d in self.store.similarity_search_by_vector(vector, k=k, **options)]

    @abstractmethod
    def find(self, ids: Sequence[str]) -> Piece:
        """See ``Collection.find``."""


class InMemory(Store):
    """LangChain's own: a dictionary."""

    store: InMemoryVectorStore

    def count(self) -> int:
        """See ``Collection.count``."""
        return len(self.store.store)

    def rows(self) -> Iterator[tuple[Row, Sequence[float]]]:
        """See ``Foreign.rows``."""
        for held in list(self.store.store.values()):
            yield self._held(held)

    def look(self, vector: Any, k: int, options: dict[str, Any]) -> Sequence[Row]:
        """See ``Foreign.look``. The score is the exact cosine."""
        found = self.store.similarity_search_with_score_by_vector(vector, k=k, **options)
        return [self.row(d, s, s) for d, s in found]

    def find(self, ids: Sequence[str]) -> Piece:
        """See ``Collection.find``."""
        held = (self.store.store.get(name) for name in ids)
        return self.piece([self._held(one) for one in held if one is not None])

    def _held(self, held: Mapping[str, Any]) -> tuple[Row, Sequence[float]]:
        document = Document(id=held["id"], page_content=held["text"], metadata=held["metadata"])
        return self.row(document), held["vector"]


class Faiss(Store):
    """FAISS: a docstore, and an index whose vectors can be had back by their places."""

    store: Any

    def __init__(self, store: VectorStore, dim: int, source: Source) -> None:
        super().__init__(store, dim, source)
        self._places: tuple[Any, dict[str, int]] = (None, {})

    def count(self) -> int:
        """See ``Collection.count``."""
        return len(self.store.index_to_docstore_id)

    def rows(self) -> Iterator[tuple[Row, Sequence[float]]]:
        """See ``Foreign.rows``."""
        for place, name in list(self.store.index_to_docstore_id.items()):
            yield self._held(name, place)

    def look(self, vector: Any, k: int, options: dict[str, Any]) -> Sequence[Row]:
        """See ``Foreign.look``."""
        found = self.store.similarity_search_with_score_by_vector(vector, k=k, **options)
        return [self.row(d, float(s)) for d, s in found]

    def find(self, ids: Sequence[str]) -> Piece:
        """See ``Collection.find``."""
        places = self._where()
        return self.piece([self._held(name, places[name]) for name in ids if name in places])

    def cosines(self, ids: Sequence[str], vector: Vector) -> dict[str, float]:
        """See ``Foreign.cosines``: on every question's path, so without the documents."""
        places = self._where()
        there = [name for name in ids if name in places]
        if not there:
            return {}
        stored = np.array([self.store.index.reconstruct(places[name]) for name in there], np.float64)
        length = np.sqrt(np.einsum("ij,ij->i", stored, stored))
        if not length.min() > 0:
            return super().cosines(there, vector)
        found = np.einsum("ij,j->i", stored, vector.astype(np.float64)) / length  # row by row: equal rows, equal scores
        return dict(zip(there, found.tolist(), strict=True))

    def _held(self, name: str, place: int) -> tuple[Row, Sequence[float]]:
        document = self.store.docstore.search(name)
        named = document if document.id is not None else document.model_copy(update={"id": name})
        return self.row(named), self.store.index.reconstruct(int(place))

    def _where(self) -> dict[str, int]:
        """Place of each document: added ones get later places in the same mapping, a removal makes another mapping."""
        listed = self.store.index_to_docstore_id
        if self._places[0] is not listed or len(self._places[1]) != len(listed):
            self._places = listed, {name: place for place, name in listed.items()}
        return self._places[1]


class Chroma(Store):
    """Chroma: ``get`` gives pages of ids, texts, metadata and vectors."""

    store: Any

    def count(self) -> int:
        """See ``Collection.count``."""
        return int(self.store._collection.count())

    def rows(self) -> Iterator[tuple[Row, Sequence[float]]]:
        """See ``Foreign.rows``."""
        start = 0
        while page := list(self._page(limit=PAGE, offset=start)):
            yield from page
            start += len(page)

    def find(self, ids: Sequence[str]) -> Piece:
        """See ``Collection.find``."""
        return self.piece(list(self._page(ids=list(ids))))

    def _page(self, **which: Any) -> Iterator[tuple[Row, Sequence[float]]]:
        got = self.store.get(include=["documents", "metadatas", "embeddings"], **which)
        for name, text, metadata, vector in zip(
            got["ids"], got["documents"], got["metadatas"], got["embeddings"], strict=True
        ):
            yield self.row(Document(id=name, page_content=text or "", metadata=metadata or {})), vector


class Plain(Store):
    """Any other store: somebody says how it is read through, and what its scores mean.

    Args:
        store: LangChain's.
        dim: Length of a vector.
        source: See ``Source``.
        embedder: Embeds again where a stored vector cannot be had: for MMR, and for what others retrieved.
        vectors: See ``Vectors``.
        cosine: Turns a score of the store into a cosine.
    """

    def __init__(
        self,
        store: VectorStore,
        dim: int,
        source: Source,
        embedder: Foreigner,
        vectors: Vectors | None,
        cosine: Callable[[float], float],
    ) -> None:
        super().__init__(store, dim, source)
        self._embedder, self._vectors, self._cosine = embedder, vectors, cosine

    def count(self) -> int:
        """See ``Collection.count``."""
        return sum(1 for _ in self.rows())

    def rows(self) -> Iterator[tuple[Row, Sequence[float]]]:
        """See ``Foreign.rows``."""
        if self._vectors is None:
            raise CapabilityError(f"{self.name} cannot be read through; give vectors=, or sync with 'casemate attach'")
        for document, vector in self._vectors():
            yield self.row(document), vector

    def look(self, vector: Any, k: int, options: dict[str, Any]) -> Sequence[Row]:
        """See ``Foreign.look``."""
        found = super().look(vector, k, options)
        return [row._replace(cosine=None if row.score is None else self._cosine(row.score)) for row in found]

    def find(self, ids: Sequence[str]) -> Piece:
        """See ``Collection.find``."""
        found = [self.row(document) for document in self.store.get_by_ids(list(ids))]
        return self.piece(list(zip(found, self._embedder.documents([row.text for row in found]), strict=True)))


def adapted(
    store: VectorStore,
    embedder: Foreigner,
    source: Source,
    vectors: Vectors | None,
    cosine: Callable[[float], float] | None,
) -> Store:
    """The store as a collection.

    Raises:
        ConfigError: If nobody knows how to read its vectors; the message says what to give.
    """
    if vectors is None and cosine is None:
        if isinstance(store, InMemoryVectorStore):
            return InMemory(store, embedder.dim, source)
        if hasattr(store, "index_to_docstore_id") and hasattr(getattr(store, "index", None), "reconstruct"):
            return Faiss(store, embedder.dim, source)
        if hasattr(store, "_collection") and hasattr(store, "get"):
            return Chroma(store, embedder.dim, source)
    if cosine is None:
        raise ConfigError(
            f"how to read the vectors of a {type(store).__name__} is not known, so nothing could be judged: give "
            "vectors= (a function that yields each document with its vector) and cosine= (a function that turns the "
            "store's score into a cosine, such as lambda distance: 1 - distance)"
        )
    return Plain(store, embedder.dim, source, embedder, vectors, cosine)


def shown(row: Row) -> Document:
    """LangChain's document; with the text that the defenses left, where one changed it."""
    document: Document = row.native
    return document if document.page_content == row.text else document.model_copy(update={"page_content": row.text})


def matrix(piece: Piece, ids: Sequence[str]) -> list[Any]:
    """The vectors of some rows, in the order of the ids."""
    held = {d.id: v for d, v in zip(piece.documents, piece.vectors, strict=True)}
    return [np.asarray(held[name]) for name in ids]
