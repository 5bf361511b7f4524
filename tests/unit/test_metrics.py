import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score

from casemate import metrics


@given(st.lists(st.integers(0, 3), min_size=2, max_size=20).filter(any), st.integers(1, 25), st.randoms())
def test_ndcg_equals_scikit_learn(gains, k, random):
    ids = [str(i) for i in range(len(gains))]
    random.shuffle(ids)
    position = {d: -rank for rank, d in enumerate(ids)}
    want = ndcg_score(np.array([gains]), np.array([[position[str(i)] for i in range(len(gains))]]), k=k)
    assert metrics.ndcg_at_k(ids, {str(i): float(g) for i, g in enumerate(gains)}, k) == pytest.approx(want)


@given(st.lists(st.integers(0, 30), unique=True), st.sets(st.integers(0, 30), min_size=1), st.integers(1, 40))
def test_recall_equals_counting(ranking, relevant, k):
    want = sum(1 for i, d in enumerate(ranking) if i < k and d in relevant) / len(relevant)
    assert metrics.recall_at_k([str(d) for d in ranking], {str(d) for d in relevant}, k) == pytest.approx(want)
