"""A picture of a collection's topics before and after re-indexing: two maps side by side, one SVG that needs no page.

Both maps show the same two directions, those of largest variance over both spaces: shadows of hundreds of dimensions,
in which topics may overlap that do not. The numbers above them are computed in the spaces themselves.
"""

from __future__ import annotations

import numpy as np

from casemate.errors import DataError
from casemate.lab.charts import Markup, Scale, join, tag
from casemate.lab.wording import number, percent
from casemate.reindexing.topics import NOISE, Labels, principal, silhouette, strangers
from casemate.types import Float64, Vector

SHOWN = 1500
"""Chunks that are drawn."""
NAMED = 8
"""Topics, the largest, that have a colour and a number of their own."""
K = 5
SIZE, GAP, EDGE, HEAD, FOOT = 300.0, 24.0, 10.0, 66.0, 34.0
STYLE = """
svg { font: 13px system-ui, sans-serif; --ink: #222; --soft: #666; --line: #ccc; --paper: #fff; }
@media (prefers-color-scheme: dark) { svg { --ink: #eee; --soft: #aaa; --line: #555; --paper: #1b1b1b; } }
text { fill: var(--ink); } .soft { fill: var(--soft); } .title { font-weight: 600; } .back { fill: var(--paper); }
.frame { fill: none; stroke: var(--line); } .other { fill: var(--soft); opacity: .25; }
.name { font-weight: 700; text-anchor: middle; paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
.t0 { fill: #0072b2; } .t1 { fill: #e69f00; } .t2 { fill: #009e73; } .t3 { fill: #cc79a7; }
.t4 { fill: #d55e00; } .t5 { fill: #56b4e9; } .t6 { fill: #8a7a00; } .t7 { fill: #7b5cc4; }
"""


def picture(before: Vector, after: Vector, labels: Labels, seed: int = 7) -> str:
    """Two maps of the same chunks, with the topics' separation in each space.

    Args:
        before: The chunks' vectors by the embedder, (n, dim), n > 5.
        after: The same in the new space, (n, dim).
        labels: Their topics, (n,).
        seed: Of the sample that is drawn.

    Returns:
        A whole SVG document.

    Raises:
        DataError: If shapes do not fit one another, or there are too few chunks.
    """
    if before.shape != after.shape or labels.shape != (len(before),) or len(before) <= K:
        what = f"{before.shape}, {after.shape} and {labels.shape}"
        raise DataError(f"a picture needs two sets of more than {K} vectors of one shape and their topics, got {what}")
    sizes = np.bincount(labels[labels != NOISE]) if (labels != NOISE).any() else np.empty(0, np.int64)
    largest = [int(c) for c in np.argsort(-sizes, kind="stable")[:NAMED] if sizes[c]]
    drawn = np.sort(np.random.default_rng(seed).permutation(len(before))[:SHOWN])
    places = principal(np.concatenate([before[drawn], after[drawn]]), 2)
    frame = places.min(axis=0), places.max(axis=0)
    panels = [
        _panel(_head(name, E, labels, left), X, labels[drawn], largest, frame, left)
        for name, E, X, left in (
            ("before", before, places[: len(drawn)], EDGE),
            ("after", after, places[len(drawn) :], EDGE + SIZE + GAP),
        )
    ]
    told = "; ".join(f"{name}: {_figures(E, labels)}" for name, E in (("before", before), ("after", after)))
    noise = percent(float((labels == NOISE).mean()))
    note = f"{len(before)} chunks, {int((sizes > 0).sum())} topics, {noise} without one; {len(drawn)} chunks drawn"
    width, height = 2 * (SIZE + EDGE) + GAP, HEAD + SIZE + FOOT
    return tag(
        "svg",
        tag("title", "Topics before and after re-indexing", id="topics-t"),
        tag("desc", f"Two maps of the same chunks. {told}. {note}.", id="topics-d"),
        tag("style", Markup(STYLE)),
        tag("rect", class_="back", width=width, height=height),
        *panels,
        tag("text", note, x=EDGE, y=height - 12, class_="soft"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_labelledby="topics-t",
        aria_describedby="topics-d",
    )


def _head(name: str, E: Vector, labels: Labels, left: float) -> Markup:
    lines = [name, *_figures(E, labels).split(", ")]
    kinds = ("title", "", "")
    return join(
        tag("text", line, x=left, y=18.0 + 18 * i, class_=kind)
        for i, (line, kind) in enumerate(zip(lines, kinds, strict=True))
    )


def _panel(
    head: Markup, X: Float64, own: Labels, largest: list[int], frame: tuple[Float64, Float64], left: float
) -> Markup:
    """One map: dots of no topic of its own first, so that the others lie on top."""
    (x_low, y_low), (x_high, y_high) = frame
    x = Scale(float(x_low), float(x_high), left + 8, left + SIZE - 8)
    y = Scale(float(y_low), float(y_high), HEAD + SIZE - 8, HEAD + 8)
    marks = [_points(X[~np.isin(own, largest)], x, y, "other")]
    marks += [_points(X[own == c], x, y, f"t{i}") for i, c in enumerate(largest)]
    marks += [_name(str(i + 1), X[own == c], x, y) for i, c in enumerate(largest) if (own == c).any()]
    return join([head, tag("rect", class_="frame", x=left, y=HEAD, width=SIZE, height=SIZE), *marks])


def _points(X: Float64, x: Scale, y: Scale, kind: str) -> Markup:
    """Dots in one path: a line of no length with round ends, lighter than an element for each."""
    dots = " ".join(_dot(x(a), y(b)) for a, b in X)
    return tag("path", class_=kind, d=dots)


def _dot(a: float, b: float) -> str:
    return f"M{a - 2:.1f},{b:.1f} a2,2 0 1,0 4,0 a2,2 0 1,0 -4,0"


def _name(text: str, X: Float64, x: Scale, y: Scale) -> Markup:
    """A topic's number at its middle, so that nothing rests on colour alone."""
    a, b = np.median(X, axis=0)
    return tag("text", text, x=x(float(a)), y=y(float(b)) + 4, class_="name")


def _figures(E: Vector, labels: Labels) -> str:
    apart, other = silhouette(E, labels), strangers(E, labels, K)
    return f"silhouette {number(apart)}, neighbours of another topic {percent(other)}"
