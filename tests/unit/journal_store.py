"""A store in memory that can break off at any call: what an index by journal is tried against."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from casemate.errors import BackendError
from casemate.journal import JournaledIndex
from casemate.journal.store import Anchor, Mark, Row, Which


class Place:
    """What the server keeps."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.anchor: Anchor | None = None
        self.marks: dict[str, Mark] = {}
        self.rows: dict[str, dict[int, Row]] = {}


class MemoryStore:
    """One handle on a place. ``before`` is told of each call, with its name, and may raise."""

    backend, where, exact, reach, overfetch = "memory", "memory", True, 10_000, 1.0

    def __init__(self, place: Place) -> None:
        self.place = place
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

    def anchor(self) -> Anchor | None:
        self._call("anchor")
        return self.place.anchor

    def found(self, anchor: Anchor, mark: Mark) -> None:
        self._call("found")
        with self.place.lock:
            if self.place.anchor is None:
                self.place.anchor = anchor
                self.place.marks[anchor.generation] = mark
                self.place.rows[anchor.generation] = {}

    def erase(self) -> None:
        self._call("erase")
        with self.place.lock:
            self.place.anchor = None
            self.place.marks.clear()
            self.place.rows.clear()

    def use(self, anchor: Anchor) -> None:
        self.generation = anchor.generation

    def mark(self) -> Mark | None:
        self._call("mark")
        return self.place.marks.get(self.generation)

    def swap(self, old: Mark, new: Mark) -> None:
        self._call("swap")
        with self.place.lock:
            if self.place.marks.get(self.generation) == old:
                self.place.marks[self.generation] = new

    def moment(self) -> Any:
        return 0

    @property
    def _rows(self) -> dict[int, Row]:
        try:
            return self.place.rows[self.generation]
        except KeyError:
            raise BackendError("the collection is gone", backend="memory", retryable=False) from None

    def insert(self, rows: Sequence[Row]) -> None:
        self._call("insert")
        for row in rows:  # one after the other, as a server that is killed might
            with self.place.lock:
                self._rows[row.key] = row
            self._call("insert a row")

    def delete(self, keys: Sequence[int]) -> None:
        self._call("delete")
        for key in keys:
            with self.place.lock:
                self._rows.pop(key, None)
            self._call("delete a row")

    def select(self, which: Which, limit: int, moment: Any, columns: Collection[str]) -> list[Row]:
        self._call("select")
        with self.place.lock:
            return [self._rows[key] for key in sorted(self._rows) if fits(self._rows[key], which)][:limit]

    def nearest(self, which: Which, q: np.ndarray, limit: int, moment: Any) -> list[Row]:
        self._call("nearest")
        with self.place.lock:
            rows = [row for row in self._rows.values() if fits(row, which)]
        return sorted(rows, key=lambda row: -float(row.vector @ q))[:limit]


def fits(row: Row, which: Which) -> bool:
    """Whether a row meets a condition."""
    return (
        (not which.tenant or row.tenant == which.tenant)
        and which.above < row.key < which.below
        and not any(a <= row.key <= b for a, b in which.without)
        and (which.sources is None or row.source in which.sources)
        and (which.ids is None or row.id in which.ids)
        and (which.keys is None or row.key in which.keys)
    )


class MemoryIndex(JournaledIndex):
    """An index by journal in memory."""

    def __init__(self, place: Place, timeout_s: float = 10) -> None:
        self.store = MemoryStore(place)
        self._begin(self.store, timeout_s)
