"""Counts the words of texts that one answer discloses."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from statistics import median_low

from casemate.text.disclosure.chains import MAX_SKIP, MIN_CHAIN, Chains, FewWords
from casemate.text.disclosure.codes import letters_of_code_words, letters_of_forms
from casemate.text.disclosure.context import share_context
from casemate.text.disclosure.letters import MIN_LETTERS
from casemate.text.disclosure.pieces import (
    LINE_STARTS,
    SENTENCE_STARTS,
    SIGNS_PER_LETTER,
    Piece,
    count_symbols,
    read_piece,
    split_pieces,
)
from casemate.text.disclosure.readability import scripts_of
from casemate.text.disclosure.unordered import UnorderedWords
from casemate.text.disclosure.words import count_letters, split_words
from casemate.text.disguises import decodings, fold_text, only_letters
from casemate.text.outlines import OUTLINE, Outline
from casemate.text.tokens import UNSPACED, character_pairs

BLOCK, MAX_BLOCK = 192, 2000
"""Letters and digits without a word of the texts after which they are decoded, and the maximum number of characters."""
_LEAST_LETTERS = 0.35
"""Share of letters below which a decoding is noise: a fifth of random bytes are letters."""
_LETTERS_ONLY = re.compile(r"[^\W_]+")
_NOT_UNSPACED, _NO_LETTER = re.compile(f"[^{UNSPACED}]+"), re.compile(rf"[\W\d_{UNSPACED}]+")


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
        self._context = share_context(tuple(texts), tuple(unseen))
        self._texts = self._context.texts
        self.lengths = [text.length for text in self._texts[: self._shown]]
        self.bits = [0] * len(self._texts)
        self._credited = [0] * len(texts)
        self._chains = defaultdict[str, dict[int, Chains]](lambda: defaultdict(Chains))  # by form and text
        self._few = defaultdict[str, FewWords](FewWords)  # forms with too few words for a chain
        self._expected_of: dict[str, int] = {}  # number of words of each form that are compared with the null
        self._undecoded, self._letters, self._size = list[str](), 0, 0
        self._pieces, self._new_words = list[Piece](), 0  # pieces not read as whole words yet, number of their words
        self._ends, self._growth = "", 0  # ends of the latest words, and ``growth`` when they were read
        self._outset = "\n."  # of the latest pieces without a letter; an answer begins a line and a sentence
        self._starts = {"lines": "", "sentences": ""}  # first letters that are not searched yet
        self._readable = set[str]()  # words since the last decoded part
        asked = split_words(fold_text(question))
        self._question, self._scripts = frozenset(asked), scripts_of(question)
        self._unordered = defaultdict[str, UnorderedWords](partial(UnorderedWords, self._context, self._question))
        self._read("question", asked)
        self._asked, self.bits = self.bits, [0] * len(self._texts)
        self._credited = [0] * len(texts)
        self._chains.clear()
        self._unordered.clear()
        self._few.clear()
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
    def common(self) -> list[int]:
        """For each text, a bit mask of the words that an unseen text contains, too."""
        return self._context.common

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
        unseen = list(enumerate(text.places for text in self._texts))[self._shown :]
        words_of = {form: few.words for form, few in self._few.items()}
        words_of |= {form: read.words for form, read in self._unordered.items()}
        for form, words in words_of.items():
            for word in words[self._expected_of.get(form, 0) :]:
                for number, places in [(i, found[word]) for i, found in unseen if word in found]:
                    self.steps += 2 * MAX_SKIP * len(places.places)
                    self.bits[number] |= self._chains[form][number].extend(places)[1]
            self._expected_of[form] = len(words)
        return median_low([bits.bit_count() for bits in self.bits[self._shown :]] or [0])

    def read(self, answer: str) -> list[int]:
        """Adds a whole answer; returns ``covered``."""
        for piece in split_pieces(answer):
            self.add(piece)
        self.finish()
        return self.covered

    def add(self, text: str) -> None:
        """Adds the next part of the answer. It begins with the space before a word and ends at the end of a word."""
        piece = read_piece(text)
        words, length, symbols, negligible = piece.words, piece.length, piece.symbols, piece.negligible
        if self._new_words >= BLOCK:
            self._read_whole()
        self._pieces.append(piece)
        self._new_words += len(words)
        readable = 0
        if not (negligible or self._context.vocabulary.isdisjoint(words)):
            known = self._read("plain", words)
            whole = len(known) == len(words) and not piece.numeric
            readable = length if whole else count_letters([w for w in known if not w.isdigit()])
        if 2 * readable > length and length - readable < MIN_LETTERS or negligible:
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
        self._read_starts(1)
        self._decode()

    def _read_whole(self) -> None:
        """Reads letters that whole words may encode: initials, letter names, last letters, and ends of changed words.

        Ends are not read if most of the words are disclosed otherwise.
        """
        if self._texts and self._new_words:
            initials = "".join([piece.initials for piece in self._pieces])
            named = "".join([piece.named for piece in self._pieces])
            ends = "".join([piece.ends for piece in self._pieces])
            self._read_stream("initials", initials)
            if 2 * len(named) > len(initials):
                self._read_stream("initials", named)
            self._read_stream("last letters", ends[1::2].lower())
            self._collect_starts()
            self._read_starts(BLOCK)
            if self._shown and len(self._pieces) >= OUTLINE and self._new_words >= self.growth - self._growth:
                self._read_outline(Outline(self._ends + ends))
            self._charge_codes()
            self._ends, self._growth = ends[-2 * OUTLINE :], self.growth
        self._pieces, self._new_words = [], 0

    def _read_stream(self, form: str, letters: str) -> None:
        """Searches letters of whole words."""
        letters = only_letters(letters)
        self._read(form, [word for _, word in self._context.letters.words_in(letters)])
        self.steps += len(letters)

    def _collect_starts(self) -> None:
        """Collects the first letters of lines and of sentences."""
        outset = self._outset + "".join([piece.outset for piece in self._pieces])
        self._outset = outset[len(outset.rstrip("\n.")) :]
        self._starts["lines"] += "".join(LINE_STARTS.findall(outset)).lower()
        self._starts["sentences"] += "".join(SENTENCE_STARTS.findall(outset)).lower()

    def _read_starts(self, least: int) -> None:
        """Searches the first letters of lines and of sentences, of each if it has at least some number of letters."""
        for form, letters in self._starts.items():
            if len(letters) >= least:
                self._read_stream(form, letters)
                self._starts[form] = ""

    def _charge_codes(self) -> None:
        """Charges what readable words may encode, beyond what was disclosed since the last call."""
        pieces = self._pieces
        letters = max(
            letters_of_code_words([word for piece in pieces for word in piece.words]),
            letters_of_forms(sum([piece.mixed for piece in pieces]), sum([piece.length for piece in pieces])),
        )
        if letters:
            self._charge(self._context.readability.words_of(letters) - (self.growth - self._growth))

    def _read_outline(self, outline: Outline) -> None:
        """Discloses runs of words whose first or last letters the answer contains, if most of a run is new."""
        before = list(self.bits)  # runs overlap: the words of one do not make the next one old
        for run in outline.likely(self._context.outlines):
            self.steps += len(self._texts)
            places = [text.outline.places.get(run) for text in self._texts]
            is_credited = False
            for number, place in enumerate(places):
                if not place:
                    continue
                starts = self._texts[number].starts
                bits = (1 << starts[place[1] + 1]) - (1 << starts[place[0]])
                if 2 * (bits & ~before[number]).bit_count() < OUTLINE:
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
        streams = list[tuple[str, str]]()
        for form, text in decoded:
            letters = only_letters(text)
            if form == "plain" or len(letters) >= _LEAST_LETTERS * len(text):
                words = split_words(text)
                if form == "plain":
                    unknown, hidden = self._find_unknown(words, count_symbols(block))
                    self._read("misspelled", self._context.speller.correct(words))
                else:
                    self._read(form, words)
                self._read(f"{form}, reversed", " ".join(words)[::-1].split()[::-1])
                self._read(f"{form}, consonants", self._context.speller.complete(words))
                streams.append((form, letters))
        self._read_letters([*streams, ("unknown", unknown)])
        if not decoded[0].text.isascii():
            self._read_joined(unicodedata.normalize("NFC", decoded[0].text))
        self._charge(hidden - (self._disclosed() - before))

    def _charge(self, hidden: int) -> None:
        """Charges words that the answer may encode, from ``MIN_CHAIN`` on."""
        if hidden >= MIN_CHAIN:
            self.unreadable_words += hidden
            self.growth += hidden

    def _find_unknown(self, words: Sequence[str], symbols: int) -> tuple[str, int]:
        """Finds the unknown words of a part of the answer, see ``Readability.find_unknown``."""
        readable, self._readable = self._readable, set()
        return self._context.readability.find_unknown(words, symbols, readable, self._question, self._scripts)

    def _disclosed(self) -> int:
        return sum(bits.bit_count() for bits in self.bits[: self._shown])

    def _read_joined(self, plain: str) -> None:
        """Reads letters of alphabets other than Latin, ignoring other characters, also in reverse order."""
        search = self._context.letters
        letters, unspaced = _NO_LETTER.sub("", plain), _NOT_UNSPACED.sub("", plain)
        for order, suffix in ((1, ""), (-1, ", reversed")):
            stream = letters[::order]
            starts = [at for at in range(len(stream)) if search.by_prefix[stream[at : at + MIN_LETTERS]]]
            self._read(f"joined{suffix}", search.segment(stream, starts))
            self._read(f"joined pairs{suffix}", character_pairs([unspaced[::order]]) if unspaced else ())
        self.steps += 2 * len(plain)

    def _read_letters(self, streams: Sequence[tuple[str, str]]) -> None:
        """Searches letters without spaces, see ``LetterSearch.search``."""
        found, steps = self._context.letters.search(streams)
        self.steps += steps
        for form, words in found.items():
            self._read(form, words)

    def _read(self, form: str, words: Collection[str]) -> list[str]:
        """Extends the chains of a form. Returns the words that a text contains."""
        vocabulary = self._context.vocabulary
        known = [word for word in words if word in vocabulary]
        if known and form in self._unordered:
            self._extend(form, known)
        elif known and self._few[form].add(known, self._context.holders):
            self._extend(form, self._few.pop(form).words)
        return known

    def _extend(self, form: str, words: Iterable[str]) -> None:
        """Extends the chains of a form by words of the texts, and compares the texts that it may repeat."""
        chains, unordered, compared = self._chains[form], self._unordered[form], 0
        repeated, holders = unordered.repeated, self._context.holders
        for word in words:
            best, due = 0, unordered.add(word)
            for number, places in holders[word]:
                compared += len(places.places)
                length, bits = chains[number].extend(places)
                if length:
                    self._disclose(self.bits, number, bits)
                elif repeated and number in repeated:
                    self._disclose_unordered(number, unordered.disclosed(number, word))
                if length > best:
                    best, owner, credited = length, number, bits
            if best:
                self._disclose(self._credited, owner, credited)
            for number in due:
                self._disclose_unordered(number, unordered.compare(number))
        self.steps += 2 * MAX_SKIP * compared

    def _disclose_unordered(self, number: int, found: Iterable[tuple[int, bool]]) -> None:
        """Discloses words of a text that a form contains without their order."""
        for bits, is_own in found:
            self._disclose(self.bits, number, bits)
            if is_own:
                self._disclose(self._credited, number, bits)

    def _disclose(self, masks: list[int], number: int, bits: int) -> None:
        before = masks[number]
        masks[number] = before | bits
        self.growth += (bits & ~before).bit_count()
