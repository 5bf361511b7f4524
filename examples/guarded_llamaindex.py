"""Guards the retriever of a LlamaIndex query engine over fictional case notes. Needs no network and no key."""

from llama_index.core import VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import TextNode

from casemate.backends.embedders.minilm import MiniLM
from casemate.demo.clinic import case_notes
from casemate.integrations.guarded_query import client_context
from casemate.integrations.llamaindex import guarded

MODEL = MiniLM()


class LocalModel(BaseEmbedding):  # Casemate's embedder as one of LlamaIndex; replace it with yours
    def _get_text_embedding(self, text: str) -> list[float]:
        return MODEL.embed([text])[0].tolist()

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


notes = case_notes(40)
index = VectorStoreIndex([TextNode(text=text, id_=name) for name, text in notes], embed_model=LocalModel())
published = {"guard": {"defenses": [{"use": "mirabel", "mode": "paper"}]}}  # the default calibrates, more accurately
retriever = guarded(index, config=published, similarity_top_k=3)
engine = RetrieverQueryEngine.from_args(retriever, llm=MockLLM(max_tokens=8))
name, text = notes[7]
with client_context("alice"):
    answer = engine.query(f"Is this in your files? {text}")
sources = [n.node.node_id for n in answer.source_nodes]
print(retriever.protection_report)
print("read for the answer:", sources)
assert name not in sources
