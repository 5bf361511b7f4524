import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score

from casemate.maths import metrics
from casemate.redteam.lab import fitting
from casemate.redteam.lab.fitting import corner, cross_fit, fit, logistic
from casemate.redteam.lab.results import Trial


def trials(X, member):
    return [Trial(f"d{i}", bool(m), tuple(map(float, x)), 1) for i, (x, m) in enumerate(zip(X, member, strict=True))]


def halves(member):
    """Halves with alternating candidates of each kind."""
    place = np.zeros(len(member), int)
    for kind in (True, False):
        place[member == kind] = np.arange((member == kind).sum())
    return {f"d{i}": "A" if p % 2 else "B" for i, p in enumerate(place)}


def candidates(rng, members, nonmembers, shift, features=1):
    member = np.array([True] * members + [False] * nonmembers)
    return rng.standard_normal((len(member), features)) + np.outer(member, shift), member


@settings(max_examples=40)
@given(
    values=st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=25).filter(
        lambda v: len({m for _, m in v}) == 2
    )
)
def test_threshold_is_optimal_for_either_direction(values):
    X = np.array([[v] for v, _ in values], float)
    member = np.array([m for _, m in values])
    tried = [
        balanced_accuracy_score(member, (X[:, 0] > cut) == above)
        for cut in np.arange(-0.5, 7)
        for above in (True, False)
    ]
    rule = fit(X, member)
    assert rule.accuracy == pytest.approx(max(tried))
    assert balanced_accuracy_score(member, rule.predict(X)) == pytest.approx(max(tried))


def test_threshold_is_the_midpoint_of_a_gap():
    rule = fit(np.array([[0.0], [1.0], [5.0], [6.0]]), np.array([False, False, True, True]))
    assert rule.threshold == 3.0
    assert rule.above


def test_fits_a_feature_with_lower_values_for_members():
    rng = np.random.default_rng(0)
    X, member = candidates(rng, 300, 300, -2.0)
    fitted = cross_fit(trials(X, member), halves(member))
    assert (fitted.predicted == fitted.member).mean() > 0.8
    assert metrics.auc(fitted.score[member], fitted.score[~member]) < 0.1  # a single feature is not transformed


def test_constant_feature_is_uninformative():
    member = np.array([True, False] * 20)
    for features in (1, 3):
        fitted = cross_fit(trials(np.ones((40, features)), member), halves(member))
        assert balanced_accuracy_score(member, fitted.predicted) == 0.5
        assert metrics.auc(fitted.score[member], fitted.score[~member]) == 0.5


def test_predictions_are_out_of_fold():
    """Each candidate has a unique feature value; an in-sample rule would always be right."""
    rng = np.random.default_rng(1)
    right = []
    for _ in range(40):
        member = rng.permutation([True, False] * 50)
        X = rng.standard_normal((100, 1))
        fitted = cross_fit(trials(X, member), halves(member))
        right.append((fitted.predicted == fitted.member).mean())
        whole = fit(X, member)
        assert whole.accuracy > 0.5
    assert abs(np.mean(right) - 0.5) < 0.02


def test_scores_are_out_of_fold():
    """Twelve noise features separate the forty candidates that they are fitted on, and no others."""
    rng = np.random.default_rng(6)
    areas = []
    for _ in range(20):
        X, member = candidates(rng, 40, 40, 0.0, 12)
        fitted = cross_fit(trials(X, member), halves(member))
        areas.append(metrics.auc(fitted.score[member], fitted.score[~member]))
    assert abs(np.mean(areas) - 0.5) < 0.05


def test_rule_of_one_half_predicts_the_other():
    """Members are above 0 in half A and below 0 in half B, so the rule of one half always fails on the other."""
    member = np.array([True, False] * 40)
    half = halves(member)
    first = np.array([half[f"d{i}"] == "A" for i in range(80)])
    X = np.where(member == first, 1.0, -1.0)[:, None]
    fitted = cross_fit(trials(X, member), half)
    assert not (fitted.predicted == fitted.member).any()


