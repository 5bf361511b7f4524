"""The red-team page: campaigns in ``redteam.folder``, guard off against on, and a list of those of external targets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.responses import Response

from casemate.errors import DataError
from casemate.gateway.dashboard.page import Page, PageRequest
from casemate.gateway.dashboard.table import Column
from casemate.gateway.dashboard.time_range import TimeRange
from casemate.guard.generation_costs import format_live_costs
from casemate.redteam.lab.results import CampaignResult, Crawl, ExtractionResult, load_result
from casemate.redteam.reporting.charts import roc
from casemate.redteam.reporting.files import CRAWL, NAMES, REPORT, TARGETS
from casemate.redteam.reporting.html import describe_comparison, is_crawl, overview, requirements
from casemate.redteam.reporting.text import (
    describe_crawl,
    describe_extracted,
    headline,
    reported_checks,
)
from casemate.reports.format import percent, scrub
from casemate.reports.render import load_script
from casemate.reports.svg import extraction_chart

MAX_FILES, MAX_BYTES = 12, 32_000_000
"""Files that are read, the newest first, and the size of the largest."""
TONES = {"pass": "good", "fail": "bad", "inconclusive": "medium", "error": "odd"}
SANDBOX_CSP = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"
"""Content-Security-Policy of a report without script: one file with inline style. No script could run."""
REPORTS = re.compile(rf"(?:{TARGETS}/[A-Za-z0-9_-]+/)?(?:{REPORT}|{CRAWL})")
"""Names of the files in the folder, without extension, that ``report`` sends."""


def redteam(request: PageRequest) -> Page:
    """Builds the page."""
    folder = request.app.config.folder / request.app.config.redteam.folder
    found = _read(folder, "*.json")
    kept = [(name, campaign) for name, campaign in found if _ended_before(campaign, request.time)]
    kept.sort(key=lambda pair: pair[1].at, reverse=True)
    membership = [(name, campaign) for name, campaign in kept if not is_crawl(campaign) and not campaign.probes]
    extracted = [(name, campaign) for name, campaign in kept if is_crawl(campaign)]
    newest = membership[0] if membership else None
    change = [describe_comparison(membership[0][1], before) | {"name": name} for name, before in membership[1:2]]
    shown = [at for _, one in (membership[:1] + extracted[:1]) if (at := _time(one))]
    context = {
        "outside": bool(shown) and not any(at in request.time for at in shown),
        "folder": str(folder),
        "campaign": _campaign(request, newest[1], _report_url(request, folder, newest[0])) if newest else None,
        "comparison": change[0] if change else None,
        "earlier": request.table(
            "Earlier campaigns", EARLIER, [_earlier(*one) for one in membership[1:]], order="-at", name="earlier"
        ),
        "targets": request.table(
            "External targets", EXTERNAL, _external(request, folder), order="target", name="targets"
        ),
        "extraction": _extraction(extracted[0][1]) if extracted else None,
        "extraction_report": _report_url(request, folder, extracted[0][0]) if extracted else "",
        "crawls": [_crawl(request, folder, name, crawl) for name, campaign in found for crawl in campaign.crawls],
    }
    return Page("redteam.html", context)


def report(request: PageRequest) -> Response:
    """Sends the report that ``casemate redteam run`` or ``crawl`` wrote.

    Its explorer is the only script that may run: the policy names the hash of this package's file, and the sandbox
    gives the page an origin of its own, without access to the session.
    """
    name = request.parameter("name") or REPORT
    path = request.app.config.folder / request.app.config.redteam.folder / f"{name}.html"
    try:
        content = path.read_bytes() if REPORTS.fullmatch(name) else None
    except OSError:
        content = None
    if content is None:
        raise HTTPException(404, "There is no such report. Run 'casemate redteam run' or 'crawl'.")
    _, csp = load_script("explorer.js")
    headers = {"Content-Security-Policy": f"{csp}; frame-ancestors 'none'; sandbox allow-scripts"}
    return Response(content, media_type="text/html", headers=headers)


def _report_url(request: PageRequest, folder: Path, name: str) -> str:
    """Address of the HTML page beside a result; empty if there is none."""
    stem = name.removesuffix(".json")
    return (
        request.url("redteam/report", name=stem)
        if REPORTS.fullmatch(stem) and (folder / f"{stem}.html").exists()
        else ""
    )


def _time(campaign: CampaignResult) -> datetime | None:
    """Time of a campaign; None if its record has none."""
    try:
        found = datetime.fromisoformat(campaign.at)
    except ValueError:
        return None
    return found if found.tzinfo else None


def _ended_before(campaign: CampaignResult, time: TimeRange) -> bool:
    """Whether a campaign ended before the end of a range; one without a time always did."""
    at = _time(campaign)
    return at is None or bool(time.preset) or at < time.end


def _read(folder: Path, pattern: str) -> list[tuple[str, CampaignResult]]:
    """The newest results in a folder that match a pattern, by name of the file. Other files are left out."""
    found = []
    for path in _newest(folder, pattern):
        with suppress(DataError):
            found.append((path.relative_to(folder).as_posix(), scrub(load_result(path))))
    return found


def _newest(folder: Path, pattern: str) -> list[Path]:
    """The newest files of results, without those that are too large or cannot be read, such as a dangling link."""
    sizes = list[tuple[float, int, Path]]()
    for path in folder.glob(pattern):
        with suppress(OSError):
            sizes.append(((status := path.stat()).st_mtime, status.st_size, path))
    newest = sorted((one for one in sizes if not one[2].name.endswith(NAMES)), reverse=True)[:MAX_FILES]
    return [path for _, size, path in newest if size <= MAX_BYTES]


def _summary(campaign: CampaignResult) -> dict[str, Any]:
    capabilities = ", ".join(map(str, campaign.evidence.get("capabilities", []))) or "unknown"
    return {
        "at": campaign.at,
        "status": str(campaign.status),
        "tone": TONES[str(campaign.status)],
        "headline": headline(campaign),
        "target": f"Target {campaign.evidence.get('target', 'own')}; capabilities: {capabilities}.",
        "cost": [(k.replace("_", " "), f"{v:,.0f}") for k, v in campaign.cost.items() if not k.startswith("live_")],
        "live_cost": format_live_costs(campaign.cost),
    }


def _campaign(request: PageRequest, campaign: CampaignResult, report_url: str) -> dict[str, Any]:
    measured = [a for a in campaign.attacks if a.off or a.on]
    rows = [
        shown | {"result": a, "url": _sessions_url(report_url, a.name)}
        for a, shown in zip(campaign.attacks, overview(campaign.attacks), strict=True)
    ]
    return _summary(campaign) | {
        "not_tested": campaign.not_tested,
        "simulated": campaign.simulated,
        "report_url": report_url,
        "attacks": request.table("Attacks", ATTACKS, rows, name="attacks"),
        "curves": [(a.name, roc(a, f"r{i}"), _sessions_url(report_url, a.name)) for i, a in enumerate(measured)],
        "checks": list(requirements(reported_checks(campaign))),
        "tones": TONES,
    }


def _sessions_url(report_url: str, attack: str) -> str:
    """Address of the questions and answers of an attack in a report; empty without a report."""
    return f"{report_url}#{urlencode({'attack': attack}, errors='replace')}" if report_url else ""


def _auc(side: str) -> Callable[[Mapping[str, Any]], float | None]:
    def value(row: Mapping[str, Any]) -> float | None:
        figures = getattr(row["result"], side)
        return figures.auc.value if figures else None

    return value


def _found(row: Mapping[str, Any]) -> float | None:
    figures = row["result"].on
    return figures.tpr_at_1.value if figures and figures.tpr_at_1 else None


ATTACKS = (
    Column("Attack", lambda row: row["result"].name, "attack"),
    "AUC",
    Column("Guard off", _auc("off"), "off", True),
    Column("Guard on", _auc("on"), "on", True),
    Column("Members found at 1 % false alarms", _found, "found", True),
    "Note",
)
EXTERNAL = (
    Column("Target", lambda row: row["name"], "target"),
    Column("Attacks", lambda row: row["attacks"], "attacks"),
    Column("Run", lambda row: row["at"], "at", True),
    Column("Verdict", lambda row: row["status"], "verdict"),
)
EARLIER = (
    Column("Run", lambda row: row["at"], "at", True),
    Column("File", lambda row: row["name"], "file"),
    Column("Verdict", lambda row: row["status"], "verdict"),
    Column("Highest AUC, guard on", lambda row: row["strongest"] and row["strongest"][0], "auc", True),
)


def _earlier(name: str, campaign: CampaignResult) -> dict[str, Any]:
    guarded = [(a.on.auc.value, a.name) for a in campaign.attacks if a.on]
    return _summary(campaign) | {"name": name, "strongest": max(guarded, default=None)}


def _external(request: PageRequest, folder: Path) -> list[dict[str, Any]]:
    """The newest campaigns against external targets."""
    return [
        _summary(campaign)
        | {
            "name": str(campaign.evidence.get("target", "unknown")),
            "attacks": _attacks(campaign),
            "url": _report_url(request, folder, file),
        }
        for file, campaign in _read(folder, f"{TARGETS}/*/*.json")
        if _ended_before(campaign, request.time)
    ]


def _attacks(campaign: CampaignResult) -> str:
    if is_crawl(campaign):
        return "extraction"
    return "injection" if campaign.probes else "membership inference"


def _extraction(campaign: CampaignResult) -> dict[str, Any]:
    """The newest extraction campaign, in words."""
    lines = [describe_crawl(crawl) for crawl in campaign.crawls]
    lines += [f"{name}: {text}" for name, text in describe_extracted(campaign)]
    return _summary(campaign) | {"lines": lines}


def _crawl(request: PageRequest, folder: Path, name: str, crawl: Crawl) -> dict[str, Any]:
    """Extraction against the number of questions: coverage, or the recovered share where coverage is unknown."""
    budget = max((result.questions for result in crawl.by_target.values()), default=1) or 1
    said = "; ".join(f"guard {side}: {_share_text(result)}" for side, result in crawl.by_target.items())
    curves = {
        side: [(float(at), crr if coverage is None else coverage) for at, coverage, crr in result.curve]
        for side, result in crawl.by_target.items()
    }
    curves = {side: [point for point in points if all(map(math.isfinite, point))] for side, points in curves.items()}
    return {
        "name": name,
        "attack": crawl.attack,
        "said": said,
        "chart": extraction_chart(curves, float(budget), said),
        "url": _sessions_url(_report_url(request, folder, name), crawl.attack),
    }


def _share_text(result: ExtractionResult) -> str:
    if result.coverage is None:
        return f"{percent(result.crr.value)} recovered"
    return f"{percent(result.coverage.value)} reached"
