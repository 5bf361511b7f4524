"""Opens alerts for honeytoken events, crawlers and quarantined documents as soon as they are recorded.

``AlertingEventStore`` wraps an event store and opens the alert when the event is appended. ``MissedAlertScanner`` opens
the same alerts later, for events of processes without the wrapper. Both may run: alert ids follow from the cause, so an
alert exists once. Each kind, tenant and hour has at most ``CLIENT_GROUPS`` alerts, so an attacker with many client
names cannot bury other alerts. Both close the quarantine alerts of a tenant when none of its documents is left in
quarantine. Until then the open alert of a tenant lists how many documents wait, the most suspicious first.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from casemate.errors import BackendError
from casemate.monitor.alerts.alert import (
    ALERT_KIND,
    Alert,
    AlertPhase,
    AlertState,
    alert_states,
    alert_to_event,
    make_alert_id,
)
from casemate.monitor.canaries.results import Severity
from casemate.protocols import EventStore, EventStoreProxy
from casemate.runtime.events import append_durably
from casemate.types import Event

HONEYTOKEN, CRAWL_LIMIT = "honeytoken", "crawl_limit"
"""Defenses whose verdicts may open an alert."""
QUARANTINE = "quarantine"
"""Kind of the events about quarantined documents, and of their alerts."""
EVENT_KINDS = ("verdict", QUARANTINE)
"""Kinds of the events that may open an alert."""
HOUR, LOOK_BACK = timedelta(hours=1), timedelta(days=1)
"""How long events of one kind share an alert, and the maximum age of a missed event."""
SECURITY_SUBJECT = "honey"
"""Subject of these alerts, where others name a canary set."""
CLIENT_GROUPS = 4
"""Alerts per kind, tenant and hour: client names are hashed into groups, and the first client of a group is named."""
CRAWLER = "A client appears to crawl the corpus"
MAX_NAME = 64
"""Characters of a client name that an alert shows."""
MAX_LISTED = 10
"""Quarantined documents that an alert lists."""
SETTLED = "Every document of this tenant was released or dropped; none is in quarantine."
"""What a closed quarantine alert says."""


class AlertingEventStore(EventStoreProxy):
    """An event store that opens alerts for the events appended through it, and closes quarantine alerts."""

    def __init__(self, store: EventStore) -> None:
        super().__init__(store)
        self._quarantined: Counter[str] = Counter()
        self._unsettled = False

    def append(self, event: Event) -> None:
        """Appends the event, and the alert that it opens, if any. Events of the quarantine are waited for.

        The alert of quarantined documents is updated with the second, fourth, eighth one and so on; with all others
        by ``close`` or by ``MissedAlertScanner``. So many documents cause few reads and few notifications.
        """
        super().append(event)
        if alert := alert_for_event(event):
            super().append(alert_to_event(alert, AlertPhase.OPENED, event.at, alert.id))
        if event.kind == QUARANTINE:
            recent = event.at - 2 * HOUR if alert else None  # the alert of a quarantined document is of this hour
            states = _quarantine_alerts(self, recent)
            is_open = any(s.open and s.alert.canaries == (_subject(event),) for s in states)
            if is_open == (alert is None) or (alert and self._is_due(alert)):
                settle_quarantine_alerts(self, event.at)
                self._unsettled = False

    def close(self) -> None:
        """Brings the alerts of the quarantine up to date, and closes the store."""
        with contextlib.suppress(BackendError):  # the scanner of the monitor does the same
            if self._unsettled:
                settle_quarantine_alerts(self, datetime.now(UTC))
        super().close()

    def _is_due(self, alert: Alert) -> bool:
        """Whether the number of documents that belong to an alert has doubled since the last update."""
        self._quarantined[alert.id] += 1
        count = self._quarantined[alert.id]
        self._unsettled = count > 1
        return count > 1 and not count & (count - 1)


class MissedAlertScanner:
    """Opens missing alerts for events of processes that crashed or that do not use ``AlertingEventStore``.

    Args:
        store: The event store.
    """

    def __init__(self, store: EventStore) -> None:
        self._store = store
        self._positions = dict.fromkeys(EVENT_KINDS, 0)

    def open_missed(self, now: datetime) -> int:
        """Opens the missing alerts. Each event is read once; events older than ``LOOK_BACK`` are skipped.

        After new events of the quarantine, and at first, ``settle_quarantine_alerts`` runs.

        Returns:
            Number of alerts opened.

        Raises:
            BackendError: If the store cannot be read or written.
        """
        found: dict[str, Event] = {}
        positions = dict(self._positions)
        for kind, position in self._positions.items():
            events, positions[kind] = self._store.read_since(kind, position, now - LOOK_BACK)
            alerts = ((event, alert) for event in events if (alert := alert_for_event(event)))
            for event, alert in alerts:
                found.setdefault(alert.id, alert_to_event(alert, AlertPhase.OPENED, event.at, alert.id))
        existing = {e.body["id"] for e in self._store.scan(ALERT_KIND, now - 2 * LOOK_BACK)} if found else set()
        missed = [event for name, event in found.items() if name not in existing]
        append_durably(self._store, missed, "the monitor's events")
        if not any(self._positions.values()) or positions[QUARANTINE] > self._positions[QUARANTINE]:
            settle_quarantine_alerts(self._store, now)
        self._positions = positions  # only now: after a failed write, the same events are read again
        return len(missed)


def settle_quarantine_alerts(store: EventStore, now: datetime) -> None:
    """Brings the quarantine alerts up to date: closes those of tenants without a document in quarantine.

    The newest open alert of any other tenant lists the documents that are in quarantine since it began.
    An alert is reopened if a document is in quarantine that came after an operator closed the alert, or while another
    process settled it. The alert of the same hour cannot open twice.

    Raises:
        BackendError: If the store cannot be read or written.
    """
    latest = {event.body.get("key"): event for event in store.scan(QUARANTINE)}
    waiting: dict[str, list[Event]] = {}
    for event in latest.values():
        if event.body.get("what") == "held":
            waiting.setdefault(_subject(event), []).append(event)
    states = _quarantine_alerts(store)
    for state in states:
        if state.open and state.alert.canaries[0] not in waiting:
            settled = replace(state.alert, changes=(SETTLED,), advice=())
            store.append(alert_to_event(settled, AlertPhase.RECOVERED, now, now.isoformat()))
    for tenant, held in waiting.items():
        of_tenant = [s for s in states if s.alert.canaries[0] == tenant]
        if not of_tenant:
            continue
        if open_ := [s for s in of_tenant if s.open]:
            _update_quarantine_alert(store, open_[-1], held, now)
            continue
        last = of_tenant[-1]
        new = held if last.alert.changes == (SETTLED,) else [e for e in held if e.at > last.changed]
        if new:
            alert = _quarantine_alert(new)
            phase = AlertPhase.UPDATED if any(s.alert.id == alert.id for s in of_tenant) else AlertPhase.OPENED
            store.append(alert_to_event(alert, phase, now, f"{new[-1].id} {now.isoformat()}"))


def _update_quarantine_alert(store: EventStore, state: AlertState, held: Sequence[Event], now: datetime) -> None:
    """Lists in an open alert what is in quarantine since it began. Notifies if the number has at least doubled."""
    counted = [event for event in held if event.at >= state.alert.since]
    if not counted:
        return
    found = _quarantine_alert(counted)
    alert = replace(
        state.alert, title=found.title, changes=found.changes, documents=found.documents, advice=found.advice
    )
    if alert == state.alert:
        return
    known = sum(event.at <= state.changed for event in counted)
    quiet = bool(state.acknowledged) or len(counted) < 2 * known
    occasion = f"{len(counted)} {counted[-1].id} {now.isoformat()}"
    store.append(alert_to_event(alert, AlertPhase.UPDATED, now, occasion, quiet))


def _quarantine_alerts(store: EventStore, since: datetime | None = None) -> list[AlertState]:
    """States of all quarantine alerts, or of those that changed since a time, oldest first."""
    return [s for s in alert_states(store.scan(ALERT_KIND, since)).values() if s.alert.kind == QUARANTINE]


def alert_for_event(event: Event) -> Alert | None:
    """The alert that an event opens; None if it opens none."""
    body = event.body
    if event.kind == QUARANTINE and body.get("what") == "held":
        return _quarantine_alert([event])
    defense = body.get("defense")
    if event.kind != "verdict" or defense not in (HONEYTOKEN, CRAWL_LIMIT) or not body.get("flagged"):
        return None
    evidence: Mapping[str, Any] = body.get("evidence", {})
    if defense == CRAWL_LIMIT:
        return _crawl_limit_alert(event, evidence)
    if evidence.get("what") == "leaked":
        return _leak_alert(event, evidence)
    if evidence.get("what") == "known to the asker":
        return _known_token_alert(event)
    return _crawl_alert(event, evidence) if evidence.get("crawler") else None


def _leak_alert(event: Event, evidence: Mapping[str, Any]) -> Alert:
    form, generation, disguise = (evidence.get(name, "?") for name in ("form", "generation", "disguise"))
    return replace(
        _new_alert("honey_leak", Severity.CRITICAL, event, "The model was about to reveal its instructions"),
        changes=(
            f"An answer contained the {form} honeytoken of generation {generation} from the instructions "
            f"(encoding: {disguise}). The answer was cut before the token.",
        ),
        advice=(
            f"Review request {event.body.get('request', '?')}: its question makes the model reveal its instructions.",
            "Replace the tokens: 'casemate canary rotate'.",
        ),
    )


def _known_token_alert(event: Event) -> Alert:
    return replace(
        _new_alert("honey_known", Severity.HIGH, event, "A question contained a honeytoken of the instructions"),
        changes=(
            "A question contained a complete honeytoken. The client has it from an earlier leak of the instructions.",
        ),
        advice=(
            "Find the leak: search logs and answers for the token with 'casemate canary scan'.",
            "Replace the tokens: 'casemate canary rotate'.",
        ),
    )


def _crawl_alert(event: Event, evidence: Mapping[str, Any]) -> Alert:
    return replace(
        _new_alert("honey_crawl", Severity.HIGH, event, CRAWLER),
        changes=(
            f"One client retrieved {evidence.get('different', 'several')} different honeytoken records, which "
            "ordinary questions hardly find.",
        ),
        documents=tuple(evidence.get("flagged", ())),
        advice=(
            "Review the other questions of this client; limit it with the defense 'crawl_limit', or block it.",
            "Other clients may do the same: check the verdicts of the honeytoken defense in this hour.",
        ),
    )


def _crawl_limit_alert(event: Event, evidence: Mapping[str, Any]) -> Alert:
    return replace(
        _new_alert("crawl", Severity.HIGH, event, CRAWLER),
        changes=(
            "crawl_limit treats a client as a crawler. The client was shown "
            f"{evidence.get('chunks', 'several')} different chunks. Its answers or questions are those of a copy more "
            "often than chance explains.",
        ),
        advice=(
            "Review the questions of this client in the dashboard (Clients, Disclosure), and block its key if needed.",
            "Other clients of the tenant may crawl with it: 'casemate client list'.",
        ),
    )


def _quarantine_alert(held: Sequence[Event]) -> Alert:
    """The alert about quarantined documents of one tenant, of the hour of the newest one."""
    ranked = sorted(held, key=lambda event: -float(event.body.get("score", 0.0)))
    first, count = ranked[0].body, len(ranked)
    made = _new_alert(QUARANTINE, Severity.MEDIUM, max(held, key=lambda event: event.at), "")
    ids = [[d["id"] for d in event.body.get("documents", ())] for event in ranked]
    if count == 1:
        title, documents = "A new document was quarantined", [*ids[0], *first.get("companions", ())]
    else:  # one chunk of each source: a long source must not hide the others
        title, documents = f"{count} new documents are in quarantine", [name for chunks in ids for name in chunks[:1]]
    which = "it" if count == 1 else "the most suspicious one first"
    return replace(
        made,
        since=min(event.at for event in held),
        title=title,
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


def _new_alert(kind: str, severity: Severity, event: Event, title: str) -> Alert:
    """An alert per kind, tenant, group of clients and hour."""
    client, tenant = str(event.body.get("client", "")), str(event.body.get("tenant", ""))
    group = int(hashlib.sha256(client.encode(errors="surrogatepass")).hexdigest(), 16) % CLIENT_GROUPS
    occasion = f"{group}@{event.at:%Y-%m-%dT%H}"
    about = (_subject(event),)
    return Alert(make_alert_id(kind, tenant, occasion), kind, severity, SECURITY_SUBJECT, about, event.at, title)


def _subject(event: Event) -> str:
    """The client that an event is about, or the tenant."""
    return (str(event.body.get("client", "")) or str(event.body.get("tenant", "")))[:MAX_NAME]
