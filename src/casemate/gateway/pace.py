"""Answers are begun on a beat, so that how long the guard took does not tell what it did.

A defense may look longer at some questions than at others: at the sentences of a doubtful one, at a long list of hits
for one whose document is withheld. Whoever measures the time to the first word would see it. So the generator is begun
at the next multiple of ``pace_ms`` after the request came. From there on the time depends on the context and the
answer, hence on nothing that would be otherwise in a collection without the withheld documents.

What is left: questions whose search and judgement take about as long as the beat fall on one side of it or the other. A
beat that is longer than nearly all of them take leaves nothing.
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
from casemate.rag import closing
from casemate.types import Prompt

ARRIVED: ContextVar[float] = ContextVar("casemate-arrived")
"""When the request that is being answered came, by the monotonic clock; not set outside of the gateway."""


async def beat(pace_s: float) -> None:
    """Waits for the next multiple of the pace since the request came."""
    arrived = ARRIVED.get(None)
    if arrived is not None and pace_s > 0:
        spent = time.monotonic() - arrived
        await asyncio.sleep(math.ceil(spent / pace_s) * pace_s - spent)


@dataclass(eq=False)
class Paced(Generator):
    """A generator that begins on the beat.

    Attributes:
        generator: What writes.
        beat: Awaited before it begins.
        watch: Told how long it took to write, as the stage ``generate``.
        span: Entered while it writes.
    """

    generator: Generator
    beat: Callable[[], Awaitable[None]]
    watch: Callable[[str, float], None] = lambda stage, seconds: None
    span: Callable[[], AbstractContextManager[None]] = nullcontext

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """The answer, from the next beat on."""
        await self.beat()
        began = time.monotonic()
        with self.span():
            async with closing(self.generator.stream(prompt)) as pieces:
                async for piece in pieces:
                    yield piece
        self.watch("generate", time.monotonic() - began)
