"""Normalization and cosine similarity of stored vectors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from casemate.types import Float64, Vector

UNIT_TOLERANCE = 1e-6  # a float32 vector whose length differs from 1 by less is a unit vector and stays bit-identical


def normalize(vectors: Vector) -> tuple[Vector, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Scales vectors, (n, dim), to length 1: contiguous float32. Those of unit length already keep their bits.

    Two masks, (n,), have the scaled vectors, and those without a direction: zero, or not finite. These become zero.

    >>> normalize(np.array([[3, 4], [0, 1], [0, 0]], np.float32))[0].tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 1.0], [0.0, 0.0]]
    """
    X = np.ascontiguousarray(vectors, np.float32)
    length = np.sqrt(np.einsum("ij,ij->i", X, X, dtype=np.float64))  # float32 squares do not overflow in float64
    invalid = ~(np.isfinite(length) & (length > 0))
    scaled = ~invalid & (np.abs(length - 1) >= UNIT_TOLERANCE)
    if scaled.any() or invalid.any():
        X = X.copy()
        X[scaled] = X[scaled].astype(np.float64) / length[scaled, None]
        X[invalid] = 0
    return X, scaled, invalid


def cosines(vectors: Vector, q: Vector) -> Float64:
    """Cosine similarities (n,) of stored vectors (n, dim) to a query vector (dim,), in float64.

    Computed row by row, so that equal rows give equal results.

    >>> cosines(np.array([[3, 4]], np.float32), np.array([0, 1], np.float32)).round(6).tolist()
    [0.8]
    """
    s: Float64 = (normalize(vectors)[0].astype(np.float64) * q.astype(np.float64)).sum(axis=1)
    return s
