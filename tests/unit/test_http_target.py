from __future__ import annotations

import asyncio
import json
import math
import threading
import time
import tracemalloc
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("httpx", reason="needs casemate[http]")
pytest.importorskip("jsonpath_ng", reason="needs casemate[http]")

from casemate import remote
from casemate.app import build
from casemate.backends.http import Http
from casemate.config import Part
from casemate.errors import BackendError, ConfigError
from casemate.monitor.canaries.canary import Canary
from casemate.monitor.canaries.results import Status
from casemate.monitor.canaries.run import run
from casemate.types import Query, Secret

REPLY = {
    "answer": "It is 7.",
    "parts": [{"text": "It is "}, {"text": "7."}],
    "hits": [{"id": 3, "file": "a.md", "score": 0.9}, {"id": 5, "file": "b.md", "score": 0.5}],
    "names": ["a.md", "b.md"],
}


@dataclass
class Fake:
    """What the server does: a word, or a status and headers, for each coming request; then ``ok``."""

    script: list = field(default_factory=list)
    received: list = field(default_factory=list)
    sent: int = 0
    closing: threading.Event = field(default_factory=threading.Event)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Stays silent."""

    def do_POST(self):
        fake = self.server.fake
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fake.received.append((self.command, self.path, dict(self.headers.items()), body, time.monotonic()))
        how = fake.script.pop(0) if fake.script else "ok"
        if isinstance(how, tuple):
            status, headers = how
            self.give(status, b'{"detail": "stack trace with %s"}' % body, headers)
        else:
            getattr(self, how)()

    do_GET = do_POST  # noqa: N815

    def give(self, status, data, headers):
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def ok(self):
        self.give(200, json.dumps(REPLY).encode(), {})

    def html(self):
        self.give(200, b"<html><body>Sign in</body></html>", {"Content-Type": "text/html"})

    def html_as_json(self):
        self.give(200, b"\n <!DOCTYPE html><html>", {})

    def text(self):
        self.give(200, b"It is 7.", {"Content-Type": "text/plain"})

    def broken(self):
        self.give(200, b'{"answer": "It', {})

    def gzipped(self):
        self.give(200, b"\x1f\x8b", {"Content-Encoding": "gzip"})

    def empty(self):
        self.give(200, b"{}", {})

    def number(self):
        self.give(200, b'{"answer": 7}', {})

    def uneven(self):
        self.give(200, json.dumps(REPLY | {"names": ["a.md"]}).encode(), {})

    def nan(self):
        self.give(200, b'{"answer": "x", "hits": [{"id": 1, "file": "a", "score": NaN}]}', {})

    def cut(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"{")
        self.close_connection = True

    def hang(self):
        self.server.fake.closing.wait(10)

    def drip(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.stream(b" ", 0.02)

    def flood(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.stream(b" " * 65536, 0)

    def stream(self, piece, pause):
        fake = self.server.fake
        try:
            while fake.sent < 100_000_000 and not fake.closing.wait(pause):
                self.wfile.write(piece)
                fake.sent += len(piece)
        except OSError:
            pass
        self.close_connection = True

    def huge(self):
        self.send_response(200)
        self.send_header("Content-Length", "100000000")
        self.end_headers()
        self.close_connection = True


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Stays silent: clients here break off on purpose."""


@contextmanager
def serving():
    fake = Fake()
    server = Server(("127.0.0.1", 0), Handler)
    server.fake = fake
    fake.url = f"http://127.0.0.1:{server.server_address[1]}/ask"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(remote, "BACKOFF_S", 0.01)
    with serving() as fake:
        yield fake


def ask(target, question="How many?", **fields):
    return asyncio.run(target.ask(Query(question, **fields)))


def failure(target):
    with pytest.raises(BackendError) as caught:
        ask(target, "my secret question")
    assert "secret" not in str(caught.value)
    assert str(caught.value).startswith("127.0.0.1:")
    assert caught.value.__cause__ is None
    return caught.value


