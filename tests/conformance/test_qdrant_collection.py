"""Attached points of Qdrant, in the client's local mode."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from casemate.backends.collections import qdrant_collection
from casemate.backends.collections.qdrant_collection import QdrantCollection
from casemate.backends.indexes.attached import AttachedIndex
from casemate.cli.attach import AttachReport
from casemate.errors import CapabilityError, DataError
from casemate.types import Document, Secret

qdrant_client = pytest.importorskip("qdrant_client")
DIM, N = 8, 600


def create(folder: Path, vectors: np.ndarray, **options: object) -> None:
    from qdrant_client import QdrantClient, models

    client = QdrantClient(path=str(folder))
    params = models.VectorParams(size=DIM, distance=options.get("distance", models.Distance.COSINE))
    client.create_collection("theirs", {"v": params} if options.get("named") else params)
    stored = client._client.collections["theirs"].storage.storage
    stored.execute("PRAGMA synchronous = OFF")  # the client commits each point
    client.upsert(
        "theirs",
        [
            models.PointStruct(
                id=i,
                vector={"v": x.tolist()} if options.get("named") else x.tolist(),
                payload={"body": f"text {i}", "doc": f"d{i // 3}", "even": i % 2 == 0, "n": i} if i != 1 else {},
            )
            for i, x in enumerate(vectors)
        ],
    )
    client.close()


@pytest.fixture(scope="module")
def created() -> dict[str, Path]:
    """A folder per set of collection options, because the client writes each point to the disk."""
    return {}


@pytest.fixture
def points(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, created: dict[str, Path]
) -> Callable[..., np.ndarray]:
    """Copies a collection of points with vectors of any length; the second has no text."""

    def make(**options: object) -> np.ndarray:
        X = np.random.default_rng(1).standard_normal((N, DIM)).astype(np.float32)
        key = str({name: value for name, value in options.items() if value})
        if key not in created:
            created[key] = tmp_path_factory.mktemp("created") / "qdrant"
            create(created[key], X, **options)
        shutil.copytree(created[key], tmp_path / "qdrant")
        return (X / np.linalg.norm(X, axis=1, keepdims=True)).astype(np.float64)

    return make


def opened(folder: Path, **options) -> AttachedIndex:
    given = {"text": "body", "source": "doc"} | options
    collection = QdrantCollection(Secret(str(folder / "qdrant")), "theirs", **given)
    index = AttachedIndex(collection, folder / "attached.db")
    index.open("test", DIM)
    return index


@pytest.mark.parametrize("name", ["", "v"])
def test_points_are_attached(points, tmp_path, monkeypatch, name) -> None:
    monkeypatch.setattr(qdrant_collection, "SCAN_PAGE", 100)
    U = points(named=bool(name))
    index = opened(tmp_path, vector=name)
    summary = index.attach()
    assert (summary.rows, summary.textless, summary.sources) == (N - 1, 1, N // 3)
    rest = np.delete(U, 1, axis=0)
    q = U[5].astype(np.float32)
    found = index.search(q, 3)
    assert found.similarity_stats.n == N - 1
    assert found.similarity_stats.mean == pytest.approx(float((rest @ q).mean()), abs=1e-6)
    assert found.similarity_stats.std == pytest.approx(float((rest @ q).std()), abs=1e-6)
    best = [i for i in np.argsort(-(U @ q)).tolist() if i != 1][:3]
    assert [h.document.id for h in found.hits] == [str(i) for i in best]
    assert (found.hits[0].document.source, found.hits[0].document.text) == ("d1", "text 5")
    assert found.hits[0].document.metadata == {"even": False, "n": 5}
    assert index.check() == []
    with pytest.raises(CapabilityError, match="writable"):
        index.remove(["d1"])
    index.close()


def test_points_without_text_do_not_displace_hits(points, tmp_path) -> None:
    U = points()
    index = opened(tmp_path, only={"even": True})
    client, q = index.collection._client, U[4].astype(np.float32)
    near = [i for i in np.argsort(-(U @ q)).tolist() if i % 2 == 0]
    client.delete_payload("theirs", ["body"], points=near[:100])  # more points than the extra candidates
    index.attach()
    assert [h.document.id for h in index.search(q, 3).hits] == [str(i) for i in near[100:103]]
    index.close()


def test_a_metric_other_than_cosine_is_reported_if_lengths_differ(points, tmp_path) -> None:
    from qdrant_client.models import Distance

    points(distance=Distance.DOT)
    index = opened(tmp_path)
    report = AttachReport(index, index.attach(), 1.0, 1.0, False)
    assert any("600 vectors do not have unit length" in s or "599 vectors" in s for s in report.lacking())
    index.collection.by_cosine = True
    assert not any("unit length" in s for s in report.lacking())
    index.close()


def test_only_points_that_match_the_payload_filter_are_attached(points, tmp_path) -> None:
    U = points()
    index = opened(tmp_path, only={"even": True})
    assert index.attach().rows == N // 2
    q = U[5].astype(np.float32)
    assert {int(h.document.id) % 2 for h in index.search(q, 20).hits} == {0}
    assert index.search(q, 3).similarity_stats.mean == pytest.approx(float((U[::2] @ q).mean()), abs=1e-6)
    index.close()


def test_changes_through_casemate_update_moments_and_points(points, tmp_path) -> None:
    U = points()
    index = opened(tmp_path, writable=True)
    index.attach()
    index.add([Document(str(i), "new", source="d1") for i in (3, 7000)], U[:2].astype(np.float32))
    assert index.remove(["d2", "d9"]) == 6
    assert index.moments().n == N - 1 - 3 + 2 - 6 == index.collection.count() - 1
    before = index.moments()
    index.rebuild()
    assert np.allclose(index.moments().scatter, before.scatter, atol=1e-6)
    assert index.check() == []
    with pytest.raises(DataError, match="needs numbers or UUIDs as ids; got 'a/1'"):
        index.add([Document("a/1", "x")], U[:1].astype(np.float32))
    assert index.check() == []
    index.close()


def test_a_missing_vector_or_collection_is_reported(points, tmp_path) -> None:
    points()
    with pytest.raises(DataError, match="has no vector 'w'"):
        opened(tmp_path, vector="w")
    index = opened(tmp_path)
    index.attach()
    index.collection._client.delete_collection("theirs")
    with pytest.raises(DataError, match="is missing; check whether it was renamed or deleted"):
        index.search(np.eye(DIM, dtype=np.float32)[0], 1)
    index.close()


def test_nested_fields_are_readable_and_not_writable(tmp_path):
    from qdrant_client import QdrantClient, models

    client = QdrantClient(path=str(tmp_path / "nested"))
    client.create_collection("theirs", models.VectorParams(size=DIM, distance=models.Distance.COSINE))
    payloads = [{"meta": {"text": text, "t": tenant}} for text, tenant in [("one", "x"), (0, "x"), ("three", "y")]]
    rows = [models.PointStruct(id=i, vector=np.eye(DIM)[i].tolist(), payload=p) for i, p in enumerate(payloads)]
    client.upsert("theirs", rows)
    client.close()
    options = {"text": "meta.text", "source": "", "only": {"meta.t": "x"}, "writable": True}
    collection = QdrantCollection(Secret(str(tmp_path / "nested")), "theirs", **options)
    assert collection.open() == DIM
    assert [d.text for d in collection.find(["0", "1", "2"]).documents] == ["one", "0"]
    with pytest.raises(CapabilityError, match="can be read, not written: 'meta.t', 'meta.text'"):
        collection.add([Document("7", "new")], np.eye(DIM, dtype=np.float32)[:1])
    collection.close()
