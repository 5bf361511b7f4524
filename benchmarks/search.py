"""Exact search against the HNSW graph, by size: where does the embedded index change over?

Also the share of queries whose true nearest document the graph finds (recall@1), which the detection depends on.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from benchmarks import SEED, clustered, median_s, save
from casemate.maths.nearest import ApproximateSearch, ExactSearch

DIM, K, QUERIES = 384, 6, 200
SIZES = (10_000, 50_000, 100_000, 200_000, 500_000)


def main(sizes: tuple[int, ...] = SIZES) -> None:
    """Grows both kinds of search through the sizes."""
    rng = np.random.default_rng(SEED)
    E = clustered(max(sizes), DIM, rng)
    exact, graph, held, build_s = ExactSearch(DIM), ApproximateSearch(DIM), 0, 0.0
    results = {}
    for n in sizes:
        keys, new = np.arange(held, n), E[held:n]
        exact.add(keys, new)
        start = time.perf_counter()
        graph.add(keys, new)
        build_s, held = build_s + time.perf_counter() - start, n
        near = E[rng.integers(0, n, QUERIES)] + 0.04 * rng.standard_normal((QUERIES, DIM), dtype=np.float32)
        Q = (near / np.linalg.norm(near, axis=1, keepdims=True)).astype(np.float32)
        found = [(exact.search(q, K)[0], graph.search(q, K)[0]) for q in Q]
        results[str(n)] = {
            "exact_ms": 1e3 * _median_search_s(exact, Q),
            "graph_ms": 1e3 * _median_search_s(graph, Q),
            "graph_recall_at_1": float(np.mean([a[0] == b[0] for a, b in found])),
            "graph_recall_at_k": float(np.mean([len({*a} & {*b}) / K for a, b in found])),
            "graph_build_s": build_s,
        }
        print(n, results[str(n)], file=sys.stderr)
    save("search", results)


def _median_search_s(neighbors: ExactSearch | ApproximateSearch, Q: np.ndarray) -> float:
    queries = iter(Q)
    return median_s(lambda: neighbors.search(next(queries), K), len(Q))


if __name__ == "__main__":
    main()
