"""The budget of new words by client and tenant: an upper bound on what clients obtain, in any encoding."""

import asyncio
import base64
import codecs
import random
from contextlib import closing

import numpy as np
import pytest

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.demo.clinic import case_notes
from casemate.errors import ConfigError
from casemate.guard.client_state import crawl_evidence
from casemate.guard.client_state.crawl_evidence import ALARMED, SUSPECTED, CrawlEvidence
from casemate.guard.defenses.crawl_limit import EXTRACTS_FROM, RESERVED_AHEAD, CrawlLimit, Grade
from casemate.guard.defenses.crawl_limit.meter import MAX_WORD, UNDECODED_LETTERS, DisclosureMeter, _lowest
from casemate.protocols import Generator
from casemate.rag.pipeline import join_stream
from casemate.text.disclosure import MAX_BLOCK, MIN_CHAIN
from casemate.types import Document, Hit, Prompt, Query, Retrieval, SimilarityStats
from tests.disguises import MORSE

WORDS = 40
"""Words of a chunk: content words that occur in no other chunk."""


def chunk(number):
    rng = np.random.default_rng(number)
    letters = rng.choice(list("eeeetttaaaooiinnsshhrrddlucmfwgypbvk"), (WORDS, 8))  # letter frequencies of English
    return Document(f"d{number}", " ".join("".join(word) for word in letters))


SIGNS = dict(zip("abcdefghijklmnopqrstuvwxyz", MORSE, strict=True))
LETTERS = {sign: letter for letter, sign in SIGNS.items()}
FORMS = {
    "plain": (str, str),
    "numbered": (
        lambda t: " ".join(f"{i}.{w}" for i, w in enumerate(t.split(), 1)),
        lambda t: " ".join(w.split(".")[-1] for w in t.split()),
    ),
    "capitals": (str.upper, str.lower),
    "spaced": (lambda t: "  ".join(" ".join(w) for w in t.split()), lambda t: t.replace("  ", "|").replace(" ", "")),
    "rot13": (lambda t: codecs.encode(t, "rot13"), lambda t: codecs.encode(t, "rot13")),
    "base64 by word": (
        lambda t: " ".join(base64.b64encode(w.encode()).decode() for w in t.split()),
        lambda t: " ".join(base64.b64decode(w).decode() for w in t.split() if len(w) % 4 == 0),
    ),
    "reversed": (lambda t: t[::-1], lambda t: t[::-1]),
    "morse": (
        lambda t: " / ".join(" ".join(SIGNS[c] for c in word) for word in t.split()),
        lambda t: " ".join("".join(LETTERS.get(sign, "") for sign in word.split()) for word in t.split("/")),
    ),
}
"""Encoders and decoders."""


class EncodesContext(Generator):
    """Repeats its context in one of ``FORMS``."""

    def __init__(self, form="plain"):
        self.encode = FORMS[form][0]
        self.read = []

    async def stream(self, prompt):
        self.read.append([d.text for d in prompt.context])
        text = self.encode(" ".join(d.text for d in prompt.context))
        for start in range(0, len(text), 9):
            await asyncio.sleep(0)
            yield text[start : start + 9]


async def answer(limit, generator, numbers, client, tenant="default", text="what then", make=chunk):
    query = Query(text, client, tenant, 5)
    hits = tuple(Hit(make(n), 0.5) for n in numbers)
    outcome = await limit.on_retrieve(query, Retrieval(hits, SimilarityStats(1000, 0.1, 0.1), exhausted=True))
    context = tuple(h.document for h in outcome.value.hits[:5])
    return await join_stream(limit.on_generate(generator).stream(Prompt(text, context, "", query.id)))


def obtained(replies, form, chunks=60):
    """Returns the words of the collection that occur in the decoded replies."""
    vocabulary = {word for n in range(chunks) for word in chunk(n).text.split()}
    return vocabulary & {w for r in replies for w in FORMS[form][1](r).replace("|", " ").split()}


