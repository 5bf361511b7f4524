"""Closeness of a question to one document: six features, each relative to the document's neighbors in the ranking.

A question may contain a document, or ask about its facts one by one. Such a document differs from the other hits by its
similarity, and by words that only it has in common with the question. ``fitting`` learns from an owner's benign
questions which closeness is unusual.

Every feature is computed from one document and those ranked below it, and withheld documents can be left out. So
decisions are made from the last document to the first. The remaining documents are judged as if the withheld ones did
not exist.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import TypeAlias

from casemate.maths import moments
from casemate.text.stored_questions import without_question
from casemate.text.tokens import STOP_WORDS, stem
from casemate.types import Hit, Retrieval, SimilarityStats

Features: TypeAlias = tuple[float, ...]
"""Values in the order of ``FEATURES``."""
FEATURES = ("similarity", "gap", "depth", "spacing", "phrases", "margin")
"""Names of the features; all increase with closeness.

``similarity``: cosine of the document's best chunk. ``gap``: the same minus the mean of the next three documents (G4).
``depth``: standard deviations above the mean of all similarities (Mirabel, Algorithm 1, line 9). ``spacing``: -log10 of
the p-value of the spacing test (``_spacing``). ``phrases``: ln(1 + number of distinct four-word phrases that
question and document share). ``margin``: ln(1 + m), where the document has m content words of the question more than
any document ranked below.
"""
NEXT_DOCUMENTS = 3
"""Documents below that ``gap`` compares with."""
LOOKAHEAD = 7
"""Hits beyond the context that are compared with."""
COPY_SIMILARITY = 0.7
"""Jaccard similarity of words above which two documents are copies: a copy does not explain a high similarity."""
MAX_SPACING, MIN_SPACING = 16.0, 1e-9
"""Cap of -log10 of the spacing test's p-value, and the spacing below which a difference is rounding."""
STEM_CACHE, TOKEN_CACHE = 4096, 64  # documents, some 40 MB; and documents with word order


class FeatureExtractor:
    """Extracts the features of one question for documents.

    Args:
        labels: Labels of the questions that documents contain (``text.stored_questions``). ``phrases`` and ``margin``
            count the rest of these documents only.
    """

    def __init__(self, text: str, labels: tuple[str, ...] = ()) -> None:
        self._labels = labels
        tokens = _tokens.__wrapped__(text)  # bypasses the cache: questions must not be stored
        stems = list(map(_STEMS.__getitem__, tokens))
        self._stems, self._phrases = frozenset(stems) - {""}, frozenset(_four_grams(tokens))
        self._phrase_stems = {frozenset(phrase) for phrase in _four_grams(stems)}
        self._shared: dict[str, tuple[frozenset[str], int]] = {}

    def extract(self, source: str, found: Retrieval, out: Collection[str] = ()) -> Features | None:
        """Returns the features of one source, compared with the next ``LOOKAHEAD`` hits.

        Args:
            source: The source.
            found: Hits by decreasing score, with the similarity statistics.
            out: Sources excluded from the comparison: those withheld, and those ranked above.

        Returns:
            In the order of ``FEATURES``. None if the source is not among the hits, or if too few hits follow it.
        """
        own, below = list[Hit](), list[Hit]()
        for hit in found.hits:
            if hit.document.source == source:
                own.append(hit)
            elif own and hit.document.source not in out:
                below.append(hit)
            if len(below) == LOOKAHEAD:
                break
        if not own or (len(below) < LOOKAHEAD and not found.exhausted):
            return None
        score, (stems, common) = own[0].score, self._shared_stems(own)
        others = [
            (hits[0].score, other_common)
            for hits, (other_stems, other_common) in ((hits, self._shared_stems(hits)) for hits in _by_source(below))
            if not _are_copies(other_stems, stems)
        ]
        near = [s for s, _ in others[:NEXT_DOCUMENTS]]
        margin = common - max((other_common for _, other_common in others), default=0)
        return (
            score,
            score - math.fsum(near) / len(near) if near else score,
            _depth(score, found.similarity_stats),
            _spacing([score, *(s for s, _ in others)]),
            math.log1p(self._shared_phrases(own, stems)),
            math.log1p(max(margin, 0)),
        )

    def _shared_stems(self, hits: Sequence[Hit]) -> tuple[frozenset[str], int]:
        """Returns the stems of one source's hits, and how many of them the question has; cached."""
        if len(hits) > 1:
            stems = frozenset[str]().union(*(_stem_set(h.document.content) for h in hits))
            own = stems
            if self._labels:
                own = frozenset[str]().union(*(_stem_set(self._own_text(h)) for h in hits))
            return stems, len(self._stems & own)
        text = hits[0].document.content  # the usual case, without a copy of the set
        found = self._shared.get(text)
        if found is None:
            stems = _stem_set(text)
            own = _stem_set(self._own_text(hits[0])) if self._labels else stems
            found = self._shared[text] = stems, len(self._stems & own)
        return found

    def _shared_phrases(self, own: Sequence[Hit], stems: frozenset[str]) -> int:
        """Counts shared phrases. The stems of the same hits usually rule them out without reading the text."""
        if not any(map(stems.issuperset, self._phrase_stems)):
            return 0
        phrases = (_four_grams(_tokens(self._own_text(h))) for h in own)
        return len(self._phrases.intersection(chain.from_iterable(phrases)))

    def _own_text(self, hit: Hit) -> str:
        """The text of a hit without the question that it contains."""
        text = hit.document.content
        return _without_question(text, self._labels) if self._labels else text


