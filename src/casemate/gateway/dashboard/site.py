"""The dashboard application: routes, access control, forms and error pages.

The script of a live page requests it every few seconds with the displayed version. The server renders the page only if
there is a newer one. No connection stays open, and at most ``MAX_CONCURRENT`` pages are rendered at once.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from http import HTTPStatus
from types import SimpleNamespace
from typing import TypeAlias
from urllib.parse import parse_qsl, quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from casemate.errors import BackendError, CasemateError
from casemate.gateway.dashboard import (
    alerts,
    calibration,
    canaries,
    clients,
    disclosure,
    documents,
    enforcement,
    overview,
    redteam,
    requests,
    topics,
    verdicts,
    view_as_client,
)
from casemate.gateway.dashboard.page import ASSET_VERSIONS, ASSETS, CSP, NAV, ROOT, Page, PageRequest, asset, render
from casemate.gateway.dashboard.records import Records
from casemate.gateway.dashboard.session import (
    LOGIN_COOKIE,
    NOTES_COOKIE,
    SESSION_COOKIE,
    DashboardSession,
    SessionStore,
    equal,
    login_token,
)
from casemate.gateway.dashboard.time_range import TimeRange
from casemate.gateway.dashboard.topics import TopicMapCache
from casemate.gateway.errors import ApiError
from casemate.gateway.state import Gateway

MAX_CONCURRENT = 32
RENDER_S = 10.0
"""A live page is rendered at least this often: durations and time spans change without events."""
MAX_FORM = 20_000
"""Bytes of a form."""
MAX_FIELDS = 400
"""Fields of a form; a page of a table has fewer boxes."""
Fields: TypeAlias = list[tuple[str, str]]
View: TypeAlias = Callable[[PageRequest], Page | Response]
Action: TypeAlias = Callable[[PageRequest], Awaitable[str | Page]]
"""Handles a form; returns the address to go to, or a page that no address leads to."""

PAGES: dict[str, tuple[View, bool]] = {
    "/": (overview.overview, True),
    "/verdicts": (verdicts.explorer, True),
    "/verdicts/{id}": (verdicts.detail, False),
    "/requests": (requests.requests, True),
    "/requests/{id}": (requests.detail, False),
    "/clients": (clients.clients, True),
    "/clients/view": (view_as_client.view, False),
    "/disclosure": (disclosure.disclosure, False),
    "/topics": (topics.topics, False),
    "/canaries": (canaries.matrix, True),
    "/canaries/result": (canaries.result, False),
    "/canaries/trend": (canaries.trend, False),
    "/alerts": (alerts.alerts, True),
    "/redteam": (redteam.redteam, False),
    "/redteam/report": (redteam.report, False),
    "/calibration": (calibration.page, False),
    "/calibration/report": (calibration.report, False),
    "/enforcement": (enforcement.page, False),
    "/documents": (documents.sources, False),
    "/documents/remove": (documents.confirm_removal, False),
    "/quarantine": (documents.quarantine, False),
    "/quarantine/{key}": (documents.quarantined, False),
}
"""By address: the view, and whether the page is live."""
ACTIONS: dict[str, Action] = {
    "/clients/reset": clients.reset,
    "/clients/view": view_as_client.ask,
    "/alerts/acknowledge": alerts.acknowledge,
    "/alerts/close": alerts.close,
    "/canaries/acknowledge": alerts.acknowledge_canaries,
    "/canaries/close": alerts.close_canaries,
    "/calibration/apply": calibration.apply,
    "/enforcement/switch": enforcement.switch,
    "/documents/remove": documents.remove,
    "/quarantine/release": documents.release,
    "/quarantine/drop": documents.drop,
}
GLOBAL_ONLY = {f"/{entry.address}" for entry in NAV if entry.global_only} | {"/calibration/apply"}
"""Addresses that concern the whole installation, and are refused to a key of one tenant."""


def make_dashboard(gateway: Gateway) -> Starlette:
    """Builds the dashboard of a gateway, to be mounted at ``/dashboard``."""
    site = Starlette(
        routes=[
            Route("/static/{name}", _static, name="static"),
            Route("/login", _login, methods=["GET", "POST"]),
            Route("/logout", _logout, methods=["POST"]),
            *(Route(path, _act(path, action), methods=["POST"]) for path, action in ACTIONS.items()),
            *(Route(path, _show(path, view, live)) for path, (view, live) in PAGES.items()),
        ],
        exception_handlers={HTTPException: _error_page, CasemateError: _error_page, Exception: _error_page},
    )
    site.router.redirect_slashes = False
    site.state.gateway = gateway
    site.state.sessions = SessionStore(gateway.app.store, gateway.keys)
    site.state.records = Records(gateway.app)
    site.state.topic_maps = TopicMapCache(gateway.app)
    site.state.rendering = asyncio.Semaphore(MAX_CONCURRENT)
    return site


def _show(path: str, view: View, live: bool) -> Callable[[Request], Awaitable[Response]]:
    """Returns the endpoint of a page."""

    async def endpoint(http: Request) -> Response:
        _set_route(http, path)
        update = http.headers.get("x-live") == "1"
        session = await _session(http, touch=not update)
        if session is None:
            return _redirect_to_login(http)
        session.notes += [] if update else _cookie_notes(http)
        if http.app.state.rendering.locked():
            raise HTTPException(503, "Too many pages are requested at once. Try again shortly.")
        async with http.app.state.rendering:
            request = await _synced_request(http, session, [])
            _require_access(request, path)
            version = f'"{request.records.version}-{int(time.time() / RENDER_S)}"' if live else ""
            if update and version and http.headers.get("if-none-match") == version:
                return Response(status_code=304, headers={"ETag": version})
            response = await request.in_thread(_respond, view, request, version)
            if not update and NOTES_COOKIE in http.cookies:
                response.delete_cookie(NOTES_COOKIE, path=ROOT)
            return response

    return endpoint


def _respond(view: View, request: PageRequest, version: str) -> Response:
    found = view(request)
    return found if isinstance(found, Response) else _html(found, request, version)


def _act(path: str, action: Action) -> Callable[[Request], Awaitable[Response]]:
    """Returns the endpoint of a form. Access depends on ``path``: a Host header may forge ``http.url``."""

    async def endpoint(http: Request) -> Response:
        _set_route(http, path)
        session = await _session(http)
        if session is None:
            return _redirect_to_login(http)
        fields = await _fields(http)
        if not equal(dict(fields).get("csrf", ""), session.csrf) or _cross_site(http):
            raise HTTPException(403, "This form does not belong to this session. Go back, reload the page, and repeat.")
        request = await _synced_request(http, session, fields)
        _require_access(request, path)
        done = await action(request)
        if isinstance(done, Page):
            return await request.in_thread(_html, done, request)
        response = RedirectResponse(done, 303)
        if session.notes:  # another gateway may serve the next page
            notes = urlsafe_b64encode(json.dumps(session.notes).encode()).decode()
            _set_cookie(response, http, NOTES_COOKIE, notes)
        return response

    return endpoint


async def _synced_request(http: Request, session: DashboardSession, fields: Fields) -> PageRequest:
    request = _page_request(http, session, fields)
    await request.in_thread(request.records.sync)
    return request


def _page_request(http: Request, session: DashboardSession, fields: Fields) -> PageRequest:
    gateway: Gateway = http.app.state.gateway
    names = gateway.keys.names()
    time_range = TimeRange.parse(http.query_params, datetime.now(UTC))
    selected = tuple(dict.fromkeys(value for name, value in fields if name == "selected"))
    return PageRequest(http, gateway, http.app.state.records, session, dict(fields), names, time_range, selected)


def _require_access(request: PageRequest, path: str) -> None:
    if not request.session.installation and any(path == one or path.startswith(f"{one}/") for one in GLOBAL_ONLY):
        raise HTTPException(403, "This page concerns the whole installation, and your key is for one tenant.")


def _html(page: Page, request: PageRequest | None, version: str = "") -> Response:
    headers = {"Content-Security-Policy": CSP} | ({"ETag": version} if version else {})
    return Response(render(page, request, version), page.status, headers, "text/html; charset=utf-8")


async def _static(http: Request) -> Response:
    _set_route(http, "/static")
    name = http.path_params["name"]
    if name not in ASSETS:
        raise HTTPException(404)
    current = http.query_params.get("v") == ASSET_VERSIONS[name]
    cache = "public, max-age=31536000, immutable" if current else "no-cache"
    return Response(asset(name), headers={"Cache-Control": cache}, media_type=ASSETS[name])


# login


def _records(http: Request) -> Records:
    records: Records = http.app.state.records
    return records


async def _session(http: Request, touch: bool = True) -> DashboardSession | None:
    """The session of a request, if its key is still valid."""
    sessions: SessionStore = http.app.state.sessions
    token = http.cookies.get(SESSION_COOKIE, "")
    return await _records(http).in_thread(sessions.find, token, touch) if token else None


def _cookie_notes(http: Request) -> list[tuple[str, str]]:
    """Messages that the previous page left in a cookie; none if another site of the same domain has set it wrongly."""
    try:
        found = json.loads(urlsafe_b64decode(http.cookies.get(NOTES_COOKIE, "")) or "[]")
        return [(str(tone), str(text)) for tone, text in found]
    except (ValueError, TypeError, RecursionError):
        return []


async def _login(http: Request) -> Response:
    _set_route(http, "/login")
    if http.method != "POST":
        return RedirectResponse(f"{ROOT}/", 303) if await _session(http) else _login_form(http)
    sessions: SessionStore = http.app.state.sessions
    gateway: Gateway = http.app.state.gateway
    form = dict(await _fields(http))
    cookie, address = http.cookies.get(LOGIN_COOKIE, ""), http.client.host if http.client else ""
    if not cookie or not equal(form.get("csrf", ""), login_token(cookie)) or _cross_site(http):
        return _login_form(http, "The form has expired, or cookies are blocked. Try again.", 403)
    key = gateway.keys.find(form.get("key", "").strip())
    if key is None or key.grant.role != "admin":  # a valid key always passes: others cannot lock an admin out
        if not await _records(http).in_thread(sessions.may_try, address):
            return _login_form(http, "Too many failed logins. Try again in a minute.", 429)
        await _records(http).in_thread(sessions.record_failure, address)
        return _login_form(http, "This is not a valid admin key.", 403)
    response = RedirectResponse(_safe_next(form.get("next", "")), 303)
    _set_cookie(response, http, SESSION_COOKIE, await _records(http).in_thread(sessions.start, key))
    response.delete_cookie(LOGIN_COOKIE, path=ROOT)
    return response


async def _logout(http: Request) -> Response:
    _set_route(http, "/logout")
    session, form = await _session(http), dict(await _fields(http))
    if session is not None and equal(form.get("csrf", ""), session.csrf) and not _cross_site(http):
        await _records(http).in_thread(http.app.state.sessions.end, http.cookies.get(SESSION_COOKIE, ""))
    response = RedirectResponse(f"{ROOT}/login", 303)
    response.delete_cookie(SESSION_COOKIE, path=ROOT)
    return response


def _login_form(http: Request, error: str = "", status: int = 200) -> Response:
    cookie = http.cookies.get(LOGIN_COOKIE) or secrets.token_urlsafe(24)
    context = {"csrf": login_token(cookie), "next": _safe_next(http.query_params.get("next", "")), "error": error}
    response = _html(Page("login.html", context, status), None)
    _set_cookie(response, http, LOGIN_COOKIE, cookie)
    return response


def _set_cookie(response: Response, http: Request, name: str, value: str) -> None:
    secure = http.url.scheme == "https"
    response.set_cookie(name, value, path=ROOT, secure=secure, httponly=True, samesite="strict")


def _redirect_to_login(http: Request) -> Response:
    """Redirects to the login form; after the login, the form leads back to the requested page."""
    if http.method != "GET" or http.headers.get("x-live") == "1":
        return RedirectResponse(f"{ROOT}/login", 303)
    requested = http.url.path + (f"?{http.url.query}" if http.url.query else "")
    return RedirectResponse(f"{ROOT}/login?next={quote(requested, safe='')}", 303)


def _safe_next(address: str) -> str:
    """The address to go to after the login: a page of the dashboard, never another site."""
    plain = address.isascii() and address.isprintable() and "\\" not in address and "//" not in address
    return address if plain and address.startswith(f"{ROOT}/") and not address.startswith(f"{ROOT}/log") else f"{ROOT}/"


def _cross_site(http: Request) -> bool:
    """Whether the browser reports that another site sent the form."""
    return http.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")


async def _fields(http: Request) -> Fields:
    """The fields of a form in order; checked boxes share a name."""
    body = bytearray()
    try:
        async for chunk in http.stream():
            body += chunk
            if len(body) > MAX_FORM:
                raise HTTPException(413, "The form is too long.")
    except ClientDisconnect:
        raise HTTPException(400, "The form did not arrive.") from None
    try:
        return parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise HTTPException(400, "The form cannot be read.") from None


def _set_route(http: Request, path: str) -> None:
    """Sets the route name that the metrics use."""
    http.scope["route"] = SimpleNamespace(path=f"{ROOT}{path}")


# errors

ERROR_TITLES = {404: "Not found", 403: "Not allowed", 409: "Conflict", 503: "Not available"}


async def _error_page(http: Request, error: Exception) -> Response:
    """Describes an error to an admin; without a session, the page contains no details."""
    if isinstance(error, ApiError):
        raise error
    try:
        session = await _session(http, touch=False)
    except CasemateError:
        session = None
    status, text = 500, "The request failed. See the log of the gateway."
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase
        text = "There is no page at this address." if error.detail == phrase == "Not Found" else str(error.detail)
        status = error.status_code
    elif isinstance(error, CasemateError):
        status, text = (503 if isinstance(error, BackendError) else 409), str(error)
    if session is None:
        context = {"title": f"Error {status}", "message": "This page does not exist, or is not available."}
        return _html(Page("error.html", context, status), None)
    context = {"title": ERROR_TITLES.get(status, f"Error {status}"), "message": text}
    return _html(Page("error.html", context, status), _page_request(http, session, []))
