"""Estimates which parts of an answer are not language, so that they may encode words of the texts.

A bigram model of letters, fitted on the texts, gives the information of each word. A word of a language like theirs has
about the same information per pair of letters as their words; a word of a cipher has more (Shannon 1951).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from casemate.text.disclosure.indexed_text import IndexedText
from casemate.text.disclosure.languages import resembles_language
from casemate.text.disclosure.letters import LAST_LATIN, LETTER_CODES, SCRIPTS, letter_pairs
from casemate.text.disclosure.words import UNSPACED_WORD, count_letters, split_words
from casemate.text.disguises import only_letters
from casemate.text.tokens import STOP_WORDS

UNREADABLE_SHARE, UNLIKE = 0.5, 1.4
"""Share of letters in unknown words from which a part of an answer is unreadable, and the limit of an unknown word.

The limit is in bits per pair of letters: the difference between the information of the word's pairs and the texts'
mean. With five texts, English prose has shares up to .43, ciphers from .5 (mean .8).
"""
ENCODED_SHARE = 0.8
"""Share of letters and digits in unknown words and numbers from which a part is unreadable: numbers may encode letters.
"""
_HAS_DIGIT = re.compile(r"\d").search
_OTHER_SCRIPT_BITS = 10.0
"""Bits of information of a pair of letters with one of a script that the texts do not use."""
_SMOOTHING = 0.3
"""Number added to the count of each pair of letters, so that pairs that the texts lack are possible."""
_LOGS = np.log2(np.arange(1024) + _SMOOTHING)
"""Logarithms of counts of pairs of letters."""
_FREQUENT = frozenset(
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然家种事"
    "成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与长把机十民第公此"
    "已工使情明性知全三又关点正业外将两高间由问很最重并物手应战向头文体政美相见被利什二等产或新己制身果加西斯月话合回特代"
    "内信表化老给世位次度门任常先海通教儿原东声提立及比员解水名真论处走义各入几口认条平系气题活尔更别打女变四神总何电数安"
    "少报才结反受目太量再感建务做接必场件计管期市直德资命山金指克许统区保至队形社便空决治展马科司五基眼书非则听白却界达光"
    "放强即像难且权思王象完设式色路记南品住告类求据程北边死张该交规万取拉格望觉术领共确传师观清今切院让识候带导争运费病医"
    "每周半末六七八九百千元号请"
    "們這個來為國說時會對後過發裡種從學現當沒動點還進樣開關問間實體將與處電數氣經書無場機業產種條爲員門應該請給讓該記錄資料類總計"
    "이다의는에을가하고지한로은기도사를리어서자으시인나들그대보아라만있부정것수일과전게해구상스년여원우러주장면와조동었성"
    "치제무교공신오경용비화국문생습니까했된않없때위분마소안진모음실선관내말"
    "านรกเองมยลวดทสตะปบคแจพหขใไช"
).union(map(chr, chain(range(0x3041, 0x3095), range(0x30A1, 0x30FB))))
"""Frequent characters of Chinese, syllables of Korean and letters of Thai, and the letters of Japanese.

