"""The index in Milvus: exact by default, or approximate by one of its indexes, for corpora past one machine.

Milvus has no transactions over several rows and cannot change a row on a condition. But of several who rename the same
collection at once, one succeeds; so an empty collection whose name is the mark is all that an index by journal needs
(``casemate.journal``).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from casemate.errors import BackendError, ConfigError, DataError
from casemate.journal import JournaledIndex
from casemate.journal.store import EVERY, Anchor, Mark, Row, Which
from casemate.milvus import Server
from casemate.types import Secret, Vector

if TYPE_CHECKING:
    from pymilvus import MilvusClient

FORMAT = "casemate 1"
REACH = 16_384
"""Most rows that Milvus gives for one question."""
BYTES = 16 << 20
"""Of one request; Milvus takes 64 MB."""
TEXT = 65_535
COLUMNS = {"tenant": 32, "source": 32, "id": 32, "label": TEXT, "body": TEXT}
"""Columns of text, and the bytes that each may have. None is in a condition but the three hashes."""
POLL_S = 0.05


@dataclass(eq=False)
class MilvusIndex(JournaledIndex):
    """Three collections of a Milvus server, standalone or distributed; scored again here in float64.

    Guaranteed: rows and moments change together, in one renaming, also when a writer is killed at any point; of two
    writers one waits; a reader sees the state before or after, and all that was written before it (Milvus's strong
    consistency, waited for once after a change and not with each question). Assumed: a writer that is halted for longer
    than three times ``timeout_s`` between two calls is given up.

    Of more than 16,384 documents that are equally near, some are found, not the oldest.

    Deviation: with another ``kind`` than ``FLAT`` the nearest documents may be missed, and with them a detection.

    The bytes of a removed record stay in the server's files until it compacts them.

    Attributes:
        url: ``http://host:19530``, with ``https`` for TLS.
        token: ``user:password`` or an API key, where the server asks for it.
        database: Name of a database that exists; empty: the default one.
        collection: Collections are called so, and so with a suffix. One name holds one index.
        kind: ``FLAT`` compares with every vector; ``HNSW`` walks a graph, ``IVF_FLAT`` looks into some of many lists.
            Counts when the index is made.
        m: HNSW: links of a vector. Counts when the index is made.
        ef_construct: HNSW: candidates kept open while the graph is built. Counts when the index is made.
        ef: HNSW: candidates kept open while it is searched.
        nlist: IVF_FLAT: how many lists. Counts when the index is made.
        nprobe: IVF_FLAT: how many of them are looked into.
        overfetch: How many times more documents than wanted are fetched and scored again.
        timeout_s: How long one call may take.
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
                f"milvus.collection is {self.collection!r}; allowed are letters, digits and _, no digit first"
            )
        numbers = (self.m, self.ef_construct, self.ef, self.nlist, self.nprobe, self.overfetch)
        if min(numbers) < 1 or not self.timeout_s > 0:
            raise ConfigError("milvus: m, ef_construct, ef, nlist, nprobe, overfetch are at least 1, timeout_s above 0")
        if self.kind not in ("FLAT", "HNSW", "IVF_FLAT"):
            raise ConfigError(f"milvus.kind is {self.kind!r}; allowed are FLAT, HNSW and IVF_FLAT")
        self.url, self.token = Secret(self.url), Secret(self.token)
        self._begin(_Store(self), self.timeout_s)


