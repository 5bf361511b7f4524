import asyncio
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from casemate.errors import CapabilityError, ConfigError, DataError
from casemate.guard.defenses.reindex import Reindex
from casemate.guard.guard import Guard
from casemate.rag.pipeline import Rag
from casemate.reindexing import fitting
from casemate.reindexing.fitting import ReindexSettings, fit
from casemate.reindexing.registry import ReindexRegistry
from casemate.reindexing.retrieval_quality import cross_topic_share, found_in_top_k, known_item_questions
from casemate.reindexing.supcon import TrainSettings
from casemate.types import Document, Query
from tests.fakes import BagOfWords, Parrot
from tests.topical import drawn, indexed, topical


@pytest.fixture
def documents():
    return topical()


class TestFit:
    settings = ReindexSettings(questions=150, training=TrainSettings(steps=150, keep_weight=10))

    def test_separates_topics_within_the_allowed_recall_loss(self, tmp_path, documents):
        index, embedder = indexed(tmp_path, documents)
        calls = []
        learnt = fit(index, embedder, self.settings, lambda *call: calls.append(call))
        report = learnt.report
        assert learnt.accepted, learnt.reason
        assert report["silhouette"]["after"] > report["silhouette"]["before"] + 0.05
        assert report["strangers"]["after"] < report["strangers"]["before"]
        assert report["recall"]["after"]["all"] >= report["recall"]["before"]["all"] - 0.01
        assert list(dict.fromkeys(step for step, *_ in calls)) == [
            "reading the index",
            "finding topics",
            "embedding questions",
            "training",
        ]
        assert all(done <= total for _, done, total in calls)

    def test_reduces_the_strength_to_the_largest_affordable_one(self, tmp_path, documents, monkeypatch):
        """The map destroys retrieval at full strength."""
        index, embedder = indexed(tmp_path, documents)
        wild = dict(drawn(documents, embedder).weights)
        wild["W2"] = 30 * wild["W2"] @ np.diag([1, 1, *[0] * 62]).astype(np.float32)  # on two directions

        def trained(*_):
            return type("T", (), {"weights": wild, "step": 1, "steps": 1, "losses": (), "separations": ()})

        monkeypatch.setattr("casemate.reindexing.fitting.train_map", trained)
        monkeypatch.setattr("casemate.reindexing.fitting.MIN_GAIN", -100)
        learnt = fit(index, embedder, self.settings)
        at_most = {strength: most for strength, _, most in learnt.report["strengths"]}
        assert 0 < learnt.strength < 1
        assert (
            at_most[learnt.strength] <= 0.01 < at_most[learnt.strength + 1 / 64]
        )  # the next larger strength exceeds the limit
        recall = learnt.report["recall"]
        assert recall["before"]["all"] - 0.01 <= recall["after"]["all"]
        assert at_most[1.0] > 0.2

    def test_recall_loss_has_an_upper_confidence_bound(self):
        before, after = np.array([True] * 80 + [False] * 20), np.array([True] * 70 + [False] * 25 + [True] * 5)
        d = np.array([0] * 70 + [1] * 10 + [0] * 15 + [-1] * 5)
        loss, at_most = fitting._recall_loss(before, after)
        assert loss == pytest.approx(0.05)
        drawn = np.random.default_rng(0).choice(d, (20_000, 100)).mean(axis=1)
        assert at_most == pytest.approx(np.quantile(drawn, 0.95), abs=0.01)

    def test_refuses_excessive_recall_loss_and_negligible_effect(self, tmp_path, documents, monkeypatch):
        index, embedder = indexed(tmp_path, documents)
        monkeypatch.setattr(
            "casemate.reindexing.fitting._Evaluation.affordable_strength",
            lambda *_: (0.0, [fitting.StrengthTrial(1.0, 0.2, 0.3), fitting.StrengthTrial(1 / 64, 0.01, 0.02)]),
        )
        refused = fit(index, embedder, replace(self.settings, mode="gate"))
        assert not refused.accepted
        assert refused.reason.startswith(
            "even at strength 0.016, recall@5 may fall by 0.020 (it fell by 0.010); the allowed loss is 0.010"
        )
        monkeypatch.undo()
        idle = fit(index, embedder, replace(self.settings, mode="gate", penalty=1e-6))
        assert not idle.accepted
        assert idle.reason.startswith("negligible effect")

    def test_mode_gate_needs_no_torch(self, tmp_path, documents, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        index, embedder = indexed(tmp_path, documents)
        learnt = fit(index, embedder, ReindexSettings(mode="gate", questions=100))
        assert learnt.weights == {}
        assert learnt.report["strangers"]["after"] < learnt.report["strangers"]["before"]

    def test_accepted_version_ranks_in_a_guard(self, tmp_path, documents):
        index, embedder = indexed(tmp_path, documents)
        ReindexRegistry(tmp_path / "r", "default").write(fit(index, embedder, self.settings))
        guard = Guard(Rag(embedder, index, Parrot()), [Reindex(folder=tmp_path / "r", embedder=embedder, index=index)])
        hits = [asyncio.run(guard.retrieve(Query(d.text)))[0].hits[0].document.id == d.id for d in documents[:40]]
        assert np.mean(hits) > 0.9

    def test_too_few_chunks_are_an_error(self, tmp_path):
        index, embedder = indexed(tmp_path, topical(99))
        with pytest.raises(DataError, match="99 chunks; re-indexing needs at least 100"):
            fit(index, embedder)

    def test_embedder_without_fine_tuning_is_rejected_before_the_index_is_read(self):
        with pytest.raises(CapabilityError, match="set rag.embedder to sentence_transformers"):
            fit(None, BagOfWords(), ReindexSettings(mode="lora"))

    @pytest.mark.parametrize(
        "wrong", [{"recall_loss": 1}, {"recall_loss": 0}, {"questions": 3}, {"k": 0}, {"penalty": 0}]
    )
    def test_invalid_settings_are_rejected(self, wrong):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ReindexSettings(**wrong)


class TestRetrievalQuality:
    def test_questions_of_all_kinds_are_built_from_the_texts(self):
        texts = [
            Document(f"d{i}", f"First of {i}. " + " ".join(f"W{i}x{j}" for j in range(40)), f"T {i}") for i in range(9)
        ]
        made = known_item_questions(
            [*texts, Document("bare", "one two", ""), Document("empty", " ")], np.random.default_rng(0)
        )
        assert Counter(s.kind for s in made) == {"title": 3, "opening": 3, "span": 4}
        assert (made[0].text, made[1].text, made[-1].text) == ("T 0", "First of 1.", "one two")
        assert len(made[2].text.split()) == 12
        assert made[2].text in texts[2].text

    def test_found_in_top_k_counts_sources(self):
        rng = np.random.default_rng(0)
        S, own = rng.random((90, 30)).astype(np.float32), [np.array([i % 30, (i + 7) % 30]) for i in range(90)]
        Q = np.arange(90, dtype=np.float32)[:, None]
        hit = found_in_top_k(lambda q: S[q[:, 0].astype(int)], Q, own, 4)
        for i in range(90):
            best = np.argsort(-S[i])
            others = [j for j in best if j not in own[i] or j == max(own[i], key=lambda j: S[i, j])]
            assert hit[i] == (others.index(max(own[i], key=lambda j: S[i, j])) < 4)

    def test_cross_topic_share_equals_the_definition(self):
        rng = np.random.default_rng(0)
        S, labels = rng.random((70, 30)).astype(np.float32), rng.integers(-1, 3, 30)
        own, itself, Q = rng.integers(0, 3, 70), rng.integers(0, 30, 70), np.arange(70, dtype=np.float32)[:, None]
        each = []
        for i in range(70):
            near = [j for j in np.argsort(-S[i]) if j != itself[i]][:5]
            each.append(np.mean([labels[j] != own[i] for j in near]))
        value = cross_topic_share(lambda q: S[q[:, 0].astype(int)].copy(), Q, own, labels, 5, itself.tolist())
        assert value == pytest.approx(np.mean(each))
