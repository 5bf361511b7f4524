"""LlamaIndex: a retriever, or a node postprocessor, with a guard.

from casemate.integrations.llamaindex import guarded
retriever = guarded(index, similarity_top_k=5)
engine = RetrieverQueryEngine.from_args(retriever)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from casemate.collection import Piece
from casemate.errors import CapabilityError, ConfigError, needs
from casemate.integrations.adapters import Foreign, Foreigner
from casemate.integrations.asking import NOTHING, Asked, Asker, Row, asker
from casemate.integrations.protection import Protection, Protects

with needs("casemate[llamaindex]"):
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.indices.vector_store.base import VectorStoreIndex
    from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle
    from llama_index.core.vector_stores.types import VectorStoreQueryMode


class Nodes(Foreign):
    """The nodes of an index.

    Args:
        index: LlamaIndex's.
        dim: Length of a vector.
    """

    def __init__(self, index: VectorStoreIndex, dim: int) -> None:
        self.index, self.dim = index, dim
        self.name = f"VectorStoreIndex on {type(index.vector_store).__name__}"
        self._plain = VectorIndexRetriever(index)

    @property
    def _dictionary(self) -> dict[str, list[float]] | None:
        """The vectors of LlamaIndex's own store, which keeps no nodes; None: another store."""
        held = getattr(getattr(self.index.vector_store, "data", None), "embedding_dict", None)
        return held if isinstance(held, dict) else None

    def count(self) -> int:
        """See ``Collection.count``."""
        held = self._dictionary
        return sum(1 for _ in self.rows()) if held is None else len(held)

    def rows(self) -> Iterator[tuple[Row, Sequence[float]]]:
        """See ``Foreign.rows``."""
        held = self._dictionary
        if held is not None:
            for name, vector in list(held.items()):
                yield _row(self.index.docstore.get_node(name)), vector
            return
        yield from self._got(None)

    def find(self, ids: Sequence[str]) -> Piece:
        """See ``Collection.find``."""
        held = self._dictionary
        if held is None:
            return self.piece(list(self._got(list(ids))))
        there = [name for name in ids if name in held]
        return self.piece([(_row(self.index.docstore.get_node(name)), held[name]) for name in there])

    def look(self, vector: Any, k: int, options: dict[str, Any]) -> Sequence[Row]:
        """See ``Foreign.look``. By the retriever's own method below its callbacks: no trace sees what is withheld."""
        retriever = copy.copy(options.get("retriever", self._plain))
        retriever.similarity_top_k = k
        bundle = QueryBundle(options.get("text", ""), embedding=vector)
        return [_row(n.node, n.score) for n in retriever._get_nodes_with_embeddings(bundle)]

    def _got(self, ids: list[str] | None) -> Iterator[tuple[Row, Sequence[float]]]:
        try:
            nodes = self.index.vector_store.get_nodes(ids, None)
        except NotImplementedError as error:
            raise CapabilityError(
                f"{self.name} cannot be read through (no get_nodes), so the guard cannot know what else is there"
            ) from error
        for node in nodes:
            yield _row(node), node.get_embedding()


class GuardedRetriever(BaseRetriever):
    """A retriever that hands out what its guard lets through. Made by ``guarded``.

    Who asks is what ``asking`` says around the call, or the attributes ``casemate_client`` and ``casemate_tenant`` of
    the ``QueryBundle``.

    Attributes:
        unguarded: The retriever inside.
        protection: The guard, shared with the postprocessors made from this.
    """

    def __init__(self, retriever: VectorIndexRetriever, protection: Protection) -> None:
        self.unguarded, self.protection = retriever, protection
        super().__init__(retriever.callback_manager, retriever.object_map, verbose=retriever._verbose)

    @property
    def protects(self) -> Protects:
        """What is protected here, and what cannot be."""
        return self.protection.protects

    @property
    def similarity_top_k(self) -> int:
        """How many nodes."""
        return self.unguarded.similarity_top_k

    @similarity_top_k.setter
    def similarity_top_k(self, k: int) -> None:
        self.unguarded.similarity_top_k = k

    def as_postprocessor(self) -> GuardedPostprocessor:
        """The same guard for nodes that other retrievers of the same index found."""
        return GuardedPostprocessor(self.protection, self.unguarded._embed_model)

    def insert_nodes(self, nodes: Sequence[BaseNode], **options: Any) -> None:
        """Puts nodes into the index; the guard learns of them at once."""
        with self.protection.writing([node.node_id for node in nodes]):
            self.unguarded._index.insert_nodes(nodes, **options)

    def delete_ref_doc(self, ref_doc_id: str, **options: Any) -> None:
        """Takes a document's nodes out of the index; the guard learns of it at once."""
        held = self.unguarded._docstore.get_ref_doc_info(ref_doc_id)
        with self.protection.writing(None if held is None else list(held.node_ids)):
            self.unguarded._index.delete_ref_doc(ref_doc_id, **options)

    def calibrate(self, questions: Sequence[str] = ()) -> None:
        """Learns anew how close harmless questions come: when the log asks for it."""
        self.protection.calibrate(questions)

    def sync(self) -> None:
        """Reads the index through, after others wrote to it."""
        self.protection.sync()

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

    def _asked(self, bundle: QueryBundle) -> Asked:
        text = bundle.query_str
        options = {"retriever": self.unguarded, "text": text}
        limits = (self.unguarded._filters, self.unguarded._node_ids, self.unguarded._doc_ids)
        whole = {"text": text} if any(limit is not None for limit in limits) else None
        return Asked(text, bundle.embedding, self.similarity_top_k, _asker(bundle), options, whole)


