import asyncio
import threading
import time
from dataclasses import dataclass, field

import pytest

from casemate.backends.extractive import Extractive
from casemate.backends.sqlite import SqliteIndex
from casemate.errors import BackendError, ConfigError
from casemate.guard import Guard
from casemate.monitor.canaries import run as module
from casemate.monitor.canaries.canary import Canary
from casemate.monitor.canaries.results import Status
from casemate.monitor.canaries.run import run
from casemate.protocols import Target
from casemate.rag import Rag
from casemate.remote import told
from casemate.types import Document
from tests.fakes import BagOfWords
from tests.unit.test_monitor_check import Judge


def canaries(count, **fields):
    return [
        Canary(**({"id": f"c{i}", "query": f"question {i}", "expected_answer": "yes"} | fields)) for i in range(count)
    ]


@dataclass
class Scripted(Target):
    """Answers by a function of the question, and remembers who asked what."""

    answer: object = "yes"
    tells: frozenset = frozenset()
    queries: list = field(default_factory=list)
    now: int = 0
    most: int = 0

    async def ask(self, query):
        self.queries.append(query)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0.002)
            answer = self.answer(query) if callable(self.answer) else self.answer
            if asyncio.iscoroutine(answer):
                answer = await answer
            if isinstance(answer, BaseException):
                raise answer
            return told(answer) if isinstance(answer, str) else answer
        finally:
            self.now -= 1


def done(*args, **options):
    return asyncio.run(run(*args, **({"run_id": "r1"} | options)))


class TestAsking:
    def test_results_are_in_the_order_of_the_set_and_asked_in_another(self):
        target, found = Scripted(), canaries(20)
        result = done(found, target)
        assert [r.canary for r in result.results] == [c.id for c in found]
        asked = [q.text for q in target.queries]
        assert sorted(asked) == sorted(c.query for c in found)
        assert asked != [c.query for c in found]

    def test_the_order_follows_from_the_run(self):
        orders = []
        for name in ("r1", "r1", "r2"):
            target = Scripted()
            done(canaries(20), target, run_id=name)
            orders.append([q.text for q in target.queries])
        assert orders[0] == orders[1] != orders[2]

    @pytest.mark.parametrize("concurrency", [1, 3, 50])
    def test_no_more_at_once_than_allowed(self, concurrency):
        target = Scripted()
        done(canaries(12), target, concurrency=concurrency)
        assert target.most == min(concurrency, 12)

    def test_queries_are_those_of_a_user(self):
        target = Scripted()
        done(canaries(2, baseline_query="base"), target, k=7, tenant="north", embedder=BagOfWords())
        assert {(q.client, q.tenant, q.k) for q in target.queries} == {("canary", "north", 7)}
        assert sorted(q.text for q in target.queries) == ["base", "base", "question 0", "question 1"]

    def test_the_client_s_name_may_hold_canary_and_run(self):
        target = Scripted()
        done(canaries(2), target, client="ann-{canary}-{run}")
        assert {q.client for q in target.queries} == {"ann-c0-r1", "ann-c1-r1"}

    def test_those_that_are_done_are_left_out(self):
        target, heard = Scripted(), []
        result = done(canaries(4), target, done=["c1", "c3"], on_result=heard.append)
        assert [r.canary for r in result.results] == ["c0", "c2"]
        assert {q.text for q in target.queries} == {"question 0", "question 2"}
        assert sorted(r.canary for r in heard) == ["c0", "c2"]

    def test_no_canaries_no_results(self):
        assert done([], Scripted()).status is Status.ERROR

    def test_each_result_is_handed_on_as_soon_as_it_is_there(self):
        heard, counted = [], []
        target = Scripted(lambda q: (heard_before.append(len(heard)), "yes")[1])
        heard_before = []
        done(canaries(5), target, concurrency=1, on_result=heard.append, progress=counted.append)
        assert heard_before == [0, 1, 2, 3, 4]
        assert counted == [1] * 5


