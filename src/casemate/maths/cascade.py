"""Token-level deferral and acceptance rules of a constrained speculative cascade.

Sources: Pan et al. 2026, "RAGFort: Dual-Path Defense Against Proprietary Knowledge Base Extraction in
Retrieval-Augmented Generation", AAAI, section 4.3, eq. 5 and Algorithm 1; Narasimhan et al. 2025, "Faster Cascades via
Speculative Decoding", ICLR (arXiv 2405.19261).

q is the next-token distribution of a small draft model, p that of a large reference model. A deferral rule r selects
the tokens that the reference decides. The target distribution pi combines q and p accordingly. A token drawn from q is
accepted with probability min(1, pi / q). After a rejection, the next token is drawn from the positive part of pi - q.

A distribution is an array (V,) over the vocabulary that sums to 1, of any float type. A copy token is a token that
would continue a verbatim copy of a retrieved chunk.

Deviation: eq. 5 uses the probability of a whole chunk. Here the ratio is over the next copy tokens (``copy_ratio``),
and 0 while no chunk is being copied.
Deviation: eq. 5 as printed penalizes every copied token, because the ratio is near 1 where the two models agree. Rule
``excess`` counts only the part above 1. ``paper`` is literal.
Deviation: the paper's rule defers all tokens of a position or none. ``token_copy`` decides token by token: the
token-specific rule V3 of Narasimhan et al. plus a bound on copy tokens. Use it with a reference model that does not see
the chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from casemate.errors import ConfigError

Distribution: TypeAlias = npt.NDArray[np.floating]
Mask: TypeAlias = npt.NDArray[np.bool_]
Tokens: TypeAlias = npt.NDArray[np.int64]
DeferralRuleName: TypeAlias = Literal["paper", "excess", "opt", "token_copy"]
RULES: tuple[DeferralRuleName, ...] = get_args(DeferralRuleName)

FLOOR, CEILING = 1e-6, 10.0
"""Added to both probabilities of the copy ratio, for numerical stability; upper bound of the ratio."""


@dataclass(frozen=True, slots=True)
class DeferralRule:
    """Selects the tokens that the reference model decides.

    ``paper``, ``excess`` and ``opt`` defer all tokens of a position or none: all, if the draft's maximum probability is
    below the reference's by a margin. ``token_copy`` defers two kinds of tokens: those that are not among the most
    probable ones of the reference, and copy tokens that the draft finds more than ``bound`` times as likely as the
    reference.

    Attributes:
        name: One of ``RULES``.
        alpha: Cost of deferring per unit of total variation, in [0, 1). With ``token_copy``: a token within this share
            of the reference's maximum probability is not deferred.
        bound: C, in [1, 10): the largest ratio of draft to reference probability of a copy token that the draft
            decides; C + 1 with ``excess``.
    """

    name: DeferralRuleName = "token_copy"
    alpha: float = 0.1
    bound: float = math.e

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise ConfigError(f"unknown deferral rule {self.name!r}; known: {', '.join(RULES)}")
        if not 0 <= self.alpha < 1 or not 1 <= self.bound < CEILING:
            what = f"alpha={self.alpha}, bound={self.bound}"
            raise ConfigError(f"cascade: need alpha in [0, 1) and bound in [1, {CEILING:g}), got {what}")

    @property
    def eta(self) -> float:
        """Weight of the copy ratio R that enforces the bound: the draft is kept only if R is at most C.

        From eq. 5: eta R <= max q - max p + alpha D_TV <= 1 + alpha.
        """
        return (1 + self.alpha) / self.bound

    def deferred(self, q: Distribution, p: Distribution, copies: Sequence[Tokens] = ()) -> Mask:
        """Deferred tokens as a mask (V,): r of eq. 5, or r(v).

        q is the draft's distribution, p the reference's; ``copies`` has the copy tokens of each chunk that is being
        copied.
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


def total_variation(p: Distribution, q: Distribution) -> float:
    """Total variation distance D_TV = sum of max(0, p - q), in [0, 1]; 0 for equal distributions.

    >>> total_variation(np.array([0.5, 0.5]), np.array([0.25, 0.75]))
    0.25
    """
    return float(np.maximum(p - q, 0).sum())


def copy_ratio(q: Distribution, p: Distribution, copies: Sequence[Tokens]) -> float:
    """Largest ratio of draft to reference probability of continuing a copy, over the chunks being copied.

    In [0, 10], clipped because p may be near 0; 0 without copies.

    >>> q, p = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.3, 0.5])
    >>> round(copy_ratio(q, p, [np.array([0]), np.array([1, 2])]), 3), copy_ratio(q, p, [])
    (3.0, 0.0)
    """
    ratios = ((q[tokens].sum() + FLOOR) / (p[tokens].sum() + FLOOR) for tokens in copies)
    return float(min(max(ratios, default=0.0), CEILING))


def target_distribution(q: Distribution, p: Distribution, deferred: Mask) -> Distribution:
    """Target distribution pi(v) = q(v) (1 - r(v)) + p(v) sum_u r(u) q(u).

    Tokens that are not deferred keep the draft's probability. The remaining mass is distributed by p. If r is the same
    for all tokens, pi is q or p. A copy token that ``token_copy`` bounds has pi(v) <= (C + 1) p(v).

    >>> target_distribution(np.array([0.6, 0.4]), np.array([0.1, 0.9]), np.array([True, False])).round(2).tolist()
    [0.06, 0.94]
    """
    if deferred.all():  # exactly p: a sum of q that is not quite 1 must not break ties
        return p
    pi: Distribution = np.where(deferred, 0, q) + p * q[deferred].sum()
    return pi


def acceptance_probability(pi: Distribution, q: Distribution, token: int) -> float:
    """Probability min(1, pi / q) of keeping a token that was drawn from q; 0 where q is 0."""
    return min(1.0, float(pi[token]) / float(q[token])) if q[token] > 0 else 0.0


def residual_distribution(pi: Distribution, q: Distribution) -> Distribution:
    """Distribution of the token drawn after a rejection: max(0, pi - q), normalized. If only rounding is left, pi.

    >>> residual_distribution(np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.2, 0.2])).round(2).tolist()
    [0.0, 0.75, 0.25]
    """
    rest: Distribution = np.maximum(pi - q, 0)
    total = float(rest.sum())
    return rest / total if total > 1e-9 else pi


def softmax(logits: npt.NDArray[np.floating], temperature: float = 1.0) -> Distribution:
    """Softmax along the last axis; a higher temperature gives a more uniform distribution."""
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / np.asarray(temperature, logits.dtype)
    weights: Distribution = np.exp(scaled)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def sample_token(distribution: Distribution, u: float) -> int:
    """Inverse-CDF sampling by a uniform u in [0, 1): the first token whose cumulative probability exceeds u.

    A token of probability 0 is never drawn.

    >>> [sample_token(np.array([0.0, 0.25, 0.0, 0.75]), u) for u in (0.0, 0.24, 0.25, 0.999)]
    [1, 1, 3, 3]
    """
    sums = np.cumsum(distribution, dtype=np.float64)
    last = np.searchsorted(sums, sums[-1])  # u times the sum may round up to the sum
    return int(min(np.searchsorted(sums, u * sums[-1], side="right"), last))
