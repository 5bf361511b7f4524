"""The papers' metrics, pure: each docstring names the range and the good direction."""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from casemate.types import Float64
from casemate.words import words

ROC_POINTS = 200
SMOOTHING = 0.1
"""What stands for no common n-gram at all in BLEU (Chen and Cherry 2014, method 1)."""
NORMALITY_MIN = 20
"""Values below which the kurtosis part of the normality test is off."""


class Detection(NamedTuple):
    """How well attack queries are told from others, each in [0, 1], higher is better."""

    accuracy: float
    precision: float
    recall: float
    f1: float


# Membership: how well scores separate members from non-members. Higher scores speak for membership.


def auc(members: npt.ArrayLike, nonmembers: npt.ArrayLike) -> float:
    """Area under the ROC curve: P(member's score > non-member's) + P(equal) / 2 (Mann and Whitney 1947).

    In [0, 1]; .5 is chance. For the owner nearer to .5 is better: below .5 an attacker turns his score round.

    Args:
        members: Scores, at least one; infinities are ranked.
        nonmembers: Likewise.

    Raises:
        ValueError: If there are none, or one is NaN.

    >>> auc([3, 2], [1, 2])
    0.875
    """
    a, b = _scores(members, nonmembers)
    b = np.sort(b)
    twice = int((np.searchsorted(b, a, "left") + np.searchsorted(b, a, "right")).sum())
    return twice / (2 * len(a) * len(b))


def roc(members: npt.ArrayLike, nonmembers: npt.ArrayLike) -> list[tuple[float, float]]:
    """The ROC curve as points (false positive rate, true positive rate), from (0, 0) to (1, 1), neither ever falling.

    One point for each different score; of more than ``ROC_POINTS`` so many are kept, spread evenly along the curve.
    Equal scores of both kinds make a slanted piece, so the area under the line through all points is ``auc``.

    Args:
        members: Scores, at least one; infinities are ranked.
        nonmembers: Likewise.

    Raises:
        ValueError: If there are none, or one is NaN.

    >>> roc([3, 2], [1, 2])
    [(0.0, 0.0), (0.0, 0.5), (0.5, 1.0), (1.0, 1.0)]
    """
    a, b = _scores(members, nonmembers)
    levels = np.unique(np.concatenate([a, b]))[::-1]
    x, y = (np.append(0.0, 1 - np.searchsorted(np.sort(s), levels, "left") / len(s)) for s in (b, a))
    kept = np.unique(np.linspace(0, len(levels), ROC_POINTS).round().astype(np.int64))
    return [(float(x[i]), float(y[i])) for i in kept]


def tpr_at_fpr(members: npt.ArrayLike, nonmembers: npt.ArrayLike, fpr: float) -> tuple[int, float]:
    """How many members are found at so few false alarms, and the threshold: who is above it is called a member.

    The threshold is the smallest one above which there are at most floor(fpr * n) of the n non-members. For the
    owner fewer found is better. An estimate takes n of at least 10 / fpr, so that ten false alarms are allowed.

    Args:
        members: Scores, at least one; infinities are ranked.
        nonmembers: Likewise.
        fpr: Allowed share of false alarms, in [0, 1).

    Raises:
        ValueError: If there are no scores, one is NaN, or ``fpr`` is out of its range.

    >>> tpr_at_fpr([5, 4, 2], [1, 2, 3, 4], 0.25)
    (2, 3.0)
    """
    if not 0 <= fpr < 1:
        raise ValueError(f"the allowed share of false alarms is {fpr}; it must be in [0, 1)")
    a, b = _scores(members, nonmembers)
    allowed = min(math.floor(fpr * len(b) + 1e-9), len(b) - 1)  # .29 * 100 is 28.999...
    threshold = float(np.sort(b)[::-1][allowed])
    return int((a > threshold).sum()), threshold


def ks(members: npt.ArrayLike, nonmembers: npt.ArrayLike) -> float:
    """Kolmogorov-Smirnov distance of the two laws: max over t of |F(t) - G(t)|.

    In [0, 1]; for the owner lower is better. It is the largest TPR - FPR, or FPR - TPR, over all thresholds.

    Deviation: Mirabel drops infinite scores (perplexities) first, which changes who is counted; here they are ranked.

    Args:
        members: Scores, at least one; infinities are ranked.
        nonmembers: Likewise.

    Raises:
        ValueError: If there are none, or one is NaN.

    >>> ks([3, 2], [1, 2])
    0.5
    """
    a, b = _scores(members, nonmembers)
    levels = np.concatenate([a, b])
    F, G = (np.searchsorted(np.sort(s), levels, "right") / len(s) for s in (a, b))
    return float(np.abs(F - G).max())


