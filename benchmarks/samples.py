"""Samples of public corpora with a calibrated guard, for benchmarks that attack a few candidates."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks import DATA, SEED, nfcorpus_questions, read_rows
from casemate import plugins
from casemate.app import open_app
from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.protocols import Index, MembershipAttack, Target
from casemate.rag.pipeline import Rag
from casemate.redteam.lab import datasets
from casemate.redteam.lab.caching import CachedGenerator
from casemate.redteam.lab.experiment import Experiment, ExperimentPlan
from casemate.redteam.lab.store import CampaignStore
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.system import App
from casemate.text.grounding import grounding_score
from casemate.types import Document, Probe, Reply

ATTACKS = ("direct", "s2mia", "mba", "interrogation", "dcmi", "menta")
"""Published attacks."""
ADAPTIVE = ("ladder", "decoys", "split_facts", "duplicates", "oracle", "averaging")
"""Adaptive attacks, which use knowledge of the guard's decision."""
LEAST_WORDS = 50
"""Minimum number of words of a candidate."""


@dataclass
class NaturalAsker(MembershipAttack):
    """Asks questions like any user, and scores the share of the text in the best reply.

    Attributes:
        asked: Questions about each candidate, by source. Default: a question with the title.
    """

    asked: Mapping[str, Sequence[str]] = field(default_factory=dict, repr=False)

    paper: ClassVar[str] = "none: an ordinary question"

    async def prepare(self, candidate: Document, rng: np.random.Generator) -> Probe:
        """Returns the questions."""
        title = candidate.title.rstrip(".")
        return Probe(tuple(self.asked.get(candidate.source, [f"What is known about {title}?"])))

    async def measure(self, candidate: Document, probe: Probe, replies: Sequence[Reply]) -> tuple[float, ...]:
        """Highest grounding score of a reply."""
        scores = (
            grounding_score(candidate.text, question, reply.text)
            for question, reply in zip(probe.questions, replies, strict=True)
        )
        return (max(scores),)


@dataclass(frozen=True)
class Sample:
    """A public corpus.

    Attributes:
        name: ``nfcorpus`` or ``squad``.
        documents: Its distinct documents of at least ``LEAST_WORDS`` words, in random order.
        log: Users' questions for the calibration.
        harmless: Further users' questions.
        asked: A user's question about some documents, by source. None for ``nfcorpus``: its questions name no document.
    """

    name: str
    documents: tuple[Document, ...]
    log: tuple[str, ...]
    harmless: tuple[str, ...]
    asked: dict[str, Sequence[str]]

    @classmethod
    def of(cls, name: str) -> Sample:
        """Reads a corpus."""
        texts = {
            row["text"]: Document(row["_id"], row["text"], row["title"]) for row in read_rows(f"{name}/corpus.jsonl.gz")
        }
        documents = [d for d in texts.values() if len(d.text.split()) >= LEAST_WORDS]
        rng = np.random.default_rng(SEED)
        shuffled = tuple(documents[i] for i in rng.permutation(len(documents)))
        if name == "nfcorpus":
            return cls(
                name,
                shuffled,
                tuple(nfcorpus_questions("qrels.dev.tsv")),
                tuple(nfcorpus_questions("qrels.tsv")),
                {},
            )
        questions = {row["_id"]: row["text"] for row in read_rows(f"{name}/queries.jsonl.gz")}
        pairs = [line.split("\t")[:2] for line in (DATA / name / "qrels.tsv").read_text().splitlines()[1:]]
        asked: dict[str, Sequence[str]] = {}
        others = []
        for query, source in pairs:
            if source in asked:
                others.append(questions[query])
            asked.setdefault(source, [questions[query]])
        drawn = [others[i] for i in rng.permutation(len(others))]
        return cls(name, shuffled, tuple(drawn[:400]), tuple(drawn[400:720]), asked)

    def attacks(self, names: Sequence[str] = ()) -> dict[str, MembershipAttack]:
        """The natural asker and the published attacks, or the named attacks."""
        wanted = names or ("natural", *ATTACKS)
        natural = NaturalAsker(self.asked)
        return {name: natural if name == "natural" else plugins.load("attack", name)() for name in wanted}


@contextmanager
def guarded_app(held: Sequence[Document], log: Sequence[str]) -> Iterator[App]:
    """Documents in an index, guarded by a Mirabel that is calibrated on a log; k = 3."""
    with tempfile.TemporaryDirectory() as folder:
        raw: dict[str, Any] = {
            "rag": {"k": 3, "index": {"use": "sqlite", "path": f"{folder}/index.db"}},
            "guard": {"defenses": [{"use": "mirabel", "calibration": f"{folder}/calibration.json"}]},
            "calibrate": {"documents": 20, "questions": 200},
            "store": {"use": "sql", "path": f"{folder}/events.db"},
        }
        with open_app(raw) as app:
            asyncio.run(app.guard.add(held))
            asyncio.run(app.calibrate(log))
            yield app


@contextmanager
def cached_rag(app: App) -> Iterator[tuple[Rag, CampaignStore]]:
    """The system without a guard, with the simulated reader and caches, and the store of its replies."""
    with tempfile.TemporaryDirectory() as name, closing(CampaignStore(Path(name) / "ledger.db")) as ledger:
        reader = CachedGenerator(SimulatedReader(), ledger, "simulated_reader")
        yield Rag(CachedEmbedder(app.guard.rag.embedder), app.index, reader, app.guard.rag.instructions), ledger


def experiment(
    attacks: Mapping[str, MembershipAttack],
    index: Index,
    ledger: CampaignStore,
    targets: dict[str, Target],
    sides: tuple[Sequence[Document], Sequence[Document]],
) -> Experiment:
    """Attacks on members and non-members; each side is split into halves at random."""
    rng = np.random.default_rng(SEED)
    half: dict[str, Any] = {}
    for side in sides:
        for rank, i in enumerate(rng.permutation(len(side))):
            half[side[i].source] = "A" if rank % 2 else "B"
    split = datasets.Split(tuple(sides[0]), tuple(sides[1]), half, 0, "a sample")
    held = datasets.indexed_sources(index, {d.source for d in split.members})
    return Experiment(attacks, split, targets, ledger, held, ExperimentPlan(seed=SEED, k=3))
