"""Reduces a page of a collection to moments and inventory rows: a pure function, so workers can run it.

``AttachScan`` adds the results in the order of the pages, so the moments do not depend on where pages were processed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from casemate.errors import ConfigError, DataError
from casemate.maths.moments import CorpusMoments
from casemate.maths.vectors import normalize
from casemate.protocols import CollectionPage
from casemate.types import DEFAULT_TENANT, Document, Vector

SKETCH_BITS = 256
"""Bits of a sketch: the sides of this many random hyperplanes on which a vector lies (SimHash, Charikar 2002)."""
MAX_QUOTED_IDS = 5  # ids quoted in an error


class InventoryRow(NamedTuple):
    """A row of the inventory: tenant, id, source, sketch of the vector and 64-bit checksum of the vector."""

    tenant: str
    id: str
    source: str
    sketch: bytes
    checksum: int


class RowCounts(NamedTuple):
    """Numbers of rows: counted, not of unit length, skipped without text, and skipped without vector."""

    rows: int = 0
    rescaled: int = 0
    textless: int = 0
    vectorless: int = 0

    def plus(self, other: RowCounts) -> RowCounts:
        """The sum."""
        return RowCounts(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class PageInventory:
    """The result for one page: moments by tenant, a row per document, counts for the summary, the cursor behind it."""

    moments: Mapping[str, CorpusMoments]
    rows: Sequence[InventoryRow]
    counts: RowCounts
    after: str


@dataclass(frozen=True, slots=True)
class SourceGrouping:
    """Rules for a document's source, in order: the collection's source, a metadata field, a pattern in the id, the id.

    Attributes:
        key: Metadata field with the source. Empty: none.
        pattern: Regular expression for the id. Its first group, or the whole match, is the source. Empty: none.
    """

    key: str = ""
    pattern: str = ""
    _compiled: re.Pattern[str] | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "_compiled", re.compile(self.pattern) if self.pattern else None)
        except re.error as error:
            raise ConfigError(
                f"source_pattern is {self.pattern!r}, which is not a regular expression: {error}"
            ) from error

    def source(self, document: Document) -> str:
        """The source of one document.

        >>> SourceGrouping(pattern="^(.*)#").source(Document("report.pdf#12", ""))
        'report.pdf'
        """
        if document.source != document.id:
            return document.source
        if self.key and (value := document.metadata.get(self.key)) not in (None, ""):
            return str(value)
        if self._compiled and (found := self._compiled.search(document.id)):
            return (found[1] if found.re.groups else found[0]) or document.id
        return document.id

    def describe(self) -> str:
        """The configured rules, for the summary."""
        ways = [f"the metadata's {self.key!r}"] if self.key else []
        ways += [f"{self.pattern!r} in the id"] if self.pattern else []
        return " or ".join(ways)


def inventory_page(page: CollectionPage, grouping: SourceGrouping, dim: int) -> PageInventory:
    """Moments of the normalized vectors in float64, and an inventory row per document; errors of ``unit_vectors``."""
    stored, rescaled = unit_vectors(page, dim)
    tenants = page.tenants or [DEFAULT_TENANT] * len(page.documents)
    columns = zip(tenants, page.documents, vector_sketches(stored), vector_checksums(stored).tolist(), strict=True)
    rows = [InventoryRow(tenant, d.id, grouping.source(d), sketch, checksum) for tenant, d, sketch, checksum in columns]
    counts = RowCounts(len(rows), rescaled, page.textless, page.vectorless)
    return PageInventory(moments_by_tenant(stored, tenants), rows, counts, page.after)


def unit_vectors(page: CollectionPage, dim: int) -> tuple[Vector, int]:
    """The page's vectors at unit length, (n, dim), and how many were rescaled.

    Raises:
        DataError: If the dimension is not ``dim``, or a vector is zero or not finite. The message names the documents.
    """
    if np.ndim(page.vectors) != 2 or (len(page.documents) and page.vectors.shape[1] != dim):
        raise DataError(f"vectors have shape {np.shape(page.vectors)[1:]}; expected {dim} dimensions")
    stored, rescaled, invalid = normalize(page.vectors)
    if invalid.any():
        raise no_direction_error([d.id for d, bad in zip(page.documents, invalid, strict=True) if bad])
    return stored, int(rescaled.sum())


def no_direction_error(ids: Sequence[str]) -> DataError:
    """The error for vectors that are zero or not finite."""
    return DataError(
        f"the vectors of {quote_ids(ids)} are zero or not finite; embed these rows again, or exclude them with 'where'"
    )


def quote_ids(ids: Sequence[str]) -> str:
    """The first ids in quotes, for a message."""
    more = f" and {len(ids) - MAX_QUOTED_IDS} more" if len(ids) > MAX_QUOTED_IDS else ""
    return ", ".join(repr(i[:80]) for i in ids[:MAX_QUOTED_IDS]) + more


def moments_by_tenant(stored: Vector, tenants: Sequence[str]) -> dict[str, CorpusMoments]:
    """The moments of each tenant's vectors, in order of first appearance."""
    distinct = list(dict.fromkeys(tenants))
    if len(distinct) < 2:
        return {t: CorpusMoments.of(stored) for t in distinct}
    owner = np.array([distinct.index(t) for t in tenants])
    return {t: CorpusMoments.of(stored[owner == i]) for i, t in enumerate(distinct)}


def vector_checksums(stored: Vector) -> npt.NDArray[np.int64]:
    """A 64-bit checksum per vector, (n,). Different vectors collide with probability 2^-64."""
    bits = np.ascontiguousarray(stored).view(np.uint32)
    if bits.shape[1] % 2:
        bits = np.pad(bits, ((0, 0), (0, 1)))
    pairs = np.ascontiguousarray(bits).view(np.uint64)
    checksums: npt.NDArray[np.int64] = (pairs @ _odd_multipliers(pairs.shape[1])).view(np.int64)
    return checksums


def vector_sketches(stored: Vector) -> list[bytes]:
    """A sketch per vector. Two sketches differ in an expected share angle / pi of their bits."""
    packed = np.packbits(stored @ _hyperplanes(stored.shape[1]) > 0, axis=1).tobytes()
    width = SKETCH_BITS // 8
    return [packed[i : i + width] for i in range(0, len(packed), width)]


@lru_cache(8)
def _hyperplanes(dim: int) -> Vector:
    return np.random.default_rng(7).standard_normal((dim, SKETCH_BITS), dtype=np.float32)


@lru_cache(8)
def _odd_multipliers(width: int) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(11).integers(0, 2**63, width, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
