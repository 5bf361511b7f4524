"""Finds texts in the context: the position of a quotation, its continuation, and the words behind masks."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from casemate.backends.generators.simulated_reader.requests import MASK
from casemate.text.tokens import WORD, content_words
from casemate.types import Document

GRAM = 4  # consecutive equal words that count as the same text
PRESENT_SHARE = 0.1
"""Smallest share of a quotation that must be found: the context has only some chunks of a long document."""
REACH = 8  # words to compare on either side of a mask
MASK_FIT = 4  # smallest number of equal words around a mask
MARKS = string.punctuation + "’‘“”–…"


class Passage(NamedTuple):
    """Consecutive chunks of one source as one text."""

    title: str
    text: str

    @property
    def content(self) -> str:
        """Title and text."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class WordMatch(NamedTuple):
    """A sequence of equal words: its start in the quotation and in the passage, and its length."""

    here: int
    there: int
    length: int


def join_chunks(context: Sequence[Document]) -> list[Passage]:
    """Joins chunks of the same source that overlap.

    A chunk overlaps another if it begins with the other's end.
    """
    found: list[tuple[str, str, str]] = []
    for document in context:
        text = document.text
        while (i := _overlapping(found, document.source, text)) is not None:
            other = found.pop(i)[2]
            text = _join(other, text) or _join(text, other)
        found.append((document.source, document.title, text))
    return [Passage(title, text) for _, title, text in found]


def _overlapping(found: Sequence[tuple[str, str, str]], source: str, text: str) -> int | None:
    """Index of a text of the same source that overlaps this one."""
    return next(
        (
            i
            for i, (name, _, other) in enumerate(found)
            if name == source and (_join(other, text) or _join(text, other))
        ),
        None,
    )


def _join(first: str, second: str) -> str:
    """The joined text if the second begins with the end of the first; otherwise empty."""
    probe = second[:16]
    at = first.find(probe, max(0, len(first) - 2000)) if len(probe) == 16 else -1
    while at >= 0:
        if second.startswith(first[at:]):
            return first[:at] + second
        at = first.find(probe, at + 1)
    return ""


def spans(text: str) -> list[tuple[str, int]]:
    """Lower-case words with their end offsets."""
    return [(m[0].lower().replace("’", "'"), m.end()) for m in WORD.finditer(text)]


def match_words(quote: Sequence[str], passage: Sequence[str]) -> list[WordMatch]:
    """Sequences of at least ``GRAM`` equal words, in the order of both texts, around the longest."""
    size = max(1, min(GRAM, len(quote)))
    offsets: dict[tuple[str, ...], list[int]] = {}
    for j in range(len(passage) - size + 1):
        offsets.setdefault(tuple(passage[j : j + size]), []).append(j)
    found: list[WordMatch] = []
    i = 0
    while i <= len(quote) - size:
        options = offsets.get(tuple(quote[i : i + size]), ())
        longest = max(
            (WordMatch(i, j, _length(quote, i, passage, j)) for j in options), key=lambda r: r.length, default=None
        )
        if longest:
            found.append(longest)
        i += longest.length if longest else 1
    return _ordered(found)


def _length(quote: Sequence[str], i: int, passage: Sequence[str], j: int) -> int:
    """Number of equal words from two positions on."""
    n = 0
    while i + n < len(quote) and j + n < len(passage) and quote[i + n] == passage[j + n]:
        n += 1
    return n


def _ordered(found: Sequence[WordMatch]) -> list[WordMatch]:
    """The longest match, and the others that keep the same order in both texts."""
    if not found:
        return []
    main = max(range(len(found)), key=lambda n: found[n].length)
    kept = [found[main]]
    for run in reversed(found[:main]):
        if run.there + run.length <= kept[0].there:
            kept.insert(0, run)
    for run in found[main + 1 :]:
        if run.there >= kept[-1].there + kept[-1].length:
            kept.append(run)
    return kept


def contains(quote: str, context: Sequence[Passage]) -> bool:
    """Whether the context contains a text word for word, as far as its passages go."""
    quoted = [w for w, _ in spans(quote)]
    texts = [[w for w, _ in spans(p.content)] for p in context]
    found = [(match_words(quoted, text), text) for text in texts]
    nearest, text = max(found, key=lambda f: _total(f[0]), default=([], []))
    return _total(nearest) > PRESENT_SHARE * len(quoted) and _unbroken(nearest, quoted, text)


