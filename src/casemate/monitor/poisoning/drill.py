"""Poisoning drill: plants poisoned documents in a copy of the corpus, and measures which canaries detect them.

The operator's index is only read. The copy is a file in a temporary folder, with a guard without client history; it is
deleted when the drill ends, also after an error.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.config import Config
from casemate.guard.guard import Guard
from casemate.monitor.canaries.results import CanaryRun, CanaryStatus
from casemate.monitor.canaries.run import CanaryRunner
from casemate.plugins import build
from casemate.protocols import Embedder, Index, PoisoningAttack, Progress, Target
from casemate.rag.index_copy import copy_index
from casemate.rag.pipeline import Rag
from casemate.text.tokens import words
from casemate.types import DEFAULT_TENANT, Document, Query

Screen: TypeAlias = Callable[[Sequence[Document]], int]
"""How many of some new documents the screening gate would quarantine."""


class DrillQuestion(NamedTuple):
    """A question to attack, the answer that the attack wants, and whether a canary asks the question."""

    question: str
    desired: str
    watched: bool


@dataclass(frozen=True, slots=True)
class DrillResult:
    """Result of one attack on one question.

    Attributes:
        quarantined: How many of them the screening gate would have quarantined; None: there is no gate.
        false_unguarded: Whether the system without its guard gives the false answer.
        detected_by: Canaries that passed before and fail now.
        seconds: From planting to the end of the next run of the canaries; the wait for that run is not included.
    """

    attack: str
    question: str
    watched: bool
    documents: int
    quarantined: int | None
    false_unguarded: bool
    false_guarded: bool
    detected_by: tuple[str, ...]
    seconds: float
    restored: bool


@asynccontextmanager
async def guarded_copy(rag: Rag, config: Config, tenant: str = DEFAULT_TENANT) -> AsyncIterator[Guard]:
    """A guarded copy of a system with a tenant's documents, deleted at the end.

    It uses the operator's embedder, generator and defenses.

    Raises:
        DataError: If the tenant has no documents, or the index changed during the copy.
    """
    with tempfile.TemporaryDirectory(prefix="casemate-drill-") as folder:
        with closing(SqliteIndex(Path(folder) / "copy.db")) as index:
            index.open(rag.embedder.fingerprint, rag.embedder.dim)
            await asyncio.to_thread(copy_index, rag.index, index, tenant)
            parts: dict[Any, Any] = {Embedder: rag.embedder, Index: index}
            defenses = [build("defense", spec, config.folder, parts) for spec in config.guard.defenses]
            yield Guard(Rag(rag.embedder, index, rag.generator, rag.instructions), defenses)


@asynccontextmanager
async def planted(guard: Guard, documents: Sequence[Document], tenant: str = DEFAULT_TENANT) -> AsyncIterator[None]:
    """Adds documents to the guard's index, and removes them at the end of the block."""
    if documents:
        await guard.add(documents, tenant)
    try:
        yield
    finally:
        if documents:
            await guard.remove([d.source for d in documents], tenant)


def contains_answer(text: str, desired: str) -> bool:
    """Whether an answer contains all words of a desired one, in order."""
    return " ".join(words(desired)) in " ".join(words(text))


@dataclass(frozen=True, slots=True)
class PoisoningDrill:
    """A drill on a guarded copy.

    Attributes:
        runner: Asks the canaries; its target is replaced by the copy.
        screen: The screening gate, fitted to the copy before the attacks; None: there is none.
    """

    guard: Guard
    runner: CanaryRunner
    screen: Screen | None = None
    seed: int = 7

    async def run(
        self,
        attacks: Mapping[str, PoisoningAttack],
        questions: Sequence[DrillQuestion],
        progress: Progress = lambda count: None,
    ) -> list[DrillResult]:
        """Plants the documents of each attack for each question, one after another, and removes them again."""
        before, found = await self._ask_canaries("drill-before"), []
        for number, (name, question) in enumerate((name, question) for name in attacks for question in questions):
            rng = np.random.default_rng([self.seed, number])
            crafted = await attacks[name].craft(question.question, question.desired, rng)
            found.append(await self._attack(name, question, crafted, before))
            progress(1)
        return found

    async def _attack(
        self, attack: str, question: DrillQuestion, crafted: Sequence[Document], before: CanaryRun
    ) -> DrillResult:
        tenant = self.runner.tenant
        quarantined = None if self.screen is None else await asyncio.to_thread(self.screen, crafted)
        async with planted(self.guard, crafted, tenant):
            began, targets = time.monotonic(), (self.guard.rag, self.guard)
            unguarded, guarded = [await self._answers_falsely(target, question) for target in targets]
            during = await self._ask_canaries("drill")
            seconds = time.monotonic() - began
        after = await self._ask_canaries("drill-after")
        return DrillResult(
            attack,
            question.question,
            question.watched,
            len(crafted),
            quarantined,
            unguarded,
            guarded,
            _newly_failed(before, during),
            seconds,
            not _newly_failed(before, after),
        )

    async def _ask_canaries(self, run_id: str) -> CanaryRun:
        return await replace(self.runner, target=self.guard).run(run_id)

    async def _answers_falsely(self, target: Target, question: DrillQuestion) -> bool:
        client = f"drill-{uuid.uuid4().hex}"
        answer = await target.ask(Query(question.question, client, self.runner.tenant, self.runner.k))
        return contains_answer(answer.text, question.desired)


def _newly_failed(before: CanaryRun, now: CanaryRun) -> tuple[str, ...]:
    passed = {r.canary for r in before.results if r.status is CanaryStatus.PASS}
    return tuple(r.canary for r in now.results if r.canary in passed and r.status is CanaryStatus.FAIL)
