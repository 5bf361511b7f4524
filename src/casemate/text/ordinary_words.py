"""English words that are no names of persons, written for this project.

The words are in ``ordinary_words.txt``: ``words`` are no names, ``names`` are words that are surnames or first names,
too, such as *brook* and *grace*.
"""

from __future__ import annotations

from functools import lru_cache

from casemate.text.tokens import stem
from casemate.text.word_lists import read_sections

_ENDINGS = ("tion", "tions", "sion", "sions", "ness", "ology", "ical", "ically", "ism", "isms", "ized", "izing")
"""Endings of words that no name has, or hardly any."""
_LONGER = 3
"""Letters before such an ending, at least."""


@lru_cache(maxsize=1)
def _listed() -> tuple[frozenset[str], frozenset[str]]:
    """The stems of the words, and the words that are names, too. Read on first use."""
    listed = read_sections("casemate.text", "ordinary_words.txt")
    return frozenset(map(stem, listed["words"].split())), frozenset(listed["names"].split())


def may_be_name(word: str) -> bool:
    """Whether a word can be a name: it is no ordinary English word, or one that is a name, too.

    Args:
        word: The word, in lower case and without possessive ending.

    >>> [w for w in ("ashgrove", "brook", "salary", "stopped", "slowly", "reorganization") if may_be_name(w)]
    ['ashgrove', 'brook']
    """
    stems, names = _listed()
    if word in names:
        return True
    base = stem(word)
    if base in stems or any(word.endswith(e) and len(word) >= len(e) + _LONGER for e in _ENDINGS):
        return False
    doubled = len(base) > _LONGER and base[-1] == base[-2] and base[:-1] in stems  # stopped, planning
    return not doubled and not (word.endswith("ly") and stem(word[:-2]) in stems)
