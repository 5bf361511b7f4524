"""LlamaIndex: guarded retrievers and node postprocessors.

from casemate.integrations.llamaindex import guarded
retriever = guarded(index, similarity_top_k=5)
engine = RetrieverQueryEngine.from_args(retriever)
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, overload

from casemate.errors import CapabilityError, ConfigError, needs
from casemate.integrations.adapters import FrameworkCollection, FrameworkEmbedder
from casemate.integrations.guarded_query import (
    NO_METADATA,
    ClientIdentity,
    FrameworkDocument,
    Guarded,
    GuardedQuery,
    client_identity,
)
from casemate.integrations.llamaindex_fusion import (
    GuardedFusionRetriever,
    JudgedNodesRetriever,
    has_legs,
    unguarded_legs,
    with_guarded_legs,
)
from casemate.integrations.protection import OPTIONS, Protected, Protection, ProtectionReport, refuse_unknown

with needs("casemate[llamaindex]"):
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.indices.vector_store.base import VectorStoreIndex
    from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle, TextNode
    from llama_index.core.vector_stores.types import VectorStoreQueryMode

RETRIEVER_OPTIONS = (*list(inspect.signature(VectorIndexRetriever).parameters)[1:-1], "vector_store_kwargs")
"""Options of LlamaIndex's own retriever, after the index; it ignores any other."""


class _LlamaIndexCollection(FrameworkCollection):
    """The nodes of a vector index."""

    def __init__(self, index: VectorStoreIndex, dim: int) -> None:
        self.index, self.dim = index, dim
        self.name = f"VectorStoreIndex on {type(index.vector_store).__name__}"
        self._plain = VectorIndexRetriever(index)

    @property
    def _dictionary(self) -> dict[str, list[float]] | None:
        """Vectors of LlamaIndex's default store, which holds no nodes; None for another store."""
        held = getattr(getattr(self.index.vector_store, "data", None), "embedding_dict", None)
        return held if isinstance(held, dict) else None

    def count(self) -> int:
        held = self._dictionary
        return sum(1 for _ in self.rows()) if held is None else len(held)

    def rows(self) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        held = self._dictionary
        if held is not None:
            for name, vector in list(held.items()):
                yield _row(self.index.docstore.get_node(name)), vector
            return
        yield from self._got(None)

    def stored(self, ids: Sequence[str]) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        held = self._dictionary
        if held is None:
            return self._got(list(ids))
        return ((_row(self.index.docstore.get_node(name)), held[name]) for name in ids if name in held)

    def search_store(self, vector: Any, k: int, options: dict[str, Any]) -> Sequence[FrameworkDocument]:
        """See ``FrameworkCollection.search_store``. No callbacks: a trace would reveal withheld nodes."""
        retriever = copy.copy(options.get("retriever", self._plain))
        retriever.similarity_top_k = k
        bundle = QueryBundle(options.get("text", ""), embedding=vector)
        return [_row(n.node, n.score) for n in retriever._get_nodes_with_embeddings(bundle)]

    def _got(self, ids: list[str] | None) -> Iterator[tuple[FrameworkDocument, Sequence[float]]]:
        try:
            nodes = self.index.vector_store.get_nodes(ids, None)
        except NotImplementedError as error:
            raise CapabilityError(
                f"{self.name} cannot be enumerated (no get_nodes), so the guard cannot compute similarity statistics"
            ) from error
        for node in nodes:
            yield _row(node), node.get_embedding()


