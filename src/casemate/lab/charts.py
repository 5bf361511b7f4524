"""Charts as inline SVG, and the elements that pages and charts are made of.

Colours come from the page's CSS variables, so a chart follows light and dark. Guard off is always orange, dashed and
round, guard on blue, solid and square: no statement rests on colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from casemate.lab.results import AttackResult, Figures
from casemate.lab.wording import measured, number, percent
from casemate.stats import Rate

Attribute: TypeAlias = str | float | int

WIDTH, HEIGHT = 320.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 308.0, 12.0, 222.0
FINE = 0.35
"""Points of a curve that are nearer together than this, in pixels, cannot be told apart."""


class Markup(str):
    """A text that is markup already. Everything else is escaped where it is put in."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: Attribute) -> Markup:
    """One element. A trailing underscore of an attribute falls away, one inside becomes a hyphen.

    >>> tag("p", "1 < 2 ", tag("b", "x"), class_='"a"', data_n=3)
    '<p class="&quot;a&quot;" data-n="3">1 &lt; 2 <b>x</b></p>'
    """
    put = "".join(f' {k.rstrip("_").replace("_", "-")}="{escape(_text(v))}"' for k, v in attributes.items())
    return Markup(f"<{name}{put}>{join(children)}</{name}>")


def join(pieces: Iterable[str], between: str = "") -> Markup:
    """Pieces in a row, each escaped unless it is markup."""
    return Markup(between.join(p if isinstance(p, Markup) else escape(p) for p in pieces))


def _text(value: Attribute) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


