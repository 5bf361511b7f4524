"""Leader election among processes, by a lease in the event store.

The leader renews the lease at a third of its length. If renewal fails until the lease expires, by a monotonic clock
started before the last request, its work is cancelled: the next leader may already have started.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from casemate.errors import BackendError
from casemate.protocols import EventStore

log = logging.getLogger(__name__)


def new_holder_name() -> str:
    """A unique name for this process as a lease holder: host, process id and a random part."""
    host = "".join(c for c in socket.gethostname() if c.isprintable())[:100]
    return f"{host}:{os.getpid()}:{uuid.uuid4().hex[:12]}"


async def run_concurrently(*work: Coroutine[Any, Any, object]) -> None:
    """Runs coroutines concurrently; the first exception cancels the others and is raised.

    Each is cancelled once: a second cancellation, as by ``gather``, would interrupt its cleanup.
    """
    await _wait_and_cancel([asyncio.ensure_future(w) for w in work], asyncio.FIRST_EXCEPTION)


async def _wait_and_cancel(tasks: Sequence[asyncio.Future[Any]], until: str) -> set[asyncio.Future[Any]]:
    """Waits for tasks, cancels the rest and waits for its cleanup; raises the first exception, or returns the done."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=until)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    return done


@dataclass
class LeaderElection:
    """One process's part in a leader election.

    Attributes:
        lease_s: Seconds after a crash until another process takes over.
    """

    store: EventStore
    name: str
    lease_s: float = 30.0
    holder: str = field(default_factory=new_holder_name)
    _expires: float = field(default=0.0, init=False)
    _request: asyncio.Future[bool] | None = field(default=None, init=False, repr=False)

    @property
    def is_leader(self) -> bool:
        """Whether this process certainly holds the lease."""
        return time.monotonic() < self._expires

    async def acquire(self) -> bool:
        """Acquires or renews the lease; returns whether this process holds it."""
        requested = time.monotonic()
        lease = asyncio.to_thread(self.store.lease, self.name, self.holder, self.lease_s)
        self._request = asyncio.ensure_future(lease)
        try:
            acquired = await asyncio.shield(self._request)
        except BackendError as error:
            log.warning("the lease %s could not be requested: %s", self.name, error)
            return self.is_leader
        self._expires = requested + self.lease_s if acquired else 0.0
        return self.is_leader

    async def run_while_leader(self, *work: Coroutine[Any, Any, object]) -> bool:
        """Runs coroutines until the first one ends or the lease is lost, then cancels the others. Requires the lease.

        Returns whether the lease was kept.
        """
        renewal = asyncio.ensure_future(self._renew())
        tasks = [renewal, *(asyncio.ensure_future(w) for w in work)]
        done = await _wait_and_cancel(tasks, asyncio.FIRST_COMPLETED)
        return renewal not in done

    async def run_whenever_leader(
        self, work: Callable[[], Coroutine[Any, Any, None]], on_change: Callable[[bool], None] | None = None
    ) -> None:
        """Runs work whenever this process is the leader, until cancelled; then releases the lease.

        A ``BackendError`` ends the work until the next attempt. ``on_change`` gets True when a term begins, and False
        when it ends, but not if it is cancelled.
        """
        try:
            while True:
                if await self.acquire():
                    await self._run_term(work, on_change or (lambda leads: None))
                await asyncio.sleep(self.lease_s / 3)
        finally:
            await asyncio.to_thread(self.store.flush)  # the next leader must see what this one recorded
            await self.release()

    async def release(self) -> None:
        """Releases the lease, so that another process can take over at once."""
        self._expires = 0.0
        if self._request:  # a cancelled request continues in its thread, and would acquire the lease again
            await asyncio.gather(self._request, return_exceptions=True)
        try:
            await asyncio.to_thread(self.store.release, self.name, self.holder)
        except BackendError as error:
            log.warning("the lease %s was not released and will expire: %s", self.name, error)

    async def _run_term(self, work: Callable[[], Coroutine[Any, Any, None]], on_change: Callable[[bool], None]) -> None:
        on_change(True)
        try:
            if not await self.run_while_leader(work()):
                log.warning("the lease %s was lost; another process takes over", self.name)
        except BackendError as error:
            log.error("work under the lease %s failed and will be retried: %s", self.name, error)
        on_change(False)  # not if cancelled: no other process is the leader then

    async def _renew(self) -> None:
        """Renews the lease until it is lost."""
        while self.is_leader:
            await asyncio.sleep(self.lease_s / 3)
            await self.acquire()
