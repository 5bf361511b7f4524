r"""Counts the words of given texts that an answer discloses, in any form, while the answer streams.

The content words of an answer are compared with those of each text. A *chain* is a common subsequence of both.
Neighbors in a chain are at most ``MAX_SKIP`` content words apart in the text, forwards or backwards. Words of the
answer that the text does not contain never break a chain, so inserted numbers and fillers hide nothing. A chain of
``MIN_CHAIN`` words discloses its words, and the function words before each.

An answer may also repeat a text in another order. Therefore ``UNORDERED_SHARE`` of the words that only one text
contains suffice: the answer then discloses all of its words that this text contains.

An answer may change every word and keep the order (``casemate.text.outlines``). The first or last letters of twelve
consecutive words then disclose these words.

Parts of the answer without a word of the texts are decoded (``casemate.text.disguises``). The search in them ignores
spaces and also tries reversed texts and rotated alphabets. Unreadable parts are counted as copies, because their form
may have no decoder here. A part is unreadable if its words do not resemble words of the texts.

Time is linear in the answer: every decoding is read once, and a word is compared with at most ``MAX_OCCURRENCES``
positions of each text.
"""

from __future__ import annotations

import math
import re
import unicodedata
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial, reduce
from itertools import accumulate, chain
from operator import or_
from statistics import median_low
from string import ascii_lowercase
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.text.disguises import INVISIBLE, LETTER_NAMES, decodings, fold_text, only_letters, without_vowels
from casemate.text.outlines import HASHES, OUTLINE, Outline, ends_of_words
from casemate.text.tokens import LETTERS, STOP_WORDS, UNSPACED, FunctionCache, character_pairs

MIN_CHAIN = 4
"""Minimum number of content words of a counted chain. Shorter ones occur by chance."""
MAX_SKIP = 3
"""Maximum distance of two neighbors of a chain in the text, in content words."""
MAX_APART = 8
"""Maximum distance of two neighbors of a chain in the answer, in words that the text contains."""
MAX_OCCURRENCES = 6
"""Maximum number of compared positions of a word in one text."""
UNORDERED_WORDS, UNORDERED_SHARE = 8, 0.5
"""Number and share of a text's own words from which an answer repeats the text, in any order.

Of 3,000 recorded model answers and 900 other documents, two disclose more words than by chains alone: 2 and 3.
"""
BLOCK, MAX_BLOCK = 192, 2000
"""Letters and digits without a word of the texts after which they are decoded, and the maximum number of characters."""
SIGNS_PER_LETTER = 4
"""Maximum number of characters that encode one letter."""
UNREADABLE_SHARE, UNLIKE = 0.5, 1.4
"""Share of letters in unknown words from which a part of an answer is unreadable, and the limit of an unknown word.

The limit is in bits per pair of letters: the difference between the information of the word's pairs and the texts'
mean. With five texts, English prose has shares up to .43, ciphers from .5 (mean .8).
"""
ENCODED_SHARE = 0.8
"""Share of letters and digits in unknown words and numbers from which a part is unreadable: numbers may encode letters.
"""
_GROUP = 1 << 12
"""Number of decoded letters from which they are searched."""
_MIN_STREAM = 4
"""Minimum length of a word that is recognized without spaces around it."""
_LONG_WORD = 20
"""Maximum length of a word that is compared with misspelled words."""
_LEAST_LETTERS = 0.35
"""Share of letters below which a decoding is noise: a fifth of random bytes are letters."""
_PERMUTED = frozenset(("markup", "leet", "script", "swapped", "doubled", "initials"))
"""Forms whose letters are not decoded with other alphabets."""
_WORD, _LETTERS_ONLY = re.compile(LETTERS), re.compile(r"[^\W_]+")
_UNSPACED_WORD = re.compile(f"[{UNSPACED}]{{1,2}}")
_NOT_UNSPACED, _NO_LETTER = re.compile(f"[^{UNSPACED}]+"), re.compile(rf"[\W\d_{UNSPACED}]+")
_HAS_DIGIT = re.compile(r"\d").search
_SIGN = re.compile(r"[^\w\s]|_")
_SAME_SIGN = re.compile(r"([\W_])\1{5,}")
_SYMBOL = re.compile(rf"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f{INVISIBLE}\u2190-\U0010ffff]")
"""Control and invisible characters, and all above punctuation and currencies: arrows, symbols, emoji, private use.

Each may encode a letter.
"""
_SPACES = re.compile(r"\s{2,}")
_ALPHANUMERIC = bytes(c for c in range(128) if chr(c).isalnum())
_WORD_ENDS = bytes(c if c in _ALPHANUMERIC else 32 for c in range(256))
_NO_SIGN = bytes(c for c in range(128) if not _SIGN.match(chr(c)))
_LETTER_CODES = 64
"""Letter codes are modulo this number, so letters of one alphabet differ. It is also the code of all other scripts."""
_OTHER_SCRIPT, _OTHER_SCRIPT_BITS = "\U0010ffff", 10.0
"""Placeholder for a letter of a script that the texts do not use, and bits of information of a pair with one."""
_LAST_LATIN, _SCRIPT_SHARE = "\u017f", 0.05
"""The last letter common to all scripts, and the minimum share of a text's letters from which it uses a script."""
_FIRST_IDEOGRAPH = "\u2e80"
_VOWELS = frozenset("aeiou")
PIECE_END = r"、。，．！？；：」』）"
"""Punctuation that ends a word without a space."""
_FREQUENT = frozenset(
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然家种事"
    "成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与长把机十民第公此"
    "已工使情明性知全三又关点正业外将两高间由问很最重并物手应战向头文体政美相见被利什二等产或新己制身果加西斯月话合回特代"
    "内信表化老给世位次度门任常先海通教儿原东声提立及比员解水名真论处走义各入几口认条平系气题活尔更别打女变四神总何电数安"
    "少报才结反受目太量再感建务做接必场件计管期市直德资命山金指克许统区保至队形社便空决治展马科司五基眼书非则听白却界达光"
    "放强即像难且权思王象完设式色路记南品住告类求据程北边死张该交规万取拉格望觉术领共确传师观清今切院让识候带导争运费病医"
    "每周半末六七八九百千元号请"
    "이다의는에을가하고지한로은기도사를리어서자으시인나들그대보아라만있부정것수일과전게해구상스년여원우러주장면와조동었성"
    "치제무교공신오경용비화국문생습니까했된않없때위분마소안진모음실선관내말"
)
"""Frequent characters of Chinese and syllables of Korean.

Texts are too short to estimate which characters are frequent.
"""
_PIECE = re.compile(rf"(?<!\s)\s*+(?:[^\s{PIECE_END}]++[{PIECE_END}]*+|[{PIECE_END}]++)|\s+\Z")
_ROTATIONS = [ascii_lowercase[k:] + ascii_lowercase[:k] for k in range(26)]
_ALPHABETS = [*_ROTATIONS, *(alphabet[::-1] for alphabet in _ROTATIONS)]
"""Rotations of the alphabet and of its reverse; the first is the alphabet itself."""
_TO_ALPHABET = [str.maketrans(ascii_lowercase, alphabet) for alphabet in _ALPHABETS]
_ALPHABET_CODES = np.array([[ord(c) - 97 for c in alphabet] for alphabet in _ALPHABETS], np.uint16)
_TRIED_ALPHABETS = 2
_SEPARATOR = "{"
"""Separates sequences of letters: the character after z."""
_HASHES = 1 << 16
"""Range of 16-bit hashes."""
_SHORT_PIECE = 40
"""Maximum length in characters of a cached piece of an answer."""
_POSITIONS = 256
"""Number of positions in a text that bit masks distinguish; positions are modulo this number."""
_End: TypeAlias = tuple[int, int, int]
"""End of a chain: time of its last word, length, and words of its start."""
_AFTER = tuple(range(1, MAX_SKIP + 1))
_BEFORE = tuple(-step for step in _AFTER)
"""Steps from a position to those of its neighbors in a chain, nearest first."""


