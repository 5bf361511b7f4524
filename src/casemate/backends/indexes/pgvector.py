"""The Postgres index with pgvector: for corpora larger than one machine's memory, and for several gateways.

The database is authoritative. A search is one read-only transaction on one snapshot. Only moments are cached, keyed by
the revision in the tenant's row. Writers of one tenant lock that row, so its moments stay exact; readers take no lock.
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

from casemate.backends import index_checks
from casemate.backends.clients.postgres import PostgresServer
from casemate.backends.index_checks import COLUMNS
from casemate.errors import ConfigError, DataError
from casemate.maths.moments import CorpusMoments
from casemate.maths.nearest import OVERSAMPLING, Keys, inner_products, rounding_error_bound, top_k
from casemate.protocols import Index
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
# STORAGE MAIN keeps vectors inline: a search of 20,000 x 384 takes 39 ms instead of 106 (pgvector 0.6.2).
DOCUMENTS = """
CREATE TABLE {s}.document (
    key bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant text NOT NULL, id text NOT NULL, source text NOT NULL,
    digest text NOT NULL, title text NOT NULL, text text NOT NULL, metadata text NOT NULL,
    checksum text NOT NULL DEFAULT '', embedding vector({dim}) NOT NULL, UNIQUE (tenant, id)
);
ALTER TABLE {s}.document ALTER embedding SET STORAGE MAIN;
CREATE INDEX ON {s}.document (tenant, source, digest);
"""
CHECKSUMS = """SELECT 1 FROM information_schema.columns
WHERE table_schema = %s AND table_name = 'document' AND column_name = 'checksum'"""
GRAPH = "CREATE INDEX ON {s}.document USING hnsw (embedding vector_ip_ops) WITH (m = {m}, ef_construction = {ef})"
MAX_KEY_BYTES = 2600  # limit of a B-tree entry
FETCH_ROWS = 4096  # rows per fetch of a server-side cursor
CACHED_TENANTS = 64  # tenants whose moments are cached: 1.2 MB each at 384 dimensions
MAX_EF = 1000  # limit of hnsw.ef_search


@dataclass(eq=False)
class PgvectorIndex(Index):
    """Tables in a schema of their own: exact cosine, or approximate by pgvector's HNSW graph.

    Deviation: ``search_by: hnsw`` may miss the nearest documents, and with them a detection. If the graph returns too
    few documents, because it ignores tenants, the search is repeated exactly.

    The bytes of a removed document stay in the server's files until vacuum, and in its log and backups.

    Attributes:
        url: ``postgresql://user:password@host:port/database``: a UTF8 database with the extension ``vector``.
        schema: Schema of the tables, one per index. Created if missing.
        connections: Largest number of concurrent searches.
        timeout_s: Limit of a connection attempt, and of one step on the server.
        search_by: ``exact`` compares with every vector; ``hnsw`` searches a graph, created with the tables.
        m: Links per vector in the graph. Fixed when the tables are created.
        ef_construct: Candidates while the graph is built. Fixed when the tables are created.
        ef: Candidates during a search of the graph, at most 1,000.
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
            raise ConfigError(
                f"pgvector.schema is {self.schema!r}; allowed: a-z, 0-9 and _, not beginning with a digit"
            )
        if self.search_by not in ("exact", "hnsw") or min(self.m, self.ef_construct, self.ef) < 1 or self.ef > MAX_EF:
            allowed = f"exact or hnsw, m and ef_construct of at least 1, ef of 1 to {MAX_EF}"
            raise ConfigError(f"pgvector: search_by={self.search_by!r}, ef={self.ef}; allowed: {allowed}")
        self.url = Secret(self.url)
        if_absent = "has no index, or that of another program"
        place = f"schema {self.schema}"
        self._server = PostgresServer("pgvector", self.url, self.connections, self.timeout_s, if_absent, place)
        self._where, self._s = self._server.where, f'"{self.schema}"'
        self._of_tenant = f"FROM {self._s}.document WHERE tenant = %s"
        self._vector = f"SELECT key, vector_send(embedding) {self._of_tenant}"
        self._cache: dict[str, tuple[int, CorpusMoments]] = {}
        self._fingerprint, self._dim = "", 0

    def open(self, fingerprint: str, dim: int) -> None:
        self._server.open()
        with self._exclusive() as db:
            if "fingerprint" not in self._meta(db):
                db.execute(DOCUMENTS.format(s=self._s, dim=int(dim)))
                if self.search_by == "hnsw":
                    self._require_graphs(db)
                    db.execute(GRAPH.format(s=self._s, m=int(self.m), ef=int(self.ef_construct)))
                insert = f"INSERT INTO {self._s}.meta VALUES ('fingerprint', %s), ('dim', %s)"
                db.execute(insert, (fingerprint, str(dim)))
            elif not db.execute(CHECKSUMS, (self.schema,)).fetchone():  # of an earlier version
                db.execute(f"ALTER TABLE {self._s}.document ADD COLUMN checksum text NOT NULL DEFAULT ''")
            self._fingerprint, self._dim = fingerprint, dim
            self._require_same_embedder(self._meta(db))

    def add(self, documents: Sequence[Document], vectors: Vector, tenant: str = DEFAULT_TENANT) -> None:
        vectors = index_checks.require_valid(documents, vectors, self._dim)
        rows = [(*_row(d, tenant), vector) for d, vector in zip(documents, vectors, strict=True)]
        insert = f"INSERT INTO {self._s}.document (tenant, {COLUMNS}, embedding) VALUES (" + "%s, " * 8 + "%b)"
        with self._transaction(write=True) as db:
            db.execute(f"INSERT INTO {self._s}.tenant VALUES (%s, 0, 0, '', '') ON CONFLICT DO NOTHING", (tenant,))
            moments = self._load(db, tenant, "FOR UPDATE")  # excludes other writers of the tenant
            removed, _ = self._delete(db, {d.source for d in documents}, tenant)
            query = f"SELECT id {self._of_tenant} AND id = ANY(%s) LIMIT 1"
            if row := db.execute(query, (tenant, [d.id for d in documents])).fetchone():
                raise index_checks.duplicate_id(row[0])
            db.cursor().executemany(insert, rows)
            self._store(db, tenant, index_checks.updated_moments(tenant, moments, removed, CorpusMoments.of(vectors)))

    def remove(self, sources: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        with self._transaction(write=True) as db:
            moments = self._load(db, tenant, "FOR UPDATE")
            removed, count = self._delete(db, sources, tenant)
            if count:
                self._store(db, tenant, index_checks.updated_moments(tenant, moments, removed))
        return count

    def search(self, vector: Vector, k: int, tenant: str = DEFAULT_TENANT) -> Retrieval:
        with self._transaction() as db:
            q = index_checks.require_query(vector, self._dim)
            keys, top = self._nearest(db, q, max(k, 0), tenant)
            rows = db.execute(f"SELECT key, {COLUMNS} FROM {self._s}.document WHERE key = ANY(%s)", (keys.tolist(),))
            columns = {row[0]: row[1:] for row in rows}
            hits = [Hit(index_checks.decode_document(columns[key]), float(s)) for key, s in zip(keys, top, strict=True)]
            return Retrieval(tuple(hits), self._moments(db, tenant).similarity_stats(q))

    def moments(self, tenant: str = DEFAULT_TENANT) -> CorpusMoments:
        with self._transaction() as db:
            return self._moments(db, tenant)

    def digests(self, tenant: str = DEFAULT_TENANT) -> dict[str, str]:
        with self._transaction() as db:
            return dict(db.execute(f"SELECT DISTINCT source, digest {self._of_tenant}", (tenant,)).fetchall())

    def tenants(self) -> list[str]:
        with self._transaction() as db:
            return sorted(name for (name,) in db.execute(f"SELECT name FROM {self._s}.tenant WHERE n > 0"))

    def scan(self, tenant: str = DEFAULT_TENANT) -> Iterator[tuple[list[Document], Vector]]:

        def read(after: int, count: int) -> list[tuple[Any, ...]]:
            query = (
                f"SELECT key, vector_send(embedding), {COLUMNS} {self._of_tenant} AND key > %s ORDER BY key LIMIT %s"
            )
            with self._transaction() as db:
                return db.execute(query, (tenant, after, count), binary=True).fetchall()

        return index_checks.scan_pages(read, partial(_matrix, dim=self._dim))

    def metadata(self, tenant: str = DEFAULT_TENANT) -> list[tuple[str, dict[str, Any]]]:
        with self._transaction() as db:
            rows = db.execute(f"SELECT DISTINCT source, metadata {self._of_tenant}", (tenant,)).fetchall()
        return index_checks.decode_metadata(rows)

    def check(self) -> list[str]:
        with self._transaction() as db:
            faults = index_checks.check_tenants(self._tenants(db), partial(self._load, db), partial(self._vectors, db))
            with db.cursor(name="documents") as cursor:
                cursor.itersize = FETCH_ROWS
                cursor.execute(f"SELECT {COLUMNS} FROM {self._s}.document ORDER BY key")
                return faults + index_checks.check_documents(cursor)

    def rebuild(self) -> None:
        """See ``Index.rebuild``. Other writers wait."""
        with self._transaction(write=True) as db:
            db.execute(f"LOCK TABLE {self._s}.tenant IN EXCLUSIVE MODE")
            for tenant in self._tenants(db):
                self._store(db, tenant, index_checks.compute_moments(self._vectors(db, tenant), self._dim))

    def clear(self) -> None:
        self._server.open()
        self._fingerprint = ""
        with self._exclusive() as db:
            db.execute(f"LOCK TABLE {self._s}.meta IN ACCESS EXCLUSIVE MODE")  # waits for running transactions
            self._meta(db)
            db.execute(f"DROP TABLE IF EXISTS {self._s}.document; DELETE FROM {self._s}.tenant")
            db.execute(f"DELETE FROM {self._s}.meta WHERE name IN ('fingerprint', 'dim')")

    def close(self) -> None:
        self._server.close()
        self._cache.clear()

    @contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[Connection[Any]]:
        """A transaction on this embedder's tables, which ``clear`` cannot drop during it."""
        with self._server.transaction("READ WRITE" if write else "ISOLATION LEVEL REPEATABLE READ READ ONLY") as db:
            db.execute(f"LOCK TABLE {self._s}.meta IN ACCESS SHARE MODE")  # before the first SELECT takes the snapshot
            self._require_same_embedder(self._meta(db))
            yield db

    @contextmanager
    def _exclusive(self) -> Iterator[Connection[Any]]:
        """A transaction that excludes other ``open`` and ``clear`` calls and ensures that ``meta`` exists."""
        with self._server.transaction("READ WRITE") as db:
            db.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"casemate.{self.schema}",))
            if db.execute("SELECT to_regclass(%s)", (f"{self._s}.meta",)).fetchone() == (None,):
                if db.execute("SELECT 1 FROM pg_tables WHERE schemaname = %s", (self.schema,)).fetchone():
                    raise DataError(f"{self._where} has tables of another program; choose another schema")
                db.execute(META.format(s=self._s, format=FORMAT))
            yield db

    def _meta(self, db: Connection[Any]) -> Mapping[str, str]:
        meta = dict(db.execute(f"SELECT name, value FROM {self._s}.meta").fetchall())
        if meta.get("format") != FORMAT:
            raise DataError(f"{self._where} has index format {meta.get('format')!r}; this version reads {FORMAT!r}")
        return meta

    def _require_graphs(self, db: Connection[Any]) -> None:
        if db.execute("SELECT 1 FROM pg_am WHERE amname = 'hnsw'").fetchone() is None:
            problem = "hnsw needs pgvector 0.5 or later"
            raise self._server.error(f"{problem}; run ALTER EXTENSION vector UPDATE, or set search_by: exact")

    def _require_same_embedder(self, meta: Mapping[str, str]) -> None:
        if (meta.get("fingerprint"), meta.get("dim")) != (self._fingerprint, str(self._dim)):
            raise index_checks.embedder_mismatch(self._where, meta.get("fingerprint"), self._fingerprint)

    def _delete(self, db: Connection[Any], sources: Collection[str], tenant: str) -> tuple[CorpusMoments, int]:
        """Deletes the documents of the sources. Returns the moments of their stored vectors, and their number."""
        delete = f"DELETE {self._of_tenant} AND source = ANY(%s) RETURNING vector_send(embedding)"
        rows = db.execute(delete, (tenant, [s for s in sources if "\0" not in s]), binary=True).fetchall()
        return CorpusMoments.of(_matrix([blob for (blob,) in rows], self._dim)), len(rows)

    def _load(self, db: Connection[Any], tenant: str, lock: str = "") -> CorpusMoments:
        query = f"SELECT n, mean, scatter FROM {self._s}.tenant WHERE name = %s {lock}"
        return index_checks.decode_moments(tenant, db.execute(query, (tenant,), binary=True).fetchone(), self._dim)

    def _store(self, db: Connection[Any], tenant: str, m: CorpusMoments) -> None:
        """Writes moments with a random revision, which neither a restored backup nor a new schema repeats."""
        db.execute(
            f"INSERT INTO {self._s}.tenant VALUES (%s, %s, %s, %b, %b) ON CONFLICT (name) DO UPDATE SET "
            "revision = excluded.revision, n = excluded.n, mean = excluded.mean, scatter = excluded.scatter",
            (tenant, secrets.randbits(63), m.n, m.mean.tobytes(), m.scatter.tobytes()),
        )

    def _moments(self, db: Connection[Any], tenant: str) -> CorpusMoments:
        """The tenant's moments, cached by their revision."""
        row = db.execute(f"SELECT revision FROM {self._s}.tenant WHERE name = %s", (tenant,)).fetchone()
        revision, cached = row[0] if row else 0, self._cache.get(tenant)
        if cached is None or cached[0] != revision:
            if len(self._cache) >= CACHED_TENANTS:
                self._cache.clear()
            cached = self._cache[tenant] = revision, self._load(db, tenant)
        return cached[1]

    def _nearest(self, db: Connection[Any], q: Vector, k: int, tenant: str) -> tuple[Keys, Float64]:
        """Keys and float64 scores of the k nearest. Fetches more rows while float32 rounding may misorder them."""
        limit = k + OVERSAMPLING
        if self.search_by == "hnsw" and k and 2 * limit <= MAX_EF:
            ef = max(self.ef, 2 * limit)
            db.execute(f"SET LOCAL hnsw.ef_search = {ef:d}")
            query = f"{self._vector} ORDER BY embedding <#> %b LIMIT %s"
            rows = db.execute(query, (tenant, q, 2 * limit), binary=True).fetchall()
            if len(rows) == 2 * limit:
                return self._best(rows, q, k)
        query = f"{self._vector} ORDER BY (embedding <#> %b) + 0, key LIMIT %s"  # + 0 prevents the use of the graph
        while True:
            rows = db.execute(query, (tenant, q, limit), binary=True).fetchall()
            keys, top = self._best(rows, q, k)
            if len(rows) < limit or not k or self._best(rows[-1:], q, 1)[1][0] < top[-1] - rounding_error_bound(q):
                return keys, top
            limit *= 4

    def _best(self, rows: Sequence[tuple[int, bytes]], q: Vector, k: int) -> tuple[Keys, Float64]:
        s = inner_products(_matrix([blob for _, blob in rows], self._dim), q)
        return top_k(np.array([key for key, _ in rows], np.int64), s, k)

    def _tenants(self, db: Connection[Any]) -> list[str]:
        query = f"SELECT name FROM {self._s}.tenant UNION SELECT tenant FROM {self._s}.document"
        return sorted(name for (name,) in db.execute(query))

    def _vectors(self, db: Connection[Any], tenant: str) -> Iterator[tuple[Keys, Vector]]:
        """Keys and stored vectors of a tenant in pages, by a server-side cursor."""
        with db.cursor(name="vectors") as cursor:
            cursor.execute(self._vector, (tenant,), binary=True)
            while rows := cursor.fetchmany(FETCH_ROWS):
                yield np.array([key for key, _ in rows], np.int64), _matrix([blob for _, blob in rows], self._dim)


def _row(d: Document, tenant: str) -> tuple[str, ...]:
    """The columns of a document. Refuses what Postgres would refuse, and names the document."""
    row = (tenant, *index_checks.document_columns(d))
    if any("\0" in value for value in row):
        raise DataError(f"document {d.id!r} contains a NUL character, which Postgres cannot store; remove it")
    if len(tenant.encode()) + max(len(d.id.encode()), len((d.source + d.digest).encode())) > MAX_KEY_BYTES:
        raise DataError(
            f"document {d.id[:80]!r}: id or source exceeds the {MAX_KEY_BYTES} bytes that Postgres can index"
        )
    return row


def _matrix(blobs: Sequence[bytes], dim: int) -> Vector:
    """Decodes ``vector_send``: two int16, then big-endian float32."""
    return np.frombuffer(b"".join(blob[4:] for blob in blobs), ">f4").astype(np.float32).reshape(-1, dim)
