"""What a crawler meets with besides fewer documents: extracts, and a pause."""

import asyncio
import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate import traces
from casemate.backends.sqlite import SqliteIndex
from casemate.defenses.crawl_limit import CrawlLimit
from casemate.errors import ConfigError
from casemate.gateway.keys import Grant, Keys
from casemate.guard import Guard
from casemate.protocols import Generator
from casemate.quoting import Quotes, spoken
from casemate.rag import Rag, join
from casemate.traces import ALARMED, CLEAR, SUSPECTED
from casemate.types import Background, Document, Hit, Prompt, Query, Retrieval
from casemate.words import extract
from tests.fakes import BagOfWords
from tests.gateways import chat, make, serving

WAIT = 60.0  # longer than any test
QUESTION = "What is the toll of the north bridge?"
TEXT = (
    "It rained in all the valleys for a week. The toll of the north bridge is three marks for a cart. "
    "Herons nest late in the reeds behind the weir. Divers found cracks in two piers of the old mill."
)
CHUNK = Document("d0", TEXT)


class Dump(Generator):
    """Repeats its context, and remembers what it was given."""

    def __init__(self):
        self.read = []

    async def stream(self, prompt):
        self.read.append([d.text for d in prompt.context])
        for word in " ".join(d.text for d in prompt.context).split():
            yield word + " "


def held(limit, level, client="ann", chunks=("d0",), tenant="default"):
    """Makes the limit hold a client for what a level says, who was shown some chunks."""
    query = Query("", client, tenant)
    for _ in range({CLEAR: 0, SUSPECTED: 1, ALARMED: 3}[level]):
        limit.traces.told(query, "", {}, (), True)
    limit.traces.shown(query, chunks)
    assert limit.traces.level(query) is level
    return limit


async def asked(limit, reader, client="ann", chunks=(CHUNK,), text=QUESTION):
    query = Query(text, client)
    found = Retrieval(tuple(Hit(c, 0.5) for c in chunks), Background(9, 0.1, 0.1), exhausted=True)
    kept = (await limit.on_retrieve(query, found)).value.hits
    return await join(limit.on_generate(reader).stream(Prompt(text, tuple(h.document for h in kept), "", query.id)))


@pytest.mark.parametrize(("level", "read"), [(CLEAR, TEXT), (SUSPECTED, TEXT), (ALARMED, extract(QUESTION, TEXT, 1))])
def test_only_a_crawler_is_answered_from_extracts(level, read):
    reader = Dump()
    asyncio.run(asked(held(CrawlLimit(sentences=1), level), reader))
    assert reader.read == [[read]]


def test_extracts_can_be_switched_off():
    reader = Dump()
    asyncio.run(asked(held(CrawlLimit(sentences=0), ALARMED), reader))
    assert reader.read == [[TEXT]]


def test_a_chunk_that_says_nothing_about_the_question_is_not_read():
    reader = Dump()
    asyncio.run(asked(held(CrawlLimit(), ALARMED), reader, text="Who feeds the pigeons?"))
    assert reader.read == [[]]


SENTENCE = st.lists(st.sampled_from(TEXT.replace(".", "").lower().split()), min_size=1, max_size=9)


@given(st.lists(SENTENCE.map(lambda words: f"{' '.join(words).capitalize()}."), min_size=1, max_size=6))
def test_what_an_extract_tells_counts_by_the_whole_chunk(sentences):
    text = " ".join(sentences)
    limit, query = held(CrawlLimit(), ALARMED), Query("", "ann")
    told = asyncio.run(asked(limit, Dump(), chunks=[Document("d0", text)]))
    quotes = Quotes([text], QUESTION)
    quotes.take(told)
    covered = limit.traces.covered(query, "d0")
    assert covered == quotes.covered[0]
    assert covered.bit_count() <= limit.exposure * len(spoken(text))


