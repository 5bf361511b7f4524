"""The overview page: open alerts, request counts, latency, and the state of the system."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from casemate.errors import CasemateError
from casemate.gateway.dashboard.clients import by_client, client_table
from casemate.gateway.dashboard.page import Page, PageRequest
from casemate.gateway.dashboard.records import VerdictRecord, by_request, flagged_share
from casemate.gateway.dashboard.requests import latency_chart, latency_table
from casemate.gateway.dashboard.table import Column
from casemate.gateway.dashboard.time_range import by_bin
from casemate.guard.audience import IGNORED
from casemate.monitor.canaries.results import CanaryStatus, base_run_id
from casemate.reports.format import plural, short_rate, utc_time
from casemate.reports.svg import FramedChart, request_bars

MAX_FLAGGED = 8


def overview(request: PageRequest) -> Page:
    """Builds the page."""
    tenants = request.tenants
    verdicts = request.verdicts(tenants)
    asked = [v for v in verdicts if not request.is_canary(v.client)]
    finished = request.requests(tenants)
    flagged = [c for c in by_client(asked, request.records.resets.all) if c.flagged]
    context = {
        "banner": _banner(request),
        "tiles": list(_tiles(request, asked, len(verdicts) - len(asked))),
        "requests": _requests_over_time(request, asked),
        "flagged": _flagged_table(request, by_request([v for v in asked if v.newly_flagged])),
        "clients": client_table(request, flagged, brief=True),
        "latency": latency_table(request, finished),
        "latency_chart": latency_chart(request, finished),
        "states": _states(request, tenants),
    }
    return Page("overview.html", context)


def _banner(request: PageRequest) -> dict[str, Any]:
    """The most important message: unacknowledged alerts, then a guard that does not enforce."""
    mode, state = request.app.mode, {"alerts": False, "off": False, "observe": False}
    opened = [s for s in request.records.alert_states if s.open] if request.session.installation else []
    if new := [s for s in opened if not s.acknowledged]:
        worst = max(new, key=lambda s: s.alert.severity.rank)
        title = f"{plural(len(new), 'alert')} not acknowledged"
        return {**state, "tone": worst.alert.severity, "title": title, "text": worst.alert.title, "alerts": True}
    if mode == "enforce":
        known = f" Open and acknowledged: {len(opened)}." if opened else ""
        text = f"No unacknowledged alerts.{known}"
        return {**state, "tone": "good", "title": "The guard is on", "text": text}
    observe = mode == "observe"
    title = "The guard is in observe mode" if observe else "The guard is off"
    text = "Verdicts are recorded, but nothing is withheld." if observe else "No verdicts, and nothing is withheld."
    if request.app.ignores_audience:
        text += f" {IGNORED[0].upper()}{IGNORED[1:]}."
    return {**state, "tone": "medium", "title": title, "text": text, "off": True, "observe": observe}


def _tile(name: str, figure: str, *about: str, tone: str = "", url: str = "") -> dict[str, Any]:
    return {"name": name, "figure": figure, "about": about, "tone": tone, "url": url}


def _tiles(request: PageRequest, asked: Sequence[VerdictRecord], canaries: int) -> Iterator[dict[str, Any]]:
    requests = by_request(asked)
    beside = f"and {plural(canaries, 'verdict')} on canaries" if canaries else "without canaries"
    yield _tile("Guarded requests", f"{len(requests):,}", beside, url=request.url("verdicts"))
    figure, about = flagged_share(requests)
    tone, url = "warm" if any(v.newly_flagged for v in asked) else "", request.url("verdicts", outcome="flagged")
    yield _tile("Flagged", figure, about, tone=tone, url=url)
    if failed := sum(any(v.failed for v in one) for one in requests):
        url = request.url("verdicts", outcome="failed")
        yield _tile("Defense failures", f"{failed:,}", "requests; see the log", tone="bad", url=url)
    if not request.session.installation:
        return
    opened = [s for s in request.records.alert_states if s.open]
    new = sum(not s.acknowledged for s in opened)
    yield _tile(
        "Open alerts", str(len(opened)), f"{new} not acknowledged", tone="bad" if new else "", url=request.url("alerts")
    )
    yield _canary_tile(request)


def _canary_tile(request: PageRequest) -> dict[str, Any]:
    results, url = [r for r in request.records.results.all if "~" not in r.run], request.url("canaries")
    if not results:
        return _tile("Last canary run", "–", "none yet", url=url)
    last = [r for r in results if base_run_id(r.run) == base_run_id(results[-1].run)]
    failed = sum(r.status is CanaryStatus.FAIL for r in last)
    errors = sum(r.status is CanaryStatus.ERROR for r in last)
    about = f"{errors} without an answer" if errors else f"{failed} failed"
    figure = f"{len(last) - failed - errors} of {len(last)} passed"
    at = f"at {utc_time(last[-1].at, seconds=False)}"
    return _tile("Last canary run", figure, about, at, tone="bad" if failed or errors else "", url=url)


def _requests_over_time(request: PageRequest, asked: Sequence[VerdictRecord]) -> FramedChart | None:
    """Requests and newly flagged requests in each bin of the range; None if there were none."""
    requests = by_request(asked)
    if not requests:
        return None
    bins = request.time.bins
    found = by_bin(bins, [one[0].at for one in requests])
    counts = [(len(own), sum(any(v.newly_flagged for v in requests[i]) for i in own)) for own in found]
    links = [
        b.link(request.url("verdicts", **b.parameters), f"{plural(count, 'request')}, {flagged} flagged")
        for b, (count, flagged) in zip(bins, counts, strict=True)
    ]
    said = f"{plural(len(requests), 'request')} over time, {sum(f for _, f in counts)} of them flagged"
    return request_bars(counts, links, said)


def _flagged_table(request: PageRequest, flagged: Sequence[Sequence[VerdictRecord]]) -> Any:
    """The newly flagged requests, each with the verdict that withheld most."""
    shown = [max(one, key=lambda v: len(v.hidden)) for one in flagged]
    columns = (
        Column("Time", lambda v: v.at, "at", True),
        request.client_column,
        Column("Score and threshold", lambda v: v.score, "score", True),
        Column("Withheld", lambda v: len(v.hidden), "withheld", True),
    )
    return request.table("Flagged requests", columns, shown, order="-at", name="flagged", size=MAX_FLAGGED)


def _states(request: PageRequest, tenants: Sequence[str]) -> list[dict[str, Any]]:
    """State of guard, index, store, calibration and gateway. Blocks."""
    app, mode, dropped = request.app, request.app.mode, request.app.store.dropped
    defenses = ", ".join(part.use for part in app.config.guard.defenses) or "none"
    working, limit = request.gateway.limits.in_progress, request.gateway.section.concurrency
    return [
        _card("Guard", mode == "enforce", mode, ("Defenses", defenses), ("On failure", app.guard.on_error)),
        _index_card(request, tenants),
        _card(
            "Event store",
            not dropped,
            f"{dropped:,} events lost" if dropped else "no events lost",
            ("Type", app.config.store.use),
        ),
        _calibration_card(request, tenants),
        _card(
            "Gateway",
            True,
            f"{working:,} in progress",
            ("Limit", f"{limit:,}"),
            ("Generator", app.config.rag.generator.use),
        ),
    ]


def _card(name: str, good: bool, state: str, *facts: tuple[str, str | list[str]]) -> dict[str, Any]:
    return {"name": name, "good": good, "state": state, "facts": facts}


def _index_card(request: PageRequest, tenants: Sequence[str]) -> dict[str, Any]:
    index = request.app.index
    try:
        sizes = {tenant: index.moments(tenant).n for tenant in tenants}
    except CasemateError as error:
        return _card("Index", False, "cannot be read", ("Reason", str(error)))
    total = sum(sizes.values())
    per_tenant = [f"{tenant}: {n:,}" for tenant, n in sizes.items()]
    state = plural(total, "chunk") if total else "empty: run 'casemate index'"
    return _card("Index", bool(total), state, ("Type", request.app.config.rag.index.use), ("Tenants", per_tenant))


def _calibration_card(request: PageRequest, tenants: Sequence[str]) -> dict[str, Any]:
    defenses = request.app.calibrated
    if not defenses:
        return _card("Calibration", True, "not needed", ("Reason", "no calibrated defense"))
    due = {tenant: why for tenant in tenants if (why := request.app.due(tenant))}
    rates = ", ".join(f"{d.name} {short_rate(d.significance or 0.0)}" for d in defenses)
    facts = [(f"Tenant {tenant}", why) for tenant, why in list(due.items())[:3]]
    state = "run 'casemate calibrate'" if due else "up to date"
    return _card("Calibration", not due, state, ("Significance", rates), *facts)
