"""SVG charts of reports and dashboard. They take numbers, and know neither campaigns nor calibrations.

Colors and sizes come from the CSS of the page, so a chart follows light and dark mode. Color never carries meaning
alone: guard off is orange, dashed and round; guard on is blue, solid and square; flagged marks differ in shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import NamedTuple, TypeAlias
from xml.etree import ElementTree as ET

import numpy as np

from casemate.maths.stats import Estimate
from casemate.reports.durations import duration
from casemate.reports.format import measured, minus, number, percent
from casemate.types import Float64

Point: TypeAlias = tuple[float, float]
WIDTH, HEIGHT = 320.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 308.0, 12.0, 222.0
"""View box of the report charts, and the edges of their plot area, in pixels."""
MIN_DISTANCE = 0.35
"""Points of a curve that are nearer together, in pixels, are drawn as one."""


class LinearScale(NamedTuple):
    """A linear map of numbers from low to high onto pixels from start to end, clipped at both ends."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, x: float) -> float:
        """Returns the pixel of a number; ``start`` if the number is not finite or the range is empty."""
        if not math.isfinite(x) or self.high <= self.low:
            return self.start
        share = (x - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


class Drawing:
    """An SVG image. ElementTree escapes every text and attribute, so Jinja2 includes it as safe markup.

    Without a title, the image is decorative, and assistive technology skips it. A description needs a key: the prefix,
    unique on the page, of the ids of both. ``kind`` is the CSS class. A stretched image ignores its own aspect ratio.
    """

    def __init__(
        self,
        size: Point,
        title: str = "",
        *,
        description: str = "",
        key: str = "",
        kind: str = "",
        stretch: bool = False,
    ) -> None:
        self.root = ET.Element("svg", viewBox="0 0 {:g} {:g}".format(*size))
        if kind:
            self.root.set("class", kind)
        if stretch:
            self.root.set("preserveAspectRatio", "none")
        if not title:
            self.root.set("aria-hidden", "true")
            return
        self.root.set("role", "img")
        if not key:
            self.root.set("aria-label", title)
            ET.SubElement(self.root, "title").text = title
            return
        for tag, attribute, text in (("title", "labelledby", title), ("desc", "describedby", description)):
            ET.SubElement(self.root, tag, id=f"{key}-{tag}").text = text
            self.root.set(f"aria-{attribute}", f"{key}-{tag}")

    def __html__(self) -> str:
        """Returns the markup; the name is the protocol of MarkupSafe and Jinja2."""
        return ET.tostring(self.root, encoding="unicode", short_empty_elements=False)

    __str__ = __html__

    def _mark(self, tag: str, kind: str, attributes: Mapping[str, str | float], title: str = "") -> ET.Element:
        texts = {name: value if isinstance(value, str) else _pixels(value) for name, value in attributes.items()}
        element = ET.SubElement(self.root, tag, ({"class": kind} if kind else {}) | texts)
        if title:
            ET.SubElement(element, "title").text = title
        return element

    def line(self, kind: str, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draws a line."""
        self._mark("line", kind, {"x1": x1, "x2": x2, "y1": y1, "y2": y2})

    def rect(self, kind: str, x: float, y: float, width: float, height: float, title: str = "") -> None:
        """Draws a rectangle; the title is shown as a tooltip."""
        self._mark("rect", kind, {"x": x, "y": y, "width": width, "height": height}, title)

    def circle(self, kind: str, x: float, y: float, radius: float, title: str = "") -> None:
        """Draws a circle around (x, y); the title is shown as a tooltip."""
        self._mark("circle", kind, {"cx": x, "cy": y, "r": radius}, title)

    def link(self, url: str, title: str, x: float, y: float, width: float, height: float) -> None:
        """Puts a transparent link over an area. The image is then a group of links, no longer a single picture."""
        self.root.set("role", "group")
        anchor = ET.SubElement(self.root, "a", {"href": url, "aria-label": title, "class": "hit"})
        box = {"x": _pixels(x), "y": _pixels(y), "width": _pixels(width), "height": _pixels(height)}
        ET.SubElement(ET.SubElement(anchor, "rect", box), "title").text = title

    def path(self, kind: str, d: str) -> None:
        """Draws a path from SVG path data."""
        self._mark("path", kind, {"d": d})

    def polyline(self, kind: str, points: Iterable[Point]) -> None:
        """Draws straight lines through some points."""
        self.path(kind, "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in points))

    def dots(self, kind: str, points: Iterable[Point]) -> None:
        """Draws round dots as one path of zero-length lines: lighter than an element for each."""
        self.path(kind, " ".join(f"M{x:.1f},{y:.1f}h.01" for x, y in points))

    def text(self, text: str, x: float, y: float, anchor: str = "middle", kind: str = "", angle: float = 0.0) -> None:
        """Writes a text at a position, rotated by an angle in degrees."""
        at: dict[str, str | float] = {"x": x, "y": y}
        if angle:
            at = {"transform": f"translate({x:.1f} {y:.1f}) rotate({angle:.1f})"}
        self._mark("text", kind, {**at, "text-anchor": anchor}).text = text

    def marker(self, kind: str, x: float, y: float, radius: float, square: bool) -> None:
        """Draws a square or a circle around (x, y)."""
        if square:
            self.rect(kind, x - radius, y - radius, 2 * radius, 2 * radius)
        else:
            self.circle(kind, x, y, radius)


class FramedChart(NamedTuple):
    """A stretched image and its axis labels, which the page writes beside it in HTML: so text is never stretched."""

    image: Drawing
    y_labels: Sequence[str]
    x_labels: Sequence[str]


def _pixels(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _short(x: float) -> str:
    return f"{x:.3g}"


# membership inference


class RocCurve(NamedTuple):
    """A ROC curve: points (false positive rate, true positive rate), AUC, and true positive rate at 1 % FPR."""

    points: Sequence[Point]
    auc: Estimate
    tpr_at_1: Estimate | None = None


class GroupHistogram(NamedTuple):
    """Shares of members and of non-members in each bin, in [0, 1]; one edge more than bins."""

    edges: Sequence[float]
    members: Sequence[float]
    nonmembers: Sequence[float]

    def mean(self, shares: Sequence[float]) -> float:
        """The mean score of one group, from the centers of the bins."""
        return sum(share * (a + b) / 2 for share, (a, b) in zip(shares, pairwise(self.edges), strict=True))


def auc_track(name: str, aucs: Mapping[str, Estimate], low: float, key: str) -> Drawing:
    """AUCs by side of the guard, ``off`` or ``on``, with intervals on one axis, from ``low`` below 0.5 to 1."""
    said = "; ".join(f"guard {side}: AUC {measured(auc)}" for side, auc in aucs.items())
    image = Drawing(
        (300, 76), f"{name}: AUC", description=f"From chance (.50) to certain (1.00). {said}.", key=f"{key}-track"
    )
    x = LinearScale(low, 1.0, 12.0, 288.0)
    image.line("chance", x(0.5), 3.0, x(0.5), 56.0)
    image.line("axis", 12.0, 56.0, 288.0, 56.0)
    image.text("chance", x(0.5), 70.0)
    image.text("certain", 288.0, 70.0, "end")
    for side, auc in aucs.items():
        y = 17.0 if side == "off" else 41.0
        at, left, right = (x(v) for v in (auc.value, auc.low, auc.high))
        image.line(f"whisker {side}", left, y, right, y)
        image.marker(f"marker {side}", at, y, 5.0, square=side == "on")
        before = right + 60 > x.end
        image.text(
            f"{side} {number(auc.value)}",
            left - 10 if before else right + 10,
            y + 4.5,
            "end" if before else "start",
            "strong",
        )
    return image


def roc_chart(name: str, curves: Mapping[str, RocCurve], key: str) -> Drawing:
    """ROC curves by side of the guard, and the line of chance."""
    said = " ".join(
        f"Guard {side}: AUC {measured(c.auc)}, true positive rate {measured(c.tpr_at_1, True)} at 1 % false positives."
        for side, c in curves.items()
    )
    image = Drawing((WIDTH, HEIGHT), f"{name}: ROC curves", description=said, key=f"{key}-roc")
    x, y = LinearScale(0, 1, LEFT, RIGHT), LinearScale(0, 1, BOTTOM, TOP)
    for v, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        image.line("grid", x(v), TOP, x(v), BOTTOM)
        image.line("grid", LEFT, y(v), RIGHT, y(v))
        image.text(percent(v), x(v), BOTTOM + 16, anchor)
        image.text(percent(v), LEFT - 6, y(v) + 4, "end")
    image.line("chance", x(0), y(0), x(1), y(1))
    for side, curve in curves.items():
        if curve.points:
            points = [(x(a), y(b)) for a, b in sorted({(0.0, 0.0), (1.0, 1.0), *curve.points})]
            image.polyline(f"curve {side}", _thinned(points))
    legend = [(f"curve {side}", f"guard {side}, AUC {number(curve.auc.value)}") for side, curve in curves.items()]
    for row, (kind, text) in enumerate([*legend, ("chance", "chance")]):
        at = BOTTOM - 12 - 18.0 * (len(legend) - row)
        image.line(kind, RIGHT - 146, at - 4, RIGHT - 122, at - 4)
        image.text(text, RIGHT - 116, at, "start")
    image.text("false positive rate", (LEFT + RIGHT) / 2, HEIGHT - 12)
    image.text("true positive rate", 13.0, (TOP + BOTTOM) / 2, angle=-90)
    return image


def _thinned(points: Sequence[Point]) -> list[Point]:
    kept = [points[0]]
    for point in points[1:]:
        if math.dist(point, kept[-1]) >= MIN_DISTANCE:
            kept.append(point)
    return kept


def score_histogram(name: str, shapes: Mapping[str, GroupHistogram], side: str, key: str) -> Drawing:
    """Scores of members above the axis and of non-members below it, for one side of the guard.

    The histograms of all sides set the scales, so charts of one attack can be compared.
    """
    shape = shapes[side]
    x = LinearScale(min(s.edges[0] for s in shapes.values()), max(s.edges[-1] for s in shapes.values()), LEFT, RIGHT)
    top = max(max([*s.members, *s.nonmembers]) for s in shapes.values()) or 1.0
    means = [_short(shape.mean(shares)) for shares in (shape.members, shape.nonmembers)]
    said = (
        f"Mean score of members {means[0]}, of non-members {means[1]}, on a scale from {_short(x.low)} to "
        f"{_short(x.high)}. The highest bar is {percent(top)} of its group."
    )
    image = Drawing((WIDTH, HEIGHT), f"{name}: scores, guard {side}", description=said, key=f"{key}-{side}")
    middle = (TOP + BOTTOM) / 2
    up, down = LinearScale(0, top, middle, TOP + 8), LinearScale(0, top, middle, BOTTOM - 8)
    image.path(f"bar {side}", _outline(shape.edges, shape.members, x, up))
    image.path(f"bar {side} others", _outline(shape.edges, shape.nonmembers, x, down))
    image.line("axis", LEFT, middle, RIGHT, middle)
    image.text(_short(x.low), LEFT, BOTTOM + 16, "start")
    image.text(_short(x.high), RIGHT, BOTTOM + 16, "end")
    image.text(percent(top), LEFT - 6, up(top) + 4, "end")
    image.text(percent(top), LEFT - 6, down(top) + 4, "end")
    image.text("members", 13.0, (TOP + middle) / 2 + 4, angle=-90)
    image.text("non-members", 13.0, (BOTTOM + middle) / 2 - 4, angle=-90)
    image.text("score: higher means likelier a member", (LEFT + RIGHT) / 2, HEIGHT - 12)
    return image


def _outline(edges: Sequence[float], shares: Sequence[float], x: LinearScale, y: LinearScale) -> str:
    """One outline for all bars: lighter than an element for each."""
    base = y(0)
    parts = [f"M{x(edges[0]):.1f},{base:.1f}"]
    for share, (a, b) in zip(shares, pairwise(edges), strict=True):
        parts.append(f"L{x(a):.1f},{y(share):.1f} L{x(b):.1f},{y(share):.1f}")
    return " ".join([*parts, f"L{x(edges[-1]):.1f},{base:.1f} Z"])


# extraction


def extraction_chart(curves: Mapping[str, Sequence[Point]], budget: float, said: str) -> Drawing:
    """Share extracted, in [0, 1], against the number of questions, by side of the guard."""
    image = Drawing((320, 230), said)
    x, y = LinearScale(0.0, budget, 42.0, 310.0), LinearScale(0.0, 1.0, 200.0, 12.0)
    for v in (0.0, 0.5, 1.0):
        image.line("grid", x.start, y(v), x.end, y(v))
        image.text(percent(v), 36.0, y(v) + 4, "end")
    for side, points in curves.items():
        image.polyline(f"curve {'off' if side == 'off' else 'on'}", [(x(a), y(b)) for a, b in [(0.0, 0.0), *points]])
    image.text("0", x.start, 218.0)
    image.text(f"{budget:,.0f} questions", x.end, 218.0, "end")
    return image


# calibration

AREA_HEIGHT, AREA_LEFT, AREA_TOP, AREA_BOTTOM = 196.0, 50.0, 10.0, 154.0
"""Height of the calibration charts, and edges of their plot area, in pixels; width and right edge as above."""
MAX_BINS = 36


def recall_panel(
    name: str,
    recall: Mapping[str, Mapping[float, Estimate]],
    ticks: Sequence[float],
    current: float,
    missing: float | None,
    key: str,
) -> Drawing:
    """Share of an attack that is withheld, against the false alarm rate on a logarithmic axis.

    ``recall`` has the shares of ``question`` and of ``document``; ``current`` is the rate that is marked. Up to
    ``missing`` there are too few questions for a threshold.
    """
    told = (f"at {100 * r:g} %: {measured(share, True)} of questions" for r, share in recall["question"].items())
    image = Drawing((WIDTH, AREA_HEIGHT), f"{name}: share withheld", description="; ".join(told), key=key)
    ends = [math.log10(r) for r in (*ticks, current)]
    x = LinearScale(min(ends), max(ends), AREA_LEFT + 14, RIGHT - 10)
    y = LinearScale(0.0, 1.0, AREA_BOTTOM, AREA_TOP)
    for v in (0.0, 0.5, 1.0):
        image.line("grid", AREA_LEFT, y(v), RIGHT, y(v))
        image.text(percent(v), AREA_LEFT - 6, y(v) + 4, "end")
    for r in ticks:
        image.text(f"{100 * r:g}", x(math.log10(r)), AREA_BOTTOM + 16)
    image.text("% of benign questions flagged", (AREA_LEFT + RIGHT) / 2, AREA_BOTTOM + 34)
    if missing is not None:
        edge = x(math.log10(missing * min(recall["question"])) / 2)
        image.rect("missing", AREA_LEFT, AREA_TOP, edge - AREA_LEFT, AREA_BOTTOM - AREA_TOP)
        image.text("too few questions", (AREA_LEFT + edge) / 2 + 4, (AREA_TOP + AREA_BOTTOM) / 2, angle=-90)
    now = x(math.log10(current))
    image.line("chosen", now, AREA_TOP, now, AREA_BOTTOM)
    for by, aside in (("document", 2.5), ("question", -2.5)):  # beside each other, so that whiskers do not overlap
        points = [(x(math.log10(r)) + aside, share) for r, share in recall[by].items()]
        for a, share in points:
            image.line(f"error {by}", a, y(share.low), a, y(share.high))
        image.polyline(f"line {by}", [(a, y(share.value)) for a, share in points])
        for a, share in points:
            recall_marker(image, by, a, y(share.value))
    return image


def recall_marker(image: Drawing, by: str, x: float, y: float) -> None:
    """Draws the marker of ``question`` or ``document``."""
    image.marker(by, x, y, 3.0 if by == "question" else 3.2, square=by == "question")


def recall_legend(by: str) -> Drawing:
    """Line and marker of ``question`` or ``document``, for a legend in a text."""
    image = Drawing((26, 12), kind="legend")
    image.path(f"line {by}", "M0,6 H26")
    recall_marker(image, by, 13.0, 6.0)
    return image


def threshold_histogram(scores: Float64, threshold: float, said: str, key: str) -> Drawing:
    """Scores of benign questions, (n,), n > 0, with those above the threshold, which may be infinite, set apart."""
    image = Drawing((WIDTH, AREA_HEIGHT), "Scores of benign questions", description=said, key=key)
    edges = _bins(float(scores.min()), float(scores.max()), threshold)
    counts = np.histogram(-scores, -edges[::-1])[0][::-1]  # a score on the threshold is not above it
    x = LinearScale(float(edges[0]), float(edges[-1]), AREA_LEFT, RIGHT)
    y = LinearScale(0.0, float(counts.max()), AREA_BOTTOM, AREA_TOP + 22)
    cut = int(np.searchsorted(edges, threshold))
    image.path("bar", _separate_bars(edges[: cut + 1], counts[:cut], x, y))
    image.path("bar flagged", _separate_bars(edges[cut:], counts[cut:], x, y))
    image.line("axis", AREA_LEFT, AREA_BOTTOM, RIGHT, AREA_BOTTOM)
    image.text(str(counts.max()), AREA_LEFT - 6, y(y.high) + 4, "end")
    image.text(minus(f"{x.low:.1f}"), x.start, AREA_BOTTOM + 16, "start")
    image.text(minus(f"{x.high:.1f}"), x.end, AREA_BOTTOM + 16, "end")
    image.text("score: 0 is average, higher is closer", (AREA_LEFT + RIGHT) / 2, AREA_BOTTOM + 34)
    image.text("questions", 14.0, (AREA_TOP + AREA_BOTTOM) / 2, angle=-90)
    if math.isfinite(threshold):
        at = x(threshold)
        image.line("chosen", at, AREA_TOP + 4, at, AREA_BOTTOM)
        on_left = at < (AREA_LEFT + RIGHT) / 2
        label = minus(f"threshold {threshold:.2f}")
        image.text(label, at + 6 if on_left else at - 6, AREA_TOP + 12, "start" if on_left else "end", "strong")
    return image


def _bins(low: float, high: float, threshold: float) -> Float64:
    """Edges of bins of equal width, one of them at the threshold if there is one."""
    if high <= low:
        return np.array([low - 0.5, low, low + 0.5])
    if not math.isfinite(threshold):
        return np.linspace(low, high, MAX_BINS + 1)
    below = round(MAX_BINS * (threshold - low) / (high - low))
    width = (threshold - low) / below if below else (high - low) / MAX_BINS
    steps = np.arange(-max(below, 1), math.ceil((high - threshold) / width) + 1)
    edges = np.asarray(threshold + width * steps, np.float64)
    edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)  # rounding must not leave a score out
    return edges


def _separate_bars(edges: Iterable[float], counts: Iterable[float], x: LinearScale, y: LinearScale) -> str:
    return " ".join(
        f"M{x(a):.1f},{y(0):.1f} V{y(c):.1f} H{x(b):.1f} V{y(0):.1f}"
        for c, (a, b) in zip(counts, pairwise(edges), strict=True)
        if c
    )


# time series and scores of the dashboard

WIDE, HIGH = 1000.0, 200.0
MAX_DOTS = 2000


class ChartLink(NamedTuple):
    """A column of a chart over time that leads to the events behind it; the title is also its tooltip."""

    start: datetime
    end: datetime
    url: str
    title: str


class _TimeChart:
    """A chart over time: the same horizontal scale for its marks, its columns and its labels."""

    def __init__(self, start: datetime, end: datetime, said: str) -> None:
        self.image = Drawing((WIDE, HIGH), said, stretch=True)
        self._start, self._end = start, end
        self._scale = LinearScale(0.0, max((end - start).total_seconds(), 1e-3), 0.0, WIDE)

    def x(self, at: datetime) -> float:
        return self._scale((at - self._start).total_seconds())

    def framed(self, y_labels: Sequence[str], links: Sequence[ChartLink]) -> FramedChart:
        for one in links:
            left = self.x(one.start)
            self.image.link(one.url, one.title, left, 0.0, max(self.x(one.end) - left, 1.0), HIGH)
        return FramedChart(self.image, y_labels, _time_labels(self._start, self._end))


def request_bars(counts: Sequence[tuple[int, int]], links: Sequence[ChartLink], said: str) -> FramedChart:
    """Requests over time, with the flagged ones at the foot of each bar: both counts of each column."""
    chart = _TimeChart(links[0].start, links[-1].end, said)
    top = max((requests for requests, _ in counts), default=0) or 1
    y = LinearScale(0.0, float(top), HIGH, 0.0)
    for both, link in zip(counts, links, strict=True):
        left, right = chart.x(link.start), chart.x(link.end)
        for kind, count in zip(("all", "flagged"), both, strict=True):
            if count:
                height = max(HIGH - y(count), 3.0)
                width = right - left
                chart.image.rect(kind, left + 0.12 * width, HIGH - height, 0.76 * width, height)
    return chart.framed((f"{top:,}", "0"), [one for one, (count, _) in zip(links, counts, strict=True) if count])


QUANTILE_STYLES = ("p50", "p95", "p99")
"""CSS classes of the lines in ``latency_lines``, in order."""


def latency_lines(quantiles: Sequence[Sequence[float] | None], links: Sequence[ChartLink], said: str) -> FramedChart:
    """Seconds at p50, p95 and p99 over time, as one line each; interrupted where a column has none.

    A column between two without durations gets a line of half its width.
    """
    chart = _TimeChart(links[0].start, links[-1].end, said)
    top = max((max(q) for q in quantiles if q), default=0.0) or 1.0
    y = LinearScale(0.0, top, HIGH - 4, 4.0)
    gaps = [True, *(found is None for found in quantiles), True]
    for i, kind in reversed(list(enumerate(QUANTILE_STYLES))):
        parts = []
        for one, found, (before, _, after) in zip(
            links, quantiles, zip(gaps, gaps[1:], gaps[2:], strict=False), strict=True
        ):
            left, right = chart.x(one.start), chart.x(one.end)
            width = (right - left) / 2 if before and after else 0.0
            if found:
                x = (left + right - width) / 2
                parts.append(f"{'M' if before else 'L'}{x:.1f},{y(found[i]):.1f}" + (f"h{width:.1f}" if width else ""))
        chart.image.path(f"latency {kind}", " ".join(parts))
    known = [one for one, found in zip(links, quantiles, strict=True) if found]
    return chart.framed((duration(top), "0"), known)


def score_scatter(
    points: Sequence[tuple[datetime, float, bool]],
    span: tuple[datetime, datetime],
    links: Sequence[ChartLink],
    said: str,
    ends: tuple[str, str] | None = None,
) -> FramedChart:
    """Distance of scores to their threshold over time: time, difference, and whether it was flagged.

    The newest ``MAX_DOTS`` points are drawn; ``span`` are both ends of the horizontal axis. ``ends`` label
    the upper and the lower end of the vertical axis; None: the largest distance.
    """
    chart = _TimeChart(*span, said)
    points = points[-MAX_DOTS:]
    reach = max([*(abs(p[1]) for p in points), 1e-6])
    y = LinearScale(-reach, reach, HIGH - 8, 8.0)
    chart.image.line("limit", 0.0, HIGH / 2, WIDE, HIGH / 2)
    for kind, flagged in (("calm", False), ("flagged", True)):
        chart.image.dots(f"dots {kind}", [(chart.x(p[0]), y(p[1])) for p in points if p[2] is flagged])
    above, below = ends or (f"+{reach:.2f}", minus(f"-{reach:.2f}"))
    return chart.framed((above, "threshold", below), links)


def _time_labels(start: datetime, end: datetime) -> list[str]:
    form = "%H:%M" if start.date() == end.date() else "%d %b %H:%M" if end - start < timedelta(days=4) else "%d %b"
    shown = [start, start + (end - start) / 2, end]
    return [f"{one.astimezone(UTC):{form}}" for one in shown[:-1]] + [f"{shown[-1].astimezone(UTC):{form}} UTC"]


class RunPanel(NamedTuple):
    """A line over runs, with the band in which it is expected.

    Attributes:
        band: Its ends; None: there is none.
        span: Both ends of the vertical axis.
        bars: One share per run, drawn as bars behind the line; empty: none.
    """

    name: str
    values: Sequence[float | None]
    band: Point | None
    span: Point
    labels: tuple[str, str]
    bars: Sequence[float | None] = ()


class RunAlarm(NamedTuple):
    """An alarm in a chart over runs; runs are counted from 0.

    Attributes:
        change: Estimated first run after the change, and both ends of its interval; None: not marked.
        recovered: The run that ended the alarm; None: it lasts.
    """

    alarmed: int
    change: tuple[int, int, int] | None = None
    recovered: int | None = None


class RunChart(NamedTuple):
    """A chart over runs.

    Attributes:
        marks: A letter per run: ``P`` passed, ``F`` failed, ``E`` no answer, a space: not asked. Empty: no marks.
        links: Address and title of each run; empty: none.
    """

    title: str
    description: str
    times: tuple[str, str]
    marks: str
    panels: Sequence[RunPanel]
    alarms: Sequence[RunAlarm] = ()
    links: Sequence[tuple[str, str]] = ()
    width: float = 340.0
    height: float = 72.0


MARK_ROWS = {"F": 5.0, "E": 12.0, "P": 19.0}
"""Vertical position of the marks: results differ in place and form, not only in color."""
MARK_CLASSES = {"F": "failed", "E": "unanswered", "P": "passed"}


def run_chart(chart: RunChart, key: str) -> Drawing:
    """Draws lines over runs, each result as a mark, and alarms with the estimated run of the change."""
    runs = max(len(chart.marks), *(len(p.values) for p in chart.panels), 1)
    head = 28.0 if chart.alarms else 4.0
    tops = [head + 14 + i * (chart.height + 22) + (22 if i and chart.marks else 0) for i in range(len(chart.panels))]
    bottom = tops[-1] + chart.height + (24 if chart.marks and len(tops) == 1 else 2)
    image = Drawing((chart.width, bottom + 16), chart.title, description=chart.description, key=key, kind="runs")
    x = LinearScale(-0.5, runs - 0.5, 46.0, chart.width - 8)
    for panel, top in zip(chart.panels, tops, strict=True):
        _run_panel(image, panel, x, top, top + chart.height)
    if chart.marks:
        _run_marks(image, chart.marks, x, tops[0] + chart.height + 3)
    for alarm in chart.alarms:
        _run_alarm(image, alarm, x, head, bottom)
    if chart.alarms:
        _alarm_labels(image, chart.alarms[-1], x)
    for time, at, anchor in zip(chart.times, (x.start, x.end), ("start", "end"), strict=True):
        if time:
            image.text(time, at, bottom + 12, anchor)
    for i, (url, title) in enumerate(chart.links):
        image.link(url, title, x(i - 0.5), head, max(x(i + 0.5) - x(i - 0.5), 1.0), bottom - head)
    return image


def _run_panel(image: Drawing, panel: RunPanel, x: LinearScale, top: float, bottom: float) -> None:
    y = LinearScale(*panel.span, bottom, top)
    if panel.band:
        low, high = (y(end) for end in panel.band)
        image.rect("band", x.start, high, x.end - x.start, max(low - high, 1.0), f"{panel.name}: expected range")
        image.line("edge", x.start, high, x.end, high)
    image.line("axis", x.start, bottom, x.end, bottom)
    image.line("grid", x.start, top, x.end, top)
    image.text(panel.labels[0], x.start - 5, bottom + 3, "end")
    image.text(panel.labels[1], x.start - 5, top + 8, "end")
    image.text(panel.name, x.start, top - 4, "start", "strong small")
    half = 0.36
    bars = [(i, v) for i, v in enumerate(panel.bars) if v]
    image.path(
        "column", " ".join(f"M{x(i - half):.1f},{bottom:g}V{y(v):.1f}H{x(i + half):.1f}V{bottom:g}" for i, v in bars)
    )
    image.path("line", _interrupted([(x(i), None if v is None else y(v)) for i, v in enumerate(panel.values)]))


def _interrupted(points: Sequence[tuple[float, float | None]]) -> str:
    """Path data of a line that is interrupted where there is no value."""
    parts, connected = [], False
    for x, y in points:
        if y is not None:
            parts.append(f"{'L' if connected else 'M'}{x:.1f},{y:.1f}" + ("" if connected else "h.01"))
        connected = y is not None
    return " ".join(parts)


def _run_marks(image: Drawing, marks: str, x: LinearScale, top: float) -> None:
    """Each result at the place of its run: a cross, a ring or a dot, each kind in a row of its own."""
    for letter, row in MARK_ROWS.items():
        at = [x(i) for i, mark in enumerate(marks) if mark == letter]
        y = top + row
        if letter == "P":
            image.dots(MARK_CLASSES[letter], [(a, y) for a in at])
        elif letter == "F":
            image.path(MARK_CLASSES[letter], " ".join(f"M{a - 3:.1f},{y - 3:.1f}l6,6m0,-6l-6,6" for a in at))
        else:
            image.path(
                MARK_CLASSES[letter],
                " ".join(f"M{a - 2.5:.1f},{y:.1f}a2.5,2.5 0 1 0 5,0a2.5,2.5 0 1 0 -5,0" for a in at),
            )


def _run_alarm(image: Drawing, alarm: RunAlarm, x: LinearScale, top: float, bottom: float) -> None:
    at = x(alarm.alarmed)
    image.line("alarm", at, top - 3, at, bottom)
    image.path("flag", f"M{at - 4.5:.1f},{top - 10:.1f}h9l-4.5,8z")
    if alarm.recovered is not None:
        image.line("recovered", x(alarm.recovered), top, x(alarm.recovered), bottom)
    if alarm.change:
        first, low, high = (x(run) for run in alarm.change)
        image.line("change", first, top - 3, first, bottom)
        image.line("doubt", low, top - 2, max(high, low + 1), top - 2)


def _alarm_labels(image: Drawing, alarm: RunAlarm, x: LinearScale) -> None:
    """Names the lines of an alarm, away from each other and within the chart."""
    at = x(alarm.alarmed)
    right = at < x.end - 44
    image.text(
        "alarm", at + 7 if right else at - 7, 22.0 if right else 11.0, "start" if right else "end", "strong small"
    )
    if alarm.change:
        first = x(alarm.change[0])
        left = first > x.start + 50
        image.text("change", first - 5 if left else first + 5, 11.0, "end" if left else "start", "strong small")


RUN_LEGEND = {
    "line": "failures of the last 10 runs",
    "band": "expected from the baseline",
    "passed": "passed",
    "failed": "failed",
    "unanswered": "no answer",
    "change": "estimated change, with its interval",
    "alarm": "alarm",
    "recovered": "recovery",
}
"""Meaning of each kind of mark in ``run_chart``."""


def run_legend(kind: str) -> Drawing:
    """A mark of ``run_chart``, for a legend in a text."""
    image = Drawing((26, 14), kind="runs legend")
    middle = LinearScale(0.0, 1.0, 13.0, 14.0)
    if kind == "line":
        image.path("line", "M1,10 L9,6 L16,8 L25,3")
    elif kind == "band":
        image.rect("band", 1.0, 3.0, 24.0, 10.0)
        image.line("edge", 1.0, 3.0, 25.0, 3.0)
    elif kind in MARK_CLASSES.values():
        letter = next(one for one, name in MARK_CLASSES.items() if name == kind)
        _run_marks(image, letter, middle, 7.0 - MARK_ROWS[letter])
    elif kind == "change":
        image.line("change", 13.0, 1.0, 13.0, 14.0)
        image.line("doubt", 5.0, 2.0, 21.0, 2.0)
    elif kind == "alarm":
        _run_alarm(image, RunAlarm(0), middle, 10.0, 14.0)
    else:
        image.line("recovered", 13.0, 0.0, 13.0, 14.0)
    return image


def run_strip(marks: str, said: str) -> Drawing:
    """Results of a canary as a strip of marks, as in ``RunChart``, without axes."""
    image = Drawing((240, 24), said, kind="runs strip")
    _run_marks(image, marks, LinearScale(-0.5, max(len(marks), 1) - 0.5, 2.0, 238.0), 0.0)
    return image


def sparkline(shares: Sequence[float | None], said: str, links: Sequence[tuple[str, str]] = ()) -> Drawing:
    """A small trend of shares in [0, 1], oldest first; the line is interrupted at None.

    ``links`` has the address and title of each share; empty: none.
    """
    image = Drawing((100, 24), said, kind="spark", stretch=True)
    step = 100.0 / max(len(shares), 1)
    image.line("axis", 0.0, 23.0, 100.0, 23.0)
    points = [((i + 0.5) * step, None if share is None else 21 - 18 * share) for i, share in enumerate(shares)]
    image.path("trend", _interrupted(points))
    for i, (url, title) in enumerate(links):
        image.link(url, title, i * step, 0.0, step, 24.0)
    return image


def score_meter(score: float, threshold: float | None, span: Point, flagged: bool) -> Drawing:
    """One score on a line, with its threshold as a bar across; ``span`` are both ends of the line."""
    image = Drawing((120, 14), kind="meter")
    x = LinearScale(*span, 4.0, 116.0)
    image.line("axis", 2.0, 7.0, 118.0, 7.0)
    if threshold is not None:
        image.line("limit", x(threshold), 1.0, x(threshold), 13.0)
    if flagged:
        image.path("flagged", f"M{x(score):.1f},2 l5,5 l-5,5 l-5,-5 z")
    else:
        image.circle("calm", x(score), 7.0, 4.0)
    return image


def share_bar(share: float) -> Drawing:
    """A share in [0, 1] as a horizontal bar."""
    image = Drawing((100, 8), kind="level", stretch=True)
    image.rect("back", 0.0, 0.0, 100.0, 8.0)
    image.rect("bar", 0.0, 0.0, 100 * min(max(share, 0.0), 1.0), 8.0)
    return image


# maps and figures of papers


LABEL_WIDTH, LABEL_HEIGHT = 110.0, 22.0
"""Distance below which labels of topics would overlap, in pixels."""


def topic_map(
    points: Float64, labels: Sequence[int], rings: Sequence[tuple[int, float, str, str]], names: Sequence[str]
) -> Drawing:
    """Chunks, (n, 2), as dots, colored and labeled by topic, with rings around some of them.

    Topics without a name are gray. A ring has the index of a point, its radius, tooltip, and address of the events
    behind it.
    """
    size = 640.0
    known = len({label for label in labels if label >= 0})
    image = Drawing((size, size), f"Map of {len(points)} chunks in {known} topics")
    (x_low, y_low), (x_high, y_high) = points.min(axis=0), points.max(axis=0)
    x, y = (
        LinearScale(float(x_low), float(x_high), 14.0, size - 14),
        LinearScale(float(y_low), float(y_high), size - 14, 14.0),
    )
    at = [(x(float(a)), y(float(b))) for a, b in points]
    centers = draw_topics(image, at, labels, len(names))
    for i, radius, title, url in rings:
        image.circle("ring", *at[i], radius)
        image.link(url, title, at[i][0] - radius, at[i][1] - radius, 2 * radius, 2 * radius)
    taken: list[Point] = []
    for topic, center in centers.items():
        a, b = center
        while any(abs(a - x0) < LABEL_WIDTH and abs(b - y0) < LABEL_HEIGHT for x0, y0 in taken):
            b += LABEL_HEIGHT
        taken.append((a, b))
        image.text(names[topic], a, b + 6)
    return image


def draw_topics(image: Drawing, points: Sequence[Point], labels: Sequence[int], topics: int) -> dict[int, Point]:
    """Draws points as dots in the color of their topic, those of no topic below ``topics`` first and in gray.

    Returns the median position of each topic that has points.
    """
    labeled = list(zip(points, labels, strict=True))
    image.dots("topic other", [p for p, label in labeled if not 0 <= label < topics])
    centers = {}
    for topic in range(topics):
        own = [p for p, label in labeled if label == topic]
        image.dots(f"topic t{topic}", own)
        if own:
            a, b = np.median(own, axis=0).tolist()
            centers[topic] = a, b
    return centers


STEP_STYLES = ("curve on", "curve off", "curve axis")
"""CSS classes of the groups in ``step_chart``, in order: blue, orange and dashed, gray."""


def step_chart(
    title: str, edges: Float64, groups: Mapping[str, Float64], axis: str, threshold: float | None = None
) -> Drawing:
    """Shares of up to three groups, (n,), in the same bins, with edges (n + 1,), as outlines.

    ``axis`` is the label of the horizontal axis; a threshold is marked.
    """
    said = [f"{name}: mean {number(float(s @ (edges[1:] + edges[:-1])) / 2)}" for name, s in groups.items()]
    said += [f"threshold {number(threshold)}"] if threshold is not None else []
    image = Drawing((320, 250), f"{title}. {'; '.join(said)}.")
    left, bottom, head = 50.0, 206.0, 34.0
    top = max(float(shares.max()) for shares in groups.values()) or 1.0
    x, y = LinearScale(float(edges[0]), float(edges[-1]), left, RIGHT), LinearScale(0.0, top, bottom, head)
    image.line("axis", left, bottom, RIGHT, bottom)
    image.text(percent(top), left - 6, head + 4, "end")
    image.text(number(x.low), left, bottom + 16, "start")
    image.text(number(x.high), RIGHT, bottom + 16, "end")
    image.text(axis, (left + RIGHT) / 2, 236.0)
    for i, ((name, shares), style) in enumerate(zip(groups.items(), STEP_STYLES, strict=False)):
        bars = zip(shares, pairwise(edges), strict=True)
        image.polyline(style, [(left, bottom), *((x(v), y(s)) for s, ends in bars for v in ends)])
        at = 30 + 96.0 * i
        image.line(style, at, 10.0, at + 16, 10.0)
        image.text(name, at + 20, 14.0, "start")
    if threshold is not None:
        image.line("chance", x(threshold), head, x(threshold), bottom)
        image.text(f"threshold {number(threshold)}", x(threshold) - 5, head + 10, "end")
    return image
