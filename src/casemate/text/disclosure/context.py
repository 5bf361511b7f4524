"""The texts that an answer is compared with: those in its context, and others as the null distribution of chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property, lru_cache, reduce
from itertools import chain
from operator import or_

import numpy as np
import numpy.typing as npt

from casemate.text.disclosure.chains import WordPlaces
from casemate.text.disclosure.indexed_text import index_text
from casemate.text.disclosure.letter_search import LetterSearch
from casemate.text.disclosure.readability import Readability
from casemate.text.disclosure.spelling import Speller
from casemate.text.outlines import HASHES
from casemate.text.tokens import FunctionCache


class Context:
    """The texts that an answer is compared with.

    Args:
        shown: The texts in the context.
        unseen: Texts that were not in the context.

    Attributes:
        shown: Number of texts in the context.
        texts: All texts, those in the context first.
        counts: For each content word, the number of texts that contain it.
        numbers: For each content word, their numbers.
        vocabulary: All content words.
        holders: For each word, the numbers of the texts in the context that contain it, and its positions in each.
        own_words: By number of a text, its words that no other text contains.
        speller: Finds their words among misspelled words.
        letters: Finds their words in letters without spaces.
        readability: Finds what is not in a language like theirs.
    """

    def __init__(self, shown: Sequence[str], unseen: Sequence[str]) -> None:
        self.shown = len(shown)
        self.texts = [index_text(text) for text in (*shown, *unseen)]
        self.counts = Counter(chain.from_iterable(text.places for text in self.texts))
        self.vocabulary = self.counts.keys()
        self._places = [(number, text.places) for number, text in enumerate(self.texts)]
        self._shown_places = self._places[: self.shown]
        self.numbers = FunctionCache(self._numbers)
        self.holders = FunctionCache(self._holders)
        self.own_words = FunctionCache(self._own_words)
        among = self.texts[: self.shown]
        self.speller = Speller(among, self.texts, self.vocabulary)
        self.letters = LetterSearch(self.texts)
        self.readability = Readability(among, self.texts, self.vocabulary)

    def _holders(self, word: str) -> list[tuple[int, WordPlaces]]:
        return [(number, places[word]) for number, places in self._shown_places if word in places]

    def _numbers(self, word: str) -> list[int]:
        return [number for number, places in self._places if word in places]

    def _own_words(self, number: int) -> frozenset[str]:
        return frozenset(word for word in self.texts[number].places if self.counts[word] == 1)

    @cached_property
    def weights(self) -> list[float]:
        """For each text, the sum of the weights of its words."""
        inverse = [0.0, *(1 / n for n in range(1, len(self.texts) + 1))]
        return [sum(map(inverse.__getitem__, map(self.counts.__getitem__, text.places))) for text in self.texts]

    @cached_property
    def own(self) -> list[int]:
        """For each text, a bit mask of the words that no other text contains."""
        return [
            reduce(or_, [mask for word in self.own_words[i] for _, mask in text.places[word].places], 0)
            for i, text in enumerate(self.texts)
        ]

    @cached_property
    def outlines(self) -> npt.NDArray[np.bool_]:
        """Whether a text in the context may have an outline with a hash."""
        found = np.zeros(HASHES, np.bool_)
        found[np.concatenate([text.outline.hashes for text in self.texts[: self.shown]])] = True
        return found


share_context = lru_cache(maxsize=32)(Context)
"""The context of some texts; the last 32 contexts are cached."""
