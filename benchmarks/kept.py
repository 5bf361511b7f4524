"""An embedder with a cache on disk, so that a repeated measurement takes seconds."""

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
    """MiniLM with a file of vectors by text hash."""

    def __init__(self, file: Path, inner: MiniLM | None = None) -> None:
        super().__init__(inner or MiniLM(threads=1))
        self.file = file
        self.held: dict[str, Vector] = {}
        if file.exists():
            with np.load(file) as found:
                self.held = dict(zip(found["keys"].tolist(), found["vectors"], strict=True))

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """Embeds new texts, and looks up the others."""
        keys = [hashlib.sha256(text.encode()).hexdigest()[:32] for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self.held}
        if new:
            self.held.update(zip(new, self.inner.embed(list(new.values())), strict=True))
        if progress:
            progress(len(texts))
        return np.stack([self.held[key] for key in keys]) if keys else np.empty((0, self.dim), np.float32)

    def save(self) -> None:
        """Writes the cache."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(self.file, keys=np.array(list(self.held)), vectors=np.stack(list(self.held.values())))


def span(text: str, rng: np.random.Generator) -> str:
    """A run of ``SPAN`` words of a text, as a user might remember it."""
    words = text.split()
    start = int(rng.integers(max(1, len(words) - SPAN + 1)))
    return " ".join(words[start : start + SPAN])


def corpus(name: str) -> list[Document]:
    """Documents of a corpus in BEIR's format."""
    return [Document(r["_id"], r["text"], r.get("title", "")) for r in read_rows(f"{name}/corpus.jsonl.gz")]


def questions(name: str) -> list[str]:
    """Questions of a corpus."""
    return [r["text"] for r in read_rows(f"{name}/queries.jsonl.gz")]
