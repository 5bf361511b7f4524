"""Two systems, asked the same canaries: is one better, worse, or can no difference be shown?

Both are asked in turn, several times. Whether the pass rates differ is decided by an exact paired test: if the two are
alike, each canary's two counts could as well stand the other way round, so the sum of all differences has a law that is
computed, not simulated. For canaries asked once it is McNemar's exact test (1947). What may be concluded beyond the
canaries asked rests on their being drawn like the questions that matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

import numpy as np

from casemate.errors import ConfigError
from casemate.monitor.canaries.canary import Canary
from casemate.monitor.canaries.results import Result, Status, by_canary
from casemate.monitor.canaries.run import CLIENT, run
from casemate.protocols import Embedder, Generator, Target
from casemate.stats import Rate
from casemate.types import DEFAULT_TENANT

REPEATS = 5
LEVEL = 0.05
"""Of the test; and of the interval, half at each end."""
TOLERANCE = 0.1
"""Difference in the pass rate that must be ruled out before no difference counts as shown."""
PERSISTENCE = 0.9
"""Of the rank-biased overlap: the weight of a rank is this share of that above it."""


class Conclusion(StrEnum):
    """What a comparison shows of the second system."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "no difference shown"
    UNCLEAR = "too few to say"


@dataclass(frozen=True, slots=True)
class Pair:
    """One canary on both systems.

    Attributes:
        canary: Its id.
        asked: How often each was asked.
        passed: How often it passed, on the first and on the second.
        deviations: Kinds of deviation that only one of them had.
        overlap: Of their contexts, in [0, 1]; None: no ids nor sources are told.
        alike: Cosine of their answers; None: there is no embedder.
    """

    canary: str
    asked: int
    passed: tuple[int, int]
    deviations: tuple[str, ...]
    overlap: float | None
    alike: float | None

    @property
    def flip(self) -> Conclusion | None:
        """Better or worse, where it always passed on one and never on the other; else None."""
        flips = {(0, self.asked): Conclusion.BETTER, (self.asked, 0): Conclusion.WORSE}
        return flips.get(self.passed)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The second system against the first.

    Attributes:
        pairs: The canaries that both could be judged by.
        left_out: The others, with the number of errors of each.
        repeats: How often each canary was asked.
        difference: Pass rate of the second minus that of the first, with a 95 % interval.
        p: Of the exact paired test, two-sided.
        conclusion: What that shows.
    """

    pairs: tuple[Pair, ...]
    left_out: dict[str, tuple[int, int]]
    repeats: int
    difference: Rate
    p: float
    conclusion: Conclusion

    @property
    def flips(self) -> tuple[Pair, ...]:
        """The canaries that always pass on one and never on the other: these differ, whatever the whole set shows."""
        return tuple(pair for pair in self.pairs if pair.flip)

    @property
    def rates(self) -> tuple[float, float]:
        """Pass rates of the first and of the second."""
        total = max(sum(p.asked for p in self.pairs), 1)
        return sum(p.passed[0] for p in self.pairs) / total, sum(p.passed[1] for p in self.pairs) / total

    @property
    def overlap(self) -> float | None:
        """Mean overlap of the contexts."""
        return _mean([p.overlap for p in self.pairs if p.overlap is not None])

    @property
    def alike(self) -> float | None:
        """Mean cosine of the answers."""
        return _mean([p.alike for p in self.pairs if p.alike is not None])


async def compare(  # noqa: PLR0913  as run
    canaries: Sequence[Canary],
    first: Target,
    second: Target,
    *,
    repeats: int = REPEATS,
    k: int = 5,
    embedder: Embedder | None = None,
    concurrency: int = 8,
    timeout_s: float = 30.0,
    tenant: str = DEFAULT_TENANT,
    client: str = f"{CLIENT}-{{canary}}-{{run}}",
    judge: Generator | None = None,
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Asks both systems all canaries, in turn.

    Args:
        canaries: With ids that differ.
        first: What is.
        second: What is compared with it.
        repeats: How often each is asked, at least 1.
        k: As in ``run``, and so are those that follow.
        embedder: Compares meanings, and the answers of the two.
        concurrency: Questions at the same time.
        timeout_s: Longest time for one.
        tenant: Whose documents.
        client: The name under which they are asked.
        judge: Judges behaviours without a name.
        tolerance: Difference in the pass rate, above 0, that must be ruled out before none counts as shown.

    Raises:
        ConfigError: If a canary expects what one of the two cannot tell, or a number is out of range.
    """
    if repeats < 1 or not 0 < tolerance < 1:
        raise ConfigError(f"repeats={repeats}, tolerance={tolerance}; at least 1, and between 0 and 1")
    found: dict[str, list[Result]] = {"first": [], "second": []}
    for number in range(repeats):
        for name in sorted(found, reverse=bool(number % 2)):  # in turn, so that what changes with time hits both
            done = await run(
                canaries,
                first if name == "first" else second,
                run_id=f"compare-{name}-{number}",
                k=k,
                embedder=embedder,
                concurrency=concurrency,
                timeout_s=timeout_s,
                tenant=tenant,
                client=client,
                judge=judge,
            )
            found[name] += done.results
    return judged(found["first"], found["second"], embedder, tolerance)


