"""Splits folded texts into words, and counts their letters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from casemate.text.tokens import LETTERS, UNSPACED, FunctionCache, character_pairs

_WORD = re.compile(LETTERS)
UNSPACED_WORD = re.compile(f"[{UNSPACED}]{{1,2}}")
"""A word of a script without spaces: a pair of neighboring letters, or a single letter."""
ALPHANUMERIC = bytes(c for c in range(128) if chr(c).isalnum())
"""Letters and digits of ASCII."""
_WORD_ENDS = bytes(c if c in ALPHANUMERIC else 32 for c in range(256))
_FIRST_IDEOGRAPH = "\u2e80"


def split_words(folded: str) -> list[str]:
    """The words of a folded text; for scripts without spaces, all pairs of neighboring letters."""
    if folded.isascii():
        return folded.encode().translate(_WORD_ENDS).decode().split()
    return character_pairs(_WORD.findall(unicodedata.normalize("NFC", folded)))  # folding decomposes Korean letters


def split_parts(folded: str) -> list[list[str]]:
    """The words of each part of a folded text between spaces."""
    return [split_words(part) for part in folded.split()]


def count_letters(words: Iterable[str]) -> int:
    """Number of letters of some words.

    Ideographs count twice, because a word has two; of a pair, only the first counts.
    """
    words = tuple(words)
    text = "".join(words)
    return len(text) if text.isascii() else sum(map(LETTER_COUNTS.__getitem__, words))


def _letter_count(word: str) -> int:
    counted = word[:1] if UNSPACED_WORD.fullmatch(word) else word
    return len(counted) + sum(char >= _FIRST_IDEOGRAPH for char in counted)


LETTER_COUNTS = FunctionCache(_letter_count)
"""Number of letters of a word, as in ``count_letters``."""