@pytest.mark.parametrize("features", [1, 2, 4])
def test_logistic_regression_equals_an_independent_implementation(features):
    rng = np.random.default_rng(2)
    X, member = candidates(rng, 90, 40, np.linspace(0.3, 1.5, features), features)
    X = X * np.logspace(-3, 3, features) + 7
    Z = (X - X.mean(axis=0)) / X.std(axis=0)
    reference = LogisticRegression(C=1.0, class_weight="balanced", tol=1e-10, max_iter=10_000).fit(Z, member)
    assert np.allclose(logistic(X, member)(X), reference.decision_function(Z), atol=1e-4)


def test_logistic_regression_stays_finite_under_perfect_separation():
    member = np.array([True, False] * 20)
    odds = logistic(np.column_stack([member * 1e9, np.zeros(40)]), member)(np.array([[1e9, 0.0], [0.0, 0.0]]))
    assert np.isfinite(odds).all()
    assert odds[0] > 1 > -1 > odds[1]


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_corner_is_at_least_as_accurate_as_any_single_threshold(seed):
    rng = np.random.default_rng(seed)
    X = rng.integers(0, 5, (30, 2)).astype(float)
    member = rng.permutation([True, False] * 15)
    inside = corner(X, member)(X)[:, 0] > 0
    cuts = np.arange(-0.5, 5)
    single = max(balanced_accuracy_score(member, X[:, j] > cut) for j in (0, 1) for cut in cuts)
    best = max(balanced_accuracy_score(member, (X > [a, b]).all(axis=1)) for a in cuts for b in cuts)
    assert best + 1e-12 >= balanced_accuracy_score(member, inside) >= single - 1e-12


def test_finds_a_corner_if_members_have_high_values_of_both_features():
    rng = np.random.default_rng(3)
    X = rng.uniform(0, 1, (400, 2))
    member = (X > 0.6).all(axis=1)
    assert ((corner(X, member)(X)[:, 0] > 0) == member).all()
    rule = fit(X, member)
    assert rule.accuracy == 1.0
    assert fit(X[:, :1], member).accuracy < 0.9


def test_combines_features_only_if_that_improves_accuracy():
    rng = np.random.default_rng(4)
    X, member = candidates(rng, 400, 400, [1.0, 1.0], 2)
    both = cross_fit(trials(X, member), halves(member))
    one = cross_fit(trials(X[:, :1], member), halves(member))
    assert metrics.auc(both.score[member], both.score[~member]) > metrics.auc(one.score[member], one.score[~member])
    assert (both.predicted == member).mean() > (one.predicted == member).mean()
    noise = np.column_stack([X[:, 0] * 10, rng.standard_normal(800)])
    assert fit(noise, member).accuracy >= fit(noise[:, :1], member).accuracy - 1e-12


def test_scores_of_both_halves_have_the_same_scale():
    rng = np.random.default_rng(5)
    X, member = candidates(rng, 300, 300, [1.5, 1.5], 2)
    half = halves(member)
    fitted = cross_fit(trials(X, member), half)
    first = np.array([half[f"d{i}"] == "A" for i in range(600)])
    apart = [metrics.auc(fitted.score[h & member], fitted.score[h & ~member]) for h in (first, ~first)]
    assert metrics.auc(fitted.score[member], fitted.score[~member]) == pytest.approx(np.mean(apart), abs=0.02)


def test_chooses_the_simplest_of_equally_accurate_rules(monkeypatch):
    X = np.column_stack([np.r_[np.zeros(20), np.ones(20)], np.r_[np.zeros(20), np.ones(20)]])
    member = np.arange(40) >= 20
    used = []
    original = fitting._odds
    monkeypatch.setattr(fitting, "_odds", lambda way, *rest: used.append(way(X).shape) or original(way, *rest))
    rule = fit(X, member)
    assert used == [(40, 1), (40, 1), (40, 2)]
    assert rule.score(np.array([[1.0, 0.0]])) == rule.score(np.array([[1.0, 1.0]]))  # the first feature alone
