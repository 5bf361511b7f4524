"""Membership inference on a target outside: from the configuration to a report."""

from __future__ import annotations

import platform
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import numpy as np

from casemate import capabilities, registry
from casemate.app import build
from casemate.capabilities import Capability
from casemate.config import Config
from casemate.errors import BackendError, DataError
from casemate.foreign.aim import Aim, in_turn, ledger_of, take_aim
from casemate.foreign.rounds import Round, open_round
from casemate.foreign.signs import Life, alive, genre, harmless, harmless_questions, life, refusals
from casemate.lab.datasets import Split, Stored
from casemate.lab.experiment import Experiment, Plan, Trials, digest
from casemate.lab.judge import ATLAS, OFF, ON, OWASP, Gate, judge_campaign, overall
from casemate.lab.known import known_split, texts
from casemate.lab.ledger import Ledger
from casemate.lab.outside import Outside
from casemate.lab.results import AttackResult, Campaign, Check, Status, Utility
from casemate.protocols import MembershipAttack
from casemate.redteam import NOT_TESTED, WRITTEN, Steps, transcripts
from casemate.types import Query

KNOWN = "Members are not told from others with the guard"
MISSING = (
    "It needs texts of which you know whether they are in the target's collection. Set redteam.known.members and "
    "redteam.known.nonmembers to a folder or file of each, of the same genre and time, at least 10 and better some "
    "hundreds"
)


@dataclass(frozen=True, slots=True)
class Asking:
    """A campaign that is under way.

    Attributes:
        config: The owner's.
        aim: Who is attacked.
        split: Who is a member.
        round: Which campaign on it.
        experiment: What is run.
        outside: What cannot be seen.
    """

    config: Config
    aim: Aim
    split: Split
    round: Round
    experiment: Experiment
    outside: Outside


@dataclass(slots=True)
class Findings:
    """What is known beside the trials, as far as the campaign came.

    Attributes:
        lives: What each target said to questions about texts that it has.
        utility: What harmless askers lose; None: it was not measured.
        broken: Why the campaign ended early; empty if it did not.
    """

    lives: dict[str, Life]
    utility: Utility | None = None
    broken: str = ""


async def run_outside(config: Config, benign: Sequence[str], steps: Steps, anew: bool = False) -> Campaign:
    """Attacks the configured target outside, or goes on with what was interrupted.

    A finished campaign is not used again: the target may have changed since, and nobody would know.

    Args:
        config: The owner's.
        benign: Harmless questions, which tell what a guard costs; empty: made from the known members.
        steps: Shows progress.
        anew: Whether an interrupted campaign is given up.

    Raises:
        ConfigError: If the target is not said to be the owner's, or cannot be built.
        DataError: If texts that were named cannot be read.
    """
    split, why = _known(config)
    aim = take_aim(config, *((Capability.KNOWN,) if split else ()))
    attacks: dict[str, MembershipAttack] = {p.use: build("attack", p, config.folder) for p in config.redteam.attacks}
    if split is None:
        return _unknown(config, aim, attacks, why)
    with ExitStack() as opened:
        ledger = opened.enter_context(Ledger(ledger_of(config)))
        asking = _set_up(config, aim, split, attacks, ledger, anew)
        found = Findings({})
        trials = asking.experiment.trials()
        try:
            await _before(asking, benign, steps, found)
            with steps(f"attacking {', '.join(aim.names.values())}", asking.experiment.total) as count:
                trials = await asking.experiment.run(count)
            await alive(aim, split.members, config.redteam.concurrency)
        except BackendError as error:
            found.broken = str(error)
        if not (found.broken or trials.errors or trials.missing):
            asking.round.finish(ledger)
        return _campaign(asking, trials, found)


def outside_of(config: Config, can: frozenset[Capability]) -> Outside:
    """What a target that can do so much does not let be seen, in this configuration."""
    section = config.redteam
    one_name = {"fresh_clients"} if section.identity == "campaign" else set()
    left_out = frozenset({*section.leave_out, *one_name})
    return Outside(capabilities.impossible(can, left_out), left_out)


def facts(config: Config, aim: Aim) -> dict[str, Any]:
    """What a report says of the target."""
    return {
        "target": aim.names[ON],
        **({"target_off": aim.names[OFF]} if OFF in aim.names else {}),
        "capabilities": sorted(aim.can),
        "left_out": sorted(config.redteam.leave_out),
        "seed": config.redteam.seed,
        "versions.casemate": version("casemate"),
        "versions.python": platform.python_version(),
        "versions.numpy": np.__version__,
        "versions.platform": sys.platform,
    }


def _known(config: Config) -> tuple[Split | None, str]:
    """The split by what the owner knows, or why there is none."""
    section = config.redteam
    paths = {"members": section.known.members, "nonmembers": section.known.nonmembers}
    lacking = [f"redteam.known.{kind} is not given" for kind, path in paths.items() if path is None]
    if lacking:
        return None, f"{' and '.join(lacking)}. {MISSING}"
    inside, outside = (
        texts(config.folder / path, kind, config.rag.max_file_mb) for kind, path in paths.items() if path is not None
    )
    try:
        return known_split(inside, outside, (section.members, section.nonmembers), section.seed), ""
    except DataError as error:
        return None, f"{error}. {MISSING}"


