"""What a question is about, and whether a unit is about something else.

**A unit is about another subject if it lacks a word of the question that is not an ordinary word**, such as a name.
Letter case, order and separators do not matter. The decision depends on the question, the unit and lists of words,
never on other units. Otherwise, the presence of a record would decide whether others abstain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

from casemate.guard.defenses.quorum.codes import NEVER, NUMBER, YEAR, code_pattern, find_codes, without_codes
from casemate.text.function_words import ALL_FUNCTION_WORDS
from casemate.text.ordinary_words import WordKind, frequent_words, word_kind
from casemate.text.sentences import sentences
from casemate.text.tokens import LETTERS, FunctionCache, stem
from casemate.text.unspaced import asked_stretches, is_spaceless, text_parts

_WORD = re.compile(LETTERS)
_INVISIBLE = re.compile("[\xad\u200c\u200d\u2060\ufeff]")
"""Invisible characters inside a word: soft hyphen, joiners. A zero-width space (U+200B) separates words."""
_PARTICLES = frozenset(
    "de la las los le del della di da do dos das du des von van vom zu zur zum der den dem ten ter te al el bin ibn abu"
    " y e und".split()
)
"""Words between parts of a name. So are initials."""
_INTERROGATIVES = frozenset("when how what who where which why".split())
"""Words after which *will*, *may* and *long* are not names."""
_NEAR = 3
"""Words between which parts of a name are neighbors, as in *Ann de la Cruz*."""
MAX_MISSING = 1
"""Pairs of neighboring clusters of a question that a unit may lack in a row, in scripts without spaces.

