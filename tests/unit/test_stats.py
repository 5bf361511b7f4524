import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from casemate.maths import moments, stats
from casemate.maths import moments as moments_module
from casemate.maths.moments import CorpusMoments
from casemate.types import SimilarityStats


def unit(rng, n, dim, shift=0.4):
    E = (rng.standard_normal((n, dim)) + shift).astype(np.float32)
    return E / np.linalg.norm(E, axis=1, keepdims=True)


def scan(E, q):
    """All similarities, as the oracle of the moments."""
    return E.astype(np.float64) @ q.astype(np.float64)


corpora = {"n": st.integers(2, 200), "dim": st.integers(2, 40), "shift": st.floats(0, 5), "seed": st.integers(0, 999)}


@settings(deadline=None)
@given(**corpora)
def test_similarity_stats_equal_mean_and_deviation_of_a_scan(n, dim, shift, seed):
    rng = np.random.default_rng(seed)
    E, q = unit(rng, n, dim, shift), unit(rng, 1, dim)[0]
    found, s = CorpusMoments.of(E).similarity_stats(q), scan(E, q)
    assert (found.n, found.mean) == (n, pytest.approx(s.mean(), abs=1e-12))
    assert found.std == pytest.approx(s.std(), abs=1e-6)  # sqrt of MIN_VARIANCE
    if s.std() > 1e-5:
        assert found.std == pytest.approx(s.std(), rel=1e-9)


@settings(deadline=None)
@given(**corpora, cut=st.integers(0, 200))
def test_moments_add_and_subtract(n, dim, shift, seed, cut):
    E = unit(np.random.default_rng(seed), n, dim, shift)
    a, b, both = CorpusMoments.of(E[:cut]), CorpusMoments.of(E[cut:]), CorpusMoments.of(E)
    for got, want in ((a + b, both), (b + a, both), (both - b, a), (both - a, b)):
        assert got.n == want.n
        np.testing.assert_allclose(got.mean, want.mean, atol=1e-11)
        np.testing.assert_allclose(got.scatter, want.scatter, atol=1e-10)


@settings(deadline=None)
@given(**corpora)
def test_sum_of_squares_is_n_for_unit_vectors(n, dim, shift, seed):
    assert CorpusMoments.of(unit(np.random.default_rng(seed), n, dim, shift)).sum_of_squares == pytest.approx(
        n, rel=1e-6
    )


def test_moments_stay_exact_over_many_additions_and_removals():
    rng = np.random.default_rng(3)
    E = unit(rng, 4000, 24, shift=3.0)  # anisotropic vectors, for which uncentered float32 sums lose precision
    moments = CorpusMoments.of(E[:1000])
    for i in range(1000, 4000):
        moments = moments + CorpusMoments.of(E[i : i + 1]) - CorpusMoments.of(E[i - 1000 : i - 999])
    fresh = CorpusMoments.of(E[3000:])
    np.testing.assert_allclose(moments.scatter, fresh.scatter, atol=1e-9)
    np.testing.assert_allclose(moments.mean, fresh.mean, atol=1e-11)


def test_subtracting_more_than_n_is_rejected():
    E = unit(np.random.default_rng(0), 3, 4)
    with pytest.raises(ValueError, match="cannot remove 3 embeddings from 2"):
        CorpusMoments.of(E[:2]) - CorpusMoments.of(E)


@settings(deadline=None)
@given(n=st.integers(3, 300), seed=st.integers(0, 999), spread=st.floats(1e-3, 1), mean=st.floats(-1, 1))
def test_leave_one_out_equals_statistics_of_the_others(n, seed, spread, mean):
    s = mean + spread * np.random.default_rng(seed).standard_normal(n)
    top, rest = s.max(), np.delete(s, s.argmax())
    found = moments_module.leave_one_out(SimilarityStats(n, s.mean(), s.std()), top)
    assert found.n == n - 1
    assert found.mean == pytest.approx(rest.mean(), abs=1e-12)
    assert found.std == pytest.approx(rest.std(), abs=1e-10)
    whole = moments_module.add_one(SimilarityStats(n - 1, rest.mean(), rest.std()), top)
    assert (whole.n, whole.mean, whole.std) == (n, pytest.approx(s.mean()), pytest.approx(s.std()))


@pytest.mark.parametrize(
    ("n", "paper", "gumbel", "exact"),
    [
        (3633, 4.783, 4.210, 4.187),
        (25_657, 5.165, 4.627, 4.611),
        (171_332, 5.514, 5.003, 4.992),
        (10_000_000, 6.201, 5.733, 5.726),
    ],
)
def test_extreme_value_thresholds_equal_known_values(n, paper, gumbel, exact):
    found = [stats.extreme_value_threshold(n, 0.05, form) for form in ("paper", "gumbel", "exact")]
    assert found == pytest.approx([paper, gumbel, exact], abs=6e-4)


@given(n=st.integers(2, 10**9), rho=st.floats(1e-6, 0.999))
def test_exact_threshold_is_the_quantile(n, rho):
    z = stats.extreme_value_threshold(n, rho, "exact")
    assert n * scipy_stats.norm.logcdf(z) == pytest.approx(math.log1p(-rho), rel=1e-6)


