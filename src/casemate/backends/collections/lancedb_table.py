"""An existing LanceDB table: rows with a vector column, used in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from casemate.backends.sidecar.row_collection import SCAN_PAGE, RowCollection, StoredRow
from casemate.errors import BackendError, CasemateError, ConfigError, DataError, needs
from casemate.types import Vector


@dataclass(eq=False)
class LancedbTable(RowCollection):
    """Rows of a table. LanceDB finds the nearest by cosine, exactly by default; they are scored again in float64.

    A scan reads one version of the table, also if it is interrupted and resumed.

    Attributes:
        location: Folder of the database, or an address that LanceDB accepts. Its credentials come from the environment.
        table: Name of the table.
        id: Column of the row id, a text.
        vector: Column of the vector.
        text: Column of the text.
        source: Column with the name of the row's source document, or ``a.b`` for the field ``b`` of a structure. Empty:
            none.
        title: Column of the title. Empty: none.
        where: SQL condition; other rows are ignored. Not validated.
        exact: Whether LanceDB compares with all rows. The detection needs the true nearest row.
    """

    location: str
    table: str
    id: str = "id"
    vector: str = "vector"
    text: str = "text"
    source: str = ""
    title: str = ""
    where: str = ""
    exact: bool = True

    def __post_init__(self) -> None:
        if not (self.location and self.table and self.id and self.vector and self.text):
            raise ConfigError("lancedb_table: location, table, id, vector and text must not be empty")
        with needs("casemate[lancedb]"):
            import lancedb  # noqa: F401
        self.name = f"lancedb {self.location}, table {self.table}"
        self.own_fields = frozenset({self.id, self.vector, "_distance", "_rowid"})
        self._held: Any = None

    def connect(self) -> int:
        import lancedb

        self._held = lancedb.connect(self.location).open_table(self.table)
        schema = self._held.schema
        if lacking := [c for c in (self.id, self.vector, self.text.partition(".")[0]) if c not in schema.names]:
            raise DataError(f"{self.name} has no column {lacking[0]!r}; it has {', '.join(schema.names)}")
        return int(getattr(schema.field(self.vector).type, "list_size", 0) or 0)

    def count(self) -> int:
        with self.errors():
            return int(self._latest().count_rows(self.where or None))

    def pages(self, after: str) -> Iterator[tuple[Sequence[StoredRow], str]]:
        """See ``RowCollection``. The cursor is the version of the table and a number of rows."""
        version, _, start = after.partition(":")
        table = self._latest()
        number, at = int(version or table.version), int(start or 0)
        import lancedb

        table = lancedb.connect(self.location).open_table(self.table)  # a handle of its own, bound to one version
        table.checkout(number)
        while True:
            found = self._condition(table.search()).limit(SCAN_PAGE).offset(at).to_arrow().to_pylist()
            if not found:
                return
            at += len(found)
            yield self._rows(found), f"{number}:{at}"

    def nearest(self, vector: Vector, k: int) -> Iterable[StoredRow]:
        query = self._latest().search(vector.tolist(), vector_column_name=self.vector).distance_type("cosine")
        if self.exact:
            query = query.bypass_vector_index()
        return self._rows(self._condition(query).limit(k).to_list())

    def stored(self, ids: Sequence[str]) -> Iterable[StoredRow]:
        listed = ", ".join("'" + name.replace("'", "''") + "'" for name in ids)
        condition = f"`{self.id}` IN ({listed})"
        query = self._latest().search().where(f"({self.where}) AND {condition}" if self.where else condition)
        return self._rows(query.limit(len(ids)).to_list())

    def close(self) -> None:
        self._held = None

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except CasemateError:
            raise
        except (ValueError, FileNotFoundError) as error:
            missing = "was not found" in str(error) or isinstance(error, FileNotFoundError)
            what = "does not exist; check location and table" if missing else "rejected the request; check where"
            raise DataError(f"{self.name} {what}") from None
        except (OSError, RuntimeError) as error:
            problem = f"{self.name} cannot be read: {type(error).__name__}"
            raise BackendError(problem, backend="lancedb_table", retryable=True) from None

    def _latest(self) -> Any:
        if self._held is None:
            raise BackendError(f"{self.name} is not open", backend="lancedb_table", retryable=False)
        self._held.checkout_latest()
        return self._held

    def _condition(self, query: Any) -> Any:
        return query.where(self.where) if self.where else query

    def _rows(self, found: Iterable[Any]) -> list[StoredRow]:
        return [StoredRow(str(row[self.id]), row[self.vector], row) for row in found]
