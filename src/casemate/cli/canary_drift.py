"""``canary drift|shadow|corpus``: whether answers, traffic, two states of a system, or the vectors have changed."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.table import Table

from casemate import config as configuration
from casemate.app import App, open_app
from casemate.canaries import Canaries, watched_questions
from casemate.cli.canary import canary, opened, span
from casemate.cli.canary_set import named
from casemate.cli.console import (
    ERROR,
    FAILED,
    INCOMPLETE,
    OK,
    ConfigFile,
    Json,
    Tenant,
    out,
    print_json,
    questions_in,
    say,
    shown,
)
from casemate.monitor.alerts import drifted
from casemate.monitor.alerts.alert import Alert, raise_alert
from casemate.monitor.drift import moments
from casemate.monitor.drift.moments import Audit, Move, Shift
from casemate.monitor.drift.shadow import Shadow, shadow_diff
from casemate.monitor.drift.traffic import Observation, Reading, by_run, by_time, drift, flags
from casemate.monitor.trends import baseline, trend
from casemate.types import DEFAULT_TENANT

BACK = "30d"
Windows: TypeAlias = Sequence[Sequence[Observation]]
Readings: TypeAlias = Mapping[str, Sequence[Sequence[Reading]]]
Alerting = Annotated[bool, typer.Option("--alert", help="Open an alert if it fails, unless the same is open.")]


@canary.command("drift")
def show_drift(
    since: Annotated[
        str, typer.Option(help="How far back, such as 30d. Default: to the accepted baseline, else 30d.")
    ] = "",
    reference: Annotated[int, typer.Option(min=2, help="How many windows, from the first, are known to be good.")] = 7,
    window: Annotated[str, typer.Option(help="A window of traffic. Traffic has weekdays: 1d or 7d.")] = "1d",
    alert: Alerting = False,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Have answers to canaries, or the traffic, drifted? Exit codes: 0 no, 1 yes, 3 too little to say."""
    with opened(config, tenant) as found:
        start = datetime.now(UTC) - span(since or BACK)
        known = baseline.load(found.app.store, found.set)
        start = known.at if known and not since else start
        series = _series(found, start, span(window).total_seconds())
        readings = _judged(found.app, series, reference)
        alarms = {name: _alarms(series[name][reference:], steps) for name, steps in readings.items()}
        for name, some in alarms.items():
            if some and alert:
                _raise(found.app, drifted.behaviour(found.set.name, name, some[-1][1], some[-1][0]))
    counts = {name: len(windows) for name, windows in series.items()}
    if as_json:
        told = {name: [[asdict(r) for r in step] for step in steps] for name, steps in readings.items()}
        print_json({"since": start, "reference": reference, "windows": counts, "readings": told})
    else:
        _show_drift(readings, counts, reference)
    raise typer.Exit(FAILED if any(alarms.values()) else OK if readings else INCOMPLETE)


