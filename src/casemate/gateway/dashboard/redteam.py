"""Red-team runs that are kept in ``redteam.folder``: what each attack achieved, guard off against guard on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.responses import Response

from casemate.errors import DataError
from casemate.gateway.dashboard.page import Look, Page, cell, chip, empty, facts, moment, percent, section, table, url
from casemate.lab.charts import Markup, Scale, join, lowest_auc, roc, tag, track
from casemate.lab.compare import conclusion, diff
from casemate.lab.crawl_html import is_crawl
from casemate.lab.generation import live
from casemate.lab.results import AttackResult, Campaign, load
from casemate.lab.wording import carried, cases, headline, in_figures, measured, number, scrub, sentence

MOST, LARGEST = 12, 32_000_000
"""Files that are looked at, the newest, and bytes of the largest."""
TONES = {"pass": "good", "fail": "bad", "inconclusive": "medium", "error": "odd"}
SANDBOX = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"
"""The report is one file with its style inside. It has no script, and could run none."""


class _File(NamedTuple):
    path: Path
    changed: float
    campaign: Campaign | None
    crawls: list[Mapping[str, Any]]


def redteam(look: Look) -> Page:
    """The page."""
    folder = look.app.config.folder / look.app.config.redteam.folder
    found = _read(folder)
    kept = sorted((f for f in found if f.campaign), key=lambda f: f.campaign.at if f.campaign else "", reverse=True)
    campaigns = [f for f in kept if f.campaign and not is_crawl(f.campaign)]
    raids = [f.campaign for f in kept if f.campaign and is_crawl(f.campaign)]
    crawls = [(f, crawl) for f in found for crawl in f.crawls]
    if not kept and not crawls:
        steps = (
            f"Attack your own system with 'casemate redteam run'; the report then stands in {folder}.",
            "To keep an earlier run for comparison, put its report.json beside it under another name.",
        )
        return Page("Red team", empty("No red-team run is kept.", *steps))
    parts: list[Markup] = []
    if campaigns:
        newest, *earlier = campaigns
        assert newest.campaign is not None
        parts += _campaign(newest.campaign, (folder / "report.html").exists() and newest.path.name == "report.json")
        parts += _earlier(newest.campaign, earlier)
    if crawls or raids:
        drawn = [_crawl(f.path.name, crawl, i) for i, (f, crawl) in enumerate(crawls)]
        lead = "How much of the collection crawlers reached, question by question. Lower is better."
        said = [piece for raid in raids[:1] for piece in _raid(raid)]
        parts.append(section("Extraction", *said, tag("div", *drawn, class_="panels"), lead=lead))
    return Page("Red team", join(parts), lead="The published attacks, run against this system by its owner.")


def report(look: Look) -> Response:
    """The whole report, as ``casemate redteam run`` wrote it."""
    path = look.app.config.folder / look.app.config.redteam.folder / "report.html"
    try:
        content = path.read_bytes()
    except OSError:
        raise HTTPException(404, "There is no report; run 'casemate redteam run'.") from None
    return Response(content, media_type="text/html", headers={"Content-Security-Policy": SANDBOX})


def _read(folder: Path) -> list[_File]:
    try:
        paths = sorted(folder.glob("*.json"), key=lambda p: p.stat().st_mtime, reverse=True)[:MOST]
    except OSError:
        return []
    found = []
    for path in paths:
        state = path.stat()
        if state.st_size > LARGEST:
            continue
        campaign, crawls = None, list[Mapping[str, Any]]()
        try:
            campaign = scrub(load(path))
            crawls = [asdict(crawl) for crawl in campaign.crawls]
        except DataError:
            crawls = _crawls(path)
        if campaign or crawls:
            found.append(_File(path, state.st_mtime, campaign, crawls))
    return found


def _crawls(path: Path) -> list[Mapping[str, Any]]:
    """The crawls in a file of ``casemate redteam crawl --json``, or in one of a single crawl."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    given = raw.get("crawls", [raw]) if isinstance(raw, Mapping) else []
    return [c for c in given if isinstance(c, Mapping) and isinstance(c.get("hauls"), Mapping) and c.get("attack")]


