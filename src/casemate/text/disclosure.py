r"""Counts the words of given texts that an answer discloses, in whatever form, while the answer streams.

The content words of an answer are compared with those of each text. A *chain* is a common subsequence of both in which
neighbors are at most ``MAX_SKIP`` content words apart in the text, forwards or backwards. Words of the answer that the
text does not contain never break a chain, so numbers and fillers between the words hide nothing. A chain of
``MIN_CHAIN`` words discloses its words, and the function words before each.

Parts of the answer with no word of the texts are decoded (``casemate.text.disguises``), and searched for the texts'
words run together, reversed, or rotated in the alphabet.

Work is linear in the answer: every decoding is read once, and a word is compared with at most ``MAX_OCCURRENCES``
positions of each text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import product
from statistics import median_low
from string import ascii_lowercase
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.text.disguises import decodings, fold_text, only_letters, without_vowels
from casemate.text.tokens import STOP_WORDS

MIN_CHAIN = 4
"""Content words of a chain from which it counts. Shorter ones occur by chance."""
MAX_SKIP = 3
"""Distance in the text, in content words, of two neighbors of a chain."""
MAX_APART = 8
"""Distance in the answer of two neighbors of a chain, counting words that the text contains."""
MAX_OCCURRENCES = 6
"""Positions of a word in one text that are compared."""
BLOCK, MAX_BLOCK = 192, 2000
"""Letters and digits without a word of the texts after which these are decoded; characters, at the latest."""
SIGNS_PER_LETTER = 4
"""Characters that may encode one letter."""
_MIN_STREAM = 4
"""Letters of a word that is recognized without spaces around it."""
_LEAST_LETTERS = 0.35
"""Share of letters below which a decoding is noise: a fifth of random bytes are letters."""
_PERMUTED = frozenset(("markup", "leet", "script", "swapped", "doubled", "initials"))
"""Forms whose letters are not tried in other alphabets."""
_WORD = re.compile(r"[^\W_]+")
_PIECE = re.compile(r"(?<!\s)\s*\S+")
_ROTATIONS = [ascii_lowercase[k:] + ascii_lowercase[:k] for k in range(26)]
_ALPHABETS = [*_ROTATIONS, *(alphabet[::-1] for alphabet in _ROTATIONS)]
"""Rotations of the alphabet and of its reverse; the first is the alphabet itself."""
_ALPHABET_CODES = np.array([[ord(c) - 97 for c in alphabet] for alphabet in _ALPHABETS])
_TRIED_ALPHABETS = 2
_Steps: TypeAlias = tuple[int, int, int]
"""From a position to the ends of chains that it may extend: as many as ``MAX_SKIP``, forwards or backwards."""
_Ends: TypeAlias = dict[int, tuple[int, int, int]]
"""For each position, the length of the chain that ends there, the words of its start, and the time."""


def _is_content(word: str) -> bool:
    return word not in STOP_WORDS and (len(word) > 1 or word.isdigit())


def _letter_counts(letters: str) -> npt.NDArray[np.int64]:
    return np.bincount(np.frombuffer(letters.encode(), np.uint8) - 97, minlength=26)


class _IndexedText:
    """The content words of a text.

    Attributes:
        length: Number of all words.
        places: For each content word, its positions among these, each with a bit mask of the word and of the function
            words before it, among all words.
        prefixes: The words of ``_MIN_STREAM`` letters and more, by their first letters, the longest first.
        skeletons: These words by their consonants.
        frequencies: Counts of their letters.
    """

    def __init__(self, text: str) -> None:
        self.places: dict[str, list[tuple[int, int]]] = {}
        start, at, self.length = 0, 0, 0
        for self.length, word in enumerate(_WORD.findall(fold_text(text)), 1):
            if _is_content(word):
                places = self.places.setdefault(word, [])
                if len(places) < MAX_OCCURRENCES:
                    places.append((at, (1 << self.length) - (1 << start)))
                start, at = self.length, at + 1
        long_words = [w for w in self.places if len(w) >= _MIN_STREAM and only_letters(w) == w]
        self.prefixes: dict[str, list[str]] = {}
        for word in sorted(long_words, key=len, reverse=True):
            self.prefixes.setdefault(word[:_MIN_STREAM], []).append(word)
        self.skeletons = {skeleton: w for w in long_words if len(skeleton := without_vowels(w)) > 2}
        self.frequencies = _letter_counts("".join(long_words))


_indexed = lru_cache(maxsize=1024)(_IndexedText)


class DisclosureCounter:
    """Counts the words of some texts that one answer discloses.

    Args:
        texts: The texts in the context.
        question: The client's question; what it contains is not disclosed to the client.
        unseen: Texts that were not in the context, as the null: what an answer has in common with these is chance.

    Attributes:
        covered: For each text, a bit mask of its disclosed words.
        credited: The same, but each word of the answer counts for one text only: that of the longest chain.
        disclosed_words: Number of words disclosed so far, as credited.
        lengths: For each text, its number of words.
        steps: Comparisons made so far.

    >>> counter = DisclosureCounter(["Divers found deep cracks in both northern piers of the bridge."])
    >>> counter.add(" 1.DIVERS 2.FOUND 3.DEEP 4.CRACKS")
    >>> counter.disclosed_words, counter.covered, counter.lengths
    (4, [15], [11])
    """

    def __init__(self, texts: Sequence[str], question: str = "", unseen: Sequence[str] = ()) -> None:
        self.steps = 0
        self._shown = len(texts)
        self._texts = [_indexed(text) for text in (*texts, *unseen)]
        self.lengths = [text.length for text in self._texts[: self._shown]]
        self.bits = [0] * len(self._texts)
        self._credited = [0] * len(texts)
        self._chains: dict[str, _Chains] = {}
        self._places: dict[str, list[tuple[int, list[tuple[int, int]]]]] = {}
        self._undecoded, self._letters, self._size = list[str](), 0, 0
        self._asked = [0] * len(self._texts)
        if question:
            self._read("question", _WORD.findall(fold_text(question)))
            self._asked, self.bits = self.bits, [0] * len(self._texts)
            self._credited, self._chains = [0] * len(texts), {}

    @property
    def covered(self) -> list[int]:
        """For each text, a bit mask of its disclosed words."""
        return [bits & ~asked for bits, asked in zip(self.bits[: self._shown], self._asked, strict=False)]

    @property
    def credited(self) -> list[int]:
        """For each text, a bit mask of the words that it discloses and no other text with a longer chain."""
        return [bits & ~asked for bits, asked in zip(self._credited, self._asked, strict=False)]

    @property
    def disclosed_words(self) -> int:
        """Number of words disclosed so far."""
        return sum(bits.bit_count() for bits in self.credited)

    @property
    def undecoded_letters(self) -> int:
        """Number of letters that are not decoded yet; of signs such as those of Morse code, one for each few."""
        return max(self._letters, self._size // SIGNS_PER_LETTER)

    @property
    def expected(self) -> int:
        """Words of a text that an answer discloses by chance: the median over the unseen texts; 0 without any."""
        return median_low([bits.bit_count() for bits in self.bits[self._shown :]] or [0])

    def read(self, answer: str) -> list[int]:
        """Adds a whole answer; returns ``covered``."""
        for piece in _PIECE.findall(answer):
            self.add(piece)
        self.finish()
        return self.covered

    def add(self, text: str) -> None:
        """Adds the next part of the answer, which ends at the end of a word and begins with the space before it."""
        words = _WORD.findall(fold_text(text))
        known = sum([len(w) for w in self._read("plain", words) if not w.isdigit()])
        length = sum(map(len, words))
        if 2 * known > length or (not known and words and all(len(w) > 1 and w in STOP_WORDS for w in words)):
            return
        self._undecoded.append(text)
        self._letters += length
        self._size += len(text)
        if self._letters >= BLOCK or self._size >= MAX_BLOCK:
            self.finish()

    def finish(self) -> None:
        """Decodes what is left."""
        block, self._undecoded, self._letters, self._size = "".join(self._undecoded), [], 0, 0
        if not self._texts:
            return
        for form, text in decodings(block):
            letters = only_letters(text)
            if form == "plain" or len(letters) >= _LEAST_LETTERS * len(text):
                words = _WORD.findall(text)
                if form != "plain":
                    self._read(form, words)
                self._read(f"{form}, reversed", [word[::-1] for word in words])
                self._read(f"{form}, consonants", self._complete(words))
                self._read_letters(form, letters)

    @cached_property
    def _vocabulary(self) -> frozenset[str]:
        return frozenset().union(*(text.places for text in self._texts))

    @cached_property
    def _prefixes(self) -> frozenset[str]:
        return frozenset().union(*(text.prefixes for text in self._texts))

    @cached_property
    def _alphabet_weights(self) -> npt.NDArray[np.int64]:
        """For each alphabet but the first, the frequency of each of its letters in the texts."""
        frequencies: npt.NDArray[np.int64] = np.sum([text.frequencies for text in self._texts], axis=0)
        weights: npt.NDArray[np.int64] = frequencies[_ALPHABET_CODES[1:]]
        return weights

    def _complete(self, words: Iterable[str]) -> list[str]:
        """The words of the texts that have the consonants of words without vowels."""
        bare = [w for w in words if len(w) > 2 and without_vowels(w) == w]
        return [text.skeletons[w] for w in bare for text in self._texts if w in text.skeletons]

    def _read_letters(self, form: str, letters: str) -> None:
        """Reads letters without spaces: as they are, and in the alphabets of which the frequencies fit best."""
        alphabets = [0]
        if form not in _PERMUTED:
            fit = self._alphabet_weights @ _letter_counts(letters)
            alphabets += (np.argsort(-fit)[:_TRIED_ALPHABETS] + 1).tolist()
        for number in alphabets:
            stream = letters.translate(str.maketrans(ascii_lowercase, _ALPHABETS[number])) if number else letters
            self._read(f"{form}, alphabet {number}", self._segment(stream))
            self._read(f"{form}, alphabet {number}, reversed", self._segment(stream[::-1]))

    def _segment(self, letters: str) -> list[str]:
        """The longer words of the texts in a sequence of letters, from left to right, the longest first."""
        found, end, prefixes = list[str](), 0, self._prefixes
        self.steps += len(letters)
        for at in [i for i in range(len(letters) - _MIN_STREAM + 1) if letters[i : i + _MIN_STREAM] in prefixes]:
            if at >= end:
                prefix = letters[at : at + _MIN_STREAM]
                words = [w for t in self._texts for w in t.prefixes.get(prefix, ()) if letters.startswith(w, at)]
                if words:
                    found.append(max(words, key=len))
                    end = at + len(found[-1])
        return found

    def _read(self, form: str, words: Iterable[str]) -> list[str]:
        """Extends the chains of a form; returns those words that a text contains."""
        known = [word for word in words if word in self._vocabulary]
        if not known:
            return known
        chains = self._chains.get(form)
        if chains is None:
            chains = self._chains[form] = _Chains(len(self.bits))
        for word in known:
            best = (0, 0, 0)
            for number, places in self._occurrences(word):
                self.steps += 2 * MAX_SKIP * len(places)
                length, bits = chains.extend(number, places)
                self.bits[number] |= bits
                if length > best[0] and number < self._shown:
                    best = length, number, bits
            if best[0]:
                self._credited[best[1]] |= best[2]
        return known

    def _occurrences(self, word: str) -> list[tuple[int, list[tuple[int, int]]]]:
        """Returns the numbers of the texts that contain a word, with its places in each."""
        found = self._places.get(word)
        if found is None:
            found = [(n, places) for n, text in enumerate(self._texts) if (places := text.places.get(word))]
            self._places[word] = found
        return found


class _Chains:
    """Chains that end at each position of each text, in both directions."""

    def __init__(self, texts: int) -> None:
        self._ends: list[tuple[tuple[_Ends, _Steps], ...]] = [
            (({}, (-1, -2, -3)), ({}, (1, 2, 3))) for _ in range(texts)
        ]
        self._time = [0] * texts

    def extend(self, text: int, places: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """Adds a word at its positions in a text.

        Returns:
            The length of the longest chain of ``MIN_CHAIN`` words and more that the word extends, 0 if there is none;
            and the words that such chains disclose.
        """
        longest, disclosed = 0, 0
        self._time[text] = now = self._time[text] + 1
        oldest = now - MAX_APART
        for (ends, (a, b, c)), (at, mask) in product(self._ends[text], places):
            if longest and a > 0:
                break  # the word is disclosed forwards
            length, bits = 0, 0
            for before in (ends.get(at + a), ends.get(at + b), ends.get(at + c)):
                if before is not None and before[0] > length and before[2] >= oldest:
                    length, bits, _ = before
            if length < MIN_CHAIN:
                bits |= mask
            else:
                bits = mask
            ends[at] = length + 1, bits, now
            if length + 1 >= MIN_CHAIN:
                disclosed |= bits
                longest = max(longest, length + 1)
        return longest, disclosed
