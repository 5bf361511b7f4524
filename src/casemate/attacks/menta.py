"""MEntA: a few natural open questions, and a look whether the replies say what the document says.

Nguyen et al. 2026, "Five queries are enough", USENIX Security (arXiv 2605.24312). The questions ask for facts of the
text as a curious person would; nothing in them commands, or asks for a form. The replies are cut into claims. A claim
that the attacker's copy entails speaks for membership, a reply that abstains against it.

Deviation: without language models, questions are made by rules from the terms of the most telling clauses; a claim is
a clause of the reply, and it is entailed if the text has most of its words, by weight, and all its numbers and names.
Deviation: a claim counts only if it tells something that the question did not, by words that are not common to the
genre. Otherwise a reply that repeats the question, or says what holds for every text, would speak for membership.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from casemate.errors import ConfigError
from casemate.protocols import Generator, MembershipAttack
from casemate.types import Document, Probe, Prompt, Reply
from casemate.words import WORD, abstains, clauses, content_words, headline, names, numbers, terms

FRAMES = (
    "What is known about {0} and {1}?",
    "How do {0} and {1} go together?",
    "What was found on {0}, especially on {1}?",
    "What can you tell me about {0} with respect to {1}?",
    "I would like to understand {0} better: what about {1}?",
)
ALONE = "What is known about {0}?"
CITATION = re.compile(r"\[[\d,;\s–-]+\]|\((?:source|document|doc|ref)\w*\.? ?\d+\)", re.IGNORECASE)
SOURCES = re.compile(r"^\W*(?:sources?|references?|citations?)\W*(?::.*)?$", re.IGNORECASE | re.MULTILINE)
MARKUP = re.compile(r"^[\s#>*+•|-]+|[*_`|]+", re.MULTILINE)
ITEM = re.compile(r"^[\s\-*•]*(?:\d+[.):]\s*)?")

ABOUT = (
    "Name the subject of the document in one short phrase that holds its most telling terms. Write the phrase and "
    "nothing else; do not call it a document, text or study."
)
ASK = (
    "Write {count} questions, one on a line, that a curious person might ask and that the document answers. Each is "
    "broad and open, is not answered by yes or no, and leads to another specific fact in the document without telling "
    "it. Do not speak of a document, text or study. Write nothing else."
)
ENTAILS = 'Does the document say this? "{claim}"'
JUDGE = "Answer from the document alone, with Yes or No and nothing else."


@dataclass(eq=False)
class MEntA(MembershipAttack):
    """Asks a few open questions: replies that the text entails count for membership, abstentions against it.

    Attributes:
        questions: How many are asked at most, at least 1.
        summary: Whether a summary of the text stands in front of each question.
        support: Share of a claim's weight, in (0, 1], that the text must have for the claim to be entailed by words.
        novelty: Weight, at least 0, of what an entailed claim must tell beyond the question: a word of the genre's
            rarest counts 1, one that stands in every text counts 0.
        writer: A generator that writes summary and questions; none: rules.
        judge: A generator that says whether the text entails a claim; none: by words.
    """

    questions: int = 5
    summary: bool = True
    support: float = 0.75
    novelty: float = 1.5
    writer: Generator | None = None
    judge: Generator | None = None
    _spread: Counter[str] = field(default_factory=Counter, init=False, repr=False)  # texts of the genre with a word
    _studied: int = field(default=0, init=False, repr=False)

    paper: ClassVar[str] = "Nguyen et al. 2026, arXiv 2605.24312"
    features: ClassVar[tuple[str, ...]] = ("score", "entailed", "answered")

    def __post_init__(self) -> None:
        if self.questions < 1 or not 0 < self.support <= 1 or not 0 <= self.novelty < math.inf:
            raise ConfigError(
                f"menta: questions={self.questions}, support={self.support}, novelty={self.novelty}; questions must be "
                "at least 1, support above 0 and at most 1, novelty finite and not negative"
            )

    def study(self, texts: Sequence[str]) -> None:
        """Counts in how many texts each word stands."""
        self._spread = Counter(word for text in texts for word in content_words(text))
        self._studied = len(texts)

    async def prepare(self, candidate: Document, rng: np.random.Generator) -> Probe:
        """A few open questions, each behind the summary. None for an empty text."""
        asked = await self._written(candidate) or self._made(candidate.text or candidate.title, rng)
        about = f"{await self._about(candidate)} " if self.summary and asked else ""
        return Probe(tuple(f"{about}{question}" for question in asked))

    async def measure(self, candidate: Document, probe: Probe, replies: Sequence[Reply]) -> tuple[float, ...]:
        """Mean of [some claim is entailed] - [abstains], in [-1, 1]; share entailed; share that does not abstain."""
        if not probe.questions:
            return (-1.0, 0.0, 0.0)
        pairs = list(zip(probe.questions, replies, strict=True))
        entailed = sum([await self._entailed(candidate, question, reply.text) for question, reply in pairs])
        abstained = sum(abstains(reply.text) or not reply.text.strip() for reply in replies)
        n = len(pairs)
        return ((entailed - abstained) / n, entailed / n, 1 - abstained / n)

    async def _about(self, candidate: Document) -> str:
        """The summary, with a stop at its end."""
        written = await _generated(self.writer, ABOUT, candidate) if self.writer else ""
        about = (" ".join(written.split()) or headline(candidate.text, candidate.title)).rstrip(". ")
        return about if about.endswith(("?", "!")) else f"{about}."

    async def _written(self, candidate: Document) -> list[str]:
        """The writer's questions; none without a writer."""
        if not self.writer:
            return []
        lines = (await _generated(self.writer, ASK.format(count=self.questions), candidate)).splitlines()
        return [q for q in (ITEM.sub("", line).strip() for line in lines) if q.endswith("?")][: self.questions]

    def _made(self, text: str, rng: np.random.Generator) -> list[str]:
        """Questions by rules: each asks for two terms of a clause, the most telling clauses first."""
        own = names(text)
        found = {clause: self._telling(terms(clause, own)) for clause in clauses(text)}
        ranked = sorted((c for c in found if found[c]), key=lambda c: -self._weigh(content_words(" ".join(found[c]))))
        frames = [FRAMES[i] for i in rng.permutation(len(FRAMES))]
        return [
            (frames[i % len(frames)] if len(found[clause]) == 2 else ALONE).format(*found[clause])
            for i, clause in enumerate(ranked[: self.questions])
        ]

    def _telling(self, options: Sequence[str]) -> list[str]:
        """The one or two terms that weigh most without sharing a word, in order of reading."""
        chosen: list[str] = []
        for term in sorted(options, key=lambda term: -self._weigh(content_words(term))):
            if len(chosen) < 2 and not any(content_words(term) & content_words(other) for other in chosen):
                chosen.append(term)
        return sorted(chosen, key=options.index)

    async def _entailed(self, candidate: Document, question: str, reply: str) -> bool:
        """Whether the text entails some claim of a reply that tells what the question did not."""
        known = content_words(question)
        telling = [c for c in claims(reply) if self._weigh(content_words(c) - known) >= self.novelty]
        if self.judge:
            for claim in telling:
                told = await _generated(self.judge, ENTAILS.format(claim=claim), candidate, JUDGE)
                if re.match(r"\W*yes\b", told, re.IGNORECASE):
                    return True
            return False
        return any(self._says(candidate.content, claim, known) for claim in telling)

    def _says(self, text: str, claim: str, known: frozenset[str]) -> bool:
        """Whether a text has most of a claim's words, enough of what is new in it, and all its numbers and names."""
        there, bag = content_words(text), content_words(claim)
        written = set(WORD.findall(text))
        return (
            self._weigh(bag & there) >= self.support * self._weigh(bag)
            and self._weigh((bag & there) - known) >= self.novelty
            and numbers(claim) <= numbers(text)
            and all(name in written for name in names(claim))
        )

    def _weigh(self, stems: Iterable[str]) -> float:
        """How much some words tell, from 0 each for those in every text of the genre to 1 for those in none."""
        n = self._studied
        return math.fsum(1 - math.log1p(self._spread[w]) / math.log1p(n) if n else 1.0 for w in sorted(stems))


async def _generated(generator: Generator, question: str, candidate: Document, instructions: str = "") -> str:
    """What a generator writes with the candidate before it."""
    return "".join([piece async for piece in generator.stream(Prompt(question, (candidate,), instructions))])


def claims(reply: str) -> list[str]:
    r"""The statements of a reply, without citations, lists of sources and markup.

    >>> claims("The bridge is closed until May [1]. It was built in 1902 (source 2).\nSources: [1] bridge.md")
    ['The bridge is closed until May', 'It was built in 1902']
    """
    plain = MARKUP.sub("", CITATION.sub("", SOURCES.sub("", reply)))
    return [" ".join(c.split()).rstrip(" .,;") for c in clauses(re.sub(r" +(?=[.,;])", "", plain))]
