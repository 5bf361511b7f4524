"""The trend: page rules, findings and summaries of a history."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, Deviation, Severity, result_to_event
from casemate.monitor.trends.cusum import AlarmLimits, CusumState, WatchedCanary, WatchedSet
from casemate.monitor.trends.sequential_tests import FlakeCounts
from casemate.monitor.trends.trend import (
    BLIND,
    CHANGED,
    FAILURES,
    MANY,
    PERSISTENT,
    SUDDEN,
    UNREACHABLE,
    compute_trend,
    read_results,
)
from tests.unit.monitor_stores import InMemoryEventStore

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
STATUS_OF_LETTER = {"P": CanaryStatus.PASS, "F": CanaryStatus.FAIL, "E": CanaryStatus.ERROR}
NO_REPEATS = AlarmLimits(max_repeats=0)


def watched(n):
    return WatchedSet("clinic", tuple(WatchedCanary(f"c{i}", Severity.MEDIUM, FlakeCounts(100, 0)) for i in range(n)))


def history(*runs):
    """Runs, each given as one letter per canary."""
    found = []
    for number, letters in enumerate(runs):
        at = NOON + timedelta(hours=number)
        name = f"clinic@{at:%Y-%m-%dT%H:%M:%SZ}"
        found += [CanaryResult(f"c{i}", name, at, STATUS_OF_LETTER[x]) for i, x in enumerate(letters)]
    return found


def kinds(found, kind):
    return [f for f in found.findings if f.kind == kind]


@given(st.lists(st.text("PFE", min_size=3, max_size=3), min_size=1, max_size=25))
def test_page_rules_equal_those_of_the_wiki_page(runs):
    """Compares with the algorithm of the wiki page, with one timeline per canary."""
    sudden, persistent, rate = [], [], []
    for i in range(3):
        line = [(number, run[i] == "P") for number, run in enumerate(runs) if run[i] != "E"]
        sudden += [(line[j][0], f"c{i}") for j in range(1, len(line)) if line[j - 1][1] and not line[j][1]]
        if sum(not passed for _, passed in line[-10:]) >= 8:
            persistent.append(f"c{i}")
    for number, run in enumerate(runs):
        judged = [x for x in run if x != "E"]
        if judged and judged.count("F") / len(judged) > 0.10:
            rate.append(number)
    found = compute_trend(history(*runs), watched(3), NO_REPEATS)
    assert [(int((f.at - NOON).total_seconds()) // 3600, *f.canaries) for f in kinds(found, SUDDEN)] == sorted(sudden)
    assert sorted(i for f in kinds(found, PERSISTENT) for i in f.canaries) == persistent
    assert [int((f.at - NOON).total_seconds()) // 3600 for f in kinds(found, FAILURES)] == rate


def test_failure_rate_of_exactly_ten_percent_is_not_a_finding():
    assert not kinds(compute_trend(history("F" + "P" * 9), watched(10), NO_REPEATS), FAILURES)
    assert kinds(compute_trend(history("FF" + "P" * 8), watched(10), NO_REPEATS), FAILURES)


def test_page_rules_alert_only_if_configured():
    runs = history("PPPPPPPPPP", "FFPPPPPPPP", *["FPPPPPPPPP"] * 9)
    ruled = {SUDDEN, PERSISTENT, FAILURES}
    assert {f.kind for f in compute_trend(runs, watched(10), NO_REPEATS).findings if not f.alerts} == ruled
    with_alerts = compute_trend(runs, watched(10), AlarmLimits(max_repeats=0, page_rules=True))
    assert {f.kind for f in with_alerts.findings if f.alerts} >= ruled


def test_alarms_are_findings_with_their_canaries():
    (changed,) = kinds(compute_trend(history("PPPPP", *["FPPPP"] * 6), watched(5), NO_REPEATS), CHANGED)
    assert (changed.canaries, changed.severity, changed.alerts) == (("c0",), Severity.MEDIUM, True)
    (many,) = kinds(compute_trend(history("P" * 50, "F" * 8 + "P" * 42), watched(50), NO_REPEATS), MANY)
    assert many.severity is Severity.CRITICAL
    assert "8 of 50 canaries failed at once" in many.message
    assert many.alerts


def test_reports_missing_answers_once():
    runs = history("PPPP", "EEEE", "EEEE", "PPPP", *["PPPE"] * 5)
    found = compute_trend(runs, watched(4), NO_REPEATS)
    assert [f.run[-9:-4] for f in kinds(found, UNREACHABLE)] == ["13:00"]
    (blind,) = kinds(found, BLIND)
    assert blind.canaries == ("c3",)
    assert not kinds(found, CHANGED)


def test_summarizes_canaries_and_runs():
    found = compute_trend(
        history("PPP", "FPE", "FPP"), WatchedSet("clinic", (*watched(3).canaries, WatchedCanary("new"))), NO_REPEATS
    )
    line, _, third, new = found.canaries
    assert (line.judged, line.failed, line.errors, line.last, line.recent) == (3, 2, 0, CanaryStatus.FAIL, "PFF")
    assert line.since == NOON + timedelta(hours=1)
    assert line.evidence > 1 > third.evidence
    assert (third.judged, third.errors, third.last) == (2, 1, CanaryStatus.PASS)
    assert (new.last, new.judged, new.flake_rate, new.assumed_flake_rate) == (None, 0, None, 0.2)
    assert [(r.judged, r.failed, r.errors) for r in found.runs] == [(3, 0, 0), (2, 1, 1), (3, 1, 0)]
    assert found.runs[0].p_value == 1 > found.runs[1].p_value


def test_repetitions_count_in_their_run():
    runs = history("FPP")
    runs.append(CanaryResult("c0", f"{runs[0].run}~1", NOON, CanaryStatus.PASS))
    found = compute_trend(runs, watched(3), NO_REPEATS)
    assert len(found.runs) == 1
    assert found.canaries[0].judged == 1
    assert found.state.canaries["c0"].recent == "F"


def test_empty_history_has_no_findings():
    found = compute_trend([], watched(2), NO_REPEATS)
    assert (found.runs, found.findings, found.state) == ((), (), CusumState())
    assert [line.last for line in found.canaries] == [None, None]


def test_reads_only_results_of_the_set():
    store = InMemoryEventStore()
    for result in history("PF"):
        store.append(result_to_event(result))
    store.append(result_to_event(CanaryResult("c0", "clinical@x", NOON, CanaryStatus.FAIL)))
    assert [r.status for r in read_results(store, "clinic")] == [CanaryStatus.PASS, CanaryStatus.FAIL]
    assert read_results(store, "clinic", NOON + timedelta(hours=1)) == []


def count_calls(task) -> int:
    """Counts calls of Python and C functions: a measure of work that does not depend on machine load."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        task()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(("canaries", "runs"), [(50, 200), (1, 10_000)])
def test_number_of_calls_is_linear_in_the_number_of_results(tmp_path, canaries, runs):
    rng = np.random.default_rng(0)
    store = SqlEventStore(path=tmp_path / "events.db")
    for number in range(runs):
        at = NOON + timedelta(hours=number)
        for i in range(canaries):
            failed = bool(rng.random() < 0.01)
            documents = tuple(f"docs/page-{j}.md#3" for j in rng.integers(0, 999, 5))
            status, why = (
                (CanaryStatus.FAIL, (Deviation("answer_mismatch", "not so"),)) if failed else (CanaryStatus.PASS, ())
            )
            name = f"clinic@{at:%Y-%m-%dT%H:%M:%SZ}"
            store.append(
                result_to_event(
                    CanaryResult(f"c{i}", name, at, status, why, "", 0.12, documents, documents, (0.7,) * 5)
                )
            )
    assert store.flush(60)
    results = read_results(store, "clinic")
    store.close()
    assert len(compute_trend(results, watched(canaries)).runs) == runs
    half = results[: len(results) // 2]
    calls = [count_calls(lambda held=held: compute_trend(held, watched(canaries))) for held in (half, results)]
    assert calls[1] < 2.2 * calls[0]
    assert calls[1] < 150 * len(results)
