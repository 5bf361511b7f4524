"""Gateways for tests: a small system, a real server in a thread, and generators that fail on demand."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar

import httpx
import uvicorn.server

from casemate import config as configuration
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import BackendError
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.gateway.server import GatewayServer, uvicorn_config
from casemate.guard.guard import Guard
from casemate.protocols import Defense, Generator
from casemate.rag.pipeline import Rag
from casemate.system import App
from casemate.types import Action, Outcome, Verdict
from tests.fakes import BagOfWords, Parrot, documents

SECRET_WORDS = ("hide_best", "verdict", "threshold", "flagged", "score", "hidden", "mirabel", "defense")


@dataclass
class HideNamed(Defense):
    """Hides one source from all clients, and flags queries that retrieve it."""

    source: str = "d3"
    max_hidden_sources: ClassVar[int] = 1

    async def on_retrieve(self, query, retrieval):
        hidden = tuple(h.document.id for h in retrieval.hits if h.document.source == self.source)
        kept = tuple(h for h in retrieval.hits if h.document.source != self.source)
        action = Action.HIDE if hidden else Action.NONE
        return Outcome(replace(retrieval, hits=kept), Verdict("hide_best", bool(hidden), action, 1.0, 0.5, hidden))


@dataclass
class Held(Generator):
    """Sends some pieces, then waits until the test releases it. Counts starts and ends."""

    pieces: int = 1
    begun: int = 0
    ended: int = 0
    free: threading.Event = field(default_factory=threading.Event)

    async def stream(self, prompt):
        self.begun += 1
        try:
            for _ in range(self.pieces):
                yield "begun "
            while not self.free.is_set():
                await asyncio.sleep(0.01)
            yield "done"
        finally:
            self.ended += 1


@dataclass
class Endless(Generator):
    """Streams without end and counts the pieces."""

    size: int = 10_000
    taken: int = 0
    ended: int = 0

    async def stream(self, prompt):
        try:
            while True:
                self.taken += 1
                yield "x" * self.size
                await asyncio.sleep(0)
        finally:
            self.ended += 1


@dataclass
class Down(Generator):
    """Fails, immediately or after some pieces."""

    error: Exception = field(default_factory=lambda: BackendError("host:1 secret", backend="openai", retryable=True))
    after: int = 0

    async def stream(self, prompt):
        for _ in range(self.after):
            yield "begun "
        raise self.error
        yield ""


def make(folder, generator=None, defenses=(), count=40, k=5, mode="enforce", **section) -> App:
    """Assembles a system over documents of random words."""
    raw = {"rag": {"k": k}, "guard": {"mode": mode, "defenses": []}, "gateway": {"port": 0, "pace_ms": 0, **section}}
    config = configuration.parse(raw, folder=folder)
    opened = ExitStack()
    index = opened.enter_context(closing(SqliteIndex(folder / "index.db")))
    store = opened.enter_context(closing(SqlEventStore(path=folder / "events.db")))
    rag = Rag(BagOfWords(256), index, generator or Parrot())
    guard = Guard(rag, defenses, enforce=mode == "enforce", store=store)
    if count and not index.tenants():
        asyncio.run(guard.add(documents(count)))
    return App(config, guard, store, opened)


def key(app: App, role="client", name="someone", **grant) -> str:
    """Creates an API key and returns its text."""
    return str(ApiKeyStore(app.store).create(Grant(name, role, **grant))[1])


class ShortSleeps:
    """The module ``asyncio`` for uvicorn, which otherwise checks for a stop only every 0.1 s."""

    def __getattr__(self, name):
        return getattr(asyncio, name)

    async def sleep(self, seconds):
        await asyncio.sleep(min(seconds, 0.01))


uvicorn.server.asyncio = ShortSleeps()


@contextmanager
def serving(app: App):
    """Serves in a thread and yields the address. The server stops as after a signal."""
    started = threading.Event()
    addresses = []

    def on_start(address):
        addresses.append(address)
        started.set()

    server = GatewayServer(uvicorn_config(app), on_start)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        assert started.wait(20), "the server did not begin"
        yield addresses[0]
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"


@contextmanager
def client(app: App, text: str | None):
    """Starts a server; yields an HTTP client with a key."""
    headers = {"Authorization": f"Bearer {text}"} if text else {}
    with serving(app) as url, httpx.Client(base_url=url, headers=headers, timeout=20) as http:
        yield http


def connected_to(url: str) -> socket.socket:
    """An HTTP connection to a server."""
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def chat(text: str, **more):
    """Returns the body of a chat request."""
    return {"model": "casemate", "messages": [{"role": "user", "content": text}], **more}
