"""LlamaIndex retrievers that combine others: their guarded form, and a check of their legs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from casemate.errors import needs
from casemate.guard.turn import Turn, turn
from casemate.integrations.guarded_query import Guarded, client_context, client_identity

with needs("casemate[llamaindex]"):
    from llama_index.core.base.base_query_engine import BaseQueryEngine
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
    from llama_index.core.tools import QueryEngineTool, RetrieverTool

Leaf: TypeAlias = Callable[[BaseRetriever], BaseRetriever]
FOLLOWED = (BaseRetriever, BaseQueryEngine, RetrieverTool, QueryEngineTool, list, tuple, dict)


class GuardedFusionRetriever(Guarded, BaseRetriever):
    """A retriever that combines guarded ones, as one turn: no query brings back what another one withholds.

    Created by ``guarded``. Nodes that no guarded leg returned are dropped.
    """

    def __init__(self, retriever: BaseRetriever) -> None:
        self.unguarded = retriever
        super().__init__(retriever.callback_manager)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        with _client(query_bundle), turn(query_bundle.query_str) as current:
            return _allowed(current, self.unguarded._retrieve(query_bundle))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        with _client(query_bundle), turn(query_bundle.query_str) as current:
            return _allowed(current, await self.unguarded._aretrieve(query_bundle))


class JudgedNodesRetriever(Guarded, BaseRetriever):
    """Judges the nodes of another retriever before returning them. Created by ``guarded``."""

    def __init__(self, retriever: BaseRetriever, judge: BaseNodePostprocessor) -> None:
        self.unguarded, self._judge = retriever, judge
        super().__init__(retriever.callback_manager)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._judge._postprocess_nodes(self.unguarded._retrieve(query_bundle), query_bundle)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = await self.unguarded._aretrieve(query_bundle)
        return await self._judge._apostprocess_nodes(found, query_bundle)


def unguarded_legs(part: Any) -> list[str]:
    """Names every retriever in a retriever, query engine or tool that no guard judges.

    Returns:
        One line for each leg, such as ``QueryFusionRetriever._retrievers[1]: BM25Retriever``. Empty: all are guarded.
    """
    return [f"{path}: {type(leg).__name__}" for path, leg in _legs(part, type(part).__name__)]


def with_guarded_legs(part: Any, leaf: Leaf) -> Any:
    """A copy of a retriever in which ``leaf`` replaces every retriever without a guard, and fusions are guarded."""
    if isinstance(part, Guarded):
        return part
    if isinstance(part, list | tuple):
        return type(part)(with_guarded_legs(one, leaf) for one in part)
    if isinstance(part, dict):
        return {name: with_guarded_legs(one, leaf) for name, one in part.items()}
    if not isinstance(part, BaseRetriever):
        return part
    if not has_legs(part):
        return leaf(part)
    made = copy.copy(part)
    for name, one in vars(part).items():
        if isinstance(one, BaseRetriever | list | tuple | dict):
            setattr(made, name, with_guarded_legs(one, leaf))
    return GuardedFusionRetriever(made)


def has_legs(retriever: BaseRetriever) -> bool:
    """Whether a retriever asks other ones."""
    return any(_retrieves(one) for one in vars(retriever).values())


def _retrieves(part: Any) -> bool:
    if isinstance(part, list | tuple | dict):
        return any(map(_retrieves, part.values() if isinstance(part, dict) else part))
    return isinstance(part, BaseRetriever)


def _legs(part: Any, path: str) -> Iterator[tuple[str, BaseRetriever]]:
    if isinstance(part, Guarded):
        return
    if isinstance(part, BaseRetriever) and not has_legs(part):
        yield path, part
        return
    if any(isinstance(one, Guarded) for one in getattr(part, "_node_postprocessors", None) or ()):
        return  # an engine that judges whatever it retrieves
    for name, one in _members(part):
        yield from _legs(one, f"{path}{name}")


def _members(part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, list | tuple):
        held: Any = ((f"[{i}]", one) for i, one in enumerate(part))
    elif isinstance(part, dict):
        held = ((f"[{name!r}]", one) for name, one in part.items())
    else:
        held = ((f".{name}", one) for name, one in vars(part).items())
    return ((name, one) for name, one in held if isinstance(one, FOLLOWED))


def _client(bundle: QueryBundle) -> Any:
    who = client_identity(getattr(bundle, "casemate_client", ""), getattr(bundle, "casemate_tenant", ""))
    return client_context(who.client, who.tenant, who.groups, who.labels)


def _allowed(current: Turn, nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    return current.allowed(nodes, lambda n: (n.node.node_id, n.node.get_content(MetadataMode.NONE)))
