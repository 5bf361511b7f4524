"""Cutting a text into chunks that an embedder reads whole, where a reader would cut."""

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

BLOCK = 100_000
"""Characters tokenised at once: a token span costs far more memory than the characters it spans."""
TITLE = 1000
"""Characters of a title that are looked at: tokenisers take a word of any length for one token."""

# Each match ends where the next part of the text begins.
_PARAGRAPH = re.compile(r"\n\s*\n\s*")
_SENTENCE = re.compile(r"[.!?…]['\"’”»)\]]*\s+|[。！？]\s*|\n\s*\n\s*")
_WORD = re.compile(r"\s+")
_REACH = 3  # how many characters before that place the match may begin
_NUMBERED = re.compile(r"#[0-9]+\Z")


def cut(source: Document, embedder: Embedder, size: int, overlap: int) -> list[Document]:
    """Cuts a whole source into the documents that are embedded.

    Every chunk carries the title, cut to a quarter of the size if it is longer, and has that much less room
    for text. A source that has nothing but a title gives it as text; one that has nothing gives no document.

    Args:
        source: The whole source: title, text, digest, metadata, and its name as ``source``.
        embedder: Says where tokens are.
        size: Tokens in a chunk, title included.
        overlap: Tokens that a chunk repeats of the one before, roughly.

    Returns:
        Documents named like the source if there is one, else ``name#1``, ``name#2``, ...

    Raises:
        ConfigError: If the size is not positive.
    """
    title, text = " ".join(source.title.split()), source.text
    if not text.strip():
        title, text = "", title
    title = _shortened(title, embedder, size // 4)
    room = max(1, size - len(embedder.spans(f"{title}\n"))) if title else size
    pieces = [p for block in _blocks(text) for p in chunk(block, embedder.spans(block), room, overlap)]
    ids = _ids(source.source, len(pieces))
    return [replace(source, id=i, title=title, text=piece) for i, piece in zip(ids, pieces, strict=True)]


def chunk(text: str, spans: Sequence[tuple[int, int]], size: int, overlap: int) -> list[str]:
    """Cuts a text into pieces of at most ``size`` tokens that together hold all of it.

    A piece ends at the last paragraph end in its last quarter, else the last sentence end there, else the
    last word end, else between two tokens; more tokens on one character than fit stay together. It begins at
    the first sentence start among the last ``overlap`` tokens of the piece before, else the first word start.

    Args:
        text: What to cut.
        spans: Start and end character of each token.
        size: Tokens in a piece.
        overlap: Tokens that a piece repeats of the one before, roughly; half the size at most.

    Returns:
        Pieces without white space around them, none empty; none at all if the text is blank.

    Raises:
        ConfigError: If the size is not positive.

    >>> chunk("One two. Three four.", [(0, 3), (4, 7), (7, 8), (9, 14), (15, 19), (19, 20)], 4, 0)
    ['One two.', 'Three four.']
    """
    if size < 1:
        raise ConfigError(f"chunk size {size}: a chunk holds at least 1 token")
    pieces = (text[begin:stop].strip() for begin, stop in _windows(text, spans, size, overlap))
    return [piece for piece in pieces if piece]


def _windows(text: str, spans: Sequence[tuple[int, int]], size: int, overlap: int) -> Iterator[tuple[int, int]]:
    """Begin and stop of each piece. Every step gets at least one character further, whatever the spans."""
    starts, ends = _disjoint(spans, len(text))
    overlap = min(max(overlap, 0), size // 2)
    end, begin, reached = len(text.rstrip()), 0, 0
    while reached < end:
        first = min(bisect_left(starts, begin), bisect_right(ends, begin))
        stop = min(starts[first + size], end) if first + size < len(starts) else end
        if stop <= reached and begin < reached:  # the overlap alone fills the window: do without
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
    """Starts and ends of tokens in order, inside the text, each ending before the next begins."""
    flat = np.fromiter(chain.from_iterable(spans), np.int64, 2 * len(spans)).clip(0, length)
    starts, ends = flat[0::2], flat[1::2]
    order = np.lexsort((ends, starts))
    starts = starts[order]
    ends = np.clip(ends[order], starts, np.append(starts[1:], length))
    return starts.tolist(), ends.tolist()


def _last_end(text: str, low: int, stop: int) -> int:
    """Where to end a piece, from ``low`` to ``stop``: as natural, then as late as possible."""
    for pattern in (_PARAGRAPH, _SENTENCE, _WORD):
        found = 0
        for match in pattern.finditer(text, max(low - _REACH, 0), stop):
            found = match.end()
        if found >= low:
            return found
    return stop


def _first_start(text: str, back: int, stop: int) -> int:
    """Where to begin the next piece: from ``back`` on, as early as possible, before ``stop`` if possible."""
    for pattern in (_SENTENCE, _WORD):
        for match in pattern.finditer(text, max(back - _REACH, 0), stop):
            if back <= match.end() < stop:
                return match.end()
    return min(back, stop)


def _blocks(text: str) -> Iterator[str]:
    """The text in parts that are tokenised one by one."""
    begin = 0
    while begin < len(text):
        stop = begin + BLOCK
        if stop < len(text):
            stop = _last_end(text, begin + BLOCK * 3 // 4, stop)
        yield text[begin:stop]
        begin = stop


def _shortened(title: str, embedder: Embedder, size: int) -> str:
    """As much of the title as fits."""
    title = title[:TITLE]
    return chunk(title, embedder.spans(title), size, 0)[0] if title and size else ""


def _ids(name: str, count: int) -> list[str]:
    """Ids of the chunks of a source, which no other source's chunks have: 'a#1' alone must not be 'a' cut."""
    if count == 1 and not _NUMBERED.search(name):
        return [name]
    return [f"{name}#{i}" for i in range(1, count + 1)]
