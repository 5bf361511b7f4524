import asyncio
import threading
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from casemate.errors import BackendError, BudgetExhausted, QueryError
from casemate.protocols import Generator
from casemate.rag.pipeline import join_stream
from casemate.redteam.lab.black_box import Budget, TargetSession, retry_with
from casemate.redteam.lab.caching import CachedGenerator
from casemate.redteam.lab.store import CampaignStore, Exchange, describe_verdict
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.types import Action, Answer, Document, Hit, Prompt, Query, Reply, Retrieval, SimilarityStats, Verdict
from tests.fakes import BagOfWords

HITS = (Hit(Document("a#1", "text", source="a"), 0.9), Hit(Document("b", "text"), 0.5))
ANSWER = Answer("It is so.", Retrieval(HITS, SimilarityStats(9, 0.0, 0.1)))
HIDDEN = Verdict("mirabel", True, Action.HIDE, 1.0, 0.5, ("c#2", "c#1"))


@dataclass
class Echo:
    """Records the queries and returns its answers in turn."""

    answers: list = field(default_factory=lambda: [ANSWER])
    queries: list = field(default_factory=list)

    async def ask(self, query):
        self.queries.append(query)
        answer = self.answers[min(len(self.queries), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


def session(target, **options):
    return TargetSession(target, lambda number: f"client-{number}", options.pop("budget", Budget()), **options)


def ask(made, *questions):
    with made as box:
        return [asyncio.run(box.ask(q)) for q in questions]


def test_attack_receives_replies_only():
    made = session(Echo([replace(ANSWER, verdicts=(HIDDEN,))]))
    with made as box:
        reply = asyncio.run(box.ask("why?"))
    assert reply == Reply("It is so.")
    assert [n for n in dir(box) if not n.startswith("_")] == ["ask"]


def test_queries_contain_client_k_and_tenant():
    target = Echo()
    ask(session(target, k=9, tenant="acme"), "one", "two")
    asked = [("one", "client-0", "acme", 9), ("two", "client-1", "acme", 9)]
    assert target.queries == [Query(*one, groups=frozenset()) for one in asked]  # an attacker has no group


def test_exchanges_record_withheld_documents_and_context():
    made = session(Echo([replace(ANSWER, verdicts=(HIDDEN,))]))
    ask(made, "why?")
    assert made.exchanges == (
        Exchange(
            "why?",
            "It is so.",
            ("a#1", "b"),
            ("c#1", "c#2"),
            True,
            alarms=("mirabel",),
            reasons=(describe_verdict(HIDDEN),),
        ),
    )


@pytest.mark.parametrize(
    ("verdict", "hidden", "withheld", "failed"),
    [
        (HIDDEN, True, True, False),
        (replace(HIDDEN, enforced=False), False, False, False),  # observe mode changes nothing
        (Verdict("m", False, Action.NONE, 0.1, 0.5), False, False, False),
        (Verdict("m", False, Action.WITHHOLD, 0.0, None, evidence={"error": "E"}), False, True, True),
        (Verdict("m", False, Action.NONE, 0.0, None, evidence={"error": "E"}), False, False, True),
    ],
)
def test_exchange_records_the_effect_of_a_verdict(verdict, hidden, withheld, failed):
    exchange = Exchange.from_answer("why?", replace(ANSWER, verdicts=(verdict,)))
    assert (bool(exchange.hidden), exchange.withheld, exchange.failed) == (hidden, withheld, failed)


def test_exchanges_are_ordered_by_question_and_not_by_answer_time():
    class SecondAnswerFirst(Echo):
        async def ask(self, query):
            await asyncio.sleep(0 if query.text == "b" else 0.01)
            return await super().ask(query)

    async def both(box):
        await asyncio.gather(box.ask("a"), box.ask("b"))

    made = session(SecondAnswerFirst())
    with made as box:
        asyncio.run(both(box))
    assert [e.question for e in made.exchanges] == ["a", "b"]


def test_rejects_a_question_beyond_the_budget_of_the_campaign():
    budget = Budget(total=3)
    ask(session(Echo(), budget=budget), "a", "b")
    made = session(Echo(), budget=budget)
    with pytest.raises(BudgetExhausted, match="all 3 questions of the campaign"):
        ask(made, "c", "d")
    assert (budget.spent, budget.exhausted, made.truncated) == (3, True, True)
    assert len(made.exchanges) == 1


def test_rejected_question_has_an_empty_reply():
    made = session(Echo([QueryError("too long"), ANSWER]))
    assert ask(made, "x" * 9, "b") == [Reply(""), Reply("It is so.")]
    assert [e.refused for e in made.exchanges] == [True, False]


def failing(count, retryable=True):
    return [BackendError("no route", backend="fake", retryable=retryable)] * count


def test_retries_an_unavailable_target():
    target, budget = Echo([*failing(2), ANSWER]), Budget()
    assert ask(session(target, waits=(0, 0), budget=budget), "a") == [Reply("It is so.")]
    assert (len(target.queries), budget.spent) == (3, 1)


@pytest.mark.parametrize(("retryable", "tries"), [(True, 3), (False, 1)])
def test_raises_if_the_target_is_unavailable_after_the_retries(retryable, tries):
    target = Echo(failing(9, retryable))
    with pytest.raises(BackendError) as caught:
        ask(session(target, waits=(0, 0)), "a")
    assert len(target.queries) == tries
    assert not caught.value.retryable


def test_retries_backend_errors_only():
    calls = []

    async def broken():
        calls.append(1)
        raise ValueError

    with pytest.raises(ValueError):
        asyncio.run(retry_with((0, 0), broken))
    assert len(calls) == 1


@dataclass
class Sampler(Generator):
    """Returns a different reply each time."""

    said: int = 0
    fails: int = 0

    async def stream(self, prompt):
        if self.fails:
            self.fails -= 1
            raise BackendError("broke off", backend="fake", retryable=True)
        self.said += 1
        yield "take "
        yield str(self.said)


DOCUMENT = Document("a#1", "text", "title", "a", metadata={"year": 1999})
PROMPT = Prompt("why?", (DOCUMENT,), "be brief")


@pytest.fixture
def store(tmp_path):
    with CampaignStore(tmp_path / "campaigns.db") as opened:
        yield opened


def say(generator, *prompts):
    return [asyncio.run(join_stream(generator.stream(p))) for p in prompts]


def test_same_prompt_in_another_session_is_served_from_the_cache(store):
    inner = Sampler()
    generator = CachedGenerator(inner, store, "sampler")
    with session(Echo()):
        first = say(generator, PROMPT, PROMPT)
    with session(Echo()):
        second = say(generator, PROMPT, PROMPT, PROMPT)
    assert first == ["take 1", "take 2"]  # a repetition within a session is a new sample
    assert second == ["take 1", "take 2", "take 3"]
    assert (inner.said, generator.calls, generator.hits) == (3, 3, 2)


def test_prompt_outside_of_a_session_has_one_cached_reply(store):
    assert say(CachedGenerator(Sampler(), store, "sampler"), PROMPT, PROMPT) == ["take 1", "take 1"]


def test_concurrent_sessions_count_repeated_prompts_separately(store):
    generator = CachedGenerator(Sampler(), store, "sampler")

    async def one():
        with session(Echo()):
            first = await join_stream(generator.stream(PROMPT))
            await asyncio.sleep(0)
            return [first, await join_stream(generator.stream(PROMPT))]

    async def both():
        return await asyncio.gather(one(), one())

    assert asyncio.run(both()) == [["take 1", "take 2"]] * 2


@pytest.mark.parametrize(
    "other",
    [
        replace(PROMPT, question="what?"),
        replace(PROMPT, instructions="be long"),
        replace(PROMPT, context=()),
        replace(PROMPT, context=(DOCUMENT, DOCUMENT)),
        replace(PROMPT, context=(replace(DOCUMENT, text="other"),)),
        replace(PROMPT, context=(replace(DOCUMENT, title="other"),)),
        replace(PROMPT, context=(replace(DOCUMENT, source="other"),)),
        replace(PROMPT, context=(replace(DOCUMENT, metadata={"year": 2000}),)),
    ],
)
def test_different_prompt_is_not_served_from_the_cache(store, other):
    assert say(CachedGenerator(Sampler(), store, "sampler"), PROMPT, other) == ["take 1", "take 2"]


def test_cache_key_depends_on_the_order_of_the_context(store):
    two = replace(PROMPT, context=(DOCUMENT, replace(DOCUMENT, id="b")))
    turned = replace(two, context=two.context[::-1])
    assert say(CachedGenerator(Sampler(), store, "sampler"), two, turned) == ["take 1", "take 2"]


def test_cache_is_separate_for_each_generator_and_shared_by_processes(tmp_path):
    with CampaignStore(tmp_path / "l.db") as one, CampaignStore(tmp_path / "l.db") as two:
        assert say(CachedGenerator(Sampler(), one, "a"), PROMPT) == ["take 1"]
        assert say(CachedGenerator(Sampler(said=7), two, "a"), PROMPT) == ["take 1"]
        assert say(CachedGenerator(Sampler(said=7), two, "b"), PROMPT) == ["take 8"]


def test_incomplete_reply_is_not_cached(store):
    generator = CachedGenerator(Sampler(fails=1), store, "sampler")
    with session(Echo()):
        with pytest.raises(BackendError):
            say(generator, PROMPT)
        assert say(generator, PROMPT) == ["take 1"]
    assert say(generator, PROMPT) == ["take 1"]


def test_embeds_each_text_once():
    inner = BagOfWords()
    embedder = CachedEmbedder(inner)
    first, again = embedder.embed(["a b", "c", "a b"]), embedder.embed(["c", "a b"])
    assert inner.texts == ["a b", "c"]
    assert np.array_equal(first, BagOfWords().embed(["a b", "c", "a b"]))
    assert np.array_equal(again, first[[1, 0]])
    assert (embedder.calls, embedder.hits) == (2, 3)
    again[:] = 0  # the caller may modify its copy
    assert np.array_equal(embedder.embed(["c"]), first[[1]])


def test_cached_embedder_delegates_to_its_inner_embedder():
    inner, counts = BagOfWords(), []
    embedder = CachedEmbedder(inner)
    assert (embedder.fingerprint, embedder.dim, embedder.max_tokens) == ("bag-of-words", 64, 40)
    assert embedder.spans("a b") == inner.spans("a b")
    assert embedder.embed([], counts.append).shape == (0, 64)
    embedder.embed(["a", "b"], counts.append)
    assert counts == [0, 2]


def test_cached_vectors_are_returned_without_embedding():
    inner = BagOfWords()
    embedder = CachedEmbedder(inner)
    embedder.keep(["a b"], np.ones((1, 64), np.float32))
    assert np.array_equal(embedder.embed(["a b", "c"]), np.vstack([np.ones(64), BagOfWords().embed(["c"])[0]]))
    assert inner.texts == ["c"]


def test_evicts_the_least_recently_used_vector():
    inner = BagOfWords()
    embedder = CachedEmbedder(inner, megabytes=3 * 4 * 64 / 1e6)  # three vectors
    for text in ("a", "b", "c", "a", "d", "a", "b"):
        embedder.embed([text])
    assert inner.texts == ["a", "b", "c", "d", "b"]


def test_cached_embedder_is_thread_safe():
    embedder = CachedEmbedder(BagOfWords(), megabytes=4 * 4 * 64 / 1e6)
    wrong = []

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(200):
            text = f"w{rng.integers(9)}"
            if not np.array_equal(embedder.embed([text]), BagOfWords().embed([text])):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert embedder.calls + embedder.hits == 800
