"""The budget of crawl_limit over several processes on one event store, after crashes, and for evicted clients."""

import asyncio
import os
import random
import signal
import threading
import time
from contextlib import closing

import pytest

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.errors import BackendError
from casemate.guard.client_state import crawl_evidence
from casemate.guard.client_state.reset import reset_client
from casemate.guard.client_state.word_quotas import WordQuotas, quota_name
from casemate.guard.defenses.crawl_limit import CrawlLimit, Grade
from casemate.guard.defenses.crawl_limit.meter import DisclosureMeter
from casemate.types import Document, Hit, Query, Retrieval, SimilarityStats
from tests.fakes import Memory

STATS = SimilarityStats(1000, 0.1, 0.1)


def chunk(number):
    """A document of 40 words that occur in no other document. Its id has no words."""
    return Document(f"{number:032x}", " ".join(f"w{number}x{i}" for i in range(40)))


def only_budget(store, **options):
    return CrawlLimit(
        quote_words=10**6, whole=10**6, questions=10**4, exposure=1.0, alarm=1e-12, store=store, **options
    )


async def fetched(limit, numbers, client="ann"):
    """Returns the words that a client obtains by fetching documents, or from an answer that repeats them."""
    documents = [chunk(n) for n in numbers]
    query = Query(documents[0].text, client, k=len(documents))
    limit.sync()
    retrieval = Retrieval(tuple(Hit(d, 0.5) for d in documents), STATS, exhausted=True)
    found = (await limit.on_retrieve(query, retrieval)).value
    delivered = await limit.on_deliver(query, [h.document for h in found.hits])
    return {word for d in delivered for word in d.text.split()}


def work(folder, seed, pipe):
    """Fetches documents for two clients until it is killed. Reports the words of each call before the next call."""
    rng = random.Random(seed)
    with closing(SqlEventStore(path=folder / "events.db")) as store:
        limit = only_budget(store, budget=600, tenant_budget=1000)
        while True:
            name = rng.choice(["ann", "bob"])
            words = asyncio.run(fetched(limit, rng.sample(range(500), rng.randrange(1, 4)), name))
            os.write(pipe, f"{name} {' '.join(sorted(words))}\n".encode())


def fork_worker(folder, seed, pipe):
    if child := os.fork():
        return child
    try:
        work(folder, seed, pipe)
    finally:
        os._exit(1)


def obtained_by_processes(folder, rounds, seed):
    """Returns the words by client delivered by two concurrent processes, each killed after a random number of calls."""
    rng, found = random.Random(seed), {"ann": set(), "bob": set()}
    for number in range(rounds):
        reading, writing = os.pipe()
        children = [fork_worker(folder, f"{seed} {number} {i}", writing) for i in range(2)]
        os.close(writing)
        with open(reading) as lines:
            reported = [lines.readline() for _ in range(rng.randrange(5, 30))]
            for child in children:
                os.kill(child, signal.SIGKILL)
                assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
            reported += lines
        for name, *words in map(str.split, reported):
            found[name].update(words)
    return found


def require_bounds(found):
    assert all(len(words) <= 600 for words in found.values())
    assert len(found["ann"] | found["bob"]) <= 1000


@pytest.mark.parametrize("shared", [True, False])
def test_killed_processes_deliver_at_most_the_budget_of_a_client(tmp_path, monkeypatch, shared):
    """Also if no process reads the events of the others."""
    if not shared:
        monkeypatch.setattr(CrawlLimit, "sync", lambda _: None)
    SqlEventStore(path=tmp_path / "events.db").close()
    found = obtained_by_processes(tmp_path, 6, 0)
    require_bounds(found)
    assert sum(map(len, found.values())) > 100  # a killed process loses at most one block


