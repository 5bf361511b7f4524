"""The graduated response of crawl_limit: extracts and a pause."""

import asyncio
import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import ConfigError
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.guard.client_state import crawl_evidence
from casemate.guard.client_state.crawl_evidence import ALARMED, CLEAR, SUSPECTED, text_name
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.guard import Guard
from casemate.protocols import Generator
from casemate.rag.pipeline import Rag, join_stream
from casemate.text.disclosure import DisclosureCounter
from casemate.text.sentences import extract_sentences
from casemate.types import Document, Hit, Prompt, Query, Retrieval, SimilarityStats
from tests.fakes import BagOfWords
from tests.gateways import chat, make, serving

WAIT = 60.0  # longer than any test
QUESTION = "What is the toll of the north bridge?"
TEXT = (
    "It rained in all the valleys for a week. The toll of the north bridge is three marks for a cart. "
    "Herons nest late in the reeds behind the weir. Divers found cracks in two piers of the old mill."
)
CHUNK = Document("d0", TEXT)


class RepeatsContext(Generator):
    """Repeats its context and records it."""

    def __init__(self):
        self.read = []

    async def stream(self, prompt):
        self.read.append([d.text for d in prompt.context])
        for word in " ".join(d.text for d in prompt.context).split():
            yield word + " "


def with_client_level(limit, level, client="ann", chunks=("d0",), tenant="default"):
    """Sets the level of a client that was shown some chunks."""
    query = Query("", client, tenant)
    for number in range({CLEAR: 0, SUSPECTED: 1, ALARMED: 3}[level]):
        limit.evidence.record_answer(query, "", {f"other{number}": 1}, (), True)
    limit.evidence.record_shown(query, chunks)
    assert limit.evidence.level(query) is level
    return limit


async def ask_limited(limit, reader, client="ann", chunks=(CHUNK,), text=QUESTION):
    query = Query(text, client)
    found = Retrieval(tuple(Hit(c, 0.5) for c in chunks), SimilarityStats(9, 0.1, 0.1), exhausted=True)
    kept = (await limit.on_retrieve(query, found)).value.hits
    return await join_stream(
        limit.on_generate(reader).stream(Prompt(text, tuple(h.document for h in kept), "", query.id))
    )


@pytest.mark.parametrize(
    ("level", "read"), [(CLEAR, TEXT), (SUSPECTED, TEXT), (ALARMED, extract_sentences(QUESTION, TEXT, 1))]
)
def test_only_an_alarmed_client_is_answered_from_extracts(level, read):
    reader = RepeatsContext()
    asyncio.run(ask_limited(with_client_level(CrawlLimit(sentences=1), level), reader))
    assert reader.read == [[read]]


def test_extracts_can_be_disabled():
    reader = RepeatsContext()
    asyncio.run(ask_limited(with_client_level(CrawlLimit(sentences=0), ALARMED), reader))
    assert reader.read == [[TEXT]]


def test_chunk_without_relevant_sentences_is_not_in_the_context():
    reader = RepeatsContext()
    asyncio.run(ask_limited(with_client_level(CrawlLimit(), ALARMED), reader, text="Who feeds the pigeons?"))
    assert reader.read == [[]]


SENTENCE = st.lists(st.sampled_from(TEXT.replace(".", "").lower().split()), min_size=1, max_size=9)


@given(st.lists(SENTENCE.map(lambda words: f"{' '.join(words).capitalize()}."), min_size=1, max_size=6))
def test_quotations_from_extracts_count_against_the_whole_chunk(sentences):
    text = " ".join(sentences)
    limit, query = with_client_level(CrawlLimit(), ALARMED), Query("", "ann")
    quoted = asyncio.run(ask_limited(limit, RepeatsContext(), chunks=[Document("d0", text)]))
    counter = DisclosureCounter([text], QUESTION)
    covered = limit.evidence.disclosed(query, text_name(Document("d0", text)))
    assert [covered] == counter.read(quoted)
    assert covered.bit_count() <= limit.exposure * counter.lengths[0]


