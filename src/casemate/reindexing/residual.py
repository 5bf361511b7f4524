"""The map from the embedder's space into one where topics lie apart, as plain arrays.

z = norm(E + t A(E)), with A(E) = relu(E W1 + b1) W2 + b2 and a strength t in [0, 1]; t = 0 is E itself. ``supcon``
trains it; this is what answers questions, and needs numpy alone.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from casemate.types import Vector

Weights: TypeAlias = dict[str, Vector]
"""``W1`` (dim, hidden), ``b1`` (hidden,), ``W2`` (hidden, dim), ``b2`` (dim,), float32."""
SHAPES = ("W1", "b1", "W2", "b2")
BLOCK = 8192
"""Vectors that are mapped at a time."""


def mapped(E: Vector, weights: Weights, strength: float = 1.0) -> Vector:
    """The map: norm(E + strength A(E)).

    Args:
        E: Unit vectors, (n, dim).
        weights: Of A.
        strength: t, in [0, 1].

    Returns:
        Unit vectors, (n, dim), float32.
    """
    Z = np.empty_like(E, np.float32)
    for start in range(0, len(E), BLOCK):
        x = E[start : start + BLOCK]
        hidden = np.maximum(x @ weights["W1"] + weights["b1"], 0)
        z = x + np.float32(strength) * (hidden @ weights["W2"] + weights["b2"])
        Z[start : start + BLOCK] = z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)
    return Z