class TestResults:
    def test_pass_and_fail(self):
        target = Scripted(lambda q: "no" if q.text == "question 1" else "yes, I don't know")
        result = done(canaries(3), target)
        assert [r.status for r in result.results] == [Status.PASS, Status.FAIL, Status.PASS]
        assert result.status is Status.FAIL
        first = result.results[0]
        assert (first.run, first.text, first.words, first.error) == ("r1", "yes, I don't know", 4, "")
        assert first.refused
        assert first.seconds > 0
        assert first.at.tzinfo is not None
        assert result.results[1].deviations[0].kind == "answer_mismatch"

    def test_what_is_not_told_is_not_recorded(self):
        answer = told("yes", sources=("a.md", "b.md"))
        for tells, sources in ((frozenset(), ()), (frozenset({"sources"}), ("a.md", "b.md"))):
            (found,) = done(canaries(1), Scripted(answer, tells)).results
            assert (found.sources, found.documents, found.scores) == (sources, (), ())

    def test_new_documents_are_told_against_the_baseline(self):
        answer = told("yes", ids=("d1", "d2"))
        found = canaries(2, new_documents="report")
        target = Scripted(answer, frozenset({"ids"}))
        result = done(found, target, baselines={"c0": ["d2"]})
        assert [[d.kind for d in r.deviations] for r in result.results] == [["new_document"], []]


class TestFaults:
    async def hang(self):
        await asyncio.sleep(60)

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            (ValueError("secret text"), "ValueError was raised"),
            (
                BackendError("host: HTTP 500:\n the server failed", backend="x", retryable=True),
                "host: HTTP 500: the server",
            ),
            (asyncio.CancelledError(), "the target gave up"),
            (TimeoutError(), "TimeoutError was raised"),
            (None, "the target returned NoneType, which is no answer"),
            (told(7), "the target returned Answer, which is no answer"),
            ("y" * 1_000_001, "the answer has 1,000,001 characters; at most 1,000,000 are read"),
        ],
    )
    def test_of_a_target_are_errors_and_no_deviations(self, answer, reason):
        result = done(canaries(3), Scripted(lambda q: answer if q.text == "question 1" else "yes"))
        assert [r.status for r in result.results] == [Status.PASS, Status.ERROR, Status.PASS]
        error = result.results[1].error
        assert reason in error
        assert "\n" not in error
        assert "secret" not in error
        assert result.results[1].deviations == ()
        assert result.status is Status.ERROR

    def test_a_target_that_hangs_costs_its_time_only(self):
        target = Scripted(lambda q: self.hang() if q.text == "question 1" else "yes")
        begun = time.perf_counter()
        result = done(canaries(3), target, timeout_s=0.2)
        assert time.perf_counter() - begun < 30
        assert result.results[1].error == "no answer within 0.2 s"
        assert 0.1 < result.results[1].seconds < 30
        assert result.results[2].status is Status.PASS

    def test_a_baseline_question_that_fails_leaves_what_is_known(self):
        target = Scripted(lambda q: ValueError() if q.text == "base" else "yes")
        (found,) = done(canaries(1, baseline_query="base"), target, embedder=BagOfWords()).results
        assert (found.status, found.text, found.deviations) == (Status.ERROR, "yes", ())

    def test_a_judge_that_fails_or_says_nothing_is_an_error(self):
        sentence = canaries(1, expected_behavior="It greets.")
        for said, status in (("Yes", Status.PASS), ("No", Status.FAIL), ("Hm", Status.ERROR), ([5], Status.ERROR)):
            (found,) = done(sentence, Scripted(), judge=Judge(said)).results
            assert found.status is status

    def test_an_embedder_that_fails_is_an_error(self):
        class Broken(BagOfWords):
            def embed(self, texts, progress=None):
                raise BackendError("no model", backend="x", retryable=False)

        (found,) = done(canaries(1, baseline_query="b"), Scripted(), embedder=Broken()).results
        assert found.error == "the answer could not be judged: no model"

    def test_what_a_listener_raises_ends_the_run(self):
        def full(result):
            raise OSError("disk full")

        target = Scripted()
        with pytest.raises(OSError, match="disk full"):
            done(canaries(50), target, on_result=full, concurrency=2)
        assert len(target.queries) < 10

    def test_cancelling_ends_it_at_once(self):
        target, heard = Scripted(lambda q: "yes" if q.text == "question 0" else self.hang()), []

        async def interrupted():
            task = asyncio.create_task(run(canaries(5), target, run_id="r", on_result=heard.append))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        begun = time.perf_counter()
        asyncio.run(interrupted())
        assert time.perf_counter() - begun < 30
        assert [r.canary for r in heard] == ["c0"]
        assert target.now == 0


