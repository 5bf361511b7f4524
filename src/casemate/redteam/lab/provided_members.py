"""Membership of an external collection, from texts that the operator provides.

The operator provides texts that are in the collection and texts that are not. Nothing is held out, nothing is planted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from casemate.errors import DataError
from casemate.maths import metrics, stats
from casemate.maths.stats import Estimate
from casemate.rag.corpus import Corpus
from casemate.redteam.lab.datasets import Split, split_from_pools
from casemate.text.tfidf import TfIdf
from casemate.types import Document

SEED = 0  # seed of the resamples, as in `judge`


def read_provided(path: Path, kind: str, max_mb: float) -> list[Document]:
    """Reads the whole documents under a path, each named by their kind (such as `members`) and its name.

    Files, and lines of JSON Lines, above ``max_mb`` are skipped.

    Raises:
        DataError: If no text is readable.
    """
    found = []
    for source in Corpus(path, max_mb).sources():
        try:
            title, text, metadata = source.parse()
        except DataError:
            continue
        found.append(Document(f"{kind}/{source.name}", text, title, metadata=metadata))
    if not found:
        raise DataError(f"{path} ({kind}) contains no readable text; provide texts, one per file or record")
    return found


def split_provided(
    members: Sequence[Document], nonmembers: Sequence[Document], counts: tuple[int, int], seed: int
) -> Split:
    """Draws candidates from the provided texts, at most ``counts``, without non-members that nearly duplicate a member.

    Raises:
        DataError: If there are too few texts.
    """
    rng = np.random.default_rng(seed)
    inside = rng.permutation(len(members)).tolist()
    outside = (len(members) + rng.permutation(len(nonmembers))).tolist()
    return split_from_pools([*members, *nonmembers], inside, outside, counts, rng)


def genre_auc(split: Split) -> Estimate:
    """How well the texts alone distinguish members from non-members, without the target: an AUC with its interval.

    Texts of one genre give 0.5. If this is high, an attack's metrics may measure the genre instead of membership. The
    score of a text is its TF-IDF cosine with the mean of the members of the other half, minus that with its
    non-members.
    """
    candidates = split.candidates
    tfidf = TfIdf([document.content for document, _ in candidates])
    member = np.array([kind for _, kind in candidates])
    half = np.array([split.half[document.source] for document, _ in candidates])
    scores = np.zeros(len(candidates))
    for here, other in (("A", "B"), ("B", "A")):
        inside, outside = (tfidf.mean((half == other) & (member == kind)) for kind in (True, False))
        scores[half == here] = tfidf.dot(inside - outside)[half == here]
    return stats.bootstrap(metrics.auc, scores[member], scores[~member], SEED)