def open_limit(**options):
    """Only the budget limits."""
    return CrawlLimit(quote_words=10**6, whole=10**6, questions=10**4, exposure=1.0, alarm=1e-12, **options)


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_clients_obtain_at_most_their_budgets_together(clients, form):
    """n clients with a budget of B words obtain at most n * B words, for any questions."""
    limit, budget = open_limit(budget=150), 150

    async def crawl():
        return [
            await answer(limit, EncodesContext(form), range(5 * i, 5 * i + 5), f"client {c}")
            for c in range(clients)
            for i in range(4 * c, 4 * c + 4)
        ]

    replies = asyncio.run(crawl())
    assert 0 < len(obtained(replies, form)) <= clients * budget
    assert all(limit.evidence.disclosed_words(Query("", f"client {c}")) <= budget for c in range(clients))


@pytest.mark.parametrize("form", FORMS)
def test_end_of_a_short_encoded_answer_is_decoded_before_it_is_sent(form):
    limit, cut = CrawlLimit(quote_words=10), Document("d", " ".join(chunk(0).text.split()[:20]))
    reply = asyncio.run(answer(limit, EncodesContext(form), [0, 1], "ann", make=lambda n: chunk(1) if n else cut))
    assert len(obtained([reply], form)) <= 10 + UNDECODED_LETTERS // 8


@pytest.mark.parametrize("form", FORMS)
def test_encoded_text_is_decoded_before_it_is_sent(form):
    """One answer discloses at most the quote limit in any encoding. No block of encoded text is sent undecoded."""
    limit = CrawlLimit(quote_words=30, whole=10**6, exposure=1.0, questions=10**4, budget=10**6)
    reply = asyncio.run(answer(limit, EncodesContext(form), range(5), "ann"))
    assert len(obtained([reply], form)) <= 30 + UNDECODED_LETTERS // 8 + MIN_CHAIN


def _key_cipher(text, sign):
    """Shifts each letter by the next letter of a key (Vigenere cipher). No decoder tries keys."""
    return "".join(
        chr(97 + (ord(c) - 97 + sign * (ord("lemonade"[i % 8]) - 97)) % 26) if c.isalpha() else c
        for i, c in enumerate(text)
    )


NOTES = [" ".join(text.split()) for _, text in case_notes(60, seed=3)]


def note(number):
    return Document(f"n{number}", NOTES[number])


class Enciphers(EncodesContext):
    """Repeats a part of its context in a keyed cipher."""

    def __init__(self, part=slice(None)):
        super().__init__()
        self.encode = lambda text: _key_cipher(" ".join(text.lower().split()[part]), 1)


def sent_words(replies):
    """Returns the words of the notes in the deciphered replies."""
    vocabulary = {word for text in NOTES for word in text.lower().split()}
    return [sum(word in vocabulary for word in _key_cipher(reply, -1).split()) for reply in replies]


def test_undecodable_answers_count_as_copies():
    """A client that asks for a keyed cipher obtains at most its budget, and its grade is reduced."""
    limit = open_limit(budget=300)
    crawl = [answer(limit, Enciphers(), range(5 * i, 5 * i + 5), "ann", make=note) for i in range(4)]
    replies = [asyncio.run(one) for one in crawl]
    assert 0 < sum(sent_words(replies)) <= 1.05 * 300  # words are estimated from their letters
    assert limit.evidence.disclosed_words(Query("", "ann")) > 200
    assert limit.grade(Query("", "ann")) is not Grade.FULL


def test_undecodable_answers_are_charged_to_the_tenant_and_each_client():
    """Ten clients ask for different parts of the same notes in a keyed cipher."""
    limit = open_limit(budget=10_000, tenant_budget=300)
    crawl = [answer(limit, Enciphers(slice(40 * i, 40 * i + 60)), range(5), f"c{i}", make=note) for i in range(10)]
    assert sum(sent_words([asyncio.run(one) for one in crawl])) <= 1.05 * 300
    assert limit.evidence.tenant_words("default") > 200


def test_partially_consumed_answer_is_counted():
    limit = open_limit(budget=10_000)
    query = Query("q", "ann")
    for _ in range(20):
        meter = DisclosureMeter(limit, query, [note(0), note(1)], ())
        text = "".join(map(meter.feed, _key_cipher(NOTES[0].lower(), 1)[:60]))
        meter.record()
        assert text
    assert limit.evidence.disclosed_words(query) >= 20


