"""An embedder and a model that keep on disk what they computed, so that a measurement is repeated in seconds."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import DATA
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.generators.transformers import CausalLM
from casemate.protocols import EmbedderProxy, Progress
from casemate.rag.pipeline import join_stream
from casemate.types import Document, Prompt, Vector

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


def rows(name: str) -> list[dict[str, Any]]:
    """The lines of a packed jsonl file of the evaluation data."""
    with gzip.open(DATA / name, "rt") as file:
        return [json.loads(line) for line in file]


def span(text: str, rng: np.random.Generator) -> str:
    """A run of ``SPAN`` words of a text: what somebody remembers of it."""
    words = text.split()
    start = int(rng.integers(max(1, len(words) - SPAN + 1)))
    return " ".join(words[start : start + SPAN])


def corpus(name: str) -> list[Document]:
    """The documents of a corpus in BEIR's form."""
    return [Document(r["_id"], r["text"], r.get("title", "")) for r in rows(f"{name}/corpus.jsonl.gz")]


def questions(name: str) -> list[str]:
    """Its questions."""
    return [r["text"] for r in rows(f"{name}/queries.jsonl.gz")]


class KeptAnswers:
    """Answers of a model on this machine without documents, kept in a file of JSON lines, so that a run can go on.

    The model is loaded for the first new question.
    """

    def __init__(self, file: Path, model: str, max_tokens: int) -> None:
        self.file, self.model, self.max_tokens = file, model, max_tokens
        self._loaded: CausalLM | None = None
        lines = file.read_text().splitlines() if file.exists() else []
        self.held: dict[str, str] = dict(json.loads(line) for line in lines if line.endswith("]"))

    async def ask(self, question: str) -> str:
        """The answer, greedy."""
        key = hashlib.sha256(f"{Path(self.model).name} {self.max_tokens} {question}".encode()).hexdigest()[:32]
        if key not in self.held:
            self._loaded = self._loaded or CausalLM(self.model, max_tokens=self.max_tokens)
            self.held[key] = await join_stream(self._loaded.stream(Prompt(question, (), "")))
            with self.file.open("a") as file:
                file.write(json.dumps([key, self.held[key]]) + "\n")
        return self.held[key]
