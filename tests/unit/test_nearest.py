"""``ExactSearch`` compared with a naive sort, and the guarantees of ``ApproximateSearch``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from casemate.maths import nearest
from casemate.maths.nearest import ApproximateSearch, ExactSearch
from tests.fakes import unit

DIM = 8


def naive(held: dict[int, np.ndarray], q: np.ndarray, k: int) -> list[tuple[int, float]]:
    """Returns keys and scores by a sort in Python."""
    scored = [(key, float(np.sum(x.astype(np.float64) * q.astype(np.float64)))) for key, x in held.items()]
    return sorted(scored, key=lambda pair: (-pair[1], pair[0]))[:k]


def assert_same(index: ExactSearch, held: dict[int, np.ndarray], q: np.ndarray, k: int) -> None:
    keys, scores = index.search(q, k)
    expected = naive(held, q, k)
    assert keys.tolist() == [key for key, _ in expected]
    np.testing.assert_allclose(scores, [s for _, s in expected], rtol=0, atol=1e-12)


# A step is a number of added (negative: removed) vectors and the share of repeated ones.
steps = st.lists(st.tuples(st.integers(-9, 20), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps, seed=st.integers(0, 1 << 30), sizes=st.sampled_from([(1, 1), (2, 5), (7, 99), (16, 5), (99, 99)]))
def test_exact_search_equals_a_sort_after_additions_and_removals(monkeypatch, steps, seed, sizes) -> None:
    monkeypatch.setattr(nearest, "BLOCK", sizes[0])
    monkeypatch.setattr(nearest, "RESCORE_BLOCK", sizes[1])
    rng, index, held, last = np.random.default_rng(seed), ExactSearch(DIM), {}, 0
    for count, repeated in steps:
        if count < 0:
            gone = rng.integers(0, last + 2, -count)  # some keys are unknown or already removed
            index.remove(gone)
            held = {key: x for key, x in held.items() if key not in gone}
        else:
            vectors, old = unit(rng, count), list(held.values())
            for i in np.flatnonzero(rng.random(count) < repeated) if old else ():
                vectors[i] = old[rng.integers(len(old))]
            keys = np.arange(last + 1, last + count + 1)
            index.add(keys, vectors)
            held.update(zip(keys.tolist(), vectors, strict=True))
            last += count
        assert len(index) == len(held)
        for q in (unit(rng, 1)[0], *list(held.values())[:1]):
            for k in (0, 1, 3, len(held), len(held) + 5):
                assert_same(index, held, q, k)


def test_empty_index_returns_nothing() -> None:
    keys, scores = ExactSearch(DIM).search(unit(np.random.default_rng(0), 1)[0], 5)
    assert len(keys) == len(scores) == 0
    assert keys.dtype == np.int64


@pytest.mark.parametrize("dim", [2, 8, 384])
def test_orders_float32_ties_by_float64_scores(dim) -> None:
    rng = np.random.default_rng(dim)
    q = unit(rng, 1, dim)[0]
    alike = (q * (1 + 1e-7 * rng.standard_normal((2000, dim)))).astype(np.float32)
    alike[5::7] = alike[4::7][: len(alike[5::7])]
    index = ExactSearch(dim)
    index.add(np.arange(2000), alike)
    index.remove(np.arange(0, 2000, 3))
    assert_same(index, {i: alike[i] for i in range(2000) if i % 3}, q, 10)


def test_returns_equal_vectors_by_increasing_key(monkeypatch) -> None:
    monkeypatch.setattr(nearest, "BLOCK", 999)  # the last block then has an odd size
    x, index = unit(np.random.default_rng(1), 1, 33), ExactSearch(33)
    index.add(np.arange(10_000), np.repeat(x, 10_000, axis=0))
    index.remove(np.arange(3))
    assert index.search(x[0], 4)[0].tolist() == [3, 4, 5, 6]


def test_exact_index_reports_that_most_rows_are_removed(monkeypatch) -> None:
    monkeypatch.setattr(nearest, "BLOCK", 10)
    index = ExactSearch(DIM)
    index.add(np.arange(30), unit(np.random.default_rng(0), 30))
    index.remove(np.arange(15))
    assert not index.mostly_removed
    index.remove(np.arange(16))
    assert index.mostly_removed


def test_rounding_error_bound_holds() -> None:
    rng = np.random.default_rng(0)
    for dim in (3, 64, 1024):
        for q in unit(rng, 20, dim):
            x = unit(rng, 100, dim)
            off = np.abs((x @ q).astype(np.float64) - x.astype(np.float64) @ q.astype(np.float64)).max()
            assert off < nearest.rounding_error_bound(q) / 2


def clustered(rng: np.random.Generator, n: int, dim: int = 32, centers: int = 100) -> np.ndarray:
    c = np.random.default_rng(77).standard_normal((centers, dim))
    x = c[rng.integers(centers, size=n)] + 0.3 * rng.standard_normal((n, dim))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def recall_at_1(exact: ExactSearch, approximate: ApproximateSearch, queries: np.ndarray) -> float:
    return float(np.mean([exact.search(q, 1)[0][0] == approximate.search(q, 1)[0][0] for q in queries]))


@pytest.mark.slow
def test_graph_keeps_its_recall_after_replacing_two_thirds_of_the_vectors() -> None:
    rng, exact, graph = np.random.default_rng(0), ExactSearch(32), ApproximateSearch(32)
    vectors, keys = clustered(rng, 3000), np.arange(3000)
    for index in (exact, graph):
        index.add(keys, vectors)
    assert recall_at_1(exact, graph, clustered(rng, 300)) >= 0.99
    assert all(graph.search(vectors[i], 1)[1][0] > 1 - 1e-6 for i in range(3000))  # no vector is lost
    for round_ in range(2):
        fresh, new = clustered(rng, 1000), np.arange(1000) + 10_000 * (round_ + 1)
        gone = rng.choice(keys, 1000, replace=False)
        keys = np.concatenate([np.setdiff1d(keys, gone), new])
        for index in (exact, graph):
            index.remove(gone)
            index.add(new, fresh)
        assert len(graph) == 3000
        assert recall_at_1(exact, graph, clustered(rng, 300)) >= 0.99
    assert not graph.mostly_removed


def test_graph_skips_removed_neighborhoods() -> None:
    rng, graph = np.random.default_rng(1), ApproximateSearch(DIM)
    near = unit(rng, 1)[0] + 0.01 * rng.standard_normal((200, DIM))
    vectors = np.concatenate([near / np.linalg.norm(near, axis=1, keepdims=True), unit(rng, 400)]).astype(np.float32)
    graph.add(np.arange(600), vectors)
    graph.remove(np.arange(200))
    graph.remove(np.array([5, 99_999]))  # already removed, and unknown
    keys, scores = graph.search(vectors[0], 5)
    assert len(keys) == 5
    assert keys.min() >= 200
    left = {key: vectors[key] for key in range(200, 600)}
    assert graph.search(vectors[0], 1000)[0].tolist() == [key for key, _ in naive(left, vectors[0], 1000)]
    assert np.all(np.diff(scores) <= 0)
    graph.remove(np.arange(200, 301))
    assert graph.mostly_removed
    graph.remove(np.arange(600))
    assert len(graph) == 0
    assert len(graph.search(vectors[0], 5)[0]) == 0


def test_saved_graph_has_mode_0600_and_loads_unchanged(tmp_path) -> None:
    rng, graph = np.random.default_rng(2), ApproximateSearch(DIM)
    vectors = unit(rng, 100)
    graph.add(np.arange(100), vectors)
    graph.save(tmp_path / "graph")
    assert (tmp_path / "graph").stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["graph"]
    loaded = ApproximateSearch.load(tmp_path / "graph", DIM)
    loaded.retain(np.arange(50, 200))
    assert len(loaded) == 50
    assert loaded.search(vectors[60], 1)[0].tolist() == [60]
    assert loaded.search(vectors[10], 100)[0].min() >= 50


def test_a_graph_is_never_readable_by_others_while_it_is_saved(tmp_path) -> None:
    graph, modes = ApproximateSearch(DIM), []
    place = tmp_path / "graph.part"
    place.touch(0o644)  # of a killed process

    class Saved:
        def save(self, path: str) -> None:
            modes.append(place.stat().st_mode & 0o777)
            real.save(path)
            modes.append(place.stat().st_mode & 0o777)

    real, graph._graph = graph._graph, Saved()
    for _ in range(2):
        graph.save(tmp_path / "graph")
    assert modes == [0o600] * 4
