"""The alerts: what somebody must see, who has seen it, and what is over."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from casemate.gateway.dashboard.page import Look, Page, chip, empty, facts, link, names, post, section, url, when
from casemate.gateway.dashboard.verdicts import field
from casemate.lab.charts import Markup, join, tag
from casemate.monitor.alerts import alert
from casemate.monitor.alerts.alert import Standing
from casemate.monitor.alerts.at_once import ABOUT
from casemate.monitor.canaries.results import Severity

PAST, NAMED = 30, 6
"""Alerts shown of those that are over, and documents named in one."""


def alerts(look: Look) -> Page:
    """The page."""
    standing = look.records.standings
    order = list(Severity)
    opened = sorted(
        (s for s in standing if s.open),
        key=lambda s: (bool(s.acknowledged), -order.index(s.alert.severity), -s.changed.timestamp()),
    )
    over = sorted((s for s in standing if not s.open), key=lambda s: s.changed, reverse=True)[:PAST]
    if opened:
        first: Markup = tag("div", *(_card(look, s) for s in opened), class_="alerts")
    elif standing:
        first = empty("No alert is open.", "Below is what there was.")
    else:
        first = empty(
            "There has never been an alert.",
            "They come from canaries ('casemate canary watch') and from honey tokens that appear in answers.",
            "To be told by webhook or mail, set monitor.channels in casemate.yaml.",
        )
    body = [section("Open", first, id="open")]
    if over:
        body.append(section("Over", tag("div", *(_card(look, s) for s in over), class_="alerts past"), id="over"))
    return Page("Alerts", join(body))


def _card(look: Look, s: Standing) -> Markup:
    a = s.alert
    state = (
        "over"
        if not s.open
        else f"acknowledged by {s.acknowledged}"
        if s.acknowledged
        else "nobody has acknowledged it"
    )
    tone = a.severity if s.open else "plain"
    changes = [tag("ul", *(tag("li", c) for c in a.changes), class_="plain")] if a.changes else []
    advice = [tag("h4", "What to do"), tag("ul", *(tag("li", c) for c in a.advice), class_="plain")] if a.advice else []
    about: list[tuple[str, str]] = [
        ("Since", when(a.since)),
        ("Opened", when(s.opened)),
        ("Last change", when(s.changed)),
    ]
    held = a.kind == "quarantine"
    if a.set == ABOUT:  # of one event, and no canary's
        about.append(("Tenant" if held else "Client", ", ".join(map(look.client, a.canaries))))
    else:
        about.append(("About", f"{a.set}: " + (", ".join(a.canaries[:8]) or "all of it")))
    if a.documents:
        what = "Held back" if held else "Records shown" if a.set == ABOUT else "New documents in the answers"
        about.append((what, names(a.documents, NAMED) if held else _documents(a.documents)))
    return tag(
        "article",
        tag("header", chip(f"{_mark(a.severity)} {a.severity}", tone), tag("span", state, class_="soft")),
        tag("h3", a.title),
        *changes,
        *advice,
        facts(about),
        *([_acts(look, s)] if s.open else []),
        class_=f"alert {tone}{' known' if s.acknowledged else ''}",
        id=f"a-{a.id}",
    )


def _documents(documents: Sequence[str]) -> Markup:
    """Ids of chunks, each a way to its source in the list."""
    more = [f"and {len(documents) - NAMED} more"] if len(documents) > NAMED else []
    return join([*(link(d, "documents", source=d.partition("#")[0]) for d in documents[:NAMED]), *more], ", ")


def _mark(severity: Severity) -> str:
    return {"low": "·", "medium": "!", "high": "!!", "critical": "!!!"}[severity]


def _acts(look: Look, s: Standing) -> Markup:
    parts = []
    if not s.acknowledged:
        button = tag("button", "Acknowledge", aria_label=f"Acknowledge: {s.alert.title}")
        parts.append(post(look, "alerts/acknowledge", button, id=s.alert.id))
    reason = field("Why it is over", "reason", "", required="required")
    inside = post(look, "alerts/close", reason, tag("button", "Close it", class_="quiet"), id=s.alert.id)
    parts.append(tag("details", tag("summary", "Close by hand"), inside))
    if s.alert.kind == "quarantine":
        parts.append(link("Quarantine", "quarantine"))
    elif s.alert.set != ABOUT:
        parts.append(link("Canaries", "canaries"))
    elif s.alert.canaries:
        parts.append(link("His verdicts", "verdicts", client=s.alert.canaries[0]))
    return tag("div", *parts, class_="acts")


async def acknowledge(look: Look) -> str:
    """Notes that somebody has seen an alert; returns where to go."""
    name = look.form.get("id", "")
    await look.aside(alert.acknowledge, look.app.store, name, look.session.name, datetime.now(UTC))
    await look.aside(look.records.follow, True)
    look.session.notes.append(("good", "Acknowledged. You hear of it again only if it gets graver, or is over."))
    return url("alerts")


async def close(look: Look) -> str:
    """Ends an alert by hand; returns where to go."""
    reason = look.form.get("reason", "").strip()[:300] or "no reason was given"
    told = f"closed by hand by {look.session.name}: {reason}"
    await look.aside(alert.close, look.app.store, look.form.get("id", ""), told, datetime.now(UTC))
    await look.aside(look.records.follow, True)
    look.session.notes.append(("good", "Closed."))
    return url("alerts")
