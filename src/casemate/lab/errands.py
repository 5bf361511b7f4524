"""Trials that workers run: what each is given, and what it brings back.

The ledger stays with whoever sends them out. So a campaign that was interrupted goes on as ever, wherever its trials
ran; what is lost with a worker is the trial that it was at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from casemate.lab.ledger import Exchange
from casemate.lab.results import Trial
from casemate.spread import Stopped
from casemate.types import Document

LEASE = 300
"""Questions that one errand may ask in a campaign with a budget: what it does not ask is given back."""


class Errand(NamedTuple):
    """One attack on one candidate, against every target.

    Attributes:
        attack: Its name.
        candidate: Who is attacked.
        member: Whether he is one, which the attack is not told.
        questions: How many may be asked in all; None: as many as it takes.
    """

    attack: str
    candidate: Document
    member: bool
    questions: int | None


@dataclass(slots=True)
class Brought:
    """What an errand came to.

    Attributes:
        attack: Its name.
        candidate: Who was attacked.
        sides: Finished trials with what was asked, by target.
        asked: Questions, those of unfinished trials included.
        short: Trials that needed more questions than one candidate is worth.
        error: Why the attack broke off; empty if it did not.
        replies: What models wrote, by key (see ``CachedGenerator``).
        cached: How often that had been written already.
    """

    attack: str
    candidate: str
    sides: dict[str, tuple[Trial, tuple[Exchange, ...]]] = field(default_factory=dict)
    asked: int = 0
    short: int = 0
    error: str = ""
    replies: Mapping[str, str] = field(default_factory=dict)
    cached: int = 0


Send: TypeAlias = Callable[[Iterable[Errand], Stopped], Iterator[Brought]]
"""Sends errands out, and brings back what they came to, in their order."""


@dataclass(eq=False)
class Replies:
    """Replies that were generated in one errand: what a ``Ledger`` is to a ``CachedGenerator``, in memory."""

    held: dict[str, str] = field(default_factory=dict)

    def reply(self, key: str) -> str | None:
        """See ``Ledger.reply``."""
        return self.held.get(key)

    def keep(self, key: str, text: str) -> str:
        """See ``Ledger.keep``."""
        return self.held.setdefault(key, text)

    def take(self) -> dict[str, str]:
        """All of them; none are left."""
        taken, self.held = self.held, {}
        return taken
