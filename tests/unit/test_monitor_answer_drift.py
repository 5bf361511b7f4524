from datetime import UTC, datetime, timedelta
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, result_to_event
from casemate.monitor.drift import answer_drift as module
from casemate.monitor.drift.answer_drift import (
    CONCENTRATION,
    FLAGGED,
    HUB,
    LENGTH,
    OVERLAP,
    REFUSALS,
    Observation,
    detect_drift,
    observations_of_verdicts,
    windows_by_run,
    windows_by_time,
)
from casemate.types import Event

AT = datetime(2026, 3, 1, tzinfo=UTC)


def traffic(rng, count=60, refused=0.08, hub=0.0, length=3.5, flagged=0.02):
    """Simulated questions over 1,000 documents, some of which are retrieved often."""
    weights = 1 / np.arange(1, 1001) ** 0.6
    found = []
    for _ in range(count):
        ids = [f"d{i}" for i in rng.choice(1000, 5, replace=False, p=weights / weights.sum())]
        if rng.random() < hub:
            ids[-1] = "poison"
        answer = (bool(rng.random() < refused), int(rng.lognormal(length, 0.6)))
        sources = tuple(f"s{i}" for i in ids)
        found.append(
            Observation(f"q{rng.integers(1 << 40)}", AT, *answer, tuple(ids), sources, bool(rng.random() < flagged))
        )
    return found


def canaries(rng, count=40, refused=(), changed=0.01, other=()):
    """A simulated run of canaries with nearly constant answers."""
    found = []
    for i in range(count):
        own = np.random.default_rng(i)
        ids = [f"d{x}" for x in own.choice(1000, 5, replace=False)]
        if rng.random() < changed:
            ids[-1] = f"n{rng.integers(100)}"
        if i in other:
            ids[0], ids[1] = "poison", "poison2"
        words = int(own.integers(5, 60))
        found.append(Observation(f"c{i}", AT, i in refused, words, tuple(ids), tuple(f"s{x}" for x in ids)))
    return found


def first_alarm(windows, reference, paired, **options):
    """Window after the reference, and signals, of the first alarm."""
    for number, readings in enumerate(detect_drift(windows, reference, paired=paired, **options), start=1):
        if alarms := [r.signal for r in readings if r.alarm]:
            return number, alarms
    return None, []


def windows_with_change(make, change, seed=0, reference=10, windows=12):
    """Unchanged windows, then changed ones."""
    rng = np.random.default_rng(seed)
    return [make(rng) for _ in range(reference)] + [make(rng, **change) for _ in range(windows)]


class TestFalseAlarms:
    @pytest.mark.slow
    def test_number_of_first_alarms_is_within_the_budget(self):
        """Seeded simulation: at one alarm in 20 windows, 60 sequences of 20 windows may have 60 first alarms."""
        alarms = 0
        for seed in range(60):
            rng = np.random.default_rng([seed, 1])
            paired = seed % 2 == 0
            make = canaries if paired else traffic
            options = {"changed": 0.1} if paired else {"count": 30}
            windows = [make(rng, **options) for _ in range(25)]
            alarms += first_alarm(windows, 5, paired, windows_per_false_alarm=20.0, seed=seed)[0] is not None
        assert alarms <= 15

    def test_identical_windows_never_alarm(self):
        rng = np.random.default_rng(0)
        readings = [r for w in detect_drift([canaries(rng, changed=0.0)] * 12, 5, paired=True) for r in w]
        assert {r.p for r in readings} == {1.0}
        assert not any(r.alarm for r in readings)

    @pytest.mark.slow
    def test_p_values_are_valid_and_independent(self):
        found = []
        for seed in range(80):
            rng = np.random.default_rng([seed, 2])
            windows = [traffic(rng, count=20) for _ in range(8)]
            readings = detect_drift(windows, 3, paired=False, seed=seed)
            found.append([next(r.p for r in w if r.signal == LENGTH) for w in readings])
        P = np.array(found)
        for level in (0.05, 0.2, 0.5):
            assert (P <= level).mean() <= level + 2.5 * np.sqrt(level * (1 - level) / P.size)
        correlation = np.corrcoef(P.T)[np.triu_indices(5, 1)]
        assert abs(correlation.mean()) < 0.1


