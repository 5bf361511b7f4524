"""Crawls of small systems whose behaviour is known: budgets, names, kills, figures."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from casemate.errors import BackendError, ConfigError, QueryError
from casemate.lab.crawl import Crawler, CrawlPlan, replay
from casemate.lab.crawl_figures import measured
from casemate.lab.crawl_results import Find, Step, Walk
from casemate.lab.ledger import Ledger
from casemate.protocols import ExtractionAttack, Generator
from casemate.rag import Rag
from casemate.types import UNKNOWN, Action, Answer, Background, Hit, Retrieval, Verdict
from tests.fakes import BagOfWords, documents
from tests.lab_setting import Hide, setting

ROOT = Path(__file__).parents[2]
COLLECTION = documents(30, words=30)


def flagged(name="watch", hidden=(), action=Action.NONE, **fields):
    return Verdict(name, True, action, 1.0, 0.5, hidden, **fields)


@dataclass
class Shelf:
    """Tells whole documents, the ones that share most words with the question; and remembers who asked what."""

    collection: list = field(default_factory=lambda: COLLECTION)
    asked: list = field(default_factory=list)
    suspects: str = "no such word"
    mute: tuple = ()
    breaks_at: int = 0
    fault: BaseException | None = None

    async def ask(self, query):
        if self.breaks_at and len(self.asked) + 1 == self.breaks_at:
            raise self.fault
        self.asked.append((query.client, query.text))
        if query.text.startswith("?"):
            raise QueryError("no question")
        if len(self.asked) in self.mute:
            return Answer(UNKNOWN, Retrieval((), Background(0, 0, 0)))
        wanted = set(query.text.split())
        best = sorted(self.collection, key=lambda d: -len(wanted & set(d.text.split())))[: query.k]
        verdicts = (flagged(),) if self.suspects in query.text else ()
        hits = tuple(Hit(d, 0.5) for d in best)
        return Answer("\n\n".join(d.text for d in best), Retrieval(hits, Background(30, 0, 1)), verdicts)


@dataclass
class Wander(ExtractionAttack):
    """Asks on with words of the last reply, drawn by chance; gives out each new text."""

    words: int = 4
    most: int = 1000

    paper: ClassVar[str] = "none"

    async def extract(self, box, rng):
        held, question = set(), "amber birch cedar"
        for _ in range(self.most):
            reply = (await box.ask(question)).text
            for text in reply.split("\n\n"):
                if text not in held:
                    held.add(text)
                    yield text
            spoken = reply.split()
            question = " ".join(spoken[i] for i in rng.integers(len(spoken), size=self.words))


@dataclass
class Says(ExtractionAttack):
    """Asks what it was told to ask, and gives nothing out."""

    questions: tuple = ()
    keeps_on: bool = False

    paper: ClassVar[str] = "none"

    async def extract(self, box, rng):
        for question in self.questions:
            try:
                await box.ask(question)
            except BackendError:
                if not self.keeps_on:
                    raise
        for text in ():
            yield text


class Quote(Generator):
    """Says all it was given."""

    async def stream(self, prompt):
        for document in prompt.context:
            yield document.text + "\n\n"


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.db") as made:
        yield made


def crawl(ledger, attack, targets, **options):
    crawler = Crawler("wander", attack, targets, ledger, CrawlPlan(waits=(0.0,), **options))
    return crawler, asyncio.run(crawler.run())


def walk(ledger, attack, target, **options):
    return crawl(ledger, attack, {"off": target}, **options)[1]["off"]


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
from tests.unit.test_lab_crawl import Shelf, Wander

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


# Figures.


def figures(ledger, targets, attack=None, collection=COLLECTION, **options):
    crawler, walks = crawl(ledger, attack or Wander(), targets, **options)
    return measured(crawler, walks, collection, BagOfWords())


def test_what_is_quoted_is_recovered_and_what_is_not_is_not(ledger):
    crawled = figures(ledger, {"off": Shelf()}, questions=8, k=3)
    haul = crawled.hauls["off"]
    steps = walk(ledger, Wander(), Shelf(), questions=8, k=3).steps
    seen = {i for s in steps for i in s.context}
    assert 0 < len(seen) < 30
    assert haul.coverage.value == pytest.approx(len(seen) / 30)
    assert haul.coverage.low < haul.coverage.value < haul.coverage.high
    assert haul.crr.value == haul.crr_at["0.9"].value == haul.crr_recall_at["0.9"].value == haul.coverage.value
    assert haul.crr_ikea.value == pytest.approx(1)
    assert haul.efficiency == pytest.approx(len(seen) / (8 * 3))
    assert haul.answered.value == 1
    assert (haul.questions, haul.chunks, haul.alarms, haul.first_alarm) == (8, 30, {}, None)
    assert set(haul.crr_at) == {"0.3", "0.7", "0.9"}
    assert (crawled.crr_drop, crawled.relative) == (None, None)


def test_the_curve_tells_when(ledger):
    haul = figures(ledger, {"off": Shelf()}, questions=8, k=3).hauls["off"]
    steps = walk(ledger, Wander(), Shelf(), questions=8, k=3).steps
    assert haul.curve[0] == (0, 0.0, 0.0)
    assert haul.curve[-1][0] == 8
    for at, coverage, crr in haul.curve:
        assert coverage == crr == pytest.approx(len({i for s in steps[:at] for i in s.context}) / 30)
    for name, share in {"10%": 3, "25%": 8, "50%": 15}.items():
        after = next((at for at, coverage, _ in haul.curve if coverage * 30 >= share - 1e-9), None)
        assert haul.coverage_after[name] == haul.crr_after[name] == after
    assert haul.coverage_after["10%"] == 1


def test_a_refusal_covers_nothing(ledger):
    haul = figures(ledger, {"off": Shelf(mute=(2, 4))}, Says(("only1", "only2", "only3", "only4")), k=1).hauls["off"]
    assert haul.coverage.value == pytest.approx(2 / 30)
    assert haul.answered.value == 0.5
    assert haul.efficiency == 0.5


def test_what_the_attack_decoded_counts(ledger):
    @dataclass
    class Decode(Says):
        async def extract(self, box, rng):
            yield COLLECTION[9].text  # before any question: from nowhere
            await box.ask("only4")
            yield COLLECTION[5].text

    class Coded(Shelf):
        async def ask(self, query):
            return replace(await super().ask(query), text="mvmm pqeft mvqqf gvhs wmvv")

    haul = figures(ledger, {"off": Coded()}, Decode(), k=1).hauls["off"]
    assert haul.crr.value == pytest.approx(1 / 30)
    assert haul.coverage.value == pytest.approx(1 / 30)
    assert haul.crr_ikea.value == 0
    assert haul.finds[1] == Find(COLLECTION[5].text, 1)


def test_the_guard_is_compared_with_the_bare_system(tmp_path, ledger):
    with setting(tmp_path) as lab:
        inside = [d for d in lab.documents if d.source not in {n.source for n in lab.split.nonmembers}]
        guard = lab.guard(Hide(lab.secret))
        lab.rag.generator = guard.generator = Quote()
        assert isinstance(lab.rag, Rag)
        crawled = figures(ledger, {"off": lab.rag, "on": guard}, collection=inside, questions=60)
    off, on = crawled.hauls["off"], crawled.hauls["on"]
    assert off.crr.value > on.crr.value > 0
    assert on.coverage.value <= 30 / 50  # twenty of fifty are hidden
    assert crawled.crr_drop.value == pytest.approx(off.crr.value - on.crr.value)
    assert crawled.crr_drop.low <= crawled.crr_drop.value <= crawled.crr_drop.high
    assert crawled.relative == pytest.approx(on.crr.value / off.crr.value)
    assert (off.alarms, off.first_alarm, off.touched) == ({}, None, 0)
    assert (on.alarms, on.first_alarm, on.touched) == ({"hide": 60}, 1, 60)


def test_nothing_was_asked_and_nothing_found(ledger):
    haul = figures(ledger, {"off": Shelf()}, Says()).hauls["off"]
    assert (haul.crr.value, haul.coverage.value, haul.crr_ikea, haul.answered) == (0, 0, None, None)
    assert haul.curve == ((0, 0.0, 0.0),)
    with pytest.raises(ValueError, match="no chunks"):
        figures(ledger, {"off": Shelf()}, Says(), collection=[])


def test_alarms_are_counted_by_question(ledger):
    shelf = Shelf(suspects="birch")
    haul = figures(ledger, {"on": shelf}, Says(("amber", "birch", "birch cedar"))).hauls["on"]
    assert (haul.alarms, haul.first_alarm) == ({"watch": 2}, 2)


def test_a_saved_crawl_holds_no_text_of_the_collection(ledger, tmp_path):
    crawled = figures(ledger, {"off": Shelf()}, questions=4)
    crawled.save(tmp_path / "crawl.json")
    text = (tmp_path / "crawl.json").read_text()
    assert not re.search(r"only\d", text)
    kept = json.loads(text)["hauls"]["off"]
    assert kept["finds"] == [f.query for f in crawled.hauls["off"].finds]
    assert kept["crr"] == list(crawled.hauls["off"].crr)
    assert crawled.hauls["off"].finds[0].text.startswith("only")


def test_a_walk_can_be_judged_without_its_crawl(ledger):
    """A reply that holds a chunk between others is found in a window, by the number of its question."""
    filler = " ".join(f"Filler {i} says nothing." for i in range(30))
    reply = f"{filler} {COLLECTION[3].text.capitalize()}. {filler}"
    crawler = Crawler("wander", Wander(), {}, ledger)
    steps = (Step("q", UNKNOWN), Step("q", reply, ("d3", "gone")))
    haul = measured(crawler, {"x": Walk(steps, ())}, COLLECTION, BagOfWords()).hauls["x"]
    assert haul.crr.value == haul.crr_recall.value == pytest.approx(1 / 30)
    assert haul.crr_after == {"10%": None, "25%": None, "50%": None}
    assert haul.curve == ((0, 0.0, 0.0), (2, pytest.approx(1 / 30), pytest.approx(1 / 30)))
    assert np.isfinite(haul.fidelity)


# Harmless people.


def test_sessions_with_an_alarm_are_counted_once():
    class Guarded(Shelf):
        async def ask(self, query):
            answer = await super().ask(query)
            if "birch" in query.text:
                return replace(answer, text="less", verdicts=(flagged("a", ("d1",), Action.HIDE), flagged("b")))
            return replace(answer, verdicts=(Verdict("a", False, Action.NONE, 0.1, 0.5),))

    sessions = [("ann", ["birch", "amber", "birch"]), ("bo", ["amber"]), ("cy", ["amber", "? hm", "birch"])]
    guarded, bare = Guarded(), Shelf()
    met = asyncio.run(replay(guarded, sessions, bare))
    assert (met.sessions, met.questions) == (3, 7)
    assert met.alarmed.value == pytest.approx(2 / 3)
    assert met.alarms == {"a": 2, "b": 2}
    assert (met.touched, met.changed, met.failed) == (3, 3, 0)
    assert guarded.asked == bare.asked
    assert [client for client, _ in bare.asked] == ["ann"] * 3 + ["bo"] + ["cy"] * 3
    assert asyncio.run(replay(guarded, sessions)).changed is None


def test_an_alarm_in_observe_mode_is_one_and_touches_nothing(tmp_path):
    with setting(tmp_path) as lab:
        guard = lab.guard(Hide(lab.secret))
        guard.enforce = False
        met = asyncio.run(replay(guard, [("ann", [d.text for d in lab.split.members[:2]])], lab.rag))
    assert met.alarmed.value == 1
    assert (met.touched, met.changed) == (0, 0)


def test_a_failed_defense_is_told_and_nobody_means_no_rate():
    class Failing(Shelf):
        async def ask(self, query):
            return replace(await super().ask(query), verdicts=(flagged(evidence={"error": "KeyError"}),))

    assert asyncio.run(replay(Failing(), [("ann", ["amber"])])).failed == 1
    assert asyncio.run(replay(Shelf(), [])).alarmed is None


def test_a_target_out_of_reach_ends_the_replay():
    shelf = Shelf(breaks_at=1, fault=BackendError("gone", backend="fake", retryable=True))
    with pytest.raises(BackendError, match="gone"):
        asyncio.run(replay(shelf, [("ann", ["amber"])], plan=CrawlPlan(waits=())))
