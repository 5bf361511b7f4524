"""What a crawl came to, and what harmless sessions met with, in figures."""

import asyncio
import json
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest

from casemate.errors import BackendError
from casemate.lab.crawl import Crawler, CrawlPlan, replay
from casemate.lab.crawl_figures import measured
from casemate.lab.crawl_results import Find, Step, Walk
from casemate.lab.ledger import Ledger
from casemate.rag import Rag
from casemate.types import UNKNOWN, Action, Verdict
from tests.fakes import BagOfWords
from tests.lab_setting import Hide, setting
from tests.unit.crawled import COLLECTION, Quote, Says, Shelf, Wander, figures, flagged, walk


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.db") as made:
        yield made


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
