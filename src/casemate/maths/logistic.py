"""Weighted, L2-penalized logistic regression, optionally with non-negative weights."""

from __future__ import annotations

import numpy as np

from casemate.types import Float64

ITERATIONS = 200
ARMIJO, MIN_SCALE = 1e-4, 1e-12  # Armijo constant of the line search, and its shortest step
TOLERANCE = 1e-10  # largest component of the gradient at the solution, relative to the sum of the sample weights


def logistic_regression(
    X: Float64, y: Float64, sample_weight: Float64, penalty: float, non_negative: bool = False
) -> tuple[Float64, float]:
    """Fits an L2-penalized logistic regression with sample weights: coefficients (f,) and intercept.

    Minimizes sum_i w_i ln(1 + exp(-y_i (x_i . c + b))) + penalty |c|^2 / 2 over coefficients c and intercept b. The
    method is Newton's with a line search. With ``non_negative`` the coefficients stay at or above 0 (projected Newton,
    Bertsekas 1982). The intercept is neither penalized nor bounded. Features X, (n, f), are standardized; labels y,
    (n,), are 1 and -1; weights w are at least 0. The penalty is above 0, so that separable classes have a finite
    solution.

    >>> X, y = np.array([[-1.0], [0.0], [1.0]]), np.array([-1.0, -1.0, 1.0])
    >>> coefficients, intercept = logistic_regression(X, y, np.ones(3), 1.0)
    >>> coefficients.round(3).tolist(), round(intercept, 3)
    ([0.702], -0.748)
    """
    Z = np.column_stack([X, np.ones(len(X))])
    ridge = np.append(np.full(X.shape[1], penalty), 0.0)
    bounded = np.append(np.full(X.shape[1], non_negative), False)
    t = np.zeros(Z.shape[1])

    def loss(at: Float64) -> float:
        return float(sample_weight @ np.logaddexp(0, -y * (Z @ at)) + ridge @ at**2 / 2)

    current = loss(t)
    for _ in range(ITERATIONS):
        p_wrong = np.exp(-np.logaddexp(0, y * (Z @ t)))  # probability of the other label, (n,)
        gradient = ridge * t - Z.T @ (sample_weight * y * p_wrong)
        free = ~(bounded & (t <= 0) & (gradient > 0))
        if np.abs(gradient[free]).max(initial=0.0) <= TOLERANCE * sample_weight.sum():
            break
        F = Z[:, free]
        hessian = (F.T * (sample_weight * p_wrong * (1 - p_wrong))) @ F + np.diag(ridge[free])
        step = np.zeros_like(t)
        step[free] = np.linalg.lstsq(hessian, gradient[free], rcond=None)[0]
        scale = 1.0
        while scale > MIN_SCALE:
            new = np.where(bounded, np.maximum(t - scale * step, 0), t - scale * step)
            after = loss(new)
            if after <= current - ARMIJO * float(gradient @ (t - new)):
                break
            scale /= 2
        else:
            break
        t, current = new, after
    return t[:-1], float(t[-1])
