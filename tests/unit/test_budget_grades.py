"""Beyond the budget of ``crawl_limit``: what n clients obtain in total, with and without ``quorum``."""

import asyncio
from contextlib import closing

import pytest

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.audience import AudiencePolicy
from casemate.guard.defenses.crawl_limit import CrawlLimit, Grade
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.guard import Guard
from casemate.protocols import Generator
from casemate.rag.pipeline import Rag
from casemate.types import UNKNOWN, Document, Query
from tests.fakes import BagOfWords

TOPICS, SOURCES, BUDGET = 8, 3, 60


def own_words(topic, source):
    """Words that only one source contains."""
    return [f"w{topic}{source}{letter}" for letter in "abcdefghijkl"]


def fact(topic):
    return f"Bridge{topic} opened in {1900 + topic} beside mill{topic}"


COLLECTION = [
    Document(f"d{t}-{s}", f"{fact(t)}. " + " ".join(own_words(t, s))) for t in range(TOPICS) for s in range(SOURCES)
]
SECRETS = {word for t in range(TOPICS) for s in range(SOURCES) for word in own_words(t, s)}


class RepeatsContext(Generator):
    """Repeats its context: the worst case."""

    async def stream(self, prompt):
        for document in prompt.context:
            yield f"{document.text}\n"
        if not prompt.context:
            yield UNKNOWN


@pytest.fixture
def rag(tmp_path):
    embedder = BagOfWords()
    with closing(SqliteIndex(tmp_path / "index.db")) as index:
        index.open(embedder.fingerprint, embedder.dim)
        made = Rag(embedder, index, RepeatsContext())
        asyncio.run(Guard(made, []).add(COLLECTION))
        yield made


def quorum():
    return Quorum(support=2, jitter=1, floor=0.0)


def only_budget(**options):
    """Only the budget limits."""
    return CrawlLimit(
        budget=BUDGET, quote_words=10**6, whole=10**6, questions=10**4, exposure=1.0, alarm=1e-12, **options
    )


def crawl(guard, limit, clients):
    """Asks about every topic as every client. Returns each reply with its question and the grade before it."""

    async def go():
        found = []
        for client in range(clients):
            for topic in range(TOPICS):
                query = Query(f"When was bridge{topic} opened?", f"c{client}", k=SOURCES)
                grade = limit.grade(query)
                found.append((query, grade, (await guard.ask(query)).text))
        return found

    return asyncio.run(go())


@pytest.mark.parametrize("clients", [1, 3])
def test_clients_obtain_at_most_their_budgets_beyond_quorum_answers(rag, clients):
    """n clients with B new words a day obtain at most n * B words beyond ``quorum`` answers for unentitled clients."""
    limit = only_budget()
    replies = crawl(Guard(rag, [quorum(), limit]), limit, clients)
    unentitled_guard = Guard(rag, [quorum()], audience=AudiencePolicy("quorum"))
    quorum_part = [(query, text) for query, grade, text in replies if grade is Grade.QUORUM]
    for query, text in quorum_part:
        asked = Query(query.text, "stranger", k=SOURCES, groups=frozenset())
        assert text == asyncio.run(unentitled_guard.ask(asked)).text
    assert any("19" in text for _, text in quorum_part)  # facts of three sources are still answered
    answer_words = {word for _, _, text in replies for word in text.replace(".", " ").split()}
    assert 0 < len(answer_words & SECRETS) <= clients * BUDGET
    assert not {word for _, text in quorum_part for word in text.split()} & SECRETS


def test_no_documents_are_read_beyond_the_budget_without_quorum(rag):
    limit = only_budget()
    replies = crawl(Guard(rag, [limit]), limit, 1)
    assert {text for _, grade, text in replies if grade is Grade.QUORUM} == {UNKNOWN}


def test_quorum_answers_are_not_charged(rag):
    limit = CrawlLimit(budget=BUDGET)
    guard = Guard(rag, [quorum(), limit], audience=AudiencePolicy("quorum"))
    query = Query("When was bridge1 opened?", "visitor", k=SOURCES, groups=frozenset())
    assert "1901" in asyncio.run(guard.ask(query)).text
    assert limit.evidence.disclosed_words(query) == limit.evidence.shown_count(query) == 0


@pytest.mark.parametrize("clients", [1, 3])
def test_fetching_clients_obtain_at_most_their_budgets_beyond_quorum_answers(rag, clients):
    """Beyond the budget they receive only ``quorum`` answers, which are not charged."""
    limit = only_budget()
    guard = Guard(rag, [quorum(), limit])

    async def fetch(client, topic):
        query = Query(f"When was bridge{topic} opened?", f"c{client}", k=SOURCES)
        grade, retrieval = limit.grade(query), (await guard.retrieve(query))[0]
        return grade, await guard.deliver(query, [hit.document for hit in retrieval.hits])

    found = [asyncio.run(fetch(client, topic)) for client in range(clients) for topic in range(TOPICS)]
    words = {word for _, documents in found for d in documents for word in d.text.split()}
    quorum_part = [d for grade, documents in found if grade is Grade.QUORUM for d in documents]
    assert 0 < len(words & SECRETS) <= clients * BUDGET
    assert (
        any("19" in d.text for d in quorum_part)
        and not {word for d in quorum_part for word in d.text.split()} & SECRETS
    )
    assert all(limit.evidence.disclosed_words(Query("", f"c{c}")) <= BUDGET for c in range(clients))


def test_observe_mode_answers_from_the_documents_beyond_the_budget(rag):
    limit = only_budget()
    guard = Guard(rag, [quorum(), limit], enforce=False)
    bare = Guard(rag, [])
    for query, _, text in crawl(guard, limit, 1):
        assert text == asyncio.run(bare.ask(query)).text
    assert limit.grade(query) is Grade.QUORUM


def test_budget_exhausted_between_search_and_decision_removes_all_documents(rag):
    """Another answer to the client may finish after the search. Documents found before must not be read."""
    limit = only_budget()
    query = Query("When was bridge1 opened?", "ann", k=SOURCES)
    retrieval = asyncio.run(Guard(rag, []).retrieve(query))[0]
    limit.evidence.record_answer(query, "", {"more": (1 << BUDGET) - 1}, (), False)
    assert asyncio.run(limit.on_retrieve(query, retrieval)).value.hits == ()
