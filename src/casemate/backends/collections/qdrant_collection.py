"""An existing Qdrant collection: points with a vector and a payload, used in place."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from casemate.backends.clients.qdrant import QdrantServer
from casemate.backends.clients.rest import without_credentials
from casemate.backends.sidecar.row_inventory import quote_ids
from casemate.errors import CapabilityError, ConfigError, DataError, needs
from casemate.maths.vectors import cosines
from casemate.protocols import CollectionPage, VectorCollection
from casemate.types import Document, Hit, Secret, Vector

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

SCAN_PAGE = 1024
"""Points per page of a scan."""
SPARE = 16
"""Points to fetch above k, for scoring in float64."""
END = "end"
"""Cursor of a completed scan."""
MIN_VERSION = (1, 10)
"""First server version with ``query_points``."""


@dataclass(eq=False)
class QdrantCollection(VectorCollection):
    """Points of a collection. Qdrant finds the nearest; they are scored again exactly. Document ids are point ids.

    Attributes:
        url: ``http://host:6333``. A folder or ``:memory:`` selects the client's local mode, for trials.
        collection: Its name.
        api_key: Empty: the server needs none.
        vector: Name of the vector, if a point has several. Empty: the only one.
        text: Payload key of the text.
        source: Payload key with the name of the point's source document. Empty: none.
        title: Payload key of the title. Empty: none.
        only: Payload keys and values that points must have; other points are ignored.
        exact: Whether Qdrant compares with all points. The detection needs the true nearest point.
        effort: Candidates during a search of the graph (hnsw_ef), if not exact.
        writable: Whether Casemate may add and remove documents. Their ids must be numbers or UUIDs.
        timeout_s: Limit of one call.
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
            raise ConfigError(
                "qdrant_collection: collection and text must not be empty, timeout_s and effort must be above 0"
            )
        with needs("casemate[qdrant]"):
            import qdrant_client  # noqa: F401
        self.url, self.api_key = Secret(self.url), Secret(self.api_key)
        where = f"qdrant {without_credentials(self.url)}, collection {self.collection}"
        if_absent = "the collection is missing; check whether it was renamed or deleted"
        self._server = QdrantServer(
            "qdrant_collection", where, self.url, self.api_key, self.timeout_s, if_absent, MIN_VERSION
        )
        self._client: QdrantClient | None = None
        self._dim = 0

    @property
    def name(self) -> str:
        """See ``VectorCollection.name``."""
        return self._server.where

    def open(self) -> int:
        """See ``VectorCollection.open``."""
        from qdrant_client.models import Distance

        if self._client is None:
            self._client = self._connected()
        with self._open_client() as client:
            if not client.collection_exists(self.collection):
                raise DataError(f"{self.name} does not exist; set qdrant_collection.collection to an existing one")
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
        location: dict[str, Any] = {"location": self.url} if self.url == ":memory:" else {"path": self.url}
        with self._server.translate_errors():
            return QdrantClient(**location, force_disable_check_same_thread=True)

    def count(self) -> int:
        """See ``VectorCollection.count``. Exact."""
        with self._open_client() as client:
            return int(client.count(self.collection, count_filter=self._filter(), exact=True).count)

    def scan(self, after: str = "") -> Iterator[CollectionPage]:
        """See ``VectorCollection.scan``. In order of the point ids."""
        if after == END:
            return
        offset: Any = point_id(after) if after else None
        while True:
            with self._open_client() as client:
                points, offset = client.scroll(
                    self.collection, scroll_filter=self._filter(), limit=SCAN_PAGE, offset=offset, with_payload=True,
                    with_vectors=self._vectors(),
                )  # fmt: skip
            if points:
                yield self._page(points, str(offset) if offset is not None else END)
            if offset is None:
                return

    def search(self, vector: Vector, k: int) -> Sequence[Hit]:
        """See ``VectorCollection.search``."""
        with self._open_client() as client:
            points = client.query_points(
                self.collection, query=vector.tolist(), using=self.vector or None, with_payload=True,
                query_filter=self._filter(whole=True), limit=k + SPARE, with_vectors=self._vectors(),
                search_params=self._search_with(k + SPARE),
            ).points  # fmt: skip
        page = self._page(points, "")
        s = cosines(page.vectors, vector)
        return [Hit(page.documents[i], float(s[i])) for i in np.argsort(-s, kind="stable")[:k].tolist()]

    def find(self, ids: Sequence[str]) -> CollectionPage:
        """See ``VectorCollection.find``."""
        wanted = [p for p in map(point_id, ids) if p is not None]
        with self._open_client() as client:
            points = client.retrieve(self.collection, wanted, with_payload=True, with_vectors=self._vectors())
        mine = [p for p in points if all((p.payload or {}).get(k) == v for k, v in self.only.items())]
        return self._page(mine, "")

    def add(self, documents: Sequence[Document], vectors: Vector) -> None:
        """See ``VectorCollection.add``."""
        from qdrant_client import models

        self._require_writable()
        if odd := [d.id for d in documents if point_id(d.id) is None]:
            raise DataError(f"{self.name} needs numbers or UUIDs as ids; got {quote_ids(odd)}")
        if not documents:
            return
        points = [
            models.PointStruct(
                id=point_id(d.id),  # type: ignore[arg-type]
                vector={self.vector: v.tolist()} if self.vector else v.tolist(),
                payload=self._payload(d),
            )
            for d, v in zip(documents, vectors, strict=True)
        ]
        with self._open_client() as client:
            client.upsert(self.collection, points, wait=True)

    def remove(self, ids: Sequence[str]) -> None:
        """See ``VectorCollection.remove``."""
        self._require_writable()
        wanted: Any = [p for p in map(point_id, ids) if p is not None]
        if wanted:
            with self._open_client() as client:
                client.delete(self.collection, wanted, wait=True)

    def close(self) -> None:
        """See ``VectorCollection.close``."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _payload(self, d: Document) -> dict[str, Any]:
        own = {self.text: d.text, self.source: d.source, self.title: d.title}
        return {**d.metadata, **self.only, **{key: value for key, value in own.items() if key}}

    def _require_writable(self) -> None:
        if not self.writable:
            raise CapabilityError(
                f"{self.name} is read-only; set qdrant_collection.writable: true to add and remove documents"
            )

    def _search_with(self, limit: int) -> Any:
        from qdrant_client import models

        if not self._server.remote:
            return None  # local mode is exact, and warns about search parameters
        return models.SearchParams(exact=self.exact, hnsw_ef=max(self.effort, limit))

    def _vectors(self) -> bool | list[str]:
        return [self.vector] if self.vector else True

    def _filter(self, *, whole: bool = False) -> Any:
        """The filter by ``only``. ``whole``: points must also have a text."""
        from qdrant_client import models

        match: Any = [models.FieldCondition(key=k, match=models.MatchValue(value=v)) for k, v in self.only.items()]
        empty: Any = [models.IsEmptyCondition(is_empty=models.PayloadField(key=self.text))] if whole else []
        return models.Filter(must=match, must_not=empty) if match or empty else None

    def _page(self, points: Sequence[Any], after: str) -> CollectionPage:
        """A page without the points that lack text or vector."""
        rows = [(str(p.id), p.payload or {}, self._vector_of(p)) for p in points]
        whole = [(i, payload, v) for i, payload, v in rows if payload.get(self.text) is not None and v is not None]
        if other := [i for i, _, v in whole if len(v) != self._dim]:
            raise DataError(f"{self.name}: the vectors of {quote_ids(other)} do not have {self._dim} dimensions")
        textless = sum(payload.get(self.text) is None for _, payload, _ in rows)
        vectors = np.array([v for _, _, v in whole], np.float32).reshape(-1, self._dim)
        documents = [self._document(i, payload) for i, payload, _ in whole]
        return CollectionPage(documents, vectors, after, (), textless, len(rows) - len(whole) - textless)

    def _document(self, identity: str, payload: Mapping[str, Any]) -> Document:
        own = {self.text, self.source, self.title, *self.only}
        rest = {key: value for key, value in payload.items() if key not in own}
        source, title = payload.get(self.source), payload.get(self.title)
        return Document(identity, str(payload[self.text]), str(title or ""), str(source or ""), "", rest)

    def _vector_of(self, point: Any) -> Any:
        held = point.vector
        return held.get(self.vector) if isinstance(held, Mapping) else held

    @contextmanager
    def _open_client(self) -> Iterator[QdrantClient]:
        """The client, with errors translated."""
        if self._client is None:
            raise self._server.error("the collection is not open")
        with self._server.translate_errors():
            yield self._client


def point_id(identity: str) -> int | str | None:
    """The point id: a number or a UUID. None: the text is neither."""
    if identity.isascii() and identity.isdigit() and str(int(identity)) == identity:
        return int(identity)
    try:
        return identity if str(uuid.UUID(identity)) == identity else None
    except ValueError:
        return None
