"""The words of a text, indexed for all comparisons with answers.

An index depends on one text only, so it is computed once and shared by all answers that read the text.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from casemate.text.disclosure.chains import WordPlaces
from casemate.text.disclosure.letters import (
    LAST_LATIN,
    LONG_WORD,
    MIN_LETTERS,
    SCRIPTS,
    deletions,
    hash_codes,
    letter_codes,
    letter_pairs,
    ngram_codes,
    sorted_letters,
)
from casemate.text.disclosure.words import LETTER_COUNTS, UNSPACED_WORD, split_parts, split_words
from casemate.text.disguises import fold_text, only_letters, without_vowels
from casemate.text.outlines import Outline, ends_of_words, without_numbers
from casemate.text.tokens import STOP_WORDS

MAX_OCCURRENCES = 6
"""Maximum number of compared positions of a word in one text."""
_SCRIPT_SHARE = 0.05
"""Minimum share of a text's letters from which it uses a script."""


class IndexedText:
    """The content words of a text.

    Attributes:
        length: Number of all words.
        letters: Number of their letters and digits.
        places: Positions of each content word.
        prefixes: Words of at least ``MIN_LETTERS`` letters by their first letters, longest first.
        beginnings: Their first ``MIN_LETTERS`` + 1 letters.
        prefix_codes: Their first letters in ASCII, by ``ngram_codes``.
        skeletons: These words by their consonants.
        characters: Letters of scripts without spaces.
        frequencies: Counts of these letters.
        scripts: Scripts of its letters, except Latin.
        pairs: Pairs of letters in all content words, as numbers.
        outline: The outline of its parts between spaces.
        starts: The number of words before each of these parts that is not a number; and the number of all words.
    """

    def __init__(self, text: str) -> None:
        found: dict[str, list[tuple[int, int]]] = {}
        start, at, self.length, self.letters = 0, 0, 0, 0
        folded = fold_text(text)
        words, parts = split_words(folded), split_parts(folded)
        self.outline = Outline(ends_of_words(parts, STOP_WORDS))
        ends = [0, *accumulate(map(len, parts))]
        self.starts = [ends[i] for i, part in enumerate(parts) if without_numbers(part)] + ends[-1:]
        for self.length, word in enumerate(words, 1):
            self.letters += LETTER_COUNTS[word]
            if word not in STOP_WORDS and (len(word) > 1 or word.isdigit()):
                places = found.setdefault(word, [])
                if len(places) < MAX_OCCURRENCES:
                    places.append((at, (1 << self.length) - (1 << start)))
                start, at = self.length, at + 1
        self.places = {word: WordPlaces.of(places) for word, places in found.items()}
        alphabetic = sorted((w for w in self.places if len(w) >= MIN_LETTERS and w.isalpha()), key=len, reverse=True)
        long_words = [w for w in alphabetic if only_letters(w) == w]
        self.prefixes: dict[str, list[str]] = {}
        for word in alphabetic:
            self.prefixes.setdefault(word[:MIN_LETTERS], []).append(word)
        self.beginnings = {word[: MIN_LETTERS + 1] for word in long_words}
        self.prefix_codes = ngram_codes(letter_codes("".join(filter(str.isascii, self.prefixes))))[::MIN_LETTERS]
        self.skeletons = {skeleton: w for w in long_words if len(skeleton := without_vowels(w)) > 2}
        self._alphabetic = alphabetic
        unspaced = {w for w in self.places if not w.isascii() and UNSPACED_WORD.fullmatch(w)}
        neighbors = zip(words, words[1:], strict=False)
        self._skipping = {a[0] + b[1]: a for a, b in neighbors if a in unspaced and a[1:] == b[:1] and len(b) == 2}
        self.characters = frozenset("".join(unspaced))
        scripts = Counter(SCRIPTS[char] for word in self.places for char in word if char > LAST_LATIN)
        self.scripts = {script for script, count in scripts.items() if count >= _SCRIPT_SHARE * self.letters}
        self.pairs = letter_pairs((w for w in self.places if not w.isdigit() and w not in unspaced), self.scripts)
        self.frequencies = np.bincount(letter_codes("".join(long_words)), minlength=26)

    @cached_property
    def misspelled(self) -> dict[str, str]:
        """Words by their spellings with one deleted letter, and by their sorted letters.

        Pairs of letters are indexed by their first letter and the one after next.
        """
        words = [w for w in self._alphabetic if MIN_LETTERS < len(w) <= LONG_WORD]
        return self._skipping | {key: word for word in words for key in (sorted_letters(word), *deletions(word))}

    @cached_property
    def misspelled_codes(self) -> npt.NDArray[np.int64]:
        """The ``hash_codes`` of ``misspelled``."""
        return np.array(hash_codes(self.misspelled), np.int64)


index_text = lru_cache(maxsize=1024)(IndexedText)
"""The index of a text; those of the last 1,024 texts are cached."""
