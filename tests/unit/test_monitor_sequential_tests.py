"""The sequential tests, against independent computations."""

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
    AfterFailure,
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


def test_failures_tail_is_precise_far_out():
    assert sequential_tests.failures_tail((0.01,) * 50)[20] == pytest.approx(binom.sf(19, 50, 0.01), rel=1e-9)


def test_page_rules_would_fire_in_39_percent_of_the_runs():
    assert sequential_tests.failures_tail((0.01,) * 50)[1] == pytest.approx(1 - 0.99**50)
    assert round(1 - 0.99**50, 2) == 0.39


@given(st.integers(1, 400), st.data())
def test_flake_rate_bound_is_clopper_pearson(asked, data):
    failed = data.draw(st.integers(0, asked))
    oracle = max(beta.ppf(0.8, failed + 1, asked - failed) if failed < asked else 1.0, MIN_FLAKE_RATE)
    assert sequential_tests.flake_rate_bound(FlakeCounts(asked, failed)) == pytest.approx(oracle, abs=1e-8)


def test_flake_rate_bound_has_its_coverage():
    rng = np.random.default_rng(3)
    for p in (0.01, 0.03, 0.1):
        bounds = [sequential_tests.flake_rate_bound(FlakeCounts(60, int(f))) for f in rng.binomial(60, p, 4000)]
        assert np.mean(np.array(bounds) >= p) >= 0.79


def test_failures_that_last_count_once_in_the_flake_rate():
    counts = FlakeCounts(20, 9, next_asked=9, next_failed=8)
    assert counts.fresh == (11, 1)
    assert sequential_tests.flake_rate_bound(counts) == sequential_tests.flake_rate_bound(FlakeCounts(11, 1))
    assert sequential_tests.flake_rate_mean(counts) == sequential_tests.flake_rate_mean(FlakeCounts(11, 1))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6))
def test_answers_after_failures_are_sums_over_the_set_without_canaries_that_never_passed(canaries):
    flakes = tuple(FlakeCounts(20, 8, a, min(a, b), b, min(a, b)) for a, b in canaries)
    sums = [sum(column) for column in zip(*(f[2:] for f in flakes), strict=True)]
    broken = FlakeCounts(20, 20, 19, 19, 20, 20)
    assert sequential_tests.answers_after_failures((*flakes, broken)) == AfterFailure(*sums)


def test_long_failures_of_a_baseline_count():
    """Markov failures that last with .9: the pooled share is unbiased, and without the longest failures too low."""
    rng, lasting, half = np.random.default_rng(3), AfterFailure(), AfterFailure()
    for _ in range(400):
        fails, runs = False, np.zeros((20, 50), bool)
        for number in range(20):
            runs[number] = fails = rng.random(50) < np.where(fails, 0.9, 0.01)
        asked, failed = runs[:-1].sum(0), (runs[:-1] & runs[1:]).sum(0)
        flakes = [FlakeCounts(20, *map(int, row)) for row in zip(runs.sum(0), asked, failed, strict=True)]
        lasting = lasting.plus(sequential_tests.answers_after_failures(tuple(flakes)))
        half = half.plus(sequential_tests.answers_after_failures(tuple(f for f in flakes if 2 * f.failed < f.asked)))
    assert lasting.next_failed / lasting.next_asked == pytest.approx(0.9, abs=0.01)
    assert half.next_failed / half.next_asked < 0.88


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 5), st.integers(0, 5))
def test_the_chance_that_a_failure_lasts_is_the_posterior_mean(asked, failed, since_asked, since_failed):
    failed, since_failed = min(asked, failed), min(since_asked, since_failed)
    found = sequential_tests.next_failure_chance(AfterFailure(asked, failed), AfterFailure(since_asked, since_failed))
    runs, fails = asked + since_asked, failed + since_failed
    assert found == pytest.approx(beta.mean(fails + 0.5, runs - fails + 0.5) if failed else 0)


@given(st.integers(0, 30), st.integers(0, 30), st.floats(0.005, 1), st.integers(0, 4), st.integers(0, 4))
def test_the_distribution_of_repetitions_has_the_documented_mean(repeats, failed, flake_rate, again, refailed):
    failed, refailed = min(repeats, failed), min(again, refailed)
    measured = (failed + 0.5) / (repeats + 1) if failed else 2 / (20 + repeats)
    baseline, since = AfterFailure(0, 0, repeats, failed), AfterFailure(0, 0, again, refailed)
    a, b = sequential_tests.repeat_failure_prior(baseline, AfterFailure(), flake_rate, 0.1)
    assert a / (a + b) == pytest.approx(max(measured, flake_rate if flake_rate > 0.1 else 0))
    more = sequential_tests.repeat_failure_prior(baseline, since, flake_rate, 0.1)
    assert more == pytest.approx((a + refailed, b + again - refailed))


