"""Known words, of a tokenizer's vocabulary or of texts that were read: what an answer in their language consists of."""

from __future__ import annotations

import re
from collections.abc import Iterable

from casemate.text.disguises import fold_text
from casemate.text.tokens import STOP_WORDS, stem

MAX_STEMS = 20_000
"""Stems from which texts add no more."""
_WORD = re.compile(r"[^\W_]+")
_MIN_LETTERS = 3
"""Letters of a word that a vocabulary makes known. Shorter tokens are fragments, and occur in every cipher."""


class Vocabulary:
    """Known words, by their stems.

    Args:
        words: Words, such as the tokens of an embedder.

    >>> known = Vocabulary(["divers", "crack"])
    >>> known.unknown(["the", "diver", "cracked", "gur", "qviref"])
    ['gur', 'qviref']
    """

    def __init__(self, words: Iterable[str] = ()) -> None:
        self._stems = set(map(stem, STOP_WORDS))
        self._add(words)

    def add_text(self, text: str) -> None:
        """Makes the words of a text known; nothing once there are ``MAX_STEMS``."""
        if len(self._stems) < MAX_STEMS:
            self._add(_WORD.findall(fold_text(text)))

    def unknown(self, words: Iterable[str]) -> list[str]:
        """Returns the words, in lower case, of which the stem is not known."""
        return [word for word in words if stem(word) not in self._stems]

    def _add(self, words: Iterable[str]) -> None:
        self._stems.update(stem(word) for word in words if len(word) >= _MIN_LETTERS)
