"""Compares a campaign with a baseline: changes beyond the 95 % intervals.

Two metrics differ only if their intervals do not overlap. This is strict on purpose: among fifty metrics of an
unchanged system, a test at 5 % would report a change by chance in nearly every comparison. Changes smaller than the
intervals are not detected; more candidates narrow the intervals.

Campaigns with the same split attack the same candidates. Their AUCs are also compared in pairs, which detects smaller
changes: variance between candidates cancels. The paired differences do not decide the exit code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple, TypeAlias

from casemate.maths import metrics, stats
from casemate.maths.stats import Estimate
from casemate.redteam.lab.judge import OFF, ON, SEED
from casemate.redteam.lab.results import AttackResult, CampaignResult, Check, CheckStatus
from casemate.redteam.reporting.text import auc_in_words
from casemate.reports.format import measured, number, scrub

WorseDirection: TypeAlias = Literal["high", "low", "far from 0.5"]

SETTINGS = frozenset(
    """backend budget candidates chunks corpus documents embedder generator k members model nonmembers queries questions
    seed sources split target""".split()
)
"""Evidence whose name contains one of these words must be equal for two campaigns to be comparable."""
OUTCOMES = frozenset({"members_in_context_despite_guard", "questions_about_members"})
"""Evidence that depends on the guard, although its name contains such a word."""
DECIDED = (CheckStatus.PASS, CheckStatus.FAIL)


class ReportChange(NamedTuple):
    """One changed value."""

    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what}: {self.before} -> {self.after}"


@dataclass(frozen=True, slots=True)
class ReportDiff:
    """A campaign against a baseline.

    Attributes:
        settings: Changes that make metrics incomparable: seed, split, corpus, an attack's backend or strength.
        worse: Metrics that are worse beyond the intervals, and checks that fail now.
        better: Metrics that are better beyond the intervals, and failed checks that pass now.
        notes: Versions, configuration and other evidence, which comparisons vary on purpose.
        compared: Number of metrics and checks that both have.
        paired: Changed AUCs over the same candidates, with the difference and its 95 % interval.
    """

    settings: tuple[ReportChange, ...] = ()
    worse: tuple[ReportChange, ...] = ()
    better: tuple[ReportChange, ...] = ()
    appeared: tuple[str, ...] = ()
    disappeared: tuple[str, ...] = ()
    notes: tuple[ReportChange, ...] = ()
    compared: int = 0
    paired: tuple[ReportChange, ...] = ()

    @property
    def exit_code(self) -> int:
        """1: something is worse. 3: not comparable in full. 0: nothing is worse."""
        if self.worse:
            return 1
        return 3 if self.settings or self.disappeared or not self.compared else 0

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The changes in groups with a title, one line each, the most important first; no group is empty."""
        found = {
            "Not comparable, because this differs": self.settings,
            "Worse": self.worse,
            "Better": self.better,
            "Paired, over the same candidates": self.paired,
            "Disappeared": self.disappeared,
            "Appeared": self.appeared,
            "Also different": self.notes,
        }
        return {title: tuple(map(str, changes)) for title, changes in found.items() if changes}


class _DirectedRate(NamedTuple):
    rate: Estimate
    worse: WorseDirection
    share: bool

    @property
    def shown(self) -> str:
        return measured(self.rate, self.share)

    @property
    def harm(self) -> Estimate:
        """The rate in the direction in which higher is worse."""
        value, low, high = self.rate
        if self.worse == "high":
            return self.rate
        if self.worse == "low":
            return Estimate(-value, -high, -low)
        far = sorted((abs(low - 0.5), abs(high - 0.5)))
        return Estimate(abs(value - 0.5), 0.0 if low <= 0.5 <= high else far[0], far[1])


def compare_results(campaign: CampaignResult, baseline: CampaignResult) -> ReportDiff:
    """Compares a campaign with a baseline of the same system."""
    new, old = scrub(campaign), scrub(baseline)
    settings, notes = _compare_evidence(new.evidence, old.evidence)
    now, was = _directed_rates(new), _directed_rates(old)
    shared = [key for key in was if key in now]
    worse = [_rate_change(key, was, now) for key in shared if now[key].harm.low > was[key].harm.high]
    better = [_rate_change(key, was, now) for key in shared if now[key].harm.high < was[key].harm.low]
    checks = _compare_checks(new.checks, old.checks)
    return ReportDiff(
        settings=(*settings, *_attack_settings(new, old)),
        worse=(*worse, *checks.worse),
        better=(*better, *checks.better),
        appeared=(*_missing(now, was), *checks.appeared),
        disappeared=(*_missing(was, now), *checks.disappeared),
        notes=tuple(notes),
        compared=len(shared) + checks.compared,
        paired=tuple(_paired(new, old)),
    )


