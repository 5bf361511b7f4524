"""Runs membership attacks on candidates, against the bare and the guarded system.

Each finished trial is stored at once, so an interrupted or killed experiment, or one out of budget, resumes when it is
run again. Trials can also run on workers as work items; the store stays in this process, so a lost worker loses only
its current item.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from casemate.errors import BudgetExhausted, DataError, describe_failure
from casemate.protocols import MembershipAttack, Progress, Target
from casemate.redteam.lab.black_box import Budget, TargetSession, retry_with
from casemate.redteam.lab.datasets import IndexedSource, Split
from casemate.redteam.lab.results import Trial
from casemate.redteam.lab.store import CampaignStore, Exchange
from casemate.runtime.concurrency import map_concurrently
from casemate.runtime.executor import Stopped
from casemate.runtime.package_code import package_code
from casemate.types import DEFAULT_TENANT, Document, Probe

log = logging.getLogger(__name__)

Identity: TypeAlias = Literal["candidate", "question", "campaign"]
LEASE_QUESTIONS = 300  # Questions reserved for a work item of a campaign with a budget. Unused ones are returned.
JSON_SCALARS = (str, int, float, bool, type(None))


SAMPLED_PROBES = 4
"""Candidates from which the number of questions is estimated."""


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """Settings of an experiment.

    Attributes:
        identity: Client names of the attacker: one for each candidate, for each question, or one for the campaign.
            With `campaign`, order matters to a guard with state: trials run one at a time, and a resumed campaign meets
            a guard that has lost its state.
        questions: Budget of the campaign, earlier runs included; None: unlimited.
        waits: Seconds to wait before each retry of an unavailable target.
        label: Fingerprint of everything else that results depend on: configuration, corpus, versions. Trials with
            another label are not reused.
    """

    seed: int = 7
    k: int = 5
    tenant: str = DEFAULT_TENANT
    identity: Identity = "candidate"
    questions: int | None = None
    concurrency: int = 4
    waits: tuple[float, ...] = (1.0, 5.0, 20.0)
    label: str = ""

    def client(self, attack: str, candidate: str) -> Callable[[int], str]:
        """Maps the number of a question about a candidate, from 0, to the client's name."""
        if self.identity == "campaign":
            return lambda number: f"redteam-{attack}"
        name = f"redteam-{attack}-{digest(attack, candidate)}"
        return (lambda number: f"{name}-{number}") if self.identity == "question" else (lambda number: name)


@dataclass(frozen=True, slots=True)
class Trials:
    """Measurements of an experiment so far.

    Attributes:
        done: Finished trials by attack and target, in the order of the candidates.
        errors: Aborted attacks and the reasons. They are not judged.
        missing: Unfinished trials of the other attacks.
        reason: Why trials are missing; empty if none is.
        failed: Questions in which a defense failed.
        cost: `questions` of finished trials, questions `refused` by the target.
    """

    done: Mapping[tuple[str, str], tuple[Trial, ...]]
    errors: Mapping[str, str]
    missing: int
    reason: str
    failed: int
    cost: Mapping[str, float]


class WorkItem(NamedTuple):
    """One attack on one candidate, against the targets that are left; the attack does not learn ``member``.

    ``questions`` is its budget on a worker; None: unlimited.
    """

    attack: str
    candidate: Document
    member: bool
    targets: tuple[str, ...]
    questions: int | None = None


@dataclass(slots=True)
class WorkResult:
    """Result of a work item that ran on a worker.

    Attributes:
        trials: Finished trials with their exchanges, by target.
        asked: Questions asked, those of unfinished trials included.
        error: Why the attack was aborted; empty if it was not.
        replies: Replies generated, by key of `CachedGenerator`.
        cached: Replies served from the worker's cache.
    """

    attack: str
    candidate: str
    trials: dict[str, tuple[Trial, tuple[Exchange, ...]]] = field(default_factory=dict)
    asked: int = 0
    error: str = ""
    replies: Mapping[str, str] = field(default_factory=dict)
    cached: int = 0


