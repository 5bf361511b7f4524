"""LangChain's vector stores as collections.

LangChain has no common interface to enumerate a store or to read a stored vector. Stores are recognized by their
attributes, not by their class, so no vendor package is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from casemate.backends.collections.qdrant_collection import point_id
from casemate.errors import CapabilityError, ConfigError, needs
from casemate.integrations.adapters import FrameworkCollection, FrameworkEmbedder, stack_vectors, unit_vector
from casemate.integrations.guarded_query import FrameworkDocument
from casemate.maths.vectors import cosines
from casemate.protocols import CollectionPage, VectorCollection
from casemate.types import Vector

with needs("casemate[langchain]"):
    from langchain_core.documents import Document
    from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

Source: TypeAlias = str | Callable[[Mapping[str, Any]], str]
"""The key of a document's metadata that names the record of the document, or a function of the metadata."""
Vectors: TypeAlias = Callable[[], Iterable[tuple[Document, Sequence[float]]]]
"""Enumerates a store: each document, with its id, and its stored vector."""
WITH_SCORE = ("similarity_search_with_score_by_vector", "similarity_search_by_vector_with_relevance_scores")
"""Names that stores use for a search by vector with scores; LangChain defines none."""
PAGE = 1000


class LangChainCollection(FrameworkCollection):
    """A vector store of any kind."""

    def __init__(self, store: VectorStore, dim: int, source: Source) -> None:
        self.store, self.dim, self._source = store, dim, source
        self.name = type(store).__name__

    def row(self, document: Document, score: float | None = None, cosine: float | None = None) -> FrameworkDocument:
        """Converts a retrieved document."""
        name = self.id_of(document)
        if name is None:
            raise CapabilityError(f"{self.name} returns documents without ids; only those with ids can be guarded")
        metadata, text = document.metadata, document.page_content
        return FrameworkDocument(name, text, metadata, self._record(metadata), document, score, cosine)

    def id_of(self, document: Document) -> str | None:
        """Id of a retrieved document; None: it has none."""
        return document.id

    def replaces(self) -> bool:
        """Whether adding documents deletes those that the store holds."""
        return False

    def _record(self, metadata: Mapping[str, Any]) -> str:
        """Record of a document. Loaders of tables and JSON name the row beside the file."""
        if callable(self._source):
            return self._source(metadata)
        source = metadata.get(self._source)
        if not isinstance(source, str):
            return ""
        number = metadata.get("row", metadata.get("seq_num"))
        return source if number is None else f"{source}#{number}"

    def search_store(self, vector: Any, k: int, options: dict[str, Any]) -> Sequence[FrameworkDocument]:
        for name in WITH_SCORE:
            if hasattr(self.store, name):
                return [self.row(d, float(s)) for d, s in getattr(self.store, name)(vector, k=k, **options)]
        return [self.row(d) for d in self.store.similarity_search_by_vector(vector, k=k, **options)]


class _InMemory(LangChainCollection):
    """LangChain's ``InMemoryVectorStore``."""

    store: InMemoryVectorStore

    def count(self) -> int:
        return len(self.store.store)

    def rows(self) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        for held in list(self.store.store.values()):
            yield self._held(held)

    def search_store(self, vector: Any, k: int, options: dict[str, Any]) -> Sequence[FrameworkDocument]:
        """See ``FrameworkCollection.search_store``. The score is the exact cosine."""
        found = self.store.similarity_search_with_score_by_vector(vector, k=k, **options)
        return [self.row(d, s, s) for d, s in found]

    def stored(self, ids: Sequence[str]) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        held = (self.store.store.get(name) for name in ids)
        return (self._held(one) for one in held if one is not None)

    def _held(self, held: Mapping[str, Any]) -> tuple[FrameworkDocument, Sequence[float]]:
        document = Document(id=held["id"], page_content=held["text"], metadata=held["metadata"])
        return self.row(document), held["vector"]


