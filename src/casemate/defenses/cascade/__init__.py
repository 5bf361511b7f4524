"""The constrained cascade: no chunk is carried away by having the model recite it.

Pan et al. 2026, "RAGFort: Dual-Path Defense Against Proprietary Knowledge Base Extraction in Retrieval-Augmented
Generation", AAAI, section 4.3, with the token-specific rules of Narasimhan et al. 2025 (arXiv 2405.19261). A small
draft model proposes tokens, a large reference model checks them, and where the answer is copying a chunk the
reference decides.

Deviation: in the paper the reference sees what the draft sees. If it is told to recite, it recites, and the better it
is the more faithfully. Here, by default, it has not seen the chunk that is being copied (``ablated``): no copy token
is then more than C + 1 times as likely as if the chunk had never been retrieved. ``same`` is the paper's.
Deviation: the paper has no notion of being copied. Here a chunk is, while a run of its tokens is as long as ``run``,
and from when ``budget`` of them are quoted to the end of the answer: short quotations stay possible.
Deviation: the paper has no cascade for models that show no probabilities; see ``rewriting``. Other deviations are
told in ``casemate.cascade`` and in ``decoding``.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar, cast

import numpy as np

from casemate.cascade import Rule, RuleName
from casemate.copying import Alphabet, Copying
from casemate.defenses.cascade.decoding import Bonus, Decoding, Method, View
from casemate.defenses.cascade.rewriting import Rewriting, measured
from casemate.errors import CapabilityError, ConfigError
from casemate.protocols import Defense, EventStore, Generator, TokenModel
from casemate.types import Event, Prompt

log = logging.getLogger(__name__)

HALF = "\ufffd"  # what a character decodes to, of which some tokens are still to come
VIEWS = ("same", "ablated", "summary", "guarded")


@dataclass(eq=False)
class Cascade(Defense):
    """Keeps answers from quoting a document at length.

    With a ``draft`` model, token by token, and streaming: the answer is the cascade's, and the configured generator
    serves as reference, or is not used. Without one, the answers of any generator are measured when they are finished,
    and written again from a context without what they quote; then an answer comes whole.

    Attributes:
        draft: A small model, such as ``{use: transformers, model: ...}``.
        reference: A large model with the same vocabulary; unset: the system's generator, if it is one.
        rule: Which tokens the reference settles: ``token_copy``, or for comparison ``paper``, ``excess``, ``opt``.
        reference_view: What the reference sees while documents are being copied: ``ablated``: the others; ``summary``:
            what they are about; ``guarded``: all, with a word not to quote; ``same``: all.
        run: Tokens that may be quoted in one piece; without a draft, words. At least 1.
        budget: Tokens of one document that may be quoted in one answer; unset (null): any number.
        share: Share of a document that may stand in an answer in order, whatever stands between, in (0, 1]; never
            fewer tokens than the budget.
        alpha: Cost of asking the reference, in [0, 1); ``token_copy``: how much less likely than the reference's first
            choice a token may be and still be the draft's to settle.
        bound: C, in [1, 10): how many times likelier than with the reference a copy token may be, to be the draft's.
        gamma: Tokens drafted at a time, at least 1.
        bonus: Whence the token after a block that was kept whole: ``verifier``, the reference's law, or ``mixture``.
        temperature: 0: the likeliest tokens. Above 0: tokens are drawn, more freely the higher it is.
        seed: Starts the draws of each answer.
        max_tokens: Longest answer, at least 1.
        store: The system's; the figures of each answer are noted there.
    """

    draft: TokenModel | None = field(default=None, repr=False)
    reference: TokenModel | None = field(default=None, repr=False)
    rule: RuleName = "token_copy"
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
        if self.gamma < 1 or self.max_tokens < 1 or self.temperature < 0 or self.seed < 0:
            raise ConfigError(
                f"cascade needs gamma > 0, max_tokens > 0, temperature >= 0 and seed >= 0, got gamma={self.gamma}, "
                f"max_tokens={self.max_tokens}, temperature={self.temperature}, seed={self.seed}"
            )
        if self.reference is not None and self.draft is None:
            raise ConfigError("cascade has a reference model and no draft; name a small model of the same vocabulary")
        rule = Rule(self.rule, self.alpha, self.bound)
        self._copying((), ())  # what is wrong with these shows at wiring
        self._method = Method(rule, self.reference_view, self.gamma, self.bonus, self.temperature, self.max_tokens)

    def on_generate(self, generator: Generator) -> Generator:
        """The cascade in place of the generator, or, without a draft model, behind it.

        Raises:
            CapabilityError: If there is no reference, the two vocabularies are not the same, or a model cannot take
                back what it has read.
        """
        if self.draft is None:
            if self.reference_view == "same":
                raise CapabilityError(
                    "cascade without a draft model writes answers again from another context, and reference_view "
                    "'same' is no other: take ablated, summary or guarded, or name a draft model"
                )
            return Rewriting(generator, self.reference_view, self.run, self.budget, self.share, self._note)
        reference = self.reference or _token_model(generator)
        _require_one_vocabulary(self.draft, reference)
        for name, model in (("draft", self.draft), ("reference", reference)):
            _require_rewinding(name, model)
        return _Cascaded((self.draft, reference), self._method, self._copying, self.seed, self._note)

    def _copying(self, chunks: Sequence[Sequence[int]], question: Sequence[int]) -> Copying:
        return Copying(chunks, question, self.run, self.budget, self.share)

    def _note(self, prompt: Prompt, figures: dict[str, Any]) -> None:
        """Hands the figures of an answer to the store. No text is among them."""
        if self.store is None:
            return
        copied = [prompt.context[z].id for z in sorted(figures["copied"])]
        body = {"defense": "cascade", "request": prompt.request, "rule": self.rule, "view": self.reference_view}
        try:
            event = Event(uuid.uuid4().hex, datetime.now(UTC), "generation", body | figures | {"copied": copied})
            self.store.append(event)
        except Exception as error:  # a record that cannot be kept must not cost anybody an answer
            log.error("the figures of an answer were not noted: %s", type(error).__name__)


class _Cascaded(Generator):
    """Writes answers by draft and reference."""

    def __init__(
        self,
        models: tuple[TokenModel, TokenModel],
        method: Method,
        copying: Callable[[Sequence[Sequence[int]], Sequence[int]], Copying],
        seed: int,
        note: Callable[[Prompt, dict[str, Any]], None],
    ) -> None:
        self._models, self._method, self._copying, self._seed, self._note = models, method, copying, seed, note
        reference = models[1]
        self._alphabet = Alphabet(reference.text([i]) for i in range(len(reference.vocabulary)))

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """The answer, block by block. Whoever stops asking stops the models.

        Raises:
            BackendError: If the prompt is too long for one of the models, or a model fails.
        """
        decoding = await asyncio.to_thread(self.decoding, prompt)
        sent = 0
        try:
            while not decoding.finished:
                await asyncio.to_thread(decoding.block)
                text = self._text(decoding)
                if len(text) > sent and not text.endswith(HALF):
                    yield text[sent:]
                    sent = len(text)
            if rest := self._text(decoding)[sent:]:
                yield rest
        finally:
            chunks = range(len(prompt.context))
            figures = measured(decoding.copying, decoding.state, chunks) | asdict(decoding.figures)
            self._note(prompt, {**figures, "mode": "token", "copied": decoding.state.copied})

    def decoding(self, prompt: Prompt) -> Decoding:
        """An answer, not begun."""
        texts = [prompt.question, *(document.content for document in prompt.context)]
        question, *chunks = (self._alphabet.read(self._models[1].tokens(_line(text))) for text in texts)
        rng = np.random.default_rng(self._seed)
        return Decoding(self._models, prompt, self._method, self._copying(chunks, question), self._alphabet, rng)

    def _text(self, decoding: Decoding) -> str:
        return self._models[1].text(decoding.answer).lstrip()


def _token_model(generator: Generator) -> TokenModel:
    if TokenModel not in type(generator).__mro__:
        raise CapabilityError(
            f"cascade needs a reference model: {type(generator).__name__} shows no probabilities; name one, or "
            "leave draft out, and whole answers are measured instead"
        )
    return cast(TokenModel, generator)


def _line(text: str) -> str:
    """A text as it is when it is recited: in one line, each word with a space before it."""
    return " " + " ".join(text.split())


def _require_one_vocabulary(draft: TokenModel, reference: TokenModel) -> None:
    q, p = draft.vocabulary, reference.vocabulary
    if tuple(q) == tuple(p):
        return
    place = next((i for i, (a, b) in enumerate(zip(q, p, strict=False)) if a != b), min(len(q), len(p)))
    raise CapabilityError(
        f"the draft has {len(q)} tokens and the reference {len(p)}, and they differ from token {place} on: "
        "a cascade needs two models of one family, with the same tokenizer"
    )


def _require_rewinding(name: str, model: TokenModel) -> None:
    """Reads, takes back and reads again, as in a block that is not kept."""
    tokens = (model.tokens("one two three four") * 4)[:4]
    reading, fresh = model.begin([tokens]), model.begin([tokens])
    reading.read(tokens)
    again, first = reading.read(tokens[:1]), fresh.read(tokens[:1])
    if again.shape != (1, 1, len(model.vocabulary)) or not np.allclose(again, first, rtol=0.05, atol=0.05):
        raise CapabilityError(
            f"the {name} model cannot take back what it has read, so drafted tokens cannot be tried: "
            "take a model with plain attention caches"
        )
