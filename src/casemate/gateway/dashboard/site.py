"""All pages joined: who may see what, and what he is told when something goes wrong.

A page that follows what happens is fetched again by its script, every few seconds, with the version it shows; nothing
is rendered until there is news. No connection stays open, and no more than ``AT_ONCE`` pages are made at once.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable
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
from casemate.gateway.dashboard import alerts, calibration, canaries, documents, overview, redteam, topics, verdicts
from casemate.gateway.dashboard.page import (
    ASSETS,
    NAV,
    POLICY,
    ROOT,
    VERSIONS,
    Look,
    Page,
    asset,
    hidden_fields,
    void,
    whole,
)
from casemate.gateway.dashboard.records import Records
from casemate.gateway.dashboard.session import (
    COOKIE,
    FORM_COOKIE,
    NOTES_COOKIE,
    Session,
    Sessions,
    form_token,
    same,
)
from casemate.gateway.dashboard.topics import Maps
from casemate.gateway.refusals import Refusal
from casemate.gateway.state import Gateway
from casemate.lab.charts import Markup, join, tag

AT_ONCE = 32
AGAIN_S = 10.0
"""After so long a page is made anew even if no event came: durations and spans of time move on."""
LONGEST_FORM = 20_000
Show: TypeAlias = Callable[[Look], Page | Response]
Act: TypeAlias = Callable[[Look], Awaitable[str]]

PAGES: dict[str, tuple[Show, bool]] = {
    "/": (overview.overview, True),
    "/verdicts": (verdicts.explorer, True),
    "/verdicts/{id}": (verdicts.detail, False),
    "/topics": (topics.topics, False),
    "/canaries": (canaries.matrix, True),
    "/canaries/result": (canaries.result, False),
    "/alerts": (alerts.alerts, True),
    "/redteam": (redteam.redteam, False),
    "/redteam/report": (redteam.report, False),
    "/calibration": (calibration.page, False),
    "/calibration/report": (calibration.report, False),
    "/documents": (documents.sources, False),
    "/documents/remove": (documents.ask_removal, False),
    "/quarantine": (documents.quarantine, False),
}
"""Address, what shows it, and whether it follows what happens."""
ACTS: dict[str, Act] = {
    "/verdicts/forgive": verdicts.forgive,
    "/alerts/acknowledge": alerts.acknowledge,
    "/alerts/close": alerts.close,
    "/calibration/apply": calibration.apply,
    "/documents/remove": documents.remove,
    "/quarantine/release": documents.release,
    "/quarantine/drop": documents.drop,
}
FOR_ALL = {f"/{address}" for address, _, whole_only in NAV if whole_only} | {"/calibration/apply"}
"""What is of the whole installation, and not for a key of one tenant."""


def make_dashboard(gateway: Gateway) -> Starlette:
    """The pages of a gateway, to be mounted at ``/dashboard``."""
    site = Starlette(
        routes=[
            Route("/static/{name}", _static, name="static"),
            Route("/login", _login, methods=["GET", "POST"]),
            Route("/logout", _logout, methods=["POST"]),
            *(Route(path, _acting(act), methods=["POST"]) for path, act in ACTS.items()),
            *(Route(path, _showing(path, show, live)) for path, (show, live) in PAGES.items()),
        ],
        exception_handlers={HTTPException: _refuse, CasemateError: _refuse, Exception: _refuse},
    )
    site.router.redirect_slashes = False
    site.state.gateway = gateway
    site.state.sessions = Sessions(gateway.app.store, gateway.keys)
    site.state.records = Records(gateway.app)
    site.state.maps = Maps(gateway.app)
    site.state.room = asyncio.Semaphore(AT_ONCE)
    return site


def _showing(path: str, show: Show, live: bool) -> Callable[[Request], Awaitable[Response]]:
    """What answers for a page."""

    async def answer(request: Request) -> Response:
        _named(request, path)
        by_itself = request.headers.get("x-live") == "1"
        session = await _session(request, touch=not by_itself)
        if session is None:
            return _to_login(request)
        session.notes += [] if by_itself else _told(request)
        if request.app.state.room.locked():
            raise HTTPException(503, "Too many pages are asked for at once. Try again shortly.")
        async with request.app.state.room:
            look = await _look(request, session, {})
            _require_whole(look, path)
            version = f'"{look.records.version}-{int(time.time() / AGAIN_S)}"' if live else ""
            if by_itself and version and request.headers.get("if-none-match") == version:
                return Response(status_code=304, headers={"ETag": version})
            answer = await look.aside(_made, show, look, version)
            if not by_itself and NOTES_COOKIE in request.cookies:
                answer.delete_cookie(NOTES_COOKIE, path=ROOT)
            return answer

    return answer


def _made(show: Show, look: Look, version: str) -> Response:
    found = show(look)
    return found if isinstance(found, Response) else _sent(found, look, version)


def _acting(act: Act) -> Callable[[Request], Awaitable[Response]]:
    """What answers for a form."""

    async def answer(request: Request) -> Response:
        path = request.url.path.removeprefix(ROOT)
        _named(request, path)
        session = await _session(request)
        if session is None:
            return _to_login(request)
        form = await _form(request)
        if not same(form.get("csrf", ""), session.csrf) or _foreign(request):
            raise HTTPException(403, "This form is not from this session. Go back, load the page again, and repeat it.")
        look = await _look(request, session, form)
        _require_whole(look, path)
        answer = RedirectResponse(await act(look), 303)
        if session.notes:  # the next page may come from another gateway
            _set(answer, request, NOTES_COOKIE, urlsafe_b64encode(json.dumps(session.notes).encode()).decode())
        return answer

    return answer


async def _look(request: Request, session: Session, form: dict[str, str]) -> Look:
    look = _looking(request, session, form)
    await look.aside(look.records.follow)
    return look


def _looking(request: Request, session: Session, form: dict[str, str]) -> Look:
    gateway: Gateway = request.app.state.gateway
    names = {key.id: key.grant.name for key in gateway.keys.all()}
    return Look(request, gateway, request.app.state.records, session, form, names)


def _require_whole(look: Look, path: str) -> None:
    if not look.session.whole and any(path == one or path.startswith(f"{one}/") for one in FOR_ALL):
        raise HTTPException(403, "This is about the whole installation, and your key is for one tenant.")


def _sent(page: Page, look: Look | None, version: str = "") -> Response:
    headers = {"Content-Security-Policy": POLICY} | ({"ETag": version} if version else {})
    return Response(whole(page, look, version), page.status, headers, "text/html; charset=utf-8")


async def _static(request: Request) -> Response:
    _named(request, "/static")
    name = request.path_params["name"]
    if name not in ASSETS:
        raise HTTPException(404, "There is nothing at this address.")
    fresh = request.query_params.get("v") == VERSIONS[name]
    kept = "public, max-age=31536000, immutable" if fresh else "no-cache"
    return Response(asset(name), headers={"Cache-Control": kept}, media_type=ASSETS[name])


# who


async def _session(request: Request, touch: bool = True) -> Session | None:
    """Whoever is logged in, if his key still holds."""
    sessions: Sessions = request.app.state.sessions
    token = request.cookies.get(COOKIE, "")
    return await asyncio.to_thread(sessions.find, token, touch) if token else None


def _told(request: Request) -> list[tuple[str, str]]:
    """What was left by the page before."""
    try:
        found = json.loads(urlsafe_b64decode(request.cookies.get(NOTES_COOKIE, "")) or "[]")
        return [(str(tone), str(text)) for tone, text in found]
    except (ValueError, TypeError):
        return []


async def _login(request: Request) -> Response:
    """The form, and what it sends."""
    _named(request, "/login")
    if request.method != "POST":
        return RedirectResponse(f"{ROOT}/", 303) if await _session(request) else _door(request)
    sessions: Sessions = request.app.state.sessions
    gateway: Gateway = request.app.state.gateway
    form = await _form(request)
    cookie, address = request.cookies.get(FORM_COOKIE, ""), request.client.host if request.client else ""
    if not cookie or not same(form.get("csrf", ""), form_token(cookie)) or _foreign(request):
        return _door(request, "That form was too old, or your browser keeps no cookies. Try again.", 403)
    if not await asyncio.to_thread(sessions.may_try, address):
        return _door(request, "Too many logins have failed. Try again in a minute.", 429)
    key = gateway.keys.find(form.get("key", "").strip())
    if key is None or key.grant.role != "admin":
        await asyncio.to_thread(sessions.failed, address)
        return _door(request, "This is not a valid key of an admin.", 403)
    answer = RedirectResponse(_next(form.get("next", "")), 303)
    _set(answer, request, COOKIE, await asyncio.to_thread(sessions.begin, key))
    answer.delete_cookie(FORM_COOKIE, path=ROOT)
    return answer


async def _logout(request: Request) -> Response:
    _named(request, "/logout")
    session, form = await _session(request), await _form(request)
    if session is not None and same(form.get("csrf", ""), session.csrf) and not _foreign(request):
        await asyncio.to_thread(request.app.state.sessions.end, request.cookies.get(COOKIE, ""))
    answer = RedirectResponse(f"{ROOT}/login", 303)
    answer.delete_cookie(COOKIE, path=ROOT)
    return answer


def _door(request: Request, wrong: str = "", status: int = 200) -> Response:
    """The form by which one logs in."""
    cookie = request.cookies.get(FORM_COOKIE) or secrets.token_urlsafe(24)
    hidden = {"csrf": form_token(cookie), "next": _next(request.query_params.get("next", ""))}
    body = tag(
        "form",
        *hidden_fields(hidden),
        *([tag("p", wrong, class_="note bad", role="alert")] if wrong else []),
        tag(
            "label",
            tag("span", "API key of an admin"),
            void(
                "input",
                type="password",
                name_="key",
                required="required",
                autocomplete="current-password",
                autofocus="autofocus",
                spellcheck="false",
                maxlength="200",
            ),
        ),
        tag("button", "Log in"),
        tag("p", "No key yet? ", tag("code", "casemate key create NAME --role admin"), class_="soft"),
        method="post",
        action=f"{ROOT}/login",
        class_="login",
    )
    answer = _sent(Page("Log in", body, status), None)
    _set(answer, request, FORM_COOKIE, cookie)
    return answer


def _set(answer: Response, request: Request, name: str, value: str) -> None:
    secure = request.url.scheme == "https"
    answer.set_cookie(name, value, path=ROOT, secure=secure, httponly=True, samesite="strict")


def _to_login(request: Request) -> Response:
    """Whoever is not logged in goes to the form, and from there to where he wanted to."""
    if request.method != "GET" or request.headers.get("x-live") == "1":
        return RedirectResponse(f"{ROOT}/login", 303)
    wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"{ROOT}/login?next={quote(wanted, safe='')}", 303)


def _next(address: str) -> str:
    """Where to go after the login: only to a page of ours."""
    plain = address.isascii() and address.isprintable() and "\\" not in address and "//" not in address
    return address if plain and address.startswith(f"{ROOT}/") and not address.startswith(f"{ROOT}/log") else f"{ROOT}/"


def _foreign(request: Request) -> bool:
    """Whether a browser says that the form was sent by another site."""
    return request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")


async def _form(request: Request) -> dict[str, str]:
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > LONGEST_FORM:
                raise HTTPException(413, "The form is too long.")
    except ClientDisconnect:
        raise HTTPException(400, "The form did not arrive.") from None
    try:
        return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=50))
    except ValueError:
        raise HTTPException(400, "The form cannot be read.") from None


def _named(request: Request, path: str) -> None:
    """Tells the metrics which route this is."""
    request.scope["route"] = SimpleNamespace(path=f"{ROOT}{path}")


# what went wrong


async def _refuse(request: Request, error: Exception) -> Response:
    """A page that says what is wrong. Whoever sees it is an admin, or is told nothing but a phrase."""
    if isinstance(error, Refusal):
        raise error
    try:
        session = await _session(request, touch=False)
    except CasemateError:
        session = None
    status, text = 500, "Something went wrong here. The log of the gateway says what."
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase
        text = "There is nothing at this address." if error.detail == phrase == "Not Found" else str(error.detail)
        status = error.status_code
    elif isinstance(error, CasemateError):
        status, text = (503 if isinstance(error, BackendError) else 409), str(error)
    if session is None:
        return _sent(
            Page(f"Error {status}", tag("p", "There is nothing here for you, or it does not work."), status), None
        )
    look = _looking(request, session, {})
    back = tag("p", tag("a", "Back to the overview", href=f"{ROOT}/"))
    titles = {404: "Not found", 403: "Not allowed", 409: "That did not work", 503: "Not available"}
    body: Markup = join([tag("div", tag("p", text), back, class_="empty")])
    return _sent(Page(titles.get(status, f"Error {status}"), body, status), look)
