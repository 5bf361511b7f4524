"""Words that are not names of persons, in eight languages, written for this project.

The words are in ``ordinary_words.txt``, a section for each language. Those of English are complete words, those of
other languages are beginnings of words. ``names`` are words of any of them that are surnames or first names, too, such
as *brook* and *klein*.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

from casemate.text.function_words import ALL_FUNCTION_WORDS
from casemate.text.tokens import FunctionCache, stem
from casemate.text.word_lists import read_sections

_ENGLISH_ENDINGS = ("tion", "tions", "sion", "sions", "ness", "ology", "ical", "ically", "ism", "isms", "ized", "izing")
"""Endings of words that no name has, or hardly any."""
_LONGER = 3
"""Letters before such an ending, at least."""
_ENDINGS = frozenset(
    "e en er es em n s t te ten tet et st est ung ungen lich liche lichen in innen r a o as os i ar ir are ere ire an "
    "am ado ada ados adas ato ata ati ate ido ida idos idas ito ita iti uto ando iendo ó í ió aba ía re ent ons ont é "
    "ée és ées ait aient eur ción ciones ção ções zione zioni mento mentos menti ment ments de den а я о е ё ы и у ю "
    "й ь ой ей ом ем ам ям ах ях ов ев ами ями ет ёт ит ют ут ал ала али ил ила или ить ать ает ают ется ются ый ий "
    "ая ое ые ого его ому ему ых их ым им ния ние нии нием ка ки ку кой ке".split()
)
"""Endings of words of the other languages."""
_LEAST = 4
"""Letters of a beginning to which endings are added, and of each part of a compound, at least."""


@lru_cache(maxsize=1)
def frequent_words() -> frozenset[str]:
    """Frequent words of 29 further languages that are hardly ever names. Read on first use."""
    return frozenset().union(*map(str.split, read_sections("casemate.text", "language_words.txt").values()))


class WordKind(Enum):
    """What a word can be."""

    ORDINARY = "no name"
    EITHER = "an ordinary word, or a name"
    UNLISTED = "in no list: a name, a term, or a word of another language"


@lru_cache(maxsize=1)
def _listed() -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The stems of English words, the beginnings of others, and the words that are names, too. Read on first use."""
    sections = read_sections("casemate.text", "ordinary_words.txt")
    listed = {title: frozenset(words.split()) for title, words in sections.items()}
    english, names = listed.pop("en"), listed.pop("names")
    return frozenset(map(stem, english)), frozenset().union(*listed.values()), names


def _kind(word: str) -> WordKind:
    english, _, names = _listed()
    if word in names:
        return WordKind.EITHER
    if word in ALL_FUNCTION_WORDS or stem(word) in english or _is_derived(word, english) or _is_foreign(word):
        return WordKind.ORDINARY
    return WordKind.UNLISTED


word_kind = FunctionCache(_kind).__getitem__
"""What a word in lower case can be; function words of all languages are ordinary. Cached.

>>> [word_kind(word).name for word in ("brook", "salary", "planning", "kundennummer", "ashgrove")]
['EITHER', 'ORDINARY', 'ORDINARY', 'ORDINARY', 'UNLISTED']
"""


def _is_derived(word: str, english: frozenset[str]) -> bool:
    base = stem(word)
    if any(word.endswith(e) and len(word) >= len(e) + _LONGER for e in _ENGLISH_ENDINGS):
        return True
    doubled = len(base) > _LONGER and base[-1] == base[-2] and base[:-1] in english  # stopped, planning
    return doubled or (word.endswith("ly") and stem(word[:-2]) in english)


def _is_foreign(word: str) -> bool:
    """Whether a word consists of a listed beginning and an ending, or of two of them, as German compounds do."""
    return _is_inflected(word) or any(
        _is_inflected(word[:i]) and _is_inflected(word[i:]) for i in range(_LEAST, len(word) - _LEAST + 1)
    )


def _is_inflected(word: str) -> bool:
    beginnings = _listed()[1]
    return word in beginnings or any(word[:i] in beginnings and word[i:] in _ENDINGS for i in range(_LEAST, len(word)))
