"""A JSON endpoint as a target, by a request template and JSONPath expressions for the response.

The question enters the body as a JSON value, not by text substitution, so no question can change the request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from casemate.backends.target_answers import flatten, partial_answer
from casemate.errors import ConfigError, needs
from casemate.protocols import Target
from casemate.runtime.http_client import HttpClient, RequestRefused, require_address
from casemate.types import Answer, Query, Secret

NAME = "http"
_PLACEHOLDER = re.compile(r"\{(question|client|tenant|k)\}")
_CLIENT_PLACEHOLDER = re.compile(r"\{(client|tenant)\}")


@dataclass(eq=False)
class HttpTarget(Target):
    """Sends the question to a URL and extracts the answer from the JSON response.

    The placeholders ``{question}``, ``{client}``, ``{tenant}`` and ``{k}`` are replaced in every string of ``body`` and
    in path and parameters of ``url``; ``{client}`` and ``{tenant}`` also in ``headers``. Paths are JSONPath, such as
    ``$.answer`` or ``$.sources[*].name``.

    Attributes:
        url: Address.
        method: ``POST``, ``PUT``, ``PATCH`` or ``GET``. A ``GET`` has no body.
        headers: Sent with each request. Write keys as ``${NAME}``.
        body: Request body, as a mapping or as JSON text.
        answer: Path of the answer's text. Several matches are concatenated.
        sources: Path of the sources of the documents in the context, best first. Empty: not returned.
        ids: Path of their ids, likewise.
        scores: Path of their cosine similarities, likewise.
        timeout_s: Limit of one attempt, until the last byte.
        retries: Further attempts when the server is busy (429), fails (5xx) or cannot be reached. Honors
            ``Retry-After``.
        requests_per_s: Rate limit. 0: none. Waiting counts towards the caller's timeout.
        max_bytes: Largest size of a response.
        max_requests: Largest number of requests, retries included. 0: no limit.
    """

    url: str = field(repr=False)  # may contain a password
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
    max_requests: int = 0

    def __post_init__(self) -> None:
        require_address("http.url", self.url)
        self.method = self.method.upper()
        if self.method not in {"POST", "PUT", "PATCH", "GET"}:
            raise ConfigError(f"http.method is {self.method!r}; allowed: POST, PUT, PATCH, GET")
        self.headers = {key.lower(): Secret(value) for key, value in self.headers.items()}
        self._body = None if self.method == "GET" else _template(self.body)
        self._require_question()
        self._http = HttpClient(
            NAME, self.timeout_s, self.retries, self.requests_per_s, self.max_bytes, self.max_requests
        )
        details = {name: getattr(self, name) for name in ("sources", "ids", "scores") if getattr(self, name)}
        self._paths = {name: _parse_path(name, path) for name, path in ({"answer": self.answer} | details).items()}
        self.tells: frozenset[str] = frozenset(details)
        templates = (self.url, json.dumps(self._body), *self.headers.values())
        self.can: frozenset[str] = frozenset(
            {"clients"} if any("{client}" in template for template in templates) else ()
        )

    @property
    def requests(self) -> int:
        """Requests sent so far, including retries."""
        return self._http.requests

    async def ask(self, query: Query) -> Answer:
        """Answers one query.

        Raises:
            RequestRefused: If the response has no text at the path of the answer.
            BackendError: If the endpoint cannot be reached, or its response cannot be read.
        """
        url = _PLACEHOLDER.sub(lambda m: _url_quoted(query, m[1]), self.url)
        body = None if self._body is None else json.dumps(_fill(self._body, query)).encode()
        headers = {"accept": "application/json", "content-type": "application/json"}
        for key, text in self.headers.items():
            headers[key] = Secret(_CLIENT_PLACEHOLDER.sub(lambda m: _url_quoted(query, m[1]), text))
        reply = self._http.json(self.url, await self._http.send(self.method, url, headers, body))
        try:
            return self._answer(reply)
        except LookupError as error:  # content filters answer some questions in another form
            raise self._http.error(self.url, str(error), kind=RequestRefused) from None
        except ValueError as error:
            raise self._http.error(self.url, str(error)) from None

    def _answer(self, reply: Any) -> Answer:
        """Extracts the answer by the configured paths.

        Raises:
            LookupError: If there is no text.
            ValueError: If a detail has the wrong type.
        """
        found = {name: flatten([match.value for match in path.find(reply)]) for name, path in self._paths.items()}
        texts = found["answer"]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise LookupError(f"the response has no text at http.answer ({self.answer}); correct the path")
        return partial_answer("".join(texts), *(found.get(name) for name in ("ids", "sources", "scores")))

    def _require_question(self) -> None:
        parts = urlsplit(self.url)
        if _PLACEHOLDER.search(parts.netloc):
            raise ConfigError("http.url has a placeholder in its host; use placeholders in path and parameters only")
        template = parts.path + parts.query if self._body is None else json.dumps(self._body)
        if "{question}" not in template:
            where = "url" if self._body is None else "body"
            raise ConfigError(f"http.{where} has no {{question}} placeholder; add it")


def _template(body: Mapping[str, Any] | str) -> Any:
    """The body as JSON values. Text is parsed first, so placeholders can only be inside values."""
    try:
        return json.loads(body if isinstance(body, str) else json.dumps(body))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"http.body is not JSON: {type(error).__name__}; write a mapping, or JSON in quotes"
        ) from None


def _fill(part: Any, query: Query) -> Any:
    """Fills the template. All placeholders of a string are replaced at once, so values are not filled again.

    >>> _fill({"q": ["{question}", "Say: {question}"], "k": "{k}"}, Query('7" {k}'))
    {'q': ['7" {k}', 'Say: 7" {k}'], 'k': 5}
    """
    if isinstance(part, dict):
        return {key: _fill(value, query) for key, value in part.items()}
    if isinstance(part, list):
        return [_fill(value, query) for value in part]
    if not isinstance(part, str):
        return part
    single = _PLACEHOLDER.fullmatch(part)
    return _value(query, single[1]) if single else _PLACEHOLDER.sub(lambda m: str(_value(query, m[1])), part)


def _value(query: Query, name: str) -> str | int:
    values: dict[str, str | int] = {
        "question": query.text,
        "client": query.client,
        "tenant": query.tenant,
        "k": query.k,
    }
    return values[name]


def _url_quoted(query: Query, name: str) -> str:
    """A URL-quoted value, which cannot leave its place in the URL or header."""
    return quote(str(_value(query, name)), safe="", errors="replace")


def _parse_path(name: str, path: str) -> Any:
    with needs("casemate[http]"):
        from jsonpath_ng.exceptions import JSONPathError
        from jsonpath_ng.ext.parser import parse
    try:
        return parse(path)
    except JSONPathError:
        raise ConfigError(
            f"http.{name} is {path!r}, which is not a JSONPath expression; an example is $.answer"
        ) from None