class Scale(NamedTuple):
    """Maps numbers from low to high onto pixels from start to end."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, x: float) -> float:
        """The pixel of a number, never outside."""
        if not math.isfinite(x) or self.high <= self.low:
            return self.start
        share = (x - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def lowest_auc(attacks: Iterable[AttackResult]) -> float:
    """Where the AUC axis of all attacks begins, so that their tracks can be compared."""
    lows = [f.auc.low for a in attacks for f in (a.off, a.on) if f and math.isfinite(f.auc.low)]
    return max(0.0, math.floor(10 * min([0.4, *lows]) + 1e-9) / 10)


def track(result: AttackResult, low: float, key: str) -> Markup:
    """AUC off and on with intervals, on a line from below chance to certainty."""
    x = Scale(low, 1.0, 12.0, 288.0)
    chance = x(0.5)
    lanes = [_lane(x, y, side, f.auc) for y, side, f in ((17.0, "off", result.off), (41.0, "on", result.on)) if f]
    marks = [
        tag("line", class_="chance", x1=chance, x2=chance, y1=3.0, y2=56.0),
        tag("line", class_="axis", x1=12.0, x2=288.0, y1=56.0, y2=56.0),
        _label("coin toss", chance, 70.0, "middle"),
        _label("certain", 288.0, 70.0, "end"),
    ]
    said = "; ".join(f"guard {side}: AUC {measured(f.auc)}" for side, f in _sides(result) if f)
    return _svg(f"{key}-track", f"{result.name}: AUC", f"From coin toss to certain. {said}.", 300, 76, [*marks, *lanes])


def _lane(x: Scale, y: float, side: str, auc: Rate) -> Markup:
    at, low, high = (x(v) for v in (auc.value, auc.low, auc.high))
    whisker = tag("line", class_=f"whisker {side}", x1=low, x2=high, y1=y, y2=y)
    left = high + 60 > x.end
    place = (low - 10, y + 4.5, "end") if left else (high + 10, y + 4.5, "start")
    return join([whisker, _marker(side, at, y), _label(f"{side} {number(auc.value)}", *place, "strong")])


def _marker(side: str, x: float, y: float) -> Markup:
    if side == "off":
        return tag("circle", class_="marker off", cx=x, cy=y, r=5.0)
    return tag("rect", class_="marker on", x=x - 5, y=y - 5, width=10.0, height=10.0)


def roc(result: AttackResult, key: str) -> Markup:
    """Both ROC curves and the line of chance."""
    x, y = Scale(0, 1, LEFT, RIGHT), Scale(0, 1, BOTTOM, TOP)
    marks = [*_grid(x, y), tag("line", class_="chance", x1=x(0), y1=y(0), x2=x(1), y2=y(1))]
    slope = math.degrees(math.atan2(y(1) - y(0), x(1) - x(0)))
    marks.append(_turned("coin toss", x(0.32) + 13, y(0.32) + 16, slope))
    marks += [_curve(x, y, side, f) for side, f in _sides(result) if f and f.roc]
    legend = [(side, f"guard {side}, AUC {number(f.auc.value)}") for side, f in _sides(result) if f]
    for line, (side, text) in enumerate(legend):
        at = BOTTOM - 12 - 18.0 * (len(legend) - 1 - line)
        marks.append(tag("line", class_=f"curve {side}", x1=RIGHT - 146, x2=RIGHT - 122, y1=at - 4, y2=at - 4))
        marks.append(_label(text, RIGHT - 116, at, "start"))
    said = " ".join(
        f"Guard {side}: AUC {measured(f.auc)}, true positive rate {measured(f.tpr_at_1, True)} at 1 % false positives."
        for side, f in _sides(result)
        if f
    )
    marks += _titles("false alarms: others taken for members", "members found")
    return _svg(f"{key}-roc", f"{result.name}: ROC curves", said, WIDTH, HEIGHT, marks)


def _curve(x: Scale, y: Scale, side: str, figures: Figures) -> Markup:
    points = [(x(a), y(b)) for a, b in sorted({(0.0, 0.0), (1.0, 1.0), *figures.roc})]
    kept = points[:1]
    for point in points[1:]:
        if math.dist(point, kept[-1]) >= FINE:
            kept.append(point)
    return tag("path", class_=f"curve {side}", d="M" + " L".join(f"{a:.1f},{b:.1f}" for a, b in kept))


def histogram(result: AttackResult, side: str, key: str) -> Markup:
    """Scores of members above the line, of others below it; both sides of an attack on the same scales."""
    shapes = {name: _shares(f) for name, f in _sides(result)}
    shape = shapes[side]
    if shape is None:
        return tag("p", f"No scores with the guard {side}.", class_="none")
    present = [s for s in shapes.values() if s]
    x = Scale(min(s.edges[0] for s in present), max(s.edges[-1] for s in present), LEFT, RIGHT)
    top = max(max([*s.members, *s.others]) for s in present) or 1.0
    middle = (TOP + BOTTOM) / 2
    up, down = Scale(0, top, middle, TOP + 8), Scale(0, top, middle, BOTTOM - 8)
    marks = [
        _bars(shape.edges, shape.members, x, up, f"bar {side}"),
        _bars(shape.edges, shape.others, x, down, f"bar {side} others"),
        tag("line", class_="axis", x1=LEFT, x2=RIGHT, y1=middle, y2=middle),
        *(_label(_short(v), x(v), BOTTOM + 16, anchor) for v, anchor in ((x.low, "start"), (x.high, "end"))),
        _label(percent(top), LEFT - 6, up(top) + 4, "end"),
        _label(percent(top), LEFT - 6, down(top) + 4, "end"),
        _turned("members", 24.0, (TOP + middle) / 2 + 4, -90),
        _turned("others", 24.0, (BOTTOM + middle) / 2 - 4, -90),
        _label("score: more to the right, likelier a member", (LEFT + RIGHT) / 2, HEIGHT - 12, "middle"),
    ]
    means = [_short(shape.mean(shares)) for shares in (shape.members, shape.others)]
    said = (
        f"Mean score of members {means[0]}, of others {means[1]}, on a scale from {_short(x.low)} to {_short(x.high)}. "
        f"The tallest bar is {percent(top)} of its group."
    )
    return _svg(f"{key}-{side}", f"{result.name}: scores, guard {side}", said, WIDTH, HEIGHT, marks)


class _Shape(NamedTuple):
    edges: Sequence[float]
    members: Sequence[float]
    others: Sequence[float]

    def mean(self, shares: Sequence[float]) -> float:
        return sum(share * (a + b) / 2 for share, (a, b) in zip(shares, pairwise(self.edges), strict=True))


def _shares(figures: Figures | None) -> _Shape | None:
    """The histogram as shares of each group; None if there is none that can be drawn."""
    raw: Mapping[str, list[float]] = figures.histogram if figures else {}
    edges, groups = raw.get("edges", []), [raw.get(name, []) for name in ("members", "nonmembers")]
    if len(edges) < 2 or any(len(g) != len(edges) - 1 for g in groups) or edges[-1] <= edges[0]:
        return None
    if not all(map(math.isfinite, [*edges, *groups[0], *groups[1]])):
        return None
    members, others = ([n / (sum(g) or 1.0) for n in g] for g in groups)
    return _Shape(edges, members, others)


def _bars(edges: Sequence[float], shares: Sequence[float], x: Scale, y: Scale, kind: str) -> Markup:
    """One outline for all bars: lighter than an element for each."""
    base = y(0)
    parts = [f"M{x(edges[0]):.1f},{base:.1f}"]
    for share, (a, b) in zip(shares, pairwise(edges), strict=True):
        parts.append(f"L{x(a):.1f},{y(share):.1f} L{x(b):.1f},{y(share):.1f}")
    return tag("path", class_=kind, d=" ".join([*parts, f"L{x(edges[-1]):.1f},{base:.1f} Z"]))


def _sides(result: AttackResult) -> tuple[tuple[str, Figures | None], ...]:
    return (("off", result.off), ("on", result.on))


def _grid(x: Scale, y: Scale) -> list[Markup]:
    """Lines and labels at each half."""
    marks = []
    for v, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        marks.append(tag("line", class_="grid", x1=x(v), x2=x(v), y1=TOP, y2=BOTTOM))
        marks.append(tag("line", class_="grid", x1=LEFT, x2=RIGHT, y1=y(v), y2=y(v)))
        marks.append(_label(percent(v), x(v), BOTTOM + 16, anchor))
        marks.append(_label(percent(v), LEFT - 6, y(v) + 4, "end"))
    return marks


def _titles(below: str, beside: str) -> list[Markup]:
    return [
        _label(below, (LEFT + RIGHT) / 2, HEIGHT - 12, "middle"),
        _turned(beside, 13.0, (TOP + BOTTOM) / 2, -90),
    ]


def _label(text: str, x: float, y: float, anchor: str, kind: str = "") -> Markup:
    return tag("text", text, x=x, y=y, text_anchor=anchor, class_=kind)


def _turned(text: str, x: float, y: float, degrees: float) -> Markup:
    return tag("text", text, text_anchor="middle", transform=f"translate({x:.1f} {y:.1f}) rotate({degrees:.1f})")


def _short(x: float) -> str:
    return f"{x:.3g}"


def _svg(key: str, title: str, said: str, width: float, height: float, marks: Iterable[str]) -> Markup:
    """An image with its text alternative."""
    return tag(
        "svg",
        tag("title", title, id=f"{key}-t"),
        tag("desc", said, id=f"{key}-d"),
        *marks,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_labelledby=f"{key}-t",
        aria_describedby=f"{key}-d",
    )
