"""Simulation of the canary tests: false alarms, also with persistent failures, and detection delays; 50 canaries.

``python -m benchmarks.pooled_drift [PART...]``. All data are simulated: canaries with a flake rate of 1 %, and a
baseline of 20 runs with one repetition of each failure. First the pooled test alone. Then all tests run through the
monitor's code (``analyze_run``), run by run with repetitions. Each part has at least 10,000 runs, including baselines.

A failure may persist: the next answer, in the same or the next run, fails with some probability. ``cache``: repetitions
fail, the next run does not. ``end to end``: one run of the complete monitor per setting, with an HTTP service, an event
store and a webhook. Its failures equal those of the simulation, so both must raise the alarm in the same run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import SEED, save, saved
from benchmarks.flaky_canaries import BASELINE, CANARIES, FLAKE, Change, Faults, Flakes, Rates, end_to_end
from casemate.maths import stats
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus
from casemate.monitor.trends.cusum import (
    AlarmLimits,
    CusumState,
    RunAnalysis,
    WatchedCanary,
    WatchedSet,
    analyze_run,
    canaries_to_repeat,
)
from casemate.monitor.trends.pooled_evidence import PooledCounts, pooled_evidence
from casemate.monitor.trends.sequential_tests import FlakeCounts, answers_after_failures

RUNS_PER_FALSE_ALERT = 4000.0
SETS = 10_000
QUIET_RUNS = 100
"""Runs of the complete monitor without a fault."""
LASTING = {"independent": (FLAKE, FLAKE), "cache": (FLAKE, 1.0), "half last": (0.5, 0.5), "most last": (0.9, 0.9)}
"""Probabilities that the run after a failed one fails, and that a repetition fails."""
START = datetime(2026, 1, 1, tzinfo=UTC)


def usual(number: int) -> Rates:
    """Failure rates without a fault."""
    return np.full(CANARIES, FLAKE)


def one(rate: float, number: int) -> Rates:
    """Failure rates in which one canary has a higher rate."""
    return np.array([rate] + [FLAKE] * (CANARIES - 1))


def all_at(first: float, more: float, number: int) -> Rates:
    """Failure rates of all canaries, with an increase in every run."""
    return np.full(CANARIES, first + more * number)


def first_alarms(found: RunAnalysis) -> bool:
    """Whether the first canary has an alarm."""
    return "c0" in found.alarmed


def any_alarms(found: RunAnalysis) -> bool:
    """Whether any test has an alarm."""
    return bool(found.alarmed or found.decayed)


CHANGES = {
    "one fails always": Change(partial(one, 1.0), first_alarms, 1, 500, 20),
    "one fails in a fifth": Change(partial(one, 0.2), first_alarms, 40, 200, 120),
    "all fail in a tenth": Change(partial(all_at, 0.1, 0.0), any_alarms, 3, 500, 20),
    "all: a quarter of a point more in every run": Change(partial(all_at, FLAKE, 0.0025), any_alarms, 20, 300, 60),
}


def outcome(failed: bool) -> CanaryStatus:
    """The status of an answer."""
    return CanaryStatus.FAIL if failed else CanaryStatus.PASS


class SimulatedSet:
    """A set of canaries with persistent failures and a new random baseline.

    Args:
        flakes: Decides which answers fail.
    """

    def __init__(self, flakes: Flakes) -> None:
        self.flakes = flakes
        runs, refailed = np.zeros((BASELINE, CANARIES), bool), np.zeros(CANARIES, int)
        for number in range(BASELINE):
            runs[number] = flakes.next_run()
            refailed += runs[number] & flakes.repeated[0]
        counts = [np.full(CANARIES, BASELINE), runs.sum(0), runs[:-1].sum(0), (runs[1:] & runs[:-1]).sum(0)]
        rows = np.array([*counts, runs.sum(0), refailed]).T.tolist()
        canaries = tuple(WatchedCanary(f"c{i}", flakes=FlakeCounts(*row)) for i, row in enumerate(rows))
        self.watched, self.state, self.number = WatchedSet("simulated", canaries), CusumState(), 0

    def run(self, rates: Faults) -> RunAnalysis:
        """One run with its repetitions."""
        self.number += 1
        limits, at = AlarmLimits(), START + timedelta(hours=self.number)
        run = f"simulated@{at:%Y-%m-%dT%H:%M:%SZ}"
        failed = self.flakes.next_run(rates(self.number))
        results = [CanaryResult(f"c{i}", run, at, outcome(bool(f))) for i, f in enumerate(failed)]
        for number in range(1, limits.max_repeats + 1):
            again = canaries_to_repeat(self.state, results, self.watched, limits)
            results += [
                CanaryResult(name, f"{run}~{number}", at, outcome(self.flakes.fails(int(name[1:]), number)))
                for name in again
            ]
            if not again:
                break
        found = analyze_run(self.state, results, self.watched, limits)
        self.state = found.state
        return found


def false_alarms(rng: np.random.Generator, lasting: tuple[float, float], sets: int, runs: int) -> dict[str, Any]:
    """Share of runs with an alarm of any test, with its interval, without a fault."""
    alarms = 0
    for _ in range(sets):
        simulated = SimulatedSet(Flakes(rng, lasting))
        alarms += sum(any_alarms(simulated.run(usual)) for _ in range(runs))
    return {"runs": sets * runs, "share_of_runs": stats.proportion(alarms, sets * runs)}


def lasting_bounds(rng: np.random.Generator, lasting: tuple[float, float], sets: int) -> dict[str, Any]:
    """Accuracy of the estimated persistence, with and without canaries that failed in half of their runs.

    ``share``: failed runs among those after a failed one, over all sets. ``too_low``: sets whose upper bound on it is
    below the true rate.
    """
    found: dict[str, Any] = {"sets": sets, "true": lasting[0]}
    drawn = (SimulatedSet(Flakes(rng, lasting)).watched.canaries for _ in range(sets))
    baselines = [tuple(c.flakes for c in canaries) for canaries in drawn]
    seldom = [tuple(f for f in flakes if 2 * f.failed < f.asked) for flakes in baselines]
    for name, rows in (("as the monitor counts", baselines), ("without half-failed canaries", seldom)):
        after = [answers_after_failures(flakes) for flakes in rows]
        share = sum(a.next_failed for a in after) / sum(a.next_asked for a in after)
        too_low = sum(a.next_bound < lasting[0] for a in after)
        found[name] = {"share": share, "too_low": stats.proportion(too_low, sets)}
    return found


def run_of_alarm(simulated: SimulatedSet, change: Change) -> int:
    """Number of the first run with the alarm about a change; ``longest`` + 1: none."""
    numbers = range(1, change.longest + 1)
    return next((n for n in numbers if change.alarms(simulated.run(change.rates))), change.longest + 1)


def delay(rng: np.random.Generator, lasting: tuple[float, float], change: Change) -> dict[str, Any]:
    """Number of runs until the alarm about a change."""
    found = [run_of_alarm(SimulatedSet(Flakes(rng, lasting)), change) for _ in range(change.sets)]
    return {
        "median": float(np.median(found)),
        "quantile_95": float(np.quantile(found, 0.95)),
        "longest": change.longest,
        "sets": change.sets,
        "runs": sum(min(n, change.longest) for n in found) + BASELINE * change.sets,
        "within": change.within,
        "share_within": stats.proportion(sum(n <= change.within for n in found), change.sets),
    }


def whole_monitor(rng: np.random.Generator, lasting: tuple[float, float], change: Change) -> dict[str, Any]:
    """The complete monitor on an HTTP service, once, and the simulation with the same failures."""
    seed = int(rng.integers(2**32))
    drawn = [Flakes(np.random.default_rng(seed), lasting) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        found = end_to_end(Path(folder), drawn[0], change)
    expected = min(run_of_alarm(SimulatedSet(drawn[1]), change), change.longest)
    return found | {"run_in_simulation": expected, "within": change.within}


def first_alarm(rng: np.random.Generator, rate: Callable[[int], float], longest: int) -> int:
    """Runs until the pooled test of one set raises an alarm; longer than ``longest``: never."""
    asked = CANARIES * BASELINE
    baseline = PooledCounts(asked, int(rng.binomial(asked, FLAKE)))
    runs: list[PooledCounts] = []
    for number in range(1, longest + 1):
        runs.append(PooledCounts(CANARIES, int(rng.binomial(CANARIES, min(rate(number), 1.0)))))
        if pooled_evidence(runs, baseline) >= RUNS_PER_FALSE_ALERT:
            return number
    return longest + 1


def pooled_test(rng: np.random.Generator, sets: int = SETS) -> dict[str, Any]:
    """The pooled test alone: false alarms per run over weeks of 100 runs, and delays."""
    quiet = [first_alarm(rng, lambda n: FLAKE, 100) for _ in range(sets // 20)]
    runs = sum(min(q, 100) for q in quiet)
    jump = np.array([first_alarm(rng, lambda n: 0.1, 10) for _ in range(sets // 10)])
    drift = np.array([first_alarm(rng, lambda n: FLAKE + 0.0025 * n, 40) for _ in range(sets // 10)])
    return {
        "false_alarms": stats.proportion(sum(q <= 100 for q in quiet), runs),
        "runs": runs,
        "jump_to_ten_percent": {str(q): float(np.quantile(jump, q)) for q in (0.5, 0.95)},
        "quarter_point_per_run": {str(q): float(np.quantile(drift, q)) for q in (0.5, 0.95)},
        "jump_within_3": stats.proportion(int((jump <= 3).sum()), len(jump)),
        "drift_within_20": stats.proportion(int((drift <= 20).sum()), len(drift)),
    }


def parts() -> dict[str, Callable[[np.random.Generator], dict[str, Any]]]:
    """Measurements by name; each needs some minutes of CPU time at most."""
    found: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {"pooled": pooled_test}
    quiet = Change(usual, lambda _: False, QUIET_RUNS, 1, QUIET_RUNS)
    found["most last: bounds from baselines"] = partial(lasting_bounds, lasting=LASTING["most last"], sets=1000)
    for name, lasting in LASTING.items():
        found[f"{name}: false alarms"] = partial(false_alarms, lasting=lasting, sets=SETS // 100, runs=100)
        found[f"end to end, {name}: false alarms"] = partial(whole_monitor, lasting=lasting, change=quiet)
        for fault, change in CHANGES.items():
            if name == "independent":
                found[f"{name}: {fault}"] = partial(delay, lasting=lasting, change=change)
                found[f"end to end, {name}: {fault}"] = partial(whole_monitor, lasting=lasting, change=change)
            elif change.alarms is first_alarms:
                fewer = change._replace(sets=25, longest=60)
                found[f"{name}: {fault}"] = partial(delay, lasting=lasting, change=fewer)
    return found


def main(*names: str) -> None:
    """Runs the named parts, or all, and saves each; results of other parts are kept."""
    known = parts()
    for number, (name, measure) in enumerate(known.items()):
        if not names or name in names:
            measured = measure(np.random.default_rng([SEED, number]))
            kept = saved("pooled_drift") | {name: measured}
            save("pooled_drift", {"simulated": True} | {part: kept[part] for part in known if part in kept})


if __name__ == "__main__":
    main(*sys.argv[1:])
