"""Mirabel: detect-and-hide against membership inference.

Choi, Park, Byun, Lee and Park 2025, "Safeguarding Privacy of Retrieval Data against Membership Inference Attacks: Is
This Query Too Close to Home?", EMNLP Findings (arXiv 2505.22061). A query that carries a document of the corpus is
similar to that one document beyond what the best of n chance similarities would be. Mirabel tests the largest
similarity against that law, and answers without the document when it is beyond.

Deviation: the paper scans the corpus for the mean and deviation of the similarities. Here they come exactly from the
corpus moments (``stats.CorpusMoments``), at a cost that does not depend on the corpus.
Deviation: the paper hides the nearest embedding. Here the whole source document goes, all its chunks, because the next
chunk of the same record would tell as much.
Deviation: below ``min_documents`` nothing is decided; the law of the maximum is asymptotic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from casemate import stats
from casemate.errors import ConfigError
from casemate.protocols import Defense
from casemate.types import Action, Outcome, Query, Retrieval, Verdict


@dataclass(frozen=True, slots=True)
class Mirabel(Defense):
    """Hides the nearest source document when it is nearer than chance allows.

    Attributes:
        threshold: ``paper`` (Algorithm 1 as printed), ``gumbel`` (textbook constants) or ``exact`` (the quantile).
        significance: rho of Eq. 8, in (0, 1): wanted share of harmless queries that are flagged. That holds for normal
            similarities only; on real text measure it.
        min_documents: With fewer documents no statement is made, and the verdict says so.
    """

    threshold: stats.Threshold = "paper"
    significance: float = 0.05
    min_documents: int = 30

    paper: ClassVar[str] = "Choi et al. 2025, Algorithm 1 and Section 4.2, arXiv 2505.22061"
    hides: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.threshold not in stats.THRESHOLDS:
            raise ConfigError(f"mirabel.threshold is {self.threshold!r}; known: {', '.join(stats.THRESHOLDS)}")
        if not 0 < self.significance < 1:
            raise ConfigError(f"mirabel.significance is {self.significance}; it must lie between 0 and 1")
        if self.min_documents < 3:
            raise ConfigError(f"mirabel.min_documents is {self.min_documents}; at least 3 are needed")

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Takes all hits of the target document out when the query is flagged."""
        verdict = self.judge(retrieval)
        if not verdict.flagged:
            return Outcome(retrieval, verdict)
        target = retrieval.hits[0].document.source
        kept = tuple(h for h in retrieval.hits if h.document.source != target)
        return Outcome(replace(retrieval, hits=kept), verdict)

    def judge(self, retrieval: Retrieval) -> Verdict:
        """Algorithm 1, lines 8-13, on the best hit and the background."""
        n = retrieval.background.n
        if n < self.min_documents or not retrieval.hits:
            why = f"{n} documents; {self.min_documents} are needed for a statement"
            score = retrieval.hits[0].score if retrieval.hits else 0.0
            return Verdict("mirabel", False, Action.NONE, score, None, evidence={"undecided": why})
        best = retrieval.hits[0]
        rest = stats.without(retrieval.background, best.score)
        std = max(rest.std, math.sqrt(stats.MIN_VARIANCE))  # among equal documents, rounding must flag nobody
        tau = rest.mean + std * stats.standard_threshold(n, self.significance, self.threshold)
        flagged = best.score > tau
        target = best.document.source
        hidden = tuple(h.document.id for h in retrieval.hits if h.document.source == target) if flagged else ()
        evidence = {"target": target, "form": self.threshold, "n": n, "mean": rest.mean, "std": std}
        return Verdict("mirabel", flagged, Action.HIDE if flagged else Action.NONE, best.score, tau, hidden, evidence)
