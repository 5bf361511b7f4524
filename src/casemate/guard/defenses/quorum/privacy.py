"""Differentially private release of keywords: a histogram with Gaussian noise and a threshold, and its budget.

Each unit adds 1 to the count of at most L keywords. A keyword is released if its count plus Gaussian noise reaches the
threshold tau. Keywords that no unit states are never drawn, so the domain is unbounded. tau bounds the probability that
a keyword of a single unit is released. Stability-based histogram: Korolova et al. 2009, "Releasing Search Queries and
Clicks Privately". With Gaussian noise: Wilkins et al. 2024, "Exact Privacy Analysis of the Gaussian Sparse Histogram
Mechanism", restated in arXiv 2412.10357.

Neighboring collections differ in one unit, added or removed. The budget of a unit counts the keywords that it stated,
over all questions of all clients in a period. A unit without budget is left out, which affects this unit only: Feldman
and Zrnic 2021, "Individual Privacy Accounting via a Renyi Filter" (arXiv 2008.11193), applied to retrieval by
Private-RAG (arXiv 2511.07637). For Gaussian noise the losses of all orders are multiples of one number, and the filter
is valid in terms of Gaussian differential privacy: Koskela et al. 2023, "Individual Privacy Accounting with Gaussian
Differential Privacy" (arXiv 2209.15596).

Guarantee: with kappa = delta / 2 and mu as in ``PrivateHistogram``, everything that is released in a period is
(epsilon, delta)-differentially private for each unit. Without keywords of this unit alone, the releases are
mu-Gaussian-private. The squared losses n / sigma^2 of its n keywords add up to at most T L / sigma^2, which is mu^2.
One of its own keywords is released with probability at most kappa in total.

Deviation: one delta for all answers of a period. Private-RAG converts the Renyi budget of each query.

Deviation: no noise is added to a number. A keyword with count c is drawn with the probability P(c + noise >= tau) =
Phi((c - tau) / sigma), which is the same distribution. So no floating-point noise can reveal a count by its low bits
(Mironov 2012). The probabilities are rounded to a relative error of about 1e-15, the draws to 2^-128.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Self

from casemate.errors import needs

BITS = 128
"""Random bits of one draw, from the operating system."""


@dataclass(frozen=True, slots=True)
class PrivateHistogram:
    """The noise for a budget.

    Attributes:
        epsilon: Budget of a unit in a period, above 0.
        delta: Probability that the bound fails, in (0, 1): one half each for the noise and the threshold.
        words: L: largest number of keywords of one unit in one answer.
        answers: T: number of answers with L keywords each that the budget of a unit covers.
        sigma: Standard deviation of the noise of a count, sqrt(T L) / mu.
        threshold: tau = 1 + sigma Phi^-1((1 - delta / 2)^(1 / (T L))).
    """

    epsilon: float
    delta: float
    words: int
    answers: int
    sigma: float
    threshold: float

    @classmethod
    def of(cls, epsilon: float, delta: float, words: int, answers: int = 1) -> Self:
        """Calibrates the noise by the analytic Gaussian mechanism (Balle and Wang 2018, arXiv 1805.06530).

        Raises:
            MissingExtra: If ``casemate[dp]`` is not installed.
        """
        with needs("casemate[dp]"):
            from dp_accounting import get_sigma_gaussian
        most = words * answers
        sigma = math.sqrt(most) * float(get_sigma_gaussian(epsilon, delta / 2))
        alone = -math.expm1(math.log1p(-delta / 2) / most)  # of one keyword: 1 - (1 - delta / 2)^(1 / (T L))
        return cls(epsilon, delta, words, answers, sigma, 1.0 - sigma * NormalDist().inv_cdf(alone))

    @property
    def most(self) -> int:
        """Budget of a unit in a period: T L keywords."""
        return self.words * self.answers

    @property
    def mu(self) -> float:
        """The bound in terms of Gaussian differential privacy: mu = sqrt(T L) / sigma."""
        return math.sqrt(self.most) / self.sigma

    @property
    def advantage(self) -> float:
        """Largest advantage (true minus false positives) of any attacker on a unit: 2 Phi(mu / 2) - 1 + delta / 2."""
        return min(1.0, 2 * _phi(self.mu / 2) - 1 + self.delta / 2)

    @property
    def auc(self) -> float:
        """Largest AUC of any attacker on a unit: Phi(mu / sqrt 2) + delta / 2 (Dong et al. 2022, arXiv 1905.02383)."""
        return min(1.0, _phi(self.mu / math.sqrt(2)) + self.delta / 2)

    def probability(self, count: int, threshold: float | None = None) -> float:
        """Probability that a keyword with this count is released.

        Args:
            count: Number of units that state it, at least 1.
            threshold: Another threshold; None: tau.
        """
        return _phi((count - (self.threshold if threshold is None else threshold)) / self.sigma)

    def release(self, units: Sequence[Collection[str]]) -> dict[str, int]:
        """Draws the released keywords with their levels: how often tau can be doubled below the noisy count.

        The randomness is the operating system's, never a seed or the jitter's hash: the draws reveal the
        counts.

        Args:
            units: Keywords of each unit, within its budget.

        Raises:
            ValueError: If a unit states more than L keywords.
        """
        if any(len(said) > self.words for said in units):
            raise ValueError(f"a unit states more than {self.words} keywords; keep at most so many of each unit")
        counts = Counter(word for said in units for word in frozenset(said))
        released = {}
        for word, count in counts.items():
            drawn, bound, level = secrets.randbits(BITS), self.threshold, -1
            while drawn < int(math.ldexp(self.probability(count, bound), BITS)):  # one draw is one noise
                bound, level = 2 * bound, level + 1
            if level >= 0:
                released[word] = level
        return released


def _phi(x: float) -> float:
    """Phi, the normal distribution function, exact in relative terms also far below 0."""
    return math.erfc(-x / math.sqrt(2)) / 2
