"""``canary``: known questions, asked now or on a schedule, and what their answers show."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from casemate import config as configuration
from casemate.app import App, open_app
from casemate.canaries import Canaries, open_canaries
from casemate.cli.console import (
    ERROR,
    FAILED,
    INTERRUPTED,
    OK,
    ConfigFile,
    Json,
    Tenant,
    bar,
    out,
    print_json,
    say,
    shown,
)
from casemate.monitor.alerts.alert import Standing, acknowledge, close, open_alerts
from casemate.monitor.alerts.wording import render
from casemate.monitor.canaries.canary import interval, schema
from casemate.monitor.canaries.results import Result, Run, Status
from casemate.monitor.trends.gauges import Step
from casemate.monitor.trends.trend import Trend
from casemate.monitor.watch.schedule import Gap
from casemate.types import DEFAULT_TENANT

canary = typer.Typer(help="Ask known questions, and notice when the answers change.", no_args_is_help=True)
CODES = {Status.PASS: OK, Status.FAIL: FAILED, Status.ERROR: ERROR}
STYLES = {Status.PASS: "green", Status.FAIL: "red", Status.ERROR: "yellow"}


@contextmanager
def opened(config: Path | None, tenant: str) -> Iterator[Canaries]:
    """The configured canaries, while they are needed; it says on stderr which they are, and who is asked."""
    with open_app(configuration.read(config)) as app:
        found = open_canaries(app, tenant)
        whom = app.config.monitor.target.use
        say.print(f"{len(found.set.canaries)} canaries of {shown(str(found.file))}; target: {whom}", soft_wrap=True)
        yield found


def span(text: str) -> timedelta:
    """An interval that was given as an option."""
    try:
        return interval(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@canary.command("run")
def run_canaries(config: ConfigFile = None, tenant: Tenant = DEFAULT_TENANT, as_json: Json = False) -> None:
    """Ask all canaries now. Exit codes: 0 all passed, 1 some failed, 2 some could not be judged."""
    with opened(config, tenant) as found:
        results: dict[str, Result] = {}
        with bar() as progress:
            task = progress.add_task("asking", total=len(found.set.canaries))

            def hear(result: Result) -> None:
                progress.advance(task, result.canary not in results)
                results[result.canary] = result

            found.heard.append(hear)
            step = asyncio.run(found.run())
        status = Run(step.run, tuple(results.values())).status
        if as_json:
            print_json(_run_json(found.app, step, results, status))
        else:
            _show_run(found, step, results, status)
    raise typer.Exit(CODES[status])


@canary.command("watch")
def watch_canaries(config: ConfigFile = None, tenant: Tenant = DEFAULT_TENANT) -> None:
    """Ask canaries as they fall due, and alert. Any number of processes may: one leads, the others stand by."""
    with opened(config, tenant) as found:
        told = ", ".join(c.name for c in found.channels) or "nobody: monitor.channels is empty"
        say.print(f"asked every {found.app.config.monitor.every}; alerts go to {shown(told)}", soft_wrap=True)
        try:
            asyncio.run(found.watch(_say_step, _say_lead))
        except KeyboardInterrupt:
            say.print("ended; what was begun is finished by whoever watches next")
            raise typer.Exit(INTERRUPTED) from None


@canary.command("trend")
def show_trend(
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    since: Annotated[str, typer.Option(help="How far back, such as 12h or 30d.")] = "30d",
    as_json: Json = False,
) -> None:
    """How each canary has fared, and what that means. Exit code 1 if one is alarming, or the target does not answer."""
    start = datetime.now(UTC) - span(since)
    with opened(config, tenant) as canaries:
        found, gaps = canaries.trend(start), canaries.gaps(start)
    if as_json:
        print_json({"runs": [asdict(r) for r in found.runs], "canaries": [asdict(c) for c in found.canaries],
                    "findings": [asdict(f) for f in found.findings],
                    "gaps": [gap._asdict() for gap in gaps]})  # fmt: skip
    else:
        _show_trend(found)
        _show_gaps(gaps)
    down = found.state.down >= canaries.limits.errors
    raise typer.Exit(FAILED if down or any(c.alarmed for c in found.canaries) else OK)


@canary.command("alerts")
def show_alerts(
    config: ConfigFile = None,
    ack: Annotated[str, typer.Option(help="Acknowledge the alert with this id.")] = "",
    end: Annotated[
        str, typer.Option("--close", help="Close the alert with this id: one that does not end itself.")
    ] = "",
    why: Annotated[str, typer.Option(help="Why it is closed.")] = "seen to",
    by: Annotated[str, typer.Option(help="Who acknowledges or closes.")] = "operator",
    as_json: Json = False,
) -> None:
    """List the open alerts, acknowledge or close one. Exit code 1 if any is open that nobody has acknowledged."""
    with open_app(configuration.read(config)) as app:
        if ack:
            acknowledge(app.store, ack, by, datetime.now(UTC))
        if end:
            close(app.store, end, f"closed by hand by {by}: {why}", datetime.now(UTC))
        standing = open_alerts(app.store)
    if as_json:
        print_json([asdict(s.alert) | {"acknowledged": s.acknowledged, "opened": s.opened} for s in standing])
    else:
        _show_alerts(standing)
    raise typer.Exit(FAILED if any(not s.acknowledged for s in standing) else OK)


@canary.command("schema")
def print_schema() -> None:
    """Print the JSON schema of canaries.yaml, for an editor."""
    print_json(schema())


def _run_json(app: App, step: Step, results: dict[str, Result], status: Status) -> dict[str, Any]:
    rows = [asdict(r) for r in results.values()]
    for row in rows if not app.config.privacy.log_text else ():
        del row["text"]
    facts = {"run": step.run, "status": status, "failed": step.failed, "errors": step.errors, "chance": step.chance}
    return {**facts, "alarmed": step.alarmed, "recovered": step.recovered, "results": rows}


def _show_run(found: Canaries, step: Step, results: dict[str, Result], status: Status) -> None:
    counts = {s: sum(r.status is s for r in results.values()) for s in Status}
    said = f"{counts[Status.PASS]} passed, {counts[Status.FAIL]} failed, {counts[Status.ERROR]} could not be judged"
    out.print(f"[{STYLES[status]} bold]{status.value.upper()}[/]  {shown(found.set.name)}: {said}")
    wrong = [r for r in results.values() if r.status is not Status.PASS]
    if wrong:
        table = Table(Column("canary", overflow="fold"), "", "why")
        for r in sorted(wrong, key=lambda r: r.canary):
            why = [r.error] if r.error else [f"{d.kind}: {d.message}" for d in r.deviations]
            table.add_row(shown(r.canary), f"[{STYLES[r.status]}]{r.status.value}[/]", shown("\n".join(why)))
        out.print(table)
    if step.chance < 1:
        out.print(f"As many failures come by chance in {step.chance:.2g} of runs, by the baselines.")
    unmeasured = [k.id for k in found.watched.canaries if not k.clean.asked]
    if unmeasured:
        say.print(
            f"[yellow]note:[/yellow] {len(unmeasured)} canaries have no baseline, so their failures weigh little; "
            "'casemate canary baseline' records one"
        )
    if found.aside:
        names = shown(", ".join(found.aside))
        say.print(
            f"[yellow]note:[/yellow] {names}: you replaced what they rest on, so they page nobody until another "
            "baseline is accepted"
        )
    still = [i for i, gauge in step.state.gauges.items() if gauge.alarmed and i not in step.alarmed]
    told: dict[str, Sequence[str]] = {"alarming": step.alarmed, "still alarming": still, "well again": step.recovered}
    for what, ids in told.items():
        if ids:
            out.print(shown(f"{what}: {', '.join(ids)}"), soft_wrap=True)


def _say_step(step: Step) -> None:
    at = step.at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    more = f"; alarming: {', '.join(step.alarmed)}" if step.alarmed else ""
    more += f"; well again: {', '.join(step.recovered)}" if step.recovered else ""
    say.print(shown(f"{at}  asked {step.asked}, failed {len(step.failed)}, without an answer {step.errors}{more}"))


def _say_lead(leads: bool) -> None:
    say.print("leading" if leads else "standing by")


def _show_trend(found: Trend) -> None:
    if not found.runs:
        out.print("nothing was asked in this time; 'casemate canary run' asks now")
        return
    silent = sum(not run.judged for run in found.runs)
    first, last = (run.at.astimezone().strftime("%Y-%m-%d %H:%M") for run in (found.runs[0], found.runs[-1]))
    out.print(f"runs: {len(found.runs)}, from {first} to {last}; without any answer: {silent}")
    whole = [Column(name, no_wrap=True) for name in ("last runs", "failed", "since")]  # the newest must not be cut off
    table = Table(Column("canary", overflow="fold"), *whole, "no answer", "flake rate", "evidence")
    for line in sorted(found.canaries, key=lambda c: (not c.alarmed, -c.evidence)):
        since = line.since.astimezone().strftime("%m-%d %H:%M") if line.since else ""
        name = f"[red]{shown(line.canary)}[/red]" if line.alarmed else shown(line.canary)
        failed = f"{line.failed} of {line.judged}"
        table.add_row(name, line.recent, failed, since, str(line.errors), f"{line.flake:.3f}", f"{line.evidence:.3g}")
    out.print(table)
    for finding in found.findings[-20:]:
        at = finding.at.astimezone().strftime("%Y-%m-%d %H:%M")
        mark = "[red]alert[/red]" if finding.pages else "[dim]noted[/dim]"
        out.print(f"{at} {mark} {shown(finding.message)}", soft_wrap=True)


def _show_gaps(gaps: Sequence[Gap]) -> None:
    for gap in gaps[-5:]:
        first, last = (at.astimezone().strftime("%Y-%m-%d %H:%M") for at in (gap.first, gap.last))
        when = f"of {first}" if gap.slots == 1 else f"from {first} to {last}"
        still = "" if gap.noted else "; nobody watches now: casemate canary watch"
        runs = "1 run" if gap.slots == 1 else f"{gap.slots} runs"
        out.print(f"[yellow]not made:[/yellow] {runs} {when}{still}", soft_wrap=True)


def _show_alerts(standing: Sequence[Standing]) -> None:
    if not standing:
        out.print("no alert is open")
    for s in standing:
        seen = f"\n\nAcknowledged by {s.acknowledged}." if s.acknowledged else ""
        out.print(shown(f"{render(s.alert, s.phase).plain}{seen}\n"), soft_wrap=True)
