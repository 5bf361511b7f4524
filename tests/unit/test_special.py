"""Incomplete beta and gamma functions against SciPy."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import special as scipy_special

from casemate.maths.special import beta_cdf, beta_quantile, gamma_sf

SIZE = st.floats(-1, 5).map(lambda e: 10.0**e)
SPREAD = st.floats(-4, 4)


@given(SIZE, SIZE, SPREAD)
def test_beta_distribution(a, b, z):
    mean = a / (a + b)
    x = mean * math.exp(z * math.sqrt((1 - mean) / mean / (a + b + 1)))
    assume(0 < x < 1)
    assert beta_cdf(x, a, b) == pytest.approx(scipy_special.betainc(a, b, x), rel=1e-8, abs=1e-14)


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.sampled_from([0.005, 0.025, 0.5, 0.975]))
def test_beta_quantile(successes, failures, p):
    quantiles = beta_quantile(p, successes + 1, failures)
    assert quantiles == pytest.approx(scipy_special.betaincinv(successes + 1, failures, p), rel=1e-8)


@given(SIZE, SPREAD)
def test_gamma_distribution(a, z):
    x = a * math.exp(z / math.sqrt(a + 1))
    assert gamma_sf(x, a) == pytest.approx(scipy_special.gammaincc(a, x), rel=1e-8, abs=1e-14)


def test_limits_of_the_domain():
    assert (beta_cdf(0, 2, 3), beta_cdf(1, 2, 3)) == (0, 1)
    assert beta_quantile(0, 2, 3) == 0
    assert gamma_sf(0, 2) == 1
    assert gamma_sf(800.0, 1.0) == pytest.approx(math.exp(-800), abs=1e-300)
