"""Decoys: a fact of the text in the middle of words from other texts, so that the question is close to none of them.

An adaptive attack on guards that compare the whole question: the words around it lower its similarity to the target and
raise that to another document, which then explains much of the question, too. The target need not be the nearest
document, only one of those that are read. Each fact is asked for with several shares of decoy words, because how many
are enough depends on the collection.
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
from casemate.words import Genre, clauses, content_words, keywords, told

FRAMES = ("What about {}?", "What was found on {}?", "What is reported about {}?", "What do you know of {}?")
ANCHORS, RARE = 6, 3


@dataclass(eq=False)
class Decoys(MembershipAttack):
    """Asks about facts of the text between words of other texts: the best few replies count.

    Attributes:
        questions: How many are asked at most, at least 1.
        shares: Decoy words for each of the text's own in a question, at least 0; they are used in turn.
        words: Words of the text in one question, at least 2.
        best: How many of the replies that tell most are counted, at least 1.
    """

    questions: int = 30
    shares: tuple[float, ...] = (0.5, 1.0, 2.0)
    words: int = 3
    best: int = 3
    _genre: Genre = field(default_factory=Genre, init=False, repr=False)

    paper: ClassVar[str] = "own: an adaptive attacker who mixes his question with other texts"
    features: ClassVar[tuple[str, ...]] = ("score", "share")

    def __post_init__(self) -> None:
        if self.questions < 1 or self.words < 2 or self.best < 1 or not self.shares or min(self.shares) < 0:
            raise ConfigError(
                f"decoys: questions={self.questions}, shares={self.shares}, words={self.words}, best={self.best}; "
                "questions and best must be at least 1, words at least 2, shares at least one number, none negative"
            )

    def study(self, texts: Sequence[str]) -> None:
        """Keeps the genre's texts: the decoys are taken from them."""
        self._genre = Genre(texts)

    async def prepare(self, candidate: Document, rng: np.random.Generator) -> Probe:
        """Own words between those of another text, then one more as the question. None for a text without words."""
        anchors = self._genre.telling(candidate.text, candidate.title)[:ANCHORS]
        facts = [rare for c in clauses(candidate.text) if (rare := [w for w in keywords(c) if w not in anchors])]
        facts = [facts[i] for i in rng.permutation(len(facts))] or [anchors]
        asked = []
        for turn in range(self.questions if anchors else 0):
            rare = sorted(facts[turn % len(facts)], key=self._genre.rarity, reverse=True)[:RARE]
            fact = rare[int(rng.integers(len(rare)))]
            own = [anchors[i] for i in rng.permutation(len(anchors))[: self.words - 1]]
            count = round(self.shares[turn % len(self.shares)] * self.words)
            decoys = self._decoys(candidate, count, rng)
            lead = " ".join([*decoys[: count // 2], *own, *decoys[count // 2 :]])
            question = FRAMES[int(rng.integers(len(FRAMES)))].format(fact)
            asked.append(f"{lead[0].upper()}{lead[1:]}. {question}")
        return Probe(tuple(asked))

    async def measure(self, candidate: Document, probe: Probe, replies: Sequence[Reply]) -> tuple[float, ...]:
        """Mean of the best replies, and the share that tells something, both in [0, 1]."""
        pairs = list(zip(probe.questions, replies, strict=True))
        found = [told(candidate.content, question, reply.text) for question, reply in pairs]
        if not found:
            return (0.0, 0.0)
        best = sorted(found, reverse=True)[: self.best]
        return math.fsum(best) / len(best), sum(f >= 0.5 for f in found) / len(found)

    def _decoys(self, candidate: Document, count: int, rng: np.random.Generator) -> list[str]:
        """Telling words of another text, drawn at random, that the candidate has not; none if no text is known."""
        others = [text for text in self._genre.texts if text != candidate.content]
        if not others:
            return []
        there = content_words(candidate.content)
        telling = self._genre.telling(others[int(rng.integers(len(others)))])[: count + ANCHORS]
        words = [w for w in telling if not content_words(w) & there]
        return [words[i] for i in rng.permutation(len(words))[:count]]
