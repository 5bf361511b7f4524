"""Metrics of crawls and of benign sessions."""

import asyncio
import re
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import pytest

from casemate.errors import BackendError
from casemate.rag.pipeline import Rag
from casemate.redteam.lab.benign import replay_benign_sessions
from casemate.redteam.lab.extraction_experiment import Crawler, CrawlPlan, CrawlTrace
from casemate.redteam.lab.extraction_metrics import measure_crawl, without_context
from casemate.redteam.lab.results import RecoveredText
from casemate.redteam.lab.store import CampaignStore, Exchange
from casemate.types import UNKNOWN, Action, Verdict
from tests.fakes import BagOfWords
from tests.lab_setting import Hide, setting
from tests.unit.crawl_fakes import (
    COLLECTION,
    FixedQuestions,
    OverlapTarget,
    Quote,
    RandomWords,
    crawl,
    figures,
    flagged,
    run_crawl,
)


@pytest.fixture
def store(tmp_path):
    with CampaignStore(tmp_path / "campaigns.db") as made:
        yield made


def test_quoted_chunks_are_recovered_and_others_are_not(store):
    crawled = figures(store, {"off": OverlapTarget()}, questions=8, k=3)
    result = crawled.by_target["off"]
    steps = run_crawl(store, RandomWords(), OverlapTarget(), questions=8, k=3).exchanges
    context_ids = {i for s in steps for i in s.context}
    assert 0 < len(context_ids) < 30
    assert result.coverage.value == pytest.approx(len(context_ids) / 30)
    assert result.coverage.low < result.coverage.value < result.coverage.high
    assert result.crr.value == result.crr_at["0.9"].value == result.crr_recall_at["0.9"].value == result.coverage.value
    assert result.crr_ikea.value == pytest.approx(1)
    assert result.efficiency == pytest.approx(len(context_ids) / (8 * 3))
    assert result.answered.value == 1
    assert (result.questions, result.chunks, result.alarms, result.first_alarm) == (8, 30, {}, None)
    assert set(result.crr_at) == {"0.3", "0.7", "0.9"}
    assert (crawled.crr_drop, crawled.ratio) == (None, None)


def test_curve_records_recovery_by_question_number(store):
    result = figures(store, {"off": OverlapTarget()}, questions=8, k=3).by_target["off"]
    steps = run_crawl(store, RandomWords(), OverlapTarget(), questions=8, k=3).exchanges
    assert result.curve[0] == (0, 0.0, 0.0)
    assert result.curve[-1][0] == 8
    for at, coverage, crr in result.curve:
        assert coverage == crr == pytest.approx(len({i for s in steps[:at] for i in s.context}) / 30)
    for name, share in {"10%": 3, "25%": 8, "50%": 15}.items():
        after = next((at for at, coverage, _ in result.curve if coverage * 30 >= share - 1e-9), None)
        assert result.coverage_after[name] == result.crr_after[name] == after
    assert result.coverage_after["10%"] == 1


def test_parts_of_a_reply_recover_their_chunks(store):
    crawler, traces = crawl(store, FixedQuestions(("only1",)), {"off": OverlapTarget()}, k=3)
    result = measure_crawl(crawler, traces, COLLECTION, BagOfWords(), windows=False).by_target["off"]
    assert (result.segments, result.crr.value) == (4, pytest.approx(3 / 30))


def test_refusal_covers_no_chunk(store):
    result = figures(
        store, {"off": OverlapTarget(declined=(2, 4))}, FixedQuestions(("only1", "only2", "only3", "only4")), k=1
    ).by_target["off"]
    assert result.coverage.value == pytest.approx(2 / 30)
    assert result.answered.value == 0.5
    assert result.efficiency == 0.5


