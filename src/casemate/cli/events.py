"""``events``: writes recorded events of a time range as JSON lines, for a SIEM or an archive."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from casemate import config as configuration
from casemate.app import open_app
from casemate.cli.console import ConfigFile, print_json
from casemate.errors import ConfigError
from casemate.monitor.canaries.canary import INTERVAL, parse_interval
from casemate.types import Event

EXPORTED: Mapping[str, tuple[str, ...]] = {
    "verdict": ("request", "client", "tenant", "k", "defense", "flagged", "action", "score", "threshold", "hidden",
                "evidence", "enforced"),
    "request": ("request", "client", "tenant", "route", "status", "seconds"),
    "alert": ("id", "phase", "kind", "severity", "set", "canaries", "since", "title", "documents", "sources", "changed",
              "advice", "by"),
    "delivery": ("alert", "channel", "number", "outcome", "reason", "notification"),
    "quarantine": ("what", "key", "tenant", "source", "score", "reasons", "companions"),
    "screening": ("key", "tenant", "source", "score", "reasons"),
    "ingest": ("action", "key", "tenant", "sources", "chunks", "quarantined"),
    "corpus-update": ("tenant", "sources"),
    "key": ("action", "key", "role", "name", "tenant", "labels", "groups"),
    "login": ("action", "key"),
    "setting": ("name", "defense", "tenant", "before", "after", "by"),
    "canary-run": ("set", "run", "judged", "failed", "errors", "p_value", "alarmed", "recovered", "unreachable"),
    "canary": ("canary", "run", "status", "error", "seconds", "documents", "sources", "refused", "words", "withheld"),
}  # fmt: skip
"""Fields of each kind that are exported. Others are not: they may be texts, digests of secrets, or internal state."""
TEXTS: Mapping[str, tuple[str, ...]] = {
    "verdict": ("text",),
    "canary": ("text", "deviations"),
    "alert": ("changes",),
    "quarantine": ("documents",),
}
"""Fields with raw text: a question, an answer, expected and forbidden phrases, quarantined documents. Those named
``text`` are recorded only with ``privacy.log_text``."""


def events(
    since: Annotated[str, typer.Option(help="Start: how far back, such as 24h, or a time in ISO 8601 (UTC).")] = "24h",
    until: Annotated[str, typer.Option(help="End, excluded, in the same form. Default: now.")] = "",
    kind: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help="Only this kind; repeat for several. Default: all.")
    ] = None,
    text: Annotated[
        bool,
        typer.Option("--text", help="Include questions, answers, phrases of canaries and quarantined documents."),
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Write the events of a time range as JSON lines, oldest first. Without --text no line contains raw text."""
    if unknown := sorted({*(kind or ())} - EXPORTED.keys()):
        raise ConfigError(f"unknown kind {unknown[0]!r}; the kinds are {', '.join(EXPORTED)}")
    now = datetime.now(UTC)
    start, end = _parse_time(since, now), _parse_time(until, now) if until else now
    if not start < end:
        raise ConfigError(f"--since {since!r} is not before --until {until or 'now'!r}; choose an earlier start")
    settings = configuration.read(config)
    with open_app(settings) as app:
        names = dict.fromkeys(kind or EXPORTED)
        found = [event for name in names for event in app.store.scan(name, start) if event.at < end]
    for event in sorted(found, key=lambda event: event.at):
        line = _as_json(event, text)
        if settings.monitor.is_canary(str(event.body.get("client", ""))):
            line["body"]["canary"] = True
        print_json(line, indent=None)


def _parse_time(text: str, now: datetime) -> datetime:
    """A time in ISO 8601, in UTC unless it names a zone; or how far back."""
    try:
        if INTERVAL.fullmatch(text):
            return now - parse_interval(text)
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{text!r} is not a time between the years 1 and 9999; write how far back, such as 24h (s, m, h or d), or "
            "a time in ISO 8601, such as 2026-03-01T12:00:00Z"
        ) from None


def _as_json(event: Event, text: bool) -> dict[str, Any]:
    """The exported part of an event; of quarantined documents the ids, of deviations the kinds."""
    names = (*EXPORTED[event.kind], *(TEXTS.get(event.kind, ()) if text else ()))
    body = {name: event.body[name] for name in names if name in event.body}
    if event.kind == "quarantine":
        body["document_ids"] = [document["id"] for document in event.body.get("documents", ())]
    if event.kind == "canary" and not text:  # the messages of deviations quote phrases
        body["deviations"] = [{"kind": deviation["kind"]} for deviation in event.body.get("deviations", ())]
    return {"id": event.id, "at": event.at.isoformat(), "kind": event.kind, "body": body}
