"""Chains: common subsequences of an answer and a text, extended word by word while the answer streams.

Unlike the longest common subsequence (LCS) of the whole texts, a chain is local: its neighbors are at most ``MAX_SKIP``
content words apart in the text, and ``MAX_APART`` known words in the answer. So a word takes constant time, and words
that occur by chance far apart form no chain. A chain of ``MIN_CHAIN`` words discloses its words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

MIN_CHAIN = 4
"""Minimum number of content words of a counted chain. Shorter ones occur by chance."""
MAX_SKIP = 3
"""Maximum distance of two neighbors of a chain in the text, in content words."""
MAX_APART = 8
"""Maximum distance of two neighbors of a chain in the answer, in words that the text contains."""
_POSITIONS = 256
"""Number of positions in a text that bit masks distinguish; positions are modulo this number."""
_End: TypeAlias = tuple[int, int, int]
"""End of a chain: time of its last word, length, and words of its start."""
_AFTER = tuple(range(1, MAX_SKIP + 1))
_BEFORE = tuple(-step for step in _AFTER)
"""Steps from a position to those of its neighbors in a chain, nearest first."""
_NONE = 0, 0


@dataclass(frozen=True, slots=True)
class WordPlaces:
    """The positions of a word in a text.

    Attributes:
        places: Positions of the word among the content words, each with the word and the function words before it.
        at: Bit mask of the positions, modulo ``_POSITIONS``.
        before: Bit mask of the ``MAX_SKIP`` positions before each.
        after: Bit mask of the ``MAX_SKIP`` positions after each.
        near: Union of ``before`` and ``after``.
    """

    places: list[tuple[int, int]]
    at: int
    before: int
    after: int
    near: int

    @classmethod
    def of(cls, places: list[tuple[int, int]]) -> WordPlaces:
        """The positions of a word."""
        at, before, after = 0, 0, 0
        for position, _ in places:
            at |= 1 << position % _POSITIONS
            for step in _AFTER:
                before |= 1 << (position - step) % _POSITIONS
                after |= 1 << (position + step) % _POSITIONS
        return cls(places, at, before, after, before | after)


class Chains:
    """The chains of one decoded form of an answer in one text.

    Attributes:
        time: Number of words of the answer so far that the text contains.
    """

    __slots__ = ("_backwards", "_forwards", "_older", "_recent", "time")

    def __init__(self) -> None:
        self.time = self._recent = self._older = 0  # of the last word, and the words of the last ``MAX_APART``
        self._forwards: dict[int, _End] = {}  # for each position, the last chain that ended there
        self._backwards: dict[int, _End] = {}

    def extend(self, word: WordPlaces) -> tuple[int, int]:
        """Adds a word at its positions: forwards, and backwards if that does not disclose it.

        Returns:
            Length of the longest chain of at least ``MIN_CHAIN`` words that the word extends (0 without one), and the
            number of words that these chains disclose.
        """
        self.time = now = self.time + 1
        if not now % MAX_APART:
            self._recent, self._older = 0, self._recent
        self._recent = recent = self._recent | word.at
        near, places = recent | self._older, word.places
        if not word.near & near:
            for position, mask in places:
                self._forwards[position] = self._backwards[position] = now, 1, mask
            return _NONE
        if word.before & near:
            found = _extend(self._forwards, _BEFORE, places, now)
            if found[0]:
                return found
        else:
            for position, mask in places:
                self._forwards[position] = now, 1, mask
        if word.after & near:
            return _extend(self._backwards, _AFTER, places, now)
        for position, mask in places:
            self._backwards[position] = now, 1, mask
        return _NONE


def _extend(
    ends: dict[int, _End], steps: Sequence[int], places: Iterable[tuple[int, int]], now: int
) -> tuple[int, int]:
    """Adds a word in one direction; backwards up to the first disclosed position.

    Args:
        ends: For each position, the last chain that ended there.
        steps: Steps from a position to the positions of the previous word, nearest first.
        places: The positions.
        now: Number of words of the answer so far that the text contains.
    """
    oldest, longest, disclosed, end_at = now - MAX_APART, 0, 0, ends.get
    for at, mask in places:
        length, bits = 0, mask
        for step in steps:  # of equal length, the nearest
            end = end_at(at + step)
            if end and end[1] > length and end[0] >= oldest:
                _, length, bits = end
        length += 1
        bits = mask if length > MIN_CHAIN else bits | mask
        ends[at] = now, length, bits
        if length >= MIN_CHAIN:
            disclosed |= bits
            longest = max(longest, length)
            if steps is _AFTER:
                break
    return longest, disclosed


class FewWords:
    """The words of a form with too few words of each text for a chain. They are not compared with the texts.

    Attributes:
        words: The words, in order.
    """

    def __init__(self) -> None:
        self.words = list[str]()
        self._positions = defaultdict[int, int](int)  # number of positions of these words in each text

    def add(self, words: Sequence[str], holders: Mapping[str, Sequence[tuple[int, WordPlaces]]]) -> list[str]:
        """Adds words of the texts. Returns all words once a text may have a chain of them, until then none."""
        self.words += words
        positions = self._positions
        for word in words:
            for number, places in holders[word]:
                positions[number] += len(places.places)
        return self.words if positions and max(positions.values()) >= MIN_CHAIN else []
