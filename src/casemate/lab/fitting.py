"""The attacker's decision: a rule is fitted on candidates whose membership he knows, and judged on the others.

It is fitted under the very target that is attacked. Thresholds from the bare system would measure an attacker who has
not noticed the guard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from casemate import metrics
from casemate.lab.datasets import Half
from casemate.lab.results import Trial
from casemate.types import Float64

Flags: TypeAlias = npt.NDArray[np.bool_]
Scorer: TypeAlias = Callable[[Float64], Float64]
"""Features (n, f) to scores (n,); higher speaks for membership."""

PENALTY = 1.0
"""Of the squared weights of a logistic regression, against the log-losses of all candidates."""
SWEEPS = 20
"""How often a corner's thresholds are gone through at most; mostly the third time changes nothing."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Who is called a member: whose score is above the cut, or who is not where members score lower.

    Attributes:
        score: Scores features.
        cut: The threshold; infinite if everyone is called the same.
        above: Whether members are above.
        accuracy: Balanced accuracy on the candidates that it was fitted on, at least .5.
    """

    score: Scorer
    cut: float
    above: bool
    accuracy: float

    def says(self, X: Float64) -> Flags:
        """Who of these is called a member."""
        said: Flags = (self.score(X) > self.cut) == self.above
        return said


@dataclass(frozen=True, slots=True)
class Fitted:
    """Every candidate, judged once, by the rule that was fitted on the half that he is not in.

    Attributes:
        member: Who is a member, (n,).
        score: The attack's only feature as it is, or the log-odds of membership from several, (n,).
        said: Who was called a member, (n,).
    """

    member: Flags
    score: Float64
    said: Flags


def cross_fit(trials: Sequence[Trial], half: Mapping[str, Half]) -> Fitted:
    """Fits on either half and judges on the other, so that every candidate counts and none judges himself.

    Args:
        trials: Of one attack against one target; members and non-members in both halves.
        half: In which half each candidate is.
    """
    X = np.array([t.features for t in trials], np.float64)
    member = np.array([t.member for t in trials])
    first = np.array([half[t.candidate] == "A" for t in trials])
    score, said = X[:, 0].copy(), np.zeros(len(X), np.bool_)
    for learn in (first, ~first):
        rule = fit(X[learn], member[learn])
        said[~learn] = rule.says(X[~learn])
        if X.shape[1] > 1:
            score[~learn] = rule.score(X[~learn])
    return Fitted(member, score, said)


def fit(X: Float64, member: Flags) -> Rule:
    """The best rule for candidates whose membership is known.

    One feature is cut where balanced accuracy is best. Of several features, three ways are tried, and the one with the
    best balanced accuracy on these candidates is taken, the simpler one if two are equal: the first feature alone; a
    corner, that is a threshold for each feature, all of which must be passed (S2MIA-T, Li et al. 2024, arXiv
    2406.19234); and a logistic regression. Their scores are brought to log-odds, so that those of both halves' rules
    can be put into one ranking.

    The corner is searched greedily: of each feature in turn all places between two values are tried, until no change
    helps; once beginning with each feature.

    Args:
        X: Features, (n, f).
        member: Who is a member, (n,); some are and some are not.
    """
    if X.shape[1] == 1:
        return _cut(lambda Z: Z[:, 0], X, member)
    ways = (lambda Z: Z[:, :1], corner(X, member), lambda Z: Z)
    return max((_cut(_odds(way, X, member), X, member) for way in ways), key=lambda rule: rule.accuracy)


def _odds(way: Callable[[Float64], Float64], X: Float64, member: Flags) -> Scorer:
    """A way to look at features, brought to log-odds."""
    odds = logistic(way(X), member)
    return lambda Z: odds(way(Z))


def _cut(score: Scorer, X: Float64, member: Flags) -> Rule:
    """The threshold, and the side, with the best balanced accuracy; of several in a row the middle one."""
    cuts, found, alarms = _passed(score(X), member)
    gap = found * int((~member).sum()) - alarms * int(member.sum())  # (TPR - FPR) in whole numbers
    best = np.flatnonzero(np.abs(gap) == np.abs(gap).max())
    place = int(best[len(best) // 2])
    above = bool(gap[place] >= 0)
    tp, fp = int(found[place]), int(alarms[place])
    accuracy = metrics.balanced_accuracy(tp, fp, int((~member).sum()) - fp, int(member.sum()) - tp)
    return Rule(score, float(cuts[place]), above, max(accuracy, 1 - accuracy))


def _passed(s: Float64, member: Flags) -> tuple[Float64, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All thresholds that make a difference, rising, and how many members and non-members are above each."""
    levels = np.unique(s)
    cuts = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    counts = [np.sort(s[kind]) for kind in (member, ~member)]
    found, alarms = (len(c) - np.searchsorted(c, cuts, "right") for c in counts)
    return cuts, found, alarms