class _Store:
    """See ``journal.store.Store``."""

    backend, reach = "milvus", REACH

    def __init__(self, options: MilvusIndex) -> None:
        self._options, o = options, options
        gone = "a collection was deleted, renamed or released; put it back, or index again"
        self.where = f"{o.url.rstrip('/')}, collection {o.collection}"
        self._server = Server("milvus", self.where, o.url, o.token, o.database, o.timeout_s, gone)
        self._call = self._server.call
        self.exact, self.overfetch = options.kind == "FLAT", 1.0 if options.kind == "FLAT" else options.overfetch
        self._generation = ""

    def connect(self) -> None:
        self._server.connect()

    def close(self) -> None:
        self._server.close()

    def anchor(self) -> Anchor | None:
        with self._call() as (db, patient):
            if not db.has_collection(self._options.collection, **patient):
                return None
            held = db.describe_collection(self._options.collection, **patient)["description"]
        try:
            known = json.loads(held)
            found = known.pop("format"), Anchor(**known)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{self.where} is of another program; choose another name") from error
        if found[0] != FORMAT:
            raise DataError(f"{self.where} has index format {found[0]!r}, this version reads {FORMAT!r}")
        return found[1]

    def found(self, anchor: Anchor, mark: Mark) -> None:
        name, marked = self._options.collection, self._named(anchor.generation, mark)
        documents = f"{name}_{anchor.generation}"
        with self._call() as (db, patient):
            self._create(db, documents, anchor.dim)
            db.create_collection(marked, schema=_bare(db, ""), **patient)
        try:  # with a description of its own, a name that is taken is refused
            with self._call() as (db, patient):
                about = json.dumps({"format": FORMAT, **anchor._asdict()})
                db.create_collection(name, schema=_bare(db, about), **patient)
        except (BackendError, DataError):
            if self.anchor() is None:
                raise
        if self.anchor() != anchor:
            with self._call() as (db, patient):
                for left in (marked, documents):
                    db.drop_collection(left, **patient)

    def erase(self) -> None:
        self.anchor()  # refuses what is of another program
        ours = re.compile(re.escape(self._options.collection) + "(_[0-9a-f]{8}(_at_.*)?)?")
        with self._call() as (db, patient):
            for name in sorted(filter(ours.fullmatch, db.list_collections(**patient))):  # the anchor's first
                db.drop_collection(name, **patient)

    def use(self, anchor: Anchor) -> None:
        self._generation = anchor.generation

    def mark(self) -> Mark | None:
        begin = self._named(self._generation, None)
        with self._call() as (db, patient):
            found = [name for name in db.list_collections(**patient) if name.startswith(begin)]
        if not found:
            return None
        step, beat, holder, lease = found[0].removeprefix(begin).split("_")
        return Mark(int(step), int(beat), "" if holder == "nobody" else holder, int(lease))

    def swap(self, old: Mark, new: Mark) -> None:
        with self._call() as (db, patient):
            db.rename_collection(self._named(self._generation, old), self._named(self._generation, new), **patient)

    def moment(self) -> int:
        """A time of the server, after that of all that was written; a read with it waits until it sees as much."""
        with self._call() as (db, patient):
            return int(db._get_connection().alloc_timestamp(**patient))

    def insert(self, rows: Sequence[Row]) -> None:
        entries = [{**row._asdict(), "vector": row.vector} for row in rows]
        with self._call() as (db, patient):
            for part in _parts(entries):
                db.insert(self._documents, part, **patient)

    def delete(self, keys: Sequence[int]) -> None:
        with self._call() as (db, patient):
            db.delete(self._documents, ids=list(keys), **patient)

    def select(self, which: Which, limit: int, moment: Any, columns: Collection[str]) -> list[Row]:
        with self._call() as (db, patient):
            found = db.query(
                self._documents,
                _condition(which),
                output_fields=["key", *columns],
                limit=limit,
                reduce_stop_for_best=True,  # the first by key of all segments, as Milvus's own iterator asks for
                **_seeing(moment),
                **patient,
            )
        return sorted((_row(entry["key"], entry) for entry in found), key=lambda row: row.key)

    def nearest(self, which: Which, q: Vector, limit: int, moment: Any) -> list[Row]:
        o = self._options
        parameters = {"HNSW": {"ef": max(o.ef, limit)}, "IVF_FLAT": {"nprobe": min(o.nprobe, o.nlist)}}
        with self._call() as (db, patient):
            found = db.search(
                self._documents,
                [q],
                filter=_condition(which),
                limit=limit,
                output_fields=["label", "body", "vector"],
                search_params={"metric_type": "IP", "params": parameters.get(o.kind, {})},
                **_seeing(moment),
                **patient,
            )
        return [_row(hit["id"], hit["entity"]) for hit in found[0]]

    @property
    def _documents(self) -> str:
        return f"{self._options.collection}_{self._generation}"

    def _named(self, generation: str, mark: Mark | None) -> str:
        begin = f"{self._options.collection}_{generation}_at_"
        return begin + (f"{mark.step}_{mark.beat}_{mark.holder or 'nobody'}_{mark.lease_ms}" if mark else "")

    def _create(self, db: MilvusClient, name: str, dim: int) -> None:
        """Makes the collection of documents, and waits until it can be searched."""
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
                raise self._server.failure(
                    "a new collection is not loaded for too long; see to the query nodes", retryable=True
                )
            time.sleep(POLL_S)


def _seeing(moment: int) -> dict[str, Any]:
    """For a read that waits until it sees what was written by then; a server that tells no time is asked for all."""
    if not moment:
        return {"consistency_level": "Strong"}
    return {"consistency_level": "Customized", "guarantee_timestamp": moment}


def _bare(db: MilvusClient, description: str) -> Any:
    """The schema of a collection in which nothing is kept but its name, and a description."""
    from pymilvus import DataType

    schema = db.create_schema(auto_id=False, enable_dynamic_field=False, description=description)
    schema.add_field("key", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=2)
    return schema


def _parts(entries: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Entries in requests of bounded size."""
    part: list[dict[str, Any]] = []
    size = 0
    for entry in entries:
        if part and size > BYTES:
            yield part
            part, size = [], 0
        part.append(entry)
        size += 4 * len(entry["body"]) + entry["vector"].nbytes + 500
    if part:
        yield part


def _condition(which: Which) -> str:
    """As Milvus wants it; made of numbers and hashes alone."""
    if which.keys is not None:
        return f"key in {list(which.keys)}"
    parts = [f"key > {which.above}"]
    if which.below < EVERY:
        parts.append(f"key < {which.below}")
    if which.tenant:
        parts.append(f'tenant == "{which.tenant}"')
    for column, values in (("source", which.sources), ("id", which.ids)):
        if values is not None:
            parts.append(f"{column} in {json.dumps(list(values))}")
    single = [first for first, last in which.without if first == last]
    parts += [f"not (key >= {first} and key <= {last})" for first, last in which.without if first < last]
    if single:
        parts.append(f"key not in {single}")
    return " and ".join(parts)


def _row(key: int, entry: Any) -> Row:
    tenant, source, identity, label, body = (entry.get(column, "") for column in COLUMNS)
    return Row(key, tenant, source, identity, label, body, np.array(entry.get("vector", ()), np.float32))