def test_exact_threshold_has_its_level_in_simulation():
    maxima = np.random.default_rng(5).standard_normal((4000, 500)).max(axis=1)
    flagged = int((maxima > stats.extreme_value_threshold(500, 0.05, "exact")).sum())
    low, high = stats.clopper_pearson(flagged, 4000, confidence=0.999)
    assert low < 0.05 < high


@pytest.mark.parametrize(("n", "rho"), [(1, 0.05), (10, 0), (10, 1), (10, -0.1), (10, math.nan)])
def test_threshold_arguments_out_of_range_are_rejected(n, rho):
    with pytest.raises(ValueError, match="rho"):
        stats.extreme_value_threshold(n, rho)


def test_unknown_threshold_form_is_rejected():
    with pytest.raises(ValueError, match="known: paper, gumbel, exact"):
        stats.extreme_value_threshold(10, 0.05, "papper")


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (10, 10), (3, 10), (1, 1), (37, 400)])
def test_clopper_pearson_equals_scipy(successes, trials):
    want = scipy_stats.binomtest(successes, trials).proportion_ci(0.95, "exact")
    assert stats.clopper_pearson(successes, trials) == pytest.approx((want.low, want.high), abs=1e-12)


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (-1, 5), (6, 5)])
def test_clopper_pearson_impossible_counts_are_rejected(successes, trials):
    with pytest.raises(ValueError, match="successes"):
        stats.clopper_pearson(successes, trials)


def test_proportion_has_the_exact_interval():
    assert stats.proportion(3, 40) == (3 / 40, *stats.clopper_pearson(3, 40))
    with pytest.raises(ValueError, match="trials"):
        stats.proportion(0, 0)


@pytest.mark.parametrize(("successes", "trials", "n"), [(0, 3, 4), (1, 3, 50), (3, 3, 7), (7, 40, 200), (39, 40, 90)])
def test_predicted_share_is_the_interval_of_the_beta_binomial_distribution(successes, trials, n):
    law = scipy_stats.betabinom(n, successes + 0.5, trials - successes + 0.5)
    assert stats.predicted_share(successes, trials, n) == tuple(law.ppf([0.025, 0.975]) / n)


# Bootstrap


def naive_auc(a, b):
    return np.mean((a[:, None] > b) + 0.5 * (a[:, None] == b))


def naive_resamples(a, b, figure, count=400):
    """Percentile interval, one resample at a time."""
    rng = np.random.default_rng(99)
    drawn = [(rng.choice(len(a), len(a), replace=True), rng.choice(len(b), len(b), replace=True)) for _ in range(count)]
    return np.percentile([figure(i, j) for i, j in drawn], [2.5, 97.5])


def test_bootstrap_equals_naive_resampling_and_hanley_mcneil_error():
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal(300) + 1, rng.standard_normal(150)
    found = stats.bootstrap(naive_auc, a, b, seed=5, resamples=1000)
    low, high = naive_resamples(a, b, lambda i, j: naive_auc(a[i], b[j]))
    assert found.value == naive_auc(a, b)
    assert found[1:] == pytest.approx((low, high), abs=0.012)
    A, n, m = found.value, len(a), len(b)  # Hanley and McNeil 1982
    error = (A * (1 - A) + (n - 1) * (A / (2 - A) - A * A) + (m - 1) * (2 * A * A / (1 + A) - A * A)) / (n * m)
    assert found.high - found.low == pytest.approx(2 * 1.96 * math.sqrt(error), rel=0.12)


def test_bootstrap_interval_has_its_nominal_coverage():
    rng, truth = np.random.default_rng(2), scipy_stats.norm.cdf(1 / math.sqrt(2))
    hits = 0
    for seed in range(200):
        a, b = rng.standard_normal(80) + 1, rng.standard_normal(80)
        _, low, high = stats.bootstrap(naive_auc, a, b, seed, resamples=200)
        hits += low <= truth <= high
    assert scipy_stats.binomtest(hits, 200, 0.95).pvalue > 1e-3


def test_members_and_nonmembers_are_resampled_separately():
    seen = []

    def spy(a, b):
        seen.append((set(a), set(b), len(a), len(b)))
        return 0.0

    stats.bootstrap(spy, [1, 2, 3], [7, 8], seed=0, resamples=50)
    assert len(seen) == 51
    assert all(a <= {1, 2, 3} and b <= {7, 8} and (n, m) == (3, 2) for a, b, n, m in seen)
    assert len({(frozenset(a), frozenset(b)) for a, b, _, _ in seen}) > 5


@given(seed=st.integers(0, 10**6), shift=st.floats(-5, 5))
def test_bootstrap_is_deterministic_and_exact_for_a_constant_difference(seed, shift):
    a, b = np.arange(6.0), np.arange(4.0)
    mean = lambda x, y: float(x.mean() - y.mean())  # noqa: E731
    assert stats.bootstrap(mean, a, b, seed, 20) == stats.bootstrap(mean, a, b, seed, 20)
    assert stats.paired_bootstrap(mean, (a + shift, b), (a, b), seed, 20) == pytest.approx((shift,) * 3)