def corner(X: Float64, member: Flags) -> Callable[[Float64], Float64]:
    """S2MIA-T: how far inside the corner a candidate is, in deviations of the feature that is nearest to its threshold.

    What is returned maps features (n, f) to such distances (n, 1), above 0 inside.

    Args:
        X: Features, (n, f).
        member: Who is a member, (n,).
    """
    scale = np.where(X.std(axis=0) > 0, X.std(axis=0), 1.0)
    floor = X.min(axis=0) - scale  # no restriction
    columns = range(X.shape[1])
    found = [_searched(X, member, floor, [*columns[start:], *columns[:start]]) for start in columns]
    _, limits = max(found, key=lambda pair: pair[0])
    return lambda Z: ((Z - limits) / scale).min(axis=1, keepdims=True)


def _searched(X: Float64, member: Flags, floor: Float64, order: Sequence[int]) -> tuple[int, Float64]:
    """How good the corner is that is found by moving one threshold after the other in this order; and the corner."""
    limits, best = floor.copy(), 0
    for _ in range(SWEEPS):
        before = best
        for j in order:
            rest = np.delete(X > limits, j, axis=1).all(axis=1)
            cuts, found, alarms = _passed(X[rest, j], member[rest])
            gap = found * int((~member).sum()) - alarms * int(member.sum())
            place = int(np.argmax(gap))
            if gap[place] > best:
                best = int(gap[place])
                limits[j] = max(float(cuts[place]), float(floor[j]))
        if best == before:
            break
    return best, limits


def logistic(X: Float64, member: Flags) -> Scorer:
    """Log-odds of membership by logistic regression on standardised features, both kinds weighing the same.

    The squared weights are penalised (L2), the intercept is not, so that a perfect separation stays finite.

    Args:
        X: Features, (n, f).
        member: Who is a member, (n,); some are and some are not.
    """
    from scipy.optimize import minimize
    from scipy.special import expit

    mean, scale = X.mean(axis=0), np.where(X.std(axis=0) > 0, X.std(axis=0), 1.0)
    Z = np.column_stack([(X - mean) / scale, np.ones(len(X))])  # (n, f + 1)
    sign = np.where(member, 1.0, -1.0)
    weight = len(X) / (2 * np.where(member, member.sum(), (~member).sum()))
    penalty = np.append(np.full(X.shape[1], PENALTY), 0.0)

    def loss(w: Float64) -> tuple[float, Float64]:
        margin = sign * (Z @ w)
        slope = penalty * w - Z.T @ (weight * sign * expit(-margin))
        return float(weight @ np.logaddexp(0, -margin) + (penalty * w) @ w / 2), slope

    w: Float64 = minimize(loss, np.zeros(Z.shape[1]), jac=True, method="L-BFGS-B", options={"gtol": 1e-8}).x
    return lambda values: ((values - mean) / scale) @ w[:-1] + w[-1]
