"""An existing Weaviate collection: objects with a vector, used in place over HTTP (REST and GraphQL)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from casemate.backends.clients.rest import RestServer, without_credentials
from casemate.backends.sidecar.row_collection import SCAN_PAGE, RowCollection, StoredRow
from casemate.errors import ConfigError, DataError
from casemate.types import Secret, Vector

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PLAIN_TYPES = {"text", "string", "int", "number", "boolean", "date", "uuid"}
"""Types of properties that are read: single values, or lists of them."""
MAX_RESULTS = 10_000  # largest number of objects of one search, unless the server's ``QUERY_MAXIMUM_RESULTS`` is lower


@dataclass(eq=False)
class WeaviateCollection(RowCollection):
    """Objects of a collection. Weaviate finds the nearest; they are scored again exactly. Scanned by object id.

    A search for more than ``MAX_RESULTS`` objects raises ``CapabilityError``.

    Attributes:
        url: ``http://host:8080``.
        collection: Its name; begins with a capital letter.
        api_key: Empty: the server needs none.
        vector: Name of the vector, if objects have named vectors. Empty: the only one.
        tenant: Name of the tenant, if the collection has several. Empty: it has none.
        text: Property of the text.
        source: Property with the name of the object's source document. Empty: none.
        title: Property of the title. Empty: none.
        timeout_s: Limit of one step of a call.
    """

    max_results = MAX_RESULTS
    url: Secret
    collection: str
    api_key: Secret = Secret("")
    vector: str = ""
    tenant: str = ""
    text: str = "text"
    source: str = ""
    title: str = ""
    timeout_s: float = 10

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.collection) or not (NAME.fullmatch(self.vector) or not self.vector):
            raise ConfigError(
                f"weaviate_collection: collection={self.collection!r}, vector={self.vector!r}; allowed: letters, "
                "digits and _"
            )
        if not (self.text and self.timeout_s > 0):
            raise ConfigError("weaviate_collection: text must not be empty, timeout_s must be above 0")
        self.url, self.api_key = Secret(self.url), Secret(self.api_key)
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        self.name = f"weaviate {without_credentials(self.url)}, collection {self.collection}"
        if_absent = "the collection is missing, or the address is not of Weaviate; check both"
        self._server = RestServer("weaviate_collection", self.name, self.url, headers, self.timeout_s, if_absent)
        self._properties: tuple[str, ...] = ()

    def connect(self) -> int:
        """See ``RowCollection``. The schema has no length of a vector; the first object decides."""
        self._server.connect()
        schema = self._server.call("GET", f"/v1/schema/{self.collection}")
        named = schema.get("vectorConfig") or {}
        if self.vector not in (named or {"": schema}):
            known = ", ".join(map(repr, named)) or "one without a name"
            raise DataError(f"{self.name} has no vector {self.vector!r}; it has {known}")
        properties = [(p["name"], p["dataType"][0].removesuffix("[]")) for p in schema.get("properties", ())]
        self._properties = tuple(name for name, kind in properties if kind in PLAIN_TYPES and NAME.fullmatch(name))
        for wanted in filter(None, (self.text, self.source, self.title)):
            if wanted not in self._properties:
                known = ", ".join(self._properties)
                raise DataError(f"{self.name} has no property {wanted!r} of a plain type; it has {known}")
        config = (named[self.vector] if self.vector else schema).get("vectorIndexConfig") or {}
        self.by_cosine = config.get("distance", "cosine") == "cosine"
        return 0

    def count(self) -> int:
        tenant = f"(tenant: {json.dumps(self.tenant)})" if self.tenant else ""
        found = self._graphql(f"{{ Aggregate {{ {self.collection}{tenant} {{ meta {{ count }} }} }} }}")
        return int(found["Aggregate"][self.collection][0]["meta"]["count"])

    def pages(self, after: str) -> Iterator[tuple[Sequence[StoredRow], str]]:
        fixed = {"class": self.collection, "limit": SCAN_PAGE, "include": "vector"}
        fixed |= {"tenant": self.tenant} if self.tenant else {}
        while True:
            found = self._server.call("GET", "/v1/objects", None, **fixed, after=after)["objects"]
            if not found:
                return
            after = found[-1]["id"]
            yield [self._row(one["id"], one, self._read(one.get("properties") or {})) for one in found], after

    def nearest(self, vector: Vector, k: int) -> Iterable[StoredRow]:
        target = f", targetVectors: [{json.dumps(self.vector)}]" if self.vector else ""
        return self._get(f"nearVector: {{vector: {json.dumps(vector.tolist())}{target}}}, limit: {k}")

    def stored(self, ids: Sequence[str]) -> Iterable[StoredRow]:
        listed = json.dumps(list(ids))
        where = f'where: {{path: ["id"], operator: ContainsAny, valueText: {listed}}}'
        return self._get(f"{where}, limit: {len(ids)}")

    def _get(self, arguments: str) -> list[StoredRow]:
        tenant = f", tenant: {json.dumps(self.tenant)}" if self.tenant else ""
        vectors = f"vectors {{ {self.vector} }}" if self.vector else "vector"
        wanted = f"{' '.join(self._properties)} _additional {{ id {vectors} }}"
        found = self._graphql(f"{{ Get {{ {self.collection}({arguments}{tenant}) {{ {wanted} }} }} }}")
        rows = []
        for one in found["Get"][self.collection]:
            held = one.pop("_additional")
            rows.append(self._row(held["id"], held, one))
        return rows

    def _read(self, properties: Mapping[str, Any]) -> Mapping[str, Any]:
        """The properties that a search returns, too."""
        return {name: value for name, value in properties.items() if name in self._properties}

    def _graphql(self, query: str) -> Any:
        answer = self._server.call("POST", "/v1/graphql", {"query": query})
        if answer.get("errors"):
            message = " ".join(str(answer["errors"][0].get("message")).split())[:300]
            raise DataError(f"{self.name} rejected the request: {message}")
        return answer["data"]

    def _row(self, identity: str, held: Mapping[str, Any], properties: Mapping[str, Any]) -> StoredRow:
        vector = (held.get("vectors") or {}).get(self.vector) if self.vector else held.get("vector")
        return StoredRow(identity, vector or None, {n: v for n, v in properties.items() if v is not None})