def balanced_accuracy(tp: int, fp: int, tn: int, fn: int) -> float:
    """(TPR + TNR) / 2, in [0, 1]; .5 is chance, whatever the shares of both kinds.

    Args:
        tp: Members called members.
        fp: Non-members called members.
        tn: Non-members called non-members.
        fn: Members called non-members.

    Raises:
        ValueError: If there are no members or no non-members.

    >>> balanced_accuracy(9, 25, 75, 3)
    0.75
    """
    if tp + fn < 1 or tn + fp < 1:
        raise ValueError(f"need members and non-members, got {tp + fn} and {tn + fp}")
    return (tp / (tp + fn) + tn / (tn + fp)) / 2


def adjusted_accuracy(accuracy: float) -> float:
    """max(a, 1 - a) - .5 (Mirabel, Table 4), in [0, .5]; for the owner lower is better.

    An accuracy below one half is information, too: the attacker turns his answer round.

    Args:
        accuracy: In [0, 1], over as many members as non-members.

    Raises:
        ValueError: If it is out of its range.

    >>> adjusted_accuracy(0.25)
    0.25
    """
    if not 0 <= accuracy <= 1:
        raise ValueError(f"an accuracy is in [0, 1], got {accuracy}")
    return max(accuracy, 1 - accuracy) - 0.5


# Detection: how well attack queries are told from others.


def detection(tp: int, fp: int, tn: int, fn: int) -> Detection:
    """Accuracy, precision, recall and F1 of a detector, as in the tables of the Mirabel paper.

    Positive is a query of an attack on a *member*: only there is something to hide. What the negatives are is the
    caller's choice, and must be said beside the figures: in Mirabel's Table 2 benign queries and queries of attacks on
    non-members together, in its Table 8 benign queries alone. What has nothing to count is 0, as in these tables.

    Deviation: in the paper's Table 2 some F1 are not the harmonic mean of the printed precision and recall; here F1
    always is.

    Args:
        tp: Positives that were flagged.
        fp: Negatives that were flagged.
        tn: Negatives that were not.
        fn: Positives that were not.

    Raises:
        ValueError: If there are no queries.

    >>> [round(x, 3) for x in detection(323, 80, 243, 0)]  # Table 8, NFCorpus, S2MIA
    [0.876, 0.801, 1.0, 0.89]
    """
    total = tp + fp + tn + fn
    if total < 1:
        raise ValueError("there are no queries to count")
    precision = tp / (tp + fp) if tp + fp else 0.0
    recall = tp / (tp + fn) if tp + fn else 0.0
    return Detection((tp + tn) / total, precision, recall, 2 * tp / (2 * tp + fp + fn) if tp else 0.0)


def ppv(recall: float, fpr: float, prevalence: float) -> float:
    """Share of real attacks among what is flagged: r p / (r p + f (1 - p)), in [0, 1]; higher is better.

    Tables with as many attacks as harmless queries hide how seldom attacks are; 0 if nothing is ever flagged.

    Args:
        recall: Share r of attacks that are flagged.
        fpr: Share f of harmless queries that are flagged.
        prevalence: Share p of attacks among all queries.

    Raises:
        ValueError: If one is not in [0, 1].

    >>> round(ppv(1, 0.25, 1e-4), 5)
    0.0004
    """
    for share in (recall, fpr, prevalence):
        if not 0 <= share <= 1:
            raise ValueError(f"recall, fpr and prevalence are in [0, 1], got {recall}, {fpr}, {prevalence}")
    real, false = recall * prevalence, fpr * (1 - prevalence)
    return real / (real + false) if real + false else 0.0


def normality(values: npt.ArrayLike) -> float:
    """p-value of the K2 test (D'Agostino and Pearson 1973): how well skewness and kurtosis fit a normal law.

    In [0, 1]; small: not normal. Mirabel's Table 1 prints means of it, of S_q over queries, with and without the
    largest similarity. A mean of p-values is no test, and with many documents the smallest deviation is found.

    Args:
        values: At least ``NORMALITY_MIN`` finite numbers, not all alike.

    Raises:
        ValueError: If they are fewer, not finite, or all alike.

    >>> normality(np.arange(100) ** 2) < 0.01
    True
    """
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or len(x) < NORMALITY_MIN or not np.isfinite(x).all() or np.ptp(x) == 0:
        raise ValueError(
            f"the normality test needs a list of {NORMALITY_MIN} or more finite numbers that differ, got {x.shape}"
        )
    from scipy.stats import normaltest  # 0.3 CPU-s to import

    return float(normaltest(x).pvalue)


