"""An existing index of Elasticsearch or OpenSearch: documents with a vector field, used in place over HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from casemate.backends.clients.rest import RestServer, without_credentials
from casemate.backends.sidecar.row_collection import SCAN_PAGE, RowCollection, StoredRow, field_of
from casemate.errors import BackendError, ConfigError, DataError
from casemate.types import Secret, Vector

KEEP_ALIVE = "2m"  # time for which the server keeps the snapshot of a scan between two pages
MAX_RESULTS = 10_000
"""Largest number of candidates and, unless the index's ``max_result_window`` differs, of rows of one search."""
WHOLE = {"allow_partial_search_results": "false"}
"""Parameter of a search: a shard that fails is an error. By default, its rows would be missing."""
OMITS_VECTORS = (9, 2)  # first version of Elasticsearch whose responses have the vector only if it is requested


@dataclass(eq=False)
class ElasticsearchIndex(RowCollection):
    """Documents of an Elasticsearch or OpenSearch index. The server finds the nearest; they are scored again exactly.

    A scan reads one snapshot (point in time) in the order of the sequence numbers.

    A search for more than ``MAX_RESULTS`` rows raises ``CapabilityError``.

    Attributes:
        url: ``https://host:9200``, with ``user:password@`` if the server needs them. Never add a path.
        index: Name of the index.
        api_key: Elasticsearch API key, with ``monitor`` on the cluster, and ``read`` and ``view_index_metadata`` on the
            index. Empty: none.
        vector: Field of the vector, of type ``dense_vector`` or ``knn_vector``, with an index.
        text: Field of the text. ``a.b`` is the field ``b`` of the object ``a``.
        source: Field with the name of the row's source document. Empty: none.
        title: Field of the title. Empty: none.
        only: Fields and exact values that rows must have; other rows are ignored.
        effort: Candidates of each shard during a search. The detection needs the true nearest row.
        timeout_s: Limit of one step of a call.
    """

    max_results = MAX_RESULTS
    url: Secret
    index: str
    api_key: Secret = Secret("")
    vector: str = "vector"
    text: str = "text"
    source: str = ""
    title: str = ""
    only: dict[str, str | int | bool] = field(default_factory=dict)
    effort: int = 500
    timeout_s: float = 10

    def __post_init__(self) -> None:
        if not (self.index and self.text and self.vector and self.timeout_s > 0):
            raise ConfigError(
                "elasticsearch_index: index, text and vector must not be empty, timeout_s must be above 0"
            )
        if not 0 < self.effort <= MAX_RESULTS:
            raise ConfigError(f"elasticsearch_index.effort is {self.effort}; allowed: 1 to {MAX_RESULTS}")
        if re.search(r"[*,\s/?#]", self.index):
            raise ConfigError(f"elasticsearch_index.index is {self.index!r}; allowed: one name without wildcards")
        self.url, self.api_key = Secret(self.url), Secret(self.api_key)
        headers = {"Authorization": f"ApiKey {self.api_key}"} if self.api_key else {}
        self.name = f"elasticsearch {without_credentials(self.url)}, index {self.index}"
        if_absent = "the index is missing, or the address is not of Elasticsearch or OpenSearch; check both"
        self._server = RestServer("elasticsearch_index", self.name, self.url, headers, self.timeout_s, if_absent)
        self._path = f"/{quote(self.index, safe='')}"
        self._open_search, self._returned = False, dict[str, Any]()
        self.own_fields = frozenset({self.vector.partition(".")[0]})

    def connect(self) -> int:
        self._server.connect()
        version = self._server.call("GET", "/").get("version", {})
        self._open_search = version.get("distribution") == "opensearch"
        numbers = tuple(map(int, re.findall(r"\d+", str(version.get("number")))[:2]))
        omits = not self._open_search and (numbers >= OMITS_VECTORS or version.get("build_flavor") == "serverless")
        self._returned = {"_source": {"exclude_vectors": False}} if omits else {}
        (mapping, *others) = self._server.call("GET", f"{self._path}/_mapping").values()
        if others:
            raise DataError(f"{self.name} stands for several indexes; name one")
        found = _field_mapping(mapping["mappings"], self.vector)
        if found.get("type") not in ("dense_vector", "knn_vector"):
            known = ", ".join(sorted(mapping["mappings"].get("properties", {})))
            raise DataError(f"{self.name}: {self.vector!r} is not a vector field; the fields are {known}")
        metric = found.get("similarity") or found.get("space_type") or found.get("method", {}).get("space_type")
        self.by_cosine = metric in ("cosine", "cosinesimil") or (metric is None and not self._open_search)
        return int(found.get("dims") or found.get("dimension") or 0)

    def count(self) -> int:
        found = self._server.call("POST", f"{self._path}/_count", {"query": self._query()})
        return int(self._whole(found)["count"])

    def pages(self, after: str) -> Iterator[tuple[Sequence[StoredRow], str]]:
        """See ``RowCollection``. Shards count on their own, so rows with equal numbers stay on one page."""
        path = f"{self._path}/{'_search/point_in_time' if self._open_search else '_pit'}"
        opened = self._server.call("POST", path, keep_alive=KEEP_ALIVE)
        snapshot = opened.get("pit_id") or opened["id"]
        last, more = int(after or -1), True
        try:
            while more:
                found = self._whole(self._server.call("POST", "/_search", self._page_after(last, snapshot), **WHOLE))
                snapshot, hits = found.get("pit_id", snapshot), found["hits"]["hits"]
                more = len(hits) == SCAN_PAGE
                hits = [hit for hit in hits if hit["sort"][0] < hits[-1]["sort"][0]] if more else hits
                if hits:
                    last = hits[-1]["sort"][0]
                    yield self._rows(hits), str(last)
                elif more:
                    raise DataError(f"{self.name} has more than {SCAN_PAGE} shards")
        finally:
            self._forget(snapshot)

    def _page_after(self, number: int, snapshot: str) -> dict[str, Any]:
        return {
            "size": SCAN_PAGE,
            "query": self._query({"range": {"_seq_no": {"gt": number}}}),
            "sort": [{"_seq_no": "asc"}],
            "pit": {"id": snapshot, "keep_alive": KEEP_ALIVE},
            **self._returned,
        }

    def nearest(self, vector: Vector, k: int) -> Iterable[StoredRow]:
        numbers, query = vector.tolist(), self._query()
        body: dict[str, Any] = {"size": k, **self._returned}
        if self._open_search:
            near: dict[str, Any] = {"vector": numbers, "k": max(k, self.effort)}
            body["query"] = {"knn": {self.vector: near | ({"filter": query} if self.only else {})}}
        else:
            candidates = {"k": k, "num_candidates": max(k, self.effort)}
            body["knn"] = {"field": self.vector, "query_vector": numbers, **candidates}
            body["knn"] |= {"filter": query} if self.only else {}
        return self._search(body)

    def stored(self, ids: Sequence[str]) -> Iterable[StoredRow]:
        query = self._query({"ids": {"values": list(ids)}})
        return self._search({"size": len(ids), "query": query, **self._returned})

    def _search(self, body: Mapping[str, Any]) -> list[StoredRow]:
        found = self._server.call("POST", f"{self._path}/_search", body, **WHOLE)
        return self._rows(self._whole(found)["hits"]["hits"])

    def _whole(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """The response, if all shards contributed to it and no row can be missing."""
        failed = (found.get("_shards") or {}).get("failed", 0)
        if failed or found.get("timed_out"):
            why = f"{failed} failed shards" if failed else "the server's time limit passed"
            raise self._server.error(f"the response may lack rows: {why}; check the cluster's health", retryable=True)
        return found

    def _rows(self, hits: Sequence[Mapping[str, Any]]) -> list[StoredRow]:
        return [StoredRow(hit["_id"], field_of(hit["_source"], self.vector), hit["_source"]) for hit in hits]

    def _query(self, *conditions: Mapping[str, Any]) -> dict[str, Any]:
        """The rows that ``only`` and these conditions select."""
        every = [*({"term": {name: value}} for name, value in self.only.items()), *conditions]
        return {"bool": {"filter": every}} if every else {"match_all": {}}

    def _forget(self, snapshot: str) -> None:
        """Frees a snapshot. If that fails, the server does it after ``KEEP_ALIVE``; the scan does not depend on it."""
        path, body = "/_pit", dict[str, Any](id=snapshot)
        if self._open_search:
            path, body = "/_search/point_in_time", {"pit_id": [snapshot]}
        with suppress(BackendError, DataError):
            self._server.call("DELETE", path, body)


def _field_mapping(mappings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The mapping of a field; empty if there is none. Objects have their fields under ``properties``."""
    found: Any = mappings
    for part in name.split("."):
        found = found.get("properties", {}).get(part, {})
    return found if isinstance(found, Mapping) else {}
