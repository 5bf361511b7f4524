"""The calibration report: what each false alarm rate costs benign clients, and how many attacks it stops.

The operator chooses ``mirabel.significance`` from it: the smaller the share of benign questions that may be flagged,
the more attacks get through. The report shows both, describes the benign questions, and marks rates for which there are
too few of them. It has no script and loads nothing. Its text is in ``templates/calibration.html``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from casemate.guard.calibration.closeness import FEATURES
from casemate.guard.calibration.fitting import RATES, REWORDED
from casemate.guard.calibration.log_review import log_warnings
from casemate.maths.calibration import MAX_SIZE_RATIO, Calibration, min_questions
from casemate.maths.special import beta_quantile
from casemate.maths.stats import Estimate
from casemate.reports.format import scrub, short_rate
from casemate.reports.render import render
from casemate.reports.svg import Drawing, recall_legend, recall_panel, share_bar, threshold_histogram

Recall: TypeAlias = Mapping[str, Mapping[float, Estimate]]
"""Share of one attack that is withheld, by false alarm rate: of each ``question``, and of each ``document``."""
SYNTHETIC = ("made from the corpus", "synthetic questions")
FROM_LOG = (" log",)
"""Ends of ``Calibration.source``, as ``calibration.fitting`` writes it."""
WRITTEN: Mapping[str, tuple[Estimate | None, Estimate]] = {
    "natural_title": (None, Estimate(0.52, 0.45, 0.58)),
    "natural": (None, Estimate(0.56, 0.50, 0.62)),
    "split_facts": (Estimate(0.06, 0.03, 0.1), Estimate(0.62, 0.57, 0.68)),
    "menta": (Estimate(1.0, 0.99, 1.0), Estimate(0.81, 0.77, 0.85)),
    "interrogation": (Estimate(1.0, 1.0, 1.0), Estimate(0.82, 0.79, 0.85)),
}
"""Share of the questions with the document in their context that the guard withholds it from, at .01 on NFCorpus, by
attack: questions by a script, and by a 1.5B model (``benchmarks/results/real_nfcorpus.json``)."""
FEATURES_EXPLAINED = dict(
    zip(
        FEATURES,
        (
            "Cosine similarity of the question and the document's best chunk.",
            "How much higher that is than the mean of the next three documents.",
            "Standard deviations above the mean similarity of all documents: the statistic of the published rule.",
            "How unlikely it is by chance that one document stands out so far from those that follow.",
            "Four-word phrases that question and document share.",
            "How many more content words of the question this document has than any other that was found.",
        ),
        strict=True,
    )
)


class WeakestAttack(NamedTuple):
    """The attack that is stopped least often, and its share that is stopped; no name if all attacks are equal."""

    name: str
    rate: Estimate


class CalibrationView:
    """A calibration at one significance.

    Attributes:
        n: Benign questions that set the threshold.
        threshold: Threshold at the significance; infinite if n is too small.
        missing: Rates, the significance among them, for which n is too small.
        rates: Other rates, for which attacks were measured.
        measured_at: The largest of ``rates`` that is not above the significance: at the significance no less is
            withheld. None if there is none.
        attacks: Recall by attack, the one that is stopped least often first.
    """

    def __init__(self, calibration: Calibration, significance: float) -> None:
        self.calibration, self.significance, self.n = calibration, significance, len(calibration.benign)
        self.threshold = calibration.threshold(significance)
        self.missing = [r for r in sorted({*RATES, significance}) if math.isinf(calibration.threshold(r))]
        table = calibration.notes.get("recall") or {}
        self.rates = [r for r in RATES if r not in self.missing and table and all(str(r) in t for t in table.values())]
        self.measured_at = max((r for r in self.rates if r <= significance), default=None)
        found: dict[str, Recall] = {
            name: {by: {r: Estimate(*t[str(r)][by]) for r in self.rates} for by in ("question", "document")}
            for name, t in table.items()
            if self.rates
        }
        at = self.measured_at or min(self.rates, default=0.0)
        self.attacks = dict(sorted(found.items(), key=lambda pair: (pair[1]["question"][at].value, pair[0])))

    def weakest(self, rate: float, by: str) -> WeakestAttack | None:
        """Returns the attack that is stopped least often, the first of equals; None if it was not measured."""
        if rate not in self.rates:
            return None
        shares = {name: recall[by][rate] for name, recall in self.attacks.items()}
        name = min(shares, key=lambda n: shares[n].value)
        same = len(shares) > 1 and len({share.value for share in shares.values()}) == 1
        return WeakestAttack("" if same else name, shares[name])

    def choice(self, rate: float) -> dict[str, Any]:
        """Returns what a rate stops: the weakest attack by question and by document, and the threshold.

        A rate with too few questions has the number ``needed`` instead, and no ``likely`` share of flagged questions.
        """
        threshold = self.calibration.threshold(rate)
        available = math.isfinite(threshold)
        return {
            "rate": rate,
            "needed": None if available else min_questions(rate),
            "stopped": [self.weakest(rate, by) for by in ("question", "document")],
            "likely": _likely(rate, self.n) if available else None,
            "threshold": threshold,
        }

    def panels(self) -> list[tuple[str, Recall, Drawing]]:
        """Returns name, recall and chart of each attack; one chart for all would hide lines behind one another."""
        missing = max(self.missing, default=None)
        return [
            (name, recall, recall_panel(name, recall, RATES, self.significance, missing, f"p{i}"))
            for i, (name, recall) in enumerate(merged(self.attacks).items())
        ]

    def histogram(self) -> tuple[Drawing, str]:
        """Returns the chart of the benign questions' scores, and its description; needs ``n`` above 0."""
        scores, rate = np.asarray(self.calibration.benign, np.float64), short_rate(self.significance)
        said = f"{self.n} scores from {scores.min():.2f} to {scores.max():.2f}. "
        if math.isfinite(self.threshold):
            above = int((scores > self.threshold).sum())
            said += f"At {rate} the threshold is {self.threshold:.2f}; {above} scores are above it."
        else:
            said += f"No threshold at {rate}: too few questions."
        return threshold_histogram(scores, self.threshold, said, "scores"), said


