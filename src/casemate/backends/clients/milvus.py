"""Milvus client: one connection with a timeout per call, and errors translated for operators."""

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

MIN_VERSION = (2, 3)
PERMANENT = re.compile("auth|password|token|permission|privilege|denied", re.IGNORECASE)
"""Errors that a retry does not cure: the server refuses the user."""
ABSENT = re.compile(
    "(collection|partition|database).{0,80}not (found|exist|loaded)|can't find collection", re.IGNORECASE
)


@dataclass(eq=False)
class MilvusServer:
    """A connection to a Milvus server; for its options, see ``MilvusIndex``.

    For errors: the plug-in's name (``backend``), the location without secrets (``where``), and what a missing
    collection means and what to do (``if_absent``).
    """

    backend: str
    where: str
    url: Secret
    token: Secret
    database: str
    timeout_s: float
    if_absent: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^\s@/]+/?", self.url):
            form = f"http://host:19530; set a password in {self.backend}.token"
            raise ConfigError(f"{self.backend}.url is not of the form {form}")
        with needs("casemate[milvus]"):
            import pymilvus  # noqa: F401
        self._client: MilvusClient | None = None
        self._connecting = threading.Lock()

    def connect(self) -> None:
        """Connects. Idempotent. ``BackendError``: the server is not reachable, too old, or not a Milvus server."""
        from pymilvus import MilvusClient

        with self._connecting, self.translate_errors():
            if self._client is not None:
                return
            logging.getLogger("pymilvus.decorators").addFilter(_drop_record)
            client = MilvusClient(self.url, token=self.token, db_name=self.database, timeout=self.timeout_s)
            version = client.get_server_version(timeout=self.timeout_s)
            if tuple(map(int, re.findall(r"\d+", version)[:2])) < MIN_VERSION:
                client.close()
                needed = ".".join(map(str, MIN_VERSION))
                raise self.error(f"the server is Milvus {version[:40]}; {needed} or later is needed")
            self._client = client

    def close(self) -> None:
        """Closes the connection."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @contextmanager
    def call(self) -> Iterator[tuple[MilvusClient, dict[str, Any]]]:
        """The client, and the timeout argument for each call: without one, the driver retries for minutes."""
        if self._client is None:
            raise self.error("the connection is not open")
        with self.translate_errors():
            yield self._client, {"timeout": self.timeout_s}

    def error(self, problem: str, *, retryable: bool = False) -> BackendError:
        """A ``BackendError`` that names the location."""
        return BackendError(f"{self.where}: {problem}", backend=self.backend, retryable=retryable)

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translates errors of the server and the driver to ``BackendError`` or ``DataError``, without the token."""
        import grpc
        from pymilvus.exceptions import DataNotMatchException, MilvusException, ParamError

        try:
            yield
        except (DataNotMatchException, ParamError) as error:
            raise DataError(f"{self.where} rejected a value: {self._message(error)}") from None
        except (MilvusException, grpc.RpcError, OSError, RuntimeError, ValueError) as error:
            raise self._translate(error) from None  # the chained error may contain the token

    def _translate(self, error: Exception) -> BackendError | DataError:
        import grpc

        message = self._message(error)
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
            chain.append(cause)  # the driver hides the cause of a failed connection here
        codes = " ".join(e.code().name for e in chain if isinstance(e, grpc.RpcError))
        if ABSENT.search(message):
            return DataError(f"{self.where}: {self.if_absent} ({message})")
        if "UNIMPLEMENTED" in f"{codes} {message}":
            needed = f"Milvus {'.'.join(map(str, MIN_VERSION))} or later"
            return self.error(f"unknown call; check that url has the gRPC port of {needed} ({message})")
        if PERMANENT.search(f"{codes} {message}"):
            return self.error(f"the server refuses the token, or its user lacks a privilege ({message})")
        if "DEADLINE_EXCEEDED" in codes:
            return self.error(f"no answer within timeout_s = {self.timeout_s:g} ({message})", retryable=True)
        if "Fail connecting" in message or "server unavailable" in message:
            return self.error(f"cannot be reached ({message})", retryable=True)
        return self.error(message, retryable=not isinstance(error, ValueError))

    def _message(self, error: Exception) -> str:
        """The error message in one line of at most 300 characters, without the password."""
        import grpc

        raw = error.details() if isinstance(error, grpc.RpcError) else getattr(error, "message", "")
        message = " ".join(str(raw or error).split())
        for secret in filter(None, self.token.split(":", 1)[-1:]):
            message = message.replace(secret, "***")
        return message[:300]


def _drop_record(record: logging.LogRecord) -> bool:
    """Drops the driver's log of failed calls: they are raised too, and may contain the token."""
    return False
