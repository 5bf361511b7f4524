"""What a client may carry away: shares, quotations, alarms, and who remembers them."""

import asyncio
from datetime import UTC, datetime

import numpy as np
import pytest

from casemate import traces
from casemate.backends.sql_events import SqlEvents
from casemate.defenses.crawl_limit import CrawlLimit
from casemate.errors import ConfigError, DataError
from casemate.protocols import Generator
from casemate.rag import join
from casemate.reindexing.shelf import Shelf
from casemate.reindexing.space import Reindexing, distinct, key
from casemate.traces import ALARMED, CLEAR, SUSPECTED
from casemate.types import Background, Document, Hit, Prompt, Query, Retrieval

BACKGROUND = Background(1000, 0.1, 0.1)


def chunk(number):
    rng = np.random.default_rng(number)
    return Document(f"d{number}", " ".join(f"w{i}" for i in rng.integers(0, 10**6, 60)))


def found(numbers):
    return Retrieval(tuple(Hit(chunk(n), 0.5 - i / 100) for i, n in enumerate(numbers)), BACKGROUND, exhausted=True)


class Dump(Generator):
    """Repeats its context, or says something of its own."""

    def __init__(self, words=10**6):
        self.words = words

    async def stream(self, prompt):
        text = " ".join(d.content for d in prompt.context) if self.words else "nothing of the kind"
        for start in range(0, len(text), 7):  # pieces that end anywhere
            yield text[start : start + 7]


def ask(limit, numbers, client="ann", text="what then", dump=True, k=5, tenant="default"):
    query = Query(text, client, tenant, k)

    async def go():
        limit.follow()  # as the guard does
        outcome = await limit.on_retrieve(query, found(numbers))
        hits = outcome.value.hits[:k]
        prompt = Prompt(text, tuple(h.document for h in hits), "", query.id)
        return outcome, await join(limit.on_generate(Dump(10**6 if dump else 0)).stream(prompt))

    return asyncio.run(go())


def ids(outcome, k=5):
    return [h.document.id for h in outcome.value.hits[:k]]


def level(limit, client="ann"):
    return limit.traces.level(Query("", client))


def test_an_answer_quotes_so_much_and_ends():
    outcome, text = ask(CrawlLimit(quote_words=25), range(5))
    assert ids(outcome) == [f"d{n}" for n in range(5)]
    assert text == " ".join(chunk(0).text.split()[:25])


def test_what_is_no_quotation_is_left_as_it_is():
    assert ask(CrawlLimit(quote_words=1), range(5), dump=False)[1] == "nothing of the kind"


def test_everybody_may_ask_his_questions_a_day():
    limit = CrawlLimit(questions=20)
    for question in range(20):
        outcome, _ = ask(limit, range(5 * question, 5 * question + 8), dump=False)
        assert ids(outcome) == [f"d{5 * question + i}" for i in range(5)]
        assert not outcome.verdict.flagged
    outcome, _ = ask(limit, [200, 3, 201, 97, 0], dump=False)
    assert ids(outcome) == ["d3", "d97", "d0"]
    assert outcome.verdict.hidden == ("d200", "d201")
    outcome, _ = ask(limit, range(200, 205), client="bob", dump=False)
    assert len(ids(outcome)) == 5


def test_whoever_has_everything_repeated_is_held_to_be_a_crawler_and_learns_nothing_new():
    limit = CrawlLimit(quote_words=50)
    levels = []
    for question in range(6):
        ask(limit, range(5 * question, 5 * question + 5))
        levels.append(level(limit))
    assert levels[0] is SUSPECTED
    assert levels[-1] is ALARMED
    outcome, text = ask(limit, [90, 1, 91])
    assert outcome.verdict.flagged
    assert ids(outcome) == ["d1"]
    assert len(text.split()) < 40


def test_a_suspect_is_told_a_share_of_a_chunk_in_all():
    limit = CrawlLimit(quote_words=10, short_quote_words=40, exposure=0.3, alarm=1e-9)
    told = {word for _ in range(4) for word in ask(limit, [0], k=1)[1].split()}
    assert len(told) <= 0.3 * 60


