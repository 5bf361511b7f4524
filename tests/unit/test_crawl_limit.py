"""Limits per client: shown chunks, quotations, alarms and evidence shared between processes."""

import asyncio
from datetime import UTC, datetime

import numpy as np
import pytest

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.errors import ConfigError, DataError
from casemate.guard.client_state import crawl_evidence
from casemate.guard.client_state.crawl_evidence import ALARMED, CLEAR, SUSPECTED, text_name
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.verdict_log import append, collect_verdicts
from casemate.protocols import Generator
from casemate.rag.pipeline import join_stream
from casemate.reindexing.registry import ReindexRegistry
from casemate.reindexing.space import Reindexing, chunk_key, unique_keys
from casemate.reports.verdicts import reason
from casemate.types import Document, Event, Hit, Prompt, Query, Retrieval, SimilarityStats

BACKGROUND = SimilarityStats(1000, 0.1, 0.1)


@pytest.fixture
def store(tmp_path):
    opened = SqlEventStore(path=tmp_path / "events.db")
    yield opened
    opened.close()


def chunk(number):
    rng = np.random.default_rng(number)
    return Document(f"d{number}", " ".join(f"w{i}" for i in rng.integers(0, 10**6, 60)))


def found(numbers):
    return Retrieval(tuple(Hit(chunk(n), 0.5 - i / 100) for i, n in enumerate(numbers)), BACKGROUND, exhausted=True)


class RepeatsContext(Generator):
    """Repeats its context, or writes a fixed text."""

    def __init__(self, words=10**6):
        self.words = words

    async def stream(self, prompt):
        text = " ".join(d.content for d in prompt.context) if self.words else "nothing of the kind"
        for start in range(0, len(text), 7):  # pieces that end within words
            yield text[start : start + 7]


def ask(limit, numbers, client="ann", text="what then", dump=True, k=5, tenant="default"):
    query = Query(text, client, tenant, k)

    async def go():
        limit.sync()  # as the guard does
        outcome = await limit.on_retrieve(query, found(numbers))
        hits = outcome.value.hits[:k]
        prompt = Prompt(text, tuple(h.document for h in hits), "", query.id)
        return outcome, await join_stream(limit.on_generate(RepeatsContext(10**6 if dump else 0)).stream(prompt))

    return asyncio.run(go())


def ids(outcome, k=5):
    return [h.document.id for h in outcome.value.hits[:k]]


def level(limit, client="ann"):
    return limit.evidence.level(Query("", client))


def test_nearest_chunks_are_kept_when_the_daily_quota_ends():
    limit = CrawlLimit(questions=2)
    for numbers, shown in ((range(5), range(5)), ((5, 0, 6, 7), (5, 0, 6, 7)), ((20, 1, 21, 22, 2), (20, 1, 21, 2))):
        assert ids(ask(limit, numbers, dump=False)[0]) == [f"d{n}" for n in shown]


def test_answer_ends_at_the_quote_limit():
    outcome, text = ask(CrawlLimit(quote_words=25), range(5))
    assert ids(outcome) == [f"d{n}" for n in range(5)]
    assert text == " ".join(chunk(0).text.split()[:25])


def long_documents(words, seed=0):
    """Five documents without common words."""
    rng = np.random.default_rng(seed)
    return [Document(f"long{seed}-{n}", " ".join(f"w{i}" for i in rng.integers(0, 10**6, words))) for n in range(5)]


def test_long_answer_from_long_documents_is_not_evidence():
    limit = CrawlLimit()
    for number in range(4):
        documents = long_documents(400, seed=number)
        text = " ".join(" ".join(d.text.split()[:200]) for d in documents[:2])
        assert answer_from(limit, documents, text, question=f"what of {number}") == text
    assert level(limit) is CLEAR


def test_answer_from_long_documents_quotes_at_most_half_of_the_context():
    documents = long_documents(400)
    text = " ".join(d.text for d in documents[:3])
    limit = CrawlLimit()
    assert len(answer_from(limit, documents, text).split()) == 1000
    assert level(limit) is SUSPECTED


def test_recently_shown_texts_are_the_baseline_if_no_other_texts_were_retrieved():
    limit = CrawlLimit()
    for numbers in (range(5), range(5, 10)):
        query = Query("what then", "ann", "default", 5)
        asyncio.run(limit.on_retrieve(query, found(numbers)))
    assert set(limit.pop_query(Prompt("", (), "", query.id))[1]) == {chunk(n).content for n in range(5)}