class TestBefore:
    @pytest.mark.parametrize(
        ("expected", "message"),
        [
            ({"expected_sources": ["a"]}, "canary 'c0': expected_sources needs a target that tells its sources"),
            ({"expected_documents": ["a"]}, "canary 'c0': expected_documents needs a target that tells its ids"),
            ({"min_unique_sources": 6}, "canary 'c0': min_unique_sources needs 6 documents"),
            ({"baseline_query": "b"}, "canary 'c0': baseline_query needs an embedder"),
            ({"expected_behavior": "It greets."}, "canary 'c0': expected_behavior is 'It greets.', which only a judge"),
        ],
    )
    def test_what_cannot_be_judged_is_refused_before_anything_is_asked(self, expected, message):
        target = Scripted()
        with pytest.raises(ConfigError, match="canary 'c0'") as caught:
            done(canaries(1, **expected), target)
        assert str(caught.value).startswith(message)
        assert not target.queries

    def test_all_are_named(self):
        with pytest.raises(ConfigError) as caught:
            done(canaries(3, expected_sources=["a"]), Scripted())
        assert [line.split("'")[1] for line in str(caught.value).splitlines()] == ["c0", "c1", "c2"]

    def test_ids_must_differ(self):
        with pytest.raises(ConfigError, match="several canaries are called 'c0'"):
            done([*canaries(1), *canaries(1)], Scripted())

    @pytest.mark.parametrize("options", [{"concurrency": 0}, {"timeout_s": 0}, {"timeout_s": float("nan")}, {"k": 0}])
    def test_numbers_out_of_range(self, options):
        with pytest.raises(ConfigError, match="must be above 0"):
            done(canaries(1), Scripted(), **options)


class Slow(BagOfWords):
    """Waits in the thread, as a hanging index would."""

    waiting = threading.Event()

    def embed(self, texts, progress=None):
        if texts == ["hang"]:
            self.waiting.wait(5)
        return super().embed(texts, progress)


class TestTheOwnSystem:
    @pytest.fixture
    def rag(self, tmp_path):
        embedder = Slow()
        index = SqliteIndex(tmp_path / "index.db")
        rag = Rag(embedder, index, Extractive())
        documents = [
            Document("d1", "The north bridge was built in 1931.", source="bridge.md"),
            Document("d2", "Herons nest late in the reeds.", source="herons.md"),
        ]
        index.add(documents, embedder.embed([d.content for d in documents]))
        yield rag
        index.close()

    @pytest.mark.parametrize("wrap", [lambda rag: rag, lambda rag: Guard(rag, [])])
    def test_is_asked_as_users_ask_it(self, rag, wrap):
        found = [
            Canary(
                id="a",
                query="When was the north bridge built?",
                expected_answer="1931",
                expected_sources=["bridge.md"],
                expected_documents=["d1"],
                max_rank=1,
                min_cosine=0.3,
                expected_refusal=False,
            ),
            Canary(id="b", query="Who is the mayor?", expected_refusal=True),
        ]
        result = done(found, wrap(rag), k=2, embedder=rag.embedder)
        assert [(r.status, r.deviations) for r in result.results] == [(Status.PASS, ())] * 2
        assert result.results[0].documents[0] == "d1"
        assert result.results[0].sources[0] == "bridge.md"
        assert result.results[0].scores[0] > result.results[0].scores[1]

    def test_a_thread_that_hangs_does_not_stop_the_others(self, rag):
        found = [Canary(id=q, query=q, expected_refusal=True) for q in ("hang", "Who is mayor?")]
        threading.Timer(0.6, rag.embedder.waiting.set).start()  # the loop waits for its threads when it closes
        result = done(found, rag, k=2, timeout_s=0.3)
        assert [r.status for r in result.results] == [Status.ERROR, Status.PASS]


def test_reasons_are_short():
    error = BackendError("x" * 5000, backend="x", retryable=False)
    assert len(module._reason(error)) == module.REASON
