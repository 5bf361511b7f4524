"""Who calls: the key of a request, checked for its role, and the query that it may ask."""

from __future__ import annotations

from fastapi import Request

from casemate.errors import QueryError
from casemate.gateway.auth.keys import ApiKey, query_of
from casemate.gateway.errors import ApiError, forbidden, invalid_key
from casemate.gateway.state import Gateway, get_context
from casemate.rag.pipeline import require_answerable
from casemate.types import Query

MAX_USER = 100
"""Characters of the field ``user``."""


def gateway_of(request: Request) -> Gateway:
    """Returns the gateway that received a request."""
    gateway: Gateway = request.app.state.gateway
    return gateway


def require_role(request: Request, *roles: str) -> ApiKey:
    """Returns the key of a request.

    The body has arrived by now, and the key may have been revoked meanwhile.

    Raises:
        ApiError: If the key has none of the roles, or is revoked.
    """
    key = get_context(request.scope).key
    if key is None or key.grant.role not in roles:
        raise forbidden()
    if gateway_of(request).keys.is_revoked(key.id):
        raise invalid_key()
    return key


def make_query(request: Request, key: ApiKey, question: str, field: str, user: str | None, k: int) -> Query:
    """Builds the query of a request from the field of its body that has the question, and its field ``user``.

    Raises:
        ApiError: If the question or the user is invalid.
    """
    context = get_context(request.scope)
    context.client = _client(key, user)
    query = query_of(key, question, context.client, k, context.id)
    try:
        require_answerable(query)
    except QueryError as error:
        raise ApiError(400, str(error), "invalid_value", field) from None
    return query


def _client(key: ApiKey, user: str | None) -> str:
    """The client's identity for the guard: the key, and the field ``user`` if the key is trusted to set it."""
    if not (key.grant.trust_user and user):
        return key.id
    if len(user) > MAX_USER or not user.isprintable():
        raise ApiError(400, f"user: 1 to {MAX_USER} printable characters are allowed", "invalid_value", "user")
    return f"{key.id}/{user}"
