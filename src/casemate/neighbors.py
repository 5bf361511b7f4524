"""Nearest neighbours by inner product, in memory: exact by BLAS, or approximate by an HNSW graph (usearch).

Both keep vectors under integer keys that grow with age, and give back float64 scores of the stored float32 vectors,
so that a similarity is the same number wherever it is computed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from casemate.types import Float64, Vector

Keys = npt.NDArray[np.int64]

BLOCK = 65_536
"""Rows of one piece of the matrix. Memory is taken piece by piece and touched only where it is used."""
SPARE = 16
"""Candidates beyond k that are scored again in float64, so that float32 rounding cannot change the order."""
EFFORT = 256
"""Candidates that a search in the graph keeps open (ef): the detection needs the true nearest document."""


class Exact:
    """All similarities in one pass of BLAS over a float32 matrix: n * dim * 4 bytes read per query."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._blocks: list[Vector] = []
        self._keys: Keys = np.empty(0, np.int64)  # (rows,), increasing
        self._alive: npt.NDArray[np.bool_] = np.empty(0, np.bool_)

    def __len__(self) -> int:
        return int(self._alive.sum())

    @property
    def sparse(self) -> bool:
        """Whether most rows belong to vectors that were removed, so that loading anew saves memory."""
        return len(self._alive) > BLOCK and len(self) < len(self._alive) / 2

    def add(self, keys: Keys, vectors: Vector) -> None:
        """Appends; rows of earlier vectors do not move."""
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
        """Marks rows as gone; unknown keys are ignored."""
        self._alive &= ~np.isin(self._keys, keys)

    def search(self, q: Vector, k: int) -> tuple[Keys, Float64]:
        """Keys and scores of the k nearest, by decreasing score, ties by increasing key."""
        rows, wanted = len(self._keys), min(k, len(self))
        s = np.empty(rows, np.float32)
        for i, block in enumerate(self._blocks):
            part = s[i * BLOCK : (i + 1) * BLOCK]
            np.dot(block[: len(part)], q, out=part)
        s[~self._alive] = -np.inf
        near = min(wanted + SPARE, len(self))
        top = np.argpartition(s, rows - near)[rows - near :] if near < rows else np.arange(rows)
        vectors = np.array([self._blocks[i // BLOCK][i % BLOCK] for i in top], np.float32).reshape(-1, self._dim)
        return _best(self._keys[top], vectors, q, wanted)


class Approximate:
    """An HNSW graph (Malkov and Yashunin 2016, by usearch): recall below 1, cost nearly independent of n."""

    def __init__(self, dim: int) -> None:
        from usearch.index import Index

        self._dim = dim
        self._graph: Any = Index(
            ndim=dim, metric="ip", dtype="f32", connectivity=16, expansion_add=128, expansion_search=EFFORT
        )

    def __len__(self) -> int:
        return len(self._graph)

    def add(self, keys: Keys, vectors: Vector) -> None:
        """Links the vectors into the graph, on all cores."""
        self._graph.add(keys, vectors)

    def remove(self, keys: Keys) -> None:
        """Takes vectors out of the graph; unknown keys are ignored."""
        present = keys[self._graph.contains(keys)] if len(keys) else keys
        if len(present):
            self._graph.remove(present)

    def search(self, q: Vector, k: int) -> tuple[Keys, Float64]:
        """As ``Exact.search``, but a near neighbour may be missed."""
        wanted = min(k, len(self))
        found = self._graph.search(q, min(wanted + SPARE, len(self))).keys.astype(np.int64)
        vectors = np.asarray(self._graph.get(found), np.float32).reshape(-1, self._dim)
        return _best(found, vectors, q, wanted)

    def save(self, path: Path) -> None:
        """Writes the graph, whole or not at all."""
        temporary = path.with_name(path.name + ".part")
        self._graph.save(str(temporary))
        os.chmod(temporary, 0o600)  # vectors tell about texts
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path, dim: int) -> Self:
        """A graph that was saved."""
        loaded = cls(dim)
        loaded._graph.load(str(path))
        return loaded


def _best(keys: Keys, vectors: Vector, q: Vector, k: int) -> tuple[Keys, Float64]:
    """The k best of the candidates by float64 score. Row by row, so that equal vectors get equal scores."""
    s = (vectors.astype(np.float64) * q.astype(np.float64)).sum(axis=1)  # (candidates,)
    order = np.lexsort((keys, -s))[:k]
    return keys[order], s[order]