class _Faiss(LangChainCollection):
    """FAISS: a docstore, and an index that reconstructs vectors by position."""

    store: Any

    def __init__(self, store: VectorStore, dim: int, source: Source) -> None:
        super().__init__(store, dim, source)
        self._places: tuple[Any, dict[str, int]] = (None, {})

    def count(self) -> int:
        return len(self.store.index_to_docstore_id)

    def rows(self) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        for place, name in list(self.store.index_to_docstore_id.items()):
            yield self._held(name, place)

    def search_store(self, vector: Any, k: int, options: dict[str, Any]) -> Sequence[FrameworkDocument]:
        found = self.store.similarity_search_with_score_by_vector(vector, k=k, **options)
        return [self.row(d, float(s)) for d, s in found]

    def stored(self, ids: Sequence[str]) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        places = self._where()
        return (self._held(name, places[name]) for name in ids if name in places)

    def cosines(self, ids: Sequence[str], vector: Vector) -> dict[str, float]:
        """See ``FrameworkCollection.cosines``. On the path of every question, so it reads no documents."""
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

    def _held(self, name: str, place: int) -> tuple[FrameworkDocument, Sequence[float]]:
        document = self.store.docstore.search(name)
        named = document if document.id is not None else document.model_copy(update={"id": name})
        return self.row(named), self.store.index.reconstruct(int(place))

    def _where(self) -> dict[str, int]:
        """Position of each document. An addition extends the mapping; a removal replaces it."""
        listed = self.store.index_to_docstore_id
        if self._places[0] is not listed or len(self._places[1]) != len(listed):
            self._places = listed, {name: place for place, name in listed.items()}
        return self._places[1]


class _Chroma(LangChainCollection):
    """Chroma: ``get`` returns pages of ids, texts, metadata and vectors."""

    store: Any

    def count(self) -> int:
        return int(self.store._collection.count())

    def rows(self) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        start = 0
        while page := list(self._page(limit=PAGE, offset=start)):
            yield from page
            start += len(page)

    def stored(self, ids: Sequence[str]) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        return self._page(ids=list(ids))

    def _page(self, **which: Any) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        got = self.store.get(include=["documents", "metadatas", "embeddings"], **which)
        for name, text, metadata, vector in zip(
            got["ids"], got["documents"], got["metadatas"], got["embeddings"], strict=True
        ):
            yield self.row(Document(id=name, page_content=text or "", metadata=metadata or {})), vector


class _Qdrant(LangChainCollection):
    """Qdrant, on a server or in local mode: points with a payload. Documents have their id in the metadata."""

    store: Any

    def __init__(self, store: VectorStore, dim: int, source: Source) -> None:
        super().__init__(store, dim, source)
        mode = getattr(self.store.retrieval_mode, "value", self.store.retrieval_mode)
        if mode != "dense":
            raise ConfigError(
                f"a {self.name} with retrieval_mode {mode!r} does not search by dense vectors alone: guard a store "
                "with retrieval_mode 'dense' on the same collection, and judge the results of this one by "
                "guarded(store.as_retriever(), store=guarded_dense_store)"
            )

    def id_of(self, document: Document) -> str | None:
        found = document.id or document.metadata.get("_id")
        return None if found is None else str(found)

    def count(self) -> int:
        return int(self.store.client.count(self.store.collection_name, exact=True).count)

    def rows(self) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        offset = None
        while True:
            points, offset = self.store.client.scroll(
                self.store.collection_name, limit=PAGE, offset=offset, with_payload=True, with_vectors=True
            )
            yield from map(self._held, points)
            if offset is None:
                return

    def stored(self, ids: Sequence[str]) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        """See ``FrameworkCollection.stored``. Qdrant's ids are numbers or UUIDs; no other row can exist."""
        wanted = [p for p in map(point_id, ids) if p is not None]
        points = self.store.client.retrieve(self.store.collection_name, wanted, with_payload=True, with_vectors=True)
        return map(self._held, points if wanted else ())

    def _held(self, point: Any) -> tuple[FrameworkDocument, Sequence[float]]:
        payload, vector = point.payload or {}, point.vector
        document = Document(
            page_content=payload.get(self.store.content_payload_key) or "",
            metadata={**(payload.get(self.store.metadata_payload_key) or {}), "_id": point.id},
        )
        return self.row(document), vector[self.store.vector_name] if isinstance(vector, Mapping) else vector


