"""The operations that ``MvccIndex`` needs from a vector store, and the values they exchange."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from casemate.types import Vector

ROW_BITS = 20
"""Low bits of a key that number the rows of a transaction. Keys fit into a float64, in which some servers compare."""
KEY_LIMIT = 1 << 62  # greater than every key
PAGE = 1024  # rows per read, insert or delete


class IndexDescriptor(NamedTuple):
    """What an index was created for. Each creation gets its own random ``generation``."""

    generation: str
    fingerprint: str
    dim: int


class CommitRecord(NamedTuple):
    """The single value that commits a transaction and carries the writer lease.

    Attributes:
        committed: Number of the last committed transaction.
        sequence: Increases with each exchange. The value at the start of a transaction becomes its number.
        holder: Random id of the lease holder. Empty: no writer, and every stored row is visible.
        lease_ms: The lease expires after this time without an exchange.
    """

    committed: int
    sequence: int
    holder: str
    lease_ms: int


class StoredRow(NamedTuple):
    """One row. Tenant, source and id are hashes of fixed length, so a filter never contains text from a document."""

    key: int
    tenant: str
    source: str
    id: str
    label: str
    body: str
    vector: Vector


@dataclass(frozen=True)
class RowFilter:
    """A conjunction of conditions on rows: an empty tenant is any; ``above`` and ``below`` exclude the limits.

    ``without`` lists the first and last key of each excluded range. ``keys`` excludes all other conditions. Tenants,
    sources and ids are hashes.
    """

    tenant: str = ""
    above: int = -1
    below: int = KEY_LIMIT
    without: Sequence[tuple[int, int]] = ()
    sources: Sequence[str] | None = None
    ids: Sequence[str] | None = None
    keys: Sequence[int] | None = None


class VersionedStore(Protocol):
    """A vector store. Each method raises ``BackendError`` or ``DataError`` and no other error.

    Attributes:
        backend: Plug-in name.
        where: Location for messages, without secrets.
        exact: Whether ``nearest`` misses no row, apart from float32 rounding.
        max_hits: Largest number of rows that ``nearest`` returns. For more, ``MvccIndex`` reads all rows in pages.
        overfetch: Factor of rows to fetch above k, for scoring in float64.
    """

    backend: str
    where: str
    exact: bool
    max_hits: int
    overfetch: float

    def connect(self) -> None:
        """Connects to the server. Idempotent."""

    def close(self) -> None:
        """Closes the connection."""

    def descriptor(self) -> IndexDescriptor | None:
        """Descriptor of the stored index. None: there is no index."""

    def create(self, descriptor: IndexDescriptor, record: CommitRecord) -> None:
        """Creates an index with its first commit record. Of concurrent calls, the first one wins."""

    def drop(self) -> None:
        """Deletes the index."""

    def use(self, descriptor: IndexDescriptor) -> None:
        """Binds the methods below to this generation. They fail once it is dropped."""

    def commit_record(self) -> CommitRecord | None:
        """The current commit record, linearizable with ``compare_and_swap``. None: the generation was dropped."""

    def compare_and_swap(self, old: CommitRecord, new: CommitRecord) -> None:
        """Replaces the commit record atomically if it equals ``old``. Read it afterwards to learn the outcome."""

    def read_timestamp(self) -> Any:
        """A value that makes reads see everything written before this call."""

    def insert(self, rows: Sequence[StoredRow]) -> None:
        """Inserts at most ``PAGE`` rows."""

    def delete(self, keys: Sequence[int]) -> None:
        """Deletes at most ``PAGE`` rows. Unknown keys are ignored."""

    def select(self, rows: RowFilter, limit: int, timestamp: Any, columns: Collection[str]) -> list[StoredRow]:
        """The first ``limit`` matching rows by key. Columns that are not requested may be empty."""

    def nearest(self, rows: RowFilter, q: Vector, limit: int, timestamp: Any) -> list[StoredRow]:
        """At most ``limit`` matching rows with the largest inner product: label, body and vector."""
