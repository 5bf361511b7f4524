"""The index in Postgres with pgvector: for corpora beyond one machine's memory, and for several servers at once.

The database is the truth. Every search is one read-only transaction on one snapshot; only the moments of a tenant are
kept in memory, for as long as the revision in the tenant's row stays what it was. Writers of one tenant wait for one
another at that row, so its moments stay exact; readers wait for nobody.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from casemate import indexing
from casemate.errors import ConfigError, DataError
from casemate.indexing import COLUMNS
from casemate.neighbors import SPARE, Keys, best, rounding, scores
from casemate.postgres import Server
from casemate.protocols import Index
from casemate.stats import CorpusMoments
from casemate.types import DEFAULT_TENANT, Document, Float64, Hit, Retrieval, Secret, Vector

if TYPE_CHECKING:
    from psycopg import Connection

FORMAT = "casemate 1"
META = """
CREATE SCHEMA IF NOT EXISTS {s};
CREATE TABLE {s}.meta (name text PRIMARY KEY, value text NOT NULL);
CREATE TABLE {s}.tenant (
    name text PRIMARY KEY, revision bigint NOT NULL, n bigint NOT NULL, mean bytea NOT NULL, scatter bytea NOT NULL
);
ALTER TABLE {s}.tenant ALTER scatter SET STORAGE EXTERNAL;
INSERT INTO {s}.meta VALUES ('format', '{format}');
"""
# STORAGE MAIN keeps a vector beside its row: 39 ms instead of 106 for a search of 20,000 x 384 (pgvector 0.6.2).
DOCUMENTS = """
CREATE TABLE {s}.document (
    key bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant text NOT NULL, id text NOT NULL, source text NOT NULL,
    digest text NOT NULL, title text NOT NULL, text text NOT NULL, metadata text NOT NULL,
    embedding vector({dim}) NOT NULL, UNIQUE (tenant, id)
);
ALTER TABLE {s}.document ALTER embedding SET STORAGE MAIN;
CREATE INDEX ON {s}.document (tenant, source, digest);
"""
GRAPH = "CREATE INDEX ON {s}.document USING hnsw (embedding vector_ip_ops) WITH (m = {m}, ef_construction = {ef})"
INDEXABLE = 2600  # bytes that Postgres can take into a B-tree
STREAM = 4096  # rows that a server-side cursor fetches at a time
CACHED = 64  # tenants whose moments are kept in memory: 1.2 MB each at 384 dimensions
MOST = 1000  # candidates that pgvector keeps open in a graph


@dataclass(eq=False)
class PgvectorIndex(Index):
    """Tables in a schema of their own; exact cosine by the server, or approximate by pgvector's HNSW graph.

    Deviation: with ``search_by: hnsw`` the nearest documents may be missed, and with them a detection. Where the graph
    gives fewer than are wanted (it knows no tenants), the search is exact.

    The bytes of a removed record stay in the server's files until they are vacuumed, and in its log and backups.

    Attributes:
        url: ``postgresql://user:password@host:port/database``, a database with the extension ``vector``, in UTF8.
        schema: Where the tables are; it is made when missing. One schema holds one index.
        connections: Searches that run at once; more wait.
        timeout_s: How long a connection, or one step on the server, may take.
        search_by: ``exact`` compares with every vector; ``hnsw`` walks the graph, which is made when the tables are.
        m: Links of a vector in the graph. Counts when the tables are made.
        ef_construct: Candidates kept open while the graph is built. Counts when the tables are made.
        ef: Candidates kept open while it is searched, at most 1,000.
    """

    url: Secret
    schema: str = "casemate"
    connections: int = 4
    timeout_s: float = 10
    search_by: Literal["exact", "hnsw"] = "exact"
    m: int = 16
    ef_construct: int = 200
    ef: int = 256

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z_][a-z0-9_]{0,62}", self.schema):
            raise ConfigError(f"pgvector.schema is {self.schema!r}; allowed are a-z, 0-9 and _, no digit first")
        if self.search_by not in ("exact", "hnsw") or min(self.m, self.ef_construct, self.ef) < 1 or self.ef > MOST:
            allowed = f"exact or hnsw, m and ef_construct of at least 1, ef of 1 to {MOST}"
            raise ConfigError(f"pgvector: search_by={self.search_by!r}, ef={self.ef}; allowed are {allowed}")
        self.url = Secret(self.url)
        about = "holds no index, or one of another program"
        place = f"schema {self.schema}"
        self._server = Server("pgvector", self.url, self.connections, self.timeout_s, about, place)
        self._where, self._s = self._server.where, f'"{self.schema}"'
        self._held = f"FROM {self._s}.document WHERE tenant = %s"
        self._vector = f"SELECT key, vector_send(embedding) {self._held}"
        self._cache: dict[str, tuple[int, CorpusMoments]] = {}
        self._fingerprint, self._dim = "", 0

    def open(self, fingerprint: str, dim: int) -> None:
        """See ``Index.open``."""
        self._server.open()
        with self._alone() as db:
            if "fingerprint" not in self._meta(db):
                db.execute(DOCUMENTS.format(s=self._s, dim=int(dim)))
                if self.search_by == "hnsw":
                    self._require_graphs(db)
                    db.execute(GRAPH.format(s=self._s, m=int(self.m), ef=int(self.ef_construct)))
                insert = f"INSERT INTO {self._s}.meta VALUES ('fingerprint', %s), ('dim', %s)"
                db.execute(insert, (fingerprint, str(dim)))
            self._fingerprint, self._dim = fingerprint, dim
            self._require_same_embedder(self._meta(db))

    def add(self, documents: Sequence[Document], vectors: Vector, tenant: str = DEFAULT_TENANT) -> None:
        """See ``Index.add``."""
        vectors = indexing.require_fit(documents, vectors, self._dim)
        rows = [(*_row(d, tenant), vector) for d, vector in zip(documents, vectors, strict=True)]
        insert = f"INSERT INTO {self._s}.document (tenant, {COLUMNS}, embedding) VALUES (" + "%s, " * 7 + "%b)"
        with self._transaction(write=True) as db:
            db.execute(f"INSERT INTO {self._s}.tenant VALUES (%s, 0, 0, '', '') ON CONFLICT DO NOTHING", (tenant,))
            held = self._load(db, tenant, "FOR UPDATE")  # no other writer may touch the tenant from here on
            gone, _ = self._take_out(db, {d.source for d in documents}, tenant)
            query = f"SELECT id {self._held} AND id = ANY(%s) LIMIT 1"
            if row := db.execute(query, (tenant, [d.id for d in documents])).fetchone():
                raise indexing.given_twice(row[0])
            db.cursor().executemany(insert, rows)
            self._store(db, tenant, indexing.changed(tenant, held, gone, CorpusMoments.of(vectors)))

    def remove(self, sources: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        """See ``Index.remove``."""
        with self._transaction(write=True) as db:
            held = self._load(db, tenant, "FOR UPDATE")
            gone, count = self._take_out(db, sources, tenant)
            if count:
                self._store(db, tenant, indexing.changed(tenant, held, gone))
        return count

    def search(self, vector: Vector, k: int, tenant: str = DEFAULT_TENANT) -> Retrieval:
        """See ``Index.search``."""
        with self._transaction() as db:
            q = indexing.require_query(vector, self._dim)
            keys, found = self._nearest(db, q, max(k, 0), tenant)
            rows = db.execute(f"SELECT key, {COLUMNS} FROM {self._s}.document WHERE key = ANY(%s)", (keys.tolist(),))
            held = {row[0]: row[1:] for row in rows}
            hits = [Hit(indexing.document_of(held[key]), float(s)) for key, s in zip(keys, found, strict=True)]
            return Retrieval(tuple(hits), self._moments(db, tenant).background(q))

    def moments(self, tenant: str = DEFAULT_TENANT) -> CorpusMoments:
        """See ``Index.moments``."""
        with self._transaction() as db:
            return self._moments(db, tenant)

    def digests(self, tenant: str = DEFAULT_TENANT) -> dict[str, str]:
        """See ``Index.digests``."""
        with self._transaction() as db:
            return dict(db.execute(f"SELECT DISTINCT source, digest {self._held}", (tenant,)).fetchall())

    def tenants(self) -> list[str]:
        """See ``Index.tenants``."""
        with self._transaction() as db:
            return sorted(name for (name,) in db.execute(f"SELECT name FROM {self._s}.tenant WHERE n > 0"))

    def scan(self, tenant: str = DEFAULT_TENANT) -> Iterator[tuple[list[Document], Vector]]:
        """See ``Index.scan``."""

        def read(after: int, count: int) -> list[tuple[Any, ...]]:
            query = f"SELECT key, vector_send(embedding), {COLUMNS} {self._held} AND key > %s ORDER BY key LIMIT %s"
            with self._transaction() as db:
                return db.execute(query, (tenant, after, count), binary=True).fetchall()

        return indexing.scanned(read, partial(_matrix, dim=self._dim))

    def warm(self, tenant: str = DEFAULT_TENANT) -> None:
        """See ``Index.warm``. Only the moments are kept here; the vectors are the server's to cache."""
        self.moments(tenant)

    def check(self) -> list[str]:
        """See ``Index.check``."""
        with self._transaction() as db:
            return indexing.compare_all(self._tenants(db), partial(self._load, db), partial(self._vectors, db))

    def rebuild(self) -> None:
        """See ``Index.rebuild``. Writers wait meanwhile."""
        with self._transaction(write=True) as db:
            db.execute(f"LOCK TABLE {self._s}.tenant IN EXCLUSIVE MODE")
            for tenant in self._tenants(db):
                self._store(db, tenant, indexing.moments_from(self._vectors(db, tenant), self._dim))

    def clear(self) -> None:
        """See ``Index.clear``."""
        self._server.open()
        self._fingerprint = ""
        with self._alone() as db:
            db.execute(f"LOCK TABLE {self._s}.meta IN ACCESS EXCLUSIVE MODE")  # when all that is under way is done
            self._meta(db)
            db.execute(f"DROP TABLE IF EXISTS {self._s}.document; DELETE FROM {self._s}.tenant")
            db.execute(f"DELETE FROM {self._s}.meta WHERE name IN ('fingerprint', 'dim')")

    def close(self) -> None:
        """See ``Index.close``."""
        self._server.close()
        self._cache.clear()

    @contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[Connection[Any]]:
        """One consistent state of this embedder's tables, which cannot be dropped meanwhile."""
        with self._server.session("READ WRITE" if write else "ISOLATION LEVEL REPEATABLE READ READ ONLY") as db:
            db.execute(f"LOCK TABLE {self._s}.meta IN ACCESS SHARE MODE")  # before the first SELECT takes the snapshot
            self._require_same_embedder(self._meta(db))
            yield db

    @contextmanager
    def _alone(self) -> Iterator[Connection[Any]]:
        """A transaction beside no other ``open`` or ``clear``, in which ``meta`` exists."""
        with self._server.session("READ WRITE") as db:
            db.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"casemate.{self.schema}",))
            if db.execute("SELECT to_regclass(%s)", (f"{self._s}.meta",)).fetchone() == (None,):
                if db.execute("SELECT 1 FROM pg_tables WHERE schemaname = %s", (self.schema,)).fetchone():
                    raise DataError(f"{self._where} holds tables of another program; choose another schema")
                db.execute(META.format(s=self._s, format=FORMAT))
            yield db

    def _meta(self, db: Connection[Any]) -> Mapping[str, str]:
        held = dict(db.execute(f"SELECT name, value FROM {self._s}.meta").fetchall())
        if held.get("format") != FORMAT:
            raise DataError(f"{self._where} has index format {held.get('format')!r}, this version reads {FORMAT!r}")
        return held

    def _require_graphs(self, db: Connection[Any]) -> None:
        if db.execute("SELECT 1 FROM pg_am WHERE amname = 'hnsw'").fetchone() is None:
            what = "this pgvector has no hnsw graph, 0.5 or later has: ALTER EXTENSION vector UPDATE"
            raise self._server.failure(f"{what}, or set search_by to exact")

    def _require_same_embedder(self, held: Mapping[str, str]) -> None:
        if (held.get("fingerprint"), held.get("dim")) != (self._fingerprint, str(self._dim)):
            raise indexing.another_embedder(self._where, held.get("fingerprint"), self._fingerprint)

    def _take_out(self, db: Connection[Any], sources: Collection[str], tenant: str) -> tuple[CorpusMoments, int]:
        """Deletes the documents of the sources; their moments are those of the stored vectors, bit by bit."""
        delete = f"DELETE {self._held} AND source = ANY(%s) RETURNING vector_send(embedding)"
        rows = db.execute(delete, (tenant, [s for s in sources if "\0" not in s]), binary=True).fetchall()
        return CorpusMoments.of(_matrix([blob for (blob,) in rows], self._dim)), len(rows)

    def _load(self, db: Connection[Any], tenant: str, lock: str = "") -> CorpusMoments:
        query = f"SELECT n, mean, scatter FROM {self._s}.tenant WHERE name = %s {lock}"
        return indexing.moments_of(tenant, db.execute(query, (tenant,), binary=True).fetchone(), self._dim)

    def _store(self, db: Connection[Any], tenant: str, m: CorpusMoments) -> None:
        """Writes moments under a new revision: a random one, which no restored backup and no new schema repeats."""
        db.execute(
            f"INSERT INTO {self._s}.tenant VALUES (%s, %s, %s, %b, %b) ON CONFLICT (name) DO UPDATE SET "
            "revision = excluded.revision, n = excluded.n, mean = excluded.mean, scatter = excluded.scatter",
            (tenant, secrets.randbits(63), m.n, m.mean.tobytes(), m.scatter.tobytes()),
        )

    def _moments(self, db: Connection[Any], tenant: str) -> CorpusMoments:
        """The tenant's moments, from memory while its revision is the same."""
        row = db.execute(f"SELECT revision FROM {self._s}.tenant WHERE name = %s", (tenant,)).fetchone()
        revision, held = row[0] if row else 0, self._cache.get(tenant)
        if held is None or held[0] != revision:
            if len(self._cache) >= CACHED:
                self._cache.clear()
            held = self._cache[tenant] = revision, self._load(db, tenant)
        return held[1]

    def _nearest(self, db: Connection[Any], q: Vector, k: int, tenant: str) -> tuple[Keys, Float64]:
        """Keys and float64 scores of the k nearest. The server's float32 order is trusted only as far as it can be."""
        limit = k + SPARE
        if self.search_by == "hnsw" and k and 2 * limit <= MOST:
            ef = max(self.ef, 2 * limit)
            db.execute(f"SET LOCAL hnsw.ef_search = {ef:d}")
            query = f"{self._vector} ORDER BY embedding <#> %b LIMIT %s"
            rows = db.execute(query, (tenant, q, 2 * limit), binary=True).fetchall()
            if len(rows) == 2 * limit:
                return self._best(rows, q, k)
        query = f"{self._vector} ORDER BY (embedding <#> %b) + 0, key LIMIT %s"  # + 0: no graph is used
        while True:
            rows = db.execute(query, (tenant, q, limit), binary=True).fetchall()
            keys, found = self._best(rows, q, k)
            if len(rows) < limit or not k or self._best(rows[-1:], q, 1)[1][0] < found[-1] - rounding(q):
                return keys, found
            limit *= 4  # more are alike than float32 can tell apart

    def _best(self, rows: Sequence[tuple[int, bytes]], q: Vector, k: int) -> tuple[Keys, Float64]:
        s = scores(_matrix([blob for _, blob in rows], self._dim), q)
        return best(np.array([key for key, _ in rows], np.int64), s, k)

    def _tenants(self, db: Connection[Any]) -> list[str]:
        """All tenants that have documents, or moments as if they had."""
        query = f"SELECT name FROM {self._s}.tenant UNION SELECT tenant FROM {self._s}.document"
        return sorted(name for (name,) in db.execute(query))

    def _vectors(self, db: Connection[Any], tenant: str) -> Iterator[tuple[Keys, Vector]]:
        """Keys and stored vectors of a tenant in pieces, by a server-side cursor."""
        with db.cursor(name="vectors") as cursor:
            cursor.execute(self._vector, (tenant,), binary=True)
            while rows := cursor.fetchmany(STREAM):
                yield np.array([key for key, _ in rows], np.int64), _matrix([blob for _, blob in rows], self._dim)


def _row(d: Document, tenant: str) -> tuple[str, ...]:
    """The columns of a document; what Postgres would refuse is refused here, with the document's name."""
    row = (tenant, *indexing.columns(d))
    if any("\0" in value for value in row):
        raise DataError(f"document {d.id!r} holds a NUL character, which Postgres cannot keep; take it out")
    if len(tenant.encode()) + max(len(d.id.encode()), len((d.source + d.digest).encode())) > INDEXABLE:
        raise DataError(f"document {d.id[:80]!r}: id or source exceed the {INDEXABLE} bytes that Postgres can index")
    return row


def _matrix(blobs: Sequence[bytes], dim: int) -> Vector:
    """Vectors as ``vector_send`` gives them: two int16, then big-endian float32."""
    return np.frombuffer(b"".join(blob[4:] for blob in blobs), ">f4").astype(np.float32).reshape(-1, dim)
