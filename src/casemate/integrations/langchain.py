"""LangChain: a vector store or a retriever with a guard in front of it.

::

    from casemate.integrations.langchain import guarded
    store = guarded(store)

The result is a ``VectorStore`` (or a retriever) in its turn: chains, agents, tracing and streaming go on as they were.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, overload

from casemate.errors import ConfigError, needs
from casemate.integrations.adapters import Foreigner
from casemate.integrations.asking import Asked, Asker, Row, asker, asking
from casemate.integrations.langchain_stores import Source, Vectors, adapted, matrix, shown
from casemate.integrations.protection import Protection, Protects

with needs("casemate[langchain]"):
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import RunnableConfig
    from langchain_core.runnables.config import ensure_config, var_child_runnable_config
    from langchain_core.vectorstores import InMemoryVectorStore, VectorStore, VectorStoreRetriever
    from langchain_core.vectorstores.utils import maximal_marginal_relevance

K = 4
"""LangChain's own default."""


class GuardedVectorStore(VectorStore):
    """A vector store that hands out what its guard lets through. Made by ``guarded``.

    Every search takes ``casemate_client=`` and ``casemate_tenant=`` beside what the store takes; without them, who asks
    is what the run's config says (``metadata`` or ``configurable``, by the same keys).

    Attributes:
        unguarded: The store inside, for the owner's own work. What it hands out is not guarded.
        protection: The guard, shared by all that is made from this.
    """

    def __init__(self, store: VectorStore, protection: Protection) -> None:
        self.unguarded = store
        self.protection = protection

    @property
    def protects(self) -> Protects:
        """What is protected here, and what cannot be."""
        return self.protection.protects

    @property
    def embeddings(self) -> Embeddings | None:
        """The store's own."""
        return self.unguarded.embeddings

    def similarity_search(self, query: str, k: int = K, **kwargs: Any) -> list[Document]:
        """See LangChain."""
        return [shown(row) for row in self._rows(query, k, kwargs)]

    async def asimilarity_search(self, query: str, k: int = K, **kwargs: Any) -> list[Document]:
        """See LangChain."""
        return [shown(row) for row in await self._arows(query, k, kwargs)]

    def similarity_search_with_score(self, query: str, k: int = K, **kwargs: Any) -> list[tuple[Document, float]]:
        """See LangChain. The scores are the store's own."""
        return _scored(self._rows(query, k, kwargs))

    async def asimilarity_search_with_score(
        self, query: str, k: int = K, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """See LangChain. The scores are the store's own."""
        return _scored(await self._arows(query, k, kwargs))

    def similarity_search_by_vector(self, embedding: list[float], k: int = K, **kwargs: Any) -> list[Document]:
        """See LangChain. Without the words of the question a stricter rule judges."""
        return [shown(row) for row in self.protection.retrieve(self._asked("", embedding, k, kwargs))]

    async def asimilarity_search_by_vector(self, embedding: list[float], k: int = K, **kwargs: Any) -> list[Document]:
        """See LangChain. Without the words of the question a stricter rule judges."""
        return [shown(row) for row in await self.protection.aretrieve(self._asked("", embedding, k, kwargs))]

    def max_marginal_relevance_search(
        self, query: str, k: int = K, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """See LangChain. All candidates are judged, before any is chosen."""
        asked = self._asked(query, self._embedded(query), max(fetch_k, k), kwargs)
        return self._chosen(asked, self.protection.retrieve(asked), k, lambda_mult)

    async def amax_marginal_relevance_search(
        self, query: str, k: int = K, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """See LangChain. All candidates are judged, before any is chosen."""
        asked = self._asked(query, await self._aembedded(query), max(fetch_k, k), kwargs)
        return self._chosen(asked, await self.protection.aretrieve(asked), k, lambda_mult)

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = K, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """See LangChain. Without the words of the question a stricter rule judges."""
        asked = self._asked("", embedding, max(fetch_k, k), kwargs)
        return self._chosen(asked, self.protection.retrieve(asked), k, lambda_mult)

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """See LangChain. What is withheld from whoever asks (``asking``, or the run's config) is not there for him."""
        return self._by_ids(self.unguarded.get_by_ids(ids), self.protection.withheld(_asker({})))

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """See LangChain."""
        return self._by_ids(await self.unguarded.aget_by_ids(ids), await self.protection.awithheld(_asker({})))

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """See LangChain."""
        ids = _ids(documents, kwargs)
        with self.protection.writing(ids):
            added = self.unguarded.add_documents(documents, **{**kwargs, "ids": ids})
        if added != ids:  # a store that names documents itself
            self.sync()
        return added

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """See LangChain. In a thread: writers wait for one another."""
        return await asyncio.to_thread(self.add_documents, documents, **kwargs)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """See LangChain."""
        with self.protection.writing(ids):
            return self.unguarded.delete(ids, **kwargs)

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """See LangChain. In a thread: writers wait for one another."""
        return await asyncio.to_thread(self.delete, ids, **kwargs)

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
        """A guarded ``InMemoryVectorStore``; for another, make it and give it to ``guarded``."""
        store = InMemoryVectorStore.from_texts(texts, embedding, metadatas, ids=ids)
        return cls(store, _protection(store, **kwargs))

    def as_retriever(self, **kwargs: Any) -> GuardedRetriever:
        """See LangChain."""
        tags = kwargs.pop("tags", None) or [*self._get_retriever_tags()]
        return GuardedRetriever(vectorstore=self, tags=tags, **kwargs)

    def calibrate(self, questions: Sequence[str] = ()) -> None:
        """Learns anew how close harmless questions come: when the log asks for it."""
        self.protection.calibrate(questions)

    def sync(self) -> None:
        """Reads the store through, after others wrote to it."""
        self.protection.sync()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a guarded store has no {name!r}; the store inside, without a guard, is .unguarded")

    def _get_retriever_tags(self) -> list[str]:
        return self.unguarded._get_retriever_tags()

    def _select_relevance_score_fn(self) -> Any:
        return self.unguarded._select_relevance_score_fn()

    def _rows(self, query: str, k: int, kwargs: dict[str, Any]) -> list[Row]:
        return self.protection.retrieve(self._asked(query, self._embedded(query), k, kwargs))

    async def _arows(self, query: str, k: int, kwargs: dict[str, Any]) -> list[Row]:
        return await self.protection.aretrieve(self._asked(query, await self._aembedded(query), k, kwargs))

    def _embedded(self, query: str) -> list[float]:
        assert self.embeddings is not None
        return self.embeddings.embed_query(query)

    async def _aembedded(self, query: str) -> list[float]:
        assert self.embeddings is not None
        return await self.embeddings.aembed_query(query)

    def _asked(self, text: str, vector: Any, k: int, kwargs: dict[str, Any]) -> Asked:
        return Asked(text, vector, k, _asker(kwargs), kwargs, {} if kwargs else None)

    def _chosen(self, asked: Asked, rows: list[Row], k: int, lambda_mult: float) -> list[Document]:
        if not rows:
            return []
        ids = [row.id for row in rows]
        vectors = matrix(self.protection.store.find(ids), ids)
        assert asked.vector is not None
        order = maximal_marginal_relevance(asked.vector, vectors, k=k, lambda_mult=lambda_mult)
        return [shown(rows[i]) for i in order]

    def _by_ids(self, documents: list[Document], withheld: Collection[str]) -> list[Document]:
        if not withheld:
            return documents
        sources = self.protection.sources(str(d.id) for d in documents)
        return [d for d in documents if d.id in sources and sources[d.id] not in withheld]


class GuardedRetriever(VectorStoreRetriever):
    """A retriever on a guarded store: all search types, and who asks by the run's config.

    Attributes:
        k: How many documents; unset: as ``search_kwargs`` says.
    """

    k: int | None = None

    def model_post_init(self, context: Any, /) -> None:
        """Refuses a store without a guard."""
        super().model_post_init(context)
        if not isinstance(self.vectorstore, GuardedVectorStore):
            raise ConfigError(f"a {type(self.vectorstore).__name__} is not guarded; give guarded(store)")
        if self.k is not None:
            self.search_kwargs = {**self.search_kwargs, "k": self.k}

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """See LangChain."""
        with _asking(config):
            return super().invoke(input, config, **kwargs)

    async def ainvoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """See LangChain."""
        with _asking(config):
            return await super().ainvoke(input, config, **kwargs)


class JudgedRetriever(BaseRetriever):
    """Somebody else's retriever: what it finds is judged before it is handed on. Made by ``guarded``.

    Its own run is not traced: a trace, or a stream of events made from one, would show what is withheld.

    Attributes:
        retriever: The one inside.
        store: The guarded store whose documents it finds. What is not in it is dropped.
    """

    retriever: BaseRetriever
    store: GuardedVectorStore

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """See LangChain."""
        with _asking(config):
            return super().invoke(input, config, **kwargs)

    async def ainvoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """See LangChain."""
        with _asking(config):
            return await super().ainvoke(input, config, **kwargs)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        found = self.retriever.invoke(query, {"callbacks": []}, **kwargs)
        asked = self._asked(query, self.store._embedded(query), found)
        return _kept(found, self.store.protection.retrieve(asked)) if asked else []

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        found = await self.retriever.ainvoke(query, {"callbacks": []}, **kwargs)
        asked = self._asked(query, await self.store._aembedded(query), found)
        return _kept(found, await self.store.protection.aretrieve(asked)) if asked else []

    def _asked(self, query: str, vector: list[float], found: Sequence[Document]) -> Asked | None:
        given = self.store.protection.given(Row(str(d.id), d.page_content, d.metadata, native=d) for d in found)
        return Asked(query, vector, len(given), _asker({}), given=given) if given else None


@overload
def guarded(inner: VectorStore, /, **options: Any) -> GuardedVectorStore: ...
@overload
def guarded(inner: VectorStoreRetriever, /, **options: Any) -> GuardedRetriever: ...
@overload
def guarded(inner: BaseRetriever, /, **options: Any) -> BaseRetriever: ...


def guarded(
    inner: VectorStore | BaseRetriever, /, **options: Any
) -> GuardedVectorStore | GuardedRetriever | BaseRetriever:
    """The same with a guard in front of it.

    What it protects, and what it cannot protect there, is logged at INFO under ``casemate.integrations``, and is in the
    attribute ``protects``.

    Args:
        inner: A vector store; or a retriever. A retriever that is not on a vector store needs ``store=``, a guarded
            one that holds what it finds.
        **options: ``config``: a ``casemate.yaml``, or the same as a mapping; without it Mirabel stands guard as it
            comes. ``path``: a folder in which the guard keeps what it knows; without it, it is forgotten at the end.
            ``fit``: see ``Protection``. ``source``: the key of the metadata that names the record that a document was
            cut from, or a function of the metadata; usually ``source``. ``vectors``, ``cosine``: for a store that
            cannot be read through otherwise (``langchain_stores.Plain``).

    Raises:
        ConfigError: If the configuration is wrong, or nothing can be judged with what is given.
    """
    if isinstance(inner, GuardedVectorStore | GuardedRetriever | JudgedRetriever):
        if options:
            raise ConfigError(f"it is guarded already; {', '.join(options)} would change nothing")
        return inner
    if isinstance(inner, VectorStore):
        return GuardedVectorStore(inner, _protection(inner, **options))
    if isinstance(inner, VectorStoreRetriever):
        fields = {name: getattr(inner, name) for name in ("search_type", "search_kwargs", "tags", "metadata")}
        return GuardedRetriever(vectorstore=guarded(inner.vectorstore, **options), **fields)
    held = options.pop("store", None)
    if not isinstance(held, GuardedVectorStore) or options:
        raise ConfigError(
            f"a {type(inner).__name__} does not say what else there is, so nothing it finds can be judged alone: "
            "give store=, the guarded vector store that holds what it finds, and nothing else"
        )
    return JudgedRetriever(retriever=inner, store=held)


def _protection(
    store: VectorStore,
    *,
    source: Source = "source",
    vectors: Vectors | None = None,
    cosine: Callable[[float], float] | None = None,
    **options: Any,
) -> Protection:
    if store.embeddings is None:
        raise ConfigError(f"this {type(store).__name__} does not say how it embeds (embeddings is None)")
    embedder = Foreigner(_model(store.embeddings), store.embeddings.embed_query, store.embeddings.embed_documents)
    return Protection(adapted(store, embedder, source, vectors, cosine), embedder, **options)


def _model(embeddings: Embeddings) -> str:
    """What tells one model from another, as far as it says."""
    said = (getattr(embeddings, name, None) for name in ("model", "model_name", "model_id", "repo_id"))
    name = next((s for s in said if isinstance(s, str) and s), "")
    return " ".join(["langchain", type(embeddings).__name__, name]).rstrip()


def _asker(kwargs: dict[str, Any]) -> Asker:
    """Who asks, taken out of a search's arguments; else as ``asking`` says, else as the run around does."""
    named = {name: kwargs.pop(f"casemate_{name}", "") for name in ("client", "tenant")}
    found, around = asker(**named), var_child_runnable_config.get()
    return _configured(around, found) if around and not found.client else found


def _configured(config: RunnableConfig, found: Asker) -> Asker:
    held = {**(config.get("metadata") or {}), **(config.get("configurable") or {})}
    said = asker(held.get("casemate_client") or "", held.get("casemate_tenant") or "")
    return Asker(found.client or said.client, found.tenant or said.tenant)


def _asking(config: RunnableConfig | None) -> AbstractContextManager[None]:
    """Who asks by a run's config, for what is done within."""
    found = _configured(ensure_config(config), Asker())
    return asking(found.client, found.tenant)


def _scored(rows: Sequence[Row]) -> list[tuple[Document, float]]:
    if any(row.score is None for row in rows):
        raise NotImplementedError("this store tells no scores")
    return [(shown(row), row.score) for row in rows if row.score is not None]


def _ids(documents: Sequence[Document], kwargs: Mapping[str, Any]) -> list[str]:
    """The ids under which documents are added: those given, else their own, else new ones."""
    given = kwargs.get("ids")
    if given and len(given) != len(documents):
        raise ValueError(f"ids must be as many as documents: {len(given)} ids for {len(documents)} documents")
    own = given or [d.id for d in documents]
    return [name or str(uuid.uuid4()) for name in own]


def _kept(found: Sequence[Document], rows: Sequence[Row]) -> list[Document]:
    """What is left of somebody else's finds, in his order, then what took the place of the withheld."""
    left = {row.id: row for row in rows}
    kept = [shown(left.pop(d.id)) for d in found if d.id in left]
    return kept + [shown(row) for row in left.values()]
