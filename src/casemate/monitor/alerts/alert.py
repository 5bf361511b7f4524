"""Alerts as events: opened, updated, acknowledged and recovered.

The state of an alert is the sequence of its events; nothing else is stored, so a crash loses nothing. Event ids are
derived from the run, so processing a run again writes the same events, and the store keeps each once.

Canaries that begin to fail in the same run, or because of the same new document, share one alert. While it is open, its
canaries open no other. Other detectors, such as the honeytoken defense, open alerts with ``raise_alert``.

An alert contains document ids, and no text of a document. Of an answer, ``changes`` quotes at most a phrase that a
canary forbids, and of a canary the phrases that it expects.

Functions that read or write the store raise ``BackendError`` if it fails.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter

from casemate.errors import DataError
from casemate.monitor.canaries.results import Severity
from casemate.protocols import EventStore
from casemate.runtime.events import digest
from casemate.runtime.stored import read_stored
from casemate.types import Event

ALERT_KIND = "alert"
"""Kind of the events that store one change of one alert."""
SECURITY_SUBJECT = "clients and documents"
"""Subject of the alerts about clients and documents, where others name a canary set."""
CLIENT_GROUPS = 4
"""Alerts per kind, tenant and hour: client names are hashed into groups, and the first client of a group is named."""
MAX_NAME = 64
"""Characters of a client name that an alert shows."""


class AlertPhase(StrEnum):
    """Kind of change of an alert."""

    OPENED = "opened"
    UPDATED = "updated"
    ACKNOWLEDGED = "acknowledged"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition that needs an operator.

    Attributes:
        id: Unique id; also the deduplication key for pagers.
        kind: Machine-readable kind: ``changed``, ``many_at_once``, ``unreachable``, ``blind`` or any other word.
        set: Canary set, or another subject.
        since: When the condition began, which may be long before it was detected.
        documents: Ids of documents in the answers that are not in the baseline.
        sources: Sources in the answers that passed answers never had; also of targets without document ids.
        changed: Sources that were changed or removed since the baseline, or during the comparison of a drift.
    """

    id: str
    kind: str
    severity: Severity
    set: str
    canaries: tuple[str, ...]
    since: datetime
    title: str
    changes: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AlertState:
    """State of an alert after its latest event.

    Attributes:
        phase: Latest change, except acknowledgments.
        changed: Time of that change.
        acknowledged: Who acknowledged it; empty: not acknowledged.
        events: Ids of its events, oldest first.
    """

    alert: Alert
    phase: AlertPhase
    opened: datetime
    changed: datetime
    acknowledged: str = ""
    events: tuple[str, ...] = ()

    @property
    def open(self) -> bool:
        """Whether it has not recovered."""
        return self.phase is not AlertPhase.RECOVERED


_ALERT = TypeAdapter(Alert)


def make_alert_id(kind: str, about: str, occasion: str) -> str:
    """Id of an alert, equal for the same kind, subject and occasion.

    >>> make_alert_id("changed", "clinic", "clinic@2026-03-01T12:00:00Z")
    'changed-aea553bdbccfabe9'
    """
    return f"{kind[:60]}-{digest(kind, about, occasion)}"


def security_alert(
    kind: str, severity: Severity, event: Event, title: str, *, since: datetime | None = None, **details: Any
) -> Alert:
    """An alert per kind, tenant, group of clients and hour; ``details`` are further fields of `Alert`."""
    client, tenant = str(event.body.get("client", "")), str(event.body.get("tenant", ""))
    group = int(digest(client, length=64), 16) % CLIENT_GROUPS
    occasion = f"{group}@{event.at:%Y-%m-%dT%H}"
    name, about = make_alert_id(kind, tenant, occasion), (alert_subject(event),)
    return Alert(name, kind, severity, SECURITY_SUBJECT, about, since or event.at, title, **details)


def alert_subject(event: Event) -> str:
    """The client that an event is about, or the tenant."""
    return (str(event.body.get("client", "")) or str(event.body.get("tenant", "")))[:MAX_NAME]


def alert_to_event(alert: Alert, phase: AlertPhase, at: datetime, occasion: str, quiet: bool = False) -> Event:
    """Converts a change to an event; ``quiet``: without a notification.

    The store keeps the same change of the same occasion, such as a run, once.
    """
    about = "" if phase is AlertPhase.OPENED else f":{digest(occasion)}"
    body = asdict(alert) | {"since": alert.since.isoformat(), "phase": phase, "quiet": quiet}
    return Event(f"{ALERT_KIND}:{phase}:{alert.id}{about}", at, ALERT_KIND, body)


