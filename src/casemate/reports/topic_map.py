"""A picture of a corpus's topics before and after re-indexing: two maps side by side, as one standalone SVG file.

Both maps show the same two directions, those of largest variance over both spaces. They are projections from hundreds
of dimensions, so topics may overlap that do not overlap in the space. The figures above the maps are computed in the
spaces themselves.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence

import numpy as np

from casemate.maths.clustering import NOISE, Labels, knn_impurity, principal_components, silhouette
from casemate.reports.format import number, percent
from casemate.reports.svg import Drawing, LinearScale, draw_topics
from casemate.types import Float64, Vector

MAX_DRAWN = 1500
"""Chunks that are drawn."""
MAX_NAMED = 8
"""Topics, the largest, that have a color and a number."""
K = 5
"""Neighbors of the share of neighbors from another topic."""
SIZE, GAP, EDGE, HEAD, FOOT = 300.0, 24.0, 10.0, 66.0, 34.0
WIDTH, HEIGHT = 2 * (SIZE + EDGE) + GAP, HEAD + SIZE + FOOT
STYLE = """
svg { font: 13px system-ui, sans-serif; --ink: #222; --soft: #666; --line: #ccc; --paper: #fff; }
@media (prefers-color-scheme: dark) { svg { --ink: #eee; --soft: #aaa; --line: #555; --paper: #1b1b1b; } }
text { fill: var(--ink); } .soft { fill: var(--soft); } .title { font-weight: 600; } .back { fill: var(--paper); }
.frame { fill: none; stroke: var(--line); } .topic { fill: none; stroke-linecap: round; stroke-width: 4px; }
.name { font-weight: 700; paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
.topic.other { stroke: var(--soft); opacity: .25; }
.t0 { stroke: #0072b2; } .t1 { stroke: #e69f00; } .t2 { stroke: #009e73; } .t3 { stroke: #cc79a7; }
.t4 { stroke: #d55e00; } .t5 { stroke: #56b4e9; } .t6 { stroke: #8a7a00; } .t7 { stroke: #7b5cc4; }
"""


def picture(before: Vector, after: Vector, labels: Labels, seed: int = 7) -> str:
    """Draws two maps of the same chunks, with the separation of the topics in each space, as an SVG document.

    The vectors by the embedder and in the new space are (n, dim), n > ``K``; the topics (n,).
    """
    sizes = np.bincount(labels[labels != NOISE]) if (labels != NOISE).any() else np.empty(0, np.int64)
    largest = [int(c) for c in np.argsort(-sizes, kind="stable")[:MAX_NAMED] if sizes[c]]
    drawn = np.sort(np.random.default_rng(seed).permutation(len(before))[:MAX_DRAWN])
    points = principal_components(np.concatenate([before[drawn], after[drawn]]), 2)
    ranks = {c: i for i, c in enumerate(largest)}
    topics = [ranks.get(c, NOISE) for c in labels[drawn].tolist()]
    texts = ["before", *_figures(before, labels)], ["after", *_figures(after, labels)]
    noise = percent(float((labels == NOISE).mean()))
    note = f"{len(before)} chunks, {int((sizes > 0).sum())} topics, {noise} without one; {len(drawn)} chunks drawn"
    return str(_draw(points, topics, texts, note))


def _draw(points: Float64, topics: Sequence[int], texts: Sequence[Sequence[str]], note: str) -> Drawing:
    """Draws the points of the first map, then those of the second, (2n, 2); ``texts`` are a title and figures each."""
    said = "; ".join(f"{name}: {', '.join(figures)}" for name, *figures in texts)
    title, said = "Topics before and after re-indexing", f"Two maps of the same chunks. {said}. {note}."
    image = Drawing((WIDTH, HEIGHT), title, description=said, key="topics")
    image.root.set("xmlns", "http://www.w3.org/2000/svg")
    ET.SubElement(image.root, "style").text = STYLE
    image.rect("back", 0, 0, WIDTH, HEIGHT)
    (x_low, y_low), (x_high, y_high) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
    x, y = LinearScale(x_low, x_high, 8, SIZE - 8), LinearScale(y_low, y_high, HEAD + SIZE - 8, HEAD + 8)
    for left, lines, own in zip((EDGE, EDGE + SIZE + GAP), texts, np.split(points, 2), strict=True):
        for i, line in enumerate(lines):
            image.text(line, left, 18 * (i + 1), "start", "" if i else "title")
        image.rect("frame", left, HEAD, SIZE, SIZE)
        centers = draw_topics(image, [(left + x(a), y(b)) for a, b in own.tolist()], topics, MAX_NAMED)
        for topic, (a, b) in centers.items():
            image.text(str(topic + 1), a, b + 4, kind="name")
    image.text(note, EDGE, HEIGHT - 12, "start", "soft")
    return image


def _figures(E: Vector, labels: Labels) -> list[str]:
    return [
        f"silhouette {number(silhouette(E, labels))}",
        f"neighbors of another topic {percent(knn_impurity(E, labels, K))}",
    ]
