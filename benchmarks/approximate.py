"""Effect of an approximate index on detection: recall, and Mirabel's decisions compared with exact search.

The corpus has 40,000 vectors: 6,000 passages of NFCorpus and SQuAD, and interpolations between neighboring passages.
Queries: benign questions, whole passages, half passages, and questions of the interrogation attack about a document.

Every engine is searched as in the product: approximate candidates, rescored in float64, with the moments of the whole
corpus. The threshold is the 95 % quantile of Mirabel's statistic over every second benign question, by exact search. A
query is detected if its statistic exceeds the threshold and the nearest document found is the target.

    python -m benchmarks.approximate [sqlite] [pgvector] [milvus-hnsw] [milvus-ivf]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT, SEED, median_s, nfcorpus_questions, read_rows, save
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.indexes.milvus import MilvusIndex
from casemate.backends.indexes.pgvector import PgvectorIndex
from casemate.guard.defenses.mirabel import Mirabel
from casemate.maths.moments import CorpusMoments
from casemate.maths.nearest import ApproximateSearch, ExactSearch
from casemate.maths.stats import clopper_pearson
from casemate.protocols import Index
from casemate.types import Document, Float64, Hit, Retrieval, Secret, Vector

SIZE, REAL, DIM, K = 40_000, 6_000, 384, 5
WORDS = 70
PROBES, HARMLESS = 300, 300
EFFORTS = (16, 32, 64, 128, 256, 512, 1024)
NPROBES = (1, 2, 4, 8, 16, 32, 64, 128)
LISTS = 256
CACHE = Path(tempfile.gettempdir()) / "casemate-approximate.npz"
Searches = Iterator[tuple[str, Callable[[Vector], tuple[np.ndarray, Float64]]]]
"""Label of each setting, with its search function, which returns row numbers and scores."""


def texts() -> tuple[list[str], list[str]]:
    """Passages of about 70 words, and the id of the document of each."""
    passages, sources = [], []
    for name in ("nfcorpus", "squad"):
        for record in read_rows(f"{name}/corpus.jsonl.gz"):
            words = record["text"].split()
            pieces = [words[i : i + WORDS] for i in range(0, len(words), WORDS)]
            passages += [" ".join(piece) for piece in pieces if len(piece) > 15]
            sources += [str(record["_id"]) for piece in pieces if len(piece) > 15]
    kept = np.sort(np.random.default_rng(SEED).choice(len(passages), REAL, replace=False))
    return [passages[i] for i in kept], [sources[i] for i in kept]


def questions(
    passages: Sequence[str], sources: Sequence[str], rng: np.random.Generator
) -> dict[str, list[tuple[str, str]]]:
    """By kind: pairs of a question and its target document; the target of a benign question is ""."""
    squad = [row["text"] for row in read_rows("squad/queries.jsonl.gz")]
    picked = rng.choice(len(passages), PROBES, replace=False)
    records = read_rows("mia_riddle/nfcorpus_ia_llama3_8b_top15.jsonl.gz")
    held = set(sources)
    asked = [(interrogation(r)[0], r["_id"]) for r in records if r["_id"] in held and r["questions"]]
    return {
        "harmless": [
            (q, "")
            for q in [*nfcorpus_questions("qrels.tsv"), *(squad[i] for i in rng.choice(len(squad), HARMLESS, False))]
        ],
        "whole passage": [(passages[i], sources[i]) for i in picked],
        "half a passage": [(passages[i][: len(passages[i]) // 2], sources[i]) for i in picked],
        "interrogation": [asked[i] for i in rng.permutation(len(asked))[:PROBES]],
    }


def interrogation(record: dict[str, Any]) -> list[str]:
    """Questions of the interrogation attack about a document, each after the title."""
    return [f"{record['title']} {question}" for question in record["questions"]]


def embedded() -> dict[str, Any]:
    """Vectors of all passages and queries, cached in the folder of temporary files."""
    rng = np.random.default_rng(SEED)
    passages, sources = texts()
    kinds = questions(passages, sources, rng)
    if not CACHE.exists():
        model = MiniLM()
        every = [*passages, *(q for asked in kinds.values() for q, _ in asked)]
        np.savez(CACHE, vectors=np.concatenate([model.embed(every[i : i + 1000]) for i in range(0, len(every), 1000)]))
    vectors = np.load(CACHE)["vectors"]
    real, rest = vectors[: len(passages)], vectors[len(passages) :]
    asked = {}
    for kind, pairs in kinds.items():
        asked[kind] = rest[: len(pairs)], [source for _, source in pairs]
        rest = rest[len(pairs) :]
    E, names = _grown(real, sources, rng)
    return {"vectors": E, "sources": names, "asked": asked, "real": len(real)}


def _grown(real: Vector, sources: list[str], rng: np.random.Generator) -> tuple[Vector, list[str]]:
    """The real vectors, and noisy interpolations between one of them and one of its 20 nearest, ``SIZE`` in all."""
    exact, count = ExactSearch(DIM), max(SIZE - len(real), 0)
    exact.add(np.arange(len(real)), real)
    chosen = rng.integers(0, len(real), count)
    near = {int(i): exact.search(real[i], 20)[0] for i in np.unique(chosen)}
    other = np.array([rng.choice(near[int(i)]) for i in chosen], np.int64)
    share = rng.uniform(0.3, 0.7, (count, 1)).astype(np.float32)
    between = share * real[chosen] + (1 - share) * real[other]
    between += 0.02 * rng.standard_normal(between.shape, dtype=np.float32)
    between /= np.linalg.norm(between, axis=1, keepdims=True)
    return np.concatenate([real, between]), [*sources, *(f"between-{i}" for i in range(count))]


@contextmanager
def graph(data: dict[str, Any]) -> Iterator[Searches]:
    """The embedded index's HNSW graph (usearch)."""
    made, E = ApproximateSearch(DIM), data["vectors"]
    made.add(np.arange(len(E)), E)

    def sweep() -> Searches:
        for effort in EFFORTS:
            made._graph.expansion_search = effort
            yield f"ef={effort}", lambda q: made.search(q, K + 3)

    yield sweep()


