"""An OpenAI-compatible chat endpoint as a target: a RAG service behind that API, or a bare model.

It receives the question, and earlier turns if configured, and returns the answer only; retrieval is its own.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from casemate.backends.clients.openai import server_address
from casemate.backends.local_servers import chat_models
from casemate.backends.target_answers import partial_answer
from casemate.errors import BackendError, ConfigError, require_range
from casemate.protocols import Target
from casemate.runtime.bounded_dict import BoundedDict
from casemate.runtime.http_client import HttpClient, HttpResponse, RequestRefused, host_of, require_address
from casemate.runtime.retry import exponential_backoff, retry
from casemate.types import Answer, Query, Secret

NAME = "openai_endpoint"
_END = re.compile(rb"^data:\s*\[DONE\]\s*$", re.MULTILINE)
CONVERSATIONS = 10_000  # clients whose turns are kept; the one that asked least recently is dropped


class _Interrupted(BackendError):
    """The stream of an answer ended early or with an error."""


@dataclass(eq=False)
class OpenAIEndpoint(Target):
    """Sends the question to a chat endpoint and reads the streamed response.

    Attributes:
        model: The server's name of the model.
        base_url: Address including /v1. Empty: ``OPENAI_BASE_URL``, otherwise OpenAI's own.
        api_key: Empty: ``OPENAI_API_KEY`` for OpenAI's own address and ``OPENAI_BASE_URL``, none for any other.
        instructions: System message. Empty: none.
        temperature: 0: greedy decoding. Below 0: not sent, for models that do not accept it.
        max_tokens: Largest length of the answer, in tokens.
        user: Sent as ``user``, by which some servers distinguish clients. ``{client}`` is replaced by the client id.
            Empty: not sent.
        turns: Earlier questions and answers of the same client that are sent with a question, as chat applications do:
            an attack of several questions is one conversation. 0: each question alone.
        timeout_s: Limit of one attempt, until the last byte.
        retries: Further attempts when the server is busy (429), fails (5xx), cannot be reached, or interrupts the
            answer. Honors ``Retry-After``.
        requests_per_s: Rate limit. 0: none. Waiting counts towards the caller's timeout.
        max_bytes: Largest size of a response. A streamed one has some hundred bytes per token.
        max_requests: Largest number of requests, retries included. 0: no limit.
    """

    model: str
    base_url: str = field(default="", repr=False)  # may contain a password
    api_key: Secret = Secret("")
    instructions: str = field(default="", repr=False)
    temperature: float = 0.0
    max_tokens: int = 512
    user: str = ""
    turns: int = 0
    timeout_s: float = 30.0
    retries: int = 2
    requests_per_s: float = 0.0
    max_bytes: int = 1_000_000
    max_requests: int = 0

    tells: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        base, key = server_address(self.base_url, self.api_key)
        require_address("openai_endpoint.base_url", base)
        if not self.model:
            raise ConfigError(f"{NAME}.model is empty; set a model")
        require_range(NAME, self, "max_tokens", at_least=1)
        require_range(NAME, self, "turns", at_least=0)
        self.api_key = Secret(key)
        self._url = f"{base}/chat/completions"
        self._http = HttpClient(
            NAME, self.timeout_s, self.retries, self.requests_per_s, self.max_bytes, self.max_requests
        )
        self._clients: BoundedDict[str, deque[tuple[str, str]]] = BoundedDict(CONVERSATIONS)
        self.can: frozenset[str] = frozenset({"clients"} if "{client}" in self.user else ())

    @property
    def requests(self) -> int:
        """Requests sent so far, including retries."""
        return self._http.requests

    async def ask(self, query: Query) -> Answer:
        """Answers one query.

        Raises:
            RequestRefused: If the answer has no text.
            BackendError: If the endpoint cannot be reached, or interrupts the answer.
        """
        turns = self._turns(query.client)
        text = await self._send(query, tuple(turns))
        turns.append((query.text, text))
        return partial_answer(text)

    def _turns(self, client: str) -> deque[tuple[str, str]]:
        """The last turns of a client, oldest first."""
        found = self._clients[client] = self._clients.get(client, deque[tuple[str, str]](maxlen=self.turns))
        return found

    async def _send(self, query: Query, turns: tuple[tuple[str, str], ...]) -> str:
        """The answer; interrupted streams are retried like failed requests."""
        return await retry(partial(self._attempt, query, turns), self.retries, _delay)

    async def _attempt(self, query: Query, turns: tuple[tuple[str, str], ...]) -> str:
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = Secret(f"Bearer {str(self.api_key)}")
        response = await self._http.send("POST", self._url, headers, json.dumps(self._body(query, turns)).encode())
        try:
            text, complete = self._read(response)
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise self._error(
                f"the response cannot be parsed ({type(error).__name__}); check that the API is OpenAI-compatible"
            ) from None
        if not complete:
            raise self._error("the answer was interrupted; try again, or see the server's log", True, _Interrupted)
        if not text:
            problem = "the answer is empty; check that base_url and model name a chat model"
            raise self._error(problem, kind=RequestRefused)
        return text

    def _body(self, query: Query, turns: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        """The request body. OpenAI's newer models accept only the new name of the limit, other servers the old one."""
        messages = [("system", self.instructions)] if self.instructions else []
        for question, answer in turns:
            messages += [("user", question), ("assistant", answer)]
        messages.append(("user", query.text))
        limit = "max_completion_tokens" if host_of(self._url).endswith("openai.com") else "max_tokens"
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": role, "content": text} for role, text in messages],
            "stream": True,
            limit: self.max_tokens,
        }
        body |= {"user": self.user.replace("{client}", query.client)} if self.user else {}
        return body if self.temperature < 0 else {**body, "temperature": self.temperature}

    def _read(self, response: HttpResponse) -> tuple[str, bool]:
        """The answer's text, and whether it is complete. Some servers do not stream although it is requested."""
        if "event-stream" not in response.content_type:
            choice = self._http.json(self._url, response)["choices"][0]
            return _message_text(choice["message"]), True
        parts, complete = [], False
        for chunk in _events(response.data):
            if "error" in chunk:
                raise self._error("the server sent an error; see its log", True, _Interrupted)
            for choice in chunk.get("choices", [])[:1]:
                parts.append(_message_text(choice.get("delta") or {}))
                complete = complete or bool(choice.get("finish_reason"))
        text = "".join(parts)
        return text, complete or bool(text and _END.search(response.data))  # some servers send no finish_reason

    def _error(self, problem: str, retryable: bool = False, kind: type[BackendError] = BackendError) -> BackendError:
        return self._http.error(self._url, f"model {self.model!r}: {problem}", retryable, kind)


