"""Splits answers into pieces at the ends of words, and describes each piece.

Answers repeat short pieces, so the descriptions are cached.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from casemate.text.disclosure.codes import has_mixed_forms
from casemate.text.disclosure.words import ALPHANUMERIC, count_letters, split_parts, split_words
from casemate.text.disguises import INVISIBLE, LETTER_NAMES, fold_text
from casemate.text.outlines import ends_of_words
from casemate.text.tokens import STOP_WORDS, FunctionCache

SIGNS_PER_LETTER = 4
"""Maximum number of characters that encode one letter."""
_SIGN = re.compile(r"[^\w\s]|_")
_SAME_SIGN = re.compile(r"([\W_])\1{5,}")
_SYMBOL = re.compile(rf"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f{INVISIBLE}\u2190-\U0010ffff]")
"""Control and invisible characters, and all above punctuation and currencies: arrows, symbols, emoji, private use.

Each may encode a letter.
"""
_SPACES = re.compile(r"\s{2,}")
_NO_SIGN = bytes(c for c in range(128) if not _SIGN.match(chr(c)))
PIECE_END = r"、。，．！？；：」』）"
"""Punctuation that ends a word without a space."""
_PIECE = re.compile(rf"(?<!\s)\s*+(?:[^\s{PIECE_END}]++[{PIECE_END}]*+|[{PIECE_END}]++)|\s+\Z")
_SENTENCE_ENDS, _CLOSING = tuple(".!?。！？"), " \t\n\r\"'*_)]}»”’」』）"
"""Characters that end a sentence, and characters that may follow them."""
LINE_STARTS, SENTENCE_STARTS = re.compile(r"\n\.*([A-Za-z])"), re.compile(r"\.\n*([A-Za-z])")
"""The first letters of lines and of sentences in ``Piece.outset`` of consecutive pieces."""
_SHORT_PIECE = 40
"""Maximum length in characters of a cached piece of an answer."""


def _other_spaces(run: str) -> int:
    """Number of white-space characters after another one, such as a tab after a space. Each may encode a letter."""
    return sum(b not in " \t\n\r" or a in " \t" and a != b for a, b in zip(run, run[1:], strict=False))


def count_symbols(text: str) -> int:
    """Maximum number of letters that the characters outside words may encode.

    A long run of one character counts once.
    """
    if not text.isascii():
        text = _SAME_SIGN.sub(r"\1", text)
        signs = "".join(_SIGN.findall(text))
    else:
        if any(6 * chr(code) in text for code in set(text.encode().translate(None, ALPHANUMERIC))):
            text = _SAME_SIGN.sub(r"\1", text)
        signs = text.encode().translate(None, _NO_SIGN).decode()
    symbols = len(_SYMBOL.findall(signs))
    return symbols + (len(signs) - symbols) // SIGNS_PER_LETTER + sum(map(_other_spaces, _SPACES.findall(text)))


@dataclass(frozen=True, slots=True)
class Piece:
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
        mixed: Number of its letters if a word mixes forms of letters, otherwise 0.
        outset: The first of ``ends``, after a line feed if the piece begins a line, and before a dot if it ends a
            sentence.
    """

    words: list[str]
    length: int
    symbols: int
    negligible: bool
    numeric: bool
    initials: str
    named: str
    ends: str
    mixed: int
    outset: str


def _begins_line(text: str) -> bool:
    return "\n" in text[: len(text) - len(text.lstrip())]


def _read_piece(text: str) -> Piece:
    folded = fold_text(text)
    words = split_words(folded)
    negligible = bool(words) and all(len(w) > 1 and w in STOP_WORDS for w in words)
    numeric = any(map(str.isdigit, words))
    initials, named = (word[0] for word in words), (LETTER_NAMES.get(word, "") for word in words)
    ends, length = ends_of_words(split_parts(folded), STOP_WORDS), count_letters(words)
    return Piece(
        words,
        length,
        count_symbols(text),
        negligible,
        numeric,
        initials="".join(initials),
        named="".join(named),
        ends=ends,
        mixed=length if has_mixed_forms(text) else 0,
        outset="\n" * _begins_line(text) + ends[:1] + "." * text.rstrip(_CLOSING).endswith(_SENTENCE_ENDS),
    )


_PIECES = FunctionCache(_read_piece, 4096)


def read_piece(text: str) -> Piece:
    """The description of a piece."""
    return _PIECES[text] if len(text) <= _SHORT_PIECE else _read_piece(text)


def split_pieces(answer: str) -> list[str]:
    """Splits an answer at the ends of words; each piece begins with the space before it."""
    return _PIECE.findall(answer)


def _count_words(piece: str) -> int:
    return len(split_words(fold_text(piece)))


_WORD_COUNTS = FunctionCache(_count_words, 4096)


def pieces_with_words(text: str) -> list[tuple[str, int]]:
    """Splits a text at the ends of words. Returns each piece with its number of words.

    >>> pieces_with_words("Tolls: 3 marks.")
    [('Tolls:', 1), (' 3', 1), (' marks.', 1)]
    """
    short = _SHORT_PIECE
    return [(p, _WORD_COUNTS[p] if len(p) <= short else _count_words(p)) for p in split_pieces(text)]
