"""The arithmetic of alarms, against independent ways to the same figures."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from casemate.monitor.trends import evidence
from casemate.monitor.trends.evidence import ALTERNATIVES, FLOOR, MOST, NOTHING
from casemate.monitor.trends.watched import Clean
from casemate.stats import clopper_pearson

RATES = st.floats(0.001, 0.999)


@given(st.lists(RATES, min_size=1, max_size=12))
def test_the_law_of_failures_is_that_of_all_ways_to_fail(flake):
    oracle = np.zeros(len(flake) + 1)
    for fails in itertools.product((False, True), repeat=len(flake)):
        p = math.prod(q if f else 1 - q for f, q in zip(fails, flake, strict=True))
        oracle[: sum(fails) + 1] += p
    assert evidence.failures_tail(tuple(flake)) == pytest.approx(oracle, rel=1e-9, abs=1e-300)


@given(st.integers(1, 300), RATES)
def test_with_one_rate_it_is_the_binomial_law(n, p):
    k = np.arange(n + 1)
    assert evidence.failures_tail((p,) * n) == pytest.approx(binom.sf(k - 1, n, p), rel=1e-8, abs=1e-200)


def test_the_tail_keeps_its_figures_far_out():
    assert evidence.failures_tail((0.01,) * 50)[20] == pytest.approx(binom.sf(19, 50, 0.01), rel=1e-9)


def test_the_pages_rules_would_strike_in_39_percent_of_the_runs():
    assert evidence.failures_tail((0.01,) * 50)[1] == pytest.approx(1 - 0.99**50)
    assert round(1 - 0.99**50, 2) == 0.39


@given(st.integers(1, 400), st.data())
def test_the_flake_bound_is_clopper_and_pearsons(asked, data):
    failed = data.draw(st.integers(0, asked))
    oracle = max(clopper_pearson(failed, asked, 0.6)[1], FLOOR)
    assert evidence.flake_bound(Clean(asked, failed)) == pytest.approx(oracle, abs=1e-8)


def test_the_flake_bound_covers_as_often_as_it_says():
    rng = np.random.default_rng(3)
    for p in (0.01, 0.03, 0.1):
        bounds = [evidence.flake_bound(Clean(60, int(f))) for f in rng.binomial(60, p, 4000)]
        assert np.mean(np.array(bounds) >= p) >= 0.79


@given(st.integers(1, 100), st.data())
def test_a_flake_rate_is_a_rate_and_grows_with_failures(asked, data):
    failed = data.draw(st.integers(0, asked - 1))
    for rate in (evidence.flake_bound, evidence.flake_mean):
        assert FLOOR <= rate(Clean(asked, failed)) <= rate(Clean(asked, failed + 1)) <= 1


@given(RATES, st.integers(0, 5), st.integers(0, 5))
def test_the_ratio_is_that_of_the_likelihoods(flake, failed, passed):
    for p, ratio in zip(ALTERNATIVES, evidence.ratio(flake, failed, passed), strict=True):
        oracle = binom.pmf(failed, failed + passed, p) / binom.pmf(failed, failed + passed, flake) if p > flake else 1
        assert ratio == pytest.approx(oracle, rel=1e-6) or (failed and oracle > MOST / 2)


@given(RATES, RATES)
def test_evidence_grows_by_chance_no_faster_than_one_a_run(flake, below):
    """What the promise rests on: with a true rate no larger than p0, one answer multiplies by 1 at most, on average."""
    true = min(flake, below)
    for failed, passed in zip(evidence.ratio(flake, 1, 0), evidence.ratio(flake, 0, 1), strict=True):
        assert true * failed + (1 - true) * passed <= 1 + 1e-9


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), st.lists(st.floats(0, 1e3), min_size=3, max_size=3))
def test_evidence_begins_anew_at_one(sums, ratios):
    added = evidence.add(tuple(sums), tuple(ratios))
    assert added == tuple(min(max(s, 1) * r, MOST) for s, r in zip(sums, ratios, strict=True))
    assert evidence.add(NOTHING, (2.0, 0.5, 1.0), (3.0, 1.0, 0.5)) == (6.0, 0.5, 0.5)


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 3000)), st.floats(1, 3000))
def test_e_bh_picks_the_largest_set_whose_smallest_suffices(stakes, budget):
    fitting = [
        set(some)
        for k in range(1, len(stakes) + 1)
        for some in itertools.combinations(stakes, k)
        if min(stakes[i] for i in some) >= budget / k
    ]
    picked = evidence.alarms(stakes, budget)
    assert len(picked) == max((len(some) for some in fitting), default=0)
    assert not picked or min(stakes[i] for i in picked) * len(picked) >= budget * (1 - 1e-12)
    assert sum(stakes[i] for i in picked) >= (budget * (1 - 1e-12) if picked else 0)  # what an alarm costs


@given(st.integers(0, 40), st.integers(0, 40))
def test_passes_are_enough_when_a_canary_as_bad_would_hardly_have_them(failed, more):
    asked = failed + more
    n = evidence.enough_passes(failed, asked, 1, 10_000)
    rate = (failed + 0.5) / (asked + 1)
    assert (1 - rate) ** n <= 0.05 + 1e-12 < (1 - rate) ** (n - 1) + 1e-9
    assert evidence.enough_passes(failed, asked, 3, 10) == min(max(n, 3), 10)
