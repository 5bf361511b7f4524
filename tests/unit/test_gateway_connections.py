"""Slow, idle and invalid connections, over real sockets: they must not block other clients."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import httpx
import pytest
from uvicorn.config import LOOP_FACTORIES
from uvicorn.server import ServerState

from casemate.config import GatewaySection
from casemate.gateway import body_reader, server
from casemate.gateway.body_reader import MAX_UPLOADS
from casemate.gateway.connections import (
    ACCEPTED_AT_ONCE,
    FEW,
    REPLACED_PER_S,
    OpenConnections,
    connection_options,
    raise_descriptor_limit,
)
from casemate.gateway.server import uvicorn_config
from casemate.protocols import Defense
from casemate.types import Outcome
from tests import gateways
from tests.fakes import AnswerFunction, Clock
from tests.gateways import Endless, Held, chat, client, connected_to, key, make, serving
from tests.waiting import wait_for

INCOMPLETE = "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"


def started(text: str, rest: str) -> bytes:
    """The beginning of a chat request."""
    return f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {text}\r\n{rest}".encode()


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(4096) == b""
    except ConnectionError:
        return True


@pytest.fixture(params=["asyncio", "uvloop"])
def each_loop(request, monkeypatch):
    """The event loops of uvicorn; uvloop only if it is installed."""
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    monkeypatch.setitem(LOOP_FACTORIES, "auto", LOOP_FACTORIES[request.param])


def test_slow_upload_does_not_occupy_a_slot(tmp_path):
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
            authorization = {"Authorization": f"Bearer {text}"}
            return httpx.post(f"{url}/v1/chat/completions", json=chat("only7"), headers=authorization).status_code

        wait_for(lambda: status(slow) == 503)
        assert status(other) == 200


def test_upload_bytes_of_one_key_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(body_reader, "BODIES_PER_OWNER", 2)
    app = make(tmp_path, max_body_mb=0.1)
    large_uploads, other = key(app), key(app)
    long = "Content-Type: application/json\r\nContent-Length: 90000\r\n\r\n" + "x" * 80_000
    with serving(app) as url, ExitStack() as opened:
        for _ in range(2):
            opened.enter_context(connected_to(url)).sendall(started(large_uploads, long))

        def answer(text):
            authorization, body = {"Authorization": f"Bearer {text}"}, chat("only7 " + "x" * 50_000)
            return httpx.post(f"{url}/v1/chat/completions", json=body, headers=authorization)

        wait_for(lambda: answer(large_uploads).status_code == 503)
        assert answer(large_uploads).headers["connection"] == "close"
        assert answer(other).status_code < 500


def test_uploads_without_a_key_never_block_a_login(tmp_path):
    app = make(tmp_path)
    with serving(app) as url, ExitStack() as opened:
        slow = [opened.enter_context(connected_to(url)) for _ in range(MAX_UPLOADS + 20)]
        for connection in slow:
            connection.sendall(f"POST /dashboard/login HTTP/1.1\r\nHost: x\r\n{INCOMPLETE}".encode())
        timed_out = [connection for connection in slow[:20] if connection.recv(4096).startswith(b"HTTP/1.1 408")]
        assert len(timed_out) == 20, "those that have waited longest"
        assert httpx.post(f"{url}/dashboard/login", data={"key": "wrong"}).status_code == 403
        slow[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            slow[-1].recv(1)


def test_one_key_cannot_occupy_all_slots(tmp_path):
    held = Held()
    app = make(tmp_path, held, concurrency=2, concurrency_per_key=1)
    first, second = key(app), key(app)
    with client(app, first) as http, http.stream("POST", "/v1/chat/completions", json=chat("q", stream=True)):
        wait_for(lambda: held.begun == 1)
        refused = http.post("/v1/chat/completions", json=chat("q"))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "connection" not in refused.headers  # its body was read, so the connection can be reused
        models = http.get("/v1/models", headers={"Authorization": f"Bearer {second}"})
        assert models.status_code == 200
        held.free.set()


@pytest.mark.parametrize("lengths", ["Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET "])
def test_requests_with_two_length_headers_are_refused_and_the_connection_closed(tmp_path, lengths):
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


class FakeConnection:
    """A connection of an address, which records whether it was closed."""

    def __init__(self, host):
        self.host, self.waits, self.closed = host, True, False

    def abort(self):
        assert self.waits and not self.closed
        self.closed = True


def longest_waiting_of_the_largest_address(connections):
    """Reference: the longest waiting connection of each address with the most waiting connections."""
    waiting = {}
    for opened in connections:
        if opened.waits and not opened.closed:
            waiting.setdefault(opened.host, []).append(opened)
    most = max(map(len, waiting.values()))
    return [found[0] for found in waiting.values() if len(found) == most]


@pytest.mark.parametrize("seed", range(20))
def test_at_the_limit_the_longest_waiting_connection_of_the_largest_address_is_closed(seed):
    rng, tracked = random.Random(seed), OpenConnections(12, clock=Clock(100.0))
    still_open = []  # in the order in which they began to wait
    for _ in range(300):
        event, some = rng.random(), rng.choice(still_open) if still_open else None
        if some is None or event < 0.5:
            opened = FakeConnection(f"10.0.0.{rng.randrange(4)}")
            still_open.append(opened)
            allowed = longest_waiting_of_the_largest_address(still_open)
            tracked.open(opened, opened.host)
            closed = [one for one in still_open if one.closed]
            assert len(closed) == (len(still_open) > 12)
            assert not closed or closed[0] in allowed
            still_open = [one for one in still_open if not one.closed]
        elif event < 0.7:
            tracked.work(some)
            some.waits = False
        elif event < 0.9:
            tracked.wait(some)
            some.waits = True
            still_open.remove(some)
            still_open.append(some)
        else:
            tracked.close(some)
            still_open.remove(some)


def test_replacements_per_second_are_limited_for_an_address_with_many_connections():
    clock = Clock(100.0)
    tracked = OpenConnections(100, ["10.1.0.0/16", "10.2.0.9"], clock)
    for _ in range(100):
        assert tracked.admits("10.0.0.1")
        tracked.open(FakeConnection("10.0.0.1"), "10.0.0.1")
    assert sum(tracked.admits("10.0.0.1") for _ in range(1000)) == REPLACED_PER_S
    clock.now += 0.5
    assert sum(tracked.admits("10.0.0.1") for _ in range(1000)) == REPLACED_PER_S // 2
    assert all(tracked.admits("10.0.0.2") for _ in range(1000)), "an address with few connections is always admitted"
    for number in range(22):
        tracked.open(FakeConnection("10.0.0.2"), "10.0.0.2")
        assert tracked.admits("10.0.0.2"), f"{number + 1} of 100, and the most are {99 - number}"
    assert not tracked.admits("10.0.0.1")
    for host in ["10.1.2.3", "10.2.0.9", "10.2.0.8"]:
        for _ in range(30):
            tracked.open(FakeConnection(host), host)
    assert all(tracked.admits(host) for host in ["10.1.2.3", "10.2.0.9"] for _ in range(100)), "trusted proxies"
    assert not tracked.admits("10.2.0.8")
    clock.now += 3600
    assert sum(tracked.admits("10.0.0.1") for _ in range(1000)) == REPLACED_PER_S, "the allowance has a limit"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:ffff:ffff:ffff", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("10.0.0.1", "10.0.0.2", False),
    ],
)
def test_ipv6_addresses_of_one_network_count_as_one_address(one, other, same):
    tracked = OpenConnections(FEW + 1, clock=Clock(100.0))
    for _ in range(FEW + 1):
        tracked.open(FakeConnection(one), one)
    found = sum(tracked.admits(other) for _ in range(2 * REPLACED_PER_S))
    assert found == (REPLACED_PER_S if same else 2 * REPLACED_PER_S)


def test_connections_of_one_address_do_not_displace_those_of_another(tmp_path, each_loop):
    """Two addresses of the loopback network: one has an idle connection, the other opens many more than fit."""
    app = make(tmp_path, max_connections=40)
    text = key(app)
    with client(app, text) as http, ExitStack() as opened:
        assert http.get("/v1/models").status_code == 200
        place = http.base_url.host, http.base_url.port
        many, reset = [], 0
        for _ in range(40 + 4 * REPLACED_PER_S):
            try:
                many.append(opened.enter_context(socket.create_connection(place, 20, ("127.0.0.2", 0))))
            except ConnectionResetError:
                reset += 1
        for connection in many:
            connection.setblocking(False)
        answer = http.get("/v1/models")
        assert answer.status_code == 200
        kept = opened.enter_context(connected_to(str(http.base_url)))
        kept.sendall(started(text, "\r\n"))
        assert kept.recv(4096).startswith(b"HTTP/1.1"), "a new connection of the first address is served"
        reset += sum(map(was_reset, many))
        assert reset >= REPLACED_PER_S


def was_reset(connection):
    try:
        connection.recv(1)
    except ConnectionResetError:
        return True
    except BlockingIOError:
        pass
    return False


def with_certificate(folder, generator=None, **section):
    """Returns a system that serves TLS, and the TLS context of a client that trusts it."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not here to make a certificate")
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    made += " -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [*made.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=folder, capture_output=True, check=True
    )
    app = make(folder, generator, tls_cert="cert.pem", tls_key="key.pem", **section)
    return app, ssl.create_default_context(cafile=folder / "cert.pem")


