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
        weights: For each text in the context, the weight of its words in the form. The caller adds those of new words.
        least: For each text in the context, the weight from which to compare it.
        repeated: Numbers of the texts that the form repeats.
    """

    def __init__(self, context: Context, question: frozenset[str]) -> None:
        self._context, self._question = context, question
        self.words = list[str]()
        texts = len(context.texts)
        self.weights = [0.0] * texts
        self.least = [(UNORDERED_WORDS - 1) / texts] * context.shown
        self.repeated = set[int]()
        self._different = set[str]()
        self._unweighed = list[str]()  # those of these words that are not in the weights of the unseen texts yet
        self._said, self._counted = Counter[str](), 0  # how often each word is in the form, once it repeats a text

    def add(self, word: str) -> float:
        """Adds a word of the texts. Returns its weight; 0 if the form or the question contained it before."""
        self.words.append(word)
        if word in self._different or word in self._question:
            return 0.0
        self._different.add(word)
        self._unweighed.append(word)
        return self._context.weigh(word)

    def compare(self, number: int) -> list[tuple[int, bool]]:
        """Compares a text. Returns all of its words that the form contains, if these are more than chance explains.

        Args:
            number: Number of the text.

        Returns:
            Bit mask of each word, and whether no other text in the context contains it.
        """
        self.least[number] = least = self._least_weight(number)
        if self.weights[number] < least:
            return []
        words = self._context.texts[number].places.keys() & self._different
        if len(words) < UNORDERED_WORDS:
            return []
        self.least[number] = math.inf
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
        if len(self.weights) == 1:
            return (UNORDERED_SHARE + _UNKNOWN_CHANCE) * totals[number]
        least = UNORDERED_SHARE * totals[number]
        if self.weights[number] < least:
            return least
        self._weigh_unseen()
        shares = [weight / (totals[i] or 1) for i, weight in enumerate(self.weights) if i != number]
        return least + median_low(shares) * totals[number]

    def _weigh_unseen(self) -> None:
        """Adds the new words to the weights of the texts that are not in the context."""
        weighed = [(word, self._context.weigh(word)) for word in self._unweighed]
        for number in range(self._context.shown, len(self.weights)):
            places = self._context.texts[number].places
            for word, weight in weighed:
                if word in places:
                    self.weights[number] += weight
        self._unweighed = []

    def _disclosed(self, number: int, word: str, before: int) -> list[tuple[int, bool]]:
        """The occurrence of a word of a text after some ``before``."""
        places = self._context.texts[number].places[word].places
        return [(places[before][1], len(self._context.holders[word]) == 1)] if before < len(places) else []
