"""The pooled test of canaries by simulation: false alarms, and delay of uniform decay; 50 canaries.

``python -m benchmarks.pooled_drift``. Everything is simulated: canaries that flake in 1 % of runs, each canary counted
once per run. A sticky flake fails in the repetitions of its run, too: they do not count, so nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import SEED, save
from casemate.maths import stats
from casemate.monitor.trends.pooled_evidence import PooledCounts, evidence_threshold, pooled_evidence

CANARIES, BASELINE, FLAKE, RUNS_PER_FALSE_ALERT = 50, 20, 0.01, 2000.0
SETS = 10_000


def first_alarm(rng: np.random.Generator, rate: Callable[[int], float], longest: int) -> int:
    """Runs until the pooled test of one set alarms; longer than ``longest``: never."""
    asked = CANARIES * BASELINE
    baseline = PooledCounts(asked, int(rng.binomial(asked, FLAKE)))
    runs: list[PooledCounts] = []
    for number in range(1, longest + 1):
        runs.append(PooledCounts(CANARIES, int(rng.binomial(CANARIES, min(rate(number), 1.0)))))
        if pooled_evidence(runs, baseline) >= evidence_threshold(RUNS_PER_FALSE_ALERT):
            return number
    return longest + 1


def main(sets: int = SETS) -> None:
    """False alarms per run over weeks of 100 runs, and the delays."""
    rng = np.random.default_rng(SEED)
    quiet = [first_alarm(rng, lambda n: FLAKE, 100) for _ in range(sets // 20)]
    runs = sum(min(q, 100) for q in quiet)
    jump = np.array([first_alarm(rng, lambda n: 0.1, 10) for _ in range(sets // 10)])
    drift = np.array([first_alarm(rng, lambda n: FLAKE + 0.0025 * n, 40) for _ in range(sets // 10)])
    found: dict[str, Any] = {
        "simulated": True,
        "false_alarms": stats.proportion(sum(q <= 100 for q in quiet), runs),
        "runs": runs,
        "jump_to_ten_percent": {str(q): float(np.quantile(jump, q)) for q in (0.5, 0.95)},
        "quarter_point_per_run": {str(q): float(np.quantile(drift, q)) for q in (0.5, 0.95)},
    }
    save("pooled_drift", found)


if __name__ == "__main__":
    main()
