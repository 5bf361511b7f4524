"""A Milvus server as a patient client sees it: a limit for each call, and complaints in the operator's words."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from casemate.errors import BackendError, ConfigError, DataError, needs
from casemate.types import Secret

if TYPE_CHECKING:
    from pymilvus import MilvusClient

OLDEST = (2, 3)
HOPELESS = re.compile("auth|password|token|permission|privilege|denied", re.IGNORECASE)
"""What a server says when it knows the caller and will not have him, the next time neither."""
ABSENT = re.compile(
    "(collection|partition|database).{0,80}not (found|exist|loaded)|can't find collection", re.IGNORECASE
)


@dataclass(eq=False)
class Server:
    """One connection, made by ``connect`` and let go by ``close``.

    Attributes:
        backend: Name of the plug-in, for errors.
        where: What messages call it.
        url: ``http://host:19530``.
        token: ``user:password`` or an API key.
        database: Its name; empty: the default one.
        timeout_s: For one call.
        gone: What an absent collection means, and what to do.
    """

    backend: str
    where: str
    url: Secret
    token: Secret
    database: str
    timeout_s: float
    gone: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^\s@/]+/?", self.url):
            form = f"http://host:19530; a password belongs into {self.backend}.token"
            raise ConfigError(f"{self.backend}.url is not of the form {form}")
        with needs("casemate[milvus]"):
            import pymilvus  # noqa: F401
        self._client: MilvusClient | None = None
        self._connecting = threading.Lock()

    def connect(self) -> None:
        """Makes the connection, if there is none.

        Raises:
            BackendError: If the server does not answer as one should that is new enough.
        """
        from pymilvus import MilvusClient

        with self._connecting, self.explained():
            if self._client is not None:
                return
            logging.getLogger("pymilvus.decorators").addFilter(_told_by_us)
            client = MilvusClient(self.url, token=self.token, db_name=self.database, timeout=self.timeout_s)
            version = client.get_server_version(timeout=self.timeout_s)
            if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
                client.close()
                raise self.failure(
                    f"the server is Milvus {version[:40]}; {'.'.join(map(str, OLDEST))} or later is needed"
                )
            self._client = client

    def close(self) -> None:
        """Lets go of the connection."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @contextmanager
    def call(self) -> Iterator[tuple[MilvusClient, dict[str, Any]]]:
        """The client, and the limit that each call is to be given: without one, the driver tries for minutes."""
        if self._client is None:
            raise self.failure("it is not open")
        with self.explained():
            yield self._client, {"timeout": self.timeout_s}

    def failure(self, say: str, *, retryable: bool = False) -> BackendError:
        """What to raise, with the place."""
        return BackendError(f"{self.where}: {say}", backend=self.backend, retryable=retryable)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Says in the operator's words what the server or the driver complains about."""
        import grpc
        from pymilvus.exceptions import DataNotMatchException, MilvusException, ParamError

        try:
            yield
        except (DataNotMatchException, ParamError) as error:
            raise DataError(f"{self.where} refuses a value: {self._said(error)}") from None
        except (MilvusException, grpc.RpcError, OSError, RuntimeError, ValueError) as error:
            raise self._meant(error) from None  # what it says may repeat the token

    def _meant(self, error: Exception) -> BackendError | DataError:
        import grpc

        said = self._said(error)
        chain: list[BaseException] = [error]
        while (before := chain[-1].__cause__ or chain[-1].__context__) and before not in chain:
            chain.append(before)  # the driver keeps to itself why it could not connect
        why = " ".join(e.code().name for e in chain if isinstance(e, grpc.RpcError))
        if ABSENT.search(said):
            return DataError(f"{self.where}: {self.gone} ({said})")
        if "UNIMPLEMENTED" in f"{why} {said}":
            needed = f"Milvus {'.'.join(map(str, OLDEST))} or later"
            return self.failure(f"does not know this call; see that url is that of the gRPC port of {needed} ({said})")
        if HOPELESS.search(f"{why} {said}"):
            return self.failure(f"refuses the token, or does not let its user do this ({said})")
        if "DEADLINE_EXCEEDED" in why:
            return self.failure(f"no answer within timeout_s = {self.timeout_s:g} ({said})", retryable=True)
        if "Fail connecting" in said or "server unavailable" in said:
            return self.failure(f"cannot be reached ({said})", retryable=True)
        return self.failure(said, retryable=not isinstance(error, ValueError))

    def _said(self, error: Exception) -> str:
        """In one line, not too long, and without the password."""
        import grpc

        told = error.details() if isinstance(error, grpc.RpcError) else getattr(error, "message", "")
        said = " ".join(str(told or error).split())
        for part in filter(None, self.token.split(":", 1)[-1:]):
            said = said.replace(part, "***")
        return said[:300]


def _told_by_us(record: logging.LogRecord) -> bool:
    """Passes on nothing of what the driver logs of failures: it raises them, too, and they are explained."""
    return False
