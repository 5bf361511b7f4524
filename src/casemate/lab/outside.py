"""What cannot be seen of a system that the lab has not built, and the checks that this leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from casemate.lab.results import Check, Status

WORKS = "The attack works without the guard"
HARMLESS = "Harmless questions are answered as without the guard"
TRACELESS = "What is withheld leaves no trace"
SOUND = "No defense failed"
NAMES = {
    "guard_off": WORKS,
    "harmless": HARMLESS,
    "two_worlds": TRACELESS,
    "defense_errors": SOUND,
    "fresh_clients": "Attackers under fresh names get no further",
}
"""What the checks of ``capabilities.CHECKS`` are called in a report."""


@dataclass(frozen=True, slots=True)
class Outside:
    """What could not be seen of a target outside.

    Attributes:
        cannot: Checks that it cannot undergo, and why.
        left_out: Checks that its owner has left out.
    """

    cannot: Mapping[str, str]
    left_out: frozenset[str] = frozenset()

    def skips(self, name: str) -> bool:
        """Whether the check of this name in a report is not made, so that nothing may be said in its name."""
        return any(NAMES[key] == name for key in (*self.cannot, *self.left_out))

    def checks(self) -> Iterator[Check]:
        """What stands in their place."""
        for key, why in self.cannot.items():
            told = f"The target cannot undergo this check: {why}"
            yield Check(NAMES[key], Status.INCONCLUSIVE, None, None, told)