def test_text_without_quotations_is_unchanged():
    assert ask(CrawlLimit(quote_words=1), range(5), dump=False)[1] == "nothing of the kind"


def test_each_client_gets_new_chunks_for_the_daily_number_of_questions():
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


def test_client_with_only_verbatim_answers_is_alarmed_and_gets_no_new_chunks():
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
    assert [hit.document.id for hit in ask(limit, [90, 1, 2, 91, 3])[0].value.hits] == ["d1", "d2"]  # half as many


def test_repeated_question_counts_as_evidence_once():
    limit = CrawlLimit(quote_words=50)
    for _ in range(8):
        ask(limit, range(5))
    assert level(limit) is SUSPECTED


@pytest.mark.parametrize(("new", "expected"), [(1, ALARMED), (0, CLEAR)])
def test_copy_of_known_chunks_and_a_new_one_is_evidence(new, expected):
    """A crawler asks about what it knows, so few chunks of an answer are new. Without a new one, it is a repetition."""
    limit = CrawlLimit()
    for number in range(4):
        ask(limit, [number], k=1)
    for question in range(6):
        ask(limit, [0, 1, 2, 3, 10 + question][: 4 + new])
    assert level(limit) is expected


def test_suspected_client_gets_at_most_the_exposure_share_of_a_chunk_in_total():
    limit = CrawlLimit(quote_words=10, short_quote_words=40, exposure=0.3, alarm=1e-9)
    quoted = {word for _ in range(4) for word in ask(limit, [0], k=1)[1].split()}
    assert len(quoted) <= 0.3 * 60


def test_questions_that_repeat_earlier_answers_are_evidence():
    limit, text = CrawlLimit(quote_words=1000), "what then"
    for question in range(1, 9):
        _, text = ask(limit, [question], k=1, text=" ".join(text.split()[-12:]))
    assert level(limit) is ALARMED
    other = CrawlLimit(quote_words=1000)
    for question in range(8):
        ask(other, [question], k=1, text=" ".join(chunk(question + 50).text.split()[-20:]))
    assert level(other) is CLEAR


def test_verdicts_on_an_alarmed_client_that_continues_to_crawl_are_stored(store):
    limit, query = CrawlLimit(quote_words=1000, store=store), Query("what then", client="ann")
    for question in range(300):  # each question repeats the previous answer
        limit.evidence.record_question(query)
        limit.evidence.record_answer(query, chunk(question).text, {f"d{question}": 1}, [], True)
        query = Query(chunk(question).text, client="ann")
    verdict = asyncio.run(limit.on_retrieve(query, found([300]))).verdict
    append(store, query, verdict)
    store.flush()
    assert verdict.flagged
    assert [event.body["flagged"] for event in store.scan("verdict")] == [True]


def test_repetition_of_the_clients_own_question_is_not_evidence():
    limit = CrawlLimit(quote_words=1000)
    for _ in range(10):
        ask(limit, [3], k=1, text=f"what about this: {chunk(3).text}")
    assert level(limit) is CLEAR


def posts(shared, seed=0, count=5, own=25):
    """Short posts with a common beginning and different continuations."""
    rng = np.random.default_rng(seed)
    opening = " ".join(f"s{seed}x{i}" for i in range(shared))
    rest = [" ".join(f"w{i}" for i in rng.integers(0, 10**6, own)) for _ in range(count)]
    return [Document(f"p{seed}-{number}", f"{opening} {text}") for number, text in enumerate(rest)]


class FixedAnswer(Generator):
    """Always generates the same answer."""

    def __init__(self, text):
        self.text = text

    async def stream(self, prompt):
        yield self.text


def answer_from(limit, documents, text, question="what then", client="ann"):
    """Returns the answer to a client whose context is ``documents``, from a generator that always writes ``text``."""
    query = Query(question, client)
    hits = tuple(Hit(d, 0.5) for d in documents)

    async def go():
        await limit.on_retrieve(query, Retrieval(hits, BACKGROUND, exhausted=True))
        return await join_stream(
            limit.on_generate(FixedAnswer(text)).stream(Prompt(question, tuple(documents[:5]), "", query.id))
        )

    return asyncio.run(go())


