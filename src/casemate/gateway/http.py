"""The gateway's routes, and the application that they make.

Who asks is told by the key alone: ``Query.client`` is the key's id, or, where the key is trusted to say so, that and
the end user's. Only ``Answer.reply`` leaves; ids, times and counts that go with it are of what the client sees anyway.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import RedirectResponse, Response

from casemate.app import App
from casemate.errors import CasemateError
from casemate.gateway import documents
from casemate.gateway.answering import Streamed, connected
from casemate.gateway.chat import ChatRequest, Completion, Shape, Text, tokens
from casemate.gateway.dashboard.page import ROOT
from casemate.gateway.dashboard.site import make_dashboard
from casemate.gateway.door import Door
from casemate.gateway.keys import Key
from casemate.gateway.metrics import CONTENT_TYPE
from casemate.gateway.refusals import Json, Refusal, not_allowed, refusal_of
from casemate.gateway.state import Gateway, visit_of
from casemate.types import MAX_K, Query, Retrieval

LONGEST_USER = 100
CREATED = 1767225600
"""What OpenAI's shape calls the time of a model; ours has none."""
ANY_KEY = Depends(HTTPBearer(auto_error=False, description="A key made by `casemate key create`."))

router = APIRouter()


class RetrieveRequest(Shape):
    """What is posted to ``/v1/retrieve``."""

    question: Text
    k: Annotated[int, Field(ge=1, le=MAX_K)] | None = None
    user: Text | None = None


