"""Tokenization and lexical features of English text: words, stems, numbers, keywords, n-grams, term rarity.

All functions work by rules, without a language model.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

STOP_WORDS = frozenset(
    """a about above after again all also am an and any are as at be because been before being below between both but
    by can could did do does doing done down during each else ever few for from further get give got had has have
    having he her here hers him his how i if in into is it its itself just let like long many may me might mine more
    most much must my need no nor not now of off often on once only or other our ours out over own please same say
    she should so some such take tell than that the their them then there these they this those to too under until
    up us use very was we were what when where which while who whom whose why will with without would you your
    yours""".split()
)
"""English function words."""
UNSAFE_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Control characters, lone surrogates, noncharacters and bidirectional controls.

On a terminal they can run commands or change the displayed text.
"""
REPLACEMENT_CHARACTER = "\ufffd"
"""Replaces unsafe characters in output."""
_MARKS = "".join(c for c in map(chr, range(0x300, 0x1C00)) if unicodedata.category(c) in ("Mn", "Mc"))
LETTERS = rf"[^\W_]++(?:[{_MARKS}]++[^\W_]*+)*+"
"""Regular expression of a run of letters and digits. Accents, and the vowel signs of Indic scripts, do not end it."""
WORD = re.compile(rf"{LETTERS}(?:['’.-]{LETTERS})*+")
"""A word or number; apostrophes, periods and hyphens inside it do not end it."""
_ASCII_WORD = re.compile(r"[0-9A-Za-z]++(?:['.-][0-9A-Za-z]++)*+")
"""The same in an ASCII text. The search takes half as long."""
UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uac00-\ud7a3"
    r"\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Letters of scripts whose words are not separated by spaces, or have many endings; as ranges of a regular expression.

