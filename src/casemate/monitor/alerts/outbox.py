"""From alerts to people: each change of an alert goes through a channel, until it has arrived.

What was tried, when, and how it ended, are events; what is still to be sent follows from them and from the alerts'. So
nothing is lost when a channel is down, or when the process dies between sending and noting: then the notice comes
twice, with the same key. What goes next is decided in ``letters``. Only who holds the channel's lease may send.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from casemate.errors import BackendError, CasemateError
from casemate.monitor.alerts.alert import KIND as ALERT
from casemate.monitor.alerts.letters import KIND, Book, Failure, Policy
from casemate.protocols import Channel, EventStore
from casemate.types import Event, Notice

log = logging.getLogger(__name__)

LOOK_BACK = timedelta(days=30)
"""How far back alerts are looked at."""
REASON = 200
"""Characters of a reason that are kept."""


@dataclass(frozen=True)
class Outbox:
    """What goes through one channel.

    Attributes:
        store: Where alerts and attempts are.
        channel: To whom they are told.
        policy: How notices are sent.
    """

    store: EventStore
    channel: Channel
    policy: Policy = Policy()

    async def deliver(self, now: Callable[[], datetime], may: Callable[[], bool] = lambda: True) -> datetime | None:
        """Sends what is due, one notice after another; each is noted before the next.

        Args:
            now: The time.
            may: Asked before each notice: whether this process still holds the lease.

        Returns:
            When something is due next; None: nothing waits.

        Raises:
            BackendError: If the store cannot be read or written.
        """
        since = now() - LOOK_BACK
        alerts = await asyncio.to_thread(self.store.scan, ALERT, since)
        if not alerts:
            return None
        name = self.channel.name
        book = Book(alerts, await asyncio.to_thread(self.store.scan, KIND, since), name, self.policy)
        if lost := book.give_up(now()):
            log.error("channel %s: %d notices are too old, and given up", name, len(lost))
            await self._note(lost)
        while may() and (sending := book.next(now())):
            failure = await self._send(sending.notice)
            if failure:
                log.warning("channel %s did not take %s: %s", name, sending.notice.key, failure.reason)
            await self._note(book.settle(sending, now(), failure))
        return book.next_due(now())

    async def _send(self, notice: Notice) -> Failure | None:
        """Sends one notice; None, or why that failed. The words of errors that are not ours may hold a secret."""
        try:
            async with asyncio.timeout(self.policy.timeout_s):
                await self.channel.send(notice)
        except BackendError as error:
            return Failure(str(error)[:REASON], error.retryable)
        except CasemateError as error:
            return Failure(str(error)[:REASON], retryable=False)
        except Exception as error:
            late = isinstance(error, TimeoutError)
            return Failure(f"no answer within {self.policy.timeout_s:g} s" if late else type(error).__name__)
        return None

    async def _note(self, events: Sequence[Event]) -> None:
        """Writes attempts down, for good."""
        for event in events:
            self.store.append(event)
        if not await asyncio.to_thread(self.store.flush):
            message = "the event store did not take how a notice was delivered; it will be sent again"
            raise BackendError(message, backend="store", retryable=True)
