"""What must be known of canaries to say when they are due, and whether their failures mean something."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from casemate.errors import DataError
from casemate.monitor.canaries.results import KIND, Severity

LONGEST_ID = 200
"""Characters of an event's id, as the event store takes it."""
_TIME = "2026-01-01T00:00:00Z.000000~9"


class Clean(NamedTuple):
    """The baseline of a canary: how often it was asked when all was well, and how often it failed all the same."""

    asked: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Known:
    """One canary, as the monitor knows it.

    Attributes:
        id: Of the canary.
        severity: How grave it is when it fails.
        clean: Its baseline; none: a canary that was never measured is taken to fail often.
        every: Seconds from one asking to the next; 0: as often as its set.
        pages: Whether its failures may alert somebody, or are only shown.
        documents: Ids of the documents that its baseline had in the context.
    """

    id: str
    severity: Severity = Severity.HIGH
    clean: Clean = Clean()
    every: float = 0.0
    pages: bool = True
    documents: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Watched:
    """A set of canaries under watch.

    Attributes:
        name: Of the set: in the id of each of its runs, and in each of its alerts.
        canaries: At least one; their ids are unique.
        every: Seconds from one run to the next, at least 1.

    Raises:
        DataError: If there are none, an id is there twice, a baseline is none, or name and ids are too long together.
    """

    name: str
    canaries: tuple[Known, ...]
    every: float = 3600.0

    def __post_init__(self) -> None:
        ids = [canary.id for canary in self.canaries]
        if not ids:
            raise DataError(f"the canary set {self.name!r} is empty")
        if twice := [i for i, count in Counter(ids).items() if count > 1]:
            raise DataError(f"the canary set {self.name!r} has the id {twice[0]!r} more than once")
        if not self.name or not self.name.isprintable() or "@" in self.name or "~" in self.name:
            raise DataError(f"a canary set cannot be called {self.name!r}: printable characters without '@' and '~'")
        if strange := [i for i in ids if not i or not i.isprintable()]:
            raise DataError(f"the canary set {self.name!r} has the id {strange[0]!r}; ids are of printable characters")
        longest = max(ids, key=len)
        spare = LONGEST_ID - len(f"{KIND}:{self.name}@{_TIME}:")
        if len(longest) > spare:
            raise DataError(
                f"the canary id {longest!r} has {len(longest)} characters; {spare} fit beside the set's name"
            )
        for every in (self.every, *(c.every or self.every for c in self.canaries)):
            if not (every >= 1 and every == int(every)):
                raise DataError(
                    f"the canary set {self.name!r}: every={every}; an interval is of whole seconds, at least 1"
                )
        for canary in self.canaries:
            if not 0 <= canary.clean.failed <= canary.clean.asked:
                raise DataError(
                    f"the baseline of {canary.id!r} has {canary.clean.failed} failures of {canary.clean.asked}"
                )

    @property
    def known(self) -> dict[str, Known]:
        """The canaries by id."""
        return {canary.id: canary for canary in self.canaries}
