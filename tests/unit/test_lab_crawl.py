"""Crawls of small systems with known behavior: budgets, client names, interruptions."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from casemate.errors import BackendError, ConfigError
from casemate.redteam.lab.extraction_experiment import Crawler, CrawlPlan
from casemate.redteam.lab.store import CampaignStore
from casemate.types import Answer, Retrieval, SimilarityStats
from tests.unit.crawl_fakes import FixedQuestions, OverlapTarget, RandomWords, crawl, run_crawl

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path):
    with CampaignStore(tmp_path / "campaigns.db") as made:
        yield made


def test_records_each_exchange_with_operator_data(store):
    target = OverlapTarget(flagged_text="only3")
    found = run_crawl(store, FixedQuestions(("only7 amber", "only3", "? what")), target, k=2)
    assert [s.question for s in found.exchanges] == ["only7 amber", "only3", "? what"]
    assert [len(s.context) for s in found.exchanges] == [2, 2, 0]
    assert found.exchanges[0].context[0] == "d7"
    assert found.exchanges[0].reply.startswith("only7 ")
    assert [s.alarms for s in found.exchanges] == [(), ("watch",), ()]
    assert [s.refused for s in found.exchanges] == [False, False, True]
    assert [s.answered for s in found.exchanges] == [True, True, False]
    assert (found.finds, found.resumed, found.exhausted, found.error) == ((), 0, False, "")


def test_budget_ends_the_crawl_and_recovered_texts_are_counted(store):
    target = OverlapTarget()
    found = run_crawl(store, RandomWords(), target, questions=7)
    assert len(found.exchanges) == len(target.asked) == 7
    assert found.exhausted
    assert not found.error
    assert {f.text for f in found.finds} == {text for s in found.exchanges for text in s.reply.split("\n\n")}
    for find in found.finds:
        assert find.text in found.exchanges[find.query - 1].reply
        assert all(find.text not in s.reply for s in found.exchanges[: find.query - 1])


def test_attack_may_end_before_its_budget(store):
    found = run_crawl(store, RandomWords(most=3), OverlapTarget(), questions=7)
    assert (len(found.exchanges), found.exhausted) == (3, False)


def test_colluding_clients_ask_in_rotation(store):
    target = OverlapTarget()
    run_crawl(store, RandomWords(), target, questions=7, clients=3)
    names = [client for client, _ in target.asked]
    assert len(set(names[:3])) == 3
    assert names == [names[i % 3] for i in range(7)]


def test_crawls_of_all_targets_use_the_same_random_seed(store):
    one, two = OverlapTarget(), OverlapTarget()
    _, traces = crawl(store, RandomWords(), {"off": one, "on": two}, questions=5)
    assert traces["off"].exchanges == traces["on"].exchanges
    other = run_crawl(store, RandomWords(), OverlapTarget(), questions=5, seed=8)
    assert other.exchanges != traces["off"].exchanges


class Killed(BaseException):
    """Simulates a signal."""


@pytest.mark.parametrize("fault", [Killed(), BackendError("gone", backend="fake", retryable=True), TypeError("secret")])
@pytest.mark.parametrize("at", [1, 4])
def test_resumes_an_interrupted_crawl(store, tmp_path, fault, at):
    broken = OverlapTarget(breaks_at=at, fault=fault)
    if isinstance(fault, Killed):
        with pytest.raises(Killed):
            run_crawl(store, RandomWords(), broken, questions=9)
    else:
        found = run_crawl(store, RandomWords(), broken, questions=9)
        assert len(found.exchanges) == at - 1
        says = {BackendError: "BackendError: gone", TypeError: "TypeError in crawl_fakes.py, line "}
        assert found.error.startswith(says[type(fault)]) and "secret" not in found.error
    rest = OverlapTarget()
    found = run_crawl(store, RandomWords(), rest, questions=9)
    with CampaignStore(tmp_path / "other.db") as fresh:
        whole = run_crawl(fresh, RandomWords(), OverlapTarget(), questions=9)
    assert [text for _, text in broken.asked + rest.asked] == [s.question for s in whole.exchanges]
    assert len({client for client, _ in broken.asked + rest.asked}) == 1
    assert replace(found, resumed=0) == whole
    assert (found.resumed, len(rest.asked)) == (at - 1, 10 - at)


@pytest.mark.parametrize("schedule", ["rotate", "adaptive"])
def test_replays_stored_questions_to_a_guard_that_lost_its_client_state(store, tmp_path, schedule):
    class Limited(OverlapTarget):
        """Answers six questions of each client."""

        async def ask(self, query):
            answer = await super().ask(query)
            used = sum(client == query.client for client, _ in self.asked)
            return answer if used <= 6 else replace(answer, text="No.")

    options = {"questions": 9, "clients": 2, "schedule": schedule}
    with pytest.raises(Killed):
        crawl_one(store, Limited(breaks_at=8, fault=Killed()), **options)
    rest = Limited()
    found = crawl_one(store, rest, **options)
    with CampaignStore(tmp_path / "other.db") as fresh:
        whole = crawl_one(fresh, Limited(), **options)
    assert replace(found, resumed=0) == whole and found.resumed == 7
    assert [text for _, text in rest.asked] == [s.question for s in whole.exchanges]
    again = Limited()
    assert replace(crawl_one(store, again, **options), resumed=0) == whole
    assert not again.asked  # nothing new was asked, so no state is needed


def crawl_one(store, target, **options):
    """The crawl of a guard that keeps client state in memory."""
    crawler = Crawler("random_words", RandomWords(), {"on": target}, store, CrawlPlan(**options), ("on",))
    return asyncio.run(crawler.run())["on"]


def test_replays_a_finished_crawl_and_resumes_it_with_a_larger_budget(store):
    first = run_crawl(store, RandomWords(), OverlapTarget(), questions=5)
    silent = OverlapTarget()
    again = run_crawl(store, RandomWords(), silent, questions=5)
    assert replace(again, resumed=0) == first
    assert not silent.asked
    more = OverlapTarget()
    assert run_crawl(store, RandomWords(), more, questions=8).exchanges[:5] == first.exchanges
    assert len(more.asked) == 3


def test_adaptive_attacker_changes_the_client_if_replies_become_shorter(store):
    """Replies to client 0 become shorter after three questions, those to client 1 after two.

    Then the client with the longest last reply is used.
    """
    lengths = iter([100, 90, 100, 10, 80, 20, 60, 60])
    asked = []

    class ShorterReplies:
        async def ask(self, query):
            asked.append(int(query.client.rsplit("-", 1)[1]))
            return Answer("x" * next(lengths), Retrieval((), SimilarityStats(0, 0, 0)))

    run_crawl(store, FixedQuestions(tuple("abcdefgh")), ShorterReplies(), questions=8, clients=3, schedule="adaptive")
    assert asked == [0, 0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("other", [{"label": "new corpus"}, {"seed": 8}, {"k": 2}, {"clients": 2}, {"tenant": "b"}])
def test_does_not_reuse_replies_of_another_campaign(store, other):
    run_crawl(store, RandomWords(), OverlapTarget(), questions=3)
    target = OverlapTarget()
    run_crawl(store, RandomWords(), target, questions=3, **other)
    assert len(target.asked) == 3
    run_crawl(store, RandomWords(words=5), target, questions=3)
    assert len(target.asked) == 6


@dataclass
class Nondeterministic(FixedQuestions):
    """Asks its questions in reverse order in the second run."""

    times: int = field(default=0, init=False)

    async def extract(self, box, rng):
        self.times += 1
        for question in self.questions[:: 1 if self.times == 1 else -1]:
            await box.ask(question)
            yield question


def test_nondeterministic_attack_receives_no_stored_replies(store):
    attack, target = Nondeterministic(("amber", "birch")), OverlapTarget()
    assert not run_crawl(store, attack, target).error
    found = run_crawl(store, attack, target)
    assert found.error.startswith("DataError: question 1 differs from the earlier run")
    assert (found.exchanges, found.finds, len(target.asked)) == ((), (), 2)


def test_rejects_further_questions_of_an_attack_that_ignores_an_error(store):
    target = OverlapTarget(breaks_at=2, fault=BackendError("gone", backend="fake", retryable=False))
    found = run_crawl(store, FixedQuestions(("amber", "birch", "cedar"), ignores_errors=True), target)
    assert [s.question for s in found.exchanges] == ["amber"]
    assert found.error == "BackendError: gone"


def test_retries_an_unavailable_target(store):
    class Unavailable(OverlapTarget):
        async def ask(self, query):
            self.breaks_at = 0 if self.breaks_at == -1 else -1
            if self.breaks_at:
                raise BackendError("away", backend="fake", retryable=True)
            return await super().ask(query)

    found = run_crawl(store, RandomWords(), Unavailable(), questions=4)
    assert (len(found.exchanges), found.error) == (4, "")


CHILD = """
import asyncio, sys, time
from pathlib import Path
from casemate.redteam.lab.extraction_experiment import Crawler, CrawlPlan
from casemate.redteam.lab.store import CampaignStore
from casemate.types import Answer, Retrieval, SimilarityStats
from tests.unit.crawl_fakes import OverlapTarget, RandomWords

