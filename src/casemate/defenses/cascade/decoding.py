"""Block-speculative decoding of one answer by a draft model and a reference (RAGFort, Algorithm 1, repaired).

In a block the draft model draws some tokens; the reference reads them all in one pass; each is judged in turn, and
the first that is not kept is drawn anew and ends the block. If all are kept, a bonus token follows.

Deviation: lines 1-3 never draw what is judged later; here x ~ q.
Deviation: the loops of lines 5 and 10 run over different places; here the reference gives the laws of one place more
than was drafted, and the last is the bonus token's.
Deviation: line 14 accepts with p / q, which is right only if r is the same for all tokens; here with pi / q.
Deviation: lines 22 and 24 contradict the text on the bonus token: it comes from the reference's law, as the text
says, or from pi (``bonus``). With the latter every token of an answer is drawn from pi.
Deviation: at temperature 0 the laws would be all or nothing, and the rule with them; here the rule is applied to the
laws of temperature 1, and the likeliest token of pi is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np

from casemate.cascade import Law, Rule, Tokens, acceptance, draw, mixture, residual, softmax
from casemate.copying import Alphabet, Copying, State
from casemate.errors import BackendError
from casemate.protocols import Logits, Reading, TokenModel
from casemate.types import Prompt
from casemate.words import headline

View: TypeAlias = Literal["same", "ablated", "summary", "guarded"]
Bonus: TypeAlias = Literal["verifier", "mixture"]
GUARDED = "Tell it in words of your own: never write more than a few words as they stand in a document."
KEPT_VIEWS = 3
"""Contexts of the reference that are held at a time; each has its own cache of keys and values."""


@dataclass(frozen=True, slots=True)
class Method:
    """How answers are decoded.

    Attributes:
        rule: Which tokens the reference settles.
        view: What the reference sees in place of the chunks that are being copied.
        gamma: Tokens that are drafted in a block.
        bonus: Where the token after a block comes from that was kept whole.
        temperature: 0: the likeliest tokens.
        most: Longest answer.
    """

    rule: Rule
    view: View = "ablated"
    gamma: int = 4
    bonus: Bonus = "verifier"
    temperature: float = 0.0
    most: int = 512


@dataclass(slots=True)
class Figures:
    """What one answer took.

    Attributes:
        tokens: How long it is, its end included.
        passes: Passes of the reference.
        drafted: Tokens that the draft model drew and the reference read.
        judged: Those of them that came to be judged.
        deferred: Those of the judged that the rule left to the reference.
        accepted: Those of the judged that were kept.
        contexts: Contexts that the reference read, beside the whole one.
        flops_paper: Operations if kept tokens cost a pass of the draft and others one of the reference, as the paper
            must count to save any; both read the prompt.
        flops_honest: Operations of all passes that were made.
        flops_reference: What the reference alone would have taken for an answer of this length.
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
class Views:
    """The reference, behind what it may see at each place of an answer."""

    model: TokenModel
    prompt: Prompt
    view: View
    figures: Figures
    _open: dict[frozenset[int], Reading] = field(default_factory=dict)

    def read(self, copied: frozenset[int], answer: Sequence[int], last: int) -> Logits:
        """Logits after the last places of an answer, (last, V), while these chunks are being copied.

        A context that is needed for the first time is read now, not before.
        """
        key = copied if self.view != "same" else frozenset[int]()
        if key not in self._open:
            self.figures.contexts += bool(key)
            self._forget()
            self._open[key] = self.model.begin([self.model.encode(shown(self.prompt, self.view, key))])
        before = self._open[key].flops
        logits: Logits = self._open[key].read(answer, last)[0]
        self.figures.passes += 1
        self.figures.flops_honest += self._open[key].flops - before
        return logits

    def _forget(self) -> None:
        """Lets go of the oldest context, but for the whole one."""
        partial = [key for key in self._open if key]
        if len(partial) >= KEPT_VIEWS - 1:
            del self._open[partial[0]]


