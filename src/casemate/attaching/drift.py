"""How far a collection and what is kept beside it have come apart, measured on a sample."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from casemate.attaching.places import Place
from casemate.attaching.run import About, found
from casemate.attaching.sidecar import Named, Sidecar
from casemate.attaching.tally import checked, marks
from casemate.collection import Collection
from casemate.errors import DataError
from casemate.indexing import FIX, PROBES
from casemate.stats import CorpusMoments, clopper_pearson

SAMPLE = 1024
"""Rows of each tenant that are looked at: of a share of 1 %, one of 1024 misses all with probability 3e-5."""
TENANTS = 32
"""Tenants that are looked at, the largest first."""
FAR = 6.0
"""Standard errors of a sample's mean that chance does not reach."""
LOOK_S, LOOK_SHARE = 30.0, 0.02
"""Seconds at least between two counts of a collection, which may take this share of the time at most."""


class Look:
    """Now and then: whether a collection is still the one that was scanned. One asker counts, the others do not wait.

    Args:
        limit: Share of the rows that may have come, gone or changed.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._due, self._refusal = limit, 0.0, ""
        self._lock = threading.Lock()

    def require(self, name: str, rows: Callable[[], tuple[int, int, int]]) -> None:
        """Counts if it is time to.

        Args:
            name: Of the collection.
            rows: Counts: those of the collection, of them scanned, and changed since.

        Raises:
            DataError: If too many have come, gone or changed.
        """
        if time.monotonic() >= self._due and self._lock.acquire(blocking=not self._due):  # all wait for the first count
            try:
                self._count(name, rows)
            finally:
                self._lock.release()
        if self._refusal:
            self._due = min(self._due, time.monotonic() + 1)  # a scan may have mended it
            raise DataError(self._refusal)

    def _count(self, name: str, rows: Callable[[], tuple[int, int, int]]) -> None:
        begin = time.monotonic()
        if begin < self._due:  # somebody else has just counted
            return
        held, scanned, changed = rows()
        self._refusal = ""
        if abs(held - scanned) + changed > self._limit * max(scanned, 1):
            self._refusal = (
                f"{name} has {held} rows, {scanned} were scanned, {changed} changed since: "
                f"more than attached.drift = {self._limit:g} allows; run 'casemate attach'"
            )
        end = time.monotonic()
        self._due = end + max(LOOK_S, (end - begin) / LOOK_SHARE)


@dataclass(frozen=True, slots=True)
class Drift:
    """What a sample says.

    Attributes:
        rows: That the collection has now, with text and vector, as far as it can tell.
        scanned: That the moments count.
        sampled: Of those, how many were looked at.
        missing: Of the sample, how many the collection no longer has.
        changed: Of the sample, how many have another vector now.
        noticed: Rows that were seen to be changed when they were replaced or removed by way of us.
        faults: What does not fit though the rows do: the moments themselves are wrong.
    """

    rows: int
    scanned: int
    sampled: int
    missing: int
    changed: int
    noticed: int
    faults: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Estimate of the share of rows that the moments hold wrongly or not at all."""
        gone = (self.missing + self.changed) / self.sampled if self.sampled else 0.0
        lost = round(self.missing / self.sampled * self.scanned) if self.sampled else 0
        come = max(self.rows - (self.scanned - lost), 0)
        base = max(self.scanned, 1)
        return max(gone, abs(self.rows - self.scanned) / base, (come + self.noticed) / base)

    def complaints(self, limit: float) -> list[str]:
        """What is wrong, a sentence each, if the share is beyond half of what searches are refused for."""
        told = list(self.faults)
        if self.share > limit / 2:
            told.append(f"{self.told()}: run 'casemate attach' or 'casemate doctor --fix'")
        return told

    def told(self) -> str:
        """One sentence."""
        low, high = clopper_pearson(self.missing + self.changed, self.sampled) if self.sampled else (0.0, 0.0)
        return (
            f"{self.rows} rows, {self.scanned} scanned; of {self.sampled} looked at {self.missing} are gone and "
            f"{self.changed} changed ({low:.3f} to {high:.3f} of all): about {self.share:.1%} are not in the moments "
            "as they are"
        )

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self) | {"share": self.share}


def measure(collection: Collection, place: Place, dim: int) -> Drift:
    """Looks at a random sample of each tenant's rows, as the collection has them now.

    Raises:
        BackendError: If the collection fails.
        DataError: If vectors of the sample cannot be used.
    """
    with place.session(write=False) as tables:
        side = Sidecar(tables, dim)
        about, size, noticed = About.read(side.meta), side.size(), side.drifted
        law = {t: side.moments(t) for t in side.tenants()[:TENANTS]}
        drawn = {t: side.draw(t, SAMPLE) for t in law}
    sampled = missing = changed = 0
    faults = [f for t, m in law.items() for f in _square(t, m)]
    for tenant, rows in drawn.items():
        piece = found(collection, tenant, [row.id for row in rows])
        stored, _ = checked(piece, dim)
        now = dict(zip([d.id for d in piece.documents], marks(stored).tolist(), strict=True)) if len(stored) else {}
        gone, other = _compare(rows, now)
        sampled, missing, changed = sampled + len(rows), missing + gone, changed + other
        if not gone and not other and len(rows) > PROBES:
            faults += _fits(tenant, law[tenant], CorpusMoments.of(stored))
    there = collection.count() - (about.textless + about.vectorless if about else 0)
    return Drift(there, size, sampled, missing, changed, noticed, tuple(faults))


def _compare(rows: Sequence[Named], now: dict[str, int]) -> tuple[int, int]:
    missing = sum(row.id not in now for row in rows)
    return missing, sum(now.get(row.id, row.known.mark) != row.known.mark for row in rows)


def _square(tenant: str, m: CorpusMoments) -> list[str]:
    """tr(S) is n for unit vectors."""
    if abs(m.square_norm - m.n) <= 1e-6 * max(m.n, 1):  # false for NaN, too
        return []
    return [f"tenant {tenant!r}: tr(S) = {m.square_norm:.6f} for {m.n} unit vectors: {FIX}"]


def _fits(tenant: str, law: CorpusMoments, sample: CorpusMoments) -> list[str]:
    """Whether the mean similarity to some directions is that of the sample, but for chance."""
    probes = np.random.default_rng(0).standard_normal((PROBES, len(law.mean))).astype(np.float32)
    for q in probes:
        all_rows, some = law.background(q), sample.background(q)
        if abs(some.mean - all_rows.mean) > FAR * max(all_rows.std, some.std) / np.sqrt(some.n) + 1e-6:
            return [f"tenant {tenant!r}: the moments do not fit a sample of the vectors: {FIX}"]
    return []
