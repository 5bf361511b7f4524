"""Guards a LangChain vector store, here Chroma if it is installed. Needs no network and no key."""

from importlib.util import find_spec

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore

from casemate.backends.embedders.minilm import MiniLM
from casemate.demo.clinic import case_notes
from casemate.integrations.langchain import guarded


class LocalModel(Embeddings):  # Casemate's embedder as one of LangChain; replace it with yours
    model = MiniLM()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.model.embed(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


if find_spec("langchain_chroma"):
    from langchain_chroma import Chroma

    store = Chroma("notes", LocalModel(), collection_metadata={"hnsw:space": "cosine"})
else:
    store = InMemoryVectorStore(LocalModel())
notes = [(name, text[:160]) for name, text in case_notes(40)]  # short, so that the calibration takes seconds
store.add_documents([Document(text, id=name, metadata={"source": name}) for name, text in notes])
name, text = notes[7]
question = f"Is this in your files? {text}"
safe = guarded(store, config={"calibrate": {"questions": 40, "documents": 20}})  # the defaults are more accurate
found = safe.as_retriever(search_kwargs={"k": 3}).invoke(question, {"metadata": {"casemate_client": "alice"}})
print(safe.protection_report)
print("without the guard:", [d.id for d in store.similarity_search(question, k=3)])
print("with the guard:   ", [d.id for d in found])
assert name not in [d.id for d in found]
