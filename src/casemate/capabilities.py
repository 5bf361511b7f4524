"""What a system that is attacked can be asked for, and which checks need what.

A check that a target cannot undergo is INCONCLUSIVE, with the reason that stands here. It is never a pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any


class Capability(StrEnum):
    """One thing that a target can do."""

    ANSWERS = "answers"  # a question in, a text out: every target
    SOURCES = "sources"  # tells from which sources it read
    IDS = "ids"  # tells which chunks it read
    SCORES = "scores"  # tells how similar they were
    CLIENTS = "clients"  # is told who asks, so that the attacker may go by fresh names
    GUARD_OFF = "guard_off"  # can be asked with the guard off
    VERDICTS = "verdicts"  # tells the lab, not the client, what a guard withheld and whether it failed
    INGEST = "ingest"  # the lab can take documents out and put them in
    KNOWN = "known"  # the owner says of some texts whether they are in it
    CORPUS = "corpus"  # the owner gives the texts of the collection


OWN = frozenset(Capability)
"""What the system that ``casemate.yaml`` describes can do: the lab builds copies of it as it likes."""
ATTACKS: Mapping[str, frozenset[Capability]] = {
    "attack": frozenset({Capability.ANSWERS, Capability.KNOWN}),
    "crawler": frozenset({Capability.ANSWERS, Capability.CORPUS}),
}
"""What the figures of each kind of attack need."""
CHECKS: Mapping[str, frozenset[Capability]] = {
    "guard_off": frozenset({Capability.GUARD_OFF}),
    "harmless": frozenset({Capability.GUARD_OFF}),
    "two_worlds": frozenset({Capability.INGEST, Capability.VERDICTS}),
    "defense_errors": frozenset({Capability.VERDICTS}),
    "fresh_clients": frozenset({Capability.CLIENTS}),
}
"""What each check needs, by its name in ``redteam.leave_out``."""
WHY: Mapping[str, str] = {
    "guard_off": "there is nothing to compare with: it cannot be asked with its guard off; give redteam.target_off",
    "harmless": "what the guard costs harmless askers shows only beside the same target with its guard off; give "
    "redteam.target_off",
    "two_worlds": "contexts with a document withheld and with it absent can be compared only where the lab may take "
    "documents out and sees what was withheld; run against redteam.target: own for that",
    "defense_errors": "it does not tell whether a defense failed; see its own logs",
    "fresh_clients": "it is not told who asks, so an attacker under a fresh name for each text was not tested; put "
    "{client} where it reads the client's name, or set redteam.identity: campaign to test an attacker with one name",
}
"""Why a check could not be made, and what to do."""
LEFT_OUT: Mapping[str, str] = {
    "guard_off": "What the target does without its guard: how strong the attacks are on it is not known.",
    "harmless": "What the guard costs harmless askers.",
    "two_worlds": "Whether a withheld document leaves a trace in the context.",
    "defense_errors": "Whether a defense of the target failed during the attack.",
    "fresh_clients": "An attacker who goes by a fresh name for each text.",
}
"""What the owner has accepted as not tested, in the report's words."""

AS_MET = "Whether the target has a guard at all: 'guard on' is the target as its users meet it."
"""What must be said where there is no other to compare with."""


def of(target: Any, *given: Capability) -> frozenset[Capability]:
    """What a target outside can do.

    Args:
        target: Its plug-in; what it ``tells`` beside answers, and what it ``can``, is believed.
        given: What the owner gives beside it: texts, or a second target.
    """
    said = {*getattr(target, "tells", ()), *getattr(target, "can", ())}
    return frozenset({Capability.ANSWERS, *given, *(c for c in Capability if c.value in said)})


def impossible(can: Collection[Capability], left_out: Collection[str]) -> dict[str, str]:
    """Checks that these capabilities do not allow and that nobody has left out, each with the reason.

    >>> sorted(impossible(OWN, ()))
    []
    >>> sorted(impossible(OWN - {Capability.CLIENTS, Capability.VERDICTS}, ("two_worlds",)))
    ['defense_errors', 'fresh_clients']
    """
    return {
        name: f"{WHY[name]}; or add {name} to redteam.leave_out"
        for name, needed in CHECKS.items()
        if name not in left_out and not needed.issubset(can)
    }