def judged(
    first: Sequence[Result], second: Sequence[Result], embedder: Embedder | None = None, tolerance: float = TOLERANCE
) -> Comparison:
    """What the results of two systems show, each canary asked equally often.

    Args:
        first: Of what is.
        second: Of what is compared with it.
        embedder: Compares the answers.
        tolerance: As in ``compare``.
    """
    one, other = by_canary(first), by_canary(second)
    rows = {name: (one[name], other[name]) for name in one if name in other}
    errors = {name: (_errors(a), _errors(b)) for name, (a, b) in rows.items()}
    answers = _Answers(embedder)
    pairs = tuple(_pair(a, b, answers) for name, (a, b) in rows.items() if not any(errors[name]))
    p = paired_p([pair.passed[1] - pair.passed[0] for pair in pairs])
    difference = _difference(pairs)
    repeats = max((len(a) for a, _ in rows.values()), default=0)
    left_out = {name: counts for name, counts in errors.items() if any(counts)}
    return Comparison(pairs, left_out, repeats, difference, p, _conclusion(difference, p, tolerance))


def paired_p(differences: Sequence[int]) -> float:
    """Two-sided p-value of a sum of paired differences: the share of all choices of signs that give as large a sum.

    Exact, by convolution. Where all that differ do so by the same amount, it is McNemar's exact test.

    Args:
        differences: One for each pair, whole numbers.

    >>> paired_p([1] * 6), paired_p([1, 1, 1, -1]), paired_p([0, 0])
    (0.03125, 0.625, 1.0)
    """
    sizes = [abs(d) for d in differences if d]
    law = np.ones(1)
    for size in sizes:
        both = np.zeros(len(law) + 2 * size)
        both[: len(law)] += law / 2
        both[2 * size :] += law / 2
        law = both  # of the sum, from -sum(sizes) to sum(sizes)
    reached = abs(sum(differences))
    sums = np.abs(np.arange(len(law)) - sum(sizes))
    return min(float(law[sums >= reached].sum()), 1.0)


def rank_biased_overlap(one: Sequence[str], other: Sequence[str], persistence: float = PERSISTENCE) -> float:
    """How alike two rankings are, high ranks counting most (Webber, Moffat and Zobel 2010), in [0, 1].

    Deviation: the paper's rankings never end; these do, so the weights are made to add up to 1 and equal ones have 1.

    Args:
        one: Ids, best first.
        other: The same.
        persistence: Weight of a rank as a share of that above it, in (0, 1).

    >>> rank_biased_overlap("abc", "abc"), rank_biased_overlap("abc", "xyz"), round(rank_biased_overlap("ab", "ba"), 3)
    (1.0, 0.0, 0.474)
    """
    a, b = list(dict.fromkeys(one)), list(dict.fromkeys(other))
    depth = max(len(a), len(b))
    if not depth:
        return 1.0
    weights = [persistence**d for d in range(depth)]
    shared = [len(set(a[: d + 1]) & set(b[: d + 1])) / (d + 1) for d in range(depth)]
    return math.fsum(w * s for w, s in zip(weights, shared, strict=True)) / math.fsum(weights)


