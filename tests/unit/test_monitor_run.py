import asyncio
import threading
import time
from dataclasses import dataclass, field

import pytest

from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.backends.target_answers import partial_answer
from casemate.errors import BackendError, ConfigError
from casemate.guard.guard import Guard
from casemate.monitor.canaries import run as module
from casemate.monitor.canaries.canary import Canary
from casemate.monitor.canaries.results import CanaryStatus
from casemate.monitor.canaries.run import CanaryRunner
from casemate.protocols import Target
from casemate.rag.pipeline import Rag
from casemate.types import Document
from tests.fakes import BagOfWords
from tests.unit.test_monitor_check import Judge


def canaries(count, **fields):
    return [
        Canary(**({"id": f"c{i}", "query": f"question {i}", "expected_answer": "yes"} | fields)) for i in range(count)
    ]


@dataclass
class Scripted(Target):
    """Answers by a function of the question, and records the queries."""

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
            return partial_answer(answer) if isinstance(answer, str) else answer
        finally:
            self.now -= 1


def run_canaries(found, target, run_id="r1", on_result=lambda result: None, **options):
    return asyncio.run(CanaryRunner(found, target, **options).run(run_id, on_result))


class TestAsking:
    def test_results_are_in_the_order_of_the_set_and_questions_are_shuffled(self):
        target, found = Scripted(), canaries(20)
        result = run_canaries(found, target)
        assert [r.canary for r in result.results] == [c.id for c in found]
        asked = [q.text for q in target.queries]
        assert sorted(asked) == sorted(c.query for c in found)
        assert asked != [c.query for c in found]

    def test_order_depends_on_the_run_id(self):
        orders = []
        for name in ("r1", "r1", "r2"):
            target = Scripted()
            run_canaries(canaries(20), target, run_id=name)
            orders.append([q.text for q in target.queries])
        assert orders[0] == orders[1] != orders[2]

    @pytest.mark.parametrize("concurrency", [1, 3, 50])
    def test_concurrency_is_limited(self, concurrency):
        target = Scripted()
        run_canaries(canaries(12), target, concurrency=concurrency)
        assert target.most == min(concurrency, 12)

    def test_queries_contain_client_tenant_and_k(self):
        target = Scripted()
        run_canaries(
            canaries(2, baseline_query="base"), target, k=7, tenant="north", client="canary", embedder=BagOfWords()
        )
        assert {(q.client, q.tenant, q.k) for q in target.queries} == {("canary", "north", 7)}
        assert sorted(q.text for q in target.queries) == ["base", "base", "question 0", "question 1"]

    def test_client_name_may_contain_canary_and_run(self):
        target = Scripted()
        run_canaries(canaries(2), target, client="ann-{canary}-{run}")
        assert {q.client for q in target.queries} == {"ann-c0-r1", "ann-c1-r1"}

    def test_ask_queries_only_the_given_canaries(self):
        target, collected = Scripted(), []
        runner = CanaryRunner(canaries(4), target)
        result = asyncio.run(runner.ask("r1", {"c2": (), "c0": ()}, collected.append))
        assert [r.canary for r in result.results] == ["c0", "c2"]
        assert {q.text for q in target.queries} == {"question 0", "question 2"}
        assert sorted(r.canary for r in collected) == ["c0", "c2"]

    def test_run_without_canaries_is_an_error(self):
        assert run_canaries([], Scripted()).status is CanaryStatus.ERROR

    def test_reports_each_result_immediately(self):
        collected = []
        target = Scripted(lambda q: (results_before.append(len(collected)), "yes")[1])
        results_before = []
        run_canaries(canaries(5), target, concurrency=1, on_result=collected.append)
        assert results_before == [0, 1, 2, 3, 4]
        assert len(collected) == 5


