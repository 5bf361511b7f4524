"""In-memory nearest-neighbor search by inner product: exact (BLAS) or approximate (HNSW graph, usearch).

Both identify vectors by integer keys in order of insertion. Both return float64 scores of the stored float32 vectors,
so that a similarity is the same number in every index.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from casemate.errors import needs
from casemate.types import Float64, Vector

Keys = npt.NDArray[np.int64]

BLOCK = 65_536  # Rows of one block of the matrix. Memory is allocated by block and touched only where it is used.
OVERSAMPLING = 16
"""Candidates beyond k that are scored again in float64, so that float32 rounding rarely changes the order."""
RESCORE_BLOCK = 4096  # candidates that are scored again at a time
HNSW = "casemate[hnsw]"  # extra that installs usearch: 56 MB, used only for tenants above ``approximate_above``
EXPANSION_SEARCH = 1024
"""Candidate list size of a graph search (ef). It is large because detection needs the true nearest document."""


class ExactSearch:
    """Exact search: all similarities in one BLAS pass over a float32 matrix, n * dim * 4 bytes read per query."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._blocks: list[Vector] = []
        self._keys: Keys = np.empty(0, np.int64)  # (rows,), increasing
        self._alive: npt.NDArray[np.bool_] = np.empty(0, np.bool_)

    def __len__(self) -> int:
        return int(self._alive.sum())

    @property
    def mostly_removed(self) -> bool:
        """Whether most rows belong to removed vectors, so that a rebuild saves memory."""
        return len(self._alive) > BLOCK and len(self) < len(self._alive) / 2

    def add(self, keys: Keys, vectors: Vector) -> None:
        """Appends vectors; rows of earlier vectors do not move."""
        rows = len(self._keys)
        self._keys = np.concatenate([self._keys, keys])
        self._alive = np.concatenate([self._alive, np.ones(len(keys), np.bool_)])
        while len(vectors):
            if rows % BLOCK == 0:
                self._blocks.append(np.empty((BLOCK, self._dim), np.float32))
            start = rows % BLOCK
            part = vectors[: BLOCK - start]
            self._blocks[-1][start : start + len(part)] = part
            rows, vectors = rows + len(part), vectors[len(part) :]

    def remove(self, keys: Keys) -> None:
        """Marks vectors as removed; unknown keys are ignored."""
        self._alive &= ~np.isin(self._keys, keys)

    def search(self, q: Vector, k: int) -> tuple[Keys, Float64]:
        """Keys and scores of the k nearest, by decreasing score, ties by increasing key."""
        rows, wanted = len(self._keys), min(k, len(self))
        s = np.empty(rows, np.float32)
        for i, block in enumerate(self._blocks):
            part = s[i * BLOCK : (i + 1) * BLOCK]
            np.dot(block[: len(part)], q, out=part)
        s[~self._alive] = -np.inf
        found: tuple[Keys, Float64] = (np.empty(0, np.int64), np.empty(0))
        if wanted < 1:
            return found
        worst = float(np.partition(s, rows - wanted)[rows - wanted])
        near = np.flatnonzero(s >= np.float32(worst - rounding_error_bound(q)))  # all possible members of the top k
        for start in range(0, len(near), RESCORE_BLOCK):  # more than one block only with thousands of equal vectors
            some = near[start : start + RESCORE_BLOCK]
            vectors = np.stack([self._blocks[i // BLOCK][i % BLOCK] for i in some])
            more = inner_products(vectors, q)
            found = top_k(np.concatenate([found[0], self._keys[some]]), np.concatenate([found[1], more]), wanted)
        return found


class ApproximateSearch:
    """HNSW graph (Malkov and Yashunin 2016, usearch): recall below 1, cost nearly independent of n.

    Removed vectors stay in the graph as waypoints and are skipped in results. Deleting them would degrade the graph:
    after as many removals as there are vectors, one nearest neighbor in ten is missed.
    """

    def __init__(self, dim: int) -> None:
        with needs(HNSW):
            from usearch.index import Index
        self._dim = dim
        self._gone: set[int] = set()
        self._graph: Any = Index(
            ndim=dim, metric="ip", dtype="f32", connectivity=16, expansion_add=128, expansion_search=EXPANSION_SEARCH
        )

    def __len__(self) -> int:
        return len(self._graph) - len(self._gone)

    @property
    def mostly_removed(self) -> bool:
        """Whether most vectors of the graph are removed, so that a rebuild is worthwhile."""
        return len(self._gone) > len(self._graph) / 2

    def add(self, keys: Keys, vectors: Vector) -> None:
        """Inserts vectors, in one thread: concurrent insertion permanently loses one vector in 300."""
        self._graph.add(keys, vectors, threads=1)

    def remove(self, keys: Keys) -> None:
        """Marks vectors as removed; unknown keys are ignored."""
        if len(keys):
            self._gone.update(keys[self._graph.contains(keys)].tolist())

    def retain(self, keys: Keys) -> None:
        """Marks all other vectors as removed."""
        self._gone = set(np.asarray(self._graph.keys).tolist()) - set(keys.tolist())

    def search(self, q: Vector, k: int) -> tuple[Keys, Float64]:
        """As ``ExactSearch.search``, but a near neighbor may be missed."""
        wanted = min(k, len(self))
        reach = wanted + OVERSAMPLING
        while True:
            found = self._graph.search(q, min(reach, len(self._graph))).keys.astype(np.int64)
            alive = found[[key not in self._gone for key in found.tolist()]]
            if len(alive) >= wanted or len(found) < reach:
                break
            reach *= 2
        vectors = np.asarray(self._graph.get(alive), np.float32).reshape(-1, self._dim)
        return top_k(alive, inner_products(vectors, q), wanted)

    def save(self, path: Path) -> None:
        """Writes the graph to a file, atomically, with mode 0600."""
        temporary = path.with_name(path.name + ".part")
        temporary.touch(0o600)  # before there are vectors in it: they reveal texts
        os.chmod(temporary, 0o600)  # of a killed process, perhaps of an earlier version
        self._graph.save(str(temporary))
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path, dim: int) -> Self:
        """Reads a saved graph."""
        loaded = cls(dim)
        loaded._graph.load(str(path))
        return loaded


def rounding_error_bound(q: Vector) -> float:
    """Upper bound of the error in the difference of two float32 similarities to q, for any order of summation.

    Each similarity is off by at most dim u |q| |x|, with u = 2**-24 and |x| = 1 (Higham 2002, Eq. 3.5), plus slack.
    """
    return 2 * (len(q) + 4) * 2.0**-24 * (1 + float(np.linalg.norm(q)))


def inner_products(vectors: Vector, q: Vector) -> Float64:
    """Inner products (n,) of stored vectors (n, dim) with q, row by row, so that equal vectors get equal scores."""
    s: Float64 = (vectors.astype(np.float64) * q.astype(np.float64)).sum(axis=1)
    return s


def top_k(keys: Keys, s: Float64, k: int) -> tuple[Keys, Float64]:
    """The k largest scores and their keys, by decreasing score, ties by increasing key."""
    order = np.lexsort((keys, -s))[:k]
    return keys[order], s[order]
