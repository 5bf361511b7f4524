"""An existing Pinecone index: records with values and metadata, used in place over HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from casemate.backends.clients.rest import RestServer, without_credentials
from casemate.backends.sidecar.row_collection import RowCollection, StoredRow
from casemate.errors import ConfigError
from casemate.types import Secret, Vector

API_VERSION = "2025-04"
ID_PAGE = 100  # ids per page of a listing, and per request for their records
MAX_RESULTS = 1000  # largest number of records with values that Pinecone returns for one search
END = "end"  # cursor of a completed scan


@dataclass(eq=False)
class PineconeIndex(RowCollection):
    """Records of one namespace of a serverless index. Pinecone finds the nearest; they are scored again exactly.

    Pinecone lists ids of serverless indexes only. Its changes become visible after some seconds.

    A search for more than ``MAX_RESULTS`` records raises ``CapabilityError``.

    Attributes:
        url: Address of the index (its host, not that of the control plane): ``https://docs-abc.svc.REGION.pinecone.io``.
        api_key: The API key.
        namespace: Empty: the default namespace.
        text: Metadata field of the text.
        source: Metadata field with the name of the record's source document. Empty: none.
        title: Metadata field of the title. Empty: none.
        timeout_s: Limit of one step of a call.
    """

    max_results = MAX_RESULTS
    url: Secret
    api_key: Secret
    namespace: str = ""
    text: str = "text"
    source: str = ""
    title: str = ""
    timeout_s: float = 10

    def __post_init__(self) -> None:
        if not (self.text and self.api_key and self.timeout_s > 0):
            raise ConfigError("pinecone_index: text and api_key must not be empty, timeout_s must be above 0")
        self.url, self.api_key = Secret(self.url), Secret(self.api_key)
        headers = {"Api-Key": str(self.api_key), "X-Pinecone-Api-Version": API_VERSION}
        self.name = f"pinecone {without_credentials(self.url)}, namespace {self.namespace or 'default'}"
        if_absent = "the address is not of a Pinecone index; use the index's host"
        self._server = RestServer("pinecone_index", self.name, self.url, headers, self.timeout_s, if_absent)
        self._space = {"namespace": self.namespace} if self.namespace else {}

    def connect(self) -> int:
        self._server.connect()
        found = self._statistics()
        self.by_cosine = found.get("metric", "cosine") == "cosine"
        return int(found.get("dimension") or 0)

    def count(self) -> int:
        """See ``VectorCollection.count``. Follows changes after some seconds."""
        spaces = self._statistics().get("namespaces") or {}
        held = spaces.get(self.namespace or "__default__") or spaces.get(self.namespace) or {}
        return int(held.get("vectorCount", 0))

    def pages(self, after: str) -> Iterator[tuple[Sequence[StoredRow], str]]:
        """See ``RowCollection``. In the order of Pinecone's listing."""
        while after != END:
            token = {"paginationToken": after} if after else {}
            found = self._server.call("GET", "/vectors/list", None, limit=ID_PAGE, **self._space, **token)
            ids = [one["id"] for one in found.get("vectors") or ()]
            after = (found.get("pagination") or {}).get("next") or END
            if ids:
                yield self.stored(ids), after

    def nearest(self, vector: Vector, k: int) -> Iterable[StoredRow]:
        body = {"vector": vector.tolist(), "topK": k, "includeValues": True, "includeMetadata": True}
        return [self._row(one) for one in self._server.call("POST", "/query", body | self._space)["matches"]]

    def stored(self, ids: Sequence[str]) -> list[StoredRow]:
        rows = []
        for start in range(0, len(ids), ID_PAGE):
            some = list(ids[start : start + ID_PAGE])
            found = self._server.call("GET", "/vectors/fetch", None, ids=some, **self._space)
            rows += [self._row(one) for one in (found.get("vectors") or {}).values()]
        return rows

    def _statistics(self) -> Any:
        return self._server.call("POST", "/describe_index_stats", {})

    def _row(self, record: Mapping[str, Any]) -> StoredRow:
        return StoredRow(record["id"], record.get("values") or None, record.get("metadata") or {})
