"""The index beside a framework's store: ``backends.attached``, for changes that the framework itself carries out."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from casemate.attaching.change import Change
from casemate.attaching.places import FilePlace, Place, Tables
from casemate.attaching.sidecar import Known, Sidecar
from casemate.attaching.tally import checked
from casemate.backends.attached import AttachedIndex
from casemate.collection import Piece, cosines
from casemate.stats import CorpusMoments
from casemate.types import DEFAULT_TENANT, Document, Hit, Vector

REMEMBERED = 1 << 16
"""Rows of which what is known stays in memory: some 20 MB."""


class _Counted(FilePlace):
    """A file that says whether anybody has written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._writes = 0

    @contextmanager
    def session(self, write: bool) -> Iterator[Tables]:
        """See ``Place.session``."""
        with super().session(write) as tables:
            if write:
                self._writes += 1
            yield tables

    def untouched(self, writes: int) -> bool:
        """Whether nobody can have written since so many writes: nobody else reaches what is in memory only."""
        return self._memory and writes == self._writes

    @contextmanager
    def reading(self) -> Iterator[tuple[Tables, tuple[int, int]]]:
        """A session that reads, and a state that is another one after any process has written."""
        with self.session(write=False) as tables:
            ((others,),) = tables.all("PRAGMA data_version")
            yield tables, (self._writes, int(others))


@dataclass(eq=False)
class Attachment(AttachedIndex):
    """An ``AttachedIndex`` that is told of a change by the ids it is about, whatever sources they are of.

    What is known of rows stays in memory for as long as nobody writes to our tables: each question asks for it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rows: dict[str, Known | None] = {}
        self._state: tuple[int, int] = (-1, -1)
        self._whole: CorpusMoments | None = None

    def open(self, fingerprint: str, dim: int) -> None:
        """See ``Index.open``. What was never scanned, or left by a process that died while writing, is scanned now."""
        super().open(fingerprint, dim)
        with self._session() as side:
            sound = side.epoch and "writing" not in side.meta
        if not sound:
            self.attach(anew=True)
            self._note(None)

    def _made(self) -> Place:
        return _Counted(self.path)

    def _found(self, q: Vector, k: int, tenant: str) -> tuple[Sequence[Hit], dict[str, Known], CorpusMoments]:
        """See ``AttachedIndex``."""
        hits = self.collection.search(q, k) if k > 0 and tenant == DEFAULT_TENANT else ()
        place = self._open()
        assert isinstance(place, _Counted)
        if place.untouched(self._state[0]) and tenant == DEFAULT_TENANT:
            rows, moments = self._rows, self._whole
            if moments is not None and all(h.document.id in rows for h in hits):
                return hits, {h.document.id: row for h in hits if (row := rows[h.document.id]) is not None}, moments
        with place.reading() as (tables, state):
            if state != self._state or self._whole is None or tenant != DEFAULT_TENANT:
                side = Sidecar(tables, self._dim)
                side.require(self.collection.name, self._fingerprint)
                side.require_whole()
                moments = self._moments(side, tenant)
                if tenant != DEFAULT_TENANT:
                    return hits, {}, moments
                self._rows, self._whole, self._state = {}, moments, state
            rows = self._rows
            if new := [h.document.id for h in hits if h.document.id not in rows]:
                if len(rows) > REMEMBERED:
                    rows.clear()
                    new = [h.document.id for h in hits]
                found = Sidecar(tables, self._dim).known(DEFAULT_TENANT, new)
                rows.update((name, found.get(name)) for name in new)
            known = {h.document.id: row for h in hits if (row := rows[h.document.id]) is not None}
            return hits, known, self._whole

    def _named(self, document: Document, known: Known | None) -> Document:
        """See ``AttachedIndex``."""
        if known is not None and (known.twin or known.source) == document.source and known.digest == document.digest:
            return document
        return super()._named(document, known)

    @contextmanager
    def changing(self, ids: Sequence[str]) -> Iterator[None]:
        """Around a change of some rows by the framework's own methods, whole or in part, whether it fails or not."""
        ids = list(dict.fromkeys(ids))
        place = self._open()
        with place.alone():
            self._note(secrets.token_hex(8))
            before = self.collection.find(ids)
            try:
                yield
            finally:
                after = self.collection.find(ids)
                change = Change(
                    DEFAULT_TENANT,
                    gone=ids,
                    found=[d.id for d in before.documents],
                    vectors=self._stored(before),
                    documents=self.named(after.documents, fresh=True),
                    new=self._stored(after),
                )
                with place.session(write=True) as tables:
                    side = Sidecar(tables, self._dim)
                    side.apply(change, change.new)
                    side.note(writing=None)

    def named(self, documents: Sequence[Document], fresh: bool = False) -> list[Document]:
        """Documents with the sources that the guard groups them to.

        Args:
            documents: As the collection gives them.
            fresh: They have just been written: what was known of them before no longer counts.
        """
        known = {}
        if not fresh:
            with self._session() as side:
                known = side.known(DEFAULT_TENANT, [d.id for d in documents])
        return [self._named(d, known.get(d.id)) for d in documents]

    def cosines(self, ids: Sequence[str], vector: Vector) -> dict[str, float]:
        """Exact similarity of some rows to a vector; what is not there is left out."""
        piece = self.collection.find(ids)
        if not piece.documents:
            return {}
        return dict(zip([d.id for d in piece.documents], cosines(piece.vectors, vector).tolist(), strict=True))

    def _stored(self, piece: Piece) -> Vector:
        if not piece.documents:
            return np.empty((0, self._dim), np.float32)
        return checked(piece, self._dim)[0]

    def _note(self, writing: str | None) -> None:
        with self._open().session(write=True) as tables:
            Sidecar(tables, self._dim).note(writing=writing)
