"""The constrained cascade's arithmetic: who decides on the next token, and how it is drawn.

Pan et al. 2026, "RAGFort: Dual-Path Defense Against Proprietary Knowledge Base Extraction in Retrieval-Augmented
Generation", AAAI, section 4.3, eq. 5 and Algorithm 1, after Narasimhan et al. 2025, "Faster Cascades via Speculative
Decoding", ICLR (arXiv 2405.19261). A small draft model has the law q of the next token, a large reference the law p.
A rule says which tokens the draft may not settle (r); pi mixes the two laws accordingly, and a token that the draft
has drawn is kept with probability min(1, pi / q), else drawn anew from what pi has more than q.

A law is an array (V,) that sums to 1, of any float type. A copy token is one that would carry on the copying of a
chunk.

Deviation: eq. 5 speaks of the probability of a whole chunk, which is a condition of the same law. Here it is that of
the tokens that would carry on a copy of it (``copy_ratio``), and nothing while nothing is copied.
Deviation: eq. 5 as printed taxes every copied token, for the ratio is near 1 where the two models agree. Rule
``excess`` counts what is above 1 only. ``paper`` is literal.
Deviation: the paper's rule settles all tokens of a place alike. ``token_copy`` decides on each: it is the
token-specific rule V3 of Narasimhan et al., and a bound on copy tokens. The reference should then be one that never
saw the chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from casemate.errors import ConfigError

Law: TypeAlias = npt.NDArray[np.floating]
Mask: TypeAlias = npt.NDArray[np.bool_]
Tokens: TypeAlias = npt.NDArray[np.int64]
RuleName: TypeAlias = Literal["paper", "excess", "opt", "token_copy"]
RULES: tuple[RuleName, ...] = get_args(RuleName)

FLOOR, CEILING = 1e-6, 10.0
"""Added to both probabilities of the copy ratio; the most that the ratio may be."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Says which tokens are the reference's to settle.

    ``paper``, ``excess`` and ``opt`` give it all or none of them: all, if the draft is less sure of itself than the
    reference by a margin. ``token_copy`` gives it those that are not among the reference's own favourites, and the copy
    tokens that the draft finds more than ``bound`` times as likely.

    Attributes:
        name: One of ``RULES``.
        alpha: What it costs to ask the reference, per total variation, at least 0. ``token_copy``: a favourite is at
            most this share less likely than the first; in [0, 1).
        bound: C, in [1, 10): where the draft settles a copy token it is at most so many times as likely as with the
            reference; with ``excess`` one more.
    """

    name: RuleName = "token_copy"
    alpha: float = 0.1
    bound: float = math.e

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise ConfigError(f"the rule {self.name!r} is unknown; known: {', '.join(RULES)}")
        if not 0 <= self.alpha < 1 or not 1 <= self.bound < CEILING:
            what = f"alpha={self.alpha}, bound={self.bound}"
            raise ConfigError(f"a cascade needs alpha in [0, 1) and bound in [1, {CEILING:g}), got {what}")

    @property
    def eta(self) -> float:
        """The weight of the copy ratio that enforces the bound: a draft that is kept has a ratio of at most C.

        From eq. 5: eta R <= max q - max p + alpha D_TV <= 1 + alpha.
        """
        return (1 + self.alpha) / self.bound

    def deferred(self, q: Law, p: Law, copies: Sequence[Tokens] = ()) -> Mask:
        """The tokens that the reference settles: r of eq. 5, or r(v), (V,).

        Args:
            q: The draft's law.
            p: The reference's law.
            copies: For each chunk that is being copied, its copy tokens.
        """
        if self.name == "token_copy":
            mask: Mask = p < (1 - self.alpha) * p.max()
            for tokens in copies:
                mask[tokens] |= q[tokens] > self.bound * p[tokens]
            return mask
        limit = float(p.max()) - self.alpha * total_variation(p, q)
        if self.name != "opt":
            ratio = copy_ratio(q, p, copies)
            limit += self.eta * (ratio if self.name == "paper" else max(0.0, ratio - 1))
        return np.full(len(q), float(q.max()) < limit)


def total_variation(p: Law, q: Law) -> float:
    """D_TV, the sum of max(0, p - q): in [0, 1], 0 for equal laws.

    >>> total_variation(np.array([0.5, 0.5]), np.array([0.25, 0.75]))
    0.25
    """
    return float(np.maximum(p - q, 0).sum())


def copy_ratio(q: Law, p: Law, copies: Sequence[Tokens]) -> float:
    """How much likelier the draft copies on than the reference, of the chunk where it is most; 0 where none is copied.

    In [0, 10]; clipped, since p may be next to nothing.

    >>> q, p = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.3, 0.5])
    >>> round(copy_ratio(q, p, [np.array([0]), np.array([1, 2])]), 3), copy_ratio(q, p, [])
    (3.0, 0.0)
    """
    ratios = ((q[tokens].sum() + FLOOR) / (p[tokens].sum() + FLOOR) for tokens in copies)
    return float(min(max(ratios, default=0.0), CEILING))


def mixture(q: Law, p: Law, deferred: Mask) -> Law:
    """pi: the draft's law where the draft settles; what it has elsewhere is dealt out by the reference's.

    pi(v) = q(v) (1 - r(v)) + p(v) * sum of r q. With r the same for all tokens that is q or p itself. A copy token that
    ``token_copy`` bounds has pi(v) <= (C + 1) p(v).

    >>> mixture(np.array([0.6, 0.4]), np.array([0.1, 0.9]), np.array([True, False])).round(2).tolist()
    [0.06, 0.94]
    """
    if deferred.all():  # exactly p: a sum of q that is not quite 1 must not break ties
        return p
    pi: Law = np.where(deferred, 0, q) + p * q[deferred].sum()
    return pi


def acceptance(pi: Law, q: Law, token: int) -> float:
    """The probability, min(1, pi / q), with which a token that the draft drew is kept."""
    return min(1.0, float(pi[token]) / float(q[token])) if q[token] > 0 else 0.0


def residual(pi: Law, q: Law) -> Law:
    """The law of the token that comes instead: norm(max(0, pi - q)). Where nothing is left but rounding, pi.

    >>> residual(np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.2, 0.2])).round(2).tolist()
    [0.0, 0.75, 0.25]
    """
    rest: Law = np.maximum(pi - q, 0)
    total = float(rest.sum())
    return rest / total if total > 1e-9 else pi


def softmax(logits: npt.NDArray[np.floating], temperature: float = 1.0) -> Law:
    """The law that logits stand for, along the last axis; higher temperatures are more even."""
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / np.asarray(temperature, logits.dtype)
    weights: Law = np.exp(scaled)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def draw(law: Law, u: float) -> int:
    """The token at which the law's running sum passes u, in [0, 1). A token of probability 0 is never drawn.

    >>> [draw(np.array([0.0, 0.25, 0.0, 0.75]), u) for u in (0.0, 0.24, 0.25, 0.999)]
    [1, 1, 3, 3]
    """
    sums = np.cumsum(law, dtype=np.float64)
    last = np.searchsorted(sums, sums[-1])  # u times the sum may round to the sum
    return int(min(np.searchsorted(sums, u * sums[-1], side="right"), last))