@router.post("/v1/chat/completions", tags=["chat"])
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answers the last user message, whole or as a stream."""
    gateway, visit = _gateway(request), visit_of(request.scope)
    key = _asker(request)
    _require_model(gateway, body.model)
    body.require_supported()
    query = _query(key, body, gateway.app.config.rag.k, visit.id)
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    completion = Completion(visit.id, gateway.section.model, body.tokens, with_usage)
    seconds, books = gateway.section.timeout_s, gateway.books(key)
    if body.stream:
        return Streamed(gateway.app.target.stream(query), completion, seconds, books)
    try:
        answer = await connected(request.receive, gateway.app.target.ask(query), seconds)
    except Exception:
        await books.pay(completion.asked, exactly=True)
        raise
    text = answer.reply.text
    await books.enter(completion.asked + tokens(text), exactly=True)
    return Json(completion.whole(text))


@router.get("/v1/models", tags=["chat"])
async def models(request: Request) -> Response:
    """The one model there is."""
    return Json({"object": "list", "data": [_model(_gateway(request))]})


@router.get("/v1/models/{model:path}", tags=["chat"])
async def model(request: Request, model: Annotated[str, Path(min_length=1)]) -> Response:
    """The same by its name."""
    _require_model(_gateway(request), model)
    return Json(_model(_gateway(request)))


@router.post("/v1/retrieve", tags=["retrieve"])
async def retrieve(body: RetrieveRequest, request: Request) -> Response:
    """The documents that an answer may be made from, for those who keep their own language model.

    Scores go to admins only: how near a question comes to a document is the very thing that tells members from others,
    and a gap where one was hidden would show. Clients read as many documents as an answer does, at most: the guard was
    fitted to that number.
    """
    gateway, key = _gateway(request), _asker(request)
    admin = key.grant.role == "admin"
    if not (admin or key.grant.retrieve):
        raise not_allowed()
    most = gateway.app.config.rag.k
    if body.k is not None and body.k > most and not admin:
        raise Refusal(400, f"k: at most {most} documents are read for an answer", "invalid_value", "k")
    query = _query(key, body, body.k or most, visit_of(request.scope).id)
    found = await connected(request.receive, _retrieved(gateway, query), gateway.section.timeout_s)
    charged = tokens(body.question) + sum(tokens(hit.document.content) for hit in found.hits)
    await gateway.books(key).enter(charged, exactly=True)
    data: list[dict[str, Any]] = []
    for hit in found.hits:
        d = hit.document
        shown: dict[str, Any] = {"object": "document", "id": d.id, "source": d.source, "title": d.title, "text": d.text}
        data.append(shown | {"score": hit.score} if admin else shown)
    return Json({"object": "list", "data": data})


@router.get("/healthz", tags=["operation"])
async def healthz() -> Response:
    """The process lives."""
    return Json({"ok": True})


@router.get("/readyz", tags=["operation"])
async def readyz(request: Request) -> Response:
    """Index, store and keys are there; 503 while they are not. What is missing is in the log."""
    ready = await _gateway(request).ready()
    return Json({"ok": ready}, 200 if ready else 503)


@router.get("/metrics", tags=["operation"])
async def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    gateway, key = _gateway(request), visit_of(request.scope).key
    if gateway.section.metrics == "key" and (key is None or key.grant.role == "client"):
        raise not_allowed()
    return Response(gateway.metrics.text(), media_type=CONTENT_TYPE)


def make_app(app: App) -> FastAPI:
    """The application of a wired system, which it closes when it ends."""
    gateway = Gateway(app)
    api = FastAPI(
        title="Casemate",
        version=version("casemate"),
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        lifespan=gateway.open,
        dependencies=[ANY_KEY],
        redirect_slashes=False,  # they would lead to whatever address and scheme the request names, with its key
    )
    api.state.gateway = gateway
    for kind in (RequestValidationError, HTTPException, CasemateError, Exception):
        api.add_exception_handler(kind, _refuse)
    api.include_router(router)
    api.include_router(documents.router)
    api.add_route(ROOT, lambda _: RedirectResponse(f"{ROOT}/"), include_in_schema=False)
    api.mount(ROOT, make_dashboard(gateway))
    api.add_middleware(Door, gateway=gateway)
    if gateway.section.cors:
        api.add_middleware(
            CORSMiddleware,
            allow_origins=gateway.section.cors,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return api


async def _refuse(_: Request, error: Exception) -> Response:
    return refusal_of(error).response()


def _gateway(request: Request) -> Gateway:
    found: Gateway = request.app.state.gateway
    return found


def _asker(request: Request) -> Key:
    """The key of somebody who may ask."""
    key = visit_of(request.scope).key
    if key is None or key.grant.role == "metrics":
        raise not_allowed()
    return key


def _query(key: Key, body: ChatRequest | RetrieveRequest, k: int, id_: str) -> Query:
    """What is asked by whom. An admin, who may list and remove all of his tenant's documents, may read them, too."""
    labels = None if key.grant.role == "admin" else frozenset(key.grant.labels)
    return Query(body.question, _client(key, body.user), key.grant.tenant, k, id_, labels)


def _client(key: Key, user: str | None) -> str:
    """Whom the guard remembers. What a client says of himself counts only where the key is trusted to say it."""
    if not (key.grant.trust_user and user):
        return key.id
    if len(user) > LONGEST_USER or not user.isprintable():
        raise Refusal(400, f"user: 1 to {LONGEST_USER} printable characters are allowed", "invalid_value", "user")
    return f"{key.id}/{user}"


def _require_model(gateway: Gateway, name: str) -> None:
    if name != gateway.section.model:
        message = "There is no such model; GET /v1/models tells which there is."
        raise Refusal(404, message, "model_not_found", "model")


def _model(gateway: Gateway) -> dict[str, Any]:
    return {"id": gateway.section.model, "object": "model", "created": CREATED, "owned_by": "casemate"}


async def _retrieved(gateway: Gateway, query: Query) -> Retrieval:
    """What the guard lets through, or the bare system while the guard is off."""
    if gateway.app.config.guard.mode == "off":
        return await gateway.app.guard.rag.retrieve(query)
    retrieval, _ = await gateway.app.guard.retrieve(query)
    await gateway.beat()
    return retrieval
