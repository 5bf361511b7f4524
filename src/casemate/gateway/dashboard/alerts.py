"""The alerts page: open and past alerts, with acknowledgement and closing, one by one or several at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

from casemate.errors import DataError
from casemate.gateway.dashboard.page import Page, PageRequest
from casemate.monitor.alerts import alert
from casemate.monitor.alerts.alert import SECURITY_SUBJECT, AlertState
from casemate.monitor.alerts.messages import document_heading
from casemate.monitor.canaries.results import Severity
from casemate.protocols import EventStore
from casemate.reports.format import plural

MAX_PAST, MAX_CANARIES = 30, 8
MARKS = {"low": "·", "medium": "!", "high": "!!", "critical": "!!!"}


def alerts(request: PageRequest) -> Page:
    """Builds the page."""
    states = request.records.alert_states
    wanted = {name: request.parameter(name) for name in ("severity", "search")}
    matching = [s for s in states if _matches(s, wanted["severity"], wanted["search"])]
    opened = sorted(
        (s for s in matching if s.open),
        key=lambda s: (bool(s.acknowledged), -s.alert.severity.rank, -s.changed.timestamp()),
    )
    past = [s for s in matching if not s.open and s.changed in request.time]
    past = sorted(past, key=lambda s: s.changed, reverse=True)[:MAX_PAST]
    context = {
        "wanted": wanted,
        "severities": [("", "all"), *((str(s), str(s)) for s in reversed(Severity))],
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


ACKNOWLEDGED = "Acknowledged {}. The next notification comes only if the severity rises or the alert ends."
CLOSED = "Closed {}."


async def acknowledge(request: PageRequest) -> str:
    """Acknowledges one alert, or all selected ones; returns the address to go to."""
    return await _apply(request, _acknowledgment(request), ACKNOWLEDGED)


async def close(request: PageRequest) -> str:
    """Closes one alert by hand, or all selected ones; returns the address to go to."""
    return await _apply(request, _closing(request), CLOSED)


async def acknowledge_canaries(request: PageRequest) -> str:
    """Acknowledges the open alerts about the selected canaries; returns the address to go to."""
    return await _apply_to_canaries(request, _acknowledgment(request), ACKNOWLEDGED)


async def close_canaries(request: PageRequest) -> str:
    """Closes the open alerts about the selected canaries; returns the address to go to."""
    return await _apply_to_canaries(request, _closing(request), CLOSED)


def canary_key(set_: str, canary: str) -> str:
    """Value of the box that selects a canary."""
    return f"{set_}/{canary}"


def about_canaries(states: Iterable[AlertState], keys: Collection[str]) -> list[AlertState]:
    """The open alerts about some canaries, given by `canary_key`. One without canaries is about the whole set."""
    return [
        s
        for s in states
        if s.open
        and s.alert.set != SECURITY_SUBJECT
        and (
            any(canary_key(s.alert.set, canary) in keys for canary in s.alert.canaries)
            or (not s.alert.canaries and any(key.startswith(canary_key(s.alert.set, "")) for key in keys))
        )
    ]


_Work: TypeAlias = Callable[[EventStore, str], object]


def _acknowledgment(request: PageRequest) -> _Work:
    return lambda store, name: alert.acknowledge_alert(store, name, request.session.name, datetime.now(UTC))


def _closing(request: PageRequest) -> _Work:
    reason = request.form.get("reason", "").strip()[:300] or "no reason given"
    text = f"closed by hand by {request.session.name}: {reason}"
    return lambda store, name: alert.close_alert(store, name, text, datetime.now(UTC))


async def _apply_to_canaries(request: PageRequest, work: _Work, done: str) -> str:
    names = [s.alert.id for s in about_canaries(request.records.alert_states, request.selected)]
    missed = "No open alert is about the selected canaries." if request.selected else "No canary was selected."
    note = (
        ("good", done.format(plural(await _apply_each(request, work, names), "alert"))) if names else ("medium", missed)
    )
    request.session.notes.append(note)
    return request.url("canaries")


async def _apply(request: PageRequest, work: _Work, done: str) -> str:
    """Applies an action to the alert of a form, or to the selected ones of which some may have ended meanwhile."""
    own = request.form.get("id", "")
    names = (own,) if own else request.selected
    count = await _apply_each(request, work, names, required=bool(own))
    missed = "No selected alert is open." if names else "No alert was selected."
    note = ("good", done.format(plural(count, "alert"))) if count else ("medium", missed)
    request.session.notes.append(note)
    return request.url("alerts")


async def _apply_each(request: PageRequest, work: _Work, names: Sequence[str], required: bool = False) -> int:
    """Applies an action to each open alert, and returns their number; ``DataError`` if a required one is not open."""
    count = 0
    for name in names:
        try:
            await request.in_thread(work, request.app.store, name)
            count += 1
        except DataError:
            if required:
                raise
    await request.in_thread(request.records.sync, True)
    return count
