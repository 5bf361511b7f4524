"""HotFlip without gradients: changes words one by one until a text's embedding lies near a target.

Ebrahimi et al. 2018, "HotFlip" (arXiv 1712.06751), as used by attacks on retrieval.

Deviation: an ``Embedder`` exposes neither gradients nor its vocabulary. Candidates are common words, those whose own
embeddings point to the target first. Each is tried by embedding the whole text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from casemate.protocols import Embedder
from casemate.redteam.crawling.common_words import WORDS
from casemate.types import Document, Vector

Score: TypeAlias = Callable[[Sequence[Sequence[str]]], Vector]  # scores of word lists; higher is better


def flip_words(
    words: Sequence[str],
    score: Score,
    pool: Sequence[str],
    rng: np.random.Generator,
    passes: int = 1,
    candidates: int = 8,
) -> list[str]:
    """Improves a list of words by replacing one word at a time, as measured by ``score``.

    At each position, in random order, words of the pool are tried, and the best is kept if it is better. This takes
    passes * len(words) * candidates evaluations. The pool has the most promising words first; a position draws from the
    first four times as many.
    """
    chosen = list(words)
    best = float(score([chosen])[0]) if pool else 0.0
    for position in (p for _ in range(passes if pool else 0) for p in rng.permutation(len(chosen)).tolist()):
        tried = rng.permutation(min(len(pool), 4 * candidates))[:candidates]
        options = [[*chosen[:position], pool[i], *chosen[position + 1 :]] for i in tried.tolist()]
        scores = score(options)
        if scores.max() > best:
            best, chosen = float(scores.max()), options[int(scores.argmax())]
    return chosen


def candidate_words(embedder: Embedder, direction: Vector, own: Sequence[str] = ()) -> list[str]:
    """Common words and ``own`` ones, sorted by the cosine of their embeddings to a direction, (dim,), largest first."""
    known = list(dict.fromkeys([*own, *WORDS]))
    order = np.argsort(-(embedder.embed(known) @ direction), kind="stable")
    return [known[i] for i in order]


def crafted_document(text: str, title: str) -> Document:
    """A document of an attack, with an id by its content."""
    name = hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:16]
    return Document(f"added-{name}", text, title)
