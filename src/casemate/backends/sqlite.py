"""The embedded index: documents, vectors and moments in one SQLite file, searched in memory.

The file is the truth. Memory is a copy that follows the file's revision before every search, so a change by any process
is seen by the next question, and a killed process loses only what was never committed.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from casemate import indexing
from casemate.errors import BackendError, DataError
from casemate.indexing import COLUMNS
from casemate.neighbors import BLOCK, Approximate, Exact, Keys, checksum
from casemate.protocols import Index
from casemate.sqlite_wal import BUSY_S, write_ahead
from casemate.stats import CorpusMoments
from casemate.types import DEFAULT_TENANT, Document, Hit, Retrieval, Vector

APPLICATION_ID = 0x43534D54  # "CSMT" in the file's header: what `file` and we recognise it by
FORMAT = 1
SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE tenant (
    name TEXT PRIMARY KEY, revision INTEGER NOT NULL, n INTEGER NOT NULL, mean BLOB NOT NULL, scatter BLOB NOT NULL
);
CREATE TABLE document (
    key INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL, source TEXT NOT NULL,
    digest TEXT NOT NULL, title TEXT NOT NULL, text TEXT NOT NULL, metadata TEXT NOT NULL, UNIQUE (tenant, id)
);
CREATE INDEX document_source ON document (tenant, source, digest);
CREATE INDEX document_tenant ON document (tenant);
CREATE TABLE vector (key INTEGER PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE removed (seq INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, key INTEGER NOT NULL);
"""
SCAN = f"""SELECT key, value, {COLUMNS} FROM document JOIN vector USING (key)
WHERE tenant = ? AND key > ? AND length(value) = ? ORDER BY key LIMIT ?"""


@dataclass(slots=True)
class _View:
    """What memory holds of one tenant, and up to which change of the file."""

    neighbors: Exact | Approximate
    moments: CorpusMoments
    revision: int = 0
    last_key: int = 0
    last_removed: int = 0


