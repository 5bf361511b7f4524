"""Metrics of the papers as pure functions. Each docstring gives the range and which direction is better."""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from casemate.text.tokens import words
from casemate.types import Float64

ROC_POINTS = 200
SMOOTHING = 0.1  # count that replaces 0 common n-grams in BLEU (Chen and Cherry 2014, method 1)
MIN_NORMALITY_SAMPLE = 20  # smallest sample for which the normal approximation of the kurtosis test holds


# Membership inference. A higher score means member.


def auc(members: npt.ArrayLike, nonmembers: npt.ArrayLike) -> float:
    """Area under the ROC curve: P(member's score > non-member's) + P(equal) / 2 (Mann and Whitney 1947).

    In [0, 1]; .5 is chance. For the defender closer to .5 is better: below .5 an attacker inverts the score. Infinite
    scores are ranked.

    Raises:
        ValueError: If a list is empty, or a score is NaN.

    >>> auc([3, 2], [1, 2])
    0.875
    """
    a, b = _scores(members, nonmembers)
    b = np.sort(b)
    twice = int((np.searchsorted(b, a, "left") + np.searchsorted(b, a, "right")).sum())
    return twice / (2 * len(a) * len(b))


def roc_curve(members: npt.ArrayLike, nonmembers: npt.ArrayLike) -> list[tuple[float, float]]:
    """ROC curve as points (false positive rate, true positive rate), non-decreasing from (0, 0) to (1, 1).

    One point per distinct score, thinned evenly to ``ROC_POINTS``. Tied scores of both classes give a diagonal segment,
    so the trapezoidal area under all points is ``auc``; errors as there.

    >>> roc_curve([3, 2], [1, 2])
    [(0.0, 0.0), (0.0, 0.5), (0.5, 1.0), (1.0, 1.0)]
    """
    a, b = _scores(members, nonmembers)
    levels = np.unique(np.concatenate([a, b]))[::-1]
    x, y = (np.append(0.0, 1 - np.searchsorted(np.sort(s), levels, "left") / len(s)) for s in (b, a))
    kept = np.unique(np.linspace(0, len(levels), ROC_POINTS).round().astype(np.int64))
    return [(float(x[i]), float(y[i])) for i in kept]


def tpr_at_fpr(members: npt.ArrayLike, nonmembers: npt.ArrayLike, fpr: float) -> tuple[int, float]:
    """Number of true positives at a bounded false positive rate, and the threshold. A score above it means member.

    The threshold is the smallest with at most floor(fpr * n) of the n non-members above it. For the defender fewer is
    better. A reliable estimate needs n of at least 10 / fpr, so that ten false positives are allowed.

    Raises:
        ValueError: As for ``auc``, or if ``fpr`` is not in [0, 1).

    >>> tpr_at_fpr([5, 4, 2], [1, 2, 3, 4], 0.25)
    (2, 3.0)
    """
    if not 0 <= fpr < 1:
        raise ValueError(f"the false positive rate must be in [0, 1), got {fpr}")
    a, b = _scores(members, nonmembers)
    allowed = min(math.floor(fpr * len(b) + 1e-9), len(b) - 1)  # .29 * 100 is 28.999...
    threshold = float(np.sort(b)[::-1][allowed])
    return int((a > threshold).sum()), threshold


def ks_statistic(members: npt.ArrayLike, nonmembers: npt.ArrayLike) -> float:
    """Two-sample Kolmogorov-Smirnov statistic: the maximum over t of |F(t) - G(t)|.

    In [0, 1]; for the defender lower is better. It is the largest |TPR - FPR| over all thresholds. Errors as for
    ``auc``.

    Deviation: Mirabel drops infinite scores (perplexities), which changes the sample. Here they are ranked.

    >>> ks_statistic([3, 2], [1, 2])
    0.5
    """
    a, b = _scores(members, nonmembers)
    levels = np.concatenate([a, b])
    F, G = (np.searchsorted(np.sort(s), levels, "right") / len(s) for s in (a, b))
    return float(np.abs(F - G).max())


def balanced_accuracy(tp: int, fp: int, tn: int, fn: int) -> float:
    """Balanced accuracy (TPR + TNR) / 2, in [0, 1]; .5 is chance at any class balance. Members are positive.

    Raises:
        ValueError: If there are no members or no non-members.

    >>> balanced_accuracy(9, 25, 75, 3)
    0.75
    """
    if tp + fn < 1 or tn + fp < 1:
        raise ValueError(f"need members and non-members, got {tp + fn} and {tn + fp}")
    return (tp / (tp + fn) + tn / (tn + fp)) / 2


def adjusted_accuracy(accuracy: float) -> float:
    """Adjusted attack accuracy max(a, 1 - a) - .5 (Mirabel, Table 4), in [0, .5]; for the defender lower is better.

    An accuracy below .5 also reveals membership: the attacker inverts the decision. The accuracy is that on equally
    many members and non-members.

    Raises:
        ValueError: If it is not in [0, 1].

    >>> adjusted_accuracy(0.25)
    0.25
    """
    if not 0 <= accuracy <= 1:
        raise ValueError(f"accuracy must be in [0, 1], got {accuracy}")
    return max(accuracy, 1 - accuracy) - 0.5


# Similarities of one query.


