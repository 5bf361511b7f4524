"""The scan of ``casemate attach``: row inventory, moments and near-duplicates in one pass. Resumes if interrupted."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeAlias

import numpy as np

from casemate.backends.sidecar.near_duplicates import NearDuplicateFinder, canonical_sources
from casemate.backends.sidecar.row_inventory import (
    PageInventory,
    RowCounts,
    SourceGrouping,
    inventory_page,
    unit_vectors,
)
from casemate.backends.sidecar.sidecar import Sidecar
from casemate.backends.sidecar.sidecar_database import SidecarDatabase
from casemate.errors import DataError
from casemate.maths.vectors import normalize
from casemate.protocols import CollectionPage, TransactionalCollection, VectorCollection
from casemate.runtime.executor import prefetch
from casemate.types import DEFAULT_TENANT, Document, Float64, Vector

FLUSH_ROWS, FLUSH_S = 32_768, 2.0
"""Results are committed after this many rows or seconds; a killed scan resumes from there."""
SKETCH_PAGE = 8192

MAX_AHEAD = 4  # pages read ahead of the one being processed

RowScreen: TypeAlias = Callable[[str, Sequence[Document], Vector], Collection[str]]
"""Screens rows of a tenant that are new or changed since the previous scan; returns the ids of those to withhold."""
PageMap: TypeAlias = Callable[
    [Callable[[CollectionPage], PageInventory], Iterable[CollectionPage]], Iterable[PageInventory]
]
"""Maps a function over pages, with results in page order: ``map_in_thread``, or workers of a cluster."""


def map_in_thread(
    work: Callable[[CollectionPage], PageInventory], pages: Iterable[CollectionPage]
) -> Iterator[PageInventory]:
    """Processes pages in a thread while the next ones are read. In order, with bounded read-ahead."""
    waiting: deque[Future[PageInventory]] = deque()
    with ThreadPoolExecutor(1, "inventory") as thread:
        for page in pages:
            waiting.append(thread.submit(work, page))
            while waiting and (len(waiting) > MAX_AHEAD or waiting[0].done()):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@dataclass(frozen=True, slots=True)
class ScanSummary:
    """Result of a scan.

    Attributes:
        rows: Rows with text and vector, which the moments count.
        dim: Dimensions of a vector.
        rescaled: Rows whose vectors were not of unit length.
        textless: Rows skipped because they have no text.
        vectorless: Rows skipped because they have no vector.
        sources: Number of sources.
        grouped: Rule for sources. Empty: the collection's, or each row is its own source.
        copies: Groups of near-duplicates from several sources, which are hidden together.
        copied: Rows in these groups.
        widespread: Groups with too many sources, which are not hidden together.
        threshold: Smallest cosine of near-duplicates. 0: none were searched.
        at: Completion time in seconds since 1970.
        seconds: Duration of the last run.
    """

    rows: int
    dim: int
    rescaled: int
    textless: int
    vectorless: int
    sources: int
    grouped: str
    copies: int
    copied: int
    widespread: int
    threshold: float
    at: float
    seconds: float

    @classmethod
    def from_meta(cls, meta: Mapping[str, str]) -> Self | None:
        """Reads the summary from the sidecar. None: there was no scan."""
        return cls(**json.loads(meta["summary"])) if "summary" in meta else None

    def as_json(self) -> dict[str, Any]:
        """For ``--json`` and the sidecar."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class AttachScan:
    """A scan of an open collection into an open database that is bound to it.

    ``threshold`` is the smallest cosine of near-duplicates (0: none are searched). ``screen`` screens new and changed
    rows before the scan is activated; without it, as in a first scan, all are trusted.
    """

    collection: VectorCollection
    database: SidecarDatabase
    dim: int
    grouping: SourceGrouping
    threshold: float
    map_pages: PageMap = map_in_thread
    screen: RowScreen | None = None

    def run(self, progress: Callable[[int], None], restart: bool = False) -> ScanSummary:
        """Scans to the end, resuming an interrupted run unless ``restart``, and then activates the results at once.

        Raises:
            DataError: If vectors or ids are invalid. The message names documents.
            BackendError: If the collection fails. Committed results are kept.
        """
        begin = time.monotonic()
        with self.database.transaction(write=True) as tables:
            token, counts, after = Sidecar(tables, self.dim).begin_scan(restart)
        progress(counts.rows)
        waiting, flushed = list[PageInventory](), time.monotonic()
        for page in self.inventory(after):
            self._screen(page)
            waiting.append(page)
            counts = counts.plus(page.counts)
            if sum(len(p.rows) for p in waiting) >= FLUSH_ROWS or time.monotonic() - flushed > FLUSH_S:
                self._flush(token, waiting, counts)
                waiting, flushed = [], time.monotonic()
                progress(counts.rows)
        self._flush(token, waiting, counts)
        progress(counts.rows)
        finder = NearDuplicateFinder(self._cosines, self.threshold or 1.0)
        if self.threshold:
            finder.search(self._sketches())
        return self._finish(token, counts, finder, begin)

    def inventory(self, after: str) -> Iterable[PageInventory]:
        """The inventory of each page, in order: the only part that workers of a cluster may run."""
        return self.map_pages(PageInventoryTask(self.grouping, self.dim), prefetch(self.collection.scan(after)))

    def _screen(self, page: PageInventory) -> None:
        """Screens the rows of a page that the active inventory has not, or with another vector."""
        if self.screen is None:
            return
        for tenant in page.moments:
            rows = {row.id: row.checksum for row in page.rows if row.tenant == tenant}
            with self.database.transaction(write=False) as tables:
                sidecar = Sidecar(tables, self.dim)
                entries = sidecar.entries(tenant, rows)
            new = [name for name, checksum in rows.items() if name not in entries or entries[name].checksum != checksum]
            if not sidecar.epoch or not new:
                continue
            with self.database.transaction(write=True) as tables:  # at once, also from the calibration of the screening
                Sidecar(tables, self.dim).set_withheld(tenant, new, ())
            found = find_rows(self.collection, tenant, new)
            documents = [replace(d, source=self.grouping.source(d)) for d in found.documents]
            withheld = self.screen(tenant, documents, unit_vectors(found, self.dim)[0]) if documents else ()
            with self.database.transaction(write=True) as tables:
                Sidecar(tables, self.dim).set_withheld(tenant, withheld, new)

    def _flush(self, token: str, waiting: list[PageInventory], counts: RowCounts) -> None:
        if waiting:
            with self.database.transaction(write=True) as tables:
                sidecar = Sidecar(tables, self.dim)
                sidecar.require_scanner(token)
                sidecar.add_pages(waiting, counts)

    def _sketches(self) -> Iterator[list[tuple[int, bytes]]]:
        after = 0
        while True:
            with self.database.transaction(write=False) as tables:
                rows = Sidecar(tables, self.dim).scanned_sketches(after, SKETCH_PAGE)
            if not rows:
                return
            yield rows
            after = rows[-1][0]

    def _cosines(self, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """The exact cosines of pairs of rows; NaN for rows of different tenants or missing rows."""
        with self.database.transaction(write=False) as tables:
            rows = Sidecar(tables, self.dim).rows_by_age({age for pair in pairs for age in pair})
        ids_by_tenant: dict[str, list[str]] = {}
        for tenant, identity, _ in rows.values():
            ids_by_tenant.setdefault(tenant, []).append(identity)
        vectors = {t: self._vectors(t, ids) for t, ids in ids_by_tenant.items()}

        def cosine(a: int, b: int) -> float:
            (tenant, one, _), (other_tenant, other, _) = rows[a], rows[b]
            x, y = vectors[tenant].get(one), vectors[other_tenant].get(other)
            return float(x @ y) if tenant == other_tenant and x is not None and y is not None else math.nan

        return [cosine(a, b) if a in rows and b in rows else math.nan for a, b in pairs]

    def _vectors(self, tenant: str, ids: Sequence[str]) -> dict[str, Float64]:
        page = find_rows(self.collection, tenant, ids)
        stored = normalize(page.vectors)[0].astype(np.float64) if len(page.documents) else ()
        return {d.id: x for d, x in zip(page.documents, stored, strict=True)}

    def _finish(self, token: str, counts: RowCounts, finder: NearDuplicateFinder, begin: float) -> ScanSummary:
        with self.database.transaction(write=True) as tables:
            sidecar = Sidecar(tables, self.dim)
            sidecar.require_scanner(token)
            rows, sources = sidecar.count_scanned()
            if rows < counts.rows and "changed_during_scan" not in sidecar.meta:
                raise DataError(
                    f"{self.collection.name}: {counts.rows} rows have only {rows} different ids; "
                    "configure a unique column or field as the id"
                )
            duplicates, groups, widespread = canonical_sources(
                finder.groups(), lambda ages: {age: row[2] for age, row in sidecar.rows_by_age(ages).items()}
            )
            summary = ScanSummary(
                rows=rows, dim=self.dim, rescaled=counts.rescaled, textless=counts.textless,
                vectorless=counts.vectorless, sources=sources, grouped=self.grouping.describe(), copies=groups,
                copied=len(duplicates), widespread=widespread, threshold=self.threshold, at=time.time(),
                seconds=time.monotonic() - begin,
            )  # fmt: skip
            sidecar.finish_scan(duplicates, summary.as_json())
        return summary


@dataclass(frozen=True, slots=True)
class PageInventoryTask:
    """``inventory_page`` with its options, as a value that can be pickled."""

    grouping: SourceGrouping
    dim: int

    def __call__(self, page: CollectionPage) -> PageInventory:
        """See ``inventory_page``."""
        return inventory_page(page, self.grouping, self.dim)


def find_rows(
    collection: VectorCollection, tenant: str, ids: Sequence[str], within: Any | None = None
) -> CollectionPage:
    """Rows of a tenant by id. Works for collections without tenants or transactions too."""
    if isinstance(collection, TransactionalCollection):
        return collection.find(ids, tenant, within)
    return collection.find(ids) if tenant == DEFAULT_TENANT else CollectionPage((), np.empty((0, 0), np.float32))