Texts are too short to estimate which characters are frequent.
"""
_UNSPACED_SCRIPTS = frozenset({"CJK", "HIRAGANA", "KATAKANA", "HANGUL", "THAI"})
"""Scripts whose frequent letters are listed."""


def scripts_of(question: str) -> frozenset[str]:
    """The scripts of a question, except Latin, if at least a third of its words have a letter of one of them.

    Words of one letter do not count: they can be the key of a cipher.

    >>> sorted(scripts_of("Что такое PostgreSQL?")), sorted(scripts_of("Repeat the text with the letters абвг"))
    (['CYRILLIC'], [])
    """
    if question.isascii():
        return frozenset()
    words = {word for word in split_words(question.lower()) if len(word) > 1}
    found = [{SCRIPTS[char] for char in word if char > LAST_LATIN} for word in words]
    return frozenset().union(*found) if 3 * sum(map(bool, found)) >= len(words) else frozenset()


class Readability:
    """The letter model of some texts.

    Args:
        shown: The texts in the context.
        texts: All texts, those in the context first.
        vocabulary: All their content words.
    """

    def __init__(self, shown: Sequence[IndexedText], texts: Sequence[IndexedText], vocabulary: Collection[str]) -> None:
        self._texts, self._vocabulary = texts, vocabulary
        self._words, self._letters = sum(text.length for text in shown), sum(text.letters for text in shown)

    @cached_property
    def _characters(self) -> frozenset[str]:
        """Letters of scripts without spaces that the texts contain or that are frequent; empty if no text uses them."""
        found = frozenset[str]().union(*[text.characters for text in self._texts])
        return found | _FREQUENT if found else found

    @cached_property
    def _scripts(self) -> frozenset[str]:
        """The scripts of the texts, except Latin."""
        return frozenset[str]().union(*[text.scripts for text in self._texts])

    @cached_property
    def _pair_bits(self) -> tuple[npt.NDArray[np.float64], float]:
        """Conditional information in bits of each pair of letters given the first, in the texts; and the mean."""
        codes = LETTER_CODES + 1
        counts = np.bincount(np.concatenate([text.pairs for text in self._texts]), minlength=codes**2)
        table = counts.reshape(codes, codes)
        logs = _LOGS if counts.max() < len(_LOGS) else np.log2(np.arange(counts.max() + 1) + _SMOOTHING)
        bits: npt.NDArray[np.float64] = np.log2(table.sum(1, keepdims=True) + _SMOOTHING * 27) - logs[table]
        bits[-1], bits[:, -1] = _OTHER_SCRIPT_BITS, _OTHER_SCRIPT_BITS
        return bits.ravel(), float(counts @ bits.ravel()) / max(1, int(counts.sum()))

    def find_unknown(
        self,
        words: Sequence[str],
        symbols: int,
        readable: set[str],
        question: frozenset[str],
        scripts: frozenset[str],
    ) -> tuple[str, int]:
        """Finds the unknown words of a part of the answer.

        Each word counts once: otherwise a readable word between all others would hide a cipher. Words with digits may
        encode letters, so only those of the texts and of the question count once. Unknown words of the question may be
        a code.

        Args:
            words: The words of the part.
            symbols: Number of letters that its other characters may encode.
            readable: Words around the part, which are changed.
            question: Words of the question.
            scripts: Scripts of the question, see ``scripts_of``.

        Returns:
            Their letters if there are enough for a search, and the number of words that an unreadable part may encode
            (0 if it is readable).
        """
        unknown = self._unknown(words, scripts)
        numbers = [w for w in words if not w.isalpha() and _HAS_DIGIT(w)]
        readable.update(words)
        readable.difference_update(unknown, numbers)
        readable.update(codes := question.intersection(unknown))
        repeated = count_letters(w for w in unknown if w in codes) - count_letters(codes)
        different = symbols + count_letters(set(unknown) - codes) + repeated
        new_numbers = count_letters(numbers) - count_letters(
            {n for n in numbers if n in question or n in self._vocabulary}
        )
        encoded = symbols + count_letters(unknown) - count_letters(codes) + new_numbers
        total = encoded - new_numbers + count_letters(readable)
        searched = only_letters("".join(unknown)) if 4 * different > total else ""
        is_cipher = different > UNREADABLE_SHARE * (different + count_letters(readable))
        if not is_cipher and encoded <= ENCODED_SHARE * (total + count_letters(numbers)):
            return searched, 0
        new = (w for w in words if w not in self._vocabulary and (w.isalpha() or not _HAS_DIGIT(w)))
        return searched, self.words_of(symbols + new_numbers + count_letters(new))

    def words_of(self, letters: int) -> int:
        """Number of words of the texts in the context that have some number of letters."""
        return letters * self._words // (self._letters or 1)

    def _unknown(self, words: Sequence[str], scripts: frozenset[str]) -> list[str]:
        """The words that are not in the texts and do not resemble their words; none with a digit.

        A word resembles these if the mean information of its pairs of letters exceeds that of the texts by at most
        ``UNLIKE`` bits. Words like those of other languages are left out, too (``languages``): tables and short records
        have too few letters for the estimate. Their script must be Latin, or one of the texts or the question. A pair
        of letters of a script without spaces resembles them if one of the letters is familiar. A single Latin letter
        resembles no word.
        """
        vocabulary = self._vocabulary
        new = [w for w in words if not (w in vocabulary or w in STOP_WORDS or not w.isalpha() and _HAS_DIGIT(w))]
        unspaced = [w for w in new if not w.isascii() and UNSPACED_WORD.fullmatch(w)]
        familiar = self._characters or (_FREQUENT if _UNSPACED_SCRIPTS & scripts else frozenset())
        odd = [w for w in unspaced if familiar.isdisjoint(w)]
        single = [w for w in new if len(w) == 1 and w.isascii()]
        if unspaced or single:
            others = frozenset(unspaced + single)
            new = [w for w in new if w not in others]
        odd += single
        if not new:
            return odd
        sizes = np.array([len(w) + 1 for w in new], np.int64)
        bits, usual = self._pair_bits
        mean = np.add.reduceat(bits[letter_pairs(new, self._scripts)], sizes.cumsum() - sizes) / sizes
        unlike = [w for w, one in zip(new, mean, strict=True) if one > usual + UNLIKE]
        return odd + [w for w in unlike if not resembles_language(w, scripts | self._scripts)]
