"""Base of the adaptive membership attacks: word frequencies of the genre, and features by grounding."""

from __future__ import annotations

from collections.abc import Sequence

from casemate.protocols import MembershipAttack
from casemate.text.grounding import summarize_grounding
from casemate.text.tokens import ReferenceCorpus
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

    best: int | None = None
    _genre = ReferenceCorpus()

    def study(self, texts: Sequence[str]) -> None:
        """Counts word frequencies of the genre."""
        self._genre = ReferenceCorpus(texts)

    async def measure(self, candidate: Document, probe: Probe, replies: Sequence[Reply]) -> tuple[float, ...]:
        """Mean grounding score of the best replies, and share of replies above the threshold; both in [0, 1]."""
        exchanges = zip(probe.questions, (reply.text for reply in replies), strict=True)
        return summarize_grounding(candidate.content, exchanges, self.best)
