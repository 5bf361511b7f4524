"""What all pages share: the request with its session, static files, and rendering of templates."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlencode

from jinja2 import Environment
from starlette.requests import Request

from casemate.gateway.dashboard.records import Records, RequestRecord, VerdictRecord
from casemate.gateway.dashboard.session import DashboardSession
from casemate.gateway.dashboard.table import Column, Table, TableSpec
from casemate.gateway.dashboard.time_range import PRESETS, TimeRange, field_time
from casemate.gateway.state import Gateway
from casemate.reports.format import utc_time
from casemate.reports.render import template_environment
from casemate.system import App

ROOT = "/dashboard"
T = TypeVar("T")
ASSETS = {
    "dashboard.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "trend.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
CSP = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: nothing inline and nothing from other hosts, so that markup that escapes does no harm."""


class NavEntry(NamedTuple):
    """A page of the navigation; ``global_only`` if it is about the whole installation, not about one tenant."""

    address: str
    name: str
    global_only: bool = False


NAV = (
    NavEntry("", "Overview"),
    NavEntry("verdicts", "Verdicts"),
    NavEntry("requests", "Requests"),
    NavEntry("clients", "Clients"),
    NavEntry("disclosure", "Disclosure"),
    NavEntry("topics", "Topics"),
    NavEntry("canaries", "Canaries", global_only=True),
    NavEntry("alerts", "Alerts", global_only=True),
    NavEntry("redteam", "Red team", global_only=True),
    NavEntry("calibration", "Calibration"),
    NavEntry("enforcement", "Enforcement", global_only=True),
    NavEntry("documents", "Documents"),
    NavEntry("quarantine", "Quarantine"),
)


def asset(name: str) -> bytes:
    """Reads a static file of the dashboard, or a style that it shares with the reports."""
    own = files("casemate.gateway.dashboard").joinpath("static", name)
    return (own if own.is_file() else files("casemate.reports").joinpath("templates", name)).read_bytes()


ASSET_VERSIONS = {name: hashlib.sha256(asset(name)).hexdigest()[:12] for name in ASSETS}


class ClientName(NamedTuple):
    """A client for people: its full name, with the name of its key in place of the key's id, and a short form."""

    id: str
    full: str
    short: str


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request of a user who is logged in.

    Attributes:
        key_names: Names of API keys by id.
        selected: Values of all checked boxes of the form.
    """

    http: Request
    gateway: Gateway
    records: Records
    session: DashboardSession
    form: Mapping[str, str]
    key_names: Mapping[str, str]
    time: TimeRange
    selected: tuple[str, ...] = ()

    @property
    def app(self) -> App:
        """The system."""
        return self.gateway.app

    def parameter(self, name: str, max_length: int = 200) -> str:
        """Returns a query parameter, cut to a length; empty if it is missing."""
        return self.http.query_params.get(name, "")[:max_length]

    @property
    def query(self) -> Mapping[str, str]:
        """The query parameters."""
        return self.http.query_params

    def url(self, address: str, **parameters: str) -> str:
        """Returns the address of a page in the same time range, unless the parameters contain another one."""
        own = {} if parameters.keys() & RANGE_PARAMETERS else self.time.parameters
        return url(address, **parameters, **own)

    def table(
        self,
        label: str,
        columns: Sequence[Column | str],
        rows: Sequence[T],
        show: Callable[[T], Any] | None = None,
        **options: Any,
    ) -> Table:
        """Returns the requested page of a table; for the options see `TableSpec`."""
        return Table.of(self.query, TableSpec(label, columns, **options), rows, show)

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """See ``Records.in_thread``."""
        return await self.records.in_thread(work, *arguments)

    def note_setting(self, text: str, scope: str, why: str) -> None:
        """Adds a message about a changed setting; ``why``, if not empty, states why the file was not updated."""
        if why:
            note = ("medium", f"{text} This holds {scope}: {why}. Change the file by hand to keep it.")
        else:
            note = ("good", f"{text} casemate.yaml was updated; other gateways follow within seconds.")
        self.session.notes.append(note)

    @property
    def tenants(self) -> list[str]:
        """Tenants that the session may see. Blocks."""
        own = self.session.key.grant.tenant
        return sorted({own, *self.app.index.tenants()}) if self.session.every_tenant else [own]

    def tenant(self, tenants: Sequence[str]) -> str:
        """Returns the requested tenant if it is one of the allowed tenants, else the key's own."""
        given = self.form.get("tenant") or self.parameter("tenant")
        return given if given in tenants else self.session.key.grant.tenant

    def verdicts(self, tenants: Sequence[str]) -> list[VerdictRecord]:
        """The verdicts of some tenants in the time range, oldest first."""
        return [v for v in self.records.verdicts.all if v.at in self.time and v.tenant in tenants]

    def requests(self, tenants: Sequence[str]) -> list[RequestRecord]:
        """The requests of some tenants in the time range, oldest first."""
        return [r for r in self.records.requests.all if r.at in self.time and r.tenant in tenants]

    @property
    def missing_events(self) -> str:
        """States that the range starts before the oldest event in memory; empty if it does not."""
        tails = (("verdicts", self.records.verdicts), ("requests", self.records.requests))
        late = [
            f"the newest {tail.keep:,} {name} are loaded, since {utc_time(tail.all[0].at)}"
            for name, tail in tails
            if tail.full and tail.all and tail.all[0].at > self.time.start
        ]
        return f"Only {' and '.join(late)}." if late else ""

    def is_canary(self, client: str) -> bool:
        """Whether a client is the monitor."""
        return self.app.config.monitor.is_canary(client)

    @property
    def client_column(self) -> Column:
        """The column of a table whose rows have the attribute ``client``."""
        return Column("Client", lambda row: self.client_name(row.client).full.lower(), "client")

    def client_name(self, client: str) -> ClientName:
        """Returns the name of a client."""
        if self.is_canary(client):
            return ClientName(client, client, _shortened(client.partition("@")[0], MAX_NAME))
        key, slash, user = client.partition("/")
        name = self.key_names.get(key, key)
        short = _shortened(name, MAX_NAME) + (slash + _shortened(user, MAX_USER) if user else slash)
        return ClientName(client, f"{name}{slash}{user}", short)


