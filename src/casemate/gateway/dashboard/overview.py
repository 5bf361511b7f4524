"""The first page: whether all is well, and how busy it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from casemate.errors import CasemateError
from casemate.gateway.dashboard import figures
from casemate.gateway.dashboard.figures import Bar
from casemate.gateway.dashboard.page import (
    ROOT,
    Look,
    Page,
    cell,
    chip,
    code,
    decimal,
    empty,
    facts,
    link,
    many,
    names,
    seconds,
    section,
    share,
    table,
    tile,
    when,
)
from casemate.gateway.dashboard.records import Seen, by_request
from casemate.lab.charts import Markup, join, tag
from casemate.lab.cost_charts import written
from casemate.monitor.canaries.results import Severity, Status, base

DAY, HOUR = timedelta(days=1), timedelta(hours=1)
LATEST = 8
SHOWN = {
    "casemate_request_seconds": "route",
    "casemate_first_piece_seconds": "",
    "casemate_stage_seconds": "stage",
}
"""Histograms that are shown, with the label that tells them apart."""
PLACES = {"embed": 0, "search": 1, "generate": 3}
"""Stages in the order in which they come; defenses stand between."""
QUANTILES = (0.5, 0.95, 0.99)
LABELS = ("Half", "95 %", "99 %")
ROUTES = ("/v1/chat/completions", "/v1/retrieve", "/v1/documents")


def overview(look: Look) -> Page:
    """The page."""
    now = datetime.now(UTC)
    tenants = look.tenants
    verdicts = [v for v in look.records.verdicts.all if v.tenant in tenants and v.at > now - DAY]
    asked = [v for v in verdicts if not look.is_canary(v.client)]
    state = _state(look, tenants)
    body = join(
        [
            _banner(look),
            tag("ul", *_tiles(look, asked, len(verdicts) - len(asked)), class_="tiles", id="tiles", data_live=1),
            section("Requests in the last 24 hours", _busy(asked, now), id="busy"),
            tag(
                "div",
                section("Latest flagged requests", _flagged(look, asked), id="flagged"),
                section(
                    "How long things take",
                    _latency(look),
                    lead="Of this gateway since it began; quantiles are read off histograms, exact to a bucket.",
                    id="latency",
                ),
                class_="halves",
            ),
            section("State of the system", tag("div", *state, class_="states"), id="state"),
        ]
    )
    return Page("Overview", body)


def _banner(look: Look) -> Markup:
    """The one thing to know."""
    mode = look.app.config.guard.mode
    standing = [s for s in look.records.standings if s.open] if look.session.whole else []
    news = [s for s in standing if not s.acknowledged]
    if news:
        gravest = max(news, key=lambda s: list(Severity).index(s.alert.severity))
        said = f"{len(news)} alert{'s' * (len(news) > 1)} that nobody has acknowledged"
        parts = [tag("b", said), tag("p", gravest.alert.title), link("Look at the alerts", "alerts")]
        return tag("div", *parts, class_=f"banner {gravest.alert.severity}", id="banner", data_live=1)
    if mode != "enforce":
        what = {"observe": "The guard only observes", "off": "The guard is off"}[mode]
        told = "Verdicts are noted, and nothing is withheld." if mode == "observe" else "Nothing is judged or withheld."
        parts = [tag("b", what), tag("p", told, " Set ", code("guard.mode: enforce"), " in casemate.yaml.")]
        return tag("div", *parts, class_="banner medium", id="banner", data_live=1)
    known = f"; {len(standing)} acknowledged still open" if standing else ""
    parts = [tag("b", "The guard is on"), tag("p", f"No alert waits for anybody{known}.")]
    return tag("div", *parts, class_="banner good", id="banner", data_live=1)


def _tiles(look: Look, asked: Sequence[Seen], canaries: int) -> Iterator[Markup]:
    requests = by_request(asked)
    flagged = sum(any(v.flagged for v in one) for one in requests)
    since = "in the last 24 hours"
    if look.records.verdicts.full and asked:
        since = f"since {asked[0].at.astimezone(UTC):%d %b %H:%M} UTC: no more are kept here"
    beside = f"and {canaries:,} verdicts on canaries" if canaries else "canaries not counted"
    yield tile("Guarded requests", f"{len(requests):,}", since, beside, address="verdicts")
    figure, about = share(flagged, len(requests))
    yield tile("Flagged", figure, about, tone="warm" if flagged else "")
    failed = sum(any(v.failed for v in one) for one in requests)
    if failed:
        yield tile("A defense failed", f"{failed:,}", "requests; the log says why", tone="bad")
    if not look.session.whole:
        return
    standing = [s for s in look.records.standings if s.open]
    new = sum(not s.acknowledged for s in standing)
    yield tile(
        "Open alerts", str(len(standing)), f"{new} not acknowledged", tone="bad" if new else "", address="alerts"
    )
    yield _canaries(look)


def _canaries(look: Look) -> Markup:
    results = [r for r in look.records.results.all if "~" not in r.run]
    if not results:
        return tile("Last canary run", "–", "none yet", address="canaries")
    last = [r for r in results if base(r.run) == base(results[-1].run)]
    failed = sum(r.status is Status.FAIL for r in last)
    errors = sum(r.status is Status.ERROR for r in last)
    about = f"{errors} could not be asked" if errors else f"{failed} failed"
    at = tag("span", "at ", when(last[-1].at, seconds=False))
    return tile(
        "Last canary run",
        f"{len(last) - failed - errors} of {len(last)} passed",
        about,
        at,
        tone="bad" if failed or errors else "",
        address="canaries",
    )


def _busy(asked: Sequence[Seen], now: datetime) -> Markup:
    requests = by_request(asked)
    if not requests:
        return empty(
            "Nobody has asked anything in the last 24 hours.",
            "Make a key with 'casemate key create NAME', and ask over /v1/chat/completions.",
        )
    begins = figures.hours(now, 24, HOUR)
    counts = dict.fromkeys(begins, 0)
    flags = dict.fromkeys(begins, 0)
    for one in requests:
        begin = figures.hours(one[0].at, 1, HOUR)[0]
        if begin in counts:
            counts[begin] += 1
            flags[begin] += any(v.flagged for v in one)
    said = f"{len(requests)} requests by the hour, {sum(flags.values())} of them flagged"
    legend = tag(
        "p",
        tag("span", class_="key all"),
        "requests by the hour, ",
        tag("span", class_="key flagged"),
        "flagged among them",
        class_="soft",
    )
    return join([figures.bars([Bar(b, counts[b], flags[b]) for b in begins], said), legend])


def _flagged(look: Look, asked: Sequence[Seen]) -> Markup:
    found = [v for v in asked if v.flagged][-LATEST:][::-1]
    if not found:
        return empty("Nothing was flagged in the last 24 hours.", "That is what harmless questions look like.")
    rows = [
        tag(
            "tr",
            cell("Time", tag("a", when(v.at), href=f"{ROOT}/verdicts/{v.id}")),
            cell("Client", look.client(v.client)),
            cell("Score, threshold", f"{decimal(v.score)} > {decimal(v.threshold)}"),
            cell("Withheld", many(len(v.hidden), "chunk") if v.enforced else "nothing: observed only"),
            id=f"v-{v.id}",
        )
        for v in found
    ]
    made = table(("Time", "Client", "Score, threshold", "Withheld"), rows, "Latest flagged requests", "cards")
    return join([made, tag("p", link("All flagged requests", "verdicts", flagged="yes"))])


def _latency(look: Look) -> Markup:
    """Whole answers by route, first pieces, whatever stages the gateway measures, and the canaries' answers."""
    rows = [
        _durations(name, count, total / count, [_quantile(buckets, q) for q in QUANTILES])
        for name, count, total, buckets in _measured(look.gateway.metrics.registry)
        if count
    ]
    day = datetime.now(UTC) - DAY
    asked = [r.seconds for r in look.records.results.all if r.status is not Status.ERROR and r.at > day]
    if asked and look.session.whole:
        exact = [float(q) for q in np.quantile(asked, QUANTILES)]
        rows.append(_durations("answers to canaries, last 24 h", len(asked), float(np.mean(asked)), exact))
    if not rows:
        return empty("Nothing was asked since this gateway began.")
    head = ("What", "Count", "Mean", *(f"{label} below" for label in LABELS))
    return table(head, rows, "Durations", "cards")


