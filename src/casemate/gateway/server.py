"""Runs a gateway until it is told to end: uvicorn, with what the configuration says.

On SIGTERM or SIGINT no more connections are taken, running answers get ``grace_s`` to finish, and events are written. A
second signal does not wait for them.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from casemate.app import App
from casemate.errors import BackendError
from casemate.gateway.door import HEADERS
from casemate.gateway.http import make_app
from casemate.gateway.refusals import no_http

BACKLOG = 2048
IDLE_S = 75
"""An idle connection is kept so long: longer than reverse proxies keep theirs, so that it is they who close it."""


class Connection(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it, for strangers.

    A request line and headers have to come within ``head_s``: whoever sends them one byte at a time, or nothing at
    all, would else hold a connection for ever. And what is no HTTP is refused in the same shape as all else.

    Attributes:
        head_s: Of the connection's configuration.
    """

    head_s: float = 30.0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        super().connection_lost(exc)
        self._wait(ended=True)

    def data_received(self, data: bytes) -> None:
        """Takes some bytes, after which a request may have begun."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before or self.transport.is_closing():
            self._wait(ended=True)
        elif self._idle and self._late is None:
            self._wait()

    def send_400_response(self, msg: str) -> None:
        """Says that this is no HTTP, unless an answer is on its way."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            refusal = no_http()
            content = bytes(refusal.response().body)
            headers = {**HEADERS, "Content-Type": "application/json", **(refusal.headers or {})}
            told = [(name.encode(), value.encode()) for name, value in headers.items()]
            told.append((b"Content-Length", str(len(content)).encode()))
            for event in (
                h11.Response(status_code=400, headers=told, reason=b"Bad Request"),
                h11.Data(data=content),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait(self, ended: bool = False) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = None if ended else self.loop.call_later(self.head_s, self._give_up)

    def _give_up(self) -> None:
        if self._idle:
            self.transport.close()


class Server(uvicorn.Server):
    """Says where it listens as soon as it does."""

    def __init__(self, config: uvicorn.Config, told: Callable[[str], None]) -> None:
        super().__init__(config)
        self._told = told

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Begins to listen."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started and self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            place = f"[{host}]" if ":" in host else host
            self._told(f"{'https' if self.config.is_ssl else 'http'}://{place}:{port}")


def configured(app: App) -> uvicorn.Config:
    """What uvicorn is told."""
    section, folder = app.config.gateway, app.config.folder
    return uvicorn.Config(
        make_app(app),
        host=section.host,
        port=section.port,
        http=type("Connection", (Connection,), {"head_s": section.body_timeout_s}),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # it would name clients and what they asked for
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=max(1, round(section.grace_s)),
        proxy_headers=bool(section.trusted_proxies),
        forwarded_allow_ips=list(section.trusted_proxies),
        ssl_certfile=folder / section.tls_cert if section.tls_cert else None,
        ssl_keyfile=str(folder / section.tls_key) if section.tls_key else None,
    )


def serve(app: App, told: Callable[[str], None] = lambda address: None) -> None:
    """Serves until a signal ends it; the system is then closed.

    Args:
        app: The system.
        told: Called with the address, as soon as requests are taken.

    Raises:
        BackendError: If it could not begin; the log says why.
    """
    server = Server(configured(app), told)
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run()  # uvicorn raises the signal once more at the end: by then it is to do nothing
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if not server.started:
        raise BackendError("the gateway could not begin; the log says why", backend="gateway", retryable=True)