def normality_p_value(values: npt.ArrayLike) -> float:
    """p-value of the K^2 normality test from skewness and kurtosis (D'Agostino and Pearson 1973).

    In [0, 1]; small: not normal. Mirabel's Table 1 prints its mean over queries, for S_q with and without the largest
    similarity. A mean of p-values is not a test, and with many documents even the smallest deviation is significant.

    Raises:
        ValueError: If there are fewer than ``MIN_NORMALITY_SAMPLE`` numbers, one is not finite, or all are equal.

    >>> normality_p_value(np.arange(100) ** 2) < 0.01
    True
    """
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or len(x) < MIN_NORMALITY_SAMPLE or not np.isfinite(x).all() or np.ptp(x) == 0:
        raise ValueError(
            f"the normality test needs at least {MIN_NORMALITY_SAMPLE} finite numbers, not all equal; shape {x.shape}"
        )
    n, z = len(x), x - x.mean()
    m2 = (z**2).mean()
    skewness, kurtosis = (z**3).mean() / m2**1.5, (z**4).mean() / m2**2
    return math.exp(-(_skewness_z(skewness, n) ** 2 + _kurtosis_z(kurtosis, n) ** 2) / 2)  # chi-square, 2 degrees


def _skewness_z(skewness: float, n: int) -> float:
    """Standard normal score of a sample skewness under normality (D'Agostino 1970)."""
    y = skewness * math.sqrt((n + 1) * (n + 3) / (6 * (n - 2)))
    beta = 3 * (n**2 + 27 * n - 70) * (n + 1) * (n + 3) / ((n - 2) * (n + 5) * (n + 7) * (n + 9))
    w2 = math.sqrt(2 * (beta - 1)) - 1
    return math.asinh(y * math.sqrt((w2 - 1) / 2)) / math.sqrt(math.log(w2) / 2)


def _kurtosis_z(kurtosis: float, n: int) -> float:
    """Standard normal score of a sample kurtosis under normality (Anscombe and Glynn 1983)."""
    mean = 3 * (n - 1) / (n + 1)
    variance = 24 * n * (n - 2) * (n - 3) / ((n + 1) ** 2 * (n + 3) * (n + 5))
    x = (kurtosis - mean) / math.sqrt(variance)
    beta = 6 * (n**2 - 5 * n + 2) / ((n + 7) * (n + 9)) * math.sqrt(6 * (n + 3) * (n + 5) / (n * (n - 2) * (n - 3)))
    a = 6 + 8 / beta * (2 / beta + math.sqrt(1 + 4 / beta**2))
    ratio = (1 - 2 / a) / (1 + x * math.sqrt(2 / (a - 4)))
    return (1 - 2 / (9 * a) - math.copysign(abs(ratio) ** (1 / 3), ratio)) / math.sqrt(2 / (9 * a))


# Text similarity and answer correctness.


def bleu(reference: str, candidate: str) -> float:
    """Sentence BLEU-4 (Papineni et al. 2002) of a candidate: brevity penalty times the geometric mean of p_1 .. p_4.

    In [0, 1]; higher is more similar; not symmetric. p_n is the clipped n-gram precision of the candidate. The brevity
    penalty is exp(1 - r / c) for a candidate of c words and a reference of r > c words. Zero counts are smoothed
    (``SMOOTHING``). Without a common word BLEU is 0. Tokens are those of ``text.tokens.words``: lower case, no
    punctuation.

    >>> round(bleu("the cat sat on the mat", "The cat sat on a mat."), 4)
    0.5373
    """
    expected, actual = words(reference), words(candidate)
    if not set(expected) & set(actual):
        return 0.0
    logs = 0.0
    for n in range(1, 5):
        theirs, ours = (Counter(zip(*(tokens[i:] for i in range(n)), strict=False)) for tokens in (expected, actual))
        logs += math.log(((theirs & ours).total() or SMOOTHING) / max(ours.total(), 1))
    return math.exp(min(1 - len(expected) / len(actual), 0) + logs / 4)


def exact_match(answer: str, golds: Iterable[str]) -> bool:
    """Whether the answer contains an accepted form of the correct answer (EM in Mirabel's Table 3).

    Both are normalized as for SQuAD: lower case, no punctuation, no articles, single spaces. Forms that are empty then
    are skipped.

    Deviation: whole words only, so that "no" does not match "know".

    >>> exact_match("It was the Danube, in 1838.", ["danube river", "The Danube"])
    True
    """
    said = f" {_normalized(answer)} "
    return any(f" {gold} " in said for gold in map(_normalized, golds) if gold)


def answer_recall(passages: Iterable[str], golds: Collection[str]) -> bool:
    """Whether one of the k retrieved passages contains a gold answer (R@k in Mirabel's Table 3), as in ``exact_match``.

    >>> answer_recall(["Rivers of Europe.", "The Danube rises in Germany."], ["Danube"])
    True
    """
    return any(exact_match(passage, golds) for passage in passages)


def _scores(members: npt.ArrayLike, nonmembers: npt.ArrayLike) -> tuple[Float64, Float64]:
    a, b = np.asarray(members, np.float64), np.asarray(nonmembers, np.float64)
    if a.ndim != 1 or b.ndim != 1 or not a.size or not b.size:
        raise ValueError(f"need scores of members and of non-members, got arrays of {a.shape} and {b.shape}")
    if np.isnan(a).any() or np.isnan(b).any():
        raise ValueError("a score is NaN, which has no rank; use the lowest score for candidates without a score")
    return a, b


def _normalized(text: str) -> str:
    """SQuAD's answer normalization (Rajpurkar et al. 2016)."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(word for word in bare.split() if word not in {"a", "an", "the"})
