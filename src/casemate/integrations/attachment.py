"""The index over a framework's store: an ``AttachedIndex`` whose rows the framework itself adds and removes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from casemate.backends.indexes.attached import AttachedIndex
from casemate.backends.sidecar.drift import DriftLimit
from casemate.backends.sidecar.pending_change import PendingChange
from casemate.backends.sidecar.row_inventory import unit_vectors
from casemate.backends.sidecar.sidecar import InventoryEntry, Sidecar
from casemate.backends.sidecar.sidecar_database import SidecarDatabase, SidecarTables, SqliteSidecarDatabase
from casemate.integrations.adapters import FrameworkCollection
from casemate.maths.moments import CorpusMoments
from casemate.protocols import CollectionPage
from casemate.types import DEFAULT_TENANT, Document, Hit, Vector

MAX_CACHED_ROWS = 1 << 16  # rows whose sidecar data is cached in memory, about 20 MB


class _CountingDatabase(SqliteSidecarDatabase):
    """A sidecar file with a counter of writes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._writes = 0

    @contextmanager
    def transaction(self, write: bool) -> Iterator[SidecarTables]:
        with super().transaction(write) as tables:
            if write:
                self._writes += 1
            yield tables

    def untouched(self, writes: int) -> bool:
        """Whether an in-memory sidecar is unchanged since this count of writes. Other processes cannot write to it."""
        return self._memory and writes == self._writes

    @contextmanager
    def reading(self) -> Iterator[tuple[SidecarTables, tuple[int, int]]]:
        """A read transaction, and a state that changes whenever a process writes."""
        with self.transaction(write=False) as tables:
            ((others,),) = tables.query("PRAGMA data_version")
            yield tables, (self._writes, int(others))


@dataclass(eq=False)
class FrameworkIndex(AttachedIndex):
    """An ``AttachedIndex`` that is notified of changes by document id.

    It caches the sidecar data of rows until a process writes to the sidecar: every question reads it.
    """

    collection: FrameworkCollection

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rows: dict[str, InventoryEntry | None] = {}
        self._state: tuple[int, int] = (-1, -1)
        self._whole: CorpusMoments | None = None

    def open(self, fingerprint: str, dim: int) -> None:
        """See ``Index.open``. Scans the store if it was never scanned, or if a process died while writing."""
        super().open(fingerprint, dim)
        with self._sidecar() as side:
            sound = side.epoch and "writing" not in side.meta
        if not sound:
            self.attach(restart=True)
            self._note(None)

    def _drift_limit(self) -> DriftLimit:
        return DriftLimit(self.drift, "", "call sync() of the wrapper")

    @property
    def _remedy(self) -> str:
        return f"give each store a path of its own, or, if this one replaces the earlier one, delete {self.path}"

    def _create_database(self) -> SidecarDatabase:
        return _CountingDatabase(self.path)

    def _search(self, q: Vector, k: int, tenant: str) -> tuple[Sequence[Hit], dict[str, InventoryEntry], CorpusMoments]:
        hits = self.collection.search(q, k) if k > 0 and tenant == DEFAULT_TENANT else ()
        database = self._require_open()
        assert isinstance(database, _CountingDatabase)
        if database.untouched(self._state[0]) and tenant == DEFAULT_TENANT:
            rows, moments = self._rows, self._whole
            if moments is not None and all(h.document.id in rows for h in hits):
                return hits, {h.document.id: row for h in hits if (row := rows[h.document.id]) is not None}, moments
        with database.reading() as (tables, state):
            if state != self._state or self._whole is None or tenant != DEFAULT_TENANT:
                side = Sidecar(tables, self._dim)
                side.require_bound(self.bound_name, self._fingerprint, self._remedy)
                side.require_scanned()
                moments = self._moments(side, tenant)
                if tenant != DEFAULT_TENANT:
                    return hits, {}, moments
                self._rows, self._whole, self._state = {}, moments, state
                self._withheld = side.withheld()
            rows = self._rows
            if new := [h.document.id for h in hits if h.document.id not in rows]:
                if len(rows) > MAX_CACHED_ROWS:
                    rows.clear()
                    new = [h.document.id for h in hits]
                entries = Sidecar(tables, self._dim).entries(DEFAULT_TENANT, new)
                rows.update((name, entries.get(name)) for name in new)
            known = {h.document.id: row for h in hits if (row := rows[h.document.id]) is not None}
            return hits, known, self._whole

    def _with_source(self, document: Document, entry: InventoryEntry | None) -> Document:
        if (
            entry is not None
            and (entry.duplicate_of or entry.source) == document.source
            and entry.digest == document.digest
        ):
            return document
        return super()._with_source(document, entry)

    @contextmanager
    def changing(self, ids: Sequence[str]) -> Iterator[None]:
        """Wraps a change of rows by the framework's own methods. Correct even if the change fails halfway."""
        ids = list(dict.fromkeys(ids))
        database = self._require_open()
        with database.exclusive_writer():
            self._note(secrets.token_hex(8))
            before = self.collection.find(ids)
            try:
                yield
            finally:
                after = self.collection.find(ids)
                change = PendingChange(
                    DEFAULT_TENANT,
                    gone=ids,
                    found=[d.id for d in before.documents],
                    vectors=self._stored(before),
                    documents=self.named(after.documents, fresh=True),
                    new=self._stored(after),
                )
                with database.transaction(write=True) as tables:
                    side = Sidecar(tables, self._dim)
                    side.record(change, change.new)
                    side.set_meta(writing=None)

    def named(self, documents: Sequence[Document], fresh: bool = False) -> list[Document]:
        """Documents, as the collection returns them, with the sources to which the guard assigns them.

        ``fresh``: they were just written, so cached data is ignored.
        """
        known = {}
        if not fresh:
            with self._sidecar() as side:
                known = side.entries(DEFAULT_TENANT, [d.id for d in documents])
        return [self._with_source(d, known.get(d.id)) for d in documents]

    def _stored(self, page: CollectionPage) -> Vector:
        if not page.documents:
            return np.empty((0, self._dim), np.float32)
        return unit_vectors(page, self._dim)[0]

    def _note(self, writing: str | None) -> None:
        with self._require_open().transaction(write=True) as tables:
            Sidecar(tables, self._dim).set_meta(writing=writing)