def test_text_shared_by_several_chunks_counts_for_one_chunk():
    limit = CrawlLimit()
    for number in range(20):
        documents = posts(shared=20, seed=number)
        text = " ".join(documents[0].text.split()[:20])
        assert answer_from(limit, documents, text, question=f"what of {number}") == text
    assert level(limit) is CLEAR
    assert len(limit.evidence.exposed_chunks(Query("", "ann"))) == 20


def test_each_chunk_that_is_quoted_beyond_the_shared_text_counts():
    limit = CrawlLimit()
    for number in range(4):
        documents = posts(shared=10, seed=number)
        text = " ".join(d.text for d in documents)
        assert len(answer_from(limit, documents, text)) < len(text)
    assert level(limit) is ALARMED


def test_copies_of_forms_with_a_common_template_count():
    """A filled-in form is disclosed by a whole copy, even if another answer contains three quarters of its words."""
    limit = CrawlLimit()
    for number in range(4):
        documents = posts(shared=46, seed=number, count=10, own=14)
        text = " ".join(d.text for d in documents[:5])
        assert len(answer_from(limit, documents, text)) < 0.8 * len(text)
    assert level(limit) is ALARMED


def test_template_words_in_several_answers_expose_no_chunk():
    """They are in the baseline, even if an earlier answer disclosed them."""
    limit = CrawlLimit()
    documents = posts(shared=30, count=10, own=15)
    words = documents[0].text.split()
    for text in (" ".join(words[:24]), " ".join(words[:30])):
        for number in range(5):  # the shared words are attributed to another chunk each time
            assert answer_from(limit, documents[number:] + documents[:number], text, question="how") == text
    assert len(limit.evidence.exposed_chunks(Query("", "ann"))) == 0


def test_template_words_do_not_mask_other_words_of_a_chunk():
    """The baseline of a chunk is its overlap with texts that were not shown."""
    limit = CrawlLimit()
    template, own = ([f"{letter}q{i}z" for i in range(size)] for letter, size in (("u", 30), ("c", 40)))
    forms = posts(shared=0, count=9, own=20)
    documents = [Document("c", " ".join(own)), *(Document(d.id, f"{' '.join(template)} {d.text}") for d in forms)]
    for words in (own[:12], template + own[:22], template + own[:31]):
        answer_from(limit, documents, " ".join(words), question="how")
    assert len(limit.evidence.exposed_chunks(Query("", "ann"))) == 1


def observe(limit, numbers, dump=True):
    """Asks in observe mode. Returns the verdict, the answer, and the answer of the generator without a guard."""
    query, bare = Query("what then", "ann"), RepeatsContext(10**6 if dump else 0)

    async def go():
        limit.sync()
        outcome = await limit.on_retrieve(query, found(numbers))
        prompt = Prompt(query.text, tuple(chunk(n) for n in numbers[:5]), "", query.id)
        whole = await join_stream(bare.stream(prompt))
        return outcome.verdict, await join_stream(limit.on_observe(bare).stream(prompt)), whole

    return asyncio.run(go())


def test_observe_mode_measures_answers_without_changing_them(store):
    limit, cut = CrawlLimit(quote_words=50, store=store), []
    for question in range(6):
        verdict, answer, bare = observe(limit, range(5 * question, 5 * question + 5))
        assert answer == bare
        store.flush()
        cut.append(len([e for e in store.scan("crawl") if e.body.get(crawl_evidence.SHORTENED)]))
    assert cut == [1, 2, 3, 4, 5, 6]
    assert verdict.flagged and level(limit) is ALARMED


def test_observe_mode_counts_all_words_of_an_answer(caplog):
    observed, enforced = (CrawlLimit(quote_words=10**6, whole=10) for _ in range(2))
    observe(observed, range(3))
    ask(enforced, range(3))
    counts = [limit.evidence.disclosed_words(Query("", "ann")) for limit in (observed, enforced)]
    assert counts[0] == counts[1] == 3 * 60
    assert not observed._in_flight and not caplog.records


def crawl(limit, questions, client="ann"):
    """Asks about other chunks each time. Returns the last verdicts on the answer and on the client."""
    for question in range(questions):
        with collect_verdicts() as about_answer:
            outcome, _ = ask(limit, range(5 * question, 5 * question + 5), client)
    return [(v.evidence["cut"], v.enforced, v.flagged) for v in about_answer], outcome.verdict


