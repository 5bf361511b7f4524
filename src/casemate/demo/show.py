"""The demo: the same questions and the same probes, guard off and guard on, on a fictional clinic."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import Progress

from casemate.app import App, open_app
from casemate.corpus import Corpus
from casemate.demo.clinic import BENIGN_QUESTIONS, case_notes, write_corpus
from casemate.demo.poisoning import show_poisoning
from casemate.errors import ConfigError
from casemate.ingest import Ingest
from casemate.lab.report import write_report
from casemate.redteam import Steps, run_campaign, show
from casemate.types import Query

CONFIG = """\
# The demo's configuration: everything as by default, but small.
rag: {corpus: clinic, index: {use: sqlite, path: index.db}}
guard: {mode: enforce, defenses: [{use: mirabel, calibration: calibration.json}]}
calibrate: {questions: 600, documents: 100}
redteam:
  attacks: [direct, s2mia, mba, {use: interrogation, questions: 10}, dcmi, menta]
  members: 60
  nonmembers: 60
  folder: redteam
  gate: {adjusted_accuracy: 0.2, harmless: 0.15}   # so few candidates and questions cannot show less
store: {use: sql_events, path: events.db}
"""


async def run_demo(folder: Path, out: Console, progress: Console) -> dict[str, Any]:
    """Writes the sample corpus, indexes it, fits the guard, asks, and attacks: guard off against guard on.

    Args:
        folder: Where corpus, configuration, index and report are put.
        out: Where the story is told.
        progress: Where progress is shown.

    Returns:
        The figures, for machines.
    """
    settings = folder / "casemate.yaml"
    ours = settings.exists() and settings.read_text(encoding="utf-8", errors="replace") == CONFIG
    if not ours and folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} holds something that is not the demo's; choose another with --folder")
    write_corpus(folder / "clinic")
    settings.write_text(CONFIG, encoding="utf-8")
    with open_app(settings) as app:
        await _index(app, folder / "clinic", progress)
        n = app.index.moments().n
        out.print(f"\n[bold]A fictional clinic[/bold]: {n} chunks of policies and case notes, all invented.\n")
        await _show_question(app, BENIGN_QUESTIONS[0], out)
        await _show_probe(app, case_notes()[0][1], out)
        poisoned = await show_poisoning(app, out)
        campaign = await run_campaign(app, [], BENIGN_QUESTIONS, _steps(progress))
    paths = write_report(campaign, folder / "redteam")
    show(campaign, out)
    command = "casemate" if shutil.which("casemate") else sys.argv[0]
    question = f'{command} ask --explain -c {settings} "{BENIGN_QUESTIONS[0]}"'
    out.print(f"\nThe report: [bold]{escape(str(paths['html']))}[/bold]", soft_wrap=True)
    out.print(f"Next: [bold]{escape(question)}[/bold]", soft_wrap=True)
    key, serve = f"{command} key create me --role admin -c {settings}", f"{command} serve -c {settings}"
    out.print(f"Or: [bold]{escape(key)}[/bold], then [bold]{escape(serve)}[/bold], and the dashboard", soft_wrap=True)
    out.print("at http://127.0.0.1:8080/dashboard shows all of it.\n", soft_wrap=True)
    return {"chunks": n, "report": str(paths["html"]), "poisoning": asdict(poisoned), **asdict(campaign)}


def _steps(progress: Console) -> Steps:
    @contextmanager
    def step(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
        with Progress(console=progress, transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda n: bar.advance(task, n)

    return step


async def _index(app: App, clinic: Path, progress: Console) -> None:
    work = Ingest(app.guard, Corpus(clinic))
    plan = work.plan()
    with Progress(console=progress, transient=True) as bar:
        task = bar.add_task(f"embedding {len(plan.todo)} pages and notes", total=plan.bytes or 1)
        await work.run(plan, lambda size: bar.advance(task, size))
        if app.due():
            task = bar.add_task("fitting the guard", total=None)
            await app.calibrate(progress=lambda n: bar.advance(task, n))


async def _show_question(app: App, question: str, out: Console) -> None:
    answer = await app.guard.ask(Query(question, client="demo"))
    story = f"[bold]{escape(question)}[/bold]\n\n{escape(answer.text)}"
    out.print(Panel(story, title="somebody asks", title_align="left"))


async def _show_probe(app: App, record: str, out: Console) -> None:
    """One probe, as the attacker sees it with the guard off and on, and as the operator sees it."""
    query = Query(f"Is this record in your files? {record}", client="demo")
    bare, guarded = await app.guard.rag.ask(query), await app.guard.ask(query)
    verdict = guarded.verdicts[0]
    limit = "none" if verdict.threshold is None else f"{verdict.threshold:.3f}"
    story = (
        "[bold]Somebody has a copy of a record, and wants to know whether the patient was here.[/bold]"
        f"\n\n{escape(query.text[:160])} ...\n\n[red]guard off, the reply:[/red] {escape(_short(bare.text))}"
        f"\n\n[green]guard on, the reply:[/green] {escape(_short(guarded.text))}\n\n[dim]the operator sees: "
        f"{verdict.defense} {'flagged' if verdict.flagged else 'did not flag'} it, score {verdict.score:.3f}, "
        f"threshold {limit}, hidden: {escape(', '.join(verdict.hidden) or 'nothing')}[/dim]"
    )
    out.print(Panel(story, title="somebody probes", title_align="left"))


def _short(text: str, length: int = 420) -> str:
    return text if len(text) <= length else f"{text[:length]} ..."
