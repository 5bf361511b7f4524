"""The estimated run of a change, and the alarms of a trend."""

import math
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, Severity
from casemate.monitor.trends.change_point import ChangePoint, estimate_change
from casemate.monitor.trends.cusum import AlarmLimits, WatchedCanary, WatchedSet
from casemate.monitor.trends.pooled_evidence import PooledCounts
from casemate.monitor.trends.sequential_tests import FlakeCounts
from casemate.monitor.trends.trend import WHOLE_SET, compute_trend
from tests.unit.change_point_simulation import SCENARIOS, measure

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
LETTERS = {"P": CanaryStatus.PASS, "F": CanaryStatus.FAIL, "E": CanaryStatus.ERROR}
BASELINE = PooledCounts(20, 0)
RARE_FLAKES = FlakeCounts(100, 0)


def counts(letters):
    return [PooledCounts(1, int(x == "F")) for x in letters]


def brute_force(runs, baseline):
    """Returns the posterior by summing over a grid of both rates, without a closed form."""
    grid = (np.arange(2000) + 0.5) / 2000
    prior = grid ** (baseline.failed - 0.5) * (1 - grid) ** (baseline.asked - baseline.failed - 0.5)

    def likelihood(some):
        return np.prod([grid**r.failed * (1 - grid) ** (r.asked - r.failed) for r in some] or [np.ones(2000)], axis=0)

    found = np.array([(prior * likelihood(runs[:i])).sum() * likelihood(runs[i:]).sum() for i in range(len(runs))])
    return found / found.sum()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=12))
def test_the_estimate_agrees_with_a_sum_over_both_rates(pairs):
    runs = [PooledCounts(asked, min(asked, failed)) for asked, failed in pairs]
    posterior = brute_force(runs, PooledCounts(30, 2))
    found = estimate_change(runs, PooledCounts(30, 2))
    assert posterior[found.run] == pytest.approx(posterior.max(), rel=1e-3)
    assert posterior[found.earliest : found.latest + 1].sum() > 0.9 - 1e-3
    assert found.earliest <= found.run <= found.latest < len(runs)


def test_clear_change_has_one_run_and_unclear_change_has_an_interval():
    assert estimate_change(counts("P" * 20 + "F" * 8), BASELINE) == ChangePoint(20, 19, 20)
    found = estimate_change(counts("P" * 20 + "FPPFPF"), BASELINE)
    assert found.run == 20
    assert found.latest > 20


def test_change_of_a_history_of_failures_is_its_first_run():
    assert estimate_change(counts("FFFF"), BASELINE).run == 0


def test_change_in_a_long_history_is_found():
    runs = [PooledCounts(50, 0)] * 2000 + [PooledCounts(50, 20)] * 3
    assert estimate_change(runs, PooledCounts(1000, 10)) == ChangePoint(2000, 2000, 2000)


def test_single_failure_weighs_less_if_the_baseline_failed_often():
    runs = counts("P" * 10 + "F" + "P" * 5 + "FFFFF")
    assert estimate_change(runs, PooledCounts(20, 6)).run == 16
    assert math.isclose(sum(brute_force(runs, BASELINE)), 1)


# alarms of a trend


def history(*runs):
    """Runs with one letter per canary."""
    return [
        CanaryResult(f"c{i}", f"clinic@{number:03}", NOON + timedelta(hours=number), LETTERS[x])
        for number, letters in enumerate(runs)
        for i, x in enumerate(letters)
    ]


def trend(*runs, flakes=RARE_FLAKES):
    watched_set = WatchedSet(
        "clinic", tuple(WatchedCanary(f"c{i}", Severity.MEDIUM, flakes) for i in range(len(runs[0])))
    )
    return compute_trend(history(*runs), watched_set, AlarmLimits(max_repeats=0))


def test_alarm_has_its_change_point_and_its_recovery():
    found = trend(*["PP"] * 10, *["FP"] * 6, *["PP"] * 10, *["FP"] * 6)
    (first, second) = found.alarms
    assert (first.canary, first.began) == ("c0", 10)
    assert 8 <= first.earliest <= 10 <= first.latest <= 11
    assert 10 < first.alarmed < 16 < first.recovered < 26
    assert (second.began, second.recovered) == (26, None)  # failures before the recovery do not count


def test_runs_without_a_verdict_keep_their_index():
    (found,) = trend(*["PP"] * 5, *["EP"] * 3, *["FP"] * 6).alarms
    assert found.began == 8
    assert found.earliest in (3, 4, 8)  # never a run without a verdict


def test_repetitions_count_for_their_run():
    again = [
        CanaryResult("c0", f"clinic@020~{n}", NOON + timedelta(hours=20, seconds=n), CanaryStatus.FAIL)
        for n in (1, 2, 3, 4, 5)
    ]
    watched_set = WatchedSet("clinic", (WatchedCanary("c0", flakes=FlakeCounts(100, 0)), WatchedCanary("c1")))
    found = compute_trend([*history(*["PP"] * 20, "FP"), *again], watched_set)
    (alarm,) = found.alarms
    assert (alarm.canary, alarm.began, alarm.alarmed, alarm.recovered) == ("c0", 20, 20, None)
    assert alarm.earliest >= 19


def test_degradation_of_the_whole_set_is_a_separate_alarm():
    rng = np.random.default_rng(3)
    rates = [*[0.01] * 30, *[0.1] * 30, *[0.0] * 40]
    runs = ["".join("F" if x else "P" for x in rng.random(50) < rate) for rate in rates]
    found = trend(*runs, flakes=FlakeCounts(100, 1))
    (whole,) = [a for a in found.alarms if a.canary == WHOLE_SET]
    assert abs(whole.began - 30) <= 1
    assert 30 <= whole.alarmed < 50
    assert whole.recovered > 60


def test_history_without_a_change_has_no_alarm():
    assert trend(*["PP", "FP", "PP"] * 3, flakes=FlakeCounts(100, 30)).alarms == ()
    assert trend("PP").alarms == ()


@pytest.mark.parametrize(
    ("scenario", "largest"),
    [
        ("one canary fails always", 0.5),
        ("one canary fails in 50 %", 2.5),
        ("one canary fails in 30 %", 6),
        ("all fail in 10 %", 1),
    ],
)
def test_the_mean_error_in_simulated_sets_is_small(scenario, largest):
    found = measure(SCENARIOS[scenario], 8, seed=7)
    assert len(found) >= 6
    assert np.mean(np.abs([e.estimate for e in found])) <= largest


def test_intervals_cover_the_change():
    found = measure(SCENARIOS["one canary fails in 30 %"], 10, seed=11)
    assert sum(e.covered for e in found) >= 0.7 * len(found)


@pytest.mark.slow
def test_estimate_of_a_sudden_failure_is_closer_than_the_last_cusum_restart():
    """A chance failure shortly before the change makes the restart too early. With rarer failures neither is closer."""
    found = measure(SCENARIOS["one canary fails always"], 60, seed=11)
    assert np.mean([abs(e.estimate) for e in found]) < np.mean([abs(e.restart) for e in found])
