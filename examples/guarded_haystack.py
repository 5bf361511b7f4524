"""A Haystack pipeline with a guarded retriever, around fictional case notes. No network, no key."""

import os

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")  # before Haystack is imported: it counts its users

from haystack import Document, Pipeline, component
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

from casemate.backends.minilm import MiniLM
from casemate.demo.clinic import case_notes
from casemate.integrations.haystack import GuardedRetriever

MODEL = MiniLM()


@component
class LocalEmbedder:
    """Casemate's own embedder for Haystack. Yours will be another."""

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, list[float]]:
        """See Haystack's text embedders."""
        return {"embedding": MODEL.embed([text])[0].tolist()}


def main() -> None:
    """Asks for a note with its own words."""
    notes = case_notes(40)
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    vectors = MODEL.embed([text for _, text in notes]).tolist()
    store.write_documents(
        [Document(id=name, content=text, embedding=v) for (name, text), v in zip(notes, vectors, strict=True)]
    )
    published = {"guard": {"defenses": [{"use": "mirabel", "mode": "paper"}]}}  # the default is better, after a fit
    pipeline = Pipeline()
    bare = InMemoryEmbeddingRetriever(store, top_k=3)
    pipeline.add_component("retriever", GuardedRetriever(bare, LocalEmbedder(), config=published))
    name, text = notes[7]
    told = pipeline.run({"retriever": {"query": f"Is this in your files? {text}", "client": "alice"}})
    found = [d.id for d in told["retriever"]["documents"]]
    print(pipeline.get_component("retriever").protects)
    print("retrieved:", found)
    assert name not in found
    assert len(found) == 3


if __name__ == "__main__":
    main()
