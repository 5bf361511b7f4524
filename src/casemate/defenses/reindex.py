"""Contrastive re-indexing: what was found is ranked in a space where topics lie apart, against extraction.

RAGFort, Section 4.2 (Li et al. 2026, "RAGFort: Dual-Path Defense Against Proprietary Knowledge Base Extraction in
Retrieval-Augmented Generation", AAAI, arXiv 2511.10128): its inter-class path. Whoever carries a collection away asks
on from what he has; if a question about one topic finds nothing of another, he stays within the topic. ``lab.reindex``
learns the topics and the map (how, and how that deviates from the paper: ``topics``, ``supcon``).

Deviation: the paper puts the new vectors into the index in place of the old. Here the index keeps the embedder's,
because other defenses judge similarities in that space, and the best ``candidates`` of it are ranked anew: the order of
the hits is that of the new space, their scores are those of the old.
Deviation: how much of the map is in force is bounded by what it costs: the share of made questions that find the text
they are about may fall by a stated share at most (``lab.reindex``). The paper has no such bound.
Deviation: mode ``gate`` is ours: no map; a chunk of another topic than the question's loses a little.

Who embeds what: the index, and all that judge by it (Mirabel), use the embedder as it is, whatever the mode. In mode
``lora`` ranking uses the fine-tuned encoder too, for chunks and questions (a second pass for each question); in mode
``lora_compatible`` for chunks only, and questions are embedded as ever.
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
from casemate.protocols import Defense, Embedder, Index
from casemate.reindexing.shelf import FIT, Shelf
from casemate.reindexing.space import TUNED, Mode, Reindexing, key, require_mode
from casemate.reindexing.topics import Labels
from casemate.reindexing.tuned import tunable
from casemate.types import Action, Document, Hit, Outcome, Query, Retrieval, Vector, Verdict

NEW = 1000
"""Chunks that were added since the collection was read, from which on it is read again."""
AT_ONCE = 4
"""Such chunks in one question's hits that are embedded; for more, the collection is read again."""
DIGITS = 9
"""Decimals of a score in the new space: texts that are equal tie, and keep their order."""


ROUNDING = 1e-6
"""By how much two ways to compute a similarity may differ."""


