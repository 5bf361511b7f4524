"""Documents delivered to the client are charged to the budget of crawl_limit: direct, over HTTP, with LangChain."""

import asyncio
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casemate.guard.client_state import crawl_evidence
from casemate.guard.client_state.crawl_evidence import CrawlEvidence, text_name
from casemate.guard.defenses import crawl_limit
from casemate.guard.defenses.crawl_limit import CrawlLimit, Grade, delivery
from casemate.guard.defenses.crawl_limit.delivery import Delivery
from casemate.protocols import Defense, Generator
from casemate.rag.pipeline import join_stream
from casemate.text.disclosure import DisclosureCounter, pieces_with_words
from casemate.types import Document, Hit, Prompt, Query, Retrieval, SimilarityStats
from tests.gateways import chat, client, key, make

STATS = SimilarityStats(1000, 0.1, 0.1)
MAX_UNUSED_WORDS = 20
"""Maximum number of unused words: a client with fewer remaining words receives nothing."""


def chunk(number, sentences=4, words=10):
    """A document with words that occur in no other document."""
    parts = (" ".join(f"w{number}x{s}x{i}" for i in range(words)) for s in range(sentences))
    return Document(f"d{number}", ". ".join(part.capitalize() for part in parts) + ".", f"title{number}")


def with_values(number, sentences, words):
    """Like ``chunk``, with words in source, id and metadata."""
    source = f"files/s{number}y0-s{number}y1.md"
    metadata = {f"k{number}": [f"m{number}y0 m{number}y1", {f"m{number}y2": number}], "author": f"a{number % 3}"}
    return replace(chunk(number, sentences, words), id=f"{source}#i{number}", source=source, metadata=metadata)


def words_of(documents):
    """The distinct words in title and text of the documents. Each occurs once in the collection."""
    return {word.strip(".").lower() for d in documents for word in d.content.split()}


def all_words_of(documents):
    """The distinct words in all fields of the documents."""
    values = " ".join(f"{d.id} {d.source} {d.metadata}" for d in documents)
    return words_of(documents) | set(re.findall(r"[a-z0-9]+", values))


def only_budget(**options):
    """Only the budgets limit."""
    return CrawlLimit(quote_words=10**6, whole=10**6, questions=10**4, exposure=1.0, alarm=1e-12, **options)


async def fetch(limit, documents, name, text="W0x0x0", released=()):
    query = Query(text, name, k=len(documents) or 1)
    hits = tuple(Hit(d, 0.5) for d in documents)
    found = (await limit.on_retrieve(query, Retrieval(hits, STATS, exhausted=True))).value
    return await limit.on_deliver(query, [h.document for h in found.hits])


class ReadsAndRepeatsContext(Generator):
    """Repeats its context and records the documents that it read."""

    def __init__(self):
        self.read = []

    async def stream(self, prompt):
        self.read.append([d.text for d in prompt.context])
        for word in " ".join(d.content for d in prompt.context).split():
            await asyncio.sleep(0)
            yield f"{word} "


def prompt(query, documents):
    return Prompt(query.text, tuple(documents), "", query.id)


async def answered(limit, documents, name, text="W0x0x0"):
    query = Query(text, name, k=len(documents))
    hits = tuple(Hit(d, 0.5) for d in documents)
    found = (await limit.on_retrieve(query, Retrieval(hits, STATS, exhausted=True))).value
    kept = [h.document for h in found.hits]
    reply = await join_stream(limit.on_generate(ReadsAndRepeatsContext()).stream(prompt(query, kept)))
    return [Document("reply", reply)]


def crawl(seed, steps=60):
    """Clients fetch random documents and ask about others. Returns the words that each fetched, and the limit.

    Answers also use the budget. Their single words, shorter than a chain, do not count.
    """
    rng = random.Random(seed)
    options = {"budget": rng.choice([1, 30, 200, 500]), "tenant_budget": rng.choice([0, 150, 700])}
    limit = only_budget(**options, sentences=rng.choice([0, 1, 2]))
    obtained = {f"client {c}": set() for c in range(rng.choice([1, 3]))}

    async def run():
        for _ in range(steps):
            numbers = rng.sample(range(60), rng.randrange(1, 6))
            documents = [with_values(n, rng.randrange(1, 8), 10) for n in numbers]
            name, text = rng.choice(sorted(obtained)), f"W{rng.choice(numbers)}x0x0 and more"
            if rng.random() < 0.8:
                obtained[name] |= all_words_of(await fetch(limit, documents, name, text))
            else:
                await answered(limit, documents, name, text)

    asyncio.run(run())
    return obtained, limit


