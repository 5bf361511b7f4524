"""``traces import|report|suggest``: real traffic, its topics without a canary, its drift, and canaries for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from casemate.app import open_app
from casemate.cli.canary import parse_span
from casemate.cli.canary_drift import Alerting, DriftTest
from casemate.cli.console import Code, ConfigFile, Json, Tenant, bar, out, print_json, say, shown
from casemate.errors import ConfigError, DataError
from casemate.monitor.canaries.canary_file import read_canaries
from casemate.monitor.canaries.coverage import RegionMap
from casemate.monitor.drift.answer_drift import windows_by_time
from casemate.monitor.service import canary_file, open_runner, open_target, open_trace_recorder
from casemate.monitor.traces.candidates import draft_candidates
from casemate.monitor.traces.exports import read_export
from casemate.monitor.traces.recorder import RecordedSpans
from casemate.monitor.traces.span_content import Span
from casemate.monitor.traces.traffic import (
    TracedQuestion,
    TrafficCoverage,
    answers,
    canary_contexts,
    measure_traffic,
    read_traffic,
    topics_asked,
)
from casemate.reports.format import plural, sample_rate
from casemate.runtime.events import append_durably
from casemate.runtime.files import write_atomically
from casemate.system import App
from casemate.types import DEFAULT_TENANT

BATCH = 500
"""Spans that are recorded together."""
SHOWN_TOPICS = 15
"""Topics that are printed."""
NO_QUESTIONS = (
    "no question is recorded in this period; import a file with 'casemate traces import', or send traces to "
    "/v1/traces. Tracing libraries leave texts out unless a setting includes them: see docs/how-to/use-traces.md"
)
Since = Annotated[str, typer.Option(help="How far back, such as 30d.")]
traces = typer.Typer(
    help="Real traffic from traces: coverage by canaries, drift, canary candidates.", no_args_is_help=True
)


@traces.command("import")
def import_command(
    files: Annotated[list[Path], typer.Argument(help="OTLP JSON, OpenInference spans, or exports of Langfuse.")],
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Record traces from files. A span is recorded once. Exit codes: 0 all, 3 some records were skipped."""
    total, formats, skipped = RecordedSpans(), Counter[str](), Counter[str]()
    with open_app(config) as app:
        for path in files:
            export = read_export(path, datetime.now(UTC))
            formats.update(export.formats)
            skipped.update(export.skipped)
            total = total.plus(_record(app, export.spans, tenant))
    facts = {**total._asdict(), "formats": dict(formats), "skipped": dict(skipped)}
    print_json(facts) if as_json else _show_import(total, formats, skipped)
    raise typer.Exit(Code.INCOMPLETE if skipped else Code.OK)


