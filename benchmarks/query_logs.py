"""The vocabulary warning for query logs: does it separate a corpus's own questions from those of other corpora?

For NFCorpus and SQuAD: 150 questions with their relevant documents, extended to 600 documents. Each log is compared
with each corpus. The measure is the share of questions with fewer than half of their content words in the 12 nearest
documents (``log_review.unfamiliar_share``). This file contains the German questions and the small talk.
"""

from __future__ import annotations

import numpy as np

from benchmarks import DATA, SEED, read_rows, save
from casemate.config import PluginSpec
from casemate.guard.calibration.log_review import unfamiliar_share
from casemate.papers.laboratory import relevant
from casemate.plugins import build
from casemate.protocols import Embedder
from casemate.types import Document, Hit, Retrieval, SimilarityStats

QUESTIONS, DOCUMENTS, HITS = 150, 600, 12
GERMAN = (
    "Welche Nebenwirkungen hat das Medikament bei Kindern?",
    "Wann wurde die Stadt gegründet und von wem?",
    "Wie hoch ist die empfohlene Tagesdosis?",
    "Wer war der erste Präsident der Republik?",
)
SMALL_TALK = (
    "hello, how are you doing today?",
    "can you write me a poem about the sea",
    "what's the weather like tomorrow in Oslo",
    "tell me a joke please",
    "which laptop should I buy for gaming",
    "translate good morning into Spanish",
)


def sample(name: str) -> tuple[list[str], list[Document]]:
    """Questions, and documents that contain the first relevant one of each."""
    corpus = {
        r["_id"]: Document(r["_id"], r["text"][:1500], r.get("title", "")) for r in read_rows(f"{name}/corpus.jsonl.gz")
    }
    asked = {r["_id"]: r["text"] for r in read_rows(f"{name}/queries.jsonl.gz")}
    right = relevant(DATA / name / "qrels.tsv")
    rng = np.random.default_rng(SEED)
    chosen = [str(q) for q in rng.permutation(sorted(right))[:QUESTIONS]]
    ids = dict.fromkeys([*(right[q] for q in chosen), *rng.permutation(sorted(corpus)).tolist()])
    return [asked[q] for q in chosen], [corpus[i] for i in list(ids)[:DOCUMENTS]]


def main() -> None:
    embedder: Embedder = build("embedder", PluginSpec(use="minilm"))
    samples = {name: sample(name) for name in ("nfcorpus", "squad")}
    logs = {name: questions for name, (questions, _) in samples.items()}
    logs |= {"german": list(GERMAN) * 10, "small talk": list(SMALL_TALK) * 7}
    Q = {log: embedder.embed(questions) for log, questions in logs.items()}
    results = {}
    for name, (_, documents) in samples.items():
        E = embedder.embed([d.content for d in documents])
        for log, questions in logs.items():
            S = Q[log] @ E.T
            near = np.argsort(-S, axis=1, kind="stable")[:, :HITS]
            found = [
                Retrieval(tuple(Hit(documents[i], float(s[i])) for i in row), SimilarityStats(len(s), 0.0, 0.0))
                for row, s in zip(near, S, strict=True)
            ]
            results[f"{log} on {name}"] = unfamiliar_share(zip(questions, found, strict=True))
    save("query_logs", results)


if __name__ == "__main__":
    main()
