"""Answering somebody who may leave: the work ends with the connection, or when the time is up.

A stream is sent piece by piece, each when the one before has been taken over by the network: a client that reads slowly
slows the generator, and nothing piles up here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from casemate.gateway.chat import BYTES_PER_TOKEN, Completion, broken_off
from casemate.gateway.limits import Purse, until_midnight
from casemate.gateway.metrics import Metrics
from casemate.gateway.refusals import Refusal, left, over_budget, refusal_of, time_is_up
from casemate.rag import closing

T = TypeVar("T")
PARTING_S = 1.0
"""How long a client is given to take the last words."""
_log = logging.getLogger(__name__)


async def connected(receive: Receive, work: Coroutine[Any, Any, T], seconds: float) -> T:
    """What the work returns; it is cancelled, and has ended, when the client leaves or the time is up.

    Args:
        receive: Of the request, whose body has been read.
        work: What is done.
        seconds: How long it may take.

    Raises:
        Refusal: If it took too long, or the client left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise left() if gone.done() else time_is_up()
    finally:
        gone.cancel()
        gone.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it need not be told
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True, slots=True)
class Books:
    """Where an answer is entered.

    Attributes:
        purse: Pays for it.
        receipt: The store's, for what is noted by now.
        settle: Waits until what a receipt is for is written.
        metrics: The gateway's figures.
    """

    purse: Purse
    receipt: Callable[[], Callable[[], bool]]
    settle: Callable[[Callable[[], bool]], Awaitable[None]]
    metrics: Metrics

    async def pay(self, tokens: int, *, exactly: bool = False) -> None:
        """Pays for what is to leave.

        Raises:
            Refusal: If the budget does not cover it.
        """
        if not await self.purse.pay(tokens, exactly=exactly):
            raise over_budget(until_midnight())
        self.metrics.tokens(tokens)

    async def enter(self, tokens: int, *, exactly: bool = False) -> None:
        """Pays for what is to leave, and waits until what was noted of it is written, which a payment carries along.

        Raises:
            Refusal: If the budget does not cover it.
            BackendError: If the store does not take it.
        """
        receipt = self.receipt()
        await self.pay(tokens, exactly=exactly)
        await self.settle(receipt)


class Streamed(Response):
    """An answer as server-sent events. Nothing is sent before the first piece, so that a failure has its own status.

    Args:
        pieces: The answer.
        completion: Writes it.
        seconds: How long all of it may take.
        books: Where it is entered.
    """

    def __init__(self, pieces: AsyncIterator[str], completion: Completion, seconds: float, books: Books) -> None:
        super().__init__(media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces
        self._completion = completion
        self._seconds = seconds
        self._books = books
        self._started = False
        self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        try:
            await connected(receive, self._send(send), self._seconds)
        except Exception as error:
            refusal = refusal_of(error)
            self._books.metrics.broken({499: "left", 504: "time"}.get(refusal.status_code, "failure"))
            if not self._started:
                raise
            await self._break_off(send, refusal)
        finally:
            await self._books.purse.close()

    @property
    def _answered(self) -> int:
        return ceil(self._bytes / BYTES_PER_TOKEN)

    async def _send(self, send: Send) -> None:
        began = time.monotonic()
        await self._books.pay(self._completion.asked)
        async with closing(self._pieces) as pieces:
            async for piece in pieces:
                before = self._answered
                self._bytes += len(piece.encode("utf-8", "replace"))
                enter = self._books.pay if self._started else self._books.enter
                await enter(self._answered - before)
                if not self._started:
                    self._books.metrics.first_piece(time.monotonic() - began)
                    await self._start(send)
                if piece:
                    await _body(send, self._completion.piece(piece))
        await self._books.enter(0)
        if not self._started:
            await self._start(send)
        await _body(send, self._completion.last(self._answered), more=False)

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await _body(send, self._completion.first())

    async def _break_off(self, send: Send, refusal: Refusal) -> None:
        """Tells a client who is still there; one who reads nothing is not waited for, and loses the connection."""
        if refusal.status_code != 499:
            _log.warning("an answer broke off: %s", refusal.message)
            with suppress(TimeoutError):
                await asyncio.wait_for(_body(send, broken_off(refusal), more=False), PARTING_S)


async def _body(send: Send, data: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
