"""Charts of our own, as inline SVG. Colours are the style sheet's; sizes follow the screen, texts stand beside in HTML.

Nothing is told by colour alone: flagged is filled and named, harmless is pale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from casemate.gateway.dashboard.page import decimal
from casemate.lab.charts import Markup, Scale, join, tag

WIDE, HIGH = 1000.0, 200.0
DOTS = 2000
"""Points that are drawn."""


class Bar(NamedTuple):
    """A span of time: what happened, and how much of it was flagged."""

    at: datetime
    asked: int
    flagged: int


def bars(found: Sequence[Bar], said: str) -> Markup:
    """Counts over time, the flagged share at the foot of each."""
    top = max((b.asked for b in found), default=0) or 1
    y = Scale(0.0, float(top), HIGH, 0.0)
    width = WIDE / max(len(found), 1)
    marks = []
    for i, bar in enumerate(found):
        left, inner = i * width + 0.12 * width, 0.76 * width
        for kind, count in (("all", bar.asked), ("flagged", bar.flagged)):
            if count:
                height = max(HIGH - y(count), 3.0)
                title = tag("title", f"{bar.at:%d %b %H:%M} UTC: {bar.asked} requests, {bar.flagged} flagged")
                marks.append(tag("rect", title, class_=kind, x=left, y=HIGH - height, width=inner, height=height))
    return _framed(marks, said, (str(top), "0"), _times([b.at for b in found]))


def scatter(points: Sequence[tuple[datetime, float, bool]], said: str) -> Markup:
    """Distance of scores from their threshold over time: what is above the line was flagged."""
    points = points[-DOTS:]
    begin, end = min(p[0] for p in points), max(p[0] for p in points)
    span = max((end - begin).total_seconds(), 1.0)
    reach = max([*(abs(p[1]) for p in points), 1e-6])
    x, y = Scale(0.0, span, 12.0, WIDE - 12), Scale(-reach, reach, HIGH - 8, 8.0)
    marks = [tag("line", class_="limit", x1=0.0, x2=WIDE, y1=HIGH / 2, y2=HIGH / 2)]
    for kind, chosen in (("calm", False), ("flagged", True)):
        places = ((x((p[0] - begin).total_seconds()), y(p[1])) for p in points if p[2] is chosen)
        marks.append(tag("path", class_=f"dots {kind}", d=" ".join(f"M{a:.1f},{b:.1f}h.01" for a, b in places)))
    labels = (f"+{decimal(reach)}", "threshold", decimal(-reach))
    return _framed(marks, said, labels, _times([begin, end]))


def line(shares: Sequence[float | None], said: str) -> Markup:
    """A small trend of shares in [0, 1], oldest first; where there is none, the line is broken."""
    step = 100.0 / max(len(shares) - 1, 1)
    parts, pen = [], False
    for i, share in enumerate(shares):
        if share is None:
            pen = False
            continue
        parts.append(f"{'L' if pen else 'M'}{i * step:.1f},{21 - 18 * share:.1f}")
        pen = True
    if len(parts) == 1:
        parts.append("h.01")
    marks = [
        tag("title", said),
        tag("line", class_="axis", x1=0.0, x2=100.0, y1=23.0, y2=23.0),
        tag("path", class_="trend", d=" ".join(parts)),
    ]
    return tag("svg", *marks, viewBox="0 0 100 24", preserveAspectRatio="none", class_="spark", role="img")


def meter(score: float, threshold: float | None, low: float, high: float, flagged: bool) -> Markup:
    """One score on a line, with its threshold as a bar across."""
    x = Scale(low, high, 4.0, 116.0)
    marks = [tag("line", class_="axis", x1=2.0, x2=118.0, y1=7.0, y2=7.0)]
    if threshold is not None:
        marks.append(tag("line", class_="limit", x1=x(threshold), x2=x(threshold), y1=1.0, y2=13.0))
    shape = (
        f"M{x(score):.1f},2 l5,5 l-5,5 l-5,-5 z" if flagged else f"M{x(score) - 4:.1f},7 a4,4 0 1,0 8,0 a4,4 0 1,0 -8,0"
    )
    marks.append(tag("path", class_="flagged" if flagged else "calm", d=shape))
    return tag("svg", *marks, viewBox="0 0 120 14", class_="meter", aria_hidden="true")


def level(share: float) -> Markup:
    """A share as a bar."""
    marks = [
        tag("rect", class_="back", x=0.0, y=0.0, width=100.0, height=8.0),
        tag("rect", class_="all", x=0.0, y=0.0, width=100 * min(max(share, 0.0), 1.0), height=8.0),
    ]
    return tag("svg", *marks, viewBox="0 0 100 8", preserveAspectRatio="none", class_="level", aria_hidden="true")


def hours(ends: datetime, count: int, each: timedelta) -> list[datetime]:
    """The beginnings of some spans of time, the last of which holds ``ends``."""
    size = each.total_seconds()
    last = datetime.fromtimestamp(ends.timestamp() // size * size, UTC)
    return [last - each * i for i in range(count - 1, -1, -1)]


def _times(at: Sequence[datetime]) -> list[str]:
    if not at:
        return []
    same_day = at[0].date() == at[-1].date()
    form = "%H:%M" if same_day else "%d %b %H:%M"
    chosen = [at[0], at[len(at) // 2], at[-1]] if len(at) > 2 else list(at)
    return [f"{one.astimezone(UTC):{form}}" for one in chosen[:-1]] + [f"{chosen[-1].astimezone(UTC):%H:%M} UTC"]


def _framed(marks: Iterable[str], said: str, y: Sequence[str], x: Sequence[str]) -> Markup:
    """The drawing, stretched to its place, with its scales beside it."""
    image = tag(
        "svg",
        tag("title", said),
        join(marks),
        viewBox=f"0 0 {WIDE:g} {HIGH:g}",
        preserveAspectRatio="none",
        role="img",
        aria_label=said,
    )
    return tag(
        "div",
        tag("div", *(tag("span", label) for label in y), class_="y", aria_hidden="true"),
        image,
        tag("div", *(tag("span", label) for label in x), class_="x", aria_hidden="true"),
        class_="chart",
    )