@pytest.mark.parametrize("sentences", [0, 2])
def test_an_alarm_lasts_its_hours_whether_or_not_extracts_are_read(sentences, monkeypatch):
    limit, query, began = held(CrawlLimit(sentences=sentences, hours=1), ALARMED), Query("", "ann"), time.time()
    for minute in range(59):
        monkeypatch.setattr(traces.time, "time", lambda now=began + 60 * minute: now)
        asyncio.run(asked(limit, Dump()))
        assert limit.traces.level(query) is ALARMED
    monkeypatch.setattr(traces.time, "time", lambda: began + 7200)
    asyncio.run(asked(limit, Dump()))
    assert limit.traces.level(query) is CLEAR


def test_a_crawler_waits_and_nobody_else_does():
    limit, reader = held(CrawlLimit(pause_s=WAIT), ALARMED), Dump()
    held(limit, SUSPECTED, "bob")

    async def go():
        crawler = asyncio.create_task(asked(limit, reader))
        others = [asked(limit, reader, "bob"), asked(limit, reader, "eve")]
        assert all(await asyncio.wait_for(asyncio.gather(*others), WAIT / 4))
        assert not crawler.done()
        crawler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await crawler

    asyncio.run(go())
    assert reader.read == [[TEXT], [TEXT]]


def test_one_question_of_a_crawler_waits_and_the_rest_are_answered_without_documents():
    limit, reader = held(CrawlLimit(pause_s=WAIT), ALARMED), Dump()

    async def waiting():
        task = asyncio.create_task(asked(limit, reader))
        await asyncio.sleep(0.01)
        rest = [asked(limit, reader) for _ in range(20)]
        assert await asyncio.wait_for(asyncio.gather(*rest), WAIT / 4) == [""] * 20
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(waiting())
    asyncio.run(waiting())  # whoever leaves makes room for his next question
    assert reader.read == [[]] * 40


def test_after_the_pause_he_is_answered():
    limit, reader = held(CrawlLimit(pause_s=0.05), ALARMED), Dump()
    began = time.monotonic()
    assert asyncio.run(asked(limit, reader))
    assert time.monotonic() - began >= 0.05
    assert asyncio.run(asked(limit, reader, text="and the north bridge"))
    assert all(texts for texts in reader.read)


def test_whoever_only_observes_lets_nobody_wait(tmp_path):
    index, reader = SqliteIndex(tmp_path / "i.db"), Dump()
    limit = held(CrawlLimit(pause_s=WAIT), ALARMED)
    guard = Guard(Rag(BagOfWords(), index, reader), [limit], enforce=False)

    async def go():
        await guard.add([CHUNK])
        answer = await asyncio.wait_for(guard.ask(Query(QUESTION, "ann")), WAIT / 4)
        assert answer.verdicts[0].flagged

    asyncio.run(go())
    index.close()
    assert reader.read == [[TEXT]]


def test_a_crawler_at_the_gateway_leaves_places_to_others(tmp_path):
    limit = CrawlLimit(pause_s=WAIT)
    app = make(tmp_path, defenses=[limit], concurrency=3)  # as many as he asks at once
    (crawler, text), (_, other) = (Keys(app.store).create(Grant(name, "client")) for name in ("crawler", "other"))
    held(limit, ALARMED, crawler.id, [f"d{i}" for i in range(40)])

    async def go(url):
        async with httpx.AsyncClient(base_url=url, timeout=WAIT / 4) as http:

            async def ask(key, **more):
                head = {"Authorization": f"Bearer {key}"}
                return await http.post("/v1/chat/completions", json=chat("only7", **more), headers=head)

            crawls = [asyncio.create_task(ask(text, stream=stream)) for stream in (True, False, True)]
            ended = asyncio.as_completed(crawls)
            assert [(await next(ended)).status_code for _ in range(2)] == [200, 200]
            async with asyncio.timeout(WAIT / 4):
                while (reply := await ask(other)).status_code == 503:  # places are given back just after an answer
                    await asyncio.sleep(0.01)
            assert reply.json()["choices"][0]["message"]["content"].startswith("d7 ")
            (waiting,) = [task for task in crawls if not task.done()]
            waiting.cancel()
            await asyncio.wait({waiting})

    with serving(app) as url:
        asyncio.run(go(url))


@pytest.mark.parametrize("wrong", [{"sentences": -1}, {"pause_s": -0.1}, {"pause_s": float("nan")}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CrawlLimit(**wrong)
