"""Splits documents into chunks that fit the embedder, at paragraph, sentence or word boundaries."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from casemate.errors import ConfigError
from casemate.protocols import Embedder
from casemate.types import Document

BLOCK = 100_000  # characters per tokenizer call; token spans need far more memory than the text
TITLE = 1000  # characters of a title that are used; a tokenizer may treat a word of any length as one token
LONGEST, PIECE = 50, 4
"""Characters of a token or of a gap between tokens that are not divided, and of the pieces into which a longer one is.

WordPiece reads a word that it does not know as one token and drops invisible characters, whatever their number. Without
the pieces, a chunk of a hostile text could fill the context of a language model.
"""

# Each match ends where the next unit begins.
_PARAGRAPH = re.compile(r"\n\s*\n\s*")
_SENTENCE = re.compile(r"[.!?…]['\"’”»)\]]*\s+|[。！？]\s*|\n\s*\n\s*")
_WORD = re.compile(r"\s+")
_REACH = 3  # a match may begin this many characters before its end
_NUMBERED = re.compile(r"#[0-9]+\Z")


def split_document(source: Document, embedder: Embedder, size: int, overlap: int) -> list[Document]:
    """Splits a source into chunks: with its id if there is only one, else ``name#1``, ``name#2``, ...

    Every chunk carries the title, shortened to a quarter of the size, which leaves correspondingly less room for text.
    The title of a source without text becomes its text. An empty source yields no chunk.

    Args:
        source: The whole source: title, text, digest, metadata, and its name as ``source``.
        embedder: Provides token boundaries.
        size: Tokens per chunk, title included.
        overlap: Approximate number of tokens that a chunk repeats from the previous one.

    Raises:
        ConfigError: If the size is not positive.
    """
    title, text = " ".join(source.title.split()), source.text
    if not text.strip():
        title, text = "", title
    title = _shortened(title, embedder, size // 4)
    room = max(1, size - len(embedder.spans(f"{title}\n"))) if title else size
    parts = [part for block in _blocks(text) for part in split_text(block, embedder.spans(block), room, overlap)]
    ids = _ids(source.source, len(parts))
    return [replace(source, id=i, title=title, text=part) for i, part in zip(ids, parts, strict=True)]


def split_text(text: str, spans: Sequence[tuple[int, int]], size: int, overlap: int) -> list[str]:
    """Splits a text into parts of at most ``size`` tokens that together cover it, without surrounding white space.

    A span or gap of more than ``LONGEST`` characters counts as one token for each ``PIECE`` characters.

    A part ends at the last paragraph boundary in its last quarter, else at the last sentence boundary there, else at
    the last word boundary, else between two tokens. Tokens that share one character stay together, even if they exceed
    the size. A part begins at the first sentence start among the last ``overlap`` tokens of the previous part, else at
    the first word start there. The overlap is at most half the size.

    Raises:
        ConfigError: If the size is not positive.

    >>> split_text("One two. Three four.", [(0, 3), (4, 7), (7, 8), (9, 14), (15, 19), (19, 20)], 4, 0)
    ['One two.', 'Three four.']
    """
    if size < 1:
        raise ConfigError(f"the chunk size is {size}; it must be at least 1 token")
    parts = (text[begin:stop].strip() for begin, stop in _windows(text, spans, size, overlap))
    return [part for part in parts if part]


def _windows(text: str, spans: Sequence[tuple[int, int]], size: int, overlap: int) -> Iterator[tuple[int, int]]:
    """Yields begin and end of each part. Every step advances by at least one character, whatever the spans."""
    starts, ends = _disjoint(spans, len(text))
    overlap = min(max(overlap, 0), size // 2)
    end, begin, reached = len(text.rstrip()), 0, 0
    while reached < end:
        first = min(bisect_left(starts, begin), bisect_right(ends, begin))
        stop = min(starts[first + size], end) if first + size < len(starts) else end
        if stop <= reached and begin < reached:  # the overlap alone fills the window: drop it
            begin = reached
            continue
        stop = max(stop, begin + 1)
        if stop < end:
            low = starts[first + size - size // 4]
            stop = _last_end(text, max(low, begin + 1, reached + 1), stop)
        yield begin, stop
        reached = stop
        following = bisect_left(starts, stop)
        begin = _first_start(text, starts[max(0, following - overlap)], stop) if overlap and starts else stop


def _disjoint(spans: Sequence[tuple[int, int]], length: int) -> tuple[list[int], list[int]]:
    """Sorts token spans, clips them to the text, removes overlaps and divides long ones; returns starts and ends."""
    flat = np.fromiter(chain.from_iterable(spans), np.int64, 2 * len(spans)).clip(0, length)
    starts, ends = flat[0::2], flat[1::2]
    edges = np.sort(np.concatenate(([0], starts, [length])))
    if long := np.flatnonzero(np.diff(edges) > LONGEST).tolist():
        pieces = np.concatenate([np.arange(edges[i], edges[i + 1], PIECE) for i in long])
        pieces = np.setdiff1d(pieces, starts)
        starts, ends = np.append(starts, pieces), np.append(ends, pieces + PIECE)
    order = np.lexsort((ends, starts))
    starts = starts[order]
    ends = np.clip(ends[order], starts, np.append(starts[1:], length))
    return starts.tolist(), ends.tolist()


def _last_end(text: str, low: int, stop: int) -> int:
    """Best position between ``low`` and ``stop`` to end a part: the highest kind of boundary, as late as possible."""
    for pattern in (_PARAGRAPH, _SENTENCE, _WORD):
        found = 0
        for match in pattern.finditer(text, max(low - _REACH, 0), stop):
            found = match.end()
        if found >= low:
            return found
    return stop


def _first_start(text: str, back: int, stop: int) -> int:
    """Best position to begin the next part: as early as possible from ``back`` on, before ``stop`` if possible."""
    for pattern in (_SENTENCE, _WORD):
        for match in pattern.finditer(text, max(back - _REACH, 0), stop):
            if back <= match.end() < stop:
                return match.end()
    return min(back, stop)


def _blocks(text: str) -> Iterator[str]:
    """Yields the text in blocks that are tokenized one by one."""
    begin = 0
    while begin < len(text):
        stop = begin + BLOCK
        if stop < len(text):
            stop = _last_end(text, begin + BLOCK * 3 // 4, stop)
        yield text[begin:stop]
        begin = stop


def _shortened(title: str, embedder: Embedder, size: int) -> str:
    """The beginning of the title, at most ``size`` tokens."""
    title = title[:TITLE]
    return split_text(title, embedder.spans(title), size, 0)[0] if title and size else ""


def _ids(name: str, count: int) -> list[str]:
    """Ids of a source's chunks, unique across sources: a source 'a#1' must not collide with a chunk of 'a'."""
    if count == 1 and not _NUMBERED.search(name):
        return [name]
    return [f"{name}#{i}" for i in range(1, count + 1)]