class _LanceDB(LangChainCollection):
    """LanceDB: a table with the columns id, text, vector and metadata. Search results lack ids, so rows are read."""

    store: Any

    def count(self) -> int:
        table = self.store.get_table()
        return 0 if table is None else int(table.count_rows())

    def replaces(self) -> bool:
        """See ``LangChainCollection.replaces``. It is the default of LangChain's LanceDB."""
        return bool(self.store.mode == "overwrite")

    def rows(self) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        table = self.store.get_table()
        for batch in table.to_arrow().to_batches(PAGE) if table is not None else ():
            yield from map(self._held, batch.to_pylist())

    def stored(self, ids: Sequence[str]) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        table = self.store.get_table()
        if table is None:
            return iter(())
        listed = ", ".join("'" + name.replace("'", "''") + "'" for name in ids)
        found = table.search().where(f"{self.store._id_key} IN ({listed})").limit(len(ids)).to_list()
        return map(self._held, found)

    def search_store(self, vector: Any, k: int, options: dict[str, Any]) -> Sequence[FrameworkDocument]:
        if self.store.get_table() is None:
            return []
        found = self.store._query(vector, k, **options).to_pylist()
        held = [self._held(row) for row in found]
        exact = cosines(stack_vectors([v for _, v in held], self.dim), unit_vector(vector)).tolist() if held else ()
        scores = [row.get("_distance", row.get("_relevance_score")) for row in found]
        return [row._replace(score=s, cosine=c) for (row, _), s, c in zip(held, scores, exact, strict=True)]

    def _held(self, row: Mapping[str, Any]) -> tuple[FrameworkDocument, Sequence[float]]:
        name, text = row[self.store._id_key], row[self.store._text_key]
        document = Document(id=name, page_content=text or "", metadata=row.get("metadata") or {})
        return self.row(document), row[self.store._vector_key]


class AttachedStore(LangChainCollection):
    """Any store whose rows an attached collection reads, such as Elasticsearch, Weaviate or Pinecone.

    The store searches; vectors and the list of rows come from the collection, which is not open yet. Documents of the
    store need the ids of the collection's rows, and ``source`` must name the same records as that of the collection.

    Raises:
        ConfigError: If its vectors have another length.
    """

    def __init__(self, store: VectorStore, dim: int, source: Source, collection: VectorCollection) -> None:
        super().__init__(store, dim, source)
        self._collection = collection
        if (length := collection.open()) != dim:
            collection.close()
            raise ConfigError(
                f"{collection.name} has vectors of {length} dimensions, the embeddings of the store {dim}"
            )

    def count(self) -> int:
        return self._collection.count()

    def rows(self) -> Iterator[tuple[FrameworkDocument, Any]]:
        for page in self._collection.scan():
            yield from self._held(page)

    def stored(self, ids: Sequence[str]) -> Iterable[tuple[FrameworkDocument, Any]]:
        return self._held(self._collection.find(ids))

    def close(self) -> None:
        """See ``VectorCollection.close``. The collection is the guard's own connection."""
        self._collection.close()

    def _held(self, page: CollectionPage) -> Iterator[tuple[FrameworkDocument, Any]]:
        for d, vector in zip(page.documents, page.vectors, strict=True):
            native = Document(page_content=d.text, id=d.id, metadata=dict(d.metadata))
            yield FrameworkDocument(d.id, d.text, d.metadata, d.source, native), vector


