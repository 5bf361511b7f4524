"""A calibration as an owner's choice: what was measured at each error rate, and charts of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from casemate.calibration import Calibration
from casemate.lab.calibrate import RATES
from casemate.lab.charts import Markup, Scale, tag
from casemate.lab.wording import measured, percent
from casemate.stats import Rate
from casemate.types import Float64

Measures: TypeAlias = Mapping[float, Mapping[str, Rate]]
"""Of one attack: rate to the share withheld, of ``question`` and of ``document``."""
BINS = 36


class View:
    """A calibration at one significance, and what the page asks of it.

    Attributes:
        held: The calibration.
        significance: The rate now.
        n: Harmless questions that set the threshold.
        threshold: At the significance; infinite if n is too small.
        gone: Rates, the significance among them, for which n is too small.
        rates: Those of the others for which attacks were measured.
        near: The largest of these that is not above the significance: at the latter no less is withheld.
        attacks: What was measured; the attack that gets through most often comes first.
    """

    def __init__(self, held: Calibration, significance: float) -> None:
        self.held, self.significance, self.n = held, significance, len(held.benign)
        self.threshold = held.threshold(significance)
        self.gone = [r for r in sorted({*RATES, significance}) if math.isinf(held.threshold(r))]
        table = held.notes.get("recall") or {}
        self.rates = [r for r in RATES if r not in self.gone and table and all(str(r) in t for t in table.values())]
        self.near = max((r for r in self.rates if r <= significance), default=None)
        found: dict[str, Measures] = {
            name: {r: {by: Rate(*cell) for by, cell in t[str(r)].items()} for r in self.rates}
            for name, t in table.items()
            if self.rates
        }
        by = self.near or min(self.rates, default=0.0)
        self.attacks = dict(sorted(found.items(), key=lambda pair: (pair[1][by]["question"].value, pair[0])))

    def weakest(self, rate: float, by: str) -> tuple[str, Rate]:
        """The attack that gets through most often, the first of equals; or that all do equally."""
        shares = {name: m[rate][by] for name, m in self.attacks.items()}
        name = min(shares, key=lambda n: shares[n].value)
        same = len(shares) > 1 and len({share.value for share in shares.values()}) == 1
        return "all attacks alike" if same else name, shares[name]


def written(rate: float) -> str:
    """A rate as one writes it in casemate.yaml.

    >>> written(0.01), written(0.00005)
    ('.01', '.00005')
    """
    return np.format_float_positional(rate).removeprefix("0")


def one_in(rate: float) -> str:
    """A rate in words.

    >>> [one_in(r) for r in (0.01, 0.03, 0.5, 0.4)]
    ['1 in 100', '1 in 33', '1 in 2', '1 in 2.5']
    """
    return f"1 in {1 / rate:.0f}" if rate <= 0.1 else f"1 in {1 / rate:.1f}".removesuffix(".0")


def fewest(rate: float) -> int:
    """Harmless questions below which no finite threshold keeps the promise (``stats.conformal_threshold``).

    >>> fewest(0.01), fewest(0.002)
    (99, 499)
    """
    return math.ceil(1 / rate - 1e-9) - 1


class _Box(NamedTuple):
    """The axes of a chart, in pixels."""

    width: float = 320.0
    height: float = 196.0
    left: float = 50.0
    right: float = 308.0
    top: float = 10.0
    bottom: float = 154.0


BOX = _Box()


def _svg(key: str, title: str, said: str, marks: Iterable[str]) -> Markup:
    """An image with its text alternative."""
    return tag(
        "svg",
        tag("title", title, id=f"{key}-t"),
        tag("desc", said, id=f"{key}-d"),
        *marks,
        viewBox=f"0 0 {BOX.width:g} {BOX.height:g}",
        role="img",
        aria_labelledby=f"{key}-t",
        aria_describedby=f"{key}-d",
    )


def _label(text: str, x: float, y: float, anchor: str = "middle", kind: str = "") -> Markup:
    return tag("text", text, x=x, y=y, text_anchor=anchor, class_=kind)


def _upright(text: str, x: float) -> Markup:
    y = (BOX.top + BOX.bottom) / 2
    return tag("text", text, text_anchor="middle", transform=f"translate({x:.1f} {y:.1f}) rotate(-90)")


def alike(attacks: Mapping[str, Measures]) -> dict[str, Measures]:
    """Attacks with the same shares everywhere as one, with the widest intervals; the table has each."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for name, measures in attacks.items():
        groups.setdefault(tuple(share.value for m in measures.values() for share in m.values()), []).append(name)
    return {", ".join(names): _widest([attacks[n] for n in names]) for names in groups.values()}


def _widest(group: Sequence[Measures]) -> Measures:
    return {
        rate: {by: max((m[rate][by] for m in group), key=lambda share: share.high - share.low) for by in both}
        for rate, both in group[0].items()
    }


def legend_mark(by: str) -> Markup:
    """The line and the marker of ``question`` or ``document``."""
    marks = [tag("path", class_=f"line {by}", d="M0,6 H26"), _marker(by, 13.0, 6.0)]
    return tag("svg", *marks, viewBox="0 0 26 12", class_="legend", aria_hidden="true")


def _marker(by: str, x: float, y: float) -> Markup:
    if by == "question":
        return tag("rect", class_=by, x=x - 3, y=y - 3, width=6.0, height=6.0)
    return tag("circle", class_=by, cx=x, cy=y, r=3.2)


