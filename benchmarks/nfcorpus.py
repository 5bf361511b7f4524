"""NFCorpus through the complete system: indexing rate, retrieval quality, latency, and queries that Mirabel flags."""

from __future__ import annotations

import asyncio
import csv
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import DATA, SEED, ingest, median_s, read_rows, save
from benchmarks.ranking import ndcg_at_k, recall_at_k
from casemate.app import open_app
from casemate.backends.embedders.minilm import BATCH_TOKENS, MiniLM
from casemate.guard.defenses.mirabel import Mirabel
from casemate.maths.stats import THRESHOLD_FORMS, clopper_pearson
from casemate.rag.corpus import Corpus
from casemate.system import App
from casemate.types import Query

PROBES = 250


def main() -> None:
    """Indexes the corpus, then asks the 323 test queries."""
    with tempfile.TemporaryDirectory() as folder:
        raw = {
            "rag": {"index": {"use": "sqlite", "path": f"{folder}/index.db"}},
            "store": {"use": "sql", "path": f"{folder}/events.db"},
        }
        with open_app(raw) as app:
            results = {"indexing": _index(app)}
            questions, qrels = _questions(DATA / "nfcorpus")
            results |= {
                "retrieval": _retrieval(app, questions, qrels),
                "ask": _ask(app, questions),
                "mirabel": _mirabel(app, questions),
            }
    save("nfcorpus", results)


def _index(app: App) -> dict[str, Any]:
    """``casemate index`` compared with the ONNX session alone on the same chunks, in one run."""
    start, cpu = time.perf_counter(), time.process_time()
    report = ingest(app, DATA / "nfcorpus")
    ingest_s, ingest_cpu_s = time.perf_counter() - start, time.process_time() - cpu
    model = app.guard.rag.embedder
    assert isinstance(model, MiniLM)
    raw_s, raw_cpu_s = _raw_session(model, _texts(app))
    return {
        "sources": report.indexed,
        "chunks": report.chunks,
        "chunks_per_s": report.chunks / ingest_s,
        "ingest_s": ingest_s,
        "raw_session_s": raw_s,
        "ratio_to_raw_session": raw_s / ingest_s,
        "ingest_cpu_s": ingest_cpu_s,
        "raw_session_cpu_s": raw_cpu_s,
        "ratio_to_raw_session_cpu": raw_cpu_s / ingest_cpu_s,
    }


def _texts(app: App) -> list[str]:
    import sqlite3

    db = sqlite3.connect(app.index.path)  # type: ignore[attr-defined]
    rows = db.execute("SELECT title, text FROM document ORDER BY key").fetchall()
    db.close()
    return [f"{title}\n{text}" if title else text for title, text in rows]


def _raw_session(model: MiniLM, texts: list[str]) -> tuple[float, float]:
    """Wall-clock and CPU seconds of the ONNX session alone on all texts, which are tokenized and sorted before."""
    rows = [[model._first, *model._tokenizer.encode(text)[: model.max_tokens], model._last] for text in texts]
    rows.sort(key=len, reverse=True)
    batches = []
    while rows:
        size = max(1, BATCH_TOKENS // len(rows[0]))
        batch, rows = rows[:size], rows[size:]
        ids = np.zeros((len(batch), len(batch[0])), np.int64)
        for i, row in enumerate(batch):
            ids[i, : len(row)] = row
        batches.append({"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)})
    start, cpu = time.perf_counter(), time.process_time()
    for batch in batches:
        model._session.run(None, batch)
    return time.perf_counter() - start, time.process_time() - cpu


def _questions(folder: Path) -> tuple[dict[str, str], dict[str, dict[str, float]]]:
    qrels: dict[str, dict[str, float]] = {}
    with (folder / "qrels.tsv").open() as file:
        for query, document, gain in list(csv.reader(file, delimiter="\t"))[1:]:
            qrels.setdefault(query, {})[document] = float(gain)
    every = {q["_id"]: q["text"] for q in read_rows("nfcorpus/queries.jsonl.gz")}
    return {i: every[i] for i in qrels}, qrels


def _retrieval(app: App, questions: dict[str, str], qrels: dict[str, dict[str, float]]) -> dict[str, float]:
    scores = []
    for i, text in questions.items():
        retrieval = asyncio.run(app.guard.rag.retrieve(Query(text, k=100)))
        ranking = list(dict.fromkeys(h.document.source for h in retrieval.hits))
        relevant = [d for d, gain in qrels[i].items() if gain > 0]
        scores.append(
            [
                recall_at_k(ranking, relevant, 5),
                recall_at_k(ranking, relevant, 10),
                ndcg_at_k(ranking, qrels[i], 10),
            ]
        )
    return dict(zip(("recall_at_5", "recall_at_10", "ndcg_at_10"), np.mean(scores, axis=0).tolist(), strict=True))


def _ask(app: App, questions: dict[str, str]) -> dict[str, float]:
    """Median milliseconds of a guarded question, and of embedding and search alone."""
    texts = list(questions.values())
    rag = app.guard.rag

    async def ask() -> list[float]:
        times = []
        for text in texts:
            start = time.perf_counter()
            await app.guard.ask(Query(text))
            times.append(time.perf_counter() - start)
        return times

    waiting = iter(texts)
    embed = median_s(lambda: rag.embedder.embed([next(waiting)]), len(texts))
    vectors = iter(rag.embedder.embed(texts))
    search = median_s(lambda: app.index.search(next(vectors), 6), len(texts))
    times = asyncio.run(ask())
    return {
        "ask_ms": 1e3 * float(np.median(times)),
        "ask_p95_ms": 1e3 * float(np.quantile(times, 0.95)),
        "embed_ms": 1e3 * embed,
        "search_ms": 1e3 * search,
        "rest_ms": 1e3 * (float(np.median(times)) - embed - search),
    }


def _mirabel(app: App, questions: dict[str, str]) -> dict[str, Any]:
    """Flag rates of each threshold: benign test queries, and probes with whole and half documents of the corpus."""
    rng = np.random.default_rng(SEED)
    sources = [source.parse() for source in Corpus(DATA / "nfcorpus").sources()]
    records = [f"{title}\n{text}" for title, text, _ in (sources[i] for i in rng.permutation(len(sources))[:PROBES])]
    kinds = {
        "benign": list(questions.values()),
        "whole_record": records,
        "half_record": [record[: len(record) // 2] for record in records],
    }
    found: dict[str, Any] = {}
    for kind, texts in kinds.items():
        retrievals = [asyncio.run(app.guard.rag.retrieve(Query(text))) for text in texts]
        for form in THRESHOLD_FORMS:
            flagged = sum(Mirabel(mode=form).judge(r).flagged for r in retrievals)  # type: ignore[arg-type]
            rate = {"flagged": flagged / len(texts), "of": len(texts), "interval": clopper_pearson(flagged, len(texts))}
            found.setdefault(form, {})[kind] = rate
    return found


if __name__ == "__main__":
    main()
