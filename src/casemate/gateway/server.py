"""Runs a gateway until it is told to end: uvicorn, with what the configuration says.

On SIGTERM or SIGINT no more connections are taken, running answers get ``grace_s`` to finish, and events are written. A
second signal does not wait for them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import uvicorn

from casemate.app import App
from casemate.errors import BackendError
from casemate.gateway.http import make_app

BACKLOG = 2048
IDLE_S = 75
"""An idle connection is kept so long: longer than reverse proxies keep theirs, so that it is they who close it."""


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
        http="h11",
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