class _Places(NamedTuple):
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
    def of(cls, places: list[tuple[int, int]]) -> _Places:
        """The positions of a word."""
        at, before, after = 0, 0, 0
        for position, _ in places:
            at |= 1 << position % _POSITIONS
            for step in _AFTER:
                before |= 1 << (position - step) % _POSITIONS
                after |= 1 << (position + step) % _POSITIONS
        return cls(places, at, before, after, before | after)


def _sorted(word: str) -> str:
    return "".join(sorted(word))


def _shortened(word: str) -> list[str]:
    """All results of deleting one letter of a word."""
    return [word[:i] + word[i + 1 :] for i in range(len(word))]


def _spellings(word: str) -> tuple[list[str], list[str], str]:
    """A word's spellings with one deleted letter, all forms compared with misspelled words, and its consonants."""
    if not _MIN_STREAM <= len(word) <= _LONG_WORD:
        return [], [word], ""
    shortened = _shortened(word)
    keys = [word, _sorted(word), _sorted(word.removesuffix("ay")), *shortened]
    return shortened, keys, without_vowels(word) if word.isascii() else ""


_SPELLINGS = FunctionCache(_spellings, 4096)


def _words(folded: str) -> list[str]:
    """The words of a folded text; for scripts without spaces, all pairs of neighboring letters."""
    if folded.isascii():
        return folded.encode().translate(_WORD_ENDS).decode().split()
    return character_pairs(_WORD.findall(unicodedata.normalize("NFC", folded)))  # folding decomposes Korean letters


def _parts(folded: str) -> list[list[str]]:
    """The words of each part of a folded text between spaces."""
    return [_words(part) for part in folded.split()]


def _letters(words: Iterable[str]) -> int:
    """Number of letters of some words.

    Ideographs count twice, because a word has two; of a pair, only the first counts.
    """
    words = tuple(words)
    text = "".join(words)
    return len(text) if text.isascii() else sum(map(_LETTER_COUNTS.__getitem__, words))


def _letter_count(word: str) -> int:
    counted = word[:1] if _UNSPACED_WORD.fullmatch(word) else word
    return len(counted) + sum(char >= _FIRST_IDEOGRAPH for char in counted)


_LETTER_COUNTS = FunctionCache(_letter_count)


def _other_spaces(run: str) -> int:
    """Number of white-space characters after another one, such as a tab after a space. Each may encode a letter."""
    return sum(b not in " \t\n\r" or a in " \t" and a != b for a, b in zip(run, run[1:], strict=False))


def _symbols(text: str) -> int:
    """Maximum number of letters that the characters outside words may encode.

    A long run of one character counts once.
    """
    if not text.isascii():
        text = _SAME_SIGN.sub(r"\1", text)
        signs = "".join(_SIGN.findall(text))
    else:
        if any(6 * chr(code) in text for code in set(text.encode().translate(None, _ALPHANUMERIC))):
            text = _SAME_SIGN.sub(r"\1", text)
        signs = text.encode().translate(None, _NO_SIGN).decode()
    symbols = len(_SYMBOL.findall(signs))
    return symbols + (len(signs) - symbols) // SIGNS_PER_LETTER + sum(map(_other_spaces, _SPACES.findall(text)))


