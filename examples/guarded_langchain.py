"""A LangChain vector store with a guard in front of it, around fictional case notes. No network, no key."""

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore

from casemate.backends.minilm import MiniLM
from casemate.demo.clinic import case_notes
from casemate.integrations.langchain import guarded


class LocalModel(Embeddings):
    """Casemate's own embedder for LangChain. Yours will be another."""

    def __init__(self) -> None:
        self.model = MiniLM()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """See LangChain."""
        return self.model.embed(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        """See LangChain."""
        return self.embed_documents([text])[0]


def main() -> None:
    """Asks for a note with its own words, once without and once with the guard."""
    store = InMemoryVectorStore(LocalModel())
    notes = [(name, text[:160]) for name, text in case_notes(40)]  # short, so that the fit takes seconds
    store.add_documents([Document(text, id=name, metadata={"source": name}) for name, text in notes])
    name, text = notes[7]
    question = f"Is this in your files? {text}"

    safe = guarded(store, config={"calibrate": {"questions": 40, "documents": 20}})  # the defaults fit better
    print(safe.protects)
    retriever = safe.as_retriever(search_kwargs={"k": 3})
    found = retriever.invoke(question, {"metadata": {"casemate_client": "alice"}})
    print("without the guard:", [d.id for d in store.similarity_search(question, k=3)])
    print("with the guard:   ", [d.id for d in found])
    assert name not in [d.id for d in found]
    assert len(found) == 3


if __name__ == "__main__":
    main()
