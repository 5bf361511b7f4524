"""OpenAI-compatible routes: ``POST /v1/chat/completions``, ``POST /v1/responses`` and ``GET /v1/models``.

Only the key identifies a client (``api.caller``). Of an answer only ``Answer.reply`` is sent; the ids, times and counts
beside it describe only what the client sees anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from casemate.gateway.api.caller import gateway_of, make_query, require_role
from casemate.gateway.api.openai_schema import ChatRequest, Completion, count_tokens
from casemate.gateway.api.responses_schema import ResponseEvents, ResponsesRequest
from casemate.gateway.api.streaming import StreamingAnswer, run_while_connected
from casemate.gateway.errors import ApiError, JsonResponse, documented
from casemate.gateway.state import Gateway

MODEL_CREATED = 1767225600
"""Creation time of the model in OpenAI's shape; ours has none."""

router = APIRouter()


@router.post("/v1/chat/completions", tags=["chat"], responses=documented(404, 504))
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answers the last user message, whole or as a stream."""
    return await _answer(body, request, partial(Completion, with_usage=body.with_usage))


@router.post("/v1/responses", tags=["chat"], responses=documented(404, 504))
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answers the last user message, whole or as a stream of events. Nothing is stored."""
    return await _answer(body, request, ResponseEvents)


async def _answer(
    body: ChatRequest | ResponsesRequest,
    request: Request,
    shape: Callable[[str, str, int], Completion | ResponseEvents],
) -> Response:
    gateway, key = gateway_of(request), require_role(request, "client", "admin")
    _require_model(gateway, body.model)
    body.require_supported()
    query = make_query(request, key, body.question, body.question_field, body.user, gateway.app.config.rag.k)
    completion = shape(query.id, gateway.section.model, body.tokens)
    timeout_s, usage = gateway.section.timeout_s, gateway.usage_meter(key)
    if body.stream:
        return StreamingAnswer(gateway.app.target.stream(query), completion, timeout_s, usage)
    try:
        answer = await run_while_connected(request.receive, gateway.app.target.ask(query), timeout_s)
    except Exception:
        await usage.charge(completion.prompt_tokens, last=True)
        raise
    text = answer.reply.text
    await usage.charge_and_write(completion.prompt_tokens + count_tokens(text), last=True)
    return JsonResponse(completion.whole(text))


@router.get("/v1/models", tags=["chat"])
async def models(request: Request) -> Response:
    """Lists the one model."""
    return JsonResponse({"object": "list", "data": [_model(gateway_of(request))]})


@router.get("/v1/models/{model:path}", tags=["chat"], responses=documented(404))
async def model(request: Request, model: Annotated[str, Path(min_length=1)]) -> Response:
    """Describes the one model."""
    _require_model(gateway_of(request), model)
    return JsonResponse(_model(gateway_of(request)))


def _require_model(gateway: Gateway, name: str) -> None:
    if name != gateway.section.model:
        message = f"There is no model {name[:80]!r}; use {gateway.section.model!r} (GET /v1/models)."
        raise ApiError(404, message, "model_not_found", "model")


def _model(gateway: Gateway) -> dict[str, Any]:
    return {"id": gateway.section.model, "object": "model", "created": MODEL_CREATED, "owned_by": "casemate"}
