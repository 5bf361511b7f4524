"""Differentially private token generation: aggregates the next-token scores of many contexts with a privacy guarantee.

Sources: Grislain 2024, "RAG with Differential Privacy" (arXiv 2412.19291); Tang et al. 2024, "Privacy-Preserving
In-Context Learning with Differentially Private Few-Shot Generation" (arXiv 2309.11765). The model reads each document
in a separate context, and one public context without documents. Each document context scores every token. The scores
are clipped and summed, and the next token is drawn by the exponential mechanism (McSherry and Talwar 2007). The public
context is added without clipping.

Neighboring data sets differ in one *replaced* context.

Deviation: the paper's code clips at epsilon T / 2, which is correct for one context added or removed. In retrieval of
the k nearest, a new document pushes another one out, which replaces a context. So scores are clipped at epsilon T / 4.

The bound holds for exact arithmetic. It does not account for the small leak of floating point (Mironov 2012).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from casemate.types import Float64

Floats = npt.NDArray[np.floating]


def token_scores(logits: Floats, steepness: float = 1.0) -> Float64:
    """Token scores of each context: (exp(a (ln p - max ln p)) - 1) / a, with the midrange shifted to 0.

    With steepness a = 1 a score is the token's probability relative to the most probable token, up to the shift. All
    scores lie within 1 / (2 a) of 0. Near a = 0: log-probabilities; large: only the most probable token counts. Logits
    and scores are (contexts, vocabulary).

    >>> token_scores(np.log([[0.8, 0.2, 0.0001]])).round(2).tolist()
    [[0.5, -0.25, -0.5]]
    """
    x = logits.astype(np.float64)
    transformed = np.expm1(steepness * (x - x.max(axis=1, keepdims=True))) / steepness
    midrange = (transformed.max(axis=1, keepdims=True) + transformed.min(axis=1, keepdims=True)) / 2
    return np.asarray(transformed - midrange, np.float64)


def clipping_bound(epsilon: float, temperature: float) -> float:
    """Clipping bound of the scores of one context: epsilon T / 4.

    Replacing one context then changes each utility by at most epsilon T / 2, and each log-probability by at most
    epsilon: one half by the token's own utility, the other by the normalization.
    """
    return epsilon * temperature / 4


def next_token_distribution(
    scored: Floats, public: Floats, epsilon: float, temperature: float = 1.0, weight: float = 0.01
) -> Float64:
    """Distribution of the next token, (vocabulary,), epsilon-differentially private under replacement of one context.

    softmax((w ln p_public + sum of clipped scores) / T). With epsilon = infinity nothing is clipped.

    Args:
        scored: Scores of the contexts, (contexts, vocabulary), from ``token_scores``.
        public: Logits of the context without documents, (vocabulary,).
        epsilon: Privacy budget of this token, at least 0.
        temperature: T, above 0.
        weight: w, at least 0.

    >>> both = next_token_distribution(np.array([[0.5, -0.5], [0.5, -0.5]]), np.zeros(2), np.inf)
    >>> both.round(3).tolist(), next_token_distribution(np.array([[0.5, -0.5]]), np.zeros(2), 0.0).tolist()
    ([0.881, 0.119], [0.5, 0.5])
    """
    bound = clipping_bound(epsilon, temperature)
    utility = np.clip(scored, -bound, bound).sum(axis=0, dtype=np.float64)
    logits = public.astype(np.float64)
    logits = logits - logits.max()
    total = (weight * (logits - np.log(np.exp(logits).sum())) + utility) / temperature
    shares = np.exp(total - total.max())
    return np.asarray(shares / shares.sum(), np.float64)


def threshold_distribution(similarities: Floats, wanted: int, epsilon: float) -> tuple[Float64, Float64]:
    """Distribution of a similarity threshold that about ``wanted`` documents reach, epsilon-DP in each document.

    Exponential mechanism with utility -|count - wanted|. Adding or removing one document changes the count by at
    most 1. All thresholds between two adjacent similarities have the same density. Returns interval limits (n + 2,),
    ascending, and the probability of each interval (n + 1,), for cosines (n,).

    >>> edges, shares = threshold_distribution(np.array([0.9, 0.5, 0.1]), 2, 50.0)
    >>> edges.tolist(), shares.round(3).tolist()
    ([-1.0, 0.1, 0.5, 0.9, 1.0], [0.0, 1.0, 0.0, 0.0])
    """
    inside = np.sort(np.clip(similarities.astype(np.float64), -1.0, 1.0))
    edges = np.concatenate([[-1.0], inside, [1.0]])
    reached = len(inside) - np.arange(len(inside) + 1)  # count of similarities above each interval
    weights = -epsilon * np.abs(reached - wanted) / 2
    shares = np.exp(weights - weights.max()) * np.diff(edges)
    total = shares.sum()
    return edges, shares / total if total > 0 else np.full(len(shares), 1 / len(shares))


def sample_threshold(edges: Float64, shares: Float64, rng: np.random.Generator) -> float:
    """Draws a threshold from the result of ``threshold_distribution``."""
    place = int(rng.choice(len(shares), p=shares))
    return float(rng.uniform(edges[place], edges[place + 1]))
