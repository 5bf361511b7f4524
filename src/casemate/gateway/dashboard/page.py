"""What all pages look like: the frame, and the pieces that they are made of."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import urlencode

from starlette.requests import Request

from casemate.app import App
from casemate.gateway.dashboard.records import Records
from casemate.gateway.dashboard.session import Session
from casemate.gateway.state import Gateway
from casemate.lab.charts import Markup, join, tag
from casemate.stats import clopper_pearson

ROOT = "/dashboard"
T = TypeVar("T")
ASSETS = {
    "dashboard.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
"""Nothing inline, nothing foreign: what got past the escaping could load and run nothing."""
NAV = (
    ("", "Overview", False),
    ("verdicts", "Verdicts", False),
    ("topics", "Topics", False),
    ("canaries", "Canaries", True),
    ("alerts", "Alerts", True),
    ("redteam", "Red team", True),
    ("calibration", "Calibration", False),
    ("documents", "Documents", False),
    ("quarantine", "Quarantine", False),
)
"""Address, name, and whether it is of the whole installation."""


def asset(name: str) -> bytes:
    """A file of ours."""
    return files("casemate.gateway.dashboard").joinpath("static", name).read_bytes()


VERSIONS = {name: hashlib.sha256(asset(name)).hexdigest()[:12] for name in ASSETS}


@dataclass(frozen=True, slots=True)
class Look:
    """One request of somebody who is logged in.

    Attributes:
        request: The request.
        gateway: The gateway.
        records: What is shown of the event store.
        session: Who asks.
        form: What he sent.
        keys: Names of keys by their id.
    """

    request: Request
    gateway: Gateway
    records: Records
    session: Session
    form: Mapping[str, str]
    keys: Mapping[str, str]

    @property
    def app(self) -> App:
        """The system."""
        return self.gateway.app

    def asked(self, name: str, longest: int = 200) -> str:
        """A parameter of the address; empty if it is not there."""
        return self.request.query_params.get(name, "")[:longest]

    async def aside(self, work: Callable[..., T], *arguments: Any) -> T:
        """Does something that blocks on the pages' own threads; those of the guard are left to questions."""
        return await asyncio.get_running_loop().run_in_executor(self.records.threads, work, *arguments)

    @property
    def tenants(self) -> list[str]:
        """Whose documents may be seen. Blocks."""
        own = self.session.key.grant.tenant
        return sorted({own, *self.app.index.tenants()}) if self.session.every_tenant else [own]

    def tenant(self, tenants: Sequence[str]) -> str:
        """The tenant that is asked for, if it may be seen; else the key's own."""
        given = self.form.get("tenant") or self.asked("tenant")
        return given if given in tenants else self.session.key.grant.tenant

    def is_canary(self, client: str) -> bool:
        """Whether a client is the monitor."""
        prefix = self.app.config.monitor.client.partition("{")[0]
        return bool(prefix) and client.startswith(prefix)

    def client(self, client: str) -> str:
        """A client as people know him: by the name of his key."""
        key, slash, user = client.partition("/")
        return f"{self.keys[key]}{slash}{user}" if key in self.keys else client


@dataclass(frozen=True, slots=True)
class Page:
    """What a page is made of.

    Attributes:
        title: Its name.
        body: What is on it, below the title.
        status: HTTP status.
        lead: A sentence below the title.
    """

    title: str
    body: Markup
    status: int = 200
    lead: str = ""


