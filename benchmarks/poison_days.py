"""One poisoned text per day: the day of its quarantine, with and without evidence from earlier days.

``python -m benchmarks.poison_days [folder]`` caches embeddings in the folder. The corpus is NFCorpus, the texts are
PoisonedRAG's (100 questions of Natural Questions, five texts each). Days are simulated. Each day, held-out benign
documents arrive with one text for each attacked question, and a new process screens them. It reads the evidence of
earlier days from the event store. Ten questions are attacked in a week. They are not watched. Documents that pass are
indexed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import SEED, MemoryEvents, save
from benchmarks.kept import Kept
from benchmarks.poison import SPLITS, Ground, Texts
from casemate.maths import stats
from casemate.monitor.poisoning.scoring import PoisonScreener
from casemate.monitor.poisoning.screening_evidence import ScreeningEvidence
from casemate.types import Document, Vector

DAYS, HARMLESS, ATTACKED = 5, 40, 10
"""Days, new benign documents per day, and questions attacked in one week."""
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def main(folder: str = "", splits: int = SPLITS) -> None:
    """Measures both forms of the texts, with and without evidence of earlier days."""
    found: dict[str, Any] = {"days": DAYS, "harmless_a_day": HARMLESS, "attacked_a_week": ATTACKED, "simulated": True}
    with tempfile.TemporaryDirectory() as scratch:
        embedder = Kept(Path(folder or scratch) / "kept.npz")
        for form, written in Texts(embedder).forms.items():
            weeks = {
                name: [week(embedder, Path(scratch), written, split, name == "kept") for split in range(splits)]
                for name in ("kept", "forgotten")
            }
            found[form] = {name: summary(results, len(written) // 5) for name, results in weeks.items()}
            print(form, found[form], file=sys.stderr)
        if folder:
            embedder.save()
    save("poison_days", found)


def summary(weeks: Sequence[tuple[list[int], int]], questions: int) -> dict[str, Any]:
    """Share of questions with a quarantined text by each day, and share of quarantined benign documents."""
    caught = [stats.proportion(sum(w[0][day] for w in weeks), questions * len(weeks)) for day in range(DAYS)]
    harmless = len(weeks) * DAYS * HARMLESS * questions // ATTACKED
    alarms = stats.proportion(sum(w[1] for w in weeks), harmless)
    return {"caught_by_day": caught, "harmless_quarantined": alarms}


def week(embedder: Kept, folder: Path, written: list[str], split: int, kept: bool) -> tuple[list[int], int]:
    """Results of consecutive weeks, each with other questions.

    Questions with a quarantined text by each day, and number of quarantined benign documents.
    """
    ground = Ground("nfcorpus", embedder, Path(tempfile.mkdtemp(dir=folder)), split)
    fitted, by_day, alarms = ground.fitted([], None), np.zeros(DAYS, int), 0
    with closing(ground.index):
        for start in range(0, len(written), 5 * ATTACKED):
            group = Week(ground, fitted, embedder, written[start : start + 5 * ATTACKED], kept)
            by_day += [len(group.run(day)) for day in range(DAYS)]
            alarms += group.alarms
            ground.index.remove(group.passed)
    return by_day.tolist(), alarms


class Week:
    """One week, in which some questions are attacked."""

    def __init__(self, ground: Ground, fitted: PoisonScreener, embedder: Kept, written: list[str], kept: bool) -> None:
        self.ground, self.fitted, self.embedder, self.written, self.kept = ground, fitted, embedder, written, kept
        self.rng, self.store = np.random.default_rng([SEED, len(written[0])]), MemoryEvents()
        self.order = self.rng.permutation(len(ground.new))
        self.caught, self.passed, self.alarms = set[int](), list[str](), 0

    def run(self, day: int) -> set[int]:
        """Simulates one day; returns the questions with a quarantined text so far."""
        benign = self.order[day * HARMLESS : (day + 1) * HARMLESS]
        poison = [Document(f"p{i}-{day}", text) for i, text in enumerate(self.written[day::5])]
        question = {document.id: i for i, document in enumerate(poison)}
        documents = [*(self.ground.new[i] for i in benign), *poison]
        vectors = np.concatenate([self.ground.new_vectors[benign], self.embedder.embed([d.text for d in poison])])
        mixed = self.rng.permutation(len(documents))
        documents, vectors = [documents[i] for i in mixed], vectors[mixed]
        held = self.screened(documents, vectors, BEGIN + timedelta(days=day))
        self.caught |= {question[name] for name in held if name in question}
        self.alarms += len(held - question.keys())
        passed = [i for i, d in enumerate(documents) if d.id not in held]
        self.ground.index.add([documents[i] for i in passed], vectors[passed])
        self.passed += [documents[i].source for i in passed]
        return self.caught

    def screened(self, documents: Sequence[Document], vectors: Vector, now: datetime) -> set[str]:
        """Ids of the documents that the process of one day quarantines."""
        screener, evidence = self.fitted.fresh_copy(), ScreeningEvidence(self.store, "default")
        if self.kept:
            screener.recall(*evidence.sync(now))
        results = screener.screen(documents, vectors)
        summed = evidence.judge(results)
        evidence.record(results, vectors, now=now)
        return {r.document.id for r, groups in zip(results, summed, strict=True) if r.suspicious or groups}


if __name__ == "__main__":
    main(*sys.argv[1:2], *(int(n) for n in sys.argv[2:3]))
