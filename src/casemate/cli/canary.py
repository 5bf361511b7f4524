"""``canary run|watch|trend|alerts|schema``: asks canaries, and shows trend and alerts."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from casemate.app import open_app
from casemate.cli.console import (
    Code,
    ConfigFile,
    Json,
    Tenant,
    bar,
    counted_errors,
    interruptible,
    note,
    out,
    print_json,
    say,
    shown,
)
from casemate.errors import ConfigError
from casemate.gateway.auth.keys import ApiKeyStore
from casemate.monitor.alerts.alert import AlertState, acknowledge_alert, close_alert, open_alerts
from casemate.monitor.alerts.messages import render_alert
from casemate.monitor.canaries.canary import parse_interval
from casemate.monitor.canaries.canary_file import canary_json_schema
from casemate.monitor.canaries.results import CanaryResult, CanaryRun, CanaryStatus
from casemate.monitor.scheduler.schedule import ScheduleGap
from casemate.monitor.scheduler.watch import AlertDispatcher
from casemate.monitor.service import CanaryMonitor, open_alert_dispatcher, open_canary_monitor
from casemate.monitor.trends.baseline import load_baseline, recorded_baselines
from casemate.monitor.trends.cusum import ERRORS_IN_A_ROW, RunAnalysis, WatchedCanary, WatchedSet
from casemate.monitor.trends.trend import CanarySummary
from casemate.monitor.trends.trend_page import TrendSource, baseline_counts, draw_trend, render_trend
from casemate.reports.format import number, sample_rate
from casemate.runtime.files import write_atomically
from casemate.types import DEFAULT_TENANT

canary = typer.Typer(help="Ask questions with known answers, and alert when the answers change.", no_args_is_help=True)
EXIT_CODES = {CanaryStatus.PASS: Code.OK, CanaryStatus.FAIL: Code.FAILED, CanaryStatus.ERROR: Code.ERROR}
STOPPED = "stopped; the next watch continues an unfinished run"
LOOK_BACK = "30d"
"""How far back the trend goes at most by default."""
SHOWN = 5
"""Changed documents of an outdated canary that are named."""
STYLES = {CanaryStatus.PASS: "green", CanaryStatus.FAIL: "red", CanaryStatus.ERROR: "yellow"}
EVIDENCE = "evidence: below 1 while nothing indicates a change; failures multiply it, passes lower it"
"""Explains the column."""


@contextmanager
def opened_monitor(config: Path | None, tenant: str) -> Iterator[CanaryMonitor]:
    """Opens the configured canaries; prints their file and target on stderr."""
    with open_app(config) as app:
        monitor = open_canary_monitor(app, tenant)
        target = app.config.monitor.target.use
        file = shown(str(monitor.file))
        say.print(f"{len(monitor.set.canaries)} canaries of {file}; target: {target}")
        yield monitor


def parse_span(text: str) -> timedelta:
    """Parses an interval given as an option."""
    try:
        return parse_interval(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@canary.command("run")
def run_command(config: ConfigFile = None, tenant: Tenant = DEFAULT_TENANT, as_json: Json = False) -> None:
    """Ask all canaries now. Exit codes: 0 all passed, 1 some failed, 2 some could not be judged."""
    with opened_monitor(config, tenant) as monitor:
        results: dict[str, CanaryResult] = {}
        with bar() as progress:
            task = progress.add_task("asking", total=len(monitor.set.canaries))

            def on_result(result: CanaryResult) -> None:
                progress.advance(task, result.canary not in results)
                results[result.canary] = result

            with counted_errors():
                analysis = asyncio.run(monitor.run(on_result=on_result))
        status = CanaryRun(analysis.run, tuple(results.values())).status
        if as_json:
            print_json(_run_json(monitor, analysis, results, status))
        else:
            _show_run(monitor, analysis, results, status)
    raise typer.Exit(EXIT_CODES[status])


@canary.command("watch")
def watch_command(config: ConfigFile = None, tenant: Tenant = DEFAULT_TENANT) -> None:
    """Ask canaries when they are due, and alert. Several processes may run: one is the leader, the others stand by."""
    with opened_monitor(config, tenant) as monitor:
        channels = ", ".join(c.name for c in monitor.channels)
        elsewhere = f" and {shown(channels)}" if channels else "; for webhook or mail, set monitor.channels"
        say.print(f"asking every {monitor.app.config.monitor.interval} until Ctrl-C")
        say.print(f"alerts: dashboard, 'casemate canary alerts'{elsewhere}")
        _show_notes(monitor)
        changes = "newly accepted baselines and indexed documents are used from the next run on"
        restart = f"after a change to casemate.yaml or {shown(str(monitor.file))}, restart this command"
        say.print(f"{restart}; {changes}")
        with interruptible(STOPPED):
            asyncio.run(monitor.watch(_say_run, _say_leader_change))
        say.print(STOPPED)  # SIGTERM


@canary.command("trend")
def trend_command(
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    since: Annotated[
        str, typer.Option(help="How far back, such as 12h or 30d. Default: since the accepted baseline, at most 30d.")
    ] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Also runs before the baseline, and canaries whose documents changed.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write plots to this file: one page without script that loads nothing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the history of each canary. Exit code 1 if one is alarmed, or if the target is unreachable."""
    now = datetime.now(UTC)
    start = now - parse_span(since or LOOK_BACK)
    with opened_monitor(config, tenant) as monitor:
        accepted = load_baseline(monitor.app.store, monitor.set)
        if accepted and not (since or everything):
            start = max(start, accepted.at)
        source, gaps = monitor.trend_source(start), monitor.gaps(start)
    trend = source.trend
    if html:
        write_atomically(html, render_trend(draw_trend(source), now).encode("utf-8"))
        say.print(f"plots: {shown(str(html))}")
    if as_json:
        print_json({"runs": [asdict(r) for r in trend.runs], "canaries": [asdict(c) for c in trend.canaries],
                    "findings": [asdict(f) for f in trend.findings], "alarms": [asdict(a) for a in trend.alarms],
                    "gaps": [gap._asdict() for gap in gaps], "since": start,
                    "baseline": accepted.at if accepted else None,
                    "outdated": {c.id: c.changed for c in source.watched.canaries if c.outdated}})  # fmt: skip
    else:
        _show_trend(source, everything)
        _show_gaps(gaps)
    unreachable = trend.state.unanswered_runs >= ERRORS_IN_A_ROW
    raise typer.Exit(Code.FAILED if unreachable or any(c.alarmed for c in trend.canaries) else Code.OK)


