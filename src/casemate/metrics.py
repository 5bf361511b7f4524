"""The papers' metrics, pure: each docstring names the range and the good direction."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence


def recall_at_k(ranking: Sequence[str], relevant: Collection[str], k: int) -> float:
    """Share of the relevant documents among the first k, in [0, 1]; higher is better.

    Args:
        ranking: Document ids, best first, each once.
        relevant: Ids of the relevant ones, at least one.
        k: How many are looked at.

    >>> recall_at_k(["a", "b", "c"], {"a", "c", "d"}, 2)
    0.3333333333333333
    """
    return len(set(ranking[:k]) & set(relevant)) / len(relevant)


def ndcg_at_k(ranking: Sequence[str], gains: Mapping[str, float], k: int) -> float:
    """Normalised discounted cumulative gain (Jarvelin and Kekalainen 2002), in [0, 1]; higher is better.

    Args:
        ranking: Document ids, best first, each once.
        gains: Graded relevance by id, at least one above 0; absent means 0.
        k: How many are looked at.

    >>> round(ndcg_at_k(["x", "a"], {"a": 1.0}, 10), 4)
    0.6309
    """
    ideal = sorted(gains.values(), reverse=True)[:k]
    return _dcg([gains.get(d, 0.0) for d in ranking[:k]]) / _dcg(ideal)


def _dcg(gains: Sequence[float]) -> float:
    return math.fsum(g / math.log2(rank + 1) for rank, g in enumerate(gains, 1))
