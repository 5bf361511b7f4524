"""Words of a text in any order: an answer repeats a text if it contains more of its words than chance explains.

The share of a text that an answer contains is weighted: a word that n of the texts at hand contain has the weight 1 / n.
So words that all texts share count little (as inverse document frequency does). Chance is the median share that the
answer contains of the other texts at hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from statistics import median_low

from casemate.text.disclosure.context import Context

UNORDERED_WORDS, UNORDERED_SHARE = 8, 0.2
"""Minimum number of different words of a text, and minimum share above chance, from which an answer repeats the text."""
_UNKNOWN_CHANCE = 0.3
"""Share that is explained by chance if there are no other texts."""


class UnorderedWords:
    """The words of one decoded form of an answer, without their order.

    Args:
        context: The texts.
        question: Words of the question, which the answer does not disclose.
    """

    def __init__(self, context: Context, question: frozenset[str]) -> None:
        self._context, self._question = context, question
        self._said: dict[str, int] = {}  # number of times that the answer contains each word of the texts
        self._different, self._weight = [0] * context.shown, [0.0] * len(context.texts)
        self._least = [0.0] * context.shown  # weight from which the answer may repeat a text
        self._repeated = list[int]()  # numbers of the texts that the answer repeats

    def read(self, known: Iterable[str]) -> Iterator[tuple[int, int, bool]]:
        """Adds words of the texts. Yields the words of each text that the answer repeats.

        Yields:
            Number of the text, bit mask of a word, and whether no other text in the context contains it.
        """
        for word in known:
            self._said[word] = times = self._said.get(word, 0) + 1
            if word in self._question:
                continue
            if times == 1:
                yield from self._add(word)
            if self._repeated:
                yield from self._disclosed(word, times, self._repeated)

    def _add(self, word: str) -> Iterator[tuple[int, int, bool]]:
        """Adds a new word, and compares the texts that contain it."""
        different, weights, least = self._different, self._weight, self._least
        weight, numbers = self._context.places_by_weight[word]
        for number in numbers:
            weights[number] += weight
            if number < len(different):
                different[number] += 1
                if different[number] >= UNORDERED_WORDS and weights[number] >= least[number]:
                    yield from self._compare(number)

    def _compare(self, number: int) -> Iterator[tuple[int, int, bool]]:
        """Yields all words of a text that the answer contains, if these are more than chance explains."""
        total = self._context.weights
        shares = [weight / (of or 1) for weight, of in zip(self._weight, total, strict=True)]
        del shares[number]
        chance = median_low(shares or [_UNKNOWN_CHANCE])
        self._least[number] = (chance + UNORDERED_SHARE) * total[number]
        if self._weight[number] < self._least[number]:
            return
        self._least[number] = math.inf
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
