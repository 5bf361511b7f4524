"""Split facts: many questions of two or three words, each about another fact, none of them close to the text.

An adaptive attack on guards that withhold a document when a question resembles it. A single question looks harmless. It
has no summary and no phrase of four words from the text, and words are reordered. A reply reveals a member if it
contains facts of the text that the question does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from casemate.errors import require_range
from casemate.redteam.adaptive_attack import FRAMES, AdaptiveAttack
from casemate.text.sentences import clauses
from casemate.text.tokens import join_words, keywords, ngrams
from casemate.types import Document, Probe

ANCHORS = 6  # distinctive words of the text; each question has at least one
TRIES = 20


@dataclass(eq=False)
class SplitFacts(AdaptiveAttack):
    """Asks short open questions about single facts. The best replies count.

    Attributes:
        questions: Most questions, at least 1.
        words: Most words of the text in one question, at least 2.
        best: Number of replies with the highest grounding score that count, at least 1.
    """

    questions: int = 30
    words: int = 3
    best: int = 3

    paper: ClassVar[str] = "own: an adaptive attacker that asks fact by fact, below the guard's threshold"

    def __post_init__(self) -> None:
        require_range("split_facts", self, "questions best", at_least=1)
        require_range("split_facts", self, "words", at_least=2)

    async def prepare(self, candidate: Document, rng: np.random.Generator) -> Probe:
        """Questions of two words first, which are least suspicious, then longer ones. Empty for an empty text."""
        anchors = self.anchors(candidate, ANCHORS)
        facts = [keywords(clause) for clause in clauses(candidate.text)] or [anchors]
        order = rng.permutation(len(facts))
        shown = ngrams(candidate.content)
        asked: dict[frozenset[str], str] = {}
        for number in range(TRIES * self.questions if anchors else 0):
            if len(asked) == self.questions:
                break
            size = 2 + len(asked) * (self.words - 1) // self.questions
            fact = facts[order[number % len(facts)]] if number % 2 else []
            chosen = self._choose_words(anchors, fact, size, rng)
            question = FRAMES[int(rng.integers(len(FRAMES)))].format(join_words(chosen))
            if not shown & ngrams(question):
                asked.setdefault(frozenset(chosen), question)
        return Probe(tuple(asked.values()))

    def _choose_words(
        self, anchors: Sequence[str], fact: Sequence[str], size: int, rng: np.random.Generator
    ) -> list[str]:
        """A few anchors, and a rare word of the fact if one is given, in random order."""
        rare = [w for w in sorted(fact, key=self._genre.rarity, reverse=True) if w not in anchors][:4]
        own = [rare[int(rng.integers(len(rare)))]] if rare else []
        drawn = rng.permutation(len(anchors))[: size - len(own)]
        words = [*(anchors[i] for i in drawn), *own]
        return [words[i] for i in rng.permutation(len(words))]