class CustomStore(LangChainCollection):
    """Any other store, with functions that enumerate it (see ``Vectors``) and convert its scores to cosines.

    The embedder embeds documents whose stored vector is not available: for MMR and for other retrievers' results.
    """

    def __init__(
        self,
        store: VectorStore,
        dim: int,
        source: Source,
        embedder: FrameworkEmbedder,
        vectors: Vectors | None,
        cosine: Callable[[float], float],
    ) -> None:
        super().__init__(store, dim, source)
        self._embedder, self._vectors, self._cosine = embedder, vectors, cosine

    def count(self) -> int:
        return sum(1 for _ in self.rows())

    def rows(self) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        if self._vectors is None:
            raise CapabilityError(f"{self.name} cannot be read through; give vectors=, or sync with 'casemate attach'")
        for document, vector in self._vectors():
            yield self.row(document), vector

    def search_store(self, vector: Any, k: int, options: dict[str, Any]) -> Sequence[FrameworkDocument]:
        found = super().search_store(vector, k, options)
        return [row._replace(cosine=None if row.score is None else self._cosine(row.score)) for row in found]

    def stored(self, ids: Sequence[str]) -> Iterable[tuple[FrameworkDocument, Vector]]:
        found = [self.row(document) for document in self.store.get_by_ids(list(ids))]
        return zip(found, self._embedder.documents([row.text for row in found]), strict=True)


RECOGNIZED: Mapping[type[LangChainCollection], Callable[[Any], bool]] = {
    _InMemory: lambda store: isinstance(store, InMemoryVectorStore),
    _Faiss: lambda store: (
        hasattr(store, "index_to_docstore_id") and hasattr(getattr(store, "index", None), "reconstruct")
    ),
    _Chroma: lambda store: hasattr(store, "_collection") and hasattr(store, "get"),
    _Qdrant: lambda store: hasattr(store, "retrieval_mode") and hasattr(store, "content_payload_key"),
    _LanceDB: lambda store: hasattr(store, "get_table") and hasattr(store, "_vector_key"),
}
"""Stores that can be read, and how each is recognized."""


def collection_of(
    store: VectorStore,
    embedder: FrameworkEmbedder,
    source: Source,
    vectors: Vectors | None,
    cosine: Callable[[float], float] | None,
    collection: VectorCollection | None = None,
) -> LangChainCollection:
    """Wraps a store as a collection.

    Raises:
        ConfigError: If its vectors cannot be read; the message names the missing options.
    """
    if collection is not None:
        if vectors is not None or cosine is not None:
            raise ConfigError("collection= reads the vectors; remove vectors= and cosine=")
        return AttachedStore(store, embedder.dim, source, collection)
    known = next((kind for kind, fits in RECOGNIZED.items() if fits(store)), None)
    if known is not None and vectors is None and cosine is None:
        return known(store, embedder.dim, source)
    if cosine is None:
        raise ConfigError(
            f"a {type(store).__name__} has no known way to read vectors, so results cannot be judged: give "
            "collection= (casemate.backends.collections has Elasticsearch, Weaviate, Pinecone and others), or give "
            "vectors= (a function that yields each document with its vector) and cosine= (a function that turns the "
            "store's score into a cosine, such as lambda distance: 1 - distance)"
        )
    return CustomStore(store, embedder.dim, source, embedder, vectors, cosine)


def to_langchain(row: FrameworkDocument) -> Document:
    """LangChain's document, with its text as changed by defenses; a new one if a defense composed it."""
    if row.native is None:
        return Document(page_content=row.text, id=row.id)
    document: Document = row.native
    return document if document.page_content == row.text else document.model_copy(update={"page_content": row.text})


def vectors_of(page: CollectionPage, ids: Sequence[str]) -> list[Any]:
    """Vectors of a page in the order of the ids."""
    held = {d.id: v for d, v in zip(page.documents, page.vectors, strict=True)}
    return [np.asarray(held[name]) for name in ids]
