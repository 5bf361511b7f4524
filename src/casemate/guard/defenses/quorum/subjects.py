"""What a question is about, and whether a unit is about something else.

**A unit is about another subject if it lacks a word of the question that is no ordinary word**, such as a name or code.
Letter case, order and separators do not matter. The decision depends on the question, the unit and lists of words,
never on other units. Otherwise, the presence of a record would decide whether others abstain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from casemate.text.function_words import ALL_FUNCTION_WORDS
from casemate.text.ordinary_words import WordKind, word_kind
from casemate.text.sentences import sentences
from casemate.text.tokens import LETTERS, stem
from casemate.text.unspaced import asked_stretches, is_spaceless, text_parts

_WORD = re.compile(LETTERS)
_RUN = re.compile(r"[^\W_]+")
_INVISIBLE = re.compile("[\xad\u200c\u200d\u2060\ufeff]")
"""Invisible characters inside a word: soft hyphen, joiners. A zero-width space (U+200B) separates words."""
_PARTICLES = frozenset(
    "de la las los le del della di da do dos das du des von van vom zu zur zum der den dem ten ter te al el bin ibn abu"
    " y e und".split()
)
"""Words between parts of a name. So are initials."""
_INTERROGATIVES = frozenset("when how what who where which why".split())
"""Words after which *will*, *may* and *long* are no names."""
_NEAR = 3
"""Words between which parts of a name are neighbors, as in *Ann de la Cruz*."""
MAX_MISSING = 1
"""Pairs of neighboring clusters of a question that a unit may lack in a row, in scripts without spaces.

