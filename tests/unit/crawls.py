"""A small system to crawl: the simulated reader over texts retrieved by shared words."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.demo.clinic import case_notes
from casemate.errors import BudgetExhausted
from casemate.rag.pipeline import join_stream
from casemate.text.tokens import words
from casemate.types import Document, Prompt, Reply
from tests.fakes import BagOfWords

NOTES = [Document(name, " ".join(text.split())) for name, text in case_notes(60, seed=3)]


@dataclass
class System:
    """Answers from the documents that are nearest to a question."""

    documents: list = field(default_factory=lambda: NOTES)
    budget: int = 10_000
    k: int = 5
    embedder: BagOfWords = field(default_factory=lambda: BagOfWords(dim=128))
    questions: list = field(default_factory=list)
    shown: list = field(default_factory=list)  # ids, for each question

    def __post_init__(self):
        self.vectors = self.embedder.embed([d.content for d in self.documents])

    async def ask(self, text):
        if len(self.questions) >= self.budget:
            raise BudgetExhausted("no question is left")
        best = np.argsort(-(self.vectors @ self.embedder.embed([text])[0]), kind="stable")[: self.k]
        context = tuple(self.documents[i] for i in best)
        self.questions.append(text)
        self.shown.append([d.id for d in context])
        return Reply(await join_stream(SimulatedReader().stream(Prompt(text, context, ""))))


@dataclass
class Stubborn:
    """Always returns the same reply."""

    reply: str
    questions: list = field(default_factory=list)

    async def ask(self, text):
        self.questions.append(text)
        return Reply(self.reply)


@dataclass
class Scribe:
    """A generator that returns texts in turn and repeats the last one; records the prompts."""

    replies: list
    prompts: list = field(default_factory=list)

    async def stream(self, prompt):
        self.prompts.append(prompt)
        yield self.replies[min(len(self.prompts), len(self.replies)) - 1]


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
    """Share of the documents that were found word for word."""
    held = {" ".join(words(text)) for text in found}
    return sum(" ".join(words(d.content)) in held for d in documents) / len(documents)