def render_diff_text(diff: ReportDiff) -> str:
    """The comparison as text, most important changes first; ends with the exit code."""
    blocks = ["\n  ".join([f"{title}:", *lines]) for title, lines in diff.groups.items()]
    return "\n\n".join([*blocks, conclusion(diff)]) + "\n"


def conclusion(diff: ReportDiff) -> str:
    """The comparison in one sentence."""
    both = f"{diff.compared} metrics and checks that both have"
    if diff.worse:
        caution = ", although not everything is comparable" if diff.settings else ""
        return f"Worse than the baseline: {len(diff.worse)} of the {both}{caution} (exit code 1)."
    if diff.exit_code:
        return f"Nothing is worse among the {both}, but not everything is comparable (exit code 3)."
    return f"Not worse than the baseline beyond the 95 % intervals in the {both} (exit code 0)."


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Flattens nested mappings to dotted names.

    >>> list(flatten({"seed": 7, "versions": {"numpy": "2.1"}}))
    [('seed', '7'), ('versions.numpy', '2.1')]
    """
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _compare_evidence(new: Mapping[str, Any], old: Mapping[str, Any]) -> tuple[list[ReportChange], list[ReportChange]]:
    now, then = dict(flatten(new)), dict(flatten(old))
    settings: list[ReportChange] = []
    notes: list[ReportChange] = []
    for key in dict.fromkeys([*then, *now]):
        if now.get(key) != then.get(key):
            named = SETTINGS & set(re.split(r"[\W_]+", key.lower()))
            decides = named and key not in OUTCOMES and not key.startswith("versions.")
            (settings if decides else notes).append(
                ReportChange(key, then.get(key, "not recorded"), now.get(key, "not recorded"))
            )
    return settings, notes


def _attack_settings(new: CampaignResult, old: CampaignResult) -> Iterator[ReportChange]:
    """Changes that make an attack incomparable: its backend, number of candidates, or strength on the bare system."""
    then = {attack.name: attack for attack in old.attacks}
    for now in new.attacks:
        was = then.get(now.name)
        if was is None:
            continue
        if now.backend != was.backend:
            yield ReportChange(f"{now.name}: backend", was.backend, now.backend)
        if (a := _sample_size(was)) and (b := _sample_size(now)) and a != b:
            yield ReportChange(f"{now.name}: candidates", a, b)
        if not (now.off and was.off and now.on and was.on):
            continue
        if now.off.auc.low > was.off.auc.high or was.off.auc.low > now.off.auc.high:
            before, after = (f"{measured(auc)} ({auc_in_words(auc)})" for auc in (was.off.auc, now.off.auc))
            yield ReportChange(f"{now.name}: strength (AUC with the guard off)", before, after)
    if new.utility and old.utility and new.utility.source != old.utility.source:
        yield ReportChange("benign questions", old.utility.source, new.utility.source)


def _paired(new: CampaignResult, old: CampaignResult) -> Iterator[ReportChange]:
    """The AUCs of campaigns with one split, where the scores of all candidates are recorded and differ."""
    split, complete = new.evidence.get("split"), all(len(c.sessions) == c.sessions_total for c in (new, old))
    if split is None or split != old.evidence.get("split") or not complete:
        return
    for name, side in product([attack.name for attack in new.attacks], (OFF, ON)):
        now, then = (_scores(campaign, name, side) for campaign in (new, old))
        if not now or now == then or now.keys() != then.keys():
            continue
        groups, before = _groups(now), _groups(then)
        if min(map(len, groups)) > 1:  # one has no interval
            difference = measured(stats.paired_bootstrap(metrics.auc, groups, before, SEED))
            after = f"{number(metrics.auc(*groups))}, difference {difference}"
            yield ReportChange(f"{name}, guard {side}: AUC", number(metrics.auc(*before)), after)


def _scores(campaign: CampaignResult, attack: str, side: str) -> dict[tuple[str, bool], float]:
    """The scores of an attack by candidate and membership. One split has one alias for each candidate.

    NaN, which has no rank, is not a score.
    """
    found = {}
    for session in campaign.sessions:
        score = judged.score if (judged := session.sides.get(side)) else None
        if session.attack == attack and session.member is not None and score is not None and not math.isnan(score):
            found[session.candidate, session.member] = score
    return found


def _groups(scores: Mapping[tuple[str, bool], float]) -> tuple[list[float], list[float]]:
    """The scores of members and those of non-members, each in the order of the candidates' names."""
    members, others = ([scores[key] for key in sorted(scores) if key[1] is kind] for kind in (True, False))
    return members, others


