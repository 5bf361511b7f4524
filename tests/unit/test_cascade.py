from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import ConfigError
from casemate.maths.cascade import (
    RULES,
    DeferralRule,
    acceptance_probability,
    copy_ratio,
    residual_distribution,
    sample_token,
    softmax,
    target_distribution,
    total_variation,
)

V = 7


@st.composite
def distributions(draw_, size=V):
    """From uniform to nearly deterministic, some with zeros."""
    raw = np.array(draw_(st.lists(st.floats(0, 1), min_size=size, max_size=size)))
    raw = raw ** draw_(st.sampled_from([0.5, 1, 4, 20])) + draw_(st.sampled_from([0.0, 1e-3]))
    return raw / raw.sum() if raw.sum() > 1e-9 else np.full(size, 1 / size)


COPIES = st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=4, unique=True).map(np.array), max_size=3)
RULE = st.builds(DeferralRule, st.sampled_from(RULES), st.floats(0, 0.9), st.floats(1, 9.9))


def accepted_distribution(q, pi):
    """Returns the distribution of the token at one position, over all tokens that may be drafted."""
    kept = np.array([q[v] * acceptance_probability(pi, q, v) for v in range(len(q))])
    return kept + (1 - kept.sum()) * residual_distribution(pi, q)


@given(distributions(), distributions(), COPIES, RULE)
def test_accepted_and_resampled_tokens_have_the_target_distribution(q, p, copies, rule):
    pi = target_distribution(q, p, rule.deferred(q, p, copies))
    assert pi.sum() == pytest.approx(1)
    assert accepted_distribution(q, pi) == pytest.approx(pi, abs=1e-9)


@given(distributions(), distributions(), st.lists(st.booleans(), min_size=V, max_size=V))
def test_target_distribution_equals_its_definition(q, p, mask):
    r = np.array(mask)
    expected = [q[v] * (1 - r[v]) + p[v] * sum(r[w] * q[w] for w in range(V)) for v in range(V)]
    assert target_distribution(q, p, r) == pytest.approx(np.array(expected), abs=1e-12)
    assert np.array_equal(target_distribution(q, p, np.full(V, True)), p)
    assert np.array_equal(target_distribution(q, p, np.full(V, False)), q)


@given(distributions(), distributions(), COPIES, st.floats(0, 0.9), st.floats(1, 9.9))
def test_copy_token_probability_is_bounded_by_the_reference(q, p, copies, alpha, bound):
    rule = DeferralRule("token_copy", alpha, bound)
    pi = target_distribution(q, p, rule.deferred(q, p, copies))
    for tokens in copies:
        assert (pi[tokens] <= (bound + 1) * p[tokens] + 1e-12).all()


def test_copy_bound_is_necessary_and_nearly_tight():
    """If the reference distribution is flat, the draft's copy tokens would be accepted without a bound."""
    rng, exceeding, most = np.random.default_rng(3), 0, 0.0
    for _ in range(2000):
        q, p = rng.dirichlet(np.full(V, 0.3)), rng.dirichlet(np.full(V, 8.0))
        copies = [rng.choice(V, 3, replace=False)]
        rule = DeferralRule("token_copy", 0.8, 1.5)
        free = target_distribution(q, p, rule.deferred(q, p, ()))
        bounded = target_distribution(q, p, rule.deferred(q, p, copies))
        exceeding += bool((free[copies[0]] > 2.5 * p[copies[0]]).any())
        most = max(most, float((bounded[copies[0]] / p[copies[0]]).max()))
    assert exceeding > 500
    assert 2.0 < most <= 2.5


@given(distributions(), distributions(), COPIES, st.floats(0, 0.9), st.floats(1, 9.9))
def test_accepted_draft_has_a_copy_ratio_within_the_bound(q, p, copies, alpha, bound):
    ratio = copy_ratio(q, p, copies)
    if not DeferralRule("paper", alpha, bound).deferred(q, p, copies).any():
        assert ratio <= bound + 1e-9
    if not DeferralRule("excess", alpha, bound).deferred(q, p, copies).any():
        assert ratio <= bound + 1 + 1e-9


