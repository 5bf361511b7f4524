"""The collection: which sources it holds, taking them out, and what waits in quarantine."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

from starlette.exceptions import HTTPException

from casemate.errors import DataError
from casemate.gateway.dashboard.page import (
    ROOT,
    Look,
    Page,
    cell,
    chip,
    decimal,
    empty,
    facts,
    link,
    many,
    names,
    post,
    section,
    table,
    url,
    when,
)
from casemate.gateway.dashboard.verdicts import choice, field
from casemate.lab.charts import Markup, join, tag
from casemate.monitor.poison.quarantine import Held, Quarantine
from casemate.types import Event

EACH = 50
LONGEST = 4000
"""Characters of a text in quarantine that are shown."""


def sources(look: Look) -> Page:
    """The list."""
    tenants = look.tenants
    tenant, wanted = look.tenant(tenants), look.asked("source")
    held = look.app.index.digests(tenant)
    found = sorted(name for name in held if wanted.lower() in name.lower())
    page = max(1, int(look.asked("page", 6)) if look.asked("page", 6).isdecimal() else 1)
    shown = found[EACH * (page - 1) : EACH * page]
    fields = [field("Source", "source", wanted, "search")]
    if len(tenants) > 1:
        fields.insert(0, choice("Tenant", "tenant", tenant, [(t, t) for t in tenants]))
    search = tag(
        "form",
        *fields,
        tag("button", "Search"),
        method="get",
        action=f"{ROOT}/documents",
        class_="filters",
        role="search",
    )
    chunks = look.app.index.moments(tenant).n
    lead = f"Tenant {tenant}: {len(held):,} sources in {chunks:,} chunks."
    if not held:
        steps = ("Index a folder with 'casemate index FOLDER', or POST to /v1/documents with an admin's key.",)
        return Page("Documents", join([search, empty(f"Tenant {tenant} holds no documents.", *steps)]), lead=lead)
    if not shown:
        return Page(
            "Documents", join([search, empty("No source has this in its name.", "Search for less.")]), lead=lead
        )
    rows = [tag("tr", cell("Source", name, kind="wrap"), cell("", _remove(name, tenant), kind="act")) for name in shown]
    body = [
        search,
        table(("Source", ""), rows, "Sources", "cards list"),
        _pages(look, tenant, wanted, page, len(found)),
    ]
    return Page("Documents", join(body), lead=lead)


def _remove(name: str, tenant: str) -> Markup:
    return tag(
        "a",
        "Remove",
        href=url("documents/remove", source=name, tenant=tenant),
        aria_label=f"Remove {name}",
        class_="button quiet",
    )


def _pages(look: Look, tenant: str, wanted: str, page: int, count: int) -> Markup:
    del look
    last = max(1, -(-count // EACH))
    parts = [tag("span", f"page {page} of {last}; {count:,} sources")]
    if page > 1:
        parts.insert(0, link("← Before", "documents", tenant=tenant, source=wanted, page=str(page - 1)))
    if page < last:
        parts.append(link("After →", "documents", tenant=tenant, source=wanted, page=str(page + 1)))
    return tag("nav", *parts, class_="pages", aria_label="Pages of the list")


def ask_removal(look: Look) -> Page:
    """Asks once more before a source goes."""
    tenants = look.tenants
    tenant, source = look.tenant(tenants), look.asked("source", 4000)
    held = look.app.index.digests(tenant)
    if source not in held:
        raise HTTPException(404, "No document has this source; somebody may have removed it.")
    button = tag("button", "Remove it for good", class_="grave")
    body = tag(
        "section",
        tag(
            "p",
            "All chunks of ",
            tag("b", source),
            f" leave the index of tenant {tenant}. From then on nobody is answered from it.",
        ),
        tag("p", "If it is still in the folder that 'casemate index' reads, it comes back with the next run."),
        tag(
            "div",
            post(look, "documents/remove", button, source=source, tenant=tenant),
            link("Keep it", "documents", tenant=tenant),
            class_="acts",
        ),
    )
    return Page("Remove a source?", body)


async def remove(look: Look) -> str:
    """Takes a source out; returns where to go."""
    tenants = await look.aside(lambda: look.tenants)
    tenant, source = _own(look, tenants), look.form.get("source", "")
    gone = await look.app.guard.remove([source], tenant)
    if not gone:
        raise HTTPException(404, "No document has this source; somebody may have removed it.")
    body = {"action": "removed", "key": look.session.key.id, "tenant": tenant, "sources": 1, "chunks": gone}
    look.app.store.append(Event(uuid.uuid4().hex, datetime.now(UTC), "ingest", body))
    due = await look.aside(look.app.due, tenant)
    look.session.notes.append(("good", f"Removed {source[:200]}: {many(gone, 'chunk')}."))
    if due:
        look.session.notes.append(("medium", due))
    return url("documents", tenant=tenant)


def _own(look: Look, tenants: Sequence[str]) -> str:
    """The tenant of a form, which must be one that may be changed."""
    given = look.form.get("tenant", "")
    if given not in tenants:
        raise HTTPException(403, "Your key is not for this tenant.")
    return given


# quarantine


def quarantine(look: Look) -> Page:
    """What waits, and what was decided lately."""
    tenants = look.tenants
    found = Quarantine(look.app.store).all()
    mine = [held for held in found.values() if held.tenant in tenants]
    waiting = [held for held in mine if held.state == "held"]
    decided = [held for held in mine if held.state != "held"][-20:][::-1]
    lead = "New documents that are held back until somebody has looked at them. They are not in the index."
    if waiting:
        first: Markup = tag("div", *(_card(look, held) for held in waiting), class_="alerts")
    else:
        on = look.app.config.monitor.gate
        gate = "What looks like poisoning is held back here when it is added."
        if not on:
            gate = "Nothing is held back: set monitor.gate in casemate.yaml, and what looks like poisoning stops here."
        first = empty("Nothing waits in quarantine.", gate)
    body = [section("Waiting", first)]
    if decided:
        rows = [
            tag(
                "tr",
                cell("Held back", when(held.at)),
                cell("Source", held.source, kind="wrap"),
                cell("Now", chip(held.state, "good" if held.state == "released" else "plain")),
                cell("Reasons", "; ".join(held.reasons), kind="wrap"),
            )
            for held in decided
        ]
        body.append(section("Decided", table(("Held back", "Source", "Now", "Reasons"), rows, "Decided", "cards")))
    return Page("Quarantine", join(body), lead=lead)


def _card(look: Look, held: Held) -> Markup:
    text = "\n\n".join(d.content for d in held.documents)
    more = f"\n… {len(text) - LONGEST:,} more characters" if len(text) > LONGEST else ""
    release = tag("button", "Release into the index", aria_label=f"Release {held.source} into the index")
    drop = tag("button", "Drop", class_="grave", aria_label=f"Drop {held.source}")
    pairs = [
        ("Held back", when(held.at)),
        ("Tenant", held.tenant),
        ("Surprise", f"{decimal(held.score, 1)} (2: one harmless document in 100; 3: one in 1,000)"),
        ("Near copies", names(held.companions) if held.companions else "none"),
    ]
    return tag(
        "article",
        tag("header", chip("! held", "medium"), tag("span", many(len(held.documents), "chunk"), class_="soft")),
        tag("h3", held.source),
        tag("ul", *(tag("li", reason) for reason in held.reasons), class_="plain"),
        facts(pairs),
        tag("details", tag("summary", "Read it"), tag("pre", text[:LONGEST] + more)),
        tag(
            "div",
            post(look, "quarantine/release", release, key=held.key),
            post(look, "quarantine/drop", drop, key=held.key),
            class_="acts",
        ),
        class_="alert medium",
    )


async def release(look: Look) -> str:
    """Lets a source in; returns where to go."""
    held = await _held(look)
    await Quarantine(look.app.store).release(held.key, look.app.guard)
    look.session.notes.append(("good", f"Released {held.source[:200]}: it is in the index now."))
    return url("quarantine")


async def drop(look: Look) -> str:
    """Leaves a source out; returns where to go."""
    held = await _held(look)
    await Quarantine(look.app.store).drop(held.key, look.app.guard)
    look.session.notes.append(
        ("good", f"Dropped {held.source[:200]}: it stays out, as long as its content is the same.")
    )
    return url("quarantine")


async def _held(look: Look) -> Held:
    """What a form is about.

    Raises:
        HTTPException: If it is of another tenant, or was decided in the meantime.
    """
    key = look.form.get("key", "")
    held = await look.aside(Quarantine(look.app.store).get, key) if key else None
    tenants = await look.aside(lambda: look.tenants)
    if held is None or held.tenant not in tenants:
        raise HTTPException(404, "There is nothing like that in quarantine.")
    if held.state != "held":
        raise DataError(f"{held.source} was {held.state} by somebody else in the meantime")
    return held
