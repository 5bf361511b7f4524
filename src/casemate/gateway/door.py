"""What every request goes through before a route sees it: who is it, may he, is there room, and how much is read.

The key is looked at before a byte of the body is: strangers cost nothing, and learn nothing of what they sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
import uuid
from collections.abc import Mapping, MutableMapping
from contextlib import nullcontext
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from casemate.gateway import refusals
from casemate.gateway.pace import ARRIVED
from casemate.gateway.refusals import CLOSING, Refusal, refusal_of
from casemate.gateway.state import VISIT, Gateway, Visit

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "interest-cohort=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Sent with every answer, unless a route says otherwise."""
HSTS = "max-age=31536000"
SMALL = 65_536
"""Bytes of a body that are read, when a request is refused, to keep the connection."""
API = "/v1/"
METRICS = "/metrics"
_log = logging.getLogger(__name__)


class Door:
    """ASGI middleware.

    Args:
        app: What is behind it.
        gateway: What they share.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        self._largest = int(gateway.section.max_body_mb * 1e6)
        self._headers = dict(HEADERS)
        if gateway.section.cors:
            del self._headers["Cross-Origin-Resource-Policy"]
        if gateway.section.tls_cert:
            self._headers["Strict-Transport-Security"] = HSTS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request in, or says why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = scope[VISIT] = Visit(uuid.uuid4().hex)
        ARRIVED.set(visit.began)
        spans = self._gateway.spans if scope["path"].startswith(API) else None
        with spans.request(scope, visit) if spans else nullcontext():
            await self._answered(scope, receive, send)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The request, to its end, whatever becomes of it."""
        visit: Visit = scope[VISIT]
        say = self._dressed(send, visit)
        try:
            await self._admitted(scope, receive, say)
        except Exception as error:
            _tell(error, visit)
            if not visit.status:
                response = refusal_of(error).response()
                if _unread(Headers(scope=scope)):
                    response.headers.update(CLOSING)
                await response(scope, receive, say)
        finally:
            spent = time.monotonic() - visit.began
            route = getattr(scope.get("route"), "path", "none")
            self._gateway.metrics.request(route, scope["method"], visit.status or 499, spent)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The request, from where it has a key and a place."""
        path, limits, visit = scope["path"], self._gateway.limits, scope[VISIT]
        if not path.startswith(API):
            if path == METRICS and self._gateway.section.metrics == "key":
                visit.key = self._key(scope)
            await self._app(scope, self._measured(receive, Headers(scope=scope)), send)
            return
        visit.key = self._key(scope)
        if wait := limits.enter():
            raise refusals.busy(wait.seconds)
        try:
            if wait := await limits.admit(visit.key):
                raise refusals.over_budget(wait.seconds) if wait.why == "budget" else refusals.over_rate(wait.seconds)
            if self._gateway.keys.revoked(visit.key.id):  # that is known only now
                raise refusals.no_key()
            await self._app(scope, self._measured(receive, Headers(scope=scope)), send)
        finally:
            limits.leave()

    def _key(self, scope: Scope) -> Any:
        """Whose request it is."""
        scheme, _, text = Headers(scope=scope).get("authorization", "").partition(" ")
        key = self._gateway.keys.find(text.strip())
        if key is None or scheme.lower() != "bearer":
            raise refusals.no_key()
        return key

    def _measured(self, receive: Receive, headers: Mapping[str, str]) -> Receive:
        """Reads no more of a body than is allowed, and for no longer."""
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._largest:
            raise refusals.too_large()
        deadline = asyncio.get_running_loop().time() + self._gateway.section.body_timeout_s
        got, whole = 0, False

        async def read() -> Message:
            nonlocal got, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message: MutableMapping[str, Any] = await receive()
            except TimeoutError:
                raise refusals.too_slow() from None
            got += len(message.get("body", b""))
            if got > self._largest:
                raise refusals.too_large()
            whole = not message.get("more_body", False)
            return message

        return read

    def _dressed(self, send: Send, visit: Visit) -> Send:
        """Sends with the headers that every answer has."""

        async def say(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
                headers["X-Request-Id"] = visit.id
            await send(message)

        return say


def _unread(headers: Headers) -> bool:
    """Whether a body may come that is not worth reading only to keep the connection."""
    length = headers.get("content-length", "0")
    return "transfer-encoding" in headers or not length.isdecimal() or int(length[:20]) > SMALL


def _tell(error: Exception, visit: Visit) -> None:
    """Logs a failure without its message, which may hold what a client sent; ours hold no text."""
    if isinstance(error, Refusal):
        return
    places = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
    ]
    _log.error("request %s failed: %s at %s", visit.id, type(error).__name__, " > ".join(places[-6:]))
