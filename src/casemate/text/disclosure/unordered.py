"""Words of a text in any order: an answer repeats a text if it contains more of its words than chance explains.

The share of a text that an answer contains is weighted: a word that n of the texts at hand contain has weight 1 / n.
So words that all texts share count little (as inverse document frequency does). Chance is the median share that the
answer contains of the other texts at hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median_low

from casemate.text.disclosure.context import Context

UNORDERED_WORDS, UNORDERED_SHARE = 8, 0.2
"""Minimum number of different words of a text, and minimum share above chance, of an answer that repeats it."""
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

    def read(self, known: Iterable[str]) -> list[tuple[int, int, bool]]:
        """Adds words of the texts. Returns the words of each text that the answer repeats.

        Returns:
            Number of the text, bit mask of a word, and whether no other text in the context contains it.
        """
        said, found = self._said, list[tuple[int, int, bool]]()
        for word in known:
            said[word] = times = said.get(word, 0) + 1
            if word in self._question:
                continue
            if times == 1:
                for number in self._add(word):
                    found += self._repeat(number)
            if self._repeated:
                found += self._disclosed(word, times, self._repeated)
        return found

    def _add(self, word: str) -> list[int]:
        """Adds a new word. Returns the numbers of the texts that the answer repeats now."""
        different, weights, least, found = self._different, self._weight, self._least, list[int]()
        places, numbers, weight = self._context.holders[word]
        for number in numbers:
            weights[number] += weight
        for number, _ in places:
            different[number] += 1
            if different[number] >= UNORDERED_WORDS and weights[number] >= least[number] and self._is_repeated(number):
                found.append(number)
        return found

    def _is_repeated(self, number: int) -> bool:
        """Whether the answer contains more of a text than chance explains."""
        total = self._context.weights
        least = (UNORDERED_SHARE if len(total) > 1 else UNORDERED_SHARE + _UNKNOWN_CHANCE) * total[number]
        if self._weight[number] >= least and len(total) > 1:
            shares = [weight / (of or 1) for weight, of in zip(self._weight, total, strict=True)]
            del shares[number]
            least += median_low(shares) * total[number]
        self._least[number] = least
        return self._weight[number] >= least

    def _repeat(self, number: int) -> list[tuple[int, int, bool]]:
        """Discloses all words of a text that the answer contains."""
        self._least[number] = math.inf
        self._repeated.append(number)
        words = self._context.texts[number].places.keys() & self._said.keys() - self._question
        return [
            one for word in words for n in range(self._said[word]) for one in self._disclosed(word, n + 1, [number])
        ]

    def _disclosed(self, word: str, times: int, among: Iterable[int]) -> list[tuple[int, int, bool]]:
        """The n-th occurrence of a word, n = ``times``, in some texts."""
        is_own = len(self._context.holders[word].places) == 1
        found = [(number, self._context.texts[number].places.get(word)) for number in among]
        return [(number, at.places[times - 1][1], is_own) for number, at in found if at and times <= len(at.places)]
