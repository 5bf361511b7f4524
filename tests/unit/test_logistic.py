"""Logistic regression, compared with scikit-learn and SciPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from casemate.maths.logistic import logistic_regression


def coefficients(X, y, w, penalty=1e-3):
    return logistic_regression(X, y, w, penalty, non_negative=True)[0]


def loss(t, X, y, w, penalty):
    return float(w @ np.logaddexp(0, -y * (X @ t[1:] + t[0])) + penalty / 2 * t[1:] @ t[1:])


def data(slopes, n=400, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, len(slopes)))
    y = np.where(X @ np.array(slopes) + rng.logistic(size=n) > 0.3, 1.0, -1.0)
    return X, y, rng.uniform(0.5, 1.5, n)


@pytest.mark.parametrize("penalty", [1e-3, 1.0, 30.0])
def test_unconstrained_fit_equals_scikit_learn(penalty):
    X, y, w = data([1.5, 0.7, 2.0])
    reference = LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=10_000).fit(X, y, sample_weight=w)
    assert reference.coef_.min() > 0
    assert coefficients(X, y, w, penalty) == pytest.approx(reference.coef_[0], abs=1e-4)


def test_sets_negative_coefficients_to_zero_and_refits_the_others():
    X, y, w = data([1.5, -1.0, 2.0, -0.3])
    found = coefficients(X, y, w, 0.1)
    reference = LogisticRegression(C=10, tol=1e-10, max_iter=10_000).fit(X[:, [0, 2]], y, sample_weight=w)
    assert found[[1, 3]] == pytest.approx(0, abs=1e-9)
    assert min(found) >= 0
    assert found[[0, 2]] == pytest.approx(reference.coef_[0], abs=1e-4)


def test_non_negative_fit_is_optimal():
    rng, (X, y, w) = np.random.default_rng(1), data([1.0, -1.0, 0.5, 0.0])
    best = coefficients(X, y, w, 0.1)
    intercepts = np.linspace(-3, 3, 601)
    least = min(loss(np.r_[b, best], X, y, w, 0.1) for b in intercepts)
    for _ in range(50):
        other = np.maximum(best + rng.normal(scale=0.2, size=4), 0)
        assert min(loss(np.r_[b, other], X, y, w, 0.1) for b in intercepts[::10]) >= least - 1e-6


def test_huge_and_constant_features_give_finite_coefficients():
    X, y, w = data([1.0, 2.0])
    assert np.isfinite(coefficients(X * 1e4, y, w)).all()
    assert np.isfinite(coefficients(np.zeros((10, 2)), np.r_[np.ones(5), -np.ones(5)], np.ones(10))).all()


@given(st.integers(0, 10_000), st.booleans())
def test_loss_is_at_most_that_of_scipy(seed, non_negative):
    rng = np.random.default_rng(seed)
    X, y, w = data(rng.normal(size=rng.integers(1, 6)), 60, seed)
    penalty = 10.0 ** rng.uniform(-3, 2)
    slopes, intercept = logistic_regression(X, y, w, penalty, non_negative)
    bounds = [(None, None)] + [(0 if non_negative else None, None)] * X.shape[1]
    reference = minimize(loss, np.zeros(X.shape[1] + 1), (X, y, w, penalty), "L-BFGS-B", bounds=bounds)
    assert loss(np.r_[intercept, slopes], X, y, w, penalty) <= reference.fun + 1e-9
    assert not non_negative or min(slopes) >= 0


def test_separable_classes_give_finite_coefficients():
    X, y = np.array([[-1.0], [1.0]] * 20), np.array([-1.0, 1.0] * 20)
    slopes, intercept = logistic_regression(X * 1e9, y, np.ones(40), 1.0)
    assert np.isfinite([*slopes, intercept]).all()