@dataclass(eq=False)
class SqliteIndex(Index):
    """One file; exact cosine by BLAS, an HNSW graph beside the file for large tenants.

    Attributes:
        path: The file. Its folder is made when missing; both are readable by their owner only.
        approximate_above: Documents of one tenant above which the search is approximate. The detection needs the true
            nearest document, and a graph misses some, so search is exact for as long as a question can wait.
    """

    path: Path = Path(".casemate/index.db")
    approximate_above: int = 1_000_000

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._views: dict[str, _View] = {}
        self._db: sqlite3.Connection | None = None
        self._file, self._fingerprint, self._dim = _identity(self.path), "", 0

    def open(self, fingerprint: str, dim: int) -> None:
        """See ``Index.open``."""
        self._connect()
        with self._transaction(write=True) as db:
            _create_or_verify(db, self.path)
            db.execute("INSERT OR IGNORE INTO meta VALUES ('fingerprint', ?)", (fingerprint,))
            self._fingerprint, self._dim = fingerprint, dim
            self._require_same_embedder(db)

    def add(self, documents: Sequence[Document], vectors: Vector, tenant: str = DEFAULT_TENANT) -> None:
        """See ``Index.add``."""
        vectors = indexing.require_fit(documents, vectors, self._dim)
        with self._transaction(write=True) as db:
            gone, count = self._take_out(db, {d.source for d in documents}, tenant)
            for document, vector in zip(documents, vectors, strict=True):
                key = _insert(db, document, tenant)
                db.execute("INSERT INTO vector VALUES (?, ?)", (key, vector.tobytes()))
            held = _load(db, tenant, self._dim)
            _store(db, tenant, indexing.changed(tenant, held, gone, CorpusMoments.of(vectors)))
        if count:
            self._forget(db)

    def remove(self, sources: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        """See ``Index.remove``."""
        with self._transaction(write=True) as db:
            gone, count = self._take_out(db, sources, tenant)
            if count:
                _store(db, tenant, indexing.changed(tenant, _load(db, tenant, self._dim), gone))
        self._forget(db)
        return count

    def search(self, vector: Vector, k: int, tenant: str = DEFAULT_TENANT) -> Retrieval:
        """See ``Index.search``."""
        with self._transaction() as db:
            q, view = indexing.require_query(vector, self._dim), self._follow(db, tenant)
            keys, scores = view.neighbors.search(q, k)
            hits = tuple(map(Hit, _fetch(db, keys.tolist()), scores.tolist()))
            return Retrieval(hits, view.moments.background(q))

    def moments(self, tenant: str = DEFAULT_TENANT) -> CorpusMoments:
        """See ``Index.moments``."""
        with self._transaction() as db:
            return _load(db, tenant, self._dim)

    def digests(self, tenant: str = DEFAULT_TENANT) -> dict[str, str]:
        """See ``Index.digests``."""
        with self._transaction() as db:
            return dict(db.execute("SELECT DISTINCT source, digest FROM document WHERE tenant = ?", (tenant,)))

    def tenants(self) -> list[str]:
        """See ``Index.tenants``."""
        with self._transaction() as db:
            return [name for (name,) in db.execute("SELECT name FROM tenant WHERE n > 0 ORDER BY name")]

    def scan(self, tenant: str = DEFAULT_TENANT) -> Iterator[tuple[list[Document], Vector]]:
        """See ``Index.scan``."""

        def read(after: int, count: int) -> list[tuple[Any, ...]]:
            with self._transaction() as db:
                return db.execute(SCAN, (tenant, after, 4 * self._dim, count)).fetchall()

        return indexing.scanned(read, partial(_matrix, dim=self._dim))

    def warm(self, tenant: str = DEFAULT_TENANT) -> None:
        """See ``Index.warm``. Writes the graph of a large tenant beside the file, so that it is built once."""
        with self._lock:
            with self._transaction() as db:
                view = self._follow(db, tenant)
            if isinstance(view.neighbors, Approximate):
                self._save_graph(view.neighbors, view.last_key, tenant)

    def check(self) -> list[str]:
        """See ``Index.check``."""
        with self._transaction() as db:
            found = [f"the file is damaged: {row[0]}" for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
            orphans = "SELECT count(*) FROM document LEFT JOIN vector USING (key) WHERE length(value) IS NOT ?"
            if count := db.execute(orphans, (4 * self._dim,)).fetchone()[0]:
                found.append(f"{count} documents have no vector, or half of one: 'casemate index --rebuild'")
            load, vectors = partial(_load, db, dim=self._dim), partial(self._vectors, db)
            found += indexing.compare_all(_tenants(db), load, vectors)
        return found

    def rebuild(self) -> None:
        """See ``Index.rebuild``."""
        with self._transaction(write=True) as db:
            for tenant in _tenants(db):
                _store(db, tenant, indexing.moments_from(self._vectors(db, tenant), self._dim))

    def clear(self) -> None:
        """See ``Index.clear``."""
        self._connect()
        self._fingerprint = ""
        with self._transaction(write=True) as db:
            _create_or_verify(db, self.path)
            db.execute("INSERT INTO removed (tenant, key) SELECT tenant, key FROM document")
            db.execute("UPDATE tenant SET revision = revision + 1, n = 0, mean = x'', scatter = x''")
            for table in ("document", "vector", "meta"):
                db.execute(f"DELETE FROM {table}")
        self._views.clear()
        for graph in self.path.parent.glob(f"{glob.escape(self.path.name)}-graph-*"):
            graph.unlink(missing_ok=True)  # vectors tell about texts

    def close(self) -> None:
        """See ``Index.close``."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None
            self._views.clear()

    def _connect(self) -> None:
        if self._db is None:
            self._db = _connect(self.path)
            self._file = _identity(self.path)

    def _require_same_embedder(self, db: sqlite3.Connection) -> None:
        """Compares with the file each time, because another process may have built it anew."""
        held = db.execute("SELECT value FROM meta WHERE name = 'fingerprint'").fetchone()
        if held != (self._fingerprint,):
            raise indexing.another_embedder(self.path, held[0] if held else None, self._fingerprint)

    @contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[sqlite3.Connection]:
        """One consistent state of the file; a write is kept whole or not at all."""
        with self._lock, _explained(self.path):
            if self._db is None:
                raise BackendError(f"the index {self.path} is not open", backend="sqlite", retryable=False)
            if self._file != _identity(self.path):
                what = f"the index {self.path} was deleted or replaced while it was open; open it anew"
                raise BackendError(what, backend="sqlite", retryable=False)
            self._db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                if self._fingerprint:
                    self._require_same_embedder(self._db)
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # after a full disk SQLite may have rolled back by itself
                    self._db.execute("ROLLBACK")
                raise

    def _forget(self, db: sqlite3.Connection) -> None:
        """Empties the write-ahead log, in which removed texts would stay, unless somebody is reading it."""
        with self._lock, suppress(sqlite3.Error):
            for pragma in ("busy_timeout = 100", "wal_checkpoint(TRUNCATE)", "busy_timeout = 30000"):
                db.execute(f"PRAGMA {pragma}").fetchall()

    def _take_out(self, db: sqlite3.Connection, sources: Collection[str], tenant: str) -> tuple[CorpusMoments, int]:
        """Deletes the documents of the sources; their moments are those of the stored vectors, bit by bit."""
        query = "SELECT key, value FROM document LEFT JOIN vector USING (key) WHERE tenant = ? AND source = ?"
        rows = [row for source in set(sources) for row in db.execute(query, (tenant, source))]
        for key, _ in rows:
            db.execute("DELETE FROM document WHERE key = ?", (key,))
            db.execute("DELETE FROM vector WHERE key = ?", (key,))
            db.execute("INSERT INTO removed (tenant, key) VALUES (?, ?)", (tenant, key))
        whole = [blob for _, blob in rows if blob is not None and len(blob) == 4 * self._dim]
        return CorpusMoments.of(_matrix(whole, self._dim)), len(rows)

    def _follow(self, db: sqlite3.Connection, tenant: str) -> _View:
        """The tenant's view, brought up to the state of the file that this transaction sees."""
        revision, n = db.execute("SELECT revision, n FROM tenant WHERE name = ?", (tenant,)).fetchone() or (0, 0)
        if not n:
            self._views.pop(tenant, None)
            return _View(Exact(self._dim), CorpusMoments.empty(self._dim))
        view = self._views.get(tenant)
        if view is None or view.revision > revision or self._unsuitable(view, n):
            view = self._views[tenant] = self._new_view(db, tenant, n)
        if view.revision != revision:
            for keys, vectors in self._vectors(db, tenant, after=view.last_key):
                view.neighbors.add(keys, vectors)
                view.last_key = int(keys[-1])
            query = "SELECT seq, key FROM removed WHERE tenant = ? AND seq > ? ORDER BY seq"
            if gone := db.execute(query, (tenant, view.last_removed)).fetchall():
                view.neighbors.remove(np.array([key for _, key in gone], np.int64))
                view.last_removed = gone[-1][0]
            view.moments, view.revision = _load(db, tenant, self._dim), revision
        return view

    def _unsuitable(self, view: _View, n: int) -> bool:
        """Whether the tenant has outgrown the kind of search that the view was made for."""
        return view.neighbors.sparse or isinstance(view.neighbors, Exact) != (n <= self.approximate_above)

    def _new_view(self, db: sqlite3.Connection, tenant: str, n: int) -> _View:
        """An empty view; for a large tenant with the saved graph, to which only later documents are to be added."""
        last_removed = db.execute("SELECT coalesce(max(seq), 0) FROM removed WHERE tenant = ?", (tenant,)).fetchone()[0]
        view = _View(Exact(self._dim), CorpusMoments.empty(self._dim), last_removed=last_removed)
        if n > self.approximate_above:
            path, view.neighbors = self._graph_path(tenant), Approximate(self._dim)
            noted = db.execute("SELECT value FROM meta WHERE name = ?", (path.name,)).fetchone()
            if noted and path.exists() and noted[0].split()[1] == checksum(path):
                saved = Approximate.load(path, self._dim)
                keys = db.execute("SELECT key FROM document WHERE tenant = ?", (tenant,)).fetchall()
                saved.keep(np.array(keys, np.int64).ravel())
                if not saved.sparse:
                    view.neighbors, view.last_key = saved, int(noted[0].split()[0])
        return view

    def _graph_path(self, tenant: str) -> Path:
        label = hashlib.sha256(f"{self._fingerprint}\n{tenant}".encode()).hexdigest()[:32]
        return self.path.with_name(f"{self.path.name}-graph-{label}")

    def _save_graph(self, graph: Approximate, last_key: int, tenant: str) -> None:
        """Writes the graph and notes its state and checksum in the index: a file that does not agree is not read."""
        path = self._graph_path(tenant)
        with self._transaction() as db:
            noted = db.execute("SELECT value FROM meta WHERE name = ?", (path.name,)).fetchone()
        if noted and path.exists() and noted[0] == f"{last_key} {checksum(path)}":
            return
        try:
            graph.save(path)
            value = f"{last_key} {checksum(path)}"
        except (OSError, RuntimeError) as error:
            raise BackendError(f"cannot save the graph {path}: {error}", backend="sqlite", retryable=True) from error
        with self._transaction(write=True) as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (path.name, value))

    def _vectors(self, db: sqlite3.Connection, tenant: str, after: int = 0) -> Iterator[tuple[Keys, Vector]]:
        """Keys and stored vectors of a tenant in order of age, in pieces of constant memory."""
        cursor = db.execute(
            "SELECT d.key, v.value FROM document d JOIN vector v USING (key) "
            "WHERE d.tenant = ? AND d.key > ? AND length(v.value) = ? ORDER BY d.key",
            (tenant, after, 4 * self._dim),
        )
        while rows := cursor.fetchmany(BLOCK // 16):
            yield np.array([key for key, _ in rows], np.int64), _matrix([blob for _, blob in rows], self._dim)


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file it is, whatever its name."""
    return (path.stat().st_dev, path.stat().st_ino) if path.exists() else None


def _connect(path: Path) -> sqlite3.Connection:
    with _explained(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not path.exists():
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise BackendError(f"cannot make the index {path}: {error}", backend="sqlite", retryable=False) from error
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            if fresh := db.execute("PRAGMA page_count").fetchone()[0] == 0:
                db.execute("PRAGMA page_size = 8192")  # five vectors of 384 dimensions to a page
            if fresh or db.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID:
                write_ahead(db)  # not in a file of another program, which this would change
            db.execute("PRAGMA synchronous = FULL")  # what was acknowledged survives a power cut
            db.execute("PRAGMA secure_delete = ON")  # a removed record leaves no bytes behind
            return db
        except BaseException:
            db.close()
            raise


def _create_or_verify(db: sqlite3.Connection, path: Path) -> None:
    """Makes the tables in an empty file; refuses a file of another program or of a later format."""
    found = db.execute("PRAGMA application_id").fetchone()[0]
    if not found and not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        for statement in SCHEMA.split(";\n"):
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {FORMAT}")
    elif found != APPLICATION_ID:
        raise DataError(f"{path} is an SQLite file of another program; choose another path for the index")
    elif (version := db.execute("PRAGMA user_version").fetchone()[0]) != FORMAT:
        raise DataError(f"{path} has index format {version}, this version reads {FORMAT}; build the index anew")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Says in the operator's words what SQLite complains about."""
    try:
        yield
    except sqlite3.OperationalError as error:
        say = str(error)
        if "full" in say or "disk I/O" in say:
            say = f"no room on the disk, or it fails ({say}): nothing of this step was kept, all before is; run again"
        elif "locked" in say:
            say = "another process is writing to it for too long; try again"
        raise BackendError(f"index {path}: {say}", backend="sqlite", retryable=True) from error
    except sqlite3.DatabaseError as error:
        raise DataError(f"{path} is damaged or no index ({error}): restore it, or delete it and index again") from error


def _insert(db: sqlite3.Connection, d: Document, tenant: str) -> int:
    insert = f"INSERT INTO document (tenant, {COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)"
    try:
        return db.execute(insert, (tenant, *indexing.columns(d))).lastrowid or 0
    except sqlite3.IntegrityError as error:
        raise indexing.given_twice(d.id) from error


def _fetch(db: sqlite3.Connection, keys: Sequence[int]) -> Iterator[Document]:
    """Documents in the order of their keys: one statement, for there may be dozens on every request's path."""
    query = f"SELECT {COLUMNS} FROM (SELECT key AS i, value AS wanted FROM json_each(?)) JOIN document ON key = wanted"
    return map(indexing.document_of, db.execute(f"{query} ORDER BY i", (json.dumps(keys),)))


def _tenants(db: sqlite3.Connection) -> list[str]:
    """All tenants that have documents, or moments as if they had."""
    return [name for (name,) in db.execute("SELECT name FROM tenant UNION SELECT tenant FROM document ORDER BY 1")]


def _load(db: sqlite3.Connection, tenant: str, dim: int) -> CorpusMoments:
    row = db.execute("SELECT n, mean, scatter FROM tenant WHERE name = ?", (tenant,)).fetchone()
    return indexing.moments_of(tenant, row, dim)


def _store(db: sqlite3.Connection, tenant: str, m: CorpusMoments) -> None:
    db.execute(
        "INSERT INTO tenant VALUES (?, 1, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
        "revision = revision + 1, n = excluded.n, mean = excluded.mean, scatter = excluded.scatter",
        (tenant, m.n, m.mean.tobytes(), m.scatter.tobytes()),
    )


def _matrix(blobs: Sequence[bytes], dim: int) -> Vector:
    return np.frombuffer(b"".join(blobs), np.float32).reshape(-1, dim)
