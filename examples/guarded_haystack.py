"""Guards the retriever of a Haystack pipeline over fictional case notes. Needs no network and no key."""

import os

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")  # Haystack reads it at import

from haystack import Document, Pipeline, component
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

from casemate.backends.embedders.minilm import MiniLM
from casemate.demo.clinic import case_notes
from casemate.integrations.haystack import GuardedHaystackRetriever

MODEL = MiniLM()


@component
class LocalEmbedder:  # Casemate's embedder as one of Haystack; replace it with yours
    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, list[float]]:
        return {"embedding": MODEL.embed([text])[0].tolist()}


notes = case_notes(40)
vectors = MODEL.embed([text for _, text in notes]).tolist()
store = InMemoryDocumentStore(embedding_similarity_function="cosine")
store.write_documents([Document(id=n, content=t, embedding=v) for (n, t), v in zip(notes, vectors, strict=True)])
published = {"guard": {"defenses": [{"use": "mirabel", "mode": "paper"}]}}  # the default calibrates, more accurately
bare = InMemoryEmbeddingRetriever(store, top_k=3)
pipeline = Pipeline()
pipeline.add_component("retriever", GuardedHaystackRetriever(bare, LocalEmbedder(), config=published))

name, text = notes[7]
result = pipeline.run({"retriever": {"query": f"Is this in your files? {text}", "client": "alice"}})
found = [d.id for d in result["retriever"]["documents"]]
print(pipeline.get_component("retriever").protection_report)
print("retrieved:", found)
assert name not in found
