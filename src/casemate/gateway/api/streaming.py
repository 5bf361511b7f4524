"""Answers to clients that may disconnect: the work is cancelled with the connection, and at the timeout.

A stream sends each piece when the network has accepted the one before: a slow client slows the generator, and nothing
accumulates in memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from math import ceil
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from casemate.gateway.api.openai_schema import BYTES_PER_TOKEN, Completion
from casemate.gateway.api.responses_schema import ResponseEvents
from casemate.gateway.errors import ApiError, answer_timeout, client_closed_request, to_api_error
from casemate.gateway.state import RequestContext, UsageMeter, get_context
from casemate.rag.pipeline import closing_stream

T = TypeVar("T")
ERROR_TIMEOUT_S = 1.0
"""Time that a client has to receive the error that ends a stream."""
INTERRUPTIONS = {499: "client_closed", 504: "timeout"}
"""Reasons of interrupted streams in the metrics, by status; all others are failures."""
_log = logging.getLogger(__name__)


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Returns the result of the work. If the client disconnects or the time is up, it cancels the work and awaits it.

    The body of the request has been read.

    Raises:
        ApiError: If the time was up, or the client disconnected.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise client_closed_request() if disconnect.done() else answer_timeout()
    finally:
        disconnect.cancel()
        disconnect.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # retrieved: not logged
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StreamingAnswer(Response):
    """An answer as server-sent events. Nothing is sent before the first piece, so a failure gets its own status."""

    def __init__(
        self,
        pieces: AsyncIterator[str],
        completion: Completion | ResponseEvents,
        timeout_s: float,
        usage: UsageMeter,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces
        self._completion = completion
        self._timeout_s = timeout_s
        self._usage, self._metrics = usage, usage.gateway.metrics
        self._started = False
        self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        try:
            await run_while_connected(receive, self._send_pieces(send, get_context(scope)), self._timeout_s)
        except Exception as error:
            api_error = to_api_error(error)
            self._metrics.interrupted.labels(INTERRUPTIONS.get(api_error.status_code, "failure")).inc()
            if not self._started:
                raise
            await self._interrupt(send, api_error)
        finally:
            await self._usage.budget.close()

    @property
    def _tokens(self) -> int:
        return ceil(self._bytes / BYTES_PER_TOKEN)

    async def _send_pieces(self, send: Send, context: RequestContext) -> None:
        start = time.monotonic()
        await self._usage.charge(self._completion.prompt_tokens)
        async with closing_stream(self._pieces) as pieces:
            async for piece in pieces:
                before = self._tokens
                self._bytes += len(piece.encode("utf-8", "replace"))
                charge = self._usage.charge if self._started else self._usage.charge_and_write
                await charge(self._tokens - before)
                if not self._started:
                    self._metrics.first_token.observe(time.monotonic() - start)
                    context.first_token = time.monotonic() - context.start
                    await self._start(send)
                if piece:
                    await _send_body(send, self._completion.text_chunk(piece))
        await self._usage.charge_and_write(0)
        if not self._started:
            await self._start(send)
        await _send_body(send, self._completion.last_chunks(self._tokens), more=False)

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await _send_body(send, self._completion.first_chunk())

    async def _interrupt(self, send: Send, error: ApiError) -> None:
        """Ends the stream with an error; a client that does not read it in time loses the connection."""
        if error.status_code != 499:
            _log.warning("an answer was interrupted: %s", error.message)
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    _send_body(send, self._completion.error_chunk(error), more=False), ERROR_TIMEOUT_S
                )


async def _send_body(send: Send, data: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
