"""Qdrant's HTTP interface on a local port, in front of the client's local mode.

For tests of requests and errors without a Qdrant server.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from qdrant_client import QdrantClient, models


class QdrantWire:
    """Answers like Qdrant, or with a configured fault.

    Attributes: version: The reported version. key: The required API key. Empty: none. fault: Status and body of all
    responses. None: no fault.
    """

    def __init__(self, client: QdrantClient) -> None:
        self.client, self.version, self.key = client, "1.17.0", ""
        self.fault: tuple[int, bytes] | None = None
        self._one, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                path = self.path.partition("?")[0]
                status, data = outer.fault or outer._answer(self, path, body)
                with suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def _answer(self, request: BaseHTTPRequestHandler, path: str, body: bytes) -> tuple[int, bytes]:
        if self.key and request.headers.get("api-key") != self.key:
            return 401, b"Must provide an API key or an Authorization bearer token"
        try:
            with self._one:
                result = self._done(request.command, path, json.loads(body or b"{}"))
        except ValueError as error:
            status = 404 if "not found" in str(error) else 400
            return status, json.dumps({"status": {"error": str(error)}, "time": 0}).encode()
        if path == "/":
            return 200, json.dumps(result).encode()
        return 200, json.dumps({"result": result, "status": "ok", "time": 0}, default=_plain).encode()

    def _done(self, method: str, path: str, given: dict[str, Any]) -> Any:
        """The result of the call in the client's local mode."""
        if path == "/":
            return {"title": "qdrant - vector search engine", "version": self.version}
        if path == "/collections":
            return self.client.get_collections()
        found = re.fullmatch("/collections/([^/]+)(/.*)?", path)
        assert found, path
        name, what = found[1], found[2] or ""
        call = self._calls(name).get((method, what))
        assert call, (method, path)
        return call(given)

    def _calls(self, name: str) -> dict[tuple[str, str], Callable[[dict[str, Any]], Any]]:
        c = self.client

        def create(given: dict[str, Any]) -> bool:
            config = models.CreateCollection(**given).vectors
            return c.create_collection(name, config)  # type: ignore[arg-type]

        def scroll(given: dict[str, Any]) -> models.ScrollResult:
            r = models.ScrollRequest(**given)
            points, after = c.scroll(name, r.filter, r.limit or 10, None, r.offset, r.with_payload, r.with_vector)  # type: ignore[arg-type]
            return models.ScrollResult(points=points, next_page_offset=after)

        def query(given: dict[str, Any]) -> Any:
            r = models.QueryRequest(**given)
            return c.query_points(
                name, r.query, using=r.using, query_filter=r.filter, limit=r.limit or 10,
                with_payload=True, with_vectors=r.with_vector or False,
            )  # fmt: skip

        def retrieve(given: dict[str, Any]) -> Any:
            r = models.PointRequest(**given)
            return c.retrieve(name, r.ids, r.with_payload or False, r.with_vector or False)  # type: ignore[arg-type]

        def upsert(given: dict[str, Any]) -> Any:
            r = models.PointsList(**given)
            return c.upsert(name, r.points, update_filter=r.update_filter)

        def delete(given: dict[str, Any]) -> Any:
            return c.delete(name, models.PointIdsList(**given))

        def payload(given: dict[str, Any]) -> Any:
            r = models.SetPayload(**given)
            return c.set_payload(name, r.payload, points=r.filter)  # type: ignore[arg-type]

        return {
            ("GET", "/exists"): lambda given: {"exists": c.collection_exists(name)},
            ("GET", ""): lambda given: c.get_collection(name),
            ("PUT", ""): create,
            ("DELETE", ""): lambda given: c.delete_collection(name),
            ("PUT", "/index"): lambda given: {"operation_id": 0, "status": "completed"},
            ("POST", "/points/count"): lambda given: c.count(name, models.CountRequest(**given).filter),
            ("POST", "/points/scroll"): scroll,
            ("POST", "/points/query"): query,
            ("POST", "/points"): retrieve,
            ("PUT", "/points"): upsert,
            ("POST", "/points/delete"): delete,
            ("POST", "/points/payload"): payload,
        }


def _plain(held: Any) -> Any:
    return held.model_dump(mode="json")


@contextmanager
def qdrant_wire() -> Iterator[QdrantWire]:
    """A server that ends with the block."""
    client = QdrantClient(":memory:", force_disable_check_same_thread=True)
    wire = QdrantWire(client)
    threading.Thread(target=wire.server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield wire
    finally:
        wire.server.shutdown()
        wire.server.server_close()
        client.close()
