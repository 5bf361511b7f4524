"""Alerts: one for each cause, from the first sign to the all-clear.

An alert is what its events say: ``opened``, ``updated`` (more canaries, or graver), ``acknowledged``, ``recovered``.
Nothing else is kept, so a process that dies takes nothing along. Events carry ids that follow from their run: whoever
works through the same run again writes the same events, and the store keeps each once.

Canaries that begin to fail in the same run, or for the same new document, are one alert. While it is open its canaries
raise no other. Whoever notices something else that somebody must see, such as a honey token on its way out, opens an
alert of his own with ``raise_alert``.

No text of an answer or of a document is in an alert. Ids of documents are: they say where to look.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from casemate.errors import DataError
from casemate.monitor.canaries.results import Severity
from casemate.protocols import EventStore
from casemate.types import Event

KIND = "alert"
"""Events of this kind hold one change of one alert."""


class Phase(StrEnum):
    """What happened to an alert."""

    OPENED = "opened"
    UPDATED = "updated"
    ACKNOWLEDGED = "acknowledged"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that somebody must see.

    Attributes:
        id: Unique; also the key by which a pager knows it again.
        kind: What is wrong: ``changed``, ``many_at_once``, ``unreachable``, ``blind``, or any other word.
        severity: How grave it is.
        set: The canary set, or whatever else it is about.
        canaries: Those concerned.
        since: When it began, which may be long before it was noticed.
        title: One line.
        changes: What changed, a sentence each.
        documents: Ids of documents that are new in the answers since the baseline.
        advice: What to do, a sentence each.
    """

    id: str
    kind: str
    severity: Severity
    set: str
    canaries: tuple[str, ...]
    since: datetime
    title: str
    changes: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """How an alert stands.

    Attributes:
        alert: As it was told last.
        phase: What happened last, acknowledgements aside.
        opened: When it was opened.
        changed: When something last happened to it, acknowledgements aside.
        acknowledged: Who has taken note of it; empty: nobody.
        events: Ids of its events, oldest first.
    """

    alert: Alert
    phase: Phase
    opened: datetime
    changed: datetime
    acknowledged: str = ""
    events: tuple[str, ...] = field(default=())

    @property
    def open(self) -> bool:
        """Whether it is not recovered."""
        return self.phase is not Phase.RECOVERED


def identity(kind: str, about: str, occasion: str) -> str:
    """An id for an alert: equal for the same kind, set and occasion.

    >>> identity("changed", "clinic", "clinic@2026-03-01T12:00:00Z")
    'changed-aea553bdbccfabe9'
    """
    return f"{kind[:60]}-{_digest(kind, about, occasion)}"


def event(alert: Alert, phase: Phase, at: datetime, occasion: str, quiet: bool = False) -> Event:
    """One change of an alert, as it is kept.

    Args:
        alert: As it is from now on.
        phase: What happened.
        at: When.
        occasion: The run, or what else made it happen; the same change on the same occasion is kept once.
        quiet: Whether nobody is told.
    """
    about = "" if phase is Phase.OPENED else f":{_digest(occasion)}"
    body = asdict(alert) | {"since": alert.since.isoformat(), "phase": phase, "quiet": quiet}
    return Event(f"{KIND}:{phase}:{alert.id}{about}", at, KIND, body)


def of_event(kept: Event) -> Alert:
    """The alert as an event tells it."""
    body: Mapping[str, Any] = kept.body
    return Alert(
        body["id"],
        body["kind"],
        Severity(body["severity"]),
        body["set"],
        tuple(body["canaries"]),
        datetime.fromisoformat(body["since"]),
        body["title"],
        tuple(body["changes"]),
        tuple(body["documents"]),
        tuple(body["advice"]),
    )


def standings(events: Iterable[Event]) -> dict[str, Standing]:
    """How each alert stands after these events, by id, oldest first. Events of other kinds are left out."""
    found: dict[str, Standing] = {}
    for kept in events:
        if kept.kind != KIND:
            continue
        phase, name = Phase(kept.body["phase"]), str(kept.body["id"])
        before = found.get(name)
        if phase is Phase.ACKNOWLEDGED:
            if before:
                found[name] = replace(before, acknowledged=str(kept.body["by"]), events=(*before.events, kept.id))
            continue
        opened = before.opened if before else kept.at
        by, ids = (before.acknowledged, before.events) if before else ("", ())
        found[name] = Standing(of_event(kept), phase, opened, kept.at, by, (*ids, kept.id))
    return found


def open_alerts(store: EventStore, about: str | None = None) -> list[Standing]:
    """The alerts of a set, or of all, that are not recovered; oldest first.

    Raises:
        BackendError: If the store cannot be read.
    """
    found = standings(store.scan(KIND)).values()
    return [s for s in found if s.open and about in {None, s.alert.set}]


def raise_alert(store: EventStore, alert: Alert, at: datetime) -> bool:
    """Opens an alert, unless it was opened before, or one of the same kind about the same canaries of the set is open.

    Returns:
        Whether it was opened.

    Raises:
        BackendError: If the store cannot be read or written.
    """
    same = (alert.set, alert.kind, frozenset(alert.canaries))
    known = standings(store.scan(KIND))
    if alert.id in known or any(
        s.open and (s.alert.set, s.alert.kind, frozenset(s.alert.canaries)) == same for s in known.values()
    ):
        return False
    store.append(event(alert, Phase.OPENED, at, alert.id))
    return True


def acknowledge(store: EventStore, alert_id: str, by: str, at: datetime) -> None:
    """Notes that somebody has seen an alert: he hears of it again only if it gets graver or is over.

    Raises:
        DataError: If no such alert is open.
        BackendError: If the store cannot be read or written.
    """
    found = {s.alert.id: s for s in open_alerts(store)}
    if alert_id not in found:
        raise DataError(f"no open alert is called {alert_id!r}; open: {', '.join(found) or 'none'}")
    body = {"id": alert_id, "phase": Phase.ACKNOWLEDGED, "by": by}
    store.append(Event(f"{KIND}:{Phase.ACKNOWLEDGED}:{alert_id}:{_digest(by, at.isoformat())}", at, KIND, body))


def close(store: EventStore, alert_id: str, reason: str, at: datetime) -> None:
    """Ends an alert by hand, such as one that nothing can end by itself.

    Raises:
        DataError: If no such alert is open.
        BackendError: If the store cannot be read or written.
    """
    found = {s.alert.id: s.alert for s in open_alerts(store)}
    if alert_id not in found:
        raise DataError(f"no open alert is called {alert_id!r}; open: {', '.join(found) or 'none'}")
    ended = replace(found[alert_id], changes=(reason,), advice=())
    store.append(event(ended, Phase.RECOVERED, at, at.isoformat()))


def graver(one: Severity, other: Severity) -> bool:
    """Whether the first is graver than the second."""
    return list(Severity).index(one) > list(Severity).index(other)


def gravest(severities: Collection[Severity]) -> Severity:
    """The gravest of some; low if there are none."""
    return max(severities, key=list(Severity).index, default=Severity.LOW)


def one_worse(severity: Severity) -> Severity:
    """The next graver one, if there is one."""
    order: Sequence[Severity] = list(Severity)
    return order[min(order.index(severity) + 1, len(order) - 1)]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:16]