@contextmanager
def milvus(data: dict[str, Any], kind: str) -> Iterator[Searches]:
    """A standalone Milvus. Its segments are sealed and indexed before the searches."""
    from pymilvus import MilvusClient

    from tests.milvus_server import milvus_server

    with milvus_server() as server:
        url = f"http://127.0.0.1:{server.listen_port}"
        index = MilvusIndex(Secret(url), kind=kind, nlist=LISTS, timeout_s=120)  # type: ignore[arg-type]
        index.open("benchmark", DIM)
        _fill(index, data)
        client, documents = MilvusClient(url), index._store._documents  # type: ignore[attr-defined]
        client.flush(documents, timeout=300)
        while client.describe_index(documents, "vector")["pending_index_rows"]:
            time.sleep(0.5)
        client.refresh_load(documents, timeout=300)
        time.sleep(5)  # until the indexed segments have replaced the growing ones

        def sweep() -> Searches:
            for setting in EFFORTS if kind == "HNSW" else NPROBES:
                index.ef = index.nprobe = setting
                yield f"{'ef' if kind == 'HNSW' else 'nprobe'}={setting}", _of(index)

        yield sweep()
        client.close()
        index.close()


@contextmanager
def pgvector(data: dict[str, Any]) -> Iterator[Searches]:
    """Postgres with pgvector's HNSW."""
    import psycopg

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pgserver
    with tempfile.TemporaryDirectory(prefix="casemate-pg-") as folder:
        os.chmod(folder, 0o755)
        server = pgserver.get_server(folder, cleanup_mode="stop")
        try:
            with psycopg.connect(server.get_uri(), autocommit=True) as db:
                db.execute("CREATE EXTENSION vector")
            index = PgvectorIndex(Secret(server.get_uri()), search_by="hnsw", timeout_s=600)
            index.open("benchmark", DIM)
            _fill(index, data)

            def sweep() -> Searches:
                for effort in EFFORTS[:-1]:
                    index.ef = effort
                    yield f"ef={effort}", _of(index)

            yield sweep()
            index.close()
        finally:
            server.cleanup()


def _fill(index: Index, data: dict[str, Any]) -> None:
    E, sources = data["vectors"], data["sources"]
    held = [Document(str(i), "", source=f"{sources[i]} {i}") for i in range(len(E))]
    for i in range(0, len(E), 2000):
        index.add(held[i : i + 2000], E[i : i + 2000])


def _of(index: Index) -> Callable[[Vector], tuple[np.ndarray, Float64]]:
    def search(q: Vector) -> tuple[np.ndarray, Float64]:
        hits = index.search(q, K + 3).hits
        return np.array([int(h.document.id) for h in hits]), np.array([h.score for h in hits])

    return search


