"""The Qdrant index: exact by default, or approximate by Qdrant's HNSW graph.

Qdrant has no transactions over several points, but it updates a payload conditionally. So the commit record of
``MvccIndex`` is the payload of one point.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from casemate.backends.clients.qdrant import QdrantServer
from casemate.backends.clients.rest import without_credentials
from casemate.backends.mvcc.index import MvccIndex
from casemate.backends.mvcc.versioned_store import KEY_LIMIT, CommitRecord, IndexDescriptor, RowFilter, StoredRow
from casemate.errors import ConfigError, DataError, needs, require_range
from casemate.types import Secret, Vector

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

FORMAT = "casemate 1"
MIN_VERSION = (1, 16)
"""First server version with conditional inserts. Older ones ignore the condition, so two could create one index."""
RECORD_POINT = 0  # id of the point with the descriptor and the commit record
COLUMNS = ("tenant", "source", "id", "label", "body")


@dataclass(eq=False)
class QdrantIndex(MvccIndex):
    """Two collections on a Qdrant server. Hits are scored again in float64.

    Guarantees: one conditional payload update commits rows and moments together, even if a writer is killed at any
    point. Of two writers one waits. A reader sees the state before or after a change. Clocks need not agree.
    Assumption: a writer that is suspended for longer than three times ``timeout_s`` between two calls loses its lease.

    Deviation: ``search_by: hnsw`` may miss the nearest documents, and with them a detection.

    The bytes of a removed document stay in the server's files until the optimizer rewrites the segment.

    Attributes:
        url: ``http://host:6333``. A folder or ``:memory:`` selects the client's local mode: for trials in one process.
        api_key: Empty: the server needs none.
        collection: Name of the index, and prefix of the names of its collections.
        search_by: ``exact`` compares with every vector; ``hnsw`` searches the graph.
        m: Links per vector in the graph. Fixed when the index is created.
        ef_construct: Candidates while the graph is built. Fixed when the index is created.
        ef: Candidates during a search of the graph.
        overfetch: Factor of documents to fetch above k, for scoring in float64.
        timeout_s: Limit of one call.
    """

    url: Secret
    api_key: Secret = Secret("")
    collection: str = "casemate"
    search_by: Literal["exact", "hnsw"] = "exact"
    m: int = 16
    ef_construct: int = 200
    ef: int = 256
    overfetch: float = 2.0
    timeout_s: float = 10

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Za-z0-9_-]{1,100}", self.collection):
            raise ConfigError(
                f"qdrant.collection is {self.collection!r}; allowed: at most 100 letters, digits, _ and -"
            )
        require_range("qdrant", self, "m ef_construct ef overfetch", at_least=1)
        require_range("qdrant", self, "timeout_s", above=0)
        if self.search_by not in ("exact", "hnsw"):
            raise ConfigError(f"qdrant.search_by is {self.search_by!r}; allowed: exact, hnsw")
        self.url, self.api_key = Secret(self.url), Secret(self.api_key)
        with needs("casemate[qdrant]"):
            import qdrant_client  # noqa: F401
        self._use_store(_QdrantStore(self), self.timeout_s)


class _LocalClients:
    """Shares one local-mode client per location within this process, with one call at a time."""

    _clients: dict[str, tuple[QdrantClient, threading.RLock, int]] = {}
    _lock = threading.Lock()

    @classmethod
    def acquire(cls, url: str) -> tuple[QdrantClient, threading.RLock]:
        from qdrant_client import QdrantClient

        with cls._lock:
            if url not in cls._clients:
                place = {"location": url} if url == ":memory:" else {"path": url}
                client = QdrantClient(**place, force_disable_check_same_thread=True)  # type: ignore[arg-type]
                cls._clients[url] = client, threading.RLock(), 0
            client, lock, users = cls._clients[url]
            cls._clients[url] = client, lock, users + 1
            return client, lock

    @classmethod
    def release(cls, url: str) -> None:
        with cls._lock:
            client, lock, users = cls._clients[url]
            cls._clients[url] = client, lock, users - 1
            if users == 1 and url != ":memory:":  # data in memory outlives its users
                del cls._clients[url]
                client.close()


class _QdrantStore:
    """See ``mvcc.versioned_store.VersionedStore``."""

    backend, max_hits = "qdrant", 1_000_000

    def __init__(self, options: QdrantIndex) -> None:
        self._options, o = options, options
        if_absent = "a collection was deleted or renamed; restore it, or index again"
        shown = without_credentials(o.url)
        self.where = f"{shown if '://' in shown else f'qdrant {shown}'}, collection {o.collection}"
        self._server = QdrantServer("qdrant", self.where, o.url, o.api_key, o.timeout_s, if_absent, MIN_VERSION)
        self._remote = self._server.remote
        self.exact, self.overfetch = options.search_by == "exact", options.overfetch
        self._client: QdrantClient | None = None
        self._lock: Any = None
        self._generation = ""
        self._connecting = threading.Lock()

    def connect(self) -> None:
        with self._connecting:
            if self._client is not None:
                return
            if self._remote:
                self._client = self._server.connect()
                return
            with self._server.translate_errors():
                self._client, self._lock = _LocalClients.acquire(self._options.url)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._remote:
            client.close()
        elif client is not None:
            _LocalClients.release(self._options.url)

    def descriptor(self) -> IndexDescriptor | None:
        record = self._read_record()
        if record is None:
            return None
        if record.get("format") != FORMAT:
            raise DataError(f"{self.where} has index format {record.get('format')!r}; this version reads {FORMAT!r}")
        return IndexDescriptor(record["generation"], record["fingerprint"], record["dim"])

    def create(self, descriptor: IndexDescriptor, record: CommitRecord) -> None:
        from qdrant_client import models

        with self._call() as db:
            if not db.collection_exists(self._options.collection):
                self._create_collection(db, self._options.collection, {}, 1)
            documents = f"{self._options.collection}-{descriptor.generation}"
            vectors = models.VectorParams(size=descriptor.dim, distance=models.Distance.DOT)
            self._create_collection(db, documents, vectors, None)
            if self._remote:
                for column, kind in (
                    ("key", "integer"),
                    ("tenant", "keyword"),
                    ("source", "keyword"),
                    ("id", "keyword"),
                ):
                    db.create_payload_index(documents, column, models.PayloadSchemaType(kind), wait=True)
            payload = {"format": FORMAT, **descriptor._asdict(), **record._asdict()}
            db.upsert(
                self._options.collection,
                [models.PointStruct(id=RECORD_POINT, vector={}, payload=payload)],
                update_filter=models.Filter(
                    must=[models.HasIdCondition(has_id=[])]
                ),  # matches no point: an existing one is never replaced
            )
        if self.descriptor() != descriptor:
            with self._call() as db:
                db.delete_collection(documents)

    def drop(self) -> None:
        with self._call() as db:
            ours = re.compile(re.escape(self._options.collection) + "(-[0-9a-f]{8})?")
            if db.collection_exists(self._options.collection) and self.descriptor() is None:
                raise DataError(f"{self.where} belongs to another program; choose another name")
            names = [c.name for c in db.get_collections().collections if ours.fullmatch(c.name)]
            for name in sorted(names):  # the commit record first: without it the index is gone
                db.delete_collection(name)

    def use(self, descriptor: IndexDescriptor) -> None:
        self._generation = descriptor.generation

    def commit_record(self) -> CommitRecord | None:
        record = self._read_record()
        if record is None or record["generation"] != self._generation:
            return None
        return CommitRecord(*(record[name] for name in CommitRecord._fields))

    def compare_and_swap(self, old: CommitRecord, new: CommitRecord) -> None:
        from qdrant_client import models

        expected: dict[str, int | str] = {
            "generation": self._generation, "sequence": old.sequence, "holder": old.holder
        }  # fmt: skip
        conditions = [models.FieldCondition(key=k, match=models.MatchValue(value=v)) for k, v in expected.items()]
        condition = models.Filter(must=[models.HasIdCondition(has_id=[RECORD_POINT]), *conditions])
        with self._call() as db:
            db.set_payload(
                self._options.collection,
                new._asdict(),
                points=condition,
                wait=True,
                ordering=models.WriteOrdering.STRONG,
            )

    def read_timestamp(self) -> None:
        """None: each write waits until it is visible."""

    def insert(self, rows: Sequence[StoredRow]) -> None:
        from qdrant_client import models

        points = [
            models.PointStruct(
                id=row.key,
                vector=row.vector.tolist(),
                payload={"key": row.key, **{column: getattr(row, column) for column in COLUMNS}},
            )
            for row in rows
        ]
        with self._call() as db:
            db.upsert(self._documents, points, wait=True)

    def delete(self, keys: Sequence[int]) -> None:
        from qdrant_client import models

        with self._call() as db:
            db.delete(self._documents, models.PointIdsList(points=list(keys)), wait=True)

    def select(self, rows: RowFilter, limit: int, timestamp: Any, columns: Collection[str]) -> list[StoredRow]:
        payload = ["key", *(column for column in columns if column != "vector")]
        vectors = "vector" in columns
        with self._call() as db:
            if rows.keys is not None:
                points = db.retrieve(self._documents, list(rows.keys), with_payload=payload, with_vectors=vectors)
                points.sort(key=lambda p: int(p.id))
            else:
                points, _ = db.scroll(
                    self._documents,
                    _filter(replace(rows, above=-1)),
                    limit=limit,
                    offset=max(rows.above + 1, 0),
                    with_payload=payload,
                    with_vectors=vectors,
                )
        return [_row(p.payload, p.vector) for p in points]

    def nearest(self, rows: RowFilter, q: Vector, limit: int, timestamp: Any) -> list[StoredRow]:
        from qdrant_client import models

        graph = None if self.exact else max(self._options.ef, limit)
        parameters = models.SearchParams(exact=self.exact, hnsw_ef=graph) if self._remote else None
        with self._call() as db:
            found = db.query_points(
                self._documents,
                q.tolist(),
                query_filter=_filter(rows),
                search_params=parameters,
                limit=limit,
                with_vectors=True,
            )
        return [_row(p.payload, p.vector) for p in found.points]

    @property
    def _documents(self) -> str:
        return f"{self._options.collection}-{self._generation}"

    def _create_collection(self, db: QdrantClient, name: str, vectors: Any, shards: int | None) -> None:
        from qdrant_client import models
        from qdrant_client.http.exceptions import UnexpectedResponse

        graph = models.HnswConfigDiff(m=self._options.m, ef_construct=self._options.ef_construct)
        try:
            db.create_collection(name, vectors, shard_number=shards, hnsw_config=graph)
        except (UnexpectedResponse, ValueError):
            if not db.collection_exists(name):  # otherwise another process created it first
                raise

    def _read_record(self) -> dict[str, Any] | None:
        """Payload with descriptor and commit record. None: there is no index."""
        try:
            with self._call() as db:
                points = db.retrieve(self._options.collection, [RECORD_POINT], with_payload=True)
        except DataError:
            with self._call() as db:
                if not db.collection_exists(self._options.collection):
                    return None
            raise
        if not points or points[0].payload is None:
            return None
        payload: dict[str, Any] = points[0].payload
        required = {"format", *IndexDescriptor._fields, *CommitRecord._fields}
        return payload if required <= set(payload) else {"format": None}

    @contextmanager
    def _call(self) -> Iterator[QdrantClient]:
        client = self._client
        if client is None:
            raise self._server.error("the index is not open")
        with self._server.translate_errors():
            if self._lock is None:
                yield client
            else:
                with self._lock:
                    yield client


def _filter(rows: RowFilter) -> Any:
    from qdrant_client import models

    def one_of(key: str, values: Sequence[str]) -> models.FieldCondition:
        return models.FieldCondition(key=key, match=models.MatchAny(any=list(values)))

    must: list[Any] = []
    if rows.above >= 0 or rows.below < KEY_LIMIT:
        must.append(models.FieldCondition(key="key", range=models.Range(gt=rows.above, lt=rows.below)))
    if rows.tenant:
        must.append(models.FieldCondition(key="tenant", match=models.MatchValue(value=rows.tenant)))
    must += [one_of(key, v) for key, v in (("source", rows.sources), ("id", rows.ids)) if v is not None]
    without: list[Any] = [models.FieldCondition(key="key", range=models.Range(gte=a, lte=b)) for a, b in rows.without]
    return models.Filter(must=must, must_not=without)


def _row(payload: Any, vector: Any) -> StoredRow:
    tenant, source, identity, label, body = (payload.get(column, "") for column in COLUMNS)
    vector = np.array([] if vector is None else vector, np.float32)
    return StoredRow(payload["key"], tenant, source, identity, label, body, vector)
