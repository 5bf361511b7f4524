"""RobustRAG: isolated answers to each passage, aggregated by keywords or token by token. A baseline of ``quorum``.

Xiang et al. 2024, "Certifiably Robust RAG against Retrieval Corruption" (arXiv 2405.15556). Keyword aggregation: words
that enough isolated answers contain; the model writes the answer from them. Decoding aggregation: the next token with
the highest joint probability over the passages. Where they do not agree, it is the model's token without passages.

Keywords, counts and the composition by rules are those of ``quorum``. With as many answers as its threshold needs, and
without jitter and equal units, both release the same words.

Deviation: keywords are those of ``quorum.keywords``: content words, numbers and names. Words of the question do not
count. The authors take phrases by parts of speech, with spaCy.

Deviation: without a ``writer``, the best sentences of a passage are its answer, and rules compose the final answer.

Deviation: if no word is released, the answer is unknown. The authors then ask the model without keywords.

Deviation: decoding forbids no first tokens. The authors forbid three that their models begin refusals with.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias, get_args

import numpy as np

from casemate.errors import BackendError, ConfigError, require_range
from casemate.guard import generation_costs
from casemate.guard.defenses.quorum.isolated import IsolatedAnswers
from casemate.guard.defenses.quorum.keywords import (
    AskedQuestion,
    Item,
    Word,
    read_text,
    statements,
    unit_statements,
)
from casemate.guard.defenses.quorum.release import Release, Thresholds, compose
from casemate.guard.token_models import require_token_model
from casemate.maths.cascade import softmax
from casemate.protocols import DecodingSession, Defense, EventStore, Generator, Logits, TokenModel
from casemate.rag.pipeline import closing_stream
from casemate.runtime.growing_text import stream_growth
from casemate.types import UNKNOWN, Document, Float64, Prompt

NAME = "robust_rag"
Aggregation: TypeAlias = Literal["keywords", "decoding"]
MOST_KEYWORDS = 64
"""Keywords of one isolated answer: in effect no limit, as in the paper."""
SENTENCES = 2
ABSTAINS = 0.99
"""Probability of "I don't know." above which a passage does not take part in decoding."""
WRITE = (
    "Answer the question in at most two short sentences, with the help of the keywords in the document. They come from "
    f"several sources. When they do not answer the question, say: {UNKNOWN}"
)


@dataclass(eq=False)
class RobustRAG(Defense):
    """Answers from each passage alone, and aggregates these answers.

    Attributes:
        aggregation: ``keywords`` or ``decoding``.
        share: alpha: share of the answers, in (0, 1], that must contain a keyword; abstentions do not count.
        most: beta: number of answers that always suffices, at least 1.
        margin: eta: smallest lead of a token's summed probability in decoding, at least 0.
        tokens: Largest length of an answer in decoding, at least 1.
        writer: For keywords: a generator that answers from each passage alone and writes from keywords. None: rules.
        writer_s: Seconds, above 0, after which a passage whose answer the writer has not finished abstains, and after
            which the answer from keywords fails. Set it below half of ``gateway.timeout_s``.
        model: For decoding: the language model; none: the system's generator, if it provides token probabilities.
        store: The system's; receives the costs of isolated answers.
    """

    aggregation: Aggregation = "keywords"
    share: float = 0.3
    most: int = 3
    margin: float = 0.0
    tokens: int = 64
    writer: Generator | None = field(default=None, repr=False)
    writer_s: float = 50.0
    model: TokenModel | None = field(default=None, repr=False)
    store: EventStore | None = field(default=None, repr=False)

    paper: ClassVar[str] = "Xiang et al. 2024, RobustRAG, arXiv 2405.15556"

    def __post_init__(self) -> None:
        if self.aggregation not in get_args(Aggregation):
            allowed = ", ".join(get_args(Aggregation))
            raise ConfigError(f"{NAME}.aggregation is {self.aggregation!r}; allowed are {allowed}")
        require_range(NAME, self, "share", above=0, at_most=1)
        require_range(NAME, self, "most tokens", at_least=1)
        require_range(NAME, self, "margin", at_least=0)
        require_range(NAME, self, "writer_s", above=0)

    def on_generate(self, generator: Generator) -> Generator:
        """Replaces the generator by the aggregation.

        Raises:
            CapabilityError: If decoding has no model with token probabilities.
        """
        if self.aggregation == "keywords":
            return _Keywords(self)
        model = require_token_model(NAME, self.model, generator, ", or aggregation: keywords")
        return _Decoding(model, self.margin, self.tokens)

    def threshold(self, answers: int) -> int:
        """Returns the number of answers that must contain a keyword: min(alpha n, beta), rounded up, at least 1.

        Args:
            answers: n: isolated answers without abstentions.

        >>> [RobustRAG().threshold(n) for n in (1, 3, 4, 6, 7, 10, 20)]
        [1, 1, 2, 2, 3, 3, 3]
        """
        return max(1, math.ceil(min(self.share * answers, self.most) - 1e-9))


class _Keywords(Generator):
    """Keyword aggregation."""

    def __init__(self, defense: RobustRAG) -> None:
        self._defense, self._writer = defense, defense.writer
        self._isolated = None if defense.writer is None else IsolatedAnswers(defense.writer, defense.writer_s)

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Streams the answer.

        Raises:
            BackendError: If the writer fails, or does not finish the answer from the keywords in time.
        """
        question = AskedQuestion.of(prompt.question)
        said = [items for items in await self._said(prompt, question) if items]
        release = Release.of(said, Thresholds(self._defense.threshold(len(said))))
        keywords = sorted(item.lemma for item in release.levels if isinstance(item, Word))
        if self._writer is None or not keywords:
            yield compose(question, release.levels).text
            return
        hints = Document(NAME, "; ".join(keywords))
        written = self._writer.stream(replace(prompt, context=(hints,), instructions=WRITE))
        async for piece in _within(written, self._defense.writer_s):
            yield piece

    async def _said(self, prompt: Prompt, question: AskedQuestion) -> Sequence[Collection[Item]]:
        """What each passage states; nothing if it abstains."""
        if self._isolated is None:
            return [unit_statements(question, d, SENTENCES, MOST_KEYWORDS) for d in prompt.context]
        answers, costs = await self._isolated.ask(prompt.question, prompt.context)
        generation_costs.append(self._defense.store, NAME, prompt.request, costs)
        return [statements(question, read_text(answer), MOST_KEYWORDS) for answer in answers]


