"""When a change began: an estimate of the run from which on canaries fail more often, with its uncertainty.

An alarm says that canaries fail more often than in the baseline, some runs after that began. The model here: before the
change every question fails with the baseline rate, from the change on with another one. Both rates are unknown: the
first has the posterior of the baseline, Beta(f + 1/2, n - f + 1/2), the second is uniform; both are integrated out, and
every run up to the alarm is equally likely a priori. The estimate is the run with the largest posterior probability.
So it uses the failures only, and neither the alternatives nor the threshold of the test that alarmed.

Deviation: usually the change is estimated by the run after the last restart of the CUSUM (Hinkley 1971). That is late
if the canary fails rarely, because evidence often restarts before it grows. Errors of both are measured in
docs/explanation/canary-alarms.md. A slow decay has no such run: the estimate then lies within the decay.

Pure functions: no clock, no store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from casemate.maths.special import log_beta
from casemate.monitor.trends.pooled_evidence import PooledCounts

CREDIBILITY = 0.9
"""Posterior probability of the interval around the estimate."""


class ChangePoint(NamedTuple):
    """The estimated first run after a change, and the 90 % credible interval; positions in the given runs."""

    run: int
    earliest: int
    latest: int


def estimate_change(runs: Sequence[PooledCounts], baseline: PooledCounts) -> ChangePoint:
    """Estimates the first run after a change, of equally probable runs the first, from one or more up to the alarm.

    >>> passed, failed = PooledCounts(1, 0), PooledCounts(1, 1)
    >>> estimate_change([passed] * 9 + [failed] * 3, PooledCounts(20, 0))
    ChangePoint(run=9, earliest=7, latest=9)
    """
    probability = _posterior(runs, baseline)
    order = np.argsort(-probability, kind="stable")
    count = int(np.searchsorted(np.cumsum(probability[order]), CREDIBILITY)) + 1
    likely = order[:count]
    return ChangePoint(int(order[0]), int(likely.min()), int(likely.max()))


def _posterior(runs: Sequence[PooledCounts], baseline: PooledCounts) -> np.ndarray:
    """Posterior probability of each run as the first after the change, (runs,)."""
    asked, failed = sum(r.asked for r in runs), sum(r.failed for r in runs)
    failures, passes = baseline.failed + 0.5, baseline.asked - baseline.failed + 0.5
    logs = []
    for run in runs:
        before = log_beta(failures, passes)
        after = log_beta(failed + 1.0, asked - failed + 1.0)
        logs.append(before + after)
        failures, passes = failures + run.failed, passes + run.asked - run.failed
        asked, failed = asked - run.asked, failed - run.failed
    weights = np.exp(np.array(logs) - max(logs))
    found: np.ndarray = weights / weights.sum()
    return found
