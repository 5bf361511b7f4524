"""Casemate guards a private RAG system."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from casemate.errors import BackendError as BackendError
    from casemate.errors import CasemateError as CasemateError
    from casemate.errors import ConfigError as ConfigError
    from casemate.errors import DataError as DataError
    from casemate.errors import QueryError as QueryError
    from casemate.guard.guard import Guard as Guard
    from casemate.protocols import Defense as Defense
    from casemate.rag.pipeline import Rag as Rag
    from casemate.types import Action as Action
    from casemate.types import Answer as Answer
    from casemate.types import Document as Document
    from casemate.types import Hit as Hit
    from casemate.types import Outcome as Outcome
    from casemate.types import Query as Query
    from casemate.types import Reply as Reply
    from casemate.types import Retrieval as Retrieval
    from casemate.types import SimilarityStats as SimilarityStats
    from casemate.types import Verdict as Verdict

_MODULES = {
    "errors": "BackendError CasemateError ConfigError DataError QueryError",
    "guard.guard": "Guard",
    "protocols": "Defense",
    "rag.pipeline": "Rag",
    "types": "Action Answer Document Hit Outcome Query Reply Retrieval SimilarityStats Verdict",
}
"""The module of each name. It is imported on first use, because the command line needs few of them."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names.split():
            return getattr(import_module(f"casemate.{module}"), name)
    raise AttributeError(f"module 'casemate' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*(n for n in globals() if n.startswith("_")), *" ".join(_MODULES.values()).split()]
