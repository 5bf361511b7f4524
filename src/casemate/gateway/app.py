"""Assembles the gateway: routes, dashboard, middleware and error handling."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from importlib.metadata import version
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from casemate.errors import CasemateError
from casemate.gateway.admission import MCP, AdmissionMiddleware, log_failure
from casemate.gateway.api import chat, documents, operation, retrieve, traces
from casemate.gateway.dashboard.page import ROOT
from casemate.gateway.dashboard.site import make_dashboard
from casemate.gateway.errors import ANY_REQUEST, WITH_KEY, JsonResponse, documented, to_api_error
from casemate.gateway.mcp.memory import own_tools
from casemate.gateway.mcp.server import HttpEndpoint
from casemate.gateway.mcp.tools import ToolSet
from casemate.gateway.state import Gateway, get_context
from casemate.system import App

BEARER = Depends(HTTPBearer(auto_error=False, description="An API key from `casemate key create`."))
"""Documents the authentication in the OpenAPI schema; ``AdmissionMiddleware`` enforces it."""
ADDRESSES = {"api": "/v1", "schema": "/openapi.json", "dashboard": f"{ROOT}/", "health": "/healthz"}
"""Response to ``GET /``, which needs no key: it reveals nothing about this gateway."""


class _Api(FastAPI):
    """Documents the errors that are sent: an invalid request has status 400, not 422 as by default."""

    def openapi(self) -> dict[str, Any]:
        """See ``FastAPI``."""
        schema = super().openapi()
        for operations in schema["paths"].values():
            for described in operations.values():
                described["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        return schema


def make_app(app: App, make_tools: Callable[[Gateway], ToolSet] = own_tools) -> FastAPI:
    """Builds the ASGI application of a wired system, which it closes at shutdown; with tools if ``gateway.mcp`` is on.

    Raises:
        MissingExtra: If ``gateway.mcp`` is on, and the SDK is not installed.
    """
    gateway = Gateway(app)
    agents = HttpEndpoint(make_tools(gateway)) if gateway.section.mcp else None
    api = _Api(
        title="Casemate",
        version=version("casemate"),
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        lifespan=_lifespan(gateway, agents),
        dependencies=[BEARER],
        redirect_slashes=False,  # a redirect would go to the host and scheme that the request names, with its key
    )
    api.state.gateway = gateway
    for kind in (RequestValidationError, HTTPException, CasemateError, Exception):
        api.add_exception_handler(kind, _error_response)
    for routes in (chat, retrieve, documents, traces):
        api.include_router(routes.router, responses=documented(*WITH_KEY))
    api.include_router(operation.router, responses=documented(*ANY_REQUEST))
    if agents:
        api.router.routes.append(Route(MCP, agents, methods=["POST"]))
    api.add_route("/", lambda _: JsonResponse(ADDRESSES), include_in_schema=False)
    api.add_route(ROOT, lambda _: RedirectResponse(f"{ROOT}/"), include_in_schema=False)
    api.mount(ROOT, make_dashboard(gateway))
    api.add_middleware(AdmissionMiddleware, gateway=gateway)
    if gateway.section.cors_origins:
        api.add_middleware(
            CORSMiddleware,
            allow_origins=gateway.section.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return api


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, CasemateError):  # others are raised again, and logged by the middleware
        log_failure(error, get_context(request.scope))
    return to_api_error(error).response()


def _lifespan(gateway: Gateway, agents: HttpEndpoint | None) -> Callable[[object], AbstractAsyncContextManager[None]]:
    """The gateway's background work, and that of the endpoint for agents."""

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        async with gateway.lifespan(), agents.running() if agents else nullcontext():
            yield

    return lifespan