async def only_model(base_url: str, api_key: str) -> str:
    """Returns the name of a server's model, if it lists a single one; ``base_url`` includes /v1.

    Raises:
        BackendError: If the server cannot be reached.
        ConfigError: If it lists none or several.
    """
    base, key = server_address(base_url, api_key)
    url, http = f"{base}/models", HttpClient(NAME, retries=1)
    response = await http.send("GET", url, {"authorization": Secret(f"Bearer {key}")} if key else {}, None)
    names = chat_models(http.json(url, response))
    if len(names) != 1:
        listed = f"several models: {', '.join(names[:20])}" if names else "no model that writes answers"
        raise ConfigError(f"{host_of(url)} lists {listed}")
    return names[0]


def _delay(error: Exception, attempt: int) -> float | None:
    return exponential_backoff(attempt) if isinstance(error, _Interrupted) else None


def _events(data: bytes) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to the end marker."""
    for line in data.decode("utf-8", "replace").split("\n"):
        data_field = line.removeprefix("data:").strip()
        if data_field == "[DONE]":
            return
        if line.startswith("data:") and data_field:
            yield json.loads(data_field)


def _message_text(message: dict[str, Any]) -> str:
    """The text of a message, or its refusal. Empty if it has neither."""
    text = message.get("content") or message.get("refusal") or ""
    if not isinstance(text, str):
        raise TypeError
    return text
