"""How close a question is to one document, in six figures, each beyond what its neighbours explain.

A question that carries a document, or asks about it fact by fact, stands out against the other documents that were
found for it: by similarity, and by the words it shares with that document alone. ``calibration`` learns from an owner's
own harmless questions how far is too far.

Every figure is computed from one document and those ranked below it, and whoever is withheld can be left out of the
comparison. So it can be decided, from the last document to the first, who is withheld, and what is left is judged as if
the withheld had never been there.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import TypeAlias

from casemate import stats
from casemate.types import Background, Hit, Retrieval
from casemate.words import STOP_WORDS, stem

Figures: TypeAlias = tuple[float, ...]
FEATURES = ("similarity", "gap", "depth", "spacing", "phrases", "margin")
"""Names of the figures, in order; each is larger the closer the question.

``similarity``: cosine of the document's best chunk. ``gap``: the same minus the mean of the next three documents (G4).
``depth``: standard deviations above the mean of all similarities (Mirabel, Algorithm 1, line 9). ``spacing``: -log10 of
the p-value of the spacing test (``stats.spacing_test``). ``phrases``: ln(1 + number of distinct four-word phrases that
question and document share). ``margin``: ln(1 + how many more of the question's content words the document has than any
that is ranked below).
"""
NEXT = 3
LOOKS = 7
"""Hits beyond the context that are compared with."""
ALIKE = 0.7
"""Share of common words above which two documents are copies: a copy does not explain a high similarity."""
CEILING, TINY = 16.0, 1e-9
"""The spacing test's p-value counts as 10^-16 at least, and a spacing below TINY is rounding."""
CACHED, READ = 4096, 64  # documents whose stems are remembered, some 40 MB; and whose words, in order


class Question:
    """The words of a question, and what documents share with them."""

    def __init__(self, text: str) -> None:
        tokens = _tokens.__wrapped__(text)  # not the caches: questions are not to be remembered
        stems = list(map(_STEMS.__getitem__, tokens))
        self._stems, self._phrases = frozenset(stems) - {""}, frozenset(_runs(tokens))
        self._of_phrases = {frozenset(run) for run in _runs(stems)}
        self._read: dict[str, tuple[frozenset[str], int]] = {}

    def figures(self, source: str, found: Retrieval, out: Collection[str] = ()) -> Figures | None:
        """The figures of one source, compared with the next ``LOOKS`` hits.

        Args:
            source: Whose.
            found: Hits by decreasing score, and the law of all similarities.
            out: Sources that nothing is compared with: those withheld, and those that rank above.

        Returns:
            In the order of ``FEATURES``. None if the source was not found, or stands so near the end of what was found
            that there is too little to compare with.
        """
        own, below = list[Hit](), list[Hit]()
        for hit in found.hits:
            if hit.document.source == source:
                own.append(hit)
            elif own and hit.document.source not in out:
                below.append(hit)
            if len(below) == LOOKS:
                break
        if not own or (len(below) < LOOKS and not found.exhausted):
            return None
        score, (stems, common) = own[0].score, self._words(own)
        others = [
            (hits[0].score, less)
            for hits, (held, less) in ((hits, self._words(hits)) for hits in _by_source(below))
            if not _copies(held, stems)
        ]
        near = [s for s, _ in others[:NEXT]]
        margin = common - max((less for _, less in others), default=0)
        return (
            score,
            score - math.fsum(near) / len(near) if near else score,
            _depth(score, found.background),
            _spacing([score, *(s for s, _ in others)]),
            math.log1p(self._shared_phrases(own, stems)),
            math.log1p(max(margin, 0)),
        )

    def _words(self, hits: Sequence[Hit]) -> tuple[frozenset[str], int]:
        """The stems of some hits of one source, and how many of them the question has: asked for again and again."""
        if len(hits) > 1:
            stems = frozenset[str]().union(*(_known(h.document.content) for h in hits))
            return stems, len(self._stems & stems)
        text = hits[0].document.content  # mostly: then nothing is copied
        found = self._read.get(text)
        if found is None:
            stems = _known(text)
            found = self._read[text] = stems, len(self._stems & stems)
        return found

    def _shared_phrases(self, own: Sequence[Hit], stems: frozenset[str]) -> int:
        """How many, given the stems of the same hits: mostly those tell that it is none, and no text is read."""
        if not any(map(stems.issuperset, self._of_phrases)):
            return 0
        runs = (_runs(_tokens(h.document.content)) for h in own)
        return len(self._phrases.intersection(chain.from_iterable(runs)))