def whole(page: Page, look: Look | None, version: str = "") -> bytes:
    """The page as it is sent.

    Args:
        page: What is on it.
        look: Who looks; None: nobody is logged in.
        version: Tells what the page fetches again by itself whether there is news; empty: it does not.
    """
    notes = [tag("p", text, class_=f"note {tone}", role="status") for tone, text in _notes(look)]
    main = tag(
        "main",
        tag("div", tag("h1", page.title), *([tag("p", page.lead, class_="lead")] if page.lead else []), class_="head"),
        *notes,
        page.body,
        id="main",
        tabindex=-1,
    )
    head = tag(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="robots" content="noindex"><meta name="color-scheme" content="light dark">'),
        tag("title", f"{page.title} · Casemate"),
        Markup(f'<link rel="stylesheet" href="{_address("dashboard.css")}">'),
        Markup(f'<link rel="icon" href="{_address("icon.svg")}" type="image/svg+xml">'),
        Markup(f'<script src="{_address("dashboard.js")}" defer></script>'),
    )
    skip = tag("a", "Skip to the content", href="#main", class_="skip")
    live = {"data_version": version} if version else {}
    body = tag("body", skip, _top(look, bool(version)), main, class_="in" if look else "out", **live)
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n".encode(errors="replace")


def _address(name: str) -> str:
    return f"{ROOT}/static/{name}?v={VERSIONS[name]}"


def _notes(look: Look | None) -> list[tuple[str, str]]:
    return look.session.notes if look else []


def _top(look: Look | None, live: bool) -> Markup:
    """Brand, ways to the pages, and the way out."""
    brand = tag("a", tag("span", "", class_="mark", aria_hidden="true"), "Casemate", href=f"{ROOT}/", class_="brand")
    if look is None:
        return tag("header", brand, class_="top")
    path = look.request.url.path.removeprefix(ROOT).strip("/").split("/")[0]
    alerts = sum(s.open for s in look.records.standings) if look.session.whole else 0
    items = []
    for address, name, for_all in NAV:
        if for_all and not look.session.whole:
            continue
        count = (
            [tag("span", str(alerts), class_="count", title=f"{alerts} open")] if address == "alerts" and alerts else []
        )
        here = {"aria_current": "page"} if address == path else {}
        items.append(tag("li", tag("a", name, *count, href=f"{ROOT}/{address}", **here)))
    state = [tag("span", "live", class_="pulse", id="pulse", title="This page follows what happens.")] if live else []
    who = tag(
        "div",
        *state,
        tag("span", look.session.key.grant.name, class_="who", title=look.session.name),
        post(look, "logout", tag("button", "Log out", class_="quiet")),
        class_="user",
    )
    return tag(
        "header", brand, tag("nav", tag("ul", *items, id="nav", data_live=1), aria_label="Pages"), who, class_="top"
    )


# pieces


def post(look: Look, address: str, *children: str, **hidden: str) -> Markup:
    """A form that changes something, with what keeps strangers from sending it."""
    fields = {"csrf": look.session.csrf, **hidden}
    return tag("form", *hidden_fields(fields), *children, method="post", action=f"{ROOT}/{address}")


def void(element: str, **attributes: str) -> Markup:
    """An element that holds nothing."""
    return Markup(tag(element, **attributes).removesuffix(f"</{element}>"))


def hidden_fields(fields: Mapping[str, str]) -> list[Markup]:
    """What a form brings along unseen."""
    return [void("input", type="hidden", name_=name, value=value) for name, value in fields.items()]


def link(text: str, address: str, **parameters: str) -> Markup:
    """A way to another page of ours."""
    return tag("a", text, href=url(address, **parameters))


def url(address: str, **parameters: str) -> str:
    """The address of a page of ours."""
    asked = urlencode({name.rstrip("_"): value for name, value in parameters.items() if value}, errors="replace")
    return f"{ROOT}/{address}" + (f"?{asked}" if asked else "")


def section(title: str, *children: str, lead: str = "", **attributes: str) -> Markup:
    """A part of a page; one with an id is kept up to date."""
    live = {"data_live": "1"} if "id" in attributes else {}
    about = [tag("p", lead, class_="lead")] if lead else []
    return tag("section", tag("h2", title), *about, *children, **attributes, **live)


def chip(text: str, tone: str) -> Markup:
    """A word that stands out; never by its colour alone."""
    return tag("span", text, class_=f"chip {tone}")