@pytest.mark.parametrize(
    ("options", "questions", "cut"),
    [
        ({"quote_words": 10}, 1, "quote_words"),
        ({"whole": 1}, 1, "whole"),
        ({"questions": 1, "whole": 100}, 1, "questions"),
        ({"budget": 40}, 1, "budget"),
        ({"budget": 1000, "tenant_budget": 40}, 1, "tenant_budget"),
        ({"budget": 40, "tenant_budget": 40}, 1, "budget"),
        ({"whole": 1}, 2, "exposure"),  # suspected
        ({"exposure": 1.0, "quote_words": 100, "short_quote_words": 9}, 3, "short_quote_words"),
    ],
)
def test_verdict_names_the_limit_that_cut_an_answer(options, questions, cut):
    found, _ = crawl(CrawlLimit(**options), questions)
    assert found == [(cut, True, False)]


def test_verdict_reason_names_the_tenant_budget_after_a_cut():
    with collect_verdicts() as found:
        ask(CrawlLimit(tenant_budget=40), range(5))
    assert found[-1].evidence == {"cut": "tenant_budget", "most": 40}
    assert "all clients of the tenant together" in reason("crawl_limit", found[-1].evidence)


def test_observe_mode_verdict_names_the_limit_that_would_cut_an_answer():
    limit = CrawlLimit(quote_words=50)
    with collect_verdicts() as found:
        observe(limit, range(5))
        observe(limit, range(5), dump=False)
    assert [(v.evidence, v.enforced) for v in found] == [({"cut": "quote_words", "most": 50}, False)]


def test_verdict_threshold_is_the_evidence_that_alarms_the_client():
    limit = CrawlLimit(quote_words=10)
    before = [crawl(limit, 1)[1]]
    while not before[-1].flagged:
        before.append(ask(limit, range(5 * len(before), 5 * len(before) + 5))[0].verdict)
    assert [v.flagged for v in before] == [v.score > v.threshold for v in before]
    assert before[-1].threshold == round(len(crawl_evidence.TESTS) / limit.alarm) == 100_000
    assert before[-1].score == max(before[-1].evidence[name] for name in crawl_evidence.TESTS)
    crawl(limit, 2, client="eve")
    make_suspected(limit)
    assert ask(limit, range(5), client="bob")[0].verdict.threshold == crawl_evidence.SUSPICION
    eve = ask(limit, range(5), client="eve", dump=False)[
        0
    ].verdict  # events before the tenant was suspected do not alarm the client
    assert crawl_evidence.SUSPICION < eve.score < eve.threshold and not eve.flagged


def test_ordinary_answers_are_not_counted_as_cut_in_observe_mode(store):
    limit = CrawlLimit(store=store)
    for question in range(6):
        observe(limit, range(5 * question, 5 * question + 5), dump=False)
    store.flush()
    assert not any(crawl_evidence.SHORTENED in e.body for e in store.scan("crawl"))
    assert level(limit) is CLEAR


def test_a_failing_measurement_does_not_change_an_answer(monkeypatch, caplog):
    limit = CrawlLimit()
    monkeypatch.setattr(limit.evidence, "record_answer", None)
    _, answer, bare = observe(limit, range(5))
    assert answer == bare and "could not measure" in caplog.text


def test_several_crawlers_set_all_clients_of_the_tenant_to_suspected():
    limit = CrawlLimit(quote_words=50, colluders=2)
    for client in ("ann", "bob"):
        assert level(limit, "eve") is CLEAR
        for question in range(6):
            ask(limit, range(5 * question, 5 * question + 5), client=client)
    assert level(limit, "eve") is SUSPECTED
    assert limit.evidence.level(Query("", "eve", "elsewhere")) is CLEAR


def test_false_alarm_rate_of_benign_clients_is_bounded():
    """Sessions of 50 questions, with each event at the highest assumed rate."""
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(2000):
        for test in crawl_evidence.TESTS.values():
            cusums, top = test.start(), 0.0
            for happened in rng.random(50) < test.harmless:
                cusums = test.step(cusums, happened)
                top = max(top, test.evidence(cusums))
            alarms += top >= len(crawl_evidence.TESTS) / CrawlLimit().alarm
    assert alarms <= 2


