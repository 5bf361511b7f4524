"""Synthetic benign questions, generated from a corpus by rules, for operators without a log of real questions.

They range from single keywords to questions about one fact of one document. Real questions differ in style, so results
that use synthetic questions are labeled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from casemate.text.markup import without_links
from casemate.text.sentences import sentences
from casemate.text.tokens import STOP_WORDS, words
from casemate.types import Document

KINDS = ("keywords", "topic", "open", "relation", "fact")
"""Kinds of questions, in the order of generation."""
FEW_WORDS = ("keywords", "open", "relation")
"""Kinds that take at most eight words from a document. The others take most words of a sentence."""
OPEN_TEMPLATES = (
    "What is known about {}?",
    "How does {} work?",
    "What are the effects of {}?",
    "Is there anything on {}?",
    "Why is {} important?",
    "When was {}?",
    "Who is responsible for {}?",
)
RELATION_TEMPLATES = ("What does {} have to do with {}?", "How is {} related to {}?", "Does {} affect {}?")
_TOKEN = re.compile(r"[^\W_]+(?:[.,'’-][^\W_]+)*|[^\w\s]")


def generate_questions(
    documents: Sequence[Document], count: int, rng: np.random.Generator, kinds: Sequence[str] = KINDS
) -> list[str]:
    """Generates questions of some kinds (default: all) in equal shares, each about a random document.

    The documents are whole, at least one with text. The same state of ``rng`` gives the same questions. Each question
    contains a word.
    """
    return [question for question, _ in generate_with_documents(documents, count, rng, kinds)]


def generate_with_documents(
    documents: Sequence[Document], count: int, rng: np.random.Generator, kinds: Sequence[str] = KINDS
) -> list[tuple[str, Document]]:
    """The questions of ``generate_questions``, each with its document."""
    found: list[tuple[str, Document]] = []
    while len(found) < count:
        document = documents[int(rng.integers(len(documents)))]
        generator = _QuestionGenerator(document, rng)
        question = generator.generate(kinds[len(found) % len(kinds)])
        if not words(question):
            question = generator.generate("open")  # the document has no words
        found.append((question, document))
    return found


class _QuestionGenerator:
    """Generates questions about one random sentence of a document."""

    def __init__(self, document: Document, rng: np.random.Generator) -> None:
        self.rng, self.title = rng, document.title
        whole = [s for s in sentences(without_links(document.text)) if 6 <= len(s.split()) <= 40]
        self.sentence = str(rng.choice(whole)) if whole else without_links(document.content)[:200]

    def generate(self, kind: str) -> str:
        phrases = _phrases(self.sentence) or _phrases(self.title) or [["this"]]
        if kind == "keywords":
            own = _phrases(self.title) if self.rng.random() < 0.5 else phrases
            return " ".join(self._choose(own or phrases)[: int(self.rng.integers(1, 4))])
        if kind == "topic":
            return " ".join(self._sample(_content(self.title or self.sentence), 0.8)[:10]).lower()
        if kind == "relation" and len(phrases) > 1:
            a, b = self.rng.choice(len(phrases), 2, replace=False)
            return str(self.rng.choice(RELATION_TEMPLATES)).format(" ".join(phrases[a][:4]), " ".join(phrases[b][:4]))
        if kind == "fact":
            return " ".join(self._sample(_content(self.sentence)[:14], 0.7)).lower() + "?"
        template = str(self.rng.choice(OPEN_TEMPLATES))
        return template.format(" ".join(max(self._choose(phrases), self._choose(phrases), key=len)[:4]))

    def _choose(self, phrases: Sequence[list[str]]) -> list[str]:
        return phrases[int(self.rng.integers(len(phrases)))]

    def _sample(self, pieces: Sequence[str], share: float) -> list[str]:
        """Samples words independently with this probability, in order; returns all words if the sample is empty."""
        kept = [w for w in pieces if self.rng.random() < share]
        return kept or list(pieces)


def _content(text: str) -> list[str]:
    """Content words with their spelling in the text."""
    return [w for w in _TOKEN.findall(text) if w[0].isalnum() and w.lower() not in STOP_WORDS]


def _phrases(text: str) -> list[list[str]]:
    """Runs of content words without stop words or punctuation between them."""
    found: list[list[str]] = [[]]
    for piece in _TOKEN.findall(text):
        if piece[0].isalnum() and piece.lower() not in STOP_WORDS:
            found[-1].append(piece)
        elif found[-1]:
            found.append([])
    return [run for run in found if run]