class GuardedLlamaIndexRetriever(Protected, BaseRetriever):
    """A retriever that returns the nodes that its guard allows. Created by ``guarded``.

    The client is that of ``client_context``, or of the attributes ``casemate_client`` and ``casemate_tenant`` of the
    ``QueryBundle``.

    Attributes:
        protection: The guard, shared with the postprocessors of this retriever.
    """

    def __init__(self, retriever: VectorIndexRetriever, protection: Protection) -> None:
        self.unguarded, self.protection = retriever, protection
        super().__init__(retriever.callback_manager, retriever.object_map, verbose=retriever._verbose)

    @property
    def similarity_top_k(self) -> int:
        """Number of nodes."""
        return self.unguarded.similarity_top_k

    @similarity_top_k.setter
    def similarity_top_k(self, k: int) -> None:
        self.unguarded.similarity_top_k = k

    def as_postprocessor(self) -> GuardedPostprocessor:
        """Creates a postprocessor with the same guard, for the results of other retrievers of the index."""
        return GuardedPostprocessor(self.protection, self.unguarded._embed_model)

    def insert_nodes(self, nodes: Sequence[BaseNode], **options: Any) -> None:
        """Inserts nodes into the index and updates the guard. Those that the screening quarantines are left out."""
        withheld = self.protection.screen([_row(node) for node in nodes])
        nodes = [node for node in nodes if node.node_id not in withheld]
        with self.protection.writing([node.node_id for node in nodes]):
            self.unguarded._index.insert_nodes(nodes, **options)

    def delete_ref_doc(self, ref_doc_id: str, **options: Any) -> None:
        """Deletes a document's nodes from the index and updates the guard."""
        held = self.unguarded._docstore.get_ref_doc_info(ref_doc_id)
        with self.protection.writing(None if held is None else list(held.node_ids)):
            self.unguarded._index.delete_ref_doc(ref_doc_id, **options)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        if query_bundle.embedding is None:
            query_bundle.embedding = self._model.get_agg_embedding_from_queries(query_bundle.embedding_strs)
        return [_scored(row) for row in self.protection.retrieve(self._asked(query_bundle))]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        if query_bundle.embedding is None:
            query_bundle.embedding = await self._model.aget_agg_embedding_from_queries(query_bundle.embedding_strs)
        return [_scored(row) for row in await self.protection.aretrieve(self._asked(query_bundle))]

    @property
    def _model(self) -> BaseEmbedding:
        model: BaseEmbedding = self.unguarded._embed_model
        return model

    def _asked(self, bundle: QueryBundle) -> GuardedQuery:
        text = bundle.query_str
        options = {"retriever": self.unguarded, "text": text}
        limits = (self.unguarded._filters, self.unguarded._node_ids, self.unguarded._doc_ids)
        whole = {"text": text} if any(limit is not None for limit in limits) else None
        return GuardedQuery(text, bundle.embedding, self.similarity_top_k, _identity(bundle), options, whole)


class GuardedPostprocessor(Guarded, BaseNodePostprocessor):
    """Judges nodes from any retriever of a guarded index and replaces withheld ones.

    Nodes that are not in the index are dropped. Without a question it raises ``ConfigError``.
    """

    _protection: Protection = PrivateAttr()
    _model: BaseEmbedding = PrivateAttr()

    def __init__(self, protection: Protection, model: BaseEmbedding, **fields: Any) -> None:
        super().__init__(**fields)
        self._protection, self._model = protection, model

    @classmethod
    def class_name(cls) -> str:
        """Name of the class in LlamaIndex's serialized components."""
        return "GuardedPostprocessor"

    @property
    def protection_report(self) -> ProtectionReport:
        """What is protected here, and what is not."""
        return self._protection.protection_report

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        bundle = _required(query_bundle)
        if bundle.embedding is None and nodes:
            bundle.embedding = self._model.get_agg_embedding_from_queries(bundle.embedding_strs)
        asked = self._asked(nodes, bundle)
        return [_scored(row) for row in self._protection.retrieve(asked)] if asked else []

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        bundle = _required(query_bundle)
        if bundle.embedding is None and nodes:
            bundle.embedding = await self._model.aget_agg_embedding_from_queries(bundle.embedding_strs)
        asked = self._asked(nodes, bundle)
        return [_scored(row) for row in await self._protection.aretrieve(asked)] if asked else []

    def _asked(self, nodes: Sequence[NodeWithScore], bundle: QueryBundle) -> GuardedQuery | None:
        given = self._protection.given(_row(n.node, n.score) for n in nodes)
        return (
            GuardedQuery(bundle.query_str, bundle.embedding, len(given), _identity(bundle), given=given)
            if given
            else None
        )


@overload
def guarded(source: VectorStoreIndex | VectorIndexRetriever, **options: Any) -> GuardedLlamaIndexRetriever: ...
@overload
def guarded(source: BaseRetriever, *, judge: GuardedLlamaIndexRetriever | None = None) -> BaseRetriever: ...


