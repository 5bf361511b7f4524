"""Finding texts in the context: where a quotation stands, what follows it, which words its masks hide."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from casemate.backends.obedient.asking import MASK
from casemate.types import Document
from casemate.words import WORD, content_words

GRAM = 4
"""Words in a row that count as the same text."""
PRESENT_SHARE = 0.1
"""A quotation of which this share is found may be there whole: of a long document only some chunks are at hand."""
REACH = 8
"""Words on either side of a mask that are compared."""
MASK_FIT = 4
"""How many of them must agree."""
MARKS = string.punctuation + "’‘“”–…"


class Passage(NamedTuple):
    """The chunks of one source that follow one another, as one text."""

    title: str
    text: str

    @property
    def content(self) -> str:
        """Title and text."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class Run(NamedTuple):
    """A stretch of equal words: where it begins in the quotation and in the passage, and its length."""

    here: int
    there: int
    length: int


def passages(context: Sequence[Document]) -> list[Passage]:
    """The context with chunks of the same source joined where one repeats the end of the other."""
    found: list[tuple[str, str, str]] = []
    for document in context:
        text = document.text
        while (i := _neighbour(found, document.source, text)) is not None:
            other = found.pop(i)[2]
            text = _joined(other, text) or _joined(text, other)
        found.append((document.source, document.title, text))
    return [Passage(title, text) for _, title, text in found]


def _neighbour(found: Sequence[tuple[str, str, str]], source: str, text: str) -> int | None:
    """Which text of the same source this one can be joined with."""
    return next(
        (
            i
            for i, (name, _, other) in enumerate(found)
            if name == source and (_joined(other, text) or _joined(text, other))
        ),
        None,
    )


def _joined(first: str, second: str) -> str:
    """Both as one, if the second begins with the end of the first; else empty."""
    probe = second[:16]
    at = first.find(probe, max(0, len(first) - 2000)) if len(probe) == 16 else -1
    while at >= 0:
        if second.startswith(first[at:]):
            return first[:at] + second
        at = first.find(probe, at + 1)
    return ""


def spans(text: str) -> list[tuple[str, int]]:
    """Lower-case words with the place where each ends."""
    return [(m[0].lower().replace("’", "'"), m.end()) for m in WORD.finditer(text)]


def runs(quote: Sequence[str], passage: Sequence[str]) -> list[Run]:
    """Stretches of at least ``GRAM`` equal words, in the order of both texts, around the longest of them."""
    size = max(1, min(GRAM, len(quote)))
    places: dict[tuple[str, ...], list[int]] = {}
    for j in range(len(passage) - size + 1):
        places.setdefault(tuple(passage[j : j + size]), []).append(j)
    found: list[Run] = []
    i = 0
    while i <= len(quote) - size:
        options = places.get(tuple(quote[i : i + size]), ())
        longest = max((Run(i, j, _length(quote, i, passage, j)) for j in options), key=lambda r: r.length, default=None)
        if longest:
            found.append(longest)
        i += longest.length if longest else 1
    return _ordered(found)


def _length(quote: Sequence[str], i: int, passage: Sequence[str], j: int) -> int:
    """How many words are equal from two places on."""
    n = 0
    while i + n < len(quote) and j + n < len(passage) and quote[i + n] == passage[j + n]:
        n += 1
    return n


def _ordered(found: Sequence[Run]) -> list[Run]:
    """The longest run, and of the others those that stand in both texts on the same side of it and of one another."""
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


def holds(quote: str, context: Sequence[Passage]) -> bool:
    """Whether the context holds a text word for word, as far as its passages reach; any other word is a no."""
    quoted = [w for w, _ in spans(quote)]
    texts = [[w for w, _ in spans(p.content)] for p in context]
    found = [(runs(quoted, text), text) for text in texts]
    nearest, text = max(found, key=lambda f: _total(f[0]), default=([], []))
    return _total(nearest) > PRESENT_SHARE * len(quoted) and _unbroken(nearest, quoted, text)


def _total(stretches: Sequence[Run]) -> int:
    return sum(run.length for run in stretches)


