"""Gateways for tests: a small system, a real server in a thread, and generators that misbehave on request."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar

import httpx

from casemate import config as configuration
from casemate.app import App
from casemate.backends.sql_events import SqlEvents
from casemate.backends.sqlite import SqliteIndex
from casemate.errors import BackendError
from casemate.gateway.keys import Grant, Keys
from casemate.gateway.server import Server, configured
from casemate.guard import Guard
from casemate.protocols import Defense, Generator
from casemate.rag import Rag
from casemate.types import Action, Outcome, Verdict
from tests.fakes import BagOfWords, Parrot, documents

SECRET_WORDS = ("hide_best", "verdict", "threshold", "flagged", "score", "hidden", "mirabel", "defense")


@dataclass
class HideNamed(Defense):
    """Hides one source, whoever asks, and flags when it would have been found."""

    source: str = "d3"
    hides: ClassVar[int] = 1

    async def on_retrieve(self, query, retrieval):
        hidden = tuple(h.document.id for h in retrieval.hits if h.document.source == self.source)
        kept = tuple(h for h in retrieval.hits if h.document.source != self.source)
        action = Action.HIDE if hidden else Action.NONE
        return Outcome(replace(retrieval, hits=kept), Verdict("hide_best", bool(hidden), action, 1.0, 0.5, hidden))


@dataclass
class Held(Generator):
    """Says one piece, then waits until it is let go; tells when it was begun and ended."""

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
    """Never stops by itself; counts what was taken from it."""

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
    """Fails, at once or after a piece."""

    error: Exception = field(default_factory=lambda: BackendError("host:1 secret", backend="openai", retryable=True))
    after: int = 0

    async def stream(self, prompt):
        for _ in range(self.after):
            yield "begun "
        raise self.error
        yield ""


def make(folder, generator=None, defenses=(), count=40, k=5, mode="enforce", **section) -> App:
    """A wired system over some documents of random words."""
    raw = {"rag": {"k": k}, "guard": {"mode": mode, "defenses": []}, "gateway": {"port": 0, "pace_ms": 0, **section}}
    config = configuration.parse(raw, folder=folder)
    opened = ExitStack()
    index = opened.enter_context(closing(SqliteIndex(folder / "index.db")))
    store = opened.enter_context(closing(SqlEvents(path=folder / "events.db")))
    rag = Rag(BagOfWords(256), index, generator or Parrot())
    guard = Guard(rag, defenses, enforce=mode == "enforce", store=store)
    if count and not index.tenants():
        asyncio.run(guard.add(documents(count)))
    return App(config, guard, store, opened)


def key(app: App, role="client", name="someone", **grant) -> str:
    """The text of a new key."""
    return str(Keys(app.store).create(Grant(name, role, **grant))[1])


@contextmanager
def serving(app: App):
    """The address of a server in a thread; on leaving it ends as on a signal."""
    told = threading.Event()
    places = []

    def tell(address):
        places.append(address)
        told.set()

    server = Server(configured(app), tell)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        assert told.wait(20), "the server did not begin"
        yield places[0]
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"


@contextmanager
def client(app: App, text: str | None):
    """An http client of a server of its own, with a key."""
    headers = {"Authorization": f"Bearer {text}"} if text else {}
    with serving(app) as url, httpx.Client(base_url=url, headers=headers, timeout=20) as http:
        yield http


def chat(text: str, **more):
    """The body of a request."""
    return {"model": "casemate", "messages": [{"role": "user", "content": text}], **more}