def paired_interval(gain: float, loss: float, pairs: int) -> tuple[float, float]:
    """95 % score interval for a difference of paired rates (Tango 1998).

    Deviation: the paper's pairs differ wholly or not at all; here they may differ in part, as a canary does that passes
    more often on one side. Such parts vary less than whole ones, so the interval errs on the safe side.

    Args:
        gain: Sum of the differences in favour of the second.
        loss: Sum of those in favour of the first.
        pairs: How many pairs there are.

    Returns:
        Both ends, in [-1, 1].

    >>> [round(x, 4) for x in paired_interval(0, 0, 50)], [round(x, 3) for x in paired_interval(9, 3, 32)]
    ([-0.0713, 0.0713], [-0.027, 0.39])
    """
    if not pairs:
        return -1.0, 1.0

    def score(delta: float) -> float:
        b = 2 * pairs * delta - (gain + loss) + (loss - gain) * delta
        root = math.sqrt(max(b * b + 8 * pairs * loss * delta * (1 - delta), 0.0))
        variance = pairs * (2 * (root - b) / (4 * pairs) + delta * (1 - delta))
        away = gain - loss - pairs * delta
        return away / math.sqrt(variance) if variance > 1e-15 else math.copysign(math.inf, away) if away else 0.0

    middle, z = (gain - loss) / pairs, NormalDist().inv_cdf(1 - LEVEL / 2)
    return _crossing(lambda d: score(d) > z, middle, -1.0), _crossing(lambda d: score(d) < -z, middle, 1.0)


def _crossing(beyond: Callable[[float], bool], near: float, far: float) -> float:
    """Where, from near to far, something begins to hold; far, if it never does."""
    for _ in range(60):
        middle = (near + far) / 2
        near, far = (near, middle) if beyond(middle) else (middle, far)
    return far


def _difference(pairs: Sequence[Pair]) -> Rate:
    """Mean difference of the pass rates, with its interval."""
    d = [(p.passed[1] - p.passed[0]) / p.asked for p in pairs]
    gain, loss = math.fsum(x for x in d if x > 0), -math.fsum(x for x in d if x < 0)
    return Rate((gain - loss) / max(len(d), 1), *paired_interval(gain, loss, len(d)))


def _conclusion(difference: Rate, p: float, tolerance: float) -> Conclusion:
    if p <= LEVEL:
        return Conclusion.BETTER if difference.value > 0 else Conclusion.WORSE
    small = -tolerance <= difference.low and difference.high <= tolerance
    return Conclusion.SAME if small else Conclusion.UNCLEAR


def _errors(results: Sequence[Result]) -> int:
    return sum(r.status is Status.ERROR for r in results)


def _pair(first: Sequence[Result], second: Sequence[Result], answers: _Answers) -> Pair:
    passed = tuple(sum(r.status is Status.PASS for r in side) for side in (first, second))
    kinds = [{d.kind for r in side for d in r.deviations} for side in (first, second)]
    both = list(zip(first, second, strict=True))
    told = [(_context(a), _context(b)) for a, b in both]
    return Pair(
        first[0].canary,
        len(first),
        (passed[0], passed[1]),
        tuple(sorted(kinds[0] ^ kinds[1])),
        _mean([rank_biased_overlap(a, b) for a, b in told if a or b]),
        answers.alike([(a.text, b.text) for a, b in both]),
    )


def _context(result: Result) -> Sequence[str]:
    return result.documents or result.sources


class _Answers:
    """Compares answers, each embedded once."""

    def __init__(self, embedder: Embedder | None) -> None:
        self._embedder = embedder
        self._known: dict[str, np.ndarray] = {}

    def alike(self, pairs: Sequence[tuple[str, str]]) -> float | None:
        """Mean cosine of pairs of texts; equal ones have 1."""
        if self._embedder is None:
            return None
        new = list(dict.fromkeys(t for a, b in pairs if a != b for t in (a, b) if t not in self._known))
        if new:
            self._known |= dict(zip(new, self._embedder.embed([t or " " for t in new]), strict=True))
        return _mean([1.0 if a == b else float(self._known[a] @ self._known[b]) for a, b in pairs])


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