def test_decoded_texts_count_as_recovered(store):
    @dataclass
    class DecodingCrawler(FixedQuestions):
        async def extract(self, box, rng):
            yield COLLECTION[9].text  # before any question, so without a source
            await box.ask("only4")
            yield COLLECTION[5].text

    class EncodingTarget(OverlapTarget):
        async def ask(self, query):
            return replace(await super().ask(query), text="mvmm pqeft mvqqf gvhs wmvv")

    result = figures(store, {"off": EncodingTarget()}, DecodingCrawler(), k=1).by_target["off"]
    assert result.crr.value == pytest.approx(1 / 30)
    assert result.coverage.value == pytest.approx(1 / 30)
    assert result.crr_ikea.value == 0
    assert result.finds[1] == RecoveredText(COLLECTION[5].text, 1)


def test_guard_is_compared_with_the_system_without_a_guard(tmp_path, store):
    with setting(tmp_path) as lab:
        inside = [d for d in lab.documents if d.source not in {n.source for n in lab.split.nonmembers}]
        guard = lab.guard(Hide(lab.secret))
        lab.rag.generator = guard.generator = Quote()
        assert isinstance(lab.rag, Rag)
        crawled = figures(store, {"off": lab.rag, "on": guard}, collection=inside, questions=60)
    off, on = crawled.by_target["off"], crawled.by_target["on"]
    assert off.crr.value > on.crr.value > 0
    assert on.coverage.value <= 30 / 50  # twenty of fifty are hidden
    assert crawled.crr_drop.value == pytest.approx(off.crr.value - on.crr.value)
    assert crawled.crr_drop.low <= crawled.crr_drop.value <= crawled.crr_drop.high
    assert crawled.ratio.value == pytest.approx(on.crr.value / off.crr.value)
    assert crawled.ratio.low <= crawled.ratio.value <= crawled.ratio.high
    assert (off.alarms, off.first_alarm, off.touched) == ({}, None, 0)
    assert (on.alarms, on.first_alarm, on.touched) == ({"hide": 60}, 1, 60)


def test_only_reply_metrics_remain_without_a_reported_context(store):
    crawled = figures(store, {"off": OverlapTarget()}, questions=8, k=3)
    whole, part = (crawl.by_target["off"] for crawl in (crawled, without_context(crawled)))
    removed_metrics = dict.fromkeys(("crr_ikea", "coverage", "area", "efficiency", "verbatim"))
    assert part == replace(whole, curve=tuple((at, None, crr) for at, _, crr in whole.curve), **removed_metrics)
    assert len(part.curve) > 2


def test_a_crawl_without_questions_recovers_nothing(store):
    result = figures(store, {"off": OverlapTarget()}, FixedQuestions()).by_target["off"]
    assert (result.crr.value, result.coverage.value, result.crr_ikea, result.answered) == (0, 0, None, None)
    assert result.curve == ((0, 0.0, 0.0),)
    with pytest.raises(ValueError, match="no chunks"):
        figures(store, {"off": OverlapTarget()}, FixedQuestions(), collection=[])


def test_alarms_are_counted_by_question(store):
    target = OverlapTarget(flagged_text="birch")
    result = figures(store, {"on": target}, FixedQuestions(("amber", "birch", "birch cedar"))).by_target["on"]
    assert (result.alarms, result.first_alarm) == ({"watch": 2}, 2)


def test_a_crawl_without_texts_contains_no_text_of_the_collection(store):
    crawled = figures(store, {"off": OverlapTarget()}, questions=4)
    bare, whole = (made.by_target["off"] for made in (crawled.without_texts(), crawled))
    assert not re.search(r"only\d", repr(bare)) and not bare.first_recovered
    assert [f.query for f in bare.finds] == [f.query for f in whole.finds] and bare.crr == whole.crr
    assert whole.finds[0].text.startswith("only")


