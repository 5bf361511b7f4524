"""Renders alerts as text and Markdown: what changed, since when, which documents are new, and what to do.

Ids of documents and canaries may be chosen by an attacker. They are shortened, shown as code spans, and stripped of
characters by which a chat would mention people, follow a link or run a command.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from casemate.monitor.alerts.alert import Alert, AlertPhase

MAX_ITEMS = 10
"""Canaries and documents that a message lists; further ones are counted."""
HEADINGS = {
    "quarantine": "Quarantined documents, in no answer unless released",
    "honeytoken_crawl": "Honeytoken records that one client retrieved",
    "corpus": "Documents whose vectors do not match their texts",
    "drift": "Documents in more answers than before",
}
"""What the documents of an alert are, by its kind; of other kinds they are new in the answers."""
CLIENTS = {"honeytoken_leak", "honeytoken_known", "honeytoken_crawl", "crawl"}
"""Kinds of alerts about a client instead of canaries."""
SUBJECTS = {
    **dict.fromkeys(CLIENTS, "Client"),
    "quarantine": "Tenant",
    "crawl_tenant": "Tenant",
    "corpus": "Tenant",
    "drift": "Series",
}
"""What an alert is about, by its kind; alerts of other kinds are about canaries."""
CHANGED_SOURCES = "Documents that were changed or removed"
"""What the field ``changed`` of an alert contains."""
MAX_LENGTH = 160
"""Characters of an id or sentence that a message shows."""
_UNSAFE = str.maketrans({"`": "'", "<": "‹", ">": "›", "@": "＠", "|": "¦", "\\": "/"})


class AlertText(NamedTuple):
    """A rendered alert: a title on one line, and the message as plain text and as Markdown."""

    title: str
    plain: str
    markdown: str


def render_alert(alert: Alert, phase: AlertPhase, key_names: Mapping[str, str] | None = None) -> AlertText:
    """Renders one change of an alert.

    Names of API keys by id replace the ids; notifications, which name no person, get no names.
    """
    recovered = phase is AlertPhase.RECOVERED
    title = f"[{'recovered' if recovered else alert.severity}] {sanitize(alert.title)}"
    sections = [
        ("What happened" if recovered else "What changed", [sanitize(c) for c in alert.changes]),
        (SUBJECTS.get(alert.kind, "Canaries"), _code_spans(_subjects(alert, key_names or {}))),
        ("New sources in the answers", [] if recovered else _code_spans(alert.sources)),
        (document_heading(alert.kind), [] if recovered else _code_spans(alert.documents)),
        (CHANGED_SOURCES, [] if recovered else _code_spans(alert.changed)),
        ("What to do", list(alert.advice)),
    ]
    began = f"{'Began' if recovered else 'Since'} {alert.since:%Y-%m-%d %H:%M:%S} UTC. Alert {sanitize(alert.id)}."
    lists = [(name, _bullets(lines)) for name, lines in sections if lines]
    plain = [title, began, *(f"{name}:\n{listed.replace('`', '')}" for name, listed in lists)]
    markdown = [f"**{title}**", began, *(f"**{name}**\n\n{listed}" for name, listed in lists)]
    return AlertText(title, "\n\n".join(plain), "\n\n".join(markdown))


def _subjects(alert: Alert, key_names: Mapping[str, str]) -> list[str]:
    """What an alert is about; a client has the name of its key, if known, and the id."""
    found = list(alert.canaries)
    if alert.kind not in CLIENTS:
        return found
    names = [key_names.get(client.partition("/")[0], "") for client in found]
    return [f"{name} ({client})" if name else client for name, client in zip(names, found, strict=True)]


def document_heading(kind: str) -> str:
    """What the documents of an alert are.

    >>> document_heading("quarantine"), document_heading("changed")
    ('Quarantined documents, in no answer unless released', 'New documents in the answers')
    """
    return HEADINGS.get(kind, "New documents in the answers")


def summarize_alerts(alerts: Sequence[tuple[Alert, AlertPhase]]) -> AlertText:
    """Renders many changes as one message: each alert once, with its latest change."""
    last = {alert.id: (alert, phase) for alert, phase in alerts}
    about = f"{len(last)} alert{'' if len(last) == 1 else 's'}"
    title = f"{len(alerts)} more notifications about {about} (rate limit: monitor.notifications_per_hour)"
    lines = [
        f"{phase}: [{alert.severity}] {sanitize(alert.title)} ({sanitize(alert.id)})" for alert, phase in last.values()
    ]
    shown = [
        *lines[: 3 * MAX_ITEMS],
        *([f"and {len(lines) - 3 * MAX_ITEMS} more"] if len(lines) > 3 * MAX_ITEMS else []),
    ]
    return AlertText(title, f"{title}\n\n{_bullets(shown)}", f"**{title}**\n\n{_bullets(shown)}")


def sanitize(text: str) -> str:
    """Makes untrusted text safe to show in a chat message.

    >>> sanitize("<!channel> see [this](https://evil.example/x) `now`\u202e @all")
    "‹!channel› see [this] (https:⁄⁄evil.example/x) 'now' ＠all"
    """
    shown = "".join(c for c in text if c.isprintable()).translate(_UNSAFE)
    shown = " ".join(shown.split()).replace("://", ":⁄⁄").replace("](", "] (")
    return shown if len(shown) <= MAX_LENGTH else f"{shown[: MAX_LENGTH - 1]}…"


def _code_spans(names: Sequence[str]) -> list[str]:
    shown = [f"`{sanitize(name)}`" for name in names[:MAX_ITEMS]]
    more = f"and {len(names) - MAX_ITEMS} more; 'casemate canary alerts --json' lists all"
    return [*shown, *([more] if len(names) > MAX_ITEMS else [])]


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
