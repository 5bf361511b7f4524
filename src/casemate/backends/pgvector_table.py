"""A table of somebody else's in Postgres with pgvector: any table, any columns, as it stands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from casemate import indexing
from casemate.attaching.tally import named
from casemate.collection import Piece, Transactional, cosines
from casemate.errors import CapabilityError, ConfigError, DataError
from casemate.postgres import Server
from casemate.types import DEFAULT_TENANT, Document, Hit, Secret, Vector

if TYPE_CHECKING:
    from psycopg import Connection

PIECE = 2048
"""Rows of one piece of a scan."""
SPARE = 16
"""Rows beyond k that are scored again in float64."""
MOST = 1000
"""Rows that an HNSW index gives at most."""
ROUNDING = 1e-5
"""By how much the server's order, made in float32, may mislead about cosines."""
ALIKE = 65_536
"""Rows at most that are looked at because they are as near as the k-th."""
NEXT = "\x1f"
"""Between the tenant and the id in the place where a scan goes on: no name holds it."""


@dataclass(eq=False)
class PgvectorTable(Transactional):
    """Rows of a table or view; the nearest by cosine, scored again exactly.

    A scan is one read-only statement on one snapshot, streamed in the order of the id (of tenant and id, where there
    are tenants): an index on it saves the server a sort.

    Attributes:
        url: ``postgresql://user:password@host:port/database``.
        table: Its name, with the schema before a dot if it is not on the search path.
        id: Column that names a row, unique (within a tenant): any type.
        text: Column of the text.
        vector: Column of the vector: ``vector``, ``halfvec`` or an array of numbers.
        source: Column that names the record a row was cut from. Empty: none.
        title: Column of a title. Empty: none.
        metadata: Column of a json object. Empty: none.
        tenant: Column that says whose a row is. Empty: all are the default tenant's.
        where: SQL condition on rows; the others are not there for us. Written by the operator, and not checked.
        writable: Whether documents may be added and removed by way of us.
        effort: Rows that a search in an HNSW index keeps open, 10 to 1000 (hnsw.ef_search): the detection needs the
            true nearest row.
        probes: Lists that a search in an IVFFlat index looks at (ivfflat.probes); 0: as the server is configured.
        connections: Searches that run at once; more wait.
        timeout_s: How long a connection, or one step on the server, may take.
    """

    url: Secret
    table: str
    id: str = "id"
    text: str = "text"
    vector: str = "embedding"
    source: str = ""
    title: str = ""
    metadata: str = ""
    tenant: str = ""
    where: str = ""
    writable: bool = False
    effort: int = 200
    probes: int = 0
    connections: int = 4
    timeout_s: float = 10

    def __post_init__(self) -> None:
        for name in ("table", "id", "text", "vector"):
            if not getattr(self, name).strip("."):
                raise ConfigError(f"pgvector_table.{name} is {getattr(self, name)!r}; name it")
        self.url = Secret(self.url)
        about, place = "is not there, or lacks a column that is configured", f"table {self.table}"
        self._server = Server("pgvector_table", self.url, self.connections, self.timeout_s, about, place)
        self.tenanted = bool(self.tenant)
        self._t = ".".join(map(_quoted, self.table.split(".")))
        self._key = [_quoted(c) for c in (self.tenant, self.id) if c]
        self._kept = f"({self.where})".replace("%", "%%") if self.where.strip() else "true"
        self._whole = f"{self._kept} AND {_quoted(self.text)} IS NOT NULL AND {_quoted(self.vector)} IS NOT NULL"
        # Each under a name of its own: ORDER BY would take a column's own name for its text, and so sort by that.
        columns = [f"{_quoted(c)}::text AS casemate_{role}" for role, c in self._named.items()]
        self._columns = f"{', '.join(columns)}, vector_send({_quoted(self.vector)}::vector)"
        self._at = {role: i for i, role in enumerate(self._named)}
        self._near, self._dim, self._types = "", 0, dict[str, str]()

    @property
    def _named(self) -> dict[str, str]:
        """The columns that there are, by what they are for; id and text come first."""
        roles = ("id", "text", "source", "title", "metadata", "tenant")
        return {role: getattr(self, role) for role in roles if getattr(self, role)}

    @property
    def name(self) -> str:
        """See ``Collection.name``."""
        return self._server.where

    def open(self) -> int:
        """See ``Collection.open``."""
        self._server.open()
        with self.transaction(write=False) as db:
            query = "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = %s::regclass"
            columns = db.execute(f"{query} AND attnum > 0 AND NOT attisdropped", (_plain(self._t),))
            self._types = dict(columns.fetchall())
            if lacking := [c for c in (*self._named.values(), self.vector) if c not in self._types]:
                raise DataError(f"{self.name} has no column {lacking[0]!r}; it has {', '.join(sorted(self._types))}")
            vector, kind = _quoted(self.vector), self._types[self.vector].partition("(")[0]
            query = f"SELECT vector_dims({vector}::vector) FROM {self._t} WHERE {self._whole} LIMIT 1"
            row = db.execute(_plain(query)).fetchone()
        indexed = kind.rpartition(".")[2] in {"vector", "halfvec"}
        self._near = f"{vector} <=> %b::vector::{kind}" if indexed else f"{vector}::vector <=> %b"
        declared = self._types[self.vector].partition("(")[2].rstrip(")")
        if row is None and not declared.isdigit():
            raise DataError(f"{self.name} holds no vectors, and does not say how long they are to be")
        self._dim = row[0] if row else int(declared)
        return self._dim

    def count(self) -> int:
        """See ``Collection.count``. Exact."""
        with self.transaction(write=False) as db:
            row = db.execute(_plain(f"SELECT count(*) FROM {self._t} WHERE {self._kept}")).fetchone()
            return int(row[0]) if row else 0

    def scan(self, after: str = "") -> Iterator[Piece]:
        """See ``Collection.scan``. One snapshot, which the server keeps for as long as the scan lasts."""
        key = ", ".join(self._key)
        behind, values = "", list[str]()
        if after:
            values = after.split(NEXT)
            casts = ", ".join(f"%s::{self._types[name]}" for name in (self.tenant, self.id) if name)
            behind = f" AND ({key}) > ({casts})"
        query = f"SELECT {self._columns} FROM {self._t} WHERE {self._kept}{behind} ORDER BY {key}"
        with self._server.stream() as db, db.cursor(name="rows") as cursor:
            cursor.execute(query if values else _plain(query), values or None, binary=True)
            last = ("", "")
            while rows := cursor.fetchmany(PIECE):
                names = [(self._owner(row), row[0]) for row in rows]
                self._require_unique([last, *names])
                last = names[-1]
                yield self._piece(rows)

    def _owner(self, row: Sequence[Any]) -> str:
        return row[self._at["tenant"]] if self.tenant else ""

    def _require_unique(self, names: Sequence[tuple[str, str]]) -> None:
        """Of rows in order, two of the same id stand together."""
        for one, other in pairwise(names):
            if one == other:
                raise DataError(f"{self.name} has two rows of the id {one[1]!r}; name a column that is unique")

    def search(self, vector: Vector, k: int, tenant: str = DEFAULT_TENANT, within: Any | None = None) -> Sequence[Hit]:
        """See ``Collection.search``. All that are as near as the k-th come with it."""
        with self._joined(within) as db:
            limit, exact = k + SPARE, False
            while True:
                piece = self._nearest(db, vector, limit, tenant, exact)
                s, lacking = cosines(piece.vectors, vector), len(piece.documents) < limit
                order = np.argsort(-s, kind="stable")
                if lacking and not exact:  # of what an index found, conditions left too little; or there is no more
                    exact = True
                elif lacking or limit >= ALIKE or s.min() < s[order[k - 1]] - ROUNDING:
                    break
                else:
                    limit *= 4
        worst = s[order[k - 1]] if len(s) >= k else -np.inf
        return [Hit(piece.documents[i], float(s[i])) for i in order.tolist() if s[i] >= worst]

    def _nearest(self, db: Connection[Any], vector: Vector, limit: int, tenant: str, exact: bool) -> Piece:
        exact = exact or limit > MOST
        settings = {"hnsw.ef_search": min(MOST, max(self.effort, limit)), "enable_indexscan": "off" if exact else "on"}
        settings |= {"ivfflat.probes": self.probes} if self.probes else {}
        for name, value in settings.items():
            db.execute(f"SET LOCAL {name} = {value}")
        mine, values = self._mine(tenant)
        query = f"SELECT {self._columns} FROM {self._t} WHERE {self._whole}{mine} ORDER BY {self._near} LIMIT %s"
        rows = db.execute(query, (*values, vector, limit), binary=True).fetchall()
        db.execute("SET LOCAL enable_indexscan = on")
        return self._piece(rows)

    def find(self, ids: Sequence[str], tenant: str = DEFAULT_TENANT, within: Any | None = None) -> Piece:
        """See ``Collection.find``."""
        mine, values = self._mine(tenant)
        query = f"SELECT {self._columns} FROM {self._t} WHERE {self._whole}{mine} AND {self._among}"
        with self._joined(within) as db:
            return self._piece(db.execute(query, (*values, self._ids(ids)), binary=True).fetchall())

    def add(
        self,
        documents: Sequence[Document],
        vectors: Vector,
        tenant: str = DEFAULT_TENANT,
        within: Any | None = None,
    ) -> None:
        """See ``Collection.add``."""
        self._require_writable()
        rows = [(*self._row(d, tenant), v) for d, v in zip(documents, vectors, strict=True)]
        filled = list(self._named.values())
        casts = [f"%s::{self._types[c]}" for c in filled] + [f"%b::vector::{self._types[self.vector]}"]
        into = ", ".join(map(_quoted, [*filled, self.vector]))
        with self._joined(within, write=True) as db:
            self.remove([d.id for d in documents], tenant, db)
            insert = f"INSERT INTO {self._t} ({into}) VALUES ({', '.join(casts)})"
            db.cursor().executemany(insert, rows)

    def remove(self, ids: Sequence[str], tenant: str = DEFAULT_TENANT, within: Any | None = None) -> None:
        """See ``Collection.remove``."""
        self._require_writable()
        mine, values = self._mine(tenant)
        with self._joined(within, write=True) as db:
            db.execute(f"DELETE FROM {self._t} WHERE {self._kept}{mine} AND {self._among}", (*values, self._ids(ids)))

    def transaction(self, write: bool) -> AbstractContextManager[Any]:
        """See ``Transactional.transaction``."""
        return self._server.session("READ WRITE" if write else "ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def close(self) -> None:
        """See ``Collection.close``."""
        self._server.close()

    def _joined(self, within: Any | None, *, write: bool = False) -> AbstractContextManager[Any]:
        return self.transaction(write) if within is None else nullcontext(within)

    def _require_writable(self) -> None:
        if not self.writable:
            raise CapabilityError(f"{self.name} is only read here; set pgvector_table.writable to add and remove")

    def _mine(self, tenant: str) -> tuple[str, tuple[str, ...]]:
        """The condition that a row is the tenant's."""
        if not self.tenant:
            return ("", ()) if tenant == DEFAULT_TENANT else (" AND false", ())
        if "\0" in tenant:
            raise DataError(f"the tenant {tenant!r} holds a NUL character, which Postgres cannot keep")
        return f" AND {_quoted(self.tenant)} = %s::{self._types[self.tenant]}", (tenant,)

    @property
    def _among(self) -> str:
        return f"{_quoted(self.id)} = ANY(%s::text[]::{self._types[self.id].partition('(')[0]}[])"

    def _ids(self, ids: Sequence[str]) -> list[str]:
        return [i for i in ids if "\0" not in i]

    def _row(self, d: Document, tenant: str) -> list[str]:
        """A document's columns, but for the vector."""
        values = {self.id: d.id, self.text: d.text, self.source: d.source, self.tenant: tenant}
        if (d.title and not self.title) or (d.metadata and not self.metadata):
            raise DataError(
                f"document {d.id!r} has a title or metadata, and {self.table} no column for it; "
                "name one in pgvector_table.title or .metadata"
            )
        values |= {self.title: d.title, self.metadata: indexing.columns(d)[5]}
        row = [values[c] for c in self._named.values()]
        if any("\0" in value for value in row):
            raise DataError(f"document {d.id!r} holds a NUL character, which Postgres cannot keep; take it out")
        return row

    def _piece(self, rows: Sequence[tuple[Any, ...]]) -> Piece:
        """Rows as a piece, without those that lack text or vector."""
        whole = [row for row in rows if row[1] is not None and row[-1] is not None]
        for role in ("id", "tenant"):
            if role in self._at and any(row[self._at[role]] is None for row in whole):
                raise DataError(f"{self.name} has rows whose {role} is NULL; leave them out with pgvector_table.where")
        if other := [row[0] for row in whole if len(row[-1]) != 4 + 4 * self._dim]:
            raise DataError(
                f"{self.name}: the vectors of {named(other)} are not of {self._dim} numbers as the first one's is: "
                "embed all rows by one model, or leave the others out with pgvector_table.where"
            )
        numbers = np.frombuffer(b"".join([row[-1][4:] for row in whole]), ">f4")
        vectors = numbers.astype(np.float32).reshape(-1, self._dim)
        texts = [row[1] for row in whole]
        ids, titles, sources = (self._all(whole, role) for role in ("id", "title", "source"))
        about = [_metadata(text, self.metadata) for text in self._all(whole, "metadata")]
        documents = list(map(Document, ids, texts, titles, sources, repeat(""), about))
        textless = sum(row[1] is None for row in rows)
        after = NEXT.join([self._owner(rows[-1]), rows[-1][0]] if self.tenant else [rows[-1][0]]) if rows else ""
        tenants = self._all(whole, "tenant") if self.tenant else ()
        return Piece(documents, vectors, after, tenants, textless, len(rows) - len(whole) - textless)

    def _all(self, rows: Sequence[tuple[Any, ...]], role: str) -> list[str]:
        """A column of texts; what is NULL, or no column, is empty."""
        at = self._at.get(role)
        return [""] * len(rows) if at is None else [row[at] or "" for row in rows]


def _metadata(text: str, column: str) -> Mapping[str, Any]:
    held = json.loads(text) if text else {}
    return held if isinstance(held, dict) else {column: held}


def _quoted(name: str) -> str:
    """A name as SQL takes it."""
    return '"' + name.replace('"', '""').replace("%", "%%") + '"'


def _plain(statement: str) -> str:
    """A statement without values, in which a percent sign is written once."""
    return statement.replace("%%", "%")
