"""The calibration page: what each false alarm rate costs and stops, and changing the operating point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from casemate.errors import DataError
from casemate.gateway import operating_point
from casemate.gateway.dashboard.page import Page, PageRequest
from casemate.gateway.dashboard.records import by_request, flagged_share
from casemate.gateway.dashboard.redteam import SANDBOX_CSP
from casemate.gateway.dashboard.table import Column
from casemate.guard.calibration import file as calibrations
from casemate.guard.calibration.fitting import RATES
from casemate.maths.calibration import Calibration
from casemate.reports import calibration_report
from casemate.reports.calibration_report import CalibrationView
from casemate.reports.format import one_in, scrub, short_rate
from casemate.reports.svg import recall_legend


def page(request: PageRequest) -> Page:
    """Builds the page."""
    defense = operating_point.defense_of(request.app)
    if defense is None:
        return Page("calibration.html", {"defense": None})
    now = defense.significance or 0.0
    tenants = request.tenants
    tenant = request.tenant(tenants)
    chosen = _parse_rate(request.parameter("at")) or now
    found = _calibration(request, tenant)
    asked = [v for v in request.verdicts(tenants) if not request.is_canary(v.client)]
    decided = by_request([v for v in asked if v.defense == defense.name and not v.undecided])
    rate, about = flagged_share(decided)
    context: dict[str, Any] = {
        "defense": defense,
        "now": now,
        "chosen": chosen,
        "flagged": rate,
        "flagged_about": about,
        "flagged_url": request.url("verdicts", defense=defense.name, outcome="flagged"),
        "tenants": tenants,
        "tenant": tenant,
        "missing": found if isinstance(found, str) else "",
    }
    if isinstance(found, Calibration):
        context |= _costs(request, defense.name, CalibrationView(found, chosen), now, tenant)
    return Page("calibration.html", context)


def _costs(request: PageRequest, defense: str, view: CalibrationView, now: float, tenant: str) -> dict[str, Any]:
    rows = [view.choice(rate) for rate in sorted({*RATES, now, view.significance})]
    chart, said = view.histogram() if view.n else (None, "")
    return {
        "view": view,
        "calibration": view.calibration,
        "listing": request.table("Rates to choose from", COLUMNS, rows),
        "panels": view.panels() if view.attacks else [],
        "legend": {by: recall_legend(by) for by in ("question", "document")},
        "chart": chart,
        "chart_text": said,
        "due": request.app.due(tenant),
        "yaml": operating_point.yaml_snippet(defense, view.significance),
    }


COLUMNS = (
    Column("Significance", lambda row: row["rate"], "significance"),
    Column("Benign flagged, at most", lambda row: row["rate"], "benign"),
    Column("Stopped, by question", lambda row: _stopped(row, 0), "questions", True),
    Column("Stopped, by document", lambda row: _stopped(row, 1), "documents", True),
    Column("Threshold, as a score", lambda row: None if row["needed"] else row["threshold"], "threshold", True),
)


def _stopped(row: Mapping[str, Any], position: int) -> float | None:
    weakest = row["stopped"][position]
    return weakest.rate.value if weakest and weakest.rate and not row["needed"] else None


async def apply(request: PageRequest) -> str:
    """Changes the operating point; returns the address to go to."""
    rate = _parse_rate(request.form.get("significance", ""))
    if rate is None:
        raise DataError("the significance must be a number between 0 and 1, such as 0.02")
    why = await request.in_thread(operating_point.change, request.app, rate, request.session.name)
    text = f"The guard now uses significance {short_rate(rate)}: at most {one_in(rate)} benign questions is flagged."
    request.note_setting(text, "until the gateway stops", why)
    return request.url("calibration")


def report(request: PageRequest) -> Response:
    """Renders the calibration report, as ``casemate calibrate`` writes it."""
    defense = operating_point.defense_of(request.app)
    found = _calibration(request, request.tenant(request.tenants))
    if defense is None or isinstance(found, str):
        raise HTTPException(404, "There is no calibration. Run 'casemate calibrate'.")
    rate = _parse_rate(request.parameter("at")) or defense.significance or 0.01
    text = calibration_report.render_html(found, rate, defense.name)
    return Response(text, media_type="text/html", headers={"Content-Security-Policy": SANDBOX_CSP})


def _parse_rate(text: str) -> float | None:
    try:
        found = float(text.strip().replace(",", "."))
    except ValueError:
        return None
    return found if 0 < found < 1 else None


def _calibration(request: PageRequest, tenant: str) -> Calibration | str:
    """The calibration of a tenant, stale or not; or why there is none. Blocks."""
    defense = operating_point.defense_of(request.app)
    if defense is None or not defense.uses_calibration:
        return "The guard uses a published rule without calibration, so the cost of a rate is unknown."
    found = calibrations.read_calibrations(defense.calibration).get(tenant)
    return scrub(found) if found else f"Tenant {tenant} has no calibration."
