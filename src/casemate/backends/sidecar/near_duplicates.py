"""Finds near-duplicates among any number of rows in bounded memory, by locality-sensitive hashing (SimHash).

Two vectors at a small angle have sketches that differ in few bits. Sorted by different parts of their bits, they are
neighbors in one order or another (Charikar 2002). Neighbors with similar sketches are compared by their vectors. So a
pair may be missed, but every reported pair is a near-duplicate.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.backends.sidecar.row_inventory import SKETCH_BITS

SORT_ORDERS = 16  # sort orders of the sketches: one per 16 bits
WINDOW = 8  # following neighbors to compare each sketch with
SORT_ROWS = 1 << 18  # rows per in-memory sort
PAIR_BATCH = 512  # pairs of vectors per read
MAX_REJECTED_PAIRS = 1 << 20  # size of the cache of pairs that are not near-duplicates
MAX_GROUP_SOURCES = 20
"""Groups of more sources are ignored: their text is common in the collection, so hiding one source hides nothing."""

RECORD = np.dtype([("age", "<i8"), ("words", "<u2", (SKETCH_BITS // 16,))])
_BITS = np.array([i.bit_count() for i in range(1 << 16)], np.uint8)
Records: TypeAlias = npt.NDArray[np.void]
PairCosines: TypeAlias = Callable[[Sequence[tuple[int, int]]], Sequence[float]]
"""Returns the exact cosines of pairs of rows, by age. NaN: a row is missing, or the pair must not be compared."""


class NearDuplicateFinder:
    """Groups rows whose exact cosine is at least the threshold, in (0, 1] (union-find)."""

    def __init__(self, cosines: PairCosines, threshold: float) -> None:
        self._cosines, self._threshold = cosines, threshold
        self._parent: dict[int, int] = {}
        self._rejected: set[tuple[int, int]] = set()
        share = math.acos(min(threshold, 1.0)) / math.pi
        self._limit = math.ceil(SKETCH_BITS * share + 2 * math.sqrt(SKETCH_BITS * share * (1 - share)))

    def search(self, pages: Iterable[Sequence[tuple[int, bytes]]]) -> None:
        """Finds pairs among all rows, given as (age, sketch) by increasing age."""
        with tempfile.TemporaryFile() as file:
            count = sum(file.write(_records(page).tobytes()) for page in pages) // RECORD.itemsize
            if count < 2:
                return
            for order in range(SORT_ORDERS):
                for part in _sorted_parts(file, count, order):
                    self._compare(part, order)

    def groups(self) -> list[list[int]]:
        """The sorted ages of each group of near-duplicates, the group with the oldest row first."""
        groups: dict[int, list[int]] = {}
        for age in sorted(self._parent):
            groups.setdefault(self._root(age), []).append(age)
        return list(groups.values())

    def _compare(self, part: Records, order: int) -> None:
        """Compares each row with its following neighbors in one order."""
        words = part["words"]
        turned = np.roll(words, -order, axis=1)
        ranks = np.lexsort((part["age"], *(turned[:, i] for i in (3, 2, 1, 0))))
        sorted_words, ages = words[ranks], part["age"][ranks]
        for step in range(1, min(WINDOW, len(part) - 1) + 1):
            differ = _count_ones(sorted_words[step:] ^ sorted_words[:-step])
            near = np.flatnonzero(differ <= self._limit)
            pairs = np.sort(np.stack([ages[near], ages[near + step]], axis=1), axis=1)
            self._unite([(int(a), int(b)) for a, b in pairs])

    def _unite(self, pairs: Sequence[tuple[int, int]]) -> None:
        for start in range(0, len(pairs), PAIR_BATCH):
            some = [
                p for p in pairs[start : start + PAIR_BATCH] if p not in self._rejected and not self._same_group(*p)
            ]
            for (a, b), cosine in zip(some, self._cosines(some) if some else (), strict=True):
                if cosine >= self._threshold:
                    low, high = sorted((self._root(a), self._root(b)))
                    self._parent[high] = low
                    self._parent.setdefault(low, low)
                elif len(self._rejected) < MAX_REJECTED_PAIRS:
                    self._rejected.add((a, b))

    def _same_group(self, a: int, b: int) -> bool:
        return a in self._parent and b in self._parent and self._root(a) == self._root(b)

    def _root(self, age: int) -> int:
        root = age
        while (above := self._parent.get(root, root)) != root:
            root = above
        while self._parent.get(age, root) != root:  # path compression
            age, self._parent[age] = self._parent[age], root
        return root


def _records(page: Sequence[tuple[int, bytes]]) -> Records:
    records: Records = np.empty(len(page), RECORD)
    records["age"] = [age for age, _ in page]
    records["words"] = np.frombuffer(b"".join(s for _, s in page), "<u2").reshape(len(page), -1)
    return records


def _sorted_parts(file: IO[bytes], count: int, order: int) -> Iterator[Records]:
    """All rows as parts of at most ``SORT_ROWS`` neighbors in one order (bucket sort on disk)."""
    if count <= SORT_ROWS:
        yield _read(file, 0, count)
        return
    sizes = np.zeros(1 << 16, np.int64)
    for block in _blocks(file, count):
        sizes += np.bincount(block["words"][:, order], minlength=1 << 16)
    part = np.zeros(1 << 16, np.int64)  # part of each value of the 16 leading bits
    filled = number = 0
    for value, size in enumerate(sizes.tolist()):
        if filled and filled + size > SORT_ROWS:
            filled, number = 0, number + 1
        part[value], filled = number, filled + size
    ends = np.cumsum(np.bincount(part, sizes, number + 1)).astype(np.int64).tolist()
    with tempfile.TemporaryFile() as sorted_file:
        begins = [0, *ends[:-1]]
        offsets = list(begins)
        for block in _blocks(file, count):
            owner = part[block["words"][:, order]]
            for i in np.unique(owner).tolist():
                some = block[owner == i]
                sorted_file.seek(offsets[i] * RECORD.itemsize)
                sorted_file.write(some.tobytes())
                offsets[i] += len(some)
        for begin, end in zip(begins, ends, strict=True):
            for start in range(begin, end, SORT_ROWS):  # several only if very many sketches are equal
                yield _read(sorted_file, start, min(SORT_ROWS, end - start))


def _blocks(file: IO[bytes], count: int) -> Iterator[Records]:
    for start in range(0, count, SORT_ROWS):
        yield _read(file, start, min(SORT_ROWS, count - start))


def _read(file: IO[bytes], start: int, count: int) -> Records:
    file.seek(start * RECORD.itemsize)
    records: Records = np.frombuffer(file.read(count * RECORD.itemsize), RECORD)
    return records


def _count_ones(words: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    total: npt.NDArray[np.int64] = _BITS[words].sum(axis=1, dtype=np.int64)
    return total


def canonical_sources(
    groups: Sequence[Sequence[int]], sources: Callable[[Collection[int]], Mapping[int, str]]
) -> tuple[list[tuple[int, str]], int, int]:
    """Assigns the source of the oldest row to each row of a group; ``sources`` returns that of each row, by age.

    Returns:
        (age, source) for each row of groups with 2 to ``MAX_GROUP_SOURCES`` sources; the number of such groups; and the
        number of groups with more sources.
    """
    assigned, kept, widespread = [], 0, 0
    for group in groups:
        own = sources(group)
        distinct = len(set(own.values()))
        widespread += distinct > MAX_GROUP_SOURCES
        if 1 < distinct <= MAX_GROUP_SOURCES:
            kept += 1
            first = own[min(own)]
            assigned += [(age, first) for age in own]
    return assigned, kept, widespread
