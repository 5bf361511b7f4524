"""Misspelled words: the word of a text that has the same letters but one, the same letters, or the same consonants.

One letter may be missing, added or changed (deletion neighborhoods: Mor and Fraenkel 1982). The letters may be in
another order, also followed by "ay", or the word may have other vowels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Sequence
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from casemate.text.disclosure.indexed_text import IndexedText
from casemate.text.disclosure.letters import (
    LONG_WORD,
    MIN_LETTERS,
    SPELLING_HASHES,
    deletions,
    hash_codes,
    sorted_letters,
)
from casemate.text.disclosure.words import UNSPACED_WORD
from casemate.text.disguises import without_vowels
from casemate.text.tokens import FunctionCache

_VOWELS = frozenset("aeiou")


class _Spellings(NamedTuple):
    """Forms of a word that are compared with misspelled words.

    Attributes:
        shortened: Spellings with one deleted letter.
        keys: All forms.
        bare: The consonants; empty if the word is not ASCII.
        entries: Returns the entries of all forms in a table by ``hash_codes``.
    """

    shortened: list[str]
    keys: list[str]
    bare: str
    entries: Callable[[bytearray], tuple[int, ...]]


def _spellings(word: str) -> _Spellings:
    shortened, keys, bare = list[str](), [word], ""
    if MIN_LETTERS <= len(word) <= LONG_WORD:
        shortened, bare = deletions(word), without_vowels(word) if word.isascii() else ""
        keys += [sorted_letters(word), sorted_letters(word.removesuffix("ay")), *shortened]
    return _Spellings(shortened, keys, bare, itemgetter(*hash_codes([word, *keys])))  # of one code: no tuple


_SPELLINGS = FunctionCache(_spellings, 4096)


class Speller:
    """Finds the words of texts that misspelled words represent.

    Args:
        shown: The texts in the context.
        texts: All texts, those in the context first.
        vocabulary: All their content words.
    """

    def __init__(self, shown: Sequence[IndexedText], texts: Sequence[IndexedText], vocabulary: KeysView[str]) -> None:
        self._shown, self._texts, self._vocabulary = shown, texts, vocabulary

    @cached_property
    def _misspelled(self) -> bytearray:
        """Whether a text in the context may have a misspelled word with a hash code (a Bloom filter).

        A union of the sets of misspelled words would take ten times as long.
        """
        found = bytearray(SPELLING_HASHES)
        for text in self._shown:
            np.frombuffer(found, np.uint8)[text.misspelled_codes] = 1
        return found

    @cached_property
    def _skeletons(self) -> frozenset[str]:
        """Words of the texts in the context without vowels."""
        return frozenset[str]().union(*[text.skeletons for text in self._shown])

    def complete(self, words: Iterable[str]) -> list[str]:
        """Words of the texts whose consonants equal words without vowels."""
        bare = [w for w in words if _VOWELS.isdisjoint(w)]
        return [text.skeletons[w] for w in bare for text in self._texts if w in text.skeletons]

    def correct(self, words: Iterable[str]) -> list[str]:
        """The words of the texts among words, also if misspelled."""
        vocabulary = self._vocabulary
        return [whole for word in words if (whole := word if word in vocabulary else self._correct(word))]

    def _correct(self, word: str) -> str:
        """The word of the texts in the context that a misspelled word represents; empty: none."""
        if not MIN_LETTERS <= len(word) <= LONG_WORD and (word.isascii() or not UNSPACED_WORD.fullmatch(word)):
            return ""
        shortened, keys, bare, entries = _SPELLINGS[word]
        if not self._vocabulary.isdisjoint(shortened):
            return next(key for key in shortened if key in self._vocabulary)
        if bare not in self._skeletons and not any(entries(self._misspelled)):
            return ""
        for text in self._shown:
            if bare in text.skeletons:
                return text.skeletons[bare]
            misspelled = text.misspelled
            for key in keys:
                if key in misspelled:
                    return misspelled[key]
        return ""
