"""The post: of all processes on a store, one opens the alerts that were missed, and one sends through each channel.

It needs no canaries: a gateway has one, too.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from casemate.errors import ConfigError
from casemate.events import EventStore
from casemate.monitor.alerts.at_once import Missed
from casemate.monitor.alerts.outbox import Outbox
from casemate.monitor.watch.leader import Leader, together
from casemate.monitor.watch.settings import Settings
from casemate.protocols import Channel


@dataclass(frozen=True)
class Post:
    """What brings alerts to people.

    Attributes:
        store: Where alerts are, and the leases.
        channels: To whom they are told; with names that differ.
        settings: How.

    Raises:
        ConfigError: If two channels have the same name.
    """

    store: EventStore
    channels: Sequence[Channel] = ()
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        names = [channel.name for channel in self.channels]
        if len(set(names)) < len(names):
            raise ConfigError(f"two channels have the same name: {', '.join(sorted(names))}; give each one of its own")

    async def run(self) -> None:
        """Sends whatever falls due, until it is cancelled."""
        sending = [(leader := self._leader(c.name)).whenever(partial(self._send, leader, c)) for c in self.channels]
        await together(self._leader().whenever(self._open), *sending)

    async def once(self) -> bool:
        """Sends what is due now, unless another process is there to do it; whether this one did.

        Raises:
            BackendError: If the store fails.
        """
        await asyncio.to_thread(Missed(self.store).open, self._now())
        return all(await asyncio.gather(*(self._send_once(channel) for channel in self.channels)))

    async def _open(self) -> None:
        missed = Missed(self.store)
        while True:
            await asyncio.to_thread(missed.open, self._now())
            await self.settings.sleep(self.settings.poll_s)

    async def _send(self, leader: Leader, channel: Channel) -> None:
        outbox = Outbox(self.store, channel, self.settings.policy)
        while True:
            await outbox.deliver(self._now, lambda: leader.held)
            await self.settings.sleep(self.settings.poll_s)

    async def _send_once(self, channel: Channel) -> bool:
        leader = self._leader(channel.name)
        if not await leader.take():
            return False
        try:
            outbox = Outbox(self.store, channel, self.settings.policy)
            return await leader.lead(outbox.deliver(self._now, lambda: leader.held))
        finally:
            await leader.release()

    def _leader(self, channel: str | None = None) -> Leader:
        """Of one channel, whose name may be long; None: of the opening of alerts."""
        about = "" if channel is None else f":{hashlib.sha256(channel.encode()).hexdigest()[:16]}"
        return Leader(self.store, f"alerts{about}", self.settings.lease_s, self.settings.holder)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self.settings.clock(), UTC)
