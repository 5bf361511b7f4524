"""Calls asynchronous code from synchronous frameworks: in a notebook, too, where a loop is running already."""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
THREADS = 16
"""Calls from inside running loops that are served side by side."""


class Loops:
    """Event loops that are lent out, one a call: what is awaited runs in the caller's own thread, without a hand-over.

    A thread in which a loop is running cannot run another, so its calls go to a thread of ours.
    """

    def __init__(self) -> None:
        self._free: deque[asyncio.AbstractEventLoop] = deque()
        self._threads = ThreadPoolExecutor(THREADS, "casemate-loops")
        self.close = weakref.finalize(self, _close, self._free, self._threads)

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of a coroutine that is made, awaited and finished before this returns."""
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
