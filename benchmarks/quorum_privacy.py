"""Quorum with differential privacy: utility by redundancy, and time of the ledger. No language model.

Synthetic facts in one collection for each r: r documents state each of five facts in varied wording. Each question runs
with full budgets, so the figures are those of one answer. Noise is random and not seeded. ``python -m
benchmarks.quorum_privacy``.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import SEED, save
from benchmarks.quorum import POLICY, STRANGER
from benchmarks.redundant import names
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.defenses.quorum.ledger import Ledger
from casemate.guard.guard import Guard
from casemate.maths.stats import clopper_pearson
from casemate.protocols import EventStore, Target
from casemate.rag.pipeline import Rag
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.types import Document, Query, QuotaGrant, QuotaRequest

REDUNDANCY = (1, 2, 3, 5, 8, 12, 16, 20, 24, 30, 40)
FACTS = 5
WORDS = 5
TEMPLATES = (
    "The {kind} of {place} was built in {year} by {person}. {noise}",
    "{noise} In {year}, {person} built the {kind} of {place}.",
    "{person} is known as the builder of the {kind} in {place}; it was finished in {year}. {noise}",
    "Visitors to {place} should see the {kind}, built by {person} in {year}. {noise}",
    "{noise} According to the chronicle, the {kind} of {place} dates from {year}, and {person} built it.",
)
FLOOR = 0.5
SETTINGS = ((8.0, 1), (8.0, 10), (2.0, 1), (2.0, 10))
"""Epsilon, and answers per unit and period."""


class FullBudgets(EventStore):
    """Grants every request, as for the first question of a period."""

    def acquire(self, requests: Sequence[QuotaRequest]) -> Sequence[QuotaGrant]:
        """Grants all."""
        return [QuotaGrant(request.amount, request.amount) for request in requests]


def main() -> None:
    """Measures both parts."""
    save(
        "quorum_privacy",
        {"facts": FACTS, "words": WORDS, "floor": FLOOR, **asyncio.run(_utility()), "ledger": _ledger()},
    )


def _defenses() -> dict[str, Quorum]:
    """New defenses for each collection: a repeated question would be answered from the cache."""
    defenses = {"m=2": Quorum(support=2, words=WORDS, jitter=1, floor=FLOOR)}
    for epsilon, answers in SETTINGS:
        quorum = Quorum(words=WORDS, floor=FLOOR, epsilon=epsilon, answers=answers, store=FullBudgets())
        defenses[f"epsilon={epsilon:g}, T={answers}"] = quorum
    return defenses


async def _utility() -> dict[str, Any]:
    embedder = CachedEmbedder(MiniLM())
    noise = {
        label: {name: getattr(d.private.histogram, name) for name in ("sigma", "threshold", "advantage", "auc")}
        for label, d in _defenses().items()
        if d.private is not None
    }
    correct: dict[str, dict[str, list[float]]] = {label: {} for label in ("plain", "m=2", *noise)}
    cpu = dict.fromkeys(correct, 0.0)
    for r in REDUNDANCY:
        rng = np.random.default_rng([SEED, r])
        facts = [_fact(rng, i) for i in range(FACTS)]
        with tempfile.TemporaryDirectory() as folder, closing(SqliteIndex(Path(folder) / "index.db")) as index:
            rag = Rag(embedder, index, ExtractiveGenerator())
            await Guard(rag, []).add(_documents(rng, facts, r))
            targets: dict[str, Target] = {"plain": rag}
            targets |= {label: Guard(rag, [defense], audience=POLICY) for label, defense in _defenses().items()}
            for label, target in targets.items():
                began = time.process_time()
                correct[label][str(r)] = await _correct(target, facts)
                cpu[label] += (time.process_time() - began) / (2 * FACTS * len(REDUNDANCY))
    return {"correct": correct, "noise": noise, "cpu_s_per_question": cpu}


def _fact(rng: np.random.Generator, number: int) -> dict[str, str]:
    kind = ("bridge", "mill", "harbor", "library", "theater")[number % 5]
    place, person, false = names(rng, 3)
    return {
        "kind": kind,
        "place": f"{place}ford",
        "person": f"{person}son",
        "false": f"{false}berg",
        "year": str(int(rng.integers(1500, 1950))),
    }


def _question(fact: dict[str, str], asked: str) -> str:
    return (
        f"Who built the {fact['kind']} of {fact['place']}?"
        if asked == "person"
        else (f"When was the {fact['kind']} of {fact['place']} built?")
    )


def _documents(rng: np.random.Generator, facts: list[dict[str, str]], r: int) -> list[Document]:
    documents = []
    for i, fact in enumerate(facts):
        for j in range(r):
            noise = f"{' '.join(names(rng, 14)).lower().capitalize()}."
            text = TEMPLATES[int(rng.integers(len(TEMPLATES)))].format(noise=noise, **fact)
            documents.append(Document(f"r{r}-{i}-{j}", text))
    return documents


async def _correct(target: Target, facts: list[dict[str, str]]) -> list[float]:
    """Rate of answers to both questions that contain the value, ignoring case, with a 95 % interval."""
    right = 0
    for fact in facts:
        for asked in ("person", "year"):
            text = (await target.ask(Query(_question(fact, asked), "reader", groups=STRANGER))).text
            right += fact[asked].casefold() in text.casefold()
    return [right, 2 * len(facts), *clopper_pearson(right, 2 * len(facts))]


def _ledger() -> dict[str, Any]:
    """Milliseconds to charge some units in one transaction on a SQLite file: median and maximum of 30."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, closing(SqlEventStore(path=Path(folder) / "events.db")) as store:
        for units in (10, 50, 200):
            ledger, times = Ledger(store, "dp", 10_000, 30), []
            for i in range(30):
                began = time.perf_counter()
                asyncio.run(ledger.spend("default", [([("source", f"{units}-{j}")], 1) for j in range(units)]))
                times += [1000 * (time.perf_counter() - began)] * (i > 0)  # the first one connects
            found[str(units)] = {"median_ms": float(np.median(times)), "max_ms": max(times)}
    return found


if __name__ == "__main__":
    main()