def test_evidence_is_an_e_value_and_the_mean_of_one_cusum_for_each_rate():
    """Against the definition: a CUSUM is the largest likelihood ratio of the last observations, at least 1."""
    rng = np.random.default_rng(1)
    for test in (*crawl_evidence.TESTS.values(), *crawl_evidence.TENANT_TESTS.values()):
        assert sum(test.crawlers.values()) == pytest.approx(1)
        before = [1000.0] * len(test.crawlers)  # far from 1, the lower limit of a CUSUM
        happened, not_happened = (np.array(test.step(before, x)) for x in (True, False))
        mean = test.harmless * happened + (1 - test.harmless) * not_happened  # over benign clients
        assert mean == pytest.approx(before)
        events, cusums = rng.random(30) < 0.15, test.start()
        for happened in events:
            cusums = test.step(cusums, bool(happened))
        expected = 0.0
        for rate, weight in test.crawlers.items():
            ratios = np.where(events, rate / test.harmless, (1 - rate) / (1 - test.harmless))
            expected += weight * max(1.0, *np.cumprod(ratios[::-1]))
        assert test.evidence(cusums) == pytest.approx(expected)


@pytest.mark.parametrize("between", [2, 5, 10])
def test_benign_questions_between_copied_answers_do_not_reduce_the_evidence(between):
    limit = CrawlLimit(quote_words=50, questions=1000, budget=10**6)
    for number in range(14):
        ask(limit, range(5 * number, 5 * number + 5))
        for _ in range(between):
            ask(limit, range(5 * number, 5 * number + 5), dump=False)
        if level(limit) is ALARMED:
            break
    assert level(limit) is ALARMED


def test_evidence_survives_a_restart_and_is_shared_among_processes(store):
    first, other = CrawlLimit(quote_words=50, store=store), CrawlLimit(quote_words=50, store=store)
    for question in range(6):
        ask(first, range(5 * question, 5 * question + 5))
    store.flush()
    for limit in (other, CrawlLimit(quote_words=50, store=store)):
        outcome, _ = ask(limit, [90, 1, 91])
        assert outcome.verdict.flagged
        assert ids(outcome) == ["d1"]
        disclosed = [of.evidence.disclosed(Query("", "ann"), text_name(chunk(0))) for of in (limit, first)]
        assert disclosed[0] == disclosed[1] > 0


def test_repeated_decision_on_a_request_counts_once():
    limit, text = CrawlLimit(quote_words=1000), ask(CrawlLimit(), [0], k=1)[1]
    ask(limit, [0], k=1)
    query = Query(" ".join(text.split()[-20:]), "ann", k=1)
    for _ in range(5):
        asyncio.run(limit.on_retrieve(query, found([1])))
    assert limit.evidence.summary(query)["echoes"] == pytest.approx(0.2 * 5 + 0.3 * 12.5 + 0.5 * 25)


def test_evidence_expires(monkeypatch):
    limit = CrawlLimit(quote_words=50, hours=1)
    for question in range(6):
        ask(limit, range(5 * question, 5 * question + 5))
    later = datetime.now(UTC).timestamp() + 3601
    monkeypatch.setattr(crawl_evidence.time, "time", lambda: later)
    outcome, _ = ask(limit, range(90, 95))
    assert ids(outcome) == [f"d{n}" for n in range(90, 95)]
    assert level(limit) is not ALARMED


def test_interrupted_answer_is_recorded():
    limit = CrawlLimit()
    query = Query("what", "ann", k=1)

    class Broken(Generator):
        async def stream(self, prompt):
            yield chunk(0).text[:200]
            raise RuntimeError

    async def go():
        await limit.on_retrieve(query, found([0]))
        with pytest.raises(RuntimeError):
            await join_stream(limit.on_generate(Broken()).stream(Prompt("what", (chunk(0),), "", query.id)))

    asyncio.run(go())
    assert limit.evidence.disclosed(query, text_name(chunk(0))) > 0


@pytest.mark.parametrize(
    "wrong", [{"questions": 0}, {"exposure": 0}, {"alarm": 1}, {"hours": 0}, {"hours": 1e9}, {"quote_words": -1}]
)
def test_invalid_options_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CrawlLimit(**wrong)


