"""Sequential tests on failures of canaries: CUSUM, e-values, and the number of failures in one run.

A canary fails now and then although nothing is wrong: with probability p0, its flake rate. A real change makes it fail
with some larger probability p1. Each answer multiplies the evidence by p1 / p0 if it is a failure, else by
(1 - p1) / (1 - p0); evidence of at most 1 restarts at 1. This is the CUSUM of likelihood ratios (Page 1954), used as an
e-detector (Shin, Ramdas and Rinaldo 2022, arXiv 2203.03532), whose false-alarm guarantee is exact, not asymptotic.
Across canaries, evidence is compared by the e-BH procedure (Wang and Ramdas 2022), which needs no independence. The
bound on false alarms is derived in docs/explanation/canary-alarms.md.

Pure functions: no clock, no store.

Deviation: the papers assume a known p0. Here it is unknown, with a distribution from the baselines of the whole set
(``failure_chance``), integrated out: each answer's p0 is its predictive probability. For one canary alone, 20 runs
without a failure would allow evidence of at most (1 - p1)^-20, or 87 for p1 = .2.
Deviation: instead of one p1 fixed in advance there are several; the mean of their likelihood ratios is the evidence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from casemate.maths.special import log_beta
from casemate.maths.stats import clopper_pearson
from casemate.types import Float64

Cusums: TypeAlias = tuple[float, ...]
"""One value per alternative in ``ALTERNATIVES``."""

ALTERNATIVES = (0.2, 0.5, 0.95)
"""Assumed failure rates p1 of a broken canary."""
ALTERNATIVE_WEIGHTS = (0.5, 0.25, 0.25)
"""Their weights: the lowest rate is the slowest to detect."""
ZERO_CUSUMS: Cusums = (0.0,) * len(ALTERNATIVES)
MIN_FLAKE_RATE = 0.005
"""Lower limit of p0: a usual baseline cannot distinguish one failure in 200 from none."""
LASTING_CONFIDENCE = 0.975
"""Confidence of each of the two bounds on how often failures last, so that both hold with 95 %."""
CONCENTRATIONS = (120.0, 1000.0, 10_000.0)
"""How alike the flake rates of a set are: runs of a canary's own baseline that its prior is worth; equally probable."""
PRIOR_MEANS = tuple(1 / (1 + math.exp(5.3 - 0.354 * i)) for i in range(16))
"""Mean flake rates of a set, from .005 to .5, equally probable."""
OUTLIERS = 0.0005
"""Prior probability that a canary's flake rate is unlike those of its set, so that only its own baseline counts."""
REPEAT_TRIALS = 20
"""Repetitions of failures that the assumed repeat-failure rate is worth, beside those of the baseline."""
UNMEASURED_FLAKE_RATE = 0.2
"""p0 of a canary without a baseline."""
CONFIDENCE = 0.8
"""Confidence of the bound on a flake rate."""
MAX_EVIDENCE = 1e12
"""Cap of the evidence: above every alarm threshold, and safe from overflow."""


class FlakeCounts(NamedTuple):
    """Baseline counts of one canary: how often it failed although nothing was wrong.

    Attributes:
        next_asked: Runs that followed a failed one.
        next_failed: Failed runs among these.
        repeats: Failures that were repeated within their run; ``repeats_failed`` failed again.
    """

    asked: int = 0
    failed: int = 0
    next_asked: int = 0
    next_failed: int = 0
    repeats: int = 0
    repeats_failed: int = 0

    @property
    def fresh(self) -> tuple[int, int]:
        """Runs that did not follow a failed one, and failures among them: where a failure begins."""
        return self.asked - self.next_asked, self.failed - self.next_failed

    @property
    def ended_failing(self) -> bool:
        """Whether its last run failed: the only failure that no run followed.

        Unknown for baselines of versions that did not measure what followed failures; False then.
        """
        return self.failed > self.next_asked and any((self.next_asked, self.repeats))

    @property
    def next_bound(self) -> float:
        """Bound on the rate at which the run after a failed one fails; 0 if no failure lasted until then."""
        return _lasting_bound(self.next_failed, self.next_asked)

    @property
    def repeat_bound(self) -> float:
        """Bound on the rate at which a repetition fails; 0 if none failed."""
        return _lasting_bound(self.repeats_failed, self.repeats)


