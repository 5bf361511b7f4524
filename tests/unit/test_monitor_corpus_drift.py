import json
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import gamma, hypergeom, kstest

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import DataError
from casemate.maths.moments import CorpusMoments
from casemate.monitor.drift.corpus_drift import (
    audit_vectors,
    load_snapshots,
    max_wrong,
    mean_shift,
    read_snapshot,
    snapshot_of,
    snapshot_to_event,
)
from tests.fakes import BagOfWords, documents
from tests.unit.monitor_stores import InMemoryEventStore

AT = datetime(2026, 3, 1, tzinfo=UTC)


def vectors(rng, count, dim=48):
    """Simulated unit vectors of a few overlapping subjects."""
    centers = np.random.default_rng(1).standard_normal((6, dim)) * 0.8
    X = centers[rng.integers(6, size=count)] + rng.standard_normal((count, dim))
    return (X / np.linalg.norm(X, axis=1, keepdims=True)).astype(np.float32)


def snapshot(E):
    return snapshot_of(CorpusMoments.of(E), "default", AT)


class TestSnapshot:
    def test_contains_the_moments_of_the_vectors(self):
        E = vectors(np.random.default_rng(0), 300)
        found = snapshot(E)
        S = np.cov(E.T.astype(np.float64), bias=True)
        assert found.n == 300
        assert np.allclose(found.mean, E.mean(axis=0), atol=1e-6)
        assert found.trace == pytest.approx(np.trace(S))
        assert found.square == pytest.approx(np.trace(S @ S))
        assert found.top == pytest.approx(np.linalg.eigvalsh(S).max())
        assert 1 <= found.degrees_of_freedom <= 48

    def test_round_trip_through_a_file(self):
        store, one = InMemoryEventStore(), snapshot(vectors(np.random.default_rng(0), 50))
        event = snapshot_to_event(one)
        store.append(event)
        store.append(
            snapshot_to_event(snapshot_of(CorpusMoments.of(vectors(np.random.default_rng(1), 9)), "south", AT))
        )
        assert load_snapshots(store, "default") == [one]
        json.dumps(dict(event.body))
        assert not any(isinstance(v, list) and k != "mean" for k, v in event.body.items())

    def test_snapshot_of_an_index(self, tmp_path):
        index, embedder = SqliteIndex(tmp_path / "i.db"), BagOfWords()
        index.open(embedder.fingerprint, embedder.dim)
        pages = documents(30)
        index.add(pages, embedder.embed([d.content for d in pages]))
        found = read_snapshot(index, "default", AT)
        E = embedder.embed([d.content for d in pages])
        assert np.allclose(found.mean, E.mean(axis=0), atol=1e-6)