class GuardedPostprocessor(BaseNodePostprocessor):
    """Judges the nodes that some retriever of a guarded index found, and puts others in the place of the withheld.

    Nodes that are not in the index are dropped. Without a question nothing can be judged, and nothing is handed on.
    """

    _protection: Protection = PrivateAttr()
    _model: BaseEmbedding = PrivateAttr()

    def __init__(self, protection: Protection, model: BaseEmbedding, **fields: Any) -> None:
        super().__init__(**fields)
        self._protection, self._model = protection, model

    @classmethod
    def class_name(cls) -> str:
        """See LlamaIndex."""
        return "GuardedPostprocessor"

    @property
    def protects(self) -> Protects:
        """What is protected here, and what cannot be."""
        return self._protection.protects

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        bundle = _required(query_bundle)
        if bundle.embedding is None and nodes:
            bundle.embedding = self._model.get_agg_embedding_from_queries(bundle.embedding_strs)
        asked = self._asked(nodes, bundle)
        return _kept(nodes, self._protection.retrieve(asked)) if asked else []

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        bundle = _required(query_bundle)
        if bundle.embedding is None and nodes:
            bundle.embedding = await self._model.aget_agg_embedding_from_queries(bundle.embedding_strs)
        asked = self._asked(nodes, bundle)
        return _kept(nodes, await self._protection.aretrieve(asked)) if asked else []

    def _asked(self, nodes: Sequence[NodeWithScore], bundle: QueryBundle) -> Asked | None:
        given = self._protection.given(_row(n.node, n.score) for n in nodes)
        return Asked(bundle.query_str, bundle.embedding, len(given), _asker(bundle), given=given) if given else None


def guarded(source: VectorStoreIndex | VectorIndexRetriever, **options: Any) -> GuardedRetriever:
    """A retriever with a guard in front of it.

    What it protects, and what it cannot protect there, is logged at INFO under ``casemate.integrations``, and is in the
    attribute ``protects``.

    Args:
        source: A vector index, or a retriever on one.
        **options: ``config``, ``path`` and ``fit``: see ``Protection``. All others are the retriever's, such as
            ``similarity_top_k`` and ``filters``.

    Raises:
        ConfigError: If the retriever does not search by similarity alone, or the configuration is wrong.
    """
    ours = {name: options.pop(name) for name in ("config", "path", "fit") if name in options}
    retriever = VectorIndexRetriever(source, **options) if isinstance(source, VectorStoreIndex) else source
    if not isinstance(retriever, VectorIndexRetriever):
        raise ConfigError(
            f"a {type(retriever).__name__} does not say what else there is: guard the vector index that holds the same "
            "nodes, and give guarded(index).as_postprocessor() to the engine"
        )
    if retriever._vector_store_query_mode != VectorStoreQueryMode.DEFAULT:
        raise ConfigError(
            f"the query mode {retriever._vector_store_query_mode.value!r} does not search by similarity alone: give "
            "guarded(index).as_postprocessor() to the engine, behind the retriever as it is"
        )
    model = retriever._embed_model
    name = f"llamaindex {type(model).__name__} {model.model_name}"
    embedder = Foreigner(name, model.get_query_embedding, model.get_text_embedding_batch)
    return GuardedRetriever(retriever, Protection(Nodes(retriever._index, embedder.dim), embedder, **ours))


def _row(node: BaseNode, score: float | None = None) -> Row:
    text = node.get_content(MetadataMode.NONE)
    return Row(node.node_id, text, node.metadata or NOTHING, node.ref_doc_id or "", node, score)


def _scored(row: Row) -> NodeWithScore:
    """LlamaIndex's node with its score; with the text that the defenses left, where one changed it."""
    node: BaseNode = row.native
    if node.get_content(MetadataMode.NONE) != row.text:
        node = node.model_copy(deep=True)
        node.set_content(row.text)
    return NodeWithScore(node=node, score=row.score)


def _kept(nodes: Sequence[NodeWithScore], rows: Sequence[Row]) -> list[NodeWithScore]:
    """What is left of somebody else's finds, in his order, then what took the place of the withheld."""
    left = {row.id: row for row in rows}
    kept = [_scored(left.pop(n.node.node_id)) for n in nodes if n.node.node_id in left]
    return kept + [_scored(row) for row in left.values()]


def _required(bundle: QueryBundle | None) -> QueryBundle:
    if bundle is None:
        raise ConfigError("nodes cannot be judged without their question: give query_bundle= or query_str=")
    return bundle


def _asker(bundle: QueryBundle) -> Asker:
    return asker(getattr(bundle, "casemate_client", ""), getattr(bundle, "casemate_tenant", ""))
