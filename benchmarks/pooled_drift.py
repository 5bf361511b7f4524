"""The tests of canaries by simulation: false alarms, also with failures that last, and delays; 50 canaries.

``python -m benchmarks.pooled_drift [PART...]``. Everything is simulated: canaries that flake in 1 % of runs, and a
baseline of 20 runs with one repetition of each failure. First the pooled test alone. Then all tests, by the monitor's
code (``analyze_run``), run after run with its repetitions. A failure may last: the next answer after it, in the same
run or the next one, fails with some probability. ``cache``: repetitions fail, the next run does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import numpy as np

from benchmarks import ROOT, SEED, save
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
from casemate.monitor.trends.sequential_tests import FlakeCounts

CANARIES, BASELINE, FLAKE, RUNS_PER_FALSE_ALERT = 50, 20, 0.01, 4000.0
SETS = 10_000
LASTING = {"independent": (FLAKE, FLAKE), "cache": (FLAKE, 1.0), "half last": (0.5, 0.5), "most last": (0.9, 0.9)}
"""Probability that the next run after a failed one fails, and that a repetition fails."""
START = datetime(2026, 1, 1, tzinfo=UTC)


def outcome(failed: bool) -> CanaryStatus:
    """The status of an answer."""
    return CanaryStatus.FAIL if failed else CanaryStatus.PASS


class SimulatedSet:
    """A set of canaries with failures that last, and a newly drawn baseline.

    Args:
        rng: Random generator.
        lasting: See ``LASTING``.
    """

    def __init__(self, rng: np.random.Generator, lasting: tuple[float, float]) -> None:
        self.rng, self.lasting, self.failed = rng, lasting, np.zeros(CANARIES, bool)
        self.rates = np.full(CANARIES, FLAKE)
        runs = np.array([self.ask() for _ in range(BASELINE)])
        after, again = runs[:-1].sum(0), runs.sum(0)
        counts = np.array([np.full(CANARIES, BASELINE), again, after, (runs[1:] & runs[:-1]).sum(0), again])
        refailed = rng.binomial(again, lasting[1])
        canaries = [
            WatchedCanary(f"c{i}", flakes=FlakeCounts(*counts[:, i].tolist(), int(refailed[i])))
            for i in range(CANARIES)
        ]
        self.watched, self.state, self.number = WatchedSet("simulated", tuple(canaries)), CusumState(), 0

    def ask(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which canaries fail in the next run."""
        chance = np.where(self.failed, np.maximum(self.lasting[0], self.rates), self.rates)
        self.failed = self.rng.random(CANARIES) < chance
        return self.failed

    def run(self) -> RunAnalysis:
        """One run with its repetitions."""
        self.number += 1
        limits, at = AlarmLimits(), START + timedelta(hours=self.number)
        run = f"simulated@{at:%Y-%m-%dT%H:%M:%SZ}"
        results = [CanaryResult(f"c{i}", run, at, outcome(failed)) for i, failed in enumerate(self.ask())]
        for number in range(1, limits.max_repeats + 1):
            again = canaries_to_repeat(self.state, results, self.watched, limits)
            chance = np.maximum(self.lasting[1], self.rates)
            results += [
                CanaryResult(name, f"{run}~{number}", at, outcome(self.rng.random() < chance[int(name[1:])]))
                for name in again
            ]
            if not again:
                break
        found = analyze_run(self.state, results, self.watched, limits)
        self.state = found.state
        return found


def false_alarms(rng: np.random.Generator, lasting: tuple[float, float], sets: int, runs: int) -> dict[str, Any]:
    """Runs with an alarm of any test, in 1,000, with the interval; nothing is wrong."""
    alarms = 0
    for _ in range(sets):
        simulated = SimulatedSet(rng, lasting)
        for _ in range(runs):
            found = simulated.run()
            alarms += bool(found.alarmed or found.decayed)
    return {"runs": sets * runs, "share_of_runs": stats.proportion(alarms, sets * runs)}


def delay(
    rng: np.random.Generator, lasting: tuple[float, float], rate: float, sets: int, longest: int
) -> dict[str, Any]:
    """Runs until a canary alarms that fails at some rate from now on; ``longest`` and more: never."""
    found = []
    for _ in range(sets):
        simulated = SimulatedSet(rng, lasting)
        simulated.rates[0] = rate
        found.append(next((n for n in range(1, longest) if "c0" in simulated.run().alarmed), longest))
    shares = {str(q): float(np.quantile(found, q)) for q in (0.5, 0.95)}
    within = stats.proportion(sum(n <= 40 for n in found), sets)
    return shares | {"longest": longest, "sets": sets, "within_40": within}


def first_alarm(rng: np.random.Generator, rate: Callable[[int], float], longest: int) -> int:
    """Runs until the pooled test of one set alarms; longer than ``longest``: never."""
    asked = CANARIES * BASELINE
    baseline = PooledCounts(asked, int(rng.binomial(asked, FLAKE)))
    runs: list[PooledCounts] = []
    for number in range(1, longest + 1):
        runs.append(PooledCounts(CANARIES, int(rng.binomial(CANARIES, min(rate(number), 1.0)))))
        if pooled_evidence(runs, baseline) >= RUNS_PER_FALSE_ALERT:
            return number
    return longest + 1


def pooled_test(rng: np.random.Generator, sets: int = SETS) -> dict[str, Any]:
    """The pooled test alone: false alarms per run over weeks of 100 runs, and the delays."""
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
    """The measurements by name; each takes about a minute of CPU time at most."""
    found: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {"pooled": pooled_test}
    for name, lasting in LASTING.items():
        sets = 200 if name == "independent" else 25
        found[f"{name}: false alarms"] = partial(false_alarms, lasting=lasting, sets=SETS // 100, runs=100)
        found[f"{name}: one fails always"] = partial(delay, lasting=lasting, rate=1.0, sets=sets, longest=20)
        found[f"{name}: one fails in a fifth"] = partial(
            delay, lasting=lasting, rate=0.2, sets=sets, longest=120 if sets > 25 else 60
        )
    return found


def main(*names: str) -> None:
    """Measures the named parts, or all; the results of other parts stay."""
    file = ROOT / "benchmarks/results/pooled_drift.json"
    before = json.loads(file.read_text())["results"] if file.exists() else {}
    known = parts()
    found = {"simulated": True} | {name: before[name] for name in known if name in before}
    for number, (name, measure) in enumerate(known.items()):
        if not names or name in names:
            found[name] = measure(np.random.default_rng([SEED, number]))
    save("pooled_drift", found)


if __name__ == "__main__":
    main(*sys.argv[1:])