@dataclass(eq=False)
class Reindex(Defense):
    """Ranks what was found so that topics lie apart; takes nothing out. Stands behind whatever withholds documents.

    Attributes:
        mode: What ``casemate reindex`` makes: ``adapter`` (chunks and questions are mapped), ``compatible`` (chunks
            only, the paper's text to the letter), ``gate`` (no map; chunks of another topic lose a little), ``lora``
            (the embedder's own model, fine-tuned: chunks and questions), ``lora_compatible`` (chunks only).
        folder: Where ``casemate reindex`` keeps its versions.
        candidates: Hits beyond the context that may come into it.
        exact: Whether to go on until the best of the whole collection are among the hits; more memory and time.
        min_documents: With fewer chunks nothing is ranked anew.
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
            tunable(self.embedder)
        self._shelves: dict[str, Shelf] = {}
        self._spaces: dict[str, _Space] = {}
        self._lock = threading.Lock()

    @property
    def looks(self) -> int:  # type: ignore[override]  # of this one, not of all
        """Hits beyond the context that it ranks."""
        return self.candidates

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Puts the hits into the order of the new space."""
        if not retrieval.hits or retrieval.background.n < self.min_documents:
            return Outcome(retrieval)
        learnt = self.ready(query.tenant)
        if len(retrieval.hits) < query.k + self.candidates and not retrieval.exhausted:
            return Outcome(retrieval, more=True)
        return await asyncio.to_thread(self._ranked, query, retrieval, learnt)

    def ready(self, tenant: str) -> Reindexing:
        """The re-indexing in force for a tenant.

        Raises:
            DataError: If there is none, or it was made in another mode or for another embedder.
            ConfigError: If the defense was built outside a system.
        """
        if self.embedder is None or self.index is None:
            raise ConfigError("reindex ranks with the system's embedder and index, and was given none")
        shelf = self._shelves.setdefault(tenant, Shelf(self.folder, tenant))
        learnt = shelf.current()
        if learnt is None:
            refused = [shelf.read(v).why for v in shelf.versions()[-1:]]
            why = f" (refused: {refused[0]})" if refused else ""
            raise DataError(f"reindex has nothing in force for tenant {tenant!r} in {self.folder}{why}: {FIT}")
        if learnt.mode != self.mode:
            raise DataError(f"the re-indexing of tenant {tenant!r} is in mode {learnt.mode}, not {self.mode}: {FIT}")
        if learnt.fingerprint != self.embedder.fingerprint:
            raise DataError(
                f"the re-indexing of tenant {tenant!r} was made with the embedder {learnt.fingerprint!r}, and this one "
                f"is {self.embedder.fingerprint!r}: its space is another; {FIT}"
            )
        return learnt

    def _ranked(self, query: Query, retrieval: Retrieval, learnt: Reindexing) -> Outcome[Retrieval]:
        assert self.embedder is not None
        asked: Vector = self.embedder.embed([query.text])
        hits = retrieval.hits if self.exact else retrieval.hits[: query.k + self.candidates]
        with self._lock:
            space = self._space(query.tenant, learnt, retrieval.background.n)
            q = _Question(asked, space.encoded([query.text]) if learnt.mode == "lora" else None)
            if self.exact and not retrieval.exhausted and space.missing(q, hits, query.k):
                return Outcome(retrieval, more=True)
            Z, labels = space.places([h.document for h in hits], self.embedder)
        s = learnt.scores(asked.astype(np.float64), Z.astype(np.float64), labels, q.tuned)[0]
        order = np.argsort(-np.round(s, DIGITS), kind="stable")
        ranked = tuple(hits[i] for i in order) + retrieval.hits[len(hits) :]
        verdict = _verdict(learnt, int(learnt.nearest(asked)[0]), labels, order, query.k)
        return Outcome(replace(retrieval, hits=ranked), verdict)

    def _space(self, tenant: str, learnt: Reindexing, count: int) -> _Space:
        """The tenant's chunks as this version sees them; read from the index when first needed, and when outgrown."""
        assert self.index is not None and self.embedder is not None
        held = self._spaces.get(tenant)
        if held is None or held.learnt is not learnt or len(held.new) > NEW or (self.exact and held.count != count):
            encoder = held.encoder if held and held.learnt is learnt else _encoder(learnt, self.embedder)
            held = self._spaces[tenant] = _Space(learnt, self.index, encoder, keep=self.exact)
        return held


class _Question(NamedTuple):
    """A question's vectors, (1, dim), by the embedder and, in mode ``lora``, by the fine-tuned encoder."""

    embedded: Vector
    tuned: Vector | None


def _encoder(learnt: Reindexing, embedder: Embedder) -> Embedder | None:
    """The fine-tuned encoder, in the modes that have one."""
    return tunable(embedder).tuned(learnt.adapter) if learnt.mode in TUNED else None


