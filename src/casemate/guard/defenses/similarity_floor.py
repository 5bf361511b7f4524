"""Similarity floor: chunks that are only loosely related to the question are not read.

Zeng et al. 2024, "The Good and The Bad: Exploring Privacy Issues in Retrieval-Augmented Generation", ACL Findings
(arXiv 2402.16893), the set distance threshold; "re-ranking protection" among the baselines of RAGFort (Li et al. 2026,
arXiv 2511.10128). A crawler asks questions far from all documents to receive arbitrary ones; with a floor it receives
none.

Deviation: the paper drops chunks beyond a distance; here below a cosine similarity. For unit vectors, L2 distance p is
cosine 1 - p² / 2.
Deviation: the papers sweep the threshold and leave the choice open; ``floor_for`` derives it from benign questions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from casemate.errors import ConfigError, DataError
from casemate.protocols import Defense
from casemate.types import Action, Outcome, Query, Retrieval, Verdict

NAME = "similarity_floor"
UNDECIDED = "no floor is set; derive one from benign questions, see docs/defenses/similarity_floor.md"


@dataclass(eq=False)
class SimilarityFloor(Defense):
    """Removes hits below a similarity to the question; nothing replaces them.

    Attributes:
        floor: Minimum cosine similarity of a chunk in the context, in [-1, 1]. Unset: nothing is removed, and the
            verdict says so.
    """

    floor: float | None = None

    paper: ClassVar[str] = "Zeng et al. 2024, Section 5.2 (set distance threshold), arXiv 2402.16893"
    max_hidden_sources: ClassVar[int] = 0  # replacements would be even less similar

    def __post_init__(self) -> None:
        if self.floor is not None and not -1 <= self.floor <= 1:
            raise ConfigError(f"{NAME}.floor is {self.floor}; it must be a cosine, from -1 to 1")

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Keeps the hits at or above the floor, if one of the first k is below it.

        The score is the distance of the least similar of the first k below the floor; above 0 the question is flagged.
        """
        context = [hit.score for hit in retrieval.hits[: query.k]]
        if self.floor is None or not context:
            return Outcome(retrieval, self._undecided(context))
        score = self.floor - min(context)
        low = [hit for hit in retrieval.hits if hit.score < self.floor] if score > 0 else []
        kept = tuple(hit for hit in retrieval.hits if hit not in low)
        hidden = tuple(hit.document.id for hit in low)
        evidence = {"floor": self.floor, "lowest": min(context), "kept": sum(s >= self.floor for s in context)}
        verdict = Verdict(NAME, bool(low), Action.HIDE if low else Action.NONE, score, 0.0, hidden, evidence)
        return Outcome(replace(retrieval, hits=kept), verdict)

    def _undecided(self, context: Sequence[float]) -> Verdict | None:
        """The verdict without a floor; None without hits."""
        if not context:
            return None
        return Verdict(NAME, False, Action.NONE, -min(context), None, evidence={"undecided": UNDECIDED})


def floor_for(similarities: Sequence[float], share: float = 0.01) -> float:
    """Returns the highest floor that affects at most a share of further benign questions.

    Split conformal prediction: of n exchangeable values and one more, the latter is below the r-th smallest with
    probability at most r / (n + 1). So r is the largest number with r / (n + 1) <= share.

    Args:
        similarities: For each of n benign questions, the cosine of its k-th hit, where k is the size of the context.
        share: Share of benign questions that may lose a chunk, in (0, 1).

    Raises:
        ConfigError: If the share is out of range.
        DataError: If there are too few questions for that share, or a similarity is not finite.

    >>> floor_for([i / 100 for i in range(99)])
    0.0
    >>> floor_for([i / 100 for i in range(99)], share=0.05)
    0.04
    """
    if not 0 < share < 1:
        raise ConfigError(f"share is {share}; it must lie between 0 and 1")
    if not all(math.isfinite(s) for s in similarities):
        raise DataError("a similarity is not finite; pass the cosine of the k-th hit of each question")
    rank = math.floor(share * (len(similarities) + 1) + 1e-9)  # .01 x 100 is not quite 1 in binary
    if rank < 1:
        needed = math.ceil(1 / share - 1e-9) - 1
        raise DataError(f"{len(similarities)} benign questions; a share of {share} needs at least {needed}")
    return sorted(similarities)[rank - 1]
