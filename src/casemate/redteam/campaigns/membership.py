"""Membership inference: runs the attacks on members and non-members, audits the guard, and judges both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from casemate import plugins
from casemate.config import Config, GateSection
from casemate.plugins import build
from casemate.protocols import MembershipAttack, Steps
from casemate.redteam.campaigns.pipeline import SCRIPTED_ATTACKS, AttackRunner
from casemate.redteam.lab.capabilities import NotObservable
from casemate.redteam.lab.experiment import Experiment, ExperimentPlan
from casemate.redteam.lab.judge import (
    ATLAS,
    INFERENCE_FAILS,
    OWASP,
    judge_campaign,
    without_decisions,
)
from casemate.redteam.lab.results import CampaignResult, Check, CheckStatus, Utility
from casemate.redteam.lab.two_world_audit import TwoWorldFindings
from casemate.redteam.reporting.sessions import attack_sessions
from casemate.reports.format import plural
from casemate.types import DEFAULT_TENANT

ENDED_EARLY = "audit_sessions_ended_early"  # key of `CampaignResult.evidence`; see `TwoWorldFindings.ended_early`
NOT_TESTED = (
    "Attackers that share knowledge across several client names.",
    "Extraction of texts, and poisoning: these attacks only infer membership.",
)


def build_attacks(config: Config, folder: Path) -> dict[str, MembershipAttack]:
    """The configured membership attacks by name; relative paths start at a folder."""
    return {part.use: build("attack", part, folder) for part in config.redteam.attacks}


def experiment_plan(config: Config, label: str, tenant: str = DEFAULT_TENANT) -> ExperimentPlan:
    """The configured experiment; the label is a fingerprint of everything else that trials depend on."""
    section = config.redteam
    return ExperimentPlan(
        seed=section.seed,
        k=config.rag.k,
        tenant=tenant,
        identity=section.identity,
        questions=section.budget,
        concurrency=section.concurrency,
        label=label,
    )


@dataclass(eq=False)
class MembershipRunner(AttackRunner):
    """Membership attacks on the candidates of a split.

    Measurements that are not possible are None. ``not_observable`` is None for an own system, which permits all checks.
    ``undecided``: why a defense decided nothing; the checks of the guarded system are then INCONCLUSIVE.
    """

    experiment: Experiment
    limits: GateSection
    measure_utility: Callable[[Steps], Awaitable[Utility | None]] | None = None
    audit_worlds: Callable[[Steps], Awaitable[TwoWorldFindings]] | None = None
    not_observable: NotObservable | None = None
    extra_checks: Callable[[], Sequence[Check]] = lambda: ()
    undecided: str = ""
    _utility: Utility | None = field(default=None, init=False)
    _worlds: TwoWorldFindings | None = field(default=None, init=False)

    async def budget_objection(self) -> str:
        experiment = self.experiment
        budget = experiment.plan.questions
        if budget is None or (expected := await experiment.expected_questions()) <= budget:
            return ""
        work = f"{plural(len(experiment.attacks), 'attack')} on {plural(len(experiment.split.candidates), 'text')}"
        needs = "needs" if len(experiment.attacks) == 1 else "need"
        return (
            f"{work} {needs} about {expected:,} questions; the budget is {budget:,}. Raise it (redteam.budget) or name "
            "fewer attacks"
        )

    async def execute(self, steps: Steps) -> None:
        """Measures the cost for benign users, then attacks: a guard with client state may remember an attack."""
        if self.measure_utility is not None:
            self._utility = await self.measure_utility(steps)
        with steps(f"attacking ({', '.join(self.experiment.targets)})", self.experiment.total) as count:
            await self.experiment.run(count)

    async def audit(self, steps: Steps) -> None:
        """Replays the sessions in which a member was withheld, with and without the member."""
        if self.audit_worlds is not None:
            self._worlds = await self.audit_worlds(steps)

    @property
    def complete(self) -> bool:
        trials = self.experiment.trials()
        return not (trials.errors or trials.missing)

    def judge(self) -> CampaignResult:
        experiment, worlds = self.experiment, self._worlds
        reported, trials = attack_sessions(experiment), experiment.trials()
        audit = self.not_observable or (worlds.audit if worlds else None)
        judged = judge_campaign(trials, experiment.split, experiment.attacks, self.limits, self._utility, audit)
        return replace(
            judged,
            checks=(*without_decisions(judged.checks, self.undecided), *self.extra_checks()),
            not_tested=(*_unused_attacks(experiment.attacks), *NOT_TESTED),
            simulated=(SCRIPTED_ATTACKS,),
            sessions=reported.sessions,
            sessions_total=reported.total,
            document_names=reported.names,
            evidence=self._evidence(sum(map(len, trials.done.values()))),
            cost=trials.cost,
        )

    def _evidence(self, trials: int) -> dict[str, Any]:
        plan, split, worlds = self.experiment.plan, self.experiment.split, self._worlds
        return {
            "k": plan.k,
            "identity": plan.identity,
            "split": split.fingerprint,
            "members": len(split.members),
            "nonmembers": len(split.nonmembers),
            "near_duplicates_dropped": split.dropped,
            "trials": trials,
            **({"notes": split.notes} if split.notes else {}),
            **(
                {
                    "members_in_context_despite_guard": worlds.exposed,
                    ENDED_EARLY: worlds.ended_early,
                    "questions_about_members": worlds.asked,
                }
                if worlds
                else {}
            ),
        }


@dataclass(eq=False)
class UnmeasurableRunner(AttackRunner):
    """Asks nothing: without known members and non-members, replies say nothing about membership.

    ``reason`` says what is missing: the only check of the campaign.
    """

    reason: str

    async def execute(self, steps: Steps) -> None:
        """Does nothing."""

    @property
    def complete(self) -> bool:
        return False

    def judge(self) -> CampaignResult:
        missing = Check(INFERENCE_FAILS, CheckStatus.INCONCLUSIVE, None, None, self.reason, "", OWASP, ATLAS)
        return CampaignResult(checks=(missing,), not_tested=("Anything: no question was asked.",))


def _unused_attacks(used: Mapping[str, MembershipAttack]) -> Iterator[str]:
    if unused := sorted(set(plugins.names("attack")) - set(used)):
        yield f"Attacks that were not run: {', '.join(unused)}."
