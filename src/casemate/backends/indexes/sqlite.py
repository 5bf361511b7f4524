"""The embedded index: documents, vectors and moments in one SQLite file, searched in memory.

The file is authoritative. Memory is a cache that every search first brings up to the file's revision. So a search sees
the changes of all processes, and a killed process loses only what was not committed.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from casemate.backends import index_checks
from casemate.backends.index_checks import COLUMNS
from casemate.errors import BackendError, DataError, needs
from casemate.maths.moments import CorpusMoments
from casemate.maths.nearest import BLOCK, HNSW, ApproximateSearch, ExactSearch, Keys
from casemate.protocols import Index
from casemate.runtime.files import file_checksum
from casemate.runtime.sqlite import BUSY_S, enable_wal, file_identity
from casemate.types import DEFAULT_TENANT, Document, Hit, Retrieval, Vector

APPROXIMATE_ABOVE = 1_000_000
APPLICATION_ID = 0x43534D54  # "CSMT" in the file's header identifies the format
FORMAT = 1
SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE tenant (
    name TEXT PRIMARY KEY, revision INTEGER NOT NULL, n INTEGER NOT NULL, mean BLOB NOT NULL, scatter BLOB NOT NULL
);
CREATE TABLE document (
    key INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL, source TEXT NOT NULL,
    digest TEXT NOT NULL, title TEXT NOT NULL, text TEXT NOT NULL, metadata TEXT NOT NULL,
    checksum TEXT NOT NULL DEFAULT '', UNIQUE (tenant, id)
);
CREATE INDEX document_source ON document (tenant, source, digest);
CREATE INDEX document_tenant ON document (tenant);
CREATE TABLE vector (key INTEGER PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE removed (seq INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, key INTEGER NOT NULL);
"""
SCAN_QUERY = f"""SELECT key, value, {COLUMNS} FROM document JOIN vector USING (key)
WHERE tenant = ? AND key > ? AND length(value) = ? ORDER BY key LIMIT ?"""


_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _TenantCache:
    """A tenant's vectors and moments in memory, and the revision of the file that they reflect."""

    neighbors: ExactSearch | ApproximateSearch
    moments: CorpusMoments
    revision: int = 0
    last_key: int = 0
    last_removed: int = 0