Where words are in another order, one pair is missing. Where a name is another one, two or more are
(``benchmarks/unspaced.py``).
"""
KNOWN, MIN_WORDS = 1 / 3, 2
"""Share of listed words in a question whose language is known, at least. Up to ``MIN_WORDS`` words need none."""
_IDENTIFIER = re.compile(r"(?<![^\W\d_])[^\W\d_]++(?:_[^\W\d_]++)++")
"""Words joined by underscores, as in *load_invoice*."""
MAX_REQUIRED = 32
"""Codes and pairs of a question, at most: each is searched in each unit. With more, every unit abstains."""
_ARTICLE = re.compile(r"\A(?:[وبفك]?ال|لل|و|וה|[הו])(?=[^\W\d_]{3})")
"""Articles of Arabic and Hebrew, and *and*, which are written as part of the next word."""
_CACHED = 4096
_STEM = FunctionCache[str, str](lambda word: stem(_ARTICLE.sub("", word).lower()))
"""The stem of a word as written, without an article."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a unit must contain.

    Attributes:
        words: Stems of words that are required.
        pairs: Stems of ordinary words that are required as neighbors, as in *Grace Long*.
        codes: Patterns of numbers, and of codes, such as customer numbers and mail addresses, with any separators.
        stretches: In scripts without spaces, pairs of neighboring clusters in a row. See ``MAX_MISSING``.
        known: Whether the question's language is known: a share of ``KNOWN`` of its words is listed. Otherwise
            ``words`` has those that no language lists: words with a capital inside a sentence; all if there are none.
        neighbors: Stems of neighboring words, if the language is not known. A unit that writes one of them with a
            capital only and lacks the other one is about another person with this name.
    """

    words: frozenset[str]
    pairs: tuple[tuple[str, str], ...]
    codes: tuple[re.Pattern[str], ...]
    stretches: tuple[tuple[str, ...], ...]
    known: bool
    neighbors: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, text: str, named: Iterable[str]) -> Subject:
        """Reads a question.

        Args:
            text: The question.
            named: Words of names of several words with capitals, in lower case.
        """
        codes = [*dict.fromkeys(find_codes(text))]
        text = without_codes(text, codes)
        read = _WORD.findall(text)
        spaced = [word.lower() for word in read if _is_alphabetic(word) and not is_spaceless(word)]
        known = _is_known(spaced)
        pairs, words = _names(text) if known else ([], _unlisted(text))
        words.update(part for name in named for part in _WORD.findall(name) if len(part) > 1)
        if words or pairs or not all(map(NUMBER.fullmatch, codes)):
            codes = [code for code in codes if not YEAR.fullmatch(code)]
        near = dict.fromkeys((stem(one), stem(other)) for one, other in pairs)
        searched = len(codes) + len(near) <= MAX_REQUIRED
        return cls(
            words=frozenset(map(_STEM.__getitem__, words)),
            pairs=tuple(near) if searched else (),
            codes=tuple(map(code_pattern, codes)) if searched else (NEVER,),
            stretches=tuple(run for word in read if is_spaceless(word) for run in asked_stretches(word)),
            known=known,
            neighbors=() if known else tuple(pairwise(map(_STEM.__getitem__, spaced))),
        )

    def is_missing(self, text: str) -> bool:
        """Whether a text is about another subject."""
        folded = text.casefold()
        has_words = all(word.casefold() in folded for word in self.words)  # spares the reading of most texts
        if not has_words or not all(code.search(text) for code in self.codes):
            return True
        if not (self.words or self.pairs or self.neighbors or self.stretches):
            return False
        read = _read(text)
        if not self.words <= read.words or not all(_are_near(read.places, *pair) for pair in self.pairs):
            return True
        names = _names_of(text) if self.neighbors else frozenset()
        if any(len(held := [*read.words.intersection(pair)]) == 1 and held[0] in names for pair in self.neighbors):
            return True
        parts = _spaceless_parts(text) if self.stretches else read.words
        return any(_longest_missing(stretch, parts) > MAX_MISSING for stretch in self.stretches)


class _Text(NamedTuple):
    """Stems of the words of a text, also in order."""

    words: frozenset[str]
    places: tuple[str, ...]


def visible(text: str) -> str:
    """Returns a text without invisible characters; zero-width spaces become spaces."""
    return _INVISIBLE.sub("", text.replace("\u200b", " "))


@lru_cache(maxsize=_CACHED)
def _read(text: str) -> _Text:
    places = tuple(map(_STEM.__getitem__, _WORD.findall(text)))
    return _Text(frozenset(places), places)


@lru_cache(maxsize=_CACHED)
def _names_of(text: str) -> frozenset[str]:
    """Stems of the words that a text writes with a capital only."""
    written = _WORD.findall(text)
    return _read(text).words - {_STEM[word] for word in written if not word[0].isupper()}


@lru_cache(maxsize=_CACHED)
def _spaceless_parts(text: str) -> frozenset[str]:
    return frozenset().union(*(text_parts(word) for word in _WORD.findall(text) if is_spaceless(word)))


def _longest_missing(stretch: tuple[str, ...], parts: frozenset[str]) -> int:
    return max((len([*run]) for missing, run in groupby(stretch, lambda pair: pair not in parts) if missing), default=0)


def _are_near(places: tuple[str, ...], one: str, other: str) -> bool:
    firsts = [i for i, word in enumerate(places) if word == one]
    return any(other in places[max(0, i - _NEAR) : i] + places[i + 1 : i + 1 + _NEAR] for i in firsts)


def _is_alphabetic(word: str) -> bool:
    """Whether a word has no digit. Vowel signs of Indic scripts are not letters in Unicode."""
    return not any(map(str.isdigit, word))


def _has_case(word: str) -> bool:
    return word.upper() != word


def _unlisted(text: str) -> set[str]:
    """Words that may be names: those with a capital inside a sentence, or all if there are none.

    All words of scripts without letter case are among them, because nothing marks a name there.
    """
    found = [
        (written.lower(), i > 0 and written[0].isupper())
        for sentence in sentences(text)
        for i, written in enumerate(_WORD.findall(sentence))
        if _may_be_name(written.lower())
    ]
    capitals = {word for word, capital in found if capital}
    return {word for word, _ in found if word in capitals or not capitals or not _has_case(word)}


def _may_be_name(word: str) -> bool:
    """Whether no language lists a word, as ordinary or frequent."""
    if len(word) == 1 or not _is_alphabetic(word) or is_spaceless(word):
        return False
    return word_kind(word) is not WordKind.ORDINARY and word not in frequent_words()


def _is_known(words: Sequence[str]) -> bool:
    """Whether the language of a question is known. Scripts without letter case have no lists."""
    listed = sum(word_kind(word) is not WordKind.UNLISTED for word in words)
    return all(map(_has_case, words)) and (len(words) <= MIN_WORDS or listed >= KNOWN * len(words))


def _names(text: str) -> tuple[list[tuple[str, str]], set[str]]:
    """Words that are required as neighbors, in identifiers and names, and single words that are required.

    A possible name is required if it is not an ordinary word, or has such a neighbor. Two ordinary words, such as
    *grace long*, must be neighbors in the unit, too: it may contain both for other reasons. So must joined words.
    """
    joined = (_WORD.findall(name) for name in _IDENTIFIER.findall(text.lower()))
    pairs, words = [pair for parts in joined for pair in pairwise(parts)], set[str]()
    for run in _possible_names(text):
        words.update(word for word in run if word_kind(word) is WordKind.UNLISTED)
        for pair in pairwise(run):
            if all(word_kind(word) is WordKind.EITHER for word in pair) or not ALL_FUNCTION_WORDS.isdisjoint(pair):
                pairs.append(pair)
            else:
                words.update(pair)
    return pairs, words


def _possible_names(text: str) -> Iterator[list[str]]:
    """Runs of neighboring words that may be names, in lower case, without initials and particles."""
    for sentence in sentences(text):
        run, before = list[str](), "when"
        for word in _WORD.findall(sentence.lower()):
            if len(word) == 1 or is_spaceless(word) or (run and word in _PARTICLES):
                continue
            auxiliary = word in ALL_FUNCTION_WORDS and before in _INTERROGATIVES
            if auxiliary or not word.isalpha() or word_kind(word) is WordKind.ORDINARY:
                yield run
                run = []
            else:
                run.append(word)
            before = word
        yield run
