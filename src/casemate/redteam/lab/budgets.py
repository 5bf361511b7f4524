"""Budgets of units for a guard of the lab: in memory, so that attacks use up none of the operator's."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime

from casemate.protocols import EventStore
from casemate.types import Event, QuotaGrant, QuotaRequest


class BudgetsInMemory(EventStore):
    """Quotas of one period that start unused. Drops events. Safe for threads."""

    def __init__(self) -> None:
        self._used: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def append(self, event: Event) -> None:
        """Drops the event."""

    def scan(self, kind: str | None = None, since: datetime | None = None) -> Sequence[Event]:
        """See ``EventStore``. There are no events."""
        return ()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """See ``EventStore``. There is nothing to write."""
        return True

    def lease(self, name: str, holder: str, seconds: float) -> bool:
        """See ``EventStore``. Not granted."""
        return False

    def release(self, name: str, holder: str) -> None:
        """See ``EventStore``. There are no leases."""

    def close(self) -> None:
        """See ``EventStore``. There is nothing to close."""

    def acquire(self, requests: Sequence[QuotaRequest]) -> Sequence[QuotaGrant]:
        """See ``EventStore``. Periods and replenishment are not supported."""
        grants = []
        with self._lock:
            for request in requests:
                granted = max(0, min(request.amount, int(request.most) - self._used[request.name]))
                self._used[request.name] += granted
                grants.append(QuotaGrant(granted, self._used[request.name]))
        return grants

    def quota_usage(self, prefix: str) -> Mapping[str, float]:
        """See ``EventStore``."""
        with self._lock:
            return {name: float(used) for name, used in self._used.items() if name.startswith(prefix)}
