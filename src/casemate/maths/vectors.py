"""Normalization and cosine similarity of stored vectors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from casemate.types import Float64, Vector

UNIT_TOLERANCE = 1e-6  # a float32 vector whose length differs from 1 by less is a unit vector and stays bit-identical


def normalize(vectors: Vector) -> tuple[Vector, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Scales vectors to length 1. Vectors that have unit length already keep their bits.

    Args:
        vectors: (n, dim), as an external store holds them.

    Returns:
        Unit vectors, (n, dim), contiguous float32; a mask (n,) of the scaled vectors; a mask (n,) of vectors without a
        direction: zero, or not finite. Vectors without a direction are zero in the result.

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
