"""Budgets of units for a guard of the lab: in memory, so that attacks use up none of the operator's."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence

from casemate.protocols import EventStore
from casemate.types import Event, QuotaGrant, QuotaRequest


class BudgetsInMemory(EventStore):
    """Quotas of one period that start unused. Drops events. Safe for threads."""

    def __init__(self) -> None:
        self._used: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def append(self, event: Event) -> None:
        """Drops the event."""

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