def test_a_trace_can_be_measured_without_running_the_crawler(store):
    """A window finds a chunk inside a long reply, at the number of its question."""
    filler = " ".join(f"Filler {i} says nothing." for i in range(30))
    reply = f"{filler} {COLLECTION[3].text.capitalize()}. {filler}"
    crawler = Crawler("random_words", RandomWords(), {}, store)
    steps = (Exchange("q", UNKNOWN), Exchange("q", reply, ("d3", "gone")))
    result = measure_crawl(crawler, {"x": CrawlTrace(steps, ())}, COLLECTION, BagOfWords()).by_target["x"]
    assert result.crr.value == result.crr_recall.value == pytest.approx(1 / 30)
    assert result.crr_after == {"10%": None, "25%": None, "50%": None}
    assert result.curve == ((0, 0.0, 0.0), (2, pytest.approx(1 / 30), pytest.approx(1 / 30)))
    assert np.isfinite(result.fidelity)


def test_the_progress_of_the_comparison_has_a_total(store):
    """The total counts chunks and segments of replies. The last count reaches it."""
    totals, counts = [], []

    def step(total):
        totals.append(total)
        return nullcontext(counts.append)

    trace = CrawlTrace((Exchange("q", COLLECTION[3].text), Exchange("q", "An answer.")), ())
    crawler = Crawler("random_words", RandomWords(), {}, store)
    measure_crawl(crawler, {"off": trace, "on": trace}, COLLECTION, BagOfWords(), step=step)
    assert totals == [sum(counts)] and totals[0] >= len(COLLECTION) + 2 * 2


# benign sessions


def test_sessions_with_an_alarm_are_counted_once():
    class Guarded(OverlapTarget):
        async def ask(self, query):
            answer = await super().ask(query)
            if "birch" in query.text:
                return replace(answer, text="less", verdicts=(flagged("a", ("d1",), Action.HIDE), flagged("b")))
            return replace(answer, verdicts=(Verdict("a", False, Action.NONE, 0.1, 0.5),))

    sessions = [("ann", ["birch", "amber", "birch"]), ("bo", ["amber"]), ("cy", ["amber", "? hm", "birch"])]
    guarded, bare = Guarded(), OverlapTarget()
    done = []
    replay = asyncio.run(replay_benign_sessions(guarded, sessions, bare, progress=done.append))
    assert sum(done) == replay.sessions
    assert (replay.sessions, replay.questions) == (3, 7)
    assert replay.alarmed.value == pytest.approx(2 / 3)
    assert replay.alarms == {"a": 2, "b": 2}
    assert (replay.touched, replay.changed, replay.failed) == (3, 3, 0)
    assert guarded.asked == bare.asked
    assert [client for client, _ in bare.asked] == ["ann"] * 3 + ["bo"] + ["cy"] * 3


def test_alarm_in_observe_mode_is_counted_without_a_change(tmp_path):
    with setting(tmp_path) as lab:
        guard = lab.guard(Hide(lab.secret))
        guard.enforce = False
        replay = asyncio.run(replay_benign_sessions(guard, [("ann", [d.text for d in lab.split.members[:2]])], lab.rag))
    assert replay.alarmed.value == 1
    assert (replay.touched, replay.changed) == (0, 0)


def test_failed_defenses_are_counted_and_rate_is_none_without_sessions():
    class Failing(OverlapTarget):
        async def ask(self, query):
            return replace(await super().ask(query), verdicts=(flagged(evidence={"error": "KeyError"}),))

    assert asyncio.run(replay_benign_sessions(Failing(), [("ann", ["amber"])], OverlapTarget())).failed == 1
    assert asyncio.run(replay_benign_sessions(OverlapTarget(), [], OverlapTarget())).alarmed is None


def test_unavailable_target_stops_the_replay():
    target = OverlapTarget(breaks_at=1, fault=BackendError("gone", backend="fake", retryable=True))
    with pytest.raises(BackendError, match="gone"):
        asyncio.run(replay_benign_sessions(target, [("ann", ["amber"])], OverlapTarget(), plan=CrawlPlan(waits=())))
