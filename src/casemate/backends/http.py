"""Any JSON endpoint that answers questions, by a template of the request and paths into the reply.

The question goes into the body as a JSON value, never as pasted text, so that no question can change the request.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from casemate.errors import ConfigError, needs
from casemate.protocols import Target
from casemate.remote import Caller, figures, listed, names, require_address, told
from casemate.types import Answer, Query, Secret

NAME = "http"
_PLACE = re.compile(r"\{(question|client|tenant|k)\}")
_WHO = re.compile(r"\{(client|tenant)\}")


@dataclass(eq=False)
class Http(Target):
    """Posts the question to an address and reads the answer out of the JSON that comes back.

    ``{question}``, ``{client}``, ``{tenant}`` and ``{k}`` stand for those of the query, in any text of ``body``, and in
    the path or the parameters of ``url``; those of client and tenant also in the values of ``headers``. Paths are
    JSONPath, such as ``$.answer`` or ``$.sources[*].name``.

    Attributes:
        url: Address.
        method: ``POST``, ``PUT``, ``PATCH`` or ``GET``; a ``GET`` has no body.
        headers: Sent with each request. Write keys as ``${NAME}``.
        body: What is sent, as a mapping, or as JSON text.
        answer: Path of the answer's text; if it leads to several, they are put together.
        sources: Path of the sources of the documents in the context, best first; empty: the endpoint does not tell.
        ids: Path of their ids, likewise.
        scores: Path of their cosine similarities, likewise.
        timeout_s: Longest time for one try, until the last byte.
        retries: Further tries when the server is busy (429), fails (5xx) or cannot be reached; ``Retry-After`` is kept.
        requests_per_s: Most requests in a second; 0: no limit. Waiting counts towards the time that an asker allows.
        max_bytes: Most bytes that are read of a reply.
    """

    url: str = field(repr=False)  # it may hold a password
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: Mapping[str, Any] | str = field(default_factory=lambda: {"question": "{question}"}, repr=False)
    answer: str = "$.answer"
    sources: str = ""
    ids: str = ""
    scores: str = ""
    timeout_s: float = 30.0
    retries: int = 2
    requests_per_s: float = 0.0
    max_bytes: int = 1_000_000

    def __post_init__(self) -> None:
        require_address("http.url", self.url)
        self.method = self.method.upper()
        if self.method not in {"POST", "PUT", "PATCH", "GET"}:
            raise ConfigError(f"http.method is {self.method!r}; allowed: POST, PUT, PATCH, GET")
        self.headers = {key.lower(): Secret(value) for key, value in self.headers.items()}
        self._body = None if self.method == "GET" else _template(self.body)
        self._require_question()
        self._caller = Caller(NAME, self.timeout_s, self.retries, self.requests_per_s, self.max_bytes)
        told = {name: getattr(self, name) for name in ("sources", "ids", "scores") if getattr(self, name)}
        self._paths = {name: _path(name, path) for name, path in ({"answer": self.answer} | told).items()}
        self.tells: frozenset[str] = frozenset(told)
        places = (self.url, json.dumps(self._body), *self.headers.values())
        self.can: frozenset[str] = frozenset({"clients"} if any("{client}" in place for place in places) else ())

    @property
    def requests(self) -> int:
        """Sent so far, tries included."""
        return self._caller.requests

    async def ask(self, query: Query) -> Answer:
        """Answers one query, whole.

        Raises:
            BackendError: If the endpoint cannot be reached, or its reply holds no answer.
        """
        url = _PLACE.sub(lambda m: _quoted(query, m[1]), self.url)
        body = None if self._body is None else json.dumps(_filled(self._body, query)).encode()
        named = {key: Secret(_WHO.sub(lambda m: _quoted(query, m[1]), text)) for key, text in self.headers.items()}
        sent = {"accept": "application/json", "content-type": "application/json", **named}
        reply = self._caller.json(self.url, await self._caller.send(self.method, url, sent, body))
        try:
            return self._answer(reply)
        except ValueError as error:
            raise self._caller.error(self.url, str(error)) from None

    async def stream(self, query: Query) -> AsyncIterator[str]:
        """The whole answer in one piece: the endpoint is not asked to stream."""
        yield (await self.ask(query)).text

    def _answer(self, reply: Any) -> Answer:
        """What the paths lead to.

        Raises:
            ValueError: If that is nothing, or of the wrong kind.
        """
        found = {name: listed([match.value for match in path.find(reply)]) for name, path in self._paths.items()}
        texts = found["answer"]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"the reply has no text at answer ({self.answer}); correct the path")
        ids, sources, scores = (found.get(name) for name in ("ids", "sources", "scores"))
        return told("".join(texts), names(ids), names(sources), figures(scores))

    def _require_question(self) -> None:
        parts = urlsplit(self.url)
        if _PLACE.search(parts.netloc):
            raise ConfigError("http.url has a placeholder in its host; they may stand behind it only")
        asked = parts.path + parts.query if self._body is None else json.dumps(self._body)
        if "{question}" not in asked:
            where = "url" if self._body is None else "body"
            raise ConfigError(f"http.{where} has no {{question}}, so nothing would be asked; write it where it belongs")


def _template(body: Mapping[str, Any] | str) -> Any:
    """The body as JSON values; a text is read as JSON first, so that placeholders are only ever values."""
    try:
        return json.loads(body if isinstance(body, str) else json.dumps(body))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"http.body is no JSON: {type(error).__name__}; write a mapping, or JSON in quotes") from None


def _filled(part: Any, query: Query) -> Any:
    """The template with the query's values in it; all placeholders of a text are filled at once, so none is refilled.

    >>> _filled({"q": ["{question}", "Say: {question}"], "k": "{k}"}, Query('7" {k}'))
    {'q': ['7" {k}', 'Say: 7" {k}'], 'k': 5}
    """
    if isinstance(part, dict):
        return {key: _filled(value, query) for key, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, query) for value in part]
    if not isinstance(part, str):
        return part
    whole = _PLACE.fullmatch(part)
    return _value(query, whole[1]) if whole else _PLACE.sub(lambda m: str(_value(query, m[1])), part)


def _value(query: Query, name: str) -> str | int:
    values: dict[str, str | int] = {
        "question": query.text,
        "client": query.client,
        "tenant": query.tenant,
        "k": query.k,
    }
    return values[name]


def _quoted(query: Query, name: str) -> str:
    """A value that cannot end the place it stands in."""
    return quote(str(_value(query, name)), safe="", errors="replace")


def _path(name: str, path: str) -> Any:
    with needs("casemate[http]"):
        from jsonpath_ng.exceptions import JSONPathError
        from jsonpath_ng.ext.parser import parse
    try:
        return parse(path)
    except JSONPathError:
        raise ConfigError(f"http.{name} is {path!r}, which is no JSONPath; write one such as $.answer") from None