@canary.command("alerts")
def alerts_command(
    config: ConfigFile = None,
    ack: Annotated[str, typer.Option(help="Acknowledge the alert with this id.")] = "",
    close: Annotated[str, typer.Option(help="Close the alert with this id, if it does not recover by itself.")] = "",
    reason: Annotated[str, typer.Option(help="Reason for closing it.")] = "resolved",
    by: Annotated[str, typer.Option(help="Who acknowledges or closes it.")] = "operator",
    test: Annotated[
        bool, typer.Option("--test", help="Only send a test notification to every channel. Exit code 1 if one fails.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the open alerts; acknowledge or close one. Exit code 1 if one is not acknowledged."""
    with open_app(config) as app:
        if test:
            raise typer.Exit(_test_channels(open_alert_dispatcher(app), as_json))
        if ack:
            acknowledge_alert(app.store, ack, by, datetime.now(UTC))
        if close:
            close_alert(app.store, close, f"Closed by {by}: {reason}", datetime.now(UTC))
        states, keys = open_alerts(app.store), ApiKeyStore(app.store)
        keys.sync()
        names = keys.names()
    if as_json:
        print_json([asdict(s.alert) | {"acknowledged": s.acknowledged, "opened": s.opened} for s in states])
    else:
        _show_alerts(states, names)
    raise typer.Exit(Code.FAILED if any(not s.acknowledged for s in states) else Code.OK)


def _test_channels(dispatcher: AlertDispatcher, as_json: bool) -> int:
    """Sends a test notification through every channel, shows the outcomes, and returns the exit code."""
    if not dispatcher.channels:
        raise ConfigError("no channel is configured; set monitor.channels in casemate.yaml")
    reasons = asyncio.run(dispatcher.send_test())
    if as_json:
        print_json({"channels": [{"name": n, "delivered": not why, "reason": why} for n, why in reasons.items()]})
    for name, why in () if as_json else reasons.items():
        outcome = f"[red]FAILED[/red]: {shown(why)}" if why else "[green]delivered[/green]"
        out.print(f"{shown(name)}: {outcome}")
    return Code.FAILED if any(reasons.values()) else Code.OK


@canary.command("schema")
def schema_command() -> None:
    """Print the JSON schema of a canary file, for an editor."""
    print_json(canary_json_schema())


def _run_json(
    monitor: CanaryMonitor, analysis: RunAnalysis, results: dict[str, CanaryResult], status: CanaryStatus
) -> dict[str, Any]:
    rows = [asdict(r) for r in results.values()]
    for row in rows if not monitor.app.config.privacy.log_text else ():
        del row["text"]
    return {
        "run": analysis.run,
        "status": status,
        "failed": analysis.failed,
        "errors": analysis.errors,
        "p_value": analysis.p_value,
        "baseline": dict(zip(("asked", "failed"), baseline_counts(monitor.watched_set()), strict=True)),
        "alarmed": analysis.alarmed,
        "recovered": analysis.recovered,
        "results": rows,
    }


def _show_run(
    monitor: CanaryMonitor, analysis: RunAnalysis, results: dict[str, CanaryResult], status: CanaryStatus
) -> None:
    counted = shown(f"{monitor.set.name}: {_describe_counts(results, analysis.failed)}")
    out.print(f"[{STYLES[status]} bold]{status.value.upper()}[/]  {counted}")
    _show_failures([r for r in results.values() if r.status is not CanaryStatus.PASS])
    if analysis.failed:
        out.print(_comparison(monitor.watched_set(), analysis))
    _show_notes(monitor)
    still = [i for i, c in analysis.state.canaries.items() if c.alarmed and i not in analysis.alarmed]
    changes: dict[str, Sequence[str]] = {
        "alarmed": analysis.alarmed,
        "still alarmed": still,
        "recovered": analysis.recovered,
    }
    for what, ids in changes.items():
        if ids:
            out.print(shown(f"{what}: {', '.join(ids)}"))


def _describe_counts(results: Mapping[str, CanaryResult], failed_first: Collection[str]) -> str:
    """Counts the last results. Names canaries that passed only when repeated: the trend counts their first answers."""
    counts = {s: sum(r.status is s for r in results.values()) for s in CanaryStatus}
    passed, failed, errors = (counts[s] for s in (CanaryStatus.PASS, CanaryStatus.FAIL, CanaryStatus.ERROR))
    late = [i for i, r in results.items() if r.status is CanaryStatus.PASS and i in failed_first]
    how = f"{passed} passed"
    if late:
        how = f"{passed - len(late)} passed at once, {len(late)} after a repetition ({', '.join(late)})"
    return f"{how}, {failed} failed, {errors} without a verdict"


def _comparison(watched: WatchedSet, analysis: RunAnalysis) -> str:
    """What the failures of a run are compared with, and how probable as many are by chance."""
    asked, failed = baseline_counts(watched)
    if not asked:
        return "no baseline yet, so it is unknown how many failures are normal; run 'casemate canary baseline'"
    share, about = sample_rate(failed, asked)
    odds = f"; probability of as many new failures in the whole set by chance: {analysis.p_value:.2g}"
    odds += "; each canary is also tested by itself"
    return f"baseline: {share} of the answers failed ({about}){odds if analysis.p_value < 1 else ''}"


def _show_failures(failures: Sequence[CanaryResult]) -> None:
    if not failures:
        return
    table = Table(Column("canary", overflow="fold"), "status", "reason")
    for r in sorted(failures, key=lambda r: r.canary):
        reasons = [r.error] if r.error else [f"{d.kind}: {d.message}" for d in r.deviations]
        table.add_row(shown(r.canary), f"[{STYLES[r.status]}]{r.status.value}[/]", shown("\n".join(reasons)))
    out.print(table)


def _show_notes(monitor: CanaryMonitor) -> None:
    unmeasured = [c.id for c in monitor.watched_set().canaries if not c.flakes.asked]
    if unmeasured:
        note(
            f"{len(unmeasured)} canaries have no baseline, so each is assumed to fail often: "
            f"an alert needs more failures; {_baseline_advice(monitor, unmeasured)}"
        )
    if outdated := [c for c in monitor.watched_set().canaries if c.outdated]:
        note(_describe_outdated(outdated))


def _baseline_advice(monitor: CanaryMonitor, unmeasured: Collection[str]) -> str:
    """The command that gives these canaries a baseline: to accept the latest one, if it measured one of them."""
    found = list(recorded_baselines(monitor.app.store, monitor.set))
    latest = found[-1] if found else None
    if latest and any(latest.of(c) for c in monitor.set.canaries if c.id in unmeasured):
        return f"accept the one that is recorded: casemate canary baseline --accept {latest.id}"
    return "run 'casemate canary baseline'"


def _describe_outdated(canaries: Sequence[WatchedCanary]) -> str:
    """Names outdated canaries, each with the first of its changed documents."""
    named = []
    for canary in canaries:
        more = f", and {len(canary.changed) - SHOWN} more" if len(canary.changed) > SHOWN else ""
        named.append(shown(f"{canary.id} ({', '.join(canary.changed[:SHOWN])}{more})"))
    why = "documents that they depend on were changed or removed; they do not alert until another baseline is accepted"
    return f"{', '.join(named)}: {why}"


def _say_run(analysis: RunAnalysis) -> None:
    at = analysis.at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    more = f"; alarmed: {', '.join(analysis.alarmed)}" if analysis.alarmed else ""
    more += f"; recovered: {', '.join(analysis.recovered)}" if analysis.recovered else ""
    counts = f"{analysis.judged} with a verdict, {len(analysis.failed)} failed, {analysis.errors} without an answer"
    say.print(shown(f"{at}  {counts}{more}"))


def _say_leader_change(is_leader: bool) -> None:
    say.print("this process is the leader" if is_leader else "standing by; another process is the leader")


def _show_trend(source: TrendSource, everything: bool) -> None:
    trend, accepted = source.trend, source.baseline
    outdated = [c for c in source.watched.canaries if c.outdated]
    hidden = set() if everything else {c.id for c in outdated}
    since = f"since the baseline of {_minute(accepted.at)}" if accepted else "in this period"
    if not trend.runs:
        earlier = "; --all shows earlier ones" if accepted else ""
        out.print(f"no runs {since}; run 'casemate canary run'{earlier}")
    else:
        silent = sum(not run.judged for run in trend.runs)
        first, last = (_minute(run.at) for run in (trend.runs[0], trend.runs[-1]))
        out.print(f"runs: {len(trend.runs)}, from {first} to {last}; without any answer: {silent}")
        _show_baseline_note(source)
        _show_canaries([line for line in trend.canaries if line.canary not in hidden])
    for finding in [f for f in trend.findings if not f.canaries or {*f.canaries} - hidden][-20:]:
        mark = "[red]alert[/red]" if finding.alerts else "[dim]info[/dim]"
        out.print(f"{_minute(finding.at)} {mark} {shown(finding.message)}")
    if outdated:
        kept = "" if everything else "not shown without --all: "
        out.print(f"[yellow]outdated:[/yellow] {kept}{_describe_outdated(outdated)}")


def _show_baseline_note(source: TrendSource) -> None:
    """Says which runs the baseline in force does not belong to, and which canaries were edited since it."""
    if (accepted := source.baseline) is None:
        return
    if older := sum(run.at < accepted.at for run in source.trend.runs):
        what = f"{older} of them are older than the baseline of {_minute(accepted.at)}, which they are judged by"
        out.print(what)
    else:
        out.print(f"since the baseline of {_minute(accepted.at)}; --all shows runs before it")
    edited = [c.id for c in source.canaries.values() if c.id in accepted.canaries and accepted.of(c) is None]
    if edited:
        what = "edited since the baseline, so earlier runs asked or expected something else"
        out.print(f"[yellow]edited:[/yellow] {shown(', '.join(edited))}: {what}")


def _show_canaries(lines: Sequence[CanarySummary]) -> None:
    lines = sorted(lines, key=lambda c: (not c.alarmed, -c.evidence))
    since = [line.since.astimezone().strftime("%m-%d %H:%M") if line.since else "" for line in lines]
    columns = {
        "canary": [f"[red]{shown(line.canary)}[/red]" if line.alarmed else shown(line.canary) for line in lines],
        "last runs": [line.recent for line in lines],
        "failed": [f"{line.failed} of {line.judged}" for line in lines],
        **({"since": since} if any(since) else {}),
        **({"no answer": [str(line.errors) for line in lines]} if any(line.errors for line in lines) else {}),
        "baseline": [_baseline_failures(line) for line in lines],
        "evidence": ["alarmed" if line.alarmed else f"{line.evidence:.3g}" for line in lines],
    }
    whole = {"last runs", "failed", "since"}  # the latest must stay visible
    table = Table(*(Column(name, no_wrap=name in whole, overflow="fold") for name in columns))
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    out.print(table)
    out.print(EVIDENCE)


def _minute(at: datetime) -> str:
    return at.astimezone().strftime("%Y-%m-%d %H:%M")


def _baseline_failures(line: CanarySummary) -> str:
    """Failures in the baseline, with the 95 % interval of the flake rate if there is one."""
    if line.flake_rate is None:
        return "no baseline"
    interval = f" [{number(line.flake_rate.low)}, {number(line.flake_rate.high)}]" if line.flakes.failed else ""
    return f"{line.flakes.failed} of {line.flakes.asked}{interval}"


def _show_gaps(gaps: Sequence[ScheduleGap]) -> None:
    for gap in gaps[-5:]:
        first, last = _minute(gap.first), _minute(gap.last)
        when = f"of {first}" if gap.slots == 1 else f"from {first} to {last}"
        still = "" if gap.recorded else "; no process is watching: run 'casemate canary watch'"
        runs = "1 run" if gap.slots == 1 else f"{gap.slots} runs"
        out.print(f"[yellow]missed:[/yellow] {runs} {when}{still}")


def _show_alerts(states: Sequence[AlertState], key_names: Mapping[str, str]) -> None:
    if not states:
        out.print("no open alerts")
    for s in states:
        acknowledged = f"\n\nAcknowledged by {s.acknowledged}." if s.acknowledged else ""
        out.print(shown(f"{render_alert(s.alert, s.phase, key_names).plain}{acknowledged}\n"))
