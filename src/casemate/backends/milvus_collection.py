"""A collection of somebody else's in Milvus: entities with a vector and fields, as they stand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from casemate.attaching.tally import named
from casemate.collection import Collection, Piece, cosines
from casemate.errors import CapabilityError, ConfigError, DataError
from casemate.milvus import Server
from casemate.types import Document, Hit, Secret, Vector

PIECE = 1024
"""Entities that a scan reads at a time."""
SPARE = 16
"""Entities beyond k that are scored again in float64."""
MOST = 16_384
"""Entities that Milvus gives for one question."""
STRONG = {"consistency_level": "Strong"}
"""Sees all that was written before."""


@dataclass(eq=False)
class MilvusCollection(Collection):
    """Entities of a collection; the nearest as Milvus finds them, scored again exactly.

    With an index whose metric is not COSINE, Milvus looks for the nearest by that metric: give vectors of unit length,
    for which all metrics agree. ``casemate attach`` counts those that are not.

    Attributes:
        url: ``http://host:19530``.
        collection: Its name; it must be loaded.
        token: ``user:password``, or an API key.
        database: Its name. Empty: the default one.
        text: Field of the text.
        vector: Field of the vector, of type FLOAT_VECTOR.
        source: Field that names the record an entity was cut from. Empty: none.
        title: Field of a title. Empty: none.
        where: Filter expression; other entities are not there for us. Written by the operator, and not checked.
        search_with: Parameters of the index for a search, as ``{ef: 256}``, or ``{nprobe: 512}`` of 1,024 lists:
            the detection needs the true nearest entity.
        writable: Whether documents may be added and removed by way of us.
        timeout_s: How long one call may take.
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
            raise ConfigError("milvus_collection: collection, text and vector need names, timeout_s must be > 0")
        self.url, self.token = Secret(self.url), Secret(self.token)
        where = f"milvus {self.url}, collection {self.collection}"
        gone = "the collection is gone or not loaded; was it renamed or released?"
        self._server = Server("milvus_collection", where, self.url, self.token, self.database, self.timeout_s, gone)
        self._dim, self._key, self._numbered = 0, "", False

    @property
    def name(self) -> str:
        """See ``Collection.name``."""
        return self._server.where

    def open(self) -> int:
        """See ``Collection.open``."""
        from pymilvus import DataType

        self._server.connect()
        with self._server.call() as (client, patient):
            fields = {f["name"]: f for f in client.describe_collection(self.collection, **patient)["fields"]}
            indexes = client.list_indexes(self.collection, self.vector, **patient)
            kinds = [client.describe_index(self.collection, i, **patient) or {} for i in indexes]
        if self.vector not in fields or "dim" not in fields[self.vector].get("params", {}):
            raise DataError(f"{self.name} has no field {self.vector!r} of vectors; it has {', '.join(sorted(fields))}")
        if fields[self.vector]["type"] != DataType.FLOAT_VECTOR:
            raise DataError(f"{self.name}: the field {self.vector!r} is not of type FLOAT_VECTOR, which is needed")
        key = next(f for f in fields.values() if f.get("is_primary"))
        self._key, self._numbered = key["name"], key["type"] == DataType.INT64
        self._dim = int(fields[self.vector]["params"]["dim"])
        self.by_cosine = [k.get("metric_type") for k in kinds] == ["COSINE"]
        return self._dim

    def count(self) -> int:
        """See ``Collection.count``. Exact."""
        with self._server.call() as (client, patient):
            found = client.query(self.collection, filter=self.where, output_fields=["count(*)"], **STRONG, **patient)
            return int(found[0]["count(*)"])

    def scan(self, after: str = "") -> Iterator[Piece]:
        """See ``Collection.scan``: in the order of the primary key, by Milvus's iterator."""
        with self._server.call() as (client, patient):
            iterator = client.query_iterator(
                self.collection, batch_size=PIECE, filter=self._behind(after), output_fields=["*"], **STRONG, **patient
            )
        try:
            while True:
                with self._server.explained():
                    rows = iterator.next()
                if not rows:
                    return
                yield self._piece(rows)
        finally:
            iterator.close()

    def search(self, vector: Vector, k: int) -> Sequence[Hit]:
        """See ``Collection.search``."""
        with self._server.call() as (client, patient):
            found = client.search(
                self.collection, data=[vector.tolist()], anns_field=self.vector, filter=self.where,
                limit=min(k + SPARE, MOST), output_fields=["*"], search_params={"params": dict(self.search_with)},
                **STRONG, **patient,
            )  # fmt: skip
        piece = self._piece([hit["entity"] | {self._key: hit.get("id", hit.get(self._key))} for hit in found[0]])
        s = cosines(piece.vectors, vector)
        return [Hit(piece.documents[i], float(s[i])) for i in np.argsort(-s, kind="stable")[:k].tolist()]

    def find(self, ids: Sequence[str]) -> Piece:
        """See ``Collection.find``."""
        rows, listed = [], self._listed(ids)
        for start in range(0, len(listed), PIECE):
            some = f"{self._key} in {json.dumps(listed[start : start + PIECE], ensure_ascii=False)}"
            condition = f"({self.where}) and {some}" if self.where else some
            with self._server.call() as (client, patient):
                rows += client.query(self.collection, filter=condition, output_fields=["*"], **STRONG, **patient)
        return self._piece(rows)

    def add(self, documents: Sequence[Document], vectors: Vector) -> None:
        """See ``Collection.add``."""
        self._require_writable()
        rows = [
            {**d.metadata, **self._own(d), self._key: self._listed([d.id], strict=True)[0], self.vector: v.tolist()}
            for d, v in zip(documents, vectors, strict=True)
        ]
        if rows:
            with self._server.call() as (client, patient):
                client.upsert(self.collection, rows, **patient)

    def remove(self, ids: Sequence[str]) -> None:
        """See ``Collection.remove``."""
        self._require_writable()
        if listed := self._listed(ids):
            with self._server.call() as (client, patient):
                client.delete(self.collection, ids=listed, **patient)

    def close(self) -> None:
        """See ``Collection.close``."""
        self._server.close()

    def _own(self, d: Document) -> dict[str, str]:
        own = {self.text: d.text, self.source: d.source, self.title: d.title}
        return {name: value for name, value in own.items() if name}

    def _require_writable(self) -> None:
        if not self.writable:
            raise CapabilityError(f"{self.name} is only read here; set milvus_collection.writable to add and remove")

    def _listed(self, ids: Sequence[str], *, strict: bool = False) -> list[int] | list[str]:
        """Ids as the primary key has them."""
        if not self._numbered:
            return list(ids)
        numbers = [int(i) for i in ids if re.fullmatch(r"-?\d{1,19}", i)]
        if strict and len(numbers) < len(ids):
            raise DataError(f"{self.name} takes whole numbers as ids, not {named(ids)}")
        return numbers

    def _behind(self, after: str) -> str:
        """The condition of a scan that goes on."""
        if not after:
            return self.where
        own = f"{self._key} > {json.dumps(self._listed([after])[0], ensure_ascii=False)}"
        return f"({self.where}) and {own}" if self.where else own

    def _piece(self, rows: Sequence[Mapping[str, Any]]) -> Piece:
        """Entities as a piece, without those that lack text or vector."""
        whole = [r for r in rows if r.get(self.text) is not None and r.get(self.vector) is not None]
        if other := [str(r[self._key]) for r in whole if len(r[self.vector]) != self._dim]:
            raise DataError(f"{self.name}: the vectors of {named(other)} are not of {self._dim} numbers")
        textless = sum(r.get(self.text) is None for r in rows)
        vectors = np.array([r[self.vector] for r in whole], np.float32).reshape(-1, self._dim)
        after = str(rows[-1][self._key]) if rows else ""
        return Piece(
            [self._document(r) for r in whole], vectors, after, (), textless, len(rows) - len(whole) - textless
        )

    def _document(self, row: Mapping[str, Any]) -> Document:
        own = {self._key, self.text, self.vector, self.source, self.title}
        rest = {name: value for name, value in row.items() if name not in own}
        source, title = row.get(self.source), row.get(self.title)
        return Document(str(row[self._key]), str(row[self.text]), str(title or ""), str(source or ""), "", rest)
