"""The document pages: sources of the corpus, their removal, and the quarantine, one by one or several at once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rapidfuzz.distance import Levenshtein
from starlette.exceptions import HTTPException

from casemate.errors import CasemateError, DataError
from casemate.gateway.dashboard.page import Page, PageRequest
from casemate.gateway.dashboard.records import withheld_phrase
from casemate.gateway.dashboard.table import Column
from casemate.monitor.poisoning.quarantine import Quarantine, QuarantinedSource
from casemate.monitor.service import missing_screening
from casemate.monitor.trends.baseline import record_if_changed
from casemate.reports.format import plural
from casemate.types import Document, Vector

MAX_TEXT = 4000
"""Characters of a quarantined text that are shown."""
MAX_COMPARED, CLOSEST = 10, 20
"""Chunks of a quarantined source that are compared, and chunks of the index among which its own are searched."""
_END = ("equal", 0, 0, 0, 0)
"""An empty equal part, which ends the last change."""
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
    verdicts = request.verdicts([tenant])
    # ids of chunks where the defense does not report sources
    hits = Counter(s for v in verdicts if v.flagged for s in {*(v.sources or v.hidden)} if s in held)
    withheld = withheld_phrase(verdicts).capitalize()
    found = sorted(name for name in held if search.lower() in name.lower())
    columns = (
        "",
        Column("Source", lambda row: row["source"].lower(), "source"),
        Column(withheld, lambda row: row["withheld"], "withheld", True),
        "",
    )
    rows = [{"source": name, "withheld": hits[name]} for name in found]
    context = {
        "tenants": tenants,
        "tenant": tenant,
        "withheld": withheld,
        "search": search,
        "total": len(held),
        "chunks": request.app.index.moments(tenant).n,
        "listing": request.table("Sources", columns, rows, order="source"),
    }
    return Page("documents.html", context)


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
    await request.in_thread(record_if_changed, request.app.store, request.app.index, tenant, dict.fromkeys(sources, ""))
    removed = await request.app.guard.remove(sources, tenant) if sources else 0
    if not removed:
        raise HTTPException(404, "No document has this source. It may have been removed.")
    request.gateway.record_ingest(request.session.key, "removed", len(sources), removed, tenant=tenant)
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
        "unscreened": _unscreened(request, tenants),
    }
    return Page("quarantine.html", context)


def _unscreened(request: PageRequest, tenants: Sequence[str]) -> list[str]:
    """One sentence for each tenant whose documents are not screened although it is configured."""
    try:
        found = {tenant: missing_screening(request.app, tenant) for tenant in tenants}
    except CasemateError as error:
        return [f"The index cannot be read: {error}."]
    return [f"Screening of tenant {tenant} is {why}." for tenant, why in found.items() if why]


def _card(source: QuarantinedSource) -> dict[str, Any]:
    text = "\n\n".join(d.content for d in source.documents)
    more = f"\n… {len(text) - MAX_TEXT:,} more characters" if len(text) > MAX_TEXT else ""
    return {"source": source, "text": text[:MAX_TEXT] + more}


def quarantined(request: PageRequest) -> Page:
    """Builds the page of one quarantined source: each chunk against the chunk of the index that is closest to it."""
    found = Quarantine(request.app.store).all().get(request.http.path_params["key"])
    if found is None or found.tenant not in request.tenants:
        raise HTTPException(404, "There is no such source in quarantine.")
    chunks = found.documents[:MAX_COMPARED]
    vectors = request.app.guard.rag.embedder.embed([d.content for d in chunks])
    compared = [_compared(request, found, d, v) for d, v in zip(chunks, vectors, strict=True)]
    more = len(found.documents) - len(chunks)
    known = found.source in request.app.index.digests(found.tenant)
    return Page("quarantined.html", {"source": found, "compared": compared, "more": more, "known": known})


def _compared(request: PageRequest, source: QuarantinedSource, document: Document, vector: Vector) -> dict[str, Any]:
    """A chunk and the closest chunk in the index: of the same source, if there is an indexed version of it."""
    hits = request.app.index.search(vector, CLOSEST, source.tenant).hits
    other = next((h for h in hits if h.document.source == source.source), hits[0] if hits else None)
    before = other.document.content[:MAX_TEXT] if other else ""
    after = document.content[:MAX_TEXT]
    return {
        "document": document,
        "other": other,
        "same": other is not None and other.document.source == source.source,
        "parts": word_diff(before, after) if other else [("same", after)],
        "cut": len(document.content) > MAX_TEXT,
    }


def word_diff(before: str, after: str) -> list[tuple[str, str]]:
    """The parts of two texts in reading order: ``same``, ``removed`` or ``added``, with their words.

    By the fewest inserted, removed and replaced words; the time is bounded for any text (bit-parallel).

    >>> word_diff("The toll is due on Mondays.", "The toll was abolished on Mondays.")
    [('same', 'The toll '), ('removed', 'is due '), ('added', 'was abolished '), ('same', 'on Mondays.')]
    """
    old, new = (re.findall(r"\S+\s*|\s+", text) for text in (before, after))
    found: list[tuple[str, str]] = []
    changed = {"removed": "", "added": ""}
    for kind, a, b, c, d in [*Levenshtein.opcodes([w.strip() for w in old], [w.strip() for w in new]), _END]:
        if kind != "equal":
            changed["removed"] += "".join(old[a:b])
            changed["added"] += "".join(new[c:d])
            continue
        found += [(name, text) for name, text in changed.items() if text]
        found += [("same", "".join(new[c:d]))] if d > c else []
        changed = {"removed": "", "added": ""}
    return found


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
    """Returns the sources that a form is about, all of them checked before the first is changed."""
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
