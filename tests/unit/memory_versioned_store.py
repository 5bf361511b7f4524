"""A ``VersionedStore`` in memory that can fail at any call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from casemate.backends.mvcc.index import MvccIndex
from casemate.backends.mvcc.versioned_store import CommitRecord, IndexDescriptor, RowFilter, StoredRow
from casemate.errors import BackendError


class MemoryServer:
    """The state of the server, shared by its connections."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.descriptor: IndexDescriptor | None = None
        self.records: dict[str, CommitRecord] = {}
        self.rows: dict[str, dict[int, StoredRow]] = {}


class MemoryStore:
    """One connection to a server. ``before`` is called with the name of each call, and may raise."""

    backend, where, exact, max_hits, overfetch = "memory", "memory", True, 10_000, 1.0

    def __init__(self, server: MemoryServer) -> None:
        self.server = server
        self.generation = ""
        self.before: Callable[[str], None] = lambda call: None
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self.before(name)

    def connect(self) -> None:
        self._call("connect")

    def close(self) -> None:
        pass

    def descriptor(self) -> IndexDescriptor | None:
        self._call("descriptor")
        return self.server.descriptor

    def create(self, descriptor: IndexDescriptor, record: CommitRecord) -> None:
        self._call("create")
        with self.server.lock:
            if self.server.descriptor is None:
                self.server.descriptor = descriptor
                self.server.records[descriptor.generation] = record
                self.server.rows[descriptor.generation] = {}

    def drop(self) -> None:
        self._call("drop")
        with self.server.lock:
            self.server.descriptor = None
            self.server.records.clear()
            self.server.rows.clear()

    def use(self, descriptor: IndexDescriptor) -> None:
        self.generation = descriptor.generation

    def commit_record(self) -> CommitRecord | None:
        self._call("commit_record")
        return self.server.records.get(self.generation)

    def compare_and_swap(self, old: CommitRecord, new: CommitRecord) -> None:
        self._call("compare_and_swap")
        with self.server.lock:
            if self.server.records.get(self.generation) == old:
                self.server.records[self.generation] = new

    def read_timestamp(self) -> Any:
        return 0

    @property
    def _rows(self) -> dict[int, StoredRow]:
        try:
            return self.server.rows[self.generation]
        except KeyError:
            raise BackendError("the collection is gone", backend="memory", retryable=False) from None

    def insert(self, rows: Sequence[StoredRow]) -> None:
        self._call("insert")
        for row in rows:  # one by one: a killed server may stop between two
            with self.server.lock:
                self._rows[row.key] = row
            self._call("insert a row")

    def delete(self, keys: Sequence[int]) -> None:
        self._call("delete")
        for key in keys:
            with self.server.lock:
                self._rows.pop(key, None)
            self._call("delete a row")

    def select(self, rows: RowFilter, limit: int, timestamp: Any, columns: Collection[str]) -> list[StoredRow]:
        self._call("select")
        with self.server.lock:
            return [self._rows[key] for key in sorted(self._rows) if matches(self._rows[key], rows)][:limit]

    def nearest(self, rows: RowFilter, q: np.ndarray, limit: int, timestamp: Any) -> list[StoredRow]:
        self._call("nearest")
        with self.server.lock:
            matching = [row for row in self._rows.values() if matches(row, rows)]
        return sorted(matching, key=lambda row: -float(row.vector @ q))[:limit]


def matches(row: StoredRow, rows: RowFilter) -> bool:
    """Whether a row meets the conditions."""
    return (
        (not rows.tenant or row.tenant == rows.tenant)
        and rows.above < row.key < rows.below
        and not any(a <= row.key <= b for a, b in rows.without)
        and (rows.sources is None or row.source in rows.sources)
        and (rows.ids is None or row.id in rows.ids)
        and (rows.keys is None or row.key in rows.keys)
    )


class MemoryIndex(MvccIndex):
    """An ``MvccIndex`` in memory."""

    def __init__(self, server: MemoryServer, timeout_s: float = 10) -> None:
        self.store = MemoryStore(server)
        self._use_store(self.store, timeout_s)
