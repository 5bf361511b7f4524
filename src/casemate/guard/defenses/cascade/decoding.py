"""Block-speculative decoding of one answer by a draft model and a reference (RAGFort, Algorithm 1, corrected).

In a block the draft model proposes tokens and the reference reads them all in one pass. Each is accepted or rejected in
turn; the first rejected one is resampled and ends the block. If all are accepted, a bonus token follows.

Deviation: lines 1-3 never draw the tokens that are verified later; here x ~ q.

Deviation: the loops of lines 5 and 10 have different ranges. Here the reference gives the distributions of one position
more than was drafted, and the last one is for the bonus token.

Deviation: line 14 accepts with p / q, which is correct only if r is the same for all tokens; here with pi / q.

Deviation: lines 22 and 24 contradict the text on the bonus token. It comes from the reference's distribution, as in the
text, or from pi (``bonus``). With the latter every token of an answer is drawn from pi.

Deviation: at temperature 0 the distributions, and the rule with them, would be degenerate. Here the rule uses the
distributions of temperature 1, and the most probable token of pi is selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np

from casemate.errors import BackendError
from casemate.maths.cascade import (
    DeferralRule,
    Distribution,
    Tokens,
    acceptance_probability,
    residual_distribution,
    sample_token,
    softmax,
    target_distribution,
)
from casemate.protocols import DecodingSession, Logits, TokenModel
from casemate.text.copying import Alphabet, CopyDetector, CopyState
from casemate.text.sentences import describe_topic
from casemate.types import Prompt

View: TypeAlias = Literal["same", "ablated", "summary", "guarded"]
Bonus: TypeAlias = Literal["verifier", "mixture"]
GUARDED = "Tell it in words of your own: never write more than a few words as they stand in a document."
MAX_VIEWS = 3
"""Contexts of the reference kept open at a time; each has its own key-value cache."""


@dataclass(frozen=True, slots=True)
class DecodingSettings:
    """Settings of the decoding.

    Attributes:
        rule: Deferral rule.
        view: Context of the reference while chunks are copied.
        gamma: Draft tokens per block.
        bonus: Distribution of the token after a block that was kept whole.
        temperature: 0: greedy decoding.
        max_tokens: Maximum length of an answer.
    """

    rule: DeferralRule
    view: View = "ablated"
    gamma: int = 4
    bonus: Bonus = "verifier"
    temperature: float = 0.0
    max_tokens: int = 512


@dataclass(slots=True)
class DecodingStats:
    """Costs of one answer.

    Attributes:
        tokens: Length, end token included.
        passes: Forward passes of the reference.
        drafted: Draft tokens that the reference read.
        judged: Draft tokens that were verified.
        deferred: Verified tokens that the rule deferred to the reference.
        accepted: Verified tokens that were kept.
        contexts: Contexts that the reference read beside the full one.
        flops_paper: Operations by the paper's count: a draft pass for a kept token, a reference pass for any other one,
            and both models read the prompt. Only this count shows savings.
        flops_honest: Operations of all passes made.
        flops_reference: Operations of the reference alone for an answer of this length.
    """

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    judged: int = 0
    deferred: int = 0
    accepted: int = 0
    contexts: int = 0
    flops_paper: float = 0.0
    flops_honest: float = 0.0
    flops_reference: float = 0.0


@dataclass
class ReferenceViews:
    """The reference model with a restricted context at each position of an answer."""

    model: TokenModel
    prompt: Prompt
    view: View
    stats: DecodingStats
    _open: dict[frozenset[int], DecodingSession] = field(default_factory=dict)

    def read(self, copied: frozenset[int], answer: Sequence[int], last: int) -> Logits:
        """Returns the logits after the last positions of an answer, (last, V), while these chunks are copied.

        A context is read when it is first needed.
        """
        key = copied if self.view != "same" else frozenset[int]()
        if key not in self._open:
            self.stats.contexts += bool(key)
            self._evict()
            self._open[key] = self.model.begin([self.model.encode(reference_prompt(self.prompt, self.view, key))])
        before = self._open[key].flops
        logits: Logits = self._open[key].read(answer, last)[0]
        self.stats.passes += 1
        self.stats.flops_honest += self._open[key].flops - before
        return logits

    def _evict(self) -> None:
        """Closes the oldest context other than the full one."""
        partial = [key for key in self._open if key]
        if len(partial) >= MAX_VIEWS - 1:
            del self._open[partial[0]]


class CascadeDecoding:
    """The decoding of one answer. Not thread-safe.

    Args:
        models: The draft, which sees the full context, and the reference, with the same vocabulary.
        prompt: Question and context.
        settings: Settings.
        copying: The chunks of the context, in order, as symbols of ``alphabet``.
        alphabet: Equivalence of tokens.
        rng: Samples the tokens.

    Raises:
        BackendError: If the prompt is too long for one of the models.
    """

    def __init__(
        self,
        models: tuple[TokenModel, TokenModel],
        prompt: Prompt,
        settings: DecodingSettings,
        copying: CopyDetector,
        alphabet: Alphabet,
        rng: np.random.Generator,
    ) -> None:
        self.draft, self.reference = models
        self.settings, self.copying, self.alphabet, self._rng = settings, copying, alphabet, rng
        self.ends = frozenset(self.draft.ends) | frozenset(self.reference.ends)
        self.tokens: list[int] = []
        self.state: CopyState = copying.start()
        self.stats = DecodingStats()
        encoded = self.draft.encode(prompt)
        self.max_tokens = min(settings.max_tokens, *(self._room(model, prompt) for model in models))
        self._draft = self.draft.begin([encoded])
        self._views = ReferenceViews(self.reference, prompt, settings.view, self.stats)
        self._prompt_lengths = len(encoded), len(self.reference.encode(prompt))

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return len(self.tokens) >= self.max_tokens or bool(self.tokens and self.tokens[-1] in self.ends)

    @property
    def answer(self) -> list[int]:
        """The tokens so far, without the end token."""
        return self.tokens[:-1] if self.tokens and self.tokens[-1] in self.ends else self.tokens

    def block(self) -> list[int]:
        """Decodes at least one more token; returns the new tokens. Call it until ``finished``."""
        drafted, draft_distributions = self._draft_block()
        references = _ReferenceBlock(self, drafted)
        new: list[int] = []
        state, kept = self.state, True
        for proposed, q in zip(drafted, draft_distributions, strict=True):
            token, kept = self._verify(proposed, q, references.distribution(state, len(new)), state)
            new.append(token)
            state = self._step(state, token)
            if not kept:
                break
        if kept and len(self.tokens) + len(new) < self.max_tokens and new[-1] not in self.ends:
            token = self._bonus(drafted, references.distribution(state, len(new)), state)
            new.append(token)
            state = self._step(state, token)
        self._count(new, len(drafted), kept)
        self.tokens += new
        self.state = state
        return new

    def copies(self, state: CopyState) -> list[Tokens]:
        """Returns, for each chunk being copied, the tokens that would continue the copy."""
        return [self.alphabet.tokens(self.copying.continuations(state, z)) for z in self.copying.copied_chunks(state)]

    def copied(self, state: CopyState) -> frozenset[int]:
        """Returns the chunks hidden from the reference here: all copied so far, while one of them is being copied."""
        return state.copied if self.copying.copied_chunks(state) else frozenset()

    def _draft_block(self) -> tuple[list[int], list[Distribution]]:
        """Returns the draft tokens of a block, and the distribution of each."""
        tokens: list[int] = []
        distributions: list[Distribution] = []
        while len(tokens) < min(self.settings.gamma, self.max_tokens - len(self.tokens)):
            distributions.append(self._draft_distribution(tokens))
            tokens.append(self._select(distributions[-1]))
            if tokens[-1] in self.ends:
                break
        return tokens, distributions

    def _draft_distribution(self, tokens: Sequence[int]) -> Distribution:
        before = self._draft.flops
        distribution = self.distribution(self._draft.read([*self.tokens, *tokens])[0, -1])
        self.stats.flops_honest += self._draft.flops - before
        return distribution

    def _verify(self, token: int, q: Distribution, p: Distribution, state: CopyState) -> tuple[int, bool]:
        """Returns the token at this position, and whether it is the draft token."""
        deferred = self.settings.rule.deferred(q, p, self.copies(state))
        pi = target_distribution(q, p, deferred)
        self.stats.judged += 1
        self.stats.deferred += bool(deferred[token])
        if not self.settings.temperature:
            likeliest = int(pi.argmax())
            return likeliest, likeliest == token
        probability = acceptance_probability(pi, q, token)
        if self._sample(np.array([1 - probability, probability])):
            return token, True
        return self._sample(residual_distribution(pi, q)), False

    def _bonus(self, drafted: Sequence[int], p: Distribution, state: CopyState) -> int:
        if self.settings.bonus == "verifier":
            return self._select(p)
        q = self._draft_distribution(drafted)
        return self._select(target_distribution(q, p, self.settings.rule.deferred(q, p, self.copies(state))))

    def distribution(self, logits: Logits) -> Distribution:
        """Returns the distribution of the next token, at the temperature of the rule."""
        return softmax(logits, self.settings.temperature or 1.0)

    def _select(self, distribution: Distribution) -> int:
        return self._sample(distribution) if self.settings.temperature else int(distribution.argmax())

    def _sample(self, distribution: Distribution) -> int:
        return sample_token(distribution, self._rng.random())

    def _step(self, state: CopyState, token: int) -> CopyState:
        return self.copying.step(state, int(self.alphabet.symbols[token]))

    def _room(self, model: TokenModel, prompt: Prompt) -> int:
        """Returns the maximum length of the answer for a model, for any of its contexts."""
        if model.limit is None:
            return self.settings.max_tokens
        everything = frozenset(range(len(prompt.context)))
        hidden = reference_prompt(prompt, self.settings.view, everything)
        length = max(len(model.encode(p)) for p in ([prompt, hidden] if model is self.reference else [prompt]))
        if length >= model.limit:
            raise BackendError(
                f"the prompt has {length} tokens, and a model of the cascade reads at most {model.limit}; "
                "use fewer or shorter documents, or models with a longer context",
                backend="cascade",
                retryable=False,
            )
        return model.limit - length

    def _count(self, new: Sequence[int], drafted: int, kept: bool) -> None:
        """Updates the costs."""
        stats, (q, p) = self.stats, self._prompt_lengths
        accepted = min(len(new), drafted) - (not kept)
        if not self.tokens:
            stats.flops_paper += self.draft.flops(q, 0) + self.reference.flops(p, 0)
            stats.flops_reference += self.reference.flops(p, 0)
        at = len(self.tokens)
        stats.flops_paper += self.draft.flops(accepted, q + at)
        stats.flops_paper += self.reference.flops(len(new) - accepted, p + at + accepted)
        stats.flops_reference += self.reference.flops(len(new), p + at)
        stats.tokens += len(new)
        stats.drafted += drafted
        stats.accepted += accepted


class _ReferenceBlock:
    """The reference's distributions at the positions of one block; each context is read once, when needed."""

    def __init__(self, decoding: CascadeDecoding, drafted: Sequence[int]) -> None:
        self._decoding, self._drafted = decoding, drafted
        self._read: dict[frozenset[int], tuple[int, Logits]] = {}

    def distribution(self, state: CopyState, position: int) -> Distribution:
        """Returns the distribution after ``position`` tokens of the block, which led to this state."""
        key = self._decoding.copied(state)
        if key not in self._read:
            answer = [*self._decoding.tokens, *self._drafted]
            self._read[key] = position, self._decoding._views.read(key, answer, len(self._drafted) + 1 - position)
        first, logits = self._read[key]
        return self._decoding.distribution(logits[position - first])


def reference_prompt(prompt: Prompt, view: View, copied: frozenset[int]) -> Prompt:
    """Returns the prompt of the reference while documents of the context are copied.

    Args:
        prompt: The prompt of the draft.
        view: ``same``: unchanged. ``ablated``: without these documents. ``summary``: with their topics instead.
            ``guarded``: all, with an instruction not to quote.
        copied: Positions of these documents in the context.
    """
    if not copied or view == "same":
        return prompt
    if view == "guarded":
        return replace(prompt, instructions=f"{prompt.instructions} {GUARDED}".strip())
    if view == "ablated":
        return replace(prompt, context=tuple(d for z, d in enumerate(prompt.context) if z not in copied))
    context = (
        replace(d, title="", text=f"A document about: {describe_topic(d.text, d.title)}.") if z in copied else d
        for z, d in enumerate(prompt.context)
    )
    return replace(prompt, context=tuple(context))
