"""Shadow diff: the same questions on the state before and after, and which new documents changed the answers.

For real questions, which no canary asks: a sample of them is replayed on two systems, such as two states of an index.
Where the answer flips, the documents that came into its context are suspect, and a document that is new in the context
of many flips most of all. Nothing of a question or an answer is in the result, only numbers and ids.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from casemate.errors import ConfigError
from casemate.monitor.canaries import matching
from casemate.monitor.canaries.check import Observed, observed
from casemate.monitor.drift.compare import rank_biased_overlap
from casemate.protocols import Embedder, Target
from casemate.stats import Rate, rate
from casemate.types import DEFAULT_TENANT, Query

ALIKE = 0.9
"""Cosine from which on two answers are alike, as for canaries, unless they differ in a number or by an opposite."""
REFUSED, ANSWERED, CHANGED = "refused", "answered", "changed"


@dataclass(frozen=True, slots=True)
class Flip:
    """A question that is answered otherwise.

    Attributes:
        question: Its number among those replayed.
        kind: ``refused`` (it was answered before), ``answered`` (it was refused before) or ``changed``.
        alike: Cosine of the two answers; None: there is no embedder, and the words differ.
        new: Documents that came into its context, best first.
    """

    question: int
    kind: str
    alike: float | None
    new: tuple[str, ...]


class Suspect(NamedTuple):
    """A new document: how many contexts it came into, and how many of these questions flipped."""

    document: str
    entered: int
    flips: int


@dataclass(frozen=True, slots=True)
class Shadow:
    """What has changed between two states.

    Attributes:
        asked: Questions that both answered.
        errors: Questions that one of them did not.
        flips: Those that are answered otherwise.
        suspects: Documents that came into a context; those with most flips first.
        overlap: Mean overlap of the contexts, in [0, 1].
        unexplained: Flips into whose context no new document came.
    """

    asked: int
    errors: int
    flips: tuple[Flip, ...]
    suspects: tuple[Suspect, ...]
    overlap: float
    unexplained: int

    @property
    def share(self) -> Rate:
        """Share of the questions that flipped, with its 95 % interval.

        Raises:
            ValueError: If no question was answered.
        """
        return rate(len(self.flips), self.asked)


async def shadow_diff(  # noqa: PLR0913  whom to ask, and how
    questions: Sequence[str],
    before: Target,
    after: Target,
    *,
    k: int = 5,
    tenant: str = DEFAULT_TENANT,
    client: str = "shadow",
    inserted: Collection[str] | None = None,
    embedder: Embedder | None = None,
    concurrency: int = 8,
    timeout_s: float = 30.0,
) -> Shadow:
    """Replays questions on both.

    Args:
        questions: A sample of real ones. They come from a log that may hold them (``privacy.log_text``).
        before: The state before.
        after: The state after.
        k: Documents read for an answer.
        tenant: Whose documents.
        client: The name under which they are asked.
        inserted: Ids of the documents that came in between; None: any document that is new in a context is suspect.
        embedder: Compares the answers; None: other words are another answer.
        concurrency: Questions at the same time.
        timeout_s: Longest time for one.

    Raises:
        ConfigError: If a number is out of range.
    """
    if concurrency < 1 or not timeout_s > 0:
        raise ConfigError(f"concurrency={concurrency}, timeout_s={timeout_s}; both must be above 0")
    gate = asyncio.Semaphore(concurrency)

    async def ask(target: Target, text: str) -> Observed | None:
        async with gate:
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await target.ask(Query(text, client, tenant, k))
                return observed(answer, getattr(target, "tells", None))
            except Exception:  # whatever a target does, it is one question less; its words may quote a text
                return None

    told = await asyncio.gather(*(ask(target, text) for text in questions for target in (before, after)))
    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(told[::2], told[1::2], strict=True)) if a and b]
    return await asyncio.to_thread(_compared, pairs, len(questions) - len(pairs), inserted, embedder)


def _compared(
    pairs: Sequence[tuple[int, Observed, Observed]],
    errors: int,
    inserted: Collection[str] | None,
    embedder: Embedder | None,
) -> Shadow:
    cosines = _cosines([(a, b) for _, a, b in pairs], embedder)
    flips, entered, flipped = [], Counter[str](), Counter[str]()
    for (number, a, b), alike in zip(pairs, cosines, strict=True):
        known = set(a.documents)
        new = tuple(d for d in b.documents if d not in known and (inserted is None or d in inserted))
        entered.update(new)
        if kind := _kind(a, b, alike):
            flips.append(Flip(number, kind, alike, new))
            flipped.update(new)
    suspects = [Suspect(d, count, flipped[d]) for d, count in entered.items()]
    overlaps = [rank_biased_overlap(_context(a), _context(b)) for _, a, b in pairs]
    return Shadow(
        len(pairs),
        errors,
        tuple(flips),
        tuple(sorted(suspects, key=lambda s: (-s.flips, -s.entered, s.document))),
        sum(overlaps) / len(overlaps) if overlaps else 1.0,
        sum(not flip.new for flip in flips),
    )


def _kind(a: Observed, b: Observed, alike: float | None) -> str:
    """How an answer flipped; empty: it did not."""
    if a.refused != b.refused:
        return REFUSED if b.refused else ANSWERED
    same = _said(a) == _said(b) if alike is None else alike >= ALIKE and not matching.differ(_said(a), _said(b))
    return "" if a.refused or same else CHANGED


def _cosines(pairs: Sequence[tuple[Observed, Observed]], embedder: Embedder | None) -> list[float | None]:
    if embedder is None:
        return [None] * len(pairs)
    texts = list(dict.fromkeys(_said(o) or " " for pair in pairs for o in pair))
    vector = dict(zip(texts, embedder.embed(texts), strict=True)) if texts else {}
    return [float(vector[_said(a) or " "] @ vector[_said(b) or " "]) for a, b in pairs]


def _said(seen: Observed) -> str:
    """The answer without its citations."""
    return " ".join(matching.bare(seen.text).split())


def _context(seen: Observed) -> Sequence[str]:
    return seen.documents or seen.sources
