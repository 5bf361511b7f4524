"""Answers without a language model: the sentences of the context that fit the question best, with their sources.

The honest default offline. It matches words, not meaning, in languages that write words apart; where nothing fits it
says that it does not know.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from casemate.errors import ConfigError
from casemate.protocols import Generator
from casemate.types import UNKNOWN, Document, Prompt
from casemate.words import content_words, sentences

MARKUP = re.compile(r"^[\s#>*+•|-]+|[*_`|]+")


class _Sentence(NamedTuple):
    place: tuple[int, int]  # document, position in it
    text: str
    words: frozenset[str]


@dataclass(frozen=True, slots=True)
class Extractive(Generator):
    """Quotes at most a few sentences.

    Attributes:
        sentences: How many sentences an answer has at most.
        support: Share of the question's weight, in (0, 1], that the best sentence must carry; below, the answer is
            that it does not know. Rare words weigh more; a word that occurs nowhere weighs most.
    """

    sentences: int = 3
    support: float = 0.35

    def __post_init__(self) -> None:
        if self.sentences < 1 or not 0 < self.support <= 1:
            raise ConfigError(
                f"extractive: sentences={self.sentences}, support={self.support}; "
                "sentences must be at least 1, support above 0 and at most 1"
            )

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """One sentence at a time, each with the number of its source, then the list of sources."""
        chosen = self._choose(prompt.question, _sentences(prompt.context))
        if not chosen:
            yield UNKNOWN
            return
        sources: list[str] = []
        for sentence in chosen:
            source = prompt.context[sentence.place[0]].source
            if source not in sources:
                sources.append(source)
            space = "" if sentence is chosen[0] else " "
            yield f"{space}{sentence.text} [{sources.index(source) + 1}]"
        yield "\nSources: " + ", ".join(f"[{i}] {source}" for i, source in enumerate(sources, 1))

    def _choose(self, question: str, sentences: Sequence[_Sentence]) -> list[_Sentence]:
        """The best sentences in order of reading."""
        wanted = content_words(question)
        spread = Counter(word for s in sentences for word in s.words & wanted)
        weight = {w: math.log(1 + len(sentences) / (spread[w] or 0.5)) for w in wanted}
        total = sum(weight.values()) or 1.0

        def fit(s: _Sentence) -> float:
            carried = sum(weight[w] for w in s.words & wanted) / total
            quoted = len(s.words & wanted) / len(s.words) if len(s.words) >= 4 else 0.0
            return max(carried, quoted if quoted >= 0.6 else 0.0)  # a question may quote the sentence it is about

        ranked = sorted(((fit(s), s) for s in sentences), key=lambda pair: (-pair[0], pair[1].place))
        if not ranked or ranked[0][0] < self.support:
            return []
        floor = max(self.support, 0.6 * ranked[0][0])
        best: dict[str, _Sentence] = {}
        for score, sentence in ranked:
            if score >= floor and len(best) < self.sentences:
                best.setdefault(sentence.text, sentence)
        return sorted(best.values(), key=lambda s: s.place)


def _sentences(context: Sequence[Document]) -> list[_Sentence]:
    """All sentences of the context; a title's words count for each sentence below it."""
    found = []
    for number, document in enumerate(context):
        title = content_words(document.title)
        for position, piece in enumerate(sentences(document.text)):
            text = " ".join(MARKUP.sub("", piece).split())
            if words := content_words(text):
                found.append(_Sentence((number, position), text, words | title))
    return found
