"""Anchors of extraction attacks: noun phrases of replies, and embedding similarity of texts.

An anchor is a short phrase from which a crawler builds its next query. It retrieves the documents that contain it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence

import numpy as np

from casemate.errors import CapabilityError
from casemate.protocols import Embedder, Progress
from casemate.redteam.crawling.common_words import NON_ANCHOR_WORDS
from casemate.text.sentences import clauses, proper_nouns, terms
from casemate.text.tokens import WORD, content_words
from casemate.types import Vector

MAX_ANCHOR_CHARACTERS = 60  # longest anchor in characters
SPEAKER_LABEL = re.compile(r"\b[A-Z]\w*:")  # Labels before a colon, such as "Doctor:". They are not part of a phrase.
NONZERO_DIMENSIONS = 8  # nonzero dimensions of a stem in a vector of stems; collisions are rare


def noun_phrases(text: str) -> list[str]:
    """Noun phrases of a text by rules, in order of reading, each once in any form.

    >>> noun_phrases("The tolls of the north bridge rose in May, and Ottilie Brandt doubted that a toll is fair.")
    ['tolls', 'north bridge', 'Ottilie Brandt', 'fair']
    """
    known = proper_nouns(text)
    found: dict[frozenset[str], str] = {}
    for clause in clauses(text):
        for phrase in clause_noun_phrases(clause, known):
            found.setdefault(content_words(phrase), phrase)
    return list(found.values())


def clause_noun_phrases(clause: str, known: Collection[str] = ()) -> list[str]:
    """Noun phrases of one clause as written. Known names keep their capital at the beginning of the clause."""
    masked = SPEAKER_LABEL.sub(
        _mask, WORD.sub(lambda match: _mask(match) if _is_non_anchor(match[0]) else match[0], clause)
    )
    return [phrase for phrase in terms(masked, known) if len(phrase) <= MAX_ANCHOR_CHARACTERS and content_words(phrase)]


def _mask(match: re.Match[str]) -> str:
    return ";" * len(match[0])


def _is_non_anchor(word: str) -> bool:
    plain = word.lower().replace("’", "'")
    return plain in NON_ANCHOR_WORDS or plain.endswith("n't") or plain.startswith("i'") or plain in {"it's", "that's"}


def require_embedder(embedder: Embedder | None, attack: str) -> Embedder:
    """The attacker's embedder; ``CapabilityError``: there is none."""
    if embedder is None:
        raise CapabilityError(
            f"{attack} compares texts by their vectors, so it needs an embedder of its own; set its option embedder"
        )
    return embedder


class TextVectors:
    """Distinct texts with their embeddings, in order of insertion. Each text is embedded once, in batches."""

    def __init__(self, embedder: Embedder) -> None:
        self.texts: list[str] = []
        self.embedder = embedder
        self._positions: dict[str, int] = {}
        self._rows: Vector = np.empty((64, embedder.dim), np.float32)

    def __len__(self) -> int:
        return len(self.texts)

    def __contains__(self, text: str) -> bool:
        return text in self._positions

    @property
    def vectors(self) -> Vector:
        """(n, dim), a view: valid until the next text is added."""
        return self._rows[: len(self.texts)]

    def embed(self, texts: Sequence[str]) -> Vector:
        """Vectors of texts, (m, dim). Does not add them."""
        new = list(dict.fromkeys(text for text in texts if text not in self._positions))
        made = dict(zip(new, self.embedder.embed(new), strict=True)) if new else {}
        found = [made[text] if text in made else self._rows[self._positions[text]] for text in texts]
        return np.stack(found) if found else np.empty((0, self.embedder.dim), np.float32)

    def add(self, text: str, vector: Vector | None = None) -> int:
        """Adds a text and returns its position. Without a vector, it is embedded."""
        if text in self._positions:
            return self._positions[text]
        row = self.embedder.embed([text])[0] if vector is None else vector
        position = self._positions[text] = len(self.texts)
        if position == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[position] = row
        self.texts.append(text)
        return position

    def nearest(self, vector: Vector) -> tuple[int, float]:
        """Position and cosine of the nearest text; (-1, -1.0) if there is none."""
        if not self.texts:
            return -1, -1.0
        s = self.vectors @ vector
        position = int(s.argmax())
        return position, float(s[position])

    def add_dissimilar(self, texts: Sequence[str], limit: float, vectors: Vector | None = None) -> list[int]:
        """Adds, in order, texts whose cosine to every stored one is below ``limit``; returns their positions."""
        rows = self.embed(texts) if vectors is None else vectors
        before = (rows @ self.vectors.T).max(axis=1, initial=-1.0)  # (m,)
        chosen: dict[str, int] = {}
        for i, text in enumerate(texts):
            beside = (rows[list(chosen.values())] @ rows[i]).max(initial=-1.0)
            if text not in self._positions and text not in chosen and max(before[i], beside) < limit:
                chosen[text] = i
        return [self.add(text, rows[i]) for text, i in chosen.items()]


class HashingEmbedder:
    """Feature hashing of word stems: an embedder without a model. Similarity depends on shared words only."""

    fingerprint = "stems"
    dim = 1024
    max_tokens = 10_000

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """See ``Embedder``. A text without content words is similar only to other such texts."""
        rows = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for stem in content_words(text) or {""}:
                digest = hashlib.blake2b(
                    stem.encode("utf-8", "surrogatepass"), digest_size=2 * NONZERO_DIMENSIONS
                ).digest()
                codes = np.frombuffer(digest, "<u2").astype(np.int64)
                np.add.at(row, codes % self.dim, np.where(codes >> 15, 1, -1))
            if not row.any():
                row[0] = 1  # all hashed features cancelled out
        if progress is not None:
            progress(len(texts))
        unit: Vector = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return unit

    def spans(self, text: str) -> Sequence[tuple[int, int]]:
        """Start and end of each word."""
        return [match.span() for match in WORD.finditer(text)]
