"""Split facts: many questions of two or three words, each about another fact, none of them close to the text.

An adaptive attack: whoever knows that the guard withholds a document when a question resembles it asks so little at a
time that every question looks like a harmless one. No summary stands in front, no phrase of four words is the text's,
and words come in another order. What gives a member away is the reply: it tells what the text says and the question did
not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from casemate.errors import ConfigError
from casemate.protocols import MembershipAttack
from casemate.types import Document, Probe, Reply
from casemate.words import Genre, clauses, keywords, listed, phrases, told

FRAMES = (
    "What about {}?",
    "What was found on {}?",
    "What is reported about {}?",
    "What was observed for {}?",
    "What do you know of {}?",
)
ANCHORS = 6
"""Words that tell the text from others, of which each question has one at least."""
TRIES = 20


@dataclass(eq=False)
class SplitFacts(MembershipAttack):
    """Asks short open questions about single facts: the best few replies count.

    Attributes:
        questions: How many are asked at most, at least 1.
        words: Words of the text in one question at most, at least 2.
        best: How many of the replies that tell most are counted, at least 1.
    """

    questions: int = 30
    words: int = 3
    best: int = 3
    _genre: Genre = field(default_factory=Genre, init=False, repr=False)

    paper: ClassVar[str] = "own: an adaptive attacker who asks fact by fact, below the guard's threshold"
    features: ClassVar[tuple[str, ...]] = ("score", "share")

    def __post_init__(self) -> None:
        if self.questions < 1 or self.words < 2 or self.best < 1:
            raise ConfigError(
                f"split_facts: questions={self.questions}, words={self.words}, best={self.best}; "
                "questions and best must be at least 1, words at least 2"
            )

    def study(self, texts: Sequence[str]) -> None:
        """Learns which words are rare in the genre."""
        self._genre = Genre(texts)

    async def prepare(self, candidate: Document, rng: np.random.Generator) -> Probe:
        """Questions of two words first, which raise least suspicion, then longer ones. None for an empty text."""
        anchors = self._genre.telling(candidate.text, candidate.title)[:ANCHORS]
        facts = [keywords(clause) for clause in clauses(candidate.text)] or [anchors]
        order = rng.permutation(len(facts))
        shown = phrases(candidate.content)
        asked: dict[frozenset[str], str] = {}
        for number in range(TRIES * self.questions if anchors else 0):
            if len(asked) == self.questions:
                break
            size = 2 + len(asked) * (self.words - 1) // self.questions
            fact = facts[order[number % len(facts)]] if number % 2 else []
            chosen = self._chosen(anchors, fact, size, rng)
            question = FRAMES[int(rng.integers(len(FRAMES)))].format(listed(chosen))
            if not shown & phrases(question):
                asked.setdefault(frozenset(chosen), question)
        return Probe(tuple(asked.values()))

    async def measure(self, candidate: Document, probe: Probe, replies: Sequence[Reply]) -> tuple[float, ...]:
        """Mean of the best replies, and the share that tells something, both in [0, 1]."""
        found = [
            told(candidate.content, question, reply.text)
            for question, reply in zip(probe.questions, replies, strict=True)
        ]
        if not found:
            return (0.0, 0.0)
        best = sorted(found, reverse=True)[: self.best]
        return math.fsum(best) / len(best), sum(f >= 0.5 for f in found) / len(found)

    def _chosen(self, anchors: Sequence[str], fact: Sequence[str], size: int, rng: np.random.Generator) -> list[str]:
        """Some anchors, and one of the rarer words of a fact if one is given, in random order."""
        rare = [w for w in sorted(fact, key=self._genre.rarity, reverse=True) if w not in anchors][:4]
        own = [rare[int(rng.integers(len(rare)))]] if rare else []
        drawn = rng.permutation(len(anchors))[: size - len(own)]
        words = [*(anchors[i] for i in drawn), *own]
        return [words[i] for i in rng.permutation(len(words))]
