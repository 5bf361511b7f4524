"""Serves concurrent calls together, where the cost of a call does not grow with their number."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Generic, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Arrivals: TypeAlias = Callable[[], Sequence[tuple[int, Request]]]


class Coalescer(Generic[Request, Reply]):
    """Coalesces concurrent calls: requests that arrive while a batch runs form the next batch.

    A batch runs in a thread, one at a time for each event loop. A request is always part of a batch that begins after
    it was submitted. ``call`` returns a reply for each request of a batch, in order. Its exception reaches all of them.
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


class ContinuousBatch(Generic[Request, Reply]):
    """Serves concurrent calls in one running batch: a request joins it while others are in progress.

    The batch runs in a daemon thread of its own. It serves the requests of all event loops.

    Args:
        serve: Serves requests until none is open. It gets a function that returns the requests that arrived since its
            last call, each with its number. It yields the number of a request with its reply. Its exception reaches
            the requests that it has taken; later ones are served by the next call.
    """

    def __init__(self, serve: Callable[[Arrivals[Request]], Iterator[tuple[int, Reply]]]) -> None:
        self._serve = serve
        self._numbers = count()
        self._taken: dict[int, asyncio.Future[Reply]] = {}  # of the thread alone
        self._lock = threading.Lock()  # guards the two below
        self._waiting: list[tuple[int, Request, asyncio.Future[Reply]]] = []
        self._running = False

    async def submit(self, request: Request) -> Reply:
        """Returns the reply to a request. One that is canceled before it is taken is not served."""
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append((next(self._numbers), request, reply))
            start, self._running = not self._running, True
        if start:
            threading.Thread(target=self._run, daemon=True).start()
        return await reply

    def _run(self) -> None:
        while True:
            problem: Exception = RuntimeError("the batch ended without a reply")
            try:
                for number, reply in self._serve(self._take):
                    future = self._taken.pop(number)
                    _resolve(future, partial(future.set_result, reply))
            except Exception as error:
                problem = error
            except BaseException as error:  # such as SystemExit, which must not end the caller's event loop
                problem = RuntimeError(f"the batch was stopped by {type(error).__name__}")
            for future in self._taken.values():
                _resolve(future, partial(future.set_exception, problem))
            self._taken = {}
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return

    def _take(self) -> list[tuple[int, Request]]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        wanted = [(number, request, reply) for number, request, reply in waiting if not reply.done()]
        self._taken |= {number: reply for number, _, reply in wanted}
        return [(number, request) for number, request, _ in wanted]


def _resolve(future: asyncio.Future[Reply], complete: Callable[[], None]) -> None:
    """Completes a future from another thread, unless it was canceled or its event loop has ended."""

    def complete_once() -> None:
        if not future.done():
            complete()

    with contextlib.suppress(RuntimeError):  # the event loop is closed
        future.get_loop().call_soon_threadsafe(complete_once)
