"""Differential privacy of answers: the arithmetic, by exhaustion over tiny vocabularies."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from casemate.private import draw_threshold, law, scores, threshold_law

VOCABULARY = 4
LOGITS = st.floats(-30, 30)


def drawn(contexts, seed=0, spread=4.0):
    return spread * np.random.default_rng(seed).standard_normal((contexts, VOCABULARY))


@given(arrays(np.float64, (3, VOCABULARY), elements=LOGITS), st.floats(0.1, 8))
def test_scores_follow_their_formula_and_lie_around_zero(logits, steepness):
    found = scores(logits, steepness)
    for row, made in zip(logits, found, strict=True):
        p = [math.exp(x - max(row)) for x in row]
        naive = [(x**steepness - 1) / steepness for x in p]
        middle = (max(naive) + min(naive)) / 2
        assert made == pytest.approx([x - middle for x in naive], abs=1e-9)
    assert np.abs(found).max() <= 0.5 / steepness + 1e-12
    assert found.max(axis=1) == pytest.approx(-found.min(axis=1))


def test_the_likeliest_token_of_a_context_scores_most():
    logits = drawn(5)
    assert (scores(logits).argmax(axis=1) == logits.argmax(axis=1)).all()


@given(arrays(np.float64, (5, VOCABULARY), elements=LOGITS), arrays(np.float64, VOCABULARY, elements=LOGITS))
def test_without_a_bound_it_is_the_mean_of_all_contexts(logits, public):
    n, temperature, weight = len(logits), 0.7, 0.3
    found = law(scores(logits), public, math.inf, temperature, weight)
    mean = scores(logits).mean(axis=0)
    known = public - math.log(sum(math.exp(x) for x in public))
    raw = [math.exp((weight * k + n * m) / temperature) for k, m in zip(known, mean, strict=True)]
    assert found == pytest.approx([x / sum(raw) for x in raw], abs=1e-9)
    assert law(scores(logits), public, 1e6, temperature, weight) == pytest.approx(found, abs=1e-12)


@given(
    arrays(np.float64, (4, VOCABULARY), elements=LOGITS),
    arrays(np.float64, VOCABULARY, elements=LOGITS),
    arrays(np.float64, VOCABULARY, elements=LOGITS),
    st.floats(0.01, 8),
    st.floats(0.05, 3),
)
def test_a_context_replaced_changes_no_probability_by_more_than_epsilon(logits, other, public, epsilon, temperature):
    """Every token of the vocabulary, analytically."""
    neighbour = logits.copy()
    neighbour[2] = other
    p, q = (law(scores(x), public, epsilon, temperature) for x in (logits, neighbour))
    both = (p > 0) & (q > 0)
    assert np.abs(np.log(p[both]) - np.log(q[both])).max(initial=0.0) <= epsilon * (1 + 1e-9)


def test_the_bound_is_reached_so_that_no_budget_is_wasted():
    """Contexts that contradict one another as much as they can; a large vocabulary shares the sum."""
    one = np.full((1, 2), -50.0)
    one[0, 0] = 50.0
    p, q = (law(scores(x), np.zeros(2), 1.0, weight=0.0) for x in (one, one[:, ::-1]))
    assert np.log(p[0] / q[0]) == pytest.approx(0.5)
    wide = np.full((1, 4000), -50.0)
    wide[0, 0] = 50.0
    other = np.roll(wide, 1, axis=1)
    p, q = (law(scores(x), np.zeros(4000), 1.0, weight=0.0) for x in (wide, other))
    assert 0.49 < np.log(p[0] / q[0]) < 1.0


def test_answers_of_several_tokens_keep_the_bound_of_their_sum():
    """All answers of three tokens, each law behind what was said before: exhaustively."""
    epsilon, rng = 0.8, np.random.default_rng(3)
    tables = {
        name: {
            said: 4 * rng.standard_normal(VOCABULARY)
            for n in range(3)
            for said in itertools.product(range(VOCABULARY), repeat=n)
        }
        for name in ("a", "b", "c", "other", "public")
    }

    def probability(contexts, answer):
        total = 1.0
        for n, token in enumerate(answer):
            logits = np.array([tables[name][answer[:n]] for name in contexts])
            total *= law(scores(logits), tables["public"][answer[:n]], epsilon)[token]
        return total

    every = list(itertools.product(range(VOCABULARY), repeat=3))
    here, there = ([probability(names, a) for a in every] for names in (("a", "b", "c"), ("a", "other", "c")))
    assert sum(here) == pytest.approx(1)
    losses = np.abs(np.log(np.array(here) / np.array(there)))
    assert 0.05 < losses.max() <= 3 * epsilon


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=12), st.floats(-1, 1), st.integers(1, 6), st.floats(0.05, 5))
def test_one_document_more_changes_no_threshold_by_more_than_epsilon(similarities, more, wanted, epsilon):
    """The density at points between all similarities."""

    def density(values, points):
        edges, shares = threshold_law(np.array(values), wanted, epsilon)
        assert shares.sum() == pytest.approx(1)
        place = np.clip(np.searchsorted(edges, points, side="right") - 1, 0, len(shares) - 1)
        return shares[place] / (edges[place + 1] - edges[place])

    cuts = sorted({-1.0, 1.0, more, *similarities})
    points = [(a + b) / 2 for a, b in itertools.pairwise(cuts) if b - a > 1e-6]
    here, there = density(similarities, points), density([*similarities, more], points)
    assert np.abs(np.log(here / there)).max() <= epsilon * (1 + 1e-6)


def test_with_much_to_spend_the_threshold_is_reached_by_as_many_as_are_wanted():
    similarities = np.array([0.9, 0.8, 0.6, 0.3])
    found = threshold_law(similarities, 2, 200.0)
    rng = np.random.default_rng(1)
    assert all(0.6 <= draw_threshold(*found, rng) <= 0.8 for _ in range(100))
    low = [draw_threshold(*threshold_law(similarities, 2, 0.01), rng) for _ in range(300)]
    assert min(low) < -0.5 and max(low) > 0.9


def test_all_similarities_alike_leave_a_threshold_all_the_same():
    edges, shares = threshold_law(np.full(5, 1.0), 2, 1.0, 1.0, 1.0)
    assert -1 <= draw_threshold(edges, shares, np.random.default_rng(0)) <= 1
