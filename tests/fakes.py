"""Small stand-ins with a behaviour that a test can predict."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

import numpy as np

from casemate.protocols import Embedder, EventStore, Generator
from casemate.types import Document


@dataclass
class BagOfWords(Embedder):
    """Each word a fixed random direction, a text their sum: texts that share words are near."""

    dim: int = 64
    fingerprint: str = "bag-of-words"
    max_tokens: int = 40
    texts: list[str] = field(default_factory=list)  # all that was ever embedded

    def embed(self, texts, progress=None):
        self.texts += texts
        E = np.array(
            [sum((self._direction(w) for w in re.findall(r"\w+", t.lower())), np.full(self.dim, 1e-9)) for t in texts]
        ).reshape(-1, self.dim)
        if progress:
            progress(len(texts))
        return (E / np.linalg.norm(E, axis=1, keepdims=True)).astype(np.float32)

    def spans(self, text):
        return [m.span() for m in re.finditer(r"\w+|[^\w\s]", text)]

    def _direction(self, word):
        seed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")
        return np.random.default_rng(seed).standard_normal(self.dim)


@dataclass
class Parrot(Generator):
    """Says the ids it was given, and remembers the prompts."""

    prompts: list = field(default_factory=list)

    async def stream(self, prompt):
        self.prompts.append(prompt)
        for document in prompt.context:
            yield f"{document.id} "


@dataclass
class Memory(EventStore):
    events: list = field(default_factory=list)

    def append(self, event):
        self.events.append(event)

    def scan(self, kind=None, since=None):
        return [e for e in self.events if kind in {None, e.kind}]

    def flush(self, timeout_s=10.0):
        return True

    def close(self):
        pass


WORDS = "amber birch cedar delta ember flint grove heron inlet jetty knoll larch maple north ocean pearl quartz".split()


def documents(count, seed=0, words=12, **fields):
    """Documents of random words; document i alone has the word ``only<i>``."""
    rng = np.random.default_rng(seed)
    return [Document(f"d{i}", " ".join([f"only{i}", *rng.choice(WORDS, words)]), **fields) for i in range(count)]
