"""Answer-level check of a new document: does it change the answer to a watched question without another's support?

A poisoned text must do more than enter a context: it must change the answer. Two steps, the cheap one first.

1. ``specific_lifts`` measures how much a document that ranks first for a question is about this question alone. It
   needs no reader, so its threshold is estimated from the corpus like that of every other signal.
2. Leave one out: a reader answers the question with and without the document. The document stays suspicious if the
   answer changes, and no other unit states the new one. That is a quorum of m = 2 (``guard.defenses.quorum``).

The second step can only clear a document, so the rate of false alarms is at most that of the first, with any reader.
The reader quotes a sentence by default, and may be a language model. What other units state is read without a model.
A document is not cleared without an answer. If the reader answers no prompt at all, the error reaches the caller. If it
fails on some, also when they are asked again alone, their documents stay suspicious: a hostile text can make a reader
fail, and must not stop the documents that come with it. The price: so does a server that fails half-way.

Leave one out: "RAGuard-ZKIP" (arXiv 2607.26339). Deviation: it runs once per document at ingest, not in every answer,
and asks for support instead of stability.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.errors import BackendError, CasemateError
from casemate.guard.defenses.quorum.keywords import (
    AskedQuestion,
    Word,
    read_text,
    unit_statements,
)
from casemate.guard.units import group_units, whole
from casemate.protocols import Generator, Index
from casemate.rag.pipeline import INSTRUCTIONS, join_stream
from casemate.runtime.concurrency import map_concurrently
from casemate.text.refusals import is_refusal
from casemate.text.tokens import content_words
from casemate.types import DEFAULT_TENANT, Document, Hit, Prompt, Vector

SUPPORT_DOCUMENTS = 24
"""Documents nearest to the question among which support is searched."""
SENTENCES, KEYWORDS = 2, 8
"""Sentences and keywords of one unit."""
SUPPORTED_SHARE = 0.5
"""Share of the new answer's keywords of which one other unit must state more to support it."""
AT_ONCE = 8
"""Answers that a reader is asked for at once. A generator with ``batch`` writes them together. With 16, a model
of 0.5 billion parameters on two busy cores exceeded ``ANSWER_S``."""
ANSWER_S = 120.0
"""Time limit of one answer, and of all that are asked again together, in seconds. Many share a model's time."""
log = logging.getLogger(__name__)
_CITATIONS = re.compile(r"(?<=[.!?])(?:\s*\[[0-9]{1,3}\])+(?=\s|$)")
_LAST_CITATION = re.compile(r"(?<!\s)\s*\[[0-9]{1,3}\]$")
_asked_words = lru_cache(maxsize=8192)(content_words)


class EnteredQuestion(NamedTuple):
    """A question and a new document that ranks first for it, with their embeddings, (dim,)."""

    question: str
    question_vector: Vector
    document: Document
    vector: Vector


