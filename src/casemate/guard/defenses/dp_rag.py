"""DP-RAG: answers with differential privacy for each chunk. A baseline; it costs most of the utility.

Grislain 2024, "RAG with Differential Privacy" (arXiv 2412.19291), a baseline of Mirabel's authors (epsilon 2, and 100
as "DP-RAG-L"). Each document is read in a context of its own. Each next token is drawn from a distribution with bounded
influence of any single context (``casemate.maths.dp``). One chunk is the unit of privacy: content of a single chunk
cannot be revealed.

Deviation: the paper clips for one context added or removed; here for one replaced (see ``casemate.maths.dp``).
Deviation: the budget is spread evenly over the longest allowed answer; or each token has a fixed cost, and the answer
ends with the budget. The paper spreads it over 70 tokens.
Deviation: the paper retrieves with a private threshold over all documents, Mirabel's authors without one. Here it is an
option (``wanted``), over the k nearest.

Not covered: decisions of other defenses from the documents (Mirabel's threshold), and several questions: the epsilons
of answers add up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from casemate.errors import ConfigError, needs, require_range
from casemate.guard import generation_costs
from casemate.guard.token_models import require_token_model
from casemate.maths.cascade import sample_token
from casemate.maths.dp import next_token_distribution, sample_threshold, threshold_distribution, token_scores
from casemate.protocols import DecodingSession, Defense, EventStore, Generator, TokenModel
from casemate.runtime.growing_text import stream_growth
from casemate.types import Action, Outcome, Prompt, Query, Retrieval, Verdict

NAME = "dp_rag"
"""Decoding of a character whose last tokens are still missing."""
MAX_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class TokenMechanism:
    """The exponential mechanism that draws the tokens.

    Attributes:
        epsilon: Privacy loss of each token.
        tokens: Number of tokens within the budget.
        temperature: T.
        public: Weight of the model without documents.
        steepness: Steepness a of the contexts' scores (``maths.dp``).
    """

    epsilon: float
    tokens: int
    temperature: float
    public: float
    steepness: float


@dataclass(eq=False)
class DPRAG(Defense):
    """Reads each document separately, and writes what many of them agree on, with differential privacy.

    Needs ``casemate[dp]`` if ``delta`` is above 0.

    Attributes:
        model: The language model; unset: the system's generator, if it provides token probabilities.
        epsilon: Privacy budget of one answer, above 0: replacing a document changes the probability of an answer by at
            most the factor e to that power.
        delta: Probability that the bound fails, in [0, 1); 0: never, at a higher cost.
        tokens: Maximum length of an answer, from 1 to 4096.
        token_epsilon: Privacy loss of one token; unset: the budget divided among ``tokens``. If set, the answer ends
            with the budget.
        wanted: Approximate number of retrieved documents that are read, by a private threshold; unset: all, without a
            threshold.
        threshold_epsilon: Share of the budget for the threshold, above 0 and below ``epsilon``.
        temperature: T of the exponential mechanism, above 0.
        public: Weight of the model without documents, at least 0. At the value of the temperature, the documents'
            scores multiply its distribution.
        steepness: Steepness a of the documents' scores, above 0. Small: log probabilities; large: only the likeliest
            token counts.
        seed: Of the draws. Set it in experiments only: a known seed voids the protection.
        store: The system's; receives the costs of each answer.
    """

    model: TokenModel | None = field(default=None, repr=False)
    epsilon: float = 2.0
    delta: float = 1e-3
    tokens: int = 70
    token_epsilon: float | None = None
    wanted: int | None = None
    threshold_epsilon: float = 0.1
    temperature: float = 1.0
    public: float = 0.01
    steepness: float = 1.0
    seed: int | None = None
    store: EventStore | None = field(default=None, repr=False)

    paper: ClassVar[str] = "Grislain 2024, arXiv 2412.19291; compared with in Choi et al. 2025, Section 5"

    def __post_init__(self) -> None:
        self._require_valid()
        left = self.epsilon - (self.threshold_epsilon if self.wanted else 0.0)
        if self.token_epsilon is None:
            each, tokens = epsilon_per_token(left, self.delta, self.tokens), self.tokens
        else:
            each, tokens = self.token_epsilon, min(self.tokens, affordable_tokens(left, self.delta, self.token_epsilon))
        if tokens < 1:
            raise ConfigError(f"{NAME}: a budget of {left:g} does not cover one token of {each:g}")
        self._mechanism = TokenMechanism(each, tokens, self.temperature, self.public, self.steepness)

    def _require_valid(self) -> None:
        require_range(NAME, self, "epsilon temperature steepness threshold_epsilon", above=0)
        if self.token_epsilon is not None:
            require_range(NAME, self, "token_epsilon", above=0)
        require_range(NAME, self, "delta", at_least=0, below=1)
        require_range(NAME, self, "public", at_least=0)
        require_range(NAME, self, "tokens", at_least=1, at_most=MAX_TOKENS)
        if self.wanted is not None and (self.wanted < 1 or self.threshold_epsilon >= self.epsilon):
            raise ConfigError(
                f"{NAME}: wanted={self.wanted}, threshold_epsilon={self.threshold_epsilon}, epsilon={self.epsilon}; "
                "need wanted > 0, and threshold_epsilon below epsilon"
            )
        if self.seed is not None:
            require_range(NAME, self, "seed", at_least=0)

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Keeps the hits above a private threshold among the k nearest; without ``wanted``, all.

        The verdict is never flagged: the defense detects nothing.
        """
        if self.wanted is None or not retrieval.hits:
            return Outcome(retrieval)
        near = retrieval.hits[: query.k]
        found = threshold_distribution(np.array([hit.score for hit in near]), self.wanted, self.threshold_epsilon)
        floor = sample_threshold(*found, self._draws(f"{query.tenant}\n{query.text}"))
        kept = tuple(hit for hit in near if hit.score >= floor)
        hidden = tuple(hit.document.id for hit in retrieval.hits if hit not in kept)  # hits beyond the k do not move up
        evidence = {"floor": floor, "kept": len(kept), "epsilon": self.threshold_epsilon}
        action = Action.HIDE if hidden else Action.NONE
        verdict = Verdict(NAME, False, action, 0.0, None, hidden, evidence)
        return Outcome(replace(retrieval, hits=kept), verdict)

    def on_generate(self, generator: Generator) -> Generator:
        """Replaces the generator by the mechanism.

        Raises:
            CapabilityError: If there is no model, and the generator provides no token probabilities.
        """
        model = require_token_model(NAME, self.model, generator)
        return _PrivateGenerator(model, self._mechanism, self._draws, self._append)

    def _draws(self, text: str) -> np.random.Generator:
        """Returns a new generator of random numbers for each answer; with a seed, equal for equal texts."""
        if self.seed is None:
            return np.random.default_rng()
        return np.random.default_rng([self.seed, *text.encode("utf-8", "surrogatepass")])

    def _append(self, prompt: Prompt, figures: dict[str, Any]) -> None:
        options = {"mode": "token", "epsilon": self.epsilon, "delta": self.delta}
        generation_costs.append(self.store, NAME, prompt.request, options | figures)


