"""Overhead of the guard in a LangChain similarity search over 100,000 documents, per question.

Bare and guarded store get the same questions, alternating in one run, so that other load affects both. Four stores:

- ``in_memory``: LangChain's own.
- ``matrix``: search by BLAS, with the interface of FAISS.
- ``instant``: cached answers, so that only the guard is measured.
- ``cold``: cached answers, after a read of the matrix. The guard then runs with the processor caches as after a search.
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
"""Rounds over all questions; the slow store gets only the first 15 questions."""


class Words(Embeddings):
    """Embeds a text as the sum of random directions of its words, so that texts with common words are near."""

    def __init__(self, rng: np.random.Generator, size: int = 6000) -> None:
        self.words = [f"{a}{b}{c}" for a in "bdfglmnprst" for b in "aeiou" for c in _ENDS][:size]
        self._place = {word: i for i, word in enumerate(self.words)}
        self._directions = rng.standard_normal((len(self.words) + 1, DIM), dtype=np.float32)

    def embed_documents(self, texts: list[str]) -> list[Any]:
        """Rows of float32. As lists of Python floats, 100,000 of them would need 1.2 GB."""
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
    """Exact search by BLAS, with FAISS's attributes ``index`` and ``index_to_docstore_id``."""

    def __init__(self, embedding: Embeddings, documents: Sequence[Document], E: np.ndarray) -> None:
        self._embedding, self._documents, self._E = embedding, documents, E
        self.index_to_docstore_id = {i: str(d.id) for i, d in enumerate(documents)}
        self.index, self.docstore = self, self

    @property
    def embeddings(self) -> Embeddings:
        """See LangChain."""
        return self._embedding

    def reconstruct(self, place: int) -> np.ndarray:
        """See FAISS's index."""
        return self._E[place]

    def search(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """See FAISS's docstore; ids are numbers here."""
        return self._documents[int(name)]

    def similarity_search_with_score_by_vector(
        self, embedding: Any, k: int = K, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """See LangChain's FAISS store."""
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
    """Returns cached answers, by a dictionary lookup."""

    def learn(self, questions: Sequence[str], reach: int = 64) -> None:
        """Searches for each question once, and caches the answers."""
        self._known: dict[float, list[tuple[Document, float]]] = {}
        for question in questions:
            vector = self._embedding.embed_query(question)
            self._known[vector[0]] = super().similarity_search_with_score_by_vector(vector, reach)

    def similarity_search_with_score_by_vector(
        self, embedding: Any, k: int = K, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """See LangChain's FAISS store."""
        known = getattr(self, "_known", {}).get(embedding[0])
        return known[:k] if known and k <= len(known) else super().similarity_search_with_score_by_vector(embedding, k)


class Cold(Instant):
    """Returns cached answers after a read of the matrix."""

    def similarity_search_with_score_by_vector(
        self, embedding: Any, k: int = K, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """See LangChain's FAISS store."""
        self._E @ np.asarray(embedding, np.float32)
        return super().similarity_search_with_score_by_vector(embedding, k)


def main(documents: int = DOCUMENTS) -> None:
    """Measures all four stores."""
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
    """Wall-clock and CPU milliseconds.

    ``first``: the first time of each question, when its documents' words are new to the guard. ``least``: the fastest
    round of each question, which other load disturbed least.
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
