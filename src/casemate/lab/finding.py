"""Whether what is in a collection is still found: questions that have one right answer each, and how often it comes up.

Nobody asked them. A title, a first sentence and a run of words stand for what people remember of a text; what they look
for is the source they are from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.reindexing.topics import Labels, foreign
from casemate.spread import ALONE, Spread
from casemate.types import Document, Vector
from casemate.words import sentences

Score: TypeAlias = Callable[[Vector], Vector]
"""Questions' vectors, (m, dim), to their similarity to every chunk, (m, n)."""
SPAN = 12
"""Words of a run."""
LONGEST = 60
"""Words of a first sentence that are asked."""
AT_ONCE = 64
"""Questions that are compared with every chunk at a time."""


class Sought(NamedTuple):
    """A question and the source that it is about.

    Attributes:
        kind: ``title``, ``opening`` or ``span``.
        text: What is asked.
        source: Where it is from.
    """

    kind: str
    text: str
    source: str


def sought(documents: Sequence[Document], rng: np.random.Generator) -> list[Sought]:
    """One question about each chunk that has words; the kinds take turns, and without a title a run of words is asked.

    Args:
        documents: The chunks.
        rng: Where the runs begin.
    """
    kinds = ("title", "opening", "span")
    found = (_asked(kinds[i % len(kinds)], document, rng) for i, document in enumerate(documents))
    return [question for question in found if question.text.strip()]


def _asked(kind: str, document: Document, rng: np.random.Generator) -> Sought:
    words = document.text.split()
    start = int(rng.integers(max(1, len(words) - SPAN + 1)))  # drawn whatever the kind: the same runs for each
    if kind == "title" and document.title.strip():
        return Sought("title", document.title, document.source)
    if kind == "opening":
        first = next(iter(sentences(document.text)), "")
        return Sought("opening", " ".join(first.split()[:LONGEST]), document.source)
    return Sought("span", " ".join(words[start : start + SPAN]), document.source)


def found(
    score: Score, Q: Vector, own: Sequence[npt.NDArray[np.int64]], k: int, spread: Spread = ALONE
) -> npt.NDArray[np.bool_]:
    """Whether a chunk of the right source is among the k best, for each question, (m,).

    Args:
        score: What is ranked by; workers need one that can be pickled.
        Q: The questions' vectors, (m, dim).
        own: Positions of the right chunks of each, at least one.
        k: Hits that are read.
        spread: Who compares.
    """
    blocks = ((Q[rows], own[rows]) for rows in _blocks(len(Q)))
    return np.array([hit for block in spread.map(_Hits(score, k), blocks) for hit in block], np.bool_)


def crossings(
    score: Score, Q: Vector, own: Labels, labels: Labels, k: int, itself: Sequence[int] | None = None
) -> float:
    """Share of the k best hits that are of another topic than the text a question was made from, on average.

    Args:
        score: What is ranked by.
        Q: The questions' vectors, (m, dim).
        own: Topic of the text that each was made from, (m,).
        labels: Topics of the chunks, (n,).
        k: Hits that are read.
        itself: Position of the chunk that each was made from, which does not count; None: it counts.
    """
    total = 0.0
    for rows in _blocks(len(Q)):
        S = score(Q[rows])
        if itself is not None:
            S[np.arange(len(S)), np.asarray(itself)[rows]] = -np.inf
        total += float(foreign(S, own[rows], labels, k).sum())
    return total / max(len(Q), 1)


@dataclass(frozen=True, slots=True)
class _Hits:
    """Which of some questions find their source."""

    score: Score
    k: int

    def __call__(self, block: tuple[Vector, Sequence[npt.NDArray[np.int64]]]) -> list[bool]:
        Q, own = block
        return [bool((s > s[rows].max()).sum() < self.k) for s, rows in zip(self.score(Q), own, strict=True)]


def _blocks(count: int) -> Iterator[slice]:
    """Some questions at a time."""
    return (slice(start, start + AT_ONCE) for start in range(0, count, AT_ONCE))
