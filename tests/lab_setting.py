"""A small experiment with a predictable system, attacks and guards."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import BackendError
from casemate.guard.guard import Guard
from casemate.protocols import Defense, MembershipAttack
from casemate.rag.pipeline import Rag
from casemate.redteam.lab import datasets
from casemate.redteam.lab.experiment import Experiment, ExperimentPlan
from casemate.redteam.lab.store import CampaignStore
from casemate.types import Action, Outcome, Probe, Reply, Verdict
from tests.fakes import BagOfWords, Parrot, documents


@dataclass
class Name(MembershipAttack):
    """Asks with the text itself and counts replies with the id of the candidate. `Parrot` gives such a reply if it is
    indexed.
    """

    questions: int = 2
    asked: list = field(default_factory=list, init=False)

    paper: ClassVar[str] = "none"

    async def prepare(self, candidate, rng):
        return Probe(tuple(f"{candidate.text} {rng.integers(1000)}" for _ in range(self.questions)))

    async def measure(self, candidate, probe, replies):
        self.asked.append((candidate.source, probe.questions))
        return (sum(f"{candidate.id} " in r.text for r in replies) / max(len(replies), 1),)


@dataclass
class Stepwise(Name):
    """The same attack in adaptive form, with the black box only."""

    async def run(self, candidate, box, rng):
        found = [await box.ask(candidate.text) for _ in range(self.questions)]
        return await self.measure(candidate, Probe(()), found)


@dataclass
class Coin(MembershipAttack):
    """Returns a random score."""

    paper: ClassVar[str] = "none"

    async def prepare(self, candidate, rng):
        return Probe(("amber",), {"coin": float(rng.random())})

    async def measure(self, candidate, probe, replies):
        return (probe.key["coin"],)


@dataclass
class Hide(Defense):
    """Hides the secret documents and refills the context, without an observable difference."""

    secret: frozenset = frozenset()

    def __post_init__(self):
        self.max_hidden_sources = len(self.secret)

    async def on_retrieve(self, query, retrieval):
        hidden = tuple(h.document.id for h in retrieval.hits if h.document.source in self.secret)
        kept = tuple(h for h in retrieval.hits if h.document.source not in self.secret)
        return Outcome(replace(retrieval, hits=kept), verdict(hidden))


@dataclass
class Shorten(Hide):
    """Hides the secret documents and does not refill the context."""

    async def on_retrieve(self, query, retrieval):
        return await super().on_retrieve(query, replace(retrieval, hits=retrieval.hits[: query.k]))


@dataclass
class BlockAfterHit(Hide):
    """Returns empty contexts to a client after a question that retrieved a secret document."""

    seen: set = field(default_factory=set)

    async def on_retrieve(self, query, retrieval):
        found = await super().on_retrieve(query, retrieval)
        blocked = query.client in self.seen
        if found.verdict.hidden:
            self.seen.add(query.client)
        return Outcome(replace(found.value, hits=()) if blocked else found.value, found.verdict)


def verdict(hidden):
    return Verdict("hide", bool(hidden), Action.HIDE if hidden else Action.NONE, 1.0, 0.5, hidden)


@dataclass
class Unreliable:
    """A target that fails a number of times, then answers."""

    inner: object
    failures: int
    retryable: bool = True

    async def ask(self, query):
        if self.failures:
            self.failures -= 1
            raise BackendError("no route to the model", backend="fake", retryable=self.retryable)
        return await self.inner.ask(query)


@dataclass
class FirstInLastOut:
    """A target that answers earlier questions later, so replies arrive in reverse order."""

    inner: object
    turns: int = 40

    async def ask(self, query):
        self.turns = max(0, self.turns - 1)
        for _ in range(self.turns):
            await asyncio.sleep(0)
        return await self.inner.ask(query)


class Setting:
    """An index without the non-members, the unguarded system over it, and the parts of an experiment."""

    def __init__(self, folder, members=20, nonmembers=20, others=30, seed=0):
        self.folder = folder
        self.documents = documents(members + nonmembers + others)
        self.split = datasets.draw_split(self.documents, members, nonmembers, seed)
        out = {d.source for d in self.split.nonmembers}
        self.index = SqliteIndex(folder / "lab.db")
        self.embedder = BagOfWords()
        self.rag = Rag(self.embedder, self.index, Parrot())
        inside = [d for d in self.documents if d.source not in out]
        self.index.add(inside, self.embedder.embed([d.content for d in inside]))
        self.indexed = datasets.indexed_sources(self.index, {d.source for d in self.split.members})
        self.store = CampaignStore(folder / "campaigns.db")

    @property
    def secret(self):
        return frozenset(d.source for d in self.split.members)

    def guard(self, *defenses, index=None):
        rag = self.rag if index is None else Rag(self.embedder, index, Parrot())
        return Guard(rag, defenses)

    def experiment(self, attacks=None, targets=None, plan=None, **options):
        attacks = attacks or {"name": Name()}
        targets = targets or {"off": self.rag}
        plan = plan or ExperimentPlan(waits=(0.0, 0.0), **options)
        return Experiment(attacks, self.split, targets, self.store, self.indexed, plan)


@contextmanager
def setting(folder, **options):
    built = Setting(folder, **options)
    try:
        yield built
    finally:
        built.index.close()
        built.store.close()


__all__ = [
    "BlockAfterHit",
    "Coin",
    "FirstInLastOut",
    "Hide",
    "Name",
    "Reply",
    "Setting",
    "Shorten",
    "Stepwise",
    "Unreliable",
    "setting",
]
