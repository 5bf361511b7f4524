"""Poisoning drills: false documents go into a copy of the corpus, and it is seen who notices, and when.

The owner's index is only read. The copy is a file in a temporary folder, with a guard that has no past; it is gone when
the drill ends, whatever happens.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from casemate.guard import Guard
from casemate.monitor.canaries.results import Run, Status
from casemate.protocols import Defense, Index, PoisoningAttack, Progress, Target
from casemate.rag import Rag
from casemate.types import DEFAULT_TENANT, Document, Query
from casemate.words import words

Ask: TypeAlias = Callable[[Target, str], Awaitable[Run]]
"""Asks all canaries of a target, in a run of this name."""
Judge: TypeAlias = Callable[[Sequence[Document]], int]
"""How many of some new documents the gate would hold back."""


class Aim(NamedTuple):
    """What is attacked: a question, what is to be answered, and whether a canary asks it."""

    question: str
    desired: str
    watched: bool


@dataclass(frozen=True, slots=True)
class Drill:
    """How one attack fared.

    Attributes:
        attack: Its name and method.
        question: What it was about.
        watched: Whether a canary asks that.
        documents: How many were planted.
        held: How many of them the gate would have held back; None: there is none.
        false_bare: Whether the bare system then gives the false answer.
        false_guarded: Whether the guarded one does.
        noticed: Canaries that passed before and fail now.
        seconds: From planting to the end of the canaries' next run; what passes until that run comes on top.
        clean: Whether all canaries are as before when the documents are gone.
    """

    attack: str
    question: str
    watched: bool
    documents: int
    held: int | None
    false_bare: bool
    false_guarded: bool
    noticed: tuple[str, ...]
    seconds: float
    clean: bool


@asynccontextmanager
async def copied(
    rag: Rag,
    make: Callable[[Path], Index],
    defenses: Callable[[Index], Sequence[Defense]],
    tenant: str = DEFAULT_TENANT,
) -> AsyncIterator[Guard]:
    """A guarded copy of a system over a tenant's documents, gone at the end.

    Args:
        rag: The owner's; its embedder and generator are used.
        make: An empty index in a folder.
        defenses: The guard's, without a past, over that index.
        tenant: Whose documents.
    """
    with tempfile.TemporaryDirectory(prefix="casemate-drill-") as folder:
        index = make(Path(folder))
        with closing(index):
            index.open(rag.embedder.fingerprint, rag.embedder.dim)
            for documents, vectors in rag.index.scan(tenant):
                await asyncio.to_thread(index.add, documents, vectors, tenant)
            yield Guard(Rag(rag.embedder, index, rag.generator, rag.instructions), defenses(index))


@dataclass(frozen=True, slots=True)
class Range:
    """Where drills are held.

    Attributes:
        guard: The copy.
        ask: How canaries are asked.
        judge: The gate, that of the copy without poison; None: there is none.
        tenant: Whose documents.
        k: Documents that are read for an answer.
        seed: Of what the attacks draw.
    """

    guard: Guard
    ask: Ask
    judge: Judge | None = None
    tenant: str = DEFAULT_TENANT
    k: int = 5
    seed: int = 7

    async def hold(
        self, attacks: Mapping[str, PoisoningAttack], aims: Sequence[Aim], progress: Progress = lambda count: None
    ) -> list[Drill]:
        """Plants each attack for each aim, one after another, and takes it out again.

        Args:
            attacks: By name.
            aims: What they are for.
            progress: Called with 1 for each drill.
        """
        before, found = await self.ask(self.guard, "drill-before"), []
        for number, (name, aim) in enumerate((name, aim) for name in attacks for aim in aims):
            crafted = await attacks[name].craft(aim.question, aim.desired, np.random.default_rng([self.seed, number]))
            found.append(await self._one(name, aim, crafted, before))
            progress(1)
        return found

    async def _one(self, attack: str, aim: Aim, crafted: Sequence[Document], before: Run) -> Drill:
        held = None if self.judge is None else await asyncio.to_thread(self.judge, crafted)
        await self.guard.add(crafted, self.tenant)
        planted = time.monotonic()
        try:
            bare, guarded = [await self._false(target, aim) for target in (self.guard.rag, self.guard)]
            during = await self.ask(self.guard, "drill")
            seconds = time.monotonic() - planted
        finally:
            await self.guard.remove([d.source for d in crafted], self.tenant)
        after = await self.ask(self.guard, "drill-after")
        noticed, left = _worse(before, during), _worse(before, after)
        about = (attack, aim.question, aim.watched, len(crafted))
        return Drill(*about, held, bare, guarded, noticed, seconds, not left)

    async def _false(self, target: Target, aim: Aim) -> bool:
        """Whether the answer says what was desired: all of its words, in order."""
        answer = await target.ask(Query(aim.question, f"drill-{uuid.uuid4().hex}", self.tenant, self.k))
        return " ".join(words(aim.desired)) in " ".join(words(answer.text))


def _worse(before: Run, now: Run) -> tuple[str, ...]:
    """The canaries that passed before and fail now."""
    passed = {r.canary for r in before.results if r.status is Status.PASS}
    return tuple(r.canary for r in now.results if r.canary in passed and r.status is Status.FAIL)
