"""Runs a gateway in uvicorn until a signal stops it.

On SIGTERM or SIGINT the server accepts no more connections, running answers have ``shutdown_grace_s`` to finish, and
events are written. A second signal skips the wait.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from casemate.config import GatewaySection
from casemate.errors import BackendError, CasemateError
from casemate.gateway.admission import HEADERS
from casemate.gateway.app import make_app
from casemate.gateway.errors import invalid_http
from casemate.gateway.mcp.memory import own_tools
from casemate.gateway.mcp.tools import ToolSet
from casemate.gateway.state import Gateway
from casemate.system import App

BACKLOG, ACCEPTED_AT_ONCE = 2048, 32
"""Connections that may wait to be accepted, and those accepted before running requests continue."""
DESCRIPTORS = 32_768
"""Open files that ``serve`` asks for, as far as the system's hard limit permits."""
RESERVED_DESCRIPTORS = 256
"""File descriptors that are kept for indexes, databases and models."""
M_ARENA_MAX = -8
"""Parameter of ``mallopt`` in glibc's malloc.h."""
LOG_INTERVAL_S = 60.0
KEEP_ALIVE_S = 75
"""Idle connections are kept longer than reverse proxies keep theirs, so that the proxy closes them."""
_log = logging.getLogger(__name__)


class OpenConnections:
    """The connections of a server that wait for their client, and the log of those that were closed for lack of room.

    Attributes:
        waiting: Connections without a complete request, longest first. While a body arrives, its connection waits, too.
    """

    def __init__(self) -> None:
        self.waiting: dict[HttpConnection, None] = {}
        self._closed, self._logged = 0, -math.inf

    def make_room(self, new: HttpConnection) -> None:
        """Closes the connection that has waited longest, or the new one; logs at most once a minute."""
        closed = next(iter(self.waiting), new)
        self.waiting.pop(closed, None)
        closed.transport.abort()
        self._closed += 1
        if time.monotonic() - self._logged > LOG_INTERVAL_S:
            _log.warning(
                "%d connections closed: more than gateway.max_connections=%d are open",
                self._closed,
                new.max_connections,
            )
            self._closed, self._logged = 0, time.monotonic()


class HttpConnection(H11Protocol):
    """An HTTP/1.1 connection with time limits and JSON errors for invalid HTTP.

    Without the limits, a client that sends its headers byte by byte, or does not read its answer, would keep a
    connection forever. If there are too many connections, a new one replaces the one that has waited longest for its
    client.

    Attributes:
        timeout_s: Time for request line and headers, and for reading a full output buffer.
        max_connections: Open connections.
        open_connections: Connections of this server that wait for their client, longest first.
    """

    timeout_s: float = 30.0
    max_connections: int = 1000
    open_connections: OpenConnections

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer; at the limit, closes the connection that has waited longest, or this one."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self.open_connections.make_room(self)
        self._restart_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timers."""
        super().connection_lost(exc)
        self._stop_timer()
        self.open_connections.waiting.pop(self, None)
        self.resume_writing()

    def pause_writing(self) -> None:
        """The client reads too slowly: it has ``timeout_s`` to empty the buffer."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read enough."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._write_timer = None

    def data_received(self, data: bytes) -> None:
        """Feeds the parser; stops the timer once a request starts."""
        super().data_received(data)
        if self.transport.is_closing() or not self._idle:
            self._stop_timer()
        elif self._timer is None:
            self._restart_timer()
        if self.transport.is_closing() or not (self._idle or self.cycle.more_body):
            self.open_connections.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        """The connection is idle until the next request."""
        super().on_response_complete()
        if self._idle and not self.transport.is_closing():
            self.open_connections.waiting[self] = None

    def send_400_response(self, msg: str) -> None:
        """Reports invalid HTTP, unless a response has started."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = invalid_http()
            content = bytes(error.response().body)
            named = {**HEADERS, "Content-Type": "application/json", **(error.headers or {})}
            headers = [(name.encode(), value.encode()) for name, value in named.items()]
            headers.append((b"Content-Length", str(len(content)).encode()))
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=content),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _restart_timer(self) -> None:
        self._stop_timer()
        self.open_connections.waiting[self] = None
        self._timer = self.loop.call_later(self.timeout_s, self._close_if_idle)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _close_if_idle(self) -> None:
        if self._idle:
            self.transport.close()


def connection_options(section: GatewaySection) -> dict[str, Any]:
    """Class attributes of the connections of one server."""
    return {
        "timeout_s": section.body_timeout_s,
        "max_connections": section.max_connections or max(1, _descriptors() - RESERVED_DESCRIPTORS),
        "open_connections": OpenConnections(),
    }


def _descriptors() -> int:
    """The limit of open files of this process; 1,024 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 1024
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20)


