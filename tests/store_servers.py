"""Servers that simulate the parts of Elasticsearch, OpenSearch, Weaviate and Pinecone that collections use.

``test_remote_collections`` compares requests of a collection with requests of the vendor's own client, which were
recorded in ``tests/data/store_requests.json``.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import numpy as np

KEY = "k-secret"


class Store:
    """The rows and the requests so far. A row is ``(id, vector or None, fields)``."""

    def __init__(self, rows, key=""):
        self.rows, self.key, self.requests = rows, key, []
        self.snapshots, self.opened = {}, 0
        self.fail = None  # status of all responses

    def nearest(self, vector, k, rows=None):
        with_vector = [row for row in (rows or self.rows) if row[1] is not None]
        q = np.array(vector, np.float64)
        cosine = [np.dot(v, q) / np.linalg.norm(v) for _, v, _ in with_vector]
        return [with_vector[i] for i in np.argsort(-np.array(cosine), kind="stable")[:k]]

    def answer(self, method, path, query, body):
        raise NotImplementedError


class Elasticsearch(Store):
    """One index ``docs`` with fields ``vector``, ``text`` and ``metadata``. Two rows share a sequence number."""

    version = {"number": "8.17.0", "build_flavor": "default"}
    field = {"type": "dense_vector", "dims": 8, "index": True, "similarity": "cosine"}
    snapshot = "/docs/_pit"
    shards = 2

    def __init__(self, rows, key=""):
        super().__init__(rows, key)
        self.numbers = {row[0]: i // self.shards for i, row in enumerate(rows)}

    def mapping(self):
        return {"properties": {"vector": self.field, "text": {"type": "text"}, "metadata": {"properties": {}}}}

    def answer(self, method, path, query, body):
        fixed = {
            ("GET", "/"): {"name": "node", "version": self.version, "tagline": "You Know, for Search"},
            ("GET", "/docs/_mapping"): {"docs": {"mappings": self.mapping()}},
        }
        if (method, path) == ("POST", "/docs/_count"):
            return {"count": len(self.selected(body["query"])), "_shards": {"total": self.shards}}
        if (method, path) == ("POST", self.snapshot):
            assert query["keep_alive"]
            return self.pinned()
        if method == "DELETE" and path in ("/_pit", "/_search/point_in_time"):
            for name in [body.get("id"), *body.get("pit_id", ())]:
                self.snapshots.pop(name, None)
            return {"succeeded": True, "num_freed": 1}
        if (method, path) in (("POST", "/_search"), ("POST", "/docs/_search")):
            return {"took": 1, "timed_out": False, **self.found(body)}
        return fixed.get((method, path))

    def pinned(self):
        self.opened += 1
        name = f"pit{self.opened}"
        self.snapshots[name] = list(self.rows)
        return {"id": name}

    def found(self, body):
        rows = self.snapshots[body["pit"]["id"]] if "pit" in body else self.rows
        if "knn" in body:
            knn = body["knn"]
            assert knn["field"] == "vector" and knn["k"] <= knn["num_candidates"] <= 10_000
            rows = self.nearest(knn["query_vector"], knn["k"], self.selected(knn.get("filter"), rows))
        elif "knn" in (query := body.get("query", {})):
            knn = query["knn"]["vector"]
            rows = self.nearest(knn["vector"], knn["k"], self.selected(knn.get("filter"), rows))
        else:
            rows = self.selected(query, rows)
            if "sort" in body:
                rows = sorted(rows, key=self.number)
        hits = [{"_index": "docs", "_id": row[0], "_score": 1.0, "_source": self.source(row, body)} for row in rows]
        for hit, row in zip(hits, rows, strict=True):
            hit.update({"sort": [self.number(row), 7]} if "sort" in body else {})
        pinned = {"pit_id": body["pit"]["id"]} if "pit" in body else {}
        return {**pinned, "hits": {"total": {"value": len(hits), "relation": "eq"}, "hits": hits[: body["size"]]}}

    def source(self, row, body):
        return row[2] if row[1] is None else {**row[2], "vector": list(map(float, row[1]))}

    def number(self, row):
        return self.numbers[row[0]]

    def selected(self, query, rows=None):
        rows = self.rows if rows is None else rows
        for one in (query or {}).get("bool", {}).get("filter", ()):
            ((kind, as_record),) = one.items()
            if kind == "ids":
                rows = [row for row in rows if row[0] in as_record["values"]]
            elif kind == "range":
                rows = [row for row in rows if self.number(row) > as_record["_seq_no"]["gt"]]
            else:
                ((name, value),) = as_record.items()
                rows = [row for row in rows if row[2].get(name) == value]
        return rows


class RecentElasticsearch(Elasticsearch):
    """Version 9.2, which returns vectors only on request."""

    version = {"number": "9.2.1", "build_flavor": "default"}

    def source(self, row, body):
        wanted = isinstance(body.get("_source"), dict) and body["_source"].get("exclude_vectors") is False
        return super().source(row, body) if wanted else row[2]


class OpenSearch(Elasticsearch):
    version = {"number": "2.19.0", "distribution": "opensearch"}
    field = {"type": "knn_vector", "dimension": 8, "method": {"name": "hnsw", "space_type": "cosinesimil"}}
    snapshot = "/docs/_search/point_in_time"

    def pinned(self):
        return {"pit_id": super().pinned()["id"], "creation_time": 1}

    def found(self, body):
        assert "knn" not in body and "_source" not in body, "OpenSearch refuses these"
        return super().found(body)


class Weaviate(Store):
    """The class ``Docs`` with properties ``text`` and ``doc``."""

    def answer(self, method, path, query, body):
        if path == "/v1/meta":  # requested by the vendor's client
            return {"hostname": "http://[::]:8080", "modules": {}, "version": "1.30.0"}
        if path == "/v1/schema/Docs":
            properties = [{"name": "text", "dataType": ["text"]}, {"name": "doc", "dataType": ["text"]}]
            properties.append({"name": "of", "dataType": ["Other"]})
            return {"class": "Docs", "properties": properties, "vectorIndexConfig": {"distance": "cosine"}}
        if (method, path) == ("GET", "/v1/objects"):
            assert (query["class"], query["include"]) == ("Docs", "vector")
            rows = sorted(row for row in self.rows if row[0] > query.get("after", ""))[: int(query["limit"])]
            return {"objects": [{"class": "Docs", **self.as_record(row), "properties": row[2]} for row in rows]}
        if (method, path) == ("POST", "/v1/graphql"):
            return self.graphql(body["query"])
        return None

    def as_record(self, row):
        return {"id": row[0], "vector": [] if row[1] is None else list(map(float, row[1]))}

    def graphql(self, text):
        if text.startswith("{ Aggregate"):
            assert text == "{ Aggregate { Docs { meta { count } } } }"
            return {"data": {"Aggregate": {"Docs": [{"meta": {"count": len(self.rows)}}]}}}
        shape = r"\{ Get \{ Docs\((.*), limit: (\d+)\) \{ text doc _additional \{ id vector \} \} \} \}"
        arguments, limit = re.fullmatch(shape, text).groups()
        if near := re.fullmatch(r"nearVector: \{vector: (\[.*\])\}", arguments):
            rows = self.nearest(json.loads(near[1]), int(limit))
        else:
            ids = re.fullmatch(r'where: \{path: \["id"\], operator: ContainsAny, valueText: (\[.*\])\}', arguments)
            rows = [row for row in self.rows if row[0] in json.loads(ids[1])]
        asked = [{name: row[2].get(name) for name in ("text", "doc")} for row in rows]
        return {
            "data": {
                "Get": {"Docs": [{**a, "_additional": self.as_record(r)} for a, r in zip(asked, rows, strict=True)]}
            }
        }


class Pinecone(Store):
    def answer(self, method, path, query, body):
        if (method, path) == ("POST", "/describe_index_stats"):
            spaces = {"__default__": {"vectorCount": len(self.rows)}}
            return {"namespaces": spaces, "dimension": 8, "totalVectorCount": len(self.rows), "metric": "cosine"}
        if (method, path) == ("GET", "/vectors/list"):
            start = int(query.get("paginationToken", 0))
            end = start + int(query["limit"])
            further = {"pagination": {"next": str(end)}} if end < len(self.rows) else {}
            return {"vectors": [{"id": row[0]} for row in self.rows[start:end]], **further}
        if (method, path) == ("GET", "/vectors/fetch"):
            wanted = query["ids"] if isinstance(query["ids"], list) else [query["ids"]]
            return {"vectors": {row[0]: self.as_record(row) for row in self.rows if row[0] in wanted}}
        if (method, path) == ("POST", "/query"):
            assert body["includeValues"] and body["includeMetadata"]
            rows = self.nearest(body["vector"], body["topK"])
            return {"matches": [{**self.as_record(row), "score": 0.5} for row in rows], "namespace": ""}
        return None

    def as_record(self, row):
        return {"id": row[0], "values": list(map(float, row[1])), "metadata": row[2]}


class Chroma(Store):
    """The collection ``docs``. While ``silent`` is set, the server accepts requests and does not answer."""

    def __init__(self, rows, key=""):
        super().__init__(rows, key)
        self.silent, self.released = False, threading.Event()

    def answer(self, method, path, query, body):
        if self.silent:
            self.released.wait(20)
        place = "/tenants/default_tenant/databases/default_database"
        of = {"tenant": "default_tenant", "database": "default_database"}
        identity, space = str(uuid.UUID(int=1)), {"hnsw": {"space": "cosine"}}
        docs = {"id": identity, "name": "docs", "configuration_json": space, "metadata": None, "dimension": 8, **of}
        records = [self.as_record(row) for row in self.rows[: (body or {}).get("limit")]]
        fixed = {
            "/heartbeat": {"nanosecond heartbeat": 1},
            "/auth/identity": {"user_id": "", "tenant": of["tenant"], "databases": [of["database"]]},
            "/tenants/default_tenant": {"name": of["tenant"]},
            place: {"id": identity, "name": of["database"], "tenant": of["tenant"]},
            f"{place}/collections/docs": {**docs, "serialized_schema": None, "version": 0, "log_position": 0},
            f"{place}/collections/{identity}/count": len(self.rows),
            f"{place}/collections/{identity}/get": {
                name: [one[name] for one in records] for name in self.as_record(None)
            },
        }
        return fixed.get(path.removeprefix("/api/v2"))

    def as_record(self, row):
        identity, vector, fields = row or ("", (), {"text": ""})
        as_record = {"ids": identity, "embeddings": list(map(float, vector)), "documents": fields["text"]}
        return {**as_record, "metadatas": {"doc": "d"}}


@contextmanager
def serving(store):
    """Serves a store on a free port; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self):
            length = int(self.headers.get("Content-Length") or 0)
            text = self.rfile.read(length).decode()
            parts = urlsplit(self.path)
            query = {
                name: with_vector[0] if len(with_vector) == 1 else with_vector
                for name, with_vector in parse_qs(parts.query).items()
            }
            body = json.loads(text) if text else None
            store.requests.append((self.command, parts.path, query, body))
            shown = self.headers.get("Authorization", "") + self.headers.get("Api-Key", "")
            if store.fail:
                self.send(*store.fail)
            elif store.key and store.key not in shown:
                self.send(401, {"message": "unauthorized"})
            elif (found := store.answer(self.command, parts.path, query, body)) is None:
                self.send(404, {"message": f"no such path, {store.key}"})
            else:
                self.send(200, found)

        do_GET = do_POST = do_DELETE = handle_any  # noqa: N815

        def send(self, status, value):
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("X-Elastic-Product", "Elasticsearch")  # the vendor's client requires it
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
