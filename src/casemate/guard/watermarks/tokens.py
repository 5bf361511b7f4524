"""Generates watermark tokens from a secret key.

A token is three pronounceable words such as "zakeno mirodo pilafe": easy to copy, hard to guess, and in no language.
The words follow from the key and from what the token identifies, so the key is enough to generate them again. The last
syllables are a checksum.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from itertools import product

from casemate.text.disguises import DecodedText

CONSONANTS, VOWELS = "bdfghjklmnprstvz", "aeio"
SYLLABLES = tuple(map("".join, product(CONSONANTS, VOWELS)))
"""The 64 syllables, 6 bits each."""
WORDS, WORD_LETTERS = 3, 6
LETTERS = WORDS * WORD_LETTERS
CHECK_SYLLABLES = 2
"""Syllables of the checksum; the other 7 identify the subject."""
_SPELLED = re.compile(f"(?=((?:[{CONSONANTS}][{VOWELS}]){{{LETTERS // 2}}}))")


class TokenGenerator:
    """Generates tokens.

    Args:
        key: The secret. Anyone with the key can generate the same tokens.
    """

    def __init__(self, key: str) -> None:
        self._key = key.encode(errors="surrogatepass")

    def token(self, *subject: str) -> str:
        """Returns the token of a subject: always the same, and different for another subject.

        >>> one, other = TokenGenerator("k"), TokenGenerator("k")
        >>> one.token("request", "chunk") == other.token("request", "chunk") != other.token("another chunk")
        True
        """
        body = self._syllables("mark", subject, LETTERS // 2 - CHECK_SYLLABLES)
        return split_words(body + self._syllables("check", (body,), CHECK_SYLLABLES))

    def is_genuine(self, token: str) -> bool:
        """Whether the checksum is valid for this key; 1 in 4,096 other texts of the same form passes too.

        >>> token = TokenGenerator("k").token("chunk")
        >>> TokenGenerator("k").is_genuine(token), TokenGenerator("j").is_genuine(token)
        (True, False)
        """
        words = split_words("".join(token.lower().split()))
        body = words.replace(" ", "")[: -2 * CHECK_SYLLABLES]
        if len(words) != LETTERS + WORDS - 1:
            return False
        return words == split_words(body + self._syllables("check", (body,), CHECK_SYLLABLES))

    def find_genuine(self, text: DecodedText) -> list[str]:
        """Returns all tokens in a text with a valid checksum, of any subject; spelled without errors."""
        spelled = (m[1] for views in text.views.values() for view in views for m in _SPELLED.finditer(view))
        return sorted({split_words(letters) for letters in spelled if self.is_genuine(letters)})

    def uniform(self, *subject: str) -> float:
        """Returns a pseudorandom number in [0, 1) that depends on the subject, for sampling."""
        return int.from_bytes(self._digest("share", subject)[:6], "big") / 2**48

    def _syllables(self, use: str, subject: tuple[str, ...], count: int) -> str:
        bits = int.from_bytes(self._digest(use, subject), "big")
        return "".join(SYLLABLES[bits >> 6 * i & 63] for i in range(count))

    def _digest(self, use: str, subject: tuple[str, ...]) -> bytes:
        return hmac.new(self._key, json.dumps([use, *subject]).encode(), hashlib.sha256).digest()


def split_words(letters: str) -> str:
    """Splits letters into words.

    >>> split_words("zakenomirodopilafe")
    'zakeno mirodo pilafe'
    """
    return " ".join(letters[i : i + WORD_LETTERS] for i in range(0, len(letters), WORD_LETTERS))
