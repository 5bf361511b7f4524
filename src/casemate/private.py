"""The arithmetic of differentially private answers: one law out of many contexts, none of which shows in it.

Grislain 2024, "RAG with Differential Privacy" (arXiv 2412.19291), after Tang et al. 2024, "Privacy-Preserving
In-Context Learning with Differentially Private Few-Shot Generation" (arXiv 2309.11765). A model reads each document in
a context of its own and one context without any. Every document scores every token; its scores are clipped, summed,
and the next token is drawn with the exponential mechanism (McSherry and Talwar 2007). What is public, the model
without documents, is added unclipped.

Deviation: the code of the paper clips at epsilon T / 2, which is right if neighbours differ in one context more or
less. Among the k nearest a new document pushes another one out. So here neighbours differ in one context *replaced*,
and scores are clipped at epsilon T / 4.

The bound is about exact arithmetic. Floating point leaks a little beyond it (Mironov 2012), which is not accounted for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from casemate.types import Float64

Floats = npt.NDArray[np.floating]


def scores(logits: Floats, steepness: float = 1.0) -> Float64:
    """What each context says for each token, centred: with steepness 1 its probability by that of the likeliest.

    (exp(a (ln p - max ln p)) - 1) / a, less the middle of its range; so all scores of a context lie within 1 / 2a of 0.

    Args:
        logits: (contexts, vocabulary).
        steepness: a, above 0; small: scores are logarithms, large: the likeliest token alone counts.

    Returns:
        (contexts, vocabulary).

    >>> scores(np.log([[0.8, 0.2, 0.0001]])).round(2).tolist()
    [[0.5, -0.25, -0.5]]
    """
    x = logits.astype(np.float64)
    raised = np.expm1(steepness * (x - x.max(axis=1, keepdims=True))) / steepness
    middle = (raised.max(axis=1, keepdims=True) + raised.min(axis=1, keepdims=True)) / 2
    return np.asarray(raised - middle, np.float64)


def clip(epsilon: float, temperature: float) -> float:
    """The most that one context may add to the utility of a token, or take from it: epsilon T / 4.

    One context replaced then moves each utility by at most epsilon T / 2, and so the law's logarithm by at most
    epsilon: half of it by the token's own utility, half by the sum over all tokens.
    """
    return epsilon * temperature / 4


def law(scored: Floats, public: Floats, epsilon: float, temperature: float = 1.0, weight: float = 0.01) -> Float64:
    """The law of the next token: epsilon-differentially private in each context, whichever is replaced by whichever.

    softmax((w ln p_public + sum of clipped scores) / T). With no bound, epsilon infinite, it is that of the mean score
    times the number of contexts.

    Args:
        scored: What each context says, (contexts, vocabulary); see ``scores``.
        public: Logits without any document, (vocabulary,).
        epsilon: Of this token.
        temperature: T, above 0.
        weight: w, at least 0.

    >>> both = law(np.array([[0.5, -0.5], [0.5, -0.5]]), np.zeros(2), np.inf)
    >>> both.round(3).tolist(), law(np.array([[0.5, -0.5]]), np.zeros(2), 0.0).tolist()
    ([0.881, 0.119], [0.5, 0.5])
    """
    bound = clip(epsilon, temperature)
    utility = np.clip(scored, -bound, bound).sum(axis=0, dtype=np.float64)
    known = public.astype(np.float64)
    known = known - known.max()
    total = (weight * (known - np.log(np.exp(known).sum())) + utility) / temperature
    shares = np.exp(total - total.max())
    return np.asarray(shares / shares.sum(), np.float64)


def threshold_law(
    similarities: Floats, wanted: int, epsilon: float, low: float = -1.0, high: float = 1.0
) -> tuple[Float64, Float64]:
    """The law of a threshold that about so many similarities reach: epsilon-differentially private in each document.

    Exponential mechanism with utility -| how many reach it - wanted |, which one document more or less moves by 1 at
    most. Between two similarities all thresholds are alike.

    Args:
        similarities: Of the documents, clipped to the range.
        wanted: How many are to reach it.
        epsilon: Of this choice.
        low: Least threshold.
        high: Greatest.

    Returns:
        The limits of the intervals, ascending, and the probability of each.

    >>> edges, shares = threshold_law(np.array([0.9, 0.5, 0.1]), 2, 50.0, 0.0, 1.0)
    >>> edges.tolist(), shares.round(3).tolist()
    ([0.0, 0.1, 0.5, 0.9, 1.0], [0.0, 1.0, 0.0, 0.0])
    """
    inside = np.sort(np.clip(similarities.astype(np.float64), low, high))
    edges = np.concatenate([[low], inside, [high]])
    reached = len(inside) - np.arange(len(inside) + 1)  # a threshold in an interval is reached by what lies above it
    weights = -epsilon * np.abs(reached - wanted) / 2
    shares = np.exp(weights - weights.max()) * np.diff(edges)
    total = shares.sum()
    return edges, shares / total if total > 0 else np.full(len(shares), 1 / len(shares))


def draw_threshold(edges: Float64, shares: Float64, rng: np.random.Generator) -> float:
    """A threshold from such a law."""
    place = int(rng.choice(len(shares), p=shares))
    return float(rng.uniform(edges[place], edges[place + 1]))
