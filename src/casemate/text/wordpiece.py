"""WordPiece tokenizer of uncased BERT models (Wu et al. 2016; Devlin et al. 2019), with character offsets.

It replaces the package ``tokenizers``, which adds 38 MB and eleven packages, including a client of a model hub (ADR
0012). ``tests/unit/test_wordpiece.py`` compares ids and offsets with that package.

Deviation: 500 of 1.1 million code points give different tokens, because Python has newer Unicode tables. Nearly all of
them were added to Unicode after 2015.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from casemate.errors import DataError

MAX_WORD_LENGTH = 100
"""Maximum length of a word in characters. A longer word is one unknown token."""
WORD_CACHE_SIZE = 1 << 15
"""Maximum number of words in the cache of pieces."""
FOLD_CACHE_SIZE = 1 << 16
"""Maximum number of characters in the cache of normal forms."""
_CJK = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


class WordPiece:
    """Tokenizer of an uncased BERT model.

    Args:
        vocabulary: Id of each token; a piece inside a word begins with ``##``. Must contain ``[UNK]``.
        special: Tokens that are never split, such as ``[UNK]``.

    Attributes:
        vocabulary: As given.
    """

    def __init__(self, vocabulary: Mapping[str, int], special: Sequence[str]) -> None:
        self.vocabulary = vocabulary
        self._unknown = vocabulary["[UNK]"]
        self._special = re.compile("|".join(map(re.escape, special)))
        self._cached_split = lru_cache(WORD_CACHE_SIZE)(self._split)

    @classmethod
    def load(cls, path: Path) -> WordPiece:
        """Reads a ``tokenizer.json``.

        Raises:
            DataError: If the file is absent or damaged, or describes another kind of tokenizer.
        """
        try:
            about = json.loads(path.read_text("utf-8"))
            model, normalizer = about["model"], about["normalizer"]
            special = [token["content"] for token in about["added_tokens"]]
            kind = (model["type"], model["continuing_subword_prefix"], normalizer["type"], normalizer["lowercase"])
            if kind != ("WordPiece", "##", "BertNormalizer", True):
                raise ValueError(f"not the WordPiece tokenizer of an uncased BERT model: {kind}")
            return cls(model["vocab"], special)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"cannot read the tokenizer {path}: {error!r}") from error

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without [CLS] and [SEP].

        >>> WordPiece({"[UNK]": 0, "run": 1, "##s": 2, "!": 3}, ["[UNK]"]).encode("Rúns! [UNK]x")
        [1, 2, 3, 0, 0]
        """
        ids: list[int] = []
        for part, special in self._parts(text):
            if special:
                ids.append(self.vocabulary[text[part]])
            else:
                for word in text[part].translate(_FOLD_TABLE).split():
                    ids += [piece for piece, _ in self._pieces(word)]
        return ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Returns the start and end offset, in characters, of each token of ``encode``.

        >>> WordPiece({"[UNK]": 0, "run": 1, "##s": 2}, ["[UNK]"]).spans("Rúns")
        [(0, 3), (3, 4)]
        """
        found: list[tuple[int, int]] = []
        for part, special in self._parts(text):
            if special:
                found.append((part.start, part.stop))
                continue
            folded = [_FOLD_TABLE[ord(char)] for char in text[part]]
            offsets = [part.start + i for i, plain in enumerate(folded) for _ in plain]
            for word in re.finditer(r"[^ ]+", "".join(folded)):
                at = word.start()
                for _, length in self._pieces(word[0]):
                    found.append((offsets[at], offsets[at + length - 1] + 1))
                    at += length
        return found

    def _parts(self, text: str) -> Iterator[tuple[slice, bool]]:
        """Splits a text at special tokens; yields each part and whether it is a special token."""
        at = 0
        for match in self._special.finditer(text) if "[" in text else ():
            yield slice(at, match.start()), False
            yield slice(match.start(), match.end()), True
            at = match.end()
        yield slice(at, len(text)), False

    def _pieces(self, word: str) -> tuple[tuple[int, int], ...]:
        """Returns the id and length of each piece of a word."""
        return self._cached_split(word) if len(word) <= MAX_WORD_LENGTH else ((self._unknown, len(word)),)

    def _split(self, word: str) -> tuple[tuple[int, int], ...]:
        """Greedy longest-match-first split; one unknown token if no piece matches at some position."""
        found, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = self.vocabulary.get(("##" if start else "") + word[start:end])
                if piece is not None:
                    found.append((piece, end - start))
                    start = end
                    break
            else:
                return ((self._unknown, len(word)),)
        return tuple(found)


class _FoldTable(dict[int, str]):
    """Cache of normal forms: lower case, no accents, no control characters, spaces around punctuation and CJK."""

    def __missing__(self, code: int) -> str:
        if len(self) >= FOLD_CACHE_SIZE:
            self.clear()
        self[code] = folded = _fold(chr(code))
        return folded


def _fold(char: str) -> str:
    if char not in "\t\n\r" and (char == "\ufffd" or unicodedata.category(char) in {"Cc", "Cf", "Co"}):
        return ""
    if char.isspace():
        return " "
    if any(low <= ord(char) <= high for low, high in _CJK):
        return f" {unicodedata.normalize('NFD', char)} "
    plain = (c.lower() for c in unicodedata.normalize("NFD", char) if unicodedata.category(c) != "Mn")
    return "".join(f" {c} " if _is_punctuation(c) else c for part in plain for c in part)


def _is_punctuation(char: str) -> bool:
    category = unicodedata.category(char)
    return category.startswith("P") or (char.isascii() and category.startswith("S"))


_FOLD_TABLE = _FoldTable()
