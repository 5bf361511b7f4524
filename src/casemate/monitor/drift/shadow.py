"""Shadow diff: replays questions on two states of a system and finds the new documents that changed the answers.

For questions that no canary asks: a sample is replayed on both states. If an answer flips, the documents that are new
in its context are suspects; a document that is new in the contexts of many flipped answers is suspected most. The
result contains numbers and ids only, no text of questions or answers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from casemate.maths.stats import Estimate, proportion
from casemate.monitor.canaries import matching
from casemate.monitor.canaries.check import ObservedAnswer, observe_answer
from casemate.monitor.drift.compare import answer_cosines, rank_biased_overlap
from casemate.protocols import Embedder, Target
from casemate.runtime.concurrency import map_concurrently
from casemate.types import DEFAULT_TENANT, Query

MIN_COSINE = 0.9
"""Minimum cosine of two equal answers, as for canaries; they must also agree in numbers and antonyms."""
CLIENT = "shadow"
"""Client name of the queries."""
REFUSED, ANSWERED, CHANGED = "refused", "answered", "changed"


@dataclass(frozen=True, slots=True)
class AnswerFlip:
    """A question, by its index, with a different answer.

    Attributes:
        kind: ``refused`` (answered before), ``answered`` (refused before) or ``changed``.
        cosine: Cosine of the two answers; None: there is no embedder, and the words differ.
        new: Documents that are new in its context, best first.
    """

    question: int
    kind: str
    cosine: float | None
    new: tuple[str, ...]


class SuspectDocument(NamedTuple):
    """A new document: the number of contexts that it entered, and of flipped answers among them."""

    document: str
    entered: int
    flips: int


@dataclass(frozen=True, slots=True)
class ShadowDiff:
    """Differences between two states.

    Attributes:
        asked: Questions that both answered.
        errors: Questions that one of them did not answer.
        unexplained: Flips without a new document in their context.
    """

    asked: int
    errors: int
    flips: tuple[AnswerFlip, ...]
    suspects: tuple[SuspectDocument, ...]
    overlap: float
    unexplained: int

    @property
    def share(self) -> Estimate:
        """Share of flipped answers, with its 95 % interval; ``ValueError`` if no question was answered."""
        return proportion(len(self.flips), self.asked)


async def shadow_diff(  # noqa: PLR0913  all settings of one replay
    questions: Sequence[str],
    before: Target,
    after: Target,
    *,
    k: int = 5,
    tenant: str = DEFAULT_TENANT,
    embedder: Embedder | None = None,
    concurrency: int = 8,
    timeout_s: float = 30.0,
) -> ShadowDiff:
    """Replays questions of clients, from a log that may contain them (``privacy.log_text``), on two states.

    Without an embedder different words are a different answer. ``concurrency`` is at least 1; a question times out
    after ``timeout_s`` seconds.
    """

    async def ask(asked: tuple[str, Target]) -> ObservedAnswer | None:
        text, target = asked
        try:
            async with asyncio.timeout(timeout_s):
                answer = await target.ask(Query(text, CLIENT, tenant, k))
            return observe_answer(answer, getattr(target, "tells", None))
        except Exception:  # any failure of a target is one unanswered question; its message may quote a text
            return None

    answers = await map_concurrently(ask, product(questions, (before, after)), concurrency)
    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(answers[::2], answers[1::2], strict=True)) if a and b]
    return await asyncio.to_thread(_compare_answers, pairs, len(questions) - len(pairs), embedder)


def _compare_answers(
    pairs: Sequence[tuple[int, ObservedAnswer, ObservedAnswer]], errors: int, embedder: Embedder | None
) -> ShadowDiff:
    texts = [(_plain_text(a), _plain_text(b)) for _, a, b in pairs]
    cosines = answer_cosines(texts, embedder) if embedder else [None] * len(pairs)
    flips, entered, flipped = [], Counter[str](), Counter[str]()
    for (number, a, b), cosine in zip(pairs, cosines, strict=True):
        known = set(a.documents)
        new = tuple(d for d in b.documents if d not in known)
        entered.update(new)
        if kind := _flip_kind(a, b, cosine):
            flips.append(AnswerFlip(number, kind, cosine, new))
            flipped.update(new)
    suspects = [SuspectDocument(d, count, flipped[d]) for d, count in entered.items()]
    overlaps = [rank_biased_overlap(a.documents or a.sources, b.documents or b.sources) for _, a, b in pairs]
    return ShadowDiff(
        len(pairs),
        errors,
        tuple(flips),
        tuple(sorted(suspects, key=lambda s: (-s.flips, -s.entered, s.document))),
        sum(overlaps) / len(overlaps) if overlaps else 1.0,
        sum(not flip.new for flip in flips),
    )


def _flip_kind(a: ObservedAnswer, b: ObservedAnswer, cosine: float | None) -> str:
    """How an answer flipped; empty if it did not."""
    if a.refused != b.refused:
        return REFUSED if b.refused else ANSWERED
    one, other = _plain_text(a), _plain_text(b)
    same = one == other if cosine is None else cosine >= MIN_COSINE and not matching.facts_differ(one, other)
    return "" if a.refused or same else CHANGED


def _plain_text(answer: ObservedAnswer) -> str:
    return " ".join(matching.strip_citations(answer.text).split())
