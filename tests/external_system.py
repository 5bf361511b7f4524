"""A small external RAG system, with or without a guard: as functions, as an HTTP server, as a gateway process.

`python -m tests.external_system FOLDER [bare]` serves a gateway over the clinic's notes and prints its address.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.demo.clinic import case_notes
from casemate.protocols import Defense
from casemate.rag.pipeline import join_stream
from casemate.text.tokens import content_words
from casemate.types import Action, Document, Outcome, Prompt, Verdict

IN, OUT = 30, 30
asked = []


@cache
def notes():
    """The notes in the collection, and an equal number of similar notes outside it."""
    found = [Document(name, text) for name, text in case_notes(IN + OUT)]
    return found[:IN], found[IN:]


def write_known(folder: Path) -> None:
    """Writes both kinds of notes as provided texts."""
    for place, kind in zip(("in", "out"), notes(), strict=True):
        for document in kind:
            path = folder / "known" / place / Path(document.id).name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(document.text)


@cache
def _bags():
    return [(document, content_words(document.text)) for document in notes()[0]]


def answer(question: str, guarded: bool) -> str:
    """The answer of the system. The guarded variant ignores a note if the question contains a third of its words."""
    q = content_words(question)
    ranked = sorted(_bags(), key=lambda pair: -len(pair[1] & q) / len(pair[1]))
    if guarded:
        ranked = [(document, bag) for document, bag in ranked if len(bag & q) / len(bag) < 1 / 3]
    context = tuple(document for document, _ in ranked[:2])
    return asyncio.run(join_stream(SimulatedReader().stream(Prompt(question, context, ""))))


def bare(question: str) -> str:
    return answer(question, guarded=False)


def guarded(question: str, client: str) -> str:
    asked.append((client, question))
    return answer(question, guarded=True)


def garbage(question: str) -> str:
    return f"Lorem ipsum dolor {len(question)} sit amet, consectetur adipiscing elit sed."


@dataclass
class HideSimilar(Defense):
    """Hides documents that are very similar to the question."""

    max_hidden_sources: ClassVar[int] = 1
    limit: float = 0.6

    async def on_retrieve(self, query, retrieval):
        hidden = tuple(h.document.id for h in retrieval.hits if h.score > self.limit)
        kept = tuple(h for h in retrieval.hits if h.score <= self.limit)
        action = Action.HIDE if hidden else Action.NONE
        return Outcome(replace(retrieval, hits=kept), Verdict("near", bool(hidden), action, 1.0, self.limit, hidden))


@dataclass
class Server:
    """An HTTP server over ``answer``.

    `script` lists the responses to the first requests; later requests get `always`. With "busy" each question fails
    once.

    Attributes: count: Requests so far. url: Its address.
    """

    always: str = "bare"
    script: list = field(default_factory=list)
    count: int = 0
    url: str = ""
    seen: set = field(default_factory=set)

    def reply(self, question: str) -> tuple[int, dict, bytes]:
        """Status, headers and body."""
        self.count += 1
        how = self.script.pop(0) if self.script else self.always
        if how == "busy" and question not in self.seen:
            self.seen.add(question)
            how = "429"
        ok = json.dumps({"answer": answer(question, how == "guarded")}).encode()
        return {
            "429": (429, {"Retry-After": "0"}, b"{}"),
            "429 later": (429, {"Retry-After": "3600"}, b"{}"),
            "500": (500, {}, b"stack trace"),
            "400": (400, {}, b'{"error": "content filter"}'),
            "malformed": (200, {}, ok[:-5]),
            "other schema": (200, {}, b'{"reply": {"text": "yes"}}'),
            "garbage": (200, {}, json.dumps({"answer": garbage(question)}).encode()),
            "empty": (200, {}, b'{"answer": ""}'),
        }.get(how, (200, {}, ok))


@contextmanager
def serving(**options):
    """A server in a thread."""
    fake = Server(**options)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if fake.always == "slow":
                fake.closing.wait(20)
            status, headers, data = fake.reply(body["question"])
            self.send_response(status)
            for key, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            """Logs nothing."""

    fake.closing = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # clients disconnect intentionally
    fake.url = f"http://127.0.0.1:{server.server_port}/ask"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


def main() -> None:
    """Serves a gateway until it is killed. Prints its address and a key on the first line."""
    from casemate.gateway.server import serve
    from tests.gateways import key, make

    guard = () if "bare" in sys.argv else (HideSimilar(),)
    limits = {"requests_per_minute": 1_000_000, "tokens_per_day": 2_000_000_000}
    app = make(Path(sys.argv[1]), SimulatedReader(), guard, count=0, k=2, **limits)
    asyncio.run(app.guard.add([replace(d, text=d.text[:4000]) for d in notes()[0]]))
    text = key(app, trust_user=True)
    serve(app, lambda address: print(json.dumps([address, text]), flush=True))


if __name__ == "__main__":
    main()