def _unbroken(stretches: Sequence[Run], quote: Sequence[str], passage: Sequence[str]) -> bool:
    """Whether quotation and passage are equal for as long as both go on; the quotation may end within a word."""
    last = stretches[-1]
    cut = quote[last.here + last.length :], passage[last.there + last.length :]
    whole = len(quote) - (len(cut[0]) == 1 and bool(cut[1]) and cut[1][0].startswith(cut[0][0]))
    ends = [Run(0, 0, 0), *stretches, Run(whole, len(passage), 0)]
    gaps = [(b.here - a.here - a.length, b.there - a.there - a.length) for a, b in pairwise(ends)]
    return min(gaps[0]) == min(gaps[-1]) == 0 and not any(i or j for i, j in gaps[1:-1])


def following(quote: str, context: Sequence[Passage], only_rest: bool) -> str:
    """The passage that a text is from, or what follows it there; empty if it is from none."""
    words = [w for w, _ in spans(quote)]
    places = [spans(p.content) for p in context]
    found = [runs(words, [w for w, _ in place]) for place in places]
    best = max(range(len(context)), key=lambda i: _total(found[i]), default=None)
    if best is None:
        return ""
    if _total(found[best]) < min(2 * GRAM, len(words)) or not words:
        return _alike(quote, context)
    passage = context[best]
    end = max(places[best][r.there + r.length - 1][1] for r in found[best])
    rest = passage.content[end:].strip(f"{MARKS} \n")
    return rest if only_rest and len(rest.split()) > 3 else passage.text


def _alike(quote: str, context: Sequence[Passage]) -> str:
    """The passage that shares most of a text's content words, if it shares half of them."""
    wanted = content_words(quote)
    best = max(context, key=lambda p: len(wanted & content_words(p.content)))
    return best.text if 2 * len(wanted & content_words(best.content)) >= len(wanted) > 0 else ""


def fill(masked: str, context: Sequence[Passage]) -> dict[str, str]:
    """The word behind each mask, by its placeholder; empty where no passage has the words around it.

    A placeholder without a number is called by its place among all.
    """
    here = masked.split()
    keys = [plain(w) for w in here]
    texts = [p.content.split() for p in context]
    plains = [[plain(w) for w in text] for text in texts]
    best: dict[str, tuple[int, str]] = {}
    for m, mask in ((m, mask) for m, word in enumerate(here) if (mask := MASK.search(word))):
        label = mask[0] if re.search(r"\d", mask[0]) else str(len(best) + 1)
        places = [(*_place(keys, m, keyed), text) for text, keyed in zip(texts, plains, strict=True)]
        fit, at, text = max(places, key=lambda place: place[0], default=(0, 0, []))
        known = best.setdefault(label, (0, ""))
        if fit >= MASK_FIT and fit > known[0]:
            best[label] = fit, _cut(text[at], here[m][: mask.start()], here[m][mask.end() :])
    return {label: word for label, (_, word) in best.items()}


def plain(word: str) -> str:
    """A word without case and punctuation around it; a mask is the empty word, which fits any."""
    return "" if MASK.search(word) else word.strip(MARKS).lower() or word


def _place(keys: Sequence[str], m: int, text: Sequence[str]) -> tuple[int, int]:
    """Where in a text the mask at m stands, and how many words around it agree without a break."""
    best = (0, 0)
    for i in range(len(text)):
        before = i > 0 and m > 0 and keys[m - 1] in ("", text[i - 1])
        after = i + 1 < len(text) and m + 1 < len(keys) and keys[m + 1] in ("", text[i + 1])
        if before or after:
            best = max(best, (_agree(keys, m, text, i, -1) + _agree(keys, m, text, i, 1), -i))
    return best[0], -best[1]


def _agree(keys: Sequence[str], m: int, text: Sequence[str], i: int, step: int) -> int:
    """Words that agree from a mask outwards; another mask agrees with anything but counts nothing."""
    count = 0
    for _ in range(REACH):
        m, i = m + step, i + step
        if not (0 <= m < len(keys) and 0 <= i < len(text)) or keys[m] not in ("", text[i]):
            break
        count += bool(keys[m])
    return count


def _cut(word: str, before: str, after: str) -> str:
    """A word of the text without what stands around the mask already, and without punctuation."""
    return word.removeprefix(before).removesuffix(after).strip(MARKS) or word