class Slow(OverlapTarget):
    async def ask(self, query):
        if len(self.asked) == 5:
            print("five", flush=True)
            await asyncio.sleep(60)
        return await super().ask(query)

store = CampaignStore(Path(sys.argv[1]))
asyncio.run(Crawler("random_words", RandomWords(), {"off": Slow()}, store, CrawlPlan(waits=(0.0,), questions=9)).run())
"""


def test_resumes_after_a_kill_of_the_process(tmp_path):
    path = tmp_path / "killed.db"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    with subprocess.Popen([sys.executable, "-c", CHILD, path], stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout.readline() == b"five\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait(timeout=60) == -signal.SIGKILL
    rest = OverlapTarget()
    with CampaignStore(path) as store, CampaignStore(tmp_path / "fresh.db") as fresh:
        found = run_crawl(store, RandomWords(), rest, questions=9)
        whole = run_crawl(fresh, RandomWords(), OverlapTarget(), questions=9)
    assert (found.resumed, len(rest.asked)) == (5, 4)
    assert (found.exchanges, found.finds) == (whole.exchanges, whole.finds)


@pytest.mark.parametrize("options", [{"questions": 0}, {"clients": 0}])
def test_rejects_a_plan_without_questions_or_clients(options):
    with pytest.raises(ConfigError, match="must be at least 1"):
        CrawlPlan(**options)
