import json
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import hypergeom, kstest

from casemate.backends.sqlite import SqliteIndex
from casemate.errors import DataError
from casemate.monitor.drift import moments as module
from casemate.monitor.drift.moments import audit, most_wrong, of, read, readings, shift, to_event
from casemate.stats import CorpusMoments
from tests.fakes import BagOfWords, documents
from tests.unit.monitor_stores import Kept

AT = datetime(2026, 3, 1, tzinfo=UTC)


def vectors(rng, count, dim=48):
    """Unit vectors of a few overlapping subjects; simulated."""
    centres = np.random.default_rng(1).standard_normal((6, dim)) * 0.8
    X = centres[rng.integers(6, size=count)] + rng.standard_normal((count, dim))
    return (X / np.linalg.norm(X, axis=1, keepdims=True)).astype(np.float32)


def reading(E):
    return of(CorpusMoments.of(E), "default", AT)


class TestReading:
    def test_is_what_the_vectors_say(self):
        E = vectors(np.random.default_rng(0), 300)
        found = reading(E)
        S = np.cov(E.T.astype(np.float64), bias=True)
        assert found.n == 300
        assert np.allclose(found.mean, E.mean(axis=0), atol=1e-6)
        assert found.trace == pytest.approx(np.trace(S))
        assert found.square == pytest.approx(np.trace(S @ S))
        assert found.top == pytest.approx(np.linalg.eigvalsh(S).max())
        assert 1 <= found.freedom <= 48

    def test_is_kept_and_read_again(self):
        store, one = Kept(), reading(vectors(np.random.default_rng(0), 50))
        event = to_event(one)
        store.append(event)
        store.append(to_event(of(CorpusMoments.of(vectors(np.random.default_rng(1), 9)), "south", AT)))
        assert readings(store, "default") == [one]
        json.dumps(dict(event.body))
        assert not any(isinstance(v, list) and k != "mean" for k, v in event.body.items())

    def test_of_an_index(self, tmp_path):
        index, embedder = SqliteIndex(tmp_path / "i.db"), BagOfWords()
        index.open(embedder.fingerprint, embedder.dim)
        pages = documents(30)
        index.add(pages, embedder.embed([d.content for d in pages]))
        found = read(index, "default", AT)
        E = embedder.embed([d.content for d in pages])
        assert np.allclose(found.mean, E.mean(axis=0), atol=1e-6)


