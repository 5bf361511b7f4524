"""A target, attacks and a reader whose behaviour is known, to be crawled."""

import asyncio
from dataclasses import dataclass, field
from typing import ClassVar

from casemate.errors import BackendError, QueryError
from casemate.lab.crawl import Crawler, CrawlPlan
from casemate.lab.crawl_figures import measured
from casemate.protocols import ExtractionAttack, Generator
from casemate.types import UNKNOWN, Action, Answer, Background, Hit, Retrieval, Verdict
from tests.fakes import BagOfWords, documents

COLLECTION = documents(30, words=30)


def flagged(name="watch", hidden=(), action=Action.NONE, **fields):
    return Verdict(name, True, action, 1.0, 0.5, hidden, **fields)


@dataclass
class Shelf:
    """Tells whole documents, the ones that share most words with the question; and remembers who asked what."""

    collection: list = field(default_factory=lambda: COLLECTION)
    asked: list = field(default_factory=list)
    suspects: str = "no such word"
    mute: tuple = ()
    breaks_at: int = 0
    fault: BaseException | None = None

    async def ask(self, query):
        if self.breaks_at and len(self.asked) + 1 == self.breaks_at:
            raise self.fault
        self.asked.append((query.client, query.text))
        if query.text.startswith("?"):
            raise QueryError("no question")
        if len(self.asked) in self.mute:
            return Answer(UNKNOWN, Retrieval((), Background(0, 0, 0)))
        wanted = set(query.text.split())
        best = sorted(self.collection, key=lambda d: -len(wanted & set(d.text.split())))[: query.k]
        verdicts = (flagged(),) if self.suspects in query.text else ()
        hits = tuple(Hit(d, 0.5) for d in best)
        return Answer("\n\n".join(d.text for d in best), Retrieval(hits, Background(30, 0, 1)), verdicts)


@dataclass
class Wander(ExtractionAttack):
    """Asks on with words of the last reply, drawn by chance; gives out each new text."""

    words: int = 4
    most: int = 1000

    paper: ClassVar[str] = "none"

    async def extract(self, box, rng):
        held, question = set(), "amber birch cedar"
        for _ in range(self.most):
            reply = (await box.ask(question)).text
            for text in reply.split("\n\n"):
                if text not in held:
                    held.add(text)
                    yield text
            spoken = reply.split()
            question = " ".join(spoken[i] for i in rng.integers(len(spoken), size=self.words))


@dataclass
class Says(ExtractionAttack):
    """Asks what it was told to ask, and gives nothing out."""

    questions: tuple = ()
    keeps_on: bool = False

    paper: ClassVar[str] = "none"

    async def extract(self, box, rng):
        for question in self.questions:
            try:
                await box.ask(question)
            except BackendError:
                if not self.keeps_on:
                    raise
        for text in ():
            yield text


class Quote(Generator):
    """Says all it was given."""

    async def stream(self, prompt):
        for document in prompt.context:
            yield document.text + "\n\n"


def crawl(ledger, attack, targets, **options):
    crawler = Crawler("wander", attack, targets, ledger, CrawlPlan(waits=(0.0,), **options))
    return crawler, asyncio.run(crawler.run())


def walk(ledger, attack, target, **options):
    return crawl(ledger, attack, {"off": target}, **options)[1]["off"]


def figures(ledger, targets, attack=None, collection=COLLECTION, **options):
    crawler, walks = crawl(ledger, attack or Wander(), targets, **options)
    return measured(crawler, walks, collection, BagOfWords())