class Decoding:
    """One answer in the making. Not to be shared by threads.

    Args:
        draft: The small model, which sees the whole context.
        reference: The large one, of the same vocabulary.
        prompt: What is asked, from what.
        method: How it is decoded.
        copying: The chunks of the context, in its order, as symbols of ``alphabet``.
        alphabet: Which tokens count as the same.
        rng: Draws the tokens, where they are drawn.

    Raises:
        BackendError: If the prompt is too long for one of the models.
    """

    def __init__(
        self,
        models: tuple[TokenModel, TokenModel],
        prompt: Prompt,
        method: Method,
        copying: Copying,
        alphabet: Alphabet,
        rng: np.random.Generator,
    ) -> None:
        self.draft, self.reference = models
        self.method, self.copying, self.alphabet, self._rng = method, copying, alphabet, rng
        self.ends = frozenset(self.draft.ends) | frozenset(self.reference.ends)
        self.said: list[int] = []
        self.state: State = copying.start()
        self.figures = Figures()
        given = self.draft.encode(prompt)
        self.room = min(method.most, *(self._room(model, prompt) for model in models))
        self._draft = self.draft.begin([given])
        self._views = Views(self.reference, prompt, method.view, self.figures)
        self._prompts = len(given), len(self.reference.encode(prompt))

    @property
    def finished(self) -> bool:
        """Whether the answer is at its end."""
        return len(self.said) >= self.room or bool(self.said and self.said[-1] in self.ends)

    @property
    def answer(self) -> list[int]:
        """The tokens so far, without the end's."""
        return self.said[:-1] if self.said and self.said[-1] in self.ends else self.said

    def block(self) -> list[int]:
        """Decides on at least one more token; returns what is new. To be called until ``finished``."""
        drafted, laws = self._drafted()
        references = _Block(self, drafted)
        new: list[int] = []
        state, kept = self.state, True
        for proposed, q in zip(drafted, laws, strict=True):
            token, kept = self._judged(proposed, q, references.law(state, len(new)), state)
            new.append(token)
            state = self._stepped(state, token)
            if not kept:
                break
        if kept and len(self.said) + len(new) < self.room and new[-1] not in self.ends:
            token = self._bonus(drafted, references.law(state, len(new)), state)
            new.append(token)
            state = self._stepped(state, token)
        self._count(new, len(drafted), kept)
        self.said += new
        self.state = state
        return new

    def copies(self, state: State) -> list[Tokens]:
        """For each chunk that is being copied, the tokens that would carry that on."""
        return [self.alphabet.tokens(self.copying.extending(state, z)) for z in self.copying.active(state)]

    def copied(self, state: State) -> frozenset[int]:
        """The chunks that the reference must not see at this place: all copied so far, while one of them is."""
        return state.copied if self.copying.active(state) else frozenset()

    def _drafted(self) -> tuple[list[int], list[Law]]:
        """The tokens that the draft model draws, and the law that each was drawn from."""
        tokens: list[int] = []
        laws: list[Law] = []
        while len(tokens) < min(self.method.gamma, self.room - len(self.said)):
            laws.append(self._draft_law(tokens))
            tokens.append(self._picked(laws[-1]))
            if tokens[-1] in self.ends:
                break
        return tokens, laws

    def _draft_law(self, tokens: Sequence[int]) -> Law:
        before = self._draft.flops
        law = self.law(self._draft.read([*self.said, *tokens])[0, -1])
        self.figures.flops_honest += self._draft.flops - before
        return law

    def _judged(self, token: int, q: Law, p: Law, state: State) -> tuple[int, bool]:
        """The token that stands at this place, and whether it is the drafted one."""
        deferred = self.method.rule.deferred(q, p, self.copies(state))
        pi = mixture(q, p, deferred)
        self.figures.judged += 1
        self.figures.deferred += bool(deferred[token])
        if not self.method.temperature:
            likeliest = int(pi.argmax())
            return likeliest, likeliest == token
        kept = acceptance(pi, q, token)
        if self._drawn(np.array([1 - kept, kept])):
            return token, True
        return self._drawn(residual(pi, q)), False

    def _bonus(self, drafted: Sequence[int], p: Law, state: State) -> int:
        if self.method.bonus == "verifier":
            return self._picked(p)
        q = self._draft_law(drafted)
        return self._picked(mixture(q, p, self.method.rule.deferred(q, p, self.copies(state))))

    def law(self, logits: Logits) -> Law:
        """The law of the next token, at the temperature of the rule."""
        return softmax(logits, self.method.temperature or 1.0)

    def _picked(self, law: Law) -> int:
        return self._drawn(law) if self.method.temperature else int(law.argmax())

    def _drawn(self, law: Law) -> int:
        return draw(law, self._rng.random())

    def _stepped(self, state: State, token: int) -> State:
        return self.copying.step(state, int(self.alphabet.symbols[token]))

    def _room(self, model: TokenModel, prompt: Prompt) -> int:
        """How long the answer may be for a model, whatever it is shown."""
        if model.limit is None:
            return self.method.most
        everything = frozenset(range(len(prompt.context)))
        prompts = [prompt, shown(prompt, self.method.view, everything)] if model is self.reference else [prompt]
        given = max(len(model.encode(p)) for p in prompts)
        if given >= model.limit:
            raise BackendError(
                f"the prompt has {given} tokens, and a model of the cascade reads {model.limit}; "
                "give it fewer or shorter documents, or take models that read more",
                backend="cascade",
                retryable=False,
            )
        return model.limit - given

    def _count(self, new: Sequence[int], drafted: int, kept: bool) -> None:
        """Keeps the figures."""
        figures, (q, p) = self.figures, self._prompts
        accepted = min(len(new), drafted) - (not kept)
        if not self.said:
            figures.flops_paper += self.draft.flops(q, 0) + self.reference.flops(p, 0)
            figures.flops_reference += self.reference.flops(p, 0)
        at = len(self.said)
        figures.flops_paper += self.draft.flops(accepted, q + at)
        figures.flops_paper += self.reference.flops(len(new) - accepted, p + at + accepted)
        figures.flops_reference += self.reference.flops(len(new), p + at)
        figures.tokens += len(new)
        figures.drafted += drafted
        figures.accepted += accepted


