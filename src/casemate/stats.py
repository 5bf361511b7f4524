"""Pure mathematics: no I/O, no state. Symbols follow the papers; docstrings map them to equations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal, NamedTuple, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from casemate.types import Background, Document, Float64, Retrieval, Vector

Threshold: TypeAlias = Literal["paper", "gumbel", "exact"]
THRESHOLDS: tuple[str, ...] = get_args(Threshold)
Metric: TypeAlias = Callable[[Float64, Float64], float]
"""Of the scores of members and of non-members."""
Draw: TypeAlias = npt.NDArray[np.int64]
RESAMPLES = 2000

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


def without_documents(retrieval: Retrieval, gone: Callable[[Document], bool]) -> Retrieval:
    """What was found, and the background, as if some of the documents that were found were not there."""
    kept, background = [], retrieval.background
    for hit in retrieval.hits:
        if not gone(hit.document):
            kept.append(hit)
        elif background.n > 2:
            background = without(background, hit.score)
    return Retrieval(tuple(kept), background, retrieval.exhausted)  # ``replace`` takes five times as long


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


def rate(successes: int, trials: int) -> Rate:
    """A share with its interval; arguments and errors as for ``clopper_pearson``.

    >>> [round(x, 4) for x in rate(2, 20)]
    [0.1, 0.0123, 0.317]
    """
    return Rate(successes / max(trials, 1), *clopper_pearson(successes, trials))


def bootstrap(
    metric: Metric, members: npt.ArrayLike, nonmembers: npt.ArrayLike, seed: int, resamples: int = RESAMPLES
) -> Rate:
    """A figure with its percentile interval, members and non-members each drawn from their own (Efron 1979).

    Where nearly every resample gives the end of the figure's range, as for the AUC of a perfect attack, the interval
    shrinks to a point, which says too much.

    Args:
        metric: Called for each resample.
        members: Scores, at least one.
        nonmembers: Scores, at least one.
        seed: The same gives the same interval.
        resamples: How many, at least one.

    Raises:
        ValueError: If there are none of these.
    """
    a, b = np.asarray(members, np.float64), np.asarray(nonmembers, np.float64)
    return _resampled(lambda i, j: metric(a[i], b[j]), (len(a), len(b)), seed, resamples)


def paired_bootstrap(
    metric: Metric,
    off: tuple[npt.ArrayLike, npt.ArrayLike],
    on: tuple[npt.ArrayLike, npt.ArrayLike],
    seed: int,
    resamples: int = RESAMPLES,
) -> Rate:
    """metric(off) - metric(on), as ``bootstrap`` does, with the same candidates drawn in both.

    What makes a candidate easy or hard is in both, and so not in the difference.

    Args:
        metric: Called twice for each resample.
        off: Scores of members and of non-members without the defense.
        on: With it, the same candidates in the same order.
        seed: The same gives the same interval.
        resamples: How many, at least one.

    Raises:
        ValueError: If the lengths differ, or there is nothing to draw.
    """
    (a, b), (c, d) = ([np.asarray(s, np.float64) for s in pair] for pair in (off, on))
    if (len(a), len(b)) != (len(c), len(d)):
        raise ValueError(f"not the same candidates: {len(a)} + {len(b)} without and {len(c)} + {len(d)} with defense")
    return _resampled(lambda i, j: metric(a[i], b[j]) - metric(c[i], d[j]), (len(a), len(b)), seed, resamples)


def _resampled(figure: Callable[[Draw, Draw], float], sizes: tuple[int, int], seed: int, resamples: int) -> Rate:
    n, m = sizes
    if n < 1 or m < 1 or resamples < 1:
        raise ValueError(f"need members, non-members and resamples, got {n}, {m} and {resamples}")
    rng = np.random.default_rng(seed)
    found = [figure(rng.integers(n, size=n), rng.integers(m, size=m)) for _ in range(resamples)]
    low, high = np.quantile(found, [0.025, 0.975])
    return Rate(float(figure(np.arange(n), np.arange(m))), float(low), float(high))


def spacing_test(scores: npt.ArrayLike, block: int) -> float:
    """p-value of the first ``block`` scores standing out together from those that follow (Renyi 1953).

    If the upper tail falls off exponentially, whatever its place and scale, the spacings D_i = i (s_i - s_(i+1)) of
    the best m scores are independent and exponential. With T_J = D_J / mean(D_(J+1) .. D_(m-1)) for a block of J and
    v = m - 1 - J, T_J has the law F(2, 2 v), so p_J = (1 + T_J / v)^-v. It needs neither the number of documents nor
    their moments, only the neighbourhood, so topics that are near together raise no alarm.

    Args:
        scores: The best m of one query, not increasing.
        block: J, from 1 to m - 2.

    Returns:
        In [0, 1]; small: the block stands out. Scores that are all alike give 1.

    Raises:
        ValueError: If the scores increase or are not finite, or the block does not fit.

    >>> round(spacing_test([0.9, 0.5, 0.45, 0.42, 0.4], 1), 4)  # D = .4, .1, .09, .08
    0.0654
    """
    s = np.asarray(scores, np.float64)
    if not np.isfinite(s).all() or (np.diff(s) > 0).any():
        raise ValueError("the spacing test needs finite scores, best first")
    if not 1 <= block <= len(s) - 2:
        raise ValueError(f"a block of {block} does not fit {len(s)} scores; allowed are 1 to {len(s) - 2}")
    D = np.arange(1, len(s)) * -np.diff(s)
    own, rest, v = float(D[block - 1]), float(D[block:].sum()), len(s) - 1 - block
    if not rest:
        return 0.0 if own else 1.0
    return math.exp(-v * math.log1p(own / rest))  # T / v = own / rest


def conformal_p(score: float, benign: npt.ArrayLike) -> float:
    """(1 + #{b >= score}) / (N + 1): how unusual a score is among N benign ones (Vovk et al. 2005).

    Args:
        score: Higher is more suspicious.
        benign: Scores of N harmless queries; the order does not matter.

    Returns:
        In [1 / (N + 1), 1]; small: unusual. If the score is exchangeable with the benign ones, P(p <= a) <= a for
        every a, with no assumption about the law.

    Raises:
        ValueError: If a score is NaN.

    >>> conformal_p(3.0, [1.0, 2.0, 3.0])
    0.5
    """
    b = np.asarray(benign, np.float64)
    if math.isnan(score) or np.isnan(b).any():
        raise ValueError("a score is NaN, which has no rank; give what could not be scored the lowest score")
    return (1 + int((b >= score).sum())) / (len(b) + 1)


def conformal_threshold(benign: npt.ArrayLike, rate: float) -> float:
    """The smallest threshold above which a new harmless score falls with probability ``rate`` at most.

    It is the a-th largest of the N benign scores, a = floor(rate (N + 1)): among N + 1 exchangeable scores the new one
    is one of the a largest with probability a / (N + 1). A score is above it just if its ``conformal_p`` is at most
    ``rate``. For a to be 1, N must be at least 1 / rate - 1; with fewer no finite threshold holds the promise.

    Args:
        benign: Scores of N harmless queries, higher more suspicious; the order does not matter.
        rate: Allowed share of false alarms, in (0, 1).

    Returns:
        The threshold; flag what is strictly above it. Infinite if N is too small: flag nothing.

    Raises:
        ValueError: If the rate is out of its range, or a score is NaN.

    >>> conformal_threshold(range(1, 40), 0.05), conformal_threshold(range(1, 19), 0.05)
    (38.0, inf)
    """
    b = np.asarray(benign, np.float64)
    if not 0 < rate < 1 or np.isnan(b).any():
        raise ValueError(f"need scores that are numbers and a rate in (0, 1), got a rate of {rate}")
    allowed = math.floor(rate * (len(b) + 1) + 1e-9)  # .29 * 100 is 28.999...
    return float(np.sort(b)[-allowed]) if allowed else math.inf


def e_value(p: float, kappa: float = 0.5) -> float:
    """Evidence that may be multiplied over queries: kappa p^(kappa - 1) (Vovk and Wang 2021).

    Its mean is at most 1 if p is uniform or larger. So a product of them, each p valid given what was before, ever
    reaches 1 / a with probability a at most, however often one looks (Ville 1939).

    Args:
        p: A p-value, in [0, 1].
        kappa: In (0, 1); smaller bets more on very small p.

    Returns:
        At least kappa; above 1 speaks against chance; infinite for p = 0.

    Raises:
        ValueError: If an argument is out of its range.

    >>> e_value(0.01), e_value(1)
    (5.0, 0.5)
    """
    if not 0 <= p <= 1 or not 0 < kappa < 1:
        raise ValueError(f"need 0 <= p <= 1 and 0 < kappa < 1, got p={p}, kappa={kappa}")
    return kappa * p ** (kappa - 1) if p else math.inf
