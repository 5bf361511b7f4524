"""Runs attacks on candidates, against the bare and the guarded system, and brings back what they measured.

Every trial is kept when it is finished. What is interrupted, killed or out of budget goes on by running again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from casemate.errors import BudgetExhausted, CasemateError, DataError
from casemate.lab.box import Budget, Session, patiently
from casemate.lab.datasets import Split, Stored
from casemate.lab.errands import LEASE, Brought, Errand, Send
from casemate.lab.ledger import Exchange, Ledger
from casemate.lab.results import Trial
from casemate.protocols import MembershipAttack, Progress, Target
from casemate.types import DEFAULT_TENANT, Document, Probe

log = logging.getLogger(__name__)

Job: TypeAlias = tuple[str, Document, bool, list[str]]
"""Attack, candidate, whether a member, and the targets still to be asked."""
Identity: TypeAlias = Literal["candidate", "question", "campaign"]

PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Plan:
    """How a campaign is run.

    Attributes:
        seed: Of everything that is drawn.
        k: Documents that may be read for an answer.
        tenant: Whose documents.
        identity: Who the attacker seems to be: another client for each candidate, for each question, or one client
            for all that an attack asks. With ``campaign`` the order matters to a guard that remembers, so one trial
            runs at a time, and a campaign that was interrupted meets a guard that has forgotten.
        questions: How many may be asked in all, those of earlier runs included; None: as many as it takes.
        per_candidate: How many one trial may ask.
        concurrency: Trials that run side by side.
        waits: Seconds before each further try when the target cannot be reached for the moment.
        label: Of everything else that the results depend on: configuration, corpus, versions. Trials of another label
            are not used again.
    """

    seed: int = 7
    k: int = 5
    tenant: str = DEFAULT_TENANT
    identity: Identity = "candidate"
    questions: int | None = None
    per_candidate: int | None = None
    concurrency: int = 4
    waits: tuple[float, ...] = (1.0, 5.0, 20.0)
    label: str = ""

    def client(self, attack: str, candidate: str) -> Callable[[int], str]:
        """The client's name for the question of a number, from 0, about a candidate."""
        if self.identity == "campaign":
            return lambda number: f"redteam-{attack}"
        name = f"redteam-{attack}-{digest(attack, candidate)}"
        return (lambda number: f"{name}-{number}") if self.identity == "question" else (lambda number: name)


@dataclass(frozen=True, slots=True)
class Trials:
    """What a campaign has measured so far.

    Attributes:
        done: Finished trials by attack and target, in the order of the candidates.
        errors: Attacks that broke off, and why. They are not judged.
        missing: Trials of the other attacks that are not there.
        why: Why they are not; empty if none is missing.
        failed: Questions in which a defense failed: the guard was not what it should be.
        cost: ``questions`` asked in these trials, ``refused`` by the target as no question, ``seconds`` of this run.
    """

    done: Mapping[tuple[str, str], tuple[Trial, ...]]
    errors: Mapping[str, str]
    missing: int
    why: str
    failed: int
    cost: Mapping[str, float]


