"""A target, attacks and a generator with predictable behavior, for crawls."""

import asyncio
from dataclasses import dataclass, field
from typing import ClassVar

from casemate.errors import BackendError, QueryError
from casemate.protocols import ExtractionAttack, Generator
from casemate.redteam.lab.extraction_experiment import Crawler, CrawlPlan
from casemate.redteam.lab.extraction_metrics import measure_crawl
from casemate.types import UNKNOWN, Action, Answer, Hit, Retrieval, SimilarityStats, Verdict
from tests.fakes import BagOfWords, documents

COLLECTION = documents(30, words=30)


def flagged(name="watch", hidden=(), action=Action.NONE, **fields):
    return Verdict(name, True, action, 1.0, 0.5, hidden, **fields)


@dataclass
class OverlapTarget:
    """Answers with the documents that share most words with the question. Records client and question."""

    collection: list = field(default_factory=lambda: COLLECTION)
    asked: list = field(default_factory=list)
    flagged_text: str = "no such word"
    declined: tuple = ()
    breaks_at: int = 0
    fault: BaseException | None = None

    async def ask(self, query):
        if self.breaks_at and len(self.asked) + 1 == self.breaks_at:
            raise self.fault
        self.asked.append((query.client, query.text))
        if query.text.startswith("?"):
            raise QueryError("no question")
        if len(self.asked) in self.declined:
            return Answer(UNKNOWN, Retrieval((), SimilarityStats(0, 0, 0)))
        wanted = set(query.text.split())
        best = sorted(self.collection, key=lambda d: -len(wanted & set(d.text.split())))[: query.k]
        verdicts = (flagged(),) if self.flagged_text in query.text else ()
        hits = tuple(Hit(d, 0.5) for d in best)
        return Answer("\n\n".join(d.text for d in best), Retrieval(hits, SimilarityStats(30, 0, 1)), verdicts)


@dataclass
class RandomWords(ExtractionAttack):
    """Asks with random words of the last reply, and yields each new text."""

    words: int = 4
    most: int = 1000

    paper: ClassVar[str] = "none"

    async def extract(self, box, rng):
        yielded, question = set(), "amber birch cedar"
        for _ in range(self.most):
            reply = (await box.ask(question)).text
            for text in reply.split("\n\n"):
                if text not in yielded:
                    yielded.add(text)
                    yield text
            words_of_reply = reply.split()
            question = " ".join(words_of_reply[i] for i in rng.integers(len(words_of_reply), size=self.words))


@dataclass
class FixedQuestions(ExtractionAttack):
    """Asks fixed questions and yields nothing."""

    questions: tuple = ()
    ignores_errors: bool = False

    paper: ClassVar[str] = "none"

    async def extract(self, box, rng):
        for question in self.questions:
            try:
                await box.ask(question)
            except BackendError:
                if not self.ignores_errors:
                    raise
        for text in ():
            yield text


class Quote(Generator):
    """Replies with the whole context."""

    async def stream(self, prompt):
        for document in prompt.context:
            yield document.text + "\n\n"


def crawl(store, attack, targets, **options):
    crawler = Crawler("random_words", attack, targets, store, CrawlPlan(waits=(0.0,), **options))
    return crawler, asyncio.run(crawler.run())


def run_crawl(store, attack, target, **options):
    return crawl(store, attack, {"off": target}, **options)[1]["off"]


def figures(store, targets, attack=None, collection=COLLECTION, **options):
    crawler, traces = crawl(store, attack or RandomWords(), targets, **options)
    return measure_crawl(crawler, traces, collection, BagOfWords())
