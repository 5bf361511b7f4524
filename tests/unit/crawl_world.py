"""A small collection, a reader that obeys, and what an attacker makes of it."""

from dataclasses import dataclass, field

import numpy as np

from casemate.backends.obedient import Obedient
from casemate.crawl.anchors import Stems
from casemate.demo.clinic import case_notes
from casemate.errors import BudgetExhausted
from casemate.protocols import Embedder, Generator
from casemate.rag import join
from casemate.types import UNKNOWN, Document, Prompt, Reply
from casemate.words import abstains
from tests.unit import crawls

NOTES = [Document(name, text) for name, text in case_notes(40, seed=3)]


@dataclass
class World:
    """Answers from the k notes that share most words with the question, until the budget is spent."""

    budget: int = 100
    k: int = 3
    notes: list = field(default_factory=lambda: NOTES)
    mute: bool = False
    asked: list = field(default_factory=list)
    reached: set = field(default_factory=set)

    def __post_init__(self):
        self._E = Stems().embed([note.text for note in self.notes])

    async def ask(self, text):
        if len(self.asked) == self.budget:
            raise BudgetExhausted("spent")
        self.asked.append(text)
        if self.mute:
            return Reply(UNKNOWN)
        top = np.argsort(-(self._E @ Stems().embed([text])[0]), kind="stable")[: self.k]
        reply = await join(Obedient().stream(Prompt(text, tuple(self.notes[i] for i in top), "")))
        if not abstains(reply):
            self.reached |= set(top.tolist())
        return Reply(reply)


@dataclass
class Scripted:
    """Gives the same replies in turn, again and again."""

    replies: list
    asked: list = field(default_factory=list)
    budget: int = 50

    async def ask(self, text):
        if len(self.asked) == self.budget:
            raise BudgetExhausted("spent")
        self.asked.append(text)
        return Reply(self.replies[(len(self.asked) - 1) % len(self.replies)])


def crawl(attack, box, seed=1):
    """All that an attack gives out before it ends or the budget does."""
    return crawls.crawl(attack, box, seed)


@dataclass
class Writer(Generator):
    """Replies by the first rule whose key stands in the request; remembers the prompts."""

    rules: dict
    prompts: list = field(default_factory=list)

    async def stream(self, prompt):
        self.prompts.append(prompt)
        yield next((reply for key, reply in self.rules.items() if key in prompt.question), "")


@dataclass
class Placed(Embedder):
    """Gives each text the direction that it was told, by the longest key that stands in it; any other is apart."""

    places: dict
    dim: int = 8
    fingerprint: str = "placed"
    max_tokens: int = 100

    def embed(self, texts, progress=None):
        rows = np.array([self._place(text) for text in texts], np.float32).reshape(-1, self.dim)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def _place(self, text):
        key = max((k for k in self.places if k in text), key=len, default=None)
        row = np.zeros(self.dim)
        value = self.places[key] if key else (0.0,) * (self.dim - 1) + (1.0,)
        row[: len(value)] = value
        return row

    def spans(self, text):
        return []
