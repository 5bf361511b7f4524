"""Estimates how many letters ordinary words encode: by few words in changing order, or by the form of their letters.

``readability`` cannot find such codes, because each word belongs to a language. Two properties of texts replace it:

- **Code words.** A text of a hundred words has many different words. A text that repeats itself has few, but also few
  different runs of words. A code that has one word for each letter, or two words for bits, has few words in many runs.
- **Forms of letters.** Capitals, look-alikes of other alphabets, and full-width letters can each stand for a bit. A
  text does not mix them within many of its words.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence

from casemate.text.disclosure.letters import LAST_LATIN
from casemate.text.disguises import fold_text
from casemate.text.tokens import FunctionCache

_MIN_WORDS, _REPEATED = 96, 5
"""Minimum number of words of a code, and how often each is repeated on average."""
_RUNS, _DIFFERENT = 8, 2 / 3
"""Number of possible runs of words, relative to the words, and minimum share of different ones.

Random words repeat few of so many possible runs. Tables and loops repeat most of theirs.
"""
_LETTER_BITS = math.log2(26)
_FORM_BITS = 5
"""Number of letters whose forms encode one letter."""
_MIXED_SHARE = 0.15
"""Share of letters in words of mixed form, from which forms are a code."""
_VARIANT = "~"
_MIXED = re.compile(f"[a-z][A-Z]+[a-z](?![a-z])|[A-Za-z]{_VARIANT}|{_VARIANT}[A-Za-z]")
"""Capitals inside a word that begin no word of their own, or a variant of a letter next to an ordinary one."""


def _form(code: int) -> str:
    """A letter without accents, ``_VARIANT`` for a variant of an ASCII letter, or a space for other characters."""
    char = chr(code)
    if char.isascii():
        return char
    base = unicodedata.normalize("NFD", char)[0]
    if base.isascii():
        return base
    folded = fold_text(char)
    return _VARIANT if char > LAST_LATIN and folded.isascii() and folded.isalpha() else " "


_FORMS: FunctionCache[int, str] = FunctionCache(_form, 50_000)


def has_mixed_forms(text: str) -> bool:
    """Whether a word of a text mixes forms of letters.

    >>> [has_mixed_forms(text) for text in ("mOuNTain", "br\u0456dge", "getUserID", "Br\u00fccke", "mRNA")]
    [True, True, False, False, False]
    """
    if text.isascii():
        return bool(_MIXED.search(text))
    return bool(_MIXED.search(text.replace(_VARIANT, " ").translate(_FORMS)))


def letters_of_forms(mixed: int, letters: int) -> int:
    """Number of letters that the forms of letters may encode.

    Args:
        mixed: Number of letters in words that mix forms.
        letters: Number of all letters.
    """
    return letters // _FORM_BITS if mixed and mixed >= _MIXED_SHARE * letters else 0


def letters_of_code_words(words: Sequence[str]) -> int:
    """Number of letters that words may encode: 0 unless they are few different ones in many different runs.

    Numbers are left out: they may number the words.

    >>> letters_of_code_words(["yes", "no", "no"] * 60)
    0
    """
    words = [word for word in words if not word.isdigit()]
    count, different = len(words), len(set(words))
    if count < _MIN_WORDS or _REPEATED * different > count:
        return 0
    length = math.ceil(math.log(_RUNS * count) / math.log(max(2, different)))
    runs = set(zip(*[words[i:] for i in range(length)], strict=False))
    is_code = len(runs) >= _DIFFERENT * count
    return int(count * min(1.0, math.log2(different) / _LETTER_BITS)) if is_code else 0
