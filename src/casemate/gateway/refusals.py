"""What a client is told when he is not answered: OpenAI's shape, neutral words, and nothing that a defense decided."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from casemate.errors import CasemateError, QueryError

RETRY_S = 5
"""After so many seconds a backend that failed may be tried again."""
CLOSING = {"Connection": "close"}
"""The rest of a body that nobody wants is not read."""
LONGEST = 300
"""Characters of a message."""


class Json(Response):
    """JSON as we send it: half of a surrogate pair, which UTF-8 cannot hold, becomes a question mark."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of the body."""
        return to_json(content)


def to_json(content: Any) -> bytes:
    """JSON in UTF-8, whatever characters are in it."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


@dataclass
class Refusal(HTTPException):
    """A request that is not answered.

    Attributes:
        status_code: HTTP status.
        message: For people.
        code: For programs; None where OpenAI has none.
        param: The field that is wrong.
        headers: Further headers.
    """

    status_code: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] | None = field(default=None)

    def __post_init__(self) -> None:
        super().__init__(self.status_code, self.message, dict(self.headers) if self.headers else None)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's shape."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        error = {"message": self.message[:LONGEST], "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """The same as it is sent."""
        return Json(self.body, self.status_code, dict(self.headers) if self.headers else None)


def no_http() -> Refusal:
    """What came is no HTTP, or its headers are longer than is read."""
    return Refusal(400, "The request is no valid HTTP/1.1.", "invalid_http", headers=dict(CLOSING))


def no_key() -> Refusal:
    """Without a key, or with one that is malformed, unknown, wrong or revoked: the same."""
    message = "No valid API key was given. Send one as 'Authorization: Bearer cmk_...'."
    return Refusal(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def not_allowed() -> Refusal:
    """The key is good, but not for this."""
    return Refusal(403, "This API key may not do that.", "insufficient_permissions")


def too_large() -> Refusal:
    """The body is longer than is read."""
    return Refusal(413, "The request is too large.", "request_too_large", headers=dict(CLOSING))


def too_slow() -> Refusal:
    """The body did not arrive in time."""
    return Refusal(408, "The request did not arrive in time.", "request_timeout", headers=dict(CLOSING))


def busy(seconds: int) -> Refusal:
    """Too many requests are at work."""
    headers = {"Retry-After": str(seconds)}
    return Refusal(503, "The service is busy. Try again shortly.", "overloaded", headers=headers)


def over_rate(seconds: int) -> Refusal:
    """The key asks too often."""
    headers = {"Retry-After": str(seconds)}
    return Refusal(429, "Too many requests for this API key.", "rate_limit_exceeded", headers=headers)


def over_budget(seconds: int) -> Refusal:
    """The key's tokens of the day are used up; the SDK is told not to try again by itself."""
    headers = {"Retry-After": str(seconds), "X-Should-Retry": "false"}
    return Refusal(429, "The day's budget of this API key is used up.", "insufficient_quota", headers=headers)


def time_is_up() -> Refusal:
    """The answer took too long."""
    headers = {"X-Should-Retry": "false"}
    return Refusal(504, "The answer took too long.", "timeout", headers=headers)


def left() -> Refusal:
    """The client went away: nobody reads this, and the metrics count it."""
    return Refusal(499, "The client closed the request.", "client_closed_request")


def refusal_of(error: Exception) -> Refusal:
    """What a client is told of an error: never its own words, unless they are about his own request."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors())
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, _phrase(error.status_code), headers=error.headers)
    if isinstance(error, QueryError):
        return Refusal(400, str(error), "invalid_value", "messages")
    if isinstance(error, CasemateError):
        headers = {"Retry-After": str(RETRY_S)}
        return Refusal(503, "The service is temporarily unavailable.", "service_unavailable", headers=headers)
    return Refusal(500, "The server failed to process the request.", "internal_error")


def _invalid(errors: Sequence[Any]) -> Refusal:
    """The first thing that is wrong with a body or a parameter, without repeating its value."""
    first = errors[0]
    parts = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    where = ".".join(part for part in parts if re.fullmatch(r"\w+", part))  # others name types of ours
    if first["type"] == "json_invalid":
        return Refusal(400, "The body is no valid JSON.", "invalid_json")
    if not where:
        return Refusal(400, "The body must be a JSON object, sent as application/json.", "invalid_type")
    return Refusal(400, f"{where}: {first['msg']}", "invalid_value", where)


def _phrase(status: int) -> str:
    phrases = {400: "The body cannot be read.", 404: "There is nothing at this address."}
    return phrases.get(status) or f"{HTTPStatus(status).phrase}."
