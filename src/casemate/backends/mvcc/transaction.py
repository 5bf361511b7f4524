"""Write transactions: the writer lease, and the rows of one transaction until it commits or is rolled back."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from casemate.backends.mvcc.manifest import KeyRanges, TenantManifest
from casemate.backends.mvcc.row_codec import MANIFEST
from casemate.backends.mvcc.versioned_store import PAGE, ROW_BITS, CommitRecord, RowFilter, StoredRow, VersionedStore
from casemate.errors import BackendError, CasemateError, DataError

MAX_WAIT = 3  # a writer waits for this many times the longer of its own lease and the holder's
POLL_S = 0.002, 0.03  # range of the random pause between two attempts to acquire the lease


def first_key(transaction: int) -> int:
    """The smallest key of a transaction."""
    return transaction << ROW_BITS


class WriterLease:
    """The exclusive right to write, held in the commit record and renewed by exchanging it.

    A waiting writer measures the lease on its own clock, from when it first read the current record, so clocks need
    not agree. One case is not prevented: a holder that is suspended for longer than its lease after checking the
    clock can still insert rows. They become visible without being in any moments, and ``check`` reports the count.
    Such a holder cannot commit, because the record has changed.
    """

    def __init__(self, store: VersionedStore, seconds: float) -> None:
        self._store, self._ms = store, round(1000 * seconds)
        self._record = CommitRecord(0, 0, "", 0)
        self._renewed = 0.0

    @property
    def record(self) -> CommitRecord:
        """The commit record as this writer last wrote it."""
        return self._record

    def acquire(self, read: Callable[[], CommitRecord]) -> bool:
        """Waits for the lease. Returns whether the previous holder left its transaction unfinished.

        Raises:
            BackendError: If other writers hold it for too long.
        """
        holder, begin = secrets.token_hex(6), time.monotonic()
        seen, since = read(), begin
        while True:
            now, record = time.monotonic(), read()
            if record != seen:
                seen, since = record, now
            expired = now - since > record.lease_ms / 1000
            if not record.holder or expired:
                new = CommitRecord(record.committed, record.sequence + 1, holder, self._ms)
                if self._exchange(record, new, read):
                    return bool(record.holder)
            if now - begin > MAX_WAIT * max(self._ms, record.lease_ms) / 1000:
                raise self._failure("another writer has held the lease for too long; try again")
            time.sleep(random.uniform(*POLL_S))

    def renew(self, read: Callable[[], CommitRecord]) -> None:
        """Renews the lease once a third of it has passed; ``BackendError``: it was lost."""
        if time.monotonic() - self._renewed > self._ms / 3000:
            self.write(self._record.committed, read)

    def write(self, committed: int, read: Callable[[], CommitRecord]) -> None:
        """Writes the number of the last committed transaction, which also renews the lease; errors as for ``renew``."""
        new = CommitRecord(committed, self._record.sequence + 1, self._record.holder, self._ms)
        if not self._exchange(self._record, new, read):
            raise self._failure("lost the lease: this writer paused for too long, and its changes were discarded")

    def release(self) -> None:
        """Releases the lease. If that fails, the next writer waits until it expires."""
        record = self._record
        with suppress(CasemateError):
            self._store.compare_and_swap(record, record._replace(sequence=record.sequence + 1, holder=""))

    def _exchange(self, old: CommitRecord, new: CommitRecord, read: Callable[[], CommitRecord]) -> bool:
        begin = time.monotonic()
        with suppress(CasemateError):  # a lost reply may have been a success: only the record itself decides
            self._store.compare_and_swap(old, new)
        if read() != new:
            return False
        self._record, self._renewed = new, begin
        return True

    def _failure(self, problem: str) -> BackendError:
        return BackendError(f"{self._store.where}: {problem}", backend=self._store.backend, retryable=True)


class WriteTransaction:
    """Rows that become visible together at commit, or never."""

    def __init__(self, store: VersionedStore, lease: WriterLease, read: Callable[[], CommitRecord]) -> None:
        self._store, self._lease, self._read = store, lease, read
        self.number = lease.record.sequence
        self._next = first_key(self.number)
        self._timestamp: Any = None

    @property
    def timestamp(self) -> Any:
        """For reads of the committed state, which no other writer changes now. Renews the lease when due."""
        self._lease.renew(self._read)
        if self._timestamp is None:
            self._timestamp = self._store.read_timestamp()
        return self._timestamp

    def allocate_keys(self, count: int) -> range:
        """New consecutive keys; ``DataError``: the transaction has too many rows."""
        self._next += count
        if self._next > first_key(self.number + 1):
            raise DataError(f"one change has more than {first_key(1):,} rows; add or remove fewer documents at a time")
        return range(self._next - count, self._next)

    def insert(self, rows: Sequence[StoredRow]) -> None:
        """Inserts rows that stay invisible until commit."""
        for i in range(0, len(rows), PAGE):
            self._lease.renew(self._read)
            self._store.insert(rows[i : i + PAGE])

    def commit(self, tombstones: KeyRanges) -> None:
        """Makes the inserted rows visible and the tombstoned ones invisible in one step, then deletes the latter."""
        self._lease.write(self.number, self._read)
        self.delete(tombstones)

    def delete(self, ranges: KeyRanges) -> None:
        """Deletes ranges of keys."""
        keys = [key for first, last in ranges for key in range(first, last + 1)]
        for i in range(0, len(keys), PAGE):
            self._lease.renew(self._read)
            self._store.delete(keys[i : i + PAGE])

    def recover(self, manifests: Callable[[RowFilter], Iterable[TenantManifest]]) -> None:
        """Deletes what a killed writer left: uncommitted rows, and the tombstoned rows of its committed transaction."""
        committed = self._lease.record.committed
        self.roll_back(committed + 1)
        last = RowFilter(MANIFEST, above=first_key(committed) - 1, below=first_key(committed + 1), ids=["0"])
        for manifest in manifests(last):
            self.delete(manifest.tombstones)

    def roll_back(self, transaction: int) -> None:
        """Deletes the rows of an uncommitted transaction and of all later ones."""
        uncommitted = RowFilter(above=first_key(transaction) - 1)
        while rows := self._store.select(uncommitted, PAGE, self._store.read_timestamp(), ()):
            self._lease.renew(self._read)
            self._store.delete([row.key for row in rows])


@contextmanager
def write_transaction(
    store: VersionedStore,
    lease: WriterLease,
    read: Callable[[], CommitRecord],
    manifests: Callable[[RowFilter], Iterable[TenantManifest]],
) -> Iterator[WriteTransaction]:
    """Holds the writer lease during the block, after recovery from a killed writer.

    A ``DataError`` rolls the transaction back. If the store itself fails, a request may still be in flight: the commit
    record stays as it is, and the next writer waits until the lease expires.
    """
    unfinished = lease.acquire(read)
    transaction = WriteTransaction(store, lease, read)
    try:
        if unfinished:
            transaction.recover(manifests)
        yield transaction
    except DataError:
        if lease.record.committed != transaction.number:
            with suppress(CasemateError):
                lease.write(lease.record.committed, read)  # a delayed request can no longer commit the transaction
                transaction.roll_back(transaction.number)
                lease.release()
        raise
    lease.release()
