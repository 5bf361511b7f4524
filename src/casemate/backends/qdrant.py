"""The index in Qdrant: exact by default, or approximate by Qdrant's HNSW graph.

Qdrant has no transactions over several points, but changes a payload only where a condition holds. That one step is all
that an index by journal needs (``casemate.journal``).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from casemate.errors import ConfigError, DataError, needs
from casemate.journal import JournaledIndex
from casemate.journal.store import EVERY, Anchor, Mark, Row, Which
from casemate.qdrant import Server
from casemate.types import Secret, Vector

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

FORMAT = "casemate 1"
OLDEST = (1, 16)
"""Of the servers, the first that inserts on a condition. Those before ignore it, and two could open at once."""
POINT = 0
"""The id of the point that is the mark."""
COLUMNS = ("tenant", "source", "id", "label", "body")


@dataclass(eq=False)
class QdrantIndex(JournaledIndex):
    """Two collections of a Qdrant server; exact cosine by the server, scored again here in float64.

    Guaranteed: rows and moments change together, in one exchange of the mark's payload, also when a writer is killed at
    any point; of two writers one waits; a reader sees the state before or after. Assumed: the server's clock plays no
    part, but a writer that is halted for longer than three times ``timeout_s`` between two calls is given up.

    Deviation: with ``search_by: hnsw`` the nearest documents may be missed, and with them a detection.

    The bytes of a removed record stay in the server's files until its optimiser rewrites the segment.

    Attributes:
        url: ``http://host:6333``. A folder, or ``:memory:``, is the client's local mode: for trials, in one process.
        api_key: What the server asks for.
        collection: Collections are called so, and so with a suffix. One name holds one index.
        search_by: ``exact`` compares with every vector; ``hnsw`` walks the graph.
        m: Links of a vector in the graph. Counts when the index is made.
        ef_construct: Candidates kept open while the graph is built. Counts when the index is made.
        ef: Candidates kept open while it is searched.
        overfetch: How many times more documents than wanted are fetched and scored again.
        timeout_s: How long one call may take.
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
                f"qdrant.collection is {self.collection!r}; allowed are letters, digits, _ and -, at most 100"
            )
        if min(self.m, self.ef_construct, self.ef, self.overfetch) < 1 or not self.timeout_s > 0:
            raise ConfigError("qdrant: m, ef_construct, ef and overfetch must be at least 1, timeout_s above 0")
        if self.search_by not in ("exact", "hnsw"):
            raise ConfigError(f"qdrant.search_by is {self.search_by!r}; allowed are exact and hnsw")
        self.url, self.api_key = Secret(self.url), Secret(self.api_key)
        with needs("casemate[qdrant]"):
            import qdrant_client  # noqa: F401
        self._begin(_Store(self), self.timeout_s)


class _Local:
    """The client's local mode: one client for all who use the place in this process, one call at a time."""

    _held: dict[str, tuple[QdrantClient, threading.RLock, int]] = {}
    _lock = threading.Lock()

    @classmethod
    def take(cls, url: str) -> tuple[QdrantClient, threading.RLock]:
        from qdrant_client import QdrantClient

        with cls._lock:
            if url not in cls._held:
                place = {"location": url} if url == ":memory:" else {"path": url}
                client = QdrantClient(**place, force_disable_check_same_thread=True)  # type: ignore[arg-type]
                cls._held[url] = client, threading.RLock(), 0
            client, lock, users = cls._held[url]
            cls._held[url] = client, lock, users + 1
            return client, lock

    @classmethod
    def give_back(cls, url: str) -> None:
        with cls._lock:
            client, lock, users = cls._held[url]
            cls._held[url] = client, lock, users - 1
            if users == 1 and url != ":memory:":  # memory is kept for who opens it next
                del cls._held[url]
                client.close()


