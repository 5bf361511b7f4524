"""A collection of somebody else's in Qdrant: points with a vector and a payload, as they stand."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from casemate.attaching.tally import named
from casemate.collection import Collection, Piece, cosines
from casemate.errors import CapabilityError, ConfigError, DataError, needs
from casemate.qdrant import Server
from casemate.types import Document, Hit, Secret, Vector

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

PIECE = 1024
"""Points that a scan reads at a time."""
SPARE = 16
"""Points beyond k that are scored again in float64."""
END = "end"
"""Where a scan goes on that has seen all."""
OLDEST = (1, 10)
"""Of the servers, the first that can be asked as we ask (``query_points``)."""


@dataclass(eq=False)
class QdrantCollection(Collection):
    """Points of a collection; the nearest as Qdrant finds them, scored again exactly. A document's id is the point's.

    Attributes:
        url: ``http://host:6333``; a folder, or ``:memory:``, is the client's local mode, for trials.
        collection: Its name.
        api_key: What the server asks for.
        vector: Name of the vector, if a point has several. Empty: the only one.
        text: Key of the payload that holds the text.
        source: Key that names the record a point was cut from. Empty: none.
        title: Key of a title. Empty: none.
        only: Keys and values that points must have; the others are not there for us.
        exact: Whether Qdrant compares with all points: the detection needs the true nearest one.
        effort: Points that a search in its graph keeps open (hnsw_ef), if not exact.
        writable: Whether documents may be added and removed by way of us. Their ids must be numbers or UUIDs.
        timeout_s: How long one call may take.
    """

    url: Secret
    collection: str
    api_key: Secret = Secret("")
    vector: str = ""
    text: str = "text"
    source: str = ""
    title: str = ""
    only: dict[str, str | int | bool] = field(default_factory=dict)
    exact: bool = True
    effort: int = 256
    writable: bool = False
    timeout_s: float = 10

    def __post_init__(self) -> None:
        if not self.collection or not self.text or not self.timeout_s > 0 or self.effort < 1:
            raise ConfigError("qdrant_collection: collection and text need names, timeout_s and effort must be > 0")
        with needs("casemate[qdrant]"):
            import qdrant_client  # noqa: F401
        self.url, self.api_key = Secret(self.url), Secret(self.api_key)
        where = f"qdrant {re.sub('//.*@', '//', self.url)}, collection {self.collection}"
        gone = "the collection is gone; was it renamed or deleted?"
        self._server = Server("qdrant_collection", where, self.url, self.api_key, self.timeout_s, gone, OLDEST)
        self._client: QdrantClient | None = None
        self._dim = 0

    @property
    def name(self) -> str:
        """See ``Collection.name``."""
        return self._server.where

    def open(self) -> int:
        """See ``Collection.open``."""
        from qdrant_client.models import Distance

        if self._client is None:
            self._client = self._connected()
        with self._explained() as client:
            if not client.collection_exists(self.collection):
                raise DataError(f"{self.name} does not exist; name one that does")
            params = client.get_collection(self.collection).config.params.vectors
        kinds: dict[str, Any] = dict(params) if isinstance(params, Mapping) else {"": params}
        if self.vector not in kinds:
            raise DataError(f"{self.name} has no vector {self.vector!r}; it has {', '.join(map(repr, kinds))}")
        self._dim = int(kinds[self.vector].size)
        self.by_cosine = kinds[self.vector].distance == Distance.COSINE
        return self._dim

    def _connected(self) -> QdrantClient:
        from qdrant_client import QdrantClient

        if self._server.remote:
            return self._server.connect()
        place: dict[str, Any] = {"location": self.url} if self.url == ":memory:" else {"path": self.url}
        with self._server.explained():
            return QdrantClient(**place, force_disable_check_same_thread=True)

    def count(self) -> int:
        """See ``Collection.count``. Exact."""
        with self._explained() as client:
            return int(client.count(self.collection, count_filter=self._filter(), exact=True).count)

    def scan(self, after: str = "") -> Iterator[Piece]:
        """See ``Collection.scan``: in the order of the points' ids, page by page."""
        if after == END:
            return
        offset: Any = _point(after) if after else None
        while True:
            with self._explained() as client:
                points, offset = client.scroll(
                    self.collection, scroll_filter=self._filter(), limit=PIECE, offset=offset, with_payload=True,
                    with_vectors=self._vectors(),
                )  # fmt: skip
            if points:
                yield self._piece(points, str(offset) if offset is not None else END)
            if offset is None:
                return

    def search(self, vector: Vector, k: int) -> Sequence[Hit]:
        """See ``Collection.search``."""
        with self._explained() as client:
            points = client.query_points(
                self.collection, query=vector.tolist(), using=self.vector or None, with_payload=True,
                query_filter=self._filter(whole=True), limit=k + SPARE, with_vectors=self._vectors(),
                search_params=self._search_with(k + SPARE),
            ).points  # fmt: skip
        piece = self._piece(points, "")
        s = cosines(piece.vectors, vector)
        return [Hit(piece.documents[i], float(s[i])) for i in np.argsort(-s, kind="stable")[:k].tolist()]

    def find(self, ids: Sequence[str]) -> Piece:
        """See ``Collection.find``."""
        wanted = [p for p in map(_point, ids) if p is not None]
        with self._explained() as client:
            points = client.retrieve(self.collection, wanted, with_payload=True, with_vectors=self._vectors())
        mine = [p for p in points if all((p.payload or {}).get(k) == v for k, v in self.only.items())]
        return self._piece(mine, "")

    def add(self, documents: Sequence[Document], vectors: Vector) -> None:
        """See ``Collection.add``."""
        from qdrant_client import models

        self._require_writable()
        if odd := [d.id for d in documents if _point(d.id) is None]:
            raise DataError(f"{self.name} takes numbers and UUIDs as ids, not {named(odd)}")
        if not documents:
            return
        points = [
            models.PointStruct(
                id=_point(d.id),  # type: ignore[arg-type]
                vector={self.vector: v.tolist()} if self.vector else v.tolist(),
                payload=self._payload(d),
            )
            for d, v in zip(documents, vectors, strict=True)
        ]
        with self._explained() as client:
            client.upsert(self.collection, points, wait=True)

    def remove(self, ids: Sequence[str]) -> None:
        """See ``Collection.remove``."""
        self._require_writable()
        wanted: Any = [p for p in map(_point, ids) if p is not None]
        if wanted:
            with self._explained() as client:
                client.delete(self.collection, wanted, wait=True)

    def close(self) -> None:
        """See ``Collection.close``."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _payload(self, d: Document) -> dict[str, Any]:
        own = {self.text: d.text, self.source: d.source, self.title: d.title}
        return {**d.metadata, **self.only, **{key: value for key, value in own.items() if key}}

    def _require_writable(self) -> None:
        if not self.writable:
            raise CapabilityError(f"{self.name} is only read here; set qdrant_collection.writable to add and remove")

    def _search_with(self, limit: int) -> Any:
        from qdrant_client import models

        if not self._server.remote:
            return None  # local mode is exact, and warns of being told so
        return models.SearchParams(exact=self.exact, hnsw_ef=max(self.effort, limit))

    def _vectors(self) -> bool | list[str]:
        return [self.vector] if self.vector else True

    def _filter(self, *, whole: bool = False) -> Any:
        """The condition that a point is there for us; ``whole``: and that it has a text."""
        from qdrant_client import models

        match: Any = [models.FieldCondition(key=k, match=models.MatchValue(value=v)) for k, v in self.only.items()]
        empty: Any = [models.IsEmptyCondition(is_empty=models.PayloadField(key=self.text))] if whole else []
        return models.Filter(must=match, must_not=empty) if match or empty else None

    def _piece(self, points: Sequence[Any], after: str) -> Piece:
        """Points as a piece, without those that lack text or vector."""
        rows = [(str(p.id), p.payload or {}, self._vector_of(p)) for p in points]
        whole = [(i, payload, v) for i, payload, v in rows if payload.get(self.text) is not None and v is not None]
        if other := [i for i, _, v in whole if len(v) != self._dim]:
            raise DataError(f"{self.name}: the vectors of {named(other)} are not of {self._dim} numbers")
        textless = sum(payload.get(self.text) is None for _, payload, _ in rows)
        vectors = np.array([v for _, _, v in whole], np.float32).reshape(-1, self._dim)
        documents = [self._document(i, payload) for i, payload, _ in whole]
        return Piece(documents, vectors, after, (), textless, len(rows) - len(whole) - textless)

    def _document(self, identity: str, payload: Mapping[str, Any]) -> Document:
        own = {self.text, self.source, self.title, *self.only}
        rest = {key: value for key, value in payload.items() if key not in own}
        source, title = payload.get(self.source), payload.get(self.title)
        return Document(identity, str(payload[self.text]), str(title or ""), str(source or ""), "", rest)

    def _vector_of(self, point: Any) -> Any:
        held = point.vector
        return held.get(self.vector) if isinstance(held, Mapping) else held

    @contextmanager
    def _explained(self) -> Iterator[QdrantClient]:
        """The client; what it complains about in the operator's words."""
        if self._client is None:
            raise self._server.failure("the collection is not open")
        with self._server.explained():
            yield self._client


def _point(identity: str) -> int | str | None:
    """A point's id: a number or a UUID; None: neither."""
    if identity.isascii() and identity.isdigit() and str(int(identity)) == identity:
        return int(identity)
    try:
        return identity if str(uuid.UUID(identity)) == identity else None
    except ValueError:
        return None