class _Space:
    """A tenant's chunks as one re-indexing sees them.

    Attributes:
        learnt: The re-indexing.
        encoder: Its fine-tuned encoder, if it has one.
        count: Chunks that were read.
        new: Chunks that came later, by key: vector in the new space, and topic.
    """

    def __init__(self, learnt: Reindexing, index: Index, encoder: Embedder | None, keep: bool) -> None:
        self.learnt, self.encoder, self._index, self._keep = learnt, encoder, index, keep
        self._read()

    def _read(self) -> None:
        """Takes the whole collection in."""
        learnt, keys = self.learnt, list[int]()
        Z, labels, E = list[Vector](), list[Labels](), list[Vector]()
        for documents, vectors in self._index.scan(learnt.tenant):
            some = [key(d) for d in documents]
            keys += some
            Z.append(np.array(learnt.chunks(vectors, self._tuned(documents))))
            labels.append(learnt.topics(np.array(some, np.uint64), vectors))
            if self._keep:
                E.append(np.array(vectors))
        empty = np.empty((0, learnt.centroids.shape[1]), np.float32)
        self._keys, self.count = np.array(keys, np.uint64), len(keys)
        self._rows = {k: row for row, k in enumerate(keys)}
        self._Z, self._labels = np.concatenate([empty, *Z]), np.concatenate([np.empty(0, np.int64), *labels])
        self._E = np.concatenate([empty, *E])
        self.new: dict[int, tuple[Vector, int]] = {}

    def encoded(self, texts: Sequence[str]) -> Vector | None:
        """What the fine-tuned encoder makes of texts, (n, dim)."""
        return None if self.encoder is None else self.encoder.embed(texts)

    def _tuned(self, documents: Sequence[Document]) -> Vector | None:
        """What it makes of chunks: as was kept, and anew for those that came later."""
        if self.encoder is None:
            return None
        T, known = self.learnt.kept(np.array([key(d) for d in documents], np.uint64))
        if not known.all():
            T[~known] = self.encoder.embed([documents[i].content for i in np.flatnonzero(~known).tolist()])
        return T

    def places(self, documents: Sequence[Document], embedder: Embedder) -> tuple[Vector, Labels]:
        """Vectors in the new space, (m, dim), and topics, (m,), of some chunks, also of those that have just come."""
        keys = [key(d) for d in documents]
        unknown = {k: d for k, d in zip(keys, documents, strict=True) if k not in self._rows and k not in self.new}
        if len(unknown) > AT_ONCE:
            self._read()
            unknown = {k: d for k, d in unknown.items() if k not in self._rows}
        if unknown:
            self._take(unknown, embedder)
        known = [self._rows.get(k, -1) for k in keys]
        places = [
            (self._Z[r], int(self._labels[r])) if r >= 0 else self.new[k] for k, r in zip(keys, known, strict=True)
        ]
        return np.stack([z for z, _ in places]), np.array([label for _, label in places], np.int64)

    def _take(self, documents: dict[int, Document], embedder: Embedder) -> None:
        E = embedder.embed([d.content for d in documents.values()])
        labels = self.learnt.topics(np.array(list(documents), np.uint64), E)
        Z = self.learnt.chunks(E, self.encoded([d.content for d in documents.values()]))
        self.new |= {k: (z, int(c)) for k, z, c in zip(documents, Z, labels, strict=True)}

    def missing(self, q: _Question, hits: Sequence[Hit], k: int) -> bool:
        """Whether one of the k best of the whole collection is neither among the hits nor withheld.

        What is more similar to the question than the last hit, by the embedder, and not among the hits, was withheld.
        """
        s = self.learnt.scores(q.embedded, self._Z, self._labels, q.tuned)[0]
        wanted = min(k + len(hits), len(s))
        given, last, left = {key(h.document) for h in hits}, hits[-1].score, k
        best = np.argpartition(-s, wanted - 1)[:wanted] if wanted else np.empty(0, np.int64)
        for row in best[np.argsort(-s[best], kind="stable")]:
            if int(self._keys[row]) in given:
                left -= 1
            elif float(self._E[row] @ q.embedded[0]) < last + ROUNDING:
                return True
            if not left:
                return False
        return wanted < len(s)


def _verdict(learnt: Reindexing, topic: int, labels: Labels, order: npt.NDArray[np.int64], k: int) -> Verdict:
    """What was done, in numbers. The score is the share of the old context that is not of the question's topic."""
    first = order[:k]
    evidence = {
        "version": learnt.version,
        "mode": learnt.mode,
        "topic": topic,
        "topics": len(np.unique(labels[first])),
        "came_in": int((first >= k).sum()),
    }
    drift = float((labels[:k] != topic).mean())
    return Verdict("reindex", False, Action.NONE, drift, None, evidence=evidence)
