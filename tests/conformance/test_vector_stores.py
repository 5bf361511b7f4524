"""Milvus and Qdrant indexes under failures of the server and changes by its administrators."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pymilvus import DataType, MilvusClient
from qdrant_client import models

from casemate.backends import index_checks
from casemate.backends.indexes.milvus import MilvusIndex
from casemate.backends.indexes.qdrant import QdrantIndex
from casemate.errors import BackendError, ConfigError, DataError, MissingExtra
from casemate.guard.guard import Guard
from casemate.protocols import Index
from casemate.rag.pipeline import Rag
from casemate.types import Document, Query, Secret
from tests.fakes import BagOfWords, Parrot, unit

DIM = 8
LONG_TIMEOUT_S = 60  # timeout of a call on a busy machine


def documents(source: str, count: int) -> list[Document]:
    return [Document(f"{source}/{i}", f"text {i}", source=source) for i in range(count)]


def guard_over(index: Index) -> Guard:
    """A guard over an index with one document, which the query names."""
    rag = Rag(BagOfWords(dim=DIM), index, Parrot())
    secret_documents = [Document("secret", "the patient Anna Weiss has diabetes")]
    index.add(secret_documents, rag.embedder.embed([d.content for d in secret_documents]))
    return Guard(rag, ())


# Milvus


@pytest.fixture
def milvus(milvus_url: str) -> Iterator[MilvusIndex]:
    """Open, with 60 documents of 6 sources."""
    index = MilvusIndex(Secret(milvus_url), collection=f"i{uuid.uuid4().hex}", timeout_s=LONG_TIMEOUT_S)
    index.open("test", DIM)
    index.add([d for i in range(6) for d in documents(f"s{i}", 10)], unit(0, 60))
    yield index
    index.clear()
    index.close()


def collections(url: str, index: MilvusIndex) -> list[str]:
    client = MilvusClient(url)
    names = sorted(name for name in client.list_collections() if name.startswith(index.collection))
    client.close()
    return names


def test_another_dimension_or_embedder_is_rejected(milvus, milvus_url) -> None:
    for fingerprint, dim in (("test", DIM + 1), ("another", DIM)):
        other = MilvusIndex(milvus_url, collection=milvus.collection)
        with pytest.raises(DataError, match="of the embedder 'test'"):
            other.open(fingerprint, dim)
        other.close()


def test_filters_contain_no_document_text(milvus) -> None:
    injections = ['" or key >= 0 or tenant == "', "' or 1 == 1 --", '\\" in [', "\0", "%", '")']
    assert milvus.remove(injections) == 0
    milvus.add([Document(text, text, source=text) for text in injections], unit(1, len(injections)), injections[0])
    assert milvus.remove(injections[:1], injections[0]) == 1
    assert milvus.tenants() == sorted([injections[0], "default"])
    assert milvus.moments().n == 60


@pytest.mark.parametrize("kind", ["HNSW", "IVF_FLAT"])
def test_approximate_index_kinds_find_the_nearest_documents(milvus_url, kind) -> None:
    index = MilvusIndex(
        milvus_url, collection=f"i{uuid.uuid4().hex}", kind=kind, nlist=4, nprobe=4, timeout_s=LONG_TIMEOUT_S
    )
    index.open("test", DIM)
    index.add(documents("a", 200), unit(2, 200))
    found, s = index.search(unit(3, 1)[0], 10), unit(2, 200).astype(np.float64) @ unit(3, 1)[0].astype(np.float64)
    assert [h.score for h in found.hits] == sorted((h.score for h in found.hits), reverse=True)
    assert found.hits[0].score == pytest.approx(s.max(), abs=1e-12)
    assert found.similarity_stats.n == 200
    index.clear()
    index.close()


def test_deleted_or_renamed_collections_are_reported(milvus, milvus_url, monkeypatch) -> None:
    monkeypatch.setattr(index_checks, "SCAN_PAGE", 7)
    client, q = MilvusClient(milvus_url), unit(4, 1)[0]
    pages = milvus.scan()
    next(pages)
    documents_of, record = collections(milvus_url, milvus)[1:]
    client.rename_collection(record, f"{milvus.collection}_moved")
    for call in (lambda: milvus.search(q, 1), lambda: milvus.remove(["s1"]), lambda: next(pages)):
        with pytest.raises(DataError, match="deleted or renamed"):
            call()
    client.rename_collection(f"{milvus.collection}_moved", record)
    assert len(milvus.search(q, 100).hits) == 60
    client.drop_collection(documents_of)
    for call in (lambda: milvus.search(q, 1), lambda: milvus.remove(["s1"]), lambda: list(milvus.scan())):
        with pytest.raises(DataError, match="deleted, renamed or released"):
            call()
    client.drop_collection(milvus.collection)
    client.drop_collection(next(name for name in collections(milvus_url, milvus) if "_at_" in name))
    with pytest.raises(DataError, match="of the embedder None"):
        milvus.search(q, 1)
    client.close()


def test_a_collection_of_another_program_is_rejected_and_not_changed(milvus_url) -> None:
    name, client = f"i{uuid.uuid4().hex}", MilvusClient(milvus_url)
    schema = client.create_schema(auto_id=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("v", DataType.FLOAT_VECTOR, dim=2)
    client.create_collection(name, schema=schema)
    index = MilvusIndex(milvus_url, collection=name)
    for call in (lambda: index.open("test", DIM), index.clear):
        with pytest.raises(DataError, match="belongs to another program"):
            call()
    assert client.has_collection(name)
    client.drop_collection(name)
    client.close()
    index.close()


def test_a_killed_writer_leaves_a_consistent_index(milvus, milvus_url) -> None:
    """SIGKILL during writes, often within a transaction."""
    script = f"""
