"""An existing Qdrant collection: points with a vector and a payload, used in place."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from casemate.backends.clients.qdrant import QdrantServer
from casemate.backends.clients.rest import without_credentials
from casemate.backends.sidecar.row_collection import SCAN_PAGE, RowCollection, StoredRow, field_of, require_writable
from casemate.backends.sidecar.row_inventory import quote_ids
from casemate.errors import ConfigError, DataError, needs
from casemate.types import Document, Secret, Vector

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

END = "end"  # cursor of a completed scan
MIN_VERSION = (1, 10)  # first server version with ``query_points``


@dataclass(eq=False)
class QdrantCollection(RowCollection):
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
        self.name = f"qdrant {without_credentials(self.url)}, collection {self.collection}"
        if_absent = "the collection is missing; check whether it was renamed or deleted"
        self._server = QdrantServer(
            "qdrant_collection", self.name, self.url, self.api_key, self.timeout_s, if_absent, MIN_VERSION
        )
        self.own_fields = frozenset(self.only)
        self._client: QdrantClient | None = None

    def errors(self) -> AbstractContextManager[None]:
        return self._server.translate_errors()

    def connect(self) -> int:
        from qdrant_client.models import Distance

        if self._client is None:
            self._client = self._connected()
        if not self._client.collection_exists(self.collection):
            raise DataError(f"{self.name} does not exist; set qdrant_collection.collection to an existing one")
        params = self._client.get_collection(self.collection).config.params.vectors
        kinds: dict[str, Any] = dict(params) if isinstance(params, Mapping) else {"": params}
        if self.vector not in kinds:
            raise DataError(f"{self.name} has no vector {self.vector!r}; it has {', '.join(map(repr, kinds))}")
        self.by_cosine = kinds[self.vector].distance == Distance.COSINE
        return int(kinds[self.vector].size)

    def _connected(self) -> QdrantClient:
        from qdrant_client import QdrantClient

        if self._server.remote:
            return self._server.connect()
        location: dict[str, Any] = {"location": self.url} if self.url == ":memory:" else {"path": self.url}
        return QdrantClient(**location, force_disable_check_same_thread=True)

    def count(self) -> int:
        """See ``VectorCollection.count``. Exact."""
        with self.errors():
            return int(self._open_client().count(self.collection, count_filter=self._filter(), exact=True).count)

    def pages(self, after: str) -> Iterator[tuple[Sequence[StoredRow], str]]:
        """See ``RowCollection``. In order of the point ids."""
        while after != END:
            points, offset = self._open_client().scroll(
                self.collection, scroll_filter=self._filter(), limit=SCAN_PAGE, with_payload=True,
                offset=point_id(after) if after else None, with_vectors=self._vectors(),
            )  # fmt: skip
            after = END if offset is None else str(offset)
            if points:
                yield self._rows(points), after

    def nearest(self, vector: Vector, k: int) -> Iterable[StoredRow]:
        return self._rows(
            self._open_client().query_points(
                self.collection, query=vector.tolist(), using=self.vector or None, with_payload=True,
                query_filter=self._filter(whole=True), limit=k, with_vectors=self._vectors(),
                search_params=self._search_with(k),
            ).points
        )  # fmt: skip

    def stored(self, ids: Sequence[str]) -> Iterable[StoredRow]:
        wanted = [p for p in map(point_id, ids) if p is not None]
        client = self._open_client()
        points = client.retrieve(self.collection, wanted, True, self._vectors()) if wanted else ()
        return self._rows([p for p in points if all(field_of(p.payload or {}, k) == v for k, v in self.only.items())])

    def add(self, documents: Sequence[Document], vectors: Vector) -> None:
        from qdrant_client import models

        require_writable(self, "qdrant_collection")
        if odd := [d.id for d in documents if point_id(d.id) is None]:
            raise DataError(f"{self.name} needs numbers or UUIDs as ids; got {quote_ids(odd)}")
        if not documents:
            return
        points = [
            models.PointStruct(
                id=point_id(d.id),  # type: ignore[arg-type]
                vector={self.vector: v.tolist()} if self.vector else v.tolist(),
                payload={**d.metadata, **self._own(d, self.only)},
            )
            for d, v in zip(documents, vectors, strict=True)
        ]
        with self.errors():
            self._open_client().upsert(self.collection, points, wait=True)

    def remove(self, ids: Sequence[str]) -> None:
        require_writable(self, "qdrant_collection")
        wanted: Any = [p for p in map(point_id, ids) if p is not None]
        if wanted:
            with self.errors():
                self._open_client().delete(self.collection, wanted, wait=True)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

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

    def _rows(self, points: Sequence[Any]) -> list[StoredRow]:
        return [StoredRow(str(p.id), self._vector_of(p), p.payload or {}) for p in points]

    def _vector_of(self, point: Any) -> Any:
        held = point.vector
        return held.get(self.vector) if isinstance(held, Mapping) else held

    def _open_client(self) -> QdrantClient:
        if self._client is None:
            raise self._server.error("the collection is not open")
        return self._client


def point_id(identity: str) -> int | str | None:
    """The point id: a number or a UUID. None: the text is neither."""
    if identity.isascii() and identity.isdigit() and str(int(identity)) == identity:
        return int(identity)
    try:
        return identity if str(uuid.UUID(identity)) == identity else None
    except ValueError:
        return None
