"""Ingest-time impact: for which watched questions a new document would enter the context (reverse nearest neighbors).

No canary asks a question that one client in a million asks. But an attacker who poisons its answer must bring a
document into its context, and that is visible at ingest. For every watched question, the scores that the document must
beat are known (METHODS D6). Watched questions are logged questions, those of canaries, or synthetic ones: the caller
chooses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from casemate.protocols import Index
from casemate.types import DEFAULT_TENANT, Vector

NO_SCORE = -1.0
"""Score of a missing document: any other beats it."""


class ContextEntry(NamedTuple):
    """A question, by its index, whose context a document enters.

    ``lift`` is the cosine minus that of the best document so far; above 0 if the document ranks first.
    """

    question: int
    lift: float


@dataclass(slots=True)
class QuestionScores:
    """Watched questions, and the scores that a new document must reach to enter their contexts.

    Attributes:
        vectors: Their embeddings, (m, dim).
        best: Scores of their k best documents, best first, (m, k); ``NO_SCORE`` where there are fewer.
        origins: For each question the source that it was generated from, or "". A source does not enter the contexts
            of its own questions: that it answers them says nothing about it.
    """

    questions: tuple[str, ...]
    vectors: Vector
    best: Vector
    origins: npt.NDArray[np.object_] | None = None

    @classmethod
    def of(
        cls,
        questions: Sequence[str],
        vectors: Vector,
        index: Index,
        k: int,
        tenant: str = DEFAULT_TENANT,
        without: Collection[str] = (),
    ) -> QuestionScores:
        """Computes the scores from a tenant's documents, except some sources.

        Reads the whole index once, in constant memory. There is at least one question; their embeddings are (m, dim).
        """
        return cls(tuple(questions), vectors, best_scores(index, vectors, k, tenant, without))

    def impact(self, vectors: Vector, sources: Sequence[str] = ()) -> tuple[Vector, list[list[ContextEntry]]]:
        """For n documents, (n, dim), the highest lift over all questions, (n,), and the contexts that each enters.

        The entries have the highest lift first; a tie enters. Without sources, these are unknown.
        """
        scores = vectors @ self.vectors.T  # (n, m)
        if self.origins is not None and len(sources):
            own = (self.origins == np.array(sources, object)[:, None]) & (self.origins != "")
            scores = np.where(own, np.float32(2 * NO_SCORE), scores)  # below any other
        lifts, enters = scores - self.best[:, 0], scores >= self.best[:, -1]
        found = [
            [ContextEntry(i, float(row[i])) for i in np.flatnonzero(entered).tolist()]
            for row, entered in zip(lifts, enters, strict=True)
        ]
        return lifts.max(axis=1), [sorted(entries, key=lambda e: -e.lift) for entries in found]

    def margins(self, vectors: Vector) -> Vector:
        """Score of each document, (n, dim), minus that of the last one in each context, (n, m); 0 or more enters."""
        above: Vector = vectors @ self.vectors.T - self.best[:, -1]
        return above

    def admit(self, vectors: Vector) -> None:
        """Updates the scores after documents, (n, dim), were indexed."""
        if len(vectors):
            self.best = _merge_scores(self.best, self.vectors @ vectors.T)


def best_scores(
    index: Index, vectors: Vector, k: int, tenant: str = DEFAULT_TENANT, without: Collection[str] = ()
) -> Vector:
    """Scores of a tenant's k documents nearest to each vector, best first: (m, dim) to (m, k). Ignores some sources."""
    best = np.full((len(vectors), k), NO_SCORE, np.float32)
    ignored = frozenset(without)
    for documents, held in index.scan(tenant):
        rows = held[[d.source not in ignored for d in documents]] if ignored else held
        if len(rows):
            best = _merge_scores(best, vectors @ rows.T)
    return best


def _merge_scores(best: Vector, scores: Vector) -> Vector:
    """The k best of old and new scores, best first."""
    k = best.shape[1]
    both = np.concatenate([best, scores.astype(np.float32)], axis=1)
    top: Vector = -np.sort(-np.partition(both, -k, axis=1)[:, -k:], axis=1)
    return top
