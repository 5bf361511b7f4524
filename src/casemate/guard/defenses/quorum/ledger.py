"""The budgets of units: counted over all clients and processes, in the event store (ADR 0016)."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from casemate.errors import BackendError, ConfigError
from casemate.guard.units import UnitName
from casemate.protocols import EventStore
from casemate.types import QuotaGrant, QuotaRequest

DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Ledger:
    """One budget for each name of a unit and each period.

    A unit has several names: its sources, and its values of metadata keys. It is charged under all of them, so the
    budget of a metadata value covers every source that has the value.

    Attributes:
        store: The event store. Its quota transaction commits before ``spend`` returns.
        purpose: What is counted: keywords with noise, or single-unit answers.
        most: Budget of a name in one period.
        period_days: Length of a period, by the clock of this process. The budget belongs to the period's name, so two
            processes with different clocks never reset each other's. A clock that is set back opens no earlier period:
            each name of a unit is charged in its latest period or a later one.
    """

    store: EventStore | None
    purpose: Literal["dp", "break-glass"]
    most: int
    period_days: int

    def period(self) -> str:
        """Name of the present period."""
        return f"{self.period_days}d{self._number()}"

    def _number(self) -> int:
        return int(time.time() // (DAY_S * self.period_days))

    async def spend(self, tenant: str, wanted: Sequence[tuple[Collection[UnitName], int]]) -> list[int]:
        """Charges units in one transaction. Returns only after the charge is on disk.

        Args:
            tenant: The tenant.
            wanted: Names of each unit, and the amount to charge. No two units share a name.

        Returns:
            The amount that each unit was granted: the least among its names. What the others were charged beyond it is
            lost, and so is everything if the process ends before the answer leaves. The budget is never exceeded.

        Raises:
            ConfigError: If there is no event store.
            BackendError: If the event store fails. The amounts may have been charged.
        """
        if self.store is None:
            raise ConfigError(
                "quorum has no event store, so it cannot count the budgets of units; build it by open_app(), or pass "
                "store"
            )
        charges = [(name, amount) for names, amount in wanted for name in names]
        grants = iter(await asyncio.to_thread(self._charge, self.store, tenant, charges) if charges else ())
        return [min(next(grants).amount for _ in names) for names, _ in wanted]

    def _charge(self, store: EventStore, tenant: str, charges: Sequence[tuple[UnitName, int]]) -> Sequence[QuotaGrant]:
        """Charges each name in its period: the present one, or a later one in which it was charged."""
        now = self._number()
        marks = store.acquire([QuotaRequest(self._entry(self._latest, tenant, name), now, now) for name, _ in charges])
        periods = [max(now, int(mark.used)) for mark in marks]
        self._discard_outdated(store, tenant, [(name, mark) for (name, _), mark in zip(charges, marks, strict=True)])
        return store.acquire(
            [
                QuotaRequest(self._entry(self._prefix(period), tenant, name), amount, self.most)
                for period, (name, amount) in zip(periods, charges, strict=True)
            ]
        )

    def _discard_outdated(self, store: EventStore, tenant: str, marks: Sequence[tuple[UnitName, QuotaGrant]]) -> None:
        """Deletes the budgets of a name before its last period but one, when it is first charged in a new period.

        Its mark, which is on disk, prevents that one of them is charged again. A charge of the last period may be in
        progress in another process. A failure only leaves them there.
        """
        moved = [(name, int(mark.used), int(mark.used) - mark.amount) for name, mark in marks]
        outdated = [(name, period) for name, now, last in moved for period in (last - 1, last) if 0 < period < now - 1]
        if outdated:
            with suppress(BackendError):
                store.discard_quotas([self._entry(self._prefix(period), tenant, name) for name, period in outdated])

    def spent(self) -> list[int]:
        """Amounts charged in the present period, one for each source that was charged, of all tenants.

        Of a source that was charged in a later period, before the clock was set back, the amount in its latest one.

        Raises:
            BackendError: If the event store cannot be read.
        """
        if self.store is None:
            return []
        now, marks = self._number(), self._usage_by_source(self.store, self._latest)
        later = {source: int(mark) for source, mark in marks.items() if mark > now}
        return [
            int(used)
            for period in sorted({now, *later.values()})
            for source, used in self._usage_by_source(self.store, self._prefix(period)).items()
            if later.get(source, now) == period
        ]

    def _usage_by_source(self, store: EventStore, prefix: str) -> dict[str, float]:
        """The usage of the quotas of sources with a prefix, by the digest of the source."""
        return {name.rpartition(" ")[2]: used for name, used in store.quota_usage(f"{prefix} source ").items()}

    @property
    def _latest(self) -> str:
        """Prefix of the quotas whose usage is the latest period of a name."""
        return f"quorum {self.purpose} latest {self.period_days}d"

    def _prefix(self, period: int) -> str:
        return f"quorum {self.purpose} {self.period_days}d{period}"

    def _entry(self, prefix: str, tenant: str, name: UnitName) -> str:
        """Name of the quota, with a digest of the unit: names of sources may be long or identify a person."""
        text, kind = repr((tenant, name)), "source" if name[0] == "source" else "key"
        return f"{prefix} {kind} {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
