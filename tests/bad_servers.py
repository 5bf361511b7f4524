"""Faulty servers: a proxy in front of real servers, and servers with invalid responses."""

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


class ServerProxy:
    """A proxy that can stop forwarding, or close immediately or at the next response.

    Args: upstream: The server's local port, or its socket path.
    """

    def __init__(self, upstream: int | str) -> None:
        self._upstream, self._connections = upstream, list[socket.socket]()
        self.silent, self.dying = threading.Event(), threading.Event()
        self.port = 0
        self.open()

    def open(self) -> None:
        """Simulates a start of the server on the same port."""
        self.silent.clear()
        self.dying.clear()
        self._listening = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, args=(self._listening,), daemon=True).start()

    def crash(self) -> None:
        """Simulates a crash of the server."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.silent.clear()
        for end in self._connections:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                near, _ = listening.accept()
            except OSError:
                return
            if isinstance(self._upstream, str):
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._upstream)
            else:
                far = socket.create_connection(("127.0.0.1", self._upstream))
            self._connections += [near, far]
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(a, b, b is near), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(65536):
                while self.silent.is_set():
                    time.sleep(0.01)
                if answers and self.dying.is_set():
                    self.crash()
                target.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, target):
                end.close()


@contextmanager
def silent_server() -> Iterator[int]:
    """Port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@contextmanager
def web_server(status: int = 404, body: bytes = b"<html>a router</html>") -> Iterator[int]:
    """Port of a server that gives the same response to every HTTP request."""

    class FixedResponse(http.server.BaseHTTPRequestHandler):
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

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FixedResponse)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def faulty_milvus(answers: Mapping[str, Any], other: grpc.StatusCode, details: str) -> Iterator[int]:
    """Port of a gRPC server with given responses by method name, and an error status for all other methods."""

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
