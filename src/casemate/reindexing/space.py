"""What re-indexing has learnt of one tenant's collection: a space to rank in, and topics. ``shelf`` keeps it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from casemate.errors import ConfigError
from casemate.reindexing.residual import Weights, mapped
from casemate.reindexing.topics import NOISE, Labels, nearest
from casemate.reindexing.tuned import Adapter, blended
from casemate.types import Document, Vector

Mode: TypeAlias = Literal["adapter", "compatible", "gate", "lora", "lora_compatible"]
MODES: tuple[str, ...] = get_args(Mode)
TUNED = ("lora", "lora_compatible")
"""Modes with a fine-tuned encoder."""
NO_VECTORS: Vector = np.empty((0, 0), np.float32)
Keys: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Reindexing:
    """A space to rank in, and the topics of a collection.

    Attributes:
        mode: ``adapter``: chunks and questions go through the map. ``compatible``: chunks only. ``gate``: neither; a
            chunk of another topic than the question's loses ``strength * penalty``. ``lora``: chunks and questions go
            through a fine-tuned encoder. ``lora_compatible``: chunks only.
        tenant: Whose collection.
        fingerprint: Of the embedder.
        centroids: Unit mean of each topic in the embedder's space, (C, dim).
        floors: How near a centroid a chunk must be to be of that topic, (C,).
        keys: Of the chunks that were learnt from, sorted, (n,), see ``key``.
        labels: Their topics, (n,).
        weights: The map's, modes ``adapter`` and ``compatible``.
        adapter: The fine-tuned encoder's files, modes ``lora`` and ``lora_compatible``.
        tuned: The vectors that it gives the chunks, in the order of ``keys``, (n, dim).
        strength: Share of the map, the encoder or the penalty that is in force, in [0, 1].
        penalty: What a chunk of another topic loses, mode ``gate``.
        accepted: Whether what is found stays found.
        why: What was decided, and why.
        report: The figures behind it.
        version: Number of the file; 0: not written yet.
        at: When, ISO 8601.
    """

    mode: Mode
    tenant: str
    fingerprint: str
    centroids: Vector
    floors: Vector
    keys: Keys
    labels: Labels
    weights: Weights = field(default_factory=dict)
    adapter: Adapter = field(default_factory=dict)
    tuned: Vector = field(default_factory=lambda: NO_VECTORS)
    strength: float = 1.0
    penalty: float = 0.0
    accepted: bool = True
    why: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)
    version: int = 0
    at: str = ""

    def chunks(self, E: Vector, T: Vector | None = None) -> Vector:
        """Chunks' vectors in the new space, (n, dim).

        Args:
            E: By the embedder, (n, dim).
            T: By the fine-tuned encoder, if there is one, (n, dim): see ``kept`` for those that it was made from.
        """
        if self.mode in TUNED:
            assert T is not None
            return blended(E, T, self.strength)
        return mapped(E, self.weights, self.strength) if self.weights else E

    def questions(self, Q: Vector, T: Vector | None = None) -> Vector:
        """Questions' vectors as they are compared with ``chunks``, (m, dim); T is for mode ``lora``."""
        if self.mode == "lora":
            return self.chunks(Q, T)
        return mapped(Q, self.weights, self.strength) if self.mode == "adapter" else Q

    def kept(self, keys: Keys) -> tuple[Vector, npt.NDArray[np.bool_]]:
        """What the fine-tuned encoder made of chunks when this was learnt, (n, dim), and whether it saw each, (n,)."""
        places, known = self._places(keys)
        T = np.zeros((len(keys), self.centroids.shape[1]), np.float32)
        T[known] = self.tuned[places[known]]
        return T, known

    def seen(self, keys: Keys, E: Vector) -> tuple[Vector, Vector, Labels]:
        """Vectors before and after, and topics, of chunks; of those only that need no encoder, where there is one."""
        if self.mode not in TUNED:
            return E, self.chunks(E), self.topics(keys, E)
        T, known = self.kept(keys)
        return E[known], self.chunks(E[known], T[known]), self.topics(keys[known], E[known])

    def topics(self, keys: Keys, E: Vector) -> Labels:
        """The topics of chunks, (n,): as learnt, or of the nearest centroid for what is new; nothing is trained.

        Args:
            keys: Of the chunks, (n,).
            E: Their vectors by the embedder, (n, dim).
        """
        labels = nearest(E, self.centroids, self.floors)
        places, known = self._places(keys)
        labels[known] = self.labels[places[known]]
        return labels

    def _places(self, keys: Keys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Where chunks are among ``keys``, (n,), and whether they are there."""
        if not len(self.keys):
            return np.zeros(len(keys), np.int64), np.zeros(len(keys), np.bool_)
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return places, self.keys[places] == keys

    def learnt(self, document: Document) -> int:
        """The topic of a chunk, as learnt; ``NOISE`` for one that is new."""
        wanted = np.uint64(key(document))
        place = int(np.searchsorted(self.keys, wanted))
        return int(self.labels[place]) if place < len(self.keys) and self.keys[place] == wanted else NOISE

    def nearest(self, Q: Vector) -> Labels:
        """The topic nearest to each question, (m,), however far it is; ``NOISE`` if there are none."""
        return nearest(Q, self.centroids, np.full(len(self.centroids), -np.inf, np.float32))

    def scores(self, Q: Vector, Z: Vector, labels: Labels, T: Vector | None = None) -> Vector:
        """What is ranked by: similarity of each question to each chunk in the new space, (m, n).

        Args:
            Q: Questions' vectors by the embedder, (m, dim).
            Z: The chunks', as ``chunks`` gives them, (n, dim).
            labels: Their topics, (n,); for ``gate``.
            T: The questions' vectors by the fine-tuned encoder, (m, dim); for ``lora``.
        """
        S: Vector = self.questions(Q, T) @ Z.T
        if self.mode == "gate":
            S = S - np.float32(self.strength * self.penalty) * (labels[None] != self.nearest(Q)[:, None])
        return S

    @property
    def megabytes(self) -> dict[str, float]:
        """What the fine-tuned encoder takes: on disk, and its chunks' vectors in memory."""
        return {"adapter": sum(map(len, self.adapter.values())) / 1e6, "vectors": self.tuned.nbytes / 1e6}

    @property
    def digest(self) -> str:
        """Of the collection that was learnt from."""
        return hashlib.blake2b(self.keys.tobytes(), digest_size=16).hexdigest()


def require_mode(mode: str) -> None:
    """Refuses what is no mode.

    Raises:
        ConfigError: If it is not known.
    """
    if mode not in MODES:
        raise ConfigError(f"reindex: mode is {mode!r}; known: {', '.join(MODES)}")


def key(document: Document) -> int:
    """Tells a chunk by its title and text, whatever its id: equal texts have equal vectors."""
    return int.from_bytes(hashlib.blake2b(document.content.encode(), digest_size=8).digest(), "little")


def distinct(keys: Sequence[int], labels: Labels) -> tuple[Keys, Labels]:
    """Keys, each once and sorted, and their topics; of equal texts the first counts."""
    found, first = np.unique(np.array(keys, np.uint64), return_index=True)
    return found, labels[first]
