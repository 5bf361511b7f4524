"""Adding, removing and listing documents over HTTP, for admins: each within the tenant of his key."""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi import Query as Parameter
from pydantic import Field
from starlette.responses import Response

from casemate.chunks import cut
from casemate.gateway.answering import connected
from casemate.gateway.chat import Shape, Text
from casemate.gateway.refusals import Json, Refusal, not_allowed
from casemate.gateway.state import Gateway, visit_of
from casemate.types import Document, Event

SEVERAL = 1000
"""Most sources in one request."""

router = APIRouter(prefix="/v1/documents", tags=["documents"])


# Patterns, so that the OpenAPI says what is allowed: names begin with a sign that is seen, and texts have one.
Name = Annotated[Text, Field(pattern=r"^[^\s\x00-\x1f\x7f-\x9f][^\x00-\x1f\x7f-\x9f]*$", max_length=1000)]
Plain = Annotated[Text, Field(pattern=r"^[^\x00]*[^\s\x00][^\x00]*$")]


class Source(Shape):
    """One source: a file, a record, a page. It is cut into chunks here."""

    source: Name
    text: Plain
    title: Annotated[Text, Field(max_length=10_000)] = ""
    metadata: dict[Text, Text | int | bool | list[Text]] = Field(default_factory=dict, max_length=100)


class Addition(Shape):
    """What is posted to ``/v1/documents``."""

    documents: list[Source] = Field(min_length=1, max_length=SEVERAL)


@router.post("")
async def add(body: Addition, request: Request) -> Response:
    """Puts sources in, each in place of what was held of it. Answered when it is on disk, and not before."""
    gateway, tenant = _entered(request)
    named = Counter(source.source for source in body.documents)
    if twice := [name for name, count in named.items() if count > 1]:
        raise Refusal(400, f"the source {twice[0][:100]!r} is given twice", "invalid_value", "documents")
    chunks = await connected(request.receive, _add(gateway, body.documents, tenant), gateway.section.timeout_s)
    _note(gateway, request, "added", len(named), chunks)
    data = [{"object": "document", "id": name} for name in named]
    return Json({"object": "list", "data": data, "chunks": chunks, "due": gateway.app.due(tenant)})


@router.delete("")
async def remove(
    request: Request, source: Annotated[list[Name], Parameter(min_length=1, max_length=SEVERAL)]
) -> Response:
    """Takes all that is held of some sources out."""
    gateway, tenant = _entered(request)
    work = gateway.app.guard.remove(source, tenant)
    removed = await connected(request.receive, work, gateway.section.timeout_s)
    if not removed:
        raise Refusal(404, "No document has this source.", "not_found", "source")
    _note(gateway, request, "removed", len(set(source)), removed)
    return Json({"object": "list", "deleted": True, "chunks": removed, "due": gateway.app.due(tenant)})


@router.get("")
async def sources(
    request: Request,
    limit: Annotated[int, Parameter(ge=1, le=SEVERAL)] = 100,
    after: Annotated[str, Parameter(max_length=1000)] = "",
) -> Response:
    """The sources that are held, by name, ``limit`` from behind ``after``."""
    gateway, tenant = _entered(request)
    held = await asyncio.to_thread(gateway.app.index.digests, tenant)
    found = list(itertools.islice((name for name in sorted(held) if name > after), limit + 1))
    data = [{"object": "document", "id": name} for name in found[:limit]]
    return Json({"object": "list", "data": data, "has_more": len(found) > limit, "total": len(held)})


def _entered(request: Request) -> tuple[Gateway, str]:
    """The gateway, and whose documents are meant.

    Raises:
        Refusal: If the key is no admin's.
    """
    key = visit_of(request.scope).key
    if key is None or key.grant.role != "admin":
        raise not_allowed()
    return request.app.state.gateway, key.grant.tenant


async def _add(gateway: Gateway, given: Sequence[Source], tenant: str) -> int:
    """Cuts, embeds and commits; returns the number of chunks. Threads give up soon after this is cancelled."""
    stopped = threading.Event()

    def tick(_: int) -> None:
        if stopped.is_set():
            raise asyncio.CancelledError

    try:
        documents = await asyncio.to_thread(_chunks, gateway, given, stopped)
        await gateway.app.guard.add(documents, tenant, tick)
    finally:
        stopped.set()
    return len(documents)


def _chunks(gateway: Gateway, given: Sequence[Source], stopped: threading.Event) -> list[Document]:
    embedder, recipe = gateway.app.guard.rag.embedder, gateway.app.config.rag.chunk
    documents = list[Document]()
    for source in given:
        if stopped.is_set():
            break
        whole = Document(source.source, source.text, source.title, metadata=source.metadata)
        documents += cut(whole, embedder, recipe.tokens or embedder.max_tokens, recipe.overlap)
    return documents


def _note(gateway: Gateway, request: Request, action: str, count: int, chunks: int) -> None:
    """Who changed how much. Not which: names of sources may be confidential."""
    key = visit_of(request.scope).key
    assert key is not None
    body: dict[str, Any] = {
        "action": action,
        "key": key.id,
        "tenant": key.grant.tenant,
        "sources": count,
        "chunks": chunks,
    }
    gateway.app.store.append(Event(uuid.uuid4().hex, datetime.now(UTC), "ingest", body))