class TestRequest:
    def test_the_question_is_posted_as_json(self, server):
        answer = ask(Http(server.url))
        method, path, headers, body, _ = server.received[0]
        assert (method, path, json.loads(body)) == ("POST", "/ask", {"question": "How many?"})
        assert headers["content-type"] == "application/json"
        assert answer.text == "It is 7."

    @settings(max_examples=30)
    @given(question=st.text(min_size=1, max_size=60))
    def test_no_question_changes_the_request(self, question):
        body = '{"messages": [{"role": "user", "content": "Q: {question}"}], "n": "{k}", "who": "{client}@{tenant}"}'
        target = Http("http://h/", body=body)
        from casemate.backends.http import _filled

        sent = json.loads(json.dumps(_filled(target._body, Query(question, "ann", "north", 7))))
        assert sent == {
            "messages": [{"role": "user", "content": f"Q: {question}"}],
            "n": 7,
            "who": "ann@north",
        }

    @pytest.mark.parametrize("question", ['"}, "role": "system"', "{client}", "\\u0022 \n \x00", "\ud800"])
    def test_hostile_questions_arrive_as_they_are(self, server, question):
        ask(Http(server.url, body={"q": "{question}", "c": "{client}"}), question, client="ann")
        assert json.loads(server.received[0][3]) == {"q": question, "c": "ann"}

    def test_a_get_carries_it_in_the_address(self, server):
        ask(Http(f"{server.url}?q={{question}}&k={{k}}", method="get"), "a&b=ü/ #?\ud800")
        method, path, _, body, _ = server.received[0]
        assert (method, body) == ("GET", b"")
        assert parse_qs(urlsplit(path).query) == {"q": ["a&b=ü/ #??"], "k": ["5"]}

    def test_secrets_are_sent_and_never_shown(self, server):
        part = Part(use="http", url=Secret(server.url), headers={"X-Key": Secret("hunter2"), "Accept": "text/x"})
        target = build("target", part)
        ask(target)
        headers = {k.lower(): v for k, v in server.received[0][2].items()}
        assert [headers[k] for k in ("x-key", "accept-encoding", "accept")] == ["hunter2", "identity", "text/x"]
        assert "hunter2" not in repr(target)
        assert "hunter2" not in repr(vars(target))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"url": "ftp://h/x"}, "http.url must begin with http"),
            ({"url": "https://"}, "http.url must begin with http"),
            ({"url": "http://{question}/"}, "placeholder in its host"),
            ({"method": "TRACE"}, "http.method is 'TRACE'"),
            ({"method": "GET"}, "http.url has no {question}"),
            ({"body": {"q": "x"}}, "http.body has no {question}"),
            ({"body": "{question}"}, "http.body is no JSON"),
            ({"body": {"q": {1, 2}}}, "http.body is no JSON"),
            ({"answer": "$.["}, "http.answer is '$.['"),
            ({"answer": ""}, "http.answer is ''"),
            ({"sources": "a b"}, "http.sources is 'a b'"),
            ({"timeout_s": 0}, "timeout_s=0"),
            ({"retries": -1}, "retries=-1"),
            ({"requests_per_s": -1}, "requests_per_s=-1"),
            ({"max_bytes": 0}, "max_bytes=0"),
        ],
    )
    def test_options_out_of_range(self, options, message):
        with pytest.raises(ConfigError) as caught:
            Http(**{"url": "http://h/x"} | options)
        assert message in str(caught.value)


