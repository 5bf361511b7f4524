"""Any OpenAI-compatible chat endpoint as a system that answers: a RAG service behind that API, or a bare model.

It is sent the question and nothing else, by plain HTTP: what it finds and reads is its own. It tells its answer only.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from casemate.errors import BackendError, ConfigError
from casemate.protocols import Target
from casemate.remote import Caller, Page, host_of, openai_server, require_address, told
from casemate.types import Answer, Query, Secret

NAME = "openai_endpoint"


@dataclass(eq=False)
class OpenAIEndpoint(Target):
    """Asks a chat endpoint, and reads what it streams.

    Attributes:
        model: The server's name of the model.
        base_url: Address up to and with /v1; empty: ``OPENAI_BASE_URL``, else OpenAI's own.
        api_key: Key; empty: ``OPENAI_API_KEY`` for OpenAI's own address and ``OPENAI_BASE_URL``, none for any other.
        instructions: Sent in front of the question as the system's; empty: nothing is.
        temperature: 0: the likeliest answer. Below 0: not sent, for models that take none.
        max_tokens: Longest answer, in tokens.
        user: Sent as ``user``, by which some servers tell clients apart; ``{client}`` stands for the query's. Empty:
            nothing is sent.
        timeout_s: Longest time for one try, until the last byte.
        retries: Further tries when the server is busy (429), fails (5xx) or cannot be reached; ``Retry-After`` is kept.
        requests_per_s: Most requests in a second; 0: no limit. Waiting counts towards the time that an asker allows.
        max_bytes: Most bytes that are read of a reply; a streamed one has some hundred for each token.
    """

    model: str
    base_url: str = field(default="", repr=False)  # it may hold a password
    api_key: Secret = Secret("")
    instructions: str = field(default="", repr=False)
    temperature: float = 0.0
    max_tokens: int = 512
    user: str = ""
    timeout_s: float = 30.0
    retries: int = 2
    requests_per_s: float = 0.0
    max_bytes: int = 1_000_000

    tells: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        base, key = openai_server(self.base_url, self.api_key)
        require_address("openai_endpoint.base_url", base)
        if not self.model or self.max_tokens < 1:
            raise ConfigError(
                f"need a model and max_tokens > 0, got model={self.model!r}, max_tokens={self.max_tokens}"
            )
        self.api_key = Secret(key)
        self._url = f"{base}/chat/completions"
        self._caller = Caller(NAME, self.timeout_s, self.retries, self.requests_per_s, self.max_bytes)
        self.can: frozenset[str] = frozenset({"clients"} if "{client}" in self.user else ())

    @property
    def requests(self) -> int:
        """Sent so far, tries included."""
        return self._caller.requests

    async def ask(self, query: Query) -> Answer:
        """Answers one query, whole.

        Raises:
            BackendError: If the endpoint cannot be reached, breaks off, or sends no text.
        """
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = Secret(f"Bearer {str(self.api_key)}")
        page = await self._caller.send("POST", self._url, headers, json.dumps(self._body(query)).encode())
        try:
            text, ended = self._read(page)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise self._error(f"the reply cannot be read ({type(error).__name__}); is it OpenAI-compatible?") from None
        if not ended:
            raise self._error("the answer broke off; ask again, or see the server's log", True)
        if not text:
            raise self._error("the answer is empty; see that base_url and model are those of a chat model")
        return told(text)

    async def stream(self, query: Query) -> AsyncIterator[str]:
        """The whole answer in one piece."""
        yield (await self.ask(query)).text

    def _body(self, query: Query) -> dict[str, Any]:
        """The request. OpenAI's newer models know the limit by its new name only, other servers by the old."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        limit = "max_completion_tokens" if host_of(self._url).endswith("openai.com") else "max_tokens"
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": query.text}],
            "stream": True,
            limit: self.max_tokens,
        }
        body |= {"user": self.user.replace("{client}", query.client)} if self.user else {}
        return body if self.temperature < 0 else {**body, "temperature": self.temperature}

    def _read(self, page: Page) -> tuple[str, bool]:
        """The answer's text, and whether it came to its end. Some servers do not stream, whatever they are asked."""
        if "event-stream" not in page.kind:
            choice = self._caller.json(self._url, page)["choices"][0]
            return _said(choice["message"]), True
        pieces, ended = [], False
        for chunk in _events(page.data):
            if "error" in chunk:
                raise self._error("the server broke off with an error; see its log", True)
            for choice in chunk.get("choices", [])[:1]:
                pieces.append(_said(choice.get("delta") or {}))
                ended = ended or bool(choice.get("finish_reason"))
        return "".join(pieces), ended

    def _error(self, what: str, retryable: bool = False) -> BackendError:
        return self._caller.error(self._url, f"model {self.model!r}: {what}", retryable)


def _events(data: bytes) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to the one that says there are no more."""
    for line in data.decode("utf-8", "replace").split("\n"):
        said = line.removeprefix("data:").strip()
        if said == "[DONE]":
            return
        if line.startswith("data:") and said:
            yield json.loads(said)


def _said(message: dict[str, Any]) -> str:
    """Text of a message, empty where it has none; a refusal is text too."""
    text = message.get("content") or message.get("refusal") or ""
    if not isinstance(text, str):
        raise TypeError
    return text
