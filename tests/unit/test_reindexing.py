import stat
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import DataError
from casemate.reindexing.residual import mapped
from casemate.reindexing.shelf import Shelf, due
from casemate.reindexing.space import distinct, key
from casemate.reindexing.topics import NOISE
from casemate.types import Document
from tests.fakes import BagOfWords
from tests.topical import TOPICS, drawn, indexed, topical


@pytest.fixture
def documents():
    return topical()


class TestShelf:
    def test_keeps_versions_of_each_tenant_apart(self, tmp_path, documents):
        learnt = drawn(documents, BagOfWords(), report={"recall": 0.5}, why="because")
        shelf = Shelf(tmp_path, "default")
        assert shelf.current() is None
        assert [shelf.write(learnt).version for _ in range(3)] == [1, 2, 3]
        assert shelf.versions() == [1, 2, 3]
        assert Shelf(tmp_path, "other").versions() == []
        held = Shelf(tmp_path, "default").current()
        assert (held.version, held.why, held.report, held.digest) == (3, "because", {"recall": 0.5}, learnt.digest)
        for name in ("centroids", "floors", "keys", "labels"):
            assert np.array_equal(getattr(held, name), getattr(learnt, name))
        assert all(np.array_equal(held.weights[n], w) for n, w in learnt.weights.items())

    def test_what_was_refused_is_kept_and_not_used(self, tmp_path, documents):
        shelf, learnt = Shelf(tmp_path, "default"), drawn(documents, BagOfWords(), mode="gate")
        shelf.write(learnt)
        shelf.write(replace(learnt, accepted=False, why="too dear"))
        assert shelf.current().version == 1
        assert shelf.read(2).why == "too dear"
        with pytest.raises(DataError, match="version 2 was refused: too dear"):
            shelf.rollback(2)
        assert shelf.write(learnt).version == 3
        assert shelf.rollback().version == 1  # not to the refused one
        with pytest.raises(DataError, match="no version of tenant 'default' before 1"):
            shelf.rollback()
        assert shelf.rollback(3).version == shelf.current().version == 3

    def test_its_files_are_the_owners_and_hold_no_text(self, tmp_path, documents):
        shelf = Shelf(tmp_path, "default")
        shelf.write(drawn(documents, BagOfWords()))
        for path in shelf.place.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with np.load(shelf.place / "001.npz") as file:
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
    def test_damage_is_noticed(self, tmp_path, documents, damage):
        shelf = Shelf(tmp_path, "default")
        shelf.write(drawn(documents, BagOfWords()))
        damage(shelf.place / "001.npz")
        with pytest.raises(DataError, match="run 'casemate reindex'"):
            shelf.current()

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
    def test_what_makes_no_sense_does_not_rank(self, tmp_path, documents, wrong):
        learnt = drawn(documents, BagOfWords())
        shelf = Shelf(tmp_path, "default")
        shelf.write(replace(learnt, **wrong(learnt)))
        with pytest.raises(DataError, match="makes no sense"):
            shelf.current()


class TestReindexing:
    def test_topics_are_as_learnt_and_of_the_nearest_centroid_for_the_new(self, documents):
        embedder = BagOfWords()
        learnt = drawn(documents, embedder)
        odd = replace(learnt, labels=(learnt.labels + 1) % TOPICS)  # learnt, whatever their vectors say
        E = embedder.embed([d.content for d in documents])
        own = np.array([int(d.id[1:]) % TOPICS for d in documents])
        assert np.array_equal(odd.topics(np.array([key(d) for d in documents], np.uint64), E), (own + 1) % TOPICS)
        new = [*topical(60, seed=4, first=1002), Document("x", "something else altogether")]
        F = embedder.embed([d.content for d in new])
        labels = learnt.topics(np.array([key(d) for d in new], np.uint64), F)
        kept = labels[:-1] != NOISE
        assert kept.mean() > 0.7
        assert np.array_equal(labels[:-1][kept], [i % TOPICS for i in range(60) if kept[i]])
        assert labels[-1] == NOISE

    def test_is_due_when_much_is_new_or_gone(self, tmp_path, documents):
        index, embedder = indexed(tmp_path, documents)
        learnt = drawn(documents, embedder)
        assert due(learnt, index) == ""
        new = topical(18, seed=9, first=1000)
        index.add(new, embedder.embed([d.content for d in new]))
        assert due(learnt, index) == ""
        index.add(more := topical(1, seed=9, first=2000), embedder.embed([d.content for d in more]))
        assert due(learnt, index).startswith("19 chunks are new and 0 are gone")
        index.remove([d.id for d in (*new, *more, *documents[:19])])
        assert due(learnt, index).startswith("0 chunks are new and 19 are gone")

    def test_is_due_when_topics_lie_less_apart(self, tmp_path, documents, monkeypatch):
        index, embedder = indexed(tmp_path, documents)
        learnt = drawn(documents, embedder, report={"silhouette": {"before": 0.1, "after": 0.99}})
        assert "less apart" in due(learnt, index)
        monkeypatch.setattr("casemate.reindexing.shelf.LOOKED_AT", 10)
        assert "less apart" in due(learnt, index)


class TestMap:
    @given(st.integers(0, 1000), st.floats(0, 1))
    def test_is_that_of_the_formula(self, seed, strength):
        rng = np.random.default_rng(seed)
        E = rng.standard_normal((4, 3))
        E /= np.linalg.norm(E, axis=1, keepdims=True)
        W1, b1, W2, b2 = (rng.standard_normal(shape) for shape in ((3, 5), 5, (5, 3), 3))
        found = mapped(E.astype(np.float32), {"W1": W1, "b1": b1, "W2": W2, "b2": b2}, strength)
        for x, z in zip(E, found, strict=True):
            hidden = [max(sum(x[i] * W1[i, j] for i in range(3)) + b1[j], 0) for j in range(5)]
            moved = [x[i] + strength * (sum(hidden[j] * W2[j, i] for j in range(5)) + b2[i]) for i in range(3)]
            np.testing.assert_allclose(z, np.array(moved) / np.linalg.norm(moved), atol=1e-4)

    def test_maps_a_large_collection_as_its_pieces(self, monkeypatch, documents):
        E, weights = BagOfWords().embed([d.content for d in documents]), drawn(documents, BagOfWords()).weights
        whole = mapped(E, weights)
        monkeypatch.setattr("casemate.reindexing.residual.BLOCK", 7)
        np.testing.assert_allclose(mapped(E, weights), whole, atol=1e-6)


def test_a_chunk_is_told_by_title_and_text_whatever_its_id():
    same = Document("a", "text", "title"), Document("b", "text", "title", "source", "digest", {"x": 1})
    other = Document("a", "text", "other"), Document("a", "titletext")
    assert len({key(d) for d in same}) == 1
    assert len({key(d) for d in (*same, *other)}) == 3


def test_of_equal_texts_the_first_tells_the_topic():
    keys, labels = distinct([9, 4, 9, 1], np.array([0, 1, 2, 3]))
    assert (keys.tolist(), labels.tolist()) == ([1, 4, 9], [3, 1, 0])