class TestReply:
    def test_what_the_paths_lead_to_is_told(self, server):
        target = Http(server.url, ids="$.hits[*].id", sources="$.hits[*].file", scores="$.hits[*].score")
        answer = ask(target)
        assert target.tells == {"ids", "sources", "scores"}
        assert [(h.document.id, h.document.source, h.score) for h in answer.retrieval.hits] == [
            ("3", "a.md", 0.9),
            ("5", "b.md", 0.5),
        ]
        assert {h.document.text for h in answer.retrieval.hits} == {""}

    def test_what_is_not_told_is_made_plain(self, server):
        answer = ask(Http(server.url, sources="$.names"))
        assert [h.document.id for h in answer.retrieval.hits] == ["unknown-1", "unknown-2"]
        assert [h.document.source for h in answer.retrieval.hits] == ["a.md", "b.md"]
        assert all(math.isnan(h.score) for h in answer.retrieval.hits)
        assert answer.retrieval.background.n == 0
        assert ask(Http(server.url)).retrieval.hits == ()
        assert Http(server.url).tells == frozenset()

    def test_parts_of_an_answer_are_put_together(self, server):
        assert ask(Http(server.url, answer="$.parts[*].text")).text == "It is 7."

    def test_a_stream_is_the_whole(self, server):
        async def pieces():
            return [piece async for piece in Http(server.url).stream(Query("q"))]

        assert asyncio.run(pieces()) == ["It is 7."]

    @pytest.mark.parametrize(
        ("how", "message"),
        [
            ("html", "an HTML page came instead of JSON"),
            ("html_as_json", "an HTML page came instead of JSON"),
            ("text", "the reply is no JSON (text/plain, 8 bytes)"),
            ("broken", "the reply is no JSON"),
            ("gzipped", "the reply is compressed"),
            ("empty", "the reply has no text at answer ($.answer)"),
            ("number", "the reply has no text at answer ($.answer)"),
            ("uneven", "not equally many: 2, 1"),
            ("nan", "scores must be finite numbers"),
            ((404, {}), "HTTP 404: there is nothing at this path"),
            ((401, {}), "HTTP 401: the key is refused"),
            ((418, {}), "HTTP 418: the request is refused"),
            ((304, {}), "HTTP 304"),
        ],
    )
    def test_what_is_no_answer_is_an_error_that_says_why(self, server, how, message):
        server.script = [how]
        target = Http(server.url, retries=3, ids="$.hits[*].id", sources="$.names", scores="$.hits[*].score")
        error = failure(target)
        assert message in str(error)
        assert not error.retryable
        assert len(server.received) == 1


class TestAgain:
    @pytest.mark.parametrize("how", [(500, {}), (503, {}), (429, {}), "cut"])
    def test_what_may_pass_is_tried_again(self, server, how):
        server.script = [how, how]
        assert ask(Http(server.url, retries=2)).text == "It is 7."
        assert len(server.received) == 3

    @pytest.mark.parametrize(
        ("how", "message"),
        [
            ((500, {}), "HTTP 500: the server failed"),
            ((429, {}), "HTTP 429: too many requests"),
            ("cut", "the connection"),
        ],
    )
    def test_but_not_for_ever(self, server, how, message):
        server.script = [how] * 5
        error = failure(Http(server.url, retries=1))
        assert message in str(error)
        assert error.retryable
        assert len(server.received) == 2

    @pytest.mark.parametrize("dated", [False, True])
    def test_a_server_that_asks_to_wait_is_waited_for(self, server, dated):
        began = time.monotonic()
        server.script = [(429, {"Retry-After": formatdate(time.time() + 2, usegmt=True) if dated else "1"})]
        ask(Http(server.url))
        assert server.received[1][4] - began > 0.9  # a date has whole seconds

    def test_but_not_for_an_hour(self, server):
        server.script = [(503, {"Retry-After": "3600"})]
        assert "HTTP 503" in str(failure(Http(server.url, retries=5)))
        assert len(server.received) == 1

    def test_a_server_that_is_not_there(self):
        error = failure(Http("http://127.0.0.1:9/ask", retries=0))
        assert "the connection failed (ConnectError)" in str(error)
        assert error.retryable


