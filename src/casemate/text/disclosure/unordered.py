"""Words of a text in any order: an answer repeats a text if it contains more of its words than chance explains.

The share of a text that an answer contains is weighted: a word that n of the texts at hand contain has weight 1 / n.
So words that all texts share count little (as inverse document frequency does). Chance is the median share that the
answer contains of the other texts at hand.
"""

from __future__ import annotations

import math
from collections import Counter
from statistics import median_low

from casemate.text.disclosure.context import Context

UNORDERED_WORDS, UNORDERED_SHARE = 8, 0.2
"""Minimum number of different words of a text, and minimum share above chance, of an answer that repeats it."""
_UNKNOWN_CHANCE = 0.3
"""Share that is explained by chance if there are no other texts."""


class UnorderedWords:
    """The words of one decoded form of an answer, without their order.

    A text is compared each time that the weight of its words in the form reaches a lower bound of the weight from which
    the form repeats it. Chance only grows, so the weight required last is such a bound. Most answers never reach it.

    Args:
        context: The texts.
        question: Words of the question, which the answer does not disclose.

    Attributes:
        words: Words of the texts in the form, in order.
        repeated: Numbers of the texts that the form repeats.
    """

    def __init__(self, context: Context, question: frozenset[str]) -> None:
        self._context, self._question = context, question
        self.words = list[str]()
        self.repeated = set[int]()
        texts = len(context.texts)
        self._weights = [0.0] * texts  # of the words of each text in the form
        # of each text in the context, the weight from which to compare it; a word less, because sums are rounded
        self._least = [(UNORDERED_WORDS - 1) / texts] * context.shown
        self._different = set[str]()
        self._unweighed = list[str]()  # those of these words that are not in the weights of the unseen texts yet
        self._said, self._counted = Counter[str](), 0  # how often each word is in the form, once it repeats a text

    def add(self, word: str) -> list[int]:
        """Adds a word of the texts. Returns the numbers of the texts to compare."""
        self.words.append(word)
        if word in self._different or word in self._question:
            return []
        self._different.add(word)
        self._unweighed.append(word)
        weight, weights, least = self._context.weigh(word), self._weights, self._least
        numbers = [number for number, _ in self._context.holders[word]]
        for number in numbers:
            weights[number] += weight
        return [number for number in numbers if weights[number] >= least[number]]

    def compare(self, number: int) -> list[tuple[int, bool]]:
        """Compares a text. Returns all of its words that the form contains, if these are more than chance explains.

        Args:
            number: Number of the text.

        Returns:
            Bit mask of each word, and whether no other text in the context contains it.
        """
        self._least[number] = least = self._least_weight(number)
        if self._weights[number] < least:
            return []
        words = self._context.texts[number].places.keys() & self._different
        if len(words) < UNORDERED_WORDS:
            return []
        self._least[number] = math.inf
        self.repeated.add(number)
        self._count()
        return [one for word in words for n in range(self._said[word]) for one in self._disclosed(number, word, n)]

    def disclosed(self, number: int, word: str) -> list[tuple[int, bool]]:
        """The last word of the form as a word of a repeated text: its bit mask, and whether only this text has it."""
        self._count()
        return [] if word in self._question else self._disclosed(number, word, self._said[word] - 1)

    def _count(self) -> None:
        self._said.update(self.words[self._counted :])
        self._counted = len(self.words)

    def _least_weight(self, number: int) -> float:
        """The weight from which the words of a text are more than chance, or a lower bound that they do not reach."""
        totals = self._context.totals
        if len(self._weights) == 1:
            return (UNORDERED_SHARE + _UNKNOWN_CHANCE) * totals[number]
        least = UNORDERED_SHARE * totals[number]
        if self._weights[number] < least:
            return least
        self._weigh_unseen()
        shares = [weight / (totals[i] or 1) for i, weight in enumerate(self._weights) if i != number]
        return least + median_low(shares) * totals[number]

    def _weigh_unseen(self) -> None:
        """Adds the new words to the weights of the texts that are not in the context."""
        weighed = [(word, self._context.weigh(word)) for word in self._unweighed]
        for number in range(self._context.shown, len(self._weights)):
            places = self._context.texts[number].places
            for word, weight in weighed:
                if word in places:
                    self._weights[number] += weight
        self._unweighed = []

    def _disclosed(self, number: int, word: str, before: int) -> list[tuple[int, bool]]:
        """The occurrence of a word of a text after some ``before``."""
        places = self._context.texts[number].places[word].places
        return [(places[before][1], len(self._context.holders[word]) == 1)] if before < len(places) else []