def _campaign(campaign: Campaign, with_report: bool) -> Iterator[Markup]:
    status = str(campaign.status)
    way = [tag("p", tag("a", "The whole report", href=url("redteam/report")))] if with_report else []
    yield tag(
        "div",
        tag("b", chip(status, TONES[status]), " ", headline(campaign)),
        tag("p", "Run of ", moment(campaign.at), ". ", _target(campaign)),
        *way,
        class_=f"banner {TONES[status]}",
    )
    yield section(
        "Guard off against guard on",
        _attacks(campaign),
        _key(),
        lead="AUC of each attack: .50 is a coin toss, 1.00 is certainty.",
    )
    drawn = [
        tag("figure", tag("figcaption", a.name), roc(a, f"r{i}"))
        for i, a in enumerate(campaign.attacks)
        if a.off or a.on
    ]
    if drawn:
        yield section("ROC curves", tag("div", *drawn, class_="panels"))
    checks = [
        tag(
            "li",
            chip(str(c.status), TONES[str(c.status)]),
            tag("span", f"{c.attack}: " * bool(c.attack), c.name, in_figures(c)),
        )
        for c in cases(campaign)
    ]
    if checks:
        yield section("What was to hold", tag("ul", *checks, class_="checks"))
    told = [("Not tested", tag("ul", *(tag("li", t) for t in campaign.not_tested)))] if campaign.not_tested else []
    told += [("Simulated", tag("ul", *(tag("li", t) for t in campaign.simulated)))] if campaign.simulated else []
    if told:
        yield section("What this does not say", facts(told))
    yield section("What it took", *_took(campaign))


def _raid(campaign: Campaign) -> Iterator[Markup]:
    """How the last crawl ended."""
    status = str(campaign.status)
    yield tag("p", chip(status, TONES[status]), " ", headline(campaign), " Crawled ", moment(campaign.at), ".")
    yield tag("p", _target(campaign), class_="soft")
    lines = [*map(carried, campaign.crawls)]
    lines += [f"{k[5:].replace('.', ', guard ')}: {v}" for k, v in campaign.evidence.items() if k.startswith("loot.")]
    yield tag("ul", *(tag("li", line) for line in lines), class_="plain")
    yield from _took(campaign)


def _target(campaign: Campaign) -> str:
    can = campaign.evidence.get("capabilities", [])
    return f"Target {campaign.evidence.get('target', 'own')}; capabilities: {', '.join(map(str, can)) or 'not said'}."


def _took(campaign: Campaign) -> Iterator[Markup]:
    """Questions, time, and what answers cost that a defense wrote: operations among it."""
    told = [(k.replace("_", " "), f"{v:,.0f}") for k, v in campaign.cost.items() if not k.startswith("live_")]
    if told:
        yield facts(told)
    if line := live(campaign.cost):
        yield tag("p", line, class_="soft")


def _key() -> Markup:
    return tag(
        "p",
        tag("span", class_="key off"),
        "guard off, ",
        tag("span", class_="key on"),
        "guard on, with 95 % intervals",
        class_="soft",
    )


def _attacks(campaign: Campaign) -> Markup:
    low = lowest_auc(campaign.attacks)
    rows = []
    for i, a in enumerate(campaign.attacks):
        drawn = [track(a, low, f"k{i}")] if a.off or a.on else []
        rows.append(
            tag(
                "tr",
                tag("th", a.name, tag("small", a.backend), scope="row"),
                cell("AUC", *drawn, kind="wide"),
                cell("Off", measured(a.off.auc) if a.off else "–", kind="fixed"),
                cell("On", measured(a.on.auc) if a.on else "–", kind="fixed"),
                cell("Found at 1 % false alarms, on", _tpr(a)),
                cell("In words", sentence(a), kind="wrap"),
            )
        )
    return table(
        ("Attack", "AUC", "Guard off", "Guard on", "Members found at 1 % false alarms", "In words"),
        rows,
        "Attacks",
        "cards",
    )