def test_tls_handshakes_count_as_waiting_connections(tmp_path, each_loop):
    app, trust = with_certificate(tmp_path, max_connections=3, body_timeout_s=1)
    authorization = {"Authorization": f"Bearer {key(app)}"}
    with serving(app) as url, ExitStack() as opened:
        plain = url.replace("https", "http")
        silent = [opened.enter_context(connected_to(plain)) for _ in range(5)]
        wait_for(lambda: is_closed(silent[0]) and is_closed(silent[1]))  # no more than three are open
        silent[2].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[2].recv(1)
        assert httpx.get(f"{url}/v1/models", headers=authorization, verify=trust).status_code == 200
        silent[2].setblocking(True)
        assert is_closed(silent[2])
        began = time.monotonic()
        assert is_closed(silent[4]), "a handshake takes at most body_timeout_s"
        assert time.monotonic() - began < 10


@pytest.fixture
def opened_connections(monkeypatch):
    """The connections of the servers that the test starts."""
    found = []

    def options(section):
        found.append(connection_options(section))
        return found[-1]

    monkeypatch.setattr(server, "connection_options", options)
    return lambda: sum(len(each["open_connections"]._addresses) for each in found)


CLOSING = {
    "invalid HTTP": "garbage\r\n\r\n",
    "the client asks for it": "GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
}