@dataclass(frozen=True, slots=True)
class Page:
    """A page to render from a file in ``templates``, with an HTTP status."""

    template: str
    context: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200


MAX_NAME, MAX_USER = 24, 12
"""Characters of the short name of a key, and of a user."""


def _shortened(text: str, most: int) -> str:
    """Shortens a text in the middle: ids often differ at their ends only."""
    head, tail = most // 2, most - most // 2 - 1
    return text if len(text) <= most else f"{text[:head]}…{text[-tail:]}"


def render(page: Page, request: PageRequest | None, version: str = "") -> bytes:
    """Renders a page as UTF-8; without a request, no user is logged in.

    ``version`` is the ETag of a live page, which the script compares to detect news; empty if the page is not live.
    """
    frame: dict[str, Any] = {"session": None, "nav": [], "version": version, "open_alerts": 0}
    if request is not None:
        frame |= {"url": request.url, "time": request.time, "presets": PRESETS, "kept": _kept(request.query)}
        frame["client_name"] = request.client_name
        frame["session"], installation = request.session, request.session.installation
        frame["nav"] = [entry for entry in NAV if installation or not entry.global_only]
        frame["open_alerts"] = sum(s.open for s in request.records.alert_states) if installation else 0
        frame["current"] = request.http.url.path.removeprefix(ROOT).strip("/").split("/")[0]
    text = _environment().get_template(page.template).render(frame | dict(page.context))
    return text.encode(errors="replace")


@cache
def _environment() -> Environment:
    environment = template_environment("casemate.gateway.dashboard")
    environment.globals |= {"url": url, "asset_url": _asset_url}
    environment.filters |= {
        "combine": lambda one, other: {**one, **other},
        "field_time": field_time,
        "iso_utc": _iso_utc,
        "parse_time": _parse_time,
    }
    return environment


RANGE_PARAMETERS = frozenset({"range", "since", "until"})


def _kept(query: Mapping[str, str]) -> list[tuple[str, str]]:
    """The parameters that stay when the time range changes: filters and order, but no page number."""
    return [(n, v) for n, v in query.items() if n not in RANGE_PARAMETERS and not n.endswith("page")]


def url(address: str, **parameters: str) -> str:
    """Returns the address of a page; empty parameters are left out."""
    query = urlencode({name: value for name, value in parameters.items() if value}, errors="replace")
    return f"{ROOT}/{address}" + (f"?{query}" if query else "")


def _asset_url(name: str) -> str:
    return f"{ROOT}/static/{name}?v={ASSET_VERSIONS[name]}"


def _parse_time(text: str) -> datetime | str:
    """An ISO 8601 time; the text itself if it is none, or has no zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return text or "at an unknown time"
    return found if found.tzinfo else text


def _iso_utc(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds")
