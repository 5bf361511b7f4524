"""Vectors of an embedder, cached in memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from casemate.protocols import Embedder, EmbedderProxy, Progress
from casemate.runtime.bounded_dict import BoundedDict
from casemate.types import Vector


class CachedEmbedder(EmbedderProxy):
    """Caches the most recently used vectors. Keys are digests, so no text is kept.

    The capacity is a size in megabytes, or a number of vectors. ``calls`` counts texts embedded, ``hits`` texts from
    the cache.
    """

    def __init__(self, inner: Embedder, megabytes: float = 100, most: int | None = None) -> None:
        super().__init__(inner)
        self.calls = self.hits = 0
        self._vectors: BoundedDict[bytes, Vector] = BoundedDict(most or max(1, int(megabytes * 1e6 / (4 * inner.dim))))
        self._lock = threading.Lock()

    def keep(self, texts: Sequence[str], vectors: Vector) -> None:
        """Adds vectors, (n, dim), that this embedder made before."""
        self._store(dict(zip(map(_key, texts), vectors, strict=True)))

    def _store(self, vectors: Mapping[bytes, Vector]) -> None:
        with self._lock:
            self._vectors.update(vectors)

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        keys = list(map(_key, texts))
        with self._lock:
            found = {key: self._vectors[key] for key in keys if key in self._vectors}
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in found}
        if new:
            found |= zip(new, self.inner.embed(list(new.values()), progress), strict=True)
        with self._lock:
            self.calls += len(new)
            self.hits += len(texts) - len(new)
        self._store({key: found[key] for key in keys})
        if progress is not None and (cached := len(texts) - len(new)) >= bool(new):
            progress(cached)
        return np.stack([found[key] for key in keys]) if keys else np.empty((0, self.dim), np.float32)


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
