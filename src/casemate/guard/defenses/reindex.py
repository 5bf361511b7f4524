"""Contrastive re-indexing against extraction: ranks hits in a space in which topics are separated.

RAGFort, Section 4.2 (Li et al. 2026, "RAGFort: Dual-Path Defense Against Proprietary Knowledge Base Extraction in
Retrieval-Augmented Generation", AAAI, arXiv 2511.10128): its inter-class path. An extraction attack derives its next
question from what it has extracted. If a question about one topic retrieves nothing of another, the attack stays within
the topic. ``casemate reindex`` learns topics and mapping (``casemate.reindexing``, with the deviations of each part).

Deviation: the paper replaces the vectors in the index. Here the index keeps the embedder's vectors, because other
defenses rely on these similarities. The best ``candidates`` are re-ranked: the order of the hits is that of the new
space, their scores are those of the embedder.

Deviation: the strength of the mapping is bounded by its cost. The share of synthetic questions that find their source
may fall by a stated amount at most (``reindexing.fitting``). The paper has no such bound.

Deviation: mode ``gate`` is our own: no mapping; a chunk of another topic than the question's loses a little.

The index, and all defenses that rely on it (Mirabel), use the plain embedder in every mode. Mode ``lora`` ranks with
the fine-tuned encoder for chunks and questions (a second pass per question), mode ``lora_compatible`` for chunks only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from casemate.errors import ConfigError, DataError
from casemate.maths.clustering import Labels
from casemate.protocols import Defense, Embedder, Index
from casemate.reindexing.registry import RUN_REINDEX, ReindexRegistry
from casemate.reindexing.space import TUNED, Mode, Reindexing, chunk_key, require_mode, require_tunable
from casemate.types import Action, Document, Hit, Outcome, Query, Retrieval, Vector, Verdict

MAX_NEW = 1000
"""Chunks added since the last scan of the collection that cause the next scan."""
MAX_EMBEDDED = 4
"""New chunks among one question's hits that are embedded on the spot; more cause a scan."""
DIGITS = 9
"""Decimals of a score in the new space, so that equal texts tie and keep their order."""
ROUNDING = 1e-6
"""Tolerance between two ways to compute a similarity."""


