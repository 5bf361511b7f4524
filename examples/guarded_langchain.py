"""Guards a LangChain vector store of fictional case notes. Needs no network and no key."""

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore

from casemate.backends.embedders.minilm import MiniLM
from casemate.demo.clinic import case_notes
from casemate.integrations.langchain import guarded


class LocalModel(Embeddings):
    """Casemate's embedder as a LangChain embedder. Replace it with yours."""

    def __init__(self) -> None:
        self.model = MiniLM()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """See LangChain."""
        return self.model.embed(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        """See LangChain."""
        return self.embed_documents([text])[0]


def main() -> None:
    """Queries with the text of a note, without and with the guard."""
    store = InMemoryVectorStore(LocalModel())
    notes = [(name, text[:160]) for name, text in case_notes(40)]  # short, so that the calibration takes seconds
    store.add_documents([Document(text, id=name, metadata={"source": name}) for name, text in notes])
    name, text = notes[7]
    question = f"Is this in your files? {text}"

    safe = guarded(store, config={"calibrate": {"questions": 40, "documents": 20}})  # the defaults are more accurate
    print(safe.protection_report)
    retriever = safe.as_retriever(search_kwargs={"k": 3})
    found = retriever.invoke(question, {"metadata": {"casemate_client": "alice"}})
    print("without the guard:", [d.id for d in store.similarity_search(question, k=3)])
    print("with the guard:   ", [d.id for d in found])
    assert name not in [d.id for d in found]
    assert len(found) == 3


if __name__ == "__main__":
    main()
