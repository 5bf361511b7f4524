"""Rate of false alarms, and delay of true ones, by simulation.

test_monitor_cusum.py shows that simulation and monitor alarm in the same runs.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.canary_simulation import baseline, delays, interval, quiet, simulate, sticky_baseline, uniform

ONE_PERCENT = np.full(50, 0.01)


@pytest.mark.parametrize("asked", [20, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("confirm", [pytest.param(0, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("length", [300, pytest.param(600, marks=pytest.mark.slow)])
def test_fifty_canaries_with_1_percent_flake_rate_have_at_most_1_false_alert_per_1000_runs(asked, confirm, length):
    failed = baseline(1, 50, 50, asked, 0.01)
    found = simulate(uniform(2, 50, 50, confirm), quiet(length, ONE_PERCENT), asked, failed, confirm=confirm)
    _, _, high = interval(found.alerts, found.runs)
    assert found.runs == 50 * length
    assert high <= 1.0
    assert found.repeats / found.runs <= 2.7  # number of repetitions per run


@pytest.mark.slow
@pytest.mark.parametrize("sets", [50, pytest.param(100, marks=pytest.mark.slow)])
def test_false_alerts_are_within_the_budget_at_higher_flake_rates(sets):
    rate = np.concatenate([np.full(40, 0.002), np.full(8, 0.05), np.full(2, 0.1)])
    found = simulate(uniform(4, sets, 50), quiet(300, rate), 20, baseline(3, sets, 50, 20, rate))
    assert interval(found.alerts, found.runs)[2] <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sticky", "echo"), [(0.01, 1.0), (0.5, 0.5), (0.9, 0.9)], ids=["cache", "half last", "most last"]
)
def test_false_alerts_are_within_the_budget_if_failures_persist(sticky, echo):
    """A failure is repeated within its run, in the next run, or both."""
    asked, failed, measured = sticky_baseline(8, 100, 50, 20, 0.01, sticky, echo)
    options = {"echo": echo, "sticky": sticky}
    found = simulate(uniform(9, 100, 50), quiet(100, ONE_PERCENT), asked, failed, **measured, **options)
    assert found.runs == 10_000
    assert interval(found.alerts, found.runs)[0] <= 1.0
    uncounted = simulate(uniform(9, 100, 50), quiet(100, ONE_PERCENT), asked, failed, **options)
    assert interval(uncounted.alerts, uncounted.runs)[1] > 1.0  # without the measured rate the budget is exceeded


@pytest.mark.slow
def test_false_alerts_are_within_the_budget_at_the_bound_of_the_flake_rate():
    """The worst case of the guarantee: 300 runs per false alarm, at the rate of the bound."""
    rate = np.full(10, 0.155)  # the bound is .156
    failed = np.full((200, 10), 12)
    found = simulate(uniform(7, 200, 10), quiet(300, rate), 100, failed, budget=300.0, confirm=2)
    assert 0 < found.alerts
    assert interval(found.alerts, found.runs)[0] <= 1000 / 300


def test_canary_that_always_fails_alarms_in_the_first_run():
    for asked in (20, 100):
        assert (delays(1.0, asked, 0.0, sets=20, longest=5) == 1).all()
    flaked = delays(1.0, 100, 0.01, sets=200, longest=5)
    assert flaked.mean() <= 1.1
    assert (delays(1.0, 200, 0.0, sets=20, confirm=0, longest=9) == 3).all()


@pytest.mark.slow
def test_canary_that_fails_in_half_of_the_runs_alarms_within_8_runs_at_the_median():
    late = delays(0.5, 20, 0.01, sets=200, longest=60)
    assert np.median(late) <= 8
    assert np.quantile(late, 0.95) <= 25


def test_simultaneous_failures_alarm_in_the_first_run_even_with_the_shortest_baseline():
    assert (delays(1.0, 20, 0.01, broken=10, confirm=0, sets=100, longest=5) == 1).all()


def test_false_alerts_exceed_the_budget_without_the_bound():
    """Shows that the test can fail: baselines without observed flakes give too many false alarms."""
    found = simulate(uniform(2, 50, 50), quiet(20, np.full(50, 0.2)), 1000, np.zeros((50, 50), int))
    assert interval(found.alerts, found.runs)[1] > 1.0