def test_questions_that_repeat_earlier_answers_are_evidence():
    limit, text = CrawlLimit(quote_words=1000), "what then"
    for question in range(1, 9):
        _, text = ask(limit, [question], k=1, text=" ".join(text.split()[-12:]))
    assert level(limit) is ALARMED
    other = CrawlLimit(quote_words=1000)
    for question in range(8):
        ask(other, [question], k=1, text=" ".join(chunk(question + 50).text.split()[-20:]))
    assert level(other) is CLEAR


def test_whoever_asks_the_same_again_echoes_himself():
    limit = CrawlLimit(quote_words=1000)
    for _ in range(10):
        ask(limit, [3], k=1, text=f"what about this: {chunk(3).text}")
    assert level(limit) is CLEAR


def test_crawlers_of_a_tenant_bring_all_its_clients_under_suspicion():
    limit = CrawlLimit(quote_words=50, colluders=2)
    for client in ("ann", "bob"):
        assert level(limit, "eve") is CLEAR
        for question in range(6):
            ask(limit, range(5 * question, 5 * question + 5), client=client)
    assert level(limit, "eve") is SUSPECTED
    assert limit.traces.level(Query("", "eve", "elsewhere")) is CLEAR


def test_harmless_clients_raise_an_alarm_as_seldom_as_said():
    """Sessions of 50 questions, each event as often as the test assumes at most."""
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(4000):
        for harmless, crawler in traces.TESTS.values():
            evidence, top = 1.0, 0.0
            for happened in rng.random(50) < harmless:
                evidence = max(1.0, evidence * (crawler / harmless if happened else (1 - crawler) / (1 - harmless)))
                top = max(top, evidence)
            alarms += top >= len(traces.TESTS) / CrawlLimit().alarm
    assert alarms <= 4


@pytest.fixture
def store(tmp_path):
    opened = SqlEvents(path=tmp_path / "events.db")
    yield opened
    opened.close()


def test_it_is_remembered_over_a_restart_and_by_other_processes(store):
    first, other = CrawlLimit(quote_words=50, store=store), CrawlLimit(quote_words=50, store=store)
    for question in range(6):
        ask(first, range(5 * question, 5 * question + 5))
    store.flush()
    for limit in (other, CrawlLimit(quote_words=50, store=store)):
        outcome, _ = ask(limit, [90, 1, 91])
        assert outcome.verdict.flagged
        assert ids(outcome) == ["d1"]
        assert limit.traces.covered(Query("", "ann"), "d0") == first.traces.covered(Query("", "ann"), "d0") > 0


def test_a_request_that_is_looked_at_again_counts_once():
    limit, text = CrawlLimit(quote_words=1000), ask(CrawlLimit(), [0], k=1)[1]
    ask(limit, [0], k=1)
    query = Query(" ".join(text.split()[-20:]), "ann", k=1)
    for _ in range(5):
        asyncio.run(limit.on_retrieve(query, found([1])))
    assert limit.traces.evidence(query)["echoes"] == 25


def test_it_is_forgotten_after_its_time(monkeypatch):
    limit = CrawlLimit(quote_words=50, hours=1)
    for question in range(6):
        ask(limit, range(5 * question, 5 * question + 5))
    later = datetime.now(UTC).timestamp() + 3601
    monkeypatch.setattr(traces.time, "time", lambda: later)
    outcome, _ = ask(limit, range(90, 95))
    assert ids(outcome) == [f"d{n}" for n in range(90, 95)]
    assert level(limit) is not ALARMED


def test_an_answer_that_breaks_off_is_noted_too():
    limit = CrawlLimit()
    query = Query("what", "ann", k=1)

    class Broken(Generator):
        async def stream(self, prompt):
            yield chunk(0).text[:200]
            raise RuntimeError

    async def go():
        await limit.on_retrieve(query, found([0]))
        with pytest.raises(RuntimeError):
            await join(limit.on_generate(Broken()).stream(Prompt("what", (chunk(0),), "", query.id)))

    asyncio.run(go())
    assert limit.traces.covered(query, "d0") > 0


