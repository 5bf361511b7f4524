"""Haystack: a retriever component with a guard in front of it.

from casemate.integrations.haystack import GuardedRetriever
pipeline.add_component("retriever", GuardedRetriever(InMemoryEmbeddingRetriever(store), text_embedder))
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from casemate.collection import Piece
from casemate.errors import ConfigError, needs
from casemate.integrations.adapters import Foreign, Foreigner
from casemate.integrations.asking import Asked, Row, asker
from casemate.integrations.protection import Protection, Protects

with needs("casemate[haystack]"):
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.core.serialization import component_to_dict


class Store(Foreign):
    """The documents behind one of Haystack's embedding retrievers.

    Args:
        retriever: A component that takes ``query_embedding``, ``top_k`` and ``filters``.
        dim: Length of a vector.
        source: Key of a document's ``meta`` that names the record it was cut from.
    """

    def __init__(self, retriever: Any, dim: int, source: str) -> None:
        self.retriever, self.dim, self._source = retriever, dim, source
        self.name = type(retriever.document_store).__name__
        self._vectors = {"return_embedding": True} if _takes(retriever, "return_embedding") else {}
        self._unfiltered = copy.copy(retriever)
        self._unfiltered.filters = None

    def count(self) -> int:
        """See ``Collection.count``."""
        return int(self.retriever.document_store.count_documents())

    def rows(self) -> Iterator[tuple[Row, Sequence[float]]]:
        """See ``Foreign.rows``."""
        yield from self._held(self.retriever.document_store.filter_documents())

    def find(self, ids: Sequence[str]) -> Piece:
        """See ``Collection.find``."""
        wanted = {"field": "id", "operator": "in", "value": list(ids)}
        return self.piece(list(self._held(self.retriever.document_store.filter_documents(wanted))))

    def look(self, vector: Any, k: int, options: dict[str, Any]) -> Sequence[Row]:
        """See ``Foreign.look``."""
        retriever = self._unfiltered if options.pop("whole", True) else self.retriever
        found = retriever.run(query_embedding=vector, top_k=k, **options, **self._vectors)["documents"]
        return [self._row(document) for document in found]

    def _held(self, documents: Sequence[Document]) -> Iterator[tuple[Row, Sequence[float]]]:
        for document in documents:
            if document.embedding is not None:
                yield self._row(document), document.embedding

    def _row(self, document: Document) -> Row:
        source = document.meta.get(self._source)
        text = document.content or ""
        return Row(document.id, text, document.meta, str(source or ""), document, document.score)


@component
class GuardedRetriever:
    """Retrieves by another retriever, and hands out what a guard lets through.

    What it protects, and what it cannot protect there, is logged at INFO under ``casemate.integrations`` when it is
    warmed up, and is in the attribute ``protects``. It sends nothing anywhere; Haystack itself counts its users unless
    ``HAYSTACK_TELEMETRY_ENABLED`` is ``False``.

    Args:
        retriever: An embedding retriever, with its ``document_store``.
        text_embedder: Embeds questions; the model that embedded the documents.
        config: A ``casemate.yaml``, or the same as a mapping; without it Mirabel stands guard as it comes.
        path: Folder in which the guard keeps what it knows; without it, that is forgotten at the end.
        source: Key of a document's ``meta`` that names the record it was cut from.
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
                f"a {type(retriever).__name__} does not search a document store by embedding, so nothing it finds can "
                "be judged: give an embedding retriever"
            )
        self.retriever, self.text_embedder = retriever, text_embedder
        self.config, self.path, self.source, self.fit = config, path, source, fit
        self._protection: Protection | None = None

    def warm_up(self) -> None:
        """Warms up what is inside, and reads the document store through, once."""
        for part in (self.text_embedder, self.retriever):
            if hasattr(part, "warm_up"):
                part.warm_up()
        if self._protection is None:
            name = f"haystack {type(self.text_embedder).__name__} {getattr(self.text_embedder, 'model', '')}".rstrip()
            embedder = Foreigner(name, self._embedded)
            store = Store(self.retriever, embedder.dim, self.source)
            self._protection = Protection(store, embedder, self.config, self.path, self.fit)

    @property
    def protection(self) -> Protection:
        """The guard."""
        if self._protection is None:
            self.warm_up()
        assert self._protection is not None
        return self._protection

    @property
    def protects(self) -> Protects:
        """What is protected here, and what cannot be."""
        return self.protection.protects

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
        """Retrieves.

        Args:
            query: The question, as it was asked.
            query_embedding: Its vector; without it, the question is embedded here.
            filters: As the retriever takes them.
            top_k: How many documents; unset: the retriever's own number.
            client: Who asks, by what was authenticated (``Asker``).
            tenant: Likewise.
        """
        asked = self._asked(query, query_embedding or self._embedded(query), filters, top_k)
        asked.asker = asker(client, tenant)
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
        """Retrieves, in a thread while the loop goes on. See ``run``."""
        vector = query_embedding if query_embedding else await asyncio.to_thread(self._embedded, query)
        asked = self._asked(query, vector, filters, top_k)
        asked.asker = asker(client, tenant)
        protection = await asyncio.to_thread(lambda: self.protection)  # the first time it reads the store through
        return {"documents": self._shown(await protection.aretrieve(asked)) if asked.k else []}

    def calibrate(self, questions: Sequence[str] = ()) -> None:
        """Learns anew how close harmless questions come: when the log asks for it."""
        self.protection.calibrate(questions)

    def sync(self) -> None:
        """Reads the document store through, after documents were written to it or deleted."""
        self.protection.sync()

    def to_dict(self) -> dict[str, Any]:
        """See Haystack."""
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
    def from_dict(cls, data: dict[str, Any]) -> GuardedRetriever:
        """See Haystack."""
        made: GuardedRetriever = default_from_dict(cls, data)
        return made

    def _embedded(self, text: str) -> list[float]:
        vector: list[float] = self.text_embedder.run(text=text)["embedding"]
        return vector

    def _asked(self, query: str, vector: list[float], filters: dict[str, Any] | None, top_k: int | None) -> Asked:
        k = self.retriever.top_k if top_k is None else top_k
        options = {"whole": False} | ({"filters": filters} if filters else {})
        filtered = filters or getattr(self.retriever, "filters", None)
        return Asked(query, vector, k, asker(), options, {} if filtered else None)

    def _shown(self, rows: Sequence[Row]) -> list[Document]:
        """Haystack's documents, with their vectors only if the retriever is told to give them."""
        kept = getattr(self.retriever, "return_embedding", False) or not _takes(self.retriever, "return_embedding")
        changes: dict[str, Any] = {} if kept else {"embedding": None}
        return [replace(row.native, content=row.text or row.native.content, **changes) for row in rows]


def _takes(retriever: Any, name: str) -> bool:
    """Whether a component's ``run`` has an argument."""
    run = getattr(retriever, "run", None)
    return run is not None and name in inspect.signature(run).parameters
