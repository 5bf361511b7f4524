"""The demo's second act: somebody slips false pages into the collection, and the canaries notice."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from casemate.app import App
from casemate.attacks.poison import Poison
from casemate.canaries import open_canaries
from casemate.monitor.alerts.alert import Alert, Phase, open_alerts
from casemate.monitor.alerts.wording import render
from casemate.monitor.trends import baseline
from casemate.types import Query

FILE = "canaries.yaml"
QUESTION, RIGHT, WRONG = "What does it cost to miss an appointment?", "25 crowns", "90 crowns"
SEED = 7


@dataclass(frozen=True, slots=True)
class Act:
    """What happened, for machines.

    Attributes:
        planted: False pages.
        answer: What was answered while they were there.
        noticed: Whether an alert was raised by the next run of the canaries.
        alert: Its title.
        documents: How many of the false pages it names.
        recovered: Whether it was over when they were gone.
    """

    planted: int
    answer: str
    noticed: bool
    alert: str
    documents: int
    recovered: bool


async def show_poisoning(app: App, out: Console) -> Act:
    """Measures the canaries while all is well, plants false pages, lets the canaries find them, and cleans up."""
    (app.config.folder / FILE).write_text(files("casemate.demo").joinpath(FILE).read_text("utf-8"), encoding="utf-8")
    canaries = open_canaries(app)
    usual = await canaries.measure()
    baseline.accept(app.store, canaries.set, usual.id, "demo", datetime.now(UTC))
    pages = await Poison().craft(QUESTION, WRONG, np.random.default_rng(SEED))
    await app.guard.add(pages)
    try:
        answer = await app.guard.ask(Query(QUESTION, client="demo"))
        await canaries.run(pause_s=0)
        raised = open_alerts(app.store, canaries.set.name)
    finally:
        await app.guard.remove([page.source for page in pages])
    ids = {page.id for page in pages}
    alert = next((s.alert for s in raised if ids & set(s.alert.documents)), None)
    for _ in range(canaries.limits.passes):
        await canaries.run(pause_s=0)
    over = alert is not None and alert.id not in {s.alert.id for s in open_alerts(app.store, canaries.set.name)}
    out.print(Panel(_story(answer.text, alert, over), title="somebody poisons", title_align="left"))
    named = len(ids.intersection(alert.documents)) if alert else 0
    return Act(len(pages), answer.text, alert is not None, alert.title if alert else "", named, over)


def _story(answer: str, alert: Alert | None, over: bool) -> str:
    """The false answer, the alert as somebody would get it, and the end."""
    text = render(alert, Phase.OPENED).plain if alert else "the canaries noticed nothing"
    end = "The pages are removed, and the canaries say that all is well again." if over else "The alert is still open."
    return (
        "[bold]Somebody slips false pages into the collection.[/bold]\n\n"
        f"[red]{escape(QUESTION)}[/red] {escape(answer[:240])} ...\n\n"
        f"[green]the next run of the canaries:[/green] {escape(text.strip())}\n\n{escape(end)}"
    )
