"""Conformance suite for embedders."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from casemate.protocols import Embedder

TEXTS = ("The pharmacy opens at eight.", "A toll of 3.50 EUR applies.", "naïve café 漢字 🦉", "the the the", "")
TOLERANCE = 2e-3
"""Largest difference between components of one text's vector in batches of different size (float32 kernels)."""


def check_embedder(embedder: Embedder) -> None:
    """Runs every check for an embedder."""
    for check in EMBEDDER_CHECKS:
        check(embedder)


def _identifies_itself(embedder: Embedder) -> None:
    """The fingerprint is a stable text; dimension and token limit are positive."""
    assert isinstance(embedder.fingerprint, str) and embedder.fingerprint, "fingerprint must be a text"
    assert embedder.fingerprint == embedder.fingerprint, "fingerprint changes between calls"
    assert isinstance(embedder.dim, int) and embedder.dim > 0, f"dim is {embedder.dim!r}; it must be positive"
    assert embedder.max_tokens > 0, f"max_tokens is {embedder.max_tokens!r}; it must be positive"


def _returns_unit_rows(embedder: Embedder) -> None:
    """``embed`` returns float32 unit rows, (n, dim), for any text."""
    E = embedder.embed(list(TEXTS))
    assert E.shape == (len(TEXTS), embedder.dim), f"embed returned shape {E.shape}"
    assert E.dtype == np.float32, f"embed returned {E.dtype}; it must return float32"
    assert np.isfinite(E).all(), "a vector is not finite"
    assert np.allclose(np.linalg.norm(E, axis=1), 1, atol=1e-4), "vectors must have unit length"
    assert embedder.embed([]).shape == (0, embedder.dim), "embed([]) must have shape (0, dim)"


def _keeps_order(embedder: Embedder) -> None:
    """A text has one vector, whatever its batch and its position in it."""
    forward, backward = embedder.embed(list(TEXTS)), embedder.embed(list(TEXTS[::-1]))
    assert np.abs(forward - backward[::-1]).max() < TOLERANCE, "rows are not in the order of the texts"
    alone = np.vstack([embedder.embed([text]) for text in TEXTS])
    assert np.abs(forward - alone).max() < TOLERANCE, "a vector depends on the other texts of its batch"


def _reports_progress(embedder: Embedder) -> None:
    """The progress counts add up to the number of texts."""
    counts: list[int] = []
    embedder.embed(list(TEXTS), counts.append)
    assert sum(counts) == len(TEXTS), f"progress counted {sum(counts)} of {len(TEXTS)} texts"


def _accepts_long_texts(embedder: Embedder) -> None:
    """Text beyond the token limit is ignored, not refused."""
    assert embedder.embed(["word " * 4 * embedder.max_tokens]).shape == (1, embedder.dim)


def _gives_spans_of_tokens(embedder: Embedder) -> None:
    """Spans are ordered, do not overlap, lie inside the text and cover every letter."""
    for text in TEXTS:
        spans = list(embedder.spans(text))
        ends = [0, *(end for _, end in spans)]
        starts = [start for start, _ in spans]
        assert all(a <= b for a, b in zip(ends, starts, strict=False)), f"spans of {text!r} overlap or are not ordered"
        assert all(start < end <= len(text) for start, end in spans), f"a span of {text!r} is empty or outside"
        covered = {i for start, end in spans for i in range(start, end)}
        assert covered >= {i for i, char in enumerate(text) if char.isalnum()}, f"spans of {text!r} miss letters"


EMBEDDER_CHECKS: tuple[Callable[[Embedder], None], ...] = (
    _identifies_itself,
    _returns_unit_rows,
    _keeps_order,
    _reports_progress,
    _accepts_long_texts,
    _gives_spans_of_tokens,
)
