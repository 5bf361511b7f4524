"""TF-IDF rows and near-duplicates against scikit-learn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer

from casemate.text.tfidf import TfIdf
from casemate.text.tokens import words

TEXTS = [" ".join(np.random.default_rng(i).choice(list("abcdefghijklmnopqrstuvwxyz"), 12)) for i in range(60)]


def reference(texts):
    return TfidfVectorizer(analyzer=words).fit_transform(texts)


def test_cosines_equal_those_of_scikit_learn():
    texts = [*TEXTS, "?!"]
    X, tfidf = reference(texts), TfIdf(texts)
    S = (X @ X.T).toarray()
    dense = np.zeros(tfidf.shape)
    for i in range(len(texts)):
        own = slice(tfidf.starts[i], tfidf.starts[i + 1])
        dense[i, tfidf.columns[own]] = tfidf.values[own]
    assert np.allclose(dense @ dense.T, S, atol=1e-12)
    assert np.allclose([tfidf.dot(row) for row in dense], S, atol=1e-12)


def test_mean_row_equals_numpy():
    X, tfidf = reference(TEXTS), TfIdf(TEXTS)
    rows = np.arange(60) % 3 == 0
    assert sorted(tfidf.mean(rows)) == pytest.approx(sorted(X.toarray()[rows].mean(axis=0)), abs=1e-12)


def test_copied_texts_are_near_duplicates():
    texts = [*TEXTS[:50], *(TEXTS[i] for i in (3, 7, 8))]
    X = reference(texts)
    S = (X @ X.T).toarray()
    tfidf = TfIdf(texts)
    expected = {i: {j for j in range(53) if j != i and S[i, j] >= 0.95} for i in range(53)[::-1]}
    assert sum(map(len, expected.values())) == 6
    assert {i: tfidf.near_duplicates(i, 0.95) for i in expected} == expected


@given(st.lists(st.text("abcd ", max_size=12), min_size=1, max_size=12), st.sampled_from([0.3, 0.7, 0.95, 1.0]))
def test_near_duplicates_equal_a_comparison_of_all_pairs(texts, threshold):
    if not any(words(text) for text in texts):
        texts = [*texts, "a"]
    S = (reference(texts) @ reference(texts).T).toarray()
    tfidf = TfIdf(texts)
    for i in range(len(texts)):
        near = {j for j in range(len(texts)) if j != i and S[i, j] >= threshold + 1e-8}
        assert near <= tfidf.near_duplicates(i, threshold)
        assert all(S[i, j] >= threshold - 1e-8 for j in tfidf.near_duplicates(i, threshold))
