"""Recognizes edited copies of a text by their words: dropped words, reordered sentences, added text.

The measure is the overlap coefficient: the share of common words among those of the shorter text. It does not depend on
the order of words, and dropped words do not reduce it. ``benchmarks/units.py`` measures missed edited copies, and
merged distinct documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from operator import or_
from unicodedata import normalize

from casemate.text.disguises import INVISIBLE
from casemate.text.tokens import content_words

MIN_OVERLAP = 0.8
"""Minimum overlap coefficient of two copies. Abstracts on one topic stay below 0.6."""
MIN_NUMBERS = 0.6
"""Minimum share of common numbers of two copies, where numbers count: two forms may differ only in numbers.

Texts from which 22 % of the words were dropped, each at random, have .78 in common.
"""
MIN_PART, MIN_PART_WORDS = 0.5, 32
"""Where texts must be one record: a text with fewer distinct words is a copy only of texts at most twice as long.

The last chunk of a source is often short, and may consist of boilerplate that many records have.
"""
MIN_WORDS = 12
"""Below this number of distinct words, two texts are copies only if their words are equal: short texts share words by
chance.
"""
CACHED_TEXTS = 4096
_BITS = 2048
_HIDDEN = re.compile(f"[{INVISIBLE}]+")


@dataclass(frozen=True, eq=False)
class TextWords:
    """The words of a text."""

    stems: frozenset[str]

    @cached_property
    def numbers(self) -> frozenset[str]:
        """Stems with a digit."""
        return frozenset(stem for stem in self.stems if any(map(str.isdigit, stem)))

    @cached_property
    def bits(self) -> int:
        """One bit for each stem, at a position by its hash. It rejects most pairs of texts in one operation."""
        return reduce(or_, [1 << hash(stem) % _BITS for stem in self.stems], 0)


@lru_cache(maxsize=CACHED_TEXTS)
def text_words(text: str) -> TextWords:
    r"""Returns the words of a text. Cached.

    Compatible Unicode forms of a text, such as decomposed accents, have the same words, with invisible characters, too.

    >>> text_words("B\u00fcro of\ufb01cial").stems == text_words("Bu\u0308ro of\u00adficial").stems
    True
    """
    return TextWords(content_words(text if text.isascii() else _HIDDEN.sub("", normalize("NFKC", text))))


def is_edited_copy(first: TextWords, second: TextWords, *, same_record: bool = False) -> bool:
    """Whether two texts are edited copies of each other.

    Args:
        first: The words of one text.
        second: The words of the other.
        same_record: Whether they must be one record: their numbers agree as well (``MIN_NUMBERS``), and neither is a
            short extract of the other (``MIN_PART``).

    >>> text = "The north bridge opened in 1932; its toll pays for the ferry, two red lamps and the old harbor wall."
    >>> edited = "Red lamps and the old harbor wall. The toll pays for the ferry, two. The north bridge in 1932."
    >>> is_edited_copy(text_words(text), text_words(edited))
    True
    >>> is_edited_copy(text_words(text), text_words("The south bridge opened in 1932; it has no toll and no lamps."))
    False
    """
    small, large = (first, second) if len(first.stems) <= len(second.stems) else (second, first)
    shorter = len(small.stems)
    if shorter < MIN_WORDS:
        return small.stems == large.stems and shorter > 0
    if same_record and shorter < min(MIN_PART * len(large.stems), MIN_PART_WORDS):
        return False
    needed = MIN_OVERLAP * shorter
    collisions = shorter - small.bits.bit_count()
    if (small.bits & large.bits).bit_count() < needed - collisions:
        return False
    if len(small.stems & large.stems) < needed:
        return False
    fewer = min(len(small.numbers), len(large.numbers))
    return not same_record or len(small.numbers & large.numbers) >= MIN_NUMBERS * fewer


def copy_groups(texts: Sequence[str]) -> tuple[list[int], frozenset[int]]:
    """Groups edited copies, to count them.

    A short text (``MIN_WORDS``) is not counted if one longer text contains all of its words. It does not link other
    texts, because one source may have many one-word texts.

    Returns:
        For each text the position of the first text of its group, and the positions of the texts that do not count.

    >>> copy_groups(["a note", "another text", "A NOTE."])
    ([0, 1, 0], frozenset())
    >>> copy_groups(["The ferry leaves at noon.", "The ferry leaves.", "The ferry sank."])
    ([0, 1, 2], frozenset({1}))
    """
    words = [text_words(text) for text in texts]
    parent, contained = list(range(len(texts))), set[int]()
    for i, j in _possible_copies(words):
        short, long = sorted((i, j), key=lambda k: len(words[k].stems))
        if is_edited_copy(words[i], words[j]):
            low, high = sorted((root(parent, i), root(parent, j)))
            parent[high] = low
        elif 0 < len(words[short].stems) < MIN_WORDS and words[short].stems < words[long].stems:
            contained.add(short)
    return [root(parent, i) for i in range(len(texts))], frozenset(contained)


def root(parent: Sequence[int], i: int) -> int:
    """The representative of a group in a union-find structure: the element that is its own parent."""
    while parent[i] != i:
        i = parent[i]
    return i


def _possible_copies(words: Sequence[TextWords]) -> Iterator[tuple[int, int]]:
    """Pairs of texts that may be copies: a superset, by common bits.

    Without a matrix product, which takes as long for the hits of a query, and whose threads wait for each other.
    """
    order = sorted(range(len(words)), key=lambda i: len(words[i].stems))
    bits = [words[i].bits for i in order]
    sizes = [len(words[i].stems) for i in order]
    needed = [MIN_OVERLAP * size - (size - own.bit_count()) for size, own in zip(sizes, bits, strict=True)]
    for place, own in enumerate(bits):
        smaller = zip(order[:place], bits, needed, strict=False)
        for i in [i for i, other, least in smaller if (own & other).bit_count() >= least]:
            yield i, order[place]
