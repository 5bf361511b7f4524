"""The sequential tests, compared with independent computations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, betabinom, binom

from casemate.monitor.trends import sequential_tests
from casemate.monitor.trends.sequential_tests import (
    ALTERNATIVES,
    MAX_EVIDENCE,
    MIN_FLAKE_RATE,
    ZERO_CUSUMS,
    FlakeCounts,
)
from tests.unit.canary_simulation import RATES_GRID, null_density

RATES = st.floats(0.001, 0.999)


@given(st.lists(RATES, min_size=1, max_size=12))
def test_failures_tail_equals_enumeration(flake):
    oracle = np.zeros(len(flake) + 1)
    for fails in itertools.product((False, True), repeat=len(flake)):
        p = math.prod(q if f else 1 - q for f, q in zip(fails, flake, strict=True))
        oracle[: sum(fails) + 1] += p
    assert sequential_tests.failures_tail(tuple(flake)) == pytest.approx(oracle, rel=1e-9, abs=1e-300)


@given(st.integers(1, 300), RATES)
def test_failures_tail_with_one_rate_is_binomial(n, p):
    k = np.arange(n + 1)
    assert sequential_tests.failures_tail((p,) * n) == pytest.approx(binom.sf(k - 1, n, p), rel=1e-8, abs=1e-200)


def test_failures_tail_is_precise_for_tiny_probabilities():
    assert sequential_tests.failures_tail((0.01,) * 50)[20] == pytest.approx(binom.sf(19, 50, 0.01), rel=1e-9)


def test_probability_of_a_page_rule_finding_is_39_percent_per_run():
    assert sequential_tests.failures_tail((0.01,) * 50)[1] == pytest.approx(1 - 0.99**50)
    assert round(1 - 0.99**50, 2) == 0.39


@given(st.integers(1, 400), st.data())
def test_flake_rate_bound_is_clopper_pearson(asked, data):
    failed = data.draw(st.integers(0, asked))
    oracle = max(beta.ppf(0.8, failed + 1, asked - failed) if failed < asked else 1.0, MIN_FLAKE_RATE)
    assert sequential_tests.flake_rate_bound(FlakeCounts(asked, failed)) == pytest.approx(oracle, abs=1e-8)


def test_flake_rate_bound_has_its_nominal_coverage():
    rng = np.random.default_rng(3)
    for p in (0.01, 0.03, 0.1):
        bounds = [sequential_tests.flake_rate_bound(FlakeCounts(60, int(f))) for f in rng.binomial(60, p, 4000)]
        assert np.mean(np.array(bounds) >= p) >= 0.79


def test_persistent_failures_count_once_in_the_flake_rate():
    counts = FlakeCounts(20, 9, next_asked=9, next_failed=8)
    assert counts.fresh == (11, 1)
    assert sequential_tests.flake_rate_bound(counts) == sequential_tests.flake_rate_bound(FlakeCounts(11, 1))
    assert sequential_tests.flake_rate_mean(counts) == sequential_tests.flake_rate_mean(FlakeCounts(11, 1))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6))
def test_bounds_on_repeat_failure_rates_are_clopper_pearson_over_the_set(canaries):
    flakes = tuple(FlakeCounts(20, 8, a, min(a, b), b, min(a, b) // 2) for a, b in canaries)
    broken = FlakeCounts(20, 20, 19, 19, 20, 20)
    found = sequential_tests.answers_after_failures((*flakes, broken))
    assert found == tuple(sum(column) for column in zip(*flakes, strict=True))

    def bound(failed, asked):
        upper = 1.0 if failed == asked else beta.ppf(0.975, failed + 1, asked - failed)
        return pytest.approx(upper if failed else 0)

    assert found.next_bound == bound(found.next_failed, found.next_asked)
    assert found.repeat_bound == bound(found.repeats_failed, found.repeats)


def test_bound_on_repeat_failures_holds_for_failures_over_half_of_the_baseline():
    """Failures persist with probability 0.9. The bound requires the canaries that failed in half of their runs."""
    rng, sets, too_low = np.random.default_rng(3), 400, np.zeros(2)
    for _ in range(sets):
        fails, runs = False, np.zeros((20, 50), bool)
        for number in range(20):
            runs[number] = fails = rng.random(50) < np.where(fails, 0.9, 0.01)
        asked, failed = runs[:-1].sum(0), (runs[:-1] & runs[1:]).sum(0)
        flakes = [FlakeCounts(20, *map(int, row)) for row in zip(runs.sum(0), asked, failed, strict=True)]
        rarely_failed = [f for f in flakes if 2 * f.failed < f.asked]
        too_low += [sequential_tests.answers_after_failures(tuple(f)).next_bound < 0.9 for f in (flakes, rarely_failed)]
    assert too_low[0] / sets <= 0.05 < too_low[1] / sets


@given(st.integers(1, 100), st.data())
def test_flake_rates_increase_with_failures(asked, data):
    failed = data.draw(st.integers(0, asked - 1))
    for rate in (sequential_tests.flake_rate_bound, sequential_tests.flake_rate_mean):
        assert MIN_FLAKE_RATE <= rate(FlakeCounts(asked, failed)) <= rate(FlakeCounts(asked, failed + 1)) <= 1


@given(RATES, st.integers(0, 5), st.integers(0, 5))
def test_likelihood_ratios_equal_ratios_of_binomials(flake, failed, passed):
    for p, ratio in zip(ALTERNATIVES, sequential_tests.likelihood_ratios(flake, failed, passed), strict=True):
        oracle = binom.pmf(failed, failed + passed, p) / binom.pmf(failed, failed + passed, flake) if p > flake else 1
        assert ratio == pytest.approx(oracle, rel=1e-6) or (failed and oracle > MAX_EVIDENCE / 2)


@given(RATES, RATES)
def test_evidence_is_a_supermartingale_without_a_change(flake, below):
    """Basis of the guarantee: at a failure rate of at most p0, the mean factor of an answer is at most 1."""
    true = min(flake, below)
    for failed, passed in zip(
        sequential_tests.likelihood_ratios(flake, 1, 0), sequential_tests.likelihood_ratios(flake, 0, 1), strict=True
    ):
        assert true * failed + (1 - true) * passed <= 1 + 1e-9


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), st.lists(st.floats(0, 1e3), min_size=3, max_size=3))
def test_cusums_restart_together_at_one(sums, ratios):
    added = sequential_tests.update_cusums(tuple(sums), tuple(ratios))
    mean = sums[0] / 2 + sums[1] / 4 + sums[2] / 4
    assert added == tuple(min(s * r, MAX_EVIDENCE) for s, r in zip(sums if mean > 1 else [1] * 3, ratios, strict=True))
    assert sequential_tests.update_cusums(ZERO_CUSUMS, (2.0, 0.5, 1.0), (3.0, 1.0, 0.5)) == (6.0, 0.5, 0.5)


BASELINES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=12)


@given(BASELINES, st.integers(0, 4), st.integers(0, 30))
@settings(max_examples=30)
def test_failure_probability_equals_the_naive_integral(baselines, failed, passed):
    """Compares with independent sums over a grid of rates."""
    flakes = tuple(FlakeCounts(asked, min(asked, f)) for asked, f in baselines)
    density = null_density(np.array([[f.failed for f in flakes]]), np.array([[f.asked for f in flakes]]))[0]
    now = density * RATES_GRID**failed * (1 - RATES_GRID) ** passed
    oracle = np.maximum((now * RATES_GRID).sum(-1) / now.sum(-1), MIN_FLAKE_RATE)
    found = [sequential_tests.failure_chance(own, flakes, failed, passed) for own in flakes]
    assert found == pytest.approx(oracle, rel=0.01)


def test_evidence_has_mean_one_if_the_rate_comes_from_the_baselines():
    """Basis of the bound: with the rate integrated out, the likelihood ratio of each sequence has mean 1."""
    flakes = tuple(FlakeCounts(20, f) for f in (0, 0, 0, 1, 0, 2, 0, 0, 1, 0))
    total = 0.0
    for answers in itertools.product((0, 1), repeat=9):
        null, ratios = 1.0, [1.0] * 3
        for i, failed in enumerate(answers):
            chance = sequential_tests.failure_chance(flakes[0], flakes, sum(answers[:i]), i - sum(answers[:i]))
            null *= chance if failed else 1 - chance
            step = sequential_tests.likelihood_ratios(chance, failed, 1 - failed, 0.1)
            ratios = [r * s for r, s in zip(ratios, step, strict=True)]
        total += null * sequential_tests.evidence(tuple(ratios))
    assert total == pytest.approx(1.0)


@given(st.integers(0, 60))
def test_repeat_ratios_have_mean_one(trials):
    a, b = 2.0, 18.0 + trials
    null = betabinom.pmf(np.arange(6), 5, a, b)
    ratios = np.array([sequential_tests.repeat_ratios(0.1, trials, k, 5 - k) for k in range(6)])
    assert null @ ratios == pytest.approx(1.0)


def test_failure_probability_of_an_atypical_canary_follows_its_own_baseline():
    alike = tuple(FlakeCounts(20, int(i < 10)) for i in range(49))
    own = FlakeCounts(20, 8)
    assert sequential_tests.failure_chance(own, (*alike, own), 0, 0) == pytest.approx(8.5 / 21, rel=0.05)
    clean = FlakeCounts(20, 0)
    assert sequential_tests.failure_chance(clean, (*alike, clean), 0, 0) < 0.015  # its own Jeffreys estimate: .024


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 3000)), st.floats(1, 3000))
def test_ebh_rejects_the_largest_set_with_sufficient_minimum_evidence(weighted, budget):
    fitting = [
        set(some)
        for k in range(1, len(weighted) + 1)
        for some in itertools.combinations(weighted, k)
        if min(weighted[i] for i in some) >= budget / k
    ]
    rejected = sequential_tests.ebh_rejections(weighted, budget)
    assert len(rejected) == max((len(some) for some in fitting), default=0)
    assert not rejected or min(weighted[i] for i in rejected) * len(rejected) >= budget * (1 - 1e-12)
    assert sum(weighted[i] for i in rejected) >= (budget * (1 - 1e-12) if rejected else 0)  # the budget of an alarm


@given(st.integers(0, 40), st.integers(0, 40))
def test_passes_to_recover_are_improbable_for_a_failing_canary(failed, more):
    asked = failed + more
    n = sequential_tests.passes_to_recover(failed, asked, 1, 10_000)
    rate = (failed + 0.5) / (asked + 1)
    assert (1 - rate) ** n <= 0.05 + 1e-12 < (1 - rate) ** (n - 1) + 1e-9
    assert sequential_tests.passes_to_recover(failed, asked, 3, 10) == min(max(n, 3), 10)
