"""``index``, ``calibrate``, ``doctor`` and ``demo``."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from casemate import config as configuration
from casemate.app import open_app, open_executor
from casemate.cli.console import (
    Code,
    ConfigFile,
    Json,
    On,
    Tenant,
    bar,
    interruptible,
    note,
    out,
    print_json,
    say,
    show_progress,
    shown,
)
from casemate.cli.redteam_output import print_result
from casemate.cli.try_documents import show_assessment
from casemate.demo.run import run_demo
from casemate.doctor import examine, examine_configuration
from casemate.errors import ConfigError, DataError
from casemate.guard.calibration.file import read_calibrations, write_calibration
from casemate.guard.calibration.fitting import RATES, calibration_possible
from casemate.guard.calibration.log_review import log_warnings, weak_attacks_note
from casemate.guard.defenses.crawl_limit import daily_share_notes
from casemate.maths.calibration import Calibration, min_questions
from casemate.monitor.enforcement import THRESHOLD, record_setting
from casemate.monitor.poisoning.screening_gate import ScreeningGate
from casemate.monitor.recalibration import recalibrated, recorded_scores
from casemate.monitor.service import missing_screening, open_screening_gate
from casemate.monitor.trends.baseline import record_source_updates
from casemate.rag.corpus import Corpus
from casemate.rag.ingest import Ingest, IngestPlan, IngestReport, MissingPolicy
from casemate.rag.question_file import questions_in
from casemate.reports import calibration_report
from casemate.reports.format import file_types, plural
from casemate.runtime.files import write_atomically
from casemate.system import App
from casemate.types import DEFAULT_TENANT


def index(
    corpus: Annotated[Path | None, typer.Argument(help="Folder or file. Default: rag.corpus.")] = None,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    missing: Annotated[
        MissingPolicy, typer.Option(help="Action for indexed sources that the corpus no longer has.")
    ] = "auto",
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Empty the index first, for all tenants.")] = False,
    fit: Annotated[bool, typer.Option("--calibrate/--no-calibrate", help="Calibrate the guard if needed.")] = True,
    on: On = None,
    as_json: Json = False,
) -> None:
    """Index new and changed documents, remove missing ones, calibrate the guard. Can be interrupted and resumed."""
    settings = configuration.read(config)
    place = corpus or (settings.folder / settings.rag.corpus if settings.rag.corpus else None)
    if place is None:
        raise ConfigError("no corpus: give a folder or file, or set rag.corpus: casemate init FOLDER")
    if corpus is None and not place.exists():
        raise ConfigError(f"no file or folder at {place}, the value of rag.corpus; correct it in {settings.file}")
    source = Corpus(place, settings.rag.max_file_mb, empty=missing == "remove")
    with open_executor(on) as executor, open_app(settings, rebuild=rebuild, executor=executor) as app:
        chunk = settings.rag.chunk
        work = Ingest(app.guard, source, chunk.tokens, chunk.overlap, tenant, missing)
        with say.status("comparing with the index"):
            plan = work.plan()
        gate = _open_gate(app, tenant) if plan.todo else None
        work = replace(work, sink=gate or app.guard)
        record_source_updates(app.store, tenant, (plan.held & plan.todo.keys()) | set(plan.gone), datetime.now(UTC))
        report = _run(work, plan)
        with say.status("preparing the search"):
            app.index.warm(tenant)
        total = app.index.moments(tenant).n
        _report(report, total, as_json)
        for line in _screening_notes(app, tenant, gate, report.quarantined):
            say.print(line)
        if (report.indexed or report.removed) and app.config.guard.mode != "off":
            for line in daily_share_notes(app.guard.defenses, total, app.config.rag.k):
                note(line)
        calibrate_if_due(app, tenant, fit)
    raise typer.Exit(Code.OK if report.complete else Code.INCOMPLETE)


def calibrate_if_due(app: App, tenant: str, fit: bool) -> None:
    """Calibrates the guard if a tenant's documents need it, and prints what the calibration can guarantee.

    Without ``fit``, it only warns that a calibration is needed.
    """
    why = app.due(tenant) or calibration_possible(app.guard.defenses, app.index, tenant)
    if why and not fit:
        say.print(f"[yellow]warning:[/yellow] {shown(why)}")
    elif why:
        known = any(tenant in read_calibrations(defense.calibration) for defense in app.calibrated)
        reason = f": {shown(why.partition(': run ')[0].partition('; run ')[0])}" if known else "; often about a minute"
        say.print(f"calibrating the guard{reason}")
        for name, (found, _) in _calibrate(app, _log(app, None), tenant).items():
            _say_calibrated(name, found, next(d.significance or 0.0 for d in app.calibrated if d.name == name))


def _open_gate(app: App, tenant: str) -> ScreeningGate | None:
    if not app.config.monitor.gate:
        return None
    with say.status("calibrating the screening of new documents"):
        return open_screening_gate(app, tenant, _log(app, None))


def _screening_notes(app: App, tenant: str, gate: ScreeningGate | None, waiting: int) -> Iterator[str]:
    if missing := missing_screening(app, tenant):
        yield f"[yellow]screening:[/yellow] {missing}"
    if not gate or not (waiting or gate.quarantined):
        return
    names = ", ".join(shown(source.source) for source in gate.quarantined[:3])
    names += ", ..." if len(gate.quarantined) > 3 else ""
    if gate.enforce:
        yield (
            f"[yellow]quarantined:[/yellow] {waiting} sources look poisoned and are not indexed, "
            f"{len(gate.quarantined)} of them new{f' ({names})' if names else ''}; run 'casemate quarantine list'"
        )
    else:
        yield (
            f"[yellow]screening:[/yellow] {len(gate.quarantined)} sources look poisoned ({names}) and were indexed: "
            "monitor.gate is observe; after 'casemate enforce' such sources are quarantined"
        )


def _run(work: Ingest, plan: IngestPlan) -> IngestReport:
    with bar() as shown_bar:
        task = shown_bar.add_task(f"embedding {len(plan.todo)} sources", total=plan.bytes or 1, unit="bytes")
        with interruptible("interrupted; what was saved is kept; run 'casemate index' again to resume"):
            return asyncio.run(work.run(plan, lambda size: shown_bar.advance(task, size)))


SHOWN_PROBLEMS = 5
"""Records skipped for the same reason that are shown."""


def _report(report: IngestReport, total: int, as_json: bool) -> None:
    counts = Counter[str]()
    for problem in report.problems:
        counts[problem.reason] += 1
        if counts[problem.reason] <= SHOWN_PROBLEMS:
            say.print(f"[yellow]skipped:[/yellow] {shown(problem.where)}: {shown(problem.reason)}")
    for reason, count in counts.items():
        if count > SHOWN_PROBLEMS:
            more = f"{count - SHOWN_PROBLEMS:,} more for the same reason: {shown(reason)}"
            say.print(f"[yellow]skipped:[/yellow] {more}; --json lists all")
    if as_json:
        print_json({**report.as_json(), "documents": total})
        return
    rate = f", {report.chunks / report.seconds:.0f} a second" if report.chunks and report.seconds > 1 else ""
    said = f"indexed {report.indexed} sources ({report.chunks} chunks{rate}), {report.unchanged} unchanged"
    said += f", {report.removed} removed, {len(report.problems)} skipped"
    said += f", {report.quarantined} quarantined" if report.quarantined else ""
    said += f", {report.rejected} rejected" if report.rejected else ""
    if report.ignored:
        said += f", {plural(report.ignored, 'file')} of other types ignored{file_types(report.ignored_types)}"
    out.print(f"{said}; the index holds {total} chunks")


def calibrate(
    log: Annotated[
        Path | None,
        typer.Option(help="Real benign questions, plain lines or jsonl. Default: calibrate.query_log."),
    ] = None,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    on: On = None,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Only adjust thresholds to the scores recorded in observe mode.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Calibrate on a log that is too short for the configured error rate, too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Calibrate the guard on your documents and questions, and show the cost of each error rate.

    With --recorded, the questions of your users since the last calibration count as benign: their scores were
    recorded in observe mode, without text.
    """
    if recorded and log:
        raise ConfigError("--recorded takes no --log; give one of them")
    with open_executor(on) as executor, open_app(config, executor=executor) as app:
        app.require_documents(tenant)
        asked = [] if recorded else _log(app, log)
        if log and not force:
            _require_questions(app, len(asked), tenant)
        done = _recalibrate(app, tenant) if recorded else _calibrate(app, asked, tenant)
        defenses = {defense.name: defense for defense in app.calibrated}
    if as_json:
        figures = {
            name: {
                "source": found.source,
                "at": found.at,
                **{key: value for key, value in found.notes.items() if key != "probes"},
                **_limits(found, defenses[name].significance or 0.0),
            }
            for name, (found, _) in done.items()
        }
        print_json({"tenant": tenant, "defenses": figures})
        return
    for name, (found, page) in done.items():
        _show(name, found, defenses[name].significance or 0.0)
        out.print(f"wrote {shown(str(defenses[name].calibration))} and {shown(str(page))}")