@canary.command("shadow")
def replay(
    first: Annotated[str, typer.Argument(help="The state before: `own`, `bare`, or a configuration file.")],
    second: Annotated[str, typer.Argument(help="The state after: the same.")],
    questions: Annotated[
        Path | None, typer.Option("--from", help="File of questions. Default: the canaries', and made ones.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Questions that are asked, at most.")] = 200,
    tolerance: Annotated[float, typer.Option(min=0.001, max=0.999, help="Share of answers that may flip.")] = 0.05,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Ask two states the same questions. Exit codes: 0 few answers flip, 1 many, 2 no answers, 3 too few to say."""
    with ExitStack() as stack:
        app = stack.enter_context(open_app(configuration.read(config)))
        asked = questions_in(questions)[:count] if questions else watched_questions(app, tenant, (), count)
        targets = [named(name, app, stack) for name in (first, second)]
        with say.status(f"asking both {len(asked)} questions"):
            done = asyncio.run(
                shadow_diff(
                    asked,
                    *targets,
                    k=app.config.rag.k,
                    tenant=tenant,
                    embedder=app.guard.rag.embedder,
                    concurrency=app.config.monitor.concurrency,
                    timeout_s=app.config.monitor.timeout_s,
                )
            )
    share = done.share if done.asked else None
    if as_json:
        print_json(asdict(done) | {"share": share._asdict() if share else None, "tolerance": tolerance})
    else:
        _show_shadow(done)
    if share is None:
        raise typer.Exit(ERROR)
    raise typer.Exit(OK if share.high <= tolerance else FAILED if share.low > tolerance else INCOMPLETE)


@canary.command("corpus")
def check_corpus(
    sample: Annotated[int, typer.Option("--audit", min=0, help="Documents that are embedded anew and compared.")] = 200,
    removed: Annotated[
        int | None, typer.Option(min=0, help="Documents that went or were replaced since the last time.")
    ] = None,
    accept: Annotated[
        bool, typer.Option("--accept", help="Compare with what is now the next time, in any case.")
    ] = False,
    alert: Alerting = False,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Are the vectors those of the texts, and have they moved? Exit codes: 0 all is well, 1 no, 3 a question to you."""
    with open_app(configuration.read(config)) as app, say.status("reading vectors"):
        now = datetime.now(UTC)
        embedder, seed = app.guard.rag.embedder, secrets.randbits(32)
        after = moments.read(app.index, tenant, now, embedder.fingerprint)
        before = next((r for r in moments.readings(app.store, tenant)[::-1] if len(r.mean) == len(after.mean)), None)
        audit = moments.audit(app.index, embedder, count=sample, tenant=tenant, seed=seed) if sample else None
        move, shift = moments.moved(before, after, removed) if before else (None, None)
        wrong = drifted.corpus(tenant, move, audit, now)
        if accept or not wrong:  # else what is wrong would be the norm the next time
            app.store.append(moments.to_event(after))
        if wrong and alert:
            _raise(app, wrong)
    if as_json:
        facts = {"documents": after.n, "since": before.at if before else None, "move": move}
        checked = {**asdict(audit), "at_most": audit.at_most, "seed": seed} if audit else None
        print_json({**facts, "shift": asdict(shift) if shift else None, "audit": checked})
    else:
        _show_corpus(before.at if before else None, move, shift, audit)
    sure = move in {Move.NONE, Move.LIKE} and audit is not None
    raise typer.Exit(FAILED if wrong else OK if sure else INCOMPLETE)


def _series(found: Canaries, start: datetime, seconds: float) -> dict[str, Windows]:
    """What canaries and traffic showed since a time, in windows."""
    store, client = found.app.store, found.app.config.monitor.client
    own = client.partition("{")[0] or "canary"
    asked = by_run(trend.read(store, found.set.name, start))
    return {"canaries": asked, "traffic": by_time(flags(store.scan("verdict", start), (own, "shadow")), seconds)}


def _judged(app: App, series: Mapping[str, Windows], reference: int) -> Readings:
    """Of each series that is long enough, the signals of each window after the reference."""
    budget, seed = app.config.monitor.false_alerts, app.config.calibrate.seed
    return {
        name: drift(windows, reference, paired=name == "canaries", budget=budget, seed=seed)
        for name, windows in series.items()
        if len(windows) > reference
    }


def _alarms(windows: Windows, steps: Sequence[Sequence[Reading]]) -> list[tuple[datetime, list[Reading]]]:
    """When each window that alarms began, and its signals that do."""
    found = ((min(o.at for o in w), [r for r in step if r.alarm]) for w, step in zip(windows, steps, strict=True))
    return [(at, some) for at, some in found if some]


def _raise(app: App, alert: Alert) -> None:
    if raise_alert(app.store, alert, alert.since):
        say.print(f"opened the alert {shown(alert.id)}")


def _show_drift(readings: Readings, counts: dict[str, int], reference: int) -> None:
    for name, count in counts.items():
        if name not in readings:
            out.print(f"{name}: {count} windows are too few; {reference} are the reference, and one at least is judged")
    table = Table("of", "signal", "usual", "last", "evidence", "alarms in windows")
    for name, steps in readings.items():
        for signal in dict.fromkeys(r.signal for step in steps for r in step):
            some = [(i, r) for i, step in enumerate(steps, reference + 1) for r in step if r.signal == signal]
            last, alarms = some[-1][1], [str(i) for i, r in some if r.alarm]
            red = f"[red]{', '.join(alarms)}[/red]"
            table.add_row(name, signal, f"{last.usual:.3g}", f"{last.value:.3g}", f"{last.evidence:.3g}", red)
    if readings:
        out.print(table)
    alarming = (r for steps in readings.values() for step in steps for r in step if r.alarm)
    if documents := dict.fromkeys(d for r in alarming for d in r.documents):
        out.print(f"in more answers than before: {shown(', '.join(documents))}", soft_wrap=True)


def _show_shadow(done: Shadow) -> None:
    if not done.asked:
        out.print(f"none of {done.errors} questions was answered by both")
        return
    share = done.share
    said = f"{len(done.flips)} of {done.asked} answers flipped, {share.value:.1%} [{share.low:.1%}, {share.high:.1%}]"
    out.print(f"{said}; {done.errors} without an answer; overlap of the contexts {done.overlap:.2f}", markup=False)
    for suspect in [s for s in done.suspects if s.flips][:10]:
        what = f"came into {suspect.entered} contexts, of which {suspect.flips} flipped"
        out.print(f"{shown(suspect.document)}: {what}", soft_wrap=True)
    if done.unexplained:
        out.print(f"{done.unexplained} flips without a new document in the context")


def _show_corpus(since: datetime | None, move: Move | None, shift: Shift | None, audit: Audit | None) -> None:
    if move is None or since is None:
        out.print("noted how the vectors lie; the next time is compared with it")
    else:
        out.print(f"since {since.astimezone():%Y-%m-%d %H:%M}: {move.value}")
    if shift:
        moved = f"moved {shift.distance:.3g}, expected {shift.expected:.3g}"
        out.print(f"{shift.added} came, {shift.removed} went; {moved}")
    if audit:
        out.print(f"{audit.checked} of {audit.held} embedded anew: {len(audit.wrong)} have other vectors", end="")
        out.print(f"; with 95 % confidence, at most {audit.at_most} of all have")
        for document, cosine in audit.wrong[:10]:
            out.print(f"{shown(document)}: cosine {cosine:.4f}", soft_wrap=True)