class TestLimits:
    @pytest.mark.parametrize("how", ["hang", "drip"])
    def test_a_server_that_hangs_or_drips(self, server, how):
        server.script = [how] * 3
        begun = time.monotonic()
        assert "no reply within 0.3 s" in str(failure(Http(server.url, timeout_s=0.3, retries=2)))
        assert time.monotonic() - begun < 30
        assert len(server.received) == 1

    @pytest.mark.parametrize("how", ["flood", "huge"])
    def test_a_reply_of_100_mb_is_not_read(self, server, how):
        server.script = [how]
        target = Http(server.url, timeout_s=20)
        tracemalloc.start()
        try:
            error = failure(target)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert "more than 1,000,000 bytes" in str(error)
        assert peak < 16_000_000
        assert server.sent < 32_000_000

    def test_requests_are_spread_in_time(self, server):
        target = Http(server.url, requests_per_s=10)

        async def several():
            await asyncio.gather(*(target.ask(Query("q")) for _ in range(5)))

        asyncio.run(several())
        times = sorted(row[4] for row in server.received)
        assert times[-1] - times[0] > 0.25

    def test_who_gave_up_waiting_takes_no_turn(self, server):
        target = Http(server.url, requests_per_s=2)

        async def impatient():
            await target.ask(Query("q"))
            for _ in range(20):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(target.ask(Query("q")), 0.001)
            begun = time.monotonic()
            await target.ask(Query("q"))
            return time.monotonic() - begun

        assert asyncio.run(impatient()) < 2

    def test_any_event_loop_may_ask(self, server):
        target = Http(server.url)
        assert {ask(target).text for _ in range(3)} == {"It is 7."}


class TestRedirects:
    @pytest.mark.parametrize("status", [301, 302, 307, 308])
    def test_on_the_same_host_the_question_goes_along(self, server, status):
        server.script = [(status, {"Location": "/ask/"})]
        assert ask(Http(server.url, headers={"X-Key": "k"})).text == "It is 7."
        method, path, headers, body, _ = server.received[1]
        assert (method, path, json.loads(body)) == ("POST", "/ask/", {"question": "How many?"})
        assert {k.lower(): v for k, v in headers.items()}["x-key"] == "k"

    def test_another_host_is_never_asked(self, server):
        with serving() as other:
            for location in (other.url, other.url.replace("127.0.0.1", "localhost"), "//localhost/x", ""):
                server.script = [(307, {"Location": location})]
                assert "redirects to another host" in str(failure(Http(server.url)))
            assert other.received == []

    def test_circles_end(self, server):
        server.script = [(307, {"Location": "/ask"})] * 9
        assert "redirects in circles" in str(failure(Http(server.url)))
        assert len(server.received) == 4

    @pytest.mark.parametrize(
        ("here", "there", "follows"),
        [
            ("https://h/a", "http://h/a", False),
            ("http://h/a", "https://h/a", True),
            ("https://h/a", "https://H:443/b", True),
            ("https://h/a", "https://h:8443/b", False),
            ("https://u:p@h/a", "/b", True),
            ("https://h/a", "https://h.evil/b", False),
            ("https://h/a", "https://h@evil/b", False),
        ],
    )
    def test_only_into_tls(self, here, there, follows):
        caller = remote.Caller("x")
        if follows:
            assert remote.urlsplit(caller._next(here, there)).hostname == "h"
        else:
            with pytest.raises(BackendError, match="redirects"):
                caller._next(here, there)


def test_canaries_through_it(server):
    server.script = ["ok", "html", "flood", (500, {})]
    found = [Canary(id=f"c{i}", query=f"q{i}", expected_answer="7", expected_sources=["a.md"]) for i in range(5)]
    target = Http(server.url, sources="$.names", retries=0)
    result = asyncio.run(run(found, target, run_id="r", concurrency=1))
    assert sorted(r.status for r in result.results) == [Status.ERROR] * 3 + [Status.PASS] * 2
    assert {r.sources for r in result.results if r.status is Status.PASS} == {("a.md", "b.md")}
    assert all("\n" not in r.error for r in result.results)
