"""Alerts about quarantined documents: at most one for each tenant and hour.

The open alert of a tenant lists how many documents are in quarantine, the most suspicious first. It closes when none is
left.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from casemate.errors import BackendError
from casemate.monitor.alerts.alert import (
    ALERT_KIND,
    MAX_NAME,
    Alert,
    AlertPhase,
    AlertState,
    alert_states,
    alert_subject,
    alert_to_event,
    security_alert,
)
from casemate.monitor.canaries.results import Severity, group_by
from casemate.monitor.poisoning.quarantine import QUARANTINE_KIND
from casemate.protocols import EventStore
from casemate.types import Event

RECENT = timedelta(hours=2)
"""The alert of a document that was quarantined just now changed within this time."""
MAX_LISTED = 10
"""Quarantined documents that an alert lists."""
SETTLED = "Every document of this tenant was released or dropped; none is in quarantine."
"""What a closed quarantine alert says."""


class QuarantineAlerts:
    """Keeps the alerts about one process's quarantine events up to date.

    The alert is updated with the second, fourth, eighth document and so on; with all others by ``finish`` or by
    ``MissedAlertScanner``. So many documents cause few reads and few notifications.
    """

    def __init__(self, store: EventStore) -> None:
        self._store = store
        self._counts: Counter[str] = Counter()
        self._unsettled = False

    def update(self, event: Event, opened: Alert | None) -> None:
        """Updates the alerts after an event of the quarantine, and the alert that it opens, were appended."""
        states = _states(self._store, event.at - RECENT if opened else None)
        is_open = any(s.open and s.alert.canaries == (alert_subject(event),) for s in states)
        if is_open == (opened is None) or (opened and self._is_due(opened)):
            settle_quarantine_alerts(self._store, event.at)
            self._unsettled = False

    def finish(self) -> None:
        """Updates the alerts with all documents."""
        with contextlib.suppress(BackendError):  # the scanner of the monitor does the same
            if self._unsettled:
                settle_quarantine_alerts(self._store, datetime.now(UTC))

    def _is_due(self, alert: Alert) -> bool:
        """Whether the number of documents that belong to an alert has doubled since the last update."""
        self._counts[alert.id] += 1
        count = self._counts[alert.id]
        self._unsettled = count > 1
        return count > 1 and not count & (count - 1)


def settle_quarantine_alerts(store: EventStore, now: datetime) -> None:
    """Brings the quarantine alerts up to date: closes those of tenants without a document in quarantine.

    The newest open alert of any other tenant lists the documents that are in quarantine since it began.
    An alert is reopened if a document is in quarantine that came after an operator closed the alert, or while another
    process settled it. The alert of the same hour cannot open twice.

    Raises:
        BackendError: If the store cannot be read or written.
    """
    latest = {event.body.get("key"): event for event in store.scan(QUARANTINE_KIND)}
    waiting = group_by((event for event in latest.values() if event.body.get("what") == "held"), alert_subject)
    states = _states(store)
    for state in states:
        if state.open and state.alert.canaries[0] not in waiting:
            settled = replace(state.alert, changes=(SETTLED,), advice=())
            store.append(alert_to_event(settled, AlertPhase.RECOVERED, now, now.isoformat()))
    for tenant, held in waiting.items():
        of_tenant = [s for s in states if s.alert.canaries[0] == tenant]
        if not of_tenant:
            continue
        if open_ := [s for s in of_tenant if s.open]:
            _update(store, open_[-1], held, now)
            continue
        last = of_tenant[-1]
        new = held if last.alert.changes == (SETTLED,) else [e for e in held if e.at > last.changed]
        if new:
            alert = quarantine_alert(new)
            phase = AlertPhase.UPDATED if any(s.alert.id == alert.id for s in of_tenant) else AlertPhase.OPENED
            store.append(alert_to_event(alert, phase, now, f"{new[-1].id} {now.isoformat()}"))


def _update(store: EventStore, state: AlertState, held: Sequence[Event], now: datetime) -> None:
    """Lists in an open alert what is in quarantine since it began. Notifies if the number has at least doubled."""
    counted = [event for event in held if event.at >= state.alert.since]
    if not counted:
        return
    found, kept = quarantine_alert(counted), state.alert
    alert = replace(found, id=kept.id, severity=kept.severity, since=kept.since)
    if alert == kept:
        return
    known = sum(event.at <= state.changed for event in counted)
    quiet = bool(state.acknowledged) or len(counted) < 2 * known
    occasion = f"{len(counted)} {counted[-1].id} {now.isoformat()}"
    store.append(alert_to_event(alert, AlertPhase.UPDATED, now, occasion, quiet))


def _states(store: EventStore, since: datetime | None = None) -> list[AlertState]:
    """States of all quarantine alerts, or of those that changed since a time, oldest first."""
    return [s for s in alert_states(store.scan(ALERT_KIND, since)).values() if s.alert.kind == QUARANTINE_KIND]


def quarantine_alert(held: Sequence[Event]) -> Alert:
    """The alert about quarantined documents of one tenant, of the hour of the newest one."""
    ranked = sorted(held, key=lambda event: -float(event.body.get("score", 0.0)))
    first, count = ranked[0].body, len(ranked)
    ids = [[d["id"] for d in event.body.get("documents", ())] for event in ranked]
    if count == 1:
        title, documents = "A new document was quarantined", [*ids[0], *first.get("companions", ())]
    else:  # one chunk of each source: a long source must not hide the others
        title, documents = f"{count} new documents are in quarantine", [name for chunks in ids for name in chunks[:1]]
    which = "it" if count == 1 else "the most suspicious one first"
    return security_alert(
        QUARANTINE_KIND,
        Severity.MEDIUM,
        max(held, key=lambda event: event.at),
        title,
        since=min(event.at for event in held),
        changes=tuple(_describe_quarantined(event.body) for event in ranked[:MAX_LISTED]),
        documents=tuple(documents[:MAX_LISTED]),
        advice=(
            f"Review {which}: 'casemate quarantine show {first.get('key', '?')[:8]}'. Then release or drop it.",
            "There is one alert an hour, closed when no document is left. All of them: 'casemate quarantine list'.",
        ),
    )


def _describe_quarantined(body: Mapping[str, Any]) -> str:
    reasons = "; ".join(body.get("reasons", ())) or "no reason recorded"
    score, source = float(body.get("score", 0.0)), str(body.get("source", "?"))[:MAX_NAME]
    return f"{source!r} of tenant {body.get('tenant')!r} is in quarantine, with score {score:.1f}: {reasons}."
