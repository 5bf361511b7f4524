"""What Mirabel's decision costs, from the moments and by the scan of Algorithm 1.

Cost counted: background of the query, threshold, decision, verdict. Not counted: embedding and search, which a RAG
does anyway.
"""

from __future__ import annotations

import numpy as np

from benchmarks import SEED, clustered, median_s, save
from casemate.defenses.mirabel import Mirabel
from casemate.stats import CorpusMoments
from casemate.types import Document, Hit, Retrieval

REPEATS = 3000


def main() -> None:
    """Measures 384 and 1,024 dimensions, and 1,000 to 1,000,000 documents."""
    rng = np.random.default_rng(SEED)
    results: dict[str, float] = {}
    for dim, sizes in ((384, (1_000, 100_000, 1_000_000)), (1024, (1_000, 100_000))):
        for n in sizes:
            E = clustered(n, dim, rng)
            moments = sum((CorpusMoments.of(E[i : i + 20_000]) for i in range(0, n, 20_000)), CorpusMoments.empty(dim))
            results[f"moments_us_dim{dim}_n{n}"] = 1e6 * _from_moments(moments, E[: min(n, 1000)])
            if n == 100_000:
                results[f"scan_us_dim{dim}_n{n}"] = 1e6 * median_s(lambda q=E[5], E=E: _by_scan(E, q), 50)
    results["ratio_scan_to_moments_dim384_n100000"] = (
        results["scan_us_dim384_n100000"] / results["moments_us_dim384_n100000"]
    )
    results["ratio_n1000000_to_n1000_dim384"] = (
        results["moments_us_dim384_n1000000"] / results["moments_us_dim384_n1000"]
    )
    save("detection", results)


def _from_moments(moments: CorpusMoments, Q: np.ndarray) -> float:
    mirabel = Mirabel()
    hits = tuple(Hit(Document(str(i), "text"), 0.5 - i / 100) for i in range(6))
    queries = iter(np.resize(Q, (REPEATS, Q.shape[1])))
    return median_s(lambda: mirabel.judge(Retrieval(hits, moments.background(next(queries)))), REPEATS)


def _by_scan(E: np.ndarray, q: np.ndarray, rho: float = 0.05) -> bool:
    """Algorithm 1 as a careful programmer writes it: one BLAS pass in float32, no copy of the scores."""
    s = E @ q  # (n,)
    n, target = len(s), int(s.argmax())
    top = s[target]
    total, squares = float(s.sum(dtype=np.float64)), float(np.dot(s, s))
    mean = (total - top) / (n - 1)
    std = np.sqrt((squares - top * top) / (n - 1) - mean * mean)
    scale = np.sqrt(2 * np.log(n))
    return bool(top > mean + std * (scale - np.log(-np.log(1 - rho)) / scale))


if __name__ == "__main__":
    main()
