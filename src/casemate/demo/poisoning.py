"""The poisoning part of the demo: false pages are added to the collection, and canaries detect them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from casemate.monitor.alerts.alert import Alert, open_alerts
from casemate.monitor.alerts.messages import sanitize
from casemate.monitor.service import open_canary_monitor
from casemate.monitor.trends import baseline
from casemate.monitor.trends.cusum import MIN_PASSES
from casemate.redteam.attacks.poison import Poison
from casemate.reports.format import plural
from casemate.system import App
from casemate.types import Query

FILE = "canaries.yaml"
QUESTION, WRONG = "What does it cost to miss an appointment?", "90 crowns"
SEED = 7
SHOWN_CHANGES = 4
"""Changes of the alert that are printed."""


@dataclass(frozen=True, slots=True)
class Act:
    """Result, for JSON.

    Attributes:
        noticed: Whether the next canary run raised an alert.
        documents: Number of false pages that it names.
        recovered: Whether the alert closed after their removal.
    """

    planted: int
    answer: str
    noticed: bool
    alert: str
    documents: int
    recovered: bool


async def show_poisoning(app: App, out: Console) -> Act:
    """Records a baseline, adds false pages, runs the canaries, and removes the pages."""
    (app.config.folder / FILE).write_text(files("casemate.demo").joinpath(FILE).read_text("utf-8"), encoding="utf-8")
    canaries = open_canary_monitor(app)
    usual = await canaries.measure_baseline()
    baseline.accept_baseline(app.store, canaries.set, usual.id, "demo", datetime.now(UTC))
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
    for _ in range(MIN_PASSES):
        await canaries.run(pause_s=0)
    over = alert is not None and alert.id not in {s.alert.id for s in open_alerts(app.store, canaries.set.name)}
    out.print(Panel(_story(answer.text, alert, over), title="poisoning", title_align="left"))
    named = len(ids.intersection(alert.documents)) if alert else 0
    return Act(len(pages), answer.text, alert is not None, alert.title if alert else "", named, over)


def _story(answer: str, alert: Alert | None, over: bool) -> str:
    """The false answer, the alert text, and the outcome."""
    text = _alert_text(alert) if alert else "no alert: the canaries did not detect it"
    end = "The pages are removed, and all canaries pass again." if over else "The alert is still open."
    return (
        "[bold]False pages are added to the collection, without the screening of new documents.[/bold]\n\n"
        f"[red]{escape(QUESTION)}[/red] {escape(answer[:240])} ...\n\n"
        f"[green]the next run of the canaries:[/green] {escape(text.strip())}\n\n{escape(end)}"
    )


def _alert_text(alert: Alert) -> str:
    """The alert without its advice: title, the first changes, and number of named documents."""
    changes = [f"- {sanitize(change)}" for change in alert.changes[:SHOWN_CHANGES]]
    named = f"The alert names {plural(len(alert.documents), 'new document')}, and says what to do."
    return "\n".join((f"[{alert.severity}] {sanitize(alert.title)}", *changes, named))
