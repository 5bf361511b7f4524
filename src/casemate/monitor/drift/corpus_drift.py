"""Corpus drift: did the mean vector move more than added and removed documents explain, and do vectors match texts?

The moments of the index (``maths.moments.CorpusMoments``) are available at no cost and depend on every vector.
Documents similar to those in the index move the mean m little: with a added and r removed,
Q = n'^2 |m' - m|^2 / (a (1 + a / n) + r (n - r) / (n - 1)) has mean tr S and variance 2 tr S^2, where S = M2 / n.
Adding j copies of one vector among a documents increases Q by about j^2 / a times tr S. So a block of similar vectors
is detected if j exceeds the square root of a by enough; a single one never is.
Vectors that change while no document is added or removed are always detected, since nothing explains the move.

The test cannot distinguish a poisoned block from a new subject: forty pages of one article move the mean as well. It
shows that the corpus moved, and by how much more than expected; the operator decides why.

Deviation: METHODS D6 names mean, trace and top eigenvalues. For unit vectors the trace of M2 is n - n |m|^2: it is
reported, but adds nothing to the mean.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum

import numpy as np
from pydantic import TypeAdapter

from casemate.errors import DataError
from casemate.maths.moments import CorpusMoments
from casemate.maths.special import gamma_sf
from casemate.monitor.canaries.coverage import sample_documents
from casemate.protocols import Embedder, EventStore, Index
from casemate.runtime.events import digest
from casemate.runtime.stored import read_stored
from casemate.types import DEFAULT_TENANT, Event

MOMENTS_KIND = "canary-moments"
"""Kind of the events that store the moments of a corpus."""
ROUNDING = 1e-6
"""Distance that the mean may move by rounding."""
MIN_SAME_COSINE = 0.999
"""Minimum cosine of a stored vector and its re-embedded text (METHODS D6)."""
CONFIDENCE = 0.95
"""Confidence of an audit's upper bound."""
SIGNIFICANCE = 0.001
"""P-value below which a move is not explained by documents similar to those in the index."""


class CorpusChange(StrEnum):
    """What a move of the mean vector means."""

    NONE = "unchanged"
    EXPECTED = "moved as expected for the documents added and removed"
    UNEXPECTED = "moved more than the documents added and removed explain"
    IN_PLACE = "vectors changed although no source did"
    UNKNOWN = "undetermined: give the number of replaced documents"


@dataclass(frozen=True, slots=True)
class MomentsSnapshot:
    """Moments of a corpus at one time, with S = M2 / n.

    Attributes:
        mean: m, (dim,).
        trace: tr S.
        square: tr S^2.
        top: Largest eigenvalue of S.
        content: Digest of sources and embedder; empty: unknown.
    """

    tenant: str
    at: datetime
    n: int
    mean: tuple[float, ...]
    trace: float
    square: float
    top: float
    content: str = ""

    @property
    def degrees_of_freedom(self) -> float:
        """Degrees of freedom of Q as a scaled chi-square (Satterthwaite 1946)."""
        return self.trace**2 / self.square if self.square else 1.0


_SNAPSHOT = TypeAdapter(MomentsSnapshot)


@dataclass(frozen=True, slots=True)
class MeanShift:
    """Move of the mean vector between two snapshots.

    Attributes:
        expected: Its root mean square if all added and removed documents are similar to those in the index.
        trace: Change of tr S.
        top: Relative change of the largest eigenvalue.
    """

    added: int
    removed: int
    distance: float
    expected: float
    p: float
    trace: float
    top: float


@dataclass(frozen=True, slots=True)
class VectorAudit:
    """Result of re-embedding a sample of documents.

    ``wrong`` has ids and cosines of vectors that do not match their text; ``lowest`` is the lowest cosine of all.
    """

    held: int
    checked: int
    wrong: tuple[tuple[str, float], ...]
    lowest: float

    @property
    def max_wrong(self) -> int:
        """Upper bound, with 95 % confidence, of the number of wrong vectors in the index."""
        return max_wrong(self.held, self.checked, len(self.wrong))


def read_snapshot(index: Index, tenant: str, at: datetime, embedder: str = "") -> MomentsSnapshot:
    """Reads the moments of a tenant's documents; the embedder is given by its fingerprint."""
    sources = json.dumps([embedder, *sorted(index.digests(tenant).items())])
    snapshot = snapshot_of(index.moments(tenant), tenant, at)
    return replace(snapshot, content=digest(sources, length=32))


def snapshot_of(moments: CorpusMoments, tenant: str, at: datetime) -> MomentsSnapshot:
    """Snapshot of given moments."""
    S = moments.scatter / max(moments.n, 1)
    top = float(np.linalg.eigvalsh(S)[-1])
    mean = tuple(round(float(x), 9) for x in moments.mean)
    return MomentsSnapshot(tenant, at.astimezone(UTC), moments.n, mean, float(np.trace(S)), float((S * S).sum()), top)


def snapshot_to_event(snapshot: MomentsSnapshot) -> Event:
    """Converts a snapshot to an event: dim + 4 numbers, no vector of a document."""
    body = asdict(snapshot) | {"mean": list(snapshot.mean)}
    at = body.pop("at")
    return Event(f"{MOMENTS_KIND}:{at.timestamp():.6f}:{snapshot.tenant}"[:200], at, MOMENTS_KIND, body)


