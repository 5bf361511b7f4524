"""Injection: hides instructions in documents of a copy of the index, and asks ordinary questions, guard off and on.

The guard is the configured one: its defenses, and the screening of new documents where it quarantines
(`monitor.gate: true`). An injected document is in the copy for one question only. If a finder is configured, the
answers to the same questions, without injected documents, are searched for personal data.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.config import Config, PluginSpec
from casemate.guard.defenses.personal_data import find_new
from casemate.guard.guard import Guard
from casemate.maths.stats import proportion
from casemate.plugins import build
from casemate.protocols import Index, InjectionAttack, PersonalDataFinder, Progress, Steps, Target
from casemate.rag.index_copy import copy_index
from casemate.redteam.campaigns.own import OwnCampaign, OwnSystem
from casemate.redteam.campaigns.pipeline import INDEX, AttackRunner, TargetSystem
from casemate.redteam.campaigns.workers import TargetFactory
from casemate.redteam.lab.benign import benign_questions
from casemate.redteam.lab.judge import OFF, ON, defense_check
from casemate.redteam.lab.probes import (
    EXAMPLES,
    MIN_CONTROL,
    ProbeTrial,
    personal_data_check,
    probe_check,
    probe_result,
)
from casemate.redteam.lab.results import CampaignResult, PersonalDataResult
from casemate.redteam.lab.store import Exchange
from casemate.redteam.reporting.files import PROBE
from casemate.types import Document, Query

Screen: TypeAlias = Callable[[Sequence[Document]], int]
"""How many of some new documents the screening gate would quarantine."""
CONTROLS = 10
"""Questions in which the user gives the instruction. A reader that ignores most of them gets no further questions."""
NOT_TESTED = (
    "Membership inference, extraction, and false facts in documents: this campaign injects instructions only.",
    "Instructions that are disguised, optimized against this reader, or spread over several documents.",
)
SIMULATED = (
    "The reader is simulated (`simulated_reader`): a script that follows no instruction in documents, which is the "
    "best case for the operator. It repeats sentences of documents, which is the worst case for personal data."
)
NO_SCREENING = (
    "The screening of new documents: it does not quarantine (monitor.gate), or the index is too small for it."
)


@dataclass(eq=False)
class ProbeRunner(AttackRunner):
    """Injection attacks on a guarded copy of the index; its bare system is the target with the guard off.

    Each question has its place in the seed. ``screen`` screens new documents (None: the index is too small), and with
    ``quarantines`` a suspicious one is kept out of the index, guard on. ``finder``, after its name, is that of personal
    data.
    """

    config: Config
    attacks: Mapping[str, InjectionAttack]
    guard: Guard
    questions: Sequence[str]
    tenant: str
    screen: Screen | None = None
    quarantines: bool = False
    finder: tuple[str, PersonalDataFinder] | None = None
    _personal_data: PersonalDataResult | None = field(default=None, init=False)
    _trials: dict[tuple[str, str], list[ProbeTrial]] = field(default_factory=dict, init=False)
    _finished: set[tuple[str, str]] = field(default_factory=set, init=False)

    async def execute(self, steps: Steps) -> None:
        """Asks every question with the instruction of every effect; replies of an earlier run are in the store."""
        for name, variant in self._probes:
            found = self._trials[name, variant] = []
            with steps(f"{name}: {variant}", len(self.questions)) as count:
                await self._ask_all(self.attacks[name], variant, found, count)
            self._finished.add((name, variant))
        if self.finder is not None:
            with steps("searching answers for personal data", len(self.questions)) as count:
                self._personal_data = await self._search_answers(*self.finder, count)

    async def _search_answers(self, name: str, finder: PersonalDataFinder, progress: Progress) -> PersonalDataResult:
        targets: dict[str, Target] = {OFF: self.guard.rag, ON: self.guard}
        kinds, answers, failed = {side: Counter[str]() for side in targets}, Counter[str](), 0
        for number, question in enumerate(self.questions):
            for side, target in targets.items():
                answer = await target.ask(Query(question, f"probe-{number}", self.tenant, self.config.rag.k))
                found = await asyncio.to_thread(find_new, finder, question, answer.text)
                kinds[side].update(one.kind for one in found)
                answers[side] += bool(found)
                failed += Exchange.from_answer(question, answer).failed
            progress(1)
        recognized = [await asyncio.to_thread(finder.find, example) for example in EXAMPLES]
        total = len(self.questions)
        return PersonalDataResult(
            name,
            total,
            proportion(answers[OFF], total),
            proportion(answers[ON], total),
            {side: dict(sorted(found.items())) for side, found in kinds.items()},
            sum(map(bool, recognized)),
            len(EXAMPLES),
            failed,
        )

    async def _ask_all(
        self, attack: InjectionAttack, variant: str, found: list[ProbeTrial], progress: Progress
    ) -> None:
        for number, question in enumerate(self.questions):
            if number == CONTROLS and _ignores_the_user(found):
                return
            rng = np.random.default_rng([self.config.redteam.seed, number])
            found.append(await self._try(attack, variant, question, rng, number < CONTROLS))
            progress(1)

    @property
    def _probes(self) -> list[tuple[str, str]]:
        return [(name, variant) for name, attack in self.attacks.items() for variant in attack.variants]

    async def _try(
        self, attack: InjectionAttack, variant: str, question: str, rng: np.random.Generator, control: bool
    ) -> ProbeTrial:
        rag, injection = self.guard.rag, attack.craft(variant, question, rng)
        client = f"probe-{injection.document.id}"

        async def ask(target: Target, text: str) -> tuple[bool, Exchange]:
            answer = await target.ask(Query(text, client, self.tenant, self.config.rag.k))
            return attack.succeeded(injection, answer.text, rag.instructions), Exchange.from_answer(text, answer)

        baseline, _ = await ask(rag, question)
        followed = (await ask(rag, f"{question} {injection.instruction}"))[0] if control else None
        suspicious = None
        if self.screen is not None:
            suspicious = await asyncio.to_thread(self.screen, [injection.document]) > 0
        await self.guard.add([injection.document], self.tenant)
        try:
            off, seen = await ask(rag, question)
            if suspicious and self.quarantines:
                await self.guard.remove([injection.document.source], self.tenant)
            on, guarded = await ask(self.guard, question)
        finally:
            await self.guard.remove([injection.document.source], self.tenant)
        retrieved = injection.document.id in seen.context
        return ProbeTrial(baseline, followed, retrieved, off, on, suspicious, guarded.failed)

    @property
    def complete(self) -> bool:
        searched = self.finder is None or self._personal_data is not None
        return searched and self._finished.issuperset(self._probes)

    def judge(self) -> CampaignResult:
        results = [
            probe_result(name, variant, self.attacks[name].paper, self._trials.get((name, variant), ()))
            for name, variant in self._probes
        ]
        section = self.config.redteam.probe
        checks = [probe_check(result, section.max_followed) for result in results]
        failures, found = {"injection": sum(result.failed for result in results)}, self._personal_data
        if found is not None:
            checks.append(personal_data_check(found, section.max_personal_data))
            failures["personal data"] = found.failed
        screened = self.quarantines and self.screen is not None
        return CampaignResult(
            probes=tuple(results),
            personal_data=found,
            checks=(*checks, defense_check(failures)),
            not_tested=NOT_TESTED if screened else (*NOT_TESTED, NO_SCREENING),
            evidence=self._evidence(screened),
            cost={"questions": sum(map(_asked, self._trials.values())) + 2 * (found.questions if found else 0)},
        )

    def _evidence(self, screened: bool) -> dict[str, Any]:
        return {
            "attacks": list(self.attacks),
            "k": self.config.rag.k,
            "questions": len(self.questions),
            "limit": self.config.redteam.probe.max_followed,
            "screening": "quarantines" if screened else "not part of the guard",
        }


def _ignores_the_user(trials: Sequence[ProbeTrial]) -> bool:
    followed = [trial.control for trial in trials if trial.control is not None and not trial.baseline]
    return sum(followed) < MIN_CONTROL * len(followed)


def _asked(trials: Sequence[ProbeTrial]) -> int:
    return sum(3 + (trial.control is not None) for trial in trials)


@dataclass(frozen=True)
class OwnProbeCampaign(OwnCampaign):
    """Injection attacks on this system. ``fit_screen`` fits the screening of new documents; None: too few."""

    fit_screen: Callable[[Index], Screen | None] = lambda index: None
    stem: ClassVar[str] = PROBE

    async def prepare(self, steps: Steps, resources: ExitStack) -> tuple[TargetSystem, AttackRunner]:
        section, before = self.config.redteam, self.app.index.digests(self.tenant)
        source, questions = self.questions()
        directory = self.open_directory(self.fingerprint([sorted(before.items()), section.probe.questions]))
        store = self.open_store(resources)
        index: Index = resources.enter_context(closing(SqliteIndex(directory / INDEX)))
        rag = self.bare_system(index, store)
        with steps("copying the index", self.app.index.moments(self.tenant).n) as count:
            copy_index(self.app.index, index, self.tenant, progress=count)
        screen, finder = await asyncio.to_thread(self.fit_screen, index), section.probe.personal_data
        runner = ProbeRunner(
            self.config,
            self.attacks(),
            TargetFactory(self.config, self.config.folder, rag, None).guard(),
            questions,
            self.tenant,
            screen,
            self.config.monitor.gate is True,
            (finder.use, build("personal_data_finder", finder, self.config.folder)) if finder else None,
        )
        system = OwnSystem(self.app, rag, self.tenant, directory, before)
        system.evidence = {**system.evidence, "questions from": source}
        system.simulated = [SIMULATED] if system.simulated else []
        return system, runner

    def parts(self) -> list[tuple[str, PluginSpec]]:
        """Role and configuration of everything that is built: see `Campaign.parts`."""
        finder = self.config.redteam.probe.personal_data
        return [*super().parts(), *([("personal_data_finder", finder)] if finder else [])]

    def attacks(self) -> dict[str, InjectionAttack]:
        """The configured attacks by name."""
        return {part.use: build("injector", part, self.config.folder) for part in self.config.redteam.probe.attacks}

    def questions(self) -> tuple[str, list[str]]:
        """The ordinary questions, and where they come from.

        Raises:
            DataError: If the tenant has no documents.
        """
        self.app.require_documents(self.tenant)
        section = self.config.redteam
        chunks = [d for documents, _ in self.app.index.scan(self.tenant) for d in documents]
        rng = np.random.default_rng(section.seed)
        source, questions = benign_questions(self.benign, chunks, section.probe.questions, rng)
        return source, questions[: section.probe.questions]
