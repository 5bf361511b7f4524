import stat
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import DataError
from casemate.maths.clustering import NOISE
from casemate.reindexing.registry import ReindexRegistry, reindex_due
from casemate.reindexing.space import apply_map, chunk_key, unique_keys
from casemate.types import Document
from tests.fakes import BagOfWords
from tests.topical import TOPICS, drawn, indexed, topical


@pytest.fixture
def documents():
    return topical()


class TestReindexRegistry:
    def test_versions_are_separate_for_each_tenant(self, tmp_path, documents):
        learnt = drawn(documents, BagOfWords(), report={"recall": 0.5}, reason="because")
        registry = ReindexRegistry(tmp_path, "default")
        assert registry.current() is None
        assert [registry.write(learnt).version for _ in range(3)] == [1, 2, 3]
        assert registry.versions() == [1, 2, 3]
        assert ReindexRegistry(tmp_path, "other").versions() == []
        latest = ReindexRegistry(tmp_path, "default").current()
        assert (latest.version, latest.reason, latest.report) == (3, "because", {"recall": 0.5})
        for name in ("centroids", "floors", "keys", "labels"):
            assert np.array_equal(getattr(latest, name), getattr(learnt, name))
        assert all(np.array_equal(latest.weights[n], w) for n, w in learnt.weights.items())

    def test_rejected_versions_are_stored_but_not_activated(self, tmp_path, documents):
        registry, learnt = ReindexRegistry(tmp_path, "default"), drawn(documents, BagOfWords(), mode="gate")
        registry.write(learnt)
        registry.write(replace(learnt, accepted=False, reason="too dear"))
        assert registry.current().version == 1
        assert registry.read(2).reason == "too dear"
        with pytest.raises(DataError, match="version 2 was refused: too dear"):
            registry.rollback(2)
        assert registry.write(learnt).version == 3
        assert registry.rollback().version == 1  # not to the rejected version
        with pytest.raises(DataError, match="tenant 'default' has no accepted version before 1"):
            registry.rollback()
        assert registry.rollback(3).version == registry.current().version == 3

    def test_files_are_private_to_the_owner_and_contain_no_text(self, tmp_path, documents):
        registry = ReindexRegistry(tmp_path, "default")
        registry.write(drawn(documents, BagOfWords()))
        for path in registry.folder.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with np.load(registry.folder / "001.npz") as file:
            whole = b"".join(file[name].tobytes() for name in file.files)
        assert b"only20" not in whole
        assert "only20".encode("utf-32-le") not in whole

    @pytest.mark.parametrize(
        "damage",
        [
            lambda path: path.write_bytes(b"no archive"),
            lambda path: path.write_bytes(path.read_bytes()[:2000]),
            lambda path: path.unlink(),
            lambda path: (path.parent / "current").write_text("x"),
            lambda path: (path.parent / "current").write_text("7"),
        ],
    )
    def test_damaged_files_are_detected(self, tmp_path, documents, damage):
        registry = ReindexRegistry(tmp_path, "default")
        registry.write(drawn(documents, BagOfWords()))
        damage(registry.folder / "001.npz")
        with pytest.raises(DataError, match="run 'casemate reindex'"):
            registry.current()

    def test_versions_of_another_format_are_left_out_after_a_new_one(self, tmp_path, documents, monkeypatch):
        registry, learnt = ReindexRegistry(tmp_path, "default"), drawn(documents, BagOfWords())
        registry.write(learnt)
        monkeypatch.setattr("casemate.reindexing.registry.FORMAT", 1)
        registry.write(learnt)
        monkeypatch.undo()
        with pytest.raises(DataError, match="written by another version of Casemate; run 'casemate reindex'"):
            registry.current()
        assert registry.write(learnt).version == registry.current().version == 3
        assert [r.version for r in registry.readable()] == [1, 3]
        assert registry.rollback().version == 1

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda r: {"centroids": r.centroids * np.nan},
            lambda r: {"labels": r.labels + 1},
            lambda r: {"keys": r.keys[::-1]},
            lambda r: {"floors": r.floors[1:]},
            lambda r: {"weights": r.weights | {"b2": r.weights["b2"][1:]}},
            lambda r: {"weights": {}},
            lambda r: {"tenant": "another"},
            lambda r: {"strength": 2.0},
        ],
    )
    def test_inconsistent_files_are_rejected(self, tmp_path, documents, wrong):
        learnt = drawn(documents, BagOfWords())
        registry = ReindexRegistry(tmp_path, "default")
        registry.write(replace(learnt, **wrong(learnt)))
        with pytest.raises(DataError, match="is inconsistent or belongs to another tenant"):
            registry.current()


