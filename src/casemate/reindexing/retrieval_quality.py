"""Retrieval quality of a ranking, measured by known-item search on synthetic questions.

Each question is a title, a first sentence or a run of words from one chunk, as a user may remember them. Its relevant
source is the one that contains them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.maths.clustering import Labels, other_topic_share
from casemate.runtime.executor import LOCAL, Executor
from casemate.text.sentences import sentences
from casemate.types import Document, Vector

ScoreFunction: TypeAlias = Callable[[Vector], Vector]
"""Maps question vectors, (m, dim), to their scores for every chunk, (m, n)."""
KINDS = ("title", "opening", "span")
SPAN_WORDS = 12
OPENING_WORDS = 60  # maximum number of words of a first sentence
QUERY_BATCH = 64  # questions scored against all chunks at a time


class KnownItemQuestion(NamedTuple):
    """A synthetic question (of kind ``title``, ``opening`` or ``span``) with one relevant source."""

    kind: str
    text: str
    source: str


def known_item_questions(documents: Sequence[Document], rng: np.random.Generator) -> list[KnownItemQuestion]:
    """Builds one question per chunk with words; kinds alternate, and a span replaces a missing title."""
    questions = (_question(KINDS[i % len(KINDS)], document, rng) for i, document in enumerate(documents))
    return [question for question in questions if question.text.strip()]


def _question(kind: str, document: Document, rng: np.random.Generator) -> KnownItemQuestion:
    words = document.text.split()
    start = int(
        rng.integers(max(1, len(words) - SPAN_WORDS + 1))
    )  # drawn for every kind: later spans do not depend on it
    if kind == "title" and document.title.strip():
        return KnownItemQuestion("title", document.title, document.source)
    if kind == "opening":
        first = next(iter(sentences(document.text)), "")
        return KnownItemQuestion("opening", " ".join(first.split()[:OPENING_WORDS]), document.source)
    return KnownItemQuestion("span", " ".join(words[start : start + SPAN_WORDS]), document.source)


def found_in_top_k(
    score: ScoreFunction, Q: Vector, own: Sequence[npt.NDArray[np.int64]], k: int, spread: Executor = LOCAL
) -> npt.NDArray[np.bool_]:
    """For each question, (m, dim), whether one of its relevant chunks, given by position, is among the k best: (m,).

    The ranking must be picklable for remote workers.
    """
    batches = ((Q[rows], own[rows]) for rows in _batches(len(Q)))
    return np.array([hit for batch in spread.map(_TopKTest(score, k), batches) for hit in batch], np.bool_)


def cross_topic_share(
    score: ScoreFunction, Q: Vector, own: Labels, labels: Labels, k: int, itself: Sequence[int] | None = None
) -> float:
    """Mean share of the k best hits of questions, (m, dim), whose topic differs from ``own``, (m,), the question's.

    ``itself`` is the position of the chunk behind each question, which is excluded from its hits.
    """
    total = 0.0
    for rows in _batches(len(Q)):
        S = score(Q[rows])
        if itself is not None:
            S[np.arange(len(S)), np.asarray(itself)[rows]] = -np.inf
        total += float(other_topic_share(S, own[rows], labels, k).sum())
    return total / max(len(Q), 1)


@dataclass(frozen=True, slots=True)
class _TopKTest:
    """Tests one batch of questions."""

    score: ScoreFunction
    k: int

    def __call__(self, batch: tuple[Vector, Sequence[npt.NDArray[np.int64]]]) -> list[bool]:
        Q, own = batch
        return [bool((s > s[rows].max()).sum() < self.k) for s, rows in zip(self.score(Q), own, strict=True)]


def _batches(count: int) -> Iterator[slice]:
    return (slice(start, start + QUERY_BATCH) for start in range(0, count, QUERY_BATCH))
