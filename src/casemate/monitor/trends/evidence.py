"""Whether failures mean something: the arithmetic, without clocks or stores.

A canary fails now and then though nothing is wrong: with probability p0, its flake rate. What has gone wrong makes it
fail with probability p1, of which we only know that it is larger. Each answer multiplies the evidence by p1 / p0 if it
is a failure, else by (1 - p1) / (1 - p0), and evidence below 1 begins anew: the CUSUM of likelihood ratios (Page
1954), here as an e-detector (Shin, Ramdas and Rinaldo 2022, arXiv 2203.03532), whose promise is exact and not
asymptotic. Over canaries, evidence is compared as in the e-BH procedure (Wang and Ramdas 2022), which needs no
independence. Why there is at most one false alarm in so many runs is shown in docs/explanation/canary-alarms.md.

Deviation: the papers know p0. Here it is the upper end of a one-sided interval from the baseline (``flake_bound``).
Deviation: instead of one p1, chosen beforehand, there are three, each with a CUSUM of its own, and their mean counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from casemate.monitor.trends.watched import Clean
from casemate.types import Float64

Sums: TypeAlias = tuple[float, ...]
"""One figure for each of ``ALTERNATIVES``."""

ALTERNATIVES = (0.3, 0.6, 0.95)
"""Failure rates that a broken canary may have; each gets a third of the stake."""
NOTHING: Sums = (0.0,) * len(ALTERNATIVES)
FLOOR = 0.005
"""No canary is held to flake less: a usual baseline cannot tell one failure in 200 from none."""
UNMEASURED = 0.2
"""Flake rate of a canary without a baseline."""
CONFIDENCE = 0.8
"""Of the bound on a canary's flake rate."""
MOST = 1e12
"""Evidence grows no further: enough for any alarm, and no float overflows."""


@lru_cache(maxsize=4096)
def flake_bound(clean: Clean) -> float:
    """A flake rate that the canary's own hardly exceeds: the upper end of a one-sided Clopper-Pearson interval.

    An upper end, because a rate taken too low makes false alarms for ever, and one taken too high only delays true
    ones. Of 80 % and not 95 %: measured, false alarms stay so far below their budget that delay is what is left to buy.

    Args:
        clean: Failures among the runs of the baseline.

    Returns:
        The rate, from ``FLOOR`` to 1.

    >>> [round(flake_bound(Clean(n, 0)), 3) for n in (20, 50, 200, 1000)]
    [0.077, 0.032, 0.008, 0.005]
    """
    if not clean.asked:
        return UNMEASURED
    low, high = clean.failed / clean.asked, 1.0
    while (
        high - low > 1e-9 and clean.failed < clean.asked
    ):  # scipy has it, and takes longer to import than all the rest
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(clean, middle) > 1 - CONFIDENCE else (low, middle)
    return max(high, FLOOR)


def flake_mean(clean: Clean) -> float:
    """A flake rate that is right on average over canaries: the mean of Jeffreys' posterior, Beta(f + 1/2, n - f + 1/2).

    For the number of failures in one run: there the errors of many estimates average out, where upper ends add up.

    >>> [round(flake_mean(Clean(n, 0)), 3) for n in (20, 50, 200)]
    [0.024, 0.01, 0.005]
    """
    return max((clean.failed + 0.5) / (clean.asked + 1), FLOOR) if clean.asked else UNMEASURED


@lru_cache(maxsize=4096)
def ratio(flake: float, failed: int, passed: int) -> Sums:
    """By what some answers multiply the evidence, for each alternative.

    Args:
        flake: The rate p0.
        failed: How many answers failed.
        passed: How many passed.

    Returns:
        (p1 / p0)^failed ((1 - p1) / (1 - p0))^passed. An alternative no larger than p0 says nothing: 1.

    >>> [round(r, 2) for r in ratio(0.01, 1, 0)], [round(r, 2) for r in ratio(0.01, 0, 1)], ratio(0.4, 1, 0)[0]
    ([30.0, 60.0, 95.0], [0.71, 0.4, 0.05], 1.0)
    """
    return tuple(
        min((p / flake) ** failed, MOST) * ((1 - p) / (1 - flake)) ** passed if p > flake else 1.0 for p in ALTERNATIVES
    )


def add(sums: Sums, *ratios: Sums) -> Sums:
    """The CUSUMs after one more run: max(sum, 1) times the ratios of all that the canary was asked in it."""
    total = [max(s, 1.0) for s in sums]
    for factors in ratios:
        total = [min(s * factor, MOST) for s, factor in zip(total, factors, strict=True)]
    return tuple(total)


def evidence(sums: Sums) -> float:
    """The mean of the CUSUMs: what counts."""
    return sum(sums) / len(sums)


def alarms(stakes: Mapping[str, float], budget: float) -> frozenset[str]:
    """The canaries that e-BH picks out: the k largest, for the largest k whose smallest is at least budget / k.

    Args:
        stakes: Evidence times weight of each canary that may be picked; the weights of the whole set add up to 1.
        budget: Runs in which one false alarm is allowed, above 0.

    >>> sorted(alarms({"a": 900.0, "b": 600.0, "c": 1.0}, budget=1000)), sorted(alarms({"a": 900.0}, budget=1000))
    (['a', 'b'], [])
    """
    falling = sorted(stakes, key=lambda name: -stakes[name])
    counts = [k for k, name in enumerate(falling, start=1) if k * stakes[name] >= budget]
    return frozenset(falling[: max(counts, default=0)])


@lru_cache(maxsize=256)
def failures_tail(flake: tuple[float, ...]) -> Float64:
    """P(at least k failures in one run), for k = 0 to the number of canaries, each with its own rate.

    The Poisson-binomial law, exact: the convolution of one coin after another.

    Args:
        flake: One rate for each canary that was asked.

    Returns:
        (canaries + 1,), falling from 1.

    >>> failures_tail((0.01,) * 50)[[1, 2, 5]].round(5).tolist()
    [0.39499, 0.08944, 0.00015]
    """
    law = np.ones(1)
    for p in flake:
        law = np.convolve(law, (1 - p, p))
    tail = np.minimum(np.cumsum(law[::-1])[::-1], 1.0)  # the small ones first, so that none is lost
    tail[0] = 1.0
    return tail


def enough_passes(failed: int, asked: int, least: int, most: int) -> int:
    """How many passes in a row show that a canary which failed is well again.

    As many as a canary would hardly have that still fails as often as it did: (1 - q)^n <= .05, where q is its failure
    rate while it was bad, (failed + 1/2) / (asked + 1).

    Args:
        failed: Runs in which it failed, since it went bad.
        asked: Runs since then, without the passes in a row at the end.
        least: Never fewer.
        most: Never more.

    >>> enough_passes(9, 9, 3, 10), enough_passes(5, 10, 3, 10), enough_passes(3, 10, 3, 10)
    (3, 5, 8)
    """
    rate = (failed + 0.5) / (asked + 1)
    return min(max(math.ceil(math.log(0.05) / math.log1p(-rate)), least), most)


def _at_most(clean: Clean, rate: float) -> float:
    """The binomial probability of no more failures than there were."""
    n = clean.asked
    ways = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(clean.failed + 1))
    return math.fsum(math.exp(way + k * math.log(rate) + (n - k) * math.log1p(-rate)) for k, way in enumerate(ways))
