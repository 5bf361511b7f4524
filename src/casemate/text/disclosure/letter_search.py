"""Finds the words of texts in letters without spaces, also reversed or in another alphabet.

The alphabets are the rotations of the alphabet and of its reverse (affine ciphers with factor 1 and -1). Those with the
best fit of letter frequencies are tried.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate
from string import ascii_lowercase

import numpy as np
import numpy.typing as npt

from casemate.text.disclosure.indexed_text import IndexedText
from casemate.text.disclosure.letters import HASHES, MIN_LETTERS, letter_codes, ngram_codes
from casemate.text.tokens import FunctionCache

PERMUTED = frozenset(("markup", "leet", "script", "swapped", "doubled", "initials"))
"""Forms whose letters are not decoded with other alphabets."""
_ROTATIONS = [ascii_lowercase[k:] + ascii_lowercase[:k] for k in range(26)]
ALPHABETS = [*_ROTATIONS, *(alphabet[::-1] for alphabet in _ROTATIONS)]
"""Rotations of the alphabet and of its reverse; the first is the alphabet itself."""
TO_ALPHABET = [str.maketrans(ascii_lowercase, alphabet) for alphabet in ALPHABETS]
_ALPHABET_CODES = np.array([[ord(c) - 97 for c in alphabet] for alphabet in ALPHABETS], np.uint16)
_TRIED_ALPHABETS = 2
_SEPARATOR = "{"
"""Separates sequences of letters: the character after z."""


class LetterSearch:
    """The longer words of some texts, indexed for the search.

    Attributes:
        by_prefix: Words of the texts by their first letters, longest first.
    """

    def __init__(self, texts: Sequence[IndexedText]) -> None:
        self._texts = texts
        self.by_prefix = FunctionCache(partial(_words_from, [text.prefixes for text in texts]))

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        """The first ``MIN_LETTERS`` + 1 letters of the longer words of the texts."""
        return frozenset[str]().union(*[text.beginnings for text in self._texts])

    @cached_property
    def _prefixes(self) -> npt.NDArray[np.bool_]:
        """Whether a word of the texts may begin with four letters, by ``ngram_codes``; false positives are rare."""
        found = np.zeros(HASHES, np.bool_)
        found[np.concatenate([text.prefix_codes for text in self._texts])] = True
        return found

    @cached_property
    def alphabet_weights(self) -> npt.NDArray[np.float64]:
        """For each alphabet except the first, the integer frequency of each letter in the texts."""
        frequencies = np.array([text.frequencies for text in self._texts], np.float64).sum(axis=0)
        weights: npt.NDArray[np.float64] = frequencies[_ALPHABET_CODES[1:]]
        return weights

    def search(self, streams: Sequence[tuple[str, str]]) -> tuple[dict[str, list[str]], int]:
        """Searches letters unchanged, and in the alphabets with the best fit of frequencies, forwards and backwards.

        Args:
            streams: Forms and letters, which are searched together.

        Returns:
            The words found, by form, alphabet and direction; and the number of letters searched.
        """
        streams = [stream for stream in streams if len(stream[1]) >= MIN_LETTERS]
        if not streams:
            return {}, 0
        searched = [
            (f"{form}, alphabet {number}", letters.translate(TO_ALPHABET[number]) if number else letters)
            for (form, letters), numbers in zip(streams, self._alphabets(streams), strict=True)
            for number in numbers
        ]
        ends = list(accumulate([1 + len(letters) for _, letters in searched for _ in range(2)]))
        text = "".join([f"{letters}{_SEPARATOR}{letters[::-1]}{_SEPARATOR}" for _, letters in searched])
        found = defaultdict[str, list[str]](list)
        for at, word in self.words_in(text):
            i = bisect(ends, at)
            found[f"{searched[i // 2][0]}{', reversed' * (i % 2)}"].append(word)
        return found, ends[-1] - len(ends)

    def _alphabets(self, streams: Sequence[tuple[str, str]]) -> list[list[int]]:
        """For each stream, the numbers of the alphabets to try; the first is the alphabet itself."""
        chosen = [[0] for _ in streams]
        if free := [i for i, (form, _) in enumerate(streams) if form not in PERMUTED]:
            codes = letter_codes("".join([streams[i][1] for i in free]))
            owner = np.repeat(np.arange(len(free)), [len(streams[i][1]) for i in free])
            counts = np.bincount(26 * owner + codes, minlength=26 * len(free)).reshape(-1, 26)
            fit = (counts @ self.alphabet_weights.T).astype(np.int64)
            best = np.argsort(-fit)[:, :_TRIED_ALPHABETS] + 1
            for i, numbers in zip(free, best.tolist(), strict=True):
                chosen[i] += numbers
        return chosen

    def words_in(self, text: str) -> Iterator[tuple[int, str]]:
        """Yields position and word of the longer words of the texts in a sequence of letters and ``_SEPARATOR``.

        The search goes from left to right, prefers the longest word, and allows no overlap.
        """
        end, beginnings = 0, self._beginnings
        for at in self._prefixes[ngram_codes(letter_codes(text))].nonzero()[0].tolist():
            prefix = text[at : at + MIN_LETTERS]
            if at >= end and (prefix in beginnings or text[at : at + MIN_LETTERS + 1] in beginnings):
                if word := next((word for word in self.by_prefix[prefix] if text.startswith(word, at)), ""):
                    yield at, word
                    end = at + len(word)

    def segment(self, letters: str, starts: Iterable[int]) -> list[str]:
        """The longer words of the texts in a sequence of letters, from left to right, longest first.

        Args:
            letters: The sequence.
            starts: Positions of four letters that may begin a word of the texts.
        """
        found, end = list[str](), 0
        for at in starts:
            words = self.by_prefix[letters[at : at + MIN_LETTERS]] if at >= end else ()
            if word := next((word for word in words if letters.startswith(word, at)), ""):
                found.append(word)
                end = at + len(word)
        return found


def _words_from(texts: Iterable[Mapping[str, list[str]]], prefix: str) -> list[str]:
    """Returns the words that begin with some letters, the longest first."""
    return sorted({word for text in texts if prefix in text for word in text[prefix]}, key=len, reverse=True)
