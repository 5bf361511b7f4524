"""Pure mathematics: no I/O, no state. Symbols follow the papers; docstrings map them to equations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal, NamedTuple, Self, TypeAlias, get_args

import numpy as np

from casemate.types import Background, Float64, Vector

Threshold: TypeAlias = Literal["paper", "gumbel", "exact"]
THRESHOLDS: tuple[str, ...] = get_args(Threshold)

MIN_VARIANCE = 1e-12
"""A smaller variance is rounding noise, of documents that are all alike."""


class Rate(NamedTuple):
    """A measured figure with both ends of its 95 % interval."""

    value: float
    low: float
    high: float


def standard_threshold(n: int, rho: float, form: Threshold = "paper") -> float:
    """Upper limit, in standard deviations above the mean, for the largest of n normal similarities.

    ``paper``: Mirabel, Algorithm 1, lines 10-12: sqrt(2 ln n) + c / sqrt(2 ln n), c = -ln(-ln(1 - rho)).
    ``gumbel``: the same with the textbook location b_n = sqrt(2 ln n) - (ln ln n + ln 4 pi) / (2 sqrt(2 ln n)).
    ``exact``: the quantile itself, the z with Phi(z)^n = 1 - rho.

    Deviation: the paper's Eq. 7 carries a stray factor d and puts the whole correction under the root; its
    Algorithm 1 drops the correction. ``paper`` follows the algorithm, whose true level at rho = .05 is .003.

    Args:
        n: Number of documents, at least 2.
        rho: Wanted probability, in (0, 1), that chance alone passes the limit.
        form: Which of the three.

    Returns:
        The limit in standard deviations; grows with n, falls with rho.

    Raises:
        ValueError: If an argument is out of its range.

    >>> [round(standard_threshold(3633, 0.05, form), 3) for form in ("paper", "gumbel", "exact")]
    [4.783, 4.21, 4.187]
    """
    if n < 2 or not 0 < rho < 1:
        raise ValueError(f"need n > 1 and 0 < rho < 1, got n={n}, rho={rho}")
    if form == "exact":
        return -NormalDist().inv_cdf(-math.expm1(math.log1p(-rho) / n))
    scale = math.sqrt(2 * math.log(n))
    c = -math.log(-math.log1p(-rho))
    if form == "paper":
        return scale + c / scale
    if form == "gumbel":
        return scale - (math.log(math.log(n)) + math.log(4 * math.pi)) / (2 * scale) + c / scale
    raise ValueError(f"no threshold is called {form!r}; known: {', '.join(THRESHOLDS)}")


def without(background: Background, score: float) -> Background:
    """The background of S_q without one similarity (Mirabel, Algorithm 1, line 9), free of cancellation.

    Args:
        background: Of all n similarities, n at least 2.
        score: The one to leave out.

    Returns:
        Mean and population standard deviation of the other n - 1.
    """
    n = background.n
    mean = (n * background.mean - score) / (n - 1)
    squares = n * background.std**2 - (score - mean) ** 2 * (n - 1) / n
    return Background(n - 1, mean, math.sqrt(max(squares / (n - 1), 0.0)))


@dataclass(frozen=True, slots=True)
class CorpusMoments:
    """Count, mean and centred scatter of the corpus embeddings.

    They hold the background of *every* query exactly: over the corpus, mean(S_q) = q.m and
    var(S_q) = q' M2 q / n. So Mirabel needs no scan, and any index that returns a top k can be guarded.
    Moments of disjoint corpora add, and what was added can be taken away again.

    Attributes:
        n: Number of embeddings.
        mean: Their mean m, (dim,).
        scatter: M2 = sum over i of (x_i - m)(x_i - m)', (dim, dim), symmetric, float64.
    """

    n: int
    mean: Float64
    scatter: Float64

    @classmethod
    def empty(cls, dim: int) -> Self:
        """The moments of no embeddings."""
        return cls(0, np.zeros(dim), np.zeros((dim, dim)))

    @classmethod
    def of(cls, E: Vector) -> Self:
        """The moments of the rows of E, (n, dim), accumulated in float64."""
        if not len(E):
            return cls.empty(E.shape[1])
        X = E.astype(np.float64)
        mean = X.mean(axis=0)
        X -= mean
        return cls(len(X), mean, X.T @ X)

    def __add__(self, other: CorpusMoments) -> CorpusMoments:
        """The moments of both together (Chan, Golub and LeVeque 1983)."""
        if not self.n or not other.n:
            return other if other.n else self
        n = self.n + other.n
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.n / n)
        scatter = self.scatter + other.scatter + np.outer(delta, delta) * (self.n * other.n / n)
        return CorpusMoments(n, mean, scatter)

    def __sub__(self, other: CorpusMoments) -> CorpusMoments:
        """What is left when embeddings that were added, with the same bits, are taken away.

        Raises:
            ValueError: If more is taken away than there is.
        """
        if other.n > self.n:
            raise ValueError(f"cannot take {other.n} embeddings out of {self.n}")
        n = self.n - other.n
        if not n:
            return CorpusMoments.empty(len(self.mean))
        mean = (self.n * self.mean - other.n * other.mean) / n
        delta = other.mean - mean
        scatter = self.scatter - other.scatter - np.outer(delta, delta) * (n * other.n / self.n)
        return CorpusMoments(n, mean, scatter)

    def background(self, q: Vector) -> Background:
        """Size, mean and standard deviation of the similarities to q, (dim,), at O(dim^2) whatever n is."""
        x = q.astype(np.float64)
        if not self.n:
            return Background(0, 0.0, 0.0)
        variance = float(x @ _dsymv()(1.0, self.scatter.T, x)) / self.n
        return Background(self.n, float(x @ self.mean), math.sqrt(variance) if variance > MIN_VARIANCE else 0.0)

    @property
    def square_norm(self) -> float:
        """Sum of the squared norms of all embeddings: n exactly, as long as all of them are unit vectors."""
        return float(np.trace(self.scatter)) + self.n * float(self.mean @ self.mean)


@cache
def _dsymv() -> Callable[..., Float64]:
    """BLAS's product of a symmetric matrix, (dim, dim) in Fortran's order, with a vector.

    It reads half the matrix, so a decision costs half of what it costs by ``@``. Imported when first needed, because
    the import takes 0.2 CPU-s.
    """
    from scipy.linalg.blas import dsymv

    product: Callable[..., Float64] = dsymv
    return product


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact two-sided interval for a rate (Clopper and Pearson 1934).

    Args:
        successes: Number of events, 0 to trials.
        trials: Number of trials, at least 1.
        confidence: Coverage, in (0, 1).

    Returns:
        Lower and upper end, in [0, 1].

    Raises:
        ValueError: If an argument is out of its range.

    >>> tuple(round(x, 4) for x in clopper_pearson(2, 20))
    (0.0123, 0.317)
    """
    if trials < 1 or not 0 <= successes <= trials or not 0 < confidence < 1:
        raise ValueError(f"need 0 <= successes <= trials, trials > 0, got {successes} of {trials}")
    from scipy.special import betaincinv  # 0.3 CPU-s to import: only where an interval is asked for

    alpha = (1 - confidence) / 2
    low = float(betaincinv(successes, trials - successes + 1, alpha)) if successes else 0.0
    high = float(betaincinv(successes + 1, trials - successes, 1 - alpha)) if successes < trials else 1.0
    return low, high
