"""Attached entities of a real Milvus server."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from casemate.backends.collections import milvus_collection
from casemate.backends.collections.milvus_collection import MilvusCollection
from casemate.backends.indexes.attached import AttachedIndex
from casemate.errors import BackendError, CapabilityError, DataError
from casemate.types import Document, Secret

if TYPE_CHECKING:
    from pymilvus import MilvusClient

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the server's launcher
DIM, N = 8, 300
LONG_S = 120


def filled(url: str) -> tuple[MilvusClient, str, np.ndarray]:
    """A collection of entities with vectors of any length, and these vectors normalized."""
    from pymilvus import DataType, MilvusClient

    X = np.random.default_rng(1).standard_normal((N, DIM)).astype(np.float32)
    client, name = MilvusClient(url, timeout=LONG_S), f"c{uuid.uuid4().hex}"
    schema = client.create_schema(enable_dynamic_field=True)
    schema.add_field("nr", DataType.INT64, is_primary=True)
    schema.add_field("body", DataType.VARCHAR, max_length=500)
    schema.add_field("doc", DataType.VARCHAR, max_length=500)
    schema.add_field("v", DataType.FLOAT_VECTOR, dim=DIM)
    params = client.prepare_index_params()
    params.add_index("v", index_type="FLAT", metric_type="COSINE")
    client.create_collection(name, schema=schema, index_params=params, timeout=LONG_S)
    client.insert(name, [{"nr": i, "body": f"t{i}", "doc": f"d{i // 3}", "v": x.tolist()} for i, x in enumerate(X)])
    return client, name, (X / np.linalg.norm(X, axis=1, keepdims=True)).astype(np.float64)


def test_attach_search_change_and_drop_a_collection(milvus_url: str, tmp_path: Path, monkeypatch) -> None:
    """One test, because a standalone server needs seconds to create and load a collection."""
    monkeypatch.setattr(milvus_collection, "SCAN_PAGE", 70)
    client, name, U = filled(milvus_url)

    def opened(**options) -> AttachedIndex:
        given = {"text": "body", "vector": "v", "source": "doc", "timeout_s": LONG_S} | options
        index = AttachedIndex(MilvusCollection(Secret(milvus_url), name, **given), tmp_path / "attached.db")
        index.open("test", DIM)
        return index

    index = opened()
    summary = index.attach()
    assert (summary.rows, summary.sources, summary.rescaled, index.collection.by_cosine) == (N, N // 3, N, True)
    assert [p.after for p in index.collection.scan("139")][0] == "209"  # resumes after the cursor
    q = U[5].astype(np.float32)
    found = index.search(q, 3)
    assert [h.document.id for h in found.hits] == [str(i) for i in np.argsort(-(U @ q))[:3]]
    assert found.hits[0].document.source == "d1"
    assert found.similarity_stats.mean == pytest.approx(float((U @ q).mean()), abs=1e-6)
    assert found.similarity_stats.std == pytest.approx(float((U @ q).std()), abs=1e-6)
    assert index.check() == []
    with pytest.raises(CapabilityError, match="writable"):
        index.remove(["d1"])
    index.close()
    index = opened(writable=True)
    index.add([Document(str(i), "new", source="d1") for i in (3, 7000)], U[:2].astype(np.float32))
    assert index.remove(["d2"]) == 3
    assert index.moments().n == index.collection.count() == N - 3 + 2 - 3
    before = index.moments()
    index.rebuild()
    assert np.allclose(index.moments().scatter, before.scatter, atol=1e-5)
    client.drop_collection(name, timeout=LONG_S)
    with pytest.raises(DataError, match="is missing or not loaded"):
        index.search(q, 1)
    index.close()
    client.close()


def test_an_unreachable_server_is_reported_without_the_token(tmp_path: Path) -> None:
    pytest.importorskip("pymilvus")
    collection = MilvusCollection(Secret("http://127.0.0.1:1"), "c", token=Secret("root:s3cret"), timeout_s=1)
    with pytest.raises(BackendError) as caught:
        AttachedIndex(collection, tmp_path / "attached.db").open("test", DIM)
    assert caught.value.retryable
    assert "s3cret" not in str(caught.value)
