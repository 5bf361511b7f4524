"""Trend plots of a canary set: one of the whole set, and one of each canary, with baseline band, change and alarm.

The page is one file without script that loads nothing; the dashboard shows the same plots. A plot has a mark for each
result and a line, the failure rate of the last ``WINDOW`` runs. The band is the range in which that rate lies with
probability .95 while nothing is wrong. It is a prediction interval (``predicted_share``), because the interval of the
flake rate alone is too narrow for a rate of so few runs. Where the target reports scores, a second line is the
cosine of the best document; its band is the range in the passed runs of the baseline.

The change is estimated by ``change_point``. Alarmed canaries come first. Those without a finding get a strip of marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

from casemate.maths.stats import predicted_share
from casemate.monitor.canaries.canary import Canary
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, base_run_id
from casemate.monitor.trends.baseline import Baseline, CanaryBaseline, best_cosine
from casemate.monitor.trends.cusum import WatchedSet
from casemate.monitor.trends.trend import WHOLE_SET, AlarmEpisode, CanarySummary, Trend, TrendFinding
from casemate.reports.format import measured, number, percent, plural, scrub, utc_time
from casemate.reports.render import render
from casemate.reports.svg import RUN_LEGEND, Drawing, RunAlarm, RunChart, RunPanel, run_chart, run_legend, run_strip

WINDOW = 10
"""Runs whose failure rate a line shows."""
MAX_CANARIES, MAX_RUNS, MAX_FINDINGS = 60, 1_000, 20
"""What a page shows at most: canaries, the worst first; runs and findings, the newest."""
MAX_CHANGED = 5
"""Changed documents of an outdated canary that are named."""
TOPS = (0.1, 0.2, 0.5, 1.0)
"""Ends of the axis of shares."""


@dataclass(frozen=True, slots=True)
class CanaryPlot:
    """One canary on the page.

    Attributes:
        state: ``alarmed``, ``recovered``, ``suspicious`` or ``healthy``.
        image: The plot, or the strip of a healthy canary.
    """

    canary: str
    severity: str
    state: str
    tone: str
    sentences: tuple[str, ...]
    image: Drawing


@dataclass(frozen=True, slots=True)
class TrendPlots:
    """The plots of a set.

    Attributes:
        overview: Share of failures by run; None: there are no runs.
        plots: Canaries with a finding, the worst first.
        strips: Canaries without a finding.
        hidden: Statement about canaries that are not shown; empty if all are shown.
        legend: Meaning of each kind of mark.
    """

    name: str
    tone: str
    headline: str
    sentences: tuple[str, ...]
    overview: Drawing | None
    findings: tuple[TrendFinding, ...]
    plots: tuple[CanaryPlot, ...]
    strips: tuple[CanaryPlot, ...]
    hidden: str
    legend: tuple[tuple[Drawing, str], ...]


@dataclass(frozen=True, slots=True)
class TrendSource:
    """What the plots are drawn from: the analyzed history, the results that it was computed from, and the set.

    Attributes:
        canaries: The canaries by id; those that are missing have the score of the first document.
        links: Address and title of each run; empty: none.
    """

    trend: Trend
    history: Sequence[CanaryResult]
    watched: WatchedSet
    canaries: Mapping[str, Canary]
    baseline: Baseline | None = None
    links: Sequence[tuple[str, str]] = ()


TONES = {"alarmed": "fail", "suspicious": "inconclusive", "recovered": "pass", "healthy": "pass"}


def draw_trend(source: TrendSource) -> TrendPlots:
    """Draws the plots of a set."""
    trend, watched = source.trend, source.watched
    results = _results_by_run(source)
    ranked = sorted(trend.canaries, key=lambda c: _rank(source, c))
    made = [_plot(source, c, results.get(c.canary, {}), i) for i, c in enumerate(ranked[:MAX_CANARIES])]
    rest = ranked[MAX_CANARIES:]
    alarmed = sum(c.alarmed for c in trend.canaries)
    hidden = (
        f"{plural(len(rest), 'more canary').replace('canarys', 'canaries')} not shown, {sum(c.alarmed for c in rest)}"
    )
    return TrendPlots(
        scrub(watched.name),
        "fail" if alarmed or trend.state.decayed else "pass" if trend.runs else "inconclusive",
        _headline(trend, alarmed),
        tuple(_set_sentences(source)),
        _overview(source) if trend.runs else None,
        tuple(scrub(f) for f in trend.findings[::-1] if f.alerts)[:MAX_FINDINGS],
        tuple(p for p in made if p.state != "healthy"),
        tuple(p for p in made if p.state == "healthy"),
        f"{hidden} of them alarmed." if rest else "",
        tuple((run_legend(kind), text) for kind, text in RUN_LEGEND.items()),
    )


def _rank(source: TrendSource, summary: CanarySummary) -> tuple[bool, bool, int, float, int]:
    """Sorts the worst canary first: alarmed, alarmed before, severe, much evidence, many failures."""
    alarms = _alarms(source.trend, summary.canary)
    severity = source.watched.by_id[summary.canary].severity.rank if alarms else 0
    return not summary.alarmed, not alarms, -severity, -summary.evidence, -summary.failed


def render_trend(plots: TrendPlots, at: datetime) -> str:
    """Renders the plots as one self-contained page, with its time."""
    return render("trend.html", trend=plots, at=at)


def _headline(trend: Trend, alarmed: int) -> str:
    if not trend.runs:
        return "No run in this period."
    if alarmed:
        return f"{alarmed} of {len(trend.canaries)} canaries alarmed."
    return "The whole set fails more often than its baseline." if trend.state.decayed else "No canary is alarmed."


def _set_sentences(source: TrendSource) -> list[str]:
    trend = source.trend
    if not trend.runs:
        return []
    failed, judged = sum(r.failed for r in trend.runs), sum(r.judged for r in trend.runs)
    silent = sum(not r.judged for r in trend.runs)
    period = f"{utc_time(trend.runs[0].at, False)} to {utc_time(trend.runs[-1].at, False)}"
    found = [
        f"{plural(len(trend.runs), 'run')}, {period}; {failed:,} of {judged:,} answers failed"
        + (f"; {plural(silent, 'run')} without any answer." if silent else ".")
    ]
    asked, flaked = baseline_counts(source.watched)
    if asked:
        at = f", recorded {utc_time(source.baseline.at, False)}" if source.baseline else ""
        found.append(f"Baseline: {flaked:,} of {asked:,} answers failed{at}.")
        if source.baseline and (older := sum(run.at < source.baseline.at for run in trend.runs)):
            found.append(f"It also judges {plural(older, 'older run')}.")
    else:
        found.append("There is no accepted baseline, so there is no band, and failures count little.")
    found += [_alarm_sentence(trend, a) for a in _alarms(trend, WHOLE_SET)[-1:]]
    if len(trend.runs) > MAX_RUNS:
        found.append(f"The last {MAX_RUNS:,} runs are drawn.")
    return found


def baseline_counts(watched: WatchedSet) -> tuple[int, int]:
    """Answers with a verdict in the baseline, and failed ones."""
    return sum(c.flakes.asked for c in watched.canaries), sum(c.flakes.failed for c in watched.canaries)


def _overview(source: TrendSource) -> Drawing:
    """Share of failures in each run, and over the last runs."""
    trend, first = source.trend, _first_drawn(source.trend)
    runs = trend.runs
    shares = [r.failed / r.judged if r.judged else None for r in runs]
    rates = _rates([(r.judged, r.failed) if r.judged else None for r in runs])
    asked, flaked = baseline_counts(source.watched)
    usual = int(median([r.judged for r in runs if r.judged] or [1]))
    band = predicted_share(flaked, asked, WINDOW * usual) if asked else None
    top = next(t for t in TOPS if max([0.0, *(s for s in shares if s), *(band or ())]) <= t)
    panel = RunPanel("failed", rates[first:], band, (0.0, top), ("0 %", percent(top)), shares[first:])
    whole = {a.alarmed: a for a in _alarms(trend, WHOLE_SET)}
    alarms = [
        _drawn(whole[run], first) if run in whole else RunAlarm(run - first)
        for run in sorted({a.alarmed for a in trend.alarms})
        if run >= first
    ]
    last = next((r for r in rates[::-1] if r is not None), None)
    said = f"Failed in the last {WINDOW} runs: {percent(last)}. " if last is not None else ""
    said += f"Expected from the baseline: {percent(band[0])} to {percent(band[1])}. " if band else ""
    said += f"Runs with an alarm: {len(alarms)}."
    chart = RunChart(
        f"{scrub(source.watched.name)}: share of canaries that failed, by run",
        said,
        (utc_time(runs[first].at, False), utc_time(runs[-1].at, False)),
        "",
        (panel,),
        alarms,
        source.links[first:],
        760.0,
        150.0,
    )
    return run_chart(chart, "trend-all")


def _plot(source: TrendSource, summary: CanarySummary, results: Mapping[int, CanaryResult], index: int) -> CanaryPlot:
    trend, canary = source.trend, source.canaries.get(summary.canary)
    base = source.baseline.of(canary) if source.baseline and canary else None
    runs = range(_first_drawn(trend), len(trend.runs))
    rate = _rate_panel(summary, [results.get(i) for i in range(len(trend.runs))], runs)
    score = _score_panel(canary, base, [results.get(i) for i in runs])
    alarms = _alarms(trend, summary.canary)
    outside = any(_outside(panel) for panel in (rate, score) if panel)
    state = (
        "alarmed"
        if summary.alarmed
        else "recovered" if alarms else "suspicious" if summary.evidence > 1 or outside else "healthy"
    )  # fmt: skip
    name, severity = scrub(summary.canary), str(source.watched.by_id[summary.canary].severity)
    marks = "".join(r.status.name[0] if (r := results.get(i)) else " " for i in runs)
    sentences = tuple(_sentences(source, summary, alarms, score, base))
    if state == "healthy":
        image = run_strip(marks, f"{name}: " + sentences[0])
    else:
        times = (utc_time(trend.runs[runs.start].at, False), utc_time(trend.runs[-1].at, False))
        drawn = [_drawn(a, runs.start) for a in alarms if a.alarmed >= runs.start]
        panels = (rate, score) if score else (rate,)
        chart = RunChart(f"{name}: failures by run", " ".join(sentences), times, marks, panels, drawn)
        image = run_chart(chart, f"trend-{index}")
    return CanaryPlot(name, severity, state, TONES[state], sentences, image)


def _rate_panel(summary: CanarySummary, results: Sequence[CanaryResult | None], runs: range) -> RunPanel:
    rates = _rates([(1, int(r.status is CanaryStatus.FAIL)) if _judged(r) and r else None for r in results])
    asked, failed = summary.flakes.asked, summary.flakes.failed
    band = predicted_share(failed, asked, WINDOW) if asked else None
    return RunPanel("failed", rates[runs.start :], band, (0.0, 1.0), ("0 %", "100 %"))


def _score_panel(
    canary: Canary | None, base: CanaryBaseline | None, results: Sequence[CanaryResult | None]
) -> RunPanel | None:
    """Cosine of the best expected document; None if no result has one."""
    scores = [
        (best_cosine(canary, r) if canary else max(r.scores[:1], default=None)) if r and _judged(r) else None
        for r in results
    ]
    known = [s for s in scores if s is not None]
    if not known:
        return None
    band = None
    if base and base.cosine is not None:
        band = (base.cosine, max(base.cosine, base.highest_cosine or 1.0))
    low, high = min([*known, *(band or ())]), max([*known, *(band or ())])
    margin = max(0.1 * (high - low), 0.01)
    span = (low - margin, high + margin)
    return RunPanel("cosine of the best document", scores, band, span, (number(span[0]), number(span[1])))


def _sentences(
    source: TrendSource,
    summary: CanarySummary,
    alarms: Sequence[AlarmEpisode],
    score: RunPanel | None,
    base: CanaryBaseline | None,
) -> list[str]:
    silent = f", {summary.errors} without an answer" if summary.errors else ""
    found = [f"Failed in {summary.failed} of {plural(summary.judged, 'run')}{silent}."]
    if summary.flake_rate is None:
        found.append("No baseline.")
    else:
        flakes = summary.flakes
        found.append(f"Baseline: {flakes.failed} of {flakes.asked}, {measured(summary.flake_rate, True)}.")
    if alarms:
        found.append(_alarm_sentence(source.trend, alarms[-1]))
    if len(alarms) > 1:
        found.append(f"{plural(len(alarms) - 1, 'earlier alarm')}.")
    if score:
        last = next(s for s in reversed(score.values) if s is not None)
        expected = f"; baseline: {number(score.band[0])} to {number(score.band[1])}" if score.band and base else ""
        found.append(f"Cosine of its best document: {number(last)}{expected}.")
    watched = source.watched.by_id[summary.canary]
    if watched.outdated:
        changed = scrub(", ".join(watched.changed[:MAX_CHANGED])) + ", ..." * (len(watched.changed) > MAX_CHANGED)
        found.append(f"It is outdated and does not alert: its documents were changed or removed ({changed}).")
    elif not watched.alerts:
        found.append("It does not alert.")
    return found


def _alarm_sentence(trend: Trend, alarm: AlarmEpisode) -> str:
    """When the change began, when the alarm came, and whether it lasts."""
    began, earliest, latest, alarmed = (
        f"{trend.runs[run].at.astimezone(UTC):%d %b %H:%M}"
        for run in (alarm.began, alarm.earliest, alarm.latest, alarm.alarmed)
    )
    about = "" if earliest == latest else f" (90 % interval: {earliest} to {latest})"
    delay = alarm.alarmed - alarm.began
    later = f"alarm {plural(delay, 'run')} later, {alarmed}" if delay else "alarm in the same run"
    text = f"Estimated change: {began} UTC{about}; {later}."
    if alarm.recovered is not None:
        text += f" Recovered: {trend.runs[alarm.recovered].at.astimezone(UTC):%d %b %H:%M}."
    return text


def _results_by_run(source: TrendSource) -> dict[str, dict[int, CanaryResult]]:
    """The first result of each canary in each run, by position of the run."""
    position = {run.run: i for i, run in enumerate(source.trend.runs)}
    found: dict[str, dict[int, CanaryResult]] = {}
    for result in source.history:
        run = position.get(base_run_id(result.run))
        if run is not None and "~" not in result.run:
            found.setdefault(result.canary, {})[run] = result
    return found


def _rates(counts: Sequence[tuple[int, int] | None]) -> list[float | None]:
    """Failed share of the last ``WINDOW`` entries with a verdict; None where there is none, or there are too few."""
    known: list[tuple[int, int]] = []
    found: list[float | None] = []
    for one in counts:
        known += [one] if one else []
        last = known[-WINDOW:]
        full = one and len(last) == WINDOW
        found.append(sum(failed for _, failed in last) / sum(asked for asked, _ in last) if full else None)
    return found


def _outside(panel: RunPanel) -> bool:
    """Whether the last value lies outside the band, on the bad side: a high rate, or a low cosine."""
    last = next((v for v in reversed(panel.values) if v is not None), None)
    if last is None or panel.band is None:
        return False
    return last > panel.band[1] if panel.span == (0.0, 1.0) else last < panel.band[0]


def _judged(result: CanaryResult | None) -> bool:
    return result is not None and result.status is not CanaryStatus.ERROR


def _alarms(trend: Trend, canary: str) -> list[AlarmEpisode]:
    return [a for a in trend.alarms if a.canary == canary]


def _drawn(alarm: AlarmEpisode, first: int) -> RunAlarm:
    """The alarm in a chart whose first run is ``first``; a change before it is drawn at its edge."""
    change = (max(alarm.began - first, 0), max(alarm.earliest - first, 0), max(alarm.latest - first, 0))
    return RunAlarm(alarm.alarmed - first, change, None if alarm.recovered is None else alarm.recovered - first)


def _first_drawn(trend: Trend) -> int:
    return max(len(trend.runs) - MAX_RUNS, 0)
