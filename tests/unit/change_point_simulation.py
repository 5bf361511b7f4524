"""Error of the estimated change point: simulated sets whose failure rate rises at a known run, through the whole
monitor.

``python -m tests.unit.change_point_simulation 300`` prints the table of docs/explanation/canary-alarms.md.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import numpy as np

from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, Severity
from casemate.monitor.trends.cusum import (
    AlarmLimits,
    CusumState,
    WatchedCanary,
    WatchedSet,
    analyze_run,
    canaries_to_repeat,
)
from casemate.monitor.trends.sequential_tests import FlakeCounts
from casemate.monitor.trends.trend import WHOLE_SET, compute_trend

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
CANARIES, BASELINE_RUNS, FLAKE_RATE, CHANGE = 50, 20, 0.01, 40
LIMITS = AlarmLimits()


class Error(NamedTuple):
    """Runs from the change to its estimate, to the last restart of the CUSUM, and to the alarm; and the interval."""

    estimate: int
    restart: int
    delay: int
    covered: bool
    width: int


def simulate(seed, rates, longest=400):
    """One set until an alarm after the change; None if there is none, or an earlier one.

    Args:
        seed: Seed of the random numbers.
        rates: Failure rate of each canary by run after the change (from 0): (runs after) -> array of (canaries,).
        longest: Runs after the change.
    """
    rng = np.random.default_rng(seed)
    failed = rng.binomial(BASELINE_RUNS, FLAKE_RATE, CANARIES)
    watched = WatchedSet(
        "clinic",
        tuple(WatchedCanary(f"c{i}", Severity.HIGH, FlakeCounts(BASELINE_RUNS, int(f))) for i, f in enumerate(failed)),
    )
    history, state, restart = [], CusumState(), {}
    for run in range(CHANGE + longest):
        rate = np.full(CANARIES, FLAKE_RATE) if run < CHANGE else rates(run - CHANGE)
        results = _ask(rng, run, rate, watched, state)
        history += results
        restart = {i: c.since for i, c in state.canaries.items()}
        analysis = analyze_run(state, results, watched, LIMITS)
        state = analysis.state
        whole = analysis.decayed
        if whole or "c0" in analysis.alarmed:
            return _error(compute_trend(history, watched, LIMITS), WHOLE_SET if whole else "c0", run, restart)
        if run < CHANGE and (analysis.alarmed or analysis.decayed):
            return None
    return None


def _ask(rng, run, rate, watched, state):
    at = NOON + timedelta(hours=run)
    name = f"clinic@{at:%Y-%m-%dT%H:%M:%SZ}"
    results, asked = [], [c.id for c in watched.canaries]
    for repeat in range(LIMITS.max_repeats + 1):
        fails = rng.random(CANARIES) < rate
        results += [
            CanaryResult(
                i,
                f"{name}~{repeat}" if repeat else name,
                at,
                CanaryStatus.FAIL if fails[int(i[1:])] else CanaryStatus.PASS,
            )
            for i in asked
        ]
        asked = canaries_to_repeat(state, results, watched, LIMITS)
        if not asked:
            break
    return results


def _error(trend, canary, run, restart):
    found = next(a for a in trend.alarms if a.canary == canary and a.alarmed == run)
    since = restart.get(canary)
    last = int((since - NOON).total_seconds()) // 3600 if since else run
    covered = found.earliest <= CHANGE <= found.latest
    return Error(found.began - CHANGE, last - CHANGE, run - CHANGE, covered, found.latest - found.earliest + 1)


def one_fails(rate):
    """Canary c0 fails at a rate; the other rates do not change."""
    rates = np.full(CANARIES, FLAKE_RATE)
    rates[0] = rate
    return lambda after: rates


def all_fail(rate):
    """All canaries fail at a rate."""
    return lambda after: np.full(CANARIES, rate)


def decay(step):
    """The failure rate of all canaries grows by a step per run."""
    return lambda after: np.full(CANARIES, min(FLAKE_RATE + step * (after + 1), 1.0))


SCENARIOS = {
    "one canary fails always": one_fails(1.0),
    "one canary fails in 50 %": one_fails(0.5),
    "one canary fails in 30 %": one_fails(0.3),
    "one canary fails in 20 %": one_fails(0.2),
    "all fail in 10 %": all_fail(0.1),
    "all fail in 3 %": all_fail(0.03),
    "all: +.25 point per run": decay(0.0025),
}


def measure(rates, sets, seed=0):
    """Errors in some simulated sets, except sets without an alarm or with an alarm before the change."""
    return [e for i in range(sets) if (e := simulate([seed, i], rates)) is not None and e.delay >= 0]


def main(sets):
    for name, rates in SCENARIOS.items():
        found = measure(rates, sets)
        size = np.abs([e.estimate for e in found])
        restart = np.abs([e.restart for e in found])
        delay, width, covered = (np.array([e[i] for e in found]) for i in (2, 4, 3))
        print(f"{name}: {len(found)} of {sets} sets; delay of the alarm {np.median(delay):.0f}", end="; ")
        print(f"error of the estimate: median {np.median(size):.0f}, mean {size.mean():.1f}", end=", ")
        print(f"90 % {np.quantile(size, 0.9):.0f}; of the last restart: mean {restart.mean():.1f}", end="; ")
        print(f"interval covers {covered.mean():.3f}, width {width.mean():.1f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
