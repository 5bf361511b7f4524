"""Disclosure accounting: share of a disguised text that is counted, time of an answer, harmless sessions.

``python -m benchmarks.disclosure [folder] [corpus ...] [size=number ...]``, or ``python -m benchmarks.disclosure time``
for the times alone. Disguises are those of
``tests/disguises.py``, applied to notes of the fictional clinic. Harmless sessions are those of
``benchmarks.defaults``, under ``crawl_limit`` with its default options, answered by the extractive generator and by the
**simulated** reader. Corpora that were measured before with the same code and sizes stay in the results.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT, before, code_digest, save
from benchmarks.defaults import CORPORA, SIZES, _index, _limits, load
from benchmarks.kept import Kept
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.demo.clinic import case_notes
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.guard import Guard
from casemate.rag.pipeline import Rag
from casemate.redteam.lab.experiment import describe_options
from casemate.text.disclosure import DisclosureCounter
from tests.disguises import DISGUISES, HELD_OUT

NOTES = [" ".join(text.split()) for _, text in case_notes(60, seed=3)]
QUESTION = "Which operation did the patient have, and who referred her?"


def main() -> None:
    """Measures disguises, times, and the corpora that are named; all of ``benchmarks.defaults`` by default."""
    if sys.argv[1:] == ["time"]:
        held = json.loads((ROOT / "benchmarks/results/disclosure.json").read_text())["results"]
        return save("disclosure", held | {"cpu_ms": _times()})
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/casemate-defaults")
    folder.mkdir(parents=True, exist_ok=True)
    SIZES.update((name, int(size)) for name, _, size in (a.partition("=") for a in sys.argv[2:] if "=" in a))
    about = {"code": code_digest(), "sizes": dict(SIZES), "defense": describe_options(CrawlLimit())}
    results = before("disclosure", about) | {"disguises": _disguises(), "cpu_ms": _times()}
    for name in [a for a in sys.argv[2:] if "=" not in a] or CORPORA:
        results["corpora"][name] = asyncio.run(_harmless(name, folder))
        save("disclosure", results)


def _disguises() -> dict[str, Any]:
    """Mean share of the words of a note that is counted, by disguise."""
    found = {}
    for name, disguise in DISGUISES.items():
        shares = []
        for i in range(0, 30, 5):
            counter = DisclosureCounter(NOTES[i : i + 5], QUESTION, NOTES[40:45])
            shares.append(counter.read(disguise(NOTES[i + 1]))[1].bit_count() / counter.lengths[1])
        found[name] = round(float(np.mean(shares)), 3)
    above = [name for name, share in found.items() if share > 0.3]
    return {
        "share": found,
        "above_exposure": [len(above), len(found)],
        "above_exposure_held_out": [len(set(above) & set(HELD_OUT)), len(HELD_OUT)],
    }


def _times() -> dict[str, Any]:
    """CPU milliseconds (p50, p95) for 200 words and 10 chunks, with 5 texts of the null; the code measured."""
    words = " ".join(NOTES[:10]).split()
    answers = {
        "quotes two chunks": " ".join(words[:200]),
        "half from the chunks": " ".join(words[:100] + " ".join(NOTES[30:]).split()[:100]),
        "none of the chunks": " ".join(" ".join(NOTES[30:]).split()[:200]),
    }

    def cpu_s(answer: str) -> float:
        start = time.process_time()
        DisclosureCounter(NOTES[:10], QUESTION, NOTES[40:45]).read(answer)
        return time.process_time() - start

    spent = {name: [1000 * cpu_s(answer) for _ in range(300)] for name, answer in answers.items()}
    return {
        "code": code_digest(),
        **{name: np.quantile(ms, (0.5, 0.95)).round(2).tolist() for name, ms in spent.items()},
    }


async def _harmless(name: str, folder: Path) -> dict[str, Any]:
    embedder, corpus = Kept(folder / f"{name}.npz"), load(name)
    try:
        with closing(_index(folder / f"{name}-disclosure.db", embedder)) as index:
            rag = Rag(embedder, index, ExtractiveGenerator())
            await Guard(rag, []).add(corpus.documents)
            return await _limits(corpus, rag)
    finally:
        embedder.save()


if __name__ == "__main__":
    main()
