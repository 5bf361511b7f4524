"""An index over an existing collection of another program, used in place, with a sidecar database.

Searches go to the collection. Moments and sources are in the sidecar, filled by one scan (``casemate attach``). Changes
through Casemate update both. Rows that other programs write are found by searches at once, and are in the moments after
the next scan. Beyond a limit of such drift, searches are refused, and the guard answers without context.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from casemate.backends import index_checks
from casemate.backends.sidecar.attach_scan import (
    AttachScan,
    PageMap,
    RowScreen,
    ScanSummary,
    find_rows,
    map_in_thread,
)
from casemate.backends.sidecar.drift import DriftLimit, DriftReport, measure_drift
from casemate.backends.sidecar.pending_change import PendingChange
from casemate.backends.sidecar.row_inventory import SourceGrouping, unit_vectors
from casemate.backends.sidecar.sidecar import InventoryEntry, Sidecar
from casemate.backends.sidecar.sidecar_database import (
    MEMORY,
    PostgresSidecarDatabase,
    SidecarDatabase,
    SqliteSidecarDatabase,
)
from casemate.errors import BackendError, CapabilityError, ConfigError, DataError
from casemate.maths.moments import CorpusMoments, add_one
from casemate.protocols import Index, TransactionalCollection, VectorCollection
from casemate.types import DEFAULT_TENANT, Document, Hit, Retrieval, SimilarityStats, Vector

SELECTING = ("database", "tenant", "where", "only")
"""Options of collections that select rows: with other values, it is another collection."""
CACHED_TENANTS = 64  # tenants whose moments are cached: 1.2 MB each at 384 dimensions


def one_collection(held: str) -> str:
    """What the user can do about state of another collection, by where it is stored."""
    return (
        "a folder holds the state of one collection: move this casemate.yaml to another folder, or, if it replaces the "
        f"earlier one, delete {held} and run 'casemate attach'"
    )


@dataclass(eq=False)
class AttachedIndex(Index):
    """An attached collection: its rows in place, and moments, sources and near-duplicates in a sidecar database.

    Attributes:
        collection: The existing collection.
        path: The sidecar file, readable by its owner only. ``:memory:`` lasts as long as the process, so opening scans
            the collection.
        schema: Name of a schema in the collection's own database to use instead of the file. Several processes can
            share it, and a change of rows and moments is one transaction. Empty: use the file.
        source_field: Metadata field with a document's source.
        source_pattern: Regular expression for the id. Its first group, or the whole match, is the source.
        near_copies: Smallest cosine of near-duplicates, which are hidden together. 0: do not search for them.
        unknown: Rows that other programs added since the last scan: `judge` them by moments without them, or `withhold`
            them until the next scan.
        drift: Largest share of rows that other programs may change before searches are refused.
    """

    collection: VectorCollection
    path: Path = Path(".casemate/attached.db")
    schema: str = ""
    source_field: str = ""
    source_pattern: str = ""
    near_copies: float = 0.95
    unknown: Literal["judge", "withhold"] = "judge"
    drift: float = 0.05

    def __post_init__(self) -> None:
        if self.schema and not re.fullmatch("[a-z_][a-z0-9_]{0,62}", self.schema):
            raise ConfigError(
                f"attached.schema is {self.schema!r}; allowed: a-z, 0-9 and _, not beginning with a digit"
            )
        if self.schema and not isinstance(self.collection, TransactionalCollection):
            raise CapabilityError(
                f"{self.collection.name} has no transactions, which attached.schema requires; set attached.path instead"
            )
        if not (0 <= self.near_copies <= 1 and 0 < self.drift <= 1):
            values = f"attached: near_copies={self.near_copies}, drift={self.drift}"
            raise ConfigError(f"{values}; allowed: 0 to 1 for near_copies, above 0 to 1 for drift")
        self._grouping = SourceGrouping(self.source_field, self.source_pattern)
        self._database: SidecarDatabase | None = None
        self._cache: dict[str, tuple[int, CorpusMoments]] = {}
        self.withhold_new = self.unknown == "withhold"
        self._withheld: dict[str, frozenset[str]] = {}
        self._fingerprint, self._dim = "", 0
        self._limit = self._drift_limit()

    def _drift_limit(self) -> DriftLimit:
        return DriftLimit(self.drift, "attached.drift", "run 'casemate attach'")

    @property
    def bound_name(self) -> str:
        """Name of the collection, with the options that select its rows: the sidecar belongs to it alone."""
        options = {option: getattr(self.collection, option, None) for option in SELECTING}
        written = {o: v.strip() if isinstance(v, str) else json.dumps(v, sort_keys=True) for o, v in options.items()}
        return ", ".join([self.collection.name, *(f"{o} {v}" for o, v in written.items() if options[o])])

    @property
    def _remedy(self) -> str:
        """What the user can do if the sidecar belongs to another collection or embedder."""
        return one_collection(f"the schema {self.schema!r}" if self.schema else str(self.path))

    def open(self, fingerprint: str, dim: int) -> None:
        """See ``Index.open``. Completes pending changes of a killed process."""
        self.close()
        try:
            self._open(fingerprint, dim)
        except BaseException:
            self._database = None
            self.collection.close()
            raise

    def _open(self, fingerprint: str, dim: int) -> None:
        length = self.collection.open()
        if length != dim:
            raise DataError(
                f"{self.collection.name} has vectors of {length} dimensions, the embedder {dim}: "
                "configure the embedder of the collection"
            )
        self._fingerprint, self._dim = fingerprint, dim
        database = self._create_database()
        database.open()
        with database.transaction(write=True) as tables:
            side = Sidecar(tables, dim)
            side.bind(self.bound_name, fingerprint, self._remedy)
            scanned, pending = side.epoch, bool(side.pending_changes())
        self._database = database
        if pending:
            with database.exclusive_writer():
                self._recover(database)
        if not scanned and (self.path.name == MEMORY or not self.collection.count()):
            self.attach()

    def attach(
        self,
        progress: Callable[[int], None] = lambda rows: None,
        restart: bool = False,
        map_pages: PageMap = map_in_thread,
        screen: RowScreen | None = None,
    ) -> ScanSummary:
        """Scans the whole collection. The previous scan stays active until this one is complete.

        Args:
            progress: Called with the number of rows read so far.
            restart: Discard the results of an interrupted run.
            map_pages: Where pages are processed.
            screen: Screens rows that are new or changed since the previous scan.

        Raises:
            DataError: If vectors or ids are invalid. The message names documents.
            BackendError: If the collection fails. Committed results are kept.
        """
        scan = AttachScan(
            self.collection, self._require_open(), self._dim, self._grouping, self.near_copies, map_pages, screen
        )
        summary = scan.run(progress, restart)
        self._limit = self._drift_limit()
        return summary

    def summary(self) -> ScanSummary | None:
        """Summary of the last completed scan. None: there was none."""
        with self._sidecar() as side:
            return ScanSummary.from_meta(side.meta)

    def measure_drift(self) -> DriftReport:
        """Estimates from a sample how far the collection has drifted since the last scan."""
        with self._sidecar() as side:
            side.require_scanned()
        return measure_drift(self.collection, self._require_open(), self._dim)

    def add(self, documents: Sequence[Document], vectors: Vector, tenant: str = DEFAULT_TENANT) -> None:
        vectors = index_checks.require_valid(documents, vectors, self._dim)
        for document in documents:
            index_checks.document_columns(document)
        self._change({d.source for d in documents}, documents, vectors, tenant)

    def remove(self, sources: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        return self._change(sources, (), np.empty((0, self._dim), np.float32), tenant)

    def search(self, vector: Vector, k: int, tenant: str = DEFAULT_TENANT) -> Retrieval:
        """See ``Index.search``.

        Raises:
            DataError: If the collection has not been scanned completely, or has drifted beyond the limit.
        """
        self._require_open()
        q, reach = index_checks.require_query(vector, self._dim), max(k, 0)
        self._limit.require(self.collection.name, self._row_counts)
        while True:
            hits, entries, moments = self._search(q, reach, tenant)
            withheld = self._withheld.get(tenant, frozenset())
            kept = [
                h
                for h in hits
                if h.document.id not in withheld
                and not (self.withhold_new and self._is_foreign(h.document, entries.get(h.document.id)))
            ]
            kept.sort(key=lambda h: (-h.score, entries[h.document.id].age if h.document.id in entries else 1 << 62))
            if len(kept) >= k or len(hits) < reach:
                return self._retrieval(kept[: max(k, 0)], entries, moments.similarity_stats(q))
            reach = min(4 * reach, max(self.collection.max_results, reach + 1))

    def _retrieval(
        self, hits: Sequence[Hit], entries: Mapping[str, InventoryEntry], similarity_stats: SimilarityStats
    ) -> Retrieval:
        """The hits, with similarity statistics that include each of them.

        Moments lack rows of other programs. Without them, leaving such a row out would leave a variance near 0, and
        every document would seem too close.
        """
        for hit in hits:
            if self._is_foreign(hit.document, entries.get(hit.document.id)):
                similarity_stats = add_one(similarity_stats, hit.score)
        return Retrieval(tuple(self._hit(h, entries.get(h.document.id)) for h in hits), similarity_stats)

    def withhold(self, ids: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        """See ``WithholdingIndex``."""
        with self._sidecar(write=True) as side:
            foreign = [name for name, entry in side.entries(tenant, ids).items() if not entry.ours]
            side.set_withheld(tenant, foreign, ())
        return len(foreign)

    def admit(self, ids: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        """See ``WithholdingIndex``."""
        with self._sidecar(write=True) as side:
            return side.set_withheld(tenant, (), ids)

    def withheld(self, tenant: str = DEFAULT_TENANT) -> frozenset[str]:
        """Ids of the rows that are withheld from retrieval."""
        with self._sidecar() as side:
            return side.withheld().get(tenant, frozenset())

    def moments(self, tenant: str = DEFAULT_TENANT) -> CorpusMoments:
        with self._sidecar() as side:
            return self._moments(side, tenant)

    def digests(self, tenant: str = DEFAULT_TENANT) -> dict[str, str]:
        """See ``Index.digests``. Empty for sources that other programs added."""
        with self._sidecar() as side:
            return side.digests(tenant)

    def tenants(self) -> list[str]:
        with self._sidecar() as side:
            return side.tenants()

    def scan(self, tenant: str = DEFAULT_TENANT) -> Iterator[tuple[list[Document], Vector]]:
        """See ``Index.scan``. The rows of the inventory, as the collection has them now, without withheld ones."""
        after, withheld = 0, self.withheld(tenant)
        while True:
            with self._sidecar() as side:
                rows = side.entries_by_age(tenant, after, index_checks.SCAN_PAGE)
            if not rows:
                return
            after = rows[-1].entry.age
            page = find_rows(self.collection, tenant, [row.id for row in rows])
            stored, _ = unit_vectors(page, self._dim)
            position = {d.id: i for i, d in enumerate(page.documents)}
            present = [row for row in rows if row.id in position and row.id not in withheld]
            if present:
                order = [position[row.id] for row in present]
                yield [self._with_source(page.documents[position[r.id]], r.entry) for r in present], stored[order]

    def check(self) -> list[str]:
        with self._sidecar() as side:
            if not side.epoch:
                return ["the collection has not been scanned completely: run 'casemate attach'"]
            pending = len(side.pending_changes())
        problems = [f"{pending} changes are incomplete: the next change completes them"] if pending else []
        return problems + self.measure_drift().problems(self.drift)

    def rebuild(self) -> None:
        """See ``Index.rebuild``. Scans the collection again."""
        self.attach(restart=True)

    def clear(self) -> None:
        """Deletes the contents of the sidecar database. The collection stays as it is."""
        if self._database is None:
            self.collection.open()
        database = self._database or self._create_database()
        database.open()
        with database.transaction(write=True) as tables:
            Sidecar(tables, self._dim).clear()
        self._cache.clear()

    def close(self) -> None:
        database, self._database = self._database, None
        self._cache.clear()
        if database is not None:
            database.close()
            self.collection.close()

    def _create_database(self) -> SidecarDatabase:
        if self.schema and isinstance(self.collection, TransactionalCollection):
            return PostgresSidecarDatabase(self.schema, self.collection.transaction, self.collection.name)
        return SqliteSidecarDatabase(self.path)

    def _require_open(self) -> SidecarDatabase:
        if self._database is None:
            raise BackendError(f"{self.collection.name} is not open", backend="attached", retryable=False)
        return self._database

    @contextmanager
    def _sidecar(self, *, write: bool = False) -> Iterator[Sidecar]:
        """The sidecar of this collection and embedder, in one transaction."""
        with self._require_open().transaction(write) as tables:
            side = Sidecar(tables, self._dim)
            side.require_bound(self.bound_name, self._fingerprint, self._remedy)
            yield side

    def _search(self, q: Vector, k: int, tenant: str) -> tuple[Sequence[Hit], dict[str, InventoryEntry], CorpusMoments]:
        """Hits, their inventory entries and the moments: of one state, if collection and sidecar share a database."""
        hits = () if self.schema else self._nearest(q, k, tenant)
        with self._sidecar() as side:
            side.require_scanned()
            if self.schema:
                hits = self._nearest(q, k, tenant, side.within)
            self._withheld = side.withheld()
            return hits, side.entries(tenant, [h.document.id for h in hits]), self._moments(side, tenant)

    def _nearest(self, q: Vector, k: int, tenant: str, within: Any = None) -> Sequence[Hit]:
        if k < 1:
            return ()
        if isinstance(self.collection, TransactionalCollection):
            return self.collection.search(q, k, tenant, within)
        return self.collection.search(q, k) if tenant == DEFAULT_TENANT else ()

    def _hit(self, hit: Hit, entry: InventoryEntry | None) -> Hit:
        document = self._with_source(hit.document, entry)
        return hit if document is hit.document else Hit(document, hit.score)

    def _with_source(self, document: Document, entry: InventoryEntry | None) -> Document:
        """The document with the source from the inventory; for a foreign row, with the source from the rules."""
        if entry is None or self._is_foreign(document, entry):
            return replace(document, source=self._grouping.source(document))
        return replace(document, source=entry.duplicate_of or entry.source, digest=entry.digest)

    def _is_foreign(self, document: Document, entry: InventoryEntry | None) -> bool:
        """Whether another program added this row since the last scan, or replaced it by one of another source."""
        return entry is None or (not entry.ours and self._grouping.source(document) != entry.source)

    def _moments(self, side: Sidecar, tenant: str) -> CorpusMoments:
        """The tenant's moments, cached by their revision."""
        revision, cached = side.revision(tenant), self._cache.get(tenant)
        if cached is None or cached[0] != revision:
            if len(self._cache) >= CACHED_TENANTS:
                self._cache.clear()
            cached = self._cache[tenant] = revision, side.moments(tenant)
        return cached[1]

    def _row_counts(self) -> tuple[int, int, int]:
        """Numbers of rows in the collection, scanned rows, and rows changed since."""
        with self._sidecar() as side:
            side.require_scanned()
            size, drifted, summary = side.size(), side.drifted, ScanSummary.from_meta(side.meta)
        return self.collection.count() - (summary.textless + summary.vectorless if summary else 0), size, drifted

    def _change(self, sources: Collection[str], documents: Sequence[Document], vectors: Vector, tenant: str) -> int:
        """Replaces all rows of some sources by documents. Returns the number of replaced rows."""
        if tenant != DEFAULT_TENANT and not getattr(self.collection, "tenanted", False):
            if documents:
                raise CapabilityError(f"{self.collection.name} has no tenants except {DEFAULT_TENANT!r}")
            return 0
        database = self._require_open()
        with database.exclusive_writer():
            write = self._change_in_transaction if self.schema else self._change_with_log
            return write(partial(self._plan, sources, documents, vectors, tenant))

    def _change_in_transaction(self, plan: Callable[[Sidecar], PendingChange]) -> int:
        with self._sidecar(write=True) as side:
            change = plan(side)
            if change.gone or change.documents:
                side.record(change, self._apply(change, side.within))
        return len(change.gone)

    def _change_with_log(self, plan: Callable[[Sidecar], PendingChange]) -> int:
        """Logs the change, applies it to the collection, and records it. The next writer completes what a kill left."""
        database = self._require_open()
        self._recover(database)
        with self._sidecar() as side:
            change = plan(side)
        if change.gone or change.documents:
            with self._sidecar(write=True) as side:
                number = side.log_change(change)
            self._complete(database, number, change)
        return len(change.gone)

    def _plan(
        self, sources: Collection[str], documents: Sequence[Document], vectors: Vector, tenant: str, side: Sidecar
    ) -> PendingChange:
        side.require_scanned()
        gone, new = side.ids_of(tenant, sources), [d.id for d in documents]
        if clash := side.entries(tenant, set(new) - set(gone)):
            raise index_checks.duplicate_id(next(iter(clash)))
        page = find_rows(self.collection, tenant, [*dict.fromkeys([*gone, *new])], side.within)
        entries = side.entries(tenant, gone)
        foreign = {d.id for d in page.documents if self._is_foreign(d, entries.get(d.id))}
        if foreign:
            raise DataError(
                f"{self.collection.name} has a row {min(foreign)!r} of another program: "
                "choose another id, or run 'casemate attach' and replace its source"
            )
        stored, _ = unit_vectors(page, self._dim)
        return PendingChange(tenant, gone, [d.id for d in page.documents], stored, documents, vectors)

    def _apply(self, change: PendingChange, within: Any = None) -> Vector:
        """Applies a change to the collection (idempotent). Returns the documents' vectors as it stores them."""
        if isinstance(self.collection, TransactionalCollection):
            self.collection.add(change.documents, change.new, change.tenant, within)
            self.collection.remove(change.removed, change.tenant, within)
        else:
            self.collection.add(change.documents, change.new)
            self.collection.remove(change.removed)
        page = find_rows(self.collection, change.tenant, [d.id for d in change.documents], within)
        position = {d.id: i for i, d in enumerate(page.documents)}
        if lost := [d.id for d in change.documents if d.id not in position]:
            problem = (
                f"{self.collection.name} accepted {lost[0]!r} but does not return it; check the store and try again"
            )
            raise BackendError(problem, backend="attached", retryable=True)
        stored, _ = unit_vectors(page, self._dim)
        return stored[[position[d.id] for d in change.documents]]

    def _complete(self, database: SidecarDatabase, number: int, change: PendingChange) -> None:
        try:
            stored = self._apply(change)
        except (CapabilityError, DataError):  # the collection refused the documents, so nothing was removed yet
            with database.transaction(write=True) as tables:
                Sidecar(tables, self._dim).discard(number)
            raise
        with database.transaction(write=True) as tables:
            Sidecar(tables, self._dim).complete(number, change, stored)

    def _recover(self, database: SidecarDatabase) -> None:
        """Completes the pending changes of killed processes. Call within ``exclusive_writer``."""
        with database.transaction(write=False) as tables:
            pending = Sidecar(tables, self._dim).pending_changes()
        for number, change in pending:
            self._complete(database, number, change)