def _require_questions(app: App, count: int, tenant: str) -> None:
    """Refuses to replace a calibration by one on a log that is too short for the configured error rate."""
    for defense in app.calibrated:
        needed = min_questions(defense.significance) if defense.significance else 0
        if count < needed and tenant in read_calibrations(defense.calibration):
            raise DataError(
                f"{count} questions in the log are too few: {defense.name}.significance {defense.significance:g} needs "
                f"{needed}. The calibration was not changed. Use a longer log, leave out --log, or add --force"
            )


def _page(calibration: Path, tenant: str) -> Path:
    """Path of the HTML page beside the calibration. The tenant's name is quoted: it may contain any character."""
    name = quote(tenant, safe="")
    name = name if len(name) <= 100 else hashlib.sha256(tenant.encode()).hexdigest()[:32]
    own = "" if tenant == DEFAULT_TENANT else f".{name}"
    return calibration.with_name(f"{calibration.stem}{own}.html")


def _log(app: App, path: Path | None) -> list[str]:
    """The benign questions of the query log, if one is configured."""
    configured = app.config.calibrate.query_log
    place = path or (app.config.folder / configured if configured else None)
    return questions_in(place) if place else []


def _calibrate(app: App, log: list[str], tenant: str) -> dict[str, tuple[Calibration, Path]]:
    """Calibrates the guard, and writes an HTML report per defense: name to calibration and report."""
    return _write_pages(app, asyncio.run(app.calibrate(log, tenant, show_progress)), tenant)


