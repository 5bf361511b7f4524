"""How close a question is to one document, in six figures, each beyond what its neighbours explain.

A question that carries a document, or asks about it fact by fact, stands out against the other documents that were
found for it: by similarity, and by the words it shares with that document alone. ``calibration`` learns from an owner's
own harmless questions how far is too far.

Every figure is computed from one document and those ranked below it. Taking another document out of the ranking never
makes one look less close, rare changes at the end of the list aside. So documents may be withheld one by one, the
closest first, and what is left is judged as if the withheld had never been there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from casemate import stats
from casemate.types import Background, Hit
from casemate.words import STOP_WORDS, stem

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
CACHED = 512  # documents whose words are remembered: some 15 MB


class Question:
    """The words of a question, and what documents share with them."""

    def __init__(self, text: str) -> None:
        words = _words(text)
        self._stems, self._phrases = words.stems - {""}, frozenset(_runs(words.tokens))

    def observe(self, hits: Sequence[Hit], background: Background, k: int) -> dict[str, tuple[float, ...]]:
        """The figures of every source that has a chunk among the first k hits.

        Args:
            hits: By decreasing score; ``LOOKS`` more than k, since the figures compare with what is below.
            background: Of all documents, without those withheld.
            k: How many hits make the context.

        Returns:
            Source to figures, in the order of ``FEATURES``.
        """
        found: dict[str, _Source] = {}
        for hit in hits[: k + LOOKS]:
            words = _words(hit.document.content)
            held = found.setdefault(hit.document.source, _Source(hit.score, frozenset(), ()))
            found[hit.document.source] = _Source(held.score, held.stems | words.stems, (*held.tokens, words.tokens))
        shared = {name: len(self._stems & source.stems) for name, source in found.items()}
        figures: dict[str, tuple[float, ...]] = {}
        for name in dict.fromkeys(h.document.source for h in hits[:k]):
            own = found[name]
            lower = [o for o, other in found.items() if o != name and other.score <= own.score]
            lower = [o for o in lower if not _copies(found[o].stems, own.stems)]
            below = [found[o].score for o in lower]
            margin = shared[name] - max((shared[o] for o in lower), default=0)
            figures[name] = (
                own.score,
                own.score - math.fsum(below[:NEXT]) / len(below[:NEXT]) if below else own.score,
                _depth(own.score, background),
                _spacing([own.score, *below]),
                math.log1p(self._shared_phrases(own)),
                math.log1p(max(margin, 0)),
            )
        return figures

    def _shared_phrases(self, source: _Source) -> int:
        if not self._phrases:
            return 0
        return len(self._phrases.intersection(chain.from_iterable(map(_runs, source.tokens))))


class _Source(NamedTuple):
    """What was found of one source document."""

    score: float
    stems: frozenset[str]
    tokens: tuple[list[str], ...]


class _Words(NamedTuple):
    tokens: list[str]
    stems: frozenset[str]  # of those that carry meaning, and "" for all others


@lru_cache(CACHED)
def _words(text: str) -> _Words:
    """Words, roughly: a fifth of the time of ``words.words``, and this is on every request's path."""
    tokens = text.lower().translate(_SPACES).split()
    return _Words(tokens, frozenset(map(_STEMS.__getitem__, tokens)))


class _Stems(dict[str, str]):
    """Word to stem; nothing for a word without meaning. Forgets all when hostile texts have filled it."""

    def __missing__(self, word: str) -> str:
        if len(self) > 1 << 17:
            self.clear()
        found = self[word] = "" if word in STOP_WORDS else stem(word)
        return found


_STEMS = _Stems()
_SPACES = {ord(c): " " for c in "“”‘’«»–—…·" + "".join(map(chr, range(128))) if not c.isalnum()}


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
    """-log10 of ``stats.spacing_test(s, 1)``, without its checks: this is on every request's path."""
    v = len(s) - 2
    if v < NEXT:
        return 0.0
    rest = math.fsum(s[1:]) + s[1] - (v + 2) * s[-1]
    return v * math.log10(1 + (s[0] - s[1]) / rest) if rest > 0 else 0.0


def as_mapping(figures: Sequence[float]) -> Mapping[str, float]:
    """The figures by name, for whoever reads a verdict."""
    return dict(zip(FEATURES, figures, strict=True))
