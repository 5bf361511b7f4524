"""Transactional outbox: delivers every alert change through a channel, at least once.

Every delivery attempt is an event, and what is pending is computed from these events and those of the alerts. So
nothing is lost when a channel is down. If the process dies between sending and recording, the notification is sent
again, with the same key. ``delivery_queue`` decides what is sent next. Only the holder of the channel's lease sends.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from casemate.errors import BackendError, CasemateError
from casemate.monitor.alerts.alert import ALERT_KIND
from casemate.monitor.alerts.delivery_queue import (
    DELIVERY_KIND,
    PER_HOUR,
    TEST,
    DeliveryAttempt,
    DeliveryFailure,
    DeliveryOutcome,
    DeliveryQueue,
    attempt_to_event,
)
from casemate.monitor.canaries.results import Severity
from casemate.protocols import Channel, EventStore
from casemate.runtime.events import append_durably
from casemate.types import Event, Notification

log = logging.getLogger(__name__)

LOOK_BACK = timedelta(days=30)
"""Age up to which alerts are read."""
TIMEOUT_S = 60.0
"""Timeout of one delivery."""
MAX_REASON = 200
"""Characters of a stored reason of a failure."""
RETRIED = "; it will be retried"
"""What channels append to a reason; untrue of a test notification."""


@dataclass(frozen=True)
class Outbox:
    """Outbox of one channel, with a limit of notifications per hour, at least 1."""

    store: EventStore
    channel: Channel
    per_hour: int = PER_HOUR

    async def deliver(
        self, now: Callable[[], datetime], may_send: Callable[[], bool] = lambda: True
    ) -> datetime | None:
        """Sends everything that is due, one notification at a time; each is recorded before the next.

        ``may_send`` tells before each whether this process still holds the lease. Returns when the next one is due;
        None: nothing is pending. Raises ``BackendError`` if the store fails.
        """
        since = now() - LOOK_BACK
        alerts = await asyncio.to_thread(self.store.scan, ALERT_KIND, since)
        if not alerts:
            return None
        name = self.channel.name
        attempts = await asyncio.to_thread(self.store.scan, DELIVERY_KIND, since)
        queue = DeliveryQueue(alerts, attempts, name, self.per_hour)
        if expired := queue.expire(now()):
            log.error("channel %s: %d notifications expired without delivery", name, len(expired))
            await self._append(expired)
        while may_send() and (delivery := queue.next_delivery(now())):
            failure = await self._send(delivery.notification)
            if failure:
                log.warning("channel %s: delivery of %s failed: %s", name, delivery.notification.key, failure.reason)
            await self._append(queue.record(delivery, now(), failure))
        return queue.next_due(now())

    async def send_test(self, now: datetime) -> str:
        """Sends a labelled test notification once, and records the outcome; returns why it failed, or ""."""
        key = f"{TEST}-{uuid.uuid4().hex[:16]}"
        text = "This is a test of the notification channel. Nothing happened; no action is needed."
        message = (f"[{TEST}] Casemate: {TEST} notification", text, f"**[{TEST}]** {text}", {"kind": TEST})
        failure = await self._send(Notification(key, key, TEST, Severity.LOW, now, *message))
        reason = failure.reason.removesuffix(RETRIED) if failure else ""
        outcome = DeliveryOutcome.FAILED if failure else DeliveryOutcome.DELIVERED
        attempt = DeliveryAttempt(1, outcome, now, now, key)
        await self._append([attempt_to_event(attempt, key, TEST, self.channel.name, reason)])
        return reason

    async def _send(self, notification: Notification) -> DeliveryFailure | None:
        """Sends one notification; returns why it failed, or None. Foreign error messages may contain a secret."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self.channel.send(notification)
        except BackendError as error:
            return DeliveryFailure(str(error)[:MAX_REASON], error.retryable)
        except CasemateError as error:
            return DeliveryFailure(str(error)[:MAX_REASON], retryable=False)
        except Exception as error:
            timed_out = isinstance(error, TimeoutError)
            return DeliveryFailure(f"no answer within {TIMEOUT_S:g} s" if timed_out else type(error).__name__)
        return None

    async def _append(self, attempts: Sequence[Event]) -> None:
        remedy = "the notification will be sent again"
        await asyncio.to_thread(append_durably, self.store, attempts, "a delivery", remedy)