@lru_cache(maxsize=4096)
def flake_rate_bound(flakes: FlakeCounts) -> float:
    """Upper end of a one-sided Clopper-Pearson interval for the flake rate: p0 of repetitions.

    Alternatives at or below it are not tested; it is at least ``MIN_FLAKE_RATE``. The confidence is 80 %, not 95 %:
    measured, false alarms remain far below their budget, and the delay is shorter.

    >>> [round(flake_rate_bound(FlakeCounts(n, 0)), 3) for n in (20, 50, 200, 1000)]
    [0.077, 0.032, 0.008, 0.005]
    """
    asked, failed = flakes.fresh
    if not asked:
        return UNMEASURED_FLAKE_RATE
    _, high = clopper_pearson(failed, asked, 2 * CONFIDENCE - 1)
    return max(high, MIN_FLAKE_RATE)


@lru_cache(maxsize=65_536)
def failure_chance(own: FlakeCounts, flakes: tuple[FlakeCounts, ...], failed: int, passed: int) -> float:
    """Predictive probability that an answer fails although nothing has changed, at least ``MIN_FLAKE_RATE``.

    The flake rates of a set come from one Beta distribution, with unknown mean and concentration, or, with probability
    ``OUTLIERS``, from Beta(1/2, 1/2). So the baselines of all canaries tell what is usual, and its own, which is among
    them, whether a canary is. The model is an empirical-Bayes mixture (Efron and Morris 1973), here fully integrated.
    Failures and passes count since the evidence last restarted.

    >>> alike = (FlakeCounts(20, 0),) * 40 + (FlakeCounts(20, 1),) * 10
    >>> [round(failure_chance(FlakeCounts(20, f), alike, 0, 0), 3) for f in (0, 1, 5)]
    [0.01, 0.012, 0.2]
    """
    asked, count = own.fresh
    if not asked:
        return UNMEASURED_FLAKE_RATE
    parts = _posterior_parts(asked, count, tuple(f.fresh for f in flakes))
    weights = [w + log_beta(a + failed, b + passed) - log_beta(a, b) for a, b, w in parts]
    most = max(weights)
    scaled = [math.exp(w - most) for w in weights]
    mean = sum(w * (a + failed) / (a + b + failed + passed) for (a, b, _), w in zip(parts, scaled, strict=True))
    return max(mean / sum(scaled), MIN_FLAKE_RATE)


@lru_cache(maxsize=4096)
def _posterior_parts(
    asked: int, failed: int, baselines: tuple[tuple[int, int], ...]
) -> tuple[tuple[float, float, float], ...]:
    """Posterior of a flake rate as a mixture of Beta distributions: (a, b, log weight) of each."""
    inside = [
        (a + failed, b + asked - failed, w + math.log1p(-OUTLIERS) + _log_marginal(a, b, asked, failed))
        for (a, b), w in zip(_priors(), _prior_weights(baselines, (asked, failed)), strict=True)
    ]
    outside = math.log(OUTLIERS) + _log_marginal(0.5, 0.5, asked, failed)
    return (*inside, (failed + 0.5, asked - failed + 0.5, outside))


