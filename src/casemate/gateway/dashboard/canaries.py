"""The canary pages: each canary against each of its last runs, plots of its trend, and the deviations of one result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from starlette.exceptions import HTTPException

from casemate.errors import DataError
from casemate.gateway.dashboard.alerts import canary_key
from casemate.gateway.dashboard.page import Page, PageRequest
from casemate.gateway.dashboard.table import Column
from casemate.gateway.dashboard.time_range import TimeBin
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, base_run_id, group_by
from casemate.monitor.scheduler.schedule import ScheduleGap
from casemate.monitor.service import trend_of_results
from casemate.monitor.trends.trend_page import draw_trend
from casemate.reports.format import percent, plural, sample_rate
from casemate.reports.svg import sparkline

MAX_RUNS = 24
SECOND = timedelta(seconds=1)
MARKS = {
    CanaryStatus.PASS: ("✓", "good", "passed"),
    CanaryStatus.FAIL: ("✕", "bad", "failed"),
    CanaryStatus.ERROR: ("!", "odd", "no answer"),
}
CONTEXT = (
    Column("Rank", lambda row: row[0], "rank"),
    Column("Source", lambda row: row[2], "source"),
    Column("Chunk", lambda row: row[1], "chunk"),
    Column("Cosine similarity", lambda row: row[3], "cosine", True),
)


def matrix(request: PageRequest) -> Page:
    """Builds the page of all canary sets."""
    recent = (result for result in request.records.results.all if result.at in request.time)
    sets = group_by(recent, lambda result: result.run.partition("@")[0])
    path, gaps = request.app.config.monitor.canaries, request.records.gaps.all
    wanted = {name: request.parameter(name) for name in ("canary", "failed")}
    context = {
        "sets": [
            _set(request, name, results, [g for g in gaps if g.set == name], wanted)
            for name, results in sorted(sets.items())
        ],
        "any": bool(request.records.results.all),
        "wanted": wanted,
        "marks": MARKS.values(),
        "path": path,
        "missing": not (request.app.config.folder / path).exists(),
        "alerts": any(s.open and s.alert.set in sets for s in request.records.alert_states),
    }
    return Page("canaries.html", context)


def _set(
    request: PageRequest,
    name: str,
    results: Sequence[CanaryResult],
    gaps: Sequence[ScheduleGap],
    wanted: Mapping[str, str],
) -> dict[str, Any]:
    """Canaries against runs, and the share that failed in each run."""
    runs = list(dict.fromkeys(base_run_id(r.run) for r in results))[-MAX_RUNS:]
    first = {(r.canary, base_run_id(r.run)): r for r in results if "~" not in r.run}
    times = {run: [r.at for r in results if base_run_id(r.run) == run] for run in runs}
    shares: list[float | None] = []
    canaries = sorted({c for c, run in first if run in runs})
    for run in runs:
        judged = [r for c in canaries if (r := first.get((c, run))) and r.status is not CanaryStatus.ERROR]
        shares.append(sum(r.status is CanaryStatus.FAIL for r in judged) / len(judged) if judged else None)
    said = "Share of canaries that failed, run by run: " + ", ".join(percent(s) for s in shares)
    rows = [_row(request, name, canary, [first.get((canary, run)) for run in runs]) for canary in canaries]
    rows = [
        r for r in rows if wanted["canary"].lower() in r["canary"].lower() and (not wanted["failed"] or r["failed"])
    ]
    columns: tuple[Column | str, ...] = (
        Column("Canary", lambda row: row["canary"], "canary"),
        *("" for _ in runs),
        Column("Failed", lambda row: row["failed"], "failed", True),
    )
    links = [
        (
            _run_url(request, times[run]),
            f"{min(times[run]):%d %b %H:%M}: " + ("no answer" if share is None else f"{percent(share)} failed"),
        )
        for run, share in zip(runs, shares, strict=True)
    ]
    return {
        "name": name,
        "lead": f"Canaries: {len(canaries)}. The last {plural(len(runs), 'run')}, oldest first; times in UTC.",
        "runs": [min(times[run]) for run in runs],
        "trend": sparkline(shares, said, links),
        "gaps": [_gap(gap) for gap in gaps if gap.last >= min(times[runs[0]])],
        "listing": request.table(f"Canaries of {name} by run", columns, rows, order="canary", name=name, size=100),
    }


def trend(request: PageRequest) -> Page:
    """Builds the page of plots of one set: the same figures as ``casemate canary trend --html``."""
    name = request.parameter("set")
    results = [r for r in request.records.results.all if r.run.partition("@")[0] == name and r.at in request.time]
    times: dict[str, list[datetime]] = {}
    for result in results:
        times.setdefault(base_run_id(result.run), []).append(result.at)
    links = {run: (_run_url(request, found), f"Run of {min(found):%d %b %H:%M} UTC") for run, found in times.items()}
    plots, problem = (
        None,
        "No canary of this set ran in this period. Choose a longer time, or run 'casemate canary run'.",
    )
    if results:
        try:
            plots = draw_trend(trend_of_results(request.app, name, results, links))
        except DataError as error:
            problem = str(error)
    return Page("canary_trend.html", {"name": name or "a set", "trend": plots, "problem": problem})


def _run_url(request: PageRequest, times: Sequence[datetime]) -> str:
    """Address of the matrix with one run alone."""
    return request.url("canaries", **TimeBin(min(times), max(times) + SECOND).parameters)


def _gap(gap: ScheduleGap) -> str:
    first, last = f"{gap.first:%d %b %H:%M}", f"{gap.last:%d %b %H:%M}"
    when = f"at {first}" if gap.slots == 1 else f"from {first} to {last}"
    return f"Missed {plural(gap.slots, 'run')} {when}: no process was watching."


def _row(request: PageRequest, name: str, canary: str, results: Sequence[CanaryResult | None]) -> dict[str, Any]:
    judged = [r for r in results if r and r.status is not CanaryStatus.ERROR]
    failed = sum(r.status is CanaryStatus.FAIL for r in judged)
    marks = [_mark(request, r) if r else None for r in results]
    return {"canary": canary, "key": canary_key(name, canary), "marks": marks, "failed": failed, "judged": len(judged)}


def _mark(request: PageRequest, result: CanaryResult) -> dict[str, Any]:
    text, tone, word = MARKS[result.status]
    return {
        "text": text,
        "tone": tone,
        "label": f"{result.canary}, {result.at:%d %b %H:%M} UTC: {word}",
        "url": request.url("canaries/result", run=result.run, canary=result.canary),
        "at": result.at,
    }


def result(request: PageRequest) -> Page:
    """Builds the page of one canary in one run."""
    run, canary = request.parameter("run", 300), request.parameter("canary", 300)
    history = [r for r in request.records.results.all if r.canary == canary]
    found = next((r for r in history if r.run == run), None)
    if found is None:
        raise HTTPException(404, "There is no such result, or it is too old to be loaded.")
    history = [r for r in history if r.at in request.time or r is found]
    judged = [r for r in history if r.status is not CanaryStatus.ERROR and "~" not in r.run]
    rate, about = sample_rate(sum(r.status is CanaryStatus.FAIL for r in judged), len(judged))
    missing = len(found.documents)
    context = list(
        zip(
            range(1, missing + 1),
            found.documents,
            [*found.sources, *([""] * missing)],
            [*found.scores, *([None] * missing)],
            strict=False,  # a target may omit sources and scores
        )
    )
    values = {
        "result": found,
        "mark": MARKS[found.status],
        "error": found.status is CanaryStatus.ERROR,
        "listing": request.table("Documents of the context", CONTEXT, context),
        "text": found.text if request.app.config.privacy.log_text else "",
        "rate": rate,
        "rate_about": about,
        "history": [_mark(request, r) for r in history[-12:][::-1] if r is not found],
    }
    return Page("canary_result.html", values)
