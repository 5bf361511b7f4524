"""An embedder that keeps on disk what it computed, so that a measurement is repeated in seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import read_rows
from casemate.backends.embedders.minilm import MiniLM
from casemate.protocols import EmbedderProxy, Progress
from casemate.types import Document, Vector

SPAN = 12


class Kept(EmbedderProxy):
    """MiniLM, and a file of vectors by the hashes of their texts."""

    def __init__(self, file: Path, inner: MiniLM | None = None) -> None:
        super().__init__(inner or MiniLM(threads=1))
        self.file = file
        self.held: dict[str, Vector] = {}
        if file.exists():
            with np.load(file) as found:
                self.held = dict(zip(found["keys"].tolist(), found["vectors"], strict=True))

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """Embeds what was never embedded before, and looks up the rest."""
        keys = [hashlib.sha256(text.encode()).hexdigest()[:32] for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self.held}
        if new:
            self.held.update(zip(new, self.inner.embed(list(new.values())), strict=True))
        if progress:
            progress(len(texts))
        return np.stack([self.held[key] for key in keys]) if keys else np.empty((0, self.dim), np.float32)

    def save(self) -> None:
        """Writes the file."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(self.file, keys=np.array(list(self.held)), vectors=np.stack(list(self.held.values())))


def span(text: str, rng: np.random.Generator) -> str:
    """A run of ``SPAN`` words of a text: what somebody remembers of it."""
    words = text.split()
    start = int(rng.integers(max(1, len(words) - SPAN + 1)))
    return " ".join(words[start : start + SPAN])


def corpus(name: str) -> list[Document]:
    """The documents of a corpus in BEIR's form."""
    return [Document(r["_id"], r["text"], r.get("title", "")) for r in read_rows(f"{name}/corpus.jsonl.gz")]


def questions(name: str) -> list[str]:
    """Its questions."""
    return [r["text"] for r in read_rows(f"{name}/queries.jsonl.gz")]
