"""Who is a member of a collection that is not ours: by what its owner knows.

The owner gives texts that are in it and texts that are not. Nothing is held out, and nothing is planted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from casemate import metrics, stats
from casemate.corpus import Corpus
from casemate.errors import DataError
from casemate.lab.datasets import Split, drawn, tfidf
from casemate.stats import Rate
from casemate.types import Document

KINDS = ("members", "nonmembers")
SEED = 0
"""Of the resamples, as in ``judge``."""


def texts(path: Path, kind: str, max_mb: float) -> list[Document]:
    """The whole documents under a path, each named by its kind and its place.

    Args:
        path: A folder or a file, as ``rag.corpus`` may be.
        kind: What the owner says of them: one of ``KINDS``, or any other word.
        max_mb: Larger files, and lines of jsonl, are left out.

    Raises:
        DataError: If nothing can be read there.
    """
    found = []
    for source in Corpus(path, max_mb).sources():
        try:
            title, text, metadata = source.parse()
        except DataError:
            continue
        found.append(Document(f"{kind}/{source.name}", text, title, metadata=metadata))
    if not found:
        raise DataError(f"{path} ({kind}) holds no text that can be read; give texts, one a file or a record")
    return found


def known_split(members: Sequence[Document], others: Sequence[Document], counts: tuple[int, int], seed: int) -> Split:
    """Draws candidates of what the owner knows.

    Args:
        members: Texts that are in the collection.
        others: Texts that are not. One with a twin among the members is left out: it is as good as in.
        counts: How many members and others are wanted.
        seed: The same gives the same split.

    Raises:
        DataError: If there are too few to say anything.
    """
    rng = np.random.default_rng(seed)
    inside = rng.permutation(len(members)).tolist()
    outside = (len(members) + rng.permutation(len(others))).tolist()
    return drawn([*members, *others], inside, outside, counts, rng)


def apart(split: Split) -> Rate:
    """How well members can be told from others by their texts alone, without asking anybody: an AUC, with its interval.

    Texts of one genre give .5. If this is high, an attack's figures may be the genre's, and say little of membership.
    Each text is scored by its TF-IDF cosine with the mean of the members of the other half, less that with the others.
    """
    candidates = split.candidates
    X = tfidf([document for document, _ in candidates]).tocsr()  # (texts, words)
    member = np.array([kind for _, kind in candidates])
    half = np.array([split.half[document.source] for document, _ in candidates])
    scores = np.zeros(len(candidates))
    for here, other in (("A", "B"), ("B", "A")):
        inside, outside = (
            np.asarray(X[(half == other) & (member == kind)].mean(axis=0)).ravel() for kind in (True, False)
        )
        scores[half == here] = X[half == here] @ (inside - outside)
    return stats.bootstrap(metrics.auc, scores[member], scores[~member], SEED)
