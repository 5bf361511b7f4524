"""Builds ``Answer`` values from the details that an external target returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from casemate.types import Answer, Document, Hit, Retrieval, SimilarityStats


def partial_answer(
    text: str,
    ids: Sequence[Any] | None = None,
    sources: Sequence[Any] | None = None,
    scores: Sequence[Any] | None = None,
) -> Answer:
    """An answer with the returned details only, best first. Document texts are empty.

    Missing ids become ``unknown-1`` and so on. Missing scores are nan. So are the similarity statistics, with n = 0,
    because only the target itself has them.

    Raises:
        ValueError: If the lists differ in length, a name is neither text nor integer, or a score no finite number.

    >>> partial_answer("It is 7.", sources=("tolls.md",)).retrieval.hits[0].document
    Document(id='unknown-1', text='', title='', source='tolls.md', digest='', metadata={})
    """
    names, origins, numbers = _names(ids), _names(sources), _numbers(scores)
    counts = [len(values) for values in (ids, sources, scores) if values is not None]
    if len(set(counts)) > 1:
        raise ValueError(f"ids, sources and scores differ in length: {', '.join(map(str, counts))}")
    hits = []
    for i in range(max(counts, default=0)):
        document = Document(names[i] if names else f"unknown-{i + 1}", "", source=origins[i] if origins else "")
        hits.append(Hit(document, numbers[i] if numbers else math.nan))
    return Answer(text, Retrieval(tuple(hits), SimilarityStats(0, math.nan, math.nan), exhausted=True))


def flatten(values: Sequence[Any]) -> list[Any]:
    """Flattens one level of lists."""
    return [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]


def _names(values: Sequence[Any] | None) -> list[str]:
    if any(isinstance(v, bool) or not isinstance(v, str | int) for v in values or ()):
        raise ValueError("ids and sources must be strings or integers")
    return list(map(str, values or ()))


def _numbers(values: Sequence[Any] | None) -> list[float]:
    if any(isinstance(v, bool) or not isinstance(v, int | float) or not math.isfinite(v) for v in values or ()):
        raise ValueError("scores must be finite numbers")
    return list(map(float, values or ()))
