"""What changed between two campaigns, beyond the intervals.

Two figures count as different only when their 95 % intervals do not overlap. That is strict on purpose: among fifty
figures of one and the same system, a test at 5 % would find one worse by chance in nearly every comparison. A change
that is smaller than the intervals is not seen; more candidates make them narrower.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from casemate.lab.results import AttackResult, Campaign, Check, Figures, Status
from casemate.lab.wording import auc_in_words, measured, scrub
from casemate.stats import Rate

Bad: TypeAlias = Literal["high", "low", "far from one half"]

SETTINGS = frozenset(
    """backend budget candidates chunks corpus documents embedder generator k members model nonmembers queries questions
    seed sources split target""".split()
)
"""An entry of the evidence whose name has one of these words decides whether two campaigns measured the same thing."""
DECIDED = (Status.PASS, Status.FAIL)


class Change(NamedTuple):
    """One thing that is not what it was."""

    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Diff:
    """A campaign against an earlier one.

    Attributes:
        settings: What makes figures incomparable: seed, split, corpus, an attack's backend or its strength.
        worse: Beyond the intervals, or a check that fails now.
        better: Beyond the intervals, or a failed check that holds now.
        appeared: Statements that only the new campaign makes.
        disappeared: Statements that only the baseline makes: what was known once and is not known now.
        notes: Versions, configuration and the rest of the evidence: what one compares across on purpose.
        compared: How many figures and checks both have.
    """

    settings: tuple[Change, ...] = ()
    worse: tuple[Change, ...] = ()
    better: tuple[Change, ...] = ()
    appeared: tuple[str, ...] = ()
    disappeared: tuple[str, ...] = ()
    notes: tuple[Change, ...] = ()
    compared: int = 0

    @property
    def exit_code(self) -> int:
        """1: something is worse. 3: it cannot be said that nothing is. 0: nothing is."""
        if self.worse:
            return 1
        return 3 if self.settings or self.disappeared or not self.compared else 0


class _Figure(NamedTuple):
    rate: Rate
    bad: Bad
    share: bool

    @property
    def shown(self) -> str:
        return measured(self.rate, self.share)

    @property
    def harm(self) -> Rate:
        """The rate turned so that more is worse for the owner."""
        value, low, high = self.rate
        if self.bad == "high":
            return self.rate
        if self.bad == "low":
            return Rate(-value, -high, -low)
        far = sorted((abs(low - 0.5), abs(high - 0.5)))
        return Rate(abs(value - 0.5), 0.0 if low <= 0.5 <= high else far[0], far[1])


def diff(campaign: Campaign, baseline: Campaign) -> Diff:
    """Compares a campaign with an earlier one of the same system."""
    new, old = scrub(campaign), scrub(baseline)
    settings, notes = _evidence(new.evidence, old.evidence)
    figures, was = _figures(new), _figures(old)
    both = [key for key in was if key in figures]
    worse = [_moved(key, was, figures) for key in both if figures[key].harm.low > was[key].harm.high]
    better = [_moved(key, was, figures) for key in both if figures[key].harm.high < was[key].harm.low]
    checks = _checks(new.checks, old.checks)
    return Diff(
        settings=(*settings, *_attack_settings(new, old)),
        worse=(*worse, *checks.worse),
        better=(*better, *checks.better),
        appeared=(*_only(figures, was), *checks.appeared),
        disappeared=(*_only(was, figures), *checks.disappeared),
        notes=tuple(notes),
        compared=len(both) + checks.compared,
    )


def render_diff_text(diff: Diff) -> str:
    """The comparison for a terminal, what matters most first; ends with what it means for the exit code."""
    blocks: list[str] = []
    for title, changes in (
        ("NOT COMPARABLE, because this differs:", diff.settings),
        ("WORSE than the baseline:", diff.worse),
        ("BETTER than the baseline:", diff.better),
        ("Also different:", diff.notes),
    ):
        if changes:
            blocks.append("\n".join([title, *(f"  {c.what}: {c.before} -> {c.after}" for c in changes)]))
    for title, names in (("DISAPPEARED:", diff.disappeared), ("Appeared:", diff.appeared)):
        if names:
            blocks.append("\n".join([title, *(f"  {name}" for name in names)]))
    return "\n\n".join([*blocks, conclusion(diff)]) + "\n"


def conclusion(diff: Diff) -> str:
    """The comparison in a sentence."""
    both = f"{diff.compared} figures and checks that both have"
    if diff.worse:
        caution = ", though not all of it can be compared" if diff.settings else ""
        return f"Worse than the baseline: {len(diff.worse)} of the {both}{caution} (exit code 1)."
    if diff.exit_code:
        return f"Nothing is worse among the {both}, but that does not show that nothing is (exit code 3)."
    return f"Not worse than the baseline beyond the 95 % intervals in the {both} (exit code 0)."


def flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Entries of nested mappings, with dotted names.

    >>> list(flat({"seed": 7, "versions": {"numpy": "2.1"}}))
    [('seed', '7'), ('versions.numpy', '2.1')]
    """
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _evidence(new: Mapping[str, Any], old: Mapping[str, Any]) -> tuple[list[Change], list[Change]]:
    """What differs in the evidence: settings, and the rest."""
    now, then = dict(flat(new)), dict(flat(old))
    settings: list[Change] = []
    notes: list[Change] = []
    for key in dict.fromkeys([*then, *now]):
        if now.get(key) != then.get(key):
            decides = not key.startswith("versions.") and SETTINGS & set(re.split(r"[\W_]+", key.lower()))
            (settings if decides else notes).append(Change(key, then.get(key, "not said"), now.get(key, "not said")))
    return settings, notes


