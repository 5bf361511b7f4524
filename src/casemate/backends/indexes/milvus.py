"""The Milvus index: exact by default, or approximate by HNSW or IVF; for corpora too large for one machine.

Milvus has no transactions over several rows and no conditional update. But of concurrent renames of one collection,
one succeeds. So the commit record of ``MvccIndex`` is the name of an empty collection.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from casemate.backends.clients.milvus import MilvusServer
from casemate.backends.mvcc.index import MvccIndex
from casemate.backends.mvcc.versioned_store import KEY_LIMIT, CommitRecord, IndexDescriptor, RowFilter, StoredRow
from casemate.errors import BackendError, ConfigError, DataError, require_range
from casemate.types import Secret, Vector

if TYPE_CHECKING:
    from pymilvus import MilvusClient

FORMAT = "casemate 1"
NO_HOLDER = "free"  # in place of an empty lease holder in a commit record's name
MAX_HITS = 16_384  # largest number of rows that Milvus returns at once
REQUEST_BYTES = 16 << 20  # size of one insert; Milvus accepts 64 MB
MAX_VARCHAR = 65_535
COLUMNS = {"tenant": 32, "source": 32, "id": 32, "label": MAX_VARCHAR, "body": MAX_VARCHAR}
"""Text columns and their sizes in bytes. Filters use the three hashes only."""
POLL_S = 0.05


@dataclass(eq=False)
class MilvusIndex(MvccIndex):
    """Three collections on a Milvus server, standalone or distributed. Hits are scored again in float64.

    Guarantees: one rename commits rows and moments together, even if a writer is killed at any point. Of two writers
    one waits. A reader sees the state before or after a change, and every change committed before the read (strong
    consistency; the wait for it happens once per change, not per query). Assumption: a writer that is suspended for
    longer than three times ``timeout_s`` between two calls loses its lease.

    Of more than 16,384 documents at the same distance, an arbitrary subset is found instead of the oldest. A search for
    more hits, as for a key that may read few documents, reads all vectors of the tenant in pages.

    Deviation: a ``kind`` other than ``FLAT`` may miss the nearest documents, and with them a detection.

    The bytes of a removed document stay in the server's files until compaction.

    Attributes:
        url: ``http://host:19530``, with ``https`` for TLS.
        token: ``user:password`` or an API key, if the server requires one.
        database: Name of an existing database. Empty: the default database.
        collection: Name of the index, and prefix of the names of its collections.
        kind: ``FLAT`` compares with every vector, ``HNSW`` searches a graph, ``IVF_FLAT`` searches some of many lists.
            Fixed when the index is created.
        m: HNSW: links per vector. Fixed when the index is created.
        ef_construct: HNSW: candidates while the graph is built. Fixed when the index is created.
        ef: HNSW: candidates during a search.
        nlist: IVF_FLAT: number of lists. Fixed when the index is created.
        nprobe: IVF_FLAT: lists per search.
        overfetch: Factor of documents to fetch above k, for scoring in float64.
        timeout_s: Limit of one call.
    """

    url: Secret
    token: Secret = Secret("")
    database: str = ""
    collection: str = "casemate"
    kind: Literal["FLAT", "HNSW", "IVF_FLAT"] = "FLAT"
    m: int = 16
    ef_construct: int = 200
    ef: int = 256
    nlist: int = 1024
    nprobe: int = 512
    overfetch: float = 2.0
    timeout_s: float = 10

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]{0,99}", self.collection):
            raise ConfigError(
                f"milvus.collection is {self.collection!r}; allowed: letters, digits and _, not beginning with a digit"
            )
        require_range("milvus", self, "m ef_construct ef nlist nprobe overfetch", at_least=1)
        require_range("milvus", self, "timeout_s", above=0)
        if self.kind not in ("FLAT", "HNSW", "IVF_FLAT"):
            raise ConfigError(f"milvus.kind is {self.kind!r}; allowed: FLAT, HNSW, IVF_FLAT")
        self.url, self.token = Secret(self.url), Secret(self.token)
        self._use_store(_MilvusStore(self), self.timeout_s)


class _MilvusStore:
    """See ``mvcc.versioned_store.VersionedStore``."""

    backend, max_hits = "milvus", MAX_HITS

    def __init__(self, options: MilvusIndex) -> None:
        self._options, o = options, options
        if_absent = "a collection was deleted, renamed or released; restore it, or index again"
        self.where = f"{o.url.rstrip('/')}, collection {o.collection}"
        self._server = MilvusServer("milvus", self.where, o.url, o.token, o.database, o.timeout_s, if_absent)
        self._call = self._server.call
        self.exact, self.overfetch = options.kind == "FLAT", 1.0 if options.kind == "FLAT" else options.overfetch
        self._generation = ""

    def connect(self) -> None:
        self._server.connect()

    def close(self) -> None:
        self._server.close()

    def descriptor(self) -> IndexDescriptor | None:
        with self._call() as (db, timeout):
            if not db.has_collection(self._options.collection, **timeout):
                return None
            description = db.describe_collection(self._options.collection, **timeout)["description"]
        try:
            fields = json.loads(description)
            version, descriptor = fields.pop("format"), IndexDescriptor(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{self.where} belongs to another program; choose another name") from error
        if version != FORMAT:
            raise DataError(f"{self.where} has index format {version!r}; this version reads {FORMAT!r}")
        return descriptor

    def create(self, descriptor: IndexDescriptor, record: CommitRecord) -> None:
        name, committed = self._options.collection, self._record_name(descriptor.generation, record)
        documents = f"{name}_{descriptor.generation}"
        with self._call() as (db, timeout):
            self._create_documents(db, documents, descriptor.dim)
            db.create_collection(committed, schema=_empty_schema(db, ""), **timeout)
        try:  # Milvus refuses an existing name with another description: of concurrent calls, the first one wins
            with self._call() as (db, timeout):
                description = json.dumps({"format": FORMAT, **descriptor._asdict()})
                db.create_collection(name, schema=_empty_schema(db, description), **timeout)
        except (BackendError, DataError):
            if self.descriptor() is None:
                raise
        if self.descriptor() != descriptor:
            with self._call() as (db, timeout):
                for unused in (committed, documents):
                    db.drop_collection(unused, **timeout)

    def drop(self) -> None:
        self.descriptor()  # refuses a collection of another program
        ours = re.compile(re.escape(self._options.collection) + "(_[0-9a-f]{8}(_at_.*)?)?")
        with self._call() as (db, timeout):
            for name in sorted(filter(ours.fullmatch, db.list_collections(**timeout))):  # the descriptor first
                db.drop_collection(name, **timeout)

    def use(self, descriptor: IndexDescriptor) -> None:
        self._generation = descriptor.generation

    def commit_record(self) -> CommitRecord | None:
        begin = self._record_name(self._generation, None)
        with self._call() as (db, timeout):
            found = [name for name in db.list_collections(**timeout) if name.startswith(begin)]
        if not found:
            return None
        committed, sequence, holder, lease = found[0].removeprefix(begin).split("_")
        return CommitRecord(int(committed), int(sequence), "" if holder == NO_HOLDER else holder, int(lease))

    def compare_and_swap(self, old: CommitRecord, new: CommitRecord) -> None:
        names = (self._record_name(self._generation, record) for record in (old, new))
        with self._call() as (db, timeout):
            db.rename_collection(*names, **timeout)

    def read_timestamp(self) -> int:
        """A server timestamp later than all completed writes. A read with it waits until it sees them."""
        with self._call() as (db, timeout):
            return int(db._get_connection().alloc_timestamp(**timeout))

    def insert(self, rows: Sequence[StoredRow]) -> None:
        entries = [{**row._asdict(), "vector": row.vector} for row in rows]
        with self._call() as (db, timeout):
            for part in _batches(entries):
                db.insert(self._documents, part, **timeout)

    def delete(self, keys: Sequence[int]) -> None:
        with self._call() as (db, timeout):
            db.delete(self._documents, ids=list(keys), **timeout)

    def select(self, rows: RowFilter, limit: int, timestamp: Any, columns: Collection[str]) -> list[StoredRow]:
        with self._call() as (db, timeout):
            found = db.query(
                self._documents,
                _expression(rows),
                output_fields=["key", *columns],
                limit=limit,
                reduce_stop_for_best=True,  # the first rows by key over all segments, as in Milvus's own iterator
                **_consistency(timestamp),
                **timeout,
            )
        return sorted((_row(entry["key"], entry) for entry in found), key=lambda row: row.key)

    def nearest(self, rows: RowFilter, q: Vector, limit: int, timestamp: Any) -> list[StoredRow]:
        o = self._options
        parameters = {"HNSW": {"ef": max(o.ef, limit)}, "IVF_FLAT": {"nprobe": min(o.nprobe, o.nlist)}}
        with self._call() as (db, timeout):
            found = db.search(
                self._documents,
                [q],
                filter=_expression(rows),
                limit=limit,
                output_fields=["label", "body", "vector"],
                search_params={"metric_type": "IP", "params": parameters.get(o.kind, {})},
                **_consistency(timestamp),
                **timeout,
            )
        return [_row(hit["id"], hit["entity"]) for hit in found[0]]

    @property
    def _documents(self) -> str:
        return f"{self._options.collection}_{self._generation}"

    def _record_name(self, generation: str, record: CommitRecord | None) -> str:
        """Name of the collection that is the commit record. None: its prefix."""
        prefix = f"{self._options.collection}_{generation}_at_"
        if record is None:
            return prefix
        return f"{prefix}{record.committed}_{record.sequence}_{record.holder or NO_HOLDER}_{record.lease_ms}"

    def _create_documents(self, db: MilvusClient, name: str, dim: int) -> None:
        """Creates the collection of documents and waits until it is loaded."""
        from pymilvus import DataType
        from pymilvus.client.types import LoadState

        o, limit = self._options, {"timeout": self._options.timeout_s}
        schema = db.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("key", DataType.INT64, is_primary=True)
        for column, size in COLUMNS.items():
            schema.add_field(column, DataType.VARCHAR, max_length=size)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
        parameters = {"HNSW": {"M": o.m, "efConstruction": o.ef_construct}, "IVF_FLAT": {"nlist": o.nlist}}
        indexes = db.prepare_index_params()
        indexes.add_index("vector", index_type=o.kind, metric_type="IP", params=parameters.get(o.kind, {}))
        for column in ("tenant", "source", "id"):
            indexes.add_index(column)
        db.create_collection(name, schema=schema, consistency_level="Strong", **limit)
        db.create_index(name, indexes, sync=False, **limit)
        db.load_collection(name, _async=True, **limit)
        begin = time.monotonic()
        while db.get_load_state(name, **limit)["state"] != LoadState.Loaded:
            if time.monotonic() - begin > 6 * o.timeout_s:
                raise self._server.error(
                    "loading a new collection takes too long; check the query nodes", retryable=True
                )
            time.sleep(POLL_S)


def _consistency(timestamp: int) -> dict[str, Any]:
    """Read options: wait for all writes up to a timestamp. 0: the server gave none, so use strong consistency."""
    if not timestamp:
        return {"consistency_level": "Strong"}
    return {"consistency_level": "Customized", "guarantee_timestamp": timestamp}


def _empty_schema(db: MilvusClient, description: str) -> Any:
    """Schema of a collection that stores only its name and a description."""
    from pymilvus import DataType

    schema = db.create_schema(auto_id=False, enable_dynamic_field=False, description=description)
    schema.add_field("key", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=2)
    return schema


def _batches(entries: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    size = 0
    for entry in entries:
        if batch and size > REQUEST_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += 4 * len(entry["body"]) + entry["vector"].nbytes + 500
    if batch:
        yield batch


def _expression(rows: RowFilter) -> str:
    """The filter as a Milvus expression, made of numbers and hashes only."""
    if rows.keys is not None:
        return f"key in {list(rows.keys)}"
    parts = [f"key > {rows.above}"]
    if rows.below < KEY_LIMIT:
        parts.append(f"key < {rows.below}")
    if rows.tenant:
        parts.append(f'tenant == "{rows.tenant}"')
    for column, values in (("source", rows.sources), ("id", rows.ids)):
        if values is not None:
            parts.append(f"{column} in {json.dumps(list(values))}")
    single = [first for first, last in rows.without if first == last]
    parts += [f"not (key >= {first} and key <= {last})" for first, last in rows.without if first < last]
    if single:
        parts.append(f"key not in {single}")
    return " and ".join(parts)


def _row(key: int, entry: Any) -> StoredRow:
    tenant, source, identity, label, body = (entry.get(column, "") for column in COLUMNS)
    return StoredRow(key, tenant, source, identity, label, body, np.array(entry.get("vector", ()), np.float32))