def panel(view: View, name: str, measures: Measures, key: str) -> Markup:
    """What is withheld of one attack, by question and by document, against the rate on a logarithmic scale."""
    ends = [math.log10(r) for r in (*RATES, view.significance)]
    x = Scale(min(ends), max(ends), BOX.left + 14, BOX.right - 10)
    y = Scale(0.0, 1.0, BOX.bottom, BOX.top)
    marks = [tag("line", class_="grid", x1=BOX.left, x2=BOX.right, y1=y(v), y2=y(v)) for v in (0.0, 0.5, 1.0)]
    marks += [_label(percent(v), BOX.left - 6, y(v) + 4, "end") for v in (0.0, 0.5, 1.0)]
    marks += [_label(f"{100 * r:g}", x(math.log10(r)), BOX.bottom + 16) for r in RATES]
    marks.append(_label("% of harmless questions flagged", (BOX.left + BOX.right) / 2, BOX.bottom + 34))
    marks += _shade(view, x)
    now = x(math.log10(view.significance))
    marks.append(tag("line", class_="chosen", x1=now, x2=now, y1=BOX.top, y2=BOX.bottom))
    for by, aside in (("document", 2.5), ("question", -2.5)):
        points = [(x(math.log10(r)) + aside, m[by]) for r, m in measures.items()]
        marks += [tag("line", class_=f"error {by}", x1=a, x2=a, y1=y(s.low), y2=y(s.high)) for a, s in points]
        path = "M" + " L".join(f"{a:.1f},{y(s.value):.1f}" for a, s in points)
        marks += [tag("path", class_=f"line {by}", d=path), *(_marker(by, a, y(s.value)) for a, s in points)]
    told = (f"at {100 * r:g} %: {measured(m['question'], True)} of questions" for r, m in measures.items())
    return _svg(key, f"{name}: share withheld", "; ".join(told), marks)


def _shade(view: View, x: Scale) -> Iterator[Markup]:
    """The rates that there are too few harmless questions for."""
    if not view.gone:
        return
    edge = x(math.log10(max(view.gone) * min(view.rates)) / 2)
    yield tag("rect", class_="missing", x=BOX.left, y=BOX.top, width=edge - BOX.left, height=BOX.bottom - BOX.top)
    yield _upright("too few questions", (BOX.left + edge) / 2 + 4)


def histogram(view: View, key: str) -> tuple[Markup, str]:
    """Scores of the harmless questions that set the threshold, and where that lies: the chart, and what it shows."""
    scores = np.asarray(view.held.benign, np.float64)
    edges = _edges(float(scores.min()), float(scores.max()), view.threshold)
    counts = np.histogram(-scores, -edges[::-1])[0][::-1]  # a score on the threshold is not above it
    x = Scale(float(edges[0]), float(edges[-1]), BOX.left, BOX.right)
    y = Scale(0.0, float(counts.max()), BOX.bottom, BOX.top + 22)
    cut = int(np.searchsorted(edges, view.threshold))
    marks = [
        _bars(edges[: cut + 1], counts[:cut], (x, y), "bar"),
        _bars(edges[cut:], counts[cut:], (x, y), "bar flagged"),
        tag("line", class_="axis", x1=BOX.left, x2=BOX.right, y1=BOX.bottom, y2=BOX.bottom),
        _label(str(counts.max()), BOX.left - 6, y(y.high) + 4, "end"),
        _label(f"{x.low:.1f}", x.start, BOX.bottom + 16, "start"),
        _label(f"{x.high:.1f}", x.end, BOX.bottom + 16, "end"),
        _label("score: 0 is the average, more is closer", (BOX.left + BOX.right) / 2, BOX.bottom + 34),
        _upright("questions", 14.0),
    ]
    said = f"{view.n} scores from {scores.min():.2f} to {scores.max():.2f}. "
    if math.isfinite(view.threshold):
        marks += _threshold(view.threshold, x(view.threshold))
        above = int((scores > view.threshold).sum())
        said += f"At {written(view.significance)} the threshold is {view.threshold:.2f}; {above} of these lie above it."
    else:
        said += f"No threshold at {written(view.significance)}: too few questions."
    return _svg(key, "Scores of harmless questions", said, marks), said


def _threshold(threshold: float, at: float) -> Iterator[Markup]:
    yield tag("line", class_="chosen", x1=at, x2=at, y1=BOX.top + 4, y2=BOX.bottom)
    x, anchor = (at + 6, "start") if at < (BOX.left + BOX.right) / 2 else (at - 6, "end")
    yield _label(f"threshold {threshold:.2f}", x, BOX.top + 12, anchor, "strong")


def _edges(low: float, high: float, threshold: float) -> Float64:
    """Bins of equal width, one of them ending at the threshold where there is one."""
    if high <= low:
        return np.array([low - 0.5, low, low + 0.5])
    if not math.isfinite(threshold):
        return np.linspace(low, high, BINS + 1)
    below = round(BINS * (threshold - low) / (high - low))
    width = (threshold - low) / below if below else (high - low) / BINS
    steps = np.arange(-max(below, 1), math.ceil((high - threshold) / width) + 1)
    edges = np.asarray(threshold + width * steps, np.float64)
    edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)  # rounding must not leave a score out
    return edges


def _bars(edges: Iterable[float], counts: Iterable[float], scales: tuple[Scale, Scale], kind: str) -> Markup:
    """One outline for all bars."""
    x, y = scales
    pairs = pairwise(edges)
    outline = [
        f"M{x(a):.1f},{y(0):.1f} V{y(c):.1f} H{x(b):.1f} V{y(0):.1f}"
        for c, (a, b) in zip(counts, pairs, strict=True)
        if c
    ]
    return tag("path", class_=kind, d=" ".join(outline))