def compare(data: dict[str, Any], searches: Searches) -> dict[str, Any]:
    """For each setting: recall, milliseconds per search, and detection rate by kind of query."""
    E = data["vectors"]
    moments = sum((CorpusMoments.of(E[i : i + 4096]) for i in range(0, len(E), 4096)), CorpusMoments.empty(DIM))
    exact, found = ExactSearch(DIM), {}
    exact.add(np.arange(len(E)), E)
    truth = {kind: [exact.search(q, K + 3) for q in Q] for kind, (Q, _) in data["asked"].items()}
    limit = float(np.quantile(_judged(data, moments, truth, "harmless")[0][::2], 0.95))
    found["exact"] = _measured(data, (moments, limit), truth, truth) | {
        "ms": 1e3 * _ms(data, lambda q: exact.search(q, K + 3))
    }
    for setting, search in searches:
        seen = {kind: [search(q) for q in Q] for kind, (Q, _) in data["asked"].items()}
        found[setting] = _measured(data, (moments, limit), truth, seen) | {"ms": 1e3 * _ms(data, search)}
        print(setting, found[setting]["recall_at_1"], found[setting]["detection"], file=sys.stderr)
    return found


def _ms(data: dict[str, Any], search: Callable[[Vector], Any]) -> float:
    queries = iter(data["asked"]["harmless"][0])
    return median_s(lambda: search(next(queries)), 200)


def _judged(data: dict[str, Any], moments: CorpusMoments, seen: Any, kind: str) -> tuple[Float64, list[str]]:
    """Mirabel's statistic for each query, and the nearest document that the search found."""
    judge, scores, nearest = Mirabel(mode="paper"), [], []
    for q, (rows, s) in zip(data["asked"][kind][0], seen[kind], strict=True):
        sources = [data["sources"][row] for row in rows]
        hits = tuple(Hit(Document(n, "", source=n), float(x)) for n, x in zip(sources, s, strict=True))
        scores.append(judge.judge(Retrieval(hits, moments.similarity_stats(q))).score if hits else -np.inf)
        nearest.append(sources[0] if sources else "")
    return np.array(scores), nearest


def _measured(data: dict[str, Any], rule: tuple[CorpusMoments, float], truth: Any, seen: Any) -> dict[str, Any]:
    pairs = [pair for kind in truth for pair in zip(truth[kind], seen[kind], strict=True)]
    same = sum(t[0][0] in s[0][:1] for t, s in pairs)
    rates: dict[str, Any] = {}
    for kind, (_, targets) in data["asked"].items():
        scores, nearest = _judged(data, rule[0], seen, kind)
        meant = [target in ("", found) for target, found in zip(targets, nearest, strict=True)]
        caught = (scores > rule[1]) & np.array(meant)
        caught = caught[1::2] if kind == "harmless" else caught  # the others set the threshold
        count = int(caught.sum())
        rates[kind] = {"rate": count / len(caught), "of": len(caught), "interval": clopper_pearson(count, len(caught))}
    return {
        "recall_at_1": same / len(pairs),
        "recall_at_1_interval": clopper_pearson(same, len(pairs)),
        f"recall_at_{K}": float(np.mean([len({*t[0][:K]} & {*s[0][:K]}) / K for t, s in pairs])),
        "detection": rates,
    }


def main(engines: Sequence[str]) -> None:
    """Measures each engine, and adds its results to those of the others."""
    data, written = embedded(), ROOT / "benchmarks/results/approximate.json"
    ways = {
        "sqlite": ("usearch HNSW", graph),
        "pgvector": ("pgvector HNSW", pgvector),
        "milvus-hnsw": ("Milvus HNSW", lambda data: milvus(data, "HNSW")),
        "milvus-ivf": ("Milvus IVF_FLAT", lambda data: milvus(data, "IVF_FLAT")),
    }
    results: dict[str, Any] = {"vectors": len(data["vectors"]), "real": data["real"], "lists": LISTS, "engines": {}}
    if engines and written.exists():
        results["engines"] = json.loads(written.read_text())["results"]["engines"]
    for name in engines or ways:
        label, way = ways[name]
        with ExitStack() as stack:
            load = os.getloadavg()[0]
            results["engines"][label] = {"load": load} | compare(data, stack.enter_context(way(data)))
        save("approximate", results)


if __name__ == "__main__":
    main(sys.argv[1:])
