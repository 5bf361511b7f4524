"""A collection of somebody else's in Milvus: entities with a vector and fields, as they stand."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from casemate.attaching.tally import named
from casemate.collection import Collection, Piece, cosines
from casemate.errors import BackendError, CapabilityError, ConfigError, DataError, needs
from casemate.types import Document, Hit, Secret, Vector

if TYPE_CHECKING:
    from pymilvus import MilvusClient

PIECE = 1024
"""Entities that a scan reads at a time."""
SPARE = 16
"""Entities beyond k that are scored again in float64."""
MOST = 16_384
"""Entities that Milvus gives for one question."""
HOPELESS = re.compile("auth|password|token|permission|privilege|denied|illegal connection", re.IGNORECASE)
"""What a server says that it will say the next time, too."""
ABSENT = re.compile("(collection|database).{0,80}not (found|exist|loaded)|can't find collection", re.IGNORECASE)


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
        search_with: Parameters of the index for a search, as ``{ef: 256}`` or ``{nprobe: 64}``: the detection needs
            the true nearest entity.
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
        with needs("casemate[milvus]"):
            import pymilvus  # noqa: F401
        self.url, self.token = Secret(self.url), Secret(self.token)
        self._where = f"milvus {re.sub('//.*@', '//', self.url)}, collection {self.collection}"
        self._client: MilvusClient | None = None
        self._dim, self._key, self._numbered = 0, "", False

    @property
    def name(self) -> str:
        """See ``Collection.name``."""
        return self._where

    def open(self) -> int:
        """See ``Collection.open``."""
        from pymilvus import DataType, MilvusClient

        with self._explained():
            if self._client is None:
                logging.getLogger("pymilvus.decorators").addFilter(lambda record: False)  # it is said by us
                self._client = MilvusClient(self.url, token=self.token, db_name=self.database, timeout=self.timeout_s)
            fields = {f["name"]: f for f in self._client.describe_collection(self.collection)["fields"]}
            indexes = self._client.list_indexes(self.collection, self.vector)
            kinds = [self._client.describe_index(self.collection, i) or {} for i in indexes]
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
        with self._explained() as client:
            found = client.query(self.collection, filter=self.where, output_fields=["count(*)"], **self._strong)
            return int(found[0]["count(*)"])

    def scan(self, after: str = "") -> Iterator[Piece]:
        """See ``Collection.scan``: in the order of the primary key, by Milvus's iterator."""
        with self._explained() as client:
            iterator = client.query_iterator(
                self.collection, batch_size=PIECE, filter=self._behind(after), output_fields=["*"], **self._strong
            )
        try:
            while True:
                with self._explained():
                    rows = iterator.next()
                if not rows:
                    return
                yield self._piece(rows)
        finally:
            iterator.close()

    def search(self, vector: Vector, k: int) -> Sequence[Hit]:
        """See ``Collection.search``."""
        with self._explained() as client:
            found = client.search(
                self.collection, data=[vector.tolist()], anns_field=self.vector, filter=self.where,
                limit=min(k + SPARE, MOST), output_fields=["*"], search_params={"params": dict(self.search_with)},
                **self._strong,
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
            with self._explained() as client:
                rows += client.query(self.collection, filter=condition, output_fields=["*"], **self._strong)
        return self._piece(rows)

    def add(self, documents: Sequence[Document], vectors: Vector) -> None:
        """See ``Collection.add``."""
        self._require_writable()
        rows = [
            {**d.metadata, **self._own(d), self._key: self._listed([d.id], strict=True)[0], self.vector: v.tolist()}
            for d, v in zip(documents, vectors, strict=True)
        ]
        if rows:
            with self._explained() as client:
                client.upsert(self.collection, rows, timeout=self.timeout_s)

    def remove(self, ids: Sequence[str]) -> None:
        """See ``Collection.remove``."""
        self._require_writable()
        if listed := self._listed(ids):
            with self._explained() as client:
                client.delete(self.collection, ids=listed, timeout=self.timeout_s)

    def close(self) -> None:
        """See ``Collection.close``."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @property
    def _strong(self) -> dict[str, Any]:
        """Sees all that was written before."""
        return {"consistency_level": "Strong", "timeout": self.timeout_s}

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

    @contextmanager
    def _explained(self) -> Iterator[MilvusClient]:
        """The client; what it complains about in the operator's words."""
        import grpc
        from pymilvus.exceptions import MilvusException

        try:
            yield self._client  # None only while it is made, which does not look at it
        except MilvusException as error:
            said = " ".join(str(error).split()).replace(str(self.token) or "\0", "***")
            if ABSENT.search(said):
                raise DataError(f"{self.name} is gone or not loaded; was it renamed or released? ({said})") from error
            retryable = "Fail connecting" in said or not HOPELESS.search(said)
            raise BackendError(f"{self.name}: {said}", backend="milvus_collection", retryable=retryable) from error
        except (grpc.RpcError, OSError) as error:
            what = f"{self.name}: cannot be reached: {error}"
            raise BackendError(what, backend="milvus_collection", retryable=True) from error
        except AttributeError as error:
            if self._client is not None:
                raise
            raise BackendError(f"{self.name} is not open", backend="milvus_collection", retryable=False) from error
