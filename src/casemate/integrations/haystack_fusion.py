"""Haystack pipelines with several retrievers: a guarded joiner, and a check of the legs.

Haystack reads ``Variadic`` from annotations as objects, so this module does not postpone them.
"""

from typing import Any

from casemate.errors import needs
from casemate.integrations.guarded_query import GuardedQuery, client_identity
from casemate.integrations.haystack import GuardedHaystackRetriever, HaystackCollection

with needs("casemate[haystack]"):
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.components.joiners import DocumentJoiner
    from haystack.core.component.types import Variadic
    from haystack.core.serialization import component_to_dict


@component
class GuardedDocumentJoiner:
    """Joins the documents of several retrievers and returns those that the guard of one of them allows.

    It judges each joined document, whichever retriever it is from. Documents outside the guarded store are dropped.

    Args:
        retriever: The guarded retriever whose document store has all documents.
        joiner: A component with the inputs of Haystack's ``DocumentJoiner``. None: one with default options.
    """

    def __init__(self, retriever: GuardedHaystackRetriever, joiner: Any = None) -> None:
        self.retriever, self.joiner = retriever, joiner if joiner is not None else DocumentJoiner()

    def warm_up(self) -> None:
        """Warms up the retriever."""
        self.retriever.warm_up()

    @component.output_types(documents=list[Document])
    def run(
        self, documents: Variadic[list[Document]], query: str, client: str = "", tenant: str = ""
    ) -> dict[str, list[Document]]:
        """Joins and judges the documents of each retriever; ``client`` and ``tenant``: see ``ClientIdentity``."""
        joined, protection = self.joiner.run(documents=documents)["documents"], self.retriever.protection
        collection = protection.store
        assert isinstance(collection, HaystackCollection)
        given = protection.given([collection.row(document) for document in joined])
        if not given:
            return {"documents": []}
        who = client_identity(client, tenant)
        asked = GuardedQuery(query, self.retriever._embedded(query), len(given), who, {"whole": False}, given=given)
        return {"documents": self.retriever._shown(protection.retrieve(asked))}

    def to_dict(self) -> dict[str, Any]:
        """See ``GuardedHaystackRetriever.to_dict``. A loaded pipeline has a guard of its own in the joiner."""
        parts = {name: component_to_dict(getattr(self, name), name) for name in ("retriever", "joiner")}
        found: dict[str, Any] = default_to_dict(self, **parts)
        return found

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "GuardedDocumentJoiner":
        """See ``GuardedHaystackRetriever.from_dict``."""
        made: GuardedDocumentJoiner = default_from_dict(cls, data)
        return made


def unguarded_legs(pipeline: Any) -> list[str]:
    """Names every retriever of a pipeline whose documents no guard judges.

    A retriever is a component with a ``document_store`` that returns ``documents``. It counts as guarded if all its
    documents go to a ``GuardedDocumentJoiner``.

    Returns:
        One line for each leg, such as ``bm25: InMemoryBM25Retriever``. Empty: all are guarded.
    """
    found = []
    for name, part in pipeline.walk():
        retrieves = hasattr(part, "document_store") and "documents" in part.__haystack_output__._sockets_dict
        after = [pipeline.get_component(other) for other in pipeline.graph.successors(name)]
        judged = bool(after) and all(isinstance(other, GuardedDocumentJoiner) for other in after)
        if retrieves and not judged:
            found.append(f"{name}: {type(part).__name__}")
    return found
