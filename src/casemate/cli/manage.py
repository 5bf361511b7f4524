"""``init``, ``index``, ``calibrate``, ``doctor``, ``demo``: setting a system up and looking after it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer
from rich.table import Table

from casemate import config as configuration
from casemate.app import App, open_app, spread_on
from casemate.calibration import Calibration
from casemate.canaries import open_gate
from casemate.cli.console import (
    FAILED,
    INCOMPLETE,
    INTERRUPTED,
    OK,
    ConfigFile,
    Json,
    On,
    Tenant,
    bar,
    out,
    print_json,
    questions_in,
    say,
    shown,
)
from casemate.corpus import Corpus
from casemate.demo.show import run_demo
from casemate.doctor import examine
from casemate.errors import ConfigError
from casemate.ingest import Gone, Ingest, Plan, Report
from casemate.lab import costs
from casemate.lab.calibrate import RATES
from casemate.lab.cost_charts import fewest
from casemate.monitor.trends.baseline import note_update
from casemate.stats import Rate
from casemate.types import DEFAULT_TENANT

TEMPLATE = """\
# Casemate. Every key, with its default: docs/reference/configuration.md. Secrets: ${{NAME}}, from the environment.
rag:
  corpus: {corpus}
  embedder: minilm          # openai | sentence_transformers
  index: sqlite             # pgvector
  generator: extractive     # {{use: openai, model: ..., base_url: ..., api_key: "${{LLM_KEY}}"}}
  k: 5
guard:
  mode: enforce             # observe | off
  on_error: closed          # open
  defenses:
    - {{name: mirabel, significance: .01}}   # 'casemate calibrate' shows what other values cost
