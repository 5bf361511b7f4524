"""What a crawler meets with besides fewer documents: extracts."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate import traces
from casemate.defenses.crawl_limit import CrawlLimit
from casemate.errors import ConfigError
from casemate.protocols import Generator
from casemate.quoting import Quotes, spoken
from casemate.rag import join
from casemate.traces import ALARMED, CLEAR, SUSPECTED
from casemate.types import Background, Document, Hit, Prompt, Query, Retrieval
from casemate.words import extract

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


@pytest.mark.parametrize("wrong", [{"sentences": -1}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CrawlLimit(**wrong)
