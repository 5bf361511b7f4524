"""Limits of outgoing calls: the one retry loop, exponential backoff with jitter, and a rate limiter."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")

BACKOFF_S = 0.5  # mean wait before the first retry; it doubles with each further one
MAX_RETRY_AFTER_S = 60.0  # longest wait that a server may ask for with ``Retry-After``


async def retry(
    call: Callable[[], Awaitable[Result]], retries: int, delay: Callable[[Exception, int], float | None]
) -> Result:
    """Calls until success, at most ``retries`` times more than once; raises the error of the last attempt.

    ``delay`` gets the error and the number of retries so far. It returns the seconds to wait before the next attempt,
    or None where a retry does not help.
    """
    for attempt in range(retries):
        try:
            return await call()
        except Exception as error:
            seconds = delay(error, attempt)
            if seconds is None:
                raise
        await asyncio.sleep(seconds)
    return await call()


def exponential_backoff(attempt: int) -> float:
    """Seconds to wait after a number of retries: ``BACKOFF_S`` times 2^attempt, within a factor of 0.5 to 1.5."""
    return BACKOFF_S * 2.0**attempt * (0.5 + random.random())


class RateLimiter:
    """Spaces calls evenly: at most ``per_s`` begin in a second (0: no limit). Any event loop and thread may use it."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._next_start = 0.0
        self._lock = threading.Lock()

    async def acquire(self) -> None:
        """Waits until the next call may begin."""
        while self._per_s:  # a slot is not reserved while waiting: a canceled caller would lose it
            with self._lock:
                now = time.monotonic()
                wait = self._next_start - now
                if wait <= 0:
                    self._next_start = now + 1 / self._per_s
                    return
            await asyncio.sleep(wait)
