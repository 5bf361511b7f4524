"""Words of a text in any order: an answer repeats a text if it contains more of its words than chance explains.

The share of a text that an answer contains is weighted: a word that n of the texts at hand contain has weight 1 / n.
So words that all texts share count little (as inverse document frequency does). Chance is the median share that the
answer contains of the other texts at hand.
"""

from __future__ import annotations

import math
from statistics import median_low

from casemate.text.disclosure.context import Context

UNORDERED_WORDS, UNORDERED_SHARE = 8, 0.2
"""Minimum number of different words of a text, and minimum share above chance, of an answer that repeats it."""
_UNKNOWN_CHANCE = 0.3
"""Share that is explained by chance if there are no other texts."""
_FIRST_LEAST = [float(UNORDERED_WORDS)]


class UnorderedWords:
    """The words of one decoded form of an answer, without their order.

    Words are only collected until a text may be repeated, because most answers repeat none.

    Args:
        context: The texts.
        question: Words of the question, which the answer does not disclose.

    Attributes:
        words: Words of the texts in the form, in order. The caller appends them.
        least: For each text in the context, the number of its words in the form from which to compare it.
        repeated: Numbers of the texts that the form repeats.
    """

    def __init__(self, context: Context, question: frozenset[str]) -> None:
        self._context, self._question = context, question
        self.words, self._added = list[str](), 0
        self.least: list[float] = _FIRST_LEAST * context.shown
        self.repeated = set[int]()
        self._said: dict[str, int] = {}  # number of times that the form contains each word
        self._different, self._weight = list[int](), list[float]()  # of each text, once one is compared

    def compare(self, number: int, time: int) -> list[tuple[int, bool]]:
        """Compares a text. Returns all of its words that the form contains, if these are more than chance explains.

        Args:
            number: Number of the text.
            time: Number of its words in the form.

        Returns:
            Bit mask of each word, and whether no other text in the context contains it.
        """
        if not self._added:
            self._different, self._weight = [0] * len(self._context.texts), [0.0] * len(self._context.texts)
            self.least = [max(UNORDERED_WORDS, UNORDERED_SHARE * total) for total in self._context.weights]
        self._add()
        missing = max(UNORDERED_WORDS - self._different[number], self._least_weight(number) - self._weight[number])
        if missing > 0:
            self.least[number] = time + max(1, math.ceil(missing - 1e-9))  # a word weighs at most 1
            return []
        self.least[number] = math.inf
        self.repeated.add(number)
        words = self._context.texts[number].places.keys() & self._said.keys() - self._question
        return [one for word in words for n in range(self._said[word]) for one in self._disclosed(number, word, n)]

    def disclosed(self, number: int, word: str) -> list[tuple[int, bool]]:
        """The last word of the form as a word of a repeated text: its bit mask, and whether only this text has it."""
        self._add()
        return [] if word in self._question else self._disclosed(number, word, self._said[word] - 1)

    def _add(self) -> None:
        """Adds the collected words."""
        said, weights, different = self._said, self._weight, self._different
        for word in self.words[self._added :]:
            said[word] = times = said.get(word, 0) + 1
            if times > 1 or word in self._question:
                continue
            weight = 1 / self._context.counts[word]
            for number in self._context.numbers[word]:
                weights[number] += weight
                different[number] += 1
        self._added = len(self.words)

    def _least_weight(self, number: int) -> float:
        """The weight from which the words of a text are more than chance."""
        total = self._context.weights
        least = (UNORDERED_SHARE if len(total) > 1 else UNORDERED_SHARE + _UNKNOWN_CHANCE) * total[number]
        if self._weight[number] >= least and len(total) > 1:
            shares = [weight / (of or 1) for weight, of in zip(self._weight, total, strict=True)]
            del shares[number]
            least += median_low(shares) * total[number]
        return least

    def _disclosed(self, number: int, word: str, before: int) -> list[tuple[int, bool]]:
        """The occurrence of a word of a text after some ``before``."""
        places = self._context.texts[number].places[word].places
        return [(places[before][1], len(self._context.holders[word]) == 1)] if before < len(places) else []