@pytest.mark.parametrize("wrong", [{"questions": 0}, {"exposure": 0}, {"alarm": 1}, {"hours": 0}, {"quote_words": 0}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CrawlLimit(**wrong)


def test_of_one_answer_few_chunks_are_told_whole():
    outcome, text = ask(CrawlLimit(quote_words=1000), range(5))
    assert len(ids(outcome)) == 5
    words = text.split()
    told = [sum(w in words for w in chunk(n).text.split()) / 60 for n in range(5)]
    assert [share > 0.3 for share in told] == [True, True, True, False, False]
    assert sum(w in ask(CrawlLimit(quote_words=1000), range(2), k=2)[1].split() for w in chunk(1).text.split()) <= 18


def test_a_day_has_as_many_whole_chunks_as_questions():
    limit, whole = CrawlLimit(questions=4), 0
    for question in range(8):
        _, text = ask(limit, [question], k=1)
        whole += len(text.split()) > 18
    assert whole == 4
    assert level(limit) is CLEAR  # it was no evidence


def test_colluders_are_noticed_together_and_told_no_more_than_one():
    limit = CrawlLimit(quote_words=1000)
    for name in range(4):
        ask(limit, range(5 * name, 5 * name + 5), client=f"c{name}")
    assert level(limit, "bystander") is SUSPECTED
    assert level(limit, "c0") is SUSPECTED  # none of them is an alarm by himself
    text = ask(limit, range(5), client="bystander")[1]
    assert len(text.split()) <= 0.3 * 60 + 3 * 60  # what c0 was told, and no whole chunk besides
    new = ask(limit, range(50, 55), client="bystander")[1]
    assert len(new.split()) <= 0.3 * 60


def test_a_single_crawler_brings_nobody_else_down():
    limit = CrawlLimit(quote_words=50)
    for question in range(30):
        ask(limit, range(5 * question, 5 * question + 5))
    assert level(limit) is ALARMED
    assert level(limit, "bystander") is CLEAR


def test_harmless_tenants_are_seldom_suspected():
    rng, suspected = np.random.default_rng(3), 0
    for tenant in range(40):
        limit = CrawlLimit(alarm=1e-3)
        for _ in range(100):
            query = Query("q", f"c{rng.integers(20)}", f"t{tenant}")
            limit.traces.told(query, "", {}, (), bool(rng.random() < 0.01))
        suspected += limit.traces.collude(f"t{tenant}")
    assert suspected <= 4  # 4,000 questions, one in a thousand


def test_topics_need_a_reindexing(tmp_path):
    limit = CrawlLimit(topics=1, folder=tmp_path)
    with pytest.raises(DataError, match="casemate reindex"):
        ask(limit, range(3))


def test_a_client_sees_so_many_topics(tmp_path, monkeypatch):
    keys, labels = distinct([key(chunk(n)) for n in range(20)], np.arange(20) // 5)
    centroids = np.eye(4, 8, dtype=np.float32)
    Shelf(tmp_path, "default").write(
        Reindexing("gate", "default", "e", centroids, np.full(4, 2.0, np.float32), keys, labels)
    )
    limit, read, current = CrawlLimit(topics=2, folder=tmp_path), [], Shelf.current
    monkeypatch.setattr(Shelf, "current", lambda self: read.append(self.tenant) or current(self))
    first, _ = ask(limit, [0, 1, 5, 6, 10, 11], k=5, dump=False)
    assert ids(first) == ["d0", "d1", "d5", "d6"]
    assert read == ["default"]  # once for a question, not for each hit
    second, _ = ask(limit, [10, 2, 16, 7, 30], k=5, dump=False)  # 30 is of no topic
    assert ids(second) == ["d2", "d7", "d30"]
    assert ids(ask(limit, [10, 2], client="bob", dump=False)[0]) == ["d10", "d2"]
