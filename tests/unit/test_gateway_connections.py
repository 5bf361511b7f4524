"""Slow, idle and invalid connections, over real sockets: they must not block other clients."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import httpx
import pytest

from casemate.config import GatewaySection
from casemate.gateway import body_reader
from casemate.gateway.body_reader import MAX_UPLOADS
from casemate.gateway.server import ACCEPTED_AT_ONCE, connection_options, raise_descriptor_limit, uvicorn_config
from casemate.protocols import Defense
from casemate.types import Outcome
from tests.gateways import Endless, Held, chat, client, connected_to, key, make, serving, wait_for

INCOMPLETE = "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"


def started(text: str, rest: str) -> bytes:
    """The beginning of a chat request."""
    return f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {text}\r\n{rest}".encode()


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(4096) == b""
    except ConnectionError:
        return True


def test_a_slow_upload_takes_no_slot(tmp_path):
    app = make(tmp_path, concurrency=1)
    slow, other = key(app), key(app)
    with serving(app) as url, ExitStack() as opened:
        for _ in range(3):
            opened.enter_context(connected_to(url)).sendall(started(slow, INCOMPLETE))
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=chat("only7"), headers={"Authorization": f"Bearer {other}"}
        )
    assert answer.status_code == 200


def test_uploads_of_one_key_are_limited(tmp_path):
    app = make(tmp_path)
    slow, other = key(app), key(app)
    with serving(app) as url, ExitStack() as opened:
        for _ in range(MAX_UPLOADS):
            opened.enter_context(connected_to(url)).sendall(started(slow, INCOMPLETE))

        def status(text):
            named = {"Authorization": f"Bearer {text}"}
            return httpx.post(f"{url}/v1/chat/completions", json=chat("only7"), headers=named).status_code

        wait_for(lambda: status(slow) == 503)
        assert status(other) == 200


def test_bytes_of_one_key_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(body_reader, "BODIES_PER_OWNER", 2)
    app = make(tmp_path, max_body_mb=0.1)
    greedy, other = key(app), key(app)
    long = "Content-Type: application/json\r\nContent-Length: 90000\r\n\r\n" + "x" * 80_000
    with serving(app) as url, ExitStack() as opened:
        for _ in range(2):
            opened.enter_context(connected_to(url)).sendall(started(greedy, long))

        def answer(text):
            named, body = {"Authorization": f"Bearer {text}"}, chat("only7 " + "x" * 50_000)
            return httpx.post(f"{url}/v1/chat/completions", json=body, headers=named)

        wait_for(lambda: answer(greedy).status_code == 503)
        assert answer(greedy).headers["connection"] == "close"
        assert answer(other).status_code < 500


def test_uploads_without_a_key_never_block_a_login(tmp_path):
    app = make(tmp_path)
    with serving(app) as url, ExitStack() as opened:
        slow = [opened.enter_context(connected_to(url)) for _ in range(MAX_UPLOADS + 20)]
        for connection in slow:
            connection.sendall(f"POST /dashboard/login HTTP/1.1\r\nHost: x\r\n{INCOMPLETE}".encode())
        given_up = [connection for connection in slow[:20] if connection.recv(4096).startswith(b"HTTP/1.1 408")]
        assert len(given_up) == 20, "those that have waited longest"
        assert httpx.post(f"{url}/dashboard/login", data={"key": "wrong"}).status_code == 403
        slow[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            slow[-1].recv(1)


def test_one_key_cannot_take_every_slot(tmp_path):
    held = Held()
    app = make(tmp_path, held, concurrency=2, concurrency_per_key=1)
    first, second = key(app), key(app)
    with client(app, first) as http, http.stream("POST", "/v1/chat/completions", json=chat("q", stream=True)):
        wait_for(lambda: held.begun == 1)
        refused = http.post("/v1/chat/completions", json=chat("q"))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        models = http.get("/v1/models", headers={"Authorization": f"Bearer {second}"})
        assert models.status_code == 200
        held.free.set()


@pytest.mark.parametrize("lengths", ["Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET "])
def test_two_lengths_are_refused_and_the_connection_is_closed(tmp_path, lengths):
    app = make(tmp_path)
    text = key(app)
    with serving(app) as url, connected_to(url) as connection:
        connection.sendall(started(text, lengths))
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400") and b"\r\nHTTP/1.1" not in answer
    assert b"connection: close" in answer.lower()


def test_a_new_connection_replaces_the_longest_idle_one(tmp_path, caplog):
    app = make(tmp_path, max_connections=3)
    text = key(app)
    with caplog.at_level(logging.WARNING), serving(app) as url, ExitStack() as opened:
        idle = [opened.enter_context(connected_to(url)) for _ in range(3)]
        for _ in range(4):
            answer = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {text}"})
            assert answer.status_code == 200
        assert is_closed(idle[0])
    closed = [r for r in caplog.records if "max_connections=3" in r.getMessage()]
    assert len(closed) == 1, "the log is limited to one line a minute"


def test_a_new_connection_replaces_a_slow_upload(tmp_path):
    app = make(tmp_path, max_connections=3)
    slow, other = key(app), key(app)
    with serving(app) as url, ExitStack() as opened:
        uploads = [opened.enter_context(connected_to(url)) for _ in range(3)]
        for connection in uploads:
            connection.sendall(started(slow, INCOMPLETE))
        for connection in uploads[:2]:
            answer = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {other}"})
            assert answer.status_code == 200
            connection.sendall(b"{")  # a byte now and then does not make it younger
        assert is_closed(uploads[0])


def test_a_connection_with_a_request_in_progress_is_kept(tmp_path):
    held = Held()
    app = make(tmp_path, held, max_connections=2)
    with client(app, key(app)) as http, http.stream("POST", "/v1/chat/completions", json=chat("q", stream=True)) as got:
        wait_for(lambda: held.begun == 1)
        with ExitStack() as opened:
            for _ in range(5):
                opened.enter_context(connected_to(str(http.base_url).rstrip("/")))
        held.free.set()
        assert "done" in got.read().decode()


def test_a_client_that_does_not_read_is_disconnected_to(tmp_path):
    endless = Endless()
    app = make(tmp_path, endless, body_timeout_s=0.3)
    text = key(app)
    body = b'{"model":"casemate","stream":true,"messages":[{"role":"user","content":"q"}]}'
    with serving(app) as url, connected_to(url) as connection:
        head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(started(text, head) + body)
        wait_for(lambda: endless.ended == 1)


def test_the_default_leaves_file_descriptors_for_databases():
    resource = pytest.importorskip("resource")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert connection_options(GatewaySection())["max_connections"] < limit
    assert connection_options(GatewaySection(max_connections=7))["max_connections"] == 7


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"), [(1024, 4096, 4096), (1024, 10**6, 32_768), (50_000, 10**6, None), (1024, -1, 32_768)]
)
def test_the_limit_of_open_files_is_raised_and_never_lowered(monkeypatch, soft, hard, wanted):
    resource = pytest.importorskip("resource")
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: found.append(limits))
    raise_descriptor_limit()
    assert found == ([(wanted, hard)] if wanted else [])


def test_many_new_connections_wait_while_few_are_accepted_at_once(tmp_path):
    """While the server is busy for a second, 200 connections are established: the kernel keeps them."""

    class Busy(Defense):
        async def on_retrieve(self, query, retrieval):
            time.sleep(1)
            return Outcome(retrieval)

    app = make(tmp_path, defenses=(Busy(),))
    assert uvicorn_config(app).backlog == ACCEPTED_AT_ONCE < 200
    with client(app, key(app)) as http, ExitStack() as opened:
        asking = threading.Thread(target=http.post, args=["/v1/chat/completions"], kwargs={"json": chat("q")})
        asking.start()
        time.sleep(0.2)
        began = time.monotonic()
        for _ in range(200):
            opened.enter_context(connected_to(str(http.base_url)))
        assert asking.is_alive() or time.monotonic() - began < 0.8, "a connection waited for the server"
        asking.join(20)
        assert http.get("/healthz").status_code == 200


ARENAS = """
import ctypes, re, threading
from casemate.gateway.server import share_memory_arenas

libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p

def with_threads(count):
    "The number of arenas while so many threads hold memory."
    held, free = threading.Barrier(count + 1), threading.Event()
    def work():
        blocks = [bytes(2000) for _ in range(100)]
        held.wait(20)
        free.wait(20)
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    held.wait(20)
    file = ctypes.c_void_p(libc.fopen(b"arenas.xml", b"w"))
    libc.malloc_info(0, file)
    libc.fclose(file)
    free.set()
    for thread in threads:
        thread.join(20)
    return len(re.findall("<heap nr=", open("arenas.xml").read()))

print(with_threads(1), with_threads(3))
share_memory_arenas()
print(with_threads(6))
"""


def test_new_threads_share_the_arenas_of_glibc(tmp_path):
    if sys.platform != "linux":
        pytest.skip("arenas are glibc's")
    done = subprocess.run([sys.executable, "-c", ARENAS], cwd=tmp_path, capture_output=True, text=True, check=False)
    if "malloc_info" in done.stderr:
        pytest.skip("another C library")
    assert done.returncode == 0, done.stderr
    few, more, shared = map(int, done.stdout.split())
    assert few < more == shared
