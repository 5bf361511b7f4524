r"""Detects watermark tokens in disguised text, and filters them out of a stream.

A token is found in all forms that ``text.disguises`` decodes, and reversed by letter or by word. It is also found
rotated or mirrored in the alphabet (ROT13 and all others), without its vowels, and with two letters wrong, missing or
added. Two adjacent words of the three suffice, or all three anywhere, also far apart in a stream. Two wrong letters
leave one word intact; looking up intact words finds any number of tokens in one pass. Near each other, the words may
have their letters in another order. Rotated tokens and those without vowels are found only without errors.

A stream is delayed by ``HELD_LETTERS`` letters. Of forms with many letters for each letter of the token (spelling
alphabets), the filter may release the first part before it finds the rest.

Not detected: other letters inserted between the letters, phonetic substitutes, keyed ciphers, and paraphrases.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from casemate.guard.watermarks.tokens import LETTERS, WORD_LETTERS
from casemate.rag.pipeline import closing_stream
from casemate.text.disguises import (
    DecodedText,
    alphabet_differences,
    normalize_letters,
    without_markup,
    without_vowels,
)
from casemate.types import UNKNOWN

MAX_ERRORS = 2
"""Letters that may be wrong, missing or added."""
HELD_LETTERS = 36
"""Letters by which a stream is delayed: a token with errors in base64, the longest code, plus a margin."""
MAX_HELD = 1000
"""Maximum number of delayed characters, for text with few letters."""
SEARCH_INTERVAL = 16
"""New characters after which a stream is searched again."""
_TWO_WORDS = 2 * WORD_LETTERS - 1
"""Differences between the letters of two words."""
_MIRRORED = str.maketrans("abcdefghijklmnopqrstuvwxyz", "azyxwvutsrqponmlkjihgfedcb")
"""Differences in an alphabet in reverse order."""
ANAGRAM = "anagram"
"""Form of a token whose words have their letters in another order."""


class WatermarkMatch(NamedTuple):
    """A token found in a text.

    Attributes:
        form: Form in which it was found, as in ``DecodedText.views``.
        errors: Letters wrong, missing or added; in a rotated token or one without vowels, those not found.
    """

    token: str
    form: str
    errors: int


def _rank(match: WatermarkMatch) -> tuple[int, bool, str]:
    """The order of matches, best first: an exact form is also an anagram."""
    return match.errors, match.form == ANAGRAM, match.form


class WatermarkDetector:
    """Searches texts for a set of tokens.

    Args:
        tokens: From ``TokenGenerator``.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._needles = {needle: token for token in tokens for needle in _spellings(token)}
        self._words: dict[str, list[tuple[str, int]]] = {}  # word -> needles with their offset of the word
        for needle in self._needles:
            for at in range(0, LETTERS, WORD_LETTERS):
                self._words.setdefault(needle[at : at + WORD_LETTERS], []).append((needle, at))
        self._parts: dict[str, set[tuple[str, int]]] = {}  # word, also reversed -> its token and number
        self._sorted: dict[str, set[tuple[str, int]]] = {}  # the same by the sorted letters of a word
        for token in set(self._needles.values()):
            for number, word in enumerate(token.split()):
                self._sorted.setdefault("".join(sorted(word)), set()).add((token, number))
                for spelled in (word, word[::-1]):
                    self._parts.setdefault(spelled, set()).add((token, number))
        self._differences = {text: needle for needle in self._needles for text in _two_word_differences(needle)}
        self._consonants = {without_vowels(needle): needle for needle in self._needles}

    def best_match(self, text: DecodedText) -> WatermarkMatch | None:
        """Returns the match with the fewest errors, if there is one."""
        return min(self._search(text), key=lambda match: (*_rank(match), match.token), default=None)

    def matches(self, text: DecodedText) -> list[WatermarkMatch]:
        """Returns the best match of every token in a text, sorted by token."""
        best: dict[str, WatermarkMatch] = {}
        for match in self._search(text):
            other = best.setdefault(match.token, match)
            best[match.token] = min(other, match, key=_rank)
        return [best[token] for token in sorted(best)]

    def tokens(self, text: DecodedText) -> list[str]:
        """Returns the tokens in a text, sorted."""
        return [match.token for match in self.matches(text)]

    def parts(self, text: DecodedText) -> set[tuple[str, int]]:
        """Returns the words of tokens in a text, also reversed: the token of each and its number, 0 to 2."""
        grams = text.ngrams(WORD_LETTERS).values()
        return {part for found in grams for word in self._parts.keys() & found for part in self._parts[word]}

    def partial_match(self, text: str) -> WatermarkMatch | None:
        """Returns a watermark token whose beginning ends the text, for example in a stream that stops inside the token.

        A beginning of only one word does not count. None if there is no such token.
        """
        end = normalize_letters(text[-10 * LETTERS :])[0][-LETTERS:]
        for needle, token in self._needles.items():
            for length in range(LETTERS - 1, WORD_LETTERS, -1):
                if end.endswith(needle[:length]):
                    return WatermarkMatch(token, "letters", LETTERS - length)
        return None

    def _search(self, text: DecodedText) -> Iterator[WatermarkMatch]:
        ngrams = text.ngrams(WORD_LETTERS)
        for form, views in text.views.items():
            words = self._words.keys() & ngrams[form]
            for word in words:
                for view in views:
                    yield from (WatermarkMatch(self._needles[n], form, e) for n, e in self._verify(word, view))
            yield from (WatermarkMatch(token, form, 0) for token in self._scattered(words))
        for token in chain.from_iterable(map(self._mixed, text.views["letters"])):
            yield WatermarkMatch(token, ANAGRAM, 0)
        for form, found in text.consonant_ngrams(LETTERS // 2).items():
            for letters in self._consonants.keys() & found:
                yield WatermarkMatch(self._needles[self._consonants[letters]], form, LETTERS // 2)
        for form, found in text.difference_ngrams(_TWO_WORDS).items():
            for differences in self._differences.keys() & found:
                needle = self._differences[differences]
                whole = alphabet_differences(needle)
                whole = whole if differences in whole else whole.translate(_MIRRORED)
                seen = any(whole in alphabet_differences(view) for view in text.views[form])
                yield WatermarkMatch(self._needles[needle], form, 0 if seen else WORD_LETTERS)

    def _scattered(self, words: Collection[str]) -> Iterator[str]:
        """Tokens of which all words are among these."""
        if len(words) >= LETTERS // WORD_LETTERS:
            counts = Counter(needle for word in words for needle in {needle for needle, _ in self._words[word]})
            yield from (self._needles[n] for n, count in counts.items() if count == LETTERS // WORD_LETTERS)

    def _mixed(self, view: str) -> Iterator[str]:
        """Tokens of which all words are near each other, with their letters in any order."""
        windows = ("".join(sorted(view[i : i + WORD_LETTERS])) for i in range(len(view) - WORD_LETTERS + 1))
        last: dict[str, dict[int, int]] = {}  # token -> position of each of its words
        for at, window in enumerate(windows):
            for token, number in self._sorted.get(window, ()):
                places = last.setdefault(token, {})
                places[number] = at
                if len(places) == LETTERS // WORD_LETTERS and max(places.values()) - min(places.values()) < 2 * LETTERS:
                    yield token

    def _verify(self, word: str, view: str) -> list[tuple[str, int]]:
        """Compares the needles with this word around each of its occurrences; returns those that match, with errors."""
        found = []
        for occurrence in re.finditer(f"(?={word})", view):
            for needle, at in self._words[word]:
                start = occurrence.start() - at
                part = view[max(start - MAX_ERRORS, 0) : start + LETTERS + MAX_ERRORS]
                errors = substring_distance(needle, part)
                if errors <= MAX_ERRORS or needle[:-WORD_LETTERS] in part or needle[WORD_LETTERS:] in part:
                    found.append((needle, errors))
        return found


class WatermarkFilter:
    """Searches a stream for tokens, and delays text that could be the start of one.

    Attributes:
        found: The first match; no text passes after it.
        finished: Whether the stream was searched to its end, or to the match.

    Args:
        detector: Detects the tokens to stop.
    """

    def __init__(self, detector: WatermarkDetector) -> None:
        self.found: WatermarkMatch | None = None
        self.finished = False
        self._detector, self._held, self._new = detector, "", 0
        self._parts = set[tuple[str, int]]()  # words of tokens in the stream so far

    def feed(self, piece: str) -> str:
        """Adds a piece of the stream; returns the text that may pass."""
        self._held += piece
        self._new += len(piece)
        return self._release(_safe_length(self._held)) if self._new >= SEARCH_INTERVAL else ""

    async def answer(
        self, pieces: AsyncIterator[str], on_match: Callable[[WatermarkMatch], None] = lambda match: None
    ) -> AsyncIterator[str]:
        """Yields an answer with a short delay; cut at a token, then ``UNKNOWN`` if nothing was sent yet.

        Args:
            pieces: The answer; it is closed at the end.
            on_match: Called before the end of a cut answer.
        """
        sent = False
        async with closing_stream(pieces):
            async for piece in pieces:
                if out := self.feed(piece):
                    sent = sent or bool(out.strip())
                    yield out
                if self.found:
                    break
            rest = self.finish()
            if self.found:
                on_match(self.found)
            if rest or (self.found and not sent):
                yield rest or UNKNOWN

    def finish(self) -> str:
        """Returns the remaining text at the end of the stream."""
        rest = self._release(len(self._held))
        self.found, self.finished = self.found or self._detector.partial_match(rest), True
        return "" if self.found else rest

    def _apart(self, text: DecodedText) -> WatermarkMatch | None:
        """Returns a token of which the stream contains all words so far, in any order, with other text between."""
        self._parts |= self._detector.parts(text)
        counts = Counter(token for token, _ in self._parts)
        whole = (token for token, count in counts.items() if count == LETTERS // WORD_LETTERS)
        return next((WatermarkMatch(token, "apart", 0) for token in whole), None)

    def _release(self, count: int) -> str:
        """Releases characters, unless the delayed text contains a token."""
        if self.found is None:
            text = DecodedText(self._held)
            self.found = self._detector.best_match(text) or self._apart(text)
        if self.found:
            self._held = ""
            return ""
        out, self._held, self._new = self._held[:count], self._held[count:], 0
        return out


def substring_distance(needle: str, text: str) -> int:
    """Returns the minimum edit distance between the needle and any substring of the text (Sellers 1980).

    >>> substring_distance("zakeno", "the zaceno!"), substring_distance("abc", "")
    (1, 3)
    """
    row = [0] * (len(text) + 1)
    for i, wanted in enumerate(needle, 1):
        above, row = row, [i]
        for j, char in enumerate(text, 1):
            row.append(min(above[j - 1] + (char != wanted), above[j] + 1, row[j - 1] + 1))
    return min(row)


def _spellings(token: str) -> Iterable[str]:
    """The letters of a token: as generated, reversed by word, by letter, by both."""
    words = token.split()
    for order in (words, words[::-1]):
        yield from ("".join(order), "".join(word[::-1] for word in order))


def _two_word_differences(needle: str) -> Iterable[str]:
    """The differences of two adjacent words, in the alphabet and in the reverse alphabet."""
    for start in range(0, LETTERS - WORD_LETTERS, WORD_LETTERS):
        found = alphabet_differences(needle[start : start + 2 * WORD_LETTERS])
        yield from (found, found.translate(_MIRRORED))


def _safe_length(held: str) -> int:
    """Length of the prefix that cannot be part of an incomplete token."""
    return max(min(_position_from_end(held), _position_from_end(without_markup(held))), len(held) - MAX_HELD)


def _position_from_end(held: str) -> int:
    """Position of the letter from which on ``HELD_LETTERS`` letters follow; 0 if there are fewer."""
    _, positions = normalize_letters(held)
    return positions[-HELD_LETTERS] if len(positions) >= HELD_LETTERS else 0