def require_bound(seed):
    """Checks that n clients with a budget of B words obtain at most n * B words, by an independent count."""
    obtained, limit = crawl(seed)
    for name, words in obtained.items():
        assert len(words) <= limit.budget
        assert len(words) <= limit.evidence.disclosed_words(Query("", name)) <= limit.budget
    if limit.tenant_budget:
        assert len(set().union(*obtained.values())) <= limit.tenant_budget
    return obtained, limit


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_clients_that_fetch_documents_obtain_at_most_their_budgets(seed):
    require_bound(seed)


@pytest.mark.parametrize(
    ("kind", "name", "fault"),
    [
        (delivery, "_values", lambda *_: iter(())),
        (CrawlLimit, "on_deliver", Defense.on_deliver),
        (Delivery, "_fits", lambda *_: True),
        (CrawlEvidence, "record_given", lambda *_: None),
    ],
)
def test_bound_check_fails_with_an_injected_fault(kind, name, fault, monkeypatch):
    monkeypatch.setattr(kind, name, fault)
    with pytest.raises(AssertionError):
        for seed in range(5):
            require_bound(seed)


@pytest.mark.parametrize("clients", [1, 20])
@pytest.mark.parametrize("budget", [30, 200, 1000])
def test_crawler_obtains_nearly_all_of_its_budget_and_no_more(clients, budget):
    """The last text is truncated at the budget, so little of the budget remains."""
    limit = only_budget(budget=budget)
    names = [f"client {c}" for c in range(clients)]

    async def run(name, first):
        found = [await fetch(limit, [chunk(n)], name, f"W{n}x0x0") for n in range(first, first + 40)]
        return all_words_of([d for some in found for d in some])

    obtained = [asyncio.run(run(name, 40 * i)) for i, name in enumerate(names)]
    assert all(budget - min(MAX_UNUSED_WORDS, budget / 10) <= len(words) <= budget for words in obtained)
    assert len(set().union(*obtained)) == sum(map(len, obtained))


def test_text_is_truncated_at_the_budget_and_delivered_words_are_free():
    limit, documents = only_budget(budget=100), [chunk(1), chunk(2), chunk(3)]
    whole = asyncio.run(fetch(limit, documents[:1], "ann"))
    assert whole == documents[:1]
    assert asyncio.run(fetch(limit, documents[:1], "ann")) == whole
    assert limit.evidence.disclosed_words(Query("", "ann")) == 42  # one of them is the id
    more = asyncio.run(fetch(limit, documents, "ann"))
    assert [d.id for d in more] == ["d1", "d2", "d3"] and more[:2] == documents[:2]
    assert documents[2].text.startswith(more[2].text) and len(all_words_of(more[2:])) == 100 - 2 * 42
    assert asyncio.run(fetch(limit, documents, "ann")) == []


def test_nearest_sentences_are_delivered_and_charged_when_most_of_the_budget_is_used():
    limit = only_budget(budget=200, sentences=2)
    asyncio.run(fetch(limit, [chunk(n) for n in range(1, 5)], "ann"))
    assert limit.grade(Query("", "ann")) is Grade.EXTRACTS
    before = limit.evidence.disclosed_words(Query("", "ann"))
    found = asyncio.run(fetch(limit, [chunk(5), chunk(6)], "ann", "W5x1x3 w5x3x2 not"))
    parts = chunk(5).text.split(" W")
    assert [(d.id, d.title, d.text) for d in found] == [("d5", "title5", f"W{parts[1]} W{parts[3]}")]
    assert limit.evidence.disclosed_words(Query("", "ann")) == before + 22
    expected = DisclosureCounter([chunk(5).content]).read(found[0].text)[0]
    assert (
        limit.evidence.disclosed(Query("", "ann"), text_name(chunk(5))) == expected | 1
    )  # the same words as in an answer, and the title


def test_texts_are_delivered_from_their_beginning_if_extracts_are_disabled():
    limit = only_budget(budget=200, sentences=0)
    asyncio.run(fetch(limit, [chunk(n) for n in range(1, 5)], "ann"))
    (given,) = asyncio.run(fetch(limit, [chunk(5)], "ann", "w5x3x2"))
    assert limit.grade(Query("", "ann")) is Grade.QUORUM and chunk(5).text.startswith(given.text)


