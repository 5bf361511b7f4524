"""A local server with the part of OpenAI's API that the backend uses, and with configurable faults."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import numpy as np

ANSWER = ("The ", "case ", "is ", "cløsed", ".")
DIM = 16
DAMAGED = {"garbled": b'data: {"choices": [{"del\n\n', "nested": b"data: " + b"[" * 100_000 + b"\n\n"}
"""Events that are not JSON, by the name of the behavior."""
FAULTS: dict[str, tuple[int, dict[str, Any]]] = {
    "400": (400, {"message": "{echo}", "code": "unsupported_parameter", "param": "max_tokens"}),
    "401": (401, {"message": "Incorrect API key provided: {echo}", "code": "invalid_api_key"}),
    "404": (404, {"message": "no model {echo}", "code": "model_not_found"}),
    "429": (429, {"message": "slow down, {echo}", "code": "rate_limit_exceeded"}),
    "quota": (429, {"message": "no money, {echo}", "code": "insufficient_quota"}),
    "500": (500, {"message": "stack trace with {echo}", "code": "UPPER and spaces {echo}"}),
}


def vector_of(text: str, dim: int = DIM) -> np.ndarray:
    """The server's vector for a text: determined by its hash, and not of unit length."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return 3 * np.random.default_rng(seed).standard_normal(dim)


@dataclass
class Received:
    """A received request, with header names in lower case."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class FakeOpenAI:
    """A server with one behavior per request in ``script``; the default is "ok".

    ``GET /v1/models`` lists `models`.

    The behavior "say:" with a text answers with that text. The behavior "answer" calls `answer` with the question.
    """

    script: list[str] = field(default_factory=list)
    always: str = "ok"
    answer: Callable[[str], str] = str
    retry_after: str = "0.01"
    models: Sequence[str] = ()
    received: list[Received] = field(default_factory=list)
    disconnected: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.fake = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    @property
    def host(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        """Value for ``base_url``."""
        return f"http://{self.host}/v1"

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """Bodies posted to a path, in order."""
        return [r.body for r in self.received if r.path == path]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    fake: FakeOpenAI

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs nothing, because clients disconnect intentionally."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""

    def do_GET(self) -> None:
        fake = self.server.fake
        fake.received.append(Received(self.path, {k.lower(): v for k, v in self.headers.items()}, {}))
        if fake.always in FAULTS:
            self._fault(fake.always, {})
        else:
            listed = {"object": "list", "data": [{"id": name, "object": "model"} for name in fake.models]}
            self._send(200, json.dumps(listed).encode(), "application/json")

    def do_POST(self) -> None:
        fake = self.server.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.received.append(Received(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        how = fake.script.pop(0) if fake.script else fake.always
        if how in FAULTS:
            self._fault(how, body)
        elif how == "html":
            self._send(200, b"<html>welcome</html>", "text/html")
        elif how == "json":
            self._send(200, b'{"data": [', "application/json")
        elif self.path == "/v1/embeddings":
            self._embeddings(body, how)
        else:
            question = body["messages"][-1]["content"]
            self._chat(f"say:{fake.answer(question)}" if how == "answer" else how)

    def _fault(self, how: str, body: dict[str, Any]) -> None:
        """An error that repeats key and request, like some servers."""
        status, error = FAULTS[how]
        echo = f"{self.headers['Authorization']} {json.dumps(body)}"
        echoed = {k: v.replace("{echo}", echo) for k, v in error.items()}
        extra = {"Retry-After": self.server.fake.retry_after}
        self._send(status, json.dumps({"error": echoed}).encode(), "application/json", extra)

    def _embeddings(self, body: dict[str, Any], how: str) -> None:
        if how == "stall":
            self.server.fake.closing.wait(10)
            return
        texts = body["input"]
        dim = body.get("dimensions", DIM) + (how == "dim")
        vectors = [vector_of(text, dim).tolist() for text in texts]
        if how in ("zero", "nan", "huge"):
            vectors[-1] = [{"zero": 0.0, "nan": float("nan"), "huge": float("inf")}[how]] * dim
        if how == "text":
            vectors[-1] = "AACAPw=="
        if how == "ragged":
            vectors[-1] = vectors[-1][:-1]
        data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(vectors)]
        if how == "count":
            data.pop()
        if how == "numbers":
            data = [{**item, "index": 0} for item in data]
        data.reverse()  # the API guarantees the index and not the order
        answer = {"object": "list", "model": body["model"], "data": data, "usage": {}}
        self._send(200, json.dumps(answer).encode(), "application/json")

    def _chat(self, how: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if how in WHOLE:
            self._events(WHOLE[how])
        elif how.startswith("say:"):
            self._events([_chunk(how.removeprefix("say:")), _chunk(None, "stop")])
        elif how == "instructions":
            self._events([_chunk(self.server.fake.received[-1].body["messages"][0]["content"]), _chunk(None, "stop")])
        else:
            self._events([{**_chunk(""), "choices": []}, _chunk(""), _chunk(ANSWER[0])])
        if how in ("stall", "slow"):
            self._linger(how)
        elif how in DAMAGED:
            self._chunked(DAMAGED[how])
        elif how == "error":
            self._events([{"error": {"message": str(self.server.fake.received[-1]), "code": "server_error"}}])
        elif how == "shape":
            self._events([{"choices": [{"index": 0, "delta": {"content": 5}, "finish_reason": None}]}])
        elif how == "ok":
            self._events([*(_chunk(chunk) for chunk in ANSWER[1:]), _chunk(None, "stop")])
        if how in ("ok", "done", "refusal", "filtered", "instructions") or how.startswith("say:"):
            self._chunked(b"data: [DONE]\n\n")
        if how == "cut":
            self.close_connection = True
        else:
            self._chunked(b"")

    def _linger(self, how: str) -> None:
        """Stalls or streams endlessly until the client disconnects or the test ends."""
        fake = self.server.fake
        try:
            while not fake.closing.wait(0.02):
                if how == "slow":
                    self._events([_chunk("and on ")])
        except OSError:
            fake.disconnected.set()
            raise

    def _events(self, events: Sequence[dict[str, Any]]) -> None:
        for event in events:
            self._chunked(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunked(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _send(self, status: int, data: bytes, kind: str, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(extra or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)


def _chunk(content: str | None, finish: str | None = None, **delta: str) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content, **delta}, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


WHOLE: dict[str, list[dict[str, Any]]] = {
    "empty": [],
    "done": [],
    "filtered": [_chunk(None, "content_filter")],
    "refusal": [_chunk(None, refusal="I will not."), _chunk(None, "stop")],
}
"""Unusual beginnings of responses."""