@dataclass(eq=False)
class Experiment:
    """One campaign.

    Attributes:
        attacks: By name.
        split: Who is a member.
        targets: By name, usually ``off`` (the bare system) and ``on`` (the guard around it). Both over the lab's index.
        ledger: Where finished trials are kept.
        held: What the index holds of each member, by which the lab sees what was withheld.
        plan: How it is run.
        send: Who runs trials elsewhere, where their order does not matter; None: nobody.
    """

    attacks: Mapping[str, MembershipAttack]
    split: Split
    targets: Mapping[str, Target]
    ledger: Ledger
    held: Mapping[str, Stored]
    plan: Plan = Plan()
    send: Send | None = None
    _errors: dict[str, str] = field(default_factory=dict, init=False)
    _short: int = field(default=0, init=False)
    _studied: set[str] = field(default_factory=set, init=False)
    _given_up: set[tuple[str, str]] = field(default_factory=set, init=False)
    _budget: Budget = field(default_factory=Budget, init=False)
    _seconds: float = field(default=0.0, init=False)

    @property
    def total(self) -> int:
        """How many trials there are to do."""
        return len(self.attacks) * len(self.targets) * len(self.split.candidates)

    async def run(self, progress: Progress = lambda count: None) -> Trials:
        """Does what is not done yet.

        Args:
            progress: Called with the number of trials just finished, first with those that were there already.

        Raises:
            DataError: If it is not known what the index holds of a member: what is withheld could not be seen.
            BackendError: If the ledger cannot be written. What an attack or a target raises is in ``Trials.errors``.
        """
        unknown = [d.source for d in self.split.members if d.source not in self.held]
        if unknown:
            raise DataError(f"{len(unknown)} members are not in the index, {unknown[0]!r} first; hold out anew")
        began = time.monotonic()
        self._errors.clear()
        self._given_up.clear()
        self._short = 0
        done = self._done()
        spent = sum(trial.questions for trials in done.values() for trial in trials.values())
        self._budget = Budget(self.plan.questions, self.plan.per_candidate, spent)
        progress(sum(map(len, done.values())))
        try:
            if self.send is not None and self.plan.identity != "campaign":
                await self._elsewhere(self.send, self._jobs(done), progress)
                done = self._done()
            await self._study([name for name in self.attacks if self._open(name, done)])
            await self._all(self._jobs(done), progress)
        finally:
            self._seconds = time.monotonic() - began
        return self.trials()

    async def errand(self, errand: Errand) -> Brought:
        """Does one, without the ledger: what there is to note is brought back."""
        name, brought, probes = errand.attack, Brought(errand.attack, errand.candidate.source), list[Probe]()
        self._budget = Budget(errand.questions, self.plan.per_candidate)
        self._errors.clear()
        self._short = 0
        if name not in self._studied:
            await self._study([name])
            self._studied.add(name)
        for label in self.targets:
            if name in self._errors:
                self._studied.discard(name)
                break
            found = await self._measured(name, label, (errand.candidate, errand.member), probes)
            if found is not None:
                brought.sides[label] = found
        brought.asked, brought.short = self._budget.spent, self._short
        brought.error = self._errors.get(name, "")
        return brought

    def trials(self) -> Trials:
        """What is finished, without running anything: for a campaign that was interrupted."""
        kept = {(name, label): self._finished(name, label) for name in self.attacks for label in self.targets}
        order = [d.source for d, _ in self.split.candidates]
        done = {key: tuple(trials[c] for c in order if c in trials) for key, trials in kept.items()}
        sound = [key for key in done if key[0] not in self._errors]
        missing = sum(len(order) - len(done[key]) for key in sound)
        troubles = [self.ledger.troubles(self._campaign(name), label) for name, label in done]
        questions = sum(trial.questions for trials in done.values() for trial in trials)
        cost = {"questions": questions, "refused": sum(r for _, r in troubles), "seconds": self._seconds}
        why = self._why(missing)
        return Trials(done, dict(self._errors), missing, why, sum(f for f, _ in troubles), cost)

    def session(self, attack: str, target: str, candidate: str) -> tuple[Exchange, ...]:
        """What was asked and answered in a finished trial."""
        return self.ledger.session(self._campaign(attack), target, candidate)

    def sessions(self, target: str) -> Iterator[tuple[str, Document, tuple[Exchange, ...]]]:
        """Attack, member and what was asked, for every finished trial of a member against a target."""
        for name in self.attacks:
            finished = self._finished(name, target)
            for document in self.split.members:
                if document.source in finished:
                    yield name, document, self.session(name, target, document.source)

    def _why(self, missing: int) -> str:
        if not missing:
            return ""
        if self._budget.exhausted:
            return f"the budget of {self.plan.questions} questions ran out; raise it and run again to go on"
        if self._short:
            return f"{self._short} trials needed more than {self.plan.per_candidate} questions for their candidate"
        return "the campaign was interrupted; run again to go on"

    def _campaign(self, attack: str) -> str:
        """A fingerprint of all that this attack's results depend on."""
        plan = self.plan
        facts = [plan.label, plan.seed, plan.k, plan.tenant, plan.identity, plan.per_candidate, self.split.fingerprint]
        return digest(*facts, attack, options_of(self.attacks[attack]))

    def _done(self) -> dict[tuple[str, str], dict[str, Trial]]:
        return {(name, label): self._finished(name, label) for name in self.attacks for label in self.targets}

    def _finished(self, attack: str, target: str) -> dict[str, Trial]:
        return self.ledger.trials(self._campaign(attack), target)

    def _open(self, attack: str, done: Mapping[tuple[str, str], Mapping[str, Trial]]) -> bool:
        return any(len(done[attack, label]) < len(self.split.candidates) for label in self.targets)

    async def _study(self, names: Sequence[str]) -> None:
        """Shows the candidates' texts to each attack, in an order that does not tell who is a member."""
        texts = sorted(d.content for d, _ in self.split.candidates)
        for name in names:
            try:
                await asyncio.to_thread(self.attacks[name].study, texts)
            except Exception as error:
                self._break_off(name, error)

    def _jobs(self, done: Mapping[tuple[str, str], Mapping[str, Trial]]) -> Iterator[Job]:
        """What is left to do. All attacks advance side by side."""
        for document, member in self.split.candidates:
            for name in self.attacks:
                left = [label for label in self.targets if document.source not in done[name, label]]
                if left and (name, document.source) not in self._given_up:
                    yield name, document, member, left

    async def _elsewhere(self, send: Send, jobs: Iterator[Job], progress: Progress) -> None:
        """Sends out what others can do, as long as the budget surely suffices for all that is under way.

        A trial whose other half was done here is done here, too: both get the same replies from a model that samples.
        """
        stopped = threading.Event()
        lease = None if self.plan.questions is None else LEASE

        def errands() -> Iterator[Errand]:
            for name, document, member, labels in jobs:
                if len(labels) < len(self.targets) or name in self._errors:
                    continue
                if not self._budget.lease(LEASE):
                    return
                yield Errand(name, document, member, lease)

        back = send(errands(), stopped.is_set)
        try:
            while (brought := await asyncio.to_thread(next, back, None)) is not None:
                progress(self._noted(brought))
        finally:
            stopped.set()

    def _noted(self, brought: Brought) -> int:
        """Keeps what an errand brought; how many trials that was."""
        self._budget.settle(LEASE, brought.asked)
        self._short += brought.short
        if brought.short:
            self._given_up.add((brought.attack, brought.candidate))
        for key, text in brought.replies.items():
            self.ledger.keep(key, text)
        for label, (trial, exchanges) in brought.sides.items():
            self.ledger.note(self._campaign(brought.attack), label, trial, exchanges)
        if brought.error:
            self._errors[brought.attack] = brought.error
            log.error("the attack %s broke off: %s", brought.attack, brought.error)
        return len(brought.sides)

    async def _all(self, jobs: Iterator[Job], progress: Progress) -> None:
        """A few workers take job after job; if one of them fails, none is left behind."""

        async def work() -> None:
            for name, document, member, labels in jobs:
                probes: list[Probe] = []
                for label in labels:
                    if not self._budget.exhausted and name not in self._errors:
                        progress(await self._trial(name, label, (document, member), probes))

        count = 1 if self.plan.identity == "campaign" else max(1, self.plan.concurrency)
        workers = [asyncio.create_task(work()) for _ in range(count)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _trial(self, name: str, label: str, candidate: tuple[Document, bool], probes: list[Probe]) -> int:
        """One trial, kept if it came to its end: 1, else 0."""
        found = await self._measured(name, label, candidate, probes)
        if found is None:
            return 0
        self.ledger.note(self._campaign(name), label, *found)
        return 1

    async def _measured(
        self, name: str, label: str, candidate: tuple[Document, bool], probes: list[Probe]
    ) -> tuple[Trial, tuple[Exchange, ...]] | None:
        """One trial with what was asked, if it came to its end."""
        document, member = candidate
        try:
            features, session = await patiently(lambda: self._attempt(name, label, document, probes), self.plan.waits)
        except BudgetExhausted:
            self._short += not self._budget.exhausted
            return None
        except Exception as error:
            self._break_off(name, error)
            return None
        if session.cut:  # it went on with what it had, but the next run can give it all
            return None
        exchanges = session.exchanges
        hidden = sum(not self.held[document.source].isdisjoint(e.hidden) for e in exchanges) if member else 0
        flagged = sum(e.withheld for e in exchanges)
        return Trial(document.source, member, features, len(exchanges), hidden, flagged), exchanges

    async def _attempt(
        self, name: str, label: str, candidate: Document, probes: list[Probe]
    ) -> tuple[tuple[float, ...], Session]:
        """The features of one candidate. A probe is prepared once for all targets."""
        plan, attack = self.plan, self.attacks[name]
        rng = np.random.default_rng(int(digest(plan.seed, name, candidate.source), 16))
        client = plan.client(name, candidate.source)
        session = Session(self.targets[label], client, self._budget, plan.k, plan.tenant, plan.waits)
        with session as box:
            if type(attack).run is not MembershipAttack.run:
                features = await attack.run(candidate, box, rng)
            else:
                probes[:] = probes or [await attack.prepare(candidate, rng)]
                replies = [await box.ask(question) for question in probes[0].questions]
                features = await attack.measure(candidate, probes[0], replies)
        if len(features) != len(attack.features) or not all(map(math.isfinite, features)):
            wanted = ", ".join(attack.features)
            raise DataError(f"the attack {name} measured {features}; finite numbers were expected for {wanted}")
        return tuple(map(float, features)), session

    def _break_off(self, name: str, error: Exception) -> None:
        """Ends an attack. The text of an error that is none of ours may hold a document's."""
        said = f": {error}" if isinstance(error, CasemateError) else ""
        self._errors[name] = f"{type(error).__name__}{said}"
        log.error("the attack %s broke off: %s", name, self._errors[name])
        log.debug("where it broke off", exc_info=error)


def options_of(part: Any) -> Any:
    """What tells two attacks of one name apart, without addresses in memory: the class and its plain options."""
    if isinstance(part, PLAIN):
        return part
    if isinstance(part, Path):
        return str(part)
    if isinstance(part, list | tuple):
        return [options_of(item) for item in part]
    if isinstance(part, Mapping):
        return {str(key): options_of(value) for key, value in part.items()}
    known = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    options = {f.name: options_of(getattr(part, f.name)) for f in known if f.init}
    return {"class": f"{type(part).__module__}.{type(part).__qualname__}", **options}


def digest(*facts: Any) -> str:
    """A name for some facts, 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()
