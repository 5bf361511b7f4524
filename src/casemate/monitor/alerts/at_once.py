"""Honey that somebody has touched, and documents that were held back: each an alert at once.

The guard and the quarantine write events; they know nothing of alerts. Here an event becomes an alert. ``Alarming``
stands before the event store and does it as the event is written; ``Missed`` does it afterwards, for what other
processes have written. Both open the same alerts, so both may be used. One client makes one alert of a kind in an hour,
however often he tries, and all clients of a tenant make ``GROUPS`` at most: nobody drowns other alerts by new names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from casemate.events import EventStore, Relay
from casemate.monitor.alerts.alert import KIND as ALERT
from casemate.monitor.alerts.alert import Alert, Phase, identity
from casemate.monitor.alerts.alert import event as change_of
from casemate.monitor.canaries.results import Severity, write
from casemate.types import Event

DEFENSE = "honeytoken"
KINDS = ("verdict", "quarantine")
"""Events of these kinds may call for an alert."""
LOOK_BACK = timedelta(days=1)
"""How old an event may be that still does, once it has been missed."""
ABOUT = "honey"
"""What these alerts say they are about, where others name a canary set."""
GROUPS = 4
"""Alerts of a kind in an hour; clients fall into as many groups by their names, and the first of a group is told."""
NAMED = 64
"""Characters of a client's name that are told."""


def alert_of(event: Event) -> Alert | None:
    """The alert that an event calls for; None: none."""
    body = event.body
    if event.kind == "quarantine" and body.get("what") == "held":
        return _held(event)
    if event.kind != "verdict" or body.get("defense") != DEFENSE or not body.get("flagged"):
        return None
    evidence: Mapping[str, Any] = body.get("evidence", {})
    if evidence.get("what") == "leaked":
        return _leaked(event, evidence)
    if evidence.get("what") == "known to the asker":
        return _known(event)
    return _crawled(event, evidence) if evidence.get("crawler") else None


class Alarming(Relay):
    """An event store that opens alerts for what is written through it, at once."""

    def append(self, event: Event) -> None:
        """As the store's; the alert is appended behind the event. Its id follows from it: the store keeps it once."""
        super().append(event)
        if alert := alert_of(event):
            super().append(change_of(alert, Phase.OPENED, event.at, alert.id))


class Missed:
    """Events that call for an alert that nobody opened: whoever wrote them died over it, or knows nothing of alerts.

    Args:
        store: Where they are.
    """

    def __init__(self, store: EventStore) -> None:
        self._store = store
        self._places = dict.fromkeys(KINDS, 0)

    def open(self, now: datetime) -> int:
        """Opens the alerts; how many. Each event is looked at once, and none that is older than a day.

        Raises:
            BackendError: If the store cannot be read or written.
        """
        found: dict[str, Event] = {}
        places = dict(self._places)
        for kind, place in self._places.items():
            events, places[kind] = self._store.follow(kind, place, now - LOOK_BACK)
            alerts = ((event, alert) for event in events if (alert := alert_of(event)))
            for event, alert in alerts:
                found.setdefault(alert.id, change_of(alert, Phase.OPENED, event.at, alert.id))
        known = {e.body["id"] for e in self._store.scan(ALERT, now - 2 * LOOK_BACK)} if found else set()
        missed = [event for name, event in found.items() if name not in known]
        write(self._store, missed)
        self._places = places  # not before: a store that fails is asked again
        return len(missed)


def _leaked(event: Event, evidence: Mapping[str, Any]) -> Alert:
    form, generation, disguise = (evidence.get(name, "?") for name in ("form", "generation", "disguise"))
    what = f"the {form} token of generation {generation}, as {disguise}"
    return replace(
        _alert("honey_leak", Severity.CRITICAL, event, "The instructions were on their way out"),
        changes=(f"An answer held {what}; it was cut before the token left.",),
        advice=(
            f"Look at request {event.body.get('request', '?')}: its asker has words that make the model tell its "
            "instructions.",
            "Plant new tokens: casemate canary rotate.",
        ),
    )


def _known(event: Event) -> Alert:
    return replace(
        _alert("honey_known", Severity.HIGH, event, "An asker has a token of the instructions"),
        changes=("A question held a whole token; nobody knows it who has not been told.",),
        advice=(
            "Find out how it came out: search logs and answers for it.",
            "Plant new tokens: casemate canary rotate.",
        ),
    )


def _crawled(event: Event, evidence: Mapping[str, Any]) -> Alert:
    return replace(
        _alert("honey_crawl", Severity.HIGH, event, "A client goes through the corpus"),
        changes=(f"{evidence.get('different', 'Several')} different made-up records were shown to one client.",),
        documents=tuple(evidence.get("flagged", ())),
        advice=(
            "See what else this client has asked; limit him (crawl_limit), or shut him out.",
            "Others may do the same: see the verdicts of honeytoken in this hour.",
        ),
    )


def _held(event: Event) -> Alert:
    body = event.body
    reasons = "; ".join(body.get("reasons", ())) or "no reason is noted"
    return replace(
        _alert("quarantine", Severity.MEDIUM, event, "New documents were held back"),
        changes=(f"A new document of tenant {body.get('tenant')!r} is in quarantine: {reasons}.",),
        documents=tuple(d["id"] for d in body.get("documents", ())) + tuple(body.get("companions", ())),
        advice=(
            f"Look at it, and release or drop it by its key, {body.get('key', '?')[:8]}.",
            "See what else is held: casemate quarantine list.",
        ),
    )


def _alert(kind: str, severity: Severity, event: Event, title: str) -> Alert:
    """One for each kind, tenant and group of clients in an hour."""
    client, tenant = str(event.body.get("client", "")), str(event.body.get("tenant", ""))
    group = int(hashlib.sha256(client.encode(errors="surrogatepass")).hexdigest(), 16) % GROUPS
    occasion = f"{group}@{event.at:%Y-%m-%dT%H}"
    who = client[:NAMED] or tenant[:NAMED]
    return Alert(identity(kind, tenant, occasion), kind, severity, ABOUT, (who,), event.at, title)