@dataclass(eq=False)
class Reindex(Defense):
    """Re-ranks hits to separate topics; removes nothing. Place it after every defense that withholds documents.

    Attributes:
        mode: The kind of mapping, as in ``casemate reindex``. ``adapter``: chunks and questions are mapped.
            ``compatible``: chunks only, the literal reading of the paper. ``gate``: no mapping; chunks of another
            topic lose a little. ``lora``: the embedder's own model, fine-tuned, for chunks and questions.
            ``lora_compatible``: the same for chunks only.
        folder: Folder of the versions written by ``casemate reindex``.
        candidates: Hits beyond the context that are re-ranked too.
        exact: Whether to fetch hits until the best of the whole collection are among them; needs more memory and time.
        min_documents: Number of chunks below which nothing is re-ranked.
        embedder: The system's.
        index: The system's.
    """

    mode: Mode = "adapter"
    folder: Path = Path(".casemate/reindex")
    candidates: int = 64
    exact: bool = False
    min_documents: int = 100
    embedder: Embedder | None = field(default=None, repr=False)
    index: Index | None = field(default=None, repr=False)

    paper: ClassVar[str] = "Li et al. 2026 (RAGFort), Section 4.2, arXiv 2511.10128"
    reorders: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_mode(self.mode)
        if self.candidates < 1 or self.min_documents < 1:
            what = f"candidates={self.candidates}, min_documents={self.min_documents}"
            raise ConfigError(f"reindex needs candidates and min_documents of at least 1, got {what}")
        if self.mode in TUNED and self.embedder is not None:
            require_tunable(self.embedder)
        self._registries: dict[str, ReindexRegistry] = {}
        self._spaces: dict[str, _Space] = {}
        self._lock = threading.Lock()

    @property
    def lookahead(self) -> int:  # type: ignore[override]  # an option here, a class attribute elsewhere
        """Hits beyond the context that are re-ranked."""
        return self.candidates

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Re-ranks the hits."""
        if not retrieval.hits or retrieval.documents < self.min_documents:
            return Outcome(retrieval)
        reindexing = self.ready(query.tenant)
        if len(retrieval.hits) < query.k + self.candidates and not retrieval.exhausted:
            return Outcome(retrieval, more=True)
        return await asyncio.to_thread(self._rerank, query, retrieval, reindexing)

    def ready(self, tenant: str) -> Reindexing:
        """Returns the active re-indexing of a tenant.

        Raises:
            DataError: If there is none, or it was made in another mode or for another embedder.
            ConfigError: If the defense has no embedder and index.
        """
        if self.embedder is None or self.index is None:
            raise ConfigError("reindex needs the system's embedder and index; configure it under guard.defenses")
        registry = self._registries.setdefault(tenant, ReindexRegistry(self.folder, tenant))
        reindexing = registry.current()
        if reindexing is None:
            refused = [registry.read(v).reason for v in registry.versions()[-1:]]
            why = f" (refused: {refused[0]})" if refused else ""
            raise DataError(f"reindex has no active version for tenant {tenant!r} in {self.folder}{why}; {RUN_REINDEX}")
        if reindexing.mode != self.mode:
            raise DataError(
                f"the re-indexing of tenant {tenant!r} is in mode {reindexing.mode}, not {self.mode}; {RUN_REINDEX}"
            )
        if reindexing.fingerprint != self.embedder.fingerprint:
            raise DataError(
                f"the re-indexing of tenant {tenant!r} was made with the embedder {reindexing.fingerprint!r}, and the "
                f"configured one is {self.embedder.fingerprint!r}; {RUN_REINDEX}"
            )
        return reindexing

    def _rerank(self, query: Query, retrieval: Retrieval, reindexing: Reindexing) -> Outcome[Retrieval]:
        assert self.embedder is not None
        embedded: Vector = self.embedder.embed([query.text])
        hits = retrieval.hits if self.exact else retrieval.hits[: query.k + self.candidates]
        with self._lock:
            space = self._space(query.tenant, reindexing, retrieval.documents)
            q = _QuestionVectors(embedded, space.encode([query.text]) if reindexing.mode == "lora" else None)
            if self.exact and not retrieval.exhausted and space.is_incomplete(q, hits, query.k):
                return Outcome(retrieval, more=True)
            Z, labels = space.lookup([h.document for h in hits], self.embedder)
        s = reindexing.scores(embedded.astype(np.float64), Z.astype(np.float64), labels, q.tuned)[0]
        order = np.argsort(-np.round(s, DIGITS), kind="stable")
        ranked = tuple(hits[i] for i in order) + retrieval.hits[len(hits) :]
        verdict = _verdict(reindexing, int(reindexing.nearest_topics(embedded)[0]), labels, order, query.k)
        return Outcome(replace(retrieval, hits=ranked), verdict)

    def _space(self, tenant: str, reindexing: Reindexing, count: int) -> _Space:
        """Returns the tenant's mapped collection; scanned on first use and when it is out of date."""
        assert self.index is not None and self.embedder is not None
        space = self._spaces.get(tenant)
        same = space is not None and space.reindexing is reindexing
        if space is None or not same or len(space.new) > MAX_NEW or (self.exact and space.count != count):
            encoder = space.encoder if space and same else _encoder(reindexing, self.embedder)
            space = self._spaces[tenant] = _Space(reindexing, self.index, encoder, keep_vectors=self.exact)
        return space


class _QuestionVectors(NamedTuple):
    """A question's vectors, (1, dim), by the embedder and, in mode ``lora``, by the fine-tuned encoder."""

    embedded: Vector
    tuned: Vector | None


def _encoder(reindexing: Reindexing, embedder: Embedder) -> Embedder | None:
    """The fine-tuned encoder, in the modes with one."""
    if reindexing.mode not in TUNED:
        return None
    return require_tunable(embedder).with_adapter(reindexing.adapter)


