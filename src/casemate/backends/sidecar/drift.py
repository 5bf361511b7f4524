"""Measures how far an attached collection has drifted from its sidecar since the scan."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from casemate.backends.index_checks import FIX, PROBES
from casemate.backends.sidecar.attach_scan import ScanSummary, find_rows
from casemate.backends.sidecar.row_inventory import unit_vectors, vector_checksums
from casemate.backends.sidecar.sidecar import IdentifiedEntry, Sidecar
from casemate.backends.sidecar.sidecar_database import SidecarDatabase
from casemate.errors import DataError
from casemate.maths.moments import CorpusMoments
from casemate.maths.stats import clopper_pearson
from casemate.protocols import VectorCollection

SAMPLE_ROWS = 1024  # sampled rows per tenant: 1024 rows miss a drift of 1 % with probability 3e-5
MAX_TENANTS = 32  # sampled tenants, first by name
MAX_STANDARD_ERRORS = 6.0  # a sample mean that differs by more standard errors is not due to chance
COUNT_INTERVAL_S, COUNT_TIME_SHARE = 30.0, 0.02
"""Smallest interval between two counts of a collection, and the largest share of time that counting may take."""


class DriftLimit:
    """Refuses searches once a collection has drifted beyond a limit. Counts at intervals; only the first count blocks.

    Args:
        limit: Largest share of rows that may have been added, removed or changed.
        setting: The option that sets the limit; empty: none does.
        rescan: What the user must do to have the collection read again.
    """

    def __init__(self, limit: float, setting: str, rescan: str) -> None:
        self._limit, self._due, self._refusal = limit, 0.0, ""
        self._setting, self._rescan = setting, rescan
        self._lock = threading.Lock()

    def require(self, name: str, rows: Callable[[], tuple[int, int, int]]) -> None:
        """Verifies the limit, with a new count if one is due: rows in the collection, scanned, and changed since.

        Raises:
            DataError: If the limit is exceeded.
        """
        if time.monotonic() >= self._due and self._lock.acquire(
            blocking=not self._due
        ):  # all callers wait for the first count
            try:
                self._count(name, rows)
            finally:
                self._lock.release()
        if self._refusal:
            self._due = min(self._due, time.monotonic() + 1)  # a scan may have corrected it
            raise DataError(self._refusal)

    def _count(self, name: str, rows: Callable[[], tuple[int, int, int]]) -> None:
        begin = time.monotonic()
        if begin < self._due:  # another thread has just counted
            return
        present, scanned, changed = rows()
        if self._exceeded(present, scanned, changed):  # or a concurrent write fell between the two counts
            present, scanned, changed = rows()
        self._refusal = ""
        if self._exceeded(present, scanned, changed):
            replaced = f", {changed} replaced" if changed else ""
            setting = f" ({self._setting})" if self._setting else ""
            self._refusal = (
                f"{name} has {present} rows, {scanned} when it was read last{replaced}: other programs changed more "
                f"than {100 * self._limit:g} %{setting} of it, so searches are refused; {self._rescan}"
            )
        end = time.monotonic()
        self._due = end + max(COUNT_INTERVAL_S, (end - begin) / COUNT_TIME_SHARE)

    def _exceeded(self, present: int, scanned: int, changed: int) -> bool:
        return abs(present - scanned) + changed > self._limit * max(scanned, 1)


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Drift estimated from a sample.

    Attributes:
        rows: Rows with text and vector in the collection now.
        scanned: Rows in the moments.
        sampled: Rows in the sample.
        missing: Sampled rows that the collection no longer has.
        changed: Sampled rows whose vector has changed.
        noticed: Rows found changed when Casemate replaced or removed them.
        faults: Errors of the moments themselves: they do not fit although the rows do.
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
        """Estimated share of rows that are missing or outdated in the moments."""
        gone = (self.missing + self.changed) / self.sampled if self.sampled else 0.0
        lost = round(self.missing / self.sampled * self.scanned) if self.sampled else 0
        come = max(self.rows - (self.scanned - lost), 0)
        base = max(self.scanned, 1)
        return max(gone, abs(self.rows - self.scanned) / base, (come + self.noticed) / base)

    def problems(self, limit: float) -> list[str]:
        """One sentence per problem, if the share exceeds half of the limit at which searches are refused."""
        sentences = list(self.faults)
        if self.share > limit / 2:
            sentences.append(f"{self.describe()}: run 'casemate attach' or 'casemate doctor --fix'")
        return sentences

    def describe(self) -> str:
        """One sentence."""
        low, high = clopper_pearson(self.missing + self.changed, self.sampled) if self.sampled else (0.0, 0.0)
        return (
            f"{self.rows} rows, {self.scanned} scanned; of {self.sampled} sampled rows {self.missing} are missing and "
            f"{self.changed} changed ({low:.1%} to {high:.1%} of all): about {self.share:.1%} of "
            "the moments are outdated"
        )

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self) | {"share": self.share}


def measure_drift(collection: VectorCollection, database: SidecarDatabase, dim: int) -> DriftReport:
    """Compares a random sample of each tenant's rows with the collection.

    Raises:
        BackendError: If the collection fails.
        DataError: If vectors of the sample are invalid.
    """
    with database.transaction(write=False) as tables:
        side = Sidecar(tables, dim)
        summary, size, noticed = ScanSummary.from_meta(side.meta), side.size(), side.drifted
        moments = {t: side.moments(t) for t in side.tenants()[:MAX_TENANTS]}
        samples = {t: side.sample(t, SAMPLE_ROWS) for t in moments}
    sampled = missing = changed = 0
    faults = [f for t, m in moments.items() for f in _check_sum_of_squares(t, m)]
    for tenant, rows in samples.items():
        page = find_rows(collection, tenant, [row.id for row in rows])
        stored, _ = unit_vectors(page, dim)
        now = (
            dict(zip([d.id for d in page.documents], vector_checksums(stored).tolist(), strict=True))
            if len(stored)
            else {}
        )
        gone, other = _compare(rows, now)
        sampled, missing, changed = sampled + len(rows), missing + gone, changed + other
        if not gone and not other and len(rows) > PROBES:
            faults += _check_sample(tenant, moments[tenant], CorpusMoments.of(stored))
    present = collection.count() - (summary.textless + summary.vectorless if summary else 0)
    return DriftReport(present, size, sampled, missing, changed, noticed, tuple(faults))


def _compare(rows: Sequence[IdentifiedEntry], now: dict[str, int]) -> tuple[int, int]:
    missing = sum(row.id not in now for row in rows)
    return missing, sum(now.get(row.id, row.entry.checksum) != row.entry.checksum for row in rows)


def _check_sum_of_squares(tenant: str, m: CorpusMoments) -> list[str]:
    """The squared lengths of n unit vectors sum to n."""
    if abs(m.sum_of_squares - m.n) <= 1e-6 * max(m.n, 1):  # false for NaN, too
        return []
    return [f"tenant {tenant!r}: the squared lengths of {m.n} unit vectors sum to {m.sum_of_squares:.6f}: {FIX}"]


def _check_sample(tenant: str, moments: CorpusMoments, sample: CorpusMoments) -> list[str]:
    """Compares the mean similarity to random directions with that of the sample."""
    probes = np.random.default_rng(0).standard_normal((PROBES, len(moments.mean))).astype(np.float32)
    for q in probes:
        all_rows, some = moments.similarity_stats(q), sample.similarity_stats(q)
        if abs(some.mean - all_rows.mean) > MAX_STANDARD_ERRORS * max(all_rows.std, some.std) / np.sqrt(some.n) + 1e-6:
            return [f"tenant {tenant!r}: the moments do not fit a sample of the vectors: {FIX}"]
    return []
