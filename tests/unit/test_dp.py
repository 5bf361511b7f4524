"""Differentially private token generation, checked exhaustively over tiny vocabularies."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from casemate.maths.dp import next_token_distribution, sample_threshold, threshold_distribution, token_scores

VOCABULARY = 4
LOGITS = st.floats(-30, 30)


def drawn(contexts, seed=0, spread=4.0):
    return spread * np.random.default_rng(seed).standard_normal((contexts, VOCABULARY))


@given(arrays(np.float64, (3, VOCABULARY), elements=LOGITS), st.floats(0.1, 8))
def test_token_scores_equal_their_formula_and_are_centered(logits, steepness):
    found = token_scores(logits, steepness)
    for row, made in zip(logits, found, strict=True):
        p = [math.exp(x - max(row)) for x in row]
        naive = [(x**steepness - 1) / steepness for x in p]
        middle = (max(naive) + min(naive)) / 2
        assert made == pytest.approx([x - middle for x in naive], abs=1e-9)
    assert np.abs(found).max() <= 0.5 / steepness + 1e-12
    assert found.max(axis=1) == pytest.approx(-found.min(axis=1))


def test_most_probable_token_has_the_highest_score():
    logits = drawn(5)
    assert (token_scores(logits).argmax(axis=1) == logits.argmax(axis=1)).all()


@given(arrays(np.float64, (5, VOCABULARY), elements=LOGITS), arrays(np.float64, VOCABULARY, elements=LOGITS))
def test_infinite_epsilon_gives_the_mean_of_all_contexts(logits, public):
    n, temperature, weight = len(logits), 0.7, 0.3
    found = next_token_distribution(token_scores(logits), public, math.inf, temperature, weight)
    mean = token_scores(logits).mean(axis=0)
    known = public - math.log(sum(math.exp(x) for x in public))
    raw = [math.exp((weight * k + n * m) / temperature) for k, m in zip(known, mean, strict=True)]
    assert found == pytest.approx([x / sum(raw) for x in raw], abs=1e-9)
    assert next_token_distribution(token_scores(logits), public, 1e6, temperature, weight) == pytest.approx(
        found, abs=1e-12
    )


@given(
    arrays(np.float64, (4, VOCABULARY), elements=LOGITS),
    arrays(np.float64, VOCABULARY, elements=LOGITS),
    arrays(np.float64, VOCABULARY, elements=LOGITS),
    st.floats(0.01, 8),
    st.floats(0.05, 3),
)
def test_replacing_a_context_changes_log_probabilities_by_at_most_epsilon(logits, other, public, epsilon, temperature):
    """Checks the exact log probability of each token."""
    neighbor = logits.copy()
    neighbor[2] = other
    p, q = (next_token_distribution(token_scores(x), public, epsilon, temperature) for x in (logits, neighbor))
    both = (p > 0) & (q > 0)
    assert np.abs(np.log(p[both]) - np.log(q[both])).max(initial=0.0) <= epsilon * (1 + 1e-9)


def test_privacy_bound_is_tight():
    """Two opposite contexts; in a large vocabulary the normalization adds more of the loss."""
    one = np.full((1, 2), -50.0)
    one[0, 0] = 50.0
    p, q = (next_token_distribution(token_scores(x), np.zeros(2), 1.0, weight=0.0) for x in (one, one[:, ::-1]))
    assert np.log(p[0] / q[0]) == pytest.approx(0.5)
    wide = np.full((1, 4000), -50.0)
    wide[0, 0] = 50.0
    other = np.roll(wide, 1, axis=1)
    p, q = (next_token_distribution(token_scores(x), np.zeros(4000), 1.0, weight=0.0) for x in (wide, other))
    assert 0.49 < np.log(p[0] / q[0]) < 1.0


def test_answers_of_several_tokens_compose_to_the_sum_of_epsilons():
    """All answers of three tokens, each distribution given its prefix."""
    epsilon, rng = 0.8, np.random.default_rng(3)
    tables = {
        name: {
            prefix: 4 * rng.standard_normal(VOCABULARY)
            for n in range(3)
            for prefix in itertools.product(range(VOCABULARY), repeat=n)
        }
        for name in ("a", "b", "c", "other", "public")
    }

    def probability(contexts, answer):
        total = 1.0
        for n, token in enumerate(answer):
            logits = np.array([tables[name][answer[:n]] for name in contexts])
            total *= next_token_distribution(token_scores(logits), tables["public"][answer[:n]], epsilon)[token]
        return total

    every = list(itertools.product(range(VOCABULARY), repeat=3))
    original, replaced = ([probability(names, a) for a in every] for names in (("a", "b", "c"), ("a", "other", "c")))
    assert sum(original) == pytest.approx(1)
    losses = np.abs(np.log(np.array(original) / np.array(replaced)))
    assert 0.05 < losses.max() <= 3 * epsilon


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=12), st.floats(-1, 1), st.integers(1, 6), st.floats(0.05, 5))
def test_adding_a_document_changes_threshold_density_by_at_most_epsilon(similarities, more, wanted, epsilon):
    """Densities at points between all similarities."""

    def density(values, points):
        edges, shares = threshold_distribution(np.array(values), wanted, epsilon)
        assert shares.sum() == pytest.approx(1)
        place = np.clip(np.searchsorted(edges, points, side="right") - 1, 0, len(shares) - 1)
        return shares[place] / (edges[place + 1] - edges[place])

    cuts = sorted({-1.0, 1.0, more, *similarities})
    points = [(a + b) / 2 for a, b in itertools.pairwise(cuts) if b - a > 1e-6]
    original, replaced = density(similarities, points), density([*similarities, more], points)
    assert np.abs(np.log(original / replaced)).max() <= epsilon * (1 + 1e-6)


def test_large_epsilon_threshold_selects_the_wanted_number():
    similarities = np.array([0.9, 0.8, 0.6, 0.3])
    found = threshold_distribution(similarities, 2, 200.0)
    rng = np.random.default_rng(1)
    assert all(0.6 <= sample_threshold(*found, rng) <= 0.8 for _ in range(100))
    low = [sample_threshold(*threshold_distribution(similarities, 2, 0.01), rng) for _ in range(300)]
    assert min(low) < -0.5 and max(low) > 0.9


def test_equal_similarities_give_a_threshold():
    edges, shares = threshold_distribution(np.full(5, 1.0), 2, 1.0)
    assert -1 <= sample_threshold(edges, shares, np.random.default_rng(0)) <= 1
