"""A figure as one page: panels of step lines or of histograms, drawn as in the lab's reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from casemate.lab.charts import Markup, Scale, join, tag
from casemate.lab.wording import number, percent
from casemate.types import Float64

Panel: TypeAlias = tuple[str, Markup]
"""Caption and image."""

LEFT, RIGHT, TOP, BOTTOM = 50.0, 308.0, 34.0, 206.0
WIDTH, HEIGHT = 320.0, 250.0
ENTRY = 96.0
"""Width of an entry of the legend."""
STYLES = ("curve on", "curve off", "curve axis")
"""Of the groups in order: blue, orange and dashed, grey."""


def write(path: Path, title: str, panels: Sequence[Panel]) -> Path:
    """Writes the page, without script and without anything beside itself."""
    style = Markup(files("casemate.lab").joinpath("report.css").read_text(encoding="utf-8"))
    figures = [tag("figure", tag("figcaption", caption), image) for caption, image in panels]
    head = tag("head", Markup('<meta charset="utf-8">'), tag("title", title), tag("style", style))
    body = tag("body", tag("main", tag("h1", title), tag("div", *figures, class_="panels")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<!doctype html>\n{tag('html', head, body, lang='en')}\n", encoding="utf-8")
    return path


def steps(caption: str, edges: Float64, groups: Mapping[str, Float64], below: str, mark: float | None = None) -> Panel:
    """The shares of up to three groups in the same bins, as outlines.

    Args:
        caption: What it shows.
        edges: Of the bins.
        groups: By name the share in each bin.
        below: What the horizontal axis is.
        mark: Where to draw a threshold; None: nowhere.
    """
    top = max(float(shares.max()) for shares in groups.values()) or 1.0
    x, y = Scale(float(edges[0]), float(edges[-1]), LEFT, RIGHT), Scale(0.0, top, BOTTOM, TOP)
    marks = [
        tag("line", class_="axis", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM),
        _label(percent(top), LEFT - 6, TOP + 4, "end"),
        *(_label(number(v), x(v), BOTTOM + 16, anchor) for v, anchor in ((x.low, "start"), (x.high, "end"))),
        _label(below, (LEFT + RIGHT) / 2, HEIGHT - 14, "middle"),
    ]
    said = []
    for place, ((name, shares), style) in enumerate(zip(groups.items(), STYLES, strict=False)):
        outline = [
            f"L{x(a):.1f},{y(s):.1f} L{x(b):.1f},{y(s):.1f}" for s, (a, b) in zip(shares, pairwise(edges), strict=True)
        ]
        marks.append(tag("path", class_=style, d=" ".join([f"M{LEFT:.1f},{BOTTOM:.1f}", *outline])))
        at = 30 + ENTRY * place
        marks.append(tag("line", class_=style, x1=at, x2=at + 16, y1=10.0, y2=10.0))
        marks.append(_label(name, at + 20, 14.0, "start"))
        said.append(f"{name}: mean {number(float(shares @ (edges[1:] + edges[:-1])) / 2)}")
    if mark is not None:
        marks.append(tag("line", class_="chance", x1=x(mark), x2=x(mark), y1=TOP, y2=BOTTOM))
        marks.append(_label(f"threshold {number(mark)}", x(mark) - 5, TOP + 10, "end"))
        said.append(f"threshold {number(mark)}")
    image = tag(
        "svg",
        tag("title", caption),
        tag("desc", f"{'; '.join(said)}."),
        join(marks),
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
    )
    return caption, image


def _label(text: str, x: float, y: float, anchor: str) -> Markup:
    return tag("text", text, x=x, y=y, text_anchor=anchor)
