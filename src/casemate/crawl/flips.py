"""Words changed one by one until a text lies where it is wanted: HotFlip's search, without gradients.

Ebrahimi et al. 2018, "HotFlip" (arXiv 1712.06751), as attacks on retrieval use it.

Deviation: an ``Embedder`` shows neither gradients nor its vocabulary. Candidates are common words, those first whose
own embeddings point where the text is to go, and each is tried by embedding the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from casemate.crawl.everyday import WORDS
from casemate.protocols import Embedder
from casemate.types import Vector

Score: TypeAlias = Callable[[Sequence[Sequence[str]]], Vector]
"""How good each of some word lists is; higher is better."""


def flipped(
    words: Sequence[str],
    score: Score,
    pool: Sequence[str],
    rng: np.random.Generator,
    passes: int = 1,
    candidates: int = 8,
) -> list[str]:
    """A list of words that scores no worse than the one given.

    At each place, in random order, some words of the pool are tried, and the best is kept if it is better. Takes
    passes * len(words) * candidates evaluations.

    Args:
        words: To begin with.
        score: What is to grow.
        pool: Words that are tried, the most promising first; a place draws from the first four times as many.
        rng: Decides order and draw.
        passes: Over all places, at least 0.
        candidates: Words tried at a place, at least 1.
    """
    chosen = list(words)
    best = float(score([chosen])[0]) if pool else 0.0
    for place in (p for _ in range(passes if pool else 0) for p in rng.permutation(len(chosen)).tolist()):
        tried = rng.permutation(min(len(pool), 4 * candidates))[:candidates]
        options = [[*chosen[:place], pool[i], *chosen[place + 1 :]] for i in tried.tolist()]
        scores = score(options)
        if scores.max() > best:
            best, chosen = float(scores.max()), options[int(scores.argmax())]
    return chosen


def promising(embedder: Embedder, wanted: Vector, own: Sequence[str] = ()) -> list[str]:
    """Everyday words, and some more, those first whose embeddings point in a direction.

    Args:
        embedder: A copy of the target's.
        wanted: The direction, (dim,).
        own: Words that are added.
    """
    known = list(dict.fromkeys([*own, *WORDS]))
    order = np.argsort(-(embedder.embed(known) @ wanted), kind="stable")
    return [known[i] for i in order]