class _Store:
    """See ``journal.store.Store``."""

    backend, reach = "qdrant", 1_000_000

    def __init__(self, options: QdrantIndex) -> None:
        self._options, o = options, options
        gone = "a collection was deleted or renamed; put it back, or index again"
        shown = re.sub("//.*@", "//", o.url)
        self.where = f"{shown if '://' in shown else f'qdrant {shown}'}, collection {o.collection}"
        self._server = Server("qdrant", self.where, o.url, o.api_key, o.timeout_s, gone, OLDEST)
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
            with self._server.explained():
                self._client, self._lock = _Local.take(self._options.url)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._remote:
            client.close()
        elif client is not None:
            _Local.give_back(self._options.url)

    def anchor(self) -> Anchor | None:
        held = self._mark_point()
        if held is None:
            return None
        if held.get("format") != FORMAT:
            raise DataError(f"{self.where} has index format {held.get('format')!r}, this version reads {FORMAT!r}")
        return Anchor(held["generation"], held["fingerprint"], held["dim"])

    def found(self, anchor: Anchor, mark: Mark) -> None:
        from qdrant_client import models

        with self._call() as db:
            if not db.collection_exists(self._options.collection):
                self._create(db, self._options.collection, {}, 1)
            documents = f"{self._options.collection}-{anchor.generation}"
            vectors = models.VectorParams(size=anchor.dim, distance=models.Distance.DOT)
            self._create(db, documents, vectors, None)
            if self._remote:
                for column, kind in (
                    ("key", "integer"),
                    ("tenant", "keyword"),
                    ("source", "keyword"),
                    ("id", "keyword"),
                ):
                    db.create_payload_index(documents, column, models.PayloadSchemaType(kind), wait=True)
            payload = {"format": FORMAT, **anchor._asdict(), **mark._asdict()}
            db.upsert(
                self._options.collection,
                [models.PointStruct(id=POINT, vector={}, payload=payload)],
                update_filter=models.Filter(must=[models.HasIdCondition(has_id=[])]),  # never: the first one stays
            )
        if self.anchor() != anchor:
            with self._call() as db:
                db.delete_collection(documents)

    def erase(self) -> None:
        with self._call() as db:
            ours = re.compile(re.escape(self._options.collection) + "(-[0-9a-f]{8})?")
            if db.collection_exists(self._options.collection) and self.anchor() is None:
                raise DataError(f"{self.where} is of another program; choose another name")
            names = [c.name for c in db.get_collections().collections if ours.fullmatch(c.name)]
            for name in sorted(names):  # the mark's first: from then on nobody finds the rest
                db.delete_collection(name)

    def use(self, anchor: Anchor) -> None:
        self._generation = anchor.generation

    def mark(self) -> Mark | None:
        held = self._mark_point()
        if held is None or held["generation"] != self._generation:
            return None
        return Mark(*(held[name] for name in Mark._fields))

    def swap(self, old: Mark, new: Mark) -> None:
        from qdrant_client import models

        was: dict[str, int | str] = {"generation": self._generation, "beat": old.beat, "holder": old.holder}
        conditions = [models.FieldCondition(key=k, match=models.MatchValue(value=v)) for k, v in was.items()]
        condition = models.Filter(must=[models.HasIdCondition(has_id=[POINT]), *conditions])
        with self._call() as db:
            db.set_payload(
                self._options.collection,
                new._asdict(),
                points=condition,
                wait=True,
                ordering=models.WriteOrdering.STRONG,
            )

    def moment(self) -> None:
        """Nothing: a write is waited for, so it is seen."""

    def insert(self, rows: Sequence[Row]) -> None:
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

    def select(self, which: Which, limit: int, moment: Any, columns: Collection[str]) -> list[Row]:
        wanted = ["key", *(column for column in columns if column != "vector")]
        vectors = "vector" in columns
        with self._call() as db:
            if which.keys is not None:
                points = db.retrieve(self._documents, list(which.keys), with_payload=wanted, with_vectors=vectors)
                points.sort(key=lambda p: int(p.id))
            else:
                points, _ = db.scroll(
                    self._documents,
                    _condition(replace(which, above=-1)),
                    limit=limit,
                    offset=max(which.above + 1, 0),
                    with_payload=wanted,
                    with_vectors=vectors,
                )
        return [_row(p.payload, p.vector) for p in points]

    def nearest(self, which: Which, q: Vector, limit: int, moment: Any) -> list[Row]:
        from qdrant_client import models

        graph = None if self.exact else max(self._options.ef, limit)
        parameters = models.SearchParams(exact=self.exact, hnsw_ef=graph) if self._remote else None
        with self._call() as db:
            found = db.query_points(
                self._documents,
                q.tolist(),
                query_filter=_condition(which),
                search_params=parameters,
                limit=limit,
                with_vectors=True,
            )
        return [_row(p.payload, p.vector) for p in found.points]

    @property
    def _documents(self) -> str:
        return f"{self._options.collection}-{self._generation}"

    def _create(self, db: QdrantClient, name: str, vectors: Any, shards: int | None) -> None:
        from qdrant_client import models
        from qdrant_client.http.exceptions import UnexpectedResponse

        graph = models.HnswConfigDiff(m=self._options.m, ef_construct=self._options.ef_construct)
        try:
            db.create_collection(name, vectors, shard_number=shards, hnsw_config=graph)
        except (UnexpectedResponse, ValueError):
            if not db.collection_exists(name):  # else another made it at the same time
                raise

    def _mark_point(self) -> dict[str, Any] | None:
        try:
            with self._call() as db:
                points = db.retrieve(self._options.collection, [POINT], with_payload=True)
        except DataError:
            with self._call() as db:
                if not db.collection_exists(self._options.collection):
                    return None
            raise
        if not points or points[0].payload is None:
            return None
        held: dict[str, Any] = points[0].payload
        return held if {"format", "generation", "fingerprint", "dim", *Mark._fields} <= set(held) else {"format": None}

    @contextmanager
    def _call(self) -> Iterator[QdrantClient]:
        client = self._client
        if client is None:
            raise self._server.failure("the index is not open")
        with self._server.explained():
            if self._lock is None:
                yield client
            else:
                with self._lock:
                    yield client


def _condition(which: Which) -> Any:
    from qdrant_client import models

    def one_of(key: str, values: Sequence[str]) -> models.FieldCondition:
        return models.FieldCondition(key=key, match=models.MatchAny(any=list(values)))

    must: list[Any] = []
    if which.above >= 0 or which.below < EVERY:
        must.append(models.FieldCondition(key="key", range=models.Range(gt=which.above, lt=which.below)))
    if which.tenant:
        must.append(models.FieldCondition(key="tenant", match=models.MatchValue(value=which.tenant)))
    must += [one_of(key, v) for key, v in (("source", which.sources), ("id", which.ids)) if v is not None]
    without: list[Any] = [models.FieldCondition(key="key", range=models.Range(gte=a, lte=b)) for a, b in which.without]
    return models.Filter(must=must, must_not=without)


def _row(payload: Any, vector: Any) -> Row:
    tenant, source, identity, label, body = (payload.get(column, "") for column in COLUMNS)
    vector = np.array([] if vector is None else vector, np.float32)
    return Row(payload["key"], tenant, source, identity, label, body, vector)
