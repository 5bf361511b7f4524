"""Base of the adaptive membership attacks: word frequencies of the genre, and features by grounding."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

from casemate.protocols import MembershipAttack
from casemate.text.grounding import summarize_grounding
from casemate.text.sentences import clauses
from casemate.text.tokens import ReferenceCorpus, keywords
from casemate.types import Document, Probe, Reply

FRAMES = (
    "What about {}?",
    "What was found on {}?",
    "What is reported about {}?",
    "What was observed for {}?",
    "What do you know of {}?",
)
"""Open questions about a few words."""


class AdaptiveAttack(MembershipAttack):
    """An attack that writes questions from distinctive words, and scores replies by grounding.

    Attributes:
        best: Number of replies with the highest grounding score that count. None: all.
    """

    features: ClassVar[tuple[str, ...]] = ("score", "share")
    best: int | None = None
    _genre = ReferenceCorpus()

    def study(self, texts: Sequence[str]) -> None:
        """Counts word frequencies of the genre."""
        self._genre = ReferenceCorpus(texts)

    def anchors(self, document: Document, count: int) -> list[str]:
        """The most distinctive words of a text."""
        return self._genre.distinctive_words(document.text, document.title)[:count]

    def clause_keywords(self, text: str, without: Collection[str]) -> list[list[str]]:
        """The keywords of each clause, except some; clauses without any are left out."""
        return [fact for c in clauses(text) if (fact := [w for w in keywords(c) if w not in without])]

    def rarest(self, words: Iterable[str], count: int) -> list[str]:
        """The rarest of some words in the genre."""
        return sorted(words, key=self._genre.rarity, reverse=True)[:count]

    async def measure(self, candidate: Document, probe: Probe, replies: Sequence[Reply]) -> tuple[float, ...]:
        """Mean grounding score of the best replies, and share of replies above the threshold; both in [0, 1]."""
        exchanges = zip(probe.questions, (reply.text for reply in replies), strict=True)
        return summarize_grounding(candidate.content, exchanges, self.best)
