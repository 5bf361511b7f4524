"""``canary drift|shadow|corpus``: have answers, traffic, two states of a system, or the vectors changed?"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.table import Table

from casemate.app import open_app
from casemate.cli.canary import canary, opened_monitor, parse_span
from casemate.cli.canary_set import open_named_target
from casemate.cli.console import Code, ConfigFile, Json, Tenant, out, print_json, say, shown
from casemate.monitor.alerts.alert import Alert, raise_alert
from casemate.monitor.alerts.rules import corpus_alert, drift_alert
from casemate.monitor.drift import corpus_drift
from casemate.monitor.drift.answer_drift import (
    DriftReading,
    Observation,
    detect_drift,
    observations_of_verdicts,
    windows_by_run,
    windows_by_time,
)
from casemate.monitor.drift.corpus_drift import CorpusChange, MeanShift, VectorAudit
from casemate.monitor.drift.shadow import ShadowDiff, shadow_diff
from casemate.monitor.service import CanaryMonitor, watched_questions
from casemate.monitor.trends.baseline import load_baseline, updated_sources
from casemate.monitor.trends.trend import read_results
from casemate.rag.question_file import questions_in
from casemate.reports.format import measured
from casemate.system import App
from casemate.types import DEFAULT_TENANT

LOOK_BACK = "30d"
Windows: TypeAlias = Sequence[Sequence[Observation]]
Alerting = Annotated[bool, typer.Option("--alert", help="Open an alert on failure, unless the same one is open.")]


@canary.command("drift")
def drift_command(
    since: Annotated[
        str, typer.Option(help="How far back, such as 30d. Default: since the accepted baseline, else 30d.")
    ] = "",
    reference: Annotated[int, typer.Option(min=2, help="Number of windows, from the first, without a problem.")] = 7,
    window: Annotated[str, typer.Option(help="Length of a window of traffic; use 1d or 7d for weekly cycles.")] = "1d",
    alert: Alerting = False,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Test whether answers to canaries, or traffic, drifted. Exit codes: 0 no, 1 yes, 3 too few windows."""
    with opened_monitor(config, tenant) as monitor:
        start = datetime.now(UTC) - parse_span(since or LOOK_BACK)
        accepted = load_baseline(monitor.app.store, monitor.set)
        start = accepted.at if accepted and not since else start
        drift = DriftTest.of(monitor.app, _series(monitor, start, parse_span(window).total_seconds()), reference)
        if alert:
            drift.raise_alerts(monitor.app, monitor.set.name, tenant, start)
    if as_json:
        print_json({"since": start, "reference": reference, **drift.as_json()})
    else:
        drift.show()
    raise typer.Exit(drift.exit_code)