Thai, Lao, Burmese, Khmer, Japanese and Chinese have no spaces between words. Korean words have many endings.
"""
_UNSPACED_RUN = re.compile(f"([{UNSPACED}]+)")


def whole_words(tokens: Iterable[str]) -> list[str]:
    """Returns the whole words of a subword vocabulary that consist of ASCII letters, sorted, without marks.

    A vocabulary marks either the tokens that continue a word (``##ing``) or those that begin one (``▁run``, ``Ġrun``).

    >>> whole_words(["run", "##ing", "[SEP]", "7"]), whole_words(["▁run", "ing"])
    (['run'], ['run'])
    """
    found = list(tokens)
    marked = [t[1:] for t in found if t[:1] in ("▁", "Ġ")]
    return sorted({t for t in marked or found if t.isascii() and t.isalpha()})


def find_words(text: str) -> list[str]:
    """Returns the words and numbers of a text as written, see ``WORD``."""
    return (_ASCII_WORD if text.isascii() else WORD).findall(text)


def words(text: str) -> list[str]:
    """Splits a text into lower-case words and numbers, without punctuation.

    >>> words("It's 2.5 mg, twice.")
    ["it's", '2.5', 'mg', 'twice']
    """
    return find_words(text.lower().replace("’", "'"))


def count_words(text: str) -> int:
    """Number of words between spaces; a letter of a script without spaces counts as half a word.

    >>> count_words("The north bridge."), count_words("北桥通行费3元。")
    (3, 3)
    """
    unspaced = 0 if text.isascii() else sum(map(len, _UNSPACED_RUN.findall(text)))
    return max(len(text.split()), unspaced // 2)


def character_pairs(found: Iterable[str]) -> list[str]:
    """Replaces words in ``UNSPACED`` scripts by all pairs of neighboring letters; other words are unchanged.

    Without spaces, a sentence would be one word. Pairs need no dictionary (Lunde 2009, "CJKV Information Processing").

    >>> character_pairs(["bridge", "北桥通行费3元"])
    ['bridge', '北桥', '桥通', '通行', '行费', '3', '元']
    """
    parts = list[str]()
    for word in found:
        if word.isascii():
            parts.append(word)
            continue
        for i, run in enumerate(_UNSPACED_RUN.split(word)):
            parts += [run[k : k + 2] for k in range(max(1, len(run) - 1))] if i % 2 else [run] if run else []
    return parts


def content_words(text: str) -> frozenset[str]:
    """Returns the stems of the words that are not stop words; for scripts without spaces, ``character_pairs``."""
    found = words(text)
    if not text.isascii() and _UNSPACED_RUN.search(text):
        found = character_pairs(found)
    return frozenset(map(stem, set(found) - STOP_WORDS))


class FunctionCache(dict[K, V]):
    """Cache of a function's values, emptied when it is full. Unlike in ``lru_cache``, a look-up does not write."""

    def __init__(self, function: Callable[[K], V], size: int = 1 << 16) -> None:
        super().__init__()
        self.function, self.size = function, size

    def __missing__(self, key: K) -> V:
        if len(self) >= self.size:
            self.clear()
        self[key] = found = self.function(key)
        return found


def _stem(word: str) -> str:
    """Removes plural and verb endings (light stemming). The stem need not be a word; compare stems only with stems.

    >>> [stem(w) for w in ("tests", "tested", "testing", "policies", "glass")]
    ['test', 'test', 'test', 'polic', 'glass']
    """
    for ending in ("ies", "ing", "ed", "es", "y", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            return word[: -len(ending)]
    return word


stem = FunctionCache(_stem).__getitem__
"""The stem of a word, see ``_stem``. Cached, because texts share most words."""

NUMBER = re.compile(r"(?<![^\W_])(?<![A-Za-z]-)(?<!\d[.,])\d+(?:[.,]\d+)*")
"""A number in digits, with separators; not a number inside a code such as "B12" or "COVID-19"."""
_UNITS = "one two three four five six seven eight nine".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
NUMBER_WORDS = {word: str(n) for n, word in enumerate([*_UNITS[1:], "ten", "eleven", "twelve"], 2)}
NUMBER_WORDS |= {ten: str(10 * i) for i, ten in enumerate(_TENS, 2)}
NUMBER_WORDS |= {f"{ten}-{unit}": str(10 * i + j) for i, ten in enumerate(_TENS, 2) for j, unit in enumerate(_UNITS, 1)}
"""Digits of the numbers 2 to 12, the tens and the compounds below 100, by their English names."""
ANTONYMS: dict[str, str] = {
    a: b
    for pair in """increase-decrease increased-decreased increases-decreases increasing-decreasing higher-lower high-low
    highest-lowest more-less most-least greater-smaller large-small larger-smaller long-short longer-shorter
    strong-weak stronger-weaker early-late earlier-later old-young older-younger positive-negative
    positively-negatively improved-worsened best-worst before-after with-without always-never above-below
    significant-insignificant significantly-insignificantly left-right common-rare male-female men-women
    normal-abnormal present-absent safe-dangerous effective-ineffective beneficial-harmful first-last
    acute-chronic""".split()
    for a, b in (pair.split("-"), pair.split("-")[::-1])
}
"""Antonyms, in both directions. Replacing one by the other reverses a statement."""


def numbers(text: str) -> frozenset[str]:
    """Returns the numbers of a text in digits, without thousands separators, including most number words below 100.

    >>> sorted(numbers("Of 31,236 patients, 60.2% (eight farms, twenty-four pens) had HbA1c."))
    ['24', '31236', '60.2', '8']
    """
    digits = {re.sub(r",(?=\d{3}\b)", "", n) for n in NUMBER.findall(text)}
    return frozenset(digits | {NUMBER_WORDS[w] for w in words(text) if w in NUMBER_WORDS})


def keywords(text: str) -> list[str]:
    """Returns the content words as spelled, in order, one per stem, without numbers and words below three letters.

    >>> keywords("The tolls of the north bridge rose by 2.5 EUR: a toll too many.")
    ['tolls', 'north', 'bridge', 'rose', 'EUR']
    """
    found: dict[str, str] = {}
    for match in WORD.finditer(text):
        if len(match[0]) > 2 and match[0].lower() not in STOP_WORDS and not NUMBER.match(match[0]):
            found.setdefault(stem(match[0].lower()), match[0])
    return list(found.values())


def ngrams(text: str, size: int = 4) -> frozenset[tuple[str, ...]]:
    """Returns the word n-grams of a text, in lower case. Punctuation is ignored.

    Args:
        text: The text.
        size: Number of words, at least 1.

    >>> sorted(ngrams("Two-part tolls: none.", 3))
    [('part', 'tolls', 'none'), ('two', 'part', 'tolls')]
    """
    tokens = re.findall(r"[^\W_]+", text.lower())
    return frozenset(zip(*(tokens[i:] for i in range(size)), strict=False))


def join_words(items: Sequence[str]) -> str:
    """Joins words with commas and "and".

    >>> join_words(["tolls", "bridges", "May"]), join_words(["tolls"])
    ('tolls, bridges and May', 'tolls')
    """
    return " and ".join(part for part in (", ".join(items[:-1]), *items[-1:]) if part)


class ReferenceCorpus:
    """Document frequencies of words in a reference corpus.

    Attributes:
        texts: As given.
    """

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self.texts = tuple(texts)
        self._document_frequency = Counter(word for text in texts for word in content_words(text))

    def rarity(self, word: str) -> float:
        """Returns 1 - ln(1 + df) / ln(1 + n), in [0, 1], for n texts of which df contain the word's stem.

        0 means that all texts contain it, 1 that none does. An empty corpus gives 1.

        >>> [ReferenceCorpus(["north bridge", "north gate"]).rarity(word) for word in ("north", "tolls")]
        [0.0, 1.0]
        """
        n = len(self.texts)
        df = self._document_frequency[stem(word.lower())]
        return 1 - math.log1p(df) / math.log1p(n) if n else 1.0

    def distinctive_words(self, text: str, title: str = "") -> list[str]:
        """Returns the keywords of a text, the most distinctive first.

        The weight of a word is its rarity times 1 + ln(count), plus its rarity if the title contains it.

        >>> ReferenceCorpus().distinctive_words("Herons nest late. Herons nest in reeds, near the weir.", "Reeds")
        ['Reeds', 'Herons', 'nest', 'late', 'near', 'weir']
        """
        counts = Counter(stem(w) for w in words(text))
        in_title = content_words(title)

        def weight(word: str) -> float:
            base = stem(word.lower())
            return (1 + math.log(max(counts[base], 1)) + (base in in_title)) * self.rarity(word)

        return sorted(keywords(f"{title}\n{text}"), key=lambda word: -weight(word))


def position_masks(tokens: Sequence[str | int]) -> dict[str | int, int]:
    """Returns a bit mask of the positions of each token: bit i is set if it is the i-th token."""
    found: dict[str | int, int] = {}
    for i, token in enumerate(tokens):
        found[token] = found.get(token, 0) | 1 << i
    return found


def longest_common_subsequence(a: Sequence[str] | Sequence[int], b: Sequence[str] | Sequence[int]) -> int:
    """Returns the length of the longest common subsequence of two sequences, in quadratic time.

    Args:
        a: Tokens of one type, none empty.
        b: Tokens of the same type.

    >>> longest_common_subsequence("the old ferry runs late".split(), "the ferry never runs".split())
    3
    """
    from rapidfuzz.distance import LCSseq

    return int(LCSseq.similarity(a, b))
