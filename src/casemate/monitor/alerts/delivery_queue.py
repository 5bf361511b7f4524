"""Delivery queue of one notification channel: what is pending and what is sent next.

Pure: computed from the events of alerts and of delivery attempts. Notifications of one alert keep their order; one that
waits for a retry delays those behind it. The most severe alert goes first. Above the rate limit
``per_hour``, everything pending is combined into one summary. One notification per hour is reserved for
critical alerts, so noise cannot block them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from casemate.monitor.alerts.alert import AlertPhase, alert_from_event, alert_states, highest_severity
from casemate.monitor.alerts.messages import render_alert, summarize_alerts
from casemate.monitor.canaries.results import Severity, group_by
from casemate.runtime.events import digest
from casemate.types import Event, Notification

DELIVERY_KIND = "delivery"
"""Kind of the events that store one delivery attempt of one alert change, or of a test notification."""
TEST = "test"
"""Action of a test notification, and what its delivery attempt names as the alert."""
HOUR = timedelta(hours=1)


FIRST_BACKOFF_S, MAX_BACKOFF_S = 5.0, 3600.0
"""Backoff after the first failed attempt, which doubles with each further one, and the longest backoff."""
EXPIRY = timedelta(days=1)
"""Age at which a pending notification expires, unless it is the latest of an open alert."""
PER_HOUR = 20
"""Default of the notifications per channel and hour."""


def backoff(key: str, number: int, retryable: bool = True) -> timedelta:
    """Exponential backoff after the failed attempt ``number``, with a jitter factor between 0.5 and 1.5.

    It is the longest if a retry does not fix the failure. The jitter is derived from the key, so retries after one
    outage are spread, and reproducible.
    """
    jitter = int(digest(key, str(number))[:8], 16) / 2**32
    length = min(FIRST_BACKOFF_S * 2.0 ** min(number - 1, 40), MAX_BACKOFF_S)
    return timedelta(seconds=(length if retryable else MAX_BACKOFF_S) * (0.5 + jitter))


class DeliveryOutcome(StrEnum):
    """Outcome of a delivery attempt."""

    DELIVERED = "delivered"
    FAILED = "failed"
    EXPIRED = "expired"


class DeliveryAttempt(NamedTuple):
    """The latest delivery attempt of an alert change.

    Attributes:
        number: From 1.
        notification: Key of the notification that carried the change.
    """

    number: int
    outcome: DeliveryOutcome
    at: datetime
    retry_at: datetime
    notification: str


class DeliveryFailure(NamedTuple):
    """Why a delivery failed, and whether a prompt retry may help."""

    reason: str
    retryable: bool = True


class Delivery(NamedTuple):
    """One notification to send, and the events of the alert changes that it carries."""

    updates: tuple[Event, ...]
    notification: Notification


class DeliveryQueue:
    """Queue of one channel, from events in the order written.

    Attempts of other channels are ignored. ``per_hour`` is at least 1.
    """

    def __init__(self, alerts: Sequence[Event], attempts: Iterable[Event], channel: str, per_hour: int) -> None:
        self._channel, self._per_hour = channel, per_hour
        self._states = alert_states(alerts)
        own = (e for e in attempts if e.body["channel"] == channel and e.body["alert"] != TEST)
        self._last = {e.body["event"]: _attempt_from_event(e) for e in own}
        notified = (e for e in alerts if e.body["phase"] != AlertPhase.ACKNOWLEDGED and not e.body["quiet"])
        self._updates = group_by(notified, lambda e: str(e.body["id"]))

    def next_delivery(self, now: datetime) -> Delivery | None:
        """The notification to send now; None if nothing is due or the rate limit is reached."""
        pending = [update for updates in self._due(now) for update in updates]
        remaining = self._per_hour - len(self._delivered_in_last_hour(now))
        if self._per_hour > 1 and Severity.CRITICAL not in map(_severity, pending):
            remaining -= 1  # reserved for critical alerts
        if not pending or remaining < 1:
            return None
        updates = tuple(pending if remaining == 1 else pending[:1])
        if len(updates) == 1:
            return Delivery(updates, _notification(updates[0], self._channel))
        return Delivery(updates, _summary(updates, self._channel))

    def next_due(self, now: datetime) -> datetime | None:
        """When the next notification may be due, if none is due now; None: nothing is pending."""
        retries = [self._last[updates[0].id].retry_at for updates in self._pending() if self._in_backoff(updates, now)]
        slots = [at + HOUR for at in self._delivered_in_last_hour(now)] if self._due(now) else []
        return min([*retries, *slots], default=None)

    def record(self, delivery: Delivery, now: datetime, failure: DeliveryFailure | None) -> list[Event]:
        """Records the outcome of a delivery, and returns its events."""
        outcome = DeliveryOutcome.FAILED if failure else DeliveryOutcome.DELIVERED
        key = delivery.notification.key
        return [self._record(u, outcome, now, key, failure or DeliveryFailure("")) for u in delivery.updates]

    def expire(self, now: datetime) -> list[Event]:
        """Drops notifications that are too old and not the latest of an open alert, and returns the events."""
        limit = now - EXPIRY
        old = [u for updates in self._pending() for u in updates if u.at < limit and not self._is_latest(u)]
        reason = DeliveryFailure("expired", retryable=False)
        return [self._record(u, DeliveryOutcome.EXPIRED, now, "", reason) for u in old]

    def _is_latest(self, update: Event) -> bool:
        alert = update.body["id"]
        return self._states[alert].open and update is self._updates[alert][-1]

    def _pending(self) -> list[list[Event]]:
        """Undelivered changes of each alert, in order."""
        settled = {e for e, attempt in self._last.items() if attempt.outcome is not DeliveryOutcome.FAILED}
        left = ([u for u in updates if u.id not in settled] for updates in self._updates.values())
        return [updates for updates in left if updates]

    def _in_backoff(self, updates: Sequence[Event], now: datetime) -> bool:
        """Whether the first change of an alert waits for a retry."""
        last = self._last.get(updates[0].id)
        return last is not None and last.retry_at > now

    def _due(self, now: datetime) -> list[list[Event]]:
        """Undelivered changes of each alert that is not in backoff, most severe alert first."""
        due = [updates for updates in self._pending() if not self._in_backoff(updates, now)]
        return sorted(due, key=lambda updates: -highest_severity([*map(_severity, updates)]).rank)

    def _delivered_in_last_hour(self, now: datetime) -> list[datetime]:
        delivered = {
            a.notification: a.at
            for a in self._last.values()
            if a.outcome is DeliveryOutcome.DELIVERED and a.at > now - HOUR
        }
        return list(delivered.values())

    def _record(
        self, update: Event, outcome: DeliveryOutcome, now: datetime, key: str, failure: DeliveryFailure
    ) -> Event:
        last = self._last.get(update.id)
        number = last.number + 1 if last else 1
        retry_at = now + backoff(update.id, number, failure.retryable)
        attempt = self._last[update.id] = DeliveryAttempt(number, outcome, now, retry_at, key)
        return attempt_to_event(attempt, update.id, update.body["id"], self._channel, failure.reason)


def attempt_to_event(attempt: DeliveryAttempt, event: str, alert: str, channel: str, reason: str) -> Event:
    """Converts an attempt to an event.

    ``event`` and ``alert`` are the ids of what it delivers, or ``TEST``; without a failure the reason is empty.
    """
    body = {
        "event": event,
        "alert": alert,
        "channel": channel,
        "number": attempt.number,
        "outcome": attempt.outcome,
        "retry_at": attempt.retry_at.isoformat(),
        "notification": attempt.notification,
        "reason": reason,
    }
    event_id = f"{DELIVERY_KIND}:{digest(event, channel, length=32)}:{attempt.number}"
    return Event(event_id, attempt.at, DELIVERY_KIND, body)


def _attempt_from_event(event: Event) -> DeliveryAttempt:
    body = event.body
    retry_at = datetime.fromisoformat(body["retry_at"])
    outcome = DeliveryOutcome(body["outcome"])
    return DeliveryAttempt(int(body["number"]), outcome, event.at, retry_at, body["notification"])


def _severity(update: Event) -> Severity:
    return Severity(update.body["severity"])


def _notification(update: Event, channel: str) -> Notification:
    alert, phase = alert_from_event(update), AlertPhase(update.body["phase"])
    details = {
        "kind": alert.kind,
        "set": alert.set,
        "canaries": list(alert.canaries),
        "since": alert.since.isoformat(),
        "documents": list(alert.documents),
        "sources": list(alert.sources),
        "changed": list(alert.changed),
    }
    text = render_alert(alert, phase)
    return Notification(f"{update.id}@{channel}", alert.id, phase, alert.severity, update.at, *text, details)


def _summary(updates: Sequence[Event], channel: str) -> Notification:
    text = summarize_alerts([(alert_from_event(u), AlertPhase(u.body["phase"])) for u in updates])
    key = f"summary-{digest(channel, *(u.id for u in updates), length=32)}"
    details, severity = (
        {"alerts": sorted({u.body["id"] for u in updates})},
        highest_severity([*map(_severity, updates)]),
    )
    return Notification(key, key, "summary", severity, max(u.at for u in updates), *text, details)