class TestReindexing:
    def test_new_chunks_get_the_topic_of_the_nearest_centroid(self, documents):
        embedder = BagOfWords()
        learnt = drawn(documents, embedder)
        mislabeled = replace(learnt, labels=(learnt.labels + 1) % TOPICS)  # contradicts the vectors on purpose
        E = embedder.embed([d.content for d in documents])
        own = np.array([int(d.id[1:]) % TOPICS for d in documents])
        assert np.array_equal(
            mislabeled.topics(np.array([chunk_key(d) for d in documents], np.uint64), E), (own + 1) % TOPICS
        )
        new = [*topical(60, seed=4, first=1002), Document("x", "something else altogether")]
        F = embedder.embed([d.content for d in new])
        labels = learnt.topics(np.array([chunk_key(d) for d in new], np.uint64), F)
        kept = labels[:-1] != NOISE
        assert kept.mean() > 0.7
        assert np.array_equal(labels[:-1][kept], [i % TOPICS for i in range(60) if kept[i]])
        assert labels[-1] == NOISE

    def test_due_after_many_additions_or_removals(self, tmp_path, documents):
        index, embedder = indexed(tmp_path, documents)
        learnt = drawn(documents, embedder)
        assert reindex_due(learnt, index) == ""
        new = topical(18, seed=9, first=1000)
        index.add(new, embedder.embed([d.content for d in new]))
        assert reindex_due(learnt, index) == ""
        index.add(more := topical(1, seed=9, first=2000), embedder.embed([d.content for d in more]))
        assert reindex_due(learnt, index).startswith("19 chunks are new and 0 were removed")
        index.remove([d.id for d in (*new, *more, *documents[:19])])
        assert reindex_due(learnt, index).startswith("0 chunks are new and 19 were removed")

    def test_due_when_topic_separation_falls(self, tmp_path, documents, monkeypatch):
        index, embedder = indexed(tmp_path, documents)
        learnt = drawn(documents, embedder, report={"silhouette": {"before": 0.1, "after": 0.99}})
        assert "topic separation (silhouette) fell" in reindex_due(learnt, index)
        monkeypatch.setattr("casemate.reindexing.registry.SAMPLE", 10)
        assert "topic separation (silhouette) fell" in reindex_due(learnt, index)


class TestMap:
    @given(st.integers(0, 1000), st.floats(0, 1))
    def test_equals_the_formula(self, seed, strength):
        rng = np.random.default_rng(seed)
        E = rng.standard_normal((4, 3))
        E /= np.linalg.norm(E, axis=1, keepdims=True)
        W1, b1, W2, b2 = (rng.standard_normal(shape) for shape in ((3, 5), 5, (5, 3), 3))
        found = apply_map(E.astype(np.float32), {"W1": W1, "b1": b1, "W2": W2, "b2": b2}, strength)
        for x, z in zip(E, found, strict=True):
            hidden = [max(sum(x[i] * W1[i, j] for i in range(3)) + b1[j], 0) for j in range(5)]
            moved = [x[i] + strength * (sum(hidden[j] * W2[j, i] for j in range(5)) + b2[i]) for i in range(3)]
            np.testing.assert_allclose(z, np.array(moved) / np.linalg.norm(moved), atol=1e-4)

    def test_batching_does_not_change_the_result(self, monkeypatch, documents):
        E, weights = BagOfWords().embed([d.content for d in documents]), drawn(documents, BagOfWords()).weights
        whole = apply_map(E, weights)
        monkeypatch.setattr("casemate.reindexing.space.MAP_BATCH", 7)
        np.testing.assert_allclose(apply_map(E, weights), whole, atol=1e-6)


def test_chunk_key_depends_on_title_and_text_only():
    same = Document("a", "text", "title"), Document("b", "text", "title", "source", "digest", {"x": 1})
    other = Document("a", "text", "other"), Document("a", "titletext")
    assert len({chunk_key(d) for d in same}) == 1
    assert len({chunk_key(d) for d in (*same, *other)}) == 3


def test_equal_texts_get_the_topic_of_the_first():
    keys, labels = unique_keys([9, 4, 9, 1], np.array([0, 1, 2, 3]))
    assert (keys.tolist(), labels.tolist()) == ([1, 4, 9], [3, 1, 0])
