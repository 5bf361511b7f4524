"""Accumulated evidence about new documents over days and processes, and thresholds of single signals."""

import asyncio
import contextlib
import math
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.monitor.poisoning import scoring
from casemate.monitor.poisoning.quarantine import Quarantine
from casemate.monitor.poisoning.scoring import (
    FALSE_POSITIVE_RATE,
    NEAR_COPY,
    REASONS,
    SHARES,
    ScreeningResult,
    _distinct,
)
from casemate.monitor.poisoning.screening_evidence import LOOK_BACK, MAX_STORED, ScreeningEvidence, log_e_value
from casemate.monitor.poisoning.screening_gate import ScreeningGate
from casemate.types import Document, Event
from tests.fakes import BagOfWords, Memory, documents
from tests.unit.test_monitor_quarantine import World, benign

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def result(name, p, source="", **metadata):
    return ScreeningResult(Document(name, "", source=source, metadata=metadata), 0.0, p, ())


def vectors(count):
    return np.eye(8, dtype=np.float32)[np.arange(count) % 8]


def add(evidence, results, uploader="", now=NOW):
    completed = evidence.judge(results, uploader)
    evidence.record(results, vectors(len(results)), uploader, now)
    return completed


class TestEvidence:
    def test_the_mean_e_value_of_benign_documents_is_at_most_one(self):
        p = (np.arange(200_000) + 0.5) / 200_000
        assert np.mean([10 ** log_e_value(x) for x in p]) <= 1

    def test_the_false_positive_rate_for_benign_uploaders_is_within_its_share(self):
        rng, alarms, count = np.random.default_rng(1), 0, 20_000
        evidence = ScreeningEvidence(Memory(), "default")
        for i in range(count):
            alarms += bool(add(evidence, [result(f"d{i}", rng.random())], "key a")[0])
        assert alarms / count <= FALSE_POSITIVE_RATE * SHARES["evidence"]

    @pytest.mark.parametrize("group", ["source", "subject", "uploader"])
    def test_evidence_of_borderline_documents_accumulates_by_group(self, group):
        def borderline(i):
            return result(
                f"d{i}", 0.004, "one" if group == "source" else "", **{"subject": "s"} if group == "subject" else {}
            )

        evidence = ScreeningEvidence(Memory(), "default")
        found = [add(evidence, [borderline(i)], "key a" if group == "uploader" else "")[0] for i in range(5)]
        assert found[0] == () and any(group in names for names in found)
        other = result("other", 0.004)
        assert evidence.judge([other], "key b") == [()]

    def test_a_single_document_gives_no_accumulated_evidence(self):
        assert add(ScreeningEvidence(Memory(), "default"), [result("d", 0.0)], "key a") == [()]

    def test_processes_share_evidence_and_count_it_once(self):
        store = Memory()
        borderline, two = ScreeningEvidence(store, "default"), ScreeningEvidence(store, "default")
        add(borderline, [result("a", 0.004, "s")])
        assert borderline.sync(NOW) == ([], [])
        found, their_vectors = two.sync(NOW)
        assert [(d.id, d.source) for d in found] == [("a", "s")] and their_vectors[0] == pytest.approx(vectors(1)[0])
        assert two.sync(NOW) == ([], []) and two._evidence == pytest.approx(borderline._evidence, abs=1e-4)
        assert ScreeningEvidence(store, "acme").sync(NOW) == ([], [])

    def test_evidence_older_than_the_look_back_is_ignored(self):
        store = Memory()
        add(ScreeningEvidence(store, "default"), [result("a", 0.004, "s")], now=NOW - LOOK_BACK - timedelta(hours=1))
        later = ScreeningEvidence(store, "default")
        assert later.sync(NOW) == ([], []) and not later._evidence

    def test_a_large_import_is_one_event_with_the_most_unusual_documents(self):
        store = Memory()
        evidence = ScreeningEvidence(store, "default")
        add(evidence, [result(f"d{i}", 1 - i / 1000, text="secret") for i in range(300)])
        (event,) = store.events
        assert [row[0] for row in event.body["rows"]] == [f"d{i}" for i in range(300 - MAX_STORED, 300)]
        assert "secret" not in str(event.body)


