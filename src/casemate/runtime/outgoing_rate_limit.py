"""Client-side rate limiter for outgoing requests."""

from __future__ import annotations

import asyncio
import threading
import time


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
