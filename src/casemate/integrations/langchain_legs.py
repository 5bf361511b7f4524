"""The legs of LangChain retrievers that combine others: ensembles, rewriters, compressors, chains, tools and graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import getclosurevars
from types import FunctionType, MethodType
from typing import Any, TypeAlias

from casemate.errors import needs
from casemate.integrations.guarded_query import Guarded

with needs("casemate[langchain]"):
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import Runnable, RunnableLambda
    from langchain_core.vectorstores import VectorStore, VectorStoreRetriever
    from pydantic import BaseModel

Replace: TypeAlias = Callable[[Any], Any]


def unguarded_legs(part: Any) -> list[str]:
    """Names every retriever and vector store in a retriever, chain, tool or graph that no guard judges.

    It follows fields, closures, global names and arguments of the objects of LangChain and LangGraph. It does not see
    what other code calls.

    Returns:
        One line for each leg, such as ``EnsembleRetriever.retrievers[1]: BM25Retriever``. Empty: all are guarded.
    """
    legs = {id(leg): (path, leg) for path, leg in reversed(list(_legs(part, _type(part), set())))}
    return [f"{path}: {_type(leg)}" for path, leg in reversed(legs.values()) if not _is_guarded(leg)]


def legs_of(part: Any) -> list[Any]:
    """Returns the retrievers and stores of a part that have no further legs, guarded ones as they are."""
    return [leg for _, leg in _legs(part, "", set())]


def has_legs(retriever: BaseRetriever) -> bool:
    """Whether a retriever combines others."""
    return any(leg is not retriever for leg in legs_of(retriever))


def with_guarded_legs(part: Any, leaf: Replace, fusion: Replace) -> Any:
    """A copy with other legs. Objects without an unguarded leg are kept as they are.

    ``leaf`` replaces an unguarded retriever or vector store without legs, ``fusion`` a copied retriever that combines
    others.
    """
    if _is_guarded(part):
        return part
    if isinstance(part, list | tuple):
        return type(part)(with_guarded_legs(one, leaf, fusion) for one in part)
    if isinstance(part, dict):
        return {name: with_guarded_legs(one, leaf, fusion) for name, one in part.items()}
    if isinstance(part, VectorStore) or (isinstance(part, BaseRetriever) and not has_legs(part)):
        return leaf(part)
    if isinstance(part, BaseModel) and isinstance(part, Runnable):
        held = {name: getattr(part, name) for name in type(part).model_fields}
        made = {name: with_guarded_legs(one, leaf, fusion) for name, one in held.items() if _followed(one)}
        copied = part.model_copy(update={name: one for name, one in made.items() if one is not held[name]})
        return fusion(copied) if isinstance(part, BaseRetriever) else copied
    return part


def _legs(part: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The retrievers and stores of a part that have no further legs, with their paths."""
    if id(part) in seen:
        return
    if _is_guarded(part) or isinstance(part, VectorStore | VectorStoreRetriever):
        yield path, part
        return
    seen = {*seen, id(part)}
    found = [leg for name, one in _members(part) for leg in _legs(one, f"{path}{name}", seen)]
    if isinstance(part, BaseRetriever) and not found:
        found = [(path, part)]
    yield from found


def _members(part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, list | tuple):
        held: Any = ((f"[{i}]", one) for i, one in enumerate(part))
    elif isinstance(part, dict):
        held = ((f"[{name!r}]", one) for name, one in part.items())
    elif isinstance(part, partial):
        held = ((f".{name}", one) for name, one in part.keywords.items())
    elif isinstance(part, FunctionType):
        used = getclosurevars(part)
        named = {name: one for name, one in used.globals.items() if isinstance(one, Guarded | Runnable | VectorStore)}
        held = ((f".{name}", one) for name, one in {**named, **used.nonlocals}.items())
    elif isinstance(part, MethodType):
        held = [
            ("", part.__func__),
            *((f".{name}", one) for name, one in getattr(part.__self__, "__dict__", {}).items()),
        ]
    elif isinstance(part, RunnableLambda):
        held = [(f".deps[{i}]", one) for i, one in enumerate(part.deps)]
        held += [(f".{name}", getattr(part, name, None)) for name in ("func", "afunc")]
    elif isinstance(part, BaseModel):
        held = ((f".{name}", getattr(part, name)) for name in type(part).model_fields)
    elif isinstance(nodes := getattr(part, "nodes", None), dict):  # a graph of LangGraph
        held = ((f".nodes[{name!r}]", getattr(node, "bound", None)) for name, node in nodes.items())
    elif isinstance(part, Runnable):
        held = ((f".{name.strip('_')}", one) for name, one in vars(part).items())
    else:
        held = ()
    return ((name, one) for name, one in held if _followed(one))


def _followed(part: Any) -> bool:
    return isinstance(
        part, Guarded | Runnable | VectorStore | list | tuple | dict | partial | FunctionType | MethodType
    )


def _is_guarded(part: Any) -> bool:
    return isinstance(part, Guarded) or (
        isinstance(part, VectorStoreRetriever) and isinstance(part.vectorstore, Guarded)
    )


def _type(part: Any) -> str:
    return type(part).__name__
