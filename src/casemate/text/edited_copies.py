"""Recognizes edited copies of a text by their words: some words dropped, sentences in another order, text added.

The share of common words among those of the shorter text (the overlap coefficient) does not depend on the order of
words, and dropping words does not lower it. ``benchmarks/units.py`` measures edited copies that are missed, and
distinct documents that are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import numpy as np

from casemate.text.tokens import content_words

MIN_OVERLAP = 0.8
"""Smallest overlap coefficient of two copies. Abstracts on one topic stay below 0.6."""
MIN_NUMBERS = 0.6
"""Smallest share of common numbers of two copies, where numbers count: two forms may differ in nothing else. Texts from
which 22 % of the words were dropped, each at random, have .78 in common."""
MIN_WORDS = 12
"""Distinct words below which two texts are copies only if their words are equal: short texts share words by chance."""
CACHED_TEXTS = 4096
_BITS = 2048
_BLOCK = 256
"""Texts whose pairs with all others are held at once."""


@dataclass(frozen=True, eq=False)
class TextWords:
    """The words of a text.

    Attributes:
        stems: Stems of its content words.
    """

    stems: frozenset[str]

    @cached_property
    def numbers(self) -> frozenset[str]:
        """Stems with a digit."""
        return frozenset(stem for stem in self.stems if any(map(str.isdigit, stem)))

    @cached_property
    def bits(self) -> int:
        """A bit for each stem, at a position by its hash: rejects most pairs of texts in one operation."""
        bits = 0
        for stem in self.stems:
            bits |= 1 << hash(stem) % _BITS
        return bits


@lru_cache(maxsize=CACHED_TEXTS)
def text_words(text: str) -> TextWords:
    """Returns the words of a text. Cached."""
    return TextWords(content_words(text))


def is_edited_copy(first: TextWords, second: TextWords, *, numbers: bool = False) -> bool:
    """Whether two texts are edited copies of each other.

    Args:
        first: The words of one text.
        second: The words of the other.
        numbers: Whether their numbers must agree as well.

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
    needed = MIN_OVERLAP * shorter
    collisions = shorter - small.bits.bit_count()
    if (small.bits & large.bits).bit_count() < needed - collisions:
        return False
    if len(small.stems & large.stems) < needed:
        return False
    fewer = min(len(small.numbers), len(large.numbers))
    return not numbers or len(small.numbers & large.numbers) >= MIN_NUMBERS * fewer


def copy_groups(texts: Sequence[str]) -> tuple[list[int], frozenset[int]]:
    """Groups edited copies, to count them.

    A short text (``MIN_WORDS``) all of whose words are in one larger text says nothing of its own. It must not count,
    but it links no texts: one source may have many texts of one word.

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
    """The first element of a group, if each other element has its parent in the group, and the first itself."""
    while parent[i] != i:
        i = parent[i]
    return i


def _possible_copies(words: Sequence[TextWords]) -> Iterator[tuple[int, int]]:
    """All pairs of texts with enough common bits to be copies, and others; found by matrix products of blocks."""
    sizes = np.array([len(text.stems) for text in words], np.int64)
    hashes = np.fromiter(map(hash, chain.from_iterable(text.stems for text in words)), np.int64)
    bits = np.zeros((len(words), _BITS), np.float32)
    bits[np.repeat(np.arange(len(words)), sizes), hashes % _BITS] = 1
    collisions = sizes - bits.sum(axis=1)
    for start in range(0, len(words), _BLOCK):
        rows = slice(start, start + _BLOCK)
        smaller = np.minimum(sizes[rows, None], sizes[None])
        needed = MIN_OVERLAP * smaller - np.maximum(collisions[rows, None], collisions[None])
        for i, j in np.argwhere(bits[rows] @ bits.T >= needed - 0.5):  # exact counts; half a bit for rounding
            if j < start + i:
                yield start + int(i), int(j)
