"""Pooled sequential test over all canaries of a set: detects that all of them fail a little more often.

The tests of single canaries (``sequential_tests``) miss a change that is small for each canary. Here the failures of
all canaries are pooled: for each window of the last runs, the number of failed canaries is compared with the baseline
by a likelihood ratio. Under "nothing has changed" the pooled rate p has the posterior of the baseline, Beta(f + 1/2,
n - f + 1/2), and the count is beta-binomial; under the alternative the rate is r p, with r from ``RATIOS``. So the
uncertainty of a short baseline is integrated out. The ratios of all windows that begin with the same run are a
martingale with mean 1 if nothing has changed and canaries fail independently. So the probability that one of them ever
exceeds c is at most 1 / c (Ville 1939), and at most T / c for all windows that begin in T runs: one false alarm in c
runs.

A canary counts once per run, by its first answer: repetitions may fail for the same passing cause.

Pure functions: no clock, no store. Own work; mixtures of likelihood ratios as in Robbins (1970).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from casemate.types import Float64

RATIOS = (1.5, 2.5, 5.0, 10.0)
"""Assumed increases of the failure rate, equally weighted."""
MAX_RATE = 0.95
"""Largest failure rate under the alternative."""
LONGEST_WINDOW = 34
"""Largest number of last runs that are pooled."""
GRID = 400
"""Points of the integral over the baseline rate."""


class PooledCounts(NamedTuple):
    """Canaries that were asked, and how many of them failed."""

    asked: int
    failed: int


def pooled_evidence(runs: Sequence[PooledCounts], baseline: PooledCounts) -> float:
    """Largest likelihood ratio over the windows that end with the last run; the baseline is that of the same canaries.

    >>> runs = [PooledCounts(50, 0), PooledCounts(50, 5), PooledCounts(50, 6)]
    >>> pooled_evidence(runs, PooledCounts(1000, 10)) > 16_000 > pooled_evidence(runs[:1], PooledCounts(1000, 10))
    True
    """
    found, asked, failed = 0.0, 0, 0
    for run in reversed(runs[-LONGEST_WINDOW:]):
        asked, failed = asked + run.asked, failed + run.failed
        if run.failed:  # a window gains nothing by a first run without failures
            found = max(found, _ratio(asked, failed, baseline))
    return found


@lru_cache(maxsize=65_536)
def _ratio(asked: int, failed: int, baseline: PooledCounts) -> float:
    """Likelihood ratio of a count, with the baseline rate integrated out."""
    log_p, weights = _posterior(baseline)
    null = _log_mean(_log_binomial(log_p, asked, failed), weights)
    total = 0.0
    for ratio in RATIOS:
        raised = np.minimum(log_p + math.log(ratio), np.maximum(log_p, math.log(MAX_RATE)))
        total += math.exp(min(_log_mean(_log_binomial(raised, asked, failed), weights) - null, 600.0)) / len(RATIOS)
    return total


@lru_cache(maxsize=256)
def _posterior(baseline: PooledCounts) -> tuple[Float64, Float64]:
    """Log rates and log weights of the posterior on a grid, uniform in the logit."""
    a, b = baseline.failed + 0.5, baseline.asked - baseline.failed + 0.5
    logit = np.linspace(-16, 6, GRID)
    log_p, log_q = -np.logaddexp(0, -logit), -np.logaddexp(0, logit)
    weights = a * log_p + b * log_q  # density times the Jacobian p q
    return log_p, weights - np.logaddexp.reduce(weights)


def _log_binomial(log_p: Float64, asked: int, failed: int) -> Float64:
    """Log likelihood of a count without the binomial coefficient, which cancels."""
    found: Float64 = failed * log_p + (asked - failed) * np.log(-np.expm1(log_p))
    return found


def _log_mean(values: Float64, weights: Float64) -> float:
    return float(np.logaddexp.reduce(values + weights))
