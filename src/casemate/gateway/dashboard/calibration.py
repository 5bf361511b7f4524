"""The operating point: what each error rate costs and buys, and moving it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.responses import Response

from casemate import calibration as calibrations
from casemate.calibration import Calibration
from casemate.errors import DataError
from casemate.gateway.dashboard import operating_point
from casemate.gateway.dashboard.page import (
    Look,
    Page,
    cell,
    chip,
    empty,
    facts,
    link,
    moment,
    post,
    section,
    share,
    table,
    url,
)
from casemate.gateway.dashboard.redteam import SANDBOX
from casemate.gateway.dashboard.verdicts import choice, field
from casemate.lab import costs
from casemate.lab.calibrate import RATES
from casemate.lab.charts import Markup, join, tag
from casemate.lab.cost_charts import View, alike, fewest, histogram, legend_mark, one_in, panel, written
from casemate.lab.wording import measured, scrub


def page(look: Look) -> Page:
    """The page."""
    defense = operating_point.defense_of(look.app)
    lead = "How many harmless questions may be flagged, against how many attacks are stopped."
    if defense is None:
        steps = ("The operating point is that of mirabel. Add it to guard.defenses in casemate.yaml.",)
        return Page("Calibration", empty("The guard has no defense with an operating point.", *steps), lead=lead)
    now = defense.significance or 0.0
    tenants = look.tenants
    tenant = look.tenant(tenants)
    chosen = _rate(look.asked("at")) or now
    found = _held(look, tenant)
    parts = [_now(look, now, chosen)]
    if len(tenants) > 1:
        options = choice("Tenant", "tenant", tenant, [(t, t) for t in tenants])
        parts.append(tag("form", options, tag("button", "Show"), method="get", class_="filters"))
    if isinstance(found, str):
        parts.append(
            empty(found, "'casemate calibrate' learns what harmless questions are like, and what each rate costs.")
        )
    else:
        parts += _costs(look, found, now, chosen, tenant)
    return Page("Calibration", join(parts), lead=lead)


async def apply(look: Look) -> str:
    """Moves the operating point; returns where to go."""
    rate = _rate(look.form.get("significance", ""))
    if rate is None:
        raise DataError("the significance must be a number between 0 and 1, such as 0.02")
    why = await look.aside(operating_point.move, look.app, rate, look.session.name)
    now = f"The guard now goes by significance {written(rate)}: at most {one_in(rate)} harmless questions is flagged."
    if why:
        look.session.notes.append(
            ("medium", f"{now} Only until this gateway ends, for {why}. To keep it, change it there.")
        )
    else:
        look.session.notes.append(
            ("good", f"{now} It is written into casemate.yaml; other gateways read it when they begin.")
        )
    return url("calibration")


def report(look: Look) -> Response:
    """All that was measured, as ``casemate calibrate`` reports it."""
    defense = operating_point.defense_of(look.app)
    tenants = look.tenants
    found = _held(look, look.tenant(tenants))
    if defense is None or isinstance(found, str):
        raise HTTPException(404, "There is no calibration; run 'casemate calibrate'.")
    text = costs.render_html(found, _rate(look.asked("at")) or defense.significance or 0.01)
    return Response(text, media_type="text/html", headers={"Content-Security-Policy": SANDBOX})


def _rate(text: str) -> float | None:
    try:
        found = float(text.strip().replace(",", "."))
    except ValueError:
        return None
    return found if 0 < found < 1 else None


def _held(look: Look, tenant: str) -> Calibration | str:
    """The calibration of a tenant, stale or not; or why there is none. Blocks."""
    defense = operating_point.defense_of(look.app)
    if defense is None or defense.mode != "calibrated":
        return "The guard goes by a published rule, which needs no calibration; so it is not known what a rate costs."
    found = calibrations.read(defense.calibration).get(tenant)
    return scrub(found) if found else f"Tenant {tenant} has no calibration."


def _now(look: Look, now: float, chosen: float) -> Markup:
    """Where it stands, and the way to move it."""
    asked = [v for v in look.records.verdicts.all if v.defense == operating_point.DEFENSE and not v.undecided]
    figure, about = share(sum(v.flagged for v in asked), len(asked))
    told = tag(
        "p", tag("b", f"Now: significance {written(now)}"), f", at most {one_in(now)} harmless questions flagged. "
    )
    real = tag(
        "p", f"Of the verdicts kept here, {figure} are flagged ({about}); attacks among them count, too.", class_="soft"
    )
    value = written(chosen)
    entry = field(
        "Significance, between 0 and 1", "at", f"0{value}" if value.startswith(".") else value, inputmode="decimal"
    )
    look_at = tag(
        "form",
        entry,
        tag("button", "Show what it costs", class_="quiet"),
        method="get",
        action=url("calibration"),
        class_="inline",
    )
    parts = [told, real, look_at]
    if look.session.whole and chosen != now:
        button = tag("button", f"Apply {written(chosen)}")
        said = tag("p", f"From the next question on, the guard goes by {written(chosen)} instead of {written(now)}.")
        parts.append(
            tag("div", said, post(look, "calibration/apply", button, significance=str(chosen)), class_="apply")
        )
    elif not look.session.whole:
        parts.append(tag("p", "It holds for all tenants, so only keys of the whole installation may move it."))
    return tag("section", tag("h2", "The operating point"), *parts, class_="now", id="now")


def _costs(look: Look, held: Calibration, now: float, chosen: float, tenant: str) -> list[Markup]:
    view = View(held, chosen)
    parts = [
        section(
            "What each rate costs and buys",
            _table(view, now, chosen, tenant),
            lead="Choose a row to look at it closer. Take the smallest rate that stops what you fear.",
        )
    ]
    if view.attacks:
        parts.append(_attacks(view))
    if view.n:
        image, said = histogram(view, "scores")
        parts.append(section("How close harmless questions come", tag("figure", image, class_="single"), lead=said))
    due = look.app.due(tenant)
    state = chip("! look", "medium") if due else chip("✓ fits", "good")
    pairs = [
        ("State", join([state, " ", due])),
        ("Made", moment(held.at)),
        ("Harmless questions", f"{held.source}; {view.n} of them set the threshold"),
        ("Collection", f"{held.documents:,} chunks; {held.k} make a context"),
        ("All figures", link("the whole report", "calibration/report", tenant=tenant, at=str(chosen))),
        ("By hand", tag("pre", operating_point.line(chosen))),
    ]
    return [*parts, section("This calibration", facts(pairs))]


def _table(view: View, now: float, chosen: float, tenant: str) -> Markup:
    rows = []
    for rate in sorted({*RATES, now, chosen}):
        marks = [chip("now", "good")] * (rate == now) + [chip("shown", "plain")] * (rate == chosen != now)
        name = tag("th", link(written(rate), "calibration", at=str(rate), tenant=tenant), " ", *marks, scope="row")
        cells = [cell("Harmless flagged", f"{one_in(rate)}", tag("small", f"{100 * rate:g} %"))]
        if math.isinf(view.held.threshold(rate)):
            need = f"needs {fewest(rate)} harmless questions; there are {view.n}"
            cells.append(tag("td", need, colspan=3, class_="wrap soft", data_label="Not available"))
        else:
            cells += [cell(label, _least(view, rate, by)) for label, by in LABELS]
            cells.append(cell("Threshold", f"{view.held.threshold(rate):.2f}"))
        rows.append(tag("tr", name, *cells, **({"class_": "chosen"} if rate == chosen else {})))
    head = ("Significance", "Harmless flagged, at most", *(label for label, _ in LABELS), "Threshold, as a score")
    return table(head, rows, "Rates to choose from", "cards")


LABELS = (("Stopped, by question", "question"), ("Stopped, by document", "document"))


def _least(view: View, rate: float, by: str) -> Markup:
    """How often the attack that gets through most often is stopped."""
    if not view.attacks or rate not in view.rates:
        return tag("small", "not measured")
    name, rated = view.weakest(rate, by)
    return join([measured(rated, share=True), tag("small", name)])


def _attacks(view: View) -> Markup:
    figures: Sequence[Markup] = [
        tag("figure", tag("figcaption", tag("b", name)), panel(view, name, measures, f"p{i}"))
        for i, (name, measures) in enumerate(alike(view.attacks).items())
    ]
    lead = tag(
        "p",
        "Share of each attack whose document is withheld, against the share of harmless questions flagged for it: ",
        legend_mark("question"),
        "of its questions, ",
        legend_mark("document"),
        "of the documents attacked, with 95 % intervals. The broken line is the rate shown.",
        class_="lead",
    )
    return section("What it buys", lead, tag("div", *figures, class_="panels"))
