"""Charts of attack results: unpacks results into the numbers that ``reports.svg`` draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from casemate.redteam.lab.results import AttackResult, ExtractionResult, MembershipMetrics
from casemate.reports.format import measured
from casemate.reports.svg import (
    Drawing,
    GroupHistogram,
    RocCurve,
    auc_track,
    extraction_chart,
    roc_chart,
    score_histogram,
)


def lowest_auc(attacks: Iterable[AttackResult]) -> float:
    """Returns the start of an AUC axis that contains every interval: at most .4, a multiple of .1."""
    lows = [f.auc.low for a in attacks for f in a.sides.values() if math.isfinite(f.auc.low)]
    return max(0.0, math.floor(10 * min([0.4, *lows]) + 1e-9) / 10)


def track(result: AttackResult, low: float, key: str) -> Drawing:
    """Draws the AUC with the guard off and on, on an axis from ``low`` to 1."""
    return auc_track(result.name, {side: f.auc for side, f in result.sides.items()}, low, key)


def roc(result: AttackResult, key: str) -> Drawing:
    """Draws the ROC curves with the guard off and on."""
    curves = {side: RocCurve(f.roc, f.auc, f.tpr_at_1) for side, f in result.sides.items()}
    return roc_chart(result.name, curves, key)


def histogram(result: AttackResult, side: str, key: str) -> Drawing | None:
    """Draws the scores of members and non-members on one side; None if there are no scores."""
    shapes = {name: shape for name, f in result.sides.items() if (shape := _shares(f))}
    return score_histogram(result.name, shapes, side, key) if side in shapes else None


def recovery(results: Mapping[str, ExtractionResult], names: Mapping[str, str] | None = None) -> Drawing:
    """Draws the recovered share of the corpus against the number of questions, by side of the guard.

    ``names`` are the sides' names in the description. None: *guard off* and *guard on*.
    """
    names = names or {side: f"guard {side}" for side in results}
    said = "; ".join(f"{names[side]}: {measured(result.crr, share=True)} recovered" for side, result in results.items())
    budget = max((result.questions for result in results.values()), default=1) or 1
    curves = {side: [(float(at), crr) for at, _, crr in result.curve] for side, result in results.items()}
    return extraction_chart(curves, float(budget), said)


def _shares(figures: MembershipMetrics) -> GroupHistogram | None:
    """The histogram as shares of each group; None if it cannot be drawn."""
    raw = figures.histogram
    edges, groups = raw.get("edges", []), [raw.get(name, []) for name in ("members", "nonmembers")]
    if len(edges) < 2 or any(len(g) != len(edges) - 1 for g in groups) or edges[-1] <= edges[0]:
        return None
    if not all(map(math.isfinite, [*edges, *groups[0], *groups[1]])):
        return None
    members, nonmembers = ([n / (sum(g) or 1.0) for n in g] for g in groups)
    return GroupHistogram(edges, members, nonmembers)
