"""Utility of quorum for clients without entitlement, by redundancy r, m, jitter, N and L, and its CPU time.

No language model. Plain RAG answers with the **extractive** reader (by words) over ten passages. Quorum answers are
composed from the best sentences. Collections: a synthetic one, in which exactly r documents state a fact, and SQuAD, in
which r of the best 24 passages contain the answer. An answer is correct if it contains a gold answer as whole words.
The questions of both are asked in lower case and in title case, too.
"""

from __future__ import annotations

import asyncio
import string
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import ROOT, save
from benchmarks.kept import Kept, corpus
from benchmarks.redundant import FLOOR, REDUNDANCY, Case, squad, synthetic
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.guard.defenses.quorum import Quorum
from casemate.maths.metrics import exact_match
from casemate.maths.stats import clopper_pearson
from casemate.rag.pipeline import INSTRUCTIONS, join_stream
from casemate.types import Document, Hit, Prompt, Query, Retrieval, Secret, SimilarityStats, Vector

K, FETCHED = 10, 60
FACTS, EACH = 5, 30
BINS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 24))
BASE = Quorum(support=2, jitter=1, secret=Secret("secret of the benchmark"))
WRITINGS = {"": str, ", lower case": str.lower, ", title case": string.capwords}
SETTINGS = {
    "m=2": {},
    "m=2, J=2": {"jitter": 2},
    "m=3": {"support": 3},
    "m=3, J=3": {"support": 3, "jitter": 3},
    "m=4": {"support": 4},
    "m=2, N=8": {"units": 8},
    "m=2, N=48": {"units": 48},
    "m=2, L=4": {"words": 4},
    "m=2, L=16": {"words": 16},
}


def main() -> None:
    """Measures both collections."""
    embedder = Kept(ROOT / "build/kept.npz")
    collections = {
        "synthetic": (*synthetic(FACTS), [(r, r) for r in REDUNDANCY]),
        "squad": (corpus("squad"), squad(embedder, EACH, BINS), BINS),
    }
    results: dict[str, Any] = {"reader": "extractive, by words", "k": K}
    for name, (documents, cases, bins) in collections.items():
        vectors = embedder.embed([d.content for d in documents])
        for label, written in WRITINGS.items():
            asked = [replace(case, question=written(case.question)) for case in cases]
            found = list(_answers(documents, vectors, asked, embedder))
            results[name + label] = {"documents": len(documents), "questions": len(cases)} | _table(asked, found, bins)
            print(name + label, f"{time.process_time():.0f} CPU-s", file=sys.stderr, flush=True)
    embedder.save()
    save("quorum_utility", results)


def _answers(
    documents: Sequence[Document], vectors: Vector, cases: Sequence[Case], embedder: Kept
) -> Iterator[tuple[dict[str, str], dict[str, float]]]:
    """Yields the answers to each question by setting, and CPU milliseconds of the defense."""
    reader = ExtractiveGenerator()
    quorums = {name: replace(BASE, **options) for name, options in SETTINGS.items()}
    for case in cases:
        scores = vectors @ embedder.embed([case.question])[0]
        best = np.argsort(-scores, kind="stable")[:FETCHED]
        hits = tuple(Hit(documents[i], float(scores[i])) for i in best)
        unreadable = frozenset(hit.document.id for hit in hits)
        found = Retrieval(hits, SimilarityStats(len(documents), 0.0, 0.1), True, unreadable)
        near = tuple(hit.document for hit in hits[:K] if hit.score >= FLOOR)
        said = {"plain": asyncio.run(join_stream(reader.stream(Prompt(case.question, near, INSTRUCTIONS))))}
        spent = {}
        for name, quorum in quorums.items():
            began = time.process_time()
            said[name] = asyncio.run(quorum.on_retrieve(Query(case.question, k=K), found)).value.hits[0].document.text
            spent[name] = 1000 * (time.process_time() - began)
        yield said, spent


def _table(
    cases: Sequence[Case],
    found: Sequence[tuple[Mapping[str, str], Mapping[str, float]]],
    bins: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """Correct answers by redundancy, and the share of plain RAG's correct answers that remain, with 95 % intervals."""
    rows: dict[str, Any] = {}
    for name in ("plain", *SETTINGS):
        right = [exact_match(said[name], case.answers) for case, (said, _) in zip(cases, found, strict=True)]
        plain = [exact_match(said["plain"], case.answers) for case, (said, _) in zip(cases, found, strict=True)]
        row = {}
        for low, high in bins:
            inside = [i for i, case in enumerate(cases) if low <= case.r <= high]
            kept = [right[i] for i in inside if plain[i]]
            label = str(low) if low == high else f"{low}-{high}"
            row[label] = {
                "right": _rate([right[i] for i in inside]),
                "of_plain_right": _rate(kept) if kept else None,
                "words": float(np.mean([len(found[i][0][name].split()) for i in inside])) if inside else None,
            }
        if name in SETTINGS:
            row["pooled"] = _pooled(cases, right, plain, replace(BASE, **SETTINGS[name]).support)
        rows[name] = row
    times = {n: [spent[n] for _, spent in found] for n in SETTINGS}
    quantiles = {n: [float(np.quantile(values, p)) for p in (0.5, 0.95, 1.0)] for n, values in times.items()}
    return {"by_redundancy": rows, "cpu_ms_p50_p95_max": quantiles}


def _pooled(
    cases: Sequence[Case], right: Sequence[bool], plain: Sequence[bool], support: int
) -> dict[str, list[float]]:
    """Share of plain RAG's correct answers that remain, among questions with enough redundancy."""
    rows = list(zip(cases, right, plain, strict=True))
    return {
        "r >= m": _rate([kept for case, kept, was in rows if was and case.r >= support]),
        "stated >= m": _rate([kept for case, kept, was in rows if was and (case.stated or 0) >= support]),
    }


def _rate(values: Sequence[bool]) -> list[float]:
    return [float(sum(values)), len(values), *clopper_pearson(sum(values), len(values))] if values else []


if __name__ == "__main__":
    main()