def raise_descriptor_limit() -> None:
    """Raises this process's limit of open files to ``DESCRIPTORS``, or as near as the system permits.

    The usual limit of 1,024 would let few idle connections close one another again and again.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def share_memory_arenas() -> None:
    """Lets all threads allocate from the arenas of glibc that exist by now.

    With one arena for each thread, the memory between their blocks grew by .4 to .9 MB per 1,000
    questions (``benchmarks.memory`` without this call), while the memory in use stayed the same.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


class GatewayServer(uvicorn.Server):
    """A server that reports its address as soon as it accepts connections."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[str], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Starts listening."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started and self.servers:
            for listening in (opened for server in self.servers for opened in server.sockets):
                _set_backlog(listening.fileno())
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            name = f"[{host}]" if ":" in host else host
            self._on_started(f"{'https' if self.config.is_ssl else 'http'}://{name}:{port}")


def _set_backlog(descriptor: int) -> None:
    """Sets how many connections may wait; asyncio has set it to the number that it accepts at once."""
    if sys.platform != "win32":
        with socket.socket(fileno=os.dup(descriptor)) as listening:
            listening.listen(BACKLOG)


def uvicorn_config(app: App, make_tools: Callable[[Gateway], ToolSet] = own_tools) -> uvicorn.Config:
    """Builds the configuration of uvicorn. See ``make_app``."""
    section, folder = app.config.gateway, app.config.folder
    return uvicorn.Config(
        make_app(app, make_tools),
        host=section.host,
        port=section.port,
        http=type("HttpConnection", (HttpConnection,), connection_options(section)),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # it would name clients and their requests
        server_header=False,
        backlog=ACCEPTED_AT_ONCE,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(section.shutdown_grace_s)),
        proxy_headers=bool(section.trusted_proxies),
        forwarded_allow_ips=list(section.trusted_proxies),
        ssl_certfile=folder / section.tls_cert if section.tls_cert else None,
        ssl_keyfile=str(folder / section.tls_key) if section.tls_key else None,
    )


def _without_traceback(app: Any, report: Callable[[CasemateError], None]) -> Any:
    """The ASGI application, whose start reports its own errors instead of sending a traceback to the log."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return

        async def send_plainly(message: Any) -> None:
            await send({**message, "message": ""} if message["type"] == "lifespan.startup.failed" else message)

        try:
            await app(scope, receive, send_plainly)
        except CasemateError as error:
            report(error)
            raise
        except Exception:
            _log.exception("the gateway's background work failed")
            raise

    return wrapped


def serve(
    app: App,
    on_started: Callable[[str], None] = lambda address: None,
    make_tools: Callable[[Gateway], ToolSet] = own_tools,
) -> None:
    """Serves until a signal stops the server, and closes the system.

    Args:
        app: The system.
        on_started: Called with the address once requests are accepted.
        make_tools: See ``make_app``.

    Raises:
        CasemateError: If the background work cannot start, such as the connection to an upstream MCP server.
        BackendError: If the server cannot start; the log has the reason.
    """
    raise_descriptor_limit()
    share_memory_arenas()
    failures: list[CasemateError] = []
    config = uvicorn_config(app, make_tools)
    config.app = _without_traceback(config.app, failures.append)
    server = GatewayServer(config, on_started)
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run()  # uvicorn raises the signal again at its end, when it must have no effect
    except SystemExit:  # of uvicorn, if the start fails: reported below
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if failures:
        raise failures[0]
    if not server.started:
        raise BackendError("the gateway cannot start; see the log", backend="gateway", retryable=True)
