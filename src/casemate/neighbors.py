"""Nearest neighbours by inner product, in memory: exact by BLAS, or approximate by an HNSW graph (usearch).

Both keep vectors under integer keys that grow with age, and give back float64 scores of the stored float32 vectors,
so that a similarity is the same number wherever it is computed.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import threading
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from casemate.types import Float64, Vector

Keys = npt.NDArray[np.int64]

BLOCK = 65_536
"""Rows of one piece of the matrix. Memory is taken piece by piece and touched only where it is used."""
SPARE = 16
"""Candidates beyond k that are scored again in float64, so that float32 rounding hardly changes the order."""
PIECE = 4096
"""Candidates that are scored again at a time."""
EFFORT = 1024
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
        found: tuple[Keys, Float64] = (np.empty(0, np.int64), np.empty(0))
        if wanted < 1:
            return found
        worst = float(np.partition(s, rows - wanted)[rows - wanted])
        near = np.flatnonzero(s >= np.float32(worst - rounding(q)))  # all that may be among the k nearest
        for start in range(0, len(near), PIECE):  # more than one only if thousands are alike
            some = near[start : start + PIECE]
            vectors = np.stack([self._blocks[i // BLOCK][i % BLOCK] for i in some])
            more = scores(vectors, q)
            found = best(np.concatenate([found[0], self._keys[some]]), np.concatenate([found[1], more]), wanted)
        return found


class Approximate:
    """An HNSW graph (Malkov and Yashunin 2016, by usearch): recall below 1, cost nearly independent of n.

    What is removed stays in the graph as a way to its neighbours and is passed over in what is found: taken out, it
    would leave a graph in which, after as many removals as there are vectors, one nearest in ten is missed.
    """

    def __init__(self, dim: int) -> None:
        from usearch.index import Index

        self._dim = dim
        self._gone: set[int] = set()
        self._graph: Any = Index(
            ndim=dim, metric="ip", dtype="f32", connectivity=16, expansion_add=128, expansion_search=EFFORT
        )

    def __len__(self) -> int:
        return len(self._graph) - len(self._gone)

    @property
    def sparse(self) -> bool:
        """Whether most of the graph is gone, so that building it anew is worth while."""
        return len(self._gone) > len(self._graph) / 2

    def add(self, keys: Keys, vectors: Vector) -> None:
        """Links the vectors into the graph. By one thread: two race, and lose one in 300 for good."""
        self._graph.add(keys, vectors, threads=1)

    def remove(self, keys: Keys) -> None:
        """Marks vectors as gone; unknown keys are ignored."""
        if len(keys):
            self._gone.update(keys[self._graph.contains(keys)].tolist())

    def keep(self, keys: Keys) -> None:
        """Marks all but these as gone."""
        self._gone = set(self._graph.keys) - set(keys.tolist())

    def search(self, q: Vector, k: int) -> tuple[Keys, Float64]:
        """As ``Exact.search``, but a near neighbour may be missed."""
        wanted = min(k, len(self))
        reach = wanted + SPARE
        while True:
            found = self._graph.search(q, min(reach, len(self._graph))).keys.astype(np.int64)
            alive = found[[key not in self._gone for key in found.tolist()]]
            if len(alive) >= wanted or len(found) < reach:
                break
            reach *= 2
        vectors = np.asarray(self._graph.get(alive), np.float32).reshape(-1, self._dim)
        return best(alive, scores(vectors, q), wanted)

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


class _Blas:
    """The BLAS libraries of the process: one thread while anybody wants it, as before when the last is done."""

    def __init__(self) -> None:
        importlib.import_module("scipy.linalg.blas")  # brings a library of its own, which ``stats`` uses
        self._controller = ThreadpoolController().select(user_api="blas")
        self._lock = threading.Lock()
        self._users = 0
        self._limit: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._limit = self._controller.limit(limits=1)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._limit.restore_original_limits()


@cache
def one_thread() -> _Blas:
    """For as long as questions are answered: BLAS uses one thread, in the whole process.

    Questions come side by side, and BLAS's threads spin for milliseconds after each product, on the cores that the
    embedder needs: a question took four times as long. To change the number for each search is as bad.
    """
    return _Blas()


def checksum(path: Path) -> str:
    """SHA-256 of a saved graph: a damaged one could bring the process down."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rounding(q: Vector) -> float:
    """By how much two float32 similarities to q, in whatever order of summation, can mislead about which is larger.

    Each is off by at most dim u |q| |x|, with u = 2**-24 and |x| = 1 (Higham 2002, Eq. 3.5); the rest is slack.
    """
    return 2 * (len(q) + 4) * 2.0**-24 * (1 + float(np.linalg.norm(q)))


def scores(vectors: Vector, q: Vector) -> Float64:
    """Similarities (n,) of stored vectors (n, dim), row by row, so that equal vectors get equal scores."""
    s: Float64 = (vectors.astype(np.float64) * q.astype(np.float64)).sum(axis=1)
    return s


def best(keys: Keys, s: Float64, k: int) -> tuple[Keys, Float64]:
    """The k best keys and their scores, by decreasing score, ties by increasing key."""
    order = np.lexsort((keys, -s))[:k]
    return keys[order], s[order]
