import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from casemate import stats
from casemate.stats import CorpusMoments
from casemate.types import Background


def unit(rng, n, dim, shift=0.4):
    E = (rng.standard_normal((n, dim)) + shift).astype(np.float32)
    return E / np.linalg.norm(E, axis=1, keepdims=True)


def scan(E, q):
    """The similarities themselves: what the moments are to stand for."""
    return E.astype(np.float64) @ q.astype(np.float64)


corpora = {"n": st.integers(2, 200), "dim": st.integers(2, 40), "shift": st.floats(0, 5), "seed": st.integers(0, 999)}


@settings(deadline=None)
@given(**corpora)
def test_background_equals_mean_and_deviation_of_a_scan(n, dim, shift, seed):
    rng = np.random.default_rng(seed)
    E, q = unit(rng, n, dim, shift), unit(rng, 1, dim)[0]
    found, s = CorpusMoments.of(E).background(q), scan(E, q)
    assert (found.n, found.mean) == (n, pytest.approx(s.mean(), abs=1e-12))
    assert found.std == pytest.approx(s.std(), abs=1e-6)  # sqrt of MIN_VARIANCE
    if s.std() > 1e-5:
        assert found.std == pytest.approx(s.std(), rel=1e-9)


@settings(deadline=None)
@given(**corpora, cut=st.integers(0, 200))
def test_moments_of_parts_add_up_and_subtract(n, dim, shift, seed, cut):
    E = unit(np.random.default_rng(seed), n, dim, shift)
    a, b, both = CorpusMoments.of(E[:cut]), CorpusMoments.of(E[cut:]), CorpusMoments.of(E)
    for got, want in ((a + b, both), (b + a, both), (both - b, a), (both - a, b)):
        assert got.n == want.n
        np.testing.assert_allclose(got.mean, want.mean, atol=1e-11)
        np.testing.assert_allclose(got.scatter, want.scatter, atol=1e-10)


@settings(deadline=None)
@given(**corpora)
def test_square_norm_is_n_for_unit_vectors(n, dim, shift, seed):
    assert CorpusMoments.of(unit(np.random.default_rng(seed), n, dim, shift)).square_norm == pytest.approx(n, rel=1e-6)


def test_moments_stay_exact_over_many_additions_and_removals():
    rng = np.random.default_rng(3)
    E = unit(rng, 4000, 24, shift=3.0)  # anisotropic: where uncentred float32 sums lose their digits
    moments = CorpusMoments.of(E[:1000])
    for i in range(1000, 4000):
        moments = moments + CorpusMoments.of(E[i : i + 1]) - CorpusMoments.of(E[i - 1000 : i - 999])
    fresh = CorpusMoments.of(E[3000:])
    np.testing.assert_allclose(moments.scatter, fresh.scatter, atol=1e-9)
    np.testing.assert_allclose(moments.mean, fresh.mean, atol=1e-11)


def test_more_cannot_be_taken_away_than_there_is():
    E = unit(np.random.default_rng(0), 3, 4)
    with pytest.raises(ValueError, match="3 embeddings out of 2"):
        CorpusMoments.of(E[:2]) - CorpusMoments.of(E)


@settings(deadline=None)
@given(n=st.integers(3, 300), seed=st.integers(0, 999), spread=st.floats(1e-3, 1), mean=st.floats(-1, 1))
def test_without_equals_the_law_of_the_others(n, seed, spread, mean):
    s = mean + spread * np.random.default_rng(seed).standard_normal(n)
    top, rest = s.max(), np.delete(s, s.argmax())
    found = stats.without(Background(n, s.mean(), s.std()), top)
    assert found.n == n - 1
    assert found.mean == pytest.approx(rest.mean(), abs=1e-12)
    assert found.std == pytest.approx(rest.std(), abs=1e-10)


@pytest.mark.parametrize(
    ("n", "paper", "gumbel", "exact"),
    [
        (3633, 4.783, 4.210, 4.187),
        (25_657, 5.165, 4.627, 4.611),
        (171_332, 5.514, 5.003, 4.992),
        (10_000_000, 6.201, 5.733, 5.726),
    ],
)
def test_thresholds_equal_the_worked_values(n, paper, gumbel, exact):
    found = [stats.standard_threshold(n, 0.05, form) for form in ("paper", "gumbel", "exact")]
    assert found == pytest.approx([paper, gumbel, exact], abs=6e-4)