@pytest.mark.parametrize("sentences", [0, 2])
def test_alarm_lasts_its_hours_with_and_without_extracts(sentences, monkeypatch):
    limit, query, start_time = (
        with_client_level(CrawlLimit(sentences=sentences, hours=1), ALARMED),
        Query("", "ann"),
        time.time(),
    )
    for minute in range(59):
        monkeypatch.setattr(crawl_evidence.time, "time", lambda now=start_time + 60 * minute: now)
        asyncio.run(ask_limited(limit, RepeatsContext()))
        assert limit.evidence.level(query) is ALARMED
    monkeypatch.setattr(crawl_evidence.time, "time", lambda: start_time + 7200)
    asyncio.run(ask_limited(limit, RepeatsContext()))
    assert limit.evidence.level(query) is CLEAR


def test_only_an_alarmed_client_waits():
    limit, reader = with_client_level(CrawlLimit(pause_s=WAIT), ALARMED), RepeatsContext()
    with_client_level(limit, SUSPECTED, "bob")

    async def go():
        crawler = asyncio.create_task(ask_limited(limit, reader))
        others = [ask_limited(limit, reader, "bob"), ask_limited(limit, reader, "eve")]
        assert all(await asyncio.wait_for(asyncio.gather(*others), WAIT / 4))
        assert not crawler.done()
        crawler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await crawler

    asyncio.run(go())
    assert reader.read == [[TEXT], [TEXT]]


def test_one_question_of_a_crawler_waits_and_its_others_get_no_documents():
    limit, reader = with_client_level(CrawlLimit(pause_s=WAIT), ALARMED), RepeatsContext()

    async def waiting():
        task = asyncio.create_task(ask_limited(limit, reader))
        await asyncio.sleep(0.01)
        rest = [ask_limited(limit, reader) for _ in range(20)]
        assert await asyncio.wait_for(asyncio.gather(*rest), WAIT / 4) == [""] * 20
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(waiting())
    asyncio.run(waiting())  # a canceled question lets the next one wait
    assert reader.read == [[]] * 40


def test_question_is_answered_after_the_pause():
    limit, reader = with_client_level(CrawlLimit(pause_s=0.05), ALARMED), RepeatsContext()
    start_time = time.monotonic()
    assert asyncio.run(ask_limited(limit, reader))
    assert time.monotonic() - start_time >= 0.05
    assert asyncio.run(ask_limited(limit, reader, text="and the north bridge"))
    assert all(texts for texts in reader.read)


def test_observe_mode_does_not_pause(tmp_path):
    index, reader = SqliteIndex(tmp_path / "i.db"), RepeatsContext()
    limit = with_client_level(CrawlLimit(pause_s=WAIT), ALARMED)
    guard = Guard(Rag(BagOfWords(), index, reader), [limit], enforce=False)

    async def go():
        await guard.add([CHUNK])
        answer = await asyncio.wait_for(guard.ask(Query(QUESTION, "ann")), WAIT / 4)
        assert answer.verdicts[0].flagged

    asyncio.run(go())
    index.close()
    assert reader.read == [[TEXT]]


def test_crawler_does_not_exhaust_the_gateway_concurrency(tmp_path):
    limit = CrawlLimit(pause_s=WAIT)
    app = make(
        tmp_path, defenses=[limit], concurrency=3, concurrency_per_key=3
    )  # as many concurrent requests as the crawler sends
    (crawler, text), (_, other) = (
        ApiKeyStore(app.store).create(Grant(name, "client")) for name in ("crawler", "other")
    )
    with_client_level(limit, ALARMED, crawler.id, [f"d{i}" for i in range(40)])

    async def go(url):
        async with httpx.AsyncClient(base_url=url, timeout=WAIT / 4) as http:

            async def ask(key, **more):
                head = {"Authorization": f"Bearer {key}"}
                return await http.post("/v1/chat/completions", json=chat("only7", **more), headers=head)

            crawls = [asyncio.create_task(ask(text, stream=stream)) for stream in (True, False, True)]
            ended = asyncio.as_completed(crawls)
            assert [(await next(ended)).status_code for _ in range(2)] == [200, 200]
            async with asyncio.timeout(WAIT / 4):
                while (reply := await ask(other)).status_code == 503:  # capacity is released just after an answer
                    await asyncio.sleep(0.01)
            assert reply.json()["choices"][0]["message"]["content"].startswith("d7 ")
            (waiting,) = [task for task in crawls if not task.done()]
            waiting.cancel()
            await asyncio.wait({waiting})

    with serving(app) as url:
        asyncio.run(go(url))


@pytest.mark.parametrize("wrong", [{"sentences": -1}, {"pause_s": -0.1}, {"pause_s": float("nan")}])
def test_invalid_options_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CrawlLimit(**wrong)