def _tpr(a: AttackResult) -> str:
    return measured(a.on.tpr_at_1, share=True) if a.on else "–"


def _earlier(newest: Campaign, earlier: Sequence[_File]) -> Iterator[Markup]:
    """What changed since the run before, and all that are kept."""
    campaigns = [(f.path.name, f.campaign) for f in earlier if f.campaign]
    if not campaigns:
        return
    name, before = campaigns[0]
    change = diff(newest, before)
    groups = (
        ("Not comparable, because this differs", change.settings),
        ("Worse", change.worse),
        ("Better", change.better),
    )
    blocks = [
        join(
            [
                tag("h3", title),
                tag("ul", *(tag("li", f"{c.what}: {c.before} → {c.after}") for c in found), class_="plain"),
            ]
        )
        for title, found in groups
        if found
    ]
    yield section(f"Against {name}, {before.at.replace('T', ' ', 1)}", tag("p", conclusion(change)), *blocks)
    rows = [
        tag(
            "tr",
            cell("Run", moment(c.at)),
            cell("File", n),
            cell("Ended", chip(str(c.status), TONES[str(c.status)])),
            cell("Strongest, guard on", _strongest(c)),
        )
        for n, c in campaigns
    ]
    yield section(
        "Earlier runs", table(("Run", "File", "Ended", "Highest AUC, guard on"), rows, "Earlier runs", "cards")
    )


def _strongest(campaign: Campaign) -> str:
    best = max((a for a in campaign.attacks if a.on), key=lambda a: a.on.auc.value if a.on else 0.0, default=None)
    return f"{number(best.on.auc.value)} ({best.name})" if best and best.on else "–"


def _crawl(name: str, crawl: Mapping[str, Any], i: int) -> Markup:
    """Coverage by the number of questions, each target a curve."""
    hauls = {str(side): haul for side, haul in crawl["hauls"].items() if isinstance(haul, Mapping)}
    budget = max((_real(h.get("questions")) for h in hauls.values()), default=1.0) or 1.0
    x, y = Scale(0.0, budget, 42.0, 310.0), Scale(0.0, 1.0, 200.0, 12.0)
    marks = [
        piece
        for v in (0.0, 0.5, 1.0)
        for piece in (
            tag("line", class_="grid", x1=x.start, x2=x.end, y1=y(v), y2=y(v)),
            tag("text", f"{v:.0%}", x=36.0, y=y(v) + 4, text_anchor="end"),
        )
    ]
    marks += [
        tag("path", class_=f"curve {'off' if side == 'off' else 'on'}", d=_path(haul, x, y))
        for side, haul in hauls.items()
    ]
    marks.append(tag("text", f"questions, 0 to {budget:.0f}", x=176.0, y=222.0, text_anchor="middle"))
    said = "; ".join(f"guard {side}: {_reached(haul)}" for side, haul in hauls.items())
    image = tag("svg", tag("title", said), *marks, viewBox="0 0 320 230", role="img", aria_label=said, id=f"c{i}")
    return tag("figure", tag("figcaption", tag("b", str(crawl["attack"])), f" {said} ({name})"), image)


def _path(haul: Mapping[str, Any], x: Scale, y: Scale) -> str:
    raw = haul.get("curve")
    points = [p for p in raw if isinstance(p, list | tuple) and len(p) >= 2] if isinstance(raw, list | tuple) else []
    return "M" + " L".join(
        f"{x(a):.1f},{y(b):.1f}" for a, b in [(0.0, 0.0), *((_real(p[0]), _height(p)) for p in points)]
    )


def _height(point: Sequence[Any]) -> float:
    """What was reached, or where that is not told, what was recovered."""
    return _real(point[1] if point[1] is not None or len(point) == 2 else point[2])


def _reached(haul: Mapping[str, Any]) -> str:
    """The same in words."""
    if haul.get("coverage") is None:
        return f"{percent(_first(haul.get('crr')))} recovered"
    return f"{percent(_first(haul.get('coverage')))} reached"


def _first(value: Any) -> float:
    return _real(value[0]) if isinstance(value, list | tuple) and value else _real(value)


def _real(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