def test_one_answer_quotes_at_most_three_whole_chunks():
    outcome, text = ask(CrawlLimit(quote_words=1000), range(5))
    assert len(ids(outcome)) == 5
    words = text.split()
    quoted = [sum(w in words for w in chunk(n).text.split()) / 60 for n in range(5)]
    assert [share > 0.3 for share in quoted] == [True, True, True, False, False]
    assert sum(w in ask(CrawlLimit(quote_words=1000), range(2), k=2)[1].split() for w in chunk(1).text.split()) <= 18


def test_daily_limit_of_whole_chunks_equals_the_daily_limit_of_questions():
    limit, whole = CrawlLimit(questions=4), 0
    for question in range(8):
        _, text = ask(limit, [question], k=1)
        whole += len(text.split()) > 18
    assert whole == 4
    assert level(limit) is CLEAR  # no evidence


def test_colluding_clients_are_detected_and_share_one_exposure_limit():
    limit = CrawlLimit(quote_words=1000)
    for name in range(4):
        ask(limit, range(5 * name, 5 * name + 5), client=f"c{name}")
    assert level(limit, "bystander") is SUSPECTED
    assert level(limit, "c0") is SUSPECTED  # no client is alarmed on its own
    text = ask(limit, range(5), client="bystander")[1]
    assert len(text.split()) <= 0.3 * 60 + 3 * 60  # the part quoted to c0, and no further whole chunk
    new = ask(limit, range(50, 55), client="bystander")[1]
    assert len(new.split()) <= 0.3 * 60


def test_popular_question_with_a_long_answer_is_not_collusion():
    limit = CrawlLimit(quote_words=50)
    for client in range(60):
        ask(limit, range(5), client=f"c{client}")
    assert not limit.evidence.is_colluding("default")


def test_answers_to_benign_clients_do_not_mask_colluding_clients():
    limit = CrawlLimit(quote_words=50)
    for number in range(30):  # short answers about the chunks that are crawled afterwards
        chunks = [chunk(n) for n in range(5 * number, 5 * number + 5)]
        answer_from(limit, chunks, " ".join(chunks[0].text.split()[:12]), f"what of {number}", client=f"h{number}")
    for name in range(6):
        ask(limit, range(5 * name, 5 * name + 5), client=f"c{name}")
    assert limit.evidence.is_colluding("default")


def continue_an_answer(limit, number, client):
    """Asks with words of the previous answer and receives one whole chunk. No answer reaches a limit."""
    before = chunk(number - 1).text.split()
    query = Query(f"go on: {' '.join(before[-20:])}", client)
    limit.evidence.record_question(query)
    limit.evidence.record_answer(query, chunk(number).text, {f"d{number}": (1 << 60) - 1}, (), False)


@pytest.mark.parametrize("clients", [20, 100])
def test_clients_that_repeat_each_others_answers_are_colluding(clients):
    limit = CrawlLimit()
    for number in range(1, 8):
        continue_an_answer(limit, number, f"c{number % clients}")
    assert limit.evidence.is_colluding("default")
    assert level(limit, "bystander") is SUSPECTED


def test_client_that_repeats_only_its_own_answers_is_not_colluding():
    limit = CrawlLimit(alarm=1e-9)
    for number in range(1, 40):
        continue_an_answer(limit, number, "ann")
    assert not limit.evidence.is_colluding("default")


def test_clients_that_ask_the_same_question_from_one_answer_are_not_colluding():
    """Only the first client that asks a question from an answer to another client counts."""
    limit = CrawlLimit()
    popular_question = "how long does the northern bridge stay closed for repairs"
    limit.evidence.record_answer(Query("q", "ann"), f"Many ask {popular_question} this year", {}, (), False)
    for client in range(30):
        limit.evidence.record_question(Query(popular_question, f"c{client}"))
    assert not limit.evidence.is_colluding("default")


def record_answer_containing(limit, client, questions):
    """Records an answer to the client that contains the questions."""
    limit.evidence.record_answer(Query("q", client), f"Many ask {' and '.join(questions)}", {}, (), False)


QUESTIONS = [f"how long does bridge {i} of river {i} stay closed for repairs" for i in range(8)]