@dataclass(eq=False)
class SqliteIndex(Index):
    """One file: exact cosine by BLAS, and for large tenants an HNSW graph beside the file.

    Attributes:
        path: The file. Its folder is created if missing; both are readable by their owner only.
        approximate_above: Search is approximate for tenants with more documents, if the extra ``hnsw`` is installed;
            without it, search stays exact and a warning is logged. The detection needs the true nearest document, which
            a graph may miss, so the default keeps search exact as long as its latency permits.
    """

    path: Path = Path(".casemate/index.db")
    approximate_above: int = APPROXIMATE_ABOVE

    def __post_init__(self) -> None:
        self._approximates = find_spec("usearch") is not None
        if not self._approximates and self.approximate_above < APPROXIMATE_ABOVE:
            with needs(HNSW):
                raise ModuleNotFoundError(name="usearch")
        self._lock = threading.RLock()
        self._caches: dict[str, _TenantCache] = {}
        self._db: sqlite3.Connection | None = None
        self._file, self._fingerprint, self._dim = file_identity(self.path), "", 0

    def open(self, fingerprint: str, dim: int) -> None:
        self._connect()
        with self._transaction(write=True) as db:
            _create_or_verify(db, self.path)
            db.execute("INSERT OR IGNORE INTO meta VALUES ('fingerprint', ?)", (fingerprint,))
            self._fingerprint, self._dim = fingerprint, dim
            self._require_same_embedder(db)

    def add(self, documents: Sequence[Document], vectors: Vector, tenant: str = DEFAULT_TENANT) -> None:
        vectors = index_checks.require_valid(documents, vectors, self._dim)
        with self._transaction(write=True) as db:
            removed, count = self._delete(db, {d.source for d in documents}, tenant)
            for document, vector in zip(documents, vectors, strict=True):
                key = _insert(db, document, tenant)
                db.execute("INSERT INTO vector VALUES (?, ?)", (key, vector.tobytes()))
            moments = _load(db, tenant, self._dim)
            _store(db, tenant, index_checks.updated_moments(tenant, moments, removed, CorpusMoments.of(vectors)))
        if count:
            self._truncate_log(db)

    def remove(self, sources: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        with self._transaction(write=True) as db:
            removed, count = self._delete(db, sources, tenant)
            if count:
                _store(db, tenant, index_checks.updated_moments(tenant, _load(db, tenant, self._dim), removed))
        self._truncate_log(db)
        return count

    def search(self, vector: Vector, k: int, tenant: str = DEFAULT_TENANT) -> Retrieval:
        with self._transaction() as db:
            q, cache = index_checks.require_query(vector, self._dim), self._refreshed(db, tenant)
            keys, scores = cache.neighbors.search(q, k)
            hits = tuple(map(Hit, _fetch(db, keys.tolist()), scores.tolist()))
            return Retrieval(hits, cache.moments.similarity_stats(q))

    def moments(self, tenant: str = DEFAULT_TENANT) -> CorpusMoments:
        with self._transaction() as db:
            return _load(db, tenant, self._dim)

    def digests(self, tenant: str = DEFAULT_TENANT) -> dict[str, str]:
        with self._transaction() as db:
            return dict(db.execute("SELECT DISTINCT source, digest FROM document WHERE tenant = ?", (tenant,)))

    def tenants(self) -> list[str]:
        with self._transaction() as db:
            return [name for (name,) in db.execute("SELECT name FROM tenant WHERE n > 0 ORDER BY name")]

    def scan(self, tenant: str = DEFAULT_TENANT) -> Iterator[tuple[list[Document], Vector]]:

        def read(after: int, count: int) -> list[tuple[Any, ...]]:
            with self._transaction() as db:
                return db.execute(SCAN_QUERY, (tenant, after, 4 * self._dim, count)).fetchall()

        return index_checks.scan_pages(read, partial(_matrix, dim=self._dim))

    def metadata(self, tenant: str = DEFAULT_TENANT) -> list[tuple[str, dict[str, Any]]]:
        with self._transaction() as db:
            rows = db.execute("SELECT DISTINCT source, metadata FROM document WHERE tenant = ?", (tenant,)).fetchall()
        return index_checks.decode_metadata(rows)

    def warm(self, tenant: str = DEFAULT_TENANT) -> None:
        """See ``Index.warm``. Saves the graph of a large tenant beside the file, so that it is built once."""
        with self._lock:
            with self._transaction() as db:
                cache = self._refreshed(db, tenant)
            if isinstance(cache.neighbors, ApproximateSearch):
                self._save_graph(cache.neighbors, cache.last_key, tenant)

    def check(self) -> list[str]:
        with self._transaction() as db:
            faults = [
                f"the file is damaged: {row[0]}" for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"
            ]
            orphans = "SELECT count(*) FROM document LEFT JOIN vector USING (key) WHERE length(value) IS NOT ?"
            if count := db.execute(orphans, (4 * self._dim,)).fetchone()[0]:
                faults.append(f"{count} documents have no vector or an incomplete one: {index_checks.REBUILD}")
            load, vectors = partial(_load, db, dim=self._dim), partial(self._vectors, db)
            faults += index_checks.check_tenants(_tenants(db), load, vectors)
            faults += index_checks.check_documents(db.execute(f"SELECT {COLUMNS} FROM document ORDER BY key"))
        return faults

    def rebuild(self) -> None:
        with self._transaction(write=True) as db:
            for tenant in _tenants(db):
                _store(db, tenant, index_checks.compute_moments(self._vectors(db, tenant), self._dim))

    def clear(self) -> None:
        self._connect()
        self._fingerprint = ""
        with self._transaction(write=True) as db:
            _create_or_verify(db, self.path)
            db.execute("INSERT INTO removed (tenant, key) SELECT tenant, key FROM document")
            db.execute("UPDATE tenant SET revision = revision + 1, n = 0, mean = x'', scatter = x''")
            for table in ("document", "vector", "meta"):
                db.execute(f"DELETE FROM {table}")
        self._caches.clear()
        for graph in self.path.parent.glob(f"{glob.escape(self.path.name)}-graph-*"):
            graph.unlink(missing_ok=True)  # vectors reveal texts

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None
            self._caches.clear()

    def _connect(self) -> None:
        if self._db is None:
            self._db = _connect(self.path)
            self._file = file_identity(self.path)

    def _require_same_embedder(self, db: sqlite3.Connection) -> None:
        """Reads the file each time, because another process may have rebuilt it."""
        row = db.execute("SELECT value FROM meta WHERE name = 'fingerprint'").fetchone()
        if row != (self._fingerprint,):
            raise index_checks.embedder_mismatch(self.path, row[0] if row else None, self._fingerprint)

    @contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[sqlite3.Connection]:
        with self._lock, _translate_errors(self.path):
            if self._db is None:
                raise BackendError(f"the index {self.path} is not open", backend="sqlite", retryable=False)
            if self._file != file_identity(self.path):
                problem = f"the index {self.path} was deleted or replaced while it was open; restart this process"
                raise BackendError(problem, backend="sqlite", retryable=False)
            self._db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                if self._fingerprint:
                    self._require_same_embedder(self._db)
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # on a full disk SQLite may have rolled back already
                    self._db.execute("ROLLBACK")
                raise

    def _truncate_log(self, db: sqlite3.Connection) -> None:
        """Truncates the write-ahead log, which still contains removed texts, unless a reader uses it."""
        with self._lock, suppress(sqlite3.Error):
            for pragma in ("busy_timeout = 100", "wal_checkpoint(TRUNCATE)", "busy_timeout = 30000"):
                db.execute(f"PRAGMA {pragma}").fetchall()

    def _delete(self, db: sqlite3.Connection, sources: Collection[str], tenant: str) -> tuple[CorpusMoments, int]:
        """Deletes the documents of the sources. Returns the moments of their stored vectors, and their number."""
        query = "SELECT key, value FROM document LEFT JOIN vector USING (key) WHERE tenant = ? AND source = ?"
        rows = [row for source in set(sources) for row in db.execute(query, (tenant, source))]
        for key, _ in rows:
            db.execute("DELETE FROM document WHERE key = ?", (key,))
            db.execute("DELETE FROM vector WHERE key = ?", (key,))
            db.execute("INSERT INTO removed (tenant, key) VALUES (?, ?)", (tenant, key))
        complete = [blob for _, blob in rows if blob is not None and len(blob) == 4 * self._dim]
        return CorpusMoments.of(_matrix(complete, self._dim)), len(rows)

    def _refreshed(self, db: sqlite3.Connection, tenant: str) -> _TenantCache:
        """The tenant's cache, updated to the state of the file in this transaction."""
        revision, n = db.execute("SELECT revision, n FROM tenant WHERE name = ?", (tenant,)).fetchone() or (0, 0)
        if not n:
            self._caches.pop(tenant, None)
            return _TenantCache(ExactSearch(self._dim), CorpusMoments.empty(self._dim))
        cache = self._caches.get(tenant)
        if cache is None or cache.revision > revision or self._outgrown(cache, n):
            cache = self._caches[tenant] = self._new_cache(db, tenant, n)
        if cache.revision != revision:
            for keys, vectors in self._vectors(db, tenant, after=cache.last_key):
                cache.neighbors.add(keys, vectors)
                cache.last_key = int(keys[-1])
            query = "SELECT seq, key FROM removed WHERE tenant = ? AND seq > ? ORDER BY seq"
            if removed := db.execute(query, (tenant, cache.last_removed)).fetchall():
                cache.neighbors.remove(np.array([key for _, key in removed], np.int64))
                cache.last_removed = removed[-1][0]
            cache.moments, cache.revision = _load(db, tenant, self._dim), revision
        return cache

    def _outgrown(self, cache: _TenantCache, n: int) -> bool:
        """Whether the cache's kind of search no longer suits the tenant's size."""
        return cache.neighbors.mostly_removed or isinstance(cache.neighbors, ApproximateSearch) != self._is_approximate(
            n
        )

    def _is_approximate(self, n: int) -> bool:
        return self._approximates and n > self.approximate_above

    def _new_cache(self, db: sqlite3.Connection, tenant: str, n: int) -> _TenantCache:
        """An empty cache; for a large tenant with the saved graph, which only lacks later documents."""
        last_removed = db.execute("SELECT coalesce(max(seq), 0) FROM removed WHERE tenant = ?", (tenant,)).fetchone()[0]
        cache = _TenantCache(ExactSearch(self._dim), CorpusMoments.empty(self._dim), last_removed=last_removed)
        if n > self.approximate_above and not self._approximates:
            _log.warning("%d documents exceed approximate_above; pip install '%s' for approximate search", n, HNSW)
        if self._is_approximate(n):
            path, cache.neighbors = self._graph_path(tenant), ApproximateSearch(self._dim)
            record = db.execute("SELECT value FROM meta WHERE name = ?", (path.name,)).fetchone()
            if record and path.exists() and record[0].split()[1] == file_checksum(path):
                saved = ApproximateSearch.load(path, self._dim)
                keys = db.execute("SELECT key FROM document WHERE tenant = ?", (tenant,)).fetchall()
                saved.retain(np.array(keys, np.int64).ravel())
                if not saved.mostly_removed:
                    cache.neighbors, cache.last_key = saved, int(record[0].split()[0])
        return cache

    def _graph_path(self, tenant: str) -> Path:
        label = hashlib.sha256(f"{self._fingerprint}\n{tenant}".encode()).hexdigest()[:32]
        return self.path.with_name(f"{self.path.name}-graph-{label}")

    def _save_graph(self, graph: ApproximateSearch, last_key: int, tenant: str) -> None:
        """Saves the graph, and its state and checksum in the index: a file that does not match is not loaded."""
        path = self._graph_path(tenant)
        with self._transaction() as db:
            record = db.execute("SELECT value FROM meta WHERE name = ?", (path.name,)).fetchone()
        if record and path.exists() and record[0] == f"{last_key} {file_checksum(path)}":
            return
        try:
            graph.save(path)
            value = f"{last_key} {file_checksum(path)}"
        except (OSError, RuntimeError) as error:
            raise BackendError(f"cannot save the graph {path}: {error}", backend="sqlite", retryable=True) from error
        with self._transaction(write=True) as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (path.name, value))

    def _vectors(self, db: sqlite3.Connection, tenant: str, after: int = 0) -> Iterator[tuple[Keys, Vector]]:
        """Keys and stored vectors of a tenant in order of age, in pages."""
        cursor = db.execute(
            "SELECT d.key, v.value FROM document d JOIN vector v USING (key) "
            "WHERE d.tenant = ? AND d.key > ? AND length(v.value) = ? ORDER BY d.key",
            (tenant, after, 4 * self._dim),
        )
        while rows := cursor.fetchmany(BLOCK // 16):
            yield np.array([key for key, _ in rows], np.int64), _matrix([blob for _, blob in rows], self._dim)


def _connect(path: Path) -> sqlite3.Connection:
    with _translate_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not path.exists():
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise BackendError(f"cannot create the index {path}: {error}", backend="sqlite", retryable=False) from error
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            if fresh := db.execute("PRAGMA page_count").fetchone()[0] == 0:
                db.execute("PRAGMA page_size = 8192")  # five vectors of 384 dimensions to a page
            if fresh or db.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID:
                enable_wal(db)  # not in a file of another program: this would change it
            db.execute("PRAGMA synchronous = FULL")  # commits survive a power failure
            db.execute("PRAGMA secure_delete = ON")  # removed texts leave no bytes in the file
            return db
        except BaseException:
            db.close()
            raise


def _create_or_verify(db: sqlite3.Connection, path: Path) -> None:
    """Creates the tables in an empty file. Refuses files of other programs and formats."""
    found = db.execute("PRAGMA application_id").fetchone()[0]
    if not found and not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        for statement in SCHEMA.split(";\n"):
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {FORMAT}")
    elif found != APPLICATION_ID:
        raise DataError(f"{path} is an SQLite file of another program; choose another path for the index")
    elif (version := db.execute("PRAGMA user_version").fetchone()[0]) != FORMAT:
        raise DataError(
            f"{path} has index format {version}; this version reads {FORMAT}: run 'casemate index --rebuild'"
        )
    elif "checksum" not in {row[1] for row in db.execute("PRAGMA table_info(document)")}:  # of an earlier version
        db.execute("ALTER TABLE document ADD COLUMN checksum TEXT NOT NULL DEFAULT ''")


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        problem = str(error)
        if "full" in problem or "disk I/O" in problem:
            problem = f"the disk is full or fails ({problem}): this step was rolled back; free space and run again"
        elif "locked" in problem:
            problem = "another process writes to it for too long; try again"
        raise BackendError(f"index {path}: {problem}", backend="sqlite", retryable=True) from error
    except sqlite3.DatabaseError as error:
        raise DataError(
            f"{path} is damaged or not an index ({error}): restore it, or delete it and index again"
        ) from error


def _insert(db: sqlite3.Connection, d: Document, tenant: str) -> int:
    insert = f"INSERT INTO document (tenant, {COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    try:
        return db.execute(insert, (tenant, *index_checks.document_columns(d))).lastrowid or 0
    except sqlite3.IntegrityError as error:
        raise index_checks.duplicate_id(d.id) from error


def _fetch(db: sqlite3.Connection, keys: Sequence[int]) -> Iterator[Document]:
    """Documents in the order of their keys, in one statement."""
    query = f"SELECT {COLUMNS} FROM (SELECT key AS i, value AS wanted FROM json_each(?)) JOIN document ON key = wanted"
    return map(index_checks.decode_document, db.execute(f"{query} ORDER BY i", (json.dumps(keys),)))


def _tenants(db: sqlite3.Connection) -> list[str]:
    return [name for (name,) in db.execute("SELECT name FROM tenant UNION SELECT tenant FROM document ORDER BY 1")]


def _load(db: sqlite3.Connection, tenant: str, dim: int) -> CorpusMoments:
    row = db.execute("SELECT n, mean, scatter FROM tenant WHERE name = ?", (tenant,)).fetchone()
    return index_checks.decode_moments(tenant, row, dim)


def _store(db: sqlite3.Connection, tenant: str, m: CorpusMoments) -> None:
    db.execute(
        "INSERT INTO tenant VALUES (?, 1, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
        "revision = revision + 1, n = excluded.n, mean = excluded.mean, scatter = excluded.scatter",
        (tenant, m.n, m.mean.tobytes(), m.scatter.tobytes()),
    )


def _matrix(blobs: Sequence[bytes], dim: int) -> Vector:
    return np.frombuffer(b"".join(blobs), np.float32).reshape(-1, dim)
