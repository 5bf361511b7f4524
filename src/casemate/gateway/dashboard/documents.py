"""The document pages: sources of the corpus, their removal, and the quarantine, one by one or several at once."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.exceptions import HTTPException

from casemate.errors import DataError
from casemate.gateway.dashboard.page import Page, PageRequest
from casemate.gateway.dashboard.records import VerdictRecord
from casemate.gateway.dashboard.table import Column
from casemate.monitor.poisoning.quarantine import Quarantine, QuarantinedSource
from casemate.reports.format import plural
from casemate.types import Event

MAX_TEXT = 4000
"""Characters of a quarantined text that are shown."""
REVIEWED = (
    Column("Quarantined", lambda q: q.at, "at", True),
    Column("Source", lambda q: q.source.lower(), "source"),
    Column("Decision", lambda q: q.state, "decision"),
    "Reasons",
)


def sources(request: PageRequest) -> Page:
    """Builds the list of sources."""
    tenants = request.tenants
    tenant, search = request.tenant(tenants), request.parameter("source")
    held = request.app.index.digests(tenant)
    withheld = Counter(
        source for v in request.verdicts([tenant]) if v.flagged for source in _sources(v) if source in held
    )
    found = sorted(name for name in held if search.lower() in name.lower())
    columns = (
        "",
        Column("Source", lambda row: row["source"].lower(), "source"),
        Column("Withheld from requests", lambda row: row["withheld"], "withheld", True),
        "",
    )
    rows = [{"source": name, "withheld": withheld[name]} for name in found]
    context = {
        "tenants": tenants,
        "tenant": tenant,
        "search": search,
        "total": len(held),
        "chunks": request.app.index.moments(tenant).n,
        "listing": request.table("Sources", columns, rows, order="source"),
    }
    return Page("documents.html", context)


def _sources(v: VerdictRecord) -> set[str]:
    """Sources that a verdict withheld; ids of chunks where the defense does not report sources."""
    sources = v.evidence.get("withheld")
    return set(map(str, sources)) if isinstance(sources, list | tuple) and sources else set(v.hidden)


def confirm_removal(request: PageRequest) -> Page:
    """Builds the page that asks for confirmation before sources are removed."""
    tenant, held = request.tenant(request.tenants), request.app.index.digests(request.tenant(request.tenants))
    asked = dict.fromkeys(source[:4000] for source in request.http.query_params.getlist("source"))
    found = [source for source in asked if source in held]
    if not found:
        raise HTTPException(404, "No document has this source. Select one; it may have been removed.")
    return Page("remove_source.html", {"tenant": tenant, "sources": found})


async def remove(request: PageRequest) -> str:
    """Removes the selected sources; returns the address to go to."""
    tenants = await request.in_thread(lambda: request.tenants)
    tenant, sources = _form_tenant(request, tenants), list(request.selected)
    removed = await request.app.guard.remove(sources, tenant) if sources else 0
    if not removed:
        raise HTTPException(404, "No document has this source. It may have been removed.")
    body = {
        "action": "removed",
        "key": request.session.key.id,
        "tenant": tenant,
        "sources": len(sources),
        "chunks": removed,
    }
    request.app.store.append(Event(uuid.uuid4().hex, datetime.now(UTC), "ingest", body))
    due = await request.in_thread(request.app.due, tenant)
    name = sources[0][:200] if len(sources) == 1 else plural(len(sources), "source")
    request.session.notes.append(("good", f"Removed {name}: {plural(removed, 'chunk')}."))
    if due:
        request.session.notes.append(("medium", due))
    return request.url("documents", tenant=tenant)


def _form_tenant(request: PageRequest, tenants: Sequence[str]) -> str:
    given = request.form.get("tenant", "")
    if given not in tenants:
        raise HTTPException(403, "Your key is not for this tenant.")
    return given


def quarantine(request: PageRequest) -> Page:
    """Builds the page of quarantined sources."""
    tenants = request.tenants
    found = [q for q in Quarantine(request.app.store).all().values() if q.tenant in tenants]
    search = request.parameter("search")
    found = [q for q in found if search.lower() in "\n".join((q.source, *q.reasons)).lower()]
    decided = [q for q in found if q.state != "held" and q.at in request.time]
    context = {
        "search": search,
        "waiting": [_card(q) for q in found if q.state == "held"],
        "reviewed": request.table("Reviewed sources", REVIEWED, decided, order="-at"),
        "gate": request.app.config.monitor.gate,
    }
    return Page("quarantine.html", context)


def _card(source: QuarantinedSource) -> dict[str, Any]:
    text = "\n\n".join(d.content for d in source.documents)
    more = f"\n… {len(text) - MAX_TEXT:,} more characters" if len(text) > MAX_TEXT else ""
    return {"source": source, "text": text[:MAX_TEXT] + more}


async def release(request: PageRequest) -> str:
    """Releases the selected sources from quarantine into the index; returns the address to go to."""
    sources = await _quarantined(request)
    for one in sources:
        await Quarantine(request.app.store).release(one.key, request.app.guard)
    request.session.notes.append(("good", f"Released {_named(sources)} into the index."))
    return request.url("quarantine")


async def drop(request: PageRequest) -> str:
    """Drops the selected sources; returns the address to go to."""
    sources = await _quarantined(request)
    for one in sources:
        await Quarantine(request.app.store).drop(one.key, request.app.guard)
    text = f"Dropped {_named(sources)}. Dropped sources stay out of the index while their content is unchanged."
    request.session.notes.append(("good", text))
    return request.url("quarantine")


def _named(sources: Sequence[QuarantinedSource]) -> str:
    return sources[0].source[:200] if len(sources) == 1 else plural(len(sources), "source")


async def _quarantined(request: PageRequest) -> list[QuarantinedSource]:
    """Returns the sources that a form is about, all of them checked before the first is changed.

    Raises:
        HTTPException: If none was selected, or one belongs to another tenant.
        DataError: If one was released or dropped in the meantime.
    """
    keys = request.selected
    if not keys:
        raise HTTPException(404, "There is no such source in quarantine. Select at least one.")
    held = await request.in_thread(Quarantine(request.app.store).all)
    tenants = await request.in_thread(lambda: request.tenants)
    found = [held[key] for key in keys if key in held and held[key].tenant in tenants]
    if len(found) < len(keys):
        raise HTTPException(404, "There is no such source in quarantine.")
    if ended := next((q for q in found if q.state != "held"), None):
        raise DataError(f"{ended.source} was already {ended.state}")
    return found
