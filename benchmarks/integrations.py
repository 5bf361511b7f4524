"""What the guard adds to a question that LangChain asks a vector store of 100,000 documents, per question.

Bare and guarded store are asked the same questions in turn, in one run, so that a busy machine slows both. Four
stores: LangChain's own in memory, one that searches a matrix by BLAS (of FAISS's shape, as far as the guard sees), one
that knows all answers before, so that nothing but the guard is left to be measured, and the same one when it has read
the matrix all the same, so that the guard finds the processor's caches as a search leaves them.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from benchmarks import SEED, save
from casemate.integrations.langchain import GuardedVectorStore, guarded

DOCUMENTS, DIM, K, WORDS, TOPICS = 100_000, 384, 4, 60, 300
QUESTIONS = 100
ROUNDS = {"instant": 20, "cold": 6, "matrix": 6, "in_memory": 2}
"""How often all questions are asked; of the slow store's, the first 15."""


class Words(Embeddings):
    """A text is the sum of its words' random directions: texts that share words are near."""

    def __init__(self, rng: np.random.Generator, size: int = 6000) -> None:
        self.words = [f"{a}{b}{c}" for a in "bdfglmnprst" for b in "aeiou" for c in _ENDS][:size]
        self._place = {word: i for i, word in enumerate(self.words)}
        self._directions = rng.standard_normal((len(self.words) + 1, DIM), dtype=np.float32)

    def embed_documents(self, texts: list[str]) -> list[Any]:
        """Rows of float32: as lists of Python's floats, 100,000 of them would take 1.2 GB."""
        return [self._vector(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """See LangChain."""
        found: list[float] = self._vector(text).tolist()
        return found

    def _vector(self, text: str) -> np.ndarray:
        places = [self._place.get(word, -1) for word in text.lower().replace("?", "").replace(".", "").split()]
        total = self._directions[places or [-1]].sum(axis=0)
        return total / np.linalg.norm(total)


_ENDS = [f"{c}{v}{d}" for c in "klmnrstvz" for v in "aeiou" for d in "dkmt"]


class Matrix(VectorStore):
    """Exact search by BLAS. ``index`` and ``index_to_docstore_id`` are as FAISS has them."""

    def __init__(self, embedding: Embeddings, documents: Sequence[Document], E: np.ndarray) -> None:
        self._embedding, self._documents, self._E = embedding, documents, E
        self.index_to_docstore_id = {i: str(d.id) for i, d in enumerate(documents)}
        self.index, self.docstore = self, self

    @property
    def embeddings(self) -> Embeddings:
        """See LangChain."""
        return self._embedding

    def reconstruct(self, place: int) -> np.ndarray:
        """As FAISS's index."""
        return self._E[place]

    def search(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """As FAISS's docstore: ids are numbers here."""
        return self._documents[int(name)]

    def similarity_search_with_score_by_vector(
        self, embedding: Any, k: int = K, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """As FAISS."""
        s = self._E @ np.asarray(embedding, np.float32)
        near = np.argpartition(-s, k)[:k]
        return [(self._documents[i], float(s[i])) for i in near[np.argsort(-s[near])]]

    def similarity_search(self, query: str, k: int = K, **kwargs: Any) -> list[Document]:
        """See LangChain."""
        return [d for d, _ in self.similarity_search_with_score_by_vector(self._embedding.embed_query(query), k)]

    @classmethod
    def from_texts(cls, *args: Any, **kwargs: Any) -> Matrix:
        """See LangChain."""
        raise NotImplementedError


class Instant(Matrix):
    """Knows what is asked: a search is a look into a dictionary."""

    def learn(self, questions: Sequence[str], reach: int = 64) -> None:
        """Searches for each question once."""
        self._known: dict[float, list[tuple[Document, float]]] = {}
        for question in questions:
            vector = self._embedding.embed_query(question)
            self._known[vector[0]] = super().similarity_search_with_score_by_vector(vector, reach)

    def similarity_search_with_score_by_vector(
        self, embedding: Any, k: int = K, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """As FAISS."""
        known = getattr(self, "_known", {}).get(embedding[0])
        return known[:k] if known and k <= len(known) else super().similarity_search_with_score_by_vector(embedding, k)


class Cold(Instant):
    """Knows what is asked, and reads the matrix first."""

    def similarity_search_with_score_by_vector(
        self, embedding: Any, k: int = K, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """As FAISS."""
        self._E @ np.asarray(embedding, np.float32)
        return super().similarity_search_with_score_by_vector(embedding, k)


def main(documents: int = DOCUMENTS) -> None:
    """Measures all four."""
    rng = np.random.default_rng(SEED)
    model = Words(rng)
    topics = rng.choice(len(model.words), (TOPICS, 150))
    texts = [_text(model, topics[rng.integers(TOPICS)], WORDS, rng) for _ in range(documents)]
    questions = [_text(model, topics[rng.integers(TOPICS)], 9, rng) + "?" for _ in range(QUESTIONS)]
    held = [Document(text, id=str(i)) for i, text in enumerate(texts)]
    E = np.stack(model.embed_documents(texts))
    instant, cold = Instant(model, held, E), Cold(model, held, E)
    instant.learn(questions)
    cold.learn(questions)
    memory = InMemoryVectorStore(model)
    memory.store = {
        str(i): {"id": str(i), "vector": v, "text": t, "metadata": {}}
        for i, (t, v) in enumerate(zip(texts, E, strict=True))
    }
    results: dict[str, Any] = {"documents": documents, "dim": DIM, "k": K}
    with tempfile.TemporaryDirectory() as folder:
        mirabel = {"use": "mirabel", "calibration": f"{folder}/calibration.json"}
        config = {"guard": {"defenses": [mirabel]}, "calibrate": {"questions": 300, "documents": 40}}
        stores = {"instant": instant, "cold": cold, "matrix": Matrix(model, held, E), "in_memory": memory}
        for name, store in stores.items():
            begun = time.perf_counter()
            wrapped = guarded(store, config=config, fit=name == "instant")
            wiring_s = time.perf_counter() - begun
            asked = questions if name != "in_memory" else questions[:15]
            results[name] = {"wiring_s": wiring_s} | _measured(store, wrapped, asked, ROUNDS[name])
            print(name, results[name], file=sys.stderr)
            wrapped.protection.close()
    save("integrations", results)


def _text(model: Words, topic: np.ndarray, count: int, rng: np.random.Generator) -> str:
    own = rng.choice(topic, count - count // 4)
    other = rng.integers(0, len(model.words), count // 4)
    return " ".join(model.words[i] for i in rng.permutation(np.concatenate([own, other])))


def _measured(
    bare: VectorStore, wrapped: GuardedVectorStore, questions: Sequence[str], rounds: int
) -> dict[str, float]:
    """Wall and CPU milliseconds.

    ``first``: each question for the first time, so its documents' words are new to the guard. ``least``: of each
    question's rounds the quickest, which the machine's other work disturbed least.
    """
    taken = np.empty((2, rounds, len(questions), 2))  # (guarded, round, question, wall and CPU)
    alike = 0
    for r in range(rounds):
        for q, question in enumerate(questions):
            found = [[], []]
            for which in ((0, 1), (1, 0))[(q + r) % 2]:
                wall, cpu = time.perf_counter(), time.process_time()
                found[which] = (bare, wrapped)[which].similarity_search(question, k=K)
                taken[which, r, q] = time.perf_counter() - wall, time.process_time() - cpu
            alike += [d.id for d in found[0]] == [d.id for d in found[1]]
    taken *= 1e3
    added, least = taken[1] - taken[0], taken.min(axis=1)
    return {
        "questions": len(questions),
        "rounds": rounds,
        "bare_ms": float(np.median(taken[0, :, :, 0])),
        "guarded_ms": float(np.median(taken[1, :, :, 0])),
        "added_wall_ms": float(np.median(added[:, :, 0])),
        "added_cpu_ms": float(np.median(added[:, :, 1])),
        "added_first_wall_ms": float(np.median(added[0, :, 0])),
        "added_first_cpu_ms": float(np.median(added[0, :, 1])),
        "added_least_wall_ms": float(np.median(least[1, :, 0] - least[0, :, 0])),
        "added_least_cpu_ms": float(np.median(least[1, :, 1] - least[0, :, 1])),
        "same_documents": alike / rounds / len(questions),
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(*map(int, sys.argv[1:]))