def _pairs(words: Iterable[str], scripts: Collection[str]) -> npt.NDArray[np.uint16]:
    """A number for each pair of neighboring letters in words, including the spaces around each word.

    Args:
        words: The words.
        scripts: Scripts that are distinguished from all others.
    """
    text = f" {' '.join(words)} "
    if text.isascii():
        codes = np.frombuffer(text.encode(), np.uint8).astype(np.uint16) % _LETTER_CODES
    else:
        others = (char for char in set(text) if char > _LAST_LATIN and _SCRIPTS[char] not in scripts)
        text = text.translate({ord(char): _OTHER_SCRIPT for char in others})
        found = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        codes = np.where(found == ord(_OTHER_SCRIPT), _LETTER_CODES, found % _LETTER_CODES).astype(np.uint16)
    return codes[:-1] * (_LETTER_CODES + 1) + codes[1:]


def _script(char: str) -> str:
    """The script of a letter.

    Each rare Latin letter counts as its own script, because some have the codes of an alphabet.
    """
    name = unicodedata.name(char, "")
    return char if name.startswith("LATIN") else name.partition(" ")[0]


_SCRIPTS = FunctionCache(_script)


class _IndexedText:
    """The content words of a text.

    Attributes:
        length: Number of all words.
        letters: Number of their letters and digits.
        places: Positions of each content word.
        prefixes: Words of at least ``_MIN_STREAM`` letters by their first letters, longest first.
        beginnings: Their first ``_MIN_STREAM`` + 1 letters.
        prefix_codes: Their first letters in ASCII, by ``_windows``.
        skeletons: These words by their consonants.
        characters: Letters of scripts without spaces.
        frequencies: Counts of these letters.
        scripts: Scripts of its letters, except Latin.
        pairs: Pairs of letters in all content words, as numbers.
        outline: The outline of its parts between spaces.
        starts: For each of these parts, the number of words before it; and the number of all words.
    """

    def __init__(self, text: str) -> None:
        found: dict[str, list[tuple[int, int]]] = {}
        start, at, self.length, self.letters = 0, 0, 0, 0
        folded = fold_text(text)
        words, parts = _words(folded), _parts(folded)
        self.outline = Outline(ends_of_words(parts, STOP_WORDS))
        self.starts = [0, *accumulate(map(len, filter(None, parts)))]
        for self.length, word in enumerate(words, 1):
            self.letters += _LETTER_COUNTS[word]
            if word not in STOP_WORDS and (len(word) > 1 or word.isdigit()):
                places = found.setdefault(word, [])
                if len(places) < MAX_OCCURRENCES:
                    places.append((at, (1 << self.length) - (1 << start)))
                start, at = self.length, at + 1
        self.places = {word: _Places.of(places) for word, places in found.items()}
        alphabetic = sorted((w for w in self.places if len(w) >= _MIN_STREAM and w.isalpha()), key=len, reverse=True)
        long_words = [w for w in alphabetic if only_letters(w) == w]
        self.prefixes: dict[str, list[str]] = {}
        for word in alphabetic:
            self.prefixes.setdefault(word[:_MIN_STREAM], []).append(word)
        self.beginnings = {word[: _MIN_STREAM + 1] for word in long_words}
        self.prefix_codes = _windows(_letter_codes("".join(filter(str.isascii, self.prefixes))))[::_MIN_STREAM]
        self.skeletons = {skeleton: w for w in long_words if len(skeleton := without_vowels(w)) > 2}
        self._alphabetic = alphabetic
        unspaced = {w for w in self.places if not w.isascii() and _UNSPACED_WORD.fullmatch(w)}
        neighbors = zip(words, words[1:], strict=False)
        self._skipping = {a[0] + b[1]: a for a, b in neighbors if a in unspaced and a[1:] == b[:1] and len(b) == 2}
        self.characters = frozenset("".join(unspaced))
        scripts = Counter(_SCRIPTS[char] for word in self.places for char in word if char > _LAST_LATIN)
        self.scripts = {script for script, count in scripts.items() if count >= _SCRIPT_SHARE * self.letters}
        self.pairs = _pairs((w for w in self.places if not w.isdigit() and w not in unspaced), self.scripts)
        self.frequencies = np.bincount(_letter_codes("".join(long_words)), minlength=26)

    @cached_property
    def misspelled(self) -> dict[str, str]:
        """Words by their spellings with one deleted letter, and by their sorted letters.

        Pairs of letters are indexed by their first letter and the one after next.
        """
        words = [w for w in self._alphabetic if _MIN_STREAM < len(w) <= _LONG_WORD]
        return self._skipping | {key: word for word in words for key in (_sorted(word), *_shortened(word))}


_indexed = lru_cache(maxsize=1024)(_IndexedText)