def _sample_size(attack: AttackResult) -> str:
    found = attack.on or attack.off
    return f"{found.members} members, {found.nonmembers} non-members" if found else ""


def _directed_rates(campaign: CampaignResult) -> dict[tuple[str, str], _DirectedRate]:
    """All metrics with an interval and a direction, by subject and name."""
    found: dict[tuple[str, str], _DirectedRate] = {}
    for attack in campaign.attacks:
        f, guard = (attack.on, "on") if attack.on else (attack.off, "off")
        rates: tuple[tuple[str, Estimate | None, WorseDirection, bool], ...] = (
            ()
            if f is None
            else (
                ("AUC", f.auc, "far from 0.5", False),
                ("adjusted accuracy", f.adjusted_accuracy, "high", False),
                ("TPR at 1 % FPR", f.tpr_at_1, "high", True),
                ("TPR at 0.1 % FPR", f.tpr_at_01, "high", True),
                ("withheld per question", f.recall_query, "low", True),
                ("withheld per document", f.recall_document, "low", True),
            )
        )
        for name, rate, bad, share in rates:
            if rate is not None:
                found[f"{attack.name}, guard {guard}", name] = _DirectedRate(rate, bad, share)
    for probe in campaign.probes:
        if probe.on:
            found[f"{probe.name}, guard on", "followed"] = _DirectedRate(probe.on, "high", True)
    if campaign.personal_data:
        found["answers", "personal data"] = _DirectedRate(campaign.personal_data.on, "high", True)
    if campaign.utility:
        if campaign.utility.flagged:
            found["benign questions", "documents withheld"] = _DirectedRate(campaign.utility.flagged, "high", True)
        found["benign questions", "answers changed"] = _DirectedRate(campaign.utility.answer_changed, "high", True)
        if lost := campaign.utility.unentitled_lost:
            found["benign questions", "answers lost without entitlement"] = _DirectedRate(lost, "high", True)
    if campaign.audit:
        found["two-world audit", "differing contexts"] = _DirectedRate(campaign.audit.rate, "high", True)
    return found


def _rate_change(
    key: tuple[str, str], was: Mapping[tuple[str, str], _DirectedRate], now: Mapping[tuple[str, str], _DirectedRate]
) -> ReportChange:
    return ReportChange(": ".join(key), was[key].shown, now[key].shown)


def _missing(
    here: Mapping[tuple[str, str], _DirectedRate], there: Mapping[tuple[str, str], _DirectedRate]
) -> Iterator[str]:
    """Metrics that only one side has; a subject that the other side lacks entirely is named once."""
    known = {subject for subject, _ in there}
    missing = [": ".join(key) if key[0] in known else key[0] for key in here if key not in there]
    yield from dict.fromkeys(missing)


def _compare_checks(new: tuple[Check, ...], old: tuple[Check, ...]) -> ReportDiff:
    """Compares checks by name and attack. Only decided checks count as results."""
    now, then = ({(c.name, c.attack): c for c in checks} for checks in (new, old))
    worse, better, appeared, disappeared = [], [], [], []
    for key in dict.fromkeys([*then, *now]):
        a, b = then.get(key), now.get(key)
        before, after = (c.status if c else None for c in (a, b))
        label = "check: " + " / ".join(filter(None, (key[1], key[0])))
        change = ReportChange(label, before or "not made", after or "not made")
        if after is CheckStatus.FAIL and before is not CheckStatus.FAIL:
            worse.append(change)
        elif after is CheckStatus.PASS and before is CheckStatus.FAIL:
            better.append(change)
        elif after in DECIDED and before not in DECIDED:
            appeared.append(f"{label}: {after}")
        elif before in DECIDED and after not in DECIDED:
            disappeared.append(f"{label}: was {before}, is {after or 'not made'}")
    compared = sum(key in now and now[key].status in DECIDED and c.status in DECIDED for key, c in then.items())
    return ReportDiff((), tuple(worse), tuple(better), tuple(appeared), tuple(disappeared), (), compared)
