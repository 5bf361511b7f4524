"""Harmless questions made from a corpus, for owners who have no log of real ones.

They are not what people ask: they are shaped like it, from short key words to questions about one fact of one document.
Whatever was calibrated on them says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from casemate.types import Document
from casemate.words import STOP_WORDS, sentences, words

KINDS = ("keywords", "topic", "open", "relation", "fact")
OPEN = (
    "What is known about {}?",
    "How does {} work?",
    "What are the effects of {}?",
    "Is there anything on {}?",
    "Why is {} important?",
    "When was {}?",
    "Who is responsible for {}?",
)
RELATION = ("What does {} have to do with {}?", "How is {} related to {}?", "Does {} affect {}?")
_PIECE = re.compile(r"[^\W_]+(?:[.,'’-][^\W_]+)*|[^\w\s]")


def made_questions(documents: Sequence[Document], count: int, rng: np.random.Generator) -> list[str]:
    """Questions of all kinds in equal shares, each from a document drawn at random.

    Args:
        documents: Whole documents, at least one with text.
        count: How many questions.
        rng: Where randomness comes from.
    """
    found: list[str] = []
    while len(found) < count:
        document = documents[int(rng.integers(len(documents)))]
        maker = _Maker(document, rng)
        question = maker.make(KINDS[len(found) % len(KINDS)])
        found.append(question if words(question) else maker.make("open"))  # of a document without words
    return found


class _Maker:
    """Questions about one document."""

    def __init__(self, document: Document, rng: np.random.Generator) -> None:
        self.rng, self.title = rng, document.title
        whole = [s for s in sentences(document.text) if 6 <= len(s.split()) <= 40]
        self.sentence = str(rng.choice(whole)) if whole else document.content[:200]

    def make(self, kind: str) -> str:
        phrases = _phrases(self.sentence) or _phrases(self.title) or [["this"]]
        if kind == "keywords":
            own = _phrases(self.title) if self.rng.random() < 0.5 else phrases
            return " ".join(self._one(own or phrases)[: int(self.rng.integers(1, 4))])
        if kind == "topic":
            return " ".join(self._some(_content(self.title or self.sentence), 0.8)[:10]).lower()
        if kind == "relation" and len(phrases) > 1:
            a, b = self.rng.choice(len(phrases), 2, replace=False)
            return str(self.rng.choice(RELATION)).format(" ".join(phrases[a][:4]), " ".join(phrases[b][:4]))
        if kind == "fact":
            return " ".join(self._some(_content(self.sentence)[:14], 0.7)).lower() + "?"
        return str(self.rng.choice(OPEN)).format(" ".join(max(self._one(phrases), self._one(phrases), key=len)[:4]))

    def _one(self, phrases: Sequence[list[str]]) -> list[str]:
        return phrases[int(self.rng.integers(len(phrases)))]

    def _some(self, pieces: Sequence[str], share: float) -> list[str]:
        """About that share of the words, in order; all if none was drawn."""
        kept = [w for w in pieces if self.rng.random() < share]
        return kept or list(pieces)


def _content(text: str) -> list[str]:
    return [w for w in _PIECE.findall(text) if w[0].isalnum() and w.lower() not in STOP_WORDS]


def _phrases(text: str) -> list[list[str]]:
    """Runs of words that carry meaning, with nothing between them."""
    found: list[list[str]] = [[]]
    for piece in _PIECE.findall(text):
        if piece[0].isalnum() and piece.lower() not in STOP_WORDS:
            found[-1].append(piece)
        elif found[-1]:
            found.append([])
    return [run for run in found if run]