class TestResults:
    def test_results_pass_or_fail(self):
        target = Scripted(lambda q: "no" if q.text == "question 1" else "yes, I don't know")
        result = run_canaries(canaries(3), target)
        assert [r.status for r in result.results] == [CanaryStatus.PASS, CanaryStatus.FAIL, CanaryStatus.PASS]
        assert result.status is CanaryStatus.FAIL
        first = result.results[0]
        assert (first.run, first.text, first.words, first.error) == ("r1", "yes, I don't know", 4, "")
        assert first.refused
        assert first.seconds > 0
        assert first.at.tzinfo is not None
        assert result.results[1].deviations[0].kind == "answer_mismatch"

    def test_does_not_record_unreported_details(self):
        answer = partial_answer("yes", sources=("a.md", "b.md"))
        for tells, sources in ((frozenset(), ()), (frozenset({"sources"}), ("a.md", "b.md"))):
            (found,) = run_canaries(canaries(1), Scripted(answer, tells)).results
            assert (found.sources, found.documents, found.scores) == (sources, (), ())

    def test_new_documents_are_those_outside_the_baseline(self):
        answer = partial_answer("yes", ids=("d1", "d2"))
        found = canaries(2, new_documents="report")
        target = Scripted(answer, frozenset({"ids"}))
        runner = CanaryRunner(found, target)
        result = asyncio.run(runner.ask("r1", {"c0": ["d2"], "c1": []}, lambda result: None))
        assert [[d.kind for d in r.deviations] for r in result.results] == [["new_document"], []]


class TestErrors:
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
            (asyncio.CancelledError(), "the target cancelled the request"),
            (TimeoutError(), "TimeoutError was raised"),
            (None, "the target returned NoneType; expected an Answer"),
            (partial_answer(7), "the target returned Answer; expected an Answer with a text"),
            ("y" * 1_000_001, "the answer has 1,000,001 characters; at most 1,000,000 are allowed"),
        ],
    )
    def test_errors_of_the_target_are_not_deviations(self, answer, reason):
        result = run_canaries(canaries(3), Scripted(lambda q: answer if q.text == "question 1" else "yes"))
        assert [r.status for r in result.results] == [CanaryStatus.PASS, CanaryStatus.ERROR, CanaryStatus.PASS]
        error = result.results[1].error
        assert reason in error
        assert "\n" not in error
        assert "secret" not in error
        assert result.results[1].deviations == ()
        assert result.status is CanaryStatus.ERROR

    def test_hanging_target_delays_the_run_by_its_timeout_only(self):
        target = Scripted(lambda q: self.hang() if q.text == "question 1" else "yes")
        begun = time.perf_counter()
        result = run_canaries(canaries(3), target, timeout_s=0.2)
        assert time.perf_counter() - begun < 30
        assert result.results[1].error == "no answer within 0.2 s"
        assert 0.1 < result.results[1].seconds < 30
        assert result.results[2].status is CanaryStatus.PASS

    def test_failed_baseline_query_keeps_the_answer(self):
        target = Scripted(lambda q: ValueError() if q.text == "base" else "yes")
        (found,) = run_canaries(canaries(1, baseline_query="base"), target, embedder=BagOfWords()).results
        assert (found.status, found.text, found.deviations) == (CanaryStatus.ERROR, "yes", ())

    def test_judge_without_a_verdict_is_an_error(self):
        sentence = canaries(1, expected_behavior="It greets.")
        for reply, status in (
            ("Yes", CanaryStatus.PASS),
            ("No", CanaryStatus.FAIL),
            ("Hm", CanaryStatus.ERROR),
            ([5], CanaryStatus.ERROR),
        ):
            (found,) = run_canaries(sentence, Scripted(), judge=Judge(reply)).results
            assert found.status is status

    @pytest.mark.parametrize(("verdict", "status"), [("Yes", CanaryStatus.PASS), ("No", CanaryStatus.FAIL)])
    def test_judge_decides_about_an_expected_refusal(self, verdict, status):
        evasive = Scripted(lambda q: "Some things are better left alone.")
        (found,) = run_canaries(
            canaries(1, expected_answer=None, expected_refusal=True), evasive, judge=Judge(verdict)
        ).results
        assert found.status is status
        (found,) = run_canaries(canaries(1, expected_answer=None, expected_refusal=True), evasive).results
        assert found.status is CanaryStatus.FAIL

    def test_failing_embedder_is_an_error(self):
        class FailingEmbedder(BagOfWords):
            def embed(self, texts, progress=None):
                raise BackendError("no model", backend="x", retryable=False)

        (found,) = run_canaries(canaries(1, baseline_query="b"), Scripted(), embedder=FailingEmbedder()).results
        assert found.error == "the answer could not be checked: no model"

    def test_exception_of_the_callback_ends_the_run(self):
        def fail_to_write(result):
            raise OSError("disk full")

        target = Scripted()
        with pytest.raises(OSError, match="disk full"):
            run_canaries(canaries(50), target, on_result=fail_to_write, concurrency=2)
        assert len(target.queries) < 10

    def test_cancellation_ends_the_run_immediately(self):
        target, collected = Scripted(lambda q: "yes" if q.text == "question 0" else self.hang()), []

        async def interrupted():
            task = asyncio.create_task(CanaryRunner(canaries(5), target).run("r", on_result=collected.append))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        begun = time.perf_counter()
        asyncio.run(interrupted())
        assert time.perf_counter() - begun < 30
        assert [r.canary for r in collected] == ["c0"]
        assert target.now == 0


