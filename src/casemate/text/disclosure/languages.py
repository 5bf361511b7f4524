"""A model of the letters of seven languages: a word that it explains worse than random letters is in none of them.

The model gives the information of each letter after the two before it (Shannon 1951). It is estimated from the listed
words of English, German, French, Spanish, Italian, Portuguese and Dutch. Short records and tables have too few words
for their own model. An answer can be in another language than its documents.
"""

from __future__ import annotations

import math
from functools import lru_cache
from string import ascii_lowercase

import numpy as np

from casemate.text.disguises import fold_text
from casemate.text.function_words import ALL_FUNCTION_WORDS
from casemate.text.tokens import FunctionCache
from casemate.text.word_lists import read_sections

_COMPLETE, _OTHER_SCRIPTS = ("en", "names"), ("ru",)
"""Sections of ``ordinary_words.txt`` with complete words, and those that are left out; others have beginnings."""
_RANDOM_BITS = math.log2(len(ascii_lowercase) + 1)
"""Information of a random letter or end of a word, in bits."""
_OTHER = len(ascii_lowercase) + 1
"""Code of all characters except letters, which are 1 to 26, and the space, which is 0."""
_CODES = bytes(0 if chr(c) == " " else ascii_lowercase.find(chr(c)) + 1 or _OTHER for c in range(256))
_SMOOTHING, _PRIOR = 0.3, 3.0
"""Number added to the count of each pair of letters, and weight of the pairs in the estimate of three letters."""


@lru_cache(maxsize=1)
def _information() -> list[list[list[float]]]:
    """Information in bits of each letter, given the two before it. Read on first use."""
    sections = read_sections("casemate.text", "ordinary_words.txt")
    complete = [*ALL_FUNCTION_WORDS, *(word for title in _COMPLETE for word in sections.pop(title).split())]
    begun = [f"{word}?" for title, words in sections.items() if title not in _OTHER_SCRIPTS for word in words.split()]
    text = _ascii(fold_text("  ".join(["", *complete, *begun])))
    codes = np.frombuffer(text.translate(_CODES), np.uint8).astype(np.int64)
    size = _OTHER + 1
    triples = np.bincount((codes[:-2] * size + codes[1:-1]) * size + codes[2:], minlength=size**3)
    counts = triples.reshape(size, size, size).astype(float)
    counts[_OTHER] = counts[:, _OTHER] = counts[:, :, _OTHER] = 0
    pairs = counts.sum(0) + _SMOOTHING
    chances = _PRIOR * pairs / pairs.sum(1, keepdims=True)
    bits = np.log2(counts.sum(2, keepdims=True) + _PRIOR) - np.log2(counts + chances)
    bits[_OTHER] = bits[:, _OTHER] = bits[:, :, _OTHER] = 2 * _RANDOM_BITS
    found: list[list[list[float]]] = bits.tolist()
    return found


def _ascii(folded: str) -> bytes:
    return folded.replace("œ", "oe").replace("æ", "ae").encode("ascii", "replace")


def _resembles(word: str) -> bool:
    codes = _ascii(f"  {word} ").translate(_CODES)
    bits = _information()
    total = sum(bits[a][b][c] for a, b, c in zip(codes, codes[1:], codes[2:], strict=False))
    return total <= _RANDOM_BITS * (len(word) + 1)


resembles_language = FunctionCache(_resembles, 4096).__getitem__
"""Whether a folded word may be of a listed language. Cached.

>>> [resembles_language(word) for word in ("bridge", "gerateverzeichnis", "sœur", "oevqtr", "brdg")]
[True, True, True, False, False]
"""
