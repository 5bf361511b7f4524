"""An existing Milvus collection: entities with a vector and fields, used in place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from casemate.backends.clients.milvus import MilvusServer
from casemate.backends.sidecar.row_collection import SCAN_PAGE, RowCollection, StoredRow, require_writable
from casemate.backends.sidecar.row_inventory import quote_ids
from casemate.errors import ConfigError, DataError
from casemate.types import Document, Secret, Vector

MAX_HITS = 16_384  # largest number of entities that Milvus returns for one search
STRONG = {"consistency_level": "Strong"}  # read option: sees every completed write


@dataclass(eq=False)
class MilvusCollection(RowCollection):
    """Entities of a collection. Milvus finds the nearest; they are scored again exactly.

    With an index whose metric is not COSINE, Milvus ranks by that metric. All metrics agree for vectors of unit length;
    ``casemate attach`` counts those that are not.

    A search for more than ``MAX_HITS`` entities raises ``CapabilityError``.

    Attributes:
        url: ``http://host:19530``.
        collection: Its name. It must be loaded.
        token: ``user:password`` or an API key.
        database: Its name. Empty: the default database.
        text: Field of the text.
        vector: Field of the vector, of type FLOAT_VECTOR.
        source: Field with the name of the entity's source document. Empty: none.
        title: Field of the title. Empty: none.
        where: Milvus filter expression; other entities are ignored. Not validated.
        search_with: Search parameters of the index, such as ``{ef: 256}``, or ``{nprobe: 512}`` of 1,024 lists. The
            detection needs the true nearest entity.
        writable: Whether Casemate may add and remove documents.
        timeout_s: Limit of one call.
    """

    max_results = MAX_HITS
    url: Secret
    collection: str
    token: Secret = Secret("")
    database: str = ""
    text: str = "text"
    vector: str = "vector"
    source: str = ""
    title: str = ""
    where: str = ""
    search_with: dict[str, int | float] = field(default_factory=dict)
    writable: bool = False
    timeout_s: float = 10

    def __post_init__(self) -> None:
        if not (self.collection and self.text and self.vector and self.timeout_s > 0):
            raise ConfigError(
                "milvus_collection: collection, text and vector must not be empty, timeout_s must be above 0"
            )
        self.url, self.token = Secret(self.url), Secret(self.token)
        self.name = f"milvus {self.url}, collection {self.collection}"
        if_absent = "the collection is missing or not loaded; check whether it was renamed or released"
        self._server = MilvusServer(
            "milvus_collection", self.name, self.url, self.token, self.database, self.timeout_s, if_absent
        )
        self._key, self._numbered = "", False

    def errors(self) -> AbstractContextManager[None]:
        return self._server.translate_errors()

    def connect(self) -> int:
        from pymilvus import DataType

        self._server.connect()
        with self._server.call() as (client, timeout):
            fields = {f["name"]: f for f in client.describe_collection(self.collection, **timeout)["fields"]}
            indexes = client.list_indexes(self.collection, self.vector, **timeout)
            kinds = [client.describe_index(self.collection, i, **timeout) or {} for i in indexes]
        if self.vector not in fields or "dim" not in fields[self.vector].get("params", {}):
            raise DataError(f"{self.name} has no vector field {self.vector!r}; it has {', '.join(sorted(fields))}")
        if fields[self.vector]["type"] != DataType.FLOAT_VECTOR:
            raise DataError(f"{self.name}: the field {self.vector!r} must be of type FLOAT_VECTOR")
        key = next(f for f in fields.values() if f.get("is_primary"))
        self._key, self._numbered = key["name"], key["type"] == DataType.INT64
        self.own_fields = frozenset({self._key, self.vector})
        self.by_cosine = [k.get("metric_type") for k in kinds] == ["COSINE"]
        return int(fields[self.vector]["params"]["dim"])

    def count(self) -> int:
        """See ``VectorCollection.count``. Exact."""
        with self._server.call() as (client, timeout):
            found = client.query(self.collection, filter=self.where, output_fields=["count(*)"], **STRONG, **timeout)
            return int(found[0]["count(*)"])

    def pages(self, after: str) -> Iterator[tuple[Sequence[StoredRow], str]]:
        """See ``RowCollection``. In order of the primary key, by Milvus's iterator."""
        # Older servers let the client choose the iterator's timestamp, which can miss rows inserted a moment before.
        # A strongly consistent count waits until they are visible.
        self.count()
        condition = self._and(
            f"{self._key} > {json.dumps(self._keys([after])[0], ensure_ascii=False)}" if after else ""
        )
        with self._server.call() as (client, timeout):
            iterator = client.query_iterator(
                self.collection, batch_size=SCAN_PAGE, filter=condition, output_fields=["*"], **STRONG, **timeout
            )
        try:
            while found := iterator.next():
                rows = self._rows(found)
                yield rows, rows[-1].id
        finally:
            iterator.close()

    def nearest(self, vector: Vector, k: int) -> Iterable[StoredRow]:
        with self._server.call() as (client, timeout):
            found = client.search(
                self.collection, data=[vector.tolist()], anns_field=self.vector, filter=self.where, limit=k,
                output_fields=["*"], search_params={"params": dict(self.search_with)}, **STRONG, **timeout,
            )  # fmt: skip
        return self._rows([hit["entity"] | {self._key: hit.get("id", hit.get(self._key))} for hit in found[0]])

    def stored(self, ids: Sequence[str]) -> Iterable[StoredRow]:
        keys = self._keys(ids)
        if not keys:
            return ()
        condition = self._and(f"{self._key} in {json.dumps(keys, ensure_ascii=False)}")
        with self._server.call() as (client, timeout):
            return self._rows(client.query(self.collection, filter=condition, output_fields=["*"], **STRONG, **timeout))

    def add(self, documents: Sequence[Document], vectors: Vector) -> None:
        require_writable(self, "milvus_collection")
        rows = [
            {**d.metadata, **self._own(d), self._key: self._keys([d.id], strict=True)[0], self.vector: v.tolist()}
            for d, v in zip(documents, vectors, strict=True)
        ]
        if rows:
            with self._server.call() as (client, timeout):
                client.upsert(self.collection, rows, **timeout)

    def remove(self, ids: Sequence[str]) -> None:
        require_writable(self, "milvus_collection")
        if keys := self._keys(ids):
            with self._server.call() as (client, timeout):
                client.delete(self.collection, ids=keys, **timeout)

    def _keys(self, ids: Sequence[str], *, strict: bool = False) -> list[int] | list[str]:
        """Ids in the type of the primary key."""
        if not self._numbered:
            return list(ids)
        numbers = [int(i) for i in ids if re.fullmatch(r"-?\d{1,19}", i)]
        if strict and len(numbers) < len(ids):
            raise DataError(f"{self.name} needs integers as ids; got {quote_ids(ids)}")
        return numbers

    def _and(self, condition: str) -> str:
        """The filter ``where`` with a further condition, if there is one."""
        return f"({self.where}) and {condition}" if self.where and condition else self.where or condition

    def _rows(self, found: Sequence[Mapping[str, Any]]) -> list[StoredRow]:
        return [StoredRow(str(row[self._key]), row.get(self.vector), row) for row in found]