class TestPower:
    def test_detects_refusals_caused_by_a_jamming_attack(self):
        windows = windows_with_change(traffic, {"refused": 0.3}, windows=5)
        assert first_alarm(windows, 10, paired=False)[1] == [REFUSALS]

    def test_detects_and_reports_the_hub_of_a_backdoor(self):
        windows = windows_with_change(traffic, {"hub": 0.15}, windows=3)
        readings = detect_drift(windows, 10, paired=False)
        alarmed = next(r for w in readings for r in w if r.alarm)
        assert (alarmed.signal, alarmed.documents) == (HUB, ("poison",))
        assert alarmed.value > 0.05
        assert alarmed.reference < 0.02

    def test_common_document_does_not_alarm(self):
        assert first_alarm(windows_with_change(traffic, {}), 10, paired=False) == (None, [])

    def test_detects_shorter_answers(self):
        assert first_alarm(windows_with_change(traffic, {"length": 3.0}, windows=3), 10, paired=False)[1] == [LENGTH]

    @pytest.mark.slow
    def test_detects_flagged_questions(self):
        assert first_alarm(windows_with_change(traffic, {"flagged": 0.25}), 10, paired=False)[1] == [FLAGGED]

    @pytest.mark.slow
    def test_detects_a_slow_drift_by_accumulated_evidence(self):
        rng = np.random.default_rng(5)
        windows = [traffic(rng) for _ in range(10)] + [traffic(rng, refused=0.08 + 0.015 * i) for i in range(25)]
        number, alarms = first_alarm(windows, 10, paired=False)
        assert alarms == [REFUSALS]
        readings = detect_drift(windows[: 10 + number], 10, paired=False)
        assert max(r.p for r in readings[-1] if r.signal == REFUSALS) > 1 / 6000  # no single window is significant

    @pytest.mark.slow
    def test_paired_comparison_detects_a_few_refused_canaries(self):
        windows = windows_with_change(canaries, {"refused": range(5)}, reference=20, windows=3)
        assert first_alarm(windows, 20, paired=True)[1] == [REFUSALS]

    @pytest.mark.slow
    def test_detects_changed_contexts_of_canaries(self):
        windows = windows_with_change(canaries, {"other": range(6)}, reference=20, windows=3)
        assert {OVERLAP, HUB} & set(first_alarm(windows, 20, paired=True)[1])

    def test_detects_few_sources(self):
        def narrow(rng, few=False):
            found = traffic(rng, count=40)
            pool = [f"s{i}" for i in range(3)] if few else [f"s{i}" for i in range(400)]
            return [
                Observation(o.question, AT, sources=tuple(rng.choice(pool, 3)), words=o.words, refused=o.refused)
                for o in found
            ]

        windows = windows_with_change(narrow, {"few": True}, windows=4)
        assert first_alarm(windows, 10, paired=False)[1] == [CONCENTRATION]


class TestReadings:
    def test_missing_signals_have_no_reading(self):
        rng = np.random.default_rng(0)
        windows = [[Observation(o.question, AT, flagged=o.flagged) for o in traffic(rng, 20)] for _ in range(6)]
        assert [[r.signal for r in w] for w in detect_drift(windows, 3, paired=False)] == [[FLAGGED]] * 3

    def test_values_equal_manual_calculations(self):
        answering = [Observation(f"q{i}", AT, False, 9, ("a", "b"), ("s", "t")) for i in range(10)]
        refusing = [Observation(f"q{i}", AT, i < 4, 19, ("a", "x"), ("s", "s")) for i in range(10)]
        (readings,) = detect_drift([answering, answering, answering, refusing], 3, paired=True)
        values = {r.signal: (round(r.value, 4), round(r.reference, 4)) for r in readings}
        assert values[REFUSALS] == (0.4, 0.0)
        assert values[LENGTH] == (round(np.log(20), 4), round(np.log(10), 4))
        assert values[OVERLAP] == (round((1 + 0.9 * 0.5) / 1.9, 4), 1.0)
        assert values[CONCENTRATION] == (1.0, round(2 * 20 * 19 / (40 * 39), 4))
        assert values[HUB] == (1.0, 0.0)
        assert next(r for r in readings if r.signal == HUB).documents == ("x",)

    @pytest.mark.slow
    def test_alarm_resets_the_evidence_and_excludes_the_window_from_the_reference(self):
        windows = windows_with_change(traffic, {"refused": 0.4}, windows=30)
        readings = [next(r for r in w if r.signal == REFUSALS) for w in detect_drift(windows, 10, paired=False)]
        alarms = [i for i, r in enumerate(readings) if r.alarm]
        assert len(alarms) >= 2
        assert readings[alarms[0] + 1].evidence < readings[alarms[0]].evidence
        assert readings[-1].reference < 0.3

    def test_readings_are_reproducible(self):
        windows = windows_with_change(traffic, {}, windows=3)
        assert detect_drift(windows, 10, paired=False, seed=1) == detect_drift(windows, 10, paired=False, seed=1)


