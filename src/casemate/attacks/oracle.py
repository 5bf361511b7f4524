"""The threshold oracle: finds out on known texts how close a question may come, then asks about the target just below.

An adaptive attack on guards with a fixed threshold. About texts whose membership he knows, or can see from the replies,
the attacker asks with more and more of their words until a text that was told before is told no more: that is the
limit. Then he asks about the target with as many words as the guard lets pass, so that the target is surely found and
never withheld. A limit that differs from document to document makes him more careful, but not blind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from casemate.errors import ConfigError
from casemate.protocols import BlackBox, MembershipAttack
from casemate.types import Document, Probe, Reply
from casemate.words import Genre, clauses, keywords, listed, told

LEVELS = (2, 3, 4, 6, 9, 14)
"""Words of the text in one question, from far to near."""
PATIENCE = 4
"""Levels on which nothing is told until a text is given up."""
ANCHORS, RARE = 6, 3
TELLS, SURE = 0.5, 0.9
"""What a reply must tell to be held to come from a text: the first at least, the second at most."""


@dataclass(eq=False)
class Oracle(MembershipAttack):
    """Learns the limit on a few texts, then asks about the target below it: the best few replies count.

    Attributes:
        questions: How many are asked about the target, at least 1.
        texts: On how many texts the limit is sought, at least 0; where it is not found, the fewest words are used.
        known: Texts of known membership: text, and whether it is a member. Members show the limit, others how much
            replies tell by chance. Empty: the first studied texts, of which those that are never told show nothing.
        best: How many of the replies that tell most are counted, at least 1.
    """

    questions: int = 20
    texts: int = 6
    known: tuple[tuple[str, bool], ...] = ()
    best: int = 3
    _genre: Genre = field(default_factory=Genre, init=False, repr=False)

    paper: ClassVar[str] = "own: an adaptive attacker who measures the guard's threshold first"
    features: ClassVar[tuple[str, ...]] = ("score", "share")

    def __post_init__(self) -> None:
        if self.questions < 1 or self.texts < 0 or self.best < 1:
            raise ConfigError(
                f"oracle: questions={self.questions}, texts={self.texts}, best={self.best}; "
                "questions and best must be at least 1, texts at least 0"
            )

    def study(self, texts: Sequence[str]) -> None:
        """Learns which words are rare in the genre, and keeps the texts to seek the limit on."""
        self._genre = Genre(texts)

    async def prepare(self, candidate: Document, rng: np.random.Generator) -> Probe:
        """The questions of whoever knows nothing of the limit: as few words as can be."""
        return self._probe(candidate, 0, rng)

    async def measure(self, candidate: Document, probe: Probe, replies: Sequence[Reply]) -> tuple[float, ...]:
        """Mean of the best replies, and the share that tells something, both in [0, 1]."""
        pairs = list(zip(probe.questions, replies, strict=True))
        found = [told(candidate.content, question, reply.text) for question, reply in pairs]
        if not found:
            return (0.0, 0.0)
        best = sorted(found, reverse=True)[: self.best]
        return math.fsum(best) / len(best), sum(f >= TELLS for f in found) / len(found)

    async def run(self, candidate: Document, box: BlackBox, rng: np.random.Generator) -> tuple[float, ...]:
        """Seeks the limit on other texts, then asks about the candidate."""
        known = self.known or tuple((text, True) for text in self._genre.texts)
        others = [(text, member) for text, member in known if text != candidate.content][: self.texts]
        climbs = [(member, await self._climb(text, box, rng)) for text, member in others]
        chance = max((tells for member, climb in climbs if not member for tells in climb), default=0.0)
        bar = min(max(TELLS, chance), SURE)
        passed = [[level for level, tells in enumerate(climb) if tells >= bar] for member, climb in climbs if member]
        limits = sorted(levels[-1] for levels in passed if levels)
        probe = self._probe(candidate, limits[(len(limits) - 1) // 2] if limits else 0, rng)
        return await self.measure(candidate, probe, [await box.ask(question) for question in probe.questions])

    async def _climb(self, text: str, box: BlackBox, rng: np.random.Generator) -> list[float]:
        """How much is told of a text on each level, from far to near: what is hidden once may stay hidden."""
        found = []
        for size in LEVELS:
            question = self._question(Document("known", text), size, rng)
            found.append(told(text, question, (await box.ask(question)).text) if question else 0.0)
            if len(found) == PATIENCE and max(found) < TELLS:  # no member, and near questions might touch the target
                break
        return found

    def _probe(self, candidate: Document, limit: int, rng: np.random.Generator) -> Probe:
        """Two thirds of the questions on the level below the limit, the rest on it."""
        below = LEVELS[max(limit - 1, 0)]
        sizes = [below if 3 * i < 2 * self.questions else LEVELS[limit] for i in range(self.questions)]
        return Probe(tuple(q for size in sizes if (q := self._question(candidate, size, rng))))

    def _question(self, document: Document, size: int, rng: np.random.Generator) -> str:
        """A question with so many words of a text, a third of them of one clause; empty for a text without words."""
        anchors = self._genre.telling(document.text, document.title)[: max(ANCHORS, size)]
        facts = [rare for c in clauses(document.text) if (rare := [w for w in keywords(c) if w not in anchors])]
        if not anchors:
            return ""
        fact = facts[int(rng.integers(len(facts)))] if facts else anchors
        rare = sorted(fact, key=self._genre.rarity, reverse=True)[: RARE + size // 3]
        own = [rare[i] for i in rng.permutation(len(rare))[: max(1, size // 3)]]
        own += [w for i in rng.permutation(len(anchors)) if (w := anchors[i]) not in own][: size - len(own)]
        return f"What about {listed([own[i] for i in rng.permutation(len(own))])}?"