def test_client_whose_answers_are_repeated_counts_once():
    limit = CrawlLimit()
    record_answer_containing(limit, "mallory", QUESTIONS)
    for number, question in enumerate(QUESTIONS):
        limit.evidence.record_question(Query(question, f"c{number}"))
    assert level(limit, "bystander") is CLEAR
    colluders = CrawlLimit()
    for number, question in enumerate(QUESTIONS):
        record_answer_containing(colluders, f"told{number}", [question])
        colluders.evidence.record_question(Query(question, f"c{number}"))
    assert level(colluders, "bystander") is SUSPECTED


def test_question_that_repeats_a_counted_and_a_new_client_is_not_a_second_event():
    limit = CrawlLimit()
    record_answer_containing(limit, "mallory", QUESTIONS)
    for number, question in enumerate(QUESTIONS):
        record_answer_containing(limit, f"new{number}", [f"{number} stay closed for repairs this long year"])
        limit.evidence.record_question(Query(f"{question} this long year", f"c{number}"))
    assert not limit.evidence.is_colluding("default")


def test_words_from_answers_to_a_counted_client_do_not_mask_collusion():
    limit, counted = CrawlLimit(), [f"a{n} b{n} c{n} d{n} e{n} f{n}" for n in range(8)]
    record_answer_containing(limit, "mallory", [*counted, QUESTIONS[0]])
    limit.evidence.record_question(Query(QUESTIONS[0], "eve"))
    for number, question in enumerate(QUESTIONS[1:]):
        record_answer_containing(limit, f"told{number}", [question])
        limit.evidence.record_question(Query(f"{question} {counted[number]}", f"c{number}"))
    assert limit.evidence.is_colluding("default")


def test_client_whose_answers_are_repeated_counts_once_over_all_processes(store):
    limits = [CrawlLimit(store=store) for _ in QUESTIONS]
    record_answer_containing(limits[0], "mallory", QUESTIONS)
    store.flush()
    for limit in limits:
        limit.sync()
    for number, (limit, question) in enumerate(zip(limits, QUESTIONS, strict=True)):  # at the same time
        limit.evidence.record_question(Query(question, f"c{number}"))
    store.flush()
    for limit in (*limits, CrawlLimit(store=store)):
        limit.sync()
        assert not limit.evidence.is_colluding("default")


def make_suspected(limit):
    """Makes a tenant suspected, by answers of four clients at the limit."""
    for number in range(4):
        limit.evidence.record_answer(Query("q", f"c{number}"), "", {f"d{number}": 1}, (), True)
    assert limit.evidence.is_colluding("default")


def test_client_is_not_alarmed_for_events_before_its_tenant_was_suspected():
    limit, query = CrawlLimit(), Query("q", "ann")
    record_answer_containing(limit, "ann", QUESTIONS)
    limit.evidence.record_question(Query(QUESTIONS[0], "ann"))  # repeats an answer, before the tenant is suspected
    make_suspected(limit)
    limit.evidence.record_question(Query("a question of more than six words about nothing that was said", "ann"))
    limit.evidence.record_shown(query, ["d9"])
    limit.evidence.record_answer(query, "short", {}, (), False)
    assert level(limit, "ann") is SUSPECTED
    limit.evidence.record_question(Query(QUESTIONS[1], "ann"))
    assert level(limit, "ann") is ALARMED


@pytest.mark.parametrize("late", [False, True])
def test_phrases_in_answers_to_a_tenant_expire(monkeypatch, late):
    """Also if newer answers of another process were read before."""
    now = [10**9]
    monkeypatch.setattr(crawl_evidence.time, "time", lambda: now[0])
    limit = CrawlLimit(hours=1)
    if late:
        now[0] += 10
        record_answer_containing(limit, "newer", ["a question of no other client"])
        now[0] -= 10
    for number, question in enumerate(QUESTIONS):
        record_answer_containing(limit, f"told{number}", [question])
    now[0] += 3601
    for number, question in enumerate(QUESTIONS):
        limit.evidence.record_question(Query(question, f"c{number}"))
    assert not limit.evidence.is_colluding("default")
    now[0] += 10
    limit.evidence.record_question(Query("anything", "ann"))
    assert not limit.evidence._tenant("default").phrases


