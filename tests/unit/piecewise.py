"""A generator that streams its reply in pieces, and a guard with this generator over thirty documents."""

import asyncio
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.guard import Guard
from casemate.protocols import Generator
from casemate.rag.pipeline import Rag
from tests.fakes import BagOfWords, Memory, documents


@dataclass
class Piecewise(Generator):
    """Streams the result of a function of the prompt. Records the prompts, the number of pieces, and the closing."""

    answer: object
    size: int = 5
    prompts: list = field(default_factory=list)
    written: int = 0
    closed: int = 0

    async def stream(self, prompt):
        self.prompts.append(prompt)
        text = self.answer(prompt)
        try:
            for i in range(0, len(text), self.size):
                self.written += 1
                await asyncio.sleep(0)
                yield text[i : i + self.size]
        finally:
            self.closed += 1


@contextmanager
def guards(folder, make_defense):
    """Yields a function that returns a guard and its store. All guards share one index."""
    with closing(SqliteIndex(folder / "i.db")) as index:

        def guard(generator, enforce=True, **options):
            rag, store = Rag(BagOfWords(), index, generator), Memory()
            chunks = documents(30)
            index.add(chunks, rag.embedder.embed([d.content for d in chunks]))
            return Guard(rag, [make_defense(**{"store": store} | options)], enforce=enforce, store=store), store

        yield guard
