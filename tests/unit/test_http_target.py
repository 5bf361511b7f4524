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

from casemate.backends.targets.http import HttpTarget
from casemate.config import PluginSpec
from casemate.errors import BackendError, ConfigError
from casemate.monitor.canaries.canary import Canary
from casemate.monitor.canaries.results import CanaryStatus
from casemate.monitor.canaries.run import CanaryRunner
from casemate.plugins import build
from casemate.runtime import http_client, retry
from casemate.types import Query, Secret

REPLY = {
    "answer": "It is 7.",
    "parts": [{"text": "It is "}, {"text": "7."}],
    "hits": [{"id": 3, "file": "a.md", "score": 0.9}, {"id": 5, "file": "b.md", "score": 0.5}],
    "names": ["a.md", "b.md"],
}


@dataclass
class ServerState:
    """The server's behavior for each request: a name, or status and headers; then ``ok``."""

    script: list = field(default_factory=list)
    received: list = field(default_factory=list)
    sent: int = 0
    closing: threading.Event = field(default_factory=threading.Event)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Logs nothing."""

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

    def stream(self, chunk, pause):
        fake = self.server.fake
        try:
            while fake.sent < 100_000_000 and not fake.closing.wait(pause):
                self.wfile.write(chunk)
                fake.sent += len(chunk)
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
        """Logs nothing, because clients disconnect intentionally."""


@contextmanager
def serving():
    fake = ServerState()
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
    monkeypatch.setattr(retry, "BACKOFF_S", 0.01)
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
        answer = ask(HttpTarget(server.url))
        method, path, headers, body, _ = server.received[0]
        assert (method, path, json.loads(body)) == ("POST", "/ask", {"question": "How many?"})
        assert headers["content-type"] == "application/json"
        assert answer.text == "It is 7."

    @settings(max_examples=30)
    @given(question=st.text(min_size=1, max_size=60))
    def test_questions_cannot_change_the_request(self, question):
        body = '{"messages": [{"role": "user", "content": "Q: {question}"}], "n": "{k}", "who": "{client}@{tenant}"}'
        target = HttpTarget("http://h/", body=body)
        from casemate.backends.targets.http import _fill

        sent = json.loads(json.dumps(_fill(target._body, Query(question, "ann", "north", 7))))
        assert sent == {
            "messages": [{"role": "user", "content": f"Q: {question}"}],
            "n": 7,
            "who": "ann@north",
        }

    @pytest.mark.parametrize("question", ['"}, "role": "system"', "{client}", "\\u0022 \n \x00", "\ud800"])
    def test_hostile_questions_arrive_unchanged(self, server, question):
        ask(HttpTarget(server.url, body={"q": "{question}", "c": "{client}"}), question, client="ann")
        assert json.loads(server.received[0][3]) == {"q": question, "c": "ann"}

    def test_get_sends_the_question_in_the_url(self, server):
        ask(HttpTarget(f"{server.url}?q={{question}}&k={{k}}", method="get"), "a&b=ü/ #?\ud800")
        method, path, _, body, _ = server.received[0]
        assert (method, body) == ("GET", b"")
        assert parse_qs(urlsplit(path).query) == {"q": ["a&b=ü/ #??"], "k": ["5"]}

    def test_secrets_are_sent_but_not_shown(self, server):
        part = PluginSpec(use="http", url=Secret(server.url), headers={"X-Key": Secret("hunter2"), "Accept": "text/x"})
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
            ({"body": "{question}"}, "http.body is not JSON"),
            ({"body": {"q": {1, 2}}}, "http.body is not JSON"),
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
            HttpTarget(**{"url": "http://h/x"} | options)
        assert message in str(caught.value)


class TestReply:
    def test_paths_extract_the_details(self, server):
        target = HttpTarget(server.url, ids="$.hits[*].id", sources="$.hits[*].file", scores="$.hits[*].score")
        answer = ask(target)
        assert target.tells == {"ids", "sources", "scores"}
        assert [(h.document.id, h.document.source, h.score) for h in answer.retrieval.hits] == [
            ("3", "a.md", 0.9),
            ("5", "b.md", 0.5),
        ]
        assert {h.document.text for h in answer.retrieval.hits} == {""}

    def test_missing_details_are_marked_as_missing(self, server):
        answer = ask(HttpTarget(server.url, sources="$.names"))
        assert [h.document.id for h in answer.retrieval.hits] == ["unknown-1", "unknown-2"]
        assert [h.document.source for h in answer.retrieval.hits] == ["a.md", "b.md"]
        assert all(math.isnan(h.score) for h in answer.retrieval.hits)
        assert answer.retrieval.similarity_stats.n == 0
        assert ask(HttpTarget(server.url)).retrieval.hits == ()
        assert HttpTarget(server.url).tells == frozenset()

    def test_several_matches_are_concatenated(self, server):
        assert ask(HttpTarget(server.url, answer="$.parts[*].text")).text == "It is 7."

    def test_stream_yields_the_whole_answer(self, server):
        async def chunks():
            return [chunk async for chunk in HttpTarget(server.url).stream(Query("q"))]

        assert asyncio.run(chunks()) == ["It is 7."]

    @pytest.mark.parametrize(
        ("how", "message"),
        [
            ("html", "the response is an HTML page instead of JSON"),
            ("html_as_json", "the response is an HTML page instead of JSON"),
            ("text", "the response is not JSON (text/plain, 8 bytes)"),
            ("broken", "the response is not JSON"),
            ("gzipped", "the response is compressed"),
            ("empty", "the response has no text at http.answer ($.answer)"),
            ("number", "the response has no text at http.answer ($.answer)"),
            ("uneven", "differ in length: 2, 1"),
            ("nan", "scores must be finite numbers"),
            ((404, {}), "HTTP 404: there is nothing at this path"),
            ((401, {}), "HTTP 401: the key is missing or rejected"),
            ((418, {}), "HTTP 418: the request is rejected"),
            ((422, {}), "does not accept this body; correct the option body (casemate try: --body)"),
            ((304, {}), "HTTP 304"),
        ],
    )
    def test_invalid_responses_raise_with_the_reason(self, server, how, message):
        server.script = [how]
        target = HttpTarget(server.url, retries=3, ids="$.hits[*].id", sources="$.names", scores="$.hits[*].score")
        error = failure(target)
        assert message in str(error)
        assert not error.retryable
        assert len(server.received) == 1


class TestRetries:
    @pytest.mark.parametrize("how", [(500, {}), (503, {}), (429, {}), "cut"])
    def test_transient_errors_are_retried(self, server, how):
        server.script = [how, how]
        assert ask(HttpTarget(server.url, retries=2)).text == "It is 7."
        assert len(server.received) == 3

    @pytest.mark.parametrize(
        ("how", "message"),
        [
            ((500, {}), "HTTP 500: the server failed"),
            ((429, {}), "HTTP 429: too many requests"),
            ("cut", "the connection"),
        ],
    )
    def test_retries_are_limited(self, server, how, message):
        server.script = [how] * 5
        error = failure(HttpTarget(server.url, retries=1))
        assert message in str(error)
        assert error.retryable
        assert len(server.received) == 2

    @pytest.mark.parametrize("dated", [False, True])
    def test_retry_after_is_honored(self, server, dated):
        began = time.monotonic()
        server.script = [(429, {"Retry-After": formatdate(time.time() + 2, usegmt=True) if dated else "1"})]
        ask(HttpTarget(server.url))
        assert server.received[1][4] - began > 0.9  # a date has whole seconds

    def test_a_long_retry_after_is_not_honored(self, server):
        server.script = [(503, {"Retry-After": "3600"})]
        assert "HTTP 503" in str(failure(HttpTarget(server.url, retries=5)))
        assert len(server.received) == 1

    def test_unreachable_server_is_an_error(self):
        error = failure(HttpTarget("http://127.0.0.1:9/ask", retries=0))
        assert "the connection failed (ConnectError)" in str(error)
        assert error.retryable


class TestLimits:
    @pytest.mark.parametrize("how", ["hang", "drip"])
    def test_server_that_blocks_or_sends_slowly_times_out(self, server, how):
        server.script = [how] * 3
        begun = time.monotonic()
        assert "no response within 0.3 s" in str(failure(HttpTarget(server.url, timeout_s=0.3, retries=2)))
        assert time.monotonic() - begun < 30
        assert len(server.received) == 1

    @pytest.mark.parametrize("how", ["flood", "huge"])
    def test_a_response_of_100_mb_is_not_read(self, server, how):
        server.script = [how]
        target = HttpTarget(server.url, timeout_s=20)
        tracemalloc.start()
        try:
            error = failure(target)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert "more than 1,000,000 bytes" in str(error)
        assert peak < 16_000_000
        assert server.sent < 32_000_000

    def test_requests_are_rate_limited(self, server):
        target = HttpTarget(server.url, requests_per_s=10)

        async def concurrent_requests():
            await asyncio.gather(*(target.ask(Query("q")) for _ in range(5)))

        asyncio.run(concurrent_requests())
        times = sorted(row[4] for row in server.received)
        assert times[-1] - times[0] > 0.25

    def test_cancelled_requests_do_not_count_against_the_rate_limit(self, server):
        target = HttpTarget(server.url, requests_per_s=2)

        async def cancel_requests():
            await target.ask(Query("q"))
            for _ in range(20):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(target.ask(Query("q")), 0.001)
            begun = time.monotonic()
            await target.ask(Query("q"))
            return time.monotonic() - begun

        assert asyncio.run(cancel_requests()) < 2

    def test_several_event_loops(self, server):
        target = HttpTarget(server.url)
        assert {ask(target).text for _ in range(3)} == {"It is 7."}


class TestRedirects:
    @pytest.mark.parametrize("status", [301, 302, 307, 308])
    def test_redirects_on_the_same_host_keep_the_question(self, server, status):
        server.script = [(status, {"Location": "/ask/"})]
        assert ask(HttpTarget(server.url, headers={"X-Key": "k"})).text == "It is 7."
        method, path, headers, body, _ = server.received[1]
        assert (method, path, json.loads(body)) == ("POST", "/ask/", {"question": "How many?"})
        assert {k.lower(): v for k, v in headers.items()}["x-key"] == "k"

    def test_redirects_to_another_host_are_refused(self, server):
        with serving() as other:
            for location in (other.url, other.url.replace("127.0.0.1", "localhost"), "//localhost/x", ""):
                server.script = [(307, {"Location": location})]
                assert "redirects to another host" in str(failure(HttpTarget(server.url)))
            assert other.received == []

    def test_redirect_loops_are_refused(self, server):
        server.script = [(307, {"Location": "/ask"})] * 9
        assert "redirects in circles" in str(failure(HttpTarget(server.url)))
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
    def test_redirects_to_https_are_followed_and_redirects_to_http_refused(self, here, there, follows):
        caller = http_client.HttpClient("x")
        if follows:
            assert http_client.urlsplit(caller._redirect(here, there)).hostname == "h"
        else:
            with pytest.raises(BackendError, match="redirects"):
                caller._redirect(here, there)


def test_canaries_run_against_an_http_target(server):
    server.script = ["ok", "html", "flood", (500, {})]
    found = [Canary(id=f"c{i}", query=f"q{i}", expected_answer="7", expected_sources=["a.md"]) for i in range(5)]
    target = HttpTarget(server.url, sources="$.names", retries=0)
    result = asyncio.run(CanaryRunner(found, target, concurrency=1).run("r"))
    assert sorted(r.status for r in result.results) == [CanaryStatus.ERROR] * 3 + [CanaryStatus.PASS] * 2
    assert {r.sources for r in result.results if r.status is CanaryStatus.PASS} == {("a.md", "b.md")}
    assert all("\n" not in r.error for r in result.results)