def unique_sources(hits: Iterable[Hit]) -> list[str]:
    """Returns the distinct sources of hits, in order."""
    return list(dict.fromkeys(h.document.source for h in hits))


def _by_source(hits: Sequence[Hit]) -> Iterable[list[Hit]]:
    found: dict[str, list[Hit]] = {}
    for hit in hits:
        found.setdefault(hit.document.source, []).append(hit)
    return found.values()


@lru_cache(STEM_CACHE)
def _without_question(text: str, labels: tuple[str, ...]) -> str:
    return without_question(text, labels)


@lru_cache(STEM_CACHE)
def _stem_set(text: str) -> frozenset[str]:
    """Stems of the content words, and "" for stop words."""
    return frozenset(map(_STEMS.__getitem__, set(_tokens(text))))


@lru_cache(TOKEN_CACHE)
def _tokens(text: str) -> list[str]:
    """Splits into words approximately, in a fifth of the time of ``tokens.words``; runs on every request.

    Normalizes as embedders do: accents and invisible characters are removed, so that they cannot hide words.
    """
    if text.isascii():  # a third of the time
        return text.lower().encode().translate(_PLAIN, _NOTHING).decode().split()
    return unicodedata.normalize("NFKD", text).casefold().translate(_FOLDED).split()


class _Stems(dict[str, str]):
    """Word to stem; empty for stop words. Cleared when it grows too large, as hostile texts could cause."""

    def __missing__(self, word: str) -> str:
        if len(self) > 1 << 17:
            self.clear()
        found = self[word] = "" if word in STOP_WORDS else stem(word)
        return found


class _Folded(dict[int, str | None]):
    """Character to itself; marks and invisible characters to None, punctuation and symbols to a space."""

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


def _four_grams(tokens: Sequence[str]) -> Iterable[tuple[str, ...]]:
    return zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False)


def _are_copies(a: frozenset[str], b: frozenset[str]) -> bool:
    """Whether the Jaccard similarity of two word sets reaches ``COPY_SIMILARITY``."""
    small, large = sorted((len(a), len(b)))
    if small < COPY_SIMILARITY * large:
        return False
    both = len(a & b)
    return both >= COPY_SIMILARITY * (len(a) + len(b) - both)


def _depth(score: float, similarity_stats: SimilarityStats) -> float:
    if similarity_stats.n < 2:
        return 0.0
    rest = moments.leave_one_out(similarity_stats, score)
    return (score - rest.mean) / max(rest.std, math.sqrt(moments.MIN_VARIANCE))


def _spacing(s: Sequence[float]) -> float:
    """-log10 of the p-value of the best score as an outlier, by normalized spacings (Renyi 1953), with a maximum.

    If the upper tail is exponential, with any location and scale, the spacings D_i = i (s_i - s_(i+1)) are independent
    and exponential. So D_1 / mean(D_2 ..) follows F(2, 2 v) for v further spacings.
    """
    v, own = len(s) - 2, s[0] - s[1] if len(s) > 1 else 0.0
    if v < NEXT_DOCUMENTS or own < MIN_SPACING:
        return 0.0
    rest = max(math.fsum(s[1:]) + s[1] - (v + 2) * s[-1], MIN_SPACING)  # 0 up to rounding if all others are equal
    return min(v * math.log10(1 + own / rest), MAX_SPACING)
