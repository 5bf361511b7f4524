"""Small fakes with predictable behavior."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint

import numpy as np

from casemate.protocols import Embedder, EventStore, Generator
from casemate.types import Document, Prompt, QuotaGrant


@dataclass
class BagOfWords(Embedder):
    """An embedder in which each word is a fixed random direction and a text their sum. Texts with common words are
    near.
    """

    dim: int = 64
    fingerprint: str = "bag-of-words"
    max_tokens: int = 40
    texts: list[str] = field(default_factory=list)  # all embedded texts

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
        return random_direction(word, self.dim)


@cache
def random_direction(word, dim):
    seed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")
    return np.random.default_rng(seed).standard_normal(dim)


@dataclass
class LongTexts(BagOfWords):
    """An embedder that reads a whole note."""

    max_tokens: int = 400


@dataclass
class Parrot(Generator):
    """Answers with the ids of the given documents, and records the prompts."""

    prompts: list = field(default_factory=list)

    async def stream(self, prompt):
        self.prompts.append(prompt)
        for document in prompt.context:
            yield f"{document.id} "


@dataclass
class Clock:
    """A clock that stands still until a test sets it."""

    now: float = 0.0

    def __call__(self):
        return self.now


@dataclass
class Memory(EventStore):
    events: list = field(default_factory=list)
    leases: dict = field(default_factory=dict)  # name -> (holder, expiry)
    tallies: dict = field(default_factory=dict)  # name -> (used, period, time)
    clock: Callable[[], float] = time.monotonic

    def append(self, event):
        self.events.append(event)

    def scan(self, kind=None, since=None):
        return [e for e in self.events if kind in {None, e.kind}]

    def flush(self, timeout_s=10.0):
        return True

    def acquire(self, wanted):
        return [self._given(w, *self.tallies.get(w.name, (0.0, w.period, 0.0))) for w in wanted]

    def quota_usage(self, prefix):
        return {name: used for name, (used, _, _) in self.tallies.items() if name.startswith(prefix)}

    def discard_quotas(self, names):
        for name in names:
            self.tallies.pop(name, None)

    def _given(self, w, used, period, at):
        now = self.clock()
        used = max(0.0, used - (now - at) * w.per_s) if period == w.period else 0.0
        amount = max(w.amount, -used) if w.amount < 0 else max(0, min(w.amount, int(max(0.0, w.most - used))))
        self.tallies[w.name] = used + amount, w.period, now
        return QuotaGrant(amount, used + amount)

    def lease(self, name, holder, seconds):
        held_by, until = self.leases.get(name, (holder, 0))
        if held_by != holder and time.monotonic() < until:
            return False
        self.leases[name] = holder, time.monotonic() + seconds
        return True

    def release(self, name, holder):
        if self.leases.get(name, ("", 0))[0] == holder:
            del self.leases[name]

    def close(self):
        pass


WORDS = "amber birch cedar delta ember flint grove heron inlet jetty knoll larch maple north ocean pearl quartz".split()


def documents(count, seed=0, words=12, **fields):
    """Documents of random words. Only document i has the word ``only<i>``."""
    rng = np.random.default_rng(seed)
    return [Document(f"d{i}", " ".join([f"only{i}", *rng.choice(WORDS, words)]), **fields) for i in range(count)]


@dataclass
class Script(Generator):
    """Returns replies in order, and records the prompts."""

    replies: list
    prompts: list = field(default_factory=list)

    async def stream(self, prompt):
        self.prompts.append(prompt)
        yield self.replies[len(self.prompts) - 1]


@dataclass
class AnswerFunction(Generator):
    """Answers by a function of the prompt, and records the prompts."""

    answer: Callable[[Prompt], str]
    prompts: list = field(default_factory=list)

    async def stream(self, prompt):
        self.prompts.append(prompt)
        yield self.answer(prompt)


def unit(rng, n, dim=8):
    """Random vectors of unit length."""
    X = np.random.default_rng(rng).standard_normal((n, dim))
    return (X / np.linalg.norm(X, axis=1, keepdims=True)).astype(np.float32)


BAG = ("embedder", "bag", "tests.fakes:BagOfWords")


def entry_points(*plug_ins):
    """Returns a function that lists these plug-ins as registered by packages. Each is a role, a name and a value."""
    registered = [EntryPoint(name, value, f"casemate.{role}") for role, name, value in plug_ins]
    return lambda group, name=None: [e for e in registered if e.group == group and name in {None, e.name}]
