"""The fold over runs: against a simulation written apart from it, and case by case."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import ConfigError, DataError
from casemate.monitor.canaries.results import Result, Severity, Status
from casemate.monitor.trends.gauges import WEIGHTS, Limits, State, step, suspects
from casemate.monitor.trends.watched import Clean, Known, Watched
from tests.unit import canary_simulation as simulation

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
LETTERS = {"P": Status.PASS, "F": Status.FAIL, "E": Status.ERROR}


HUNDRED = Clean(100, 0)
ONCE = Limits(confirm=0)


def watched(n=5, clean=HUNDRED, **fields):
    return Watched("clinic", tuple(Known(f"c{i}", Severity.MEDIUM, clean, **fields) for i in range(n)))


def results(number, letters, suffix="", ids=None):
    """One run: a letter for each canary."""
    at = NOON + timedelta(hours=number)
    names = ids or [f"c{i}" for i in range(len(letters))]
    return [
        Result(i, f"clinic@{at:%Y-%m-%dT%H:%M:%SZ}{suffix}", at, LETTERS[x])
        for i, x in zip(names, letters, strict=True)
    ]


def fold(set_, runs, limits=ONCE):
    """The steps of some runs, each a word of letters."""
    steps, state = [], State()
    for number, letters in enumerate(runs):
        steps.append(step(state, results(number, letters), set_, limits))
        state = steps[-1].state
    return steps


def by_production(draws, truth, clean, limits, severities):
    """What the simulation does for one set, by the code that the monitor runs."""
    set_ = Watched(
        "clinic", tuple(Known(f"c{i}", s, c) for i, (s, c) in enumerate(zip(severities, clean, strict=True)))
    )
    state, run, alarmed, repeats = State(), 0, [], 0
    while (rate := truth(run)) is not None:
        u = draws(run)
        rate = np.broadcast_to(rate, len(clean))
        asked, ids = [], [f"c{i}" for i in range(len(clean))]
        for number in range(limits.confirm + 1):
            fails = [u[number][0][int(i[1:])] < rate[int(i[1:])] for i in ids]
            asked += results(run, "".join("F" if f else "P" for f in fails), f"~{number}" if number else "", ids)
            ids = suspects(state, asked, set_, limits)
            if not ids:
                break
            repeats += len(ids) if number < limits.confirm else 0
        found = step(state, asked, set_, limits)
        alarmed.append([c.id in found.alarmed for c in set_.canaries])
        state, run = found.state, run + 1
    return np.array(alarmed), repeats


@pytest.mark.parametrize("seed", range(4))
def test_fold_and_simulation_alarm_in_the_same_runs(seed):
    rng = np.random.default_rng(seed)
    n, runs, asked = 12, 400, 40
    base = rng.choice([0.0, 0.01, 0.05, 0.3], n)
    periods = [np.where(rng.random(n) < 0.25, rng.choice([0.3, 0.6, 1.0]), base) for _ in range(runs // 20)]
    table = rng.random((runs, 6, 1, n))
    failed = rng.binomial(asked, base)[None]
    severities = [list(Severity)[i] for i in rng.integers(0, 4, n)]

    def truth(run):
        return periods[run // 20] if run < runs else None

    weights = np.array([WEIGHTS[s] for s in severities])
    oracle = simulation.simulate(lambda run: table[run], truth, asked, failed, weights=weights, keep=True)
    clean = [Clean(asked, int(f)) for f in failed[0]]
    alarmed, repeats = by_production(lambda run: table[run], truth, clean, Limits(), severities)
    assert oracle.alerts > 20
    assert np.array_equal(alarmed, oracle.alarmed[:, 0])
    assert repeats == oracle.repeats


def test_a_failure_now_and_then_alarms_nobody():
    steps = fold(watched(), ["PPPPP", "FPPPP", *["PPPPP"] * 30, "PFPPP", *["PPPPP"] * 30, "FPPPP"])
    assert not any(s.alarmed for s in steps)
    assert [s.failed for s in steps if s.failed] == [("c0",), ("c1",), ("c0",)]


def test_a_canary_that_fails_on_and_on_alarms_once_and_says_since_when():
    steps = fold(watched(), ["PPPPP"] * 3 + ["FPPPP"] * 12)
    (alarm,) = [i for i, s in enumerate(steps) if s.alarmed]
    assert alarm == 3 + 2  # three failures in a row, with a baseline of 100 runs
    assert steps[alarm].alarmed == ("c0",)
    assert steps[alarm].state.gauges["c0"].since == NOON + timedelta(hours=3)
    assert not steps[alarm].many


def test_asked_again_within_the_run_it_alarms_in_the_first():
    set_, limits, asked = watched(), Limits(), results(0, "FPPPP")
    rounds = 0
    while (again := suspects(State(), asked, set_, limits)) and rounds < limits.confirm:
        assert again == ("c0",)
        rounds += 1
        asked += results(0, "F", f"~{rounds}", again)
    found = step(State(), asked, set_, limits)
    assert (found.alarmed, rounds) == (("c0",), 3)
    assert found.failed == ("c0",)
    assert found.asked == 5


def test_a_repetition_that_passes_takes_the_suspicion_away_but_is_no_pass_of_the_run():
    asked = [*results(0, "FPPPP"), *results(0, "P", "~1", ["c0"]), *results(0, "P", "~2", ["c0"])]
    found = step(State(), asked, watched(), Limits())
    assert not found.alarmed
    assert found.failed == ("c0",)
    assert found.state.gauges["c0"].recent == "F"


def test_failures_that_come_in_bursts_count_less_where_the_limits_say_so():
    asked = [*results(0, "FPPPP"), *(r for i in range(1, 5) for r in results(0, "F", f"~{i}", ["c0"]))]
    assert step(State(), asked, watched(), Limits()).alarmed
    assert not step(State(), asked, watched(), Limits(echo=0.5)).alarmed


def test_a_critical_canary_needs_less_than_a_low_one():
    def runs_until(severity):
        canaries = (
            Known("c0", severity, Clean(200, 0)),
            *(Known(f"c{i}", Severity.LOW, Clean(200, 0)) for i in range(1, 9)),
        )
        steps = fold(Watched("clinic", canaries), ["F" + "P" * 8] * 9)
        return next(i for i, s in enumerate(steps, 1) if s.alarmed)

    assert (runs_until(Severity.CRITICAL), runs_until(Severity.LOW)) == (2, 3)


def test_many_failures_at_once_alarm_at_once_all_of_them():
    steps = fold(watched(50), ["P" * 50, "F" * 6 + "P" * 44])
    assert steps[1].many
    assert steps[1].alarmed == tuple(f"c{i}" for i in range(6))
    assert steps[1].chance < 1 / 2000
    assert not fold(watched(50), ["P" * 50, "F" * 2 + "P" * 48])[1].alarmed


def test_failures_that_most_repetitions_do_not_bear_out_are_not_many():
    asked = results(0, "F" * 6 + "P" * 44)
    for number in (1, 2):
        asked += results(0, "PPPPPP", f"~{number}", [f"c{i}" for i in range(6)])
    found = step(State(), asked, watched(50), Limits())
    assert not found.many and found.chance == 1.0


def test_that_many_fail_at_once_is_asked_again_once():
    asked, names = results(0, "F" * 6 + "P" * 44), tuple(f"c{i}" for i in range(6))
    assert suspects(State(), asked, watched(50), Limits()) == names
    over = [*asked, *results(0, "PPPPPP", "~1", names)]
    assert not step(State(), over, watched(50), Limits()).alarmed
    lasting = [*asked, *results(0, "FFFFFF", "~1", names)]
    assert step(State(), lasting, watched(50), Limits()).alarmed == names
    assert suspects(State(), lasting, watched(50), Limits()) == ()


def test_while_it_is_alarmed_it_neither_alarms_nor_counts_among_the_many():
    set_ = watched(50)
    steps = fold(set_, ["F" * 6 + "P" * 44] + ["F" * 6 + "P" * 44] * 5 + ["F" * 7 + "P" * 43])
    assert [bool(s.alarmed) for s in steps] == [True] + [False] * 6
    assert steps[-1].chance > 0.1


def test_it_is_well_again_after_passes_enough_for_how_bad_it_was():
    steps = fold(watched(), ["FPPPP"] * 8 + ["PPPPP"] * 8)
    assert [i for i, s in enumerate(steps) if s.recovered] == [8 + 2]
    half = fold(watched(), ["FPPPP", "PPPPP"] * 12 + ["PPPPP"] * 12)
    at = [i for i, s in enumerate(half) if s.recovered]
    assert len(at) == 1 and at[0] > 23 + 3


def test_it_alarms_anew_when_it_fails_again_after_it_was_well():
    steps = fold(watched(), ["FPPPP"] * 8 + ["PPPPP"] * 8 + ["FPPPP"] * 8)
    assert sum(bool(s.alarmed) for s in steps) == 2


def test_what_could_not_be_judged_says_nothing():
    steps = fold(watched(), ["FPPPP", "EPPPP", "FPPPP", "EPPPP", "FPPPP"])
    bare = fold(watched(), ["FPPPP"] * 3)
    for one, other in ((steps[0], bare[0]), (steps[2], bare[1]), (steps[4], bare[2])):
        assert one.state.gauges["c0"].sums == other.state.gauges["c0"].sums
    assert steps[-1].alarmed == bare[-1].alarmed == ("c0",)
    assert [s.errors for s in steps] == [0, 1, 0, 1, 0]


def test_a_target_that_never_answers_is_down_at_once_and_up_when_it_answers():
    steps = fold(watched(), ["PPPPP", "EEEEE", "EEEEE", "PPPPP"])
    assert [s.unreachable for s in steps] == [False, True, True, False]
    assert steps[2].state.down_since == NOON + timedelta(hours=1)
    assert not any(s.blind or s.alarmed for s in steps)


def test_a_target_that_hardly_answers_is_down_after_three_runs():
    steps = fold(watched(), ["PEEEP", "PEEEP", "PEEEP", "PPPPP", "PEEEP"])
    assert [s.unreachable for s in steps] == [False, False, True, False, False]


def test_one_canary_of_a_large_set_that_is_due_alone_does_not_take_the_target_down():
    found = step(State(), results(0, "E"), watched(50), Limits())
    assert not found.unreachable
    assert step(State(), results(0, "E"), watched(1), Limits()).unreachable


def test_a_canary_without_answers_is_blind_while_others_get_theirs():
    steps = fold(watched(), ["PPPPE"] * 4 + ["PPPPP"])
    assert [s.blind for s in steps] == [(), (), ("c4",), ("c4",), ()]


def test_canaries_that_page_nobody_never_alarm_and_are_not_asked_again():
    set_ = watched(pages=False)
    assert not any(s.alarmed for s in fold(set_, ["FFFFF"] * 20))
    assert suspects(State(), results(0, "FFFFF"), set_, Limits()) == ()


def test_under_another_baseline_it_begins_anew():
    state = fold(watched(), ["FPPPP"] * 3)[-1].state
    other = watched(clean=Clean(50, 1))
    gauge = step(state, results(9, "FPPPP"), other, Limits(confirm=0)).state.gauges["c0"]
    assert gauge.recent == "F" and gauge.clean == Clean(50, 1)


def test_canaries_that_left_the_set_are_forgotten():
    state = fold(watched(5), ["FPPPP"] * 3)[-1].state
    found = step(state, results(9, "FPPPP"), watched(3), Limits())
    assert set(found.state.gauges) == {"c0", "c1", "c2"}
    assert found.asked == 3


def test_a_canary_that_always_flaked_cannot_alarm():
    assert not any(s.alarmed for s in fold(watched(clean=Clean(20, 20)), ["FFFFF"] * 50))


@given(st.lists(st.text("PFE", min_size=4, max_size=4), max_size=30), st.integers(0, 29))
def test_what_an_event_keeps_goes_on_as_if_nothing_had_been(runs, cut):
    set_ = watched(4, Clean(20, 1))
    whole = fold(set_, runs)
    state = State()
    for number, letters in enumerate(runs):
        if number == cut:
            state = State.from_json(json.loads(json.dumps(state.to_json())))
        found = step(state, results(number, letters), set_, Limits(confirm=0))
        assert found == whole[number]
        state = found.state


def test_the_same_step_twice_is_the_same():
    state = fold(watched(), ["FPPPP"] * 3)[-1].state
    again = [step(state, results(5, "FFPPP"), watched(), Limits()) for _ in range(2)]
    assert again[0] == again[1]


@pytest.mark.parametrize("options", [{"budget": 0}, {"confirm": 10}, {"echo": 1.0}, {"errors": 0}, {"passes": 11}])
def test_limits_out_of_range(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Limits(**options)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"canaries": ()}, "is empty"),
        ({"canaries": (Known("a"), Known("a"))}, "'a' more than once"),
        ({"canaries": (Known("a\u200b"),)}, "printable"),
        ({"name": "a@b"}, "cannot be called"),
        ({"name": ""}, "cannot be called"),
        ({"canaries": (Known("x" * 170),)}, "fit beside"),
        ({"every": 0.5}, "whole seconds"),
        ({"canaries": (Known("a", every=2.5),)}, "whole seconds"),
        ({"canaries": (Known("a", clean=Clean(2, 3)),)}, "3 failures of 2"),
    ],
)
def test_a_set_that_cannot_be_watched(fields, says):
    with pytest.raises(DataError, match=says):
        replace(Watched("clinic", (Known("a"),)), **fields)