def empty(what: str, *then: str) -> Markup:
    """Says that there is nothing, and what to do."""
    return tag("div", tag("p", what), *(tag("p", step) for step in then), class_="empty")


def code(text: str) -> Markup:
    """Something to type."""
    return tag("code", text)


def table(head: Sequence[str], rows: Iterable[Markup], label: str, kind: str = "") -> Markup:
    """A table in a frame of its own, which scrolls where the screen is too narrow."""
    top = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in head)))
    made = tag("table", top, tag("tbody", *rows), class_=kind)
    return tag("div", made, class_="scroll", role="region", tabindex=0, aria_label=label)


def cell(name: str, *children: str, kind: str = "") -> Markup:
    """A cell that tells its column's name where the columns are gone: on a phone."""
    return tag("td", tag("div", *children), data_label=name, **({"class_": kind} if kind else {}))


def facts(pairs: Iterable[tuple[str, str]]) -> Markup:
    """Names and values, one below the other."""
    return tag("dl", *(piece for name, value in pairs for piece in (tag("dt", name), tag("dd", value))), class_="pairs")


def tile(name: str, figure: str, *about: str, tone: str = "", address: str = "") -> Markup:
    """A figure that is to be seen from afar."""
    title = tag("h3", link(name, address) if address else name)
    return tag(
        "li", title, tag("p", figure, class_="figure"), *(tag("p", a, class_="soft") for a in about), class_=tone
    )


def when(at: datetime, seconds: bool = True) -> Markup:
    """A time, with its zone."""
    utc = at.astimezone(UTC)
    form = "%d %b %H:%M:%S UTC" if seconds else "%d %b %H:%M UTC"
    return tag(
        "time", f"{utc:{form}}", datetime=utc.isoformat(timespec="seconds"), title=f"{utc:%Y-%m-%d %H:%M:%S} UTC"
    )


def moment(at: str) -> Markup | str:
    """A time that was written as text, as ``when`` shows it."""
    try:
        found = datetime.fromisoformat(at)
    except ValueError:
        return at or "at an unknown time"
    return when(found) if found.tzinfo else at


def many(count: int, what: str) -> str:
    """A count of things.

    >>> many(1, "chunk"), many(1200, "chunk")
    ('1 chunk', '1,200 chunks')
    """
    return f"{count:,} {what}{'s' * (count != 1)}"


def decimal(x: float | None, digits: int = 2) -> str:
    """A number, or a dash."""
    if x is None or not math.isfinite(x):
        return "–"
    return f"{x:.{digits}f}".replace("-", "−")


def percent(x: float) -> str:
    r"""A share, never rounded to nothing or all.

    >>> percent(0.004), percent(0.25), percent(0.0)
    ('0.4\xa0%', '25\xa0%', '0\xa0%')
    """
    digits = 0 if x in (0, 1) or 0.1 <= x <= 0.9 else 1
    return f"{100 * x:.{digits}f}\u00a0%"


def share(count: int, n: int) -> tuple[str, str]:
    """A rate of a sample: the figure, and its 95 % interval with the counts."""
    if not n:
        return "–", "of none"
    low, high = clopper_pearson(count, n)
    return percent(count / n), f"{count:,} of {n:,}; 95 % interval {100 * low:.1f} to {100 * high:.1f} %"


def seconds(x: float | None) -> str:
    r"""A duration with its unit.

    >>> seconds(0.0123), seconds(2.5), seconds(None)
    ('12\xa0ms', '2.5\xa0s', '–')
    """
    if x is None or not math.isfinite(x):
        return "–"
    if x < 0.01:
        return f"{1000 * x:.1f}\u00a0ms"
    return f"{1000 * x:.0f}\u00a0ms" if x < 1 else f"{x:.1f}\u00a0s"


def names(items: Sequence[str], most: int = 5) -> Markup:
    """Some names, the first of them written out."""
    more = [f"and {len(items) - most} more"] if len(items) > most else []
    return join([*(tag("span", item, class_="name") for item in items[:most]), *more], ", ")
