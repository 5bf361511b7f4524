"""The alerts page: open and past alerts, with acknowledgement and closing, one by one or several at once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from casemate.errors import DataError
from casemate.gateway.dashboard.page import Page, PageRequest
from casemate.monitor.alerts import alert
from casemate.monitor.alerts.alert import AlertState
from casemate.monitor.alerts.alerting_store import SECURITY_SUBJECT
from casemate.monitor.alerts.messages import document_heading
from casemate.monitor.canaries.results import Severity
from casemate.protocols import EventStore
from casemate.reports.format import plural

MAX_PAST, MAX_CANARIES = 30, 8
MARKS = {"low": "·", "medium": "!", "high": "!!", "critical": "!!!"}


def alerts(request: PageRequest) -> Page:
    """Builds the page."""
    states = request.records.alert_states
    order = list(Severity)
    wanted = {name: request.parameter(name) for name in ("severity", "search")}
    matching = [s for s in states if _matches(s, wanted["severity"], wanted["search"])]
    opened = sorted(
        (s for s in matching if s.open),
        key=lambda s: (bool(s.acknowledged), -order.index(s.alert.severity), -s.changed.timestamp()),
    )
    past = [s for s in matching if not s.open and s.changed in request.time]
    past = sorted(past, key=lambda s: s.changed, reverse=True)[:MAX_PAST]
    context = {
        "wanted": wanted,
        "severities": [("", "all"), *((str(s), str(s)) for s in reversed(order))],
        "past_count": sum(not s.open for s in states),
        "open": [_card(request, s) for s in opened],
        "past": [_card(request, s) for s in past],
        "any": bool(states),
    }
    return Page("alerts.html", context)


def _matches(s: AlertState, severity: str, search: str) -> bool:
    a = s.alert
    texts = (a.title, a.set, *a.canaries, *a.changes, *a.documents)
    return severity in ("", str(a.severity)) and search.lower() in "\n".join(map(str, texts)).lower()


def _card(request: PageRequest, s: AlertState) -> dict[str, Any]:
    a = s.alert
    quarantine, security = a.kind == "quarantine", a.set == SECURITY_SUBJECT
    if security:  # about clients, or a tenant's quarantine; not about canaries
        about = ("Tenant" if quarantine else "Client", ", ".join(request.client_name(c).full for c in a.canaries))
    else:
        about = ("About", f"{a.set}: {', '.join(a.canaries[:MAX_CANARIES]) or 'all canaries'}")
    return {
        "state": s,
        "alert": a,
        "mark": MARKS[a.severity],
        "tone": a.severity if s.open else "plain",
        "about": about,
        "documents": document_heading(a.kind),
        "quarantine": quarantine,
        "security": security,
    }


async def acknowledge(request: PageRequest) -> str:
    """Acknowledges one alert, or all selected ones; returns the address to go to."""

    def work(store: EventStore, name: str) -> None:
        alert.acknowledge_alert(store, name, request.session.name, datetime.now(UTC))

    return await _apply(
        request, work, "Acknowledged {}. The next notification comes only if the severity rises or the alert ends."
    )


async def close(request: PageRequest) -> str:
    """Closes one alert by hand, or all selected ones; returns the address to go to."""
    reason = request.form.get("reason", "").strip()[:300] or "no reason given"
    text = f"closed by hand by {request.session.name}: {reason}"
    return await _apply(
        request, lambda store, name: alert.close_alert(store, name, text, datetime.now(UTC)), "Closed {}."
    )


async def _apply(request: PageRequest, work: Callable[[EventStore, str], object], done: str) -> str:
    """Applies an action to the alert of a form, or to the selected ones of which some may have ended meanwhile.

    Raises:
        DataError: If the alert of the form is not open.
    """
    own, count = request.form.get("id", ""), 0
    names = (own,) if own else request.selected
    for name in names:
        try:
            await request.in_thread(work, request.app.store, name)
            count += 1
        except DataError:
            if own:
                raise
    await request.in_thread(request.records.sync, True)
    missed = "No selected alert is open." if names else "No alert was selected."
    note = ("good", done.format(plural(count, "alert"))) if count else ("medium", missed)
    request.session.notes.append(note)
    return request.url("alerts")
