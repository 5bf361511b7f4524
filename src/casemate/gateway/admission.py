"""ASGI middleware that every request passes first: authentication, rate limits, body size, headers and error responses.

The key is checked before the body is read, so unauthenticated requests cost little and reveal nothing. A request takes
a slot once its body is complete, so slow uploads do not block other clients.
"""

from __future__ import annotations

import logging
import traceback
import uuid
from contextlib import nullcontext
from time import monotonic

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from casemate.errors import ConfigError, DataError, QueryError
from casemate.gateway import errors
from casemate.gateway.auth.keys import ApiKey
from casemate.gateway.body_reader import ANONYMOUS, BodyReader
from casemate.gateway.errors import CLOSE, ApiError, to_api_error
from casemate.gateway.response_timing import REQUEST_START
from casemate.gateway.state import Gateway, RequestContext, set_context

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "interest-cohort=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every response, unless a route sets them."""
HSTS = "max-age=31536000"
MAX_DRAIN = 65_536
"""Bytes of the body of a refused request that are read to keep the connection open."""
API = "/v1/"
MCP = f"{API}mcp"
"""Its requests are messages, most of which ask nothing. A tool call is counted as a request when it begins."""
METRICS = "/metrics"
TRACES = f"{API}traces"
"""Not traced itself: a gateway that exports its traces to itself would never come to an end."""
_log = logging.getLogger(__name__)


class AdmissionMiddleware:
    """Authenticates, limits and answers requests."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        self._bodies = BodyReader(int(gateway.section.max_body_mb * 1e6), gateway.section.body_timeout_s)
        self._headers = dict(HEADERS)
        if gateway.section.cors_origins:
            del self._headers["Cross-Origin-Resource-Policy"]
        if gateway.section.tls_cert:
            self._headers["Strict-Transport-Security"] = HSTS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request: traces it, counts it, and turns exceptions into error responses."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext(uuid.uuid4().hex)
        set_context(scope, context)
        REQUEST_START.set(context.start)
        traced = scope["path"].startswith(API) and scope["path"] != TRACES
        tracer = self._gateway.tracer if traced else None
        send = self._with_headers(send, context)
        with tracer.request(scope, context) if tracer else nullcontext():
            try:
                await self._admit(scope, receive, send, context)
            except Exception as error:
                log_failure(error, context)
                if not context.status:
                    await _error_response(error, scope)(scope, receive, send)
            finally:
                route, seconds = getattr(scope.get("route"), "path", "none"), monotonic() - context.start
                self._gateway.metrics.observe_request(route, scope["method"], context.status or 499, seconds)
                self._gateway.record_request(context, route, seconds)

    async def _admit(self, scope: Scope, receive: Receive, send: Send, context: RequestContext) -> None:
        """Passes a request on if its key is valid and within its limits."""
        path, headers = scope["path"], Headers(scope=scope)
        if "transfer-encoding" in headers and "content-length" in headers:
            raise errors.invalid_http()  # proxies and servers disagree on which of the two ends the body
        if not path.startswith(API):
            if path == METRICS and self._gateway.section.metrics == "key":
                context.key = self._authenticate(headers)
            async with self._bodies.read(receive, headers, ANONYMOUS) as body:
                await self._app(scope, body, send)
            return
        context.key = key = self._authenticate(headers)
        async with self._bodies.read(receive, headers, key.id) as body:
            await self._admit_key(scope, body, send, context, key)

    async def _admit_key(
        self, scope: Scope, receive: Receive, send: Send, context: RequestContext, key: ApiKey
    ) -> None:
        """Passes a request with a key and a complete body on, unless the key is over a limit."""
        limits = self._gateway.limits
        if rejection := limits.acquire_slot(key):
            raise errors.overloaded(rejection.retry_after_s)
        try:
            await self._gateway.admit(key, message=scope["path"] == MCP)
            context.admitted = True
            await self._app(scope, receive, send)
        finally:
            limits.release_slot(key)

    def _authenticate(self, headers: Headers) -> ApiKey:
        """Returns the key of a request; ``ApiError`` if there is no valid one."""
        scheme, _, text = headers.get("authorization", "").partition(" ")
        key = self._gateway.keys.find(text.strip())
        if key is None or scheme.lower() != "bearer":
            raise errors.invalid_key()
        return key

    def _with_headers(self, send: Send, context: RequestContext) -> Send:
        """Returns ``send``, which also records the status and sets the headers of every response."""

        async def wrapped(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
                headers["X-Request-Id"] = context.id
            await send(message)

        return wrapped


def _error_response(error: Exception, scope: Scope) -> Response:
    refusal = to_api_error(error)
    later = scope["path"] == MCP and "Retry-After" in (refusal.headers or {})
    response = refusal.rpc_response() if later else refusal.response()
    if _has_long_body(Headers(scope=scope)):
        response.headers.update(CLOSE)
    return response


def _has_long_body(headers: Headers) -> bool:
    """Whether an unread body may be too long to read it only to keep the connection open."""
    length = headers.get("content-length", "0")
    return "transfer-encoding" in headers or not length.isdecimal() or int(length[:20]) > MAX_DRAIN


def log_failure(error: Exception, context: RequestContext) -> None:
    """Logs a failure; an ``ApiError`` and a ``QueryError`` are the client's and are not logged.

    The message is logged only if it is about configuration or data. Others may contain a client's text.
    """
    if isinstance(error, ApiError | QueryError):
        return
    frames = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
    ]
    message = f": {error}" if isinstance(error, ConfigError | DataError) else ""
    where = " > ".join(frames[-6:])
    _log.error("request %s failed: %s at %s%s", context.id, type(error).__name__, where, message)
