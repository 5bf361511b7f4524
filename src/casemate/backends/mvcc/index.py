"""An index over a store without transactions over several rows, made exact by multi-version concurrency control.

The store offers one atomic step: it exchanges the *commit record* for another one if the record still has the expected
value (``VersionedStore.compare_and_swap``). Every other call may stop half-way.

A write is a transaction with a number of its own:

1. Acquire: the writer exchanges the commit record for one with its lease.
2. Insert: it adds its rows, whose keys carry the transaction number. The record does not include that number yet, so
   the rows are invisible. The last rows are the tenant's *manifest*: its moments, and the keys that it removes
   (tombstones).
3. Commit: it exchanges the record for one that includes the number. Rows and moments change in this step.
4. Clean up: it deletes the tombstoned rows.
5. Release: it gives up the lease.

A writer that is killed before 3 leaves rows that are never visible; killed after 3, rows that no longer are. The next
writer deletes both. It may take over when the holder has not exchanged the record for the duration of its lease.

Readers do not wait for writers. Without a lease holder all rows are visible; otherwise those of committed
transactions, less the tombstoned ones. A reader checks the commit record afterwards, and repeats the read if another
transaction committed meanwhile. After ``READ_ATTEMPTS`` conflicts it acquires the lease itself.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from casemate.backends import index_checks
from casemate.backends.mvcc.manifest import KeyRanges, TenantManifest, encode_manifest, key_ranges
from casemate.backends.mvcc.row_codec import (
    CONTINUATION,
    MANIFEST,
    continuation_keys,
    decode_columns,
    encode_document,
    hash_text,
    source_and_digest,
)
from casemate.backends.mvcc.transaction import WriterLease, WriteTransaction, first_key, write_transaction
from casemate.backends.mvcc.versioned_store import (
    PAGE,
    CommitRecord,
    IndexDescriptor,
    RowFilter,
    StoredRow,
    VersionedStore,
)
from casemate.errors import BackendError, CasemateError, DataError
from casemate.maths.moments import CorpusMoments
from casemate.maths.nearest import OVERSAMPLING, Keys, inner_products, rounding_error_bound, top_k
from casemate.protocols import Index
from casemate.types import DEFAULT_TENANT, Document, Float64, Hit, Retrieval, Vector

Result = TypeVar("Result")

READ_ATTEMPTS = 8  # conflicting reads before a reader acquires the writer lease
CACHED_TENANTS = 64  # tenants whose moments are cached: 1.2 MB each at 384 dimensions
MAX_TENANT_NAME = 1000
MANIFEST_PAGE = 64
LEASE_TIMEOUTS = 3  # duration of the writer lease in multiples of the longest time of one call


@dataclass(frozen=True)
class _Snapshot:
    """A committed state to read: its commit record, and the timestamp that reads need to see all of it."""

    record: CommitRecord
    timestamp: Callable[[], Any]


class MvccIndex(Index):
    """Implements ``Index`` over a ``VersionedStore``. A plug-in calls ``_use_store`` with its own store."""

    def _use_store(self, store: VersionedStore, timeout_s: float) -> None:
        self._store, self._lease = store, WriterLease(store, LEASE_TIMEOUTS * timeout_s)
        self._writing = threading.Lock()
        self._descriptor: IndexDescriptor | None = None
        self._latest: tuple[CommitRecord, Any] | None = None  # a commit record, and the read timestamp for it
        self._manifests: tuple[int, dict[str, TenantManifest | None]] = (-1, {})  # of one committed transaction
        self._moments: dict[tuple[str, int], CorpusMoments] = {}  # by tenant and transaction

    def open(self, fingerprint: str, dim: int) -> None:
        """See ``Index.open``. Rows that a killed writer left are invisible; the next write deletes them."""
        self._store.connect()
        if self._store.descriptor() is None:
            begin = secrets.randbits(28)  # no transaction number is used twice in one location, even after clear()
            descriptor = IndexDescriptor(secrets.token_hex(4), fingerprint, int(dim))
            self._store.create(descriptor, CommitRecord(begin, begin, "", 0))
        self._bind(fingerprint, dim)

    def add(self, documents: Sequence[Document], vectors: Vector, tenant: str = DEFAULT_TENANT) -> None:
        vectors = index_checks.require_valid(documents, vectors, self._opened().dim)
        if len(tenant) > MAX_TENANT_NAME:
            raise DataError(
                f"the tenant name {tenant[:80]!r}... has {len(tenant)} characters; allowed: {MAX_TENANT_NAME}"
            )
        if not len(documents):
            return
        with self._transaction() as (transaction, snapshot):
            pairs = zip(documents, vectors, strict=True)
            rows = [row for d, v in pairs for row in encode_document(transaction.allocate_keys, d, v, tenant)]
            removed, tombstones = self._rows_of(snapshot, {d.source for d in documents}, tenant)
            self._require_new_ids(snapshot, documents, set(tombstones), tenant)
            transaction.insert(rows)
            moments = index_checks.updated_moments(
                tenant, self._moments_at(snapshot, tenant), removed, CorpusMoments.of(vectors)
            )
            self._commit(transaction, snapshot, {tenant: moments}, tombstones)

    def remove(self, sources: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        if not self._read(lambda snapshot: self._manifest(snapshot, tenant)):
            return 0
        with self._transaction() as (transaction, snapshot):
            removed, tombstones = self._rows_of(snapshot, sources, tenant)
            if removed.n:
                moments = index_checks.updated_moments(tenant, self._moments_at(snapshot, tenant), removed)
                self._commit(transaction, snapshot, {tenant: moments}, tombstones)
        return removed.n

    def search(self, vector: Vector, k: int, tenant: str = DEFAULT_TENANT) -> Retrieval:

        def read(snapshot: _Snapshot) -> Retrieval:
            q = index_checks.require_query(vector, self._opened().dim)
            rows, s = self._nearest(snapshot, q, max(k, 0), tenant)
            documents = map(index_checks.decode_document, self._columns(snapshot, rows))
            hits = tuple(Hit(d, float(score)) for d, score in zip(documents, s, strict=True))
            return Retrieval(hits, self._moments_at(snapshot, tenant).similarity_stats(q))

        return self._read(read)

    def moments(self, tenant: str = DEFAULT_TENANT) -> CorpusMoments:
        return self._read(lambda snapshot: self._moments_at(snapshot, tenant))

    def digests(self, tenant: str = DEFAULT_TENANT) -> dict[str, str]:

        def read(snapshot: _Snapshot) -> dict[str, str]:
            digests: dict[str, str] = {}
            for rows in self._pages(snapshot, self._visible(snapshot, tenant), ("label",)):
                digests.update(pair for pair in map(source_and_digest, rows) if pair)
                if unlabeled := [row.key for row in rows if not source_and_digest(row)]:
                    full = self._store.select(
                        RowFilter(keys=unlabeled), len(unlabeled), snapshot.timestamp(), ("label", "body")
                    )
                    digests.update((source, digest) for _, source, digest, *_ in self._columns(snapshot, full))
            return digests

        return self._read(read)

    def tenants(self) -> list[str]:
        return self._read(lambda snapshot: sorted(m.tenant for m in self._all_manifests(snapshot) if m.n))

    def scan(self, tenant: str = DEFAULT_TENANT) -> Iterator[tuple[list[Document], Vector]]:

        def read(after: int, count: int) -> list[tuple[Any, ...]]:
            def page(snapshot: _Snapshot) -> list[tuple[Any, ...]]:
                visible = replace(self._visible(snapshot, tenant), above=after)
                rows = self._store.select(visible, count, snapshot.timestamp(), ("label", "body", "vector"))
                return [(r.key, r.vector, *c) for r, c in zip(rows, self._columns(snapshot, rows), strict=True)]

            return self._read(page)

        return index_checks.scan_pages(read, np.stack)

    def check(self) -> list[str]:

        def read(snapshot: _Snapshot) -> list[str]:
            manifests = {m.tenant: m for m in self._all_manifests(snapshot)}
            dim = self._opened().dim
            faults = index_checks.check_tenants(
                sorted(manifests), lambda t: manifests[t].moments(dim), lambda t: self._vectors(snapshot, t)
            )
            faults += index_checks.check_documents(c for t in sorted(manifests) for c in self._documents(snapshot, t))
            if not snapshot.record.holder and (orphans := self._count_orphans(snapshot, manifests)):
                faults.append(f"{orphans} rows belong to no known tenant: run 'casemate index --rebuild'")
            return faults

        return self._read(read, attempts=2)

    def rebuild(self) -> None:
        """See ``Index.rebuild``. Other writers wait."""
        with self._transaction() as (transaction, snapshot):
            dim = self._opened().dim
            tenants = [manifest.tenant for manifest in self._all_manifests(snapshot)]
            moments = {t: index_checks.compute_moments(self._vectors(snapshot, t), dim) for t in tenants}
            self._commit(transaction, snapshot, moments, [])

    def clear(self) -> None:
        self._store.connect()
        with self._writing:
            self._reset(None)
            self._store.drop()

    def close(self) -> None:
        self._reset(None)
        self._store.close()

    def _opened(self) -> IndexDescriptor:
        if self._descriptor is None:
            problem = f"{self._store.where}: the index is not open"
            raise BackendError(problem, backend=self._store.backend, retryable=False)
        return self._descriptor

    def _reset(self, descriptor: IndexDescriptor | None) -> None:
        self._descriptor, self._latest, self._manifests, self._moments = descriptor, None, (-1, {}), {}

    def _bind(self, fingerprint: str, dim: int) -> None:
        """Binds to the current generation, which must be of this embedder."""
        found = self._store.descriptor()
        if found is None or (found.fingerprint, found.dim) != (fingerprint, dim):
            raise index_checks.embedder_mismatch(self._store.where, found.fingerprint if found else None, fingerprint)
        if not self._writing.acquire(blocking=False):  # a write must end in the generation in which it began
            problem = f"{self._store.where} was cleared and created again during this call; try again"
            raise BackendError(problem, backend=self._store.backend, retryable=True)
        try:
            self._store.use(found)
            self._reset(found)
        finally:
            self._writing.release()

    def _commit_record(self) -> CommitRecord:
        """The current commit record. Follows a new generation of the same embedder."""
        descriptor = self._opened()
        record = self._store.commit_record()
        if record is None:
            self._bind(descriptor.fingerprint, descriptor.dim)
            record = self._store.commit_record()
        if record is None:
            raise DataError(
                f"{self._store.where}: parts of the index were deleted or renamed; restore them, or run "
                "'casemate index --rebuild'"
            )
        return record

    def _read(self, read: Callable[[_Snapshot], Result], attempts: int = READ_ATTEMPTS) -> Result:
        """Reads one committed state. After ``attempts`` conflicts it blocks writers."""
        for _ in range(attempts):
            record, failure = self._commit_record(), None
            try:
                result = read(_Snapshot(record, partial(self._timestamp, record)))
            except CasemateError as error:
                failure = error
            now = self._commit_record()
            if now == record or (record.holder and now.committed == record.committed):
                if failure:
                    raise failure
                return result
        with self._transaction() as (_, snapshot):
            return read(snapshot)

    @contextmanager
    def _transaction(self) -> Iterator[tuple[WriteTransaction, _Snapshot]]:
        """A write transaction, and the state before it."""
        self._opened()
        transaction = write_transaction(self._store, self._lease, self._commit_record, self._select_manifests)
        with self._writing, transaction as work:
            yield work, _Snapshot(self._lease.record, lambda: work.timestamp)

    def _timestamp(self, record: CommitRecord) -> Any:
        """The read timestamp for a commit record: one per state, because the first read with a new one may wait."""
        latest = self._latest
        if latest is None or latest[0].committed != record.committed or not (record.holder or latest[0] == record):
            latest = self._latest = record, self._store.read_timestamp()
        return latest[1]

    def _visible(self, snapshot: _Snapshot, tenant: str) -> RowFilter:
        record = snapshot.record
        if not record.holder:
            return RowFilter(hash_text(tenant))
        manifest = self._manifest(snapshot, tenant)
        removed = manifest.tombstones if manifest and manifest.transaction == record.committed else []
        return RowFilter(hash_text(tenant), below=first_key(record.committed + 1), without=removed)

    def _pages(self, snapshot: _Snapshot, rows: RowFilter, columns: Collection[str]) -> Iterator[list[StoredRow]]:
        while page := self._store.select(rows, PAGE, snapshot.timestamp(), columns):
            yield page
            rows = replace(rows, above=page[-1].key)

    def _vectors(self, snapshot: _Snapshot, tenant: str) -> Iterator[tuple[Keys, Vector]]:
        for rows in self._pages(snapshot, self._visible(snapshot, tenant), ("vector",)):
            yield np.array([row.key for row in rows], np.int64), np.stack([row.vector for row in rows])

    def _documents(self, snapshot: _Snapshot, tenant: str) -> Iterator[Sequence[str]]:
        for rows in self._pages(snapshot, self._visible(snapshot, tenant), ("label", "body")):
            yield from self._columns(snapshot, rows)

    def _count_orphans(self, snapshot: _Snapshot, tenants: Collection[str]) -> int:
        """Number of visible rows that belong to none of the tenants."""
        known = {MANIFEST, CONTINUATION, *map(hash_text, tenants)}
        return sum(r.tenant not in known for rows in self._pages(snapshot, RowFilter(), ("tenant",)) for r in rows)

    def _nearest(self, snapshot: _Snapshot, q: Vector, k: int, tenant: str) -> tuple[list[StoredRow], Float64]:
        """The k nearest rows with float64 scores. Fetches more rows while float32 rounding may have misordered them."""
        store, visible = self._store, self._visible(snapshot, tenant)
        if k > store.max_hits:
            return self._nearest_of_all(snapshot, q, k, tenant)
        limit = min(max(k + OVERSAMPLING, round(k * store.overfetch)), store.max_hits)
        while True:
            rows = store.nearest(visible, q, limit, snapshot.timestamp()) if k else []
            s = inner_products(np.array([row.vector for row in rows], np.float32).reshape(-1, len(q)), q)
            keys, top = top_k(np.array([row.key for row in rows], np.int64), s, k)
            exhausted = len(rows) < limit or limit == store.max_hits or not store.exact
            if exhausted or s.min() < top[-1] - rounding_error_bound(q):
                by_key = {row.key: row for row in rows}
                return [by_key[key] for key in keys.tolist()], top
            limit = min(4 * limit, store.max_hits)

    def _nearest_of_all(self, snapshot: _Snapshot, q: Vector, k: int, tenant: str) -> tuple[list[StoredRow], Float64]:
        """As ``_nearest``, for more rows than the store returns at once: scores all vectors, page by page."""
        keys, top = np.empty(0, np.int64), np.empty(0)
        for page, vectors in self._vectors(snapshot, tenant):
            keys, top = top_k(np.append(keys, page), np.append(top, inner_products(vectors, q)), k)
        by_key: dict[int, StoredRow] = {}
        for i in range(0, len(keys), PAGE):
            some = RowFilter(keys=keys[i : i + PAGE].tolist())
            rows = self._store.select(some, PAGE, snapshot.timestamp(), ("label", "body"))
            by_key |= {row.key: row for row in rows}
        if len(by_key) < len(keys):  # another process removed rows meanwhile; the caller reads again
            problem = f"{self._store.where} changed during a search; try again"
            raise BackendError(problem, backend=self._store.backend, retryable=True)
        return [by_key[key] for key in keys.tolist()], top

    def _columns(self, snapshot: _Snapshot, rows: Sequence[StoredRow]) -> list[list[str]]:
        bodies: dict[int, str] = {}
        more = [key for row in rows for key in continuation_keys(row)]
        for i in range(0, len(more), PAGE):
            page = self._store.select(RowFilter(keys=more[i : i + PAGE]), PAGE, snapshot.timestamp(), ("body",))
            bodies.update((row.key, row.body) for row in page)
        return [decode_columns(row, [bodies.get(key, "") for key in continuation_keys(row)]) for row in rows]

    def _manifest(self, snapshot: _Snapshot, tenant: str) -> TenantManifest | None:
        """The tenant's current manifest. None: it never had a document."""
        committed, manifests = self._manifests
        if committed != snapshot.record.committed or len(manifests) >= CACHED_TENANTS:
            committed, manifests = self._manifests = snapshot.record.committed, {}
        if tenant not in manifests:
            rows = RowFilter(MANIFEST, below=first_key(committed + 1), sources=[hash_text(tenant)], ids=["0"])
            found = [*self._select_manifests(rows, snapshot.timestamp())]
            manifests[tenant] = found[-1] if found else None  # one assignment: other threads read this dictionary
        return manifests[tenant]

    def _all_manifests(self, snapshot: _Snapshot) -> list[TenantManifest]:
        rows = RowFilter(MANIFEST, below=first_key(snapshot.record.committed + 1), ids=["0"])
        return list({m.tenant: m for m in self._select_manifests(rows, snapshot.timestamp())}.values())

    def _select_manifests(self, rows: RowFilter, timestamp: Any = None) -> Iterator[TenantManifest]:
        """The matching manifests, oldest first."""
        timestamp = self._store.read_timestamp() if timestamp is None else timestamp

        def read(keys: Sequence[int]) -> list[str]:
            return [row.body for row in self._store.select(RowFilter(keys=keys), len(keys), timestamp, ("body",))]

        while page := self._store.select(rows, MANIFEST_PAGE, timestamp, ("body",)):
            yield from (TenantManifest(row.key, row.body, read) for row in page)
            rows = replace(rows, above=page[-1].key)

    def _moments_at(self, snapshot: _Snapshot, tenant: str) -> CorpusMoments:
        """The tenant's moments, cached by transaction."""
        dim, manifest = self._opened().dim, self._manifest(snapshot, tenant)
        if manifest is None:
            return CorpusMoments.empty(dim)
        key, cache = (tenant, manifest.transaction), self._moments
        if key not in cache:
            if len(cache) >= CACHED_TENANTS:
                cache.clear()
            cache[key] = manifest.moments(dim)
        return cache[key]

    def _rows_of(self, snapshot: _Snapshot, sources: Collection[str], tenant: str) -> tuple[CorpusMoments, list[int]]:
        """Moments of the sources' stored vectors, bit by bit, and the keys of all their rows."""
        moments, keys = CorpusMoments.empty(self._opened().dim), []
        hashes = [hash_text(source) for source in set(sources)]
        for i in range(0, len(hashes), PAGE):
            some = replace(self._visible(snapshot, tenant), sources=hashes[i : i + PAGE])
            for rows in self._pages(snapshot, some, ("label", "vector")):
                moments += CorpusMoments.of(np.stack([row.vector for row in rows]))
                keys += [key for row in rows for key in (row.key, *continuation_keys(row))]
        return moments, keys

    def _require_new_ids(
        self, snapshot: _Snapshot, documents: Sequence[Document], removed: Collection[int], tenant: str
    ) -> None:
        """Raises ``DataError`` if a document of another source has one of the ids."""
        ids = {hash_text(d.id): d.id for d in documents}
        hashes = list(ids)
        for i in range(0, len(hashes), PAGE):
            some = replace(self._visible(snapshot, tenant), ids=hashes[i : i + PAGE])
            clash = [row for rows in self._pages(snapshot, some, ("id",)) for row in rows if row.key not in removed]
            if clash:
                raise index_checks.duplicate_id(ids[clash[0].id])

    def _commit(
        self,
        transaction: WriteTransaction,
        snapshot: _Snapshot,
        moments: Mapping[str, CorpusMoments],
        tombstones: Sequence[int],
    ) -> None:
        """Inserts the manifests and commits. The documents are inserted already."""
        vector = np.eye(1, self._opened().dim, dtype=np.float32)[0]
        removed: KeyRanges = []
        for tenant, m in moments.items():
            old = self._manifest(snapshot, tenant)
            ranges = key_ranges([*tombstones, *(old.keys if old else ())])
            bodies = encode_manifest(tenant, m, ranges)
            keys = transaction.allocate_keys(len(bodies))
            transaction.insert(
                [
                    StoredRow(key, MANIFEST, hash_text(tenant), str(i), "", body, vector)
                    for i, (key, body) in enumerate(zip(keys, bodies, strict=True))
                ]
            )
            removed += ranges
        transaction.commit(removed)
