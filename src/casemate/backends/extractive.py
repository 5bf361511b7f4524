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

STOP_WORDS = frozenset(
    """a about above after again all also am an and any are as at be because been before being below between both but
    by can could did do does doing done down during each else ever few for from further get give got had has have
    having he her here hers him his how i if in into is it its itself just let like long many may me might mine more
    most much must my need no nor not now of off often on once only or other our ours out over own please same say
    she should so some such take tell than that the their them then there these they this those to too under until
    up us use very was we were what when where which while who whom whose why will with without would you your
    yours""".split()
)
WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")
BLOCK_END = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*+#•|>]|\d+[.)]\s))")
SENTENCE_END = re.compile(
    r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!\b(?:Dr|Mr|Ms|St|No|vs)\.)(?<!\b(?:Mrs|e\.g|i\.e)\.)\s+(?=[^\sa-z])"
)
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
        wanted = _words(question)
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
        title = _words(document.title)
        pieces = [s for block in BLOCK_END.split(document.text) for s in SENTENCE_END.split(block)]
        for position, piece in enumerate(pieces):
            text = " ".join(MARKUP.sub("", piece).split())
            if words := _words(text):
                found.append(_Sentence((number, position), text, words | title))
    return found


def _words(text: str) -> frozenset[str]:
    """Lower-case stems of the words that carry meaning."""
    return frozenset(_stem(w) for w in WORD.findall(text.lower().replace("’", "'")) if w not in STOP_WORDS)


def _stem(word: str) -> str:
    """Plural and verb endings off, roughly: both sides are treated alike.

    >>> [_stem(w) for w in ("tests", "tested", "testing", "policies", "glass")]
    ['test', 'test', 'test', 'polic', 'glass']
    """
    for ending in ("ies", "ing", "ed", "es", "y", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            return word[: -len(ending)]
    return word