@given(st.integers(1, 100), st.data())
def test_flake_rates_grow_with_failures(asked, data):
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
    """Basis of the guarantee: at a rate of at most p0, an answer multiplies the evidence by at most 1 on average."""
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
def test_failure_chance_is_that_of_the_naive_integral(baselines, failed, passed):
    """Against sums over a grid of rates, written independently."""
    flakes = tuple(FlakeCounts(asked, min(asked, f)) for asked, f in baselines)
    density = null_density(np.array([[f.failed for f in flakes]]), np.array([[f.asked for f in flakes]]))[0]
    now = density * RATES_GRID**failed * (1 - RATES_GRID) ** passed
    oracle = np.maximum((now * RATES_GRID).sum(-1) / now.sum(-1), MIN_FLAKE_RATE)
    found = [sequential_tests.failure_chance(own, flakes, failed, passed) for own in flakes]
    assert found == pytest.approx(oracle, rel=0.01)


def test_evidence_has_mean_one_if_the_rate_comes_from_the_baselines():
    """Basis of the bound: with the rate integrated out, each sequence's likelihood ratio has mean 1."""
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


@given(st.floats(0.5, 60), st.floats(0.5, 60), st.floats(0, 1))
def test_repeat_ratios_have_mean_one(a, b, least):
    null = betabinom.pmf(np.arange(6), 5, a, b)
    ratios = np.array([sequential_tests.repeat_ratios((a, b), k, 5 - k, least) for k in range(6)])
    assert null @ ratios == pytest.approx(1.0)
    tested = np.array(ALTERNATIVES) > max(least, a / (a + b))
    assert (ratios[:, ~tested] == 1).all()


@pytest.mark.parametrize("baseline", [AfterFailure(9, 5, 9, 8), AfterFailure(9, 0, 9, 0)], ids=["lasting", "passing"])
def test_evidence_of_answers_after_failures_has_mean_one_over_their_unknown_rates(baseline):
    """Two failed runs with two repetitions each: all answers, weighted by their probability if rates are unknown."""
    total = 0.0
    for answers in itertools.product((0, 1), repeat=5):
        next_fails, first, second = answers[0], answers[1:3], answers[3:]
        since = AfterFailure(0, 0, 2, sum(first))
        null, ratios = 1.0, np.ones(3)
        for repetitions, before in ((first, AfterFailure()), (second, since)):
            a, b = sequential_tests.repeat_failure_prior(baseline, before, 0.05, 0.1)
            failed = sum(repetitions)
            null *= betabinom.pmf(failed, 2, a, b) / math.comb(2, failed)
            ratios *= sequential_tests.repeat_ratios((a, b), failed, 2 - failed)
        chance = sequential_tests.next_failure_chance(baseline, since) or 0.05
        null *= chance if next_fails else 1 - chance
        ratios *= sequential_tests.likelihood_ratios(chance, next_fails, 1 - next_fails)
        total += null * sequential_tests.evidence(tuple(ratios))
    assert total == pytest.approx(1.0)


def test_a_canary_unlike_its_set_is_judged_by_its_own_baseline():
    alike = tuple(FlakeCounts(20, int(i < 10)) for i in range(49))
    own = FlakeCounts(20, 8)
    assert sequential_tests.failure_chance(own, (*alike, own), 0, 0) == pytest.approx(8.5 / 21, rel=0.05)
    quiet = FlakeCounts(20, 0)
    assert sequential_tests.failure_chance(quiet, (*alike, quiet), 0, 0) < 0.015  # alone, by Jeffreys: .024


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 3000)), st.floats(1, 3000))
def test_ebh_rejects_the_largest_set_whose_smallest_suffices(weighted, budget):
    fitting = [
        set(some)
        for k in range(1, len(weighted) + 1)
        for some in itertools.combinations(weighted, k)
        if min(weighted[i] for i in some) >= budget / k
    ]
    rejected = sequential_tests.ebh_rejections(weighted, budget)
    assert len(rejected) == max((len(some) for some in fitting), default=0)
    assert not rejected or min(weighted[i] for i in rejected) * len(rejected) >= budget * (1 - 1e-12)
    assert sum(weighted[i] for i in rejected) >= (
        budget * (1 - 1e-12) if rejected else 0
    )  # the share of the budget that an alarm uses


@given(st.integers(0, 40), st.integers(0, 40))
def test_passes_to_recover_are_improbable_for_a_failing_canary(failed, more):
    asked = failed + more
    n = sequential_tests.passes_to_recover(failed, asked, 1, 10_000)
    rate = (failed + 0.5) / (asked + 1)
    assert (1 - rate) ** n <= 0.05 + 1e-12 < (1 - rate) ** (n - 1) + 1e-9
    assert sequential_tests.passes_to_recover(failed, asked, 3, 10) == min(max(n, 3), 10)
