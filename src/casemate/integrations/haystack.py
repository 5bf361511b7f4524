"""Haystack: a guarded retriever component.

from casemate.integrations.haystack import GuardedHaystackRetriever
pipeline.add_component("retriever", GuardedHaystackRetriever(InMemoryEmbeddingRetriever(store), text_embedder))
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from casemate.errors import ConfigError, needs
from casemate.integrations.adapters import FrameworkCollection, FrameworkEmbedder
from casemate.integrations.guarded_query import FrameworkDocument, GuardedQuery, client_identity
from casemate.integrations.protection import Protected, Protection

with needs("casemate[haystack]"):
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.core.serialization import component_to_dict


class HaystackCollection(FrameworkCollection):
    """The documents behind an embedding retriever, with the inputs ``query_embedding``, ``top_k`` and ``filters``.

    ``source`` is the key of a document's ``meta`` that names the record that the document is a chunk of.
    """

    def __init__(self, retriever: Any, dim: int, source: str) -> None:
        self.retriever, self.dim, self._source = retriever, dim, source
        self.name = type(retriever.document_store).__name__
        self._vectors = {"return_embedding": True} if _takes(retriever, "return_embedding") else {}
        self._unfiltered = copy.copy(retriever)
        self._unfiltered.filters = None

    def count(self) -> int:
        return int(self.retriever.document_store.count_documents())

    def rows(self) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        yield from self._held(self.retriever.document_store.filter_documents())

    def stored(self, ids: Sequence[str]) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        wanted = {"field": "id", "operator": "in", "value": list(ids)}
        return self._held(self.retriever.document_store.filter_documents(wanted))

    def search_store(self, vector: Any, k: int, options: dict[str, Any]) -> Sequence[FrameworkDocument]:
        retriever = self._unfiltered if options.pop("whole", True) else self.retriever
        found = retriever.run(query_embedding=vector, top_k=k, **options, **self._vectors)["documents"]
        return [self.row(document) for document in found]

    def _held(self, documents: Sequence[Document]) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        for document in documents:
            if document.embedding is not None:
                yield self.row(document), document.embedding

    def row(self, document: Document) -> FrameworkDocument:
        """Converts a document."""
        source = document.meta.get(self._source)
        text = document.content or ""
        return FrameworkDocument(document.id, text, document.meta, str(source or ""), document, document.score)


@component
class GuardedHaystackRetriever(Protected):
    """Wraps an embedding retriever and returns the documents that the guard allows.

    ``protection_report`` states what is protected and what is not; it is logged at INFO under ``casemate.integrations``
    at warm-up. Casemate sends no telemetry; Haystack does unless ``HAYSTACK_TELEMETRY_ENABLED`` is ``False``.

    Args:
        retriever: An embedding retriever, with its ``document_store``.
        text_embedder: Embeds questions; the model that embedded the documents.
        config: A ``casemate.yaml``, or the same as a mapping; default: ``mirabel`` with default options.
        path: Folder for the guard's state. None: the state is kept in memory.
        source: Key of a document's ``meta`` that names the record that the document is a chunk of.
        fit: See ``Protection``.
    """

    def __init__(
        self,
        retriever: Any,
        text_embedder: Any,
        config: dict[str, Any] | str | None = None,
        path: str | None = None,
        source: str = "source_id",
        fit: bool = True,
    ) -> None:
        if not (_takes(retriever, "query_embedding") and hasattr(retriever, "document_store")):
            raise ConfigError(
                f"a {type(retriever).__name__} does not search a document store by embedding, so its results cannot "
                "be judged: give an embedding retriever"
            )
        self.retriever, self.text_embedder = retriever, text_embedder
        self.config, self.path, self.source, self.fit = config, path, source, fit
        self._protection: Protection | None = None

    def warm_up(self) -> None:
        """Warms up retriever and embedder, and reads the document store once."""
        for part in (self.text_embedder, self.retriever):
            if hasattr(part, "warm_up"):
                part.warm_up()
        if self._protection is None:
            name = f"haystack {type(self.text_embedder).__name__} {getattr(self.text_embedder, 'model', '')}".rstrip()
            embedder = FrameworkEmbedder(name, self._embedded)
            store = HaystackCollection(self.retriever, embedder.dim, self.source)
            self._protection = Protection(store, embedder, self.config, self.path, self.fit)

    @property
    def protection(self) -> Protection:  # type: ignore[override]
        """The guard."""
        if self._protection is None:
            self.warm_up()
        assert self._protection is not None
        return self._protection

    @component.output_types(documents=list[Document])
    def run(
        self,
        query: str,
        query_embedding: list[float] | None = None,
        filters: dict[str, Any] | None = None,
        top_k: int | None = None,
        client: str = "",
        tenant: str = "",
    ) -> dict[str, list[Document]]:
        """Retrieves. The question is embedded here unless its vector is given. Client: see ``ClientIdentity``."""
        asked = self._asked(query, query_embedding or self._embedded(query), filters, top_k)
        asked.identity = client_identity(client, tenant)
        return {"documents": self._shown(self.protection.retrieve(asked)) if asked.k else []}

    @component.output_types(documents=list[Document])
    async def run_async(
        self,
        query: str,
        query_embedding: list[float] | None = None,
        filters: dict[str, Any] | None = None,
        top_k: int | None = None,
        client: str = "",
        tenant: str = "",
    ) -> dict[str, list[Document]]:
        """Retrieves in a worker thread. See ``run``."""
        vector = query_embedding if query_embedding else await asyncio.to_thread(self._embedded, query)
        asked = self._asked(query, vector, filters, top_k)
        asked.identity = client_identity(client, tenant)
        protection = await asyncio.to_thread(lambda: self.protection)  # the first call reads the store
        return {"documents": self._shown(await protection.aretrieve(asked)) if asked.k else []}

    def write_documents(self, documents: Sequence[Document], **options: Any) -> int:
        """Writes embedded documents into the document store. Those that the screening quarantines are left out.

        The options are those of the store's own ``write_documents``, whose count is returned.
        """
        protection, store = self.protection, self.retriever.document_store
        collection = protection.store
        assert isinstance(collection, HaystackCollection)
        withheld = protection.screen([collection.row(document) for document in documents])
        kept = [document for document in documents if document.id not in withheld]
        with protection.writing([document.id for document in kept]):
            return int(store.write_documents(kept, **options)) if kept else 0

    def to_dict(self) -> dict[str, Any]:
        """Serializes the component as a dictionary, as Haystack's ``Component.to_dict`` requires."""
        found: dict[str, Any] = default_to_dict(
            self,
            retriever=component_to_dict(self.retriever, "retriever"),
            text_embedder=component_to_dict(self.text_embedder, "text_embedder"),
            config=self.config,
            path=self.path,
            source=self.source,
            fit=self.fit,
        )
        return found

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> GuardedHaystackRetriever:
        """Creates the component from a dictionary of ``to_dict``, as Haystack's ``Component.from_dict`` requires."""
        made: GuardedHaystackRetriever = default_from_dict(cls, data)
        return made

    def _embedded(self, text: str) -> list[float]:
        vector: list[float] = self.text_embedder.run(text=text)["embedding"]
        return vector

    def _asked(
        self, query: str, vector: list[float], filters: dict[str, Any] | None, top_k: int | None
    ) -> GuardedQuery:
        k = self.retriever.top_k if top_k is None else top_k
        options = {"whole": False} | ({"filters": filters} if filters else {})
        filtered = filters or getattr(self.retriever, "filters", None)
        return GuardedQuery(query, vector, k, client_identity(), options, {} if filtered else None)

    def _shown(self, rows: Sequence[FrameworkDocument]) -> list[Document]:
        """Haystack's documents, with vectors only if the retriever returns them."""
        kept = getattr(self.retriever, "return_embedding", False) or not _takes(self.retriever, "return_embedding")
        changes: dict[str, Any] = {} if kept else {"embedding": None}
        return [
            Document(id=row.id, content=row.text, score=row.score)
            if row.native is None  # composed by a defense
            else replace(row.native, content=row.text or row.native.content, **changes)
            for row in rows
        ]


def _takes(retriever: Any, name: str) -> bool:
    """Whether a component's ``run`` has a parameter of this name."""
    run = getattr(retriever, "run", None)
    return run is not None and name in inspect.signature(run).parameters
