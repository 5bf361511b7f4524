"""``analyze_run``, compared with an independent simulation and for single cases."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import DataError
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, Severity
from casemate.monitor.trends import cusum
from casemate.monitor.trends.cusum import (
    WEIGHTS,
    AlarmLimits,
    CusumState,
    WatchedCanary,
    WatchedSet,
    analyze_run,
    canaries_to_repeat,
)
from casemate.monitor.trends.sequential_tests import FlakeCounts
from tests.unit import canary_simulation as simulation

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
STATUS_OF_LETTER = {"P": CanaryStatus.PASS, "F": CanaryStatus.FAIL, "E": CanaryStatus.ERROR}


HUNDRED = FlakeCounts(100, 0)
NO_REPEATS = AlarmLimits(max_repeats=0)


def watched(n=5, flakes=HUNDRED, **fields):
    return WatchedSet("clinic", tuple(WatchedCanary(f"c{i}", Severity.MEDIUM, flakes, **fields) for i in range(n)))


def results(number, letters, suffix="", ids=None):
    """One run: one letter per canary."""
    at = NOON + timedelta(hours=number)
    names = ids or [f"c{i}" for i in range(len(letters))]
    return [
        CanaryResult(i, f"clinic@{at:%Y-%m-%dT%H:%M:%SZ}{suffix}", at, STATUS_OF_LETTER[x])
        for i, x in zip(names, letters, strict=True)
    ]


def analyze_runs(set_, runs, limits=NO_REPEATS):
    """Analyses of runs, each given as one letter per canary."""
    steps, state = [], CusumState()
    for number, letters in enumerate(runs):
        steps.append(analyze_run(state, results(number, letters), set_, limits))
        state = steps[-1].state
    return steps


def simulate_with_monitor(draws, truth, clean, limits, severities):
    """Simulates one set with the code of the monitor."""
    set_ = WatchedSet(
        "clinic", tuple(WatchedCanary(f"c{i}", s, c) for i, (s, c) in enumerate(zip(severities, clean, strict=True)))
    )
    state, run, alarmed, repeats = CusumState(), 0, [], 0
    while (rate := truth(run)) is not None:
        u = draws(run)
        rate = np.broadcast_to(rate, len(clean))
        asked, ids = [], [f"c{i}" for i in range(len(clean))]
        for number in range(limits.max_repeats + 1):
            fails = [u[number][0][int(i[1:])] < rate[int(i[1:])] for i in ids]
            asked += results(run, "".join("F" if f else "P" for f in fails), f"~{number}" if number else "", ids)
            ids = canaries_to_repeat(state, asked, set_, limits)
            if not ids:
                break
            repeats += len(ids) if number < limits.max_repeats else 0
        found = analyze_run(state, asked, set_, limits)
        alarmed.append([c.id in found.alarmed for c in set_.canaries])
        state, run = found.state, run + 1
    return np.array(alarmed), repeats


def compared(seed, echo, runs):
    """Alerts of the simulation, after a check that the monitor alarms in the same runs."""
    rng = np.random.default_rng(seed)
    n, asked = 12, 40
    base = rng.choice([0.0, 0.01, 0.05, 0.3], n)
    periods = [np.where(rng.random(n) < 0.25, rng.choice([0.3, 0.6, 1.0]), base) for _ in range(runs // 20)]
    table = rng.random((runs, 6, 1, n))
    failed = rng.binomial(asked, base)[None]
    severities = [list(Severity)[i] for i in rng.integers(0, 4, n)]

    def truth(run):
        return periods[run // 20] if run < runs else None

    weights = np.array([WEIGHTS[s] for s in severities])
    repeat_counts = (4, 3, 10, echo) if echo else (0, 0, 10, 0)
    clean = [FlakeCounts(asked + repeat_counts[0], int(f) + repeat_counts[1], *repeat_counts) for f in failed[0]]
    measured = {"after": [n * count for count in repeat_counts], "ended": failed + repeat_counts[1] > repeat_counts[0]}
    oracle = simulation.simulate(lambda run: table[run], truth, asked, failed, weights=weights, keep=True, **measured)
    alarmed, repeats = simulate_with_monitor(lambda run: table[run], truth, clean, AlarmLimits(), severities)
    assert np.array_equal(alarmed, oracle.alarmed[:, 0])
    assert repeats == oracle.repeats
    return oracle.alerts


@pytest.mark.parametrize("echo", [0, 7])
def test_monitor_and_simulation_alarm_in_the_same_runs(echo):
    assert compared(0, echo, 200) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "echo", "runs"), [*((seed, 0, 400) for seed in range(4)), (0, 7, 1200)])
def test_monitor_and_simulation_alarm_in_the_same_runs_of_a_long_history(seed, echo, runs):
    """After a baseline with persistent failures, alarms are rare, so more runs are simulated."""
    assert compared(seed, echo, runs) > 10


def test_repeat_failures_in_the_baseline_delay_alarms():
    """Counts runs until a canary that always fails alarms, without repetitions."""

    def first(flakes):
        steps = analyze_runs(watched(5, flakes), ["FPPPP"] * 60)
        return next((i for i, s in enumerate(steps, 1) if s.alarmed), 61)

    assert first(FlakeCounts(100, 2, 2, 0, 2, 0)) < first(FlakeCounts(100, 2, 2, 1, 2, 1)) < 61
    assert first(FlakeCounts(100, 2, 2, 2, 2, 2)) == 61  # such failures occurred in the baseline


def test_failed_next_runs_are_evidence_if_failures_persist_only_within_a_run():
    """With a cache, repetitions in the baseline failed and next runs did not."""

    def first(flakes):
        steps = analyze_runs(watched(5, flakes), ["FPPPP"] * 60)
        return next((i for i, s in enumerate(steps, 1) if s.alarmed), 61)

    cached, lasting = FlakeCounts(100, 2, 2, 0, 2, 2), FlakeCounts(100, 2, 2, 1, 2, 2)
    assert first(cached) == first(FlakeCounts(100, 2, 2, 0, 2, 0)) < first(lasting)


def test_canary_that_failed_in_its_whole_baseline_does_not_alarm():
    """The upper bound of its flake rate is 1."""
    broken = FlakeCounts(20, 20, 19, 19, 20, 20)
    canaries = tuple(WatchedCanary(f"c{i}", flakes=FlakeCounts(100, 0) if i else broken) for i in range(5))
    asked = [*results(0, "FPPPP"), *results(0, "F", "~1", ["c0"]), *results(0, "F", "~2", ["c0"])]
    assert not analyze_run(CusumState(), asked, WatchedSet("clinic", canaries), AlarmLimits()).alarmed


def test_persistent_failure_counts_once_in_the_pooled_test():
    lasting = analyze_runs(watched(50), ["P" * 50, *["FFF" + "P" * 47] * 3])
    fresh = analyze_runs(watched(50), ["P" * 50, *("P" * i + "FFF" + "P" * (47 - i) for i in (0, 3, 6))])
    assert [c.failed for c in lasting[-1].state.pooled] == [0, 3, 0, 0]
    assert [c.failed for c in fresh[-1].state.pooled] == [0, 3, 3, 3]
    assert lasting[-1].p_value == 1.0 > fresh[-1].p_value


@pytest.mark.parametrize(("ended", "alarms"), [(0, True), (1, False)], ids=["baseline passed", "baseline failed"])
def test_last_run_of_the_baseline_precedes_the_first_run(ended, alarms):
    """Eight canaries fail in the first run. If they failed at the end of the baseline, these are not new failures."""
    old, others = FlakeCounts(20, 3 + ended, 3, 2, 3 + ended, 2), [FlakeCounts(20, 0)] * 42
    set_ = WatchedSet("clinic", tuple(WatchedCanary(f"c{i}", flakes=f) for i, f in enumerate([*[old] * 8, *others])))
    (first,) = analyze_runs(set_, ["F" * 8 + "P" * 42])
    assert first.many_failed == alarms
    assert old.ended_failing == bool(ended)


def test_baseline_without_repeat_counts_does_not_count_as_ended_failing():
    """Such baselines are of earlier versions. A failure in the last run only was repeated, so its repetition counts."""
    assert not FlakeCounts(20, 3).ended_failing
    assert FlakeCounts(20, 1, repeats=1).ended_failing
    old = WatchedSet("clinic", tuple(WatchedCanary(f"c{i}", flakes=FlakeCounts(20, int(i < 8))) for i in range(50)))
    (first,) = analyze_runs(old, ["F" * 8 + "P" * 42])
    assert first.many_failed


def test_isolated_failures_do_not_alarm():
    steps = analyze_runs(watched(), ["PPPPP", "FPPPP", *["PPPPP"] * 30, "PFPPP", *["PPPPP"] * 30, "FPPPP"])
    assert not any(s.alarmed for s in steps)
    assert [s.failed for s in steps if s.failed] == [("c0",), ("c1",), ("c0",)]


def test_persistent_failure_alarms_once_with_its_start_and_evidence():
    steps = analyze_runs(watched(), ["PPPPP"] * 3 + ["FPPPP"] * 12)
    (alarm,) = [i for i, s in enumerate(steps) if s.alarmed]
    assert alarm == 3 + 2  # three failures in a row, with a baseline of 100 runs
    assert steps[alarm].alarmed == ("c0",)
    assert steps[alarm].state.canaries["c0"].since == NOON + timedelta(hours=3)
    assert not steps[alarm].many_failed
    value, threshold = steps[alarm].evidence["c0"]
    assert value >= threshold == 2 * 1000 * 5


def test_failed_repetitions_cause_an_alarm_in_the_first_run():
    set_, limits, asked = watched(), AlarmLimits(), results(0, "FPPPP")
    rounds = 0
    while (again := canaries_to_repeat(CusumState(), asked, set_, limits)) and rounds < limits.max_repeats:
        assert again == ("c0",)
        rounds += 1
        asked += results(0, "F", f"~{rounds}", again)
    found = analyze_run(CusumState(), asked, set_, limits)
    assert (found.alarmed, rounds) == (("c0",), 3)
    assert found.failed == ("c0",)
    assert found.judged == 5


def test_passed_repetition_removes_evidence_but_the_run_counts_as_failed():
    asked = [*results(0, "FPPPP"), *results(0, "P", "~1", ["c0"]), *results(0, "P", "~2", ["c0"])]
    found = analyze_run(CusumState(), asked, watched(), AlarmLimits())
    assert not found.alarmed
    assert found.failed == ("c0",)
    assert found.state.canaries["c0"].recent == "F"


def test_bursts_count_less_with_a_higher_repeat_failure_rate(monkeypatch):
    asked = [*results(0, "FPPPP"), *(r for i in range(1, 5) for r in results(0, "F", f"~{i}", ["c0"]))]
    assert analyze_run(CusumState(), asked, watched(), AlarmLimits()).alarmed
    monkeypatch.setattr(cusum, "REPEAT_FAILURE_RATE", 0.5)
    assert not analyze_run(CusumState(), asked, watched(), AlarmLimits()).alarmed


def test_critical_canary_requires_less_evidence_than_a_low_one():
    def runs_until(severity):
        canaries = (
            WatchedCanary("c0", severity, FlakeCounts(200, 0)),
            *(WatchedCanary(f"c{i}", Severity.LOW, FlakeCounts(200, 0)) for i in range(1, 9)),
        )
        steps = analyze_runs(WatchedSet("clinic", canaries), ["F" + "P" * 8] * 9)
        return next(i for i, s in enumerate(steps, 1) if s.alarmed)

    assert (runs_until(Severity.CRITICAL), runs_until(Severity.LOW)) == (2, 3)


def test_many_failures_in_one_run_alarm_immediately():
    steps = analyze_runs(watched(50), ["P" * 50, "F" * 6 + "P" * 44])
    assert steps[1].many_failed
    assert steps[1].alarmed == tuple(f"c{i}" for i in range(6))
    assert steps[1].p_value < 1 / 2000
    assert not analyze_runs(watched(50), ["P" * 50, "F" * 2 + "P" * 48])[1].alarmed


def test_failures_without_failed_repetitions_do_not_count_as_many():
    asked = results(0, "F" * 6 + "P" * 44)
    for number in (1, 2):
        asked += results(0, "PPPPPP", f"~{number}", [f"c{i}" for i in range(6)])
    found = analyze_run(CusumState(), asked, watched(50), AlarmLimits())
    assert not found.many_failed and found.p_value == 1.0


def test_many_failures_are_repeated_once():
    asked, names = results(0, "F" * 6 + "P" * 44), tuple(f"c{i}" for i in range(6))
    assert canaries_to_repeat(CusumState(), asked, watched(50), AlarmLimits()) == names
    over = [*asked, *results(0, "PPPPPP", "~1", names)]
    assert not analyze_run(CusumState(), over, watched(50), AlarmLimits()).alarmed
    lasting = [*asked, *results(0, "FFFFFF", "~1", names)]
    assert analyze_run(CusumState(), lasting, watched(50), AlarmLimits()).alarmed == names
    assert canaries_to_repeat(CusumState(), lasting, watched(50), AlarmLimits()) == ()


def test_alarmed_canary_neither_alarms_again_nor_counts_as_one_of_many():
    set_ = watched(50)
    steps = analyze_runs(set_, ["F" * 6 + "P" * 44] + ["F" * 6 + "P" * 44] * 5 + ["F" * 7 + "P" * 43])
    assert [bool(s.alarmed) for s in steps] == [True] + [False] * 6
    assert steps[-1].p_value > 0.1


def test_recovery_requires_more_passes_after_intermittent_failures():
    steps = analyze_runs(watched(), ["FPPPP"] * 8 + ["PPPPP"] * 8)
    assert [i for i, s in enumerate(steps) if s.recovered] == [8 + 2]
    half = analyze_runs(watched(), ["FPPPP", "PPPPP"] * 12 + ["PPPPP"] * 12)
    at = [i for i, s in enumerate(half) if s.recovered]
    assert len(at) == 1 and at[0] > 23 + 3


def test_canary_alarms_again_after_recovery():
    steps = analyze_runs(watched(), ["FPPPP"] * 8 + ["PPPPP"] * 8 + ["FPPPP"] * 8)
    assert sum(bool(s.alarmed) for s in steps) == 2


def test_runs_without_a_verdict_do_not_change_the_evidence():
    steps = analyze_runs(watched(), ["FPPPP", "EPPPP", "FPPPP", "EPPPP", "FPPPP"])
    without_errors = analyze_runs(watched(), ["FPPPP"] * 3)
    for one, other in ((steps[0], without_errors[0]), (steps[2], without_errors[1]), (steps[4], without_errors[2])):
        assert one.state.canaries["c0"].cusums == other.state.canaries["c0"].cusums
    assert steps[-1].alarmed == without_errors[-1].alarmed == ("c0",)
    assert [s.errors for s in steps] == [0, 1, 0, 1, 0]


def test_target_without_answers_is_unreachable_immediately():
    steps = analyze_runs(watched(), ["PPPPP", "EEEEE", "EEEEE", "PPPPP"])
    assert [s.unreachable for s in steps] == [False, True, True, False]
    assert steps[2].state.unanswered_since == NOON + timedelta(hours=1)
    assert not any(s.blind or s.alarmed for s in steps)


def test_target_with_few_answers_is_unreachable_after_three_runs():
    steps = analyze_runs(watched(), ["PEEEP", "PEEEP", "PEEEP", "PPPPP", "PEEEP"])
    assert [s.unreachable for s in steps] == [False, False, True, False, False]


def test_target_is_reachable_if_one_canary_of_a_large_set_is_unanswered():
    found = analyze_run(CusumState(), results(0, "E"), watched(50), AlarmLimits())
    assert not found.unreachable
    assert analyze_run(CusumState(), results(0, "E"), watched(1), AlarmLimits()).unreachable


def test_canary_without_answers_is_blind_if_others_have_answers():
    steps = analyze_runs(watched(), ["PPPPE"] * 4 + ["PPPPP"])
    assert [s.blind for s in steps] == [(), (), ("c4",), ("c4",), ()]


def test_canaries_without_alerts_never_alarm_and_are_not_repeated():
    set_ = watched(alerts=False)
    assert not any(s.alarmed for s in analyze_runs(set_, ["FFFFF"] * 20))
    assert canaries_to_repeat(CusumState(), results(0, "FFFFF"), set_, AlarmLimits()) == ()


def test_another_baseline_resets_the_state():
    state = analyze_runs(watched(), ["FPPPP"] * 3)[-1].state
    other = watched(flakes=FlakeCounts(50, 1))
    cusum = analyze_run(state, results(9, "FPPPP"), other, AlarmLimits(max_repeats=0)).state.canaries["c0"]
    assert cusum.recent == "F" and cusum.flakes == FlakeCounts(50, 1)


def test_removes_the_state_of_canaries_removed_from_the_set():
    state = analyze_runs(watched(5), ["FPPPP"] * 3)[-1].state
    found = analyze_run(state, results(9, "FPPPP"), watched(3), AlarmLimits())
    assert set(found.state.canaries) == {"c0", "c1", "c2"}
    assert found.judged == 3


def test_canary_that_always_failed_in_the_baseline_cannot_alarm():
    assert not any(s.alarmed for s in analyze_runs(watched(flakes=FlakeCounts(20, 20)), ["FFFFF"] * 50))


@given(st.lists(st.text("PFE", min_size=4, max_size=4), max_size=30), st.integers(0, 29))
def test_state_round_trips_through_json(runs, cut):
    set_ = watched(4, FlakeCounts(20, 1))
    whole = analyze_runs(set_, runs)
    state = CusumState()
    for number, letters in enumerate(runs):
        if number == cut:
            state = CusumState.from_json(json.loads(json.dumps(state.to_json())))
        found = analyze_run(state, results(number, letters), set_, AlarmLimits(max_repeats=0))
        assert found == whole[number]
        state = found.state


def test_analysis_is_deterministic():
    state = analyze_runs(watched(), ["FPPPP"] * 3)[-1].state
    again = [analyze_run(state, results(5, "FFPPP"), watched(), AlarmLimits()) for _ in range(2)]
    assert again[0] == again[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"canaries": (WatchedCanary("a\u200b"),)}, "printable"),
        ({"name": "a@b"}, "invalid name"),
        ({"name": ""}, "invalid name"),
        ({"canaries": (WatchedCanary("x" * 170),)}, "with this name of the set"),
    ],
)
def test_rejects_invalid_sets(fields, message):
    with pytest.raises(DataError, match=message):
        replace(WatchedSet("clinic", (WatchedCanary("a"),)), **fields)