def test_evidence_persists_in_an_event_store_with_older_events(tmp_path):
    with contextlib.closing(SqlEventStore(path=tmp_path / "e.db")) as store:
        store.append(Event("old", NOW, "ingest", {"action": "added"}))  # an event from before the screening
    for day in range(2):
        with contextlib.closing(SqlEventStore(path=tmp_path / "e.db")) as store:
            evidence = ScreeningEvidence(store, "default")
            assert [d.id for d in evidence.sync(NOW)[0]] == [f"d{i}" for i in range(day)]
            add(evidence, [result(f"d{day}", 0.01)])
            assert store.flush()


def test_the_third_of_near_copies_on_different_days_is_quarantined(tmp_path):
    """Each day is a new process, which fits again and reads the earlier days from the event store."""
    copied_text, found = "jetty larch violin saffron quiver jackal mosaic", []
    for day in range(5):
        with contextlib.ExitStack() as opened:
            store = opened.enter_context(contextlib.closing(SqlEventStore(path=tmp_path / "e.db")))
            world = World(tmp_path, opened, store)
            gate = ScreeningGate(world.guard, world.fitted(world.questions[1:3]), Quarantine(store))
            withheld = asyncio.run(gate.add([*benign(6, day), Document(f"c{day}", f"{copied_text} xx{day}")]))
            found.append(f"c{day}" in withheld)
            assert store.flush()
    assert found == [False, False, True, True, True]


class TestThresholds:
    def test_the_shares_sum_to_at_most_the_false_positive_budget(self):
        assert 0.95 < sum(SHARES.values()) <= 1  # union bound

    def test_unused_shares_are_reassigned_within_the_budget(self):
        rng = np.random.default_rng(4)
        without_signals = dict.fromkeys(REASONS, 0.0)
        benign = [without_signals | {"answer": -math.log10(u)} for u in rng.random(600)]
        alone, joint = (f(benign, 500, 0.01) for f in (scoring._signal_thresholds, scoring._joint_thresholds))
        assert joint["answer"] < alone["answer"]
        flagged = [sum(any(s[n] > t[n] for n in t) for s in benign) for t in (alone, joint)]
        assert flagged[0] < flagged[1] and flagged[1] + 1 <= 0.01 * 601

    def test_shares_are_not_increased_beyond_the_budget(self):
        rng = np.random.default_rng(5)
        benign = [{name: -math.log10(u) for name in REASONS for u in [rng.random()]} for _ in range(600)]
        alone, joint = (f(benign, 500, 0.01) for f in (scoring._signal_thresholds, scoring._joint_thresholds))
        flagged = sum(any(s[n] > joint[n] for n in joint) for s in benign)
        assert joint == alone or flagged + 1 <= 0.01 * 601

    def test_near_copies_are_counted_once(self):
        X = BagOfWords().embed([d.text for d in documents(30)])
        assert _distinct(np.concatenate([X, X[:5], X[:5]])) == list(range(30))
        assert (X @ X.T - np.eye(30) < NEAR_COPY).all()
        assert _distinct(X[[0, 0, 0]]) == [0, 1, 2]  # all are copies, so there is no other sample for the distribution

    def test_a_corpus_with_repeated_texts_keeps_its_recall(self, tmp_path):
        from tests.unit.test_monitor_quarantine import poison

        with contextlib.ExitStack() as opened:
            world = World(tmp_path, opened)
            text = "amber birch cedar delta notice of the general terms"
            repeated = [Document(f"r{i}", f"{text} {i}") for i in range(120)]
            world.index.add(repeated, BagOfWords().embed([d.content for d in repeated]))
            assert all(r.suspicious for r in world.screened(poison()))
            copied_text = "jetty larch violin saffron quiver jackal mosaic"
            same = [Document(f"c{i}", f"{copied_text} xx{i}") for i in range(5)]
            assert all(r.suspicious for r in world.screened(same, world.fitted(world.questions[1:3])))