def _recalibrate(app: App, tenant: str) -> dict[str, tuple[Calibration, Path]]:
    """Adjusts the thresholds of all defenses to recorded scores, or none, and writes an HTML report for each."""
    found = {}
    for defense in app.calibrated:
        present = read_calibrations(defense.calibration).get(tenant)
        if present is None:
            raise DataError(f"{defense.calibration} has no calibration of tenant {tenant!r}; run 'casemate calibrate'")
        scores = recorded_scores(app.store, defense.name, tenant, present, app.config.monitor.is_canary)
        found[defense.name] = recalibrated(present, scores, defense.significance or 0.0)
    for defense in app.calibrated:
        after, rate = found[defense.name], defense.significance or 0.0
        before = read_calibrations(defense.calibration)[tenant]
        write_calibration(defense.calibration, tenant, after)
        old, new = (c.threshold(c.attainable_rate(rate)) for c in (before, after))
        about = {"before": old, "defense": defense.name, "tenant": tenant}
        record_setting(app.store, THRESHOLD, new, "casemate calibrate --recorded", **about)
    return _write_pages(app, found, tenant)


def _write_pages(app: App, found: Mapping[str, Calibration], tenant: str) -> dict[str, tuple[Calibration, Path]]:
    pages = {}
    for defense in app.calibrated:
        page = pages[defense.name] = _page(defense.calibration, tenant)
        report = calibration_report.render_html(
            found[defense.name], found[defense.name].attainable_rate(defense.significance or 0.0), defense.name
        )
        write_atomically(page, report.encode("utf-8"))  # for the owner only: it reveals the thresholds
    return {name: (found[name], page) for name, page in pages.items()}