def alert_from_event(event: Event) -> Alert:
    """The alert after a change."""
    return read_stored(_ALERT, event.body, "alert")


def alert_states(events: Iterable[Event]) -> dict[str, AlertState]:
    """State of each alert after these events, by id, oldest first. Events of other kinds are ignored."""
    found: dict[str, AlertState] = {}
    for event in events:
        if event.kind != ALERT_KIND:
            continue
        phase, name = AlertPhase(event.body["phase"]), str(event.body["id"])
        before = found.get(name)
        if phase is AlertPhase.ACKNOWLEDGED:
            if before:
                found[name] = replace(before, acknowledged=str(event.body["by"]), events=(*before.events, event.id))
            continue
        opened = before.opened if before else event.at
        by = before.acknowledged if before and before.open else ""  # who acknowledged it did so before it was reopened
        ids = before.events if before else ()
        found[name] = AlertState(alert_from_event(event), phase, opened, event.at, by, (*ids, event.id))
    return found


def open_alerts(store: EventStore, about: str | None = None) -> list[AlertState]:
    """Open alerts of one subject, or of all, oldest first."""
    found = alert_states(store.scan(ALERT_KIND)).values()
    return [s for s in found if s.open and about in {None, s.alert.set}]


def raise_alert(store: EventStore, alert: Alert, at: datetime) -> bool:
    """Opens an alert, unless its id, or an open one of equal kind, subject and canaries exists.

    Returns whether it was opened. An open alert of the same subject with one of its documents has the same cause: it is
    updated instead, once for each kind and canaries.
    """
    same = (alert.set, alert.kind, frozenset(alert.canaries))
    states = alert_states(store.scan(ALERT_KIND))
    if alert.id in states or any(
        s.open and (s.alert.set, s.alert.kind, frozenset(s.alert.canaries)) == same for s in states.values()
    ):
        return False
    named = set(alert.documents)
    cause = next(
        (s for s in states.values() if s.open and s.alert.set == alert.set and named & {*s.alert.documents}), None
    )
    if cause is not None:
        joined = replace(
            cause.alert,
            severity=highest_severity([cause.alert.severity, alert.severity]),
            changes=(*cause.alert.changes, alert.title, *alert.changes),
            documents=tuple(dict.fromkeys([*cause.alert.documents, *alert.documents])),
            changed=tuple(dict.fromkeys([*cause.alert.changed, *alert.changed])),
        )
        occasion = json.dumps([alert.kind, *sorted(alert.canaries)])  # without a time: stored once
        store.append(alert_to_event(joined, AlertPhase.UPDATED, at, occasion, quiet=bool(cause.acknowledged)))
        return False
    store.append(alert_to_event(alert, AlertPhase.OPENED, at, alert.id))
    return True


def acknowledge_alert(store: EventStore, alert_id: str, by: str, at: datetime) -> None:
    """Acknowledges an alert: from now on it notifies only if its severity rises or it recovers.

    Raises:
        DataError: If no open alert has this id.
    """
    _require_open(store, alert_id)
    body = {"id": alert_id, "phase": AlertPhase.ACKNOWLEDGED, "by": by}
    event_id = f"{ALERT_KIND}:{AlertPhase.ACKNOWLEDGED}:{alert_id}:{digest(by, at.isoformat())}"
    store.append(Event(event_id, at, ALERT_KIND, body))


def close_alert(store: EventStore, alert_id: str, reason: str, at: datetime) -> None:
    """Closes an alert by hand. Alerts without a recovery condition must be closed so.

    Raises:
        DataError: If no open alert has this id.
    """
    closed = replace(_require_open(store, alert_id), changes=(reason,), advice=())
    store.append(alert_to_event(closed, AlertPhase.RECOVERED, at, at.isoformat()))


def highest_severity(severities: Collection[Severity]) -> Severity:
    """The highest severity; LOW if there are none."""
    return max(severities, key=lambda severity: severity.rank, default=Severity.LOW)


def _require_open(store: EventStore, alert_id: str) -> Alert:
    found = {s.alert.id: s.alert for s in open_alerts(store)}
    if alert_id not in found:
        raise DataError(f"no open alert has the id {alert_id!r}; open alerts: {', '.join(found) or 'none'}")
    return found[alert_id]
