"""Constrained cascade: prevents extraction of chunks by making the model recite them.

Pan et al. 2026, "RAGFort: Dual-Path Defense Against Proprietary Knowledge Base Extraction in Retrieval-Augmented
Generation", AAAI, section 4.3. The token-specific rules are those of Narasimhan et al. 2025 (arXiv 2405.19261). A small
draft model proposes tokens and a large reference model checks them. Where the answer copies a chunk, the reference
decides.

Deviation: in the paper the reference has the same context as the draft. Instructed to recite, it recites, and a better
model recites more exactly. Here, by default, its context lacks the chunk that is being copied (``ablated``). No copy
token is then more than C + 1 times as likely as if the chunk had not been retrieved. ``same`` is the paper's view.

Deviation: the paper does not define when a chunk is copied. Here it is copied while a run of its tokens is as long as
``run``. From ``budget`` quoted tokens on, it is copied until the end of the answer. Short quotations remain possible.

Deviation: the paper has no cascade for models without token probabilities; see ``rewriting``. Further deviations are
documented in ``casemate.maths.cascade`` and ``decoding``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np

from casemate.errors import BackendError, CapabilityError, ConfigError, require_range
from casemate.guard import generation_costs
from casemate.guard.defenses.cascade.decoding import Bonus, CascadeDecoding, DecodingSettings, View
from casemate.guard.defenses.cascade.rewriting import RewritingGenerator, quotation_stats
from casemate.guard.token_models import require_token_model
from casemate.maths.cascade import DeferralRule, DeferralRuleName
from casemate.protocols import Defense, EventStore, Generator, Logits, TokenModel
from casemate.runtime.growing_text import stream_growth
from casemate.text.copying import Alphabet, CopyDetector
from casemate.types import Prompt

"""Decoding of a character whose last tokens are still missing."""
VIEWS = ("same", "ablated", "summary", "guarded")
ROUNDING = 0.1
"""Largest RMS difference of two readings of the same tokens, in standard deviations of the logits. Qwen2.5 0.5B in
bfloat16 differs by .02; another position of the same text differs by .65."""


@dataclass(eq=False)
class Cascade(Defense):
    """Prevents answers from quoting a document at length.

    With a ``draft`` model it decodes token by token and streams: the cascade generates the answer, and the configured
    generator is the reference, or unused. Without one, it measures each finished answer of any generator, and
    regenerates it from a context without the quoted documents; answers are then sent whole.

    Attributes:
        draft: A small model, such as ``{use: transformers, model: ...}``.
        reference: A large model with the same vocabulary; unset: the system's generator, if it provides probabilities.
        rule: Deferral rule, which selects the tokens that the reference decides: ``token_copy``, or for comparison
            ``paper``, ``excess``, ``opt``.
        reference_view: Context of the reference while documents are copied: ``ablated``: without them; ``summary``:
            with their topics instead; ``guarded``: all, with an instruction not to quote; ``same``: all.
        run: Maximum length of a quoted run, in tokens; without a draft, in words. At least 1.
        budget: Maximum number of quoted tokens of one document in an answer; unset (null): no limit.
        share: Maximum share of a document that may appear in an answer in order, with gaps, in (0, 1]; never fewer
            tokens than the budget.
        alpha: Cost of deferral to the reference, in [0, 1). For ``token_copy``: how much less likely than the
            reference's first choice a token of the draft may be.
        bound: C, in [1, 10): how many times likelier than under the reference a copy token of the draft may be.
        gamma: Draft tokens per block, at least 1.
        bonus: Distribution of the token after a block that was kept whole: ``verifier``, the reference's, or
            ``mixture``.
        temperature: 0: greedy decoding. Above 0: sampling.
        seed: Of the samples of each answer.
        max_tokens: Maximum length of an answer, at least 1.
        store: The system's; receives the costs of each answer.
    """

    draft: TokenModel | None = field(default=None, repr=False)
    reference: TokenModel | None = field(default=None, repr=False)
    rule: DeferralRuleName = "token_copy"
    reference_view: View = "ablated"
    run: int = 16
    budget: int | None = 24
    share: float = 0.3
    alpha: float = 0.1
    bound: float = float(np.e)
    gamma: int = 4
    bonus: Bonus = "verifier"
    temperature: float = 0.0
    seed: int = 0
    max_tokens: int = 512
    store: EventStore | None = field(default=None, repr=False)

    paper: ClassVar[str] = "Pan et al. 2026, RAGFort, AAAI, Section 4.3, eq. 5 and Algorithm 1"

    def __post_init__(self) -> None:
        if self.reference_view not in VIEWS or self.bonus not in {"verifier", "mixture"}:
            what = f"reference_view={self.reference_view!r}, bonus={self.bonus!r}"
            known = f"{', '.join(VIEWS)}; verifier, mixture"
            raise ConfigError(f"cascade: {what}; known: {known}")
        require_range("cascade", self, "gamma max_tokens", at_least=1)
        require_range("cascade", self, "temperature seed", at_least=0)
        if self.reference is not None and self.draft is None:
            raise ConfigError(
                "cascade has a reference model but no draft; set 'draft' to a small model of the same vocabulary"
            )
        rule = DeferralRule(self.rule, self.alpha, self.bound)
        self._copying((), ())  # validates its options at wiring
        self._settings = DecodingSettings(
            rule, self.reference_view, self.gamma, self.bonus, self.temperature, self.max_tokens
        )

    def on_generate(self, generator: Generator) -> Generator:
        """Replaces the generator by the cascade; without a draft model, wraps it.

        Raises:
            CapabilityError: If there is no reference, the vocabularies differ, or a model cannot rewind its cache.
        """
        if self.draft is None:
            if self.reference_view == "same":
                raise CapabilityError(
                    "cascade without a draft model regenerates answers from another context, so reference_view cannot "
                    "be 'same'; use ablated, summary or guarded, or set a draft model"
                )
            return RewritingGenerator(generator, self.reference_view, self.run, self.budget, self.share, self._append)
        instead = ", or remove 'draft' to measure whole answers instead"
        reference = require_token_model("cascade", self.reference, generator, instead, "reference")
        _require_one_vocabulary(self.draft, reference)
        for name, model in (("draft", self.draft), ("reference", reference)):
            _require_rewinding(name, model)
        return _CascadeGenerator((self.draft, reference), self._settings, self._copying, self.seed, self._append)

    def _copying(self, chunks: Sequence[Sequence[int]], question: Sequence[int]) -> CopyDetector:
        return CopyDetector(chunks, question, self.run, self.budget, self.share)

    def _append(self, prompt: Prompt, figures: dict[str, Any]) -> None:
        copied = [prompt.context[z].id for z in sorted(figures["copied"])]
        options = {"rule": self.rule, "view": self.reference_view}
        generation_costs.append(self.store, "cascade", prompt.request, options | figures | {"copied": copied})


class _CascadeGenerator(Generator):
    """Generates answers with draft and reference."""

    def __init__(
        self,
        models: tuple[TokenModel, TokenModel],
        settings: DecodingSettings,
        copying: Callable[[Sequence[Sequence[int]], Sequence[int]], CopyDetector],
        seed: int,
        append: Callable[[Prompt, dict[str, Any]], None],
    ) -> None:
        self._models, self._settings, self._copying, self._seed, self._append = models, settings, copying, seed, append
        reference = models[1]
        self._alphabet = Alphabet(reference.text([i]) for i in range(len(reference.vocabulary)))

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Streams the answer block by block; stops the models when the reader stops.

        Raises:
            BackendError: If the prompt is too long for one of the models, a model fails, or they write nothing.
        """
        decoding = await asyncio.to_thread(self.decoding, prompt)
        message = "the models of the cascade wrote nothing; use models trained to answer"
        try:
            empty = BackendError(message, backend="cascade", retryable=False)
            async for piece in stream_growth(self._texts(decoding), empty):
                yield piece
        finally:
            chunks = range(len(prompt.context))
            figures = quotation_stats(decoding.copying, decoding.state, chunks) | asdict(decoding.stats)
            self._append(prompt, {**figures, "mode": "token", "copied": decoding.state.copied})

    def decoding(self, prompt: Prompt) -> CascadeDecoding:
        """Returns a new decoding of the answer to a prompt.

        Tokenizes question and context, and seeds the random generator.
        """
        texts = [prompt.question, *(document.content for document in prompt.context)]
        question, *chunks = (
            self._alphabet.encode(self._models[1].tokens(" " + " ".join(text.split()))) for text in texts
        )
        rng = np.random.default_rng(self._seed)
        copying = self._copying(chunks, question)
        return CascadeDecoding(self._models, prompt, self._settings, copying, self._alphabet, rng)

    def _texts(self, decoding: CascadeDecoding) -> Iterator[str]:
        """The answer after each block."""
        while not decoding.finished:
            decoding.block()
            yield self._models[1].text(decoding.answer).lstrip()