@given(n=st.integers(2, 10**9), rho=st.floats(1e-6, 0.999))
def test_the_exact_threshold_is_the_quantile(n, rho):
    z = stats.standard_threshold(n, rho, "exact")
    assert n * scipy_stats.norm.logcdf(z) == pytest.approx(math.log1p(-rho), rel=1e-6)


def test_the_exact_threshold_holds_its_level_in_simulation():
    maxima = np.random.default_rng(5).standard_normal((4000, 500)).max(axis=1)
    flagged = int((maxima > stats.standard_threshold(500, 0.05, "exact")).sum())
    low, high = stats.clopper_pearson(flagged, 4000, confidence=0.999)
    assert low < 0.05 < high


@pytest.mark.parametrize(("n", "rho"), [(1, 0.05), (10, 0), (10, 1), (10, -0.1), (10, math.nan)])
def test_threshold_refuses_arguments_out_of_range(n, rho):
    with pytest.raises(ValueError, match="rho"):
        stats.standard_threshold(n, rho)


def test_threshold_refuses_an_unknown_form():
    with pytest.raises(ValueError, match="known: paper, gumbel, exact"):
        stats.standard_threshold(10, 0.05, "papper")


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (10, 10), (3, 10), (1, 1), (37, 400)])
def test_clopper_pearson_equals_scipy(successes, trials):
    want = scipy_stats.binomtest(successes, trials).proportion_ci(0.95, "exact")
    assert stats.clopper_pearson(successes, trials) == pytest.approx((want.low, want.high), abs=1e-12)


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (-1, 5), (6, 5)])
def test_clopper_pearson_refuses_impossible_counts(successes, trials):
    with pytest.raises(ValueError, match="successes"):
        stats.clopper_pearson(successes, trials)


def test_a_rate_is_its_share_and_its_exact_interval():
    assert stats.rate(3, 40) == (3 / 40, *stats.clopper_pearson(3, 40))
    with pytest.raises(ValueError, match="trials"):
        stats.rate(0, 0)


# Resampling


def naive_auc(a, b):
    return np.mean((a[:, None] > b) + 0.5 * (a[:, None] == b))


def naive_resamples(a, b, figure, count=400):
    """One resample after another, drawn by the names of its candidates."""
    rng = np.random.default_rng(99)
    drawn = [(rng.choice(len(a), len(a), replace=True), rng.choice(len(b), len(b), replace=True)) for _ in range(count)]
    return np.percentile([figure(i, j) for i, j in drawn], [2.5, 97.5])


def test_bootstrap_equals_naive_resampling_and_the_known_error_of_auc():
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal(300) + 1, rng.standard_normal(150)
    found = stats.bootstrap(naive_auc, a, b, seed=5, resamples=1000)
    low, high = naive_resamples(a, b, lambda i, j: naive_auc(a[i], b[j]))
    assert found.value == naive_auc(a, b)
    assert found[1:] == pytest.approx((low, high), abs=0.012)
    A, n, m = found.value, len(a), len(b)  # Hanley and McNeil 1982
    error = (A * (1 - A) + (n - 1) * (A / (2 - A) - A * A) + (m - 1) * (2 * A * A / (1 + A) - A * A)) / (n * m)
    assert found.high - found.low == pytest.approx(2 * 1.96 * math.sqrt(error), rel=0.12)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    rng, truth = np.random.default_rng(2), scipy_stats.norm.cdf(1 / math.sqrt(2))
    hits = 0
    for seed in range(200):
        a, b = rng.standard_normal(80) + 1, rng.standard_normal(80)
        _, low, high = stats.bootstrap(naive_auc, a, b, seed, resamples=200)
        hits += low <= truth <= high
    assert scipy_stats.binomtest(hits, 200, 0.95).pvalue > 1e-3


