"""Metrics of a ranking of documents."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence


def recall_at_k(ranking: Sequence[str], relevant: Collection[str], k: int) -> float:
    """Recall at k: share of the relevant documents among the first k, in [0, 1]; higher is better.

    Args:
        ranking: Document ids, best first, without duplicates.
        relevant: Ids of the relevant documents, at least one.
        k: Cutoff.

    >>> recall_at_k(["a", "b", "c"], {"a", "c", "d"}, 2)
    0.3333333333333333
    """
    return len(set(ranking[:k]) & set(relevant)) / len(relevant)


def ndcg_at_k(ranking: Sequence[str], gains: Mapping[str, float], k: int) -> float:
    """Normalized discounted cumulative gain at k (Jarvelin and Kekalainen 2002), in [0, 1]; higher is better.

    Args:
        ranking: Document ids, best first, without duplicates.
        gains: Graded relevance by id, at least one above 0; absent ids have 0.
        k: Cutoff.

    >>> round(ndcg_at_k(["x", "a"], {"a": 1.0}, 10), 4)
    0.6309
    """
    ideal = sorted(gains.values(), reverse=True)[:k]
    return _dcg([gains.get(d, 0.0) for d in ranking[:k]]) / _dcg(ideal)


def _dcg(gains: Sequence[float]) -> float:
    return math.fsum(g / math.log2(rank + 1) for rank, g in enumerate(gains, 1))
