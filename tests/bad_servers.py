"""Faulty servers: a proxy in front of real ones, and servers with invalid responses."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc


class Gate:
    """A proxy that can stop forwarding, or close at once or at the next response.

    Args:
        behind: The server's local port, or its socket path.
    """

    def __init__(self, behind: int | str) -> None:
        self._behind, self._held = behind, list[socket.socket]()
        self.silent, self.dying = threading.Event(), threading.Event()
        self.port = 0
        self.open()

    def open(self) -> None:
        """Simulates a server start on the same port."""
        self.silent.clear()
        self.dying.clear()
        self._door = socket.create_server(("127.0.0.1", self.port))
        self.port = self._door.getsockname()[1]
        threading.Thread(target=self._serve, args=(self._door,), daemon=True).start()

    def shut(self) -> None:
        """Simulates the death of the server."""
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self.silent.clear()
        for end in self._held:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._held.clear()

    def _serve(self, door: socket.socket) -> None:
        while True:
            try:
                near, _ = door.accept()
            except OSError:
                return
            if isinstance(self._behind, str):
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._behind)
            else:
                far = socket.create_connection(("127.0.0.1", self._behind))
            self._held += [near, far]
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(a, b, b is near), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(65536):
                while self.silent.is_set():
                    time.sleep(0.01)
                if answers and self.dying.is_set():
                    self.shut()
                target.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, target):
                end.close()


@contextmanager
def silent_server() -> Iterator[int]:
    """Port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        yield door.getsockname()[1]


@contextmanager
def web_server(status: int = 404, body: bytes = b"<html>a router</html>") -> Iterator[int]:
    """Port of a server that gives every HTTP request the same response."""

    class Odd(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def odd_milvus(answers: Mapping[str, Any], other: grpc.StatusCode, details: str) -> Iterator[int]:
    """Port of a gRPC server with responses by method name, and a status for all other methods."""

    class Answers(grpc.GenericRpcHandler):
        def service(self, call_details: Any) -> Any:
            answer = answers.get(call_details.method.rpartition("/")[2])

            def call(request: Any, context: Any) -> Any:
                if answer is None:
                    context.abort(other, details)
                return answer

            serialize = None if answer is None else type(answer).SerializeToString
            return grpc.unary_unary_rpc_method_handler(call, response_serializer=serialize)

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Answers()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None)