@lru_cache(maxsize=256)
def _prior_weights(baselines: tuple[tuple[int, int], ...], without: tuple[int, int]) -> tuple[float, ...]:
    """Log probability of each prior, given the baselines of all canaries but one."""
    counts = Counter(baselines)
    counts[without] -= 1
    found = []
    for a, b in _priors():
        total = 0.0
        for (asked, failed), canaries in counts.items():
            inside = math.log1p(-OUTLIERS) + _log_marginal(a, b, asked, failed)
            outside = math.log(OUTLIERS) + _log_marginal(0.5, 0.5, asked, failed)
            most = max(inside, outside)
            total += canaries * (most + math.log(math.exp(inside - most) + math.exp(outside - most)))
        found.append(total)
    most = max(found)
    norm = most + math.log(sum(math.exp(w - most) for w in found))
    return tuple(w - norm for w in found)


@lru_cache(maxsize=1)
def _priors() -> tuple[tuple[float, float], ...]:
    """Parameters of the Beta distributions that a set's flake rates may come from."""
    return tuple((m * s, (1 - m) * s) for m in PRIOR_MEANS for s in CONCENTRATIONS)


def _log_marginal(a: float, b: float, asked: int, failed: int) -> float:
    """Log probability of a baseline under Beta(a, b), without the binomial coefficient, which cancels."""
    return log_beta(a + failed, b + asked - failed) - log_beta(a, b)


@lru_cache(maxsize=256)
def answers_after_failures(flakes: tuple[FlakeCounts, ...]) -> FlakeCounts:
    """The counts of all canaries together; those after failures say how long the cause of a failure lasts.

    Canaries that never passed are left out: nothing shows that their failures end. All others count, also those that
    failed in most runs. Without them the longest failures would be missing, and the rates too low. Repetitions and next
    runs are counted separately: a cause may last some seconds and not until the next run.

    >>> found = answers_after_failures((FlakeCounts(20, 9, 8, 7, 9, 0), FlakeCounts(20, 20, 19, 19, 20, 20)))
    >>> found, round(found.next_bound, 3), found.repeat_bound
    (FlakeCounts(asked=20, failed=9, next_asked=8, next_failed=7, repeats=9, repeats_failed=0), 0.997, 0.0)
    """
    rows = [f for f in flakes if f.failed < f.asked]
    return FlakeCounts(*map(sum, zip(*rows, strict=True)))


@lru_cache(maxsize=4096)
def _lasting_bound(failed: int, asked: int) -> float:
    """Upper end of a one-sided Clopper-Pearson interval; 0 without a failure."""
    return clopper_pearson(failed, asked, 2 * LASTING_CONFIDENCE - 1)[1] if failed else 0.0


@lru_cache(maxsize=4096)
def repeat_ratios(rate: float, trials: int, failed: int, passed: int) -> Cusums:
    """Likelihood ratio of a run's repetitions, for each alternative, if no repetition of the baseline failed.

    The repeat-failure rate of a run is unknown: it has a Beta distribution with mean ``rate`` and the weight of
    ``REPEAT_TRIALS`` repetitions, updated by the ``trials`` of the baseline, and is integrated out.

    >>> [round(r, 2) for r in repeat_ratios(0.1, 20, 1, 4)]
    [2.2, 0.84, 0.0]
    """
    a, b = REPEAT_TRIALS * rate, REPEAT_TRIALS * (1 - rate) + trials
    null = math.exp(log_beta(a + failed, b + passed) - log_beta(a, b))
    return tuple(min(p**failed * (1 - p) ** passed / null, MAX_EVIDENCE) for p in ALTERNATIVES)


def flake_rate_mean(flakes: FlakeCounts) -> float:
    """Mean of the Jeffreys posterior of the flake rate, Beta(f + 1/2, n - f + 1/2).

    Used for the number of failures in one run, where estimation errors of many canaries average out; upper ends would
    add up.

    >>> [round(flake_rate_mean(FlakeCounts(n, 0)), 3) for n in (20, 50, 200)]
    [0.024, 0.01, 0.005]
    """
    asked, failed = flakes.fresh
    return max((failed + 0.5) / (asked + 1), MIN_FLAKE_RATE) if asked else UNMEASURED_FLAKE_RATE