def _durations(name: str, count: int, mean: float, quantiles: Sequence[float | None]) -> Markup:
    cells = [cell(label, seconds(q)) for label, q in zip(LABELS, quantiles, strict=True)]
    return tag("tr", tag("th", name, scope="row"), cell("Count", f"{count:,}"), cell("Mean", seconds(mean)), *cells)


def _measured(registry: CollectorRegistry) -> Iterator[tuple[str, int, float, list[tuple[float, float]]]]:
    """Name, count, seconds in all, and cumulated buckets, of each duration that is measured."""
    for metric in registry.collect():
        if metric.name not in SHOWN:
            continue
        label = SHOWN[metric.name]
        found: dict[str, dict[str, Any]] = {}
        for sample in metric.samples:
            one = found.setdefault(sample.labels.get(label, ""), {"buckets": [], "count": 0.0, "sum": 0.0})
            if sample.name.endswith("_bucket"):
                one["buckets"].append((float(sample.labels["le"]), sample.value))
            elif sample.name.endswith(("_count", "_sum")):
                one[sample.name.rpartition("_")[2]] = sample.value
        for name, one in sorted(found.items(), key=lambda pair: (PLACES.get(pair[0], 2), pair[0])):
            if label == "route" and name not in ROUTES:
                continue
            told = {"": "first piece of a stream"}.get(name, f"stage: {name}" if label == "stage" else name)
            yield told, int(one["count"]), one["sum"], one["buckets"]


