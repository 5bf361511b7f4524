"""Conformance suite for notification channels."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from casemate.errors import BackendError
from casemate.protocols import Channel
from casemate.types import Notification

NOTIFICATION = Notification(
    key="alert-1:opened:1",
    alert="alert-1",
    action="opened",
    severity="high",
    at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    title="Canary set 'clinic': 2 of 50 canaries fail",
    text="Two canaries fail since 03:00 UTC. naïve 漢字 \u202e <b>",
    markdown="**Two** canaries fail since 03:00 UTC.",
    details={"set": "clinic", "canaries": ["opening-hours"]},
)


def check_channel(channel: Channel, broken: Channel | None = None) -> None:
    """Runs every check for a channel. Call it where no event loop runs.

    Args:
        channel: A channel whose receiver accepts notifications.
        broken: The same kind of channel whose receiver refuses or is unreachable; None: the check is left out.
    """
    assert isinstance(channel.name, str) and channel.name, "a channel needs a name; deliveries are recorded under it"
    asyncio.run(channel.send(NOTIFICATION))
    asyncio.run(channel.send(NOTIFICATION))  # a second delivery of the same key is allowed

    async def concurrent() -> None:
        await asyncio.gather(*(channel.send(NOTIFICATION) for _ in range(4)))

    asyncio.run(concurrent())
    if broken is not None:
        try:
            asyncio.run(broken.send(NOTIFICATION))
        except BackendError as error:
            assert str(error) and NOTIFICATION.text not in str(error), "an error must not repeat the notification"
        else:
            raise AssertionError("a notification that was not delivered must raise BackendError")