def test_document_without_a_relevant_sentence_is_not_counted_as_shortened():
    evidence, query = CrawlEvidence(0.01, 0, 3600.0, None), Query("bridge", "ann")
    delivery = Delivery(evidence, query, {"budget": 0})
    assert delivery.add(chunk(1), []) is None and not delivery.shortened
    assert delivery.add(chunk(1), [chunk(1).text]) is None and delivery.shortened


@pytest.mark.timeout(10)
def test_metadata_with_a_reference_cycle_is_read_once():
    values = {"note": "a heron by the weir", "none": None}
    values["same"] = values
    delivery = Delivery(CrawlEvidence(0.01, 0, 3600.0, None), Query("bridge", "ann"), {"budget": 100})
    document = Document("", "amber brook", metadata=values)
    assert delivery.add(document, [document.text]) == document
    assert delivery.charged == {"budget": 10}


def test_answer_from_fetched_texts_is_free_and_retrieval_alone_is_not_charged():
    limit, documents, query = only_budget(budget=1000), [chunk(1), chunk(2)], Query("W1x0x0", "ann")
    retrieval = Retrieval(tuple(Hit(d, 0.5) for d in documents), STATS, exhausted=True)
    asyncio.run(limit.on_retrieve(query, retrieval))
    assert limit.evidence.disclosed_words(query) == 0
    asyncio.run(fetch(limit, documents, "ann"))
    assert limit.evidence.disclosed_words(query) == 84
    assert len(words_of(asyncio.run(answered(limit, documents, "ann")))) == 82
    assert limit.evidence.disclosed_words(query) == 84


def test_words_reserved_by_an_unfinished_answer_are_not_delivered():
    limit, query = only_budget(budget=100), Query("what then", "ann", k=3)

    async def run():
        documents = [chunk(n) for n in (1, 2, 3)]
        await limit.on_retrieve(query, Retrieval(tuple(Hit(d, 0.5) for d in documents), STATS, exhausted=True))
        stream, streamed = limit.on_generate(ReadsAndRepeatsContext()).stream(prompt(query, documents)), ""
        while len(streamed.split()) < 60:
            streamed += await anext(stream)
        given = await fetch(limit, [chunk(4), chunk(5)], "ann")
        rest = "".join([piece async for piece in stream])
        return [Document("reply", streamed + rest), *given]

    found = asyncio.run(run())
    assert len(found) == 2  # part of the first text
    assert 60 < len(words_of(found[1:])) + 60 and len(words_of(found)) <= 100
    assert not limit._in_flight


def test_concurrent_fetches_of_one_client_share_its_budget():
    limit, interval, names = only_budget(budget=200), sys.getswitchinterval(), [f"client {c}" for c in range(6)]

    def run(number):
        name = names[number // 40]
        return name, asyncio.run(fetch(limit, [chunk(number)], name, f"W{number}x0x0"))

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(run, range(40 * len(names))))
    finally:
        sys.setswitchinterval(interval)
    for name in names:
        assert 180 <= len(words_of([d for of, some in found for d in some if of == name])) <= 200


def test_words_expire_for_a_client_that_only_gets_documents_by_id(monkeypatch):
    limit, now, query = only_budget(budget=100), crawl_evidence.time.time(), Query("", "ann")

    def given(number):
        return asyncio.run(limit.on_deliver(query, [chunk(number)]))

    found = [given(n) for n in range(4)]
    assert [len(words_of(some)) for some in found] == [41, 41, 0, 0]
    monkeypatch.setattr(crawl_evidence.time, "time", lambda: now + 25 * 3600)
    assert given(5) == [chunk(5)]


def test_other_text_with_the_id_of_a_delivered_text_is_charged():
    """A document that was replaced, or one of another collection on the same event store."""
    same = [Document("same", chunk(n).text) for n in range(20)]
    limit = only_budget(budget=100, tenant_budget=150)
    found = [asyncio.run(fetch(limit, [d], "ann")) for d in same]
    assert len(words_of([d for some in found for d in some])) == 80  # two texts; no sentence of the others is near
    assert len(all_words_of(asyncio.run(limit.on_deliver(Query("x", "bob"), same[5:])))) == 150 - 80
    answers = only_budget(budget=100)
    answered_documents = [asyncio.run(answered(answers, [d], "ann")) for d in same]
    assert len(words_of([d for some in answered_documents for d in some])) <= 100