@canary.command("shadow")
def shadow_command(
    first: Annotated[str, typer.Argument(help="State before: `own`, `bare`, or a configuration file.")],
    second: Annotated[str, typer.Argument(help="State after, in the same form.")],
    questions: Annotated[
        Path | None, typer.Option("--from", help="File of questions. Default: those of canaries, and synthetic ones.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Maximum number of questions.")] = 200,
    tolerance: Annotated[float, typer.Option(min=0.001, max=0.999, help="Share of answers that may flip.")] = 0.05,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Ask two states the same questions. Exit codes: 0 few answers flip, 1 too many, 2 no answers, 3 inconclusive."""
    with ExitStack() as stack:
        app = stack.enter_context(open_app(config))
        asked = questions_in(questions)[:count] if questions else watched_questions(app, tenant, count)
        before, after = (open_named_target(name, app, stack) for name in (first, second))
        with say.status(f"asking both states {len(asked)} questions"):
            diff = asyncio.run(
                shadow_diff(
                    asked,
                    before,
                    after,
                    k=app.config.rag.k,
                    tenant=tenant,
                    embedder=app.guard.rag.embedder,
                    concurrency=app.config.monitor.concurrency,
                    timeout_s=app.config.monitor.timeout_s,
                )
            )
    share = diff.share if diff.asked else None
    if as_json:
        print_json(asdict(diff) | {"share": share._asdict() if share else None, "tolerance": tolerance})
    else:
        _show_shadow(diff)
    if share is None:
        raise typer.Exit(Code.ERROR)
    raise typer.Exit(Code.OK if share.high <= tolerance else Code.FAILED if share.low > tolerance else Code.INCOMPLETE)


@canary.command("corpus")
def corpus_command(
    sample: Annotated[int, typer.Option("--audit", min=0, help="Documents that are re-embedded and compared.")] = 200,
    removed: Annotated[
        int | None, typer.Option(min=0, help="Documents removed or replaced since the last check.")
    ] = None,
    accept: Annotated[
        bool, typer.Option("--accept", help="Use the current vectors as the reference for the next check.")
    ] = False,
    alert: Alerting = False,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Check that vectors match their texts and have not moved. Exit codes: 0 yes, 1 no, 3 needs your decision."""
    with open_app(config) as app, say.status("reading vectors"):
        now = datetime.now(UTC)
        embedder, seed = app.guard.rag.embedder, secrets.randbits(32)
        after = corpus_drift.read_snapshot(app.index, tenant, now, embedder.fingerprint)
        snapshots = corpus_drift.load_snapshots(app.store, tenant)
        before = next((s for s in snapshots[::-1] if len(s.mean) == len(after.mean)), None)
        audit = None
        if sample:
            audit = corpus_drift.audit_vectors(app.index, embedder, count=sample, tenant=tenant, seed=seed)
        change, shift = corpus_drift.classify_change(before, after, removed) if before else (None, None)
        found = corpus_alert(tenant, change, audit, now)
        if accept or not found:  # otherwise the wrong state would be the next reference
            app.store.append(corpus_drift.snapshot_to_event(after))
        if found and alert:
            _raise(app, found)
    if as_json:
        checked = {**asdict(audit), "max_wrong": audit.max_wrong, "seed": seed} if audit else None
        facts = {"documents": after.n, "since": before.at if before else None, "change": change}
        print_json({**facts, "shift": asdict(shift) if shift else None, "audit": checked})
    else:
        _show_corpus(before.at if before else None, change, shift, audit)
    passed = change in {CorpusChange.NONE, CorpusChange.EXPECTED} and audit is not None
    raise typer.Exit(Code.FAILED if found else Code.OK if passed else Code.INCOMPLETE)


def _series(monitor: CanaryMonitor, start: datetime, seconds: float) -> dict[str, Windows]:
    """Windows of canaries and traffic since a time."""
    store = monitor.app.store
    prefix = monitor.runner.client.partition("{")[0] or "canary"
    verdicts = observations_of_verdicts(store.scan("verdict", start), (prefix, "shadow"))
    return {
        "canaries": windows_by_run(read_results(store, monitor.set.name, start)),
        "traffic": windows_by_time(verdicts, seconds, datetime.now(UTC)),
    }


@dataclass(frozen=True)
class DriftTest:
    """Series of windows, and the readings of each window after the reference, for the series that are long enough."""

    series: Mapping[str, Windows]
    reference: int
    readings: Mapping[str, Sequence[Sequence[DriftReading]]]

    @classmethod
    def of(cls, app: App, series: Mapping[str, Windows], reference: int) -> DriftTest:
        """Tests the series with the configured rate of false alarms."""
        limit, seed = app.config.monitor.runs_per_false_alert, app.config.calibrate.seed
        readings = {
            name: detect_drift(windows, reference, paired=name == "canaries", windows_per_false_alarm=limit, seed=seed)
            for name, windows in series.items()
            if len(windows) > reference
        }
        return cls(series, reference, readings)

    @property
    def exit_code(self) -> Code:
        """Whether a signal alarms; INCOMPLETE if no series is long enough."""
        alarms = any(r.alarm for steps in self.readings.values() for step in steps for r in step)
        return Code.FAILED if alarms else Code.OK if self.readings else Code.INCOMPLETE

    def raise_alerts(self, app: App, about: str, tenant: str, start: datetime) -> None:
        """Opens an alert for the last alarm of each series. It names sources that were changed or removed meanwhile.

        The series begin at ``start``, and belong to a canary set or a tenant.
        """
        changed = updated_sources(app.store, tenant, start) if self.exit_code is Code.FAILED else ()
        for name, steps in self.readings.items():
            windows = zip(self.series[name][self.reference :], steps, strict=True)
            alarms = [(w, some) for w, step in windows if (some := [r for r in step if r.alarm])]
            for window, alarming in alarms[-1:]:
                _raise(app, drift_alert(about, name, alarming, min(o.at for o in window), changed))

    def as_json(self) -> dict[str, Any]:
        """Number of windows, and readings of each series."""
        rows = {
            name: [[asdict(r) | {"alarm": r.alarm} for r in step] for step in steps]
            for name, steps in self.readings.items()
        }
        return {"windows": {name: len(windows) for name, windows in self.series.items()}, "readings": rows}

    def show(self) -> None:
        """Prints the readings of each series, and which series are too short."""
        for name, windows in self.series.items():
            if name not in self.readings:
                needed = f"{self.reference} for the reference and at least 1 to test"
                out.print(f"{name}: {len(windows)} windows are too few; needed: {needed}")
        table = Table("series", "signal", "reference", "last", "evidence", "alarm at", "alarms in windows")
        for name, steps in self.readings.items():
            for signal in dict.fromkeys(r.signal for step in steps for r in step):
                some = [(i, r) for i, step in enumerate(steps, self.reference + 1) for r in step if r.signal == signal]
                last, alarms = some[-1][1], [str(i) for i, r in some if r.alarm]
                values = (f"{x:.3g}" for x in (last.reference, last.value, last.evidence, last.threshold))
                table.add_row(name, signal, *values, f"[red]{', '.join(alarms)}[/red]")
        if self.readings:
            out.print(table)
        alarming = (r for steps in self.readings.values() for step in steps for r in step if r.alarm)
        if documents := dict.fromkeys(d for r in alarming for d in r.documents):
            out.print(f"in more answers than before: {shown(', '.join(documents))}")


def _raise(app: App, alert: Alert) -> None:
    if raise_alert(app.store, alert, alert.since):
        say.print(f"opened alert {shown(alert.id)}")
    else:
        say.print("opened no alert: the same one exists, or an open one was extended")


def _show_shadow(diff: ShadowDiff) -> None:
    if not diff.asked:
        out.print(f"none of {diff.errors} questions was answered by both states")
        return
    share = diff.share
    flips = f"{len(diff.flips)} of {diff.asked} answers flipped, {measured(share, share=True)}"
    out.print(f"{flips}; {diff.errors} without an answer; overlap of the contexts {diff.overlap:.2f}", markup=False)
    for suspect in [s for s in diff.suspects if s.flips][:10]:
        what = f"new in {suspect.entered} contexts, {suspect.flips} of them with a flipped answer"
        out.print(f"{shown(suspect.document)}: {what}")
    if diff.unexplained:
        out.print(f"{diff.unexplained} flips without a new document in the context")


def _show_corpus(
    since: datetime | None, change: CorpusChange | None, shift: MeanShift | None, audit: VectorAudit | None
) -> None:
    if change is None or since is None:
        out.print("recorded the first reference; the next check compares with it")
    else:
        out.print(f"since {since.astimezone():%Y-%m-%d %H:%M}: {change.value}")
    if shift:
        moved = f"mean vector moved {shift.distance:.3g}, expected {shift.expected:.3g} (p = {shift.p:.2g})"
        out.print(f"{shift.added} documents added, {shift.removed} removed; {moved}")
    if audit:
        out.print(f"audit: {len(audit.wrong)} of {audit.checked} re-embedded documents have another vector", end="")
        out.print(f"; with 95 % confidence at most {audit.max_wrong} of {audit.held}")
        for document, cosine in audit.wrong[:10]:
            out.print(f"{shown(document)}: cosine {cosine:.4f}")
