"""Outlines: the first letters of consecutive words of a text, and their last letters.

A text in which every word is changed or shortened often keeps its order of words, and an end of each. Its outline is
then that of the original. This covers all such forms without knowledge of what is changed: syllables in each word,
missing letters, other letters, or only the first letters of each.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cached_property
from string import ascii_uppercase

import numpy as np
import numpy.typing as npt

OUTLINE = 12
"""Number of consecutive words whose first or last letters are compared.

Those of twelve unrelated words are equal with a probability below 1e-12: two words of English have equal first letters
with .065, and equal last letters with .095.
"""
HASHES = 1 << 16
"""Range of hashes."""
_HASHED = 8
"""Number of letters in a hash: those of a 64-bit number."""
_STEP = 2
"""Distance of the hashes that are looked up. Three of them cover ``OUTLINE`` letters.

So of equal runs of ``OUTLINE`` letters, those at an even position are found, and all longer ones.
"""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SEPARATOR = b"\x00"
_FUNCTION = ascii_uppercase.encode()
"""Letters of function words."""
_HIT = b"\x01\x01\x01"
_RUN = re.compile(_HIT + b"\x01*")
"""Consecutive letters with hashes that another outline has."""


def without_numbers(part: list[str]) -> list[str]:
    """The words of a part that are not numbers."""
    return [word for word in part if not word.isdigit()]


def ends_of_words(parts: Iterable[list[str]], function_words: Collection[str]) -> str:
    """The first and the last letter of each part, in capitals if all of its words are function words.

    Numbers are left out, because an answer may number its words. Letters of other alphabets become some letters
    of ASCII.

    Args:
        parts: The words of each part between two spaces. Parts without words, and numbers, are ignored.
        function_words: Words in lower case.

    >>> ends_of_words([["1", "divers"], ["in"], ["7"], ["mid", "may"]], {"in"})
    'dsINmy'
    """
    found = list[str]()
    for words in filter(None, map(without_numbers, parts)):
        ends = words[0][0] + words[-1][-1]
        if not ends.isascii():
            ends = "".join([c if c.isascii() else chr(ord("a") + ord(c) % 26) for c in ends])
        found.append(ends.upper() if all(word in function_words for word in words) else ends)
    return "".join(found)


class Outline:
    """The outline of a text: first letters of all words, their last letters, and both without function words.

    Args:
        ends: From ``ends_of_words``.
    """

    def __init__(self, ends: str) -> None:
        self._ends = code = ends.encode()
        content = code.translate(None, _FUNCTION)
        self._letters = _SEPARATOR.join([code[::2], code[1::2], content[::2], content[1::2]]).lower()

    @cached_property
    def hashes(self) -> npt.NDArray[np.uint16]:
        """A hash of each ``_HASHED`` consecutive letters of a sequence; the same for the same letters."""
        found = self._hashes(1)
        apart = np.frombuffer(self._letters, np.uint8) == _SEPARATOR[0]
        return found[np.convolve(apart, np.ones(_HASHED), "valid") == 0] if len(found) else found

    def _hashes(self, step: int) -> npt.NDArray[np.uint16]:
        count = max(0, (len(self._letters) - _HASHED) // step + 1)
        numbers = np.ndarray((count,), "<u8", self._letters if count else bytes(_HASHED), strides=(step,))
        return (numbers * _FACTOR).view("<u2")[3::4]

    def likely(self, other: npt.NDArray[np.bool_]) -> list[bytes]:
        """Runs of ``OUTLINE`` letters that another outline may contain; of longer runs, each sixth and the last.

        Args:
            other: Whether the other outline has a hash.
        """
        hits, found = other.take(self._hashes(_STEP)).tobytes(), list[bytes]()
        for run in _RUN.finditer(hits) if _HIT in hits else ():
            first, last = _STEP * run.start(), _STEP * (run.end() - len(_HIT))
            found += [self._letters[at : at + OUTLINE] for at in (*range(first, last, OUTLINE // 2), last)]
        return found

    @cached_property
    def places(self) -> dict[bytes, tuple[int, int]]:
        """Numbers of the first and the last word of each ``OUTLINE`` letters; of equal letters, the first."""
        everything = range(len(self._ends) // 2)
        content = [i for i in everything if self._ends[2 * i] not in _FUNCTION]
        found: dict[bytes, tuple[int, int]] = {}
        at = 0
        for numbers in (everything, everything, content, content):
            for i in range(len(numbers) - OUTLINE + 1):
                place = numbers[i], numbers[i + OUTLINE - 1]
                found.setdefault(self._letters[at + i : at + i + OUTLINE], place)
            at += len(numbers) + 1
        return found
