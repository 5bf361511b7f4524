"""Models of the letters of languages, by script. A word that is less probable than random letters is unreadable.

A model gives the information of each letter after the two before it (Shannon 1951). It is estimated from listed words
of all languages of a script. Short records and tables have too few words for their own model. An answer can be in
another language than its documents.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import lru_cache

from casemate.text.disguises import fold_text
from casemate.text.function_words import ALL_FUNCTION_WORDS
from casemate.text.tokens import FunctionCache
from casemate.text.word_lists import read_sections

_LATIN = "LATIN"
_LISTS = "ordinary_words.txt", "language_words.txt"
"""Files with words of languages."""
_BEGINNINGS = frozenset({"de", "es", "fr", "it", "nl", "pt", "ru"})
"""Sections with beginnings of words."""
_SMOOTHING, _PRIOR = 0.3, 3.0
"""Number added to the count of each pair of letters, and weight of the pairs in the estimate of three letters."""
_UNKNOWN_END = "?"
_REPLACED = str.maketrans({"œ": "oe", "æ": "ae", "ø": "o", "đ": "d", "ð": "d", "þ": "th", "ł": "l", "-": " "})


class _Letters:
    """The letters of a script.

    Args:
        words: Words of its languages, folded. ``?`` at the end of a word stands for an unknown end.
    """

    def __init__(self, words: Iterable[str]) -> None:
        text = f"  {'  '.join(words)} ".translate(_REPLACED)
        found = Counter(map("".join, zip(text, text[1:], text[2:], strict=False)))
        self._triples = {t: n for t, n in found.items() if _UNKNOWN_END not in t and not t.endswith("  ")}
        self._contexts, self._pairs, self._firsts = Counter[str](), Counter[str](), Counter[str]()
        for triple, count in self._triples.items():
            self._contexts[triple[:2]] += count
            self._pairs[triple[1:]] += count
            self._firsts[triple[1]] += count
        self._size = len(self._firsts)
        self._random_bits = math.log2(self._size)
        self.explains = FunctionCache(self._explains, 4096).__getitem__

    def _information(self, triple: str) -> float:
        """Information in bits of the last of three letters; a space is a letter."""
        pair = (self._pairs[triple[1:]] + _SMOOTHING) / (self._firsts[triple[1]] + _SMOOTHING * self._size)
        return -math.log2((self._triples.get(triple, 0) + _PRIOR * pair) / (self._contexts[triple[:2]] + _PRIOR))

    def _explains(self, word: str) -> bool:
        text = f"  {word.translate(_REPLACED)} "
        triples = map("".join, zip(text, text[1:], text[2:], strict=False))
        return sum(map(self._information, triples)) <= self._random_bits * (len(word) + 1)


@lru_cache(maxsize=1)
def _models() -> dict[str, _Letters]:
    """The model of each script, by the first word of its letters' Unicode names. Read on first use."""
    words = list(ALL_FUNCTION_WORDS)
    for file in _LISTS:
        for title, listed in read_sections("casemate.text", file).items():
            words += listed.split() if title not in _BEGINNINGS else [w + _UNKNOWN_END for w in listed.split()]
    by_script = defaultdict[str, list[str]](list)
    for word in words:
        by_script[unicodedata.name(word[0]).partition(" ")[0]].append(word)
    return {script: _Letters(fold_text(" ".join(found)).split()) for script, found in by_script.items()}


def resembles_language(word: str, scripts: Iterable[str] = ()) -> bool:
    """Whether a folded word may be of a listed language, in Latin or in one of some other scripts. Cached.

    >>> [resembles_language(word) for word in ("bridge", "gerateverzeichnis", "sœur", "przedsiebiorstwo", "oevqtr")]
    [True, True, True, True, False]
    """
    models = _models()
    return any(models[script].explains(word) for script in (_LATIN, *scripts) if script in models)