def _require_one_vocabulary(draft: TokenModel, reference: TokenModel) -> None:
    q, p = draft.vocabulary, reference.vocabulary
    if tuple(q) == tuple(p):
        return
    position = next((i for i, (a, b) in enumerate(zip(q, p, strict=False)) if a != b), min(len(q), len(p)))
    raise CapabilityError(
        f"the draft has {len(q)} tokens and the reference {len(p)}, and they differ from token {position} on; "
        "use two models of one family with the same tokenizer"
    )


def _require_rewinding(name: str, model: TokenModel) -> None:
    """Tests that a model can rewind: reads tokens, rewinds and reads again, as after a rejected block."""
    tokens = (model.tokens("one two three four") * 4)[:4]
    session, fresh = model.begin([tokens]), model.begin([tokens])
    session.read(tokens)
    again, first = session.read(tokens[:1]), fresh.read(tokens[:1])
    if again.shape != (1, 1, len(model.vocabulary)) or not _are_equal_up_to_rounding(again, first):
        raise CapabilityError(
            f"the {name} model cannot rewind its cache, so draft tokens cannot be rejected; "
            "use a model with plain attention caches"
        )


def _are_equal_up_to_rounding(a: Logits, b: Logits) -> bool:
    """Whether two logits differ by at most `ROUNDING` of their spread (RMS), as after other orders of summation."""
    difference = np.subtract(a, b, out=np.zeros(b.shape), where=a != b)
    return bool(np.sqrt(np.mean(difference**2)) <= ROUNDING * np.std(b[np.isfinite(b)]))