def _summary(name: str, found: Calibration) -> str:
    if not found.benign:
        return f"[yellow]note:[/yellow] {name} is not calibrated and withholds nothing: {shown(found.source)}"
    return f"{name} is calibrated on {shown(found.source)}"


def _warn(found: Calibration, significance: float) -> None:
    for warning in log_warnings(found, significance):
        say.print(f"[yellow]warning:[/yellow] {shown(warning)}")


def _say_calibrated(name: str, found: Calibration, significance: float) -> None:
    hint = "; 'casemate calibrate' shows the cost" if found.benign else ""
    say.print(f"{_summary(name, found)}{hint}")
    _warn(found, significance)
    if weak := weak_attacks_note(found, significance):
        note(shown(weak))


def _limits(found: Calibration, significance: float) -> dict[str, Any]:
    """What the calibration can guarantee, for JSON.

    ``significance`` is the configured rate, None if there are too few benign questions for it; ``attainable`` is the
    rate in use; ``rates`` gives the threshold of each rate, None likewise; ``warnings`` concern the query log.
    """
    finite = {rate: math.isfinite(found.threshold(rate)) for rate in (*RATES, significance) if rate}
    return {
        "significance": significance if finite.get(significance) else None,
        "attainable": found.attainable_rate(significance) if found.benign else None,
        "rates": {str(r): found.threshold(r) if finite[r] else None for r in RATES},
        "warnings": log_warnings(found, significance),
    }


def _show(name: str, found: Calibration, significance: float) -> None:
    """Prints the table of what each error rate costs."""
    out.print(_summary(name, found))
    _warn(found, significance)
    recall = found.notes.get("recall")
    if not recall:
        return
    usable = [r for r in RATES if math.isfinite(found.threshold(r))]
    what = "Withheld in % of attack questions / of attacked documents (in one question or more), by error rate"
    out.print(what)
    table = Table(box=SIMPLE_HEAD)
    table.add_column("error rate", no_wrap=True)
    for r in usable:
        table.add_column(f"{100 * r:g} %{' *' * (r == significance)}", justify="right", no_wrap=True)
    for attack, by_rate in recall.items():
        cells = (by_rate[str(r)] for r in usable)
        table.add_row(attack, *(f"{100 * c['question'][0]:.0f} / {100 * c['document'][0]:.0f}" for c in cells))
    out.print(table)
    if why := found.shortage(f"{name}.significance", significance):
        out.print(f"[yellow]note:[/yellow] {why}")
    explained = f"Error rate: largest share of benign questions that are flagged (* {name}.significance)"
    out.print(f"[dim]{explained}. Attacks are written by script, without a language model.[/dim]")


def doctor(
    config: ConfigFile = None,
    fix: Annotated[bool, typer.Option("--fix", help="Rebuild corpus moments that are wrong.")] = False,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="Check the configuration file only; secrets need not be set.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check every part of the installation and report faults."""
    findings = [examine_configuration(config)] if config_only else list(examine(config, fix))
    failed = any(f.ok is False for f in findings)
    if as_json:
        print_json({"ok": not failed, "findings": [asdict(f) for f in findings]})
    else:
        signs = {True: "[green]ok  [/green]", False: "[red]FAIL[/red]", None: "[yellow]note[/yellow]"}
        for f in findings:
            out.print(f"{signs[f.ok]} {f.name}: {shown(f.detail)}")
    raise typer.Exit(Code.FAILED if failed else Code.OK)


def demo(
    folder: Annotated[Path, typer.Option(help="Folder for the sample clinic.")] = Path("casemate-demo"),
    as_json: Json = False,
) -> None:
    """Compare guard off and guard on with a fictional clinic. Needs no key and no network."""
    console = say if as_json else out
    result = asyncio.run(
        run_demo(
            folder, console, show_progress, print_result, lambda found, page: show_assessment(found, page, console)
        )
    )
    if as_json:
        print_json(result)
