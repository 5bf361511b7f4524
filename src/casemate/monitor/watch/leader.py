"""One leader among several processes: whoever holds the lease in the store.

The lease is renewed while it is held, at a third of its length. When that fails until its end, by this process's own
count from before it asked, the work is broken off: the next leader may be at it already.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from casemate.errors import BackendError, ConfigError
from casemate.protocols import EventStore

log = logging.getLogger(__name__)


def holder() -> str:
    """A name for this process that no other has: host, process and a random part."""
    host = "".join(c for c in socket.gethostname() if c.isprintable())[:100]
    return f"{host}:{os.getpid()}:{uuid.uuid4().hex[:12]}"


async def together(*work: Coroutine[Any, Any, object]) -> None:
    """Does several things side by side; what one of them raises ends the others, and comes through.

    Each is cancelled once: a second time would break off what it does to end cleanly, as ``gather`` would.
    """
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


@dataclass
class Leader:
    """A process that would lead.

    Attributes:
        store: Where the lease is.
        name: Of the lease.
        seconds: How long it is held without being renewed: the time until another takes over after a crash.
        holder: The name of this process.
    """

    store: EventStore
    name: str
    seconds: float = 30.0
    holder: str = field(default_factory=holder)
    _until: float = field(default=0.0, init=False)
    _asking: asyncio.Future[bool] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"the lease {self.name!r} is held for {self.seconds} seconds; it must be above 0")

    @property
    def held(self) -> bool:
        """Whether the lease is held for sure."""
        return time.monotonic() < self._until

    async def take(self) -> bool:
        """Takes the lease, or renews it; whether it is held now."""
        asked = time.monotonic()
        self._asking = asyncio.ensure_future(asyncio.to_thread(self.store.lease, self.name, self.holder, self.seconds))
        try:
            taken = await asyncio.shield(self._asking)
        except BackendError as error:
            log.warning("the lease %s could not be asked for: %s", self.name, error)
            return self.held
        self._until = asked + self.seconds if taken else 0.0
        return self.held

    async def lead(self, *work: Coroutine[Any, Any, object]) -> bool:
        """Works for as long as the lease can be renewed; the lease must be held.

        Args:
            work: Goes on until it ends or raises, or the lease is lost; then all of it is broken off.

        Returns:
            Whether the lease was kept.
        """
        keeper = asyncio.ensure_future(self._keep())
        tasks = [keeper, *(asyncio.ensure_future(w) for w in work)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
        return keeper not in done

    async def whenever(
        self, work: Callable[[], Coroutine[Any, Any, None]], told: Callable[[bool], None] | None = None
    ) -> None:
        """Works whenever this process leads, for ever; when it is cancelled, the lease is free for another.

        Args:
            work: Called each time this process begins to lead. A store that fails breaks its work off for a while.
            told: Called with True when this process begins to lead, with False when it does not any more.
        """
        try:
            while True:
                if await self.take():
                    await self._term(work, told or (lambda leads: None))
                await asyncio.sleep(self.seconds / 3)
        finally:
            await asyncio.to_thread(self.store.flush)  # what was found is written down before another looks for it
            await self.release()

    async def _term(self, work: Callable[[], Coroutine[Any, Any, None]], told: Callable[[bool], None]) -> None:
        """From beginning to lead until not leading any more."""
        told(True)
        try:
            if not await self.lead(work()):
                log.warning("the lease %s was lost; another process goes on", self.name)
        except BackendError as error:
            log.error("what needs the lease %s is broken off, and tried again: %s", self.name, error)
        finally:
            told(False)

    async def release(self) -> None:
        """Gives the lease back, so that another need not wait for its end."""
        self._until = 0.0
        if self._asking:  # broken off here, it goes on in its thread, and would take back what is given
            await asyncio.gather(self._asking, return_exceptions=True)
        try:
            await asyncio.to_thread(self.store.release, self.name, self.holder)
        except BackendError as error:
            log.warning("the lease %s was not given back, and ends by itself: %s", self.name, error)

    async def _keep(self) -> None:
        """Renews the lease until it is lost."""
        while self.held:
            await asyncio.sleep(self.seconds / 3)
            await self.take()