async def _within(stream: AsyncIterator[str], seconds: float) -> AsyncIterator[str]:
    """Passes a stream on. Raises ``BackendError`` if it has not ended after this time."""
    deadline = asyncio.get_running_loop().time() + seconds
    async with closing_stream(stream):
        while (piece := await _next_piece(stream, deadline)) is not None:
            yield piece


async def _next_piece(stream: AsyncIterator[str], deadline: float) -> str | None:
    """The next piece; None at the end."""
    try:
        async with asyncio.timeout_at(deadline):
            return await anext(stream, None)
    except TimeoutError:
        message = f"{NAME}: the writer has not finished after writer_s; the answer is incomplete"
        raise BackendError(message, backend=NAME, retryable=True) from None


@dataclass(frozen=True, slots=True)
class _Decoding(Generator):
    """Decoding aggregation."""

    model: TokenModel
    margin: float
    tokens: int

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Streams the answer token by token.

        Raises:
            BackendError: If a passage is too long for the model, or the model fails.
        """
        prompts = await asyncio.to_thread(self._heard, prompt)
        if len(prompts) < 2:
            yield UNKNOWN
            return
        async for piece in stream_growth(self._texts(prompts)):
            yield piece

    def _texts(self, prompts: Sequence[Sequence[int]]) -> Iterator[str]:
        """The answer after each token."""
        session, limit = self.model.begin(prompts), self.model.limit
        room = self.tokens if limit is None else min(self.tokens, limit - max(map(len, prompts)))
        answer: list[int] = []
        while len(answer) < room and (token := self._next(session, answer)) not in self.model.ends:
            answer.append(token)
            yield self.model.text(answer).lstrip()

    def _heard(self, prompt: Prompt) -> list[list[int]]:
        """Token ids of the passages that do not abstain, one prompt for each, and of no passage, which is last."""
        alone = [self.model.encode(replace(prompt, context=(document,))) for document in prompt.context]
        unknown = self.model.tokens(UNKNOWN)
        declines = self._probabilities(alone, unknown) if alone and unknown else np.zeros(len(alone))
        heard = [ids for ids, p in zip(alone, declines, strict=True) if p <= ABSTAINS]
        return [*heard, self.model.encode(replace(prompt, context=()))]

    def _probabilities(self, prompts: Sequence[Sequence[int]], answer: Sequence[int]) -> Float64:
        """The probability of an answer after each prompt, (n,)."""
        logits = self.model.begin(prompts).read(answer, len(answer) + 1)[:, :-1]
        found: Float64 = softmax(logits)[:, np.arange(len(answer)), list(answer)].prod(axis=1)
        return found

    def _next(self, session: DecodingSession, answer: Sequence[int]) -> int:
        """The token that leads the sum of the passages' probabilities by the margin, or the one without passages."""
        logits = session.read(answer)[:, -1]
        return aggregated_token(softmax(logits[:-1]), int(logits[-1].argmax()), self.margin)


def aggregated_token(probabilities: Float64 | Logits, otherwise: int, margin: float) -> int:
    """Returns the token with the largest summed probability if it leads the second by more than the margin.

    Args:
        probabilities: Of the next token by passage, (passages, vocabulary).
        otherwise: The token without passages.
        margin: eta.

    >>> import numpy as np
    >>> favored = np.array([[0.7, 0.3, 0.0], [0.6, 0.4, 0.0], [0.0, 0.9, 0.1]])
    >>> aggregated_token(favored, 2, 0.2), aggregated_token(favored, 2, 0.5)
    (1, 2)
    """
    sums = probabilities.sum(axis=0)
    second, first = np.sort(sums)[-2:]
    return int(sums.argmax()) if first - second > margin else otherwise
