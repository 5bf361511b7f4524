"""Reads request bodies before anything else happens: within a size, a time, and a memory for each API key."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from starlette.types import Message, Receive

from casemate.gateway import errors

ANONYMOUS = ""
"""Owner of the bodies of requests without an API key."""
MAX_UPLOADS = 100
"""Bodies of one owner that are read at once."""
BODIES_PER_OWNER, BODIES_AT_ONCE = 16, 64
"""Memory for the bodies of one owner and of all, in bodies of the largest size."""


class BodyReader:
    """Reads bodies, and counts them by owner until their requests have ended.

    A key that has too many uploads or bytes in progress is refused. All requests without a key have one owner. There,
    the upload with the longest wait is aborted, so that a form that arrives at once passes.
    """

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._uploads: dict[str, dict[asyncio.Timeout, None]] = {}
        self._held = Counter[str]()
        self._all_held = 0

    @asynccontextmanager
    async def read(self, receive: Receive, headers: Mapping[str, str], owner: str) -> AsyncIterator[Receive]:
        """Reads a body; yields a ``receive`` that repeats it. A request without a body is not an upload.

        The owner is the id of its API key, or ``ANONYMOUS``.

        Raises:
            ApiError: If the body is too large, too slow or cut off, or its owner has too many uploads or bytes in
                progress.
        """
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._max_bytes:
            raise errors.body_too_large()
        if not length.strip("0") and "transfer-encoding" not in headers:
            yield _without_body(receive)
            return
        body = bytearray()
        try:
            await self._receive_whole(receive, body, owner)
            read = deque([{"type": "http.request", "body": bytes(body), "more_body": False}])

            async def repeated() -> Message:
                return read.popleft() if read else await receive()

            yield repeated
        finally:
            self._hold(owner, -len(body))

    async def _receive_whole(self, receive: Receive, body: bytearray, owner: str) -> None:
        """Receives messages until the last one, and appends their contents to ``body``."""
        timeout = asyncio.timeout(self._timeout_s)
        try:
            async with timeout:
                self._begin(timeout, owner)
                while self._append(body, await receive(), owner):
                    pass
        except TimeoutError:
            raise errors.body_timeout() from None
        finally:
            self._end(timeout, owner)

    def _append(self, body: bytearray, message: Message, owner: str) -> bool:
        """Appends the content of a message. Returns whether more messages follow."""
        if message["type"] != "http.request":
            raise errors.client_closed_request()
        part = message.get("body", b"")
        if len(body) + len(part) > self._max_bytes:
            raise errors.body_too_large()
        if part and self._all_held + len(part) > BODIES_AT_ONCE * self._max_bytes:
            raise errors.too_many_uploads()
        if part and self._held[owner] + len(part) > BODIES_PER_OWNER * self._max_bytes:
            if owner != ANONYMOUS:
                raise errors.too_many_uploads()
            self._give_up_oldest()
        body += part
        self._hold(owner, len(part))
        return bool(message.get("more_body", False))

    def _begin(self, timeout: asyncio.Timeout, owner: str) -> None:
        uploads = self._uploads.setdefault(owner, {})
        if len(uploads) >= MAX_UPLOADS:
            if owner != ANONYMOUS:
                raise errors.too_many_uploads()
            self._give_up_oldest()
        uploads[timeout] = None

    def _end(self, timeout: asyncio.Timeout, owner: str) -> None:
        uploads = self._uploads.get(owner, {})
        uploads.pop(timeout, None)
        if not uploads:
            self._uploads.pop(owner, None)

    def _give_up_oldest(self) -> None:
        """Ends the upload without a key that has waited longest, as if its time was over."""
        uploads = self._uploads.get(ANONYMOUS, {})
        oldest = next(iter(uploads), None)
        if oldest is not None:
            del uploads[oldest]
            with suppress(RuntimeError):  # its time is over already
                oldest.reschedule(asyncio.get_running_loop().time())

    def _hold(self, owner: str, size: int) -> None:
        self._held[owner] += size
        self._all_held += size
        if not self._held[owner]:
            del self._held[owner]


def _without_body(receive: Receive) -> Receive:
    """Returns ``receive`` for a request that announces no body; refuses one that has one all the same."""

    async def checked() -> Message:
        message = await receive()
        if message.get("body") or message.get("more_body"):
            raise errors.body_too_large()
        return message

    return checked