def guarded(
    source: VectorStoreIndex | BaseRetriever, *, judge: GuardedLlamaIndexRetriever | None = None, **options: Any
) -> BaseRetriever:
    """Wraps a vector index, its retriever, or a retriever that combines others, with a guard.

    ``protection_report`` states what is protected and what is not; it is logged at INFO under
    ``casemate.integrations``.

    Args:
        source: A vector index, or a retriever on one; one that is guarded already is returned as it is. A
            retriever that combines others is copied with guarded legs.
        judge: Judges the results of other retrievers: a guarded retriever of the index with the same nodes.
        **options: ``config``, ``path`` and ``fit``: see ``Protection``. All others go to the retriever, such as
            ``similarity_top_k`` and ``filters``.

    Raises:
        ConfigError: If the retriever does not search by similarity alone, or the configuration is wrong. For a
            retriever that combines others, the message names each leg that nothing judges.
    """
    if isinstance(source, BaseRetriever) and (judge is not None or has_legs(source)):
        refuse_unknown(options, ("judge",))
        return _judged(source, judge)
    if isinstance(source, GuardedLlamaIndexRetriever) and not options:
        return source
    ours = {name: options.pop(name) for name in OPTIONS if name in options}
    takes = RETRIEVER_OPTIONS if isinstance(source, VectorStoreIndex) else ()
    refuse_unknown(options, (*OPTIONS, *takes))
    retriever = VectorIndexRetriever(source, **options) if isinstance(source, VectorStoreIndex) else source
    if not isinstance(retriever, VectorIndexRetriever):
        raise ConfigError(
            f"the results of a {type(retriever).__name__} cannot be judged alone: guard the vector index with the same "
            "nodes, and give judge=guarded(index), or pass guarded(index).as_postprocessor() to the engine"
        )
    if retriever._vector_store_query_mode != VectorStoreQueryMode.DEFAULT:
        raise ConfigError(
            f"the query mode {retriever._vector_store_query_mode.value!r} does not search by similarity alone: pass "
            "guarded(index).as_postprocessor() to the engine instead"
        )
    model = retriever._embed_model
    name = f"llamaindex {type(model).__name__} {model.model_name}"
    embedder = FrameworkEmbedder(name, model.get_query_embedding, model.get_text_embedding_batch)
    return GuardedLlamaIndexRetriever(
        retriever, Protection(_LlamaIndexCollection(retriever._index, embedder.dim), embedder, **ours)
    )


def _judged(source: BaseRetriever, judge: GuardedLlamaIndexRetriever | None) -> BaseRetriever:
    """A retriever of any kind with every leg guarded."""

    def leaf(leg: BaseRetriever) -> BaseRetriever:
        return leg if judge is None else JudgedNodesRetriever(leg, judge.as_postprocessor())

    made: BaseRetriever = with_guarded_legs(source, leaf)
    if legs := unguarded_legs(made.unguarded if isinstance(made, GuardedFusionRetriever) else made):
        raise ConfigError(
            f"nothing judges the results of {', '.join(legs)}: guard each with guarded(), or give judge=, a guarded "
            "retriever of the index with the same nodes"
        )
    return made


def _row(node: BaseNode, score: float | None = None) -> FrameworkDocument:
    text = node.get_content(MetadataMode.NONE)
    related = [one for info in node.relationships.values() for one in (info if isinstance(info, list) else [info])]
    return FrameworkDocument(
        node.node_id,
        text,
        node.metadata or NO_METADATA,
        node.ref_doc_id or "",
        node,
        score,
        related=[(one.node_id, one.metadata) for one in related],
    )


def _scored(row: FrameworkDocument) -> NodeWithScore:
    """LlamaIndex's node with its score, and its text as changed by defenses."""
    if row.native is None:  # composed by a defense
        return NodeWithScore(node=TextNode(id_=row.id, text=row.text), score=row.score)
    node: BaseNode = row.native
    if node.get_content(MetadataMode.NONE) != row.text:
        node = node.model_copy(deep=True)
        node.set_content(row.text)
    return NodeWithScore(node=node, score=row.score)


def _required(bundle: QueryBundle | None) -> QueryBundle:
    if bundle is None:
        raise ConfigError("nodes cannot be judged without their question; give query_bundle= or query_str=")
    return bundle


def _identity(bundle: QueryBundle) -> ClientIdentity:
    return client_identity(getattr(bundle, "casemate_client", ""), getattr(bundle, "casemate_tenant", ""))