class _Space:
    """A tenant's collection, mapped by one re-indexing.

    Attributes:
        reindexing: The re-indexing.
        encoder: Its fine-tuned encoder, if there is one.
        count: Number of scanned chunks.
        new: Vector in the new space and topic of chunks added since the scan, by key.
    """

    def __init__(self, reindexing: Reindexing, index: Index, encoder: Embedder | None, keep_vectors: bool) -> None:
        self.reindexing, self.encoder, self._index, self._keep_vectors = reindexing, encoder, index, keep_vectors
        self._scan()

    def _scan(self) -> None:
        """Reads the whole collection."""
        reindexing, keys = self.reindexing, list[int]()
        Z, labels, E = list[Vector](), list[Labels](), list[Vector]()
        for documents, vectors in self._index.scan(reindexing.tenant):
            batch = [chunk_key(d) for d in documents]
            keys += batch
            Z.append(np.array(reindexing.map_chunks(vectors, self._encode_chunks(documents))))
            labels.append(reindexing.topics(np.array(batch, np.uint64), vectors))
            if self._keep_vectors:
                E.append(np.array(vectors))
        empty = np.empty((0, reindexing.centroids.shape[1]), np.float32)
        self._keys, self.count = np.array(keys, np.uint64), len(keys)
        self._rows = {k: row for row, k in enumerate(keys)}
        self._Z, self._labels = np.concatenate([empty, *Z]), np.concatenate([np.empty(0, np.int64), *labels])
        self._E = np.concatenate([empty, *E])
        self.new: dict[int, tuple[Vector, int]] = {}

    def encode(self, texts: Sequence[str]) -> Vector | None:
        """Embeds texts with the fine-tuned encoder, (n, dim); None without one."""
        return None if self.encoder is None else self.encoder.embed(texts)

    def _encode_chunks(self, documents: Sequence[Document]) -> Vector | None:
        """The encoder's vectors of chunks: stored ones, or computed for new chunks."""
        if self.encoder is None:
            return None
        T, known = self.reindexing.tuned_vectors(np.array([chunk_key(d) for d in documents], np.uint64))
        if not known.all():
            T[~known] = self.encoder.embed([documents[i].content for i in np.flatnonzero(~known).tolist()])
        return T

    def lookup(self, documents: Sequence[Document], embedder: Embedder) -> tuple[Vector, Labels]:
        """Returns vectors in the new space, (m, dim), and topics, (m,), of chunks, including new ones."""
        keys = [chunk_key(d) for d in documents]
        unknown = {k: d for k, d in zip(keys, documents, strict=True) if k not in self._rows and k not in self.new}
        if len(unknown) > MAX_EMBEDDED:
            self._scan()
            unknown = {k: d for k, d in unknown.items() if k not in self._rows}
        if unknown:
            self._embed_new(unknown, embedder)
        found = [
            (self._Z[row], int(self._labels[row])) if (row := self._rows.get(k, -1)) >= 0 else self.new[k] for k in keys
        ]
        return np.stack([z for z, _ in found]), np.array([label for _, label in found], np.int64)

    def _embed_new(self, documents: dict[int, Document], embedder: Embedder) -> None:
        texts = [d.content for d in documents.values()]
        E = embedder.embed(texts)
        labels = self.reindexing.topics(np.array(list(documents), np.uint64), E)
        Z = self.reindexing.map_chunks(E, self.encode(texts))
        self.new |= {k: (z, int(c)) for k, z, c in zip(documents, Z, labels, strict=True)}

    def is_incomplete(self, q: _QuestionVectors, hits: Sequence[Hit], k: int) -> bool:
        """Whether one of the k best chunks of the collection is neither among the hits nor withheld.

        A chunk that is more similar to the question than the last hit, but not among the hits, was withheld.
        """
        s = self.reindexing.scores(q.embedded, self._Z, self._labels, q.tuned)[0]
        count = min(k + len(hits), len(s))
        given, last, left = {chunk_key(h.document) for h in hits}, hits[-1].score, k
        best = np.argpartition(-s, count - 1)[:count] if count else np.empty(0, np.int64)
        for row in best[np.argsort(-s[best], kind="stable")]:
            if int(self._keys[row]) in given:
                left -= 1
            elif float(self._E[row] @ q.embedded[0]) < last + ROUNDING:
                return True
            if not left:
                return False
        return count < len(s)


def _verdict(reindexing: Reindexing, topic: int, labels: Labels, order: npt.NDArray[np.int64], k: int) -> Verdict:
    """Describes the new order. The score is the share of the old context outside the question's topic."""
    first = order[:k]
    evidence = {
        "version": reindexing.version,
        "mode": reindexing.mode,
        "topic": topic,
        "topics": len(np.unique(labels[first])),
        "came_in": int((first >= k).sum()),
    }
    off_topic = float((labels[:k] != topic).mean())
    return Verdict("reindex", False, Action.NONE, off_topic, None, evidence=evidence)