def _quantile(buckets: Sequence[tuple[float, float]], q: float) -> float | None:
    """The bucket's upper edge below which a share of all lies; None: beyond the last edge."""
    total = buckets[-1][1] if buckets else 0.0
    edge = next((edge for edge, count in buckets if count >= q * total), float("inf"))
    return edge if total and edge != float("inf") else None


def _state(look: Look, tenants: Sequence[str]) -> list[Markup]:
    """Guard, index, store and calibration, each with a word on how it is. Blocks."""
    app, mode = look.app, look.app.config.guard.mode
    parts = [part.use for part in app.config.guard.defenses]
    dropped = app.store.dropped
    return [
        _card(
            "Guard",
            mode == "enforce",
            mode,
            [("Defenses", ", ".join(parts) or "none"), ("On failure", app.guard.on_error)],
        ),
        _index(look, tenants),
        _card(
            "Event store",
            not dropped,
            "written" if not dropped else f"{dropped:,} events lost",
            [("Kind", app.config.store.use), ("Events given up", f"{dropped:,}")],
        ),
        _fitted(look, tenants),
        _card(
            "Gateway",
            True,
            f"{look.gateway.limits.working} requests at work",
            [("At most", f"{look.gateway.section.concurrency:,}"), ("Generator", app.config.rag.generator.use)],
        ),
    ]


def _index(look: Look, tenants: Sequence[str]) -> Markup:
    index = look.app.index
    try:
        sizes = {tenant: index.moments(tenant).n for tenant in tenants}
    except CasemateError as error:
        return _card("Index", False, "cannot be read", [("Why", str(error))])
    total = sum(sizes.values())
    told = [("Kind", look.app.config.rag.index.use), ("Tenants", names([f"{t}: {n:,}" for t, n in sizes.items()]))]
    return _card("Index", bool(total), f"{total:,} chunks" if total else "empty: run casemate index", told)


def _fitted(look: Look, tenants: Sequence[str]) -> Markup:
    defense = look.app.calibrated
    if defense is None:
        return _card("Calibration", True, "not needed", [("Why", "no defense is calibrated")])
    due = {tenant: why for tenant in tenants if (why := look.app.due(tenant))}
    rate = written(defense.significance or 0.0)
    pairs = [("Significance", rate), *((f"Tenant {tenant}", why) for tenant, why in list(due.items())[:3])]
    return _card("Calibration", not due, "fits" if not due else "run casemate calibrate", pairs)


def _card(name: str, good: bool, state: str, pairs: Sequence[tuple[str, str]]) -> Markup:
    mark = chip("✓ well" if good else "! look", "good" if good else "medium")
    return tag("article", tag("h3", name, " ", mark), tag("p", state, class_="figure small"), facts(pairs))
