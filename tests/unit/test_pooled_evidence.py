"""The pooled test over all canaries."""

import math
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from casemate.monitor.canaries.results import CanaryResult, CanaryStatus
from casemate.monitor.trends.cusum import AlarmLimits, CusumState, WatchedCanary, WatchedSet, analyze_run
from casemate.monitor.trends.pooled_evidence import LONGEST_WINDOW, RATIOS, PooledCounts, _ratio, pooled_evidence
from casemate.monitor.trends.sequential_tests import FlakeCounts

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def naive_ratio(asked, failed, baseline, points=20_001):
    """Computes the ratio by the trapezoidal rule over p."""
    p = np.linspace(1e-6, 1 - 1e-6, points)
    a, b = baseline.failed + 0.5, baseline.asked - baseline.failed + 0.5
    density = np.exp(
        (a - 1) * np.log(p) + (b - 1) * np.log1p(-p) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    )

    def mean(rate):
        return np.trapezoid(density * rate**failed * (1 - rate) ** (asked - failed), p)

    raised = [np.minimum(r * p, np.maximum(p, 0.95)) for r in RATIOS]
    return np.mean([mean(q) for q in raised]) / mean(p)


@pytest.mark.parametrize(("asked", "failed"), [(50, 0), (50, 3), (150, 9), (400, 2)])
def test_ratio_equals_the_naive_integral(asked, failed):
    baseline = PooledCounts(1000, 10)
    assert _ratio(asked, failed, baseline) == pytest.approx(naive_ratio(asked, failed, baseline), rel=1e-3)


def test_ratio_has_mean_one_without_a_change():
    baseline, asked = PooledCounts(200, 3), 60
    p = np.random.default_rng(1).beta(3.5, 197.5, 40_000)
    counts = np.random.default_rng(2).binomial(asked, p)
    assert np.mean([_ratio(asked, int(c), baseline) for c in counts]) == pytest.approx(1, abs=0.2)


def test_windows_end_with_the_last_run():
    baseline = PooledCounts(1000, 10)
    runs = [PooledCounts(50, 9), *[PooledCounts(50, 0)] * LONGEST_WINDOW]
    assert pooled_evidence(runs, baseline) < 1 < pooled_evidence(runs[:1], baseline)


def simulate_decay(rates, seed=0):
    """Returns the runs with a decay alarm, for canaries that fail at the given rates, and the last state."""
    rng, state, alarms = np.random.default_rng(seed), CusumState(), []
    flakes = rng.binomial(20, 0.01, 50)
    watched = WatchedSet(
        "s", tuple(WatchedCanary(f"c{i}", flakes=FlakeCounts(20, int(f))) for i, f in enumerate(flakes))
    )
    for number, rate in enumerate(rates, 1):
        at = NOON + timedelta(hours=number)
        status = [CanaryStatus.FAIL if x < rate else CanaryStatus.PASS for x in rng.random(50)]
        results = [CanaryResult(f"c{i}", f"s@{number}", at, s) for i, s in enumerate(status)]
        analysis = analyze_run(state, results, watched, AlarmLimits(max_repeats=0))
        state = CusumState.from_json(analysis.state.to_json())
        assert state == analysis.state
        alarms += [number] * analysis.decayed
    return alarms, state


def test_detects_uniform_decay_and_recovers_with_its_end():
    alarms, state = simulate_decay([0.01] * 20 + [0.1] * 10)
    assert 21 <= alarms[0] <= 28 and len(alarms) == 1 and state.decayed
    alarms, state = simulate_decay([0.01] * 20 + [0.1] * 6 + [0.01] * 60)
    assert len(alarms) == 1 and not state.decayed


def test_no_alarm_without_a_change():
    assert simulate_decay([0.01] * 60) == ([], simulate_decay([0.01] * 60)[1])


def test_reads_a_state_of_an_older_version():
    body = CusumState().to_json()
    del body["pooled"], body["decayed"]
    assert CusumState.from_json(body) == CusumState()