def test_members_and_nonmembers_are_drawn_each_from_their_own():
    seen = []

    def spy(a, b):
        seen.append((set(a), set(b), len(a), len(b)))
        return 0.0

    stats.bootstrap(spy, [1, 2, 3], [7, 8], seed=0, resamples=50)
    assert len(seen) == 51
    assert all(a <= {1, 2, 3} and b <= {7, 8} and (n, m) == (3, 2) for a, b, n, m in seen)
    assert len({(frozenset(a), frozenset(b)) for a, b, _, _ in seen}) > 5


@given(seed=st.integers(0, 10**6), shift=st.floats(-5, 5))
def test_resampling_is_repeatable_and_never_off_a_constant(seed, shift):
    a, b = np.arange(6.0), np.arange(4.0)
    mean = lambda x, y: float(x.mean() - y.mean())  # noqa: E731
    assert stats.bootstrap(mean, a, b, seed, 20) == stats.bootstrap(mean, a, b, seed, 20)
    assert stats.paired_bootstrap(mean, (a + shift, b), (a, b), seed, 20) == pytest.approx((shift,) * 3)


def test_the_same_candidates_are_drawn_off_and_on():
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal(200) + 2, rng.standard_normal(200)
    c, d = a - 0.5 + 0.1 * rng.standard_normal(200), b + 0.1 * rng.standard_normal(200)
    found = stats.paired_bootstrap(naive_auc, (a, b), (c, d), seed=4, resamples=1000)
    low, high = naive_resamples(a, b, lambda i, j: naive_auc(a[i], b[j]) - naive_auc(c[i], d[j]))
    assert found.value == pytest.approx(naive_auc(a, b) - naive_auc(c, d))
    assert found[1:] == pytest.approx((low, high), abs=0.006)
    off, on = (stats.bootstrap(naive_auc, *pair, 4, 1000) for pair in ((a, b), (c, d)))
    assert found.high - found.low < 0.6 * math.hypot(off.high - off.low, on.high - on.low)


def test_resampling_refuses_what_cannot_be_drawn_or_paired():
    for a, b, count in (([], [1], 10), ([1], [], 10), ([1], [1], 0)):
        with pytest.raises(ValueError, match="resamples"):
            stats.bootstrap(naive_auc, a, b, 0, count)
    with pytest.raises(ValueError, match="2 \\+ 1 without and 1 \\+ 1 with"):
        stats.paired_bootstrap(naive_auc, ([1, 2], [1]), ([1], [1]), 0)


# Spacings and calibration


def naive_spacing(s, J):
    """By the definition, with ranks from 1, and the law from SciPy."""
    m = len(s)
    D = {i: i * (s[i - 1] - s[i]) for i in range(1, m)}
    rest = [D[i] for i in range(J + 1, m)]
    return scipy_stats.f.sf(D[J] / (sum(rest) / len(rest)), 2, 2 * (m - 1 - J))


@given(m=st.integers(3, 60), seed=st.integers(0, 999), block=st.integers(1, 5), scale=st.floats(0.01, 10))
def test_the_spacing_test_equals_its_definition(m, seed, block, scale):
    s = np.sort(np.random.default_rng(seed).exponential(scale, m))[::-1]
    block = min(block, m - 2)
    assert stats.spacing_test(s, block) == pytest.approx(naive_spacing(s, block), rel=1e-9)
    assert stats.spacing_test(3 - 2 * s[::-1], block) == pytest.approx(stats.spacing_test(-s[::-1], block))


@pytest.mark.parametrize("block", [1, 2, 5])
def test_the_spacing_test_holds_its_level_on_exponential_tails(block):
    rng = np.random.default_rng(6)
    p = [stats.spacing_test(np.sort(rng.exponential(size=400))[::-1][:50], block) for _ in range(4000)]
    assert scipy_stats.kstest(p, "uniform").pvalue > 1e-3
    assert scipy_stats.binomtest(int(np.sum(np.array(p) <= 0.05)), 4000, 0.05).pvalue > 1e-3


@pytest.mark.parametrize("copies", [1, 3])
def test_a_block_that_stands_out_is_found_as_a_whole(copies):
    s = np.sort(np.random.default_rng(7).exponential(0.05, 400))[::-1][:50]
    s[:copies] = s[0] + 0.6
    p = {J: stats.spacing_test(np.sort(s)[::-1], J) for J in range(1, 6)}
    assert min(p, key=p.get) == copies
    assert p[copies] < 1e-4
    assert copies == 1 or p[1] == 1  # one copy hides the other from a test of the first alone


