"""The enforcement page: what would have been withheld from recorded traffic, and the switch."""

from __future__ import annotations

from typing import Any

from casemate.gateway.dashboard.page import Page, PageRequest
from casemate.gateway.dashboard.records import MAX_VERDICTS
from casemate.gateway.dashboard.table import Column
from casemate.monitor import enforcement
from casemate.monitor.enforcement import DefensePreview, GuardMode
from casemate.reports.format import sample_rate

COLUMNS = (
    Column("Defense", lambda row: row["name"], "defense"),
    Column("Questions", lambda row: row["preview"].questions, "questions", True),
    Column("Withheld", lambda row: row["preview"].affected, "withheld", True),
    Column("Repeated", lambda row: row["preview"].repeated, "repeated", True),
    Column("Sessions", lambda row: row["preview"].sessions, "sessions", True),
    Column("Undecided", lambda row: row["preview"].undecided, "undecided", True),
    Column("Failed", lambda row: row["preview"].failed, "failed", True),
)


def page(request: PageRequest) -> Page:
    """Builds the page. Blocks."""
    app, time = request.app, request.time
    until = None if time.preset else time.end
    preview = enforcement.read_preview(app.store, time.start, request.is_canary, MAX_VERDICTS, until)
    rate, about = sample_rate(preview.affected, preview.questions)
    rows = [_row(request, name, d) for name, d in preview.defenses.items()]
    context: dict[str, Any] = {
        "mode": app.mode,
        "preview": preview,
        "rate": rate,
        "about": about,
        "most": MAX_VERDICTS,
        "rows": rows,
        "listing": request.table("What each defense would have withheld", COLUMNS, rows),
        "gate": app.config.monitor.gate,
    }
    return Page("enforcement.html", context)


def _row(request: PageRequest, name: str, d: DefensePreview) -> dict[str, Any]:
    rate, about = sample_rate(d.affected, d.questions)
    columns = (
        Column("Time", lambda e: e.at, "at", True),
        request.client_column,
        "Request",
        Column("Withheld", lambda e: len(e.hidden), "withheld", True),
    )
    return {
        "name": name,
        "rate": rate,
        "about": about,
        "preview": d,
        "examples": request.table(f"Questions affected by {name}", columns, d.examples[::-1], name=name),
        "url": request.url("verdicts", defense=name, outcome="flagged"),
    }


async def switch(request: PageRequest) -> str:
    """Switches enforcement on or off; returns the address to go to."""
    mode: GuardMode = "enforce" if request.form.get("mode") == "enforce" else "observe"
    enforcement.require_switchable(request.app.config, request.app.mode, mode)
    file = request.app.config.file
    why = await request.in_thread(enforcement.switch, request.app.store, file, mode, request.session.name)
    request.app.guard.enforce = mode == "enforce"
    text = "Enforcement is on." if mode == "enforce" else "The guard observes: nothing is withheld."
    request.note_setting(text, "for running gateways", why)
    return request.url("enforcement")