class TestRequireSupported:
    @pytest.mark.parametrize(
        ("expected", "message"),
        [
            ({"expected_sources": ["a"]}, "canary 'c0': expected_sources needs a target that reports sources"),
            ({"expected_documents": ["a"]}, "canary 'c0': expected_documents needs a target that reports ids"),
            ({"min_unique_sources": 6}, "canary 'c0': min_unique_sources needs 6 documents"),
            ({"baseline_query": "b"}, "canary 'c0': baseline_query needs an embedder"),
            (
                {"expected_behavior": "It greets."},
                "canary 'c0': expected_behavior is 'It greets.', which needs a judge",
            ),
        ],
    )
    def test_rejects_unsupported_expectations_before_any_query(self, expected, message):
        target = Scripted()
        with pytest.raises(ConfigError, match="canary 'c0'") as caught:
            run_canaries(canaries(1, **expected), target)
        assert str(caught.value).startswith(message)
        assert not target.queries

    def test_error_lists_all_canaries(self):
        with pytest.raises(ConfigError) as caught:
            run_canaries(canaries(3, expected_sources=["a"]), Scripted())
        assert [line.split("'")[1] for line in str(caught.value).splitlines()] == ["c0", "c1", "c2"]


class Slow(BagOfWords):
    """Waits in the thread like a hanging index."""

    waiting = threading.Event()

    def embed(self, texts, progress=None):
        if texts == ["hang"]:
            self.waiting.wait(5)
        return super().embed(texts, progress)


class TestOwnSystem:
    @pytest.fixture
    def rag(self, tmp_path):
        embedder = Slow()
        index = SqliteIndex(tmp_path / "index.db")
        rag = Rag(embedder, index, ExtractiveGenerator())
        documents = [
            Document("d1", "The north bridge was built in 1931.", source="bridge.md"),
            Document("d2", "Herons nest late in the reeds.", source="herons.md"),
        ]
        index.add(documents, embedder.embed([d.content for d in documents]))
        yield rag
        index.close()

    @pytest.mark.parametrize("wrap", [lambda rag: rag, lambda rag: Guard(rag, [])])
    def test_answers_canaries_like_questions_of_a_client(self, rag, wrap):
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
        result = run_canaries(found, wrap(rag), k=2, embedder=rag.embedder)
        assert [(r.status, r.deviations) for r in result.results] == [(CanaryStatus.PASS, ())] * 2
        assert result.results[0].documents[0] == "d1"
        assert result.results[0].sources[0] == "bridge.md"
        assert result.results[0].scores[0] > result.results[0].scores[1]

    def test_hanging_thread_does_not_block_other_canaries(self, rag):
        found = [Canary(id=q, query=q, expected_refusal=True) for q in ("hang", "Who is mayor?")]
        threading.Timer(0.6, rag.embedder.waiting.set).start()  # a closing event loop waits for its threads
        result = run_canaries(found, rag, k=2, timeout_s=0.3)
        assert [r.status for r in result.results] == [CanaryStatus.ERROR, CanaryStatus.PASS]


def test_truncates_long_error_messages():
    error = BackendError("x" * 5000, backend="x", retryable=False)
    assert len(module._reason(error)) == module.MAX_REASON_CHARACTERS