class TestPermutations:
    @given(st.lists(st.integers(0, 5), min_size=4, max_size=8), st.integers(1, 3))
    def test_p_value_is_the_share_of_permutations(self, values, size):
        v = np.array(values, float)
        limit = v[:size].mean()
        exact = np.mean([v[list(c)].mean() >= limit - 1e-12 for c in combinations(range(len(v)), size)])
        p = module._permutation_p(
            lambda c: v[c].mean(axis=1), np.arange(size)[None], np.zeros(len(v), np.int64), np.random.default_rng(0)
        )
        assert p == pytest.approx(exact, rel=1.0, abs=0.02)  # imprecise for large p: sampling stops early
        assert p > 0

    def test_permutations_respect_strata(self):
        strata = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2])
        seen = []

        def statistic(choices):
            seen.append(strata[choices])
            return np.zeros(len(choices))

        module._permutation_p(statistic, np.array([[0, 1, 2]]), strata, np.random.default_rng(0))
        assert all((np.sort(rows, axis=1) == [0, 1, 2]).all() for rows in seen)

    def test_extreme_window_has_the_smallest_p_value(self):
        v = np.r_[np.ones(5), np.zeros(60)]
        p = module._permutation_p(
            lambda c: v[c].sum(axis=1), np.arange(5)[None], np.zeros(65, int), np.random.default_rng(0)
        )
        assert p == 1 / (module.MAX_DRAWS + 1)


class TestObservations:
    def verdict(self, request, client="ann", flagged=False):
        body = {"request": request, "client": client, "flagged": flagged, "defense": "mirabel"}
        return Event(f"{request}-{flagged}", AT, "verdict", body)

    def test_separates_canaries_from_traffic(self):
        kept = CanaryResult("c", "r", AT, CanaryStatus.PASS, documents=("a",), sources=("s",), refused=True, words=4)
        broken = CanaryResult("d", "r", AT, CanaryStatus.ERROR, error="late")
        again = CanaryResult("c", "r~1", AT, CanaryStatus.PASS)
        events = [
            result_to_event(kept),
            self.verdict("q1"),
            self.verdict("q1", flagged=True),
            self.verdict("q2"),
            self.verdict("q3", client="canary-c", flagged=True),
            self.verdict("q4", client="shadow"),
            Event("x", AT, "other", {}),
        ]
        later = CanaryResult("c", "r2", AT, CanaryStatus.FAIL, words=1)
        assert windows_by_run([kept, broken, again, later]) == [
            [Observation("c", AT, True, 4, ("a",), ("s",))],
            [Observation("c", AT, False, 1)],
        ]
        passing = observations_of_verdicts(events, ("canary", "shadow"))
        assert [(o.question, o.flagged, o.refused) for o in passing] == [("q1", True, None), ("q2", False, None)]

    def test_groups_observations_by_time(self):
        found = [Observation(str(h), AT + timedelta(hours=h)) for h in (30, 0, 5, 23, 100)]
        ended, later = (windows_by_time(found, 86400, AT + timedelta(hours=h)) for h in (119, 120))
        assert [[o.question for o in w] for w in later] == [["0", "5", "23"], ["30"], ["100"]]
        assert ended == later[:2]  # the last day has not ended
        assert windows_by_time([], 60, AT) == []
