"""What an operator must know of a calibration: doubts about its query log, and attacks that it stops weakly.

A query log that a calibration takes as benign is checked for closeness to single documents, and for its vocabulary.

A calibration cannot know whether logged queries are benign. If some are pasted records or attacks, the threshold rises
above the attacks. If they are about other documents or in another language, the threshold is too low, and real users
are flagged. Both statistics are shares with Clopper-Pearson intervals, so that a short log raises no warning by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from casemate.maths.calibration import Calibration
from casemate.maths.stats import Estimate, proportion
from casemate.text.tokens import content_words
from casemate.types import Retrieval

AS_CLOSE, UNFAMILIAR = "as_close", "unfamiliar"
"""Keys of the review in the notes of a calibration."""
MIN_VOCABULARY = 0.5
"""Share of a query's content words below which its vocabulary counts as unfamiliar."""
MAX_UNFAMILIAR = 0.5
"""Share of unfamiliar queries above which the log differs from the corpus (``benchmarks/query_logs.py``)."""
MIN_RECALL = 0.5
"""Share of an attack's questions that lose their document, below which the attack is named as weakly stopped."""


def as_close_as_attacks(benign: Sequence[float], attacks: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
    """Share of benign queries that score at least as high as the median query of each attack.

    If the share exceeds a false-alarm rate, then the threshold of that rate is above the median, and most queries of
    the attack pass. So this share is also the smallest rate at which half of the attack is detected.

    Args:
        benign: Scores of benign queries, at least one.
        attacks: Scores by attack, about documents that the weights were not fitted on. Queries that do not retrieve
            their document score -inf and are left out.

    Returns:
        By attack; in [0, 1], lower is better.

    >>> as_close_as_attacks([1.0, 2.0, 3.0, 9.0], {"mba": [7.0, 8.0, 12.0]})["mba"].value
    0.25
    """
    reached = {name: [s for s in scores if s > -math.inf] for name, scores in attacks.items()}
    middle = {name: median(scores) for name, scores in reached.items() if scores}
    return {name: proportion(sum(b >= score for b in benign), len(benign)) for name, score in middle.items()}


def unfamiliar_share(queries: Iterable[tuple[str, Retrieval]]) -> Estimate | None:
    """Share of queries of which fewer than half of the content words occur in the documents that they retrieve.

    Args:
        queries: Text and hits of each logged query. Queries without content words are skipped.

    Returns:
        In [0, 1]; lower: the log uses the vocabulary of the corpus. None without content words.
    """
    judged = [share for text, found in queries if (share := _known_share(text, found)) is not None]
    return proportion(sum(share < MIN_VOCABULARY for share in judged), len(judged)) if judged else None


def _known_share(text: str, found: Retrieval) -> float | None:
    words = content_words(text)
    if not words:
        return None
    known = frozenset[str]().union(*(content_words(hit.document.content) for hit in found.hits))
    return len(words & known) / len(words)


def log_warnings(calibration: Calibration, significance: float) -> list[str]:
    """Warnings about the query log of a calibration; empty if it raises no doubt or is synthetic.

    Args:
        calibration: The calibration.
        significance: The false-alarm rate in use, in (0, 1).
    """
    rate = calibration.attainable_rate(significance)
    review = calibration.notes.get("log") or {}
    close = {name: Estimate(*share) for name, share in (review.get(AS_CLOSE) or {}).items()}
    above = {name: share for name, share in close.items() if share.low > rate}
    warnings = []
    if above:
        worst = max(above.values(), key=lambda share: share.value)
        warnings.append(
            f"{worst.value:.1%} of the logged queries are as close to one document as attack queries "
            f"({', '.join(sorted(above))}), above the false-alarm rate of {rate:.1%}; so most of these attacks pass. "
            "If the log contains pasted records or attacks, remove them; if not, a higher significance stops more"
        )
    unfamiliar = Estimate(*review[UNFAMILIAR]) if review.get(UNFAMILIAR) else None
    if unfamiliar and unfamiliar.low > MAX_UNFAMILIAR:
        warnings.append(
            f"{unfamiliar.value:.0%} of the logged queries share fewer than half of their words with the documents "
            "that they retrieve; the log may be about another collection or in another language. Then more real users "
            "are flagged than stated"
        )
    return warnings


def weak_attacks_note(calibration: Calibration, significance: float) -> str:
    """Names the scripted attacks of which most queries get their document; empty if there is none.

    Args:
        calibration: The calibration.
        significance: The configured false-alarm rate. Without a measured recall at this rate, there is no note.
    """
    rate = str(significance)
    recalls = {a: by[rate]["question"][0] for a, by in calibration.notes.get("recall", {}).items() if rate in by}
    weak = [f"{attack} {100 * recall:.0f} %" for attack, recall in recalls.items() if recall < MIN_RECALL]
    if not weak:
        return ""
    return (
        "the guard withholds the document from fewer than half of the questions of these attacks: "
        f"{', '.join(weak)}; 'casemate calibrate' shows what higher error rates stop"
    )