@traces.command("report")
def report_command(
    since: Since = "30d",
    reference: Annotated[int, typer.Option(min=2, help="Number of windows, from the first, without a problem.")] = 7,
    window: Annotated[str, typer.Option(help="Length of a window; use 1d or 7d for weekly cycles.")] = "1d",
    alert: Alerting = False,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Show topics without a canary, flagged shares and drift. Exit codes: 0 no drift, 1 drift, 3 too little data."""
    with open_app(config) as app:
        now = datetime.now(UTC)
        start = now - parse_span(since)
        questions = read_traffic(app.store, tenant, start)
        coverage = _coverage(app, questions, tenant)[1] if questions else None
        seconds = parse_span(window).total_seconds()
        observed = {"traced answers": answers(questions), "traced questions": topics_asked(questions)}
        series = {name: windows_by_time(some, seconds, now) for name, some in observed.items()}
        drift = DriftTest.of(app, series, reference)
        if alert:
            drift.raise_alerts(app, tenant, tenant, start)
    if as_json:
        print_json({**_shares(questions), "coverage": _coverage_json(coverage), **drift.as_json()})
    else:
        _show_report(questions, coverage)
        drift.show()
    raise typer.Exit(drift.exit_code)


@traces.command("suggest")
def suggest_command(
    output: Annotated[Path, typer.Argument(help="File to write.")] = Path("traffic-canaries.yaml"),
    count: Annotated[int, typer.Option(min=1, max=1000, help="Largest number of canaries.")] = 20,
    since: Since = "30d",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Draft canaries for topics that users ask about and no canary watches. Exit codes: 0 drafted, 3 none."""
    if output.exists() and not force:
        raise ConfigError(f"{output} exists; name another file, or overwrite it with --force")
    with open_app(config) as app:
        questions = read_traffic(app.store, tenant, datetime.now(UTC) - parse_span(since))
        if not questions:
            raise DataError(NO_QUESTIONS)
        corpus, coverage = _coverage(app, questions, tenant)
        seed = app.config.calibrate.seed
        runner = open_runner(app, open_target(app, app.config.monitor.target, recorded=False), tenant)
        with say.status("testing candidates"):
            found = asyncio.run(draft_candidates(corpus, coverage, questions, runner, count, seed))
    write_atomically(output, found.text.encode())  # it contains questions of users
    if as_json:
        rows = [{"id": c.id, "note": found.notes[c.id]} for c in found.canaries]
        print_json({"written": str(output), "canaries": rows, "dropped": found.dropped})
    else:
        out.print(f"{plural(len(found.canaries), 'candidate')} written to {shown(str(output))}")
        for canary in found.canaries:
            out.print(f"  {canary.id}: {shown(found.notes[canary.id])}")
        for topic in found.dropped:
            out.print(f"  no question passed for the topic {shown(topic)}")
        out.print("next: review them, and add them to your canary set")
    raise typer.Exit(Code.OK if found.canaries else Code.INCOMPLETE)


def _record(app: App, spans: Sequence[Span], tenant: str) -> RecordedSpans:
    """Records spans batch by batch, and waits until each batch is written."""
    recorder, total = open_trace_recorder(app), RecordedSpans()
    with bar() as progress:
        task = progress.add_task("recording spans", total=len(spans))
        for start in range(0, len(spans), BATCH):
            batch = spans[start : start + BATCH]
            total = total.plus(asyncio.run(recorder.record(batch, tenant, datetime.now(UTC))))
            append_durably(app.store, (), "the spans", "check the store, and import again: no span is counted twice")
            progress.advance(task, len(batch))
    return total


def _coverage(app: App, questions: Sequence[TracedQuestion], tenant: str) -> tuple[RegionMap, TrafficCoverage]:
    """Regions of the corpus, and how much of the traffic the configured canaries watch."""
    file, rag = canary_file(app), app.guard.rag
    canaries = read_canaries(file, judge=True).canaries if file.exists() else ()
    queries = {c.id: c.query for c in canaries if c.expected_refusal is not True}
    with say.status("clustering the documents into topics"):
        corpus = RegionMap.of(app.index, tenant, app.config.calibrate.seed)
        contexts = canary_contexts(app.index, rag.embedder, queries, app.config.rag.k, tenant)
    return corpus, measure_traffic(corpus, contexts, questions)


def _shares(questions: Sequence[TracedQuestion]) -> dict[str, Any]:
    """Counts of the traffic: how many questions were flagged and refused, of those where it is known."""
    known = {
        "flagged": [q.flagged for q in questions if q.flagged is not None],
        "refused": [q.refused for q in questions if q.refused is not None],
    }
    counts = {name: {"count": sum(values), "of": len(values)} for name, values in known.items()}
    by = Counter(q.flagged_by for q in questions if q.flagged_by)
    return {"questions": len(questions), **counts, "flagged_by": dict(by)}


def _coverage_json(coverage: TrafficCoverage | None) -> dict[str, Any] | None:
    if coverage is None:
        return None
    share = coverage.watched
    return {
        "watched": share._asdict() if share else None,
        "placed": coverage.placed,
        "unplaced": coverage.unplaced,
        "topics": [asdict(topic) for topic in coverage.topics],
    }


def _show_import(total: RecordedSpans, formats: Counter[str], skipped: Counter[str]) -> None:
    read = ", ".join(f"{name} {count:,}" for name, count in formats.most_common())
    out.print(f"records by format: {read}")
    out.print(f"recorded {plural(total.recorded, 'span')}; {total.ignored:,} have no question, answer or document")
    if total.untimed:
        out.print(f"{plural(total.untimed, 'span')} without a usable time: recorded with the present time")
    if total.unjudged:
        out.print(
            f"{plural(total.unjudged, 'question')} recorded without nearest documents: "
            "too long, not plain text, or too many at once"
        )
    for reason, count in skipped.most_common():
        say.print(f"[yellow]skipped[/yellow] {count:,}: {shown(reason)}")


def _show_report(questions: Sequence[TracedQuestion], coverage: TrafficCoverage | None) -> None:
    if coverage is None:
        say.print(NO_QUESTIONS)
        return
    shares = _shares(questions)
    out.print(f"{plural(len(questions), 'question')} since {questions[0].at.astimezone():%Y-%m-%d %H:%M}")
    for name in ("flagged", "refused"):
        share, about = sample_rate(shares[name]["count"], shares[name]["of"])
        out.print(f"{name}: {share} ({about})")
    watched = coverage.watched
    if watched:
        share, about = sample_rate(round(watched.value * coverage.placed), coverage.placed)
        out.print(f"nearest document in the context of a canary: {share} ({about})")
    if coverage.unplaced:
        out.print(
            f"{plural(coverage.unplaced, 'question')} without a topic: the index has none of the nearest documents"
        )
    table = Table("topic", "chunks", "questions", "canaries")
    for topic in coverage.topics[:SHOWN_TOPICS]:
        canaries = str(len(topic.canaries)) if topic.canaries else "[red]none[/red]"
        table.add_row(shown(topic.name), f"{topic.chunks:,}", f"{topic.questions:,}", canaries)
    out.print(table)
    if (more := len(coverage.topics) - SHOWN_TOPICS) > 0:
        out.print(f"and {plural(more, 'more topic')}; --json shows all")
    if coverage.unwatched:
        out.print(f"{plural(len(coverage.unwatched), 'topic')} without a canary: 'casemate traces suggest' drafts some")