def test_bound_check_of_processes_fails_with_an_injected_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(CrawlLimit, "sync", lambda _: None)
    monkeypatch.setattr(WordQuotas, "acquire", lambda _, wanted: [_add(w) for w in wanted])
    SqlEventStore(path=tmp_path / "events.db").close()
    with pytest.raises(AssertionError):
        for seed in range(3):
            require_bounds(obtained_by_processes(tmp_path, 6, seed))


def _add(wanted):
    """Counts in this process only."""
    wanted.block.left += wanted.lacking


def many(limits, client="ann", first=0):
    """Returns the words that concurrent processes deliver to a client if none reads the others' events."""

    async def run():
        asked = [fetched(limit, [first + 100 * i + n], client) for i, limit in enumerate(limits) for n in range(30)]
        return set().union(*await asyncio.gather(*asked))

    return asyncio.run(run())


def test_concurrent_answers_of_several_processes_share_the_budget(monkeypatch):
    store = Memory()
    monkeypatch.setattr(CrawlLimit, "sync", lambda _: None)
    limits = [only_budget(store, budget=500) for _ in range(4)]
    assert 400 <= len(many(limits)) <= 500


@pytest.mark.parametrize("store", [None, Memory()])
def test_evicted_client_keeps_its_remaining_budget(monkeypatch, store):
    monkeypatch.setattr(crawl_evidence, "MAX_CLIENTS", 3)
    limit, words = only_budget(store, budget=200), set()
    for turn in range(8):
        words |= many([limit], first=40 * turn)
        for n in range(3):
            asyncio.run(fetched(limit, [5000 + n], f"other {turn} {n}"))
    assert 150 <= len(words) <= 200
    assert limit.grade(Query("", "ann")) is Grade.FULL  # its counts are loaded with its first question


def test_reset_restores_the_budget_of_a_client(tmp_path):
    with closing(SqlEventStore(path=tmp_path / "events.db")) as store:
        limit = only_budget(store, budget=100)
        assert len(many([limit])) == 100 and not many([limit], first=50)
        reset_client(store, "default", "ann")
        assert len(many([limit], first=100)) == 100


def test_one_store_write_reserves_quota_for_several_answers():
    calls = []

    class CountingStore(Memory):
        def acquire(self, wanted):
            calls.append(wanted)
            return super().acquire(wanted)

    limit = only_budget(CountingStore(), budget=5000)
    for n in range(60):
        asyncio.run(fetched(limit, [n]))
    assert 0 < len(calls) <= 20
    assert {quota_name("default", "ann")} == {w.name.rpartition(" ")[0] for one in calls for w in one}


def test_answer_in_progress_does_not_block_the_event_loop_on_the_store():
    threads = []

    class CountingStore(Memory):
        def acquire(self, wanted):
            threads.append(threading.current_thread())
            return super().acquire(wanted)

    async def pieces():
        for document in documents:
            for word in document.text.split():
                yield f"{word} "

    async def answer():
        await limit.prepare(query)
        meter = DisclosureMeter(limit, query, documents, ())
        return [text async for text in meter.passing(pieces())]

    documents, query = [chunk(n) for n in range(10)], Query("", "ann", k=10)
    limit = only_budget(CountingStore(), budget=1000)
    assert len("".join(asyncio.run(answer())).split()) == 400
    assert len(threads) > 2 and threading.main_thread() not in threads


def test_nothing_is_delivered_if_the_store_fails():
    class FailingStore(Memory):
        def acquire(self, wanted):
            raise BackendError("down", backend="sql", retryable=True)

    limit = only_budget(FailingStore(), budget=500)
    with pytest.raises(BackendError):
        asyncio.run(fetched(limit, [1]))
    assert limit.reserve(Query("", "ann"), 0, 5, 5) == (0, "budget")


def test_words_are_acquired_in_the_period_of_the_answer(monkeypatch):
    now = time.time()
    limit = only_budget(Memory(), budget=100, hours=1.0)
    assert len(many([limit])) == 100
    monkeypatch.setattr(time, "time", lambda: now + 3700)
    assert len(many([limit], first=50)) == 100