import numpy as np
from tests.conformance.test_vector_stores import MilvusIndex, documents, unit
index = MilvusIndex({milvus_url!r}, collection={milvus.collection!r}, timeout_s=4)
index.open("test", {DIM})
for i in range(1000):
    index.add(documents(f"s{{i % 6}}", 10), unit(i, 10))
    print(i, flush=True)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    try:
        for _ in range(3):
            assert child.stdout is not None and child.stdout.readline().strip().isdigit()
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    found = milvus.search(unit(5, 1)[0], 100)
    assert found.similarity_stats.n == len(found.hits) == 60
    assert found.similarity_stats.mean == pytest.approx(np.mean([h.score for h in found.hits]), abs=1e-9)
    milvus.add(documents("after", 5), unit(6, 5))
    assert milvus.check() == []
    assert milvus.moments().n == 65


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://no.such.host.invalid:19530"])
def test_an_unreachable_milvus_server_is_reported(address) -> None:
    index = MilvusIndex(address, timeout_s=1)
    for call in (lambda: index.open("test", DIM), index.clear):
        with pytest.raises(BackendError, match=re.escape(address)) as caught:
            call()
        assert caught.value.retryable


# Qdrant


def test_qdrant_in_a_folder_is_persistent(tmp_path) -> None:
    index = QdrantIndex(str(tmp_path / "q"))
    index.open("test", DIM)
    index.add(documents("a", 5), unit(7, 5))
    before = index.search(unit(8, 1)[0], 3)
    index.close()
    again = QdrantIndex(str(tmp_path / "q"))
    again.open("test", DIM)
    assert again.search(unit(8, 1)[0], 3) == before
    assert again.check() == []
    with pytest.raises(BackendError, match="is not open"):
        index.search(unit(8, 1)[0], 3)
    again.close()


def test_deleted_qdrant_collections_are_reported(monkeypatch) -> None:
    monkeypatch.setattr(index_checks, "SCAN_PAGE", 7)
    index, q = QdrantIndex(":memory:", collection=f"i{uuid.uuid4().hex}"), unit(4, 1)[0]
    index.open("test", DIM)
    index.add(documents("a", 20), unit(9, 20))
    pages = index.scan()
    next(pages)
    client = index._store._client
    client.delete_collection(index._store._documents)
    for call in (lambda: index.search(q, 1), lambda: index.remove(["a"]), lambda: next(pages)):
        with pytest.raises(DataError, match="deleted or renamed"):
            call()
    client.delete_collection(index.collection)
    with pytest.raises(DataError, match="of the embedder None"):
        index.search(q, 1)
    client.create_collection(index.collection, {})
    client.upsert(index.collection, [models.PointStruct(id=0, vector={}, payload={"theirs": 1})])
    for call in (lambda: QdrantIndex(":memory:", collection=index.collection).open("test", DIM), index.clear):
        with pytest.raises(DataError):
            call()
    assert client.collection_exists(index.collection)


def test_the_guard_fails_closed_if_qdrant_fails() -> None:
    index = QdrantIndex(":memory:", collection=f"i{uuid.uuid4().hex}")
    guard = guard_over(index)
    assert asyncio.run(guard.ask(Query("Anna Weiss"))).text.strip() == "secret"
    index._store._client.delete_collection(index._store._documents)
    with pytest.raises(DataError) as caught:
        asyncio.run(guard.ask(Query("Anna Weiss")))
    assert "diabetes" not in str(caught.value)


# Milvus and Qdrant


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: MilvusIndex("http://host", collection="a-b"),
        lambda: MilvusIndex("http://host", collection=""),
        lambda: MilvusIndex("http://host", kind="flat"),
        lambda: MilvusIndex("http://host", ef=0),
        lambda: MilvusIndex("http://host", timeout_s=0),
        lambda: MilvusIndex("http://anna:s3cret@host:19530"),
        lambda: MilvusIndex("file.db"),
        lambda: QdrantIndex("http://host", collection="a b"),
        lambda: QdrantIndex("http://host", search_by="fast"),
        lambda: QdrantIndex("http://host", overfetch=0.5),
    ],
)
def test_invalid_options_are_rejected(wrong) -> None:
    with pytest.raises(ConfigError) as caught:
        wrong()
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(("package", "make"), [("pymilvus", MilvusIndex), ("qdrant_client", QdrantIndex)])
def test_only_use_of_the_index_requires_the_client_package(monkeypatch, package, make) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"pip install 'casemate\[(milvus|qdrant)\]'"):
        make("http://host:1")
