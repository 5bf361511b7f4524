"""LangChain: guarded vector stores and retrievers.

::

    from casemate.integrations.langchain import guarded
    store = guarded(store)

The result is a ``VectorStore`` (or a retriever), so chains, agents, tracing and streaming work unchanged.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, overload

from casemate.errors import ConfigError, needs
from casemate.guard.turn import SourceKey, Turn, collect_sources, text_digest, turn
from casemate.integrations.adapters import FrameworkEmbedder
from casemate.integrations.guarded_query import (
    ClientIdentity,
    FrameworkDocument,
    Guarded,
    GuardedQuery,
    client_context,
    client_identity,
    composing,
)
from casemate.integrations.langchain_legs import has_legs, legs_of, unguarded_legs, with_guarded_legs
from casemate.integrations.langchain_stores import (
    LangChainCollection,
    Source,
    Vectors,
    collection_of,
    to_langchain,
    vectors_of,
)
from casemate.integrations.protection import OPTIONS as PROTECTION_OPTIONS
from casemate.integrations.protection import Protected, Protection, refuse_unknown
from casemate.protocols import VectorCollection

with needs("casemate[langchain]"):
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import RunnableConfig
    from langchain_core.runnables.config import ensure_config, var_child_runnable_config
    from langchain_core.vectorstores import InMemoryVectorStore, VectorStore, VectorStoreRetriever
    from langchain_core.vectorstores.utils import maximal_marginal_relevance

log = logging.getLogger("casemate.integrations")
COMPOSE = ("base_compressor", "docstore")
"""Attributes of retrievers that return texts composed of documents: compressors, and those that return parents."""
OPTIONS = (*PROTECTION_OPTIONS, "source", "collection", "vectors", "cosine")
"""Options of ``guarded`` for a vector store."""
K = 4  # LangChain's default number of documents


class GuardedVectorStore(Protected, VectorStore):
    """A vector store that returns the documents that its guard allows. Created by ``guarded``.

    Every search also accepts ``casemate_client=`` and ``casemate_tenant=``. Without them the client
    is that of the run's config (``metadata`` or ``configurable``, same keys).

    Attributes:
        unguarded: The wrapped store, for trusted use: its results are not guarded.
        protection: The guard, shared by all retrievers of this store.
    """

    def __init__(self, store: VectorStore, protection: Protection) -> None:
        self.unguarded = store
        self.protection = protection

    @property
    def embeddings(self) -> Embeddings | None:
        """The embeddings of the wrapped store."""
        return self.unguarded.embeddings

    def similarity_search(self, query: str, k: int = K, **kwargs: Any) -> list[Document]:
        """Returns up to k documents of the search that the guard does not withhold from the client."""
        return [to_langchain(row) for row in self._rows(query, k, kwargs)]

    async def asimilarity_search(self, query: str, k: int = K, **kwargs: Any) -> list[Document]:
        """Asynchronous version of ``similarity_search``."""
        return [to_langchain(row) for row in await self._arows(query, k, kwargs)]

    def similarity_search_with_score(self, query: str, k: int = K, **kwargs: Any) -> list[tuple[Document, float]]:
        """As ``similarity_search``, with each document's score. The scores are the store's own."""
        return _scored(self._rows(query, k, kwargs))

    async def asimilarity_search_with_score(
        self, query: str, k: int = K, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """Asynchronous version of ``similarity_search_with_score``."""
        return _scored(await self._arows(query, k, kwargs))

    def similarity_search_by_vector(self, embedding: list[float], k: int = K, **kwargs: Any) -> list[Document]:
        """Searches with a vector. Without the text of the question a stricter rule applies."""
        return [to_langchain(row) for row in self.protection.retrieve(self._asked("", embedding, k, kwargs))]

    async def asimilarity_search_by_vector(self, embedding: list[float], k: int = K, **kwargs: Any) -> list[Document]:
        """Asynchronous version of ``similarity_search_by_vector``."""
        return [to_langchain(row) for row in await self.protection.aretrieve(self._asked("", embedding, k, kwargs))]

    def max_marginal_relevance_search(
        self, query: str, k: int = K, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Selects relevant and diverse documents. All candidates are judged before the selection."""
        return self._mmr(self._asked(query, self._embedded(query), max(fetch_k, k), kwargs), k, lambda_mult)

    async def amax_marginal_relevance_search(
        self, query: str, k: int = K, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Asynchronous version of ``max_marginal_relevance_search``."""
        asked = self._asked(query, await self._aembedded(query), max(fetch_k, k), kwargs)
        asked.candidates = True
        chosen = self._chosen(asked, await self.protection.aretrieve(asked), k, lambda_mult)
        return [to_langchain(row) for row in await self.protection.adeliver(asked, chosen)]

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = K, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """The same search with a vector. Without the text of the question a stricter rule applies."""
        return self._mmr(self._asked("", embedding, max(fetch_k, k), kwargs), k, lambda_mult)

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Returns documents by id. Documents withheld from the client are omitted."""
        identity = _identity({})
        rows = self._by_ids(self.unguarded.get_by_ids(ids), identity, self.protection.withheld(identity))
        return [to_langchain(row) for row in self.protection.deliver(GuardedQuery("", None, 1, identity), rows)]

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Asynchronous version of ``get_by_ids``."""
        identity = _identity({})
        found, withheld = await self.unguarded.aget_by_ids(ids), await self.protection.awithheld(identity)
        rows, asked = self._by_ids(found, identity, withheld), GuardedQuery("", None, 1, identity)
        return [to_langchain(row) for row in await self.protection.adeliver(asked, rows)]

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Adds documents to the store and to the guard. Returns the ids of those that are not in quarantine."""
        ids = _ids(documents, kwargs)
        named = [document.model_copy(update={"id": name}) for document, name in zip(documents, ids, strict=True)]
        collection = self._collection_of()
        if withheld := self.protection.screen([collection.row(document) for document in named]):
            documents = [d for d, name in zip(documents, ids, strict=True) if name not in withheld]
            ids = [name for name in ids if name not in withheld]
        if not documents:
            return []
        with self.protection.writing(None if collection.replaces() else ids):
            added = self.unguarded.add_documents(documents, **{**kwargs, "ids": ids})
        if added != ids:  # the store assigns ids itself
            self.sync()
        return added

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Deletes documents by id from the store and from the guard. Returns what the store returns."""
        with self.protection.writing(ids):
            return self.unguarded.delete(ids, **kwargs)

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Creates a guarded ``InMemoryVectorStore``. For another store, create it and pass it to ``guarded``."""
        store = InMemoryVectorStore.from_texts(texts, embedding, metadatas, ids=ids)
        return cls(store, _protection(store, **kwargs))

    def as_retriever(self, **kwargs: Any) -> GuardedVectorStoreRetriever:
        """Returns a retriever on this guarded store, with LangChain's options."""
        tags = kwargs.pop("tags", None) or [*self._get_retriever_tags()]
        return GuardedVectorStoreRetriever(vectorstore=self, tags=tags, **kwargs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a guarded store has no attribute {name!r}; .unguarded is the wrapped store")

    def _get_retriever_tags(self) -> list[str]:
        return self.unguarded._get_retriever_tags()

    def _select_relevance_score_fn(self) -> Any:
        return self.unguarded._select_relevance_score_fn()

    def _rows(self, query: str, k: int, kwargs: dict[str, Any]) -> list[FrameworkDocument]:
        return self.protection.retrieve(self._asked(query, self._embedded(query), k, kwargs))

    async def _arows(self, query: str, k: int, kwargs: dict[str, Any]) -> list[FrameworkDocument]:
        return await self.protection.aretrieve(self._asked(query, await self._aembedded(query), k, kwargs))

    def _embedded(self, query: str) -> list[float]:
        assert self.embeddings is not None
        return self.embeddings.embed_query(query)

    async def _aembedded(self, query: str) -> list[float]:
        assert self.embeddings is not None
        return await self.embeddings.aembed_query(query)

    def _asked(self, text: str, vector: Any, k: int, kwargs: dict[str, Any]) -> GuardedQuery:
        return GuardedQuery(text, vector, k, _identity(kwargs), kwargs, {} if kwargs else None)

    def _mmr(self, asked: GuardedQuery, k: int, lambda_mult: float) -> list[Document]:
        asked.candidates = True
        chosen = self._chosen(asked, self.protection.retrieve(asked), k, lambda_mult)
        return [to_langchain(row) for row in self.protection.deliver(asked, chosen)]

    def _chosen(
        self, asked: GuardedQuery, rows: list[FrameworkDocument], k: int, lambda_mult: float
    ) -> list[FrameworkDocument]:
        if not rows:
            return []
        stored = [row for row in rows if row.native is not None]
        composed = [row for row in rows if row.native is None][:k]
        ids = [row.id for row in stored]
        vectors = vectors_of(self.protection.store.find(ids), ids) if ids else []
        assert asked.vector is not None
        left = k - len(composed)
        order = maximal_marginal_relevance(asked.vector, vectors, k=left, lambda_mult=lambda_mult) if ids else []
        return [*(stored[i] for i in order), *composed]

    def _by_ids(
        self, documents: list[Document], identity: ClientIdentity, withheld: Collection[str]
    ) -> list[FrameworkDocument]:
        named = [(str(self._collection_of().id_of(d)), d) for d in documents]
        readable = self.protection.readable(identity, [(name, d.metadata) for name, d in named])
        named = [(name, d) for name, d in named if name in readable]
        if withheld:
            sources = self.protection.sources(name for name, _ in named)
            named = [(name, d) for name, d in named if name in sources and sources[name] not in withheld]
        return [self._collection_of().row(d) for _, d in named]

    def _collection_of(self) -> LangChainCollection:
        collection = self.protection.store
        assert isinstance(collection, LangChainCollection)
        return collection


class _ClientRetriever(Guarded, BaseRetriever):
    """A retriever whose client comes from the run's config."""

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """Retrieves documents for the client that the run's config names."""
        with _asking(config):
            return super().invoke(input, config, **kwargs)

    async def ainvoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """Asynchronous version of ``invoke``."""
        with _asking(config):
            return await super().ainvoke(input, config, **kwargs)


class GuardedVectorStoreRetriever(_ClientRetriever, VectorStoreRetriever):
    """A retriever on a guarded store: all search types; the client comes from the run's config.

    Attributes:
        k: Number of documents. Default: that of ``search_kwargs``.
    """

    k: int | None = None

    def model_post_init(self, context: Any, /) -> None:
        """Refuses an unguarded store."""
        super().model_post_init(context)
        if not isinstance(self.vectorstore, GuardedVectorStore):
            raise ConfigError(f"a {type(self.vectorstore).__name__} is not guarded; give guarded(store)")
        if self.k is not None:
            self.search_kwargs = {**self.search_kwargs, "k": self.k}


class _GuardedRetriever(_ClientRetriever):
    """A retriever around an untraced one: a trace or an event stream would reveal withheld documents."""

    retriever: BaseRetriever


class JudgedRetriever(_GuardedRetriever):
    """Judges the results of another retriever before returning them. Created by ``guarded``.

    Documents that are not in ``store``, the guarded store, are dropped.
    """

    store: GuardedVectorStore

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        found = self.retriever.invoke(query, {"callbacks": []}, **kwargs)
        asked = self._asked(query, self.store._embedded(query), found)
        return [to_langchain(row) for row in self.store.protection.retrieve(asked)] if asked else []

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        found = await self.retriever.ainvoke(query, {"callbacks": []}, **kwargs)
        asked = self._asked(query, await self.store._aembedded(query), found)
        return [to_langchain(row) for row in await self.store.protection.aretrieve(asked)] if asked else []

    def _asked(self, query: str, vector: list[float], found: Sequence[Document]) -> GuardedQuery | None:
        named = self.store._collection_of().id_of
        given = self.store.protection.given(
            FrameworkDocument(named(d) or "", d.page_content, d.metadata, native=d) for d in found
        )
        given = tuple(
            row if named(row.native) else row._replace(native=row.native.model_copy(update={"id": row.id}))
            for row in given
        )
        return GuardedQuery(query, vector, len(given), _identity({}), given=given) if given else None


class GuardedFusion(_GuardedRetriever):
    """A retriever that combines guarded ones, as one turn: no query brings back what another one withholds.

    Created by ``guarded``. Documents that no guarded leg returned are dropped. Of parents of passages, the client is
    charged the parents.
    """

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        parents_of = self._returns_parents_of
        with turn(query) as current, collect_sources() as sources:
            with composing() if parents_of else nullcontext():
                found = self.retriever.invoke(query, {"callbacks": []}, **kwargs)
            kept = self._allowed(current, found, sources)
        for protection in parents_of:
            kept = [to_langchain(row) for row in protection.deliver(*_composed(query, kept))]
        return kept

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        parents_of = self._returns_parents_of
        with turn(query) as current, collect_sources() as sources:
            with composing() if parents_of else nullcontext():
                found = await self.retriever.ainvoke(query, {"callbacks": []}, **kwargs)
            kept = self._allowed(current, found, sources)
        for protection in parents_of:
            kept = [to_langchain(row) for row in await protection.adeliver(*_composed(query, kept))]
        return kept

    @property
    def _returns_parents_of(self) -> list[Protection]:
        """The guards of the passages whose parents it returns; empty: it returns none."""
        return list(_protections(self.retriever).values()) if hasattr(self.retriever, "docstore") else []

    def _allowed(self, current: Turn, found: list[Document], sources: set[SourceKey]) -> list[Document]:
        composes = any(hasattr(self.retriever, name) for name in COMPOSE)
        kept = current.allowed(found, lambda d: (d.id, d.page_content), sources if composes else None)
        if len(kept) < len(found):
            log.info(
                "%s: %d of %d documents left out", type(self.retriever).__name__, len(found) - len(kept), len(found)
            )
        return kept


@overload
def guarded(inner: VectorStore, /, **options: Any) -> GuardedVectorStore: ...
@overload
def guarded(inner: VectorStoreRetriever, /, **options: Any) -> GuardedVectorStoreRetriever: ...
@overload
def guarded(inner: BaseRetriever, /, **options: Any) -> BaseRetriever: ...


def guarded(
    inner: VectorStore | BaseRetriever, /, **options: Any
) -> GuardedVectorStore | GuardedVectorStoreRetriever | BaseRetriever:
    """Wraps a vector store or a retriever with a guard.

    ``protection_report`` states what is protected and what is not; it is logged at INFO under
    ``casemate.integrations``.

    Args:
        inner: A vector store or a retriever; one that is guarded already is returned as it is. A retriever without a
            vector store, or on one that cannot be guarded, needs ``store=``, a guarded store with its documents. A
            retriever that combines others (an ensemble, a query rewriter, a compressor) is copied with guarded legs;
            ``store=`` guards those that are not yet.
        **options: ``config``: a ``casemate.yaml``, or the same as a mapping; default: ``mirabel`` with default
            options. ``path``: folder for the guard's state; default: in memory. ``fit``: see ``Protection``.
            ``source``: metadata key that names the record of a document, or a function of the metadata; default:
            ``source``. ``collection``: an attached collection that reads the store's vectors
            (``langchain_stores.AttachedStore``). ``vectors``, ``cosine``: for stores that cannot be enumerated
            (``langchain_stores.CustomStore``).

    Raises:
        ConfigError: If the configuration is wrong, or the arguments do not suffice to judge results; the message names
            each leg that nothing judges.
    """
    if isinstance(inner, GuardedVectorStore | GuardedVectorStoreRetriever | JudgedRetriever | GuardedFusion):
        if options:
            raise ConfigError(
                f"the {type(inner).__name__} is already guarded and keeps its options; remove {', '.join(options)}, or "
                "guard the unguarded store with them"
            )
        return inner
    if isinstance(inner, VectorStore):
        refuse_unknown(options, OPTIONS)
        return GuardedVectorStore(inner, _protection(inner, **options))
    if isinstance(inner, VectorStoreRetriever) and "store" not in options:
        return _on(guarded(inner.vectorstore, **options), inner)
    if has_legs(inner):
        refuse_unknown(options, ("store",))
        return _fused(inner, **options)
    held = options.pop("store", None)
    if not isinstance(held, GuardedVectorStore) or options:
        raise ConfigError(
            f"the results of a {type(inner).__name__} cannot be judged alone: give store=, the guarded vector store "
            "with its documents, and no other option"
        )
    return JudgedRetriever(retriever=inner, store=held)


def _fused(inner: BaseRetriever, store: GuardedVectorStore | None = None) -> BaseRetriever:
    """A retriever that combines others, with every leg guarded."""

    def leaf(leg: VectorStore | BaseRetriever) -> VectorStore | BaseRetriever:
        if store is None:
            return leg
        if isinstance(leg, VectorStore):
            return store if leg is store.unguarded else leg
        if isinstance(leg, VectorStoreRetriever) and leg.vectorstore is store.unguarded:
            return _on(store, leg)
        return JudgedRetriever(retriever=leg, store=store)

    made: BaseRetriever = with_guarded_legs(inner, leaf, lambda part: GuardedFusion(retriever=part))
    if legs := unguarded_legs(made.retriever if isinstance(made, GuardedFusion) else made):
        raise ConfigError(
            f"nothing judges the results of {', '.join(legs)}: guard each with guarded(), or give store=, the guarded "
            "vector store with its documents"
        )
    return made


def _protections(part: Any) -> dict[int, Protection]:
    found: dict[int, Protection] = {}
    for leg in legs_of(part):
        if isinstance(leg, GuardedFusion):
            found |= _protections(leg.retriever)
            continue
        store = leg.store if isinstance(leg, JudgedRetriever) else getattr(leg, "vectorstore", leg)
        if isinstance(store, GuardedVectorStore):
            found[id(store.protection)] = store.protection
    return found


def _composed(query: str, documents: Sequence[Document]) -> tuple[GuardedQuery, list[FrameworkDocument]]:
    """The arguments of ``Protection.deliver`` for documents that are not in the store. Each is named by its text."""
    rows = [
        FrameworkDocument(text_digest(d.page_content).hex(), d.page_content, d.metadata, native=d) for d in documents
    ]
    return GuardedQuery(query, None, len(rows), _identity({})), rows


def _on(store: GuardedVectorStore, retriever: VectorStoreRetriever) -> GuardedVectorStoreRetriever:
    fields = {name: getattr(retriever, name) for name in ("search_type", "search_kwargs", "tags", "metadata")}
    return GuardedVectorStoreRetriever(vectorstore=store, **fields)


def _protection(
    store: VectorStore,
    *,
    source: Source = "source",
    vectors: Vectors | None = None,
    cosine: Callable[[float], float] | None = None,
    collection: VectorCollection | None = None,
    **options: Any,
) -> Protection:
    if store.embeddings is None:
        raise ConfigError(f"this {type(store).__name__} has no embeddings (embeddings is None)")
    embedder = FrameworkEmbedder(
        _model(store.embeddings), store.embeddings.embed_query, store.embeddings.embed_documents
    )
    return Protection(collection_of(store, embedder, source, vectors, cosine, collection), embedder, **options)


def _model(embeddings: Embeddings) -> str:
    said = (getattr(embeddings, name, None) for name in ("model", "model_name", "model_id", "repo_id"))
    name = next((s for s in said if isinstance(s, str) and s), "")
    return " ".join(["langchain", type(embeddings).__name__, name]).rstrip()


def _identity(kwargs: dict[str, Any]) -> ClientIdentity:
    """Client of a search: its arguments, else ``client_context``, else the enclosing run."""
    named = {name: kwargs.pop(f"casemate_{name}", "") for name in ("client", "tenant")}
    found, around = client_identity(**named), var_child_runnable_config.get()
    return _configured(around, found) if around and not found.client else found


def _configured(config: RunnableConfig, found: ClientIdentity) -> ClientIdentity:
    held = {**(config.get("metadata") or {}), **(config.get("configurable") or {})}
    said = client_identity(held.get("casemate_client") or "", held.get("casemate_tenant") or "")
    rights = found if found.client else said
    return ClientIdentity(found.client or said.client, found.tenant or said.tenant, rights.groups, rights.labels)


def _asking(config: RunnableConfig | None) -> AbstractContextManager[None]:
    """Sets the client of a run's config for the block."""
    found = _configured(ensure_config(config), ClientIdentity())
    return client_context(found.client, found.tenant, found.groups, found.labels)


def _scored(rows: Sequence[FrameworkDocument]) -> list[tuple[Document, float]]:
    if any(row.score is None for row in rows):
        raise NotImplementedError("this store returns no scores")
    return [(to_langchain(row), row.score) for row in rows if row.score is not None]


def _ids(documents: Sequence[Document], kwargs: Mapping[str, Any]) -> list[str]:
    """Ids of added documents: the given ones, else their own, else new ones."""
    given = kwargs.get("ids")
    if given and len(given) != len(documents):
        raise ValueError(f"ids must be as many as documents: {len(given)} ids for {len(documents)} documents")
    own = given or [d.id for d in documents]
    return [name or str(uuid.uuid4()) for name in own]