def _total(matches: Sequence[WordMatch]) -> int:
    return sum(match.length for match in matches)


def _unbroken(matches: Sequence[WordMatch], quote: Sequence[str], passage: Sequence[str]) -> bool:
    """Whether quotation and passage are equal as far as both go. The quotation may end within a word."""
    last = matches[-1]
    cut = quote[last.here + last.length :], passage[last.there + last.length :]
    whole = len(quote) - (len(cut[0]) == 1 and bool(cut[1]) and cut[1][0].startswith(cut[0][0]))
    ends = [WordMatch(0, 0, 0), *matches, WordMatch(whole, len(passage), 0)]
    gaps = [(b.here - a.here - a.length, b.there - a.there - a.length) for a, b in pairwise(ends)]
    return min(gaps[0]) == min(gaps[-1]) == 0 and not any(i or j for i, j in gaps[1:-1])


def find_match(quote: str, context: Sequence[Passage], only_rest: bool) -> str:
    """The passage that contains a text, or its continuation there. Empty: there is none."""
    words = [w for w, _ in spans(quote)]
    places = [spans(p.content) for p in context]
    found = [match_words(words, [w for w, _ in place]) for place in places]
    best = max(range(len(context)), key=lambda i: _total(found[i]), default=None)
    if best is None:
        return ""
    if _total(found[best]) < min(2 * GRAM, len(words)) or not words:
        return _most_similar(quote, context)
    passage = context[best]
    end = max(places[best][r.there + r.length - 1][1] for r in found[best])
    rest = passage.content[end:].strip(f"{MARKS} \n")
    return rest if only_rest and len(rest.split()) > 3 else passage.text


def _most_similar(quote: str, context: Sequence[Passage]) -> str:
    """The passage with most of a text's content words, if it has half of them."""
    terms = content_words(quote)
    best = max(context, key=lambda p: len(terms & content_words(p.content)))
    return best.text if 2 * len(terms & content_words(best.content)) >= len(terms) > 0 else ""


def fill_masks(masked: str, context: Sequence[Passage]) -> dict[str, str]:
    """The word behind each mask, by placeholder. Empty: no passage has the words around it.

    A placeholder without a number is numbered by its position.
    """
    here = masked.split()
    keys = [normalize(w) for w in here]
    texts = [p.content.split() for p in context]
    normalized = [[normalize(w) for w in text] for text in texts]
    best: dict[str, tuple[int, str]] = {}
    for m, mask in ((m, mask) for m, word in enumerate(here) if (mask := MASK.search(word))):
        label = mask[0] if re.search(r"\d", mask[0]) else str(len(best) + 1)
        places = [(*_locate(keys, m, keyed), text) for text, keyed in zip(texts, normalized, strict=True)]
        fit, at, text = max(places, key=lambda place: place[0], default=(0, 0, []))
        known = best.setdefault(label, (0, ""))
        if fit >= MASK_FIT and fit > known[0]:
            best[label] = fit, _trim(text[at], here[m][: mask.start()], here[m][mask.end() :])
    return {label: word for label, (_, word) in best.items()}


def normalize(word: str) -> str:
    """The lower-case word without punctuation around it. A mask becomes empty, which matches any word."""
    return "" if MASK.search(word) else word.strip(MARKS).lower() or word


def _locate(keys: Sequence[str], m: int, text: Sequence[str]) -> tuple[int, int]:
    """Number of consecutive equal words around the mask at m, and its position in a text."""
    best = (0, 0)
    for i in range(len(text)):
        before = i > 0 and m > 0 and keys[m - 1] in ("", text[i - 1])
        after = i + 1 < len(text) and m + 1 < len(keys) and keys[m + 1] in ("", text[i + 1])
        if before or after:
            best = max(best, (_agree(keys, m, text, i, -1) + _agree(keys, m, text, i, 1), -i))
    return best[0], -best[1]


def _agree(keys: Sequence[str], m: int, text: Sequence[str], i: int, step: int) -> int:
    """Number of equal words from a mask outwards. Other masks match anything and are not counted."""
    count = 0
    for _ in range(REACH):
        m, i = m + step, i + step
        if not (0 <= m < len(keys) and 0 <= i < len(text)) or keys[m] not in ("", text[i]):
            break
        count += bool(keys[m])
    return count


def _trim(word: str, before: str, after: str) -> str:
    """A word without the text around the mask and without punctuation."""
    return word.removeprefix(before).removesuffix(after).strip(MARKS) or word
