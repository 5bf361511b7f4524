"""One call for all who wait for it: what costs the same for one as for many, such as a trip to a database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

A = TypeVar("A")
R = TypeVar("R")


class Together(Generic[A, R]):
    """Hands what several ask at the same time to one call, in a thread: while it runs, others gather for the next.

    Whoever asks is served by a call that begins after he asked. In an event loop one call runs at a time.

    Args:
        call: Gets what each asked, in order, and returns an answer for each. What it raises, all of them get.
    """

    def __init__(self, call: Callable[[list[A]], Sequence[R]]) -> None:
        self._call = call
        self._waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, list[tuple[A, asyncio.Future[R]]]]
        self._waiting = WeakKeyDictionary()
        self._running: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]] = WeakKeyDictionary()

    async def ask(self, what: A) -> R:
        """What the call answers. Whoever is cancelled may have been served."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()
        self._waiting.setdefault(loop, []).append((what, answer))
        if loop not in self._running:
            self._running[loop] = loop.create_task(self._serve(loop))
        return await answer

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while group := self._waiting.pop(loop, None):
                await self._answer(group)
        finally:
            del self._running[loop]

    async def _answer(self, group: Sequence[tuple[A, asyncio.Future[R]]]) -> None:
        answers = [answer for _, answer in group]
        try:
            found = await asyncio.to_thread(self._call, [what for what, _ in group])
        except Exception as error:
            for answer in answers:
                if not answer.done():
                    answer.set_exception(error)
            return
        for answer, one in zip(answers, found, strict=True):
            if not answer.done():
                answer.set_result(one)
