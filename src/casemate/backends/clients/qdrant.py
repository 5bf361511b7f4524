"""Qdrant client: a timeout per call, and errors translated for operators."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from casemate.errors import BackendError, DataError
from casemate.types import Secret

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

STATUS_ADVICE = {
    401: "the server refuses the API key; set api_key",
    403: "the API key lacks a permission; grant it all collections whose names begin with this one's",
    507: "the server's disk is full; free space and run again",
}


@dataclass(eq=False)
class QdrantServer:
    """A Qdrant server, or a location of the client's local mode; for its options, see ``QdrantIndex``.

    For errors: the plug-in's name (``backend``), the location without secrets (``where``), and what a missing
    collection means and what to do (``if_absent``). ``min_version`` is the oldest supported server version.
    """

    backend: str
    where: str
    url: Secret
    api_key: Secret
    timeout_s: float
    if_absent: str
    min_version: tuple[int, int]

    @property
    def remote(self) -> bool:
        """Whether it is a server."""
        return self.url.startswith(("http://", "https://"))

    def connect(self) -> QdrantClient:
        """A client, after a first call has verified the server's version.

        Raises:
            BackendError: If the server cannot be reached, is too old, or is not a Qdrant server.
        """
        from qdrant_client import QdrantClient

        seconds = math.ceil(self.timeout_s)
        with self.translate_errors():
            client = QdrantClient(
                url=self.url, api_key=self.api_key or None, timeout=seconds, check_compatibility=False
            )
            version = client.info().version
            if tuple(map(int, re.findall(r"\d+", version)[:2])) < self.min_version:
                client.close()
                needed = ".".join(map(str, self.min_version))
                raise self.error(f"the server is Qdrant {version[:40]}; {needed} or later is needed")
        return client

    def error(self, problem: str, *, retryable: bool = False) -> BackendError:
        """A ``BackendError`` that names the location."""
        return BackendError(f"{self.where}: {problem}", backend=self.backend, retryable=retryable)

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translates errors of the server and the client to ``BackendError`` or ``DataError``, without the API key."""
        from qdrant_client.common.client_exceptions import QdrantException
        from qdrant_client.http.exceptions import ApiException, ResponseHandlingException, UnexpectedResponse

        try:
            yield
        except UnexpectedResponse as error:
            raise self._translate_status(error.status_code or 0, error.content) from None
        except ResponseHandlingException as error:
            if isinstance(error.source, ValueError):  # its message quotes the request, which may contain user text
                raise self._not_qdrant("the response cannot be parsed") from None
            problem = f"cannot be reached, or exceeded timeout_s ({type(error.source).__name__}: {error.source})"
            raise self.error(self._redact(problem), retryable=True) from None
        except QdrantException as error:
            raise self.error(self._redact(f"rate limit: {error}"), retryable=True) from None
        except (ApiException, ValueError, KeyError, RuntimeError, OSError, AssertionError) as error:
            message = self._redact(str(error))
            if isinstance(error, json.JSONDecodeError | AssertionError):
                raise self._not_qdrant(message) from None
            if "not found" in message:
                raise self._absent(message) from None
            raise self.error(message) from None

    def _translate_status(self, status: int, content: bytes) -> BackendError | DataError:
        message = self._redact(content.decode(errors="replace"))
        if status == 404:
            return self._absent(message) if b'"status"' in content else self._not_qdrant(f"404: {message}")
        if status in (400, 422):
            return DataError(f"{self.where} rejected a value: {message}")
        advice = STATUS_ADVICE.get(status, f"{status}: {message}")
        return self.error(advice, retryable=status in (408, 429) or status >= 500)

    def _absent(self, message: str) -> DataError:
        return DataError(f"{self.where}: {self.if_absent} ({message})")

    def _not_qdrant(self, message: str) -> BackendError:
        return self.error(f"the response is not from Qdrant; check that url has the server's HTTP port ({message})")

    def _redact(self, message: str) -> str:
        """In one line of at most 300 characters, without the API key."""
        return " ".join(message.replace(self.api_key or "\0", "***").split())[:300]
