"""CPU time of Mirabel's decision, from corpus moments and by the scan of Algorithm 1.

Included: similarity statistics of the query, threshold, decision, verdict. Excluded: embedding and search, which a RAG
needs anyway. BLAS uses one thread, as in a serving process.
"""

from __future__ import annotations

import numpy as np

from benchmarks import SEED, clustered, median_s, save
from casemate.guard.defenses.mirabel import Mirabel
from casemate.maths.moments import CorpusMoments
from casemate.runtime.blas_threads import single_blas_thread
from casemate.types import Document, Hit, Retrieval

REPEATS = 3000


def main() -> None:
    """Measures with one thread."""
    with single_blas_thread():
        save("detection", measure())


def measure() -> dict[str, float]:
    """Median microseconds, best of three alternating rounds. 384 and 1,024 dimensions, 1,000 to 1,000,000 documents."""
    rng = np.random.default_rng(SEED)
    us: dict[str, float] = {}
    for dim, sizes in ((384, (1_000, 100_000, 1_000_000)), (1024, (1_000, 100_000))):
        held: dict[int, tuple[CorpusMoments, np.ndarray]] = {}
        for n in sizes:
            E = clustered(n, dim, rng)
            parts = (CorpusMoments.of(E[i : i + 20_000]) for i in range(0, n, 20_000))
            held[n] = sum(parts, CorpusMoments.empty(dim)), E[:1000].copy()
            if n == 100_000:
                us[f"scan_us_dim{dim}_n{n}"] = 1e6 * median_s(lambda q=E[5], E=E: _by_scan(E, q), 200)
        rounds = [{n: _from_moments(*held[n]) for n in sizes} for _ in range(3)]
        us |= {f"moments_us_dim{dim}_n{n}": 1e6 * min(r[n] for r in rounds) for n in sizes}
    us["ratio_scan_to_moments_dim384_n100000"] = us["scan_us_dim384_n100000"] / us["moments_us_dim384_n100000"]
    us["ratio_n1000000_to_n1000_dim384"] = us["moments_us_dim384_n1000000"] / us["moments_us_dim384_n1000"]
    return us


def _from_moments(moments: CorpusMoments, Q: np.ndarray) -> float:
    mirabel = Mirabel(mode="paper")
    hits = tuple(Hit(Document(str(i), "text"), 0.5 - i / 100) for i in range(6))
    queries = iter(np.resize(Q, (REPEATS, Q.shape[1])))
    return median_s(lambda: mirabel.judge(Retrieval(hits, moments.similarity_stats(next(queries)))), REPEATS)


def _by_scan(E: np.ndarray, q: np.ndarray, rho: float = 0.05) -> bool:
    """Algorithm 1 as printed, in numpy: similarities by BLAS, then mean and deviation of all except the largest."""
    S = E @ q  # (n,)
    target = int(S.argmax())
    rest = np.delete(S, target)
    scale = np.sqrt(2 * np.log(len(S)))
    mu_n = rest.mean() + rest.std() * scale
    return bool(S[target] > mu_n - np.log(-np.log(1 - rho)) * rest.std() / scale)


if __name__ == "__main__":
    main()