class TestShift:
    def test_p_values_of_benign_updates_are_nearly_uniform(self):
        rng = np.random.default_rng(2)
        E = vectors(rng, 2000)
        before, p = snapshot(E), []
        for _ in range(300):
            out, new = rng.permutation(2000)[:100], vectors(rng, 120)
            p.append(mean_shift(before, snapshot(np.concatenate([np.delete(E, out, axis=0), new])), removed=100).p)
        assert kstest(p, "uniform").pvalue > 0.001
        assert np.mean(np.array(p) <= 0.01) <= 0.04

    def test_expected_distance_equals_that_of_benign_updates(self):
        rng = np.random.default_rng(3)
        E = vectors(rng, 1000)
        found = [mean_shift(snapshot(E), snapshot(np.concatenate([E, vectors(rng, 60)]))) for _ in range(200)]
        assert np.sqrt(np.mean([f.distance**2 for f in found])) == pytest.approx(found[0].expected, rel=0.05)
        assert {(f.added, f.removed) for f in found} == {(60, 0)}

    def test_detects_a_cluster_of_equal_vectors_from_the_predicted_size(self):
        rng = np.random.default_rng(4)
        E, one = vectors(rng, 3000), vectors(rng, 1)
        before = snapshot(E)
        for among in (20, 100, 400):
            excess = gamma(before.degrees_of_freedom / 2).isf(0.01) / (before.degrees_of_freedom / 2) - 1  # of Q / tr S
            size = int(np.ceil(np.sqrt(excess * among))) + 1
            p = []
            for copies in (max(size // 4, 1), 2 * size):
                new = np.concatenate([vectors(rng, among - min(copies, among)), np.repeat(one, copies, axis=0)])
                p.append(mean_shift(before, snapshot(np.concatenate([E, new]))).p)
            assert p[0] > 0.001
            assert p[1] < 0.01
            assert 2 <= size <= 3 * np.sqrt(among)

    def test_detects_vectors_changed_in_place(self):
        E = vectors(np.random.default_rng(5), 500)
        poisoned = E.copy()
        poisoned[7] = -E[7]
        assert mean_shift(snapshot(E), snapshot(poisoned)).p == 0.0
        assert mean_shift(snapshot(E), snapshot(E)).p == 1.0
        assert mean_shift(snapshot(E), snapshot(E[::-1])).p == 1.0  # another order and thus other rounding

    def test_replaced_documents_require_the_number_of_added_ones(self):
        rng = np.random.default_rng(6)
        E = vectors(rng, 500)
        after = snapshot(np.concatenate([E[50:], vectors(rng, 50)]))
        assert mean_shift(snapshot(E), after).p == 0.0  # assumes that no document was added or removed
        assert mean_shift(snapshot(E), after, added=50).removed == 50
        assert mean_shift(snapshot(E), after, added=50).p > 0.001
        assert mean_shift(snapshot(E), snapshot(E[:400])).removed == 100

    def test_reports_changes_of_trace_and_top_eigenvalue(self):
        E = vectors(np.random.default_rng(7), 300)
        more = np.concatenate([E, np.repeat(E[:1], 60, axis=0)])
        found = mean_shift(snapshot(E), snapshot(more))
        assert found.trace == pytest.approx(snapshot(more).trace - snapshot(E).trace)
        assert found.top == pytest.approx(snapshot(more).top / snapshot(E).top - 1)

    def test_inconsistent_numbers_are_errors(self):
        E = vectors(np.random.default_rng(8), 20)
        one = snapshot(E)
        for wrong in ({"added": 3}, {"added": 3, "removed": 1}, {"removed": 21}):
            with pytest.raises(DataError, match="but 20 afterwards"):
                mean_shift(one, one, **({"removed": 0} | wrong))
        with pytest.raises(DataError, match="different embedders"):
            mean_shift(one, snapshot(vectors(np.random.default_rng(8), 20, dim=8)))
        with pytest.raises(DataError, match="at least 2 are needed"):
            mean_shift(snapshot(E[:1]), one)


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

    def test_full_audit_finds_all_wrong_vectors(self, index):
        found = audit_vectors(index, BagOfWords(), count=500)
        assert (found.held, found.checked) == (200, 200)
        assert [name for name, _ in found.wrong] == ["d17"]
        assert found.lowest == found.wrong[0][1] < 0.999
        assert found.max_wrong == 1

    def test_sample_depends_on_the_seed(self, index):
        embedder = BagOfWords()
        found = audit_vectors(index, embedder, count=40, seed=1)
        assert found.checked == len(embedder.texts) == 40
        again, other = BagOfWords(), BagOfWords()
        audit_vectors(index, again, count=40, seed=1)
        audit_vectors(index, other, count=40, seed=2)
        assert again.texts == embedder.texts != other.texts

    def test_detection_rate_equals_the_sampling_probability(self, index):
        hits = [bool(audit_vectors(index, BagOfWords(), count=60, seed=s).wrong) for s in range(60)]
        assert np.mean(hits) == pytest.approx(60 / 200, abs=0.15)

    def test_all_vectors_are_wrong_with_another_embedder(self, index):
        class Other(BagOfWords):
            def _direction(self, word):
                return super()._direction(word + "x")

        assert len(audit_vectors(index, Other(), count=50).wrong) == 50

    def test_lists_documents_with_vectors_that_do_not_match_their_texts(self, tmp_path):
        index, embedder = SqliteIndex(tmp_path / "j.db"), BagOfWords()
        index.open(embedder.fingerprint, embedder.dim)
        pages = documents(20)
        index.add(pages, -embedder.embed([d.content for d in pages]))
        assert len(audit_vectors(index, embedder, count=20).wrong) == 20

    def test_empty_sample_is_an_error(self, index):
        with pytest.raises(DataError, match="tenant 'absent' has no documents"):
            audit_vectors(index, BagOfWords(), tenant="absent")


class TestBound:
    @given(st.integers(1, 300), st.data())
    def test_equals_the_hypergeometric_bound(self, held, data):
        checked = data.draw(st.integers(1, held))
        found = data.draw(st.integers(0, min(checked, 4)))
        possible = range(found, held - (checked - found) + 1)
        tails = {w: hypergeom.cdf(found, held, w, checked) for w in possible}
        ends = [max((w for w, p in tails.items() if p > 0.05 + e), default=found) for e in (1e-9, -1e-9)]  # ties
        assert max_wrong(held, checked, found) in ends