class _PrivateGenerator(Generator):
    """Generates answers with bounded influence of each document."""

    def __init__(
        self,
        model: TokenModel,
        mechanism: TokenMechanism,
        draws: Callable[[str], np.random.Generator],
        append: Callable[[Prompt, dict[str, Any]], None],
    ) -> None:
        self._model, self._mechanism, self._draws, self._append = model, mechanism, draws, append

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Streams the answer token by token, until the model or the budget ends it.

        Raises:
            BackendError: If a document is too long for the model, or the model fails.
        """
        contexts = [replace(prompt, context=(document,)) for document in prompt.context]
        prompts = [self._model.encode(p) for p in (*contexts, replace(prompt, context=()))]
        session = self._model.begin(prompts)
        limit = self._model.limit
        room = self._mechanism.tokens if limit is None else min(self._mechanism.tokens, limit - max(map(len, prompts)))
        drawn: list[int] = []
        try:
            async for piece in stream_growth(self._texts(session, drawn, room, self._draws(prompt.question))):
                yield piece
        finally:
            self._append(prompt, self._figures(prompt, len(drawn), session))

    def _texts(self, session: DecodingSession, drawn: list[int], room: int, rng: np.random.Generator) -> Iterator[str]:
        """The answer after each token; appends the tokens to ``drawn``, that of the end as well."""
        while len(drawn) < room:
            drawn.append(self._next(session, drawn, rng))
            if drawn[-1] in self._model.ends:
                return
            yield self._model.text(drawn).lstrip()

    def _next(self, session: DecodingSession, answer: list[int], rng: np.random.Generator) -> int:
        mechanism = self._mechanism
        logits = session.read(answer)[:, -1]  # (contexts and the public one, vocabulary)
        scored = token_scores(logits[:-1], mechanism.steepness)
        probabilities = next_token_distribution(
            scored, logits[-1], mechanism.epsilon, mechanism.temperature, mechanism.public
        )
        return sample_token(probabilities, rng.random())

    def _figures(self, prompt: Prompt, drawn: int, session: DecodingSession) -> dict[str, Any]:
        length = len(self._model.encode(prompt))
        alone = self._model.flops(length, 0) + self._model.flops(drawn, length)
        return {
            "tokens": drawn,
            "contexts": len(prompt.context),
            "token_epsilon": self._mechanism.epsilon,
            "flops_honest": session.flops,
            "flops_reference": alone,
        }


def composed_epsilon(each: float, delta: float, times: int) -> float:
    """Returns the total epsilon of ``times`` adaptive steps of epsilon ``each``.

    By privacy loss distributions (Koskela et al. 2020) if delta is above 0; otherwise the sum.

    Raises:
        MissingExtra: If ``delta`` is above 0 and ``casemate[dp]`` is not installed.
    """
    if not delta:
        return each * times
    with needs("casemate[dp]"):
        from dp_accounting.pld import privacy_loss_distribution
        from dp_accounting.pld.common import DifferentialPrivacyParameters
    grid = max(1e-4, each / 200)  # of the losses: fine for small ones, coarse enough for large ones to be fast
    one = privacy_loss_distribution.from_privacy_parameters(
        DifferentialPrivacyParameters(each, 0.0), value_discretization_interval=grid
    )
    return min(each * times, float(one.self_compose(times).get_epsilon_for_delta(delta)))


def epsilon_per_token(epsilon: float, delta: float, tokens: int) -> float:
    """Returns the largest epsilon of each of ``tokens`` tokens within the budget, rounded down."""
    low, high = epsilon / tokens, epsilon
    if not delta or tokens == 1:
        return low
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if composed_epsilon(middle, delta, tokens) <= epsilon else (low, middle)
    return low


def affordable_tokens(epsilon: float, delta: float, each: float) -> int:
    """Returns the number of tokens of epsilon ``each`` within the budget, at most 4096."""
    low, high = min(MAX_TOKENS, int(epsilon / each + 1e-9)), MAX_TOKENS
    while low < high and delta:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if composed_epsilon(each, delta, middle) <= epsilon else (low, middle - 1)
    return low