class _Block:
    """The reference's laws at the places of one block, each context read once and only if it is needed."""

    def __init__(self, decoding: Decoding, drafted: Sequence[int]) -> None:
        self._decoding, self._drafted = decoding, drafted
        self._read: dict[frozenset[int], tuple[int, Logits]] = {}

    def law(self, state: State, place: int) -> Law:
        """What the reference expects after so many tokens of the block, which brought the answer to this state."""
        key = self._decoding.copied(state)
        if key not in self._read:
            answer = [*self._decoding.said, *self._drafted]
            self._read[key] = place, self._decoding._views.read(key, answer, len(self._drafted) + 1 - place)
        first, logits = self._read[key]
        return self._decoding.law(logits[place - first])


def shown(prompt: Prompt, view: View, copied: frozenset[int]) -> Prompt:
    """What the reference is shown while some documents of the context are being copied.

    Args:
        prompt: What the draft is shown.
        view: ``same``: all of it. ``ablated``: not those documents. ``summary``: in their place what they are about.
            ``guarded``: all, and that nothing is to be quoted.
        copied: Places of those documents in the context.
    """
    if not copied or view == "same":
        return prompt
    if view == "guarded":
        return replace(prompt, instructions=f"{prompt.instructions} {GUARDED}".strip())
    if view == "ablated":
        return replace(prompt, context=tuple(d for z, d in enumerate(prompt.context) if z not in copied))
    told = (
        replace(d, title="", text=f"A document about: {headline(d.text, d.title)}.") if z in copied else d
        for z, d in enumerate(prompt.context)
    )
    return replace(prompt, context=tuple(told))
