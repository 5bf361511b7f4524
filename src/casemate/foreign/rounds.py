"""Campaigns on a target that may change without a word.

What was interrupted goes on. What was finished does not come again from memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from casemate.lab.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Round:
    """One campaign on one target, over as many runs as it takes.

    Attributes:
        key: What it is about.
        number: From 0.
        begun: When, ISO 8601.
        resumed: Whether an earlier run began it.
    """

    key: str
    number: int
    begun: str
    resumed: bool

    @property
    def label(self) -> str:
        """Of everything that is kept for it."""
        return f"{self.key}-{self.number}"

    def finish(self, ledger: Ledger) -> None:
        """Notes that it is at its end: the next one asks anew."""
        ledger.keep(f"round-{self.label}-ended", "1")


def open_round(ledger: Ledger, key: str, anew: bool) -> Round:
    """The round to go on with, or a new one.

    Args:
        ledger: Where rounds are kept.
        key: Of all that its answers depend on, as far as it is known.
        anew: Whether one that was interrupted is given up.
    """
    number = 0
    while ledger.reply(f"round-{key}-{number}-ended"):
        number += 1
    if anew and ledger.reply(f"round-{key}-{number}"):
        ledger.keep(f"round-{key}-{number}-ended", "1")
        number += 1
    before = ledger.reply(f"round-{key}-{number}")
    begun = before or ledger.keep(f"round-{key}-{number}", datetime.now(UTC).isoformat(timespec="seconds"))
    return Round(key, number, begun, before is not None)