class TestShift:
    def test_p_values_of_harmless_updates_are_uniform_or_nearly(self):
        rng = np.random.default_rng(2)
        E = vectors(rng, 2000)
        before, p = reading(E), []
        for _ in range(300):
            out, new = rng.permutation(2000)[:100], vectors(rng, 120)
            p.append(shift(before, reading(np.concatenate([np.delete(E, out, axis=0), new])), removed=100).p)
        assert kstest(p, "uniform").pvalue > 0.001
        assert np.mean(np.array(p) <= 0.01) <= 0.04

    def test_the_distance_expected_is_that_of_harmless_updates(self):
        rng = np.random.default_rng(3)
        E = vectors(rng, 1000)
        found = [shift(reading(E), reading(np.concatenate([E, vectors(rng, 60)]))) for _ in range(200)]
        assert np.sqrt(np.mean([f.distance**2 for f in found])) == pytest.approx(found[0].expected, rel=0.05)
        assert {(f.added, f.removed) for f in found} == {(60, 0)}

    def test_a_block_of_alike_vectors_shows_and_the_size_is_foretold(self):
        rng = np.random.default_rng(4)
        E, one = vectors(rng, 3000), vectors(rng, 1)
        before = reading(E)
        for among in (20, 100, 400):
            size = before.block(among)
            p = []
            for copies in (max(size // 4, 1), 2 * size):
                new = np.concatenate([vectors(rng, among - min(copies, among)), np.repeat(one, copies, axis=0)])
                p.append(shift(before, reading(np.concatenate([E, new]))).p)
            assert p[0] > 0.001
            assert p[1] < 0.01
            assert 2 <= size <= 3 * np.sqrt(among)

    def test_vectors_that_change_in_place_show_at_once(self):
        E = vectors(np.random.default_rng(5), 500)
        poisoned = E.copy()
        poisoned[7] = -E[7]
        assert shift(reading(E), reading(poisoned)).p == 0.0
        assert shift(reading(E), reading(E)).p == 1.0
        assert shift(reading(E), reading(E[::-1])).p == 1.0  # another order, other rounding

    def test_replaced_documents_must_be_told(self):
        rng = np.random.default_rng(6)
        E = vectors(rng, 500)
        after = reading(np.concatenate([E[50:], vectors(rng, 50)]))
        assert shift(reading(E), after).p == 0.0  # as if nothing came or went
        assert shift(reading(E), after, added=50).removed == 50
        assert shift(reading(E), after, added=50).p > 0.001
        assert shift(reading(E), reading(E[:400])).removed == 100

    def test_trace_and_top(self):
        E = vectors(np.random.default_rng(7), 300)
        more = np.concatenate([E, np.repeat(E[:1], 60, axis=0)])
        found = shift(reading(E), reading(more))
        assert found.trace == pytest.approx(reading(more).trace - reading(E).trace)
        assert found.top == pytest.approx(reading(more).top / reading(E).top - 1)

    def test_what_does_not_add_up(self):
        E = vectors(np.random.default_rng(8), 20)
        one = reading(E)
        for wrong in ({"added": 3}, {"added": 3, "removed": 1}, {"removed": 21}):
            with pytest.raises(DataError, match="do not make 20"):
                shift(one, one, **({"removed": 0} | wrong))
        with pytest.raises(DataError, match="another embedder"):
            shift(one, reading(vectors(np.random.default_rng(8), 20, dim=8)))
        with pytest.raises(DataError, match="tell nothing"):
            shift(reading(E[:1]), one)


class TestAudit:
    @pytest.fixture
    def index(self, tmp_path):
        index, embedder = SqliteIndex(tmp_path / "i.db"), BagOfWords()
        index.open(embedder.fingerprint, embedder.dim)
        pages = documents(200, title="Towns")
        E = embedder.embed([d.content for d in pages])
        E[17] = E[3]  # poisoned
        index.add(pages, E)
        return index

    def test_all_finds_all(self, index):
        found = audit(index, BagOfWords(), count=500)
        assert (found.held, found.checked) == (200, 200)
        assert [name for name, _ in found.wrong] == ["d17"]
        assert found.lowest == found.wrong[0][1] < 0.999
        assert found.at_most == 1

    def test_a_sample_is_drawn_by_the_seed(self, index):
        embedder = BagOfWords()
        found = audit(index, embedder, count=40, seed=1)
        assert found.checked == len(embedder.texts) == 40
        again, other = BagOfWords(), BagOfWords()
        audit(index, again, count=40, seed=1)
        audit(index, other, count=40, seed=2)
        assert again.texts == embedder.texts != other.texts

    def test_it_finds_as_often_as_it_says(self, index):
        hits = [bool(audit(index, BagOfWords(), count=60, seed=s).wrong) for s in range(60)]
        assert audit(index, BagOfWords(), count=60).finds(1) == pytest.approx(60 / 200)
        assert np.mean(hits) == pytest.approx(0.3, abs=0.15)

    def test_another_embedder_is_wrong_everywhere(self, index):
        class Other(BagOfWords):
            def _direction(self, word):
                return super()._direction(word + "x")

        assert len(audit(index, Other(), count=50).wrong) == 50

    def test_vectors_that_a_defense_changes_are_made_as_it_does(self, tmp_path):
        index, embedder = SqliteIndex(tmp_path / "j.db"), BagOfWords()
        index.open(embedder.fingerprint, embedder.dim)
        pages = documents(20)
        index.add(pages, -embedder.embed([d.content for d in pages]))
        assert len(audit(index, embedder, count=20).wrong) == 20
        assert audit(index, embedder, count=20, vectors=lambda ds: -embedder.embed([d.content for d in ds])).wrong == ()

    def test_nothing_to_draw(self, index):
        with pytest.raises(DataError, match="0 documents"):
            audit(index, BagOfWords(), tenant="nobody")
        with pytest.raises(DataError, match="0 are to be drawn"):
            audit(index, BagOfWords(), count=0)


class TestBound:
    @given(st.integers(1, 300), st.data())
    def test_is_the_exact_one(self, held, data):
        checked = data.draw(st.integers(1, held))
        found = data.draw(st.integers(0, min(checked, 4)))
        possible = range(found, held - (checked - found) + 1)
        expected = max((w for w in possible if hypergeom.cdf(found, held, w, checked) > 0.05), default=found)
        assert most_wrong(held, checked, found) == expected

    @given(st.integers(1, 200), st.data())
    def test_the_chance_to_find_some(self, held, data):
        checked, wrong = data.draw(st.integers(1, held)), data.draw(st.integers(0, held))
        expected = 1 - hypergeom.pmf(0, held, wrong, checked)
        assert module.Audit(held, checked, (), 1.0).finds(wrong) == pytest.approx(expected, abs=1e-9)
