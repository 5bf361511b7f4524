"""Routes for operation: health, readiness and metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from casemate.gateway.api.caller import gateway_of
from casemate.gateway.errors import JsonResponse, documented, forbidden
from casemate.gateway.metrics import CONTENT_TYPE
from casemate.gateway.state import get_context

router = APIRouter()


@router.get("/healthz", tags=["operation"])
async def healthz() -> Response:
    """Reports that the process runs."""
    return JsonResponse({"ok": True})


@router.get("/readyz", tags=["operation"])
async def readyz(request: Request) -> Response:
    """Reports whether index, store and keys are available; if not, 503, and the log has the reason."""
    ready = await gateway_of(request).ready()
    return JsonResponse({"ok": ready}, 200 if ready else 503)


@router.get("/metrics", tags=["operation"], responses=documented(401, 403))
async def metrics(request: Request) -> Response:
    """Returns metrics for Prometheus."""
    gateway, key = gateway_of(request), get_context(request.scope).key
    if gateway.section.metrics == "key" and (key is None or key.grant.role not in ("admin", "metrics")):
        raise forbidden()
    return Response(gateway.metrics.exposition(), media_type=CONTENT_TYPE)
