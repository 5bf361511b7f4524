"""Misspelled words: the word of a text that has the same letters but one, the same letters, or the same consonants.

One letter may be missing, added or changed (deletion neighborhoods: Mor and Fraenkel 1982). The letters may be in
another order, also followed by "ay", or the word may have other vowels.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Sequence
from functools import cached_property

from casemate.text.disclosure.indexed_text import IndexedText
from casemate.text.disclosure.letters import LONG_WORD, MIN_LETTERS, deletions, sorted_letters
from casemate.text.disclosure.words import UNSPACED_WORD
from casemate.text.disguises import without_vowels
from casemate.text.tokens import FunctionCache

_VOWELS = frozenset("aeiou")


def _spellings(word: str) -> tuple[list[str], list[str], str]:
    """A word's spellings with one deleted letter, all forms compared with misspelled words, and its consonants."""
    if not MIN_LETTERS <= len(word) <= LONG_WORD:
        return [], [word], ""
    shortened = deletions(word)
    keys = [word, sorted_letters(word), sorted_letters(word.removesuffix("ay")), *shortened]
    return shortened, keys, without_vowels(word) if word.isascii() else ""


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
    def _misspelled(self) -> frozenset[str]:
        """The misspelled words of the texts in the context."""
        return frozenset[str]().union(*[text.misspelled for text in self._shown])

    @cached_property
    def _skeletons(self) -> frozenset[str]:
        """Words of the texts in the context without vowels."""
        return frozenset[str]().union(*[text.skeletons for text in self._shown])

    def complete(self, words: Iterable[str]) -> list[str]:
        """Words of the texts whose consonants equal words without vowels."""
        bare = [w for w in words if len(w) > 2 and _VOWELS.isdisjoint(w)]
        return [text.skeletons[w] for w in bare for text in self._texts if w in text.skeletons]

    def correct(self, words: Iterable[str]) -> list[str]:
        """The words of the texts among words, also if misspelled."""
        vocabulary = self._vocabulary
        return [whole for word in words if (whole := word if word in vocabulary else self._correct(word))]

    def _correct(self, word: str) -> str:
        """The word of the texts in the context that a misspelled word represents; empty: none."""
        if not MIN_LETTERS <= len(word) <= LONG_WORD and (word.isascii() or not UNSPACED_WORD.fullmatch(word)):
            return ""
        shortened, keys, bare = _SPELLINGS[word]
        if not self._vocabulary.isdisjoint(shortened):
            return next(key for key in shortened if key in self._vocabulary)
        if bare not in self._skeletons and self._misspelled.isdisjoint(keys):
            return ""
        for text in self._shown:
            if bare in text.skeletons:
                return text.skeletons[bare]
            misspelled = text.misspelled
            for key in keys:
                if key in misspelled:
                    return misspelled[key]
        return ""
