"""An existing Milvus collection: entities with a vector and fields, used in place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from casemate.backends.clients.milvus import MilvusServer
from casemate.backends.sidecar.row_inventory import quote_ids
from casemate.errors import CapabilityError, ConfigError, DataError
from casemate.maths.vectors import cosines
from casemate.protocols import CollectionPage, VectorCollection
from casemate.types import Document, Hit, Secret, Vector

SCAN_PAGE = 1024
"""Entities per page of a scan."""
SPARE = 16
"""Entities to fetch above k, for scoring in float64."""
MAX_HITS = 16_384
"""Largest number of entities that Milvus returns for one search."""
STRONG = {"consistency_level": "Strong"}
"""Read option: sees every completed write."""


@dataclass(eq=False)
class MilvusCollection(VectorCollection):
    """Entities of a collection. Milvus finds the nearest; they are scored again exactly.

    With an index whose metric is not COSINE, Milvus ranks by that metric. All metrics agree for vectors of unit length;
    ``casemate attach`` counts those that are not.

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
        where = f"milvus {self.url}, collection {self.collection}"
        if_absent = "the collection is missing or not loaded; check whether it was renamed or released"
        self._server = MilvusServer(
            "milvus_collection", where, self.url, self.token, self.database, self.timeout_s, if_absent
        )
        self._dim, self._key, self._numbered = 0, "", False

    @property
    def name(self) -> str:
        """See ``VectorCollection.name``."""
        return self._server.where

    def open(self) -> int:
        """See ``VectorCollection.open``."""
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
        self._dim = int(fields[self.vector]["params"]["dim"])
        self.by_cosine = [k.get("metric_type") for k in kinds] == ["COSINE"]
        return self._dim

    def count(self) -> int:
        """See ``VectorCollection.count``. Exact."""
        with self._server.call() as (client, timeout):
            found = client.query(self.collection, filter=self.where, output_fields=["count(*)"], **STRONG, **timeout)
            return int(found[0]["count(*)"])

    def scan(self, after: str = "") -> Iterator[CollectionPage]:
        """See ``VectorCollection.scan``. In order of the primary key, by Milvus's iterator."""
        # Older servers let the client choose the iterator's timestamp, which can miss rows inserted a moment before.
        # A strongly consistent count waits until they are visible.
        self.count()
        with self._server.call() as (client, timeout):
            iterator = client.query_iterator(
                self.collection,
                batch_size=SCAN_PAGE,
                filter=self._after(after),
                output_fields=["*"],
                **STRONG,
                **timeout,
            )
        try:
            while True:
                with self._server.translate_errors():
                    rows = iterator.next()
                if not rows:
                    return
                yield self._page(rows)
        finally:
            iterator.close()

    def search(self, vector: Vector, k: int) -> Sequence[Hit]:
        """See ``VectorCollection.search``."""
        with self._server.call() as (client, timeout):
            found = client.search(
                self.collection, data=[vector.tolist()], anns_field=self.vector, filter=self.where,
                limit=min(k + SPARE, MAX_HITS), output_fields=["*"], search_params={"params": dict(self.search_with)},
                **STRONG, **timeout,
            )  # fmt: skip
        page = self._page([hit["entity"] | {self._key: hit.get("id", hit.get(self._key))} for hit in found[0]])
        s = cosines(page.vectors, vector)
        return [Hit(page.documents[i], float(s[i])) for i in np.argsort(-s, kind="stable")[:k].tolist()]

    def find(self, ids: Sequence[str]) -> CollectionPage:
        """See ``VectorCollection.find``."""
        rows, keys = [], self._keys(ids)
        for start in range(0, len(keys), SCAN_PAGE):
            some = f"{self._key} in {json.dumps(keys[start : start + SCAN_PAGE], ensure_ascii=False)}"
            condition = f"({self.where}) and {some}" if self.where else some
            with self._server.call() as (client, timeout):
                rows += client.query(self.collection, filter=condition, output_fields=["*"], **STRONG, **timeout)
        return self._page(rows)

    def add(self, documents: Sequence[Document], vectors: Vector) -> None:
        """See ``VectorCollection.add``."""
        self._require_writable()
        rows = [
            {**d.metadata, **self._own(d), self._key: self._keys([d.id], strict=True)[0], self.vector: v.tolist()}
            for d, v in zip(documents, vectors, strict=True)
        ]
        if rows:
            with self._server.call() as (client, timeout):
                client.upsert(self.collection, rows, **timeout)

    def remove(self, ids: Sequence[str]) -> None:
        """See ``VectorCollection.remove``."""
        self._require_writable()
        if keys := self._keys(ids):
            with self._server.call() as (client, timeout):
                client.delete(self.collection, ids=keys, **timeout)

    def close(self) -> None:
        """See ``VectorCollection.close``."""
        self._server.close()

    def _own(self, d: Document) -> dict[str, str]:
        own = {self.text: d.text, self.source: d.source, self.title: d.title}
        return {name: value for name, value in own.items() if name}

    def _require_writable(self) -> None:
        if not self.writable:
            raise CapabilityError(
                f"{self.name} is read-only; set milvus_collection.writable: true to add and remove documents"
            )

    def _keys(self, ids: Sequence[str], *, strict: bool = False) -> list[int] | list[str]:
        """Ids in the type of the primary key."""
        if not self._numbered:
            return list(ids)
        numbers = [int(i) for i in ids if re.fullmatch(r"-?\d{1,19}", i)]
        if strict and len(numbers) < len(ids):
            raise DataError(f"{self.name} needs integers as ids; got {quote_ids(ids)}")
        return numbers

    def _after(self, after: str) -> str:
        """The filter of a scan that resumes after an id."""
        if not after:
            return self.where
        own = f"{self._key} > {json.dumps(self._keys([after])[0], ensure_ascii=False)}"
        return f"({self.where}) and {own}" if self.where else own

    def _page(self, rows: Sequence[Mapping[str, Any]]) -> CollectionPage:
        """A page without the entities that lack text or vector."""
        whole = [r for r in rows if r.get(self.text) is not None and r.get(self.vector) is not None]
        if other := [str(r[self._key]) for r in whole if len(r[self.vector]) != self._dim]:
            raise DataError(f"{self.name}: the vectors of {quote_ids(other)} do not have {self._dim} dimensions")
        textless = sum(r.get(self.text) is None for r in rows)
        vectors = np.array([r[self.vector] for r in whole], np.float32).reshape(-1, self._dim)
        after = str(rows[-1][self._key]) if rows else ""
        return CollectionPage(
            [self._document(r) for r in whole], vectors, after, (), textless, len(rows) - len(whole) - textless
        )

    def _document(self, row: Mapping[str, Any]) -> Document:
        own = {self._key, self.text, self.vector, self.source, self.title}
        rest = {name: value for name, value in row.items() if name not in own}
        source, title = row.get(self.source), row.get(self.title)
        return Document(str(row[self._key]), str(row[self.text]), str(title or ""), str(source or ""), "", rest)
