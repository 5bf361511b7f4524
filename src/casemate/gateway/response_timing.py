"""Rounds time-to-first-token up to a multiple of an interval, so latency does not reveal the guard's decision.

A defense may spend more time on some questions: on the sentences of a suspicious one, or on a long list of hits when a
document is withheld. So the generator starts at the next multiple of the interval after the request arrived. All later
times depend on context and answer, which equal those of a corpus without the withheld documents.

The interval is ``pace_ms``, or longer if search and guard take longer. It exceeds their time in the last block of
requests of the same key, except the slowest request. A block has 1,000 requests, so this is the p99.9. It ends after an
hour if it has at least 300 requests. Otherwise similar questions would be rounded to different multiples, for example
while a client loads the gateway. The interval is one of few values. It depends on the requests of its own key only, so
it reveals nothing about other clients.

After the first 299 requests of a key since the start, the interval changes only at the end of a block, or rises after
300 requests of it. Then a client cannot change it by two slow requests and observe the change at once.

During the first 299 requests, the interval rises as soon as the second slowest request needs it: two slow requests do
change it. At most one request for each value of the interval takes longer than it: 12 for ``pace_ms`` = 100 and work
below 10 s. With a fixed interval all 299 could, and each would reveal whether its work exceeded the interval. Limit: a
key with one slow request in a block raises nothing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

from casemate.protocols import Generator
from casemate.rag.pipeline import closing_stream
from casemate.runtime.bounded_dict import BoundedDict
from casemate.types import Prompt

BLOCK, BLOCK_S = 1000, 3600.0
"""Number of requests of a block of measured work, and seconds after which a block with ``FEWEST`` requests ends."""
FEWEST = 300
"""Requests of a block from which the interval may rise, and the fewest of a block. Until a key has had so many, its
interval rises at once."""
HEADROOM, STEP = 1.25, 1.5
"""The interval is at least this multiple of the measured work, and a power of ``STEP`` times ``pace_ms``."""
LONGEST_S = 10.0
"""Longest interval."""
MAX_OWNERS = 10_000
"""Keys whose work is remembered; the least recently used is forgotten first."""
REQUEST_START: ContextVar[float] = ContextVar("casemate-request-start")
"""Arrival of the current request, by the monotonic clock; not set outside the gateway."""


class ResponseInterval:
    """The interval for the requests of one key, derived from the time that search and guard take for them.

    ``seconds`` is the interval now, from ``shortest_s`` to ``longest_s``.
    """

    def __init__(
        self, shortest_s: float, longest_s: float = LONGEST_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shortest_s, self._longest_s, self._clock = shortest_s, longest_s, clock
        self.seconds = shortest_s
        self._measured = False  # whether there were `FEWEST` requests since the start
        self._slowest, self._count, self._began = (0.0, 0.0), 0, clock()  # slowest first

    def observe(self, work_s: float) -> None:
        """Counts the work of one more request, in seconds."""
        if self._count >= FEWEST and self._clock() - self._began > BLOCK_S:
            self._end_block()
        self._count += 1
        first, second = self._slowest
        self._slowest = max(first, work_s), max(second, min(first, work_s))
        if self._count == FEWEST or not self._measured:
            self.seconds = max(self.seconds, self._needed_s())
            self._measured = self._count == FEWEST
        if self._count >= BLOCK:
            self._end_block()

    def _end_block(self) -> None:
        """Derives the interval from the block, and forgets it: its two slowest requests, their number and its start."""
        self.seconds = self._needed_s()
        self._slowest, self._count, self._began = (0.0, 0.0), 0, self._clock()

    def _needed_s(self) -> float:
        """The interval that the block needs. Of 1,000 requests, the second slowest is their p99.9."""
        needed = HEADROOM * self._slowest[1]
        steps = math.ceil(math.log(max(needed / self._shortest_s, 1.0), STEP))
        return max(self._shortest_s, min(self._shortest_s * STEP**steps, self._longest_s))


class ResponsePacer:
    """Lets each request wait for a multiple of the interval of its key.

    ``shortest_s`` is the shortest interval; 0: requests do not wait. The wait may take half of the time limit of an
    answer.
    """

    def __init__(self, shortest_s: float, timeout_s: float) -> None:
        self._shortest_s, self._longest_s = shortest_s, min(LONGEST_S, timeout_s / 2)
        self._intervals: BoundedDict[str, ResponseInterval] = BoundedDict(MAX_OWNERS)

    async def wait(self, owner: str) -> None:
        """Waits until the time since the request's arrival is a multiple of the interval of its key."""
        start = REQUEST_START.get(None)
        if start is None or not self._shortest_s:
            return
        interval = self._intervals.get(owner) or ResponseInterval(self._shortest_s, self._longest_s)
        self._intervals[owner] = interval
        work_s = time.monotonic() - start
        interval.observe(work_s)
        await asyncio.sleep(math.ceil(work_s / interval.seconds) * interval.seconds - work_s)

    def longest_s(self) -> float:
        """The longest interval of any key now."""
        return max((interval.seconds for interval in list(self._intervals.values())), default=self._shortest_s)


@dataclass(eq=False)
class PacedGenerator(Generator):
    """A generator that starts at a multiple of the response interval, and reports its duration as ``generate``."""

    generator: Generator
    pace: Callable[[], Awaitable[None]]
    on_stage: Callable[[str, float], None] = lambda stage, seconds: None
    span: Callable[[], AbstractContextManager[None]] = nullcontext

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        await self.pace()
        start = time.monotonic()
        with self.span():
            async with closing_stream(self.generator.stream(prompt)) as pieces:
                async for piece in pieces:
                    yield piece
        self.on_stage("generate", time.monotonic() - start)