class _Context:
    """The texts that an answer is compared with.

    Args:
        shown: The texts in the context.
        unseen: Texts that were not in the context.

    Attributes:
        shown: Number of texts in the context.
        texts: All texts, those in the context first.
        counts: For each content word, the number of texts that contain it.
        vocabulary: All content words.
        holders: For each word, the numbers of the texts in the context that contain it, and its positions in each.
        own_words: By number of a text, its words that no other text contains.
        by_prefix: Words of the texts by their first letters, longest first.
    """

    def __init__(self, shown: Sequence[str], unseen: Sequence[str]) -> None:
        self.shown = len(shown)
        self.texts = [_indexed(text) for text in (*shown, *unseen)]
        self.counts = Counter(chain.from_iterable(text.places for text in self.texts))
        self.vocabulary = self.counts.keys()
        self.holders = FunctionCache(
            partial(_places, list(enumerate(text.places for text in self.texts[: self.shown])))
        )
        self.own_words = FunctionCache(partial(_own_words, self.texts, self.counts))
        self.by_prefix = FunctionCache(partial(_words_from, [text.prefixes for text in self.texts]))

    @cached_property
    def own(self) -> list[int]:
        """For each text, a bit mask of the words that no other text contains."""
        return [
            reduce(or_, [mask for word in self.own_words[i] for _, mask in text.places[word].places], 0)
            for i, text in enumerate(self.texts)
        ]

    @cached_property
    def misspelled(self) -> frozenset[str]:
        """The misspelled words of the texts in the context."""
        return frozenset[str]().union(*[text.misspelled for text in self.texts[: self.shown]])

    @cached_property
    def skeletons(self) -> frozenset[str]:
        """Words of the texts in the context without vowels."""
        return frozenset[str]().union(*[text.skeletons for text in self.texts[: self.shown]])

    @cached_property
    def characters(self) -> frozenset[str]:
        """Letters of scripts without spaces that the texts contain or that are frequent; empty if no text uses them."""
        found = frozenset[str]().union(*[text.characters for text in self.texts])
        return found | _FREQUENT if found else found

    @cached_property
    def beginnings(self) -> frozenset[str]:
        """The first ``_MIN_STREAM`` + 1 letters of the longer words of the texts."""
        return frozenset[str]().union(*[text.beginnings for text in self.texts])

    @cached_property
    def scripts(self) -> frozenset[str]:
        """The scripts of the texts, except Latin."""
        return frozenset[str]().union(*[text.scripts for text in self.texts])

    @cached_property
    def prefixes(self) -> npt.NDArray[np.bool_]:
        """Whether a word of the texts may begin with four letters, by ``_windows``; false positives are rare."""
        found = np.zeros(_HASHES, np.bool_)
        found[np.concatenate([text.prefix_codes for text in self.texts])] = True
        return found

    @cached_property
    def outlines(self) -> npt.NDArray[np.bool_]:
        """Whether a text in the context may have an outline with a hash."""
        found = np.zeros(HASHES, np.bool_)
        found[np.concatenate([text.outline.hashes for text in self.texts[: self.shown]])] = True
        return found

    @cached_property
    def alphabet_weights(self) -> npt.NDArray[np.float64]:
        """For each alphabet except the first, the integer frequency of each letter in the texts."""
        frequencies = np.array([text.frequencies for text in self.texts], np.float64).sum(axis=0)
        weights: npt.NDArray[np.float64] = frequencies[_ALPHABET_CODES[1:]]
        return weights

    @cached_property
    def pair_bits(self) -> tuple[npt.NDArray[np.float64], float]:
        """Conditional information in bits of each pair of letters given the first, in the texts; and the mean."""
        codes = _LETTER_CODES + 1
        counts = np.bincount(np.concatenate([text.pairs for text in self.texts]), minlength=codes**2)
        table = counts.reshape(codes, codes)
        bits: npt.NDArray[np.float64] = -np.log2((table + 0.3) / (table.sum(1, keepdims=True) + 0.3 * 27))
        bits[-1], bits[:, -1] = _OTHER_SCRIPT_BITS, _OTHER_SCRIPT_BITS
        return bits.ravel(), float(counts @ bits.ravel()) / max(1, int(counts.sum()))


_context = lru_cache(maxsize=32)(_Context)


