"""The attacker's decision rule: fitted on one half of the candidates, evaluated on the other.

The rule is fitted on trials against the attacked target. Thresholds fitted on the bare system would model an attacker
without knowledge of the guard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.maths import metrics
from casemate.maths.logistic import logistic_regression
from casemate.redteam.lab.datasets import Half
from casemate.redteam.lab.results import Trial
from casemate.types import Float64

BoolArray: TypeAlias = npt.NDArray[np.bool_]
Scorer: TypeAlias = Callable[[Float64], Float64]  # maps features (n, f) to scores (n,); higher indicates membership

PENALTY = 1.0  # L2 penalty of the logistic regression, relative to the summed log loss
MAX_SWEEPS = 20  # maximum passes over the thresholds of a corner; the third pass rarely changes anything


@dataclass(frozen=True, slots=True)
class DecisionRule:
    """Predicts membership by a threshold on a score, infinite if all predictions are equal.

    ``above``: members score above it. ``accuracy`` is the balanced one on the fitting candidates, at least 0.5.
    """

    score: Scorer
    threshold: float
    above: bool
    accuracy: float

    def predict(self, X: Float64) -> BoolArray:
        """Predicted membership, (n,)."""
        predicted: BoolArray = (self.score(X) > self.threshold) == self.above
        return predicted


@dataclass(frozen=True, slots=True)
class CrossFit:
    """Out-of-fold predictions: each candidate is judged by the rule fitted on the other half. Arrays are (n,).

    The score is the attack's only feature, or the log-odds of membership from several features.
    """

    member: BoolArray
    score: Float64
    predicted: BoolArray


def cross_fit(trials: Sequence[Trial], half: Mapping[str, Half]) -> CrossFit:
    """Fits a rule on either half of one attack's trials against one target, and applies it to the other half.

    Members and non-members must be in both halves.
    """
    X = np.array([t.features for t in trials], np.float64)
    member = np.array([t.member for t in trials])
    first = np.array([half[t.candidate] == "A" for t in trials])
    score, predicted = X[:, 0].copy(), np.zeros(len(X), np.bool_)
    for learn in (first, ~first):
        rule = fit(X[learn], member[learn])
        predicted[~learn] = rule.predict(X[~learn])
        if X.shape[1] > 1:
            score[~learn] = rule.score(X[~learn])
    return CrossFit(member, score, predicted)


def fit(X: Float64, member: BoolArray) -> DecisionRule:
    """Fits the rule with the best balanced accuracy to features, (n, f), of members and non-members.

    A single feature gets the threshold with the best balanced accuracy. For several features, three rules compete,
    and the best on these candidates wins, the simpler one in a tie: the first feature alone; a corner, that is one
    threshold for each feature, all of which must be passed (S2MIA-T, Li et al. 2024, arXiv 2406.19234); and a logistic
    regression. Their scores are converted to log-odds so that both halves' scores form one ranking.

    The corner is searched greedily: for each feature in turn, all thresholds between two values are tried until no
    change helps; once starting with each feature.
    """
    if X.shape[1] == 1:
        return _best_threshold(lambda Z: Z[:, 0], X, member)
    views = (lambda Z: Z[:, :1], corner(X, member), lambda Z: Z)
    return max((_best_threshold(_odds(view, X, member), X, member) for view in views), key=lambda rule: rule.accuracy)


def _odds(view: Callable[[Float64], Float64], X: Float64, member: BoolArray) -> Scorer:
    """Converts a view of the features to log-odds."""
    odds = logistic(view(X), member)
    return lambda Z: odds(view(Z))


def _best_threshold(score: Scorer, X: Float64, member: BoolArray) -> DecisionRule:
    """The threshold and side with the best balanced accuracy; of several equal ones, the middle one."""
    thresholds, found, alarms = _counts_above(score(X), member)
    gap = found * int((~member).sum()) - alarms * int(member.sum())  # (TPR - FPR), scaled to integers
    best = np.flatnonzero(np.abs(gap) == np.abs(gap).max())
    chosen = int(best[len(best) // 2])
    above = bool(gap[chosen] >= 0)
    tp, fp = int(found[chosen]), int(alarms[chosen])
    accuracy = metrics.balanced_accuracy(tp, fp, int((~member).sum()) - fp, int(member.sum()) - tp)
    return DecisionRule(score, float(thresholds[chosen]), above, max(accuracy, 1 - accuracy))


def _counts_above(s: Float64, member: BoolArray) -> tuple[Float64, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All distinct thresholds in ascending order, with the members and non-members above each."""
    levels = np.unique(s)
    thresholds = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    counts = [np.sort(s[kind]) for kind in (member, ~member)]
    found, alarms = (len(c) - np.searchsorted(c, thresholds, "right") for c in counts)
    return thresholds, found, alarms


def corner(X: Float64, member: BoolArray) -> Callable[[Float64], Float64]:
    """S2MIA-T: signed distance to the corner, in standard deviations of the feature closest to its threshold.

    Returns a function from features (n, f) to distances (n, 1), positive inside the corner.
    """
    scale = np.where(X.std(axis=0) > 0, X.std(axis=0), 1.0)
    floor = X.min(axis=0) - scale  # no restriction
    columns = range(X.shape[1])
    found = [_search_corner(X, member, floor, [*columns[start:], *columns[:start]]) for start in columns]
    _, limits = max(found, key=lambda pair: pair[0])
    return lambda Z: ((Z - limits) / scale).min(axis=1, keepdims=True)


def _search_corner(X: Float64, member: BoolArray, floor: Float64, order: Sequence[int]) -> tuple[int, Float64]:
    """Coordinate search: the gap and limits of the corner when thresholds are moved in this order."""
    limits, best = floor.copy(), 0
    for _ in range(MAX_SWEEPS):
        before = best
        for j in order:
            rest = np.delete(X > limits, j, axis=1).all(axis=1)
            thresholds, found, alarms = _counts_above(X[rest, j], member[rest])
            gap = found * int((~member).sum()) - alarms * int(member.sum())
            chosen = int(np.argmax(gap))
            if gap[chosen] > best:
                best = int(gap[chosen])
                limits[j] = max(float(thresholds[chosen]), float(floor[j]))
        if best == before:
            break
    return best, limits


def logistic(X: Float64, member: BoolArray) -> Scorer:
    """Log-odds of membership by logistic regression on standardized features, (n, f), with balanced class weights.

    The weights have an L2 penalty, the intercept has none, so a perfect separation stays finite.
    """
    mean, scale = X.mean(axis=0), np.where(X.std(axis=0) > 0, X.std(axis=0), 1.0)
    weight = len(X) / (2 * np.where(member, member.sum(), (~member).sum()))
    slopes, intercept = logistic_regression((X - mean) / scale, np.where(member, 1.0, -1.0), weight, PENALTY)
    return lambda values: ((values - mean) / scale) @ slopes + intercept
