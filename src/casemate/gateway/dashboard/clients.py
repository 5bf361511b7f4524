"""The clients page: what each client asked and what was flagged, and resetting the state of clients."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import quote

from starlette.exceptions import HTTPException

from casemate.gateway.dashboard.page import Page, PageRequest
from casemate.gateway.dashboard.records import VerdictRecord, withheld_phrase
from casemate.gateway.dashboard.table import Column, Table
from casemate.guard.client_state import reset as client_reset
from casemate.reports.format import plural

BRIEF = 8
"""Rows of the summary."""


@dataclass(slots=True)
class ClientSummary:
    """The verdicts on one client of a tenant.

    Attributes:
        asked: Ids of its requests.
        flagged_by: Ids of those that were newly flagged, each with the defense.
        repeated: Ids of those from which a document was withheld again, because of an earlier question.
        limited: Ids of its requests whose context or answer ``crawl_limit`` limited.
    """

    tenant: str
    client: str
    last: datetime
    asked: set[str] = field(default_factory=set)
    flagged_by: set[tuple[str, str]] = field(default_factory=set)
    repeated: set[str] = field(default_factory=set)
    withheld: set[str] = field(default_factory=set)
    limited: set[str] = field(default_factory=set)

    @property
    def flagged(self) -> int:
        """Number of newly flagged requests."""
        return len(self._flagged)

    @property
    def again(self) -> int:
        """Number of requests from which documents were only withheld again."""
        return len(self.repeated - self._flagged)

    @property
    def _flagged(self) -> set[str]:
        return {request for request, _ in self.flagged_by}

    @property
    def defenses(self) -> Counter[str]:
        """Number of newly flagged requests by defense."""
        return Counter(defense for _, defense in self.flagged_by)

    @property
    def share(self) -> float:
        """Share of newly flagged requests, in [0, 1]."""
        return self.flagged / len(self.asked)

    @property
    def key(self) -> str:
        """Tenant and client as one value of a form."""
        return json.dumps([self.tenant, self.client])


def by_client(
    verdicts: Iterable[VerdictRecord],
    resets: Iterable[tuple[tuple[str, str], datetime]],
    cut: Collection[str] = (),
) -> list[ClientSummary]:
    """Summarizes verdicts by client. What was flagged, withheld or limited counts since the client's last reset.

    ``resets``: tenant and client of each, and its time. ``cut``: ids of requests whose answers ``crawl_limit`` cut.
    """
    last_reset = dict(resets)
    found: dict[tuple[str, str], ClientSummary] = {}
    for v in verdicts:
        one = found.setdefault((v.tenant, v.client), ClientSummary(v.tenant, v.client, v.at))
        one.last = max(one.last, v.at)
        one.asked.add(v.request or v.id)
        if (at := last_reset.get((v.tenant, v.client))) and v.at <= at:
            continue
        if v.limited or (v.defense == "crawl_limit" and v.enforced and v.request in cut):
            one.limited.add(v.request or v.id)
        if v.repeated:
            one.repeated.add(v.request or v.id)
        if v.newly_flagged:
            one.flagged_by.add((v.request or v.id, v.defense))
        if v.flagged:
            one.withheld.update(v.sources or v.hidden)
    return list(found.values())


def client_table(
    request: PageRequest, found: Sequence[ClientSummary], withheld: str = "withheld", brief: bool = False
) -> Table:
    """The table of clients; ``withheld``: see `withheld_phrase`; ``brief``: a summary without boxes and counts."""
    requests = Column("Requests", lambda c: len(c.asked), "requests", True)
    flagged = Column("Flagged", lambda c: c.flagged, "flagged", True)
    share = Column("Share", lambda c: c.share, "share", True)
    sources = Column(f"Sources {withheld}", lambda c: len(c.withheld), "withheld", True)
    limited = Column("Limited", lambda c: len(c.limited), "limited", True)
    last = Column("Last request", lambda c: c.last, "last", True)
    if brief:
        columns = (request.client_column, flagged, share, last)
        return request.table("Clients", columns, found, order="-flagged", name="clients", size=BRIEF)
    all_columns = ("", request.client_column, requests, flagged, share, sources, limited, last)
    return request.table("Clients", all_columns, found, order="-flagged")


def clients(request: PageRequest) -> Page:
    """Builds the page."""
    tenants = request.tenants
    wanted = {name: request.parameter(name) for name in ("client", "flagged", "asker")}
    verdicts = [
        v
        for v in request.verdicts(tenants)
        if wanted["asker"] == "all" or request.is_canary(v.client) is (wanted["asker"] == "canaries")
    ]
    found = [
        c
        for c in by_client(verdicts, request.records.resets.all, {*request.records.cut.all})
        if wanted["client"].lower() in f"{c.client} {request.client_name(c.client).full}".lower()
        and wanted["flagged"] in ("", "yes" if c.flagged else "no")
    ]
    withheld = withheld_phrase(verdicts)
    context = {
        "any": bool(verdicts),
        "missing": request.missing_events,
        "wanted": wanted,
        "tenants": tenants,
        "withheld": withheld,
        "listing": client_table(request, found, withheld),
    }
    return Page("clients.html", context)


async def reset(request: PageRequest) -> str:
    """Deletes the guard's evidence on the selected clients; returns the address to go to."""
    tenants = await request.in_thread(lambda: request.tenants)
    chosen = [_client(value) for value in request.selected]
    if any(tenant not in tenants for tenant, _ in chosen):
        raise HTTPException(403, "Your key is not for this tenant.")
    for tenant, client in chosen:
        await request.in_thread(client_reset.reset_client, request.app.store, tenant, client)
    await request.in_thread(request.records.sync, True)
    names = ", ".join(request.client_name(client).short for _, client in chosen[:3])
    more = f", and {len(chosen) - 3} more" if len(chosen) > 3 else ""
    if chosen:
        text = f"Reset {plural(len(chosen), 'client')}, from the next question on: {names}{more}."
        request.session.notes.append(("good", text))
    else:
        request.session.notes.append(("medium", "No client was selected."))
    verdict = request.form.get("verdict", "")
    return request.url(f"verdicts/{quote(verdict, safe='')}" if verdict else "clients")


def _client(value: str) -> tuple[str, str]:
    """Tenant and client of a form's value."""
    try:
        tenant, client = json.loads(value)
    except (ValueError, TypeError, RecursionError):
        raise HTTPException(400, "The form cannot be read.") from None
    return str(tenant), str(client)