def test_equal_scores_say_nothing_unless_a_block_is_above_them():
    assert stats.spacing_test([0.5] * 10, 1) == 1
    assert stats.spacing_test([0.9, *[0.5] * 10], 1) == 0
    assert stats.spacing_test([0.9, 0.9, *[0.5] * 10], 2) == 0


@pytest.mark.parametrize(
    ("s", "block", "says"),
    [
        ([1, 2, 3], 1, "best first"),
        ([3, math.nan, 1], 1, "finite"),
        ([math.inf, 2, 1], 1, "finite"),
        ([3, 2, 1], 2, "1 to 1"),
        ([3, 2, 1], 0, "1 to 1"),
    ],
)
def test_the_spacing_test_refuses_what_it_cannot_judge(s, block, says):
    with pytest.raises(ValueError, match=says):
        stats.spacing_test(s, block)


scores = st.lists(st.integers(0, 9), max_size=60)


@given(benign=scores, score=st.integers(-1, 10), rate=st.floats(0.001, 0.999))
def test_above_the_conformal_threshold_is_what_has_so_small_a_p(benign, score, rate):
    p, threshold = stats.conformal_p(score, benign), stats.conformal_threshold(benign, rate)
    assert p == (1 + sum(1 for b in benign if b >= score)) / (len(benign) + 1)
    if abs(p - rate) > 1e-9:
        assert (score > threshold) == (p <= rate)


@pytest.mark.parametrize(("rate", "n"), [(0.05, 19), (0.01, 99), (0.29, 3), (0.1, 9)])
def test_a_threshold_takes_as_many_benign_scores_as_the_rate_asks_for(rate, n):
    assert stats.conformal_threshold(range(n), rate) == n - 1
    assert stats.conformal_threshold(range(n), rate) < math.inf == stats.conformal_threshold(range(2), rate / 2)
    assert n >= 1 / rate - 1 > n - 1
    assert stats.conformal_threshold(range(n - 1), rate) == math.inf


def test_the_conformal_rate_holds_for_any_law():
    rng, flagged = np.random.default_rng(8), 0
    for _ in range(4000):
        s = rng.standard_cauchy(60).round(1)  # 59 to learn from, then one; ties make it smaller
        flagged += s[-1] > stats.conformal_threshold(s[:-1], 0.1)
    low, high = stats.clopper_pearson(int(flagged), 4000, confidence=0.999)
    assert low <= 0.1
    assert high >= 0.09


@pytest.mark.parametrize("rate", [0, 1, -1, math.nan])
def test_an_impossible_conformal_rate_is_refused(rate):
    with pytest.raises(ValueError, match="rate"):
        stats.conformal_threshold([1, 2], rate)


def test_a_score_that_is_no_number_is_not_calibrated():
    with pytest.raises(ValueError, match="numbers"):
        stats.conformal_threshold([math.nan], 0.5)
    for score, benign in ((math.nan, [1]), (1, [math.nan])):
        with pytest.raises(ValueError, match="NaN"):
            stats.conformal_p(score, benign)


@pytest.mark.parametrize("kappa", [0.2, 0.5, 0.9])
def test_evidence_has_mean_one_under_chance(kappa):
    from scipy.integrate import quad

    assert quad(lambda p: stats.e_value(p, kappa), 0, 1)[0] == pytest.approx(1, rel=1e-6)
    assert stats.e_value(0, kappa) == math.inf
    assert stats.e_value(1, kappa) == kappa


def test_a_product_of_evidence_seldom_grows_large_by_chance():
    p = np.random.default_rng(9).uniform(size=(2000, 60))
    highest = np.cumsum(np.log(np.vectorize(stats.e_value)(p)), axis=1).max(axis=1)
    assert 0 < np.mean(highest >= math.log(20)) <= 0.05


@pytest.mark.parametrize(("p", "kappa"), [(-0.1, 0.5), (1.1, 0.5), (math.nan, 0.5), (0.5, 0), (0.5, 1)])
def test_evidence_refuses_arguments_out_of_range(p, kappa):
    with pytest.raises(ValueError, match="kappa"):
        stats.e_value(p, kappa)
