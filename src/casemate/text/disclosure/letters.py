"""Letters as numbers, and spellings of words with other letters."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from casemate.text.tokens import FunctionCache

MIN_LETTERS = 4
"""Minimum length of a word that is recognized without spaces around it."""
LONG_WORD = 20
"""Maximum length of a word that is compared with misspelled words."""
LETTER_CODES = 64
"""Codes of letters in pairs are below this number, so letters of one alphabet differ.

It is also the code of all letters of other scripts.
"""
_OTHER_SCRIPT = "\U0010ffff"
"""Placeholder for a letter of a script that the texts do not use."""
LAST_LATIN = "\u017f"
"""The last letter common to all scripts."""
HASHES = 1 << 16
"""Range of 16-bit hashes."""
SPELLING_HASHES = 1 << 18
"""Range of hashes of misspelled words. Ten texts of 100 words have about 7,000."""


def sorted_letters(word: str) -> str:
    """The letters of a word in alphabetical order."""
    return "".join(sorted(word))


def deletions(word: str) -> list[str]:
    """All results of deleting one letter of a word."""
    return [word[:i] + word[i + 1 :] for i in range(len(word))]


def hash_codes(words: Iterable[str]) -> list[int]:
    """A number below ``SPELLING_HASHES`` for each word; the same for the same word in one process."""
    return [hash(word) % SPELLING_HASHES for word in words]


def letter_codes(letters: str) -> npt.NDArray[np.uint16]:
    """The numbers of lower-case letters, 0 to 25."""
    return np.frombuffer(letters.encode(), np.uint8).astype(np.uint16) - 97


def ngram_codes(codes: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """A number below ``HASHES`` for each run of ``MIN_LETTERS`` letters; the same for the same letters."""
    runs = codes.shape[-1] - MIN_LETTERS + 1
    found = codes[..., : max(0, runs)]
    for k in range(1, MIN_LETTERS):
        found = 26 * found + codes[..., k : max(k, runs + k)]  # modulo ``HASHES``
    return found


def letter_pairs(words: Iterable[str], scripts: Collection[str]) -> npt.NDArray[np.uint16]:
    """A number for each pair of neighboring letters in words, including the spaces around each word.

    Args:
        words: The words.
        scripts: Scripts that are distinguished from all others.
    """
    text = f" {' '.join(words)} "
    if text.isascii():
        codes = np.frombuffer(text.encode(), np.uint8).astype(np.uint16) % LETTER_CODES
    else:
        others = (char for char in set(text) if char > LAST_LATIN and SCRIPTS[char] not in scripts)
        text = text.translate({ord(char): _OTHER_SCRIPT for char in others})
        found = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        codes = np.where(found == ord(_OTHER_SCRIPT), LETTER_CODES, found % LETTER_CODES).astype(np.uint16)
    return codes[:-1] * (LETTER_CODES + 1) + codes[1:]


def _script(char: str) -> str:
    """The script of a letter.

    Each rare Latin letter counts as its own script, because some have the codes of an alphabet.
    """
    name = unicodedata.name(char, "")
    return char if name.startswith("LATIN") else name.partition(" ")[0]


SCRIPTS = FunctionCache(_script)
"""The script of a letter, see ``_script``."""
