"""Coalesces concurrent calls whose cost does not grow with their number, such as a round trip to a database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class Coalescer(Generic[Request, Reply]):
    """Coalesces concurrent calls: requests that arrive while a batch runs form the next batch.

    A batch runs in a thread, one at a time for each event loop. A request is always part of a batch that begins after
    it was submitted.

    Args:
        call: Gets the requests of a batch in order and returns a reply for each. Its exception reaches all of them.
    """

    def __init__(self, call: Callable[[list[Request]], Sequence[Reply]]) -> None:
        self._call = call
        self._waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, list[tuple[Request, asyncio.Future[Reply]]]]
        self._waiting = WeakKeyDictionary()
        self._running: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]] = WeakKeyDictionary()

    async def submit(self, request: Request) -> Reply:
        """Returns the reply to a request. A canceled request may still be served."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Reply] = loop.create_future()
        self._waiting.setdefault(loop, []).append((request, reply))
        if loop not in self._running:
            self._running[loop] = loop.create_task(self._serve(loop))
        return await reply

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while batch := self._waiting.pop(loop, None):
                await self._run(batch)
        finally:
            del self._running[loop]

    async def _run(self, batch: Sequence[tuple[Request, asyncio.Future[Reply]]]) -> None:
        futures = [future for _, future in batch]
        try:
            replies = await asyncio.to_thread(self._call, [request for request, _ in batch])
        except Exception as error:
            for future in futures:
                if not future.done():
                    future.set_exception(error)
            return
        for future, reply in zip(futures, replies, strict=True):
            if not future.done():
                future.set_result(reply)