def sources(hits: Iterable[Hit]) -> list[str]:
    """The sources of some hits, each once, in order."""
    return list(dict.fromkeys(h.document.source for h in hits))


def _by_source(hits: Sequence[Hit]) -> Iterable[list[Hit]]:
    found: dict[str, list[Hit]] = {}
    for hit in hits:
        found.setdefault(hit.document.source, []).append(hit)
    return found.values()


@lru_cache(CACHED)
def _known(text: str) -> frozenset[str]:
    """Stems of the words that carry meaning, and "" for all others."""
    return frozenset(map(_STEMS.__getitem__, set(_tokens(text))))


@lru_cache(READ)
def _tokens(text: str) -> list[str]:
    """Words, roughly: a fifth of the time of ``words.words``, and this is on every request's path.

    Read as embedders read: without accents and invisible characters, which would hide words from us and not from them.
    """
    if text.isascii():  # a third of the time
        return text.lower().encode().translate(_PLAIN, _NOTHING).decode().split()
    return unicodedata.normalize("NFKD", text).casefold().translate(_FOLDED).split()


class _Stems(dict[str, str]):
    """Word to stem; nothing for a word without meaning. Forgets all when hostile texts have filled it."""

    def __missing__(self, word: str) -> str:
        if len(self) > 1 << 17:
            self.clear()
        found = self[word] = "" if word in STOP_WORDS else stem(word)
        return found


class _Folded(dict[int, str | None]):
    """Character to itself; marks and invisible characters to nothing, punctuation and symbols to a space."""

    def __missing__(self, code: int) -> str | None:
        character = chr(code)
        kind = unicodedata.category(character)
        found: str | None = character
        if kind[0] in "PSZ" or character.isspace():
            found = " "
        elif kind[0] == "M" or kind in ("Cf", "Cc"):
            found = None
        self[code] = found
        return found


_STEMS = _Stems()
_FOLDED = _Folded()
_NOTHING = bytes(code for code in range(128) if _FOLDED[code] is None)
_PLAIN = bytes(ord(_FOLDED[code] or " ") for code in range(128)).ljust(256, b" ")


def _runs(tokens: Sequence[str]) -> Iterable[tuple[str, ...]]:
    return zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False)


def _copies(a: frozenset[str], b: frozenset[str]) -> bool:
    """Whether two documents are nearly the same words."""
    small, large = sorted((len(a), len(b)))
    if small < ALIKE * large:
        return False
    both = len(a & b)
    return both >= ALIKE * (len(a) + len(b) - both)


def _depth(score: float, background: Background) -> float:
    if background.n < 2:
        return 0.0
    rest = stats.without(background, score)
    return (score - rest.mean) / max(rest.std, math.sqrt(stats.MIN_VARIANCE))


def _spacing(s: Sequence[float]) -> float:
    """-log10 of ``stats.spacing_test(s, 1)``, at most ``CEILING``, without its checks: on every request's path."""
    v, own = len(s) - 2, s[0] - s[1] if len(s) > 1 else 0.0
    if v < NEXT or own < TINY:
        return 0.0
    rest = max(math.fsum(s[1:]) + s[1] - (v + 2) * s[-1], TINY)  # 0 if all that follow are alike, but for rounding
    return min(v * math.log10(1 + own / rest), CEILING)
