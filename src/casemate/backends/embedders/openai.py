"""Embeddings from a server with an OpenAI-compatible API."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from casemate.backends.clients.openai import NAME, OpenAIServer, utf8
from casemate.errors import needs, require_range
from casemate.protocols import Embedder, Progress
from casemate.runtime.trace_context import forwarded_headers
from casemate.types import Secret, Vector

_APPROXIMATE_TOKEN = re.compile(r"[A-Za-z]{1,4}|[0-9]{1,3}|[^\W_\u2e80-\U0010ffff]{1,2}|\S")


@dataclass(eq=False)
class OpenAIEmbedder(Embedder):
    """Embeddings over HTTP. Construction embeds one text, so a wrong address, key or model fails early.

    Attributes:
        model: The server's name of the model.
        base_url: Address including /v1. Empty: ``OPENAI_BASE_URL``, otherwise OpenAI's own.
        api_key: Empty: ``OPENAI_API_KEY`` for OpenAI's own address and ``OPENAI_BASE_URL``, none for any other.
        dimensions: Dimensions of the vectors, for models that can shorten them. 0: the model's default.
        batch: Texts per request.
        timeout_s: Read timeout in seconds.
        retries: Further attempts after a transient error.
        token_limit: Tokens that the model reads. Text beyond this limit, as counted by ``spans``, is not sent.
    """

    model: str = "text-embedding-3-small"
    base_url: str = field(default="", repr=False)  # may contain a password
    api_key: Secret = Secret("")
    dimensions: int = 0
    batch: int = 64
    timeout_s: float = 60
    retries: int = 3
    token_limit: int = 8191

    def __post_init__(self) -> None:
        self.api_key = Secret(self.api_key)
        require_range("openai", self, "batch token_limit", at_least=1)
        require_range("openai", self, "dimensions", at_least=0)
        self._server = OpenAIServer(self.model, self.base_url, self.api_key, self.timeout_s, self.retries)
        with needs("casemate[openai]"):
            from openai import OpenAI
        self._client: Any = OpenAI(**self._server.options())
        weakref.finalize(self, self._client.close)
        self._dim: int = self.dimensions
        self._dim = self._request(["probe"]).shape[1]

    @property
    def fingerprint(self) -> str:
        """Host, model and dimensions."""
        return f"{NAME}:{self._server.host}:{self.model}:{self._dim}"

    @property
    def dim(self) -> int:
        """Dimensions of the vector received on construction."""
        return self._dim

    @property
    def max_tokens(self) -> int:
        """The option ``token_limit``."""
        return self.token_limit

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """Embeds texts in order: (n, dim), float32, unit rows.

        Raises:
            BackendError: If the server fails, or does not send n vectors of the known dimension.
        """
        out = np.empty((len(texts), self._dim), np.float32)
        for start in range(0, len(texts), self.batch):
            part = texts[start : start + self.batch]
            out[start : start + len(part)] = self._request([self._truncate(text) for text in part])
            if progress:
                progress(len(part))
        return out

    def spans(self, text: str) -> Sequence[tuple[int, int]]:
        """Start and end character of approximate tokens, because the model's tokenizer is not available.

        The count is usually too high, so truncated texts fit. Words are split into 4 characters, words in alphabets
        other than a-z into 2, numbers into 3; every other sign and every CJK character is one token.
        """
        return [match.span() for match in _APPROXIMATE_TOKEN.finditer(text)]

    def _truncate(self, text: str) -> str:
        """The text truncated to the limit, and not empty: the API refuses both."""
        if len(text) > self.token_limit:
            spans = self.spans(text)
            text = text[: spans[self.token_limit - 1][1]] if len(spans) > self.token_limit else text
        return utf8(text) or " "

    def _request(self, texts: list[str]) -> Vector:
        size = {"dimensions": self.dimensions} if self.dimensions else {}
        with self._server.translate_errors():
            response = self._client.embeddings.create(
                model=self.model, input=texts, encoding_format="float", extra_headers=forwarded_headers(), **size
            )
            rows, fault = _unit_rows(response.data, len(texts), self._dim)
        if fault:
            raise self._server.error(fault, "check that the server has this model with these dimensions", False)
        return rows


def _unit_rows(items: Sequence[Any], n: int, dim: int) -> tuple[Vector, str]:
    """The vectors by index at unit length, and a fault if they are invalid. ``dim`` 0: not known yet."""
    none = np.empty((0, 0), np.float32)
    if len(items) != n:
        return none, f"the server sent {len(items)} vectors for {n} texts"
    if sorted(item.index for item in items) != list(range(n)):
        return none, "the vectors have no valid index"
    rows = np.array([item.embedding for item in sorted(items, key=lambda item: item.index)], np.float64)
    if rows.ndim != 2 or not rows.shape[1]:
        return none, "the server sent no vectors"
    if dim and rows.shape[1] != dim:
        return none, f"a vector has {rows.shape[1]} dimensions instead of {dim}"
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not (np.isfinite(lengths).all() and lengths.all()):
        return none, "a vector is zero or not finite"
    return (rows / lengths).astype(np.float32), ""