def _set_up(
    config: Config, aim: Aim, split: Split, attacks: Mapping[str, MembershipAttack], ledger: Ledger, anew: bool
) -> Asking:
    section = config.redteam
    identity = section.identity if Capability.CLIENTS in aim.can else "campaign"
    key = digest(aim.label, split.fingerprint, section.seed, identity, config.rag.k, sorted(attacks))
    found = open_round(ledger, key, anew)
    plan = Plan(
        seed=section.seed,
        k=config.rag.k,
        identity=identity,
        questions=section.budget,
        concurrency=section.concurrency,
        waits=(),  # a target outside has patience of its own: retries, backoff and Retry-After
        label=found.label,
    )
    for target in aim.targets.values():
        target.nonce = digest(found.label)[:8]
    unseen = Stored((), np.empty((0, 0), np.float32))
    held = {document.source: unseen for document in split.members}
    experiment = Experiment(attacks, split, aim.targets, ledger, held, plan)
    return Asking(config, aim, split, found, experiment, outside_of(config, aim.can))


async def _before(asking: Asking, benign: Sequence[str], steps: Steps, found: Findings) -> None:
    """Whether it answers at all, and what harmless askers get: before the attack, which a guard may remember."""
    section, aim = asking.config.redteam, asking.aim
    for side, target in aim.targets.items():
        with steps(f"asking {aim.names[side]} about texts that it has", None):
            found.lives[side] = await life(side, target, asking.split.members, section.seed, section.concurrency)
    if OFF in aim.targets and "harmless" not in section.leave_out:
        source, questions = harmless_questions(benign, asking.split, section.seed)
        queries = [Query(text, f"harmless-{i}", k=asking.config.rag.k) for i, text in enumerate(questions)]
        with steps("asking harmless questions", None):
            sides = [await in_turn(aim.targets[side], queries, section.concurrency) for side in (OFF, ON)]
        found.utility = harmless(source, *sides)


def _campaign(asking: Asking, trials: Trials, found: Findings) -> Campaign:
    section, experiment = asking.config.redteam, asking.experiment
    gate = Gate(section.gate.adjusted_accuracy, section.gate.harmless)
    judged = judge_campaign(trials, asking.split, experiment.attacks, gate, found.utility, asking.outside)
    lives = [life.check for life in found.lives.values()]
    checks = [*judged.checks, *lives, genre(asking.split), refusals(trials)]
    if found.broken:
        name = "The target could be asked to the end"
        why = f"{found.broken}; what was finished is kept, run again to go on"
        checks.insert(0, Check(name, Status.ERROR, None, None, why))
    return Campaign(
        id=uuid.uuid4().hex,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        status=overall(checks),
        attacks=judged.attacks,
        utility=found.utility,
        checks=tuple(checks),
        not_tested=tuple(_not_tested(asking)),
        simulated=(WRITTEN,),
        transcripts=tuple(transcripts(experiment, [side for side in (OFF, ON) if side in asking.aim.targets])),
        evidence=_evidence(asking, trials),
        cost={**trials.cost, **asking.aim.cost()},
    )


def _evidence(asking: Asking, trials: Trials) -> dict[str, Any]:
    plan, split = asking.experiment.plan, asking.split
    return {
        **facts(asking.config, asking.aim),
        "k": plan.k,
        "identity": plan.identity,
        "split": split.fingerprint,
        "members": len(split.members),
        "nonmembers": len(split.nonmembers),
        "near_duplicates_dropped": split.dropped,
        "begun": asking.round.begun,
        "resumed": asking.round.resumed,
        "trials": sum(map(len, trials.done.values())),
        **({"notes": split.notes} if split.notes else {}),
    }


def _not_tested(asking: Asking) -> Iterator[str]:
    left = sorted(set(registry.names("attack")) - set(asking.experiment.attacks))
    if left:
        yield f"Attacks that were not run: {', '.join(left)}."
    yield from (capabilities.LEFT_OUT[name] for name in sorted(asking.outside.left_out))
    if OFF not in asking.aim.targets:
        yield capabilities.AS_MET
    yield from NOT_TESTED


def _unknown(config: Config, aim: Aim, attacks: Mapping[str, MembershipAttack], why: str) -> Campaign:
    """Nothing was asked: nobody could say what the answers mean."""
    checks = [Check(KNOWN, Status.INCONCLUSIVE, None, None, why, name, OWASP, ATLAS) for name in attacks]
    checks += outside_of(config, aim.can).checks()
    return Campaign(
        id=uuid.uuid4().hex,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        status=overall(checks),
        attacks=tuple(AttackResult(name, a.paper, "", None, None, error=why) for name, a in attacks.items()),
        checks=tuple(checks),
        not_tested=("Anything: the target was not asked a single question.",),
        evidence=facts(config, aim),
        cost=aim.cost(),
    )