# Texts.


def bleu(reference: str, candidate: str) -> float:
    """Sentence BLEU-4 (Papineni et al. 2002): brevity penalty times the geometric mean of p_1 .. p_4.

    In [0, 1]; higher is more alike. p_n is the share of the candidate's n-grams that are in the reference, each as
    often as there; the penalty is exp(1 - r / c) for a candidate of c words, r in the reference, if c < r. Where no
    n-gram is common, ``SMOOTHING`` of one is counted (Chen and Cherry 2014, method 1); without a common word BLEU is 0.
    Words are those of ``words.words``: lower case, no punctuation.

    Args:
        reference: What is to be matched.
        candidate: What is judged. The order matters.

    >>> round(bleu("the cat sat on the mat", "The cat sat on a mat."), 4)
    0.5373
    """
    given, found = words(reference), words(candidate)
    if not set(given) & set(found):
        return 0.0
    logs = 0.0
    for n in range(1, 5):
        theirs, ours = (Counter(zip(*(tokens[i:] for i in range(n)), strict=False)) for tokens in (given, found))
        logs += math.log(((theirs & ours).total() or SMOOTHING) / max(ours.total(), 1))
    return math.exp(min(1 - len(given) / len(found), 0) + logs / 4)


def exact_match(answer: str, golds: Iterable[str]) -> bool:
    """Whether the answer contains one of the gold answers (EM in Mirabel's Table 3); more matches are better.

    Both are normalised as for SQuAD: lower case, no punctuation, no articles, single spaces.

    Deviation: whole words only, so that "no" is not found in "know".

    Args:
        answer: What the system said.
        golds: The right answer in all its forms; what is empty when normalised is passed over.

    >>> exact_match("It was the Danube, in 1838.", ["danube river", "The Danube"])
    True
    """
    said = f" {_normalised(answer)} "
    return any(f" {gold} " in said for gold in map(_normalised, golds) if gold)


def answer_recall(passages: Iterable[str], golds: Collection[str]) -> bool:
    """Whether a retrieved passage contains a gold answer (R@k in Mirabel's Table 3); more is better.

    Args:
        passages: The k passages retrieved.
        golds: The right answer in all its forms, compared as in ``exact_match``.

    >>> answer_recall(["Rivers of Europe.", "The Danube rises in Germany."], ["Danube"])
    True
    """
    return any(exact_match(passage, golds) for passage in passages)


# Retrieval.


def recall_at_k(ranking: Sequence[str], relevant: Collection[str], k: int) -> float:
    """Share of the relevant documents among the first k, in [0, 1]; higher is better.

    Args:
        ranking: Document ids, best first, each once.
        relevant: Ids of the relevant ones, at least one.
        k: How many are looked at.

    >>> recall_at_k(["a", "b", "c"], {"a", "c", "d"}, 2)
    0.3333333333333333
    """
    return len(set(ranking[:k]) & set(relevant)) / len(relevant)


def ndcg_at_k(ranking: Sequence[str], gains: Mapping[str, float], k: int) -> float:
    """Normalised discounted cumulative gain (Jarvelin and Kekalainen 2002), in [0, 1]; higher is better.

    Args:
        ranking: Document ids, best first, each once.
        gains: Graded relevance by id, at least one above 0; absent means 0.
        k: How many are looked at.

    >>> round(ndcg_at_k(["x", "a"], {"a": 1.0}, 10), 4)
    0.6309
    """
    ideal = sorted(gains.values(), reverse=True)[:k]
    return _dcg([gains.get(d, 0.0) for d in ranking[:k]]) / _dcg(ideal)


def _dcg(gains: Sequence[float]) -> float:
    return math.fsum(g / math.log2(rank + 1) for rank, g in enumerate(gains, 1))


def _scores(members: npt.ArrayLike, nonmembers: npt.ArrayLike) -> tuple[Float64, Float64]:
    a, b = np.asarray(members, np.float64), np.asarray(nonmembers, np.float64)
    if a.ndim != 1 or b.ndim != 1 or not a.size or not b.size:
        raise ValueError(f"need scores of members and of non-members, got arrays of {a.shape} and {b.shape}")
    if np.isnan(a).any() or np.isnan(b).any():
        raise ValueError("a score is NaN, which has no rank; give what could not be scored the lowest score")
    return a, b


def _normalised(text: str) -> str:
    """SQuAD's normalisation (Rajpurkar et al. 2016)."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(word for word in bare.split() if word not in {"a", "an", "the"})
