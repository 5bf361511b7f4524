"""Small systems for crawls: the simulated reader over texts retrieved by common words, and fixed replies."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.demo.clinic import case_notes
from casemate.errors import BudgetExhausted
from casemate.protocols import Embedder, Generator
from casemate.rag.pipeline import join_stream
from casemate.redteam.crawling.anchors import HashingEmbedder
from casemate.text.refusals import is_refusal
from casemate.text.tokens import words
from casemate.types import UNKNOWN, Document, Prompt, Reply
from tests.fakes import BagOfWords

NOTES = [Document(name, " ".join(text.split())) for name, text in case_notes(60, seed=3)]
PARAGRAPHS = [Document(name, text) for name, text in case_notes(40, seed=3)]
"""Notes that keep their line breaks."""


@dataclass
class System:
    """Answers from the documents nearest to a question, until the budget is spent."""

    documents: list = field(default_factory=lambda: NOTES)
    budget: int = 10_000
    k: int = 5
    embedder: Embedder = field(default_factory=lambda: BagOfWords(dim=128))
    mute: bool = False  # declines every question
    questions: list = field(default_factory=list)
    shown: list = field(default_factory=list)  # ids of the context, per question
    reached: set = field(default_factory=set)  # ids in the context of an answer that is not a refusal

    def __post_init__(self):
        self.vectors = self.embedder.embed([d.content for d in self.documents])

    async def ask(self, text):
        if len(self.questions) >= self.budget:
            raise BudgetExhausted("no question is left")
        best = np.argsort(-(self.vectors @ self.embedder.embed([text])[0]), kind="stable")[: self.k]
        context = tuple(self.documents[i] for i in best)
        self.questions.append(text)
        self.shown.append([d.id for d in context])
        if self.mute:
            return Reply(UNKNOWN)
        reply = await join_stream(SimulatedReader().stream(Prompt(text, context, "")))
        if not is_refusal(reply):
            self.reached |= {d.id for d in context}
        return Reply(reply)


def world(**options):
    """A system that retrieves paragraphs with the embedder of the crawlers."""
    return System(**{"documents": PARAGRAPHS, "budget": 100, "k": 3, "embedder": HashingEmbedder(), **options})


@dataclass
class Scripted:
    """Returns the given replies in a cycle."""

    replies: list
    questions: list = field(default_factory=list)
    budget: int = 10_000

    async def ask(self, text):
        if len(self.questions) == self.budget:
            raise BudgetExhausted("no question is left")
        self.questions.append(text)
        return Reply(self.replies[(len(self.questions) - 1) % len(self.replies)])


@dataclass
class Scribe:
    """A generator that returns given texts in order and repeats the last one. Records the prompts."""

    replies: list
    prompts: list = field(default_factory=list)

    async def stream(self, prompt):
        self.prompts.append(prompt)
        yield self.replies[min(len(self.prompts), len(self.replies)) - 1]


@dataclass
class Writer(Generator):
    """Replies by the first rule whose key occurs in the request. Records the prompts."""

    rules: dict
    prompts: list = field(default_factory=list)

    async def stream(self, prompt):
        self.prompts.append(prompt)
        yield next((reply for key, reply in self.rules.items() if key in prompt.question), "")


@dataclass
class Placed(Embedder):
    """Maps each text to a fixed direction by its longest key. Texts without a key share one direction."""

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


def crawl(attack, box, seed=0):
    """All texts that an attack yields within the budget."""

    async def run():
        found = []
        try:
            async for text in attack.extract(box, np.random.default_rng(seed)):
                found.append(text)
        except BudgetExhausted:
            pass
        return found

    return asyncio.run(run())


def share(found, documents=NOTES):
    """Share of the documents that were extracted verbatim."""
    extracted = {" ".join(words(text)) for text in found}
    return sum(" ".join(words(d.content)) in extracted for d in documents) / len(documents)
