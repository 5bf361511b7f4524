"""DP-RAG: answers with a bound on what any one document can change in them. A baseline; it costs most of the use.

Grislain 2024, "RAG with Differential Privacy" (arXiv 2412.19291), which Mirabel's authors compare with (epsilon 2, and
100 as "DP-RAG-L"). Each document is read in a context of its own; each next token is drawn from a law in which no
single context counts for much (``casemate.private``). One chunk is the unit of privacy: what one of them alone says
cannot be told.

Deviation: the paper clips for one context more or less; here for one replaced (see ``casemate.private``).
Deviation: the budget is spread evenly over the longest answer that is allowed, or each token has its own share and the
answer ends where the budget does. The paper spreads it over 70 tokens.
Deviation: the paper retrieves by a private threshold over all documents, Mirabel's authors without one. Here it is an
option (``wanted``), over the k nearest.
Not covered: what other defenses decide from the documents (Mirabel's threshold), and more than one question: the
epsilons of answers add up.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, cast

import numpy as np

from casemate.cascade import draw
from casemate.errors import CapabilityError, ConfigError, needs
from casemate.private import draw_threshold, law, scores, threshold_law
from casemate.protocols import Defense, EventStore, Generator, Reading, TokenModel
from casemate.types import Action, Event, Outcome, Prompt, Query, Retrieval, Verdict

log = logging.getLogger(__name__)

NAME = "dp_rag"
HALF = "\ufffd"  # what a character decodes to, of which some tokens are still to come
MOST_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Mechanism:
    """How the next token is drawn.

    Attributes:
        epsilon: Of each token.
        tokens: How many the budget pays for.
        temperature: T.
        public: Weight of the model without documents.
        steepness: How much more the likeliest tokens of a context count than others.
    """

    epsilon: float
    tokens: int
    temperature: float
    public: float
    steepness: float


@dataclass(eq=False)
class DPRAG(Defense):
    """Reads every document apart, and says what many of them agree on.

    Needs ``casemate[dp]`` where ``delta`` is above 0.

    Attributes:
        model: Reads and writes; unset: the system's generator, if it shows probabilities.
        epsilon: Budget of one answer, above 0: by what factor, e to that power, an answer may be likelier with a
            document than with another in its place.
        delta: Probability with which that may fail, in [0, 1); 0: never, at a higher price.
        tokens: Longest answer, from 1 to 4096.
        token_epsilon: Budget of one token; unset: so much that ``tokens`` of them use the budget up. If it is set, an
            answer ends when the budget does.
        wanted: About how many of the documents found are read, by a private threshold; unset: all, and no threshold.
        threshold_epsilon: What of the budget the threshold takes, above 0 and below ``epsilon``.
        temperature: T of the exponential mechanism, above 0.
        public: Weight of the model without documents, at least 0; as much as the temperature: its law is multiplied
            by what the documents say.
        steepness: How much more the likeliest tokens of a document count, above 0.
        seed: Of the draws. Set it in experiments only: whoever knows it undoes the protection.
        store: The system's; the figures of each answer are noted there.
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
        self._require()
        left = self.epsilon - (self.threshold_epsilon if self.wanted else 0.0)
        if self.token_epsilon is None:
            each, tokens = per_token(left, self.delta, self.tokens), self.tokens
        else:
            each, tokens = self.token_epsilon, min(self.tokens, paid_for(left, self.delta, self.token_epsilon))
        if tokens < 1:
            raise ConfigError(f"{NAME}: a budget of {left:g} does not pay for one token of {each:g}")
        self._mechanism = Mechanism(each, tokens, self.temperature, self.public, self.steepness)
        self._answers = np.random.SeedSequence(self.seed)

    def _require(self) -> None:
        found = {name: getattr(self, name) for name in ("epsilon", "temperature", "steepness", "threshold_epsilon")}
        if self.token_epsilon is not None:
            found["token_epsilon"] = self.token_epsilon
        for name, value in found.items():
            if not 0 < value < math.inf:
                raise ConfigError(f"{NAME}.{name} is {value}; it must be above 0 and finite")
        if not 0 <= self.delta < 1 or not 0 <= self.public < math.inf:
            raise ConfigError(f"{NAME}: delta={self.delta}, public={self.public}; need delta in [0, 1), public >= 0")
        if not 1 <= self.tokens <= MOST_TOKENS:
            raise ConfigError(f"{NAME}.tokens is {self.tokens}; it must lie between 1 and {MOST_TOKENS}")
        if self.wanted is not None and (self.wanted < 1 or self.threshold_epsilon >= self.epsilon):
            raise ConfigError(
                f"{NAME}: wanted={self.wanted}, threshold_epsilon={self.threshold_epsilon}, epsilon={self.epsilon}; "
                "need wanted > 0, and threshold_epsilon below epsilon"
            )
        if self.seed is not None and self.seed < 0:
            raise ConfigError(f"{NAME}.seed is {self.seed}; it must not be negative")

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Keeps what reaches a private threshold, among the k nearest; without ``wanted``, everything.

        The verdict never flags: nobody is suspected.
        """
        if self.wanted is None or not retrieval.hits:
            return Outcome(retrieval)
        near = retrieval.hits[: query.k]
        found = threshold_law(np.array([hit.score for hit in near]), self.wanted, self.threshold_epsilon)
        floor = draw_threshold(*found, self._draws(f"{query.tenant}\n{query.text}"))
        kept = tuple(hit for hit in near if hit.score >= floor)
        hidden = tuple(hit.document.id for hit in retrieval.hits if hit not in kept)  # none moves up from behind the k
        evidence = {"floor": floor, "kept": len(kept), "epsilon": self.threshold_epsilon}
        action = Action.HIDE if hidden else Action.NONE
        verdict = Verdict(NAME, False, action, 0.0, None, hidden, evidence)
        return Outcome(replace(retrieval, hits=kept), verdict)

    def on_generate(self, generator: Generator) -> Generator:
        """The mechanism in place of the generator.

        Raises:
            CapabilityError: If there is no model, and the generator shows no probabilities.
        """
        model = self.model
        if model is None and TokenModel in type(generator).__mro__:
            model = cast(TokenModel, generator)
        if model is None:
            raise CapabilityError(
                f"{NAME} needs the probabilities of tokens, and {type(generator).__name__} shows none; name a model, "
                "such as {use: transformers, model: ...}"
            )
        return _Private(model, self._mechanism, self._draws, self._note)

    def _draws(self, text: str) -> np.random.Generator:
        """Fresh ones for each answer; with a seed, the same for the same text."""
        if self.seed is None:
            return np.random.default_rng()
        return np.random.default_rng([self.seed, *text.encode("utf-8", "surrogatepass")])

    def _note(self, prompt: Prompt, figures: dict[str, Any]) -> None:
        """Hands the figures of an answer to the store. No text is among them."""
        if self.store is None:
            return
        body = {
            "defense": NAME,
            "request": prompt.request,
            "mode": "token",
            "epsilon": self.epsilon,
            "delta": self.delta,
        }
        try:
            self.store.append(Event(uuid.uuid4().hex, datetime.now(UTC), "generation", body | figures))
        except Exception as error:  # a record that cannot be kept must not cost anybody an answer
            log.error("the figures of an answer were not noted: %s", type(error).__name__)


class _Private(Generator):
    """Writes answers that no single document shows in."""

    def __init__(
        self,
        model: TokenModel,
        mechanism: Mechanism,
        draws: Callable[[str], np.random.Generator],
        note: Callable[[Prompt, dict[str, Any]], None],
    ) -> None:
        self._model, self._mechanism, self._draws, self._note = model, mechanism, draws, note

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """The answer, token by token, until the model ends it or the budget does.

        Raises:
            BackendError: If a document is too long for the model, or the model fails.
        """
        contexts = [replace(prompt, context=(document,)) for document in prompt.context]
        prompts = [self._model.encode(p) for p in (*contexts, replace(prompt, context=()))]
        reading = self._model.begin(prompts)
        rng = self._draws(prompt.question)
        limit = self._model.limit
        room = self._mechanism.tokens if limit is None else min(self._mechanism.tokens, limit - max(map(len, prompts)))
        said: list[int] = []
        sent = drawn = 0
        try:
            while drawn < room:
                token = await asyncio.to_thread(self._next, reading, said, rng)
                drawn += 1
                if token in self._model.ends:
                    break
                said.append(token)
                text = self._text(said)
                if len(text) > sent and not text.endswith(HALF):
                    yield text[sent:]
                    sent = len(text)
            if rest := self._text(said)[sent:]:
                yield rest
        finally:
            self._note(prompt, self._figures(prompt, drawn, reading))

    def _next(self, reading: Reading, said: list[int], rng: np.random.Generator) -> int:
        mechanism = self._mechanism
        logits = reading.read(said)[:, -1]  # (contexts and the public one, vocabulary)
        scored = scores(logits[:-1], mechanism.steepness)
        laws = law(scored, logits[-1], mechanism.epsilon, mechanism.temperature, mechanism.public)
        return draw(laws, rng.random())

    def _text(self, said: list[int]) -> str:
        return self._model.text(said).lstrip()

    def _figures(self, prompt: Prompt, drawn: int, reading: Reading) -> dict[str, Any]:
        given = len(self._model.encode(prompt))
        alone = self._model.flops(given, 0) + self._model.flops(drawn, given)
        return {
            "tokens": drawn,
            "contexts": len(prompt.context),
            "token_epsilon": self._mechanism.epsilon,
            "flops_honest": reading.flops,
            "flops_reference": alone,
        }


def composed(each: float, delta: float, times: int) -> float:
    """The epsilon that so many steps of epsilon ``each`` have together, however each depends on what came before.

    By privacy loss distributions (Koskela et al. 2020) where delta is above 0; else they add up.

    Raises:
        MissingExtra: If ``delta`` is above 0 and ``casemate[dp]`` is not installed.
    """
    if not delta:
        return each * times
    with needs("casemate[dp]"):
        from dp_accounting.pld import privacy_loss_distribution
        from dp_accounting.pld.common import DifferentialPrivacyParameters
    one = privacy_loss_distribution.from_privacy_parameters(
        DifferentialPrivacyParameters(each, 0.0), value_discretization_interval=_grid(each)
    )
    return min(each * times, float(one.self_compose(times).get_epsilon_for_delta(delta)))


def per_token(epsilon: float, delta: float, tokens: int) -> float:
    """The most that each of so many tokens may cost. Rounded down: never more than the budget in all."""
    low, high = epsilon / tokens, epsilon
    if not delta or tokens == 1:
        return low
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if composed(middle, delta, tokens) <= epsilon else (low, middle)
    return low


def paid_for(epsilon: float, delta: float, each: float) -> int:
    """How many tokens of this cost a budget pays for, at most 4096."""
    low, high = min(MOST_TOKENS, int(epsilon / each + 1e-9)), MOST_TOKENS
    while low < high and delta:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if composed(each, delta, middle) <= epsilon else (low, middle - 1)
    return low


def _grid(each: float) -> float:
    """Steps in which losses are counted: fine for small ones, and so that large ones take no time."""
    return max(1e-4, each / 200)
