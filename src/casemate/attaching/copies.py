"""Near-copies among any number of rows, in bounded memory: sketches in a file, sorted several ways.

Two vectors at a small angle have sketches that differ in few bits. Sorted by different stretches of their bits, they
come to stand beside each other in one order or another (Charikar 2002); whoever stands near is compared, and whoever is
near by sketch is compared by its vectors. So a pair may be missed, and is never made up.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.attaching.tally import SKETCH

ORDERS = 16
"""In how many ways the sketches are sorted: one for each 16 of their bits."""
WINDOW = 8
"""With how many that follow each is compared."""
RANGE = 1 << 18
"""Rows that are sorted at a time."""
PAIRS = 512
"""Pairs whose vectors are read at a time."""
REMEMBERED = 1 << 20
"""Pairs that are remembered for being no copies."""
WIDESPREAD = 20
"""Sources above which a text is common knowledge of the collection: hiding one of them would hide nothing."""

RECORD = np.dtype([("age", "<i8"), ("words", "<u2", (SKETCH // 16,))])
_BITS = np.array([i.bit_count() for i in range(1 << 16)], np.uint8)
Ages: TypeAlias = npt.NDArray[np.int64]
Records: TypeAlias = npt.NDArray[np.void]
Cosines: TypeAlias = Callable[[Sequence[tuple[int, int]]], Sequence[float]]
"""The true cosines of some pairs of rows, by age; NaN where a row is gone, or the two must not be compared."""


class Copies:
    """Groups of rows that are near-copies.

    Args:
        cosines: Tells how near two rows are.
        threshold: Cosine from which two rows are near-copies, in (0, 1].
    """

    def __init__(self, cosines: Cosines, threshold: float) -> None:
        self._cosines, self._threshold = cosines, threshold
        self._parent: dict[int, int] = {}
        self._apart: set[tuple[int, int]] = set()
        share = math.acos(min(threshold, 1.0)) / math.pi
        self._limit = math.ceil(SKETCH * share + 2 * math.sqrt(SKETCH * share * (1 - share)))

    def look(self, pages: Iterable[Sequence[tuple[int, bytes]]]) -> None:
        """Looks through all rows: age and sketch, by increasing age."""
        with tempfile.TemporaryFile() as file:
            count = sum(file.write(_records(page).tobytes()) for page in pages) // RECORD.itemsize
            if count < 2:
                return
            for order in range(ORDERS):
                for part in _ranges(file, count, order):
                    self._compare(part, order)

    def groups(self) -> list[list[int]]:
        """The ages of each group of near-copies, each sorted, the oldest group first."""
        found: dict[int, list[int]] = {}
        for age in sorted(self._parent):
            found.setdefault(self._root(age), []).append(age)
        return list(found.values())

    def _compare(self, part: Records, order: int) -> None:
        """Compares each row with those that follow it in one order."""
        words = part["words"]
        turned = np.roll(words, -order, axis=1)
        ranks = np.lexsort((part["age"], *(turned[:, i] for i in (3, 2, 1, 0))))
        sorted_words, ages = words[ranks], part["age"][ranks]
        for step in range(1, min(WINDOW, len(part) - 1) + 1):
            differ = _ones(sorted_words[step:] ^ sorted_words[:-step])
            near = np.flatnonzero(differ <= self._limit)
            pairs = np.sort(np.stack([ages[near], ages[near + step]], axis=1), axis=1)
            self._unite([(int(a), int(b)) for a, b in pairs])

    def _unite(self, pairs: Sequence[tuple[int, int]]) -> None:
        for start in range(0, len(pairs), PAIRS):
            some = [p for p in pairs[start : start + PAIRS] if p not in self._apart and not self._together(*p)]
            for (a, b), cosine in zip(some, self._cosines(some) if some else (), strict=True):
                if cosine >= self._threshold:
                    low, high = sorted((self._root(a), self._root(b)))
                    self._parent[high] = low
                    self._parent.setdefault(low, low)
                elif len(self._apart) < REMEMBERED:
                    self._apart.add((a, b))

    def _together(self, a: int, b: int) -> bool:
        return a in self._parent and b in self._parent and self._root(a) == self._root(b)

    def _root(self, age: int) -> int:
        root = age
        while (above := self._parent.get(root, root)) != root:
            root = above
        while self._parent.get(age, root) != root:  # shorten the way for the next
            age, self._parent[age] = self._parent[age], root
        return root


def _records(page: Sequence[tuple[int, bytes]]) -> Records:
    records: Records = np.empty(len(page), RECORD)
    records["age"] = [age for age, _ in page]
    records["words"] = np.frombuffer(b"".join(s for _, s in page), "<u2").reshape(len(page), -1)
    return records


def _ranges(file: IO[bytes], count: int, order: int) -> Iterator[Records]:
    """All rows in parts of neighbours in one order, each of ``RANGE`` rows at most."""
    if count <= RANGE:
        yield _read(file, 0, count)
        return
    sizes = np.zeros(1 << 16, np.int64)
    for block in _blocks(file, count):
        sizes += np.bincount(block["words"][:, order], minlength=1 << 16)
    part = np.zeros(1 << 16, np.int64)  # which part each value of the first 16 bits falls into
    filled = number = 0
    for value, size in enumerate(sizes.tolist()):
        if filled and filled + size > RANGE:
            filled, number = 0, number + 1
        part[value], filled = number, filled + size
    ends = np.cumsum(np.bincount(part, sizes, number + 1)).astype(np.int64).tolist()
    with tempfile.TemporaryFile() as sorted_file:
        begins = [0, *ends[:-1]]
        places = list(begins)
        for block in _blocks(file, count):
            owner = part[block["words"][:, order]]
            for i in np.unique(owner).tolist():
                some = block[owner == i]
                sorted_file.seek(places[i] * RECORD.itemsize)
                sorted_file.write(some.tobytes())
                places[i] += len(some)
        for begin, end in zip(begins, ends, strict=True):
            for start in range(begin, end, RANGE):  # more than one only if very many are alike
                yield _read(sorted_file, start, min(RANGE, end - start))


def _blocks(file: IO[bytes], count: int) -> Iterator[Records]:
    for start in range(0, count, RANGE):
        yield _read(file, start, min(RANGE, count - start))


def _read(file: IO[bytes], start: int, count: int) -> Records:
    file.seek(start * RECORD.itemsize)
    found: Records = np.frombuffer(file.read(count * RECORD.itemsize), RECORD)
    return found


def _ones(words: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """Set bits of each row."""
    total: npt.NDArray[np.int64] = _BITS[words].sum(axis=1, dtype=np.int64)
    return total


def canonical(
    groups: Sequence[Sequence[int]], sources: Callable[[Collection[int]], Mapping[int, str]]
) -> tuple[list[tuple[int, str]], int, int]:
    """Which rows are copies of which source.

    Args:
        groups: See ``Copies.groups``.
        sources: Gives the source of each row, by age.

    Returns:
        Age and source, that of the oldest in its group, for each row of groups of 2 to ``WIDESPREAD`` sources; how many
        such groups there are; and how many of more sources.
    """
    twins, kept, widespread = [], 0, 0
    for group in groups:
        own = sources(group)
        distinct = len(set(own.values()))
        widespread += distinct > WIDESPREAD
        if 1 < distinct <= WIDESPREAD:
            kept += 1
            first = own[min(own)]
            twins += [(age, first) for age in own]
    return twins, kept, widespread
