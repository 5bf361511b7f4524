"""Compares two systems on the same canaries: is the second better, worse, or is no difference shown?

Both are asked in turn, several times. An exact paired permutation test decides whether the pass rates differ. If the
two systems are equal, the counts of each canary could be swapped, so the distribution of the summed differences can be
computed. For canaries asked once it is McNemar's exact test (1947). Conclusions beyond these canaries require that they
are a sample of the questions of interest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import NormalDist

import numpy as np

from casemate.maths.stats import Estimate
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, group_by
from casemate.monitor.canaries.run import CanaryRunner
from casemate.protocols import Embedder, Target

REPEATS = 5
SIGNIFICANCE = 0.05
"""Significance level of the test; the interval leaves half of it at each end."""
TOLERANCE = 0.1
"""Difference of the pass rates that the interval must exclude for "no difference"."""
PERSISTENCE = 0.9
"""Of the rank-biased overlap: weight of a rank relative to the rank above it."""


class Conclusion(StrEnum):
    """What a comparison shows about the second system."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "no difference"
    UNCLEAR = "inconclusive"


@dataclass(frozen=True, slots=True)
class CanaryPair:
    """One canary on both systems.

    Attributes:
        asked: Questions to each system.
        passed: Passes of the first and of the second system.
        deviations: Kinds of deviation that only one of them had.
        overlap: Rank-biased overlap of the contexts, in [0, 1]; None: the targets report neither ids nor sources.
    """

    canary: str
    asked: int
    passed: tuple[int, int]
    deviations: tuple[str, ...]
    overlap: float | None
    cosine: float | None

    @property
    def flip(self) -> Conclusion | None:
        """BETTER or WORSE if it always passed on one system and never on the other; else None."""
        flips = {(0, self.asked): Conclusion.BETTER, (self.asked, 0): Conclusion.WORSE}
        return flips.get(self.passed)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The second system against the first.

    Attributes:
        pairs: Canaries with a verdict on both systems.
        left_out: The other canaries, with the number of errors on each system.
        difference: Pass rate of the second minus that of the first, with a 95 % interval.
    """

    pairs: tuple[CanaryPair, ...]
    left_out: dict[str, tuple[int, int]]
    repeats: int
    difference: Estimate
    p: float
    conclusion: Conclusion

    @property
    def flips(self) -> tuple[CanaryPair, ...]:
        """Canaries that always pass on one system and never on the other."""
        return tuple(pair for pair in self.pairs if pair.flip)

    @property
    def rates(self) -> tuple[float, float]:
        """Pass rates of the first and of the second system."""
        total = max(sum(p.asked for p in self.pairs), 1)
        return sum(p.passed[0] for p in self.pairs) / total, sum(p.passed[1] for p in self.pairs) / total

    @property
    def overlap(self) -> float | None:
        """Mean overlap of the contexts."""
        return _mean([p.overlap for p in self.pairs if p.overlap is not None])

    @property
    def cosine(self) -> float | None:
        """Mean cosine of the answers."""
        return _mean([p.cosine for p in self.pairs if p.cosine is not None])


async def compare_targets(runner: CanaryRunner, second: Target, repeats: int = REPEATS) -> Comparison:
    """Asks two systems all canaries, in turn and with the same settings, each at least once.

    Raises:
        ConfigError: If a canary expects what one of the targets does not report.
    """
    runners = {"first": runner, "second": replace(runner, target=second)}
    found: dict[str, list[CanaryResult]] = {"first": [], "second": []}
    for number in range(repeats):
        for name in sorted(found, reverse=bool(number % 2)):  # alternate, so that changes over time affect both
            found[name] += (await runners[name].run(f"compare-{name}-{number}", wording=number)).results
    return compare_results(found["first"], found["second"], runner.embedder)


def compare_results(
    first: Sequence[CanaryResult], second: Sequence[CanaryResult], embedder: Embedder | None = None
) -> Comparison:
    """Compares the results of two systems, each canary asked equally often; see ``compare_targets``."""
    one, other = (group_by(results, lambda r: r.canary) for results in (first, second))
    rows = {name: (one[name], other[name]) for name in one if name in other}
    errors = {name: (_count_errors(a), _count_errors(b)) for name, (a, b) in rows.items()}
    pairs = tuple(_pair(a, b, embedder) for name, (a, b) in rows.items() if not any(errors[name]))
    p = paired_p([pair.passed[1] - pair.passed[0] for pair in pairs])
    difference = _difference(pairs)
    repeats = max((len(a) for a, _ in rows.values()), default=0)
    left_out = {name: counts for name, counts in errors.items() if any(counts)}
    return Comparison(pairs, left_out, repeats, difference, p, _conclude(difference, p))


def paired_p(differences: Sequence[int]) -> float:
    """Two-sided p-value of a sum of paired differences: the share of sign assignments with as large a sum.

    Exact, by convolution. If all nonzero differences are equal in size, it is McNemar's exact test.

    >>> paired_p([1] * 6), paired_p([1, 1, 1, -1]), paired_p([0, 0])
    (0.03125, 0.625, 1.0)
    """
    sizes = [abs(d) for d in differences if d]
    distribution = np.ones(1)
    for size in sizes:
        both = np.zeros(len(distribution) + 2 * size)
        both[: len(distribution)] += distribution / 2
        both[2 * size :] += distribution / 2
        distribution = both  # of the sum, from -sum(sizes) to sum(sizes)
    observed = abs(sum(differences))
    sums = np.abs(np.arange(len(distribution)) - sum(sizes))
    return min(float(distribution[sums >= observed].sum()), 1.0)


def rank_biased_overlap(one: Sequence[str], other: Sequence[str]) -> float:
    """Rank-biased overlap of two rankings, best first (Webber, Moffat and Zobel 2010), in [0, 1]; 1: equal.

    Deviation: the paper's rankings are infinite; these are finite, so the weights are normalized to sum to 1.

    >>> rank_biased_overlap("abc", "abc"), rank_biased_overlap("abc", "xyz"), round(rank_biased_overlap("ab", "ba"), 3)
    (1.0, 0.0, 0.474)
    """
    a, b = list(dict.fromkeys(one)), list(dict.fromkeys(other))
    depth = max(len(a), len(b))
    if not depth:
        return 1.0
    weights = [PERSISTENCE**d for d in range(depth)]
    shared = [len(set(a[: d + 1]) & set(b[: d + 1])) / (d + 1) for d in range(depth)]
    return math.fsum(w * s for w, s in zip(weights, shared, strict=True)) / math.fsum(weights)


def paired_interval(gain: float, loss: float, pairs: int) -> tuple[float, float]:
    """95 % score interval, in [-1, 1], for a difference of paired rates (Tango 1998).

    ``gain`` and ``loss`` are sums of the differences in favor of the second and of the first.

    Deviation: the paper's pairs differ by one or not at all; here they may differ in part, since a canary may pass more
    often on one side. Partial differences vary less, so the interval is conservative.

    >>> [round(x, 4) for x in paired_interval(0, 0, 50)], [round(x, 3) for x in paired_interval(9, 3, 32)]
    ([-0.0713, 0.0713], [-0.027, 0.39])
    """
    if not pairs:
        return -1.0, 1.0

    def score(delta: float) -> float:
        b = 2 * pairs * delta - (gain + loss) + (loss - gain) * delta
        root = math.sqrt(max(b * b + 8 * pairs * loss * delta * (1 - delta), 0.0))
        variance = pairs * (2 * (root - b) / (4 * pairs) + delta * (1 - delta))
        excess = gain - loss - pairs * delta
        return excess / math.sqrt(variance) if variance > 1e-15 else math.copysign(math.inf, excess) if excess else 0.0

    middle, z = (gain - loss) / pairs, NormalDist().inv_cdf(1 - SIGNIFICANCE / 2)
    return _bisect(lambda d: score(d) > z, middle, -1.0), _bisect(lambda d: score(d) < -z, middle, 1.0)


def _bisect(holds: Callable[[float], bool], near: float, far: float) -> float:
    """The point between near and far from which a condition holds; far if it never does."""
    for _ in range(60):
        middle = (near + far) / 2
        near, far = (near, middle) if holds(middle) else (middle, far)
    return far


def _difference(pairs: Sequence[CanaryPair]) -> Estimate:
    """Mean difference of the pass rates, with its interval."""
    d = [(p.passed[1] - p.passed[0]) / p.asked for p in pairs]
    gain, loss = math.fsum(x for x in d if x > 0), -math.fsum(x for x in d if x < 0)
    return Estimate((gain - loss) / max(len(d), 1), *paired_interval(gain, loss, len(d)))


def _conclude(difference: Estimate, p: float) -> Conclusion:
    if p <= SIGNIFICANCE:
        return Conclusion.BETTER if difference.value > 0 else Conclusion.WORSE
    small = -TOLERANCE <= difference.low and difference.high <= TOLERANCE
    return Conclusion.SAME if small else Conclusion.UNCLEAR


def _count_errors(results: Sequence[CanaryResult]) -> int:
    return sum(r.status is CanaryStatus.ERROR for r in results)


def _pair(first: Sequence[CanaryResult], second: Sequence[CanaryResult], embedder: Embedder | None) -> CanaryPair:
    passed = tuple(sum(r.status is CanaryStatus.PASS for r in side) for side in (first, second))
    kinds = [{d.kind for r in side for d in r.deviations} for side in (first, second)]
    both = list(zip(first, second, strict=True))
    contexts = [(a.documents or a.sources, b.documents or b.sources) for a, b in both]
    return CanaryPair(
        first[0].canary,
        len(first),
        (passed[0], passed[1]),
        tuple(sorted(kinds[0] ^ kinds[1])),
        _mean([rank_biased_overlap(a, b) for a, b in contexts if a or b]),
        _mean(answer_cosines([(a.text, b.text) for a, b in both], embedder)) if embedder else None,
    )


def answer_cosines(pairs: Sequence[tuple[str, str]], embedder: Embedder) -> list[float]:
    """Cosines of pairs of answers; 1 for equal texts."""
    texts = list(dict.fromkeys(text for a, b in pairs if a != b for text in (a, b)))
    vectors = dict(zip(texts, embedder.embed([text or " " for text in texts]), strict=True)) if texts else {}
    return [1.0 if a == b else float(vectors[a] @ vectors[b]) for a, b in pairs]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
