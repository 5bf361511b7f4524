"""The request pages: durations of requests by operation, the list of requests, and the stages of one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException

from casemate.gateway.dashboard.page import Page, PageRequest
from casemate.gateway.dashboard.records import RequestRecord
from casemate.gateway.dashboard.table import Column, Table
from casemate.gateway.dashboard.time_range import by_bin
from casemate.monitor.canaries.results import CanaryStatus
from casemate.reports.durations import duration
from casemate.reports.format import plural
from casemate.reports.svg import FramedChart, latency_lines

QUANTILES = (0.5, 0.95, 0.99)
ANSWERS = ("/v1/chat/completions", "/v1/responses")
"""Routes that answer questions."""
STAGE_ORDER = {"embed": 0, "search": 1, "generate": 3}
"""Stages in order of execution; the defenses run as number 2."""
STATUSES = (("", "all"), ("ok", "answered"), ("failed", "failed"))


@dataclass(frozen=True, slots=True)
class Latency:
    """Durations of one operation: their number, mean, and p50, p95 and p99 in seconds; address of the requests."""

    name: str
    url: str
    count: int
    mean: float
    quantiles: tuple[float, float, float]

    @classmethod
    def of(cls, name: str, url: str, seconds: Sequence[float]) -> Latency:
        """The figures of some durations, at least one."""
        return cls(name, url, len(seconds), float(np.mean(seconds)), percentiles(seconds))


def percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """p50, p95 and p99 of some durations, at least one."""
    p50, p95, p99 = (float(q) for q in np.quantile(seconds, QUANTILES))
    return p50, p95, p99


def latency_table(request: PageRequest, finished: Sequence[RequestRecord]) -> Table:
    """Durations of whole requests by route, of first tokens, of stages, and of the answers to canaries."""
    columns = (
        Column("Operation"),
        Column("Count", lambda row: row.count, "count", True),
        Column("Mean", lambda row: row.mean, "mean", True),
        Column("p50", lambda row: row.quantiles[0], "p50", True),
        Column("p95", lambda row: row.quantiles[1], "p95", True),
        Column("p99", lambda row: row.quantiles[2], "p99", True),
    )
    return request.table("Latency", columns, list(_latencies(request, finished)), name="latency")


def _latencies(request: PageRequest, finished: Sequence[RequestRecord]) -> Iterator[Latency]:
    for route in sorted({r.route for r in finished}):
        url = request.url("requests", route=route, sort="-seconds")
        yield Latency.of(route, url, [r.seconds for r in finished if r.route == route])
    if first := [r.first_token for r in finished if r.first_token is not None]:
        yield Latency.of("time to first token", request.url("requests", sort="-first"), first)
    for stage in sorted({s for r in finished for s in r.stages}, key=lambda s: (STAGE_ORDER.get(s, 2), s)):
        url = request.url("requests", stage=stage, sort="-stage")
        yield Latency.of(f"stage: {stage}", url, [r.stages[stage] for r in finished if stage in r.stages])
    asked = [
        r.seconds for r in request.records.results.all if r.status is not CanaryStatus.ERROR and r.at in request.time
    ]
    if asked and request.session.installation:
        yield Latency.of("canary answers", request.url("canaries"), asked)


def latency_chart(request: PageRequest, finished: Sequence[RequestRecord]) -> FramedChart | None:
    """Percentiles of answered questions over time; None if there are none."""
    answered = [r for r in finished if r.route in ANSWERS and r.status < 400]
    if not answered:
        return None
    routes = {r.route for r in answered}
    route = routes.pop() if len(routes) == 1 else ""
    bins = request.time.bins
    found = by_bin(bins, [r.at for r in answered])
    quantiles = [percentiles([answered[i].seconds for i in own]) if own else None for own in found]
    links = [
        b.link(request.url("requests", route=route, sort="-seconds", **b.parameters), _said(q, len(own)))
        for b, q, own in zip(bins, quantiles, found, strict=True)
    ]
    whole = percentiles([r.seconds for r in answered])
    return latency_lines(quantiles, links, f"Durations of answered questions over time. In the range: {_said(whole)}")


def _said(quantiles: tuple[float, float, float] | None, count: int = 0) -> str:
    if quantiles is None:
        return "no requests"
    texts = [f"p{100 * q:g} {duration(seconds)}" for q, seconds in zip(QUANTILES, quantiles, strict=True)]
    return ", ".join([*([plural(count, "request")] if count else []), *texts])


def requests(request: PageRequest) -> Page:
    """Builds the list of requests, with its filters."""
    visible = request.requests(request.tenants)
    wanted = {name: request.parameter(name) for name in ("route", "status", "client", "stage", "slower")}
    slower, part = _seconds(wanted["slower"]), wanted["client"].lower()
    found = [
        r
        for r in visible
        if wanted["route"] in ("", r.route)
        and wanted["status"] in ("", "ok" if r.status < 400 else "failed")
        and part in f"{r.client} {request.client_name(r.client).full}".lower()
        and wanted["stage"] in ("", *r.stages)
        and r.seconds >= slower
    ]
    context = {
        "any": bool(visible),
        "missing": request.missing_events,
        "wanted": wanted,
        "routes": sorted({r.route for r in visible}),
        "stages": sorted({s for r in visible for s in r.stages}, key=lambda s: (STAGE_ORDER.get(s, 2), s)),
        "statuses": STATUSES,
        "latency": latency_table(request, found),
        "latency_chart": latency_chart(request, found),
        "listing": _listing(request, found, wanted["stage"]),
    }
    return Page("requests.html", context)


def _listing(request: PageRequest, found: Sequence[RequestRecord], stage: str) -> Table:
    """The table of requests, with the duration of a stage, or of the slowest if none is named."""
    flagged = {v.request for v in request.records.verdicts.all if v.newly_flagged}
    again = {v.request for v in request.records.verdicts.all if v.repeated} - flagged
    columns = (
        Column("End", lambda r: r.at, "at", True),
        request.client_column,
        Column("Route", lambda r: r.route, "route"),
        Column("Status", lambda r: r.status, "status", True),
        Column("Duration", lambda r: r.seconds, "seconds", True),
        Column("First token", lambda r: r.first_token, "first", True),
        Column(f"Stage {stage}" if stage else "Slowest stage", lambda r: _stage(r, stage)[1], "stage", True),
    )

    def show(r: RequestRecord) -> dict[str, Any]:
        return {"request": r, "stage": _stage(r, stage), "flagged": r.id in flagged, "again": r.id in again}

    return request.table("Requests", columns, found, show, order="-at")


def _seconds(text: str) -> float:
    """A number of milliseconds as seconds; 0 if it is none."""
    try:
        return max(float(text), 0.0) / 1000
    except ValueError:
        return 0.0


def _stage(r: RequestRecord, name: str) -> tuple[str, float | None]:
    """The stage with a name, or else the slowest, and its duration."""
    if name:
        return name, r.stages.get(name)
    return max(r.stages.items(), key=lambda pair: pair[1], default=("", None))


def detail(request: PageRequest) -> Page:
    """Builds the page of one request."""
    tenants, wanted = request.tenants, request.http.path_params["id"]
    found = next((r for r in request.records.requests.all if r.id == wanted and r.tenant in tenants), None)
    if found is None:
        raise HTTPException(404, "There is no such request, or it is too old to be loaded.")
    verdicts = [v for v in request.records.verdicts.all if v.request == found.id and v.tenant in tenants]
    whole = found.seconds or 1.0
    stages = sorted(found.stages.items(), key=lambda pair: (STAGE_ORDER.get(pair[0], 2), pair[0]))
    context = {
        "request": found,
        "stages": [(name, seconds, min(seconds / whole, 1.0)) for name, seconds in stages],
        "verdicts": verdicts,
    }
    return Page("request.html", context)
