"""Runs asynchronous code from synchronous frameworks, also where an event loop is running (notebooks)."""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
THREADS = 16  # concurrent calls from threads with a running loop


class EventLoopPool:
    """A pool of event loops: a coroutine runs in the calling thread, without a switch of threads.

    A thread with a running loop cannot run a second one. Its calls go to a thread pool.
    """

    def __init__(self) -> None:
        self._free: deque[asyncio.AbstractEventLoop] = deque()
        self._threads = ThreadPoolExecutor(THREADS, "casemate-loops")
        self.close = weakref.finalize(self, _close, self._free, self._threads)

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Creates a coroutine, runs it to completion and returns its result."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._here(work)
        return self._threads.submit(contextvars.copy_context().run, self._here, work).result()

    def _here(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            loop = self._free.pop()
        except IndexError:
            loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(work())
        finally:
            self._free.append(loop)


def _close(free: deque[asyncio.AbstractEventLoop], threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False)
    while free:
        loop = free.pop()
        if not loop.is_closed():
            loop.close()
