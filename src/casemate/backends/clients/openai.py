"""OpenAI-compatible server: address, key, and errors translated for operators."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from casemate.errors import BackendError, ConfigError
from casemate.runtime.http_client import host_of
from casemate.types import Secret

NAME = "openai"
OPENAI = "https://api.openai.com/v1"
NO_KEY = "none"  # sent to servers that need no key
CONNECT_S = 10.0
ERROR_CODE = re.compile(r"[a-z_]{1,40}")

_STATUS: Mapping[int, tuple[str, str]] = {
    401: ("the key is refused or missing", "set api_key; OPENAI_API_KEY is sent to OpenAI and to OPENAI_BASE_URL only"),
    403: ("the key lacks a permission", "use a key with access to the model"),
    404: ("no such model or path", "correct model; base_url usually ends in /v1"),
    429: ("too many requests, or the quota is used up", "wait, or raise the quota"),
}


@dataclass(frozen=True)
class OpenAIServer:
    """A model on a server: its client options and error translation."""

    model: str
    base_url: str
    key: Secret = field(repr=False)
    timeout_s: float
    retries: int

    def __post_init__(self) -> None:
        url, key = server_address(self.base_url, self.key)
        object.__setattr__(self, "base_url", url)
        object.__setattr__(self, "key", Secret(key or NO_KEY))
        if not self.model or self.timeout_s <= 0 or self.retries < 0:
            raise ConfigError(
                f"model={self.model!r}, timeout_s={self.timeout_s}, retries={self.retries}; set a model, "
                "timeout_s above 0 and retries of at least 0"
            )
        if not re.match(r"https?://[^/]", url):
            raise ConfigError(
                f"base_url must be of the form {OPENAI} or http://localhost:8000/v1; got one for {self.host!r}"
            )

    @property
    def host(self) -> str:
        """Name and port, without user or password."""
        return host_of(self.base_url)

    def options(self) -> dict[str, Any]:
        """Arguments of the SDK's clients."""
        from openai import Timeout

        timeout = Timeout(self.timeout_s, connect=min(self.timeout_s, CONNECT_S))
        return {
            "api_key": str(self.key),
            "base_url": self.base_url,
            "timeout": timeout,
            "max_retries": self.retries,
        }

    def error(self, problem: str, remedy: str, retryable: bool) -> BackendError:
        """A ``BackendError`` that names host and model."""
        message = f"{self.host}, model {self.model!r}: {problem}; {remedy}"
        return BackendError(message, backend=NAME, retryable=retryable)

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translates errors of the SDK to ``BackendError``, without key, prompt or server text."""
        try:
            yield
        except Exception as error:
            translated = self._translate(error)
            if not translated:
                raise
            raise self.error(*translated) from None

    def _translate(self, error: Exception) -> tuple[str, str, bool] | None:
        """Problem, remedy and whether to retry. None: the error is not the server's."""
        from openai import APIConnectionError, APIStatusError, OpenAIError

        kind = type(error)
        outside = kind.__module__.partition(".")[0] in ("httpx", "httpx2")  # older SDKs raise these during a stream
        if "Timeout" in kind.__name__ and (outside or isinstance(error, OpenAIError)):
            return f"silent for {self.timeout_s:g} s", "raise timeout_s, or check the server", True
        if outside or isinstance(error, (APIConnectionError, OSError)):
            cause = type(error.__cause__ or error).__name__
            return f"the connection failed ({cause})", "check base_url, and that the server runs", True
        attributes = [str(getattr(error, attribute, None) or "") for attribute in ("code", "param")]
        codes = [code for code in attributes if ERROR_CODE.fullmatch(code)]
        if isinstance(error, APIStatusError):
            problem, remedy = _STATUS.get(error.status_code, ("the request is refused", "change the named options"))
            if error.status_code >= 500:
                problem, remedy = "the server failed", "try again, or see its log"
            transient = error.status_code in (408, 409, 425, 429) or error.status_code >= 500
            problem += f" ({', '.join([f'HTTP {error.status_code}', *codes])})"
            return problem, remedy, transient and "insufficient_quota" not in codes
        if isinstance(error, OpenAIError):
            suffix = f" ({', '.join(codes)})" if codes else ""
            return f"the server sent an error{suffix}", "try again, or see its log", True
        if isinstance(error, (ValueError, TypeError, AttributeError)):
            problem = f"the response cannot be parsed ({kind.__name__})"
            return problem, "check that base_url is that of an OpenAI-compatible API", False
        return None


def utf8(text: str) -> str:
    """Replaces lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def server_address(base_url: str, key: str) -> tuple[str, str]:
    """Address and key of a server, with defaults from the environment.

    ``OPENAI_API_KEY`` is used for ``OPENAI_BASE_URL`` and OpenAI's own address only, so no other server receives it.

    Args:
        base_url: Empty: ``OPENAI_BASE_URL``, otherwise OpenAI's own.
        key: Empty: ``OPENAI_API_KEY`` if it belongs to the address, otherwise none.

    Raises:
        ConfigError: If the key is missing for OpenAI's own address, or has invalid characters.
    """
    configured = os.environ.get("OPENAI_BASE_URL", "").strip()
    base = (base_url or configured or OPENAI).rstrip("/")
    own = base.startswith("https://") and host_of(base) == host_of(OPENAI)
    if not key and (own or base == configured.rstrip("/")):
        key = os.environ.get("OPENAI_API_KEY", "")
    key = key.strip()
    if not key and own:
        raise ConfigError(f"no key for {host_of(base)}: set OPENAI_API_KEY in the environment, or api_key")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("api_key has characters that no key has; copy it again")
    return base, key
