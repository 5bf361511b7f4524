"""Runs a gateway in uvicorn until a signal stops it.

On SIGTERM or SIGINT the server accepts no more connections, running answers have ``shutdown_grace_s`` to finish, and
events are written. A second signal skips the wait.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn

from casemate.errors import BackendError, CasemateError
from casemate.gateway.app import make_app
from casemate.gateway.connections import (
    ACCEPTED_AT_ONCE,
    HttpConnection,
    Listener,
    connection_options,
    raise_descriptor_limit,
)
from casemate.gateway.mcp.memory import own_tools
from casemate.gateway.mcp.tools import ToolSet
from casemate.gateway.state import Gateway
from casemate.system import App

M_ARENA_MAX = -8
"""Parameter of ``mallopt`` in glibc's malloc.h."""
KEEP_ALIVE_S = 75
"""Idle connections are kept longer than reverse proxies keep theirs, so that the proxy closes them."""
_log = logging.getLogger(__name__)


def share_memory_arenas() -> None:
    """Makes all threads allocate from the existing arenas of glibc.

    With one arena per thread, the memory between their blocks grew by .4 to .9 MB per 1,000 questions, while the memory
    in use stayed the same (``benchmarks.memory`` without this call).
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


class GatewayServer(uvicorn.Server):
    """A server that reports its address as soon as it accepts connections."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[str], None]) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._listeners: list[Listener] = []

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Starts listening."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started and self.servers:
            listening = [opened for server in self.servers for opened in server.sockets]
            host, port = listening[0].getsockname()[:2]
            if sys.platform != "win32":
                self._listeners = [self._listener(opened.fileno()) for opened in listening]
                for server in self.servers:
                    server.close()  # the listeners have descriptors of their own
            name = f"[{host}]" if ":" in host else host
            self._on_started(f"{'https' if self.config.is_ssl else 'http'}://{name}:{port}")

    def _listener(self, descriptor: int) -> Listener:
        protocol: Any = self.config.http_protocol_class
        make_connection = partial(
            protocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        listening = socket.socket(fileno=os.dup(descriptor))
        return Listener(listening, make_connection, protocol.open_connections, self.config.ssl)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more connections, and lets running requests finish."""
        for listener in self._listeners:
            listener.close()
        await super().shutdown(sockets)


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

    ``on_started`` gets the address once requests are accepted; for ``make_tools`` see ``make_app``.

    Raises:
        CasemateError: If the background work cannot start, such as the connection to an upstream MCP server.
        BackendError: If the address is in use, or the server cannot start; the log then has the reason.
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
    except SystemExit as stop:  # of uvicorn, if the start fails: reported below
        if isinstance(stop.__context__, OSError) and stop.__context__.errno == errno.EADDRINUSE:
            message = f"{config.host}:{config.port} is in use; choose another with --port"
            failures.append(BackendError(message, backend="gateway", retryable=True))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if failures:
        raise failures[0]
    if not server.started:
        raise BackendError("the gateway cannot start; see the log", backend="gateway", retryable=True)
