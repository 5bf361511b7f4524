"""The learned space of one tenant's collection: topics, and one of two mappings that separate them.

Residual map: z = norm(E + t A(E)), with A(E) = relu(E W1 + b1) W2 + b2 (``apply_map``).
Fine-tuned encoder: z = norm((1 - t) E + t T), with T by the embedder's model plus a LoRA adapter (``blend``).

E are the embedder's vectors and t in [0, 1] is the strength; t = 0 is E itself. Both mappings need numpy only.
``supcon`` and ``lora`` train them, ``registry`` stores them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt

from casemate.errors import CapabilityError, ConfigError
from casemate.maths.clustering import NOISE, Labels, assign_topics
from casemate.protocols import Embedder
from casemate.types import Document, Vector

Mode: TypeAlias = Literal["adapter", "compatible", "gate", "lora", "lora_compatible"]
MODES: tuple[str, ...] = get_args(Mode)
TUNED = ("lora", "lora_compatible")  # modes with a fine-tuned encoder
Keys: TypeAlias = npt.NDArray[np.uint64]
NO_VECTORS: Vector = np.empty((0, 0), np.float32)

Weights: TypeAlias = dict[str, Vector]
"""``W1`` (dim, hidden), ``b1`` (hidden,), ``W2`` (hidden, dim), ``b2`` (dim,), float32."""
WEIGHT_NAMES = ("W1", "b1", "W2", "b2")
MAP_BATCH = 8192

Adapter: TypeAlias = Mapping[str, bytes]  # the files of a peft adapter folder by name: ``ADAPTER_FILES``
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@runtime_checkable
class TunableEmbedder(Embedder, Protocol):
    """An embedder whose model can be fine-tuned."""

    def network(self) -> Any:
        """Returns a copy of the model for training: a ``SentenceTransformer``."""
        ...

    def with_adapter(self, adapter: Adapter) -> Embedder:
        """An embedder with the same model and the adapter; ``DataError``: it is damaged or of another model."""
        ...


def require_tunable(embedder: Embedder) -> TunableEmbedder:
    """The embedder, or one that it wraps (``inner``), that can be fine-tuned; ``CapabilityError``: there is none."""
    found: Embedder | None = embedder
    while found is not None:
        if isinstance(found, TunableEmbedder):
            return found
        found = getattr(found, "inner", None)
    raise CapabilityError(
        f"reindex: modes lora and lora_compatible fine-tune the embedder, and {embedder.fingerprint.split(':')[0]!r} "
        "provides vectors only; set rag.embedder to sentence_transformers with a model folder or name and index "
        "again, or use mode adapter, compatible or gate"
    )


@dataclass(frozen=True, eq=False)
class Reindexing:
    """The learned ranking space and topics of one collection.

    Attributes:
        mode: ``adapter``: the residual map applies to chunks and questions. ``compatible``: to chunks only.
            ``gate``: no map; a chunk whose topic differs from the question's loses ``strength * penalty``.
            ``lora``: the fine-tuned encoder applies to chunks and questions. ``lora_compatible``: to chunks only.
        centroids: Unit mean of each topic in the embedder's space, (C, dim).
        floors: Minimum similarity to the centroid for membership of a topic, (C,).
        keys: ``chunk_key`` of the chunks used for training, sorted, (n,).
        labels: Topics of these chunks, (n,).
        weights: Of the residual map; modes ``adapter`` and ``compatible``.
        adapter: Files of the fine-tuned encoder; modes ``lora`` and ``lora_compatible``.
        tuned: Vectors of the chunks by the fine-tuned encoder, in the order of ``keys``, (n, dim).
        strength: Share t of the map, encoder or penalty that is applied, in [0, 1].
        penalty: Deduction for a chunk of another topic, mode ``gate``.
        accepted: Whether retrieval quality stays within the allowed loss.
        reason: The decision and its reason.
        report: Metrics behind the decision.
        version: Number of the stored version; 0: not stored yet.
        at: Creation time, ISO 8601.
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
    reason: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)
    version: int = 0
    at: str = ""

    def map_chunks(self, E: Vector, T: Vector | None = None) -> Vector:
        """Maps chunk vectors into the learned space, (n, dim).

        Args:
            E: By the embedder, (n, dim).
            T: By the fine-tuned encoder, (n, dim), in the modes with one; see ``tuned_vectors``.
        """
        if self.mode in TUNED:
            assert T is not None
            return blend(E, T, self.strength)
        return apply_map(E, self.weights, self.strength) if self.weights else E

    def map_questions(self, Q: Vector, T: Vector | None = None) -> Vector:
        """Maps question vectors into the learned space, (m, dim); arguments as in ``map_chunks``."""
        if self.mode == "lora":
            return self.map_chunks(Q, T)
        return apply_map(Q, self.weights, self.strength) if self.mode == "adapter" else Q

    def tuned_vectors(self, keys: Keys) -> tuple[Vector, npt.NDArray[np.bool_]]:
        """Returns the stored encoder vectors of chunks, (n, dim), and which chunks have one, (n,)."""
        positions, known = self._positions(keys)
        T = np.zeros((len(keys), self.centroids.shape[1]), np.float32)
        T[known] = self.tuned[positions[known]]
        return T, known

    def before_and_after(self, keys: Keys, E: Vector) -> tuple[Vector, Vector, Labels]:
        """Returns chunk vectors before and after mapping, and topics.

        With a fine-tuned encoder, chunks without a stored encoder vector are left out.
        """
        if self.mode not in TUNED:
            return E, self.map_chunks(E), self.topics(keys, E)
        T, known = self.tuned_vectors(keys)
        return E[known], self.map_chunks(E[known], T[known]), self.topics(keys[known], E[known])

    def topics(self, keys: Keys, E: Vector) -> Labels:
        """Topics of chunks by key and vector, (n,): the learned one, or the nearest centroid's for a new chunk."""
        labels = assign_topics(E, self.centroids, self.floors)
        positions, known = self._positions(keys)
        labels[known] = self.labels[positions[known]]
        return labels

    def learned_topic(self, document: Document) -> int:
        """Returns the learned topic of a chunk; ``NOISE`` for a new one."""
        wanted = np.uint64(chunk_key(document))
        position = int(np.searchsorted(self.keys, wanted))
        found = position < len(self.keys) and self.keys[position] == wanted
        return int(self.labels[position]) if found else NOISE

    def nearest_topics(self, Q: Vector) -> Labels:
        """Returns the nearest topic of each question, (m,), at any distance; ``NOISE`` if there are no topics."""
        return assign_topics(Q, self.centroids, np.full(len(self.centroids), -np.inf, np.float32))

    def scores(self, Q: Vector, Z: Vector, labels: Labels, T: Vector | None = None) -> Vector:
        """Returns the ranking scores of questions and chunks, (m, n).

        Args:
            Q: Question vectors by the embedder, (m, dim).
            Z: Chunk vectors from ``map_chunks``, (n, dim).
            labels: Topics of the chunks, (n,); for ``gate``.
            T: Question vectors by the fine-tuned encoder, (m, dim); for ``lora``.
        """
        S: Vector = self.map_questions(Q, T) @ Z.T
        if self.mode == "gate":
            S = S - np.float32(self.strength * self.penalty) * (labels[None] != self.nearest_topics(Q)[:, None])
        return S

    @property
    def megabytes(self) -> dict[str, float]:
        """Size of the fine-tuned encoder: its adapter on disk, and the chunk vectors in memory."""
        return {"adapter": sum(map(len, self.adapter.values())) / 1e6, "vectors": self.tuned.nbytes / 1e6}

    def _positions(self, keys: Keys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Positions of chunks in ``keys``, (n,), and whether each is there."""
        if not len(self.keys):
            return np.zeros(len(keys), np.int64), np.zeros(len(keys), np.bool_)
        positions = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return positions, self.keys[positions] == keys


def require_mode(mode: str) -> None:
    """Raises ``ConfigError`` if the mode is unknown."""
    if mode not in MODES:
        raise ConfigError(f"reindex: mode is {mode!r}; known: {', '.join(MODES)}")


def chunk_key(document: Document) -> int:
    """Identifies a chunk by title and text, not by its id: equal texts have equal vectors."""
    return int.from_bytes(hashlib.blake2b(document.content.encode(), digest_size=8).digest(), "little")


def unique_keys(keys: Sequence[int], labels: Labels) -> tuple[Keys, Labels]:
    """Returns sorted distinct keys and their topics; of equal texts the first one's topic."""
    found, first = np.unique(np.array(keys, np.uint64), return_index=True)
    return found, labels[first]


def apply_map(E: Vector, weights: Weights, strength: float = 1.0) -> Vector:
    """Applies the residual map A to unit vectors, (n, dim): norm(E + strength A(E)), float32; strength in [0, 1]."""
    Z = np.empty_like(E, np.float32)
    for start in range(0, len(E), MAP_BATCH):
        x = E[start : start + MAP_BATCH]
        hidden = np.maximum(x @ weights["W1"] + weights["b1"], 0)
        z = x + np.float32(strength) * (hidden @ weights["W2"] + weights["b2"])
        Z[start : start + MAP_BATCH] = z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)
    return Z


def blend(E: Vector, T: Vector, strength: float) -> Vector:
    """Interpolates between two encoders' vectors: norm((1 - strength) E + strength T), (n, dim), float32."""
    z = np.float32(1 - strength) * E + np.float32(strength) * T
    found: Vector = (z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)).astype(np.float32)
    return found


def adapter_digest(adapter: Adapter) -> str:
    """SHA-256 over file names and contents, so that a changed file is detected."""
    whole = hashlib.sha256()
    for name in sorted(adapter):
        whole.update(f"{name} {len(adapter[name])}\n".encode() + adapter[name])
    return whole.hexdigest()