def test_phrases_in_events_of_earlier_versions_are_ignored(store):
    """Their checksums have another format. The words that the answer disclosed count."""
    phrases = crawl_evidence._pack(crawl_evidence._phrase_hashes(QUESTIONS[0], "default"))
    body = {"tenant": "default", "client": "ann", "told": phrases, "covered": {"d0": "7"}}
    store.append(Event("e", datetime.now(UTC), crawl_evidence.KIND, body))
    store.flush()
    limit, query = CrawlLimit(store=store), Query(QUESTIONS[0], "ann")
    limit.sync()
    limit.evidence.record_question(query)
    assert limit.evidence.summary(query)["echoes"] == 1
    assert limit.evidence.disclosed(query, "d0") == 7


def test_one_event_alarms_a_colluding_client_but_no_other_client():
    limit = CrawlLimit(quote_words=1000)
    for name in range(5):
        ask(limit, range(5 * name, 5 * name + 5), client=f"c{name}")
    assert limit.evidence.is_colluding("default")
    ask(limit, range(50, 55), client="late")
    assert (level(limit, "late"), level(limit, "bystander")) == (ALARMED, SUSPECTED)
    outcome, _ = ask(limit, range(60, 65), client="late")
    assert ids(outcome) == []


def test_words_disclosed_to_a_tenant_expire(monkeypatch):
    now = [10**9]
    monkeypatch.setattr(crawl_evidence.time, "time", lambda: now[0])
    evidence, query = CrawlLimit(hours=1).evidence, Query("q", "ann")
    evidence.record_answer(query, "", {"a": 0b111, "b": 0b1}, (), False)
    now[0] += 3000
    evidence.record_answer(query, "", {"b": 0b11}, (), False)
    assert (evidence.disclosed_to_tenant("default", "a"), evidence.tenant_words("default")) == (0b111, 5)
    now[0] += 3000
    assert (evidence.disclosed_to_tenant("default", "a"), evidence.disclosed_to_tenant("default", "b")) == (0, 0b11)
    evidence.record_answer(Query("q", "bob"), "", {"a": 0b1}, (), False)
    assert (evidence.disclosed_to_tenant("default", "a"), evidence.tenant_words("default")) == (0b1, 2)


def test_single_crawler_does_not_raise_the_level_of_other_clients():
    limit = CrawlLimit(quote_words=50)
    for question in range(30):
        ask(limit, range(5 * question, 5 * question + 5))
    assert level(limit) is ALARMED
    assert level(limit, "bystander") is CLEAR


def test_benign_tenants_are_rarely_suspected():
    rng, suspected = np.random.default_rng(3), 0
    for tenant in range(40):
        limit = CrawlLimit(alarm=1e-3)
        for number in range(100):
            query = Query("q", f"c{rng.integers(20)}", f"t{tenant}")
            limit.evidence.record_answer(query, "", {f"d{number}": 1}, (), bool(rng.random() < 0.01))
        suspected += limit.evidence.is_colluding(f"t{tenant}")
    assert suspected <= 4  # 4,000 questions, one in a thousand


def test_topic_limit_requires_a_reindexed_collection(tmp_path):
    limit = CrawlLimit(topics=1, folder=tmp_path)
    with pytest.raises(DataError, match="casemate reindex"):
        ask(limit, range(3))


def test_topics_per_client_are_limited(tmp_path, monkeypatch):
    keys, labels = unique_keys([chunk_key(chunk(n)) for n in range(20)], np.arange(20) // 5)
    centroids = np.eye(4, 8, dtype=np.float32)
    ReindexRegistry(tmp_path, "default").write(
        Reindexing("gate", "default", "e", centroids, np.full(4, 2.0, np.float32), keys, labels)
    )
    limit, read, current = CrawlLimit(topics=2, folder=tmp_path), [], ReindexRegistry.current
    monkeypatch.setattr(ReindexRegistry, "current", lambda self: read.append(self.tenant) or current(self))
    first, _ = ask(limit, [0, 1, 5, 6, 10, 11], k=5, dump=False)
    assert ids(first) == ["d0", "d1", "d5", "d6"]
    assert read == ["default"]  # once per question, not per hit
    second, _ = ask(limit, [10, 2, 16, 7, 30], k=5, dump=False)  # 30 has no topic
    assert ids(second) == ["d2", "d7", "d30"]
    assert ids(ask(limit, [10, 2], client="bob", dump=False)[0]) == ["d10", "d2"]