@given(distributions(), distributions(), COPIES, st.floats(0, 0.9), st.floats(1, 9.9))
def test_deferral_rules_equal_those_of_the_papers(q, p, copies, alpha, bound):
    tv = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    ratios = [(sum(q[t] for t in c) + 1e-6) / (sum(p[t] for t in c) + 1e-6) for c in copies]
    ratio = min(max(ratios), 10) if ratios else 0
    eta = (1 + alpha) / bound
    margins = {
        "opt": max(p) - alpha * tv - max(q),
        "paper": max(p) - alpha * tv + eta * ratio - max(q),
        "excess": max(p) - alpha * tv + eta * max(0, ratio - 1) - max(q),
    }
    for name, margin in margins.items():
        if abs(margin) > 1e-9:
            assert DeferralRule(name, alpha, bound).deferred(q, p, copies).tolist() == [margin > 0] * V
    for v in range(V):
        is_likely = p[v] >= (1 - alpha) * max(p)
        copied = any(v in c and q[v] > bound * p[v] for c in copies)
        assert DeferralRule("token_copy", alpha, bound).deferred(q, p, copies)[v] == (not is_likely or copied)


def test_paper_rule_penalizes_equal_distributions_and_excess_rule_does_not():
    token_distribution = softmax(np.arange(V, dtype=float))
    copies = [np.array([V - 1])]
    assert DeferralRule("paper").deferred(token_distribution, token_distribution, copies).all()
    assert not DeferralRule("excess").deferred(token_distribution, token_distribution, copies).any()
    assert not DeferralRule("paper").deferred(token_distribution, token_distribution, ()).any()


@given(distributions(), distributions())
def test_total_variation_is_half_the_l1_distance(p, q):
    assert total_variation(p, q) == pytest.approx(np.abs(p - q).sum() / 2, abs=1e-12)
    assert total_variation(p, p) == 0


def test_copy_ratio_is_the_maximum_over_chunks_and_clipped():
    q, p = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.9, 0.0])
    assert copy_ratio(q, p, [np.array([1]), np.array([0, 1])]) == pytest.approx(0.8, abs=1e-5)
    assert copy_ratio(q, p, [np.array([1]), np.array([0])]) == pytest.approx(5, abs=1e-3)
    assert copy_ratio(q, p, [np.array([2])]) == 10
    assert copy_ratio(q, p, []) == 0


def test_sampled_tokens_follow_the_distribution():
    token_distribution = np.array([0.0, 0.2, 0.0, 0.5, 0.3, 0.0], np.float32)
    rng = np.random.default_rng(1)
    counts = np.bincount([sample_token(token_distribution, u) for u in rng.random(20_000)], minlength=6)
    assert counts[[0, 2, 5]].sum() == 0
    assert counts / 20_000 == pytest.approx(token_distribution, abs=0.015)
    assert sample_token(token_distribution, np.nextafter(1, 0)) == 4
    assert sample_token(np.array([0.0, 1.0, 0.0]), 0.0) == 1


def test_softmax_is_stable_for_any_size_and_temperature():
    logits = np.array([[1000.0, 1001.0], [0.0, -1e9]], np.float32)
    assert softmax(logits) == pytest.approx(np.array([[0.268941, 0.731059], [1, 0]]), abs=1e-5)
    assert softmax(logits[:1], 0.5)[0, 1] == pytest.approx(1 / (1 + math.exp(-2)), abs=1e-5)
    assert softmax(logits).dtype == np.float32


def test_equal_distributions_leave_no_residual():
    token_distribution = np.array([0.5, 0.5])
    assert residual_distribution(token_distribution, token_distribution).tolist() == [0.5, 0.5]
    assert acceptance_probability(token_distribution, token_distribution, 0) == 1
    assert acceptance_probability(np.array([0.5, 0.5]), np.array([1.0, 0.0]), 1) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "eq5"}, "unknown deferral rule 'eq5'; known: paper, excess, opt, token_copy"),
        ({"alpha": 1.0}, r"alpha in \[0, 1\)"),
        ({"alpha": -0.1}, "alpha=-0.1"),
        ({"bound": 0.9}, r"bound in \[1, 10\), got alpha=0.1, bound=0.9"),
        ({"bound": 10.0}, "bound=10.0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        DeferralRule(**options)
