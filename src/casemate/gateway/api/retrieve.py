"""Route for clients with their own language model: ``POST /v1/retrieve``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from casemate.gateway.api.caller import gateway_of, make_query, require_role
from casemate.gateway.api.openai_schema import RequestModel, Text, count_tokens
from casemate.gateway.api.streaming import run_while_connected
from casemate.gateway.errors import ApiError, JsonResponse, documented, forbidden
from casemate.types import MAX_K

router = APIRouter()


class RetrieveRequest(RequestModel):
    """Body of ``POST /v1/retrieve``."""

    question: Text
    k: Annotated[int, Field(ge=1, le=MAX_K)] | None = None
    user: Text | None = None


@router.post("/v1/retrieve", tags=["retrieve"], responses=documented(504))
async def retrieve(body: RetrieveRequest, request: Request) -> Response:
    """Returns the documents of an answer's context, for clients with their own language model.

    Scores are sent to admins only: closeness to a document is what separates members from non-members, and a gap shows
    where one was hidden. Clients get at most as many documents as an answer uses: the guard is calibrated to this.
    """
    gateway, key = gateway_of(request), require_role(request, "client", "admin")
    admin = key.grant.role == "admin"
    if not (admin or key.grant.retrieve):
        raise forbidden()
    limit = gateway.app.config.rag.k
    if body.k is not None and body.k > limit and not admin:
        raise ApiError(400, f"k: at most {limit} documents are read for an answer", "invalid_value", "k")
    query = make_query(request, key, body.question, "question", body.user, body.k or limit)
    found = await run_while_connected(request.receive, gateway.retrieve(query), gateway.section.timeout_s)
    tokens = count_tokens(body.question) + sum(count_tokens(hit.document.content) for hit in found.hits)
    await gateway.usage_meter(key).charge_and_write(tokens, last=True)
    data: list[dict[str, Any]] = []
    for hit in found.hits:
        d = hit.document
        shown: dict[str, Any] = {"object": "document", "id": d.id, "source": d.source, "title": d.title, "text": d.text}
        data.append(shown | {"score": hit.score} if admin else shown)
    return JsonResponse({"object": "list", "data": data})
