"""A small collection with the simulated reader, for crawlers."""

from dataclasses import dataclass, field

import numpy as np

from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.demo.clinic import case_notes
from casemate.errors import BudgetExhausted
from casemate.protocols import Embedder, Generator
from casemate.rag.pipeline import join_stream
from casemate.redteam.crawling.anchors import HashingEmbedder
from casemate.text.refusals import is_refusal
from casemate.types import UNKNOWN, Document, Prompt, Reply
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
        self._E = HashingEmbedder().embed([note.text for note in self.notes])

    async def ask(self, text):
        if len(self.asked) == self.budget:
            raise BudgetExhausted("spent")
        self.asked.append(text)
        if self.mute:
            return Reply(UNKNOWN)
        top = np.argsort(-(self._E @ HashingEmbedder().embed([text])[0]), kind="stable")[: self.k]
        reply = await join_stream(SimulatedReader().stream(Prompt(text, tuple(self.notes[i] for i in top), "")))
        if not is_refusal(reply):
            self.reached |= set(top.tolist())
        return Reply(reply)


@dataclass
class Scripted:
    """Returns the same replies in turn, in a cycle."""

    replies: list
    asked: list = field(default_factory=list)
    budget: int = 50

    async def ask(self, text):
        if len(self.asked) == self.budget:
            raise BudgetExhausted("spent")
        self.asked.append(text)
        return Reply(self.replies[(len(self.asked) - 1) % len(self.replies)])


def crawl(attack, box, seed=1):
    """All texts that an attack yields within the budget."""
    return crawls.crawl(attack, box, seed)


@dataclass
class Writer(Generator):
    """Replies by the first rule whose key occurs in the request; records the prompts."""

    rules: dict
    prompts: list = field(default_factory=list)

    async def stream(self, prompt):
        self.prompts.append(prompt)
        yield next((reply for key, reply in self.rules.items() if key in prompt.question), "")


@dataclass
class Placed(Embedder):
    """Gives each text a fixed direction, by the longest key in it; all other texts have one of their own."""

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