class DisclosureCounter:
    """Counts the words of some texts that one answer discloses.

    Args:
        texts: The texts in the context.
        question: The client's question. Words of the question are not disclosed by the answer.
        unseen: Texts that were not in the context, as the null distribution of chance matches.

    Attributes:
        covered: For each text, a bit mask of its disclosed words.
        credited: The same, but each word of the answer counts for one text only, the one with the longest chain.
        disclosed_words: Number of words disclosed so far, as credited.
        growth: Growth of ``covered`` and ``credited`` so far, counted in both, plus unreadable words. An upper bound on
            the growth of each mask.
        unreadable_words: Words of the answer so far that may encode any words of the texts. They are in no mask.
        lengths: Number of words of each text.
        steps: Number of comparisons so far.

    >>> counter = DisclosureCounter(["Divers found deep cracks in both northern piers of the bridge."])
    >>> counter.add(" 1.DIVERS 2.FOUND 3.DEEP 4.CRACKS")
    >>> counter.disclosed_words, counter.covered, counter.lengths
    (4, [15], [11])
    """

    def __init__(self, texts: Sequence[str], question: str = "", unseen: Sequence[str] = ()) -> None:
        self.steps = self.growth = self.unreadable_words = 0
        self._shown = len(texts)
        self._context = _context(tuple(texts), tuple(unseen))
        self._texts = self._context.texts
        self.lengths = [text.length for text in self._texts[: self._shown]]
        self.bits = [0] * len(self._texts)
        self._credited = [0] * len(texts)
        self._chains = defaultdict[str, dict[int, _Chains]](lambda: defaultdict(_Chains))  # by form and text
        self._chance = list[tuple[str, list[str]]]()  # forms and words that are not yet compared with the null
        self._said: dict[str, int] = {}  # number of times that the answer contains each word of the texts
        self._own_said = [0] * len(texts)
        self._least_own = [float(UNORDERED_WORDS)] * len(texts)  # own words from which the answer repeats a text
        self._repeated = list[int]()  # numbers of the texts that the answer repeats
        self._undecoded, self._letters, self._size = list[str](), 0, 0
        self._pieces, self._new_words = list[_Piece](), 0  # pieces not read as whole words yet, number of their words
        self._ends, self._growth = "", 0  # ends of the latest words, and ``growth`` when they were read
        self._readable = set[str]()  # words since the last decoded part
        asked = _words(fold_text(question))
        self._question = frozenset(asked)
        self._asked = [0] * len(self._texts)
        if asked:
            self._read("question", asked)
            self._asked, self.bits = self.bits, [0] * len(self._texts)
            self._credited = [0] * len(texts)
            self._chains.clear()
            self._chance.clear()
            self.growth = 0

    @property
    def covered(self) -> list[int]:
        """For each text, a bit mask of its disclosed words."""
        return [bits & ~asked for bits, asked in zip(self.bits[: self._shown], self._asked, strict=False)]

    @property
    def credited(self) -> list[int]:
        """For each text, a bit mask of its disclosed words that no other text with a longer chain contains."""
        return [bits & ~asked for bits, asked in zip(self._credited, self._asked, strict=False)]

    @property
    def own(self) -> list[int]:
        """For each text in the context, a bit mask of the words that no other text contains."""
        return self._context.own[: self._shown]

    @property
    def disclosed_words(self) -> int:
        """Number of words disclosed so far."""
        return sum(bits.bit_count() for bits in self.credited)

    @property
    def undecoded_letters(self) -> int:
        """Number of letters that are not decoded yet.

        For characters such as those of Morse code, several count as one letter.
        """
        return max(self._letters, self._size // SIGNS_PER_LETTER)

    @property
    def expected(self) -> int:
        """Number of words of a text that an answer contains by chance: median over the unseen texts; 0 without any."""
        waiting, self._chance = self._chance, []
        unseen = list(enumerate(text.places for text in self._texts))[self._shown :]
        for form, word in ((form, word) for form, words in waiting for word in words):
            for number, places in _places(unseen, word):
                self.steps += 2 * MAX_SKIP * len(places.places)
                self.bits[number] |= self._chains[form][number].extend(places)[1]
        return median_low([bits.bit_count() for bits in self.bits[self._shown :]] or [0])

    def read(self, answer: str) -> list[int]:
        """Adds a whole answer; returns ``covered``."""
        for piece in _PIECE.findall(answer):
            self.add(piece)
        self.finish()
        return self.covered

    def add(self, text: str) -> None:
        """Adds the next part of the answer. It begins with the space before a word and ends at the end of a word."""
        piece = _PIECES[text] if len(text) <= _SHORT_PIECE else _read_piece(text)
        words, length, symbols, negligible, numeric, _, _, _ = piece
        if self._new_words >= BLOCK:
            self._read_whole()
        self._pieces.append(piece)
        self._new_words += len(words)
        readable = 0
        if not (negligible or self._context.vocabulary.isdisjoint(words)):
            known = self._read("plain", words)
            self._read_unordered(known)
            whole = len(known) == len(words) and not numeric
            readable = length if whole else _letters([w for w in known if not w.isdigit()])
        if 2 * readable > length and length - readable < _MIN_STREAM or negligible:
            self._readable.update(words)
            if not symbols:
                return
            text, length = _LETTERS_ONLY.sub("", text), 0
        self._undecoded.append(text)
        self._letters += length + symbols
        self._size += len(text)
        if self._letters >= BLOCK or self._size >= MAX_BLOCK:
            self._decode()

    def finish(self) -> None:
        """Decodes the remaining part."""
        self._read_whole()
        self._decode()

    def _read_whole(self) -> None:
        """Reads letters that whole words may encode: initials, letter names, and ends of changed words.

        Ends are not read if most of the words are disclosed otherwise.
        """
        if self._texts and self._new_words:
            initials, named, ends = map("".join, list(zip(*self._pieces, strict=True))[-3:])
            streams = [initials, named] if 2 * len(named) > len(initials) else [initials]
            for letters in map(only_letters, streams):
                self._read("initials", [word for _, word in self._words_in(letters)])
                self.steps += len(letters)
            if len(self._pieces) >= OUTLINE and self._new_words >= self.growth - self._growth:
                self._read_outline(Outline(self._ends + ends))
            self._ends, self._growth = ends[-2 * OUTLINE :], self.growth
        self._pieces, self._new_words = [], 0

    def _read_outline(self, outline: Outline) -> None:
        """Discloses runs of words whose first or last letters the answer contains, if most of a run is new."""
        for run in outline.likely(self._context.outlines):
            self.steps += len(self._texts)
            places = [text.outline.places.get(run) for text in self._texts]
            is_credited = False
            for number, place in enumerate(places):
                if not place:
                    continue
                starts = self._texts[number].starts
                bits = (1 << starts[place[1] + 1]) - (1 << starts[place[0]])
                if 2 * (bits & ~self.bits[number]).bit_count() < OUTLINE:
                    continue
                self._disclose(self.bits, number, bits)
                if number < self._shown and not is_credited:
                    is_credited = True
                    self._disclose(self._credited, number, bits)

    def _decode(self) -> None:
        """Decodes the parts without a word of the texts."""
        block, self._undecoded, self._letters, self._size = "".join(self._undecoded), [], 0, 0
        if not self._texts or not block:
            return
        before, decoded, unknown, hidden = self._disclosed(), decodings(block), "", 0
        streams, size = list[tuple[str, str]](), 0
        for form, text in decoded:
            letters = only_letters(text)
            if form == "plain" or len(letters) >= _LEAST_LETTERS * len(text):
                words = _words(text)
                if form == "plain":
                    unknown, hidden = self._find_unknown(words, _symbols(block))
                    self._read("misspelled", self._corrected(words))
                else:
                    self._read(form, words)
                self._read(f"{form}, reversed", " ".join(words)[::-1].split()[::-1])
                self._read(f"{form}, consonants", self._complete(words))
                streams.append((form, letters))
                size += len(letters)
            if size >= _GROUP:
                self._read_letters(streams)
                streams, size = [], 0
        self._read_letters([*streams, ("unknown", unknown)])
        if not decoded[0].text.isascii():
            self._read_joined(unicodedata.normalize("NFC", decoded[0].text))
        hidden -= self._disclosed() - before
        if hidden >= MIN_CHAIN:
            self.unreadable_words += hidden
            self.growth += hidden

    def _disclosed(self) -> int:
        return sum(bits.bit_count() for bits in self.bits[: self._shown])

    def _find_unknown(self, words: Sequence[str], symbols: int) -> tuple[str, int]:
        """Finds the unknown words of a part of the answer.

        Each word counts once: otherwise a readable word between all others would hide a cipher. Words with digits may
        encode letters, so only those of the texts and of the question count once. Unknown words of the question may be
        a code.

        Args:
            words: The words of the part.
            symbols: Number of letters that its other characters may encode.

        Returns:
            Their letters if there are enough for a search, and the number of words that an unreadable part may encode
            (0 if it is readable).
        """
        readable, self._readable = self._readable, set()
        unknown = self._unknown(words)
        numbers = [w for w in words if not w.isalpha() and _HAS_DIGIT(w)]
        readable.update(words)
        readable.difference_update(unknown, numbers)
        readable.update(codes := self._question.intersection(unknown))
        repeated = _letters(w for w in unknown if w in codes) - _letters(codes)
        different = symbols + _letters(set(unknown) - codes) + repeated
        new_numbers = _letters(numbers) - _letters(
            {n for n in numbers if n in self._question or n in self._context.vocabulary}
        )
        encoded = symbols + _letters(unknown) - _letters(codes) + new_numbers
        total = encoded - new_numbers + _letters(readable)
        searched = only_letters("".join(unknown)) if 4 * different > total else ""
        is_cipher = different > UNREADABLE_SHARE * (different + _letters(readable))
        if not is_cipher and encoded <= ENCODED_SHARE * (total + _letters(numbers)):
            return searched, 0
        letters = symbols + _letters(w for w in words if w not in self._context.vocabulary)
        text_letters = sum(text.letters for text in self._texts[: self._shown])
        return searched, letters * sum(self.lengths) // (text_letters or 1)

    def _read_joined(self, plain: str) -> None:
        """Reads letters of alphabets other than Latin, ignoring other characters, also in reverse order."""
        letters, unspaced = _NO_LETTER.sub("", plain), _NOT_UNSPACED.sub("", plain)
        for order, suffix in ((1, ""), (-1, ", reversed")):
            stream = letters[::order]
            starts = [at for at in range(len(stream)) if self._context.by_prefix[stream[at : at + _MIN_STREAM]]]
            self._read(f"joined{suffix}", self._segment(stream, starts))
            self._read(f"joined pairs{suffix}", character_pairs([unspaced[::order]]) if unspaced else ())
        self.steps += 2 * len(plain)

    def _unknown(self, words: Sequence[str]) -> list[str]:
        """The words that are not in the texts and do not resemble their words; none with a digit.

        A word resembles these if the mean information of its pairs of letters exceeds that of the texts by at most
        ``UNLIKE`` bits. A pair of letters of a script without spaces resembles them if one of the letters is familiar.
        """
        vocabulary = self._context.vocabulary
        new = [w for w in words if not (w in vocabulary or w in STOP_WORDS or not w.isalpha() and _HAS_DIGIT(w))]
        unspaced = [w for w in new if not w.isascii() and _UNSPACED_WORD.fullmatch(w)]
        odd = [w for w in unspaced if self._context.characters.isdisjoint(w)]
        if unspaced:
            pairs = frozenset(unspaced)
            new = [w for w in new if w not in pairs]
        if not new:
            return odd
        sizes = np.array([len(w) + 1 for w in new], np.int64)
        bits, usual = self._context.pair_bits
        mean = np.add.reduceat(bits[_pairs(new, self._context.scripts)], sizes.cumsum() - sizes) / sizes
        return odd + [word for word, one in zip(new, mean, strict=True) if one > usual + UNLIKE]

    def _complete(self, words: Iterable[str]) -> list[str]:
        """Words of the texts whose consonants equal words without vowels."""
        bare = [w for w in words if len(w) > 2 and _VOWELS.isdisjoint(w)]
        return [text.skeletons[w] for w in bare for text in self._texts if w in text.skeletons]

    def _corrected(self, words: Iterable[str]) -> list[str]:
        """The words of the texts among words, also if misspelled.

        One letter may be missing, added or changed. The letters may be in another order, also followed by "ay", or have
        other vowels.
        """
        vocabulary = self._context.vocabulary
        return [whole for word in words if (whole := word if word in vocabulary else self._correct(word))]

    def _correct(self, word: str) -> str:
        """The word of the texts that a misspelled word represents; empty: none.

        Only texts in the context are compared.
        """
        if not _MIN_STREAM <= len(word) <= _LONG_WORD and (word.isascii() or not _UNSPACED_WORD.fullmatch(word)):
            return ""
        shortened, keys, bare = _SPELLINGS[word]
        if not self._context.vocabulary.isdisjoint(shortened):
            return next(key for key in shortened if key in self._context.vocabulary)
        if bare not in self._context.skeletons and self._context.misspelled.isdisjoint(keys):
            return ""
        for text in self._texts[: self._shown]:
            if bare in text.skeletons:
                return text.skeletons[bare]
            misspelled = text.misspelled
            for key in keys:
                if key in misspelled:
                    return misspelled[key]
        return ""

    def _read_letters(self, streams: Sequence[tuple[str, str]]) -> None:
        """Searches letters without spaces: unchanged, and in the alphabets with the best fit of frequencies.

        Args:
            streams: Forms and letters, which are searched together.
        """
        streams = [stream for stream in streams if len(stream[1]) >= _MIN_STREAM]
        if not streams:
            return
        searched = [
            (f"{form}, alphabet {number}", letters.translate(_TO_ALPHABET[number]) if number else letters)
            for (form, letters), numbers in zip(streams, self._alphabets(streams), strict=True)
            for number in numbers
        ]
        ends = list(accumulate([1 + len(letters) for _, letters in searched for _ in range(2)]))
        self.steps += ends[-1] - len(ends)
        text = "".join([f"{letters}{_SEPARATOR}{letters[::-1]}{_SEPARATOR}" for _, letters in searched])
        found = defaultdict[int, list[str]](list)
        for at, word in self._words_in(text):
            found[bisect(ends, at)].append(word)
        for i, words in found.items():
            self._read(f"{searched[i // 2][0]}{', reversed' * (i % 2)}", words)

    def _alphabets(self, streams: Sequence[tuple[str, str]]) -> list[list[int]]:
        """For each stream, the numbers of the alphabets to try; the first is the alphabet itself."""
        chosen = [[0] for _ in streams]
        if free := [i for i, (form, _) in enumerate(streams) if form not in _PERMUTED]:
            codes = _letter_codes("".join([streams[i][1] for i in free]))
            owner = np.repeat(np.arange(len(free)), [len(streams[i][1]) for i in free])
            counts = np.bincount(26 * owner + codes, minlength=26 * len(free)).reshape(-1, 26)
            fit = (counts @ self._context.alphabet_weights.T).astype(np.int64)
            best = np.argsort(-fit)[:, :_TRIED_ALPHABETS] + 1
            for i, numbers in zip(free, best.tolist(), strict=True):
                chosen[i] += numbers
        return chosen

    def _words_in(self, text: str) -> Iterator[tuple[int, str]]:
        """Yields position and word of the longer words of the texts in a sequence of letters and ``_SEPARATOR``.

        The search goes from left to right, prefers the longest word, and allows no overlap.
        """
        end, beginnings = 0, self._context.beginnings
        for at in np.flatnonzero(self._context.prefixes[_windows(_letter_codes(text))]).tolist():
            prefix = text[at : at + _MIN_STREAM]
            if at >= end and (prefix in beginnings or text[at : at + _MIN_STREAM + 1] in beginnings):
                if word := next((word for word in self._context.by_prefix[prefix] if text.startswith(word, at)), ""):
                    yield at, word
                    end = at + len(word)

    def _segment(self, letters: str, starts: Iterable[int]) -> list[str]:
        """The longer words of the texts in a sequence of letters, from left to right, longest first.

        Args:
            letters: The sequence.
            starts: Positions of four letters that may begin a word of the texts.
        """
        found, end = list[str](), 0
        for at in starts:
            words = self._context.by_prefix[letters[at : at + _MIN_STREAM]] if at >= end else ()
            if word := next((word for word in words if letters.startswith(word, at)), ""):
                found.append(word)
                end = at + len(word)
        return found

    def _read(self, form: str, words: Collection[str]) -> list[str]:
        """Extends the chains of a form. Returns the words that a text contains."""
        vocabulary, holders = self._context.vocabulary, self._context.holders
        if vocabulary.isdisjoint(words):
            return []
        known = [word for word in words if word in vocabulary]
        self._chance.append((form, known))
        chains, compared = self._chains[form], 0
        for word in known:
            best = 0
            for number, places in holders[word]:
                compared += len(places.places)
                length, bits = chains[number].extend(places)
                if bits & ~self.bits[number]:
                    self._disclose(self.bits, number, bits)
                if length > best:
                    best, owner, credited = length, number, bits
            if best and credited & ~self._credited[owner]:
                self._disclose(self._credited, owner, credited)
        self.steps += 2 * MAX_SKIP * compared
        return known

    def _read_unordered(self, known: Iterable[str]) -> None:
        """Adds words of the texts, and discloses the words of each text that the answer repeats in any order."""
        said, own_said, counts, holders = self._said, self._own_said, self._context.counts, self._context.holders
        for word in known:
            said[word] = times = said.get(word, 0) + 1
            if word in self._question:
                continue
            if times == 1 == counts[word] and (shown := holders[word]):
                number = shown[0][0]
                own_said[number] += 1
                if own_said[number] >= self._least_own[number]:
                    self._compare_own(number)
            if self._repeated:
                self._disclose_said(word, times, self._repeated)

    def _compare_own(self, number: int) -> None:
        """Discloses all words of a text that the answer contains, if it contains enough of the text's own words."""
        own = len(self._context.own_words[number] - self._question)
        self._least_own[number] = max(UNORDERED_WORDS, UNORDERED_SHARE * own)
        if self._own_said[number] >= self._least_own[number]:
            self._least_own[number] = math.inf
            self._repeated.append(number)
            for word in self._texts[number].places.keys() & self._said.keys() - self._question:
                for times in range(1, self._said[word] + 1):
                    self._disclose_said(word, times, [number])

    def _disclose_said(self, word: str, times: int, among: Iterable[int]) -> None:
        """Discloses the n-th occurrence of a word, n = ``times``, in some texts.

        It is credited if no other text in the context contains it.
        """
        for number in among:
            found = self._texts[number].places.get(word)
            if found and times <= len(found.places):
                bits = found.places[times - 1][1]
                if bits & ~self.bits[number]:
                    self._disclose(self.bits, number, bits)
                if bits & ~self._credited[number] and len(self._context.holders[word]) == 1:
                    self._disclose(self._credited, number, bits)

    def _disclose(self, masks: list[int], number: int, bits: int) -> None:
        self.growth += (bits & ~masks[number]).bit_count()
        masks[number] |= bits


def _own_words(texts: Sequence[_IndexedText], counts: Mapping[str, int], number: int) -> frozenset[str]:
    """The words of a text that no other text contains, by the given counts."""
    return frozenset(word for word in texts[number].places if counts[word] == 1)


def _words_from(texts: Iterable[Mapping[str, list[str]]], prefix: str) -> list[str]:
    """Returns the words that begin with some letters, the longest first."""
    return sorted({word for text in texts if prefix in text for word in text[prefix]}, key=len, reverse=True)


def _places(texts: Iterable[tuple[int, Mapping[str, _Places]]], word: str) -> list[tuple[int, _Places]]:
    """The numbers of the texts that contain a word, and its positions in each."""
    return [(number, places[word]) for number, places in texts if word in places]


class _Chains:
    """Chains of one form in one text."""

    def __init__(self) -> None:
        self._time = self._recent = self._older = 0  # times of the last word and of the word ``MAX_APART`` words before
        self._forwards: dict[int, _End] = {}  # for each position, the last chain that ended there
        self._backwards: dict[int, _End] = {}

    def extend(self, word: _Places) -> tuple[int, int]:
        """Adds a word at its positions: forwards, and backwards if that does not disclose it.

        Returns:
            Length of the longest chain of at least ``MIN_CHAIN`` words that the word extends (0 without one), and the
            number of words that these chains disclose.
        """
        self._time = now = self._time + 1
        if not now % MAX_APART:
            self._recent, self._older = 0, self._recent
        places, at, before, after, around = word
        self._recent = recent = self._recent | at
        near = recent | self._older
        if not around & near:
            for position, mask in places:
                self._forwards[position] = self._backwards[position] = now, 1, mask
            return 0, 0
        if before & near:
            found = _extend(self._forwards, _BEFORE, places, now)
            if found[0]:
                return found
        else:
            for position, mask in places:
                self._forwards[position] = now, 1, mask
        if after & near:
            return _extend(self._backwards, _AFTER, places, now)
        for position, mask in places:
            self._backwards[position] = now, 1, mask
        return 0, 0


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


def _letter_codes(letters: str) -> npt.NDArray[np.uint16]:
    """The numbers of lower-case letters, 0 to 25."""
    return np.frombuffer(letters.encode(), np.uint8).astype(np.uint16) - 97


def _windows(codes: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """A number below ``_HASHES`` for each run of ``_MIN_STREAM`` letters; the same for the same letters."""
    runs = codes.shape[-1] - _MIN_STREAM + 1
    found = codes[..., : max(0, runs)]
    for k in range(1, _MIN_STREAM):
        found = 26 * found + codes[..., k : max(k, runs + k)]  # modulo ``_HASHES``
    return found


class _Piece(NamedTuple):
    """A part of an answer.

    Attributes:
        words: Its words.
        length: Number of their letters.
        symbols: Number of its symbols.
        negligible: Whether it has only longer function words.
        numeric: Whether it has numbers.
        initials: The first letters of its words.
        named: Letters spelled by their names.
        ends: The ends of its parts between spaces.
    """

    words: list[str]
    length: int
    symbols: int
    negligible: bool
    numeric: bool
    initials: str
    named: str
    ends: str


def _read_piece(text: str) -> _Piece:
    folded = fold_text(text)
    words = _words(folded)
    negligible = bool(words) and all(len(w) > 1 and w in STOP_WORDS for w in words)
    numeric = any(map(str.isdigit, words))
    initials, named = (word[0] for word in words), (LETTER_NAMES.get(word, "") for word in words)
    ends = ends_of_words(_parts(folded), STOP_WORDS)
    return _Piece(words, _letters(words), _symbols(text), negligible, numeric, "".join(initials), "".join(named), ends)


_PIECES = FunctionCache(_read_piece, 4096)


def _count_words(piece: str) -> int:
    return len(_words(fold_text(piece)))


_WORD_COUNTS = FunctionCache(_count_words, 4096)


def pieces_with_words(text: str) -> list[tuple[str, int]]:
    """Splits a text at the ends of words. Returns each piece with its number of words.

    >>> pieces_with_words("Tolls: 3 marks.")
    [('Tolls:', 1), (' 3', 1), (' marks.', 1)]
    """
    short = _SHORT_PIECE
    return [(p, _WORD_COUNTS[p] if len(p) <= short else _count_words(p)) for p in _PIECE.findall(text)]
