"""Error responses: OpenAI's shape, neutral wording, and nothing about a defense's decision."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from casemate.errors import CasemateError, QueryError, validation_reason
from casemate.reports.format import plural

RETRY_S = 5
"""Seconds after which a client may retry a failed backend."""
CLOSE = {"Connection": "close"}
"""Closes the connection, so that the rest of an unwanted body is not read."""
RPC_REFUSED = -32000
"""JSON-RPC code of a message that the gateway refused."""
MAX_MESSAGE = 300
"""Characters of a message."""


class ErrorDetail(BaseModel):
    """What was refused or failed."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every error response."""

    error: ErrorDetail


ANY_REQUEST = (400, 408, 413, 500, 503)
"""Statuses of errors of every route."""
WITH_KEY = (*ANY_REQUEST, 401, 403, 429)
"""Statuses of errors of every route that needs an API key."""


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Error responses of a route, for the OpenAPI schema."""
    return {status: {"model": ErrorBody, "description": HTTPStatus(status).phrase} for status in sorted(statuses)}


class JsonResponse(Response):
    """A JSON response; a lone surrogate, which UTF-8 cannot encode, becomes a question mark."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Returns the bytes of the body."""
        return to_json(content)


def to_json(content: Any) -> bytes:
    """Encodes JSON as UTF-8; lone surrogates are replaced."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


@dataclass
class ApiError(HTTPException):
    """A request that is refused or failed.

    Attributes:
        code: Code for programs; None where OpenAI has none.
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
        """The error in OpenAI's shape."""
        types = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = types.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        error = {"message": self.message[:MAX_MESSAGE], "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """The error as an HTTP response."""
        return JsonResponse(self.body, self.status_code, dict(self.headers) if self.headers else None)

    def rpc_response(self) -> Response:
        """The error, which names ``Retry-After``, for a JSON-RPC message that was not read. So it has no id."""
        headers = dict(self.headers or {})
        data = {"code": self.code, "retry_after_s": int(headers["Retry-After"])}
        error = {"code": RPC_REFUSED, "message": self.message[:MAX_MESSAGE], "data": data}
        return JsonResponse({"jsonrpc": "2.0", "id": None, "error": error}, self.status_code, headers)


def invalid_http() -> ApiError:
    """The data is not HTTP/1.1, or its headers are too long."""
    return ApiError(400, "The request is not valid HTTP/1.1.", "invalid_http", headers=dict(CLOSE))


def invalid_key() -> ApiError:
    """No API key, or a malformed, unknown, wrong or revoked one: the response is the same."""
    message = "No valid API key was given. Send one as 'Authorization: Bearer cmk_...'."
    return ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def forbidden() -> ApiError:
    """The API key is valid, but not for this request."""
    return ApiError(403, "This API key may not do that.", "insufficient_permissions")


def body_too_large() -> ApiError:
    """The body exceeds ``gateway.max_body_mb``."""
    return ApiError(413, "The request is too large.", "request_too_large", headers=dict(CLOSE))


def body_timeout() -> ApiError:
    """The body did not arrive within ``gateway.body_timeout_s``."""
    return ApiError(408, "The request did not arrive in time.", "request_timeout", headers=dict(CLOSE))


def overloaded(seconds: int) -> ApiError:
    """``gateway.concurrency`` requests are in progress."""
    message = f"The service is busy. Try again in {plural(seconds, 'second')}."
    return ApiError(503, message, "overloaded", headers={"Retry-After": str(seconds)})


def too_many_uploads() -> ApiError:
    """The bodies that a key sends at once are too many or too large together."""
    error = overloaded(1)
    return replace(error, headers={**(error.headers or {}), **CLOSE})


def rate_limited(seconds: int) -> ApiError:
    """The API key exceeds its rate limit."""
    headers = {"Retry-After": str(seconds)}
    message = f"Too many requests for this API key. Try again in {seconds} seconds."
    return ApiError(429, message, "rate_limit_exceeded", headers=headers)


def budget_exhausted(seconds: int) -> ApiError:
    """The API key's tokens of the day are used up; the header stops automatic retries of OpenAI's SDK."""
    headers = {"Retry-After": str(seconds), "X-Should-Retry": "false"}
    message = f"The day's budget of this API key is used up. Try again in {seconds} seconds."
    return ApiError(429, message, "insufficient_quota", headers=headers)


def answer_timeout() -> ApiError:
    """The answer exceeds ``gateway.timeout_s``."""
    headers = {"X-Should-Retry": "false"}
    return ApiError(504, "The answer took too long.", "timeout", headers=headers)


def client_closed_request() -> ApiError:
    """The client disconnected: no one receives the response, but the metrics count it."""
    return ApiError(499, "The client closed the request.", "client_closed_request")


def to_api_error(error: Exception) -> ApiError:
    """Maps an exception to a response, without its own text unless that describes the client's request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors())
    if isinstance(error, HTTPException):
        return _http_error(error)
    if isinstance(error, QueryError):
        return ApiError(400, str(error), "invalid_value")
    if isinstance(error, CasemateError):
        headers = {"Retry-After": str(RETRY_S)}
        return ApiError(503, "The service is temporarily unavailable.", "service_unavailable", headers=headers)
    return ApiError(500, "The server failed to process the request.", "internal_error")


def _invalid(errors: Sequence[Any]) -> ApiError:
    """Describes the deepest error of a body or a parameter, without repeating its value.

    A value of a union has an error for each type. The deepest one belongs to the type that fits best.
    """
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, "The body is not valid JSON.", "invalid_json")
    paths = [_path(error) for error in errors]
    deepest = max(paths, key=len)
    if not deepest:
        return ApiError(400, "The body must be a JSON object, sent as application/json.", "invalid_type")
    where = ".".join(deepest)
    reasons = [validation_reason(error) for error, path in zip(errors, paths, strict=True) if path == deepest]
    return ApiError(400, f"{where}: {', or '.join(reasons)}", "invalid_value", where)


def _path(error: Any) -> list[str]:
    """Keys and positions of the value. Other parts of its location name our types."""
    parts = [str(part) for part in error["loc"] if part not in ("body", "query", "path")]
    return [part for part in parts if re.fullmatch(r"\w+", part)]


def _http_error(error: HTTPException) -> ApiError:
    """An error of the framework. OpenAI has the code ``unknown_url`` for a route that does not exist."""
    known = {
        400: ("The body cannot be read.", None),
        404: ("There is nothing at this address; /openapi.json lists what is supported.", "unknown_url"),
        405: ("This address does not support the method; /openapi.json lists what is supported.", "method_not_allowed"),
    }
    message, code = known.get(error.status_code, (f"{HTTPStatus(error.status_code).phrase}.", None))
    return ApiError(error.status_code, message, code, headers=error.headers)
