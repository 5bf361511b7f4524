"""The verdict explorer: what the guard decided, by how much, what it withheld, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException

from casemate import traces
from casemate.gateway.dashboard import figures
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
    percent,
    post,
    section,
    share,
    table,
    url,
    void,
    when,
)
from casemate.gateway.dashboard.records import Seen, by_request
from casemate.lab.charts import Markup, join, tag

EACH = 50
"""Verdicts on a page."""
WHY = {
    "closeness": "the question is closer to a document than harmless questions are",
    "session": "evidence against this client has added up over several questions",
    "before": "it was flagged for this client before, and stays withheld",
}
TERMS = {
    "target": "Document it is about",
    "form": "Rule",
    "flagged": "Sources flagged now",
    "withheld": "Sources withheld",
    "why": "Why",
    "p": "Share of harmless questions that come as close, at least",
    "n": "Chunks compared with",
    "mean": "Mean similarity to all chunks",
    "std": "Standard deviation of that",
    "undecided": "No statement, because",
    "error": "The defense failed with",
    "message": "It said",
}


def explorer(look: Look) -> Page:
    """The list, with its filters."""
    tenants = look.tenants
    everything = [v for v in look.records.verdicts.all if v.tenant in tenants]
    wanted = _Wanted(look, tenants)
    found = [v for v in everything if wanted(v, look)]
    page = max(1, int(look.asked("page", 6)) if look.asked("page", 6).isdecimal() else 1)
    shown = found[::-1][EACH * (page - 1) : EACH * page]
    body = join(
        [
            _filters(look, wanted, sorted({v.defense for v in everything}), tenants),
            tag("div", *_found(look, found, shown), id="found", data_live=1),
            _pages(look, page, len(found)),
        ]
    )
    kept = look.records.verdicts
    lead = f"The newest {kept.keep:,} verdicts." if kept.full else "Every verdict that the store holds."
    lead += " Nobody outside learns of them. " + _privacy(look)
    return Page("Verdicts", body, lead=lead)


def detail(look: Look) -> Page:
    """One verdict."""
    tenants = look.tenants
    everything = [v for v in look.records.verdicts.all if v.tenant in tenants]
    found = next((v for v in everything if v.id == look.request.path_params["id"]), None)
    if found is None:
        raise HTTPException(404, "There is no such verdict, or it is older than what is kept here.")
    like = [v for v in everything if v.defense == found.defense and v.threshold is not None]
    others = [v for v in everything if v.request == found.request and v is not found and found.request]
    body = join(
        [
            tag("p", link("← All verdicts", "verdicts")),
            tag("div", _decision(found, like), _withheld(found), class_="halves"),
            section("The numbers behind it", facts(_evidence(found.evidence))),
            section("The request", facts(_request(look, found, others)), *_forgiving(look, found)),
        ]
    )
    return Page(
        f"{outcome(found)[0]} by {found.defense}", body, lead=f"{found.at.astimezone(UTC):%d %B %Y, %H:%M:%S} UTC"
    )


async def forgive(look: Look) -> str:
    """Lets a client begin anew; returns where to go."""
    tenants = await look.aside(lambda: look.tenants)
    tenant, client, back = (look.form.get(name, "") for name in ("tenant", "client", "verdict"))
    if tenant not in tenants:
        raise HTTPException(403, "Your key is not for this tenant.")
    await look.aside(traces.forgive, look.app.store, tenant, client)
    look.session.notes.append(("good", f"{look.client(client)[:200]} begins anew with the next question."))
    return f"{ROOT}/verdicts/{quote(back, safe='')}"


def _forgiving(look: Look, v: Seen) -> list[Markup]:
    """Takes back what a flagged question has led to."""
    if not (v.flagged and v.enforced):
        return []
    told = (
        "Was this harmless? Then let the client begin anew: what was withheld from him for earlier questions can be "
        "found for him again, and no evidence is held against him. Other questions that are too close are judged as "
        "before. It cannot be undone."
    )
    button = tag("button", "Let the client begin anew", class_="quiet")
    return [
        tag(
            "details",
            tag("summary", "This client's past"),
            tag("p", told, class_="soft"),
            post(look, "verdicts/forgive", button, tenant=v.tenant, client=v.client, verdict=v.id),
        )
    ]


def outcome(v: Seen) -> tuple[str, str]:
    """How a verdict ended: a word, and its tone."""
    if v.failed:
        return "Failed", "critical"
    if v.undecided:
        return "Undecided", "plain"
    if v.flagged:
        return ("Flagged", "high") if v.enforced else ("Flagged, observed only", "medium")
    return "Passed", "good"


class _Wanted:
    """The filters that are set."""

    def __init__(self, look: Look, tenants: Sequence[str]) -> None:
        self.defense, self.client = look.asked("defense"), look.asked("client")
        self.flagged, self.asker = look.asked("flagged"), look.asked("asker")
        self.tenant = look.asked("tenant") if look.asked("tenant") in tenants else ""
        self.since, self.until = _time(look.asked("since")), _time(look.asked("until"))

    def __call__(self, v: Seen, look: Look) -> bool:
        """Whether a verdict passes them."""
        return (
            self.defense in ("", v.defense)
            and self.tenant in ("", v.tenant)
            and self.client.lower() in f"{v.client} {look.client(v.client) if self.client else ''}".lower()
            and self.flagged in ("", "yes" if v.flagged else "no")
            and (
                self.asker == "all"
                or (self.client and not self.asker)
                or look.is_canary(v.client) is (self.asker == "canaries")
            )
            and (self.since is None or v.at >= self.since)
            and (self.until is None or v.at <= self.until)
        )


def _time(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _privacy(look: Look) -> str:
    if look.app.config.privacy.log_text:
        return "Questions are kept and shown (privacy.log_text)."
    return "No text of a question is kept (privacy.log_text is off)."


def _filters(look: Look, wanted: _Wanted, defenses: Sequence[str], tenants: Sequence[str]) -> Markup:
    fields = [
        choice("Outcome", "flagged", wanted.flagged, (("", "all"), ("yes", "flagged"), ("no", "not flagged"))),
        choice("Asked by", "asker", wanted.asker, (("", "people"), ("canaries", "canaries"), ("all", "everybody"))),
        choice("Defense", "defense", wanted.defense, (("", "all"), *((d, d) for d in defenses))),
        field("Client", "client", wanted.client, "search"),
        field("From (UTC)", "since", look.asked("since"), "datetime-local"),
        field("To (UTC)", "until", look.asked("until"), "datetime-local"),
    ]
    if len(tenants) > 1:
        fields.append(choice("Tenant", "tenant", wanted.tenant, (("", "all"), *((t, t) for t in tenants))))
    buttons = tag("div", tag("button", "Filter"), link("Clear", "verdicts"), class_="buttons")
    return tag("form", *fields, buttons, method="get", action=f"{ROOT}/verdicts", class_="filters", role="search")


def field(label: str, name: str, value: str, kind: str = "text", **more: str) -> Markup:
    """A field with its name."""
    return tag("label", tag("span", label), void("input", type=kind, name_=name, value=value, maxlength="200", **more))


def choice(label: str, name: str, value: str, options: Sequence[tuple[str, str]]) -> Markup:
    """A choice with its name."""
    made = [tag("option", text, value=v, **({"selected": "selected"} if v == value else {})) for v, text in options]
    return tag("label", tag("span", label), tag("select", *made, name_=name))


def _found(look: Look, found: Sequence[Seen], shown: Sequence[Seen]) -> list[Markup]:
    if not look.records.verdicts.all:
        return [
            empty(
                "The guard has not judged anything yet.",
                "Ask something: 'casemate ask', or POST /v1/chat/completions with a key of 'casemate key create NAME'.",
            )
        ]
    if not shown:
        return [empty("No verdict passes these filters.", "Choose everybody under 'Asked by', or a longer time.")]
    requests = by_request(found)
    figure, about = share(sum(any(v.flagged for v in one) for one in requests), len(requests))
    parts = [tag("p", tag("b", f"{figure} flagged"), f" ({about})", class_="sum")]
    points = [(v.at, v.score - v.threshold, v.flagged) for v in found if v.threshold is not None]
    if len(points) > 1:
        said = "Each dot is a verdict: its score less its threshold, over time. Above the line means flagged"
        parts.append(
            tag(
                "figure",
                figures.scatter(points, said),
                tag("figcaption", f"{said}; what was flagged before may lie below."),
            )
        )
    low, high = _span(shown)
    names = ("Time", "Outcome", "Client", "Score against threshold", "Withheld", "Why")
    rows = [_row(look, v, low, high) for v in shown]
    return [*parts, table(names, rows, "Verdicts", "cards")]


def _span(verdicts: Sequence[Seen]) -> tuple[float, float]:
    values = [x for v in verdicts for x in (v.score, v.threshold) if x is not None]
    return min(values, default=0.0), max(values, default=1.0)


def _row(look: Look, v: Seen, low: float, high: float) -> Markup:
    word, tone = outcome(v)
    limit = "no threshold" if v.threshold is None else f"{decimal(v.score)} against {decimal(v.threshold)}"
    sources = _list(v.evidence.get("withheld"))
    gone = ", ".join([many(len(sources), "source")] * bool(sources) + [many(len(v.hidden), "chunk")])
    why = _list(v.evidence.get("why"))
    return tag(
        "tr",
        cell("Time", tag("a", when(v.at), href=f"{ROOT}/verdicts/{v.id}")),
        cell("Outcome", chip(word, tone), tag("small", v.defense)),
        cell("Client", tag("a", look.client(v.client), href=url("verdicts", client=v.client))),
        cell("Score against threshold", figures.meter(v.score, v.threshold, low, high, v.flagged), tag("small", limit)),
        cell("Withheld", gone if v.hidden else "nothing", kind="" if v.hidden else "spare"),
        cell("Why", ", ".join(why) or "–", kind="" if why else "spare"),
        id=f"v-{v.id}",
    )


def _list(value: Any) -> list[str]:
    return [str(x) for x in value] if isinstance(value, list | tuple) else []


def _pages(look: Look, page: int, count: int) -> Markup:
    kept = {name: look.asked(name) for name in ("flagged", "asker", "defense", "client", "since", "until", "tenant")}
    last = max(1, -(-count // EACH))
    parts = [tag("span", f"page {min(page, last)} of {last}; {count:,} verdicts")]
    if page > 1:
        parts.insert(0, link("← Newer", "verdicts", **kept, page=str(page - 1)))
    if page < last:
        parts.append(link("Older →", "verdicts", **kept, page=str(page + 1)))
    return tag("nav", *parts, class_="pages", aria_label="Pages of the list")


# one verdict


def _decision(v: Seen, like: Sequence[Seen]) -> Markup:
    word, tone = outcome(v)
    low, high = _span([*like, v])
    if v.threshold is None:
        told = "No statement was possible, so there is no threshold."
    else:
        side = "above" if v.score > v.threshold else "not above"
        told = f"The score {decimal(v.score, 3)} is {side} the threshold {decimal(v.threshold, 3)}."
    reasons = [tag("li", WHY.get(w, w)) for w in _list(v.evidence.get("why"))]
    undecided = v.evidence.get("undecided")
    note = [tag("p", f"No statement: {undecided}.")] if undecided else []
    return section(
        "The decision",
        tag("p", chip(word, tone)),
        figures.meter(v.score, v.threshold, low, high, v.flagged),
        tag("p", told, " Higher is more suspicious."),
        *note,
        *([tag("h3", "Why"), tag("ul", *reasons, class_="plain")] if reasons else []),
    )


def _withheld(v: Seen) -> Markup:
    if not v.hidden and v.action == "withhold":
        return section(
            "What was withheld", tag("p", "The whole context: the defense failed, and guard.on_error is closed.")
        )
    if not v.hidden:
        return section("What was withheld", tag("p", "Nothing. The answer was made from everything that was found."))
    told = (
        "Not in the context of the answer. The next best documents took their place, so the client saw nothing odd."
        if v.enforced
        else "Would have been withheld. The guard only observes, so the client got them."
    )
    return section(
        "What was withheld", tag("p", told), tag("ul", *(tag("li", tag("code", h)) for h in v.hidden), class_="plain")
    )


def _evidence(evidence: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not evidence:
        return [("Evidence", "none was noted")]
    places = {name: place for place, name in enumerate(TERMS)}
    return [
        (TERMS.get(name, name), percent(value) if name == "p" and isinstance(value, float) else _value(value))
        for name, value in sorted(evidence.items(), key=lambda pair: places.get(pair[0], len(places)))
    ]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(_value(v) for v in value) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_value(v)}" for k, v in value.items()) or "none"
    return str(value)


def _request(look: Look, v: Seen, others: Sequence[Seen]) -> list[tuple[str, str]]:
    beside = [tag("a", f"{o.defense}: {outcome(o)[0]}", href=f"{ROOT}/verdicts/{o.id}") for o in others]
    text = v.text or ("not kept" if look.app.config.privacy.log_text else "not kept: privacy.log_text is off")
    return [
        ("Client", tag("a", look.client(v.client), href=url("verdicts", client=v.client))),
        ("Tenant", v.tenant),
        ("Request id", tag("code", v.request or "none")),
        ("Question", text),
        ("Other verdicts on it", join(beside, ", ") if beside else "none"),
    ]
