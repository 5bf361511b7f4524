"""An existing Postgres table with pgvector: any table and columns, used in place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from casemate.backends import index_checks
from casemate.backends.clients.postgres import PostgresServer
from casemate.backends.sidecar.row_collection import require_writable
from casemate.backends.sidecar.row_inventory import quote_ids
from casemate.errors import ConfigError, DataError
from casemate.maths.vectors import cosines
from casemate.protocols import CollectionPage, TransactionalCollection
from casemate.types import DEFAULT_TENANT, Document, Hit, Secret, Vector

if TYPE_CHECKING:
    from psycopg import Connection

SCAN_PAGE = 2048  # rows per page of a scan
SPARE = 16  # rows to fetch above k, for scoring in float64
MAX_EF_SEARCH = 1000  # largest number of rows that an HNSW index returns
ROUNDING = 1e-5  # largest error of the server's float32 cosines
MAX_TIES = 65_536  # largest number of rows to fetch while further rows may tie with the k-th
SEPARATOR = "\x1f"  # between tenant and id in the cursor of a scan


@dataclass(eq=False)
class PgvectorTable(TransactionalCollection):
    """Rows of a table or view. The nearest by cosine are scored again exactly.

    A scan is one read-only statement on one snapshot, streamed in order of the id (with tenants: tenant and id). An
    index on these columns saves the server a sort.

    Attributes:
        url: ``postgresql://user:password@host:port/database``.
        table: Its name, as ``schema.table`` if it is not on the search path.
        id: Column of the row id, unique within a tenant; any type.
        text: Column of the text.
        vector: Column of the vector, of type ``vector``, ``halfvec`` or an array of numbers.
        source: Column with the name of the row's source document. Empty: none.
        title: Column of the title. Empty: none.
        metadata: Column with a JSON object. Empty: none.
        tenant: Column of the tenant. Empty: all rows belong to the default tenant.
        where: SQL condition; other rows are ignored. Not validated.
        writable: Whether Casemate may add and remove documents.
        effort: Candidates during a search of an HNSW index, 10 to 1000 (hnsw.ef_search). The detection needs the true
            nearest row.
        probes: Lists per search of an IVFFlat index (ivfflat.probes). 0: the server's setting.
        connections: Largest number of concurrent searches.
        timeout_s: Limit of a connection attempt, and of one step on the server.
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
                raise ConfigError(f"pgvector_table.{name} must not be empty")
        self.url = Secret(self.url)
        if_absent, place = "does not exist, or lacks a configured column", f"table {self.table}"
        self._server = PostgresServer("pgvector_table", self.url, self.connections, self.timeout_s, if_absent, place)
        self.tenanted = bool(self.tenant)
        self._table = ".".join(map(_quoted, self.table.split(".")))
        self._key_columns = [_quoted(c) for c in (self.tenant, self.id) if c]
        self._filter = f"({self.where})".replace("%", "%%") if self.where.strip() else "true"
        self._complete = f"{self._filter} AND {_quoted(self.text)} IS NOT NULL AND {_quoted(self.vector)} IS NOT NULL"
        # Under aliases: ORDER BY <column> would otherwise sort by the column's text.
        columns = [f"{_quoted(c)}::text AS casemate_{role}" for role, c in self._column_by_role.items()]
        self._selected = f"{', '.join(columns)}, vector_send({_quoted(self.vector)}::vector)"
        self._position = {role: i for i, role in enumerate(self._column_by_role)}
        self._distance, self._dim, self._types = "", 0, dict[str, str]()

    @property
    def _column_by_role(self) -> dict[str, str]:
        """Configured columns by role; id and text come first."""
        roles = ("id", "text", "source", "title", "metadata", "tenant")
        return {role: getattr(self, role) for role in roles if getattr(self, role)}

    @property
    def name(self) -> str:
        return self._server.where

    def open(self) -> int:
        self._server.open()
        with self.transaction(write=False) as db:
            query = "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = %s::regclass"
            columns = db.execute(f"{query} AND attnum > 0 AND NOT attisdropped", (_single_percent(self._table),))
            self._types = dict(columns.fetchall())
            if lacking := [c for c in (*self._column_by_role.values(), self.vector) if c not in self._types]:
                raise DataError(f"{self.name} has no column {lacking[0]!r}; it has {', '.join(sorted(self._types))}")
            vector, kind = _quoted(self.vector), self._types[self.vector].partition("(")[0]
            query = f"SELECT vector_dims({vector}::vector) FROM {self._table} WHERE {self._complete} LIMIT 1"
            row = db.execute(_single_percent(query)).fetchone()
        indexed = kind.rpartition(".")[2] in {"vector", "halfvec"}
        self._distance = f"{vector} <=> %b::vector::{kind}" if indexed else f"{vector}::vector <=> %b"
        declared = self._types[self.vector].partition("(")[2].rstrip(")")
        if row is None and not declared.isdigit():
            raise DataError(f"{self.name} has no vectors, and its column type has no dimension")
        self._dim = row[0] if row else int(declared)
        return self._dim

    def count(self) -> int:
        """See ``VectorCollection.count``. Exact."""
        with self.transaction(write=False) as db:
            row = db.execute(_single_percent(f"SELECT count(*) FROM {self._table} WHERE {self._filter}")).fetchone()
            return int(row[0]) if row else 0

    def scan(self, after: str = "") -> Iterator[CollectionPage]:
        """See ``VectorCollection.scan``. The server keeps one snapshot for the duration of the scan."""
        key = ", ".join(self._key_columns)
        resume, values = "", list[str]()
        if after:
            values = after.split(SEPARATOR)
            casts = ", ".join(f"%s::{self._types[name]}" for name in (self.tenant, self.id) if name)
            resume = f" AND ({key}) > ({casts})"
        query = f"SELECT {self._selected} FROM {self._table} WHERE {self._filter}{resume} ORDER BY {key}"
        with self._server.stream() as db, db.cursor(name="rows") as cursor:
            cursor.execute(query if values else _single_percent(query), values or None, binary=True)
            last = ("", "")
            while rows := cursor.fetchmany(SCAN_PAGE):
                ids = [(self._tenant_of(row), row[0]) for row in rows]
                self._require_unique([last, *ids])
                last = ids[-1]
                yield self._page(rows)

    def _tenant_of(self, row: Sequence[Any]) -> str:
        return row[self._position["tenant"]] if self.tenant else ""

    def _require_unique(self, ids: Sequence[tuple[str, str]]) -> None:
        """Rows come in order, so equal ids are adjacent."""
        for one, other in pairwise(ids):
            if one == other:
                raise DataError(
                    f"{self.name} has two rows with the id {one[1]!r}; set pgvector_table.id to a unique column"
                )

    def search(self, vector: Vector, k: int, tenant: str = DEFAULT_TENANT, within: Any | None = None) -> Sequence[Hit]:
        """See ``VectorCollection.search``. Includes all rows that tie with the k-th."""
        with self._within(within) as db:
            limit, exact = k + SPARE, False
            while True:
                page = self._nearest(db, vector, limit, tenant, exact)
                s, too_few = cosines(page.vectors, vector), len(page.documents) < limit
                order = np.argsort(-s, kind="stable")
                if (
                    too_few and not exact
                ):  # the filter left too few of the index's candidates, or there are no more rows
                    exact = True
                elif too_few or limit >= MAX_TIES or s.min() < s[order[k - 1]] - ROUNDING:
                    break
                else:
                    limit *= 4
        worst = s[order[k - 1]] if len(s) >= k else -np.inf
        return [Hit(page.documents[i], float(s[i])) for i in order.tolist() if s[i] >= worst]

    def _nearest(self, db: Connection[Any], vector: Vector, limit: int, tenant: str, exact: bool) -> CollectionPage:
        exact = exact or limit > MAX_EF_SEARCH
        settings = {
            "hnsw.ef_search": min(MAX_EF_SEARCH, max(self.effort, limit)),
            "enable_indexscan": "off" if exact else "on",
        }
        settings |= {"ivfflat.probes": self.probes} if self.probes else {}
        for name, value in settings.items():
            db.execute(f"SET LOCAL {name} = {value}")
        condition, values = self._tenant_condition(tenant)
        query = f"SELECT {self._selected} FROM {self._table} WHERE {self._complete}{condition}"
        query += f" ORDER BY {self._distance} LIMIT %s"
        rows = db.execute(query, (*values, vector, limit), binary=True).fetchall()
        db.execute("SET LOCAL enable_indexscan = on")
        return self._page(rows)

    def find(self, ids: Sequence[str], tenant: str = DEFAULT_TENANT, within: Any | None = None) -> CollectionPage:
        condition, values = self._tenant_condition(tenant)
        query = (
            f"SELECT {self._selected} FROM {self._table} WHERE {self._complete}{condition} AND {self._ids_condition}"
        )
        with self._within(within) as db:
            return self._page(db.execute(query, (*values, self._ids(ids)), binary=True).fetchall())

    def add(
        self,
        documents: Sequence[Document],
        vectors: Vector,
        tenant: str = DEFAULT_TENANT,
        within: Any | None = None,
    ) -> None:
        require_writable(self, "pgvector_table")
        rows = [(*self._row(d, tenant), v) for d, v in zip(documents, vectors, strict=True)]
        filled = list(self._column_by_role.values())
        casts = [f"%s::{self._types[c]}" for c in filled] + [f"%b::vector::{self._types[self.vector]}"]
        into = ", ".join(map(_quoted, [*filled, self.vector]))
        with self._within(within, write=True) as db:
            self.remove([d.id for d in documents], tenant, db)
            insert = f"INSERT INTO {self._table} ({into}) VALUES ({', '.join(casts)})"
            db.cursor().executemany(insert, rows)

    def remove(self, ids: Sequence[str], tenant: str = DEFAULT_TENANT, within: Any | None = None) -> None:
        require_writable(self, "pgvector_table")
        condition, values = self._tenant_condition(tenant)
        with self._within(within, write=True) as db:
            db.execute(
                f"DELETE FROM {self._table} WHERE {self._filter}{condition} AND {self._ids_condition}",
                (*values, self._ids(ids)),
            )

    def transaction(self, write: bool) -> AbstractContextManager[Any]:
        return self._server.transaction("READ WRITE" if write else "ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def close(self) -> None:
        self._server.close()

    def _within(self, within: Any | None, *, write: bool = False) -> AbstractContextManager[Any]:
        return self.transaction(write) if within is None else nullcontext(within)

    def _tenant_condition(self, tenant: str) -> tuple[str, tuple[str, ...]]:
        """SQL condition and its values that select the tenant's rows."""
        if not self.tenant:
            return ("", ()) if tenant == DEFAULT_TENANT else (" AND false", ())
        if "\0" in tenant:
            raise DataError(f"the tenant {tenant!r} contains a NUL character, which Postgres cannot store")
        return f" AND {_quoted(self.tenant)} = %s::{self._types[self.tenant]}", (tenant,)

    @property
    def _ids_condition(self) -> str:
        return f"{_quoted(self.id)} = ANY(%s::text[]::{self._types[self.id].partition('(')[0]}[])"

    def _ids(self, ids: Sequence[str]) -> list[str]:
        return [i for i in ids if "\0" not in i]

    def _row(self, d: Document, tenant: str) -> list[str]:
        """A document's columns without the vector."""
        values = {self.id: d.id, self.text: d.text, self.source: d.source, self.tenant: tenant}
        if (d.title and not self.title) or (d.metadata and not self.metadata):
            raise DataError(
                f"document {d.id!r} has a title or metadata, but no column is configured for it; "
                "set pgvector_table.title or pgvector_table.metadata"
            )
        values |= {self.title: d.title, self.metadata: index_checks.document_columns(d)[5]}
        row = [values[c] for c in self._column_by_role.values()]
        if any("\0" in value for value in row):
            raise DataError(f"document {d.id!r} contains a NUL character, which Postgres cannot store; remove it")
        return row

    def _page(self, rows: Sequence[tuple[Any, ...]]) -> CollectionPage:
        """A page without the rows that lack text or vector."""
        whole = [row for row in rows if row[1] is not None and row[-1] is not None]
        for role in ("id", "tenant"):
            if role in self._position and any(row[self._position[role]] is None for row in whole):
                raise DataError(f"{self.name} has rows whose {role} is NULL; exclude them with pgvector_table.where")
        if other := [row[0] for row in whole if len(row[-1]) != 4 + 4 * self._dim]:
            raise DataError(
                f"{self.name}: the vectors of {quote_ids(other)} do not have {self._dim} dimensions, as the first one: "
                "embed all rows with one model, or exclude the others with pgvector_table.where"
            )
        numbers = np.frombuffer(b"".join([row[-1][4:] for row in whole]), ">f4")
        vectors = numbers.astype(np.float32).reshape(-1, self._dim)
        texts = [row[1] for row in whole]
        ids, titles, sources = (self._column(whole, role) for role in ("id", "title", "source"))
        about = [_metadata(text, self.metadata) for text in self._column(whole, "metadata")]
        documents = list(map(Document, ids, texts, titles, sources, repeat(""), about))
        textless = sum(row[1] is None for row in rows)
        after = (
            SEPARATOR.join([self._tenant_of(rows[-1]), rows[-1][0]] if self.tenant else [rows[-1][0]]) if rows else ""
        )
        tenants = self._column(whole, "tenant") if self.tenant else ()
        return CollectionPage(documents, vectors, after, tenants, textless, len(rows) - len(whole) - textless)

    def _column(self, rows: Sequence[tuple[Any, ...]], role: str) -> list[str]:
        """A text column; empty texts for NULL, or if no column is configured."""
        at = self._position.get(role)
        return [""] * len(rows) if at is None else [row[at] or "" for row in rows]


def _metadata(text: str, column: str) -> Mapping[str, Any]:
    held = json.loads(text) if text else {}
    return held if isinstance(held, dict) else {column: held}


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""').replace("%", "%%") + '"'


def _single_percent(statement: str) -> str:
    """A statement without parameters, in which percent signs are not doubled."""
    return statement.replace("%%", "%")
