"""Rounds time-to-first-token up to a multiple of ``pace_ms``, so latency does not reveal the guard's decision.

A defense may spend more time on some questions: on the sentences of a suspicious one, or on a long list of hits when a
document is withheld. So the generator starts at the next multiple of ``pace_ms`` after the request arrived. Everything
later depends on context and answer, which are those of a corpus without the withheld documents.

Remaining leak: search and guard may take about as long as a multiple, and then fall on either side of it. With a
``pace_ms`` longer than nearly all of them, nothing remains.
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
from casemate.types import Prompt

REQUEST_START: ContextVar[float] = ContextVar("casemate-request-start")
"""Arrival of the current request, by the monotonic clock; not set outside the gateway."""


async def pace(pace_s: float) -> None:
    """Waits until the time since the request's arrival is a multiple of ``pace_s``."""
    start = REQUEST_START.get(None)
    if start is not None and pace_s > 0:
        spent = time.monotonic() - start
        await asyncio.sleep(math.ceil(spent / pace_s) * pace_s - spent)


@dataclass(eq=False)
class PacedGenerator(Generator):
    """A generator that starts at a multiple of ``pace_ms``.

    Attributes:
        generator: The generator.
        pace: Awaited before it starts.
        on_stage: Receives its duration, as the stage ``generate``.
        span: Entered while it runs.
    """

    generator: Generator
    pace: Callable[[], Awaitable[None]]
    on_stage: Callable[[str, float], None] = lambda stage, seconds: None
    span: Callable[[], AbstractContextManager[None]] = nullcontext

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Streams the answer."""
        await self.pace()
        start = time.monotonic()
        with self.span():
            async with closing_stream(self.generator.stream(prompt)) as pieces:
                async for piece in pieces:
                    yield piece
        self.on_stage("generate", time.monotonic() - start)