class AnswerChange(NamedTuple):
    """What a new document does to the answer to one question.

    Attributes:
        changed: Whether the answer states something else, is a refusal now, or could not be written.
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
        reader: Answers; the default quotes one sentence, without a model.
    """

    index: Index
    tenant: str = DEFAULT_TENANT
    k: int = 5
    reader: Generator = field(default_factory=lambda: ExtractiveGenerator(sentences=1, support=1e-6))

    def check(self, entered: Sequence[EnteredQuestion]) -> list[AnswerChange]:
        """Answers each question with and without its new document. Blocks.

        Equal prompts are asked once. Indexed versions of a document's source are left out. Takes at most ``ANSWER_S``
        for each ``AT_ONCE`` prompts and once more.

        Raises:
            CasemateError: If the reader answers no prompt, and may later.
        """
        prompts, others = list[tuple[Prompt, Prompt]](), list[list[Hit]]()
        for one in entered:
            hits = self.index.search(one.question_vector, SUPPORT_DOCUMENTS, self.tenant).hits
            others.append([hit for hit in hits if hit.document.source != one.document.source])
            prompts.append(self._prompts(one, others[-1]))
        if not prompts:
            return []
        unique = {_key(prompt): prompt for pair in prompts for prompt in pair}
        with ThreadPoolExecutor(1) as thread:  # the caller's thread may already run an event loop
            said = dict(zip(unique, thread.submit(asyncio.run, self._read([*unique.values()])).result(), strict=True))
        return [
            self._compare(one.question, said[_key(before)], said[_key(after)], hits)
            for one, (before, after), hits in zip(entered, prompts, others, strict=True)
        ]

    def _prompts(self, one: EnteredQuestion, others: Sequence[Hit]) -> tuple[Prompt, Prompt]:
        """The question with the context without the document, and with it."""
        score = float(np.dot(one.question_vector, one.vector))
        rank = sum(hit.score > score for hit in others)
        context = [hit.document for hit in others]
        extended = [*context[:rank], one.document, *context[rank:]]
        before, after = (Prompt(one.question, tuple(c[: self.k]), INSTRUCTIONS) for c in (context, extended))
        return before, after

    async def _read(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """The answers; None where the reader failed."""
        said = await map_concurrently(self._answer, prompts, AT_ONCE)
        failed = [i for i, answer in enumerate(said) if _may_succeed(answer)]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ask_again(prompts, said, failed), ANSWER_S)
        failures = [answer for answer in said if not isinstance(answer, str)]
        if len(failures) == len(said) and all(map(_may_succeed, failures)):
            raise failures[0]
        for error in failures:
            log.warning("the reader failed on a prompt about a new document, which stays suspicious: %s", error)
        return [answer if isinstance(answer, str) else None for answer in said]

    async def _ask_again(
        self, prompts: Sequence[Prompt], said: list[str | CasemateError], failed: Sequence[int]
    ) -> None:
        """Asks failed prompts again, one at a time. If none was answered, only the first, without the new document."""
        for i in failed:
            said[i] = await self._answer(prompts[i])
            if not any(isinstance(answer, str) for answer in said):
                return

    async def _answer(self, prompt: Prompt) -> str | CasemateError:
        """The answer without citations, or why there is none."""
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await join_stream(self.reader.stream(prompt))
        except CasemateError as error:
            return error
        except Exception as error:  # whatever a text causes
            what = f"no answer within {ANSWER_S:g} s" if isinstance(error, TimeoutError) else type(error).__name__
            problem = f"the reader of new documents failed with {what}; try again, or name another monitor.gate_reader"
            failure = BackendError(problem, backend="gate_reader", retryable=True)
            failure.__cause__ = error
            return failure
        return _without_citations(answer, prompt.context)

    @staticmethod
    def _compare(asked: str, before: str | None, after: str | None, others: Sequence[Hit]) -> AnswerChange:
        if before is None or after is None:
            return AnswerChange(before or "", after or "", True, 0)
        if is_refusal(after):
            return AnswerChange(before, after, not is_refusal(before), 0)
        question = AskedQuestion.of(asked)
        stated = answer_keywords(question, after)
        if not stated:
            return AnswerChange(before, after, after != before, 0)
        new = stated - (frozenset() if is_refusal(before) else answer_keywords(question, before))
        supporters = sum(
            len(new & _stated_keywords(question, whole(unit))) > SUPPORTED_SHARE * len(new)
            for unit in group_units(others)
        )
        return AnswerChange(before, after, bool(new), supporters if new else 0)


def _may_succeed(answer: str | CasemateError) -> bool:
    """Whether it is a failure that another prompt may not have, or the same one later."""
    return isinstance(answer, CasemateError) and (not isinstance(answer, BackendError) or answer.retryable)


def _without_citations(answer: str, context: Sequence[Document]) -> str:
    """An answer without citations of its context after its sentences, and without a list of its sources at the end.

    A number in brackets anywhere else, or a larger one, may be the answer.
    """

    def uncited(found: re.Match[str]) -> str:
        known = all(1 <= int(number) <= len(context) for number in re.findall("[0-9]+", found[0]))
        return "" if known else found[0]

    names = "|".join(re.escape(document.source) for document in context)
    # Possessive, thus linear: names may contain commas and brackets.
    text = re.sub(rf"\nSources: (?:\[[0-9]+\] (?:{names})(?:, |\Z))++\Z", "", answer)
    if text != answer:  # a reader that lists its sources cites the last sentence, whatever it ends with
        text = _LAST_CITATION.sub(uncited, text)
    return _CITATIONS.sub(uncited, text)


def _key(prompt: Prompt) -> tuple[str, tuple[str, ...]]:
    """What a reader reads."""
    return prompt.question, tuple(f"{document.title}\0{document.text}" for document in prompt.context)


def specific_lifts(questions: Sequence[str], text: str, lifts: Sequence[float]) -> list[float]:
    """How strongly a document that ranks first for some questions is about each of them alone.

    The lift times the root of the F1 of the content words that question and text share. A text of one question shares
    most of its words with it; a document of many facts does not. A lift is above 0: the cosine of document and
    question, minus that of the best document so far.

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
    # Once per sentence: one may be a whole document. An answer may be worded as a question.
    read = [(question.expects(s.text), s) for s in read_text(answer, questions=True)]
    new = [(t, e) for e, s in read for t in s.tokens if not question.repeats(t) and not question.contains(t.lemma)]
    typed = {t.lemma for t, expected in new if not expected.isdisjoint(w.lower() for w in t.written.split())}
    named = {t.lemma for t, _ in new if t.named}
    return frozenset(typed or named or {t.lemma for t, _ in new})


def _stated_keywords(question: AskedQuestion, unit: Document) -> frozenset[str]:
    """The keywords that a unit states about a question; none if it abstains."""
    stated = unit_statements(question, unit, SENTENCES, KEYWORDS)
    return frozenset(item.lemma for item in stated if isinstance(item, Word))