@pytest.mark.parametrize("bits", [0, 1, 0b1011001, (1 << 300) - 1, 0b1110 << 200])
def test_lowest_returns_the_lowest_set_bits(bits):
    for count in (0, 1, 3, 299, 1000):
        expected = [i for i in range(bits.bit_length()) if bits >> i & 1][:count]
        assert _lowest(bits, count) == sum(1 << i for i in expected)


@pytest.mark.parametrize("unit", ["x", "QUJD", "a \u200b"])
def test_adversarial_answer_is_measured_in_linear_time_and_bounded_memory(unit):
    """Text without white space is also read in words of bounded length."""
    meter = DisclosureMeter(CrawlLimit(), Query("q", "ann"), [chunk(0), chunk(1)], ())
    sent = waiting = 0
    for _ in range(20_000 // len(unit)):
        sent += len(meter.feed(unit))
        waiting = max(waiting, len(meter.incomplete) + sum(map(len, meter.waiting)))
    sent += len(meter.finish())
    assert sent == 20_000 // len(unit) * len(unit)
    assert waiting <= 2 * MAX_WORD + MAX_BLOCK
    assert meter.counter.steps <= 200 * 20_000


class _ChecksEachWord(DisclosureMeter):
    """Checks the limits after every word."""

    def _check(self):
        self.stale = True
        super()._check()


def _mixed_answer(rng, notes):
    """Returns parts of notes in several encodings, with unreadable words between them."""
    parts = []
    for _ in range(rng.randrange(1, 7)):
        words = rng.choice(notes).text.split()
        start = rng.randrange(len(words))
        words = words[start : start + rng.choice([2, 5, 8, 15, 30, 60])]
        text = " ".join(words)
        parts += rng.choice(
            [
                [text],
                [text],
                [base64.b64encode(text.encode()).decode()],
                [FORMS["base64 by word"][0](text), " 17\n3"],
                [_key_cipher(text.lower(), 1)],
                [FORMS["numbered"][0](text)],
                [text[::-1], "".join(words)],
                ["".join(rng.choices("qzxjkvwy", k=rng.randrange(2, 40)))],
            ]
        )
    return " ".join(parts)


@pytest.mark.parametrize("seed", range(24))
def test_limits_equal_those_of_a_check_after_each_word(seed, monkeypatch):
    rng = random.Random(seed)
    options = {"budget": rng.choice([60, 200, 5000]), "short_quote_words": rng.randrange(5, 40)}
    options |= {"questions": rng.choice([1, 2, 50]), "whole": rng.choice([0, 9]), "tenant_budget": rng.choice([0, 300])}
    options |= {"quote_words": rng.choice([0, rng.randrange(5, 90)]), "exposure": rng.choice([0.1, 0.3, 0.6, 1.0])}
    limits = CrawlLimit(**options), CrawlLimit(**options)
    if rng.random() < 0.4:
        monkeypatch.setattr(CrawlEvidence, "level", lambda self, query: SUSPECTED)
    make = rng.choice([chunk, note])
    documents = [make(i) for i in range(9)]
    for _ in range(4):
        context, client, text = rng.sample(documents[:6], 3), rng.choice("abc"), _mixed_answer(rng, documents)
        sent = []
        for limit, meter in zip(limits, (DisclosureMeter, _ChecksEachWord), strict=True):
            measured = meter(limit, Query("what then", client, k=3), context, [d.text for d in documents[6:]])
            parts = [measured.feed(text[at : at + 7]) for at in range(0, len(text), 7)] + [measured.finish()]
            measured.record()
            assert not limit._in_flight
            sent.append((parts, measured.cut, measured.limit_reached, limit.evidence.summary(Query("", client))))
        assert sent[0] == sent[1]


class _Part(Generator):
    """Repeats a part of each chunk of its context, word by word."""

    def __init__(self, start, words, chunks=1):
        self.part, self.chunks = slice(start, start + words), chunks

    async def stream(self, prompt):
        for document in prompt.context[: self.chunks]:
            for word in document.text.split()[self.part]:
                await asyncio.sleep(0)
                yield f"{word} "


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("colluding", [False, True])
def test_answers_share_the_exposure_limit_of_a_chunk(colluding, together, monkeypatch):
    """Each answer is below the share. All answers together would contain the chunk."""
    monkeypatch.setattr(CrawlEvidence, "is_colluding", lambda self, tenant: colluding)
    monkeypatch.setattr(CrawlEvidence, "level", lambda self, query: SUSPECTED)
    limit = CrawlLimit()

    async def ask():
        parts = [(start, f"client {start * colluding}") for start in range(0, WORDS, 10)]
        asked = [
            answer(limit, _Part(at, 10), range(3), client_name, text=f"words from {at}") for at, client_name in parts
        ]
        return await asyncio.gather(*asked) if together else [await one for one in asked]

    disclosed = set(" ".join(asyncio.run(ask())).split()) & set(chunk(0).text.split())
    assert 0 < len(disclosed) <= 0.3 * WORDS + 4 * MIN_CHAIN  # the words of each answer before its first counted chain
    assert not limit._in_flight and not limit.unfinished._by_chunk and not limit.unfinished._by_client


def test_concurrent_answers_share_the_limit_of_disclosed_chunks():
    limit = CrawlLimit(questions=5)

    async def ask():
        contexts = [[i, 100 + i, 200 + i] for i in range(20)]
        return await asyncio.gather(*(answer(limit, _Part(0, 25), numbers, "ann") for numbers in contexts))

    replies = asyncio.run(ask())
    assert sum(len(reply.split()) == 25 for reply in replies) == 5
    assert len(limit.evidence.exposed_chunks(Query("", "ann"))) == 5


def test_cut_answers_reserve_no_words_of_the_tenant_budget(monkeypatch):
    level = CrawlEvidence.level
    monkeypatch.setattr(
        CrawlEvidence, "level", lambda self, query: SUSPECTED if query.client > "n" else level(self, query)
    )
    limit = CrawlLimit(tenant_budget=600, short_quote_words=12)

    async def ask():
        copying = [answer(limit, _Part(0, 40, 3), range(3 * i, 3 * i + 3), f"z{i}") for i in range(6)]
        benign = [answer(limit, _Part(0, 10), [50 + i, 60, 61], f"a{i}") for i in range(5)]
        return (await asyncio.gather(*copying, *benign))[6:]

    assert [len(reply.split()) for reply in asyncio.run(ask())] == [10] * 5


def test_concurrent_benign_answers_within_the_budget_are_complete():
    limit = CrawlLimit(budget=500)

    async def ask():
        return await asyncio.gather(*(answer(limit, _Part(0, 10), [i, 100 + i, 200 + i], "ann") for i in range(20)))

    assert [len(reply.split()) for reply in asyncio.run(ask())] == [10] * 20


@pytest.mark.parametrize("step", [(DisclosureMeter, "_give"), (CrawlEvidence, "record_answer")])
def test_failed_record_releases_the_reservation_and_charges_its_words(step, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    limit = open_limit(budget=1000)
    monkeypatch.setattr(*step, fail)
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(answer(limit, _Part(0, 30), range(3), "ann"))
    assert 30 <= limit._used(Query("", "ann"))["budget"] <= 30 + RESERVED_AHEAD
    assert not limit._in_flight and not limit.unfinished._by_client


def test_benign_answers_are_charged_for_new_words_only():
    limit = open_limit(budget=10_000)
    asyncio.run(answer(limit, EncodesContext(), [0, 1], "ann"))
    asyncio.run(answer(limit, EncodesContext(), [0, 1], "ann"))  # nothing new
    assert limit.evidence.disclosed_words(Query("", "ann")) == 2 * WORDS
    assert limit.grade(Query("", "ann")) is Grade.FULL


def test_grade_depends_on_the_used_budget():
    limit, reader, grades = open_limit(budget=100, sentences=1), EncodesContext(), []
    query = Query("", "ann")
    for number in range(4):
        grades.append(limit.grade(query))
        asyncio.run(answer(limit, reader, [number], "ann", text=chunk(number).text[:30]))
        limit.evidence.record_answer(query, "", {f"more {number}": (1 << 4) - 1}, (), False)
    assert grades == [Grade.FULL, Grade.FULL, Grade.EXTRACTS, Grade.QUORUM]
    limit.evidence.record_answer(query, "", {"more": (1 << 100) - 1}, (), False)
    assert limit.grade(query) is Grade.QUORUM
    assert asyncio.run(answer(limit, reader, [9], "ann")) == "" and reader.read[-1] == []
    assert 0 < EXTRACTS_FROM < 1


def test_budget_that_is_exhausted_after_the_search_removes_all_documents():
    limit, reader, query = open_limit(budget=100), EncodesContext(), Query(chunk(0).text[:30], "ann")

    async def ask():
        await limit.on_retrieve(query, Retrieval((Hit(chunk(0), 0.5),), SimilarityStats(1000, 0.1, 0.1), True))
        limit.evidence.record_answer(query, "", {"more": (1 << 100) - 1}, (), False)
        prompt = Prompt(query.text, (chunk(0),), "", query.id)
        return await join_stream(limit.on_generate(reader).stream(prompt))

    assert asyncio.run(ask()) == "" and reader.read == [[]]


def test_concurrent_answers_share_the_budget():
    limit = open_limit(budget=100)

    async def crawl():
        return await asyncio.gather(
            *(answer(limit, EncodesContext(), range(5 * i, 5 * i + 5), "ann") for i in range(6))
        )

    assert len(obtained(asyncio.run(crawl()), "plain")) <= 100
    assert not limit._in_flight


def test_finished_answer_releases_only_its_own_reservation():
    limit, query = open_limit(budget=100, tenant_budget=100), Query("", "ann")
    first, second = (40 + limit.reserve(query, 0, 40, 40)[0] for _ in range(2))
    limit.release(query, first)
    assert limit._free(query) == {"budget": 100 - second, "tenant_budget": 100 - second}
    limit.release(query, second)
    assert limit._free(query) == {"budget": 100, "tenant_budget": 100} and not limit._in_flight


def test_tenant_budget_limits_the_total_of_all_clients_and_counts_a_word_once():
    limit = open_limit(budget=1000, tenant_budget=150)

    async def crawl(tenant):
        return [await answer(limit, EncodesContext(), range(3 * c, 3 * c + 3), f"client {c}", tenant) for c in range(8)]

    assert len(obtained(asyncio.run(crawl("north")), "plain")) <= 150
    assert limit.grade(Query("", "another", "north")) is not Grade.FULL
    assert limit.grade(Query("", "another", "south")) is Grade.FULL
    again = open_limit(tenant_budget=150)
    for client in range(9):
        assert len(asyncio.run(answer(again, EncodesContext(), [1, 2], f"client {client}")).split()) == 2 * WORDS
    assert again.evidence.tenant_words("default") == 2 * WORDS


def test_budget_is_reset_after_its_hours(monkeypatch):
    limit = open_limit(budget=100, hours=1, tenant_budget=100)
    asyncio.run(answer(limit, EncodesContext(), range(5), "ann"))
    assert limit.grade(Query("", "ann")) is not Grade.FULL
    later = crawl_evidence.time.time() + 3700
    monkeypatch.setattr(crawl_evidence.time, "time", lambda: later)
    assert asyncio.run(answer(limit, EncodesContext(), [30, 31], "ann")) == f"{chunk(30).text} {chunk(31).text}"


def test_used_budget_survives_a_restart_and_is_shared_among_processes(tmp_path):
    store = SqlEventStore(path=tmp_path / "events.db")
    try:
        first = open_limit(budget=100, store=store)
        asyncio.run(answer(first, EncodesContext(), range(5), "ann"))
        store.flush()
        second = open_limit(budget=100, store=store)
        second.sync()
        ann = Query("", "ann")
        assert second.evidence.disclosed_words(ann) == first.evidence.disclosed_words(ann) > 0
        assert len(asyncio.run(answer(second, EncodesContext(), range(10, 15), "ann")).split()) <= 20
    finally:
        store.close()


HOUR, HALF = 3600.0, (1 << 20) - 1


class Processes:
    """The evidence of several processes on one event store, with a shared clock that the test sets."""

    def __init__(self, store, monkeypatch):
        self.store, self.now, self.query = store, crawl_evidence.time.time(), Query("what then", "ann")
        monkeypatch.setattr(crawl_evidence.time, "time", lambda: self.now)

    def start(self):
        return CrawlEvidence(1e-12, 0, HOUR, self.store)

    def disclose(self, evidence, bits, exposed=()):
        evidence.record_shown(self.query, ["a"])
        evidence.record_answer(self.query, "", {"a": bits}, exposed, False)
        assert self.store.flush()

    def words(self, evidence):
        evidence.sync()
        evidence.record_question(self.query)
        return evidence.disclosed_words(self.query)


@pytest.fixture
def processes(tmp_path, monkeypatch):
    with closing(SqlEventStore(path=tmp_path / "events.db")) as store:
        yield Processes(store, monkeypatch)


def test_all_processes_count_words_of_a_chunk_that_was_shown_again(processes):
    first, second = processes.start(), processes.start()
    processes.disclose(first, 1)
    assert processes.words(second) == 1
    processes.now += 0.9 * HOUR
    processes.disclose(first, HALF, ["a"])
    processes.now += 0.5 * HOUR
    for evidence in (first, second, processes.start()):
        assert processes.words(evidence) == 20
        assert evidence.exposed_chunks(processes.query) == {"a"}
    processes.now += 0.6 * HOUR
    for evidence in (first, second, processes.start()):
        assert processes.words(evidence) == 0
        assert not evidence.exposed_chunks(processes.query)


def test_words_expire_in_a_process_started_after_their_chunk_was_shown(processes):
    first = processes.start()
    processes.disclose(first, 1)
    processes.now += 0.9 * HOUR
    processes.disclose(first, HALF)
    processes.now += 0.5 * HOUR
    later = processes.start()
    assert processes.words(later) == 20 and not later.was_shown(processes.query, "a")
    processes.now += 0.6 * HOUR
    assert processes.words(later) == 0


def test_words_expire_if_the_record_of_their_chunk_was_evicted(processes, monkeypatch):
    monkeypatch.setattr(crawl_evidence, "MAX_CHUNKS", 1)
    evidence = processes.start()
    processes.disclose(evidence, HALF)
    evidence.record_shown(processes.query, ["b"])
    assert processes.words(evidence) == 20 and not evidence.was_shown(processes.query, "a")
    processes.now += 1.1 * HOUR
    assert processes.words(evidence) == 0


def test_undecoded_text_counts_against_the_budget():
    limit = open_limit(budget=60)
    replies = [asyncio.run(answer(limit, EncodesContext("base64 by word"), range(5), "ann"))]
    assert len(obtained(replies, "base64 by word")) <= 60


@pytest.mark.parametrize("form", FORMS)
def test_client_that_copies_in_any_encoding_is_alarmed(form):
    limit = CrawlLimit()
    for question in range(8):
        asyncio.run(answer(limit, EncodesContext(form), range(5 * question, 5 * question + 5), "ann"))
    assert limit.evidence.level(Query("", "ann")) is ALARMED


def test_common_phrase_is_not_disclosure():
    """A greeting that most documents contain is not a copy of any of them."""
    greeting = "Thank you for consulting our online clinic today, your doctor will answer shortly"

    class GreetingGenerator(Generator):
        async def stream(self, prompt):
            yield greeting

    limit = CrawlLimit()
    for number in range(8):
        hits = tuple(Hit(Document(f"g{i}", f"{greeting} {chunk(i).text[:90]}"), 0.5) for i in range(number, number + 8))
        query = Query("who are you", "ann", "default", 5)

        async def go(query=query, hits=hits):
            await limit.on_retrieve(query, Retrieval(hits, SimilarityStats(1000, 0.1, 0.1), exhausted=True))
            prompt = Prompt(query.text, tuple(h.document for h in hits[:5]), "", query.id)
            return await join_stream(limit.on_generate(GreetingGenerator()).stream(prompt))

        assert asyncio.run(go()) == greeting
    assert not limit.evidence.exposed_chunks(Query("", "ann"))


@pytest.mark.parametrize("options", [{"budget": 0}, {"tenant_budget": -1}])
def test_invalid_budgets_are_rejected(options):
    with pytest.raises(ConfigError, match="budget"):
        CrawlLimit(**options)
