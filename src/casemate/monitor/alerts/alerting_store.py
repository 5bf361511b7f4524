"""Opens alerts for honeytoken events, crawlers and quarantined documents as soon as they are recorded.

``AlertingEventStore`` wraps an event store and opens the alert when the event is appended. ``MissedAlertScanner`` opens
the same alerts later, for events of processes without the wrapper. Both may run: alert ids follow from the cause, so an
alert exists once. Each kind, tenant and hour has at most ``CLIENT_GROUPS`` alerts, so an attacker with many client
names cannot bury other alerts. Both keep the alerts of the quarantine up to date (``quarantine_alerts``).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from casemate.guard.client_state.crawl_evidence import describe_restriction
from casemate.monitor.alerts.alert import (
    ALERT_KIND,
    MAX_NAME,
    SECURITY_SUBJECT,
    Alert,
    AlertPhase,
    alert_to_event,
    make_alert_id,
    security_alert,
)
from casemate.monitor.alerts.quarantine_alerts import QuarantineAlerts, quarantine_alert, settle_quarantine_alerts
from casemate.monitor.canaries.results import Severity
from casemate.monitor.poisoning.quarantine import QUARANTINE_KIND
from casemate.protocols import EventStore, EventStoreProxy
from casemate.runtime.events import append_durably
from casemate.types import Event

HONEYTOKEN, CRAWL_LIMIT = "honeytoken", "crawl_limit"
"""Defenses whose verdicts may open an alert."""
EVENT_KINDS = ("verdict", QUARANTINE_KIND)
"""Kinds of the events that may open an alert."""
LOOK_BACK = timedelta(days=1)
"""Maximum age of a missed event."""
CRAWLER = "A client appears to crawl the corpus"


class AlertingEventStore(EventStoreProxy):
    """An event store that opens alerts for the events appended through it, and closes quarantine alerts."""

    def __init__(self, store: EventStore) -> None:
        super().__init__(store)
        self._quarantine = QuarantineAlerts(self)

    def append(self, event: Event) -> None:
        """Appends the event, and the alerts that it opens. Events of the quarantine are waited for."""
        super().append(event)
        alerts = alerts_for_event(event)
        for alert in alerts:
            super().append(alert_to_event(alert, AlertPhase.OPENED, event.at, alert.id))
        if event.kind == QUARANTINE_KIND:
            self._quarantine.update(event, next(iter(alerts), None))

    def close(self) -> None:
        """Brings the alerts of the quarantine up to date, and closes the store."""
        self._quarantine.finish()
        super().close()


class MissedAlertScanner:
    """Opens missing alerts for events of processes that crashed or that do not use ``AlertingEventStore``."""

    def __init__(self, store: EventStore) -> None:
        self._store = store
        self._positions = dict.fromkeys(EVENT_KINDS, 0)

    def open_missed(self, now: datetime) -> int:
        """Opens the missing alerts, and returns their number. Each event is read once, none older than ``LOOK_BACK``.

        After new events of the quarantine, and at first, ``settle_quarantine_alerts`` runs.

        Raises:
            BackendError: If the store cannot be read or written.
        """
        found: dict[str, Event] = {}
        positions = dict(self._positions)
        for kind, position in self._positions.items():
            events, positions[kind] = self._store.read_since(kind, position, now - LOOK_BACK)
            opening = ((event, alert) for event in events for alert in alerts_for_event(event))
            for event, alert in opening:
                found.setdefault(alert.id, alert_to_event(alert, AlertPhase.OPENED, event.at, alert.id))
        existing = {e.body["id"] for e in self._store.scan(ALERT_KIND, now - 2 * LOOK_BACK)} if found else set()
        missed = [event for name, event in found.items() if name not in existing]
        append_durably(self._store, missed, "the monitor's events")
        if not any(self._positions.values()) or positions[QUARANTINE_KIND] > self._positions[QUARANTINE_KIND]:
            settle_quarantine_alerts(self._store, now)
        self._positions = positions  # only now: after a failed write, the same events are read again
        return len(missed)


def alerts_for_event(event: Event) -> list[Alert]:
    """The alerts that an event opens: of a client or a document, and of a tenant whose clients are all restricted."""
    body, alerts = event.body, list[Alert | None]()
    evidence: Mapping[str, Any] = body.get("evidence", {})
    if event.kind == QUARANTINE_KIND and body.get("what") == "held":
        alerts = [quarantine_alert([event])]
    elif event.kind == "verdict" and body.get("defense") == CRAWL_LIMIT:
        of_client = _crawl_limit_alert(event, evidence) if body.get("flagged") else None
        alerts = [of_client, _restricted_tenant_alert(event, evidence)]
    elif event.kind == "verdict" and body.get("defense") == HONEYTOKEN and body.get("flagged"):
        alerts = [_honeytoken_alert(event, evidence)]
    return [alert for alert in alerts if alert is not None]


def _honeytoken_alert(event: Event, evidence: Mapping[str, Any]) -> Alert | None:
    if evidence.get("what") == "leaked":
        return _leak_alert(event, evidence)
    if evidence.get("what") == "known to the asker":
        return _known_token_alert(event)
    return _crawl_alert(event, evidence) if evidence.get("crawler") else None


def _leak_alert(event: Event, evidence: Mapping[str, Any]) -> Alert:
    form, generation, disguise = (evidence.get(name, "?") for name in ("form", "generation", "disguise"))
    return security_alert(
        "honeytoken_leak",
        Severity.CRITICAL,
        event,
        "The model was about to reveal its instructions",
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
    return security_alert(
        "honeytoken_known",
        Severity.HIGH,
        event,
        "A question contained a honeytoken of the instructions",
        changes=(
            "A question contained a complete honeytoken. The client has it from an earlier leak of the instructions.",
        ),
        advice=(
            "Find the leak: search logs and answers for the token with 'casemate canary scan'.",
            "Replace the tokens: 'casemate canary rotate'.",
        ),
    )


def _crawl_alert(event: Event, evidence: Mapping[str, Any]) -> Alert:
    return security_alert(
        "honeytoken_crawl",
        Severity.HIGH,
        event,
        CRAWLER,
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
    return security_alert(
        "crawl",
        Severity.HIGH,
        event,
        CRAWLER,
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


def _restricted_tenant_alert(event: Event, evidence: Mapping[str, Any]) -> Alert | None:
    """The alert that all clients of a tenant are restricted, one for each restriction; None if they are not."""
    if "tenant_until" not in evidence or not event.body.get("enforced", True):
        return None
    tenant, since = str(event.body.get("tenant", "")), datetime.fromtimestamp(evidence["tenant_since"], UTC)
    until = datetime.fromtimestamp(evidence["tenant_until"], UTC)
    return Alert(
        make_alert_id("crawl_tenant", tenant, f"{since:%Y-%m-%dT%H}"),
        "crawl_tenant",
        Severity.HIGH,
        SECURITY_SUBJECT,
        (tenant[:MAX_NAME],),
        event.at,
        "All clients of a tenant are restricted",
        changes=(f"{describe_restriction(tenant, until)}.",),
        advice=(
            "Find the crawlers and block their keys: 'casemate client list'.",
            f"End the restriction: 'casemate client reset --tenant {tenant}'.",
        ),
    )
