"""Routes that add, remove and list documents of the admin's tenant."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi import Query as Parameter
from pydantic import Field
from starlette.responses import Response

from casemate.config import ChunkSection
from casemate.gateway.api.caller import gateway_of, require_role
from casemate.gateway.api.openai_schema import RequestModel, Text
from casemate.gateway.api.streaming import run_while_connected
from casemate.gateway.auth.keys import ApiKey
from casemate.gateway.errors import ApiError, JsonResponse, documented
from casemate.gateway.state import Gateway
from casemate.monitor.trends.baseline import record_if_changed
from casemate.rag.chunking import split_document
from casemate.types import Document

MAX_SOURCES = 1000
"""Sources of one request."""

router = APIRouter(prefix="/v1/documents", tags=["documents"])

# Patterns, so that the OpenAPI schema states them: names start with a visible character, texts contain one.
Name = Annotated[Text, Field(pattern=r"^[^\s\x00-\x1f\x7f-\x9f][^\x00-\x1f\x7f-\x9f]*$", max_length=1000)]
NonBlankText = Annotated[Text, Field(pattern=r"^[^\x00]*[^\s\x00][^\x00]*$")]


class SourceUpload(RequestModel, extra="forbid"):
    """A source: a file, a record or a page. The gateway splits it into chunks.

    Unknown fields are refused: ``acl`` beside ``metadata`` would restrict nothing.
    """

    source: Name
    text: NonBlankText
    title: Annotated[Text, Field(max_length=10_000)] = ""
    metadata: dict[Text, Text | int | bool | list[Text]] = Field(default_factory=dict, max_length=100)


class UploadRequest(RequestModel, extra="forbid"):
    """Body of ``POST /v1/documents``."""

    documents: list[SourceUpload] = Field(min_length=1, max_length=MAX_SOURCES)


@router.post("", responses=documented(504))
async def add(body: UploadRequest, request: Request) -> Response:
    """Adds sources; each replaces the source of the same name. The response is sent once they are on disk.

    Its field `due` is the reason why the guard must be calibrated before it answers again; empty if it is ready.
    """
    gateway, key = gateway_of(request), require_role(request, "admin")
    counts = Counter(source.source for source in body.documents)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise ApiError(400, f"the source {repeated[0][:100]!r} is given twice", "invalid_value", "documents")
    work = _add(gateway, body.documents, key)
    chunks, withheld = await run_while_connected(request.receive, work, gateway.section.timeout_s)
    gateway.metrics.documents.labels("indexed").inc(len(counts) - len(withheld))
    gateway.metrics.documents.labels("quarantined").inc(len(withheld))
    gateway.record_ingest(key, "added", len(counts) - len(withheld), chunks, len(withheld))
    # the same status for every withheld source, without a reason: it would teach the writer of poison
    status = {True: "quarantined", False: "indexed"}
    data = [{"object": "document", "id": name, "status": status[name in withheld]} for name in counts]
    due = gateway.app.due(key.grant.tenant)
    found = {"object": "list", "data": data, "chunks": chunks, "quarantined": len(withheld), "due": due}
    return JsonResponse(found)


@router.delete("", responses=documented(404, 504))
async def remove(
    request: Request, source: Annotated[list[Name], Parameter(min_length=1, max_length=MAX_SOURCES)]
) -> Response:
    """Removes sources.

    The field `due` of the response is the reason why the guard must be calibrated; empty if it is ready.
    """
    gateway, key = gateway_of(request), require_role(request, "admin")
    work = _remove(gateway, source, key.grant.tenant)
    removed = await run_while_connected(request.receive, work, gateway.section.timeout_s)
    if not removed:
        raise ApiError(404, "No document has this source.", "not_found", "source")
    gateway.record_ingest(key, "removed", len(set(source)), removed)
    due = gateway.app.due(key.grant.tenant)
    return JsonResponse({"object": "list", "deleted": True, "chunks": removed, "due": due})


@router.get("")
async def sources(
    request: Request,
    limit: Annotated[int, Parameter(ge=1, le=MAX_SOURCES)] = 100,
    after: Annotated[str, Parameter(max_length=1000)] = "",
) -> Response:
    """Lists sources by name: at most ``limit``, from the one behind ``after``."""
    gateway, key = gateway_of(request), require_role(request, "admin")
    held = await asyncio.to_thread(gateway.app.index.digests, key.grant.tenant)
    found = list(itertools.islice((name for name in sorted(held) if name > after), limit + 1))
    data = [{"object": "document", "id": name} for name in found[:limit]]
    return JsonResponse({"object": "list", "data": data, "has_more": len(found) > limit, "total": len(held)})


async def _add(gateway: Gateway, uploads: Sequence[SourceUpload], key: ApiKey) -> tuple[int, Collection[str]]:
    """Splits, embeds and adds sources; returns the number of indexed chunks, and the sources that were not indexed.

    Its threads stop soon after a cancellation.
    """
    stopped = threading.Event()

    def raise_if_stopped(_: int) -> None:
        if stopped.is_set():
            raise asyncio.CancelledError

    try:
        documents = await asyncio.to_thread(_split, gateway, uploads, stopped)
        await _record(gateway, key.grant.tenant, {d.source: d.digest for d in documents})
        withheld = await gateway.documents.add(documents, key.grant.tenant, raise_if_stopped, f"key {key.id}")
    finally:
        stopped.set()
    return sum(d.source not in withheld for d in documents), withheld.keys()


async def _remove(gateway: Gateway, sources: Sequence[str], tenant: str) -> int:
    await _record(gateway, tenant, dict.fromkeys(sources, ""))
    return await gateway.app.guard.remove(sources, tenant)


async def _record(gateway: Gateway, tenant: str, new: Mapping[str, str]) -> None:
    """Records which sources change, so that their canaries become outdated instead of failing."""
    await asyncio.to_thread(record_if_changed, gateway.app.store, gateway.app.index, tenant, new)


def _split(gateway: Gateway, uploads: Sequence[SourceUpload], stopped: threading.Event) -> list[Document]:
    embedder, recipe = gateway.app.guard.rag.embedder, gateway.app.config.rag.chunk
    documents = list[Document]()
    for upload in uploads:
        if stopped.is_set():
            break
        digest = _digest(upload, recipe)
        whole = Document(upload.source, upload.text, upload.title, digest=digest, metadata=upload.metadata)
        documents += split_document(whole, embedder, recipe.tokens or embedder.max_tokens, recipe.overlap)
    return documents


def _digest(upload: SourceUpload, recipe: ChunkSection) -> str:
    """Content hash of a source. It has no part before ``@``, so ``casemate index`` takes it for no file of its own."""
    content = [upload.text, upload.title, dict(upload.metadata), recipe.tokens, recipe.overlap]
    return f"@upload-{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]}"
