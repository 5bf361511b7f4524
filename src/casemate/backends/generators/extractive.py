"""Extractive answers without a language model: the sentences of the context that answer, with their sources.

The offline default. A linear model of word overlap and the expected type of answer ranks the sentences. A second one,
with sentence vectors, ranks the best of them again, and decides whether the context supports an answer
(``casemate.text.answering``). It does not quote a sentence that the question already contains: that would be useless,
and would confirm a pasted record. A sentence of which the question has only a part may be quoted in full.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from casemate.errors import require_range
from casemate.protocols import Embedder, Generator
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.text.answering import (
    BY_VECTORS,
    BY_WORDS,
    VECTORS_OF,
    AnswerModel,
    Passage,
    Question,
    refers_back,
    sentence_features,
    with_cosines,
)
from casemate.text.markup import without_escapes
from casemate.text.sentences import sentences
from casemate.text.tokens import content_words
from casemate.types import UNKNOWN, Document, Float64, Prompt

MARKUP = re.compile(r"^[\s#>*+•|-]+|[*`|]+|(?<!\w)_++|(?<!_)_++(?!\w)")
"""Markup of Markdown. An underscore between letters or digits is part of a name, such as ``tls_cert``."""
MAX_SENTENCES = 64  # sentences of the context that are considered, best document first: bounds the time of an answer
COMPARED = 6
"""Sentences whose vectors are compared with the question's, those that the words rank first: 4 to 6 ms each."""
CACHED_SENTENCES = 8192  # sentences whose vectors are kept: about 1.5 KB each
MARGIN = 4.0  # largest distance in score of a further sentence from the best one
MAX_WORDS = 100
"""Words of an answer beyond which no further sentence is added: a text without full stops is one long sentence."""


class _Sentence(NamedTuple):
    document: int
    position: int
    text: str


@dataclass(eq=False)
class ExtractiveGenerator(Generator):
    """Quotes the few sentences of the context that answer the question.

    Attributes:
        sentences: Largest number of sentences per answer. Further sentences must be nearly as good as the best one.
        support: Smallest estimated support of the context for an answer, in (0, 1]. Below it the answer is unknown.
            The default declines 3 % of answerable questions in development, 10 % without MiniLM.
        embedder: Embeds sentences. Only MiniLM is used; with any other embedder the answer depends on words alone.
    """

    sentences: int = 3
    support: float = 0.35
    embedder: Embedder | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require_range("extractive", self, "sentences", at_least=1)
        require_range("extractive", self, "support", above=0, at_most=1)
        if self.embedder is not None and not self.embedder.fingerprint.startswith(VECTORS_OF):
            self.embedder = None
        self._model = BY_WORDS if self.embedder is None else BY_VECTORS
        self._vectors = CachedEmbedder(self.embedder, most=CACHED_SENTENCES) if self.embedder is not None else None

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Streams one sentence at a time with the number of its source, then the list of sources."""
        chosen = await asyncio.to_thread(self._choose, prompt)
        if not chosen:
            yield UNKNOWN
            return
        sources: list[str] = []
        for sentence in chosen:
            source = prompt.context[sentence.document].source
            if source not in sources:
                sources.append(source)
            space = "" if sentence is chosen[0] else " "
            yield f"{space}{sentence.text} [{sources.index(source) + 1}]"
        yield "\nSources: " + ", ".join(f"[{i}] {source}" for i, source in enumerate(sources, 1))

    def _choose(self, prompt: Prompt) -> list[_Sentence]:
        """The answering sentences in reading order; none if the context does not support an answer."""
        question = Question(prompt.question)
        passages = passages_of(question, prompt.context)
        places = [_Sentence(d, i, text) for d, p in enumerate(passages) for i, text in enumerate(p.sentences)]
        allowed = [n for n, s in enumerate(places) if not s.text.endswith("?") and not question.says(s.text)]
        if not allowed or not question.terms:
            return []
        features = sentence_features(question, passages)
        ranked, scores = _ranked(BY_WORDS, features, allowed)
        if self.embedder is not None:
            compared = ranked[:COMPARED]
            features = with_cosines(features, passages, self._cosines(question, passages, places, compared))
            ranked, scores = _ranked(self._model, features, compared)
        if self._model.probability(features, ranked[0]) < self.support:
            return []
        near = [n for n in ranked[1:] if scores[ranked[0]] - scores[n] <= MARGIN]
        best = places[ranked[0]]
        explained = [ranked[0] - 1] if best.position and refers_back(best.text) else []
        order = [ranked[0], *(n for n in explained if n in allowed), *near]
        chosen: dict[str, _Sentence] = {}
        for n in order:
            words = sum(len(text.split()) for text in {*chosen, places[n].text})
            if not chosen or (len(chosen) < self.sentences and words <= MAX_WORDS):
                chosen.setdefault(places[n].text, places[n])
        return sorted(chosen.values())

    def _cosines(
        self, question: Question, passages: Sequence[Passage], places: Sequence[_Sentence], compared: Sequence[int]
    ) -> Float64:
        """Cosines of the question and some sentences, rounded, (n,); NaN for the others."""
        titles = [passages[places[n].document].title for n in compared]
        texts = [
            f"{title}\n{places[n].text}" if title else places[n].text for title, n in zip(titles, compared, strict=True)
        ]
        assert self._vectors is not None
        (vector,) = self._vectors.inner.embed([question.focus])  # a question's vector is not kept
        others = self._vectors.embed(texts)
        cosines = np.full(len(places), np.nan)
        # Without rounding, the answer could depend on the batch in which a vector was computed.
        cosines[compared] = np.round([v.astype(np.float64) @ vector.astype(np.float64) for v in others], 4)
        return cosines


def unanswered_reason(question: str, context: Sequence[Document]) -> str:
    """Why ``ExtractiveGenerator`` answers a question from a context with ``UNKNOWN``, for the operator."""
    asked = Question(question)
    quoted = sum(map(asked.quotes, (s for document in context for s in sentences(document.text))))
    if quoted:
        return f"the question contains {quoted} of the sentences in the context, and the generator repeats none of them"
    return "no sentence of the context answers the question well enough; rag.generator can name a language model"


def _ranked(model: AnswerModel, features: Float64, numbers: Sequence[int]) -> tuple[list[int], Float64]:
    """Some sentences by decreasing score, and the scores of all."""
    scores = model.scores(features)
    return sorted(numbers, key=lambda n: (-scores[n], n)), scores


def passages_of(question: Question, context: Sequence[Document]) -> list[Passage]:
    """The sentences of each document without markup and quotations of the question, at most ``MAX_SENTENCES`` in all.

    A pasted sentence is not evidence: counting it would quote its neighbors, the rest of a pasted record.
    """
    left, passages = MAX_SENTENCES, []
    for document in context:
        plain = (" ".join(MARKUP.sub("", s).split()) for s in sentences(without_escapes(document.text)))
        kept = tuple([s for s in plain if content_words(s)][:left])
        left -= len(kept)
        passages.append(Passage(document.title, tuple(s for s in kept if not question.quotes(s))))
    return passages