def test_paired_bootstrap_resamples_the_same_candidates():
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal(200) + 2, rng.standard_normal(200)
    c, d = a - 0.5 + 0.1 * rng.standard_normal(200), b + 0.1 * rng.standard_normal(200)
    found = stats.paired_bootstrap(naive_auc, (a, b), (c, d), seed=4, resamples=1000)
    low, high = naive_resamples(a, b, lambda i, j: naive_auc(a[i], b[j]) - naive_auc(c[i], d[j]))
    assert found.value == pytest.approx(naive_auc(a, b) - naive_auc(c, d))
    assert found[1:] == pytest.approx((low, high), abs=0.006)
    off, on = (stats.bootstrap(naive_auc, *pair, 4, 1000) for pair in ((a, b), (c, d)))
    assert found.high - found.low < 0.6 * math.hypot(off.high - off.low, on.high - on.low)


def test_bootstrap_empty_or_unpaired_samples_are_rejected():
    for a, b, count in (([], [1], 10), ([1], [], 10), ([1], [1], 0)):
        with pytest.raises(ValueError, match="resamples"):
            stats.bootstrap(naive_auc, a, b, 0, count)
    with pytest.raises(ValueError, match="2 \\+ 1 without and 1 \\+ 1 with"):
        stats.paired_bootstrap(naive_auc, ([1, 2], [1]), ([1], [1]), 0)


# Spacing test and conformal prediction


scores = st.lists(st.integers(0, 9), max_size=60)


@given(benign=scores, score=st.integers(-1, 10), rate=st.floats(0.001, 0.999))
def test_scores_above_the_conformal_threshold_have_p_at_most_rate(benign, score, rate):
    threshold = stats.conformal_threshold(benign, rate)
    p = (1 + sum(1 for b in benign if b >= score)) / (len(benign) + 1)
    if abs(p - rate) > 1e-9:
        assert (score > threshold) == (p <= rate)


@pytest.mark.parametrize(("rate", "n"), [(0.05, 19), (0.01, 99), (0.29, 3), (0.1, 9)])
def test_conformal_threshold_is_finite_from_n_of_1_over_rate_minus_1(rate, n):
    assert stats.conformal_threshold(range(n), rate) == n - 1
    assert stats.conformal_threshold(range(n), rate) < math.inf == stats.conformal_threshold(range(2), rate / 2)
    assert n >= 1 / rate - 1 > n - 1
    assert stats.conformal_threshold(range(n - 1), rate) == math.inf


def test_conformal_rate_holds_for_a_heavy_tailed_distribution():
    rng, flagged = np.random.default_rng(8), 0
    for _ in range(4000):
        s = rng.standard_cauchy(60).round(1)  # 59 calibration scores, then one; ties lower the rate
        flagged += s[-1] > stats.conformal_threshold(s[:-1], 0.1)
    low, high = stats.clopper_pearson(int(flagged), 4000, confidence=0.999)
    assert low <= 0.1
    assert high >= 0.09


@pytest.mark.parametrize("rate", [0, 1, -1, math.nan])
def test_conformal_rate_out_of_range_is_rejected(rate):
    with pytest.raises(ValueError, match="rate"):
        stats.conformal_threshold([1, 2], rate)


def test_nan_scores_are_rejected():
    with pytest.raises(ValueError, match="without NaN"):
        stats.conformal_threshold([math.nan], 0.5)


@pytest.mark.parametrize("kappa", [0.2, 0.5, 0.9])
def test_e_value_has_expectation_one_under_the_null(kappa):
    from scipy.integrate import quad

    assert quad(lambda p: stats.e_value(p, kappa), 0, 1)[0] == pytest.approx(1, rel=1e-6)
    assert stats.e_value(0, kappa) == math.inf
    assert stats.e_value(1, kappa) == kappa


def test_product_of_e_values_satisfies_ville_inequality():
    p = np.random.default_rng(9).uniform(size=(2000, 60))
    highest = np.cumsum(np.log(np.vectorize(stats.e_value)(p)), axis=1).max(axis=1)
    assert 0 < np.mean(highest >= math.log(20)) <= 0.05


@pytest.mark.parametrize(("p", "kappa"), [(-0.1, 0.5), (1.1, 0.5), (math.nan, 0.5), (0.5, 0), (0.5, 1)])
def test_e_value_arguments_out_of_range_are_rejected(p, kappa):
    with pytest.raises(ValueError, match="kappa"):
        stats.e_value(p, kappa)


@pytest.mark.parametrize("dim", [3, 384, 1500])
def test_quadratic_form_equals_the_products(dim):
    rng = np.random.default_rng(dim)
    A, x = rng.standard_normal((dim, dim)), rng.standard_normal(dim)
    S = A @ A.T
    assert moments.quadratic_form(S, x) == pytest.approx(float(x @ S @ x), rel=1e-12)