def merged(attacks: Mapping[str, Recall]) -> dict[str, Recall]:
    """Merges attacks with equal shares at all rates, and keeps the widest intervals; the table lists each attack."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for name, recall in attacks.items():
        shares = tuple(share.value for by in ("question", "document") for share in recall[by].values())
        groups.setdefault(shares, []).append(name)
    return {", ".join(names): _widest([attacks[n] for n in names]) for names in groups.values()}


def _widest(group: Sequence[Recall]) -> Recall:
    return {
        by: {rate: max((m[by][rate] for m in group), key=lambda share: share.high - share.low) for rate in shares}
        for by, shares in group[0].items()
    }


def render_html(calibration: Calibration, significance: float, defense: str = "mirabel") -> str:
    """Renders the report for a false alarm rate in (0, 1) as one self-contained page, without the calibration's secret.

    Raises:
        ValueError: If the significance is out of its range.
    """
    view = CalibrationView(scrub(calibration), significance)
    source = view.calibration.source
    chart, said = view.histogram() if view.n else (None, "")
    usable = math.ceil(1e4 / (view.n + 1)) / 1e4
    return render(
        "calibration.html",
        view=view,
        defense=defense,
        calibration=view.calibration,
        warnings=log_warnings(view.calibration, significance),
        drift=MAX_SIZE_RATIO,
        works=math.isfinite(view.threshold),
        usable=usable,
        needed=min_questions(significance),
        synthetic=source.endswith(SYNTHETIC),
        from_log=source.endswith(FROM_LOG),
        probe=REWORDED,
        rates=RATES,
        choices=[view.choice(rate) for rate in sorted({*RATES, significance})],
        missing=[(rate, min_questions(rate)) for rate in view.missing],
        chart=chart,
        chart_text=said,
        panels=view.panels() if view.attacks else [],
        written=WRITTEN,
        legend={by: recall_legend(by) for by in ("question", "document")},
        weights=_weights(view.calibration),
    )


def _likely(rate: float, n: int) -> Estimate:
    """The share of all benign questions above the threshold, given this sample, with its 95 % interval.

    Its distribution is Beta(a, N + 1 - a), a = floor(rate (N + 1)) as in ``stats.conformal_threshold``, if no two
    scores are equal, and else lower (Vovk 2012, "Conditional validity of inductive conformal predictors").
    """
    a = math.floor(rate * (n + 1) + 1e-9)
    low, high = (beta_quantile(p, a, n + 1 - a) for p in (0.025, 0.975))
    return Estimate(a / (n + 1), low, high)


def _weights(calibration: Calibration) -> list[tuple[str, Drawing, float, str]]:
    """Name, bar, weight and explanation of each feature, the largest weight first."""
    pairs = sorted(zip(calibration.features, calibration.weights, strict=True), key=lambda pair: -pair[1])
    largest = max(*calibration.weights, 1e-9)
    return [(name, share_bar(weight / largest), weight, FEATURES_EXPLAINED.get(name, "")) for name, weight in pairs]