def load_snapshots(store: EventStore, tenant: str) -> list[MomentsSnapshot]:
    """Stored snapshots of a tenant, oldest first.

    Raises:
        BackendError: If the store cannot be read.
    """
    return [
        read_stored(_SNAPSHOT, {**e.body, "at": e.at}, "snapshot of the corpus")
        for e in store.scan(MOMENTS_KIND)
        if e.body["tenant"] == tenant
    ]


def mean_shift(
    before: MomentsSnapshot, after: MomentsSnapshot, added: int | None = None, removed: int | None = None
) -> MeanShift:
    """Compares the move of the mean with that expected for documents similar to those in the index.

    Numbers of documents added and removed that are None are computed from the sizes.

    Raises:
        DataError: If the first snapshot has fewer than two documents, the dimensions differ, or the numbers are
            inconsistent.
    """
    if before.n < 2:
        raise DataError(f"the first snapshot has {before.n} documents; at least 2 are needed")
    if len(before.mean) != len(after.mean):
        raise DataError(f"the snapshots have {len(before.mean)} and {len(after.mean)} dimensions: different embedders")
    growth = after.n - before.n
    removed = removed if removed is not None else max(-growth if added is None else added - growth, 0)
    added = added if added is not None else growth + removed
    if added - removed != growth or min(added, removed) < 0 or removed > before.n:
        raise DataError(
            f"inconsistent numbers: {before.n} documents, {added} added and {removed} removed, but {after.n} afterwards"
        )
    distance = float(np.linalg.norm(np.array(after.mean) - np.array(before.mean)))
    from_added = added * (1 + added / before.n)  # m itself is estimated from n documents
    from_removed = removed * (before.n - removed) / (before.n - 1)  # drawn without replacement
    expected = math.sqrt((from_added + from_removed) * before.trace) / max(after.n, 1)
    half = before.degrees_of_freedom / 2  # P(Q >= (distance / expected)^2 tr S)
    p = gamma_sf(half * (distance / expected) ** 2, half) if expected else float(distance <= ROUNDING)
    top = after.top / before.top - 1 if before.top else 0.0
    return MeanShift(added, removed, distance, expected, p, after.trace - before.trace, top)


def classify_change(
    before: MomentsSnapshot, after: MomentsSnapshot, removed: int | None = None
) -> tuple[CorpusChange, MeanShift | None]:
    """Classifies the change between two snapshots, and returns the shift; None if the numbers do not determine it.

    ``removed`` counts documents that were removed or replaced; None: unknown.

    Raises:
        DataError: See ``mean_shift``.
    """
    if before.content and before.content == after.content:
        if before.n != after.n:
            return CorpusChange.IN_PLACE, None
        shift = mean_shift(before, after, 0, 0)
        return (CorpusChange.NONE if shift.distance <= ROUNDING else CorpusChange.IN_PLACE), shift
    if removed is None and before.n == after.n:
        return CorpusChange.UNKNOWN, None
    shift = mean_shift(before, after, removed=removed)
    return (CorpusChange.UNEXPECTED if shift.p < SIGNIFICANCE else CorpusChange.EXPECTED), shift


def audit_vectors(
    index: Index, embedder: Embedder, *, count: int = 200, tenant: str = DEFAULT_TENANT, seed: int = 7
) -> VectorAudit:
    """Re-embeds a random sample of documents and compares the vectors with those in the index.

    Use a new ``seed`` each time, so that the sample cannot be predicted.

    Raises:
        DataError: If the tenant has no documents.
    """
    documents, stored = sample_documents(index, tenant, np.random.default_rng(seed), count)
    embedded = embedder.embed([d.content for d in documents])
    cosines = np.einsum("nd,nd->n", embedded.astype(np.float64), stored.astype(np.float64))
    wrong = tuple((d.id, float(c)) for d, c in zip(documents, cosines, strict=True) if not c >= MIN_SAME_COSINE)
    return VectorAudit(index.moments(tenant).n, len(documents), wrong, float(cosines.min()))


def max_wrong(held: int, checked: int, found: int) -> int:
    """Upper end of an exact one-sided 95 % interval for the number of wrong items in a population (hypergeometric).

    The population has ``held`` items, a sample of ``checked`` without replacement has ``found`` wrong ones.

    >>> max_wrong(5000, 200, 0), max_wrong(5000, 5000, 0), max_wrong(10, 5, 5)
    (72, 0, 10)
    """
    low, high = found, held - (checked - found)
    while low < high:  # the largest number for which so few in the sample are not too improbable
        middle = (low + high + 1) // 2
        likely = _hypergeometric_cdf(held, middle, checked, found) > 1 - CONFIDENCE
        low, high = (middle, high) if likely else (low, middle - 1)
    return low


def _hypergeometric_cdf(held: int, wrong: int, checked: int, found: int) -> float:
    """P(at most ``found`` wrong items in the sample)."""
    ways = (
        _log_choose(wrong, x) + _log_choose(held - wrong, checked - x) - _log_choose(held, checked)
        for x in range(max(0, checked - (held - wrong)), min(found, wrong, checked) + 1)
    )
    return math.fsum(math.exp(way) for way in ways)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
