"""The demo: the same question and the same probe, guard off and guard on, on a fictional clinic."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from casemate.app import open_app
from casemate.demo.assessment import Assessment, PastedRecord, assess
from casemate.demo.assessment_report import as_json, render_assessment, shorten
from casemate.demo.clinic import BENIGN_QUESTIONS, write_corpus
from casemate.demo.poisoning import show_poisoning
from casemate.demo.sample import Sample
from casemate.errors import ConfigError
from casemate.protocols import Steps
from casemate.rag.corpus import Corpus
from casemate.rag.ingest import Ingest
from casemate.redteam.campaigns.own import OwnMembershipCampaign
from casemate.redteam.campaigns.pipeline import campaign_lock
from casemate.redteam.lab.datasets import Split, draw_split, read_documents
from casemate.redteam.lab.results import CampaignResult
from casemate.runtime.files import write_atomically
from casemate.system import App
from casemate.types import Query

REPORT = "assessment.html"
OTHER_RECORD = (
    "With the guard on, the reply may quote another record, as any answer does. It no longer reveals whether the "
    "pasted record is in the collection. A second defense, crawl_limit, limits how much a client can copy."
)
NOTES = 440
"""Case notes: enough for the screening, which compares new documents with at least 500 chunks."""

CONFIG = """\
# Configuration of the demo: default options, small sizes.
rag: {corpus: clinic, index: {use: sqlite, path: index.db}}
guard: {mode: enforce, defenses: [{use: mirabel, calibration: calibration.json}, crawl_limit]}
calibrate: {questions: 600, documents: 100}
redteam:
  attacks: [direct, s2mia, mba, {use: interrogation, questions: 10}, dcmi, menta]
  members: 75
  nonmembers: 75
  folder: redteam
  gate: {adjusted_accuracy: 0.2, harmless: 0.15}   # few candidates and questions: wide intervals
store: {use: sql, path: events.db}
"""


async def run_demo(
    folder: Path,
    out: Console,
    steps: Steps,
    show: Callable[[CampaignResult, Console], None],
    show_assessment: Callable[[Assessment, Path], None],
) -> dict[str, Any]:
    """Writes the sample corpus, indexes it, calibrates the guard, asks, and attacks with guard off and on.

    It ends with the assessment of ``casemate try``, on the clinic. ``show`` and ``show_assessment`` print the results.
    Returns the figures, for JSON.
    """
    settings = folder / "casemate.yaml"
    ours = settings.exists() and settings.read_text(encoding="utf-8", errors="replace") == CONFIG
    if not ours and folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and not the demo's folder; choose another with --folder")
    write_corpus(folder / "clinic", NOTES)
    settings.write_text(CONFIG, encoding="utf-8")
    with open_app(settings) as app, campaign_lock(folder / app.config.redteam.folder, "the demo"):
        split = _split(app, folder / "clinic")
        await _index(app, folder / "clinic", split, steps)
        n, held = app.index.moments().n, len(split.nonmembers)
        about = f"{n} chunks of policies and case notes, all invented. {held} others are kept out, for comparison"
        out.print(f"\n[bold]A fictional clinic[/bold]: {about}.\n", soft_wrap=True)
        await _show_question(app, BENIGN_QUESTIONS[0], out)
        poisoned = await show_poisoning(app, out)
        campaign = OwnMembershipCampaign(app, BENIGN_QUESTIONS, split=split)
        assessment = await assess(app, _sample(app, folder / "clinic", split), campaign, BENIGN_QUESTIONS, steps)
        assert assessment.membership is not None and assessment.pasted is not None
        _show_probe(assessment.pasted, out)
        result = assessment.membership
        paths = campaign.write(result)
        page = folder / REPORT
        write_atomically(page, render_assessment(assessment).encode("utf-8"))
    show(result, out)
    show_assessment(assessment, page)
    command = "casemate" if shutil.which("casemate") else sys.argv[0]
    question = f'{command} ask --explain -c {settings} "{BENIGN_QUESTIONS[0]}"'
    out.print(f"All attacks: [bold]{escape(str(paths['html']))}[/bold]\n", soft_wrap=True)
    out.print(f"Next: [bold]{escape(question)}[/bold]", soft_wrap=True)
    key, serve = f"{command} key create me --role admin -c {settings}", f"{command} serve -c {settings}"
    out.print(f"Or: [bold]{escape(key)}[/bold], then [bold]{escape(serve)}[/bold], and the dashboard", soft_wrap=True)
    out.print(f"at http://127.0.0.1:{app.config.gateway.port}/dashboard shows the results.\n", soft_wrap=True)
    figures = {"poisoning": asdict(poisoned), "assessment": {**as_json(assessment), "report": str(page)}}
    return {"chunks": n, "report": str(paths["html"]), **figures, **result.summary()}


def _split(app: App, clinic: Path) -> Split:
    """Members and non-members, case notes only: the canaries ask about the pages.

    Non-members are never indexed, so the guard needs one calibration only.
    """
    section, corpus = app.config.redteam, Corpus(clinic)
    documents = read_documents(corpus, [s.name for s in corpus.sources() if s.name.startswith("notes/")])
    return draw_split(documents, section.members, section.nonmembers, section.seed)


async def _index(app: App, clinic: Path, split: Split, steps: Steps) -> None:
    work, outside = Ingest(app.guard, Corpus(clinic)), {d.source for d in split.nonmembers}
    await app.guard.remove(sorted(outside & app.index.digests().keys()))  # indexed by hand since the last demo
    plan = work.plan()
    plan = replace(plan, todo={name: digest for name, digest in plan.todo.items() if name not in outside})
    with steps(f"embedding {len(plan.todo)} pages and notes", plan.bytes or None) as count:
        await work.run(plan, lambda size: count(int(size)))
    if app.due():
        await app.calibrate(steps=steps)


def _sample(app: App, clinic: Path, split: Split) -> Sample:
    """The clinic: all documents except the non-members are indexed."""
    indexed, held = len(app.index.digests()), len(split.nonmembers)
    return Sample(str(clinic), indexed + held, indexed, app.index.moments().n, held, split=split)


async def _show_question(app: App, question: str, out: Console) -> None:
    answer = await app.guard.ask(Query(question, client="demo"))
    story = f"[bold]{escape(question)}[/bold]\n\n{escape(answer.text)}"
    out.print(Panel(story, title="a question", title_align="left"))


def _show_probe(pasted: PastedRecord, out: Console) -> None:
    """A probe, as seen by the attacker with guard off and on, and by the operator."""
    question, off, on = (shorten(text, 420) for text in (pasted.question, pasted.off, pasted.on))
    story = (
        "[bold]An attacker pastes half of a record, and asks to continue it.[/bold] The reader is simulated: it obeys."
        f"\n\n{escape(question)}\n\n[red]guard off, the reply:[/red] {escape(off)}"
        f"\n\n[green]guard on, the reply:[/green] {escape(on)}\n\n[dim]the operator sees that these "
        f"documents were withheld: {escape(', '.join(pasted.hidden) or 'none')}[/dim]\n\n{OTHER_RECORD}"
    )
    out.print(Panel(story, title="a membership probe", title_align="left"))