def test_fetching_does_not_change_the_evidence_about_a_client():
    limit, ann = only_budget(budget=10_000), Query("", "ann")
    limit.evidence.record_answer(ann, "", {"other": 1}, (), True)
    before = limit.evidence.summary(ann)
    asyncio.run(fetch(limit, [chunk(1), chunk(2)], "ann", "what then"))
    assert limit.evidence.summary(ann) == before | {"chunks": 2}
    assert before["quotes"] > 1


def test_evicted_request_is_answered_without_documents(monkeypatch):
    """Otherwise other clients could evict the request of a client, and its answer would not be limited."""
    monkeypatch.setattr(crawl_limit, "MAX_PENDING", 1)
    limit, reader, queries = (
        CrawlLimit(),
        ReadsAndRepeatsContext(),
        [Query("what then", name) for name in ("ann", "bob")],
    )

    async def run():
        retrieval = Retrieval((Hit(chunk(1), 0.5),), STATS, exhausted=True)
        for query in queries:
            await limit.on_retrieve(query, retrieval)
        return [await join_stream(limit.on_generate(reader).stream(prompt(q, [chunk(1)]))) for q in queries]

    evicted, kept = asyncio.run(run())
    assert evicted == "" and kept and reader.read == [[], [chunk(1).text]]


def test_delivered_retrieval_is_not_pending():
    limit = CrawlLimit()
    asyncio.run(fetch(limit, [chunk(1)], "ann"))
    assert not limit._pending


TEXTS = [
    "Tolls are  3 marks.\n\nNone on Sunday. ",
    " 橋は八時に開く。料金は三元。 abc",
    "don't — <b>well</b>-known 3.5",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_concatenate_to_the_text_and_have_its_word_count(text):
    pieces = pieces_with_words(text)
    assert "".join(piece for piece, _ in pieces) == text
    assert sum(count for _, count in pieces) == DisclosureCounter([text]).lengths[0]


def questions(count):
    return [f"only{n} only{n + 1}" for n in range(0, count, 2)]


SIXTY = [Document(f"d{n}", " ".join([f"only{n}", *(f"w{n}x{i}" for i in range(39))])) for n in range(60)]


def gateway(folder, **options):
    """A gateway for 60 texts of 40 words. Only the budget limits."""
    limit = only_budget(**options.pop("limit"))
    app = make(folder, defenses=(limit,), count=0, **options)
    asyncio.run(app.guard.add(SIXTY))
    return app


@pytest.mark.parametrize("clients", [1, 20])
def test_clients_obtain_at_most_their_budgets_over_http(tmp_path, clients):
    app = gateway(tmp_path, limit={"budget": 200})
    keys = [key(app, retrieve=True, name=f"client {c}") for c in range(clients)]
    obtained, asked = [], questions(60 if clients == 1 else 16)
    with client(app, None) as http:
        for number, text in enumerate(keys):
            headers, words = {"Authorization": f"Bearer {text}"}, set()
            for question in asked[number % 4 :]:
                data = http.post("/v1/retrieve", json={"question": question}, headers=headers).json()["data"]
                words.update(word for d in data for word in d["text"].split())
            obtained.append(words)
    assert all(180 <= len(words) <= 200 for words in obtained)
    assert len(set().union(*obtained)) <= clients * 200


def test_documents_and_answers_share_the_budget_over_http_and_texts_are_charged_once(tmp_path):
    app = gateway(tmp_path, limit={"budget": 1000}, generator=ReadsAndRepeatsContext())
    (limit,) = app.guard.defenses
    with client(app, key(app, retrieve=True)) as http:
        data = http.post("/v1/retrieve", json={"question": "only3", "k": 2}).json()["data"]
        (name,) = {name for _, name in limit.evidence._clients}
        assert sum(len(d["text"].split()) for d in data) == 80
        assert limit.evidence.disclosed_words(Query("", name)) == 82  # and two ids
        answer = http.post("/v1/chat/completions", json=chat("only3")).json()["choices"][0]["message"]["content"]
    assert 100 < len(set(answer.split())) <= limit.evidence.disclosed_words(Query("", name)) <= 202


def test_observe_mode_counts_over_http_without_changing_responses(tmp_path):
    app = gateway(tmp_path, limit={"budget": 100}, mode="observe")
    (limit,) = app.guard.defenses
    with client(app, key(app, retrieve=True)) as http:
        for question in questions(20):
            data = http.post("/v1/retrieve", json={"question": question}).json()["data"]
            assert [len(d["text"].split()) for d in data] == [40] * 5
    (name,) = {name for _, name in limit.evidence._clients}
    assert 80 <= limit.evidence.disclosed_words(Query("", name)) <= 100
