"""Client of stores with an HTTP interface: a timeout per call, and errors translated for operators."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from casemate.errors import BackendError, DataError, needs
from casemate.types import Secret

MAX_BYTES = 256_000_000  # bytes of a response beyond which reading stops with an error
ADVICE = {
    401: "the server refuses the key or password; set it",
    403: "the key lacks a permission; grant it read access",
    429: "too many requests; try again later",
}


@dataclass(eq=False)
class RestServer:
    """A server with JSON over HTTP. Thread-safe. ``timeout_s`` limits each step of a call.

    The URL may have user and password. The headers are sent with each request, such as the API key. For errors: the
    plug-in's name (``backend``), the location without secrets (``where``), and what status 404 means (``if_absent``).
    """

    backend: str
    where: str
    url: Secret
    headers: Mapping[str, str] = field(repr=False)
    timeout_s: float
    if_absent: str

    def __post_init__(self) -> None:
        self._client: Any = None

    def connect(self) -> None:
        """Prepares connections. The first call opens one.

        Raises:
            MissingExtra: If httpx is not installed.
            BackendError: If the address is not a URL.
        """
        with needs("casemate[http]"):
            import httpx
        if not self.url.startswith(("http://", "https://")):
            raise self.error("url must begin with http:// or https://")
        if self._client is None:
            self._client = httpx.Client(base_url=self.url, headers=dict(self.headers), timeout=self.timeout_s)

    def call(self, method: str, path: str, body: Any = None, **parameters: Any) -> Any:
        """Sends a request; returns the parsed JSON.

        Raises:
            BackendError: If the server cannot be reached, refuses the key, or answers something else than JSON.
            DataError: If it does not know the path, or rejects the request.
        """
        import httpx

        if self._client is None:
            raise self.error("the collection is not open")
        options: dict[str, Any] = {"params": parameters} if parameters else {}
        if body is not None:
            options["json"] = body
        try:
            with self._client.stream(method, path, **options) as response:
                data = self._read(response)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict) as error:
            problem = f"cannot be reached, or exceeded timeout_s ({type(error).__name__})"
            raise self.error(problem, retryable=True) from None
        if response.status_code >= 300:
            raise self._refusal(response.status_code, data)
        return self._parsed(data)

    def error(self, problem: str, *, retryable: bool = False) -> BackendError:
        """A ``BackendError`` that names the location."""
        return BackendError(f"{self.where}: {problem}", backend=self.backend, retryable=retryable)

    def close(self) -> None:
        """Closes the connections."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _read(self, response: Any) -> bytes:
        data = bytearray()
        for piece in response.iter_bytes():
            data += piece
            if len(data) > MAX_BYTES:
                raise self.error(f"the response exceeds {MAX_BYTES:,} bytes")
        return bytes(data)

    def _parsed(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError:
            raise self.error("the response is not JSON; check the address") from None

    def _refusal(self, status: int, data: bytes) -> BackendError | DataError:
        """The error for a status. The quoted message may name fields and vectors: requests contain no text of users."""
        if status == 404:
            return DataError(f"{self.where}: {self.if_absent}")
        if status in ADVICE:
            return self.error(ADVICE[status], retryable=status == 429)
        message = " ".join(data.decode(errors="replace").split())[:300]
        for secret in (*(value.split()[-1] for value in self.headers.values()), urlsplit(self.url).password):
            message = message.replace(secret or "\0", "***")
        if status in (400, 422):
            return DataError(f"{self.where} rejected the request: {message}")
        return self.error(f"status {status}: {message}", retryable=status >= 500)


def without_credentials(url: str) -> str:
    """Removes user and password from a URL.

    >>> without_credentials("http://user:secret@host:6333")
    'http://host:6333'
    """
    scheme, slashes, rest = url.partition("//")
    return scheme + slashes + rest.rpartition("@")[2] if slashes else url
