"""Ingest-time impact: which watched questions a new document would newly be found for (reverse nearest neighbours).

A question that one user in a million asks is asked by no canary. But whoever poisons its answer must bring a document
into its context, and that shows when the document comes in: at the moment of ingest the scores that it has to beat are
known for every watched question (METHODS D6). Watched are questions that were asked, that canaries ask, or that were
made from the corpus: whatever the caller gives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from casemate.protocols import Index
from casemate.types import DEFAULT_TENANT, Vector

NOTHING = -1.0
"""The score of a document that is not there: any other beats it."""


class Entry(NamedTuple):
    """A question that a document newly enters the context of.

    Attributes:
        question: Its number among those that are watched.
        rank: The document's place in the context, from 1.
        score: Their cosine.
        lift: The same minus that of the best document held so far; above 0 when the document comes first.
    """

    question: int
    rank: int
    score: float
    lift: float


@dataclass(slots=True)
class Standings:
    """Questions, and where the documents stand in answering them: the scores that a new one must reach to be read.

    Attributes:
        questions: Their texts, for whoever reads the result.
        vectors: Their embeddings, (m, dim).
        best: Scores of the k best documents held, best first: (m, k). ``NOTHING`` where there are fewer.
    """

    questions: tuple[str, ...]
    vectors: Vector
    best: Vector

    @classmethod
    def of(
        cls,
        questions: Sequence[str],
        vectors: Vector,
        index: Index,
        k: int,
        tenant: str = DEFAULT_TENANT,
        without: Collection[str] = (),
    ) -> Standings:
        """Questions as the documents of a tenant answer them now. Reads the whole index once, in constant memory.

        Args:
            questions: At least one.
            vectors: One row for each, (m, dim).
            index: Where the documents are.
            k: Documents of a context, at least 1.
            tenant: Whose.
            without: Sources that count as not there.
        """
        return cls(tuple(questions), vectors, best_scores(index, vectors, k, tenant, without))

    def entered(self, vector: Vector) -> list[Entry]:
        """The questions whose best k a document would be among, the highest lift first. A tie enters.

        Args:
            vector: Of the document, (dim,).
        """
        scores = self.vectors @ vector  # (m,)
        found = [
            Entry(i, 1 + int((self.best[i] > scores[i]).sum()), float(scores[i]), float(scores[i] - self.best[i, 0]))
            for i in np.flatnonzero(scores >= self.best[:, -1]).tolist()
        ]
        return sorted(found, key=lambda e: -e.lift)

    def lifts(self, vectors: Vector) -> tuple[Vector, npt.NDArray[np.int64]]:
        """The highest lift of each document over all questions, and how many questions it enters: (n,), (n,).

        Args:
            vectors: Of the documents, (n, dim).
        """
        scores = vectors @ self.vectors.T  # (n, m)
        lifts: Vector = (scores - self.best[:, 0]).max(axis=1)
        return lifts, (scores >= self.best[:, -1]).sum(axis=1)

    def over(self, vectors: Vector) -> Vector:
        """By how much each document is above the last of the context, for each question; 0 or more enters: (n, m).

        Args:
            vectors: Of the documents, (n, dim).
        """
        above: Vector = vectors @ self.vectors.T - self.best[:, -1]
        return above

    def admit(self, vectors: Vector) -> None:
        """Counts documents as held from now on.

        Args:
            vectors: Theirs, (n, dim).
        """
        if len(vectors):
            self.best = _merged(self.best, self.vectors @ vectors.T)


def best_scores(
    index: Index, vectors: Vector, k: int, tenant: str = DEFAULT_TENANT, without: Collection[str] = ()
) -> Vector:
    """Scores of the k documents of a tenant nearest to each of some vectors, best first: (m, k).

    Args:
        index: Where the documents are.
        vectors: (m, dim).
        k: At least 1.
        tenant: Whose.
        without: Sources that are passed over.
    """
    best = np.full((len(vectors), k), NOTHING, np.float32)
    out = frozenset(without)
    for documents, held in index.scan(tenant):
        rows = held[[d.source not in out for d in documents]] if out else held
        if len(rows):
            best = _merged(best, vectors @ rows.T)
    return best


def _merged(best: Vector, scores: Vector) -> Vector:
    """The k best of what was there and what comes, best first."""
    k = best.shape[1]
    both = np.concatenate([best, scores.astype(np.float32)], axis=1)
    top: Vector = -np.sort(-np.partition(both, -k, axis=1)[:, -k:], axis=1)
    return top