RunOnWorkers: TypeAlias = Callable[[Iterable[WorkItem], Stopped], Iterator[WorkResult]]
"""Runs work items on workers and yields their results in order."""
RecordTrial: TypeAlias = Callable[[WorkItem, str, Trial, tuple[Exchange, ...]], None]
"""Records a trial: the work item, the target, the trial and its exchanges."""


@dataclass(eq=False)
class Experiment:
    """Membership attacks on the candidates of a split.

    Targets are usually `off` (bare system) and `on` (guarded), both over the lab's index. The indexed chunks of each
    member show whether it was withheld. ``run_on_workers`` runs trials elsewhere if their order does not matter.
    """

    attacks: Mapping[str, MembershipAttack]
    split: Split
    targets: Mapping[str, Target]
    store: CampaignStore
    indexed: Mapping[str, IndexedSource]
    plan: ExperimentPlan = ExperimentPlan()
    run_on_workers: RunOnWorkers | None = None
    _errors: dict[str, str] = field(default_factory=dict, init=False)
    _target_limit: str = field(default="", init=False)
    _studied: set[str] = field(default_factory=set, init=False)
    _budget: Budget = field(default_factory=Budget, init=False)

    @property
    def total(self) -> int:
        """Number of trials of the whole experiment."""
        return len(self.attacks) * len(self.targets) * len(self.split.candidates)

    async def run(self, progress: Progress = lambda count: None) -> Trials:
        """Runs the unfinished trials. Progress counts finished ones, first those of earlier runs.

        Raises:
            DataError: If a member has no indexed chunks.
            BackendError: If the store cannot be written. Errors of an attack or a target are in `Trials.errors`.
        """
        unknown = [d.source for d in self.split.members if d.source not in self.indexed]
        if unknown:
            raise DataError(f"{len(unknown)} members are not in the index, {unknown[0]!r} first; copy the index again")
        done = self._finished_trials()
        self._reset(Budget(self.plan.questions, _questions(done)))
        progress(sum(map(len, done.values())))
        if self.run_on_workers is not None and self.plan.identity != "campaign":
            await self._distribute(self.run_on_workers, self._open_items(done), progress)
            done = self._finished_trials()
        await self._study(list(dict.fromkeys(item.attack for item in self._open_items(done))))
        attack = partial(self._attack, record=partial(self._record, progress))
        limit = 1 if self.plan.identity == "campaign" else self.plan.concurrency
        await map_concurrently(attack, self._open_items(done), limit)
        return self.trials()

    async def expected_questions(self) -> int:
        """About how many questions all trials ask; asks none. Attacks prepare their probes for a few candidates.

        An attack whose questions depend on replies, or that has a writer, counts with its option ``questions``.
        """
        await self._study(tuple(self.attacks))
        texts = [document for document, _ in self.split.candidates][:SAMPLED_PROBES]
        per_candidate = [await self._mean_questions(name, texts) for name in self.attacks if name not in self._errors]
        return round(sum(per_candidate) * len(self.split.candidates) * len(self.targets))

    async def _mean_questions(self, name: str, texts: Sequence[Document]) -> float:
        """Mean number of questions of an attack about one candidate; 0 if it fails, which its run reports."""
        attack = self.attacks[name]
        if type(attack).run is not MembershipAttack.run or getattr(attack, "writer", None):
            return float(getattr(attack, "questions", 1))
        try:
            probes = [await attack.prepare(document, self._generator(name, document)) for document in texts]
        except Exception:
            return 0.0
        return sum(len(probe.questions) for probe in probes) / max(1, len(probes))

    def _generator(self, name: str, candidate: Document) -> np.random.Generator:
        return np.random.default_rng(int(digest(self.plan.seed, name, candidate.source), 16))

    async def run_item(self, item: WorkItem) -> WorkResult:
        """Runs one work item without the store: its trials are returned."""
        result = WorkResult(item.attack, item.candidate.source)
        self._reset(Budget(item.questions))
        if item.attack not in self._studied:
            await self._study([item.attack])
            self._studied.add(item.attack)

        def record(item: WorkItem, target: str, trial: Trial, exchanges: tuple[Exchange, ...]) -> None:
            result.trials[target] = trial, exchanges

        await self._attack(item, record)
        if item.attack in self._errors:
            self._studied.discard(item.attack)
        result.asked, result.error = self._budget.spent, self._errors.get(item.attack, "")
        return result

    def trials(self) -> Trials:
        """The finished trials; runs nothing."""
        kept = self._finished_trials()
        order = [d.source for d, _ in self.split.candidates]
        done = {key: tuple(trials[c] for c in order if c in trials) for key, trials in kept.items()}
        missing = sum(len(order) - len(trials) for (name, _), trials in done.items() if name not in self._errors)
        counts = [self.store.failure_counts(self._campaign(name), target) for name, target in done]
        cost = {"questions": _questions(kept), "refused": sum(r for _, r in counts)}
        return Trials(done, dict(self._errors), missing, self._missing_reason(missing), sum(f for f, _ in counts), cost)

    def exchanges(self, attack: str, target: str, candidate: str) -> tuple[Exchange, ...]:
        """The exchanges of a finished trial."""
        return self.store.exchanges(self._campaign(attack), target, candidate)

    def member_sessions(self, target: str) -> Iterator[tuple[str, Document, tuple[Exchange, ...]]]:
        """Attack, member and exchanges of every finished trial of a member against a target."""
        for name in self.attacks:
            finished = self.store.trials(self._campaign(name), target)
            for document in self.split.members:
                if document.source in finished:
                    yield name, document, self.exchanges(name, target, document.source)

    def _reset(self, budget: Budget) -> None:
        self._budget, self._target_limit = budget, ""
        self._errors.clear()

    def _missing_reason(self, missing: int) -> str:
        if not missing:
            return ""
        if self._budget.exhausted:
            return f"the budget of {self.plan.questions} questions ran out; raise it and run again to continue"
        return self._target_limit or "the campaign was interrupted; run again to continue"

    def _campaign(self, attack: str) -> str:
        """Fingerprint of everything that the results of an attack depend on."""
        plan = self.plan
        # None stands for an option that is gone, so that stored trials can still be reused
        facts = [plan.label, plan.seed, plan.k, plan.tenant, plan.identity, None, self.split.fingerprint]
        return digest(*facts, attack, describe_options(self.attacks[attack]))

    def _finished_trials(self) -> dict[tuple[str, str], dict[str, Trial]]:
        return {
            (name, target): self.store.trials(self._campaign(name), target)
            for name in self.attacks
            for target in self.targets
        }

    async def _study(self, names: Sequence[str]) -> None:
        """Shows the candidates' texts to each attack, in an order that does not reveal membership."""
        texts = sorted(d.content for d, _ in self.split.candidates)
        for name in names:
            try:
                await asyncio.to_thread(self.attacks[name].study, texts)
            except Exception as error:
                self._abort(name, error)

    def _open_items(self, done: Mapping[tuple[str, str], Mapping[str, Trial]]) -> Iterator[WorkItem]:
        """The unfinished work, candidate by candidate, so that all attacks advance together."""
        for document, member in self.split.candidates:
            for name in self.attacks:
                left = tuple(target for target in self.targets if document.source not in done[name, target])
                if left:
                    yield WorkItem(name, document, member, left)

    async def _distribute(self, run: RunOnWorkers, items: Iterator[WorkItem], progress: Progress) -> None:
        """Runs items on workers while the budget covers all leases.

        An item with a target finished here is left for this process: with a sampling model, all targets of a candidate
        must get replies from one cache.
        """
        stopped = threading.Event()
        lease = None if self.plan.questions is None else LEASE_QUESTIONS

        def leased() -> Iterator[WorkItem]:
            for item in items:
                if len(item.targets) < len(self.targets) or item.attack in self._errors:
                    continue
                if not self._budget.lease(LEASE_QUESTIONS):
                    return
                yield item._replace(questions=lease)

        results = run(leased(), stopped.is_set)
        try:
            while (result := await asyncio.to_thread(next, results, None)) is not None:
                self._apply(result, progress)
        finally:
            stopped.set()

    def _apply(self, result: WorkResult, progress: Progress) -> None:
        self._budget.settle(LEASE_QUESTIONS, result.asked)
        for key, text in result.replies.items():
            self.store.put_reply(key, text)
        for target, (trial, exchanges) in result.trials.items():
            self.store.record_trial(self._campaign(result.attack), target, trial, exchanges)
        progress(len(result.trials))
        if result.error:
            self._errors[result.attack] = result.error
            log.error("the attack %s was aborted: %s", result.attack, result.error)

    def _record(
        self, progress: Progress, item: WorkItem, target: str, trial: Trial, exchanges: tuple[Exchange, ...]
    ) -> None:
        self.store.record_trial(self._campaign(item.attack), target, trial, exchanges)
        progress(1)

    async def _attack(self, item: WorkItem, record: RecordTrial) -> None:
        """Attacks one candidate on its targets; each finished trial is recorded at once."""
        probes: list[Probe] = []
        for target in item.targets:
            if self._budget.exhausted or item.attack in self._errors:
                return
            try:
                attempt = partial(self._attempt, item.attack, target, item.candidate, probes)
                features, session = await retry_with(self.plan.waits, attempt)
            except BudgetExhausted as error:
                self._target_limit = str(error)  # read only if the campaign's own budget is left
                continue
            except Exception as error:
                self._abort(item.attack, error)
                return
            if not session.truncated:  # a truncated trial is repeated in full by the next run
                record(item, target, self._trial(item, features, session.exchanges), session.exchanges)

    def _trial(self, item: WorkItem, features: tuple[float, ...], exchanges: Sequence[Exchange]) -> Trial:
        source = item.candidate.source
        hidden = sum(not self.indexed[source].isdisjoint(e.hidden) for e in exchanges) if item.member else 0
        return Trial(source, item.member, features, len(exchanges), hidden, sum(e.withheld for e in exchanges))

    async def _attempt(
        self, name: str, target: str, candidate: Document, probes: list[Probe]
    ) -> tuple[tuple[float, ...], TargetSession]:
        """The features of one candidate. A probe is prepared once for all targets."""
        plan, attack = self.plan, self.attacks[name]
        rng = self._generator(name, candidate)
        client = plan.client(name, candidate.source)
        session = TargetSession(self.targets[target], client, self._budget, plan.k, plan.tenant, plan.waits)
        with session as box:
            if type(attack).run is not MembershipAttack.run:
                features = await attack.run(candidate, box, rng)
            else:
                probes[:] = probes or [await attack.prepare(candidate, rng)]
                replies = [await box.ask(question) for question in probes[0].questions]
                features = await attack.measure(candidate, probes[0], replies)
        if len(features) != len(attack.features) or not all(map(math.isfinite, features)):
            expected = ", ".join(attack.features)
            raise DataError(f"the attack {name} measured {features}; finite numbers were expected for {expected}")
        return tuple(map(float, features)), session

    def _abort(self, name: str, error: Exception) -> None:
        """Aborts an attack. Only the message of a `CasemateError` is kept: others may quote a document."""
        if name not in self._errors:  # trials in progress fail for the same reason
            log.error("the attack %s was aborted: %s", name, describe_failure(error))
        self._errors[name] = describe_failure(error)
        log.debug("traceback of the aborted attack", exc_info=error)


def _questions(trials: Mapping[tuple[str, str], Mapping[str, Trial]]) -> int:
    return sum(trial.questions for done in trials.values() for trial in done.values())


def describe_options(part: Any) -> Any:
    """The class of an attack, its plain options and, if it is not Casemate's, its code, without memory addresses."""
    if isinstance(part, JSON_SCALARS):
        return part
    if isinstance(part, Path):
        return str(part)
    if isinstance(part, list | tuple):
        return [describe_options(item) for item in part]
    if isinstance(part, Mapping):
        return {str(key): describe_options(value) for key, value in part.items()}
    known = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    options = {f.name: describe_options(getattr(part, f.name)) for f in known if f.init}
    cls = type(part)
    return {"class": f"{cls.__module__}.{cls.__qualname__}{package_code(cls) or ''}", **options}


def digest(*facts: Any) -> str:
    """Fingerprint of JSON values, 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()
