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