def _attack_settings(new: Campaign, old: Campaign) -> Iterator[Change]:
    """What makes an attack another one: who writes for it, how many candidates, what it does to the bare system."""
    then = {attack.name: attack for attack in old.attacks}
    for now in new.attacks:
        was = then.get(now.name)
        if was is None:
            continue
        if now.backend != was.backend:
            yield Change(f"{now.name}: backend", was.backend, now.backend)
        if (a := _size(was)) and (b := _size(now)) and a != b:
            yield Change(f"{now.name}: candidates", a, b)
        if now.off and was.off and now.on and was.on and _apart(now.off.auc, was.off.auc):
            yield Change(f"{now.name}: strength, as its AUC with the guard off", *_aucs(was.off, now.off))
    if new.utility and old.utility and new.utility.source != old.utility.source:
        yield Change("harmless questions", old.utility.source, new.utility.source)


def _aucs(*figures: Figures) -> list[str]:
    return [f"{measured(f.auc)} ({auc_in_words(f.auc)})" for f in figures]


def _size(attack: AttackResult) -> str:
    figures = attack.on or attack.off
    return f"{figures.members} members, {figures.nonmembers} others" if figures else ""


def _apart(a: Rate, b: Rate) -> bool:
    return a.low > b.high or b.low > a.high


def _figures(campaign: Campaign) -> dict[tuple[str, str], _Figure]:
    """All that has an interval and a direction, by subject and name."""
    found: dict[tuple[str, str], _Figure] = {}
    for attack in campaign.attacks:
        f, guard = (attack.on, "on") if attack.on else (attack.off, "off")
        rates: tuple[tuple[str, Rate | None, Bad, bool], ...] = (
            ()
            if f is None
            else (
                ("AUC", f.auc, "far from one half", False),
                ("adjusted accuracy", f.adjusted_accuracy, "high", False),
                ("TPR at 1 % FPR", f.tpr_at_1, "high", True),
                ("TPR at 0.1 % FPR", f.tpr_at_01, "high", True),
                ("withheld per question", f.recall_query, "low", True),
                ("withheld per document", f.recall_document, "low", True),
            )
        )
        for name, rate, bad, share in rates:
            if rate is not None:
                found[f"{attack.name}, guard {guard}", name] = _Figure(rate, bad, share)
    if campaign.utility:
        if campaign.utility.flagged:
            found["harmless questions", "touched"] = _Figure(campaign.utility.flagged, "high", True)
        found["harmless questions", "answers changed"] = _Figure(campaign.utility.answer_changed, "high", True)
    if campaign.audit:
        found["two worlds", "contexts that differ"] = _Figure(campaign.audit.rate, "high", True)
    return found


def _moved(
    key: tuple[str, str], was: Mapping[tuple[str, str], _Figure], now: Mapping[tuple[str, str], _Figure]
) -> Change:
    return Change(": ".join(key), was[key].shown, now[key].shown)


def _only(here: Mapping[tuple[str, str], _Figure], there: Mapping[tuple[str, str], _Figure]) -> Iterator[str]:
    """Figures that only one side has; a subject that the other side does not know at all is named once."""
    known = {subject for subject, _ in there}
    missing = [": ".join(key) if key[0] in known else key[0] for key in here if key not in there]
    yield from dict.fromkeys(missing)


def _checks(new: tuple[Check, ...], old: tuple[Check, ...]) -> Diff:
    """Checks by name and attack. One that came to no decision made no statement."""
    now, then = ({(c.name, c.attack): c for c in checks} for checks in (new, old))
    worse, better, appeared, disappeared = [], [], [], []
    for key in dict.fromkeys([*then, *now]):
        a, b = then.get(key), now.get(key)
        before, after = (c.status if c else None for c in (a, b))
        label = "check: " + " / ".join(filter(None, (key[1], key[0])))
        change = Change(label, before or "not made", after or "not made")
        if after is Status.FAIL and before is not Status.FAIL:
            worse.append(change)
        elif after is Status.PASS and before is Status.FAIL:
            better.append(change)
        elif after in DECIDED and before not in DECIDED:
            appeared.append(f"{label}: {after}")
        elif before in DECIDED and after not in DECIDED:
            disappeared.append(f"{label}: was {before}, is {after or 'not made'}")
    compared = sum(key in now and now[key].status in DECIDED and c.status in DECIDED for key, c in then.items())
    return Diff((), tuple(worse), tuple(better), tuple(appeared), tuple(disappeared), (), compared)
