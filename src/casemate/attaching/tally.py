"""One piece of a foreign collection in, what is kept of it out: a pure function, so that pieces may go to workers.

Tallies add up in the order of their pieces; ``run.py`` keeps that order, so the moments are the same to the last digit
however the pieces were spread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from casemate.collection import Piece, unit
from casemate.errors import ConfigError, DataError
from casemate.stats import CorpusMoments
from casemate.types import DEFAULT_TENANT, Document, Vector

SKETCH = 256
"""Bits of a sketch: on which side of so many random planes a vector lies."""
NAMED = 5
"""Ids that an error names."""


class Row(NamedTuple):
    """What is kept of a row: whose, its id, its source, its sketch, and 64 bits that change when the vector does."""

    tenant: str
    id: str
    source: str
    sketch: bytes
    mark: int


class Counts(NamedTuple):
    """How many rows there were, how many of them were not of unit length, and how many were left out and why."""

    rows: int = 0
    rescaled: int = 0
    textless: int = 0
    vectorless: int = 0

    def plus(self, other: Counts) -> Counts:
        """Those of both."""
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class Tally:
    """What is kept of a piece.

    Attributes:
        moments: By tenant.
        rows: One for each document.
        counts: For the summary.
        after: Where the scan goes on.
    """

    moments: Mapping[str, CorpusMoments]
    rows: Sequence[Row]
    counts: Counts
    after: str


@dataclass(frozen=True, slots=True)
class Grouping:
    """How documents find their source: what the collection says; else a field of the metadata; else the id; else none.

    Attributes:
        key: Of the metadata, whose value names the source. Empty: none.
        pattern: Regular expression; its first group in a document's id, or all it matches, names the source.
    """

    key: str = ""
    pattern: str = ""
    _compiled: re.Pattern[str] | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "_compiled", re.compile(self.pattern) if self.pattern else None)
        except re.error as error:
            raise ConfigError(f"source_pattern is {self.pattern!r}, which is no regular expression: {error}") from error

    def source(self, document: Document) -> str:
        """The source of one document.

        >>> Grouping(pattern="^(.*)#").source(Document("report.pdf#12", ""))
        'report.pdf'
        """
        if document.source != document.id:
            return document.source
        if self.key and (value := document.metadata.get(self.key)) not in (None, ""):
            return str(value)
        if self._compiled and (found := self._compiled.search(document.id)):
            return (found[1] if found.re.groups else found[0]) or document.id
        return document.id

    def told(self) -> str:
        """For the summary."""
        ways = [f"the metadata's {self.key!r}"] if self.key else []
        ways += [f"{self.pattern!r} in the id"] if self.pattern else []
        return " or ".join(ways)


def tally(piece: Piece, grouping: Grouping, dim: int) -> Tally:
    """What is kept of a piece: moments of the vectors at length 1, in float64, and a row for each document.

    Raises:
        DataError: If vectors are of another length, or have no direction; the message names the documents.
    """
    stored, rescaled = checked(piece, dim)
    names = piece.tenants or [DEFAULT_TENANT] * len(piece.documents)
    columns = zip(names, piece.documents, sketches(stored), marks(stored).tolist(), strict=True)
    rows = [Row(tenant, d.id, grouping.source(d), sketch, mark) for tenant, d, sketch, mark in columns]
    counts = Counts(len(rows), rescaled, piece.textless, piece.vectorless)
    return Tally(by_tenant(stored, names), rows, counts, piece.after)


def checked(piece: Piece, dim: int) -> tuple[Vector, int]:
    """The vectors of a piece at length 1, and how many were not.

    Raises:
        DataError: If one is of another length than ``dim``, or has no direction.
    """
    if np.ndim(piece.vectors) != 2 or (len(piece.documents) and piece.vectors.shape[1] != dim):
        raise DataError(f"vectors of {np.shape(piece.vectors)[1:]} numbers, where {dim} were expected")
    stored, rescaled, lost = unit(piece.vectors)
    if lost.any():
        raise without_direction([d.id for d, bad in zip(piece.documents, lost, strict=True) if bad])
    return stored, int(rescaled.sum())


def without_direction(ids: Sequence[str]) -> DataError:
    """What to raise for vectors that are zero or not finite."""
    return DataError(
        f"the vectors of {named(ids)} are zero or not finite, so no similarity can be trusted; "
        "embed these rows again, or leave them out with 'where'"
    )


def named(ids: Sequence[str]) -> str:
    """Some ids, for a message."""
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    return ", ".join(repr(i[:80]) for i in ids[:NAMED]) + more


def by_tenant(stored: Vector, tenants: Sequence[str]) -> dict[str, CorpusMoments]:
    """The moments of the vectors of each tenant, in order of appearance."""
    distinct = list(dict.fromkeys(tenants))
    if len(distinct) < 2:
        return {t: CorpusMoments.of(stored) for t in distinct}
    owner = np.array([distinct.index(t) for t in tenants])
    return {t: CorpusMoments.of(stored[owner == i]) for i, t in enumerate(distinct)}


def marks(stored: Vector) -> npt.NDArray[np.int64]:
    """64 bits of each vector, (n,): another vector has others but for one case in 2^64."""
    bits = np.ascontiguousarray(stored).view(np.uint32)
    if bits.shape[1] % 2:
        bits = np.pad(bits, ((0, 0), (0, 1)))
    pairs = np.ascontiguousarray(bits).view(np.uint64)
    found: npt.NDArray[np.int64] = (pairs @ _odd(pairs.shape[1])).view(np.int64)
    return found


def sketches(stored: Vector) -> list[bytes]:
    """On which side of ``SKETCH`` random planes each vector lies: two differ in a share of angle / pi of the bits."""
    packed = np.packbits(stored @ _planes(stored.shape[1]) > 0, axis=1).tobytes()
    width = SKETCH // 8
    return [packed[i : i + width] for i in range(0, len(packed), width)]


@lru_cache(8)
def _planes(dim: int) -> Vector:
    return np.random.default_rng(7).standard_normal((dim, SKETCH), dtype=np.float32)


@lru_cache(8)
def _odd(width: int) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(11).integers(0, 2**63, width, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
