"""Answer-level check of a new document: does it change the answer to a watched question without another's support?

A poisoned text must do more than enter a context: it must change the answer. Two steps, the cheap one first.

1. ``specific_lifts`` measures how much a document that ranks first for a question is about this question alone. It
   needs no reader, so its threshold is estimated from the corpus like that of every other signal.
2. Leave one out: a reader answers the question with and without the document. The document stays suspicious if the
   answer changes, and no other unit states the new one. That is a quorum of m = 2 (``guard.defenses.quorum``).

The second step can only clear a document, so the rate of false alarms is at most that of the first, with any reader.

Leave one out: "RAGuard-ZKIP" (arXiv 2607.26339). Deviation: it runs once per document at ingest, not in every answer,
and asks for support instead of stability.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.guard.defenses.quorum.keywords import (
    AskedQuestion,
    Word,
    read_text,
    unit_statements,
)
from casemate.guard.units import group_units, whole
from casemate.protocols import Generator, Index
from casemate.rag.pipeline import INSTRUCTIONS
from casemate.text.refusals import is_refusal
from casemate.text.tokens import content_words
from casemate.types import DEFAULT_TENANT, Document, Hit, Prompt, Vector

SUPPORT_DOCUMENTS = 24
"""Documents nearest to the question among which support is searched."""
SENTENCES, KEYWORDS = 2, 8
"""Sentences and keywords of one unit, as in ``Quorum``."""
SUPPORTED_SHARE = 0.5
"""Share of the new answer's keywords that one other unit must state to support it."""
_CITATIONS = re.compile(r"(?<!\s)\s*\[\d+\]|\nSources: .*", re.DOTALL)


class AnswerChange(NamedTuple):
    """What a new document does to the answer to one question.

    Attributes:
        before: Answer without the document.
        after: Answer with it.
        changed: Whether the answer states something else, or is a refusal now.
        supporters: Other units that state the new answer.
    """

    before: str
    after: str
    changed: bool
    supporters: int


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """Leave-one-out check of new documents of one tenant.

    Attributes:
        index: The documents without the new one.
        tenant: The tenant.
        k: Documents in a context.
        reader: Answers; the default quotes one sentence, without a model.
    """

    index: Index
    tenant: str = DEFAULT_TENANT
    k: int = 5
    reader: Generator = field(default_factory=lambda: ExtractiveGenerator(sentences=1, support=1e-6))

    def check(self, question: str, question_vector: Vector, document: Document, vector: Vector) -> AnswerChange:
        """Answers a question with and without a new document. Blocks.

        Args:
            question: The question.
            question_vector: Its embedding, (dim,).
            document: The document; an indexed version of its source is left out.
            vector: Its embedding, (dim,).
        """
        hits = self.index.search(question_vector, SUPPORT_DOCUMENTS, self.tenant).hits
        others = [hit for hit in hits if hit.document.source != document.source]
        score = float(np.dot(question_vector, vector))
        rank = sum(hit.score > score for hit in others)
        context = [hit.document for hit in others]
        extended = [*context[:rank], document, *context[rank:]]
        with ThreadPoolExecutor(1) as thread:  # the caller's thread may already run an event loop
            before, after = thread.submit(
                lambda: asyncio.run(self._read(question, context[: self.k], extended[: self.k]))
            ).result()
        return self._compare(AskedQuestion.of(question), before, after, others)

    async def _read(self, question: str, *contexts: Sequence[Document]) -> list[str]:
        return list(await asyncio.gather(*(self._answer(question, context) for context in contexts)))

    async def _answer(self, question: str, context: Sequence[Document]) -> str:
        prompt = Prompt(question, tuple(context), INSTRUCTIONS)
        return _CITATIONS.sub("", "".join([piece async for piece in self.reader.stream(prompt)]))

    @staticmethod
    def _compare(question: AskedQuestion, before: str, after: str, others: Sequence[Hit]) -> AnswerChange:
        if is_refusal(after):
            return AnswerChange(before, after, not is_refusal(before), 0)
        stated = answer_keywords(question, after)
        new = stated - (frozenset() if is_refusal(before) else answer_keywords(question, before))
        supporters = sum(
            len(new & _stated_keywords(question, whole(unit))) >= SUPPORTED_SHARE * len(new)
            for unit in group_units(others)
        )
        return AnswerChange(before, after, bool(new), supporters if new else 0)


def specific_lifts(questions: Sequence[str], text: str, lifts: Sequence[float]) -> list[float]:
    """How strongly a document that ranks first for some questions is about each of them alone.

    The lift times the root of the F1 of the content words that question and text share. A text of one question shares
    most of its words with it; a document of many facts does not.

    Args:
        questions: The questions.
        text: The text.
        lifts: For each question the cosine of document and question, minus that of the best document so far; above 0.

    Returns:
        A value from 0 to its lift for each question.

    >>> text = "The north bridge was built by Ottilie Brandt."
    >>> asked = ["Who built the north bridge?", "When is the fair?"]
    >>> [round(lift, 3) for lift in specific_lifts(asked, text, [0.2, 0.2])]
    [0.173, 0.0]
    """
    stated = content_words(text) if questions else frozenset()
    found = []
    for question, lift in zip(questions, lifts, strict=True):
        asked = _asked_words(question)
        found.append(lift * math.sqrt(2 * len(asked & stated) / ((len(asked) + len(stated)) or 1)))
    return found


def answer_keywords(question: AskedQuestion, answer: str) -> frozenset[str]:
    """The lemmas that make an answer: those of the expected type, else names and numbers, else all keywords.

    >>> asked = AskedQuestion.of("Who built the north bridge?")
    >>> sorted(answer_keywords(asked, "The north bridge was built by Ottilie Brandt in 1931."))
    ['ottilie brandt']
    """
    read = [(question.expects(s.text), s) for s in read_text(answer)]  # once per sentence: one may be a whole document
    new = [(t, e) for e, s in read for t in s.tokens if not question.repeats(t) and not question.contains(t.lemma)]
    typed = {t.lemma for t, expected in new if not expected.isdisjoint(w.lower() for w in t.written.split())}
    named = {t.lemma for t, _ in new if t.named}
    return frozenset(typed or named or {t.lemma for t, _ in new})


@lru_cache(maxsize=8192)
def _asked_words(question: str) -> frozenset[str]:
    return content_words(question)


def _stated_keywords(question: AskedQuestion, unit: Document) -> frozenset[str]:
    """The keywords that a unit states about a question; none if it abstains."""
    stated = unit_statements(question, unit, SENTENCES, KEYWORDS)
    return frozenset(item.lemma for item in stated if isinstance(item, Word))
