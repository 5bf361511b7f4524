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
        vocabulary: All content words.
        holders: For each word, the numbers of the texts in the context that contain it, and its positions in each.
        totals: By number of a text, the sum of the weights of its words.
        speller: Finds their words among misspelled words.
        letters: Finds their words in letters without spaces.
        readability: Finds what is not in a language like theirs.
    """

    def __init__(self, shown: Sequence[str], unseen: Sequence[str]) -> None:
        self.shown = len(shown)
        self.texts = [index_text(text) for text in (*shown, *unseen)]
        self.counts = Counter(chain.from_iterable(text.places for text in self.texts))
        self.vocabulary = self.counts.keys()
        self._places = [(number, text.places) for number, text in enumerate(self.texts[: self.shown])]
        self.holders = FunctionCache(self._holders)
        self._weights = [0.0, *(1 / n for n in range(1, len(self.texts) + 1))]
        self.totals = FunctionCache(self._total)
        among = self.texts[: self.shown]
        self.speller = Speller(among, self.texts, self.vocabulary)
        self.letters = LetterSearch(self.texts)
        self.readability = Readability(among, self.texts, self.vocabulary)

    def _holders(self, word: str) -> list[tuple[int, WordPlaces]]:
        return [(number, places[word]) for number, places in self._places if word in places]

    def weigh(self, word: str) -> float:
        """The weight of a word of the texts: the inverse of the number of texts that contain it."""
        return self._weights[self.counts[word]]

    def _total(self, number: int) -> float:
        return sum(map(self._weights.__getitem__, map(self.counts.__getitem__, self.texts[number].places)))

    @cached_property
    def own(self) -> list[int]:
        """For each text, a bit mask of the words that no other text contains."""
        own = ([at for word, at in text.places.items() if self.counts[word] == 1] for text in self.texts)
        return [reduce(or_, [mask for at in words for _, mask in at.places], 0) for words in own]

    @cached_property
    def common(self) -> list[int]:
        """For each text in the context, a bit mask of the words that an unseen text contains, too."""
        unseen = frozenset().union(*(text.places for text in self.texts[self.shown :]))
        found = ([at for word, at in text.places.items() if word in unseen] for text in self.texts[: self.shown])
        return [reduce(or_, [mask for at in words for _, mask in at.places], 0) for words in found]

    @cached_property
    def outlines(self) -> npt.NDArray[np.bool_]:
        """Whether a text in the context may have an outline with a hash."""
        found = np.zeros(HASHES, np.bool_)
        found[np.concatenate([text.outline.hashes for text in self.texts[: self.shown]])] = True
        return found


share_context = lru_cache(maxsize=32)(Context)
"""The context of some texts; the last 32 contexts are cached."""
