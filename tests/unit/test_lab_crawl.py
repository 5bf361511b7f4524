"""Crawls of small systems whose behaviour is known: budgets, names, kills."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from casemate.errors import BackendError, ConfigError
from casemate.lab.crawl import CrawlPlan
from casemate.lab.ledger import Ledger
from tests.unit.crawled import Says, Shelf, Wander, crawl, walk

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.db") as made:
        yield made


def test_each_step_is_noted_with_what_only_the_operator_knows(ledger):
    shelf = Shelf(suspects="only3")
    found = walk(ledger, Says(("only7 amber", "only3", "? what")), shelf, k=2)
    assert [s.question for s in found.steps] == ["only7 amber", "only3", "? what"]
    assert [len(s.context) for s in found.steps] == [2, 2, 0]
    assert found.steps[0].context[0] == "d7"
    assert found.steps[0].reply.startswith("only7 ")
    assert [s.alarms for s in found.steps] == [(), ("watch",), ()]
    assert [s.refused for s in found.steps] == [False, False, True]
    assert [s.answered for s in found.steps] == [True, True, False]
    assert (found.finds, found.resumed, found.exhausted, found.error) == ((), 0, False, "")


def test_the_budget_ends_the_crawl_and_what_was_found_counts(ledger):
    shelf = Shelf()
    found = walk(ledger, Wander(), shelf, questions=7)
    assert len(found.steps) == len(shelf.asked) == 7
    assert found.exhausted
    assert not found.error
    assert {f.text for f in found.finds} == {text for s in found.steps for text in s.reply.split("\n\n")}
    for find in found.finds:
        assert find.text in found.steps[find.query - 1].reply
        assert all(find.text not in s.reply for s in found.steps[: find.query - 1])


def test_an_attack_may_end_before_its_budget(ledger):
    found = walk(ledger, Wander(most=3), Shelf(), questions=7)
    assert (len(found.steps), found.exhausted) == (3, False)


def test_colluding_clients_take_turns(ledger):
    shelf = Shelf()
    walk(ledger, Wander(), shelf, questions=7, clients=3)
    names = [client for client, _ in shelf.asked]
    assert len(set(names[:3])) == 3
    assert names == [names[i % 3] for i in range(7)]


def test_targets_are_crawled_with_the_same_luck(ledger):
    one, two = Shelf(), Shelf()
    _, walks = crawl(ledger, Wander(), {"off": one, "on": two}, questions=5)
    assert walks["off"].steps == walks["on"].steps
    other = walk(ledger, Wander(), Shelf(), questions=5, seed=8)
    assert other.steps != walks["off"].steps


class Killed(BaseException):
    """As a signal."""


@pytest.mark.parametrize("fault", [Killed(), BackendError("gone", backend="fake", retryable=True), TypeError("secret")])
@pytest.mark.parametrize("at", [1, 4])
def test_what_breaks_off_goes_on_where_it_was(ledger, tmp_path, fault, at):
    broken = Shelf(breaks_at=at, fault=fault)
    if isinstance(fault, Killed):
        with pytest.raises(Killed):
            walk(ledger, Wander(), broken, questions=9)
    else:
        found = walk(ledger, Wander(), broken, questions=9)
        assert len(found.steps) == at - 1
        assert found.error == {BackendError: "BackendError: gone", TypeError: "TypeError"}[type(fault)]
    rest = Shelf()
    found = walk(ledger, Wander(), rest, questions=9)
    with Ledger(tmp_path / "other.db") as fresh:
        whole = walk(fresh, Wander(), Shelf(), questions=9)
    assert [text for _, text in broken.asked + rest.asked] == [s.question for s in whole.steps]
    assert len({client for client, _ in broken.asked + rest.asked}) == 1
    assert replace(found, resumed=0, seconds=0) == replace(whole, seconds=0)
    assert (found.resumed, len(rest.asked)) == (at - 1, 10 - at)


def test_a_finished_crawl_is_read_and_a_larger_budget_goes_on(ledger):
    first = walk(ledger, Wander(), Shelf(), questions=5)
    silent = Shelf()
    again = walk(ledger, Wander(), silent, questions=5)
    assert replace(again, resumed=0, seconds=0) == replace(first, seconds=0)
    assert not silent.asked
    more = Shelf()
    assert walk(ledger, Wander(), more, questions=8).steps[:5] == first.steps
    assert len(more.asked) == 3


@pytest.mark.parametrize("other", [{"label": "new corpus"}, {"seed": 8}, {"k": 2}, {"clients": 2}, {"tenant": "b"}])
def test_replies_of_another_campaign_are_not_used_again(ledger, other):
    walk(ledger, Wander(), Shelf(), questions=3)
    shelf = Shelf()
    walk(ledger, Wander(), shelf, questions=3, **other)
    assert len(shelf.asked) == 3
    walk(ledger, Wander(words=5), shelf, questions=3)
    assert len(shelf.asked) == 6


@dataclass
class Fickle(Says):
    """Asks its questions in another order the next time."""

    times: int = field(default=0, init=False)

    async def extract(self, box, rng):
        self.times += 1
        for question in self.questions[:: 1 if self.times == 1 else -1]:
            await box.ask(question)
            yield question


def test_an_attack_that_decides_otherwise_is_not_told_the_wrong_replies(ledger):
    attack, shelf = Fickle(("amber", "birch")), Shelf()
    assert not walk(ledger, attack, shelf).error
    found = walk(ledger, attack, shelf)
    assert found.error.startswith("DataError: question 1 is not what it was")
    assert (found.steps, found.finds, len(shelf.asked)) == ((), (), 2)


def test_an_attack_that_ignores_a_fault_asks_no_more(ledger):
    shelf = Shelf(breaks_at=2, fault=BackendError("gone", backend="fake", retryable=False))
    found = walk(ledger, Says(("amber", "birch", "cedar"), keeps_on=True), shelf)
    assert [s.question for s in found.steps] == ["amber"]
    assert found.error == "BackendError: gone"


def test_a_target_that_is_away_for_a_moment_is_asked_again(ledger):
    class Away(Shelf):
        async def ask(self, query):
            self.breaks_at = 0 if self.breaks_at == -1 else -1
            if self.breaks_at:
                raise BackendError("away", backend="fake", retryable=True)
            return await super().ask(query)

    found = walk(ledger, Wander(), Away(), questions=4)
    assert (len(found.steps), found.error) == (4, "")


CHILD = """
import asyncio, sys, time
from pathlib import Path
from casemate.lab.crawl import Crawler, CrawlPlan
from casemate.lab.ledger import Ledger
from tests.unit.crawled import Shelf, Wander

class Slow(Shelf):
    async def ask(self, query):
        if len(self.asked) == 5:
            print("five", flush=True)
            await asyncio.sleep(60)
        return await super().ask(query)

ledger = Ledger(Path(sys.argv[1]))
asyncio.run(Crawler("wander", Wander(), {"off": Slow()}, ledger, CrawlPlan(waits=(0.0,), questions=9)).run())
"""


def test_a_killed_process_goes_on_where_it_was(tmp_path):
    path = tmp_path / "killed.db"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", CHILD, path], stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout.readline() == b"five\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait(timeout=60) == -signal.SIGKILL
    rest = Shelf()
    with Ledger(path) as ledger, Ledger(tmp_path / "fresh.db") as fresh:
        found = walk(ledger, Wander(), rest, questions=9)
        whole = walk(fresh, Wander(), Shelf(), questions=9)
    assert (found.resumed, len(rest.asked)) == (5, 4)
    assert (found.steps, found.finds) == (whole.steps, whole.finds)


@pytest.mark.parametrize("options", [{"questions": 0}, {"clients": 0}])
def test_a_plan_without_questions_or_clients_is_refused(options):
    with pytest.raises(ConfigError, match="must be at least 1"):
        CrawlPlan(**options)