def closing_over_tls(url, trust, request):
    """A connection that the server closes, and whose client does not finish the TLS shutdown."""
    wrapped = trust.wrap_socket(connected_to(url.replace("https", "http")), server_hostname="127.0.0.1")
    wrapped.sendall(request.encode())
    assert wrapped.recv(1)
    return socket.socket(fileno=wrapped.detach())


@pytest.mark.parametrize("request_text", CLOSING.values(), ids=CLOSING)
def test_new_connection_replaces_one_with_an_unfinished_tls_shutdown(tmp_path, each_loop, request_text):
    app, trust = with_certificate(tmp_path, max_connections=3)
    authorization = {"Authorization": f"Bearer {key(app)}"}
    with serving(app) as url, ExitStack() as opened:
        for _ in range(3):
            opened.enter_context(closing_over_tls(url, trust, request_text))
        for _ in range(4):
            assert httpx.get(f"{url}/v1/models", headers=authorization, verify=trust).status_code == 200


@pytest.mark.parametrize("request_text", CLOSING.values(), ids=CLOSING)
def test_tls_shutdown_has_a_time_limit(tmp_path, each_loop, opened_connections, request_text):
    app, trust = with_certificate(tmp_path, body_timeout_s=0.3)
    with serving(app) as url, closing_over_tls(url, trust, request_text):
        assert opened_connections() == 1
        wait_for(lambda: not opened_connections())


def small_receiver(url):
    """A connection with a small receive buffer."""
    host, _, port = url.removeprefix("http://").partition(":")
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect((host, int(port)))
    return made


