"""An existing Chroma collection: records with an embedding, used in place, in a folder or on a server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from casemate.backends.sidecar.row_collection import SCAN_PAGE, RowCollection, StoredRow
from casemate.errors import BackendError, CasemateError, ConfigError, DataError, needs
from casemate.types import Secret, Vector

DOCUMENT = "document"  # Chroma's own field for the text
INCLUDED = ["documents", "metadatas", "embeddings"]


@dataclass(eq=False)
class ChromaCollection(RowCollection):
    """Records of a collection. Chroma finds the nearest; they are scored again exactly. Scanned in Chroma's own order.

    Attributes:
        location: Folder of a persistent client, or ``http://host:8000`` of a server.
        collection: Its name.
        api_key: Token for a server (``X-Chroma-Token``). Empty: it needs none.
        text: ``document`` for Chroma's documents, or a metadata field.
        source: Metadata field with the name of the record's source document. Empty: none.
        title: Metadata field of the title. Empty: none.
        only: Metadata fields and values that records must have; other records are ignored.
        timeout_s: Limit of one step of a call to a server.
    """

    location: str
    collection: str
    api_key: Secret = Secret("")
    text: str = DOCUMENT
    source: str = ""
    title: str = ""
    only: dict[str, str | int | bool] = field(default_factory=dict)
    timeout_s: float = 10

    def __post_init__(self) -> None:
        if not (self.location and self.collection and self.text and self.timeout_s > 0):
            raise ConfigError(
                "chroma_collection: location, collection and text must not be empty, timeout_s must be above 0"
            )
        with needs("casemate[chroma]"):
            import chromadb  # noqa: F401
        self.api_key = Secret(self.api_key)
        self.name = f"chroma {self.location}, collection {self.collection}"
        same = [{name: value} for name, value in self.only.items()]
        self._which: dict[str, Any] = {"where": {"$and": same} if len(same) > 1 else same[0]} if same else {}
        self._held: Any = None

    def connect(self) -> int:
        """See ``RowCollection``. The first record decides about the length."""
        self._held = self._client().get_collection(self.collection, embedding_function=None)
        space = (self._held.configuration_json.get("hnsw") or self._held.configuration_json.get("spann") or {}).get(
            "space"
        )
        self.by_cosine = space == "cosine"
        return 0

    def _client(self) -> Any:
        import chromadb
        import httpx

        settings = chromadb.config.Settings(anonymized_telemetry=False)
        if not self.location.startswith(("http://", "https://")):
            if not (Path(self.location) / "chroma.sqlite3").exists():  # the client would create an empty one
                raise DataError(f"{self.name}: the folder holds no Chroma database; set location")
            return chromadb.PersistentClient(self.location, settings)
        parts = urlsplit(self.location)
        host, port = parts.hostname or "", parts.port or 8000
        headers = {"X-Chroma-Token": str(self.api_key)} if self.api_key else {}
        # Chroma's client waits without limit, and sends requests while it is made: so ask the server once before
        httpx.get(f"{parts.scheme}://{host}:{port}/api/v2/heartbeat", headers=headers, timeout=self.timeout_s)
        client: Any = chromadb.HttpClient(host, port, parts.scheme == "https", headers, settings)
        client._server._session.timeout = self.timeout_s
        return client

    def count(self) -> int:
        with self.errors():
            if not self._which:
                return int(self._open().count())
            return len(self._open().get(include=[], **self._which)["ids"])

    def pages(self, after: str) -> Iterator[tuple[Sequence[StoredRow], str]]:
        """See ``RowCollection``. The cursor is a number of records: after a removal, start from the beginning."""
        start = int(after or 0)
        while rows := self._rows(limit=SCAN_PAGE, offset=start, **self._which):
            start += len(rows)
            yield rows, str(start)

    def nearest(self, vector: Vector, k: int) -> Iterable[StoredRow]:
        wanted = min(k, int(self._open().count()))
        if not wanted:
            return ()
        found = self._open().query(
            query_embeddings=[vector.tolist()], n_results=wanted, include=INCLUDED, **self._which
        )
        return _zipped({name: found[name][0] for name in ("ids", *INCLUDED)})

    def stored(self, ids: Sequence[str]) -> Iterable[StoredRow]:
        return self._rows(ids=list(ids), **self._which)

    def close(self) -> None:
        self._held = None

    @contextmanager
    def errors(self) -> Iterator[None]:
        import httpx
        from chromadb.errors import ChromaError, NotFoundError

        try:
            yield
        except CasemateError:
            raise
        except NotFoundError:
            raise DataError(f"{self.name} does not exist; check whether it was renamed or deleted") from None
        except httpx.HTTPError as error:
            problem = f"{self.name} cannot be reached, or exceeded timeout_s ({type(error).__name__})"
            raise BackendError(problem, backend="chroma_collection", retryable=True) from None
        except (ChromaError, ValueError, OSError, RuntimeError) as error:
            problem = f"{self.name} cannot be read: {type(error).__name__}"
            raise BackendError(problem, backend="chroma_collection", retryable=True) from None

    def _open(self) -> Any:
        if self._held is None:
            raise BackendError(f"{self.name} is not open", backend="chroma_collection", retryable=False)
        return self._held

    def _rows(self, **which: Any) -> list[StoredRow]:
        return _zipped(self._open().get(include=INCLUDED, **which))


def _zipped(found: Mapping[str, Any]) -> list[StoredRow]:
    columns = (found[name] for name in ("ids", "embeddings", "documents", "metadatas"))
    return [
        StoredRow(name, vector, {**(metadata or {}), **({} if text is None else {DOCUMENT: text})})
        for name, vector, text, metadata in zip(*columns, strict=True)
    ]