# calibrate:
#   log: questions.jsonl    # harmless questions that people asked; without them they are made from the corpus
"""


def init(
    corpus: Annotated[str, typer.Argument(help="Folder or file with the documents.")] = "docs",
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write a casemate.yaml to start from."""
    path = Path(configuration.FILE)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; edit it, or write over it with --force")
    try:
        path.write_text(TEMPLATE.format(corpus=json.dumps(corpus)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; go to a folder that you may write to") from error
    if as_json:
        print_json({"written": str(path)})
    else:
        there = Path(corpus).exists()
        out.print(f"wrote {path}; next: {'casemate index' if there else f'put your documents into {shown(corpus)}'}")
        if not there:
            say.print(f"[yellow]note:[/yellow] {shown(corpus)} is not there yet; rag.corpus in {path} names it")


def index(
    corpus: Annotated[Path | None, typer.Argument(help="Folder or file. Default: rag.corpus.")] = None,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    gone: Annotated[Gone, typer.Option(help="Sources that are no longer there.")] = "auto",
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Empty the whole index first, all tenants.")] = False,
    fit: Annotated[bool, typer.Option("--calibrate/--no-calibrate", help="Fit the guard when it is due.")] = True,
    on: On = None,
    as_json: Json = False,
) -> None:
    """Embed what is new or changed, remove what is gone, fit the guard. Interrupt at will and run again."""
    settings = configuration.read(config)
    place = corpus or (settings.folder / settings.rag.corpus if settings.rag.corpus else None)
    if place is None:
        raise ConfigError("no corpus: give a folder or file, or set rag.corpus in casemate.yaml")
    source = Corpus(place, settings.rag.max_file_mb, empty=gone == "remove")
    with spread_on(on) as spread, open_app(settings, rebuild=rebuild, spread=spread) as app:
        chunk = settings.rag.chunk
        gate = open_gate(app, tenant, _log(app, None) if settings.monitor.gate else ())
        work = Ingest(gate or app.guard, source, chunk.tokens, chunk.overlap, tenant, gone)
        with say.status("comparing with the index"):
            plan = work.plan()
        note_update(app.store, tenant, (plan.held & plan.todo.keys()) | set(plan.gone), datetime.now(UTC))
        report = _run(work, plan)
        with say.status("preparing the search"):
            app.index.warm(tenant)
        total = app.index.moments(tenant).n
        _report(report, total, as_json)
        if gate and (waiting := len(gate.held)):
            say.print(f"[yellow]held back:[/yellow] {waiting} sources look like poison; 'casemate quarantine list'")
        if fit and (why := app.due(tenant)):
            say.print(f"fitting the guard, because {shown(why.partition(': ')[0])}", soft_wrap=True)
            found = _calibrate(app, _log(app, None), tenant)
            hint = "; 'casemate calibrate' shows what it costs" if found.benign else ""
            say.print(f"{_said(found)}{hint}", soft_wrap=True)
    raise typer.Exit(OK if report.complete else INCOMPLETE)


def _run(work: Ingest, plan: Plan) -> Report:
    with bar() as shown_bar:
        task = shown_bar.add_task(f"embedding {len(plan.todo)} sources", total=plan.bytes or 1)
        try:
            return asyncio.run(work.run(plan, lambda size: shown_bar.advance(task, size)))
        except KeyboardInterrupt:
            say.print("interrupted; what was saved is kept, run 'casemate index' again to go on")
            raise typer.Exit(INTERRUPTED) from None


def _report(report: Report, total: int, as_json: bool) -> None:
    for problem in report.problems:
        say.print(f"[yellow]left out:[/yellow] {shown(problem.where)}: {shown(problem.reason)}", soft_wrap=True)
    if as_json:
        print_json({**report.as_json(), "documents": total})
        return
    rate = f", {report.chunks / report.seconds:.0f} a second" if report.chunks and report.seconds > 1 else ""
    said = f"indexed {report.indexed} sources ({report.chunks} chunks{rate}), {report.unchanged} unchanged"
    said += f", {report.removed} removed, {len(report.problems)} left out"
    said += f", {report.ignored} files of other kinds passed over" if report.ignored else ""
    out.print(f"{said}; the index holds {total} chunks", soft_wrap=True)


def calibrate(
    log: Annotated[
        Path | None,
        typer.Option(help="Harmless questions that people asked, plain lines or jsonl. Default: calibrate.log."),
    ] = None,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    on: On = None,
    as_json: Json = False,
) -> None:
    """Fit the guard to your documents and questions, and show what each error rate costs."""
    with spread_on(on) as spread, open_app(configuration.read(config), spread=spread) as app:
        found = _calibrate(app, _log(app, log), tenant)
        defense = app.calibrated
        assert defense is not None
        page = _page(defense.calibration, tenant)
    if as_json:
        print_json({"tenant": tenant, "source": found.source, "at": found.at, **found.notes, "rates": _rates(found)})
        return
    _show(found, defense.significance or 0.0)
    out.print(f"wrote {shown(str(defense.calibration))} and {shown(str(page))}")


def _page(calibration: Path, tenant: str) -> Path:
    """Beside the calibration; a tenant's name may hold what a file's may not."""
    name = quote(tenant, safe="")
    name = name if len(name) <= 100 else hashlib.sha256(tenant.encode()).hexdigest()[:32]
    own = "" if tenant == DEFAULT_TENANT else f".{name}"
    return calibration.with_name(f"{calibration.stem}{own}.html")


def _log(app: App, path: Path | None) -> list[str]:
    """The harmless questions of the log, if there is one."""
    configured = app.config.calibrate.log
    place = path or (app.config.folder / configured if configured else None)
    return questions_in(place) if place else []


def _calibrate(app: App, log: list[str], tenant: str) -> Calibration:
    """Fits the guard, and writes the page that shows what it costs."""
    defense = app.calibrated
    with bar() as progress:
        task = progress.add_task("asking harmless questions, and writing attacks", total=None)
        found = asyncio.run(app.calibrate(log, tenant, lambda n: progress.advance(task, n)))
    assert defense is not None and defense.significance is not None
    page = _page(defense.calibration, tenant)
    page.touch(mode=0o600)  # it tells how close a question may come
    page.write_text(costs.render_html(found, found.attainable(defense.significance)), encoding="utf-8")
    return found


def _said(found: Calibration) -> str:
    if not found.benign:
        return f"[yellow]note:[/yellow] {shown(found.source)}: nothing will be withheld"
    return f"the guard is fitted to {shown(found.source)}"


def _rates(found: Calibration) -> dict[str, float | None]:
    """Thresholds; none where there are too few harmless questions."""
    return {str(r): t if math.isfinite(t := found.threshold(r)) else None for r in RATES}


def _show(found: Calibration, significance: float) -> None:
    """What each error rate costs: the table."""
    out.print(_said(found), soft_wrap=True)
    recall = found.notes.get("recall")
    if not recall:
        return
    usable = [r for r in RATES if math.isfinite(found.threshold(r))]
    table = Table(
        title="Share of attack questions whose document is withheld (of documents, in any of an attack's questions)",
        title_justify="left",
    )
    table.add_column("harmless questions flagged, at most")
    for r in usable:
        table.add_column(f"{r:.1%}" + (" *" if r == significance else ""), justify="right")
    for attack, by_rate in recall.items():
        cells = (by_rate[str(r)] for r in usable)
        table.add_row(attack, *(f"{_share(c['question'])} ({_share(c['document'])})" for c in cells))
    out.print(table)
    needed = fewest(significance)
    if len(found.benign) < needed:
        out.print(
            f"[yellow]note:[/yellow] {len(found.benign)} harmless questions are too few for mirabel.significance "
            f"{significance}, which needs {needed}: until then it works at {found.attainable(significance):.3f}",
            soft_wrap=True,
        )
    out.print("[dim]* mirabel.significance. Attacks are written by script, without a language model.[/dim]")


def _share(figure: Rate) -> str:
    return f"{figure[0]:.2f}"


def doctor(
    config: ConfigFile = None,
    fix: Annotated[bool, typer.Option("--fix", help="Rebuild the moments if they are wrong.")] = False,
    as_json: Json = False,
) -> None:
    """Look at every part and say what is wrong."""
    findings = list(examine(config, fix))
    failed = any(f.ok is False for f in findings)
    if as_json:
        print_json({"ok": not failed, "findings": [asdict(f) for f in findings]})
    else:
        signs = {True: "[green]ok  [/green]", False: "[red]FAIL[/red]", None: "[yellow]note[/yellow]"}
        for f in findings:
            out.print(f"{signs[f.ok]} {f.name}: {shown(f.detail)}", soft_wrap=True)
    raise typer.Exit(FAILED if failed else OK)


def demo(
    folder: Annotated[Path, typer.Option(help="Where the sample clinic is put.")] = Path("casemate-demo"),
    as_json: Json = False,
) -> None:
    """Guard off against guard on, on a fictional clinic. Needs no key and no network."""
    result = asyncio.run(run_demo(folder, say if as_json else out, say))
    if as_json:
        print_json(result)