Where words are in another order, one pair is missing. Where a name is another one, two or more are
(``benchmarks/unspaced.py``).
"""
_CODE_LETTERS, _CODE_DIGITS = 3, 5
"""Letters of a part of a code without digits, at most; digits of a code without letters, at least."""
_CODE_SEPARATOR = re.compile(r"[ ./_:\\-]{0,3}")
_YEAR = re.compile(r"(?:1\d|20)\d\d")
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*%?")
_CACHED = 4096


@dataclass(frozen=True, slots=True)
class Subject:
    """What a unit must contain.

    Attributes:
        words: Stems of words that are required.
        pairs: Stems of ordinary words that are required as neighbors, as in *Grace Long*.
        codes: Patterns of codes, such as customer numbers, with any separators.
        stretches: In scripts without spaces, runs of neighboring clusters in pairs. See ``MAX_MISSING``.
        known: Whether the question's language is known: it has an ordinary word. Otherwise ``words`` has only names
            whose words have a capital.
    """

    words: frozenset[str]
    pairs: tuple[tuple[str, str], ...]
    codes: tuple[re.Pattern[str], ...]
    stretches: tuple[tuple[str, ...], ...]
    known: bool

    @classmethod
    def of(cls, text: str, named: Iterator[str]) -> Subject:
        """Reads a question.

        Args:
            text: The question.
            named: Words of names of several words with capitals, in lower case.
        """
        codes = [*_codes(text)]
        rest = _WORD.findall(_without(text, codes))
        cased = [w for w in map(str.lower, rest) if w.upper() != w and not is_spaceless(w)]
        caseless = any(w.isalpha() and w.upper() == w.lower() and not is_spaceless(w) for w in rest)
        known = not caseless and (len(cased) <= 2 or any(word_kind(w) is WordKind.ORDINARY for w in cased))
        found = [*_names(_without(text, codes))] if known else []
        near = [
            pair
            for pair in found
            if all(word_kind(word) is WordKind.EITHER for word in pair) or not ALL_FUNCTION_WORDS.isdisjoint(pair)
        ]
        words = {w for w in cased if known and word_kind(w) is WordKind.UNLISTED and len(w) > 1}
        words.update(word for pair in found if pair not in near for word in pair)
        words.update(part for name in named for part in _WORD.findall(name) if len(part) > 1)
        pairs = tuple((stem(a), stem(b)) for a, b in near)
        stretches = (run for word in rest if is_spaceless(word) for run in asked_stretches(word))
        return cls(frozenset(map(stem, words)), pairs, tuple(map(_pattern, codes)), (*stretches,), known)

    def is_missing(self, text: str) -> bool:
        """Whether a text is about another subject."""
        words, places = _read(text)
        if not self.words <= words or not all(code.search(text) for code in self.codes):
            return True
        if not all(_are_near(places, *pair) for pair in self.pairs):
            return True
        parts = _spaceless_parts(text) if self.stretches else words
        return any(_longest_missing(stretch, parts) > MAX_MISSING for stretch in self.stretches)


def visible(text: str) -> str:
    """Returns a text without invisible characters; zero-width spaces become spaces."""
    return _INVISIBLE.sub("", text.replace("\u200b", " "))


@lru_cache(maxsize=_CACHED)
def _read(text: str) -> tuple[frozenset[str], tuple[str, ...]]:
    places = tuple(map(stem, _WORD.findall(text.lower())))
    return frozenset(places), places


@lru_cache(maxsize=_CACHED)
def _spaceless_parts(text: str) -> frozenset[str]:
    return frozenset().union(*(text_parts(word) for word in _WORD.findall(text) if is_spaceless(word)))


def _longest_missing(stretch: tuple[str, ...], parts: frozenset[str]) -> int:
    return max((len([*run]) for missing, run in groupby(stretch, lambda pair: pair not in parts) if missing), default=0)


def _are_near(places: tuple[str, ...], one: str, other: str) -> bool:
    firsts = [i for i, word in enumerate(places) if word == one]
    return any(other in places[max(0, i - _NEAR) : i] + places[i + 1 : i + 1 + _NEAR] for i in firsts)


def _names(text: str) -> Iterator[tuple[str, str]]:
    """Neighboring words that may be names, of which one may be an ordinary word: *grace long*."""
    for sentence in (part for s in sentences(text) for part in s.split("@")):
        last, before = "", "when"
        for word in _WORD.findall(sentence.lower()):
            if len(word) == 1 or (last and word in _PARTICLES):
                continue
            auxiliary = word in ALL_FUNCTION_WORDS and before in _INTERROGATIVES
            kind = WordKind.ORDINARY if auxiliary or word[0].isdigit() else word_kind(word)
            before, name = word, "" if kind is WordKind.ORDINARY else word
            if last and name and WordKind.EITHER in (kind, word_kind(last)):
                yield last, name
            last = name


def _codes(text: str) -> Iterator[str]:
    """Codes of a question as written: parts with digits, and short parts without, that follow each other."""
    group: list[re.Match[str]] = []
    for run in _RUN.finditer(text):
        part = _is_code_part(run[0])
        joined = group and _CODE_SEPARATOR.fullmatch(text, group[-1].end(), run.start())
        if group and not (part and joined):
            yield from _code(text, group)
            group = []
        if part:
            group.append(run)
    yield from _code(text, group)


def _is_code_part(run: str) -> bool:
    if any(map(str.isdigit, run)):
        return not is_spaceless(run)
    return len(run) <= _CODE_LETTERS and word_kind(run.lower()) is WordKind.UNLISTED and run.lower() != run.upper()


def _code(text: str, group: list[re.Match[str]]) -> Iterator[str]:
    while group and group[-1][0].isalpha() and text[group[-1].start() - 1] == " ":  # a unit of measurement
        group = group[:-1]
    if not any(map(str.isdigit, "".join(run[0] for run in group))):
        return
    written = text[group[0].start() : group[-1].end()]
    digits = sum(map(str.isdigit, written))
    years = all(_YEAR.fullmatch(run[0]) for run in group)
    plain = _NUMBER.fullmatch(written) is not None and digits < _CODE_DIGITS
    if not (years or plain):
        yield written


def _pattern(code: str) -> re.Pattern[str]:
    letters = r"[\W_]{0,3}".join(re.escape(c) for c in code if c.isalnum())
    return re.compile(rf"(?<![^\W_]){letters}(?![^\W_])", re.IGNORECASE)


def _without(text: str, codes: list[str]) -> str:
    for code in codes:
        text = text.replace(code, " 0 ")
    return text