def kernel_buffer_size():
    """The number of bytes that the kernel buffers for a client that does not read."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with small_receiver(f"http://127.0.0.1:{listening.getsockname()[1]}"), listening.accept()[0] as sender:
            sender.setblocking(False)
            return sender.send(bytes(1 << 24))


@pytest.mark.parametrize("ended", ["closed by the server", "half-closed by the client"])
def test_a_client_has_a_time_limit_to_read_the_end_of_an_answer(tmp_path, each_loop, opened_connections, ended):
    """The server still buffers a few KB, fewer than its limit for writing."""
    app = make(
        tmp_path, AnswerFunction(lambda prompt: "x" * int(prompt.question)), body_timeout_s=0.3, tokens_per_day=10**9
    )
    text, taken = key(app), kernel_buffer_size()
    with serving(app) as url, ExitStack() as opened:
        for more in range(2_000, 50_000, 12_000):
            connection = opened.enter_context(small_receiver(url))
            body = json.dumps(chat(str(taken + more))).encode()
            head = "Connection: close\r\n" if ended == "closed by the server" else ""
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(started(text, head) + body)
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
            if ended == "half-closed by the client":
                connection.shutdown(socket.SHUT_WR)
        wait_for(lambda: not opened_connections())


def test_unfinished_handshakes_are_closed_at_server_shutdown(tmp_path, each_loop, monkeypatch):
    """An answer in progress delays the shutdown, and the server must close the handshake before it ends."""
    held, servers = Held(), []

    class Recorded(gateways.GatewayServer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            servers.append(self)

    monkeypatch.setattr(gateways, "GatewayServer", Recorded)
    app, trust = with_certificate(tmp_path, held)
    authorization = {"Authorization": f"Bearer {key(app)}"}
    with serving(app) as url, connected_to(url.replace("https", "http")) as silent:
        with (
            httpx.Client(base_url=url, headers=authorization, verify=trust) as http,
            http.stream("POST", "/v1/chat/completions", json=chat("q", stream=True)) as got,
        ):
            wait_for(lambda: held.begun == 1)
            servers[0].should_exit = True
            silent.settimeout(10)
            assert is_closed(silent)
            held.free.set()
            assert "done" in got.read().decode()


class Aborted:
    """A transport that records whether it was aborted."""

    aborted = False

    def abort(self):
        self.aborted = True

    def get_extra_info(self, name, default=None):
        return default


def test_connection_aborted_during_its_handshake_is_not_opened(tmp_path):
    config = uvicorn_config(make(tmp_path))
    config.load()

    async def abort_then_connect():
        connection = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})
        one, other = socket.socketpair()
        with one, other:
            connection.opening = one
            connection.abort()
            transport = Aborted()
            connection.connection_made(transport)
        return transport.aborted

    assert asyncio.run(abort_then_connect())


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
            connection.sendall(b"{")  # single bytes do not reset its waiting time
        assert is_closed(uploads[0])


def test_connection_with_a_request_in_progress_is_not_replaced(tmp_path):
    held = Held()
    app = make(tmp_path, held, max_connections=2)
    with client(app, key(app)) as http, http.stream("POST", "/v1/chat/completions", json=chat("q", stream=True)) as got:
        wait_for(lambda: held.begun == 1)
        with ExitStack() as opened:
            for _ in range(5):
                opened.enter_context(connected_to(str(http.base_url).rstrip("/")))
        held.free.set()
        assert "done" in got.read().decode()


def test_client_that_does_not_read_is_disconnected(tmp_path):
    endless = Endless()
    app = make(tmp_path, endless, body_timeout_s=0.3)
    text = key(app)
    body = b'{"model":"casemate","stream":true,"messages":[{"role":"user","content":"q"}]}'
    with serving(app) as url, connected_to(url) as connection:
        head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(started(text, head) + body)
        wait_for(lambda: endless.ended == 1)


def test_default_limit_reserves_file_descriptors_for_databases():
    resource = pytest.importorskip("resource")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert connection_options(GatewaySection())["open_connections"].limit < limit
    assert connection_options(GatewaySection(max_connections=7))["open_connections"].limit == 7


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


def test_kernel_queues_new_connections_while_the_server_is_busy(tmp_path):
    """While the server is busy for a second, the kernel accepts 200 connections into its backlog."""

    class BlockingDefense(Defense):
        async def on_retrieve(self, query, retrieval):
            time.sleep(1)
            return Outcome(retrieval)

    app = make(tmp_path, defenses=(BlockingDefense(),))
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
