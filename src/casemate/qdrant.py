"""A Qdrant server as a patient client sees it: a limit for each call, and complaints in the operator's words."""

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

REFUSALS = {  # what a status means to the operator
    401: "the key is refused; set api_key",
    403: "the key may not do this; grant it the collections whose names begin with this one's",
    507: "the server's disk is full; free space and run again",
}


@dataclass(eq=False)
class Server:
    """One server, or a place of the client's local mode.

    Attributes:
        backend: Name of the plug-in, for errors.
        where: What messages call it.
        url: ``http://host:6333``; anything else is local.
        api_key: What the server asks for.
        timeout_s: For one call.
        gone: What an absent collection means, and what to do.
        oldest: Version of the server that is needed.
    """

    backend: str
    where: str
    url: Secret
    api_key: Secret
    timeout_s: float
    gone: str
    oldest: tuple[int, int]

    @property
    def remote(self) -> bool:
        """Whether it is a server."""
        return self.url.startswith(("http://", "https://"))

    def connect(self) -> QdrantClient:
        """A client of the server, which has answered, and is new enough.

        Raises:
            BackendError: If not.
        """
        from qdrant_client import QdrantClient

        seconds = math.ceil(self.timeout_s)
        with self.explained():
            client = QdrantClient(
                url=self.url, api_key=self.api_key or None, timeout=seconds, check_compatibility=False
            )
            version = client.info().version
            if tuple(map(int, re.findall(r"\d+", version)[:2])) < self.oldest:
                client.close()
                needed = ".".join(map(str, self.oldest))
                raise self.failure(f"the server is Qdrant {version[:40]}; {needed} or later is needed")
        return client

    def failure(self, say: str, *, retryable: bool = False) -> BackendError:
        """What to raise, with the place."""
        return BackendError(f"{self.where}: {say}", backend=self.backend, retryable=retryable)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Says in the operator's words what the server or the client complains about; they may repeat the key."""
        from qdrant_client.common.client_exceptions import QdrantException
        from qdrant_client.http.exceptions import ApiException, ResponseHandlingException, UnexpectedResponse

        try:
            yield
        except UnexpectedResponse as error:
            raise self._refusal(error.status_code or 0, error.content) from None
        except ResponseHandlingException as error:
            if isinstance(error.source, ValueError):  # it quotes what was sent, which may be somebody's text
                raise self._stranger("what it sends cannot be read") from None
            say = f"cannot be reached, or is too slow for timeout_s ({type(error.source).__name__}: {error.source})"
            raise self.failure(self._plain(say), retryable=True) from None
        except QdrantException as error:
            raise self.failure(self._plain(f"asks to wait: {error}"), retryable=True) from None
        except (ApiException, ValueError, KeyError, RuntimeError, OSError, AssertionError) as error:
            say = self._plain(str(error))
            if isinstance(error, json.JSONDecodeError | AssertionError):
                raise self._stranger(say) from None
            if "not found" in say:
                raise self._absent(say) from None
            raise self.failure(say) from None

    def _refusal(self, status: int, content: bytes) -> BackendError | DataError:
        said = self._plain(content.decode(errors="replace"))
        if status == 404:
            return self._absent(said) if b'"status"' in content else self._stranger(f"404: {said}")
        if status in (400, 422):
            return DataError(f"{self.where} refuses a value: {said}")
        return self.failure(REFUSALS.get(status, f"{status}: {said}"), retryable=status in (408, 429) or status >= 500)

    def _absent(self, said: str) -> DataError:
        return DataError(f"{self.where}: {self.gone} ({said})")

    def _stranger(self, said: str) -> BackendError:
        return self.failure(
            f"something answers, but not as Qdrant does; see that url is that of its HTTP port ({said})"
        )

    def _plain(self, said: str) -> str:
        """In one line, not too long, and without the key."""
        return " ".join(said.replace(self.api_key or "\0", "***").split())[:300]
