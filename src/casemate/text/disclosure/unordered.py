"""Words of a text in any order: an answer repeats a text if it contains enough words that only this text contains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from casemate.text.disclosure.context import Context

UNORDERED_WORDS, UNORDERED_SHARE = 8, 0.5
"""Number and share of a text's own words from which an answer repeats the text, in any order.

Of 3,000 recorded model answers and 900 other documents, two disclose more words than by chains alone: 2 and 3.
"""


class UnorderedWords:
    """The words of an answer so far, without their order.

    Args:
        context: The texts.
        question: Words of the question, which the answer does not disclose.
    """

    def __init__(self, context: Context, question: frozenset[str]) -> None:
        self._context, self._question = context, question
        self._said: dict[str, int] = {}  # number of times that the answer contains each word of the texts
        self._own_said = [0] * context.shown
        self._least_own = [float(UNORDERED_WORDS)] * context.shown  # own words from which the answer repeats a text
        self._repeated = list[int]()  # numbers of the texts that the answer repeats

    def read(self, known: Iterable[str]) -> Iterator[tuple[int, int, bool]]:
        """Adds words of the texts. Yields the words of each text that the answer repeats.

        Yields:
            Number of the text, bit mask of a word, and whether no other text in the context contains it.
        """
        said, own_said, counts, holders = self._said, self._own_said, self._context.counts, self._context.holders
        for word in known:
            said[word] = times = said.get(word, 0) + 1
            if word in self._question:
                continue
            if times == 1 == counts[word] and (shown := holders[word]):
                number = shown[0][0]
                own_said[number] += 1
                if own_said[number] >= self._least_own[number]:
                    yield from self._compare_own(number)
            if self._repeated:
                yield from self._disclosed(word, times, self._repeated)

    def _compare_own(self, number: int) -> Iterator[tuple[int, int, bool]]:
        """Yields all words of a text that the answer contains, if it contains enough of the text's own words."""
        own = len(self._context.own_words[number] - self._question)
        self._least_own[number] = max(UNORDERED_WORDS, UNORDERED_SHARE * own)
        if self._own_said[number] >= self._least_own[number]:
            self._least_own[number] = math.inf
            self._repeated.append(number)
            for word in self._context.texts[number].places.keys() & self._said.keys() - self._question:
                for times in range(1, self._said[word] + 1):
                    yield from self._disclosed(word, times, [number])

    def _disclosed(self, word: str, times: int, among: Iterable[int]) -> Iterator[tuple[int, int, bool]]:
        """Yields the n-th occurrence of a word, n = ``times``, in some texts."""
        for number in among:
            found = self._context.texts[number].places.get(word)
            if found and times <= len(found.places):
                yield number, found.places[times - 1][1], len(self._context.holders[word]) == 1
