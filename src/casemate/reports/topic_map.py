"""A picture of a corpus's topics before and after re-indexing: two maps side by side, as one standalone SVG file.

Both maps show the same two directions, those of largest variance over both spaces. They are projections from hundreds
of dimensions, so topics may overlap that do not overlap in the space. The figures above the maps are computed in the
spaces themselves. The layout is in ``templates/topic_map.svg``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from casemate.errors import DataError
from casemate.maths.clustering import NOISE, Labels, knn_impurity, principal_components, silhouette
from casemate.reports.format import number, percent
from casemate.reports.render import render
from casemate.reports.svg import LinearScale
from casemate.types import Float64, Vector

MAX_DRAWN = 1500
"""Chunks that are drawn."""
MAX_NAMED = 8
"""Topics, the largest, that have a color and a number."""
K = 5
"""Neighbors of the share of neighbors from another topic."""
SIZE, GAP, EDGE, HEAD, FOOT = 300.0, 24.0, 10.0, 66.0, 34.0


def picture(before: Vector, after: Vector, labels: Labels, seed: int = 7) -> str:
    """Draws two maps of the same chunks, with the separation of the topics in each space.

    Args:
        before: Vectors of the chunks by the embedder, (n, dim), n > 5.
        after: Vectors of the same chunks in the new space, (n, dim).
        labels: Topics of the chunks, (n,).
        seed: Seed of the sample that is drawn.

    Returns:
        An SVG document.

    Raises:
        DataError: If the shapes do not match, or there are too few chunks.
    """
    if before.shape != after.shape or labels.shape != (len(before),) or len(before) <= K:
        what = f"{before.shape}, {after.shape} and {labels.shape}"
        raise DataError(f"a picture needs two sets of more than {K} vectors of one shape and their topics, got {what}")
    sizes = np.bincount(labels[labels != NOISE]) if (labels != NOISE).any() else np.empty(0, np.int64)
    largest = [int(c) for c in np.argsort(-sizes, kind="stable")[:MAX_NAMED] if sizes[c]]
    drawn = np.sort(np.random.default_rng(seed).permutation(len(before))[:MAX_DRAWN])
    points = principal_components(np.concatenate([before[drawn], after[drawn]]), 2)
    frame = points.min(axis=0), points.max(axis=0)
    panels = [
        _panel([name, *_figures(E, labels)], X, labels[drawn], largest, frame, left)
        for name, E, X, left in (
            ("before", before, points[: len(drawn)], EDGE),
            ("after", after, points[len(drawn) :], EDGE + SIZE + GAP),
        )
    ]
    noise = percent(float((labels == NOISE).mean()))
    return render(
        "topic_map.svg",
        panels=panels,
        note=f"{len(before)} chunks, {int((sizes > 0).sum())} topics, {noise} without one; {len(drawn)} chunks drawn",
        size=SIZE,
        edge=EDGE,
        head=HEAD,
        width=2 * (SIZE + EDGE) + GAP,
        height=HEAD + SIZE + FOOT,
    )


def _panel(
    lines: list[str],
    X: Float64,
    labels: Labels,
    largest: list[int],
    frame: tuple[Float64, Float64],
    left: float,
) -> dict[str, Any]:
    """One map: the dots of unnamed topics first, so that the others are drawn on top of them."""
    (x_low, y_low), (x_high, y_high) = frame
    x = LinearScale(float(x_low), float(x_high), left + 8, left + SIZE - 8)
    y = LinearScale(float(y_low), float(y_high), HEAD + SIZE - 8, HEAD + 8)
    named = [(f"t{i}", X[labels == c]) for i, c in enumerate(largest)]
    centers = [(i + 1, np.median(X[labels == c], axis=0)) for i, c in enumerate(largest) if (labels == c).any()]
    return {
        "lines": lines,
        "left": left,
        "topics": [(kind, _dots(own, x, y)) for kind, own in (("other", X[~np.isin(labels, largest)]), *named)],
        "names": [(text, x(float(a)), y(float(b)) + 4) for text, (a, b) in centers],
    }


def _dots(X: Float64, x: LinearScale, y: LinearScale) -> str:
    """Path data of circles: one path is lighter than an element for each dot."""
    return " ".join(f"M{x(a) - 2:.1f},{y(b):.1f} a2,2 0 1,0 4,0 a2,2 0 1,0 -4,0" for a, b in X)


def _figures(E: Vector, labels: Labels) -> list[str]:
    return [
        f"silhouette {number(silhouette(E, labels))}",
        f"neighbors of another topic {percent(knn_impurity(E, labels, K))}",
    ]
