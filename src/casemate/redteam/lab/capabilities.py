"""What an attacked system supports, and which checks require it.

A check whose requirements are not met is INCONCLUSIVE, with a reason from this module. It never passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from casemate.redteam.lab.results import Check, CheckStatus


class Capability(StrEnum):
    """One feature of a target, or of what the operator provides beside it."""

    ANSWERS = "answers"  # answers questions: every target
    SOURCES = "sources"  # reports the sources of its context
    IDS = "ids"  # reports the chunks of its context
    SCORES = "scores"  # reports their scores
    CLIENTS = "clients"  # receives client names, so the attacker can use several
    GUARD_OFF = "guard_off"  # can be asked with its guard off
    VERDICTS = "verdicts"  # reports to the lab, not to the client, what a guard withheld and whether it failed
    INGEST = "ingest"  # the lab can add and remove documents
    PROVIDED = "provided"  # the operator provides texts that are in the collection, and texts that are not
    CORPUS = "corpus"  # the operator provides the texts of the collection


OWN_SYSTEM = frozenset(Capability)  # the system of this configuration supports everything: the lab builds copies of it
ATTACKS: Mapping[str, frozenset[Capability]] = {
    "attack": frozenset({Capability.ANSWERS, Capability.PROVIDED}),
    "crawler": frozenset({Capability.ANSWERS, Capability.CORPUS}),
    "injector": frozenset({Capability.ANSWERS, Capability.IDS, Capability.INGEST}),
}
"""Requirements of each kind of attack for its metrics."""
ATTACK_WORKS = "The attack works without the guard"
BENIGN_UNCHANGED = "Benign questions get the same answers as without the guard"
NO_TRACE = "Withheld documents leave no trace"
NO_DEFENSE_FAILED = "No defense failed"


class SkippableCheck(NamedTuple):
    """A check that `redteam.skip_checks` may name.

    Attributes:
        title: Its name in a report.
        needs: What it requires of the target.
        unmet: Why it cannot be made without that, and what to do.
        skipped: Its entry under "not tested" if it is skipped.
    """

    title: str
    needs: frozenset[Capability]
    unmet: str
    skipped: str


CHECKS: Mapping[str, SkippableCheck] = {
    "guard_off": SkippableCheck(
        ATTACK_WORKS,
        frozenset({Capability.GUARD_OFF}),
        "the target cannot be asked with its guard off; set redteam.target_off",
        "The target without its guard: the strength of the attacks on it is unknown.",
    ),
    "harmless": SkippableCheck(
        BENIGN_UNCHANGED,
        frozenset({Capability.GUARD_OFF}),
        "the guard's cost for benign users requires the same target with its guard off; set redteam.target_off",
        "The guard's cost for benign users.",
    ),
    "two_worlds": SkippableCheck(
        NO_TRACE,
        frozenset({Capability.INGEST, Capability.VERDICTS}),
        "the two-world audit requires that the lab can remove documents and observe what was withheld; run against "
        "redteam.target: own",
        "Whether a withheld document leaves a trace in the context.",
    ),
    "defense_errors": SkippableCheck(
        NO_DEFENSE_FAILED,
        frozenset({Capability.VERDICTS}),
        "the target does not report whether a defense failed; check its logs",
        "Whether a defense of the target failed during the attack.",
    ),
    "fresh_clients": SkippableCheck(
        "New client names do not help the attacker",
        frozenset({Capability.CLIENTS}),
        "the target does not receive client names, so an attacker with a new name for each text was not tested; put "
        "{client} where the target reads the client's name, or set redteam.identity: campaign to test an attacker with "
        "one name",
        "An attacker with a new client name for each text.",
    ),
}
"""By their names in `redteam.skip_checks`."""
NO_BARE_TARGET = "Whether the target has a guard at all: 'guard on' is the target as its users see it."
"""Must be reported for a target that has no guard-off variant."""

ANSWERS_FROM_COLLECTION = "answers from its collection"
"""End of the name of the check of benign questions."""


@dataclass(frozen=True, slots=True)
class NotObservable:
    """Checks that an external target does not permit: unmet ones, with reasons, and those that are skipped."""

    unmet: Mapping[str, str]
    skipped: frozenset[str] = frozenset()

    def covers(self, name: str) -> bool:
        """Whether the check with this name in a report is not made."""
        return any(CHECKS[key].title == name for key in (*self.unmet, *self.skipped))

    def checks(self) -> Iterator[Check]:
        """An INCONCLUSIVE check for each unmet one."""
        for key, reason in self.unmet.items():
            text = f"This check is not possible on this target: {reason}"
            yield Check(CHECKS[key].title, CheckStatus.INCONCLUSIVE, None, None, text)


def external_capabilities(target: Any, *provided: Capability) -> frozenset[Capability]:
    """The capabilities that an external target declares (`tells`, `can`), with those that the operator provides."""
    declared = {*getattr(target, "tells", ()), *getattr(target, "can", ())}
    return frozenset({Capability.ANSWERS, *provided, *(c for c in Capability if c.value in declared)})


def unmet_checks(can: Collection[Capability], skipped: Collection[str]) -> dict[str, str]:
    """Checks whose requirements are not met and that are not skipped, with the reasons.

    >>> sorted(unmet_checks(OWN_SYSTEM, ()))
    []
    >>> sorted(unmet_checks(OWN_SYSTEM - {Capability.CLIENTS, Capability.VERDICTS}, ("two_worlds",)))
    ['defense_errors', 'fresh_clients']
    """
    return {
        name: f"{check.unmet}; or add {name} to redteam.skip_checks"
        for name, check in CHECKS.items()
        if name not in skipped and not check.needs.issubset(can)
    }
