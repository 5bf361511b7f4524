"""Contrastive re-indexing on 2,500 chunks of patient_doctor_qa: topic separation, cost, and coverage of a crawler.

``python -m benchmarks.reindex [folder]`` caches the chunks' vectors in the folder. Known items are runs of 12 words.
The questions differ from those of the acceptance test. The crawler is **simulated**: the reader returns the five chunks
of the context, and the attacker continues with the first and the last 25 words of each new chunk.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import SEED, save
from benchmarks.kept import corpus, span
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.defenses.reindex import Reindex
from casemate.maths.clustering import NOISE, TopicSettings, silhouette
from casemate.reindexing.fitting import ReindexSettings, fit
from casemate.reindexing.registry import ReindexRegistry
from casemate.reindexing.retrieval_quality import cross_topic_share, found_in_top_k
from casemate.reindexing.space import Reindexing, chunk_key
from casemate.reindexing.supcon import TrainSettings
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.types import Document, Query, Vector

CHUNKS, ASKED, K, ENDS, POOL = 2500, 600, 5, 25, 64
BUDGETS = (100, 250, 500)
NAMES = {
    "adapter": ReindexSettings(),
    "adapter, no keeping": ReindexSettings(training=TrainSettings(keep_weight=0)),
    "adapter, k-means": ReindexSettings(topics=TopicSettings(method="kmeans")),
    "compatible": ReindexSettings(mode="compatible"),
    "gate": ReindexSettings(mode="gate"),
}


def main() -> None:
    """Fits every mode, and measures each at its accepted strength and at full strength."""
    rng = np.random.default_rng(SEED)
    rows = [replace(d, title="") for d in corpus("patient_doctor_qa")]
    order = rng.permutation(len(rows))
    documents, others = [rows[i] for i in order[:CHUNKS]], [rows[i] for i in order[CHUNKS:]]
    embedder = CachedEmbedder(MiniLM(threads=1), megabytes=500)
    E = _vectors(embedder, documents, Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    bench = _Bench(embedder, documents, E, [span(d.text, rng) for d in others], rng)
    results: dict[str, Any] = {"original": bench.figures(None)}
    with tempfile.TemporaryDirectory() as folder:
        index = SqliteIndex(Path(folder) / "index.db")
        index.open(embedder.fingerprint, embedder.dim)
        index.add(documents, E)
        for name, settings in NAMES.items():
            start = time.process_time()
            learnt = fit(index, embedder, settings)
            cpu = time.process_time() - start
            facts = {"accepted": learnt.accepted, "reason": learnt.reason, "strength": learnt.strength}
            results[name] = facts | {"cpu_s": cpu}
            results[name] |= {"topics": learnt.report["topics"], "noise": learnt.report["noise"]}
            results[name]["bounded"] = bench.figures(learnt)
            results[name]["full"] = bench.figures(replace(learnt, strength=1.0))
            print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
            if name == "adapter":
                ReindexRegistry(Path(folder), settings.tenant).write(learnt)
        results["added_to_a_request_us"] = _cost(index, embedder, Path(folder), bench.asked)
    save("reindex", results)


def _cost(index: SqliteIndex, embedder: CachedEmbedder, folder: Path, asked: Sequence[str]) -> dict[str, float]:
    """CPU microseconds of re-ranking, without the second embedding of the question."""
    times = []
    defense = Reindex(folder=folder, embedder=embedder, index=index)
    for text in asked[:200]:
        retrieval = index.search(embedder.embed([text])[0], K + POOL)

        async def act(text: str = text, retrieval: Any = retrieval) -> float:
            start = time.perf_counter()
            await defense.on_retrieve(Query(text, k=K), retrieval)
            return time.perf_counter() - start

        times.append(asyncio.run(act()))
    return {"first": times[0] * 1e6} | {
        n: float(np.quantile(times, q)) * 1e6 for n, q in (("median", 0.5), ("p95", 0.95))
    }


class _Bench:
    """Retrieval results under a ranking."""

    def __init__(
        self, embedder: CachedEmbedder, documents: list[Document], E: Vector, begin: list[str], rng: np.random.Generator
    ) -> None:
        self.embedder, self.texts, self.E, self.begin = embedder, [d.text for d in documents], E, begin
        self.keys = np.array([chunk_key(d) for d in documents], np.uint64)
        self.about = rng.choice(len(documents), ASKED, replace=False)
        self.asked = [span(self.texts[i], rng) for i in self.about]
        self.Q = embedder.embed(self.asked)

    def figures(self, learnt: Reindexing | None) -> dict[str, Any]:
        labels = learnt.topics(self.keys, self.E) if learnt else np.zeros(len(self.E), np.int64)
        Z = learnt.map_chunks(self.E) if learnt else self.E
        score = (lambda Q: learnt.scores(Q, Z, labels)) if learnt else (lambda Q: Q @ self.E.T)
        own = [np.array([i]) for i in self.about]
        result: dict[str, Any] = {"known_item_recall": float(found_in_top_k(score, self.Q, own, K).mean())}
        result["coverage"] = dict(zip(map(str, BUDGETS), self.crawl(score), strict=True))
        if learnt is None:
            return result
        inside = np.flatnonzero(labels != NOISE)[:1000]
        asked = labels[self.about] != NOISE
        for when, s, V in (("before", lambda Q: Q @ self.E.T, self.E), ("after", score, Z)):
            result[f"silhouette_{when}"] = silhouette(V, labels)
            result[f"strangers_{when}"] = cross_topic_share(
                s, self.E[inside], labels[inside], labels, K, inside.tolist()
            )
            topic = labels[self.about][asked]
            result[f"strangers_asked_{when}"] = cross_topic_share(s, self.Q[asked], topic, labels, K)
        return result | self.pooled(score)

    def pooled(self, score: Callable[[Vector], Vector]) -> dict[str, float]:
        """Differences between the new ranking of the whole collection, of the candidates only, and the old ranking."""
        old, new = self.Q @ self.E.T, score(self.Q)
        rank = np.argsort(np.argsort(-old, axis=1), axis=1)
        exact = np.argsort(-new, axis=1)[:, :K]
        among = np.argsort(-np.where(rank < K + POOL, new, -9), axis=1)[:, :K]
        deepest = np.take_along_axis(rank, exact, axis=1).max(axis=1)
        mine = np.arange(len(rank)), self.about
        promoted = (rank[mine] >= K) & (np.argsort(np.argsort(-new, axis=1), axis=1)[mine] < K)
        return {
            "exact_is_pooled": float((np.sort(exact) == np.sort(among)).all(axis=1).mean()),
            "deepest_rank": int(deepest.max()),
            "context_hits_new": float((deepest >= K).mean()),
            "right_one_came_in": float(promoted.mean()),
        }

    def crawl(self, score: Callable[[Vector], Vector]) -> list[float]:
        """Share of chunks extracted after each number of questions in ``BUDGETS``."""
        queue, seen, beginnings, coverage = deque[str](), set[int](), iter(self.begin), []
        for asked in range(1, BUDGETS[-1] + 1):
            q = self.embedder.embed([queue.popleft() if queue else next(beginnings)])
            for i in np.argsort(-score(q)[0], kind="stable")[:K].tolist():
                if i not in seen:
                    seen.add(i)
                    words = self.texts[i].split()
                    queue += [" ".join(words[-ENDS:]), " ".join(words[:ENDS])]
            if asked in BUDGETS:
                coverage.append(len(seen) / len(self.E))
        return coverage


def _vectors(embedder: CachedEmbedder, documents: list[Document], folder: Path | None) -> Vector:
    """The chunks' vectors, cached in the folder."""
    file = folder / "patient_doctor_qa.npy" if folder else None
    if file and file.exists():
        return np.load(file)
    E = embedder.embed([d.content for d in documents])
    if file:
        np.save(file, E)
    return E


if __name__ == "__main__":
    main()