@lru_cache(maxsize=65_536)
def likelihood_ratios(flake_rate: float, failed: int, passed: int, least: float = 0.0) -> Cusums:
    """Likelihood ratio of some answers, for each alternative: (p1 / p0)^failed ((1 - p1) / (1 - p0))^passed.

    It is 1 for an alternative that is not above p0 (``flake_rate``) and ``least``.

    >>> [round(r, 2) for r in likelihood_ratios(0.01, 1, 0)], [round(r, 2) for r in likelihood_ratios(0.01, 0, 1)]
    ([20.0, 50.0, 95.0], [0.81, 0.51, 0.05])
    >>> likelihood_ratios(0.4, 1, 0)[0]
    1.0
    """
    return tuple(
        min((p / flake_rate) ** failed, MAX_EVIDENCE) * ((1 - p) / (1 - flake_rate)) ** passed
        if p > max(flake_rate, least)
        else 1.0
        for p in ALTERNATIVES
    )


def update_cusums(cusums: Cusums, *ratios: Cusums) -> Cusums:
    """CUSUMs after one more run: all likelihood ratios of the run times the CUSUMs, which restart together at 1."""
    total = list(cusums) if evidence(cusums) > 1 else [1.0] * len(ALTERNATIVES)
    for factors in ratios:
        total = [min(s * factor, MAX_EVIDENCE) for s, factor in zip(total, factors, strict=True)]
    return tuple(total)


def evidence(cusums: Cusums) -> float:
    """Weighted mean of the CUSUMs: the evidence against "nothing has changed"."""
    return sum(weight * s for weight, s in zip(ALTERNATIVE_WEIGHTS, cusums, strict=True))


def ebh_rejections(weighted_evidence: Mapping[str, float], runs_per_false_alarm: float) -> frozenset[str]:
    """Canaries selected by e-BH: the k largest, for the largest k whose smallest reaches runs_per_false_alarm / k.

    Each value is evidence times weight; the weights of the whole set sum to 1.

    >>> sorted(ebh_rejections({"a": 900.0, "b": 600.0, "c": 1.0}, 1000)), sorted(ebh_rejections({"a": 900.0}, 1000))
    (['a', 'b'], [])
    """
    descending = sorted(weighted_evidence, key=lambda name: -weighted_evidence[name])
    counts = [k for k, name in enumerate(descending, start=1) if k * weighted_evidence[name] >= runs_per_false_alarm]
    return frozenset(descending[: max(counts, default=0)])


@lru_cache(maxsize=256)
def failures_tail(flake_rates: tuple[float, ...]) -> Float64:
    """P(at least k failures in one run) for k = 0 to the number of canaries, each with its own flake rate.

    The exact Poisson-binomial distribution, by convolution: (canaries + 1,), decreasing from 1.

    >>> failures_tail((0.01,) * 50)[[1, 2, 5]].round(5).tolist()
    [0.39499, 0.08944, 0.00015]
    """
    distribution = np.ones(1)
    for p in flake_rates:
        distribution = np.convolve(distribution, (1 - p, p))
    tail = np.minimum(np.cumsum(distribution[::-1])[::-1], 1.0)  # smallest terms first, for precision
    tail[0] = 1.0
    return tail


def passes_to_recover(failed: int, asked: int, least: int, most: int) -> int:
    """Consecutive passes, between two limits, after which an alarmed canary counts as recovered.

    The smallest n with (1 - q)^n <= .05, where q = (failed + 1/2) / (asked + 1) is the failure rate while the canary
    was failing: since the failures began, without the passes at the end. A canary that still fails at that rate hardly
    passes n times in a row.

    >>> passes_to_recover(9, 9, 3, 10), passes_to_recover(5, 10, 3, 10), passes_to_recover(3, 10, 3, 10)
    (3, 5, 8)
    """
    rate = (failed + 0.5) / (asked + 1)
    return min(max(math.ceil(math.log(0.05) / math.log1p(-rate)), least), most)
