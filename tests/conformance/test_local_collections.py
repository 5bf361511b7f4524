"""Attached collections of Chroma, LanceDB and FAISS: the unmodified packages, in a folder."""

from __future__ import annotations

import os
import pickle
import time

import numpy as np
import pytest

from casemate.backends.collections import chroma_collection, faiss_folder, lancedb_table
from casemate.backends.collections.chroma_collection import ChromaCollection
from casemate.backends.collections.faiss_folder import FaissFolder
from casemate.backends.collections.lancedb_table import LancedbTable
from casemate.backends.indexes.attached import AttachedIndex
from casemate.errors import BackendError, ConfigError, DataError

pytestmark = pytest.mark.slow  # the vendors' packages take seconds to import
DIM, N = 8, 90


def vectors():
    """Vectors of unit length, because Chroma and FAISS rank by the Euclidean distance here."""
    X = np.random.default_rng(1).standard_normal((N, DIM))
    return (X / np.linalg.norm(X, axis=1, keepdims=True)).astype(np.float32)


def names():
    return [f"a'{i:03}" for i in range(N)]


def metadata(i):
    return {"doc": f"d{i // 3}", "even": i % 2 == 0, "n": i}


def make_chroma(folder):
    chromadb = pytest.importorskip("chromadb", reason="chromadb is not installed")
    client = chromadb.PersistentClient(str(folder), chromadb.config.Settings(anonymized_telemetry=False))
    native = client.create_collection("docs", metadata={"hnsw:space": "l2"}, embedding_function=None)
    native.add(
        names(),
        embeddings=vectors(),
        documents=[f"text {i}" for i in range(N)],
        metadatas=[metadata(i) for i in range(N)],
    )
    return native


def chroma(folder, **options):
    return ChromaCollection(str(folder), "docs", **{"source": "doc", **options})


def make_lancedb(folder):
    database = pytest.importorskip("lancedb", reason="lancedb is not installed").connect(str(folder))
    rows = zip(names(), vectors(), strict=True)
    return database.create_table(
        "docs",
        [{"id": n, "vector": v, "text": f"text {i}", "metadata": metadata(i)} for i, (n, v) in enumerate(rows)],
    )


def lancedb(folder, **options):
    return LancedbTable(str(folder), "docs", **{"source": "metadata.doc", **options})


def make_faiss(folder):
    faiss = pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    pytest.importorskip("langchain_community", reason="langchain-community is not installed")
    from langchain_community.docstore.in_memory import InMemoryDocstore
    from langchain_community.vectorstores import FAISS
    from langchain_core.documents import Document as Native

    native = {name: Native(f"text {i}", id=name, metadata=metadata(i)) for i, name in enumerate(names())}
    index = faiss.IndexFlatL2(DIM)
    index.add(vectors())
    store = FAISS(lambda text: [], index, InMemoryDocstore(native), dict(enumerate(names())))
    store.save_local(str(folder))
    return store


def faiss_saved(folder, **options):
    return FaissFolder(folder, **{"source": "doc", **options})


STORES = [(make_chroma, chroma, chroma_collection), (make_lancedb, lancedb, lancedb_table)]
STORES += [(make_faiss, faiss_saved, faiss_folder)]


@pytest.fixture(params=STORES, ids=["chroma", "lancedb", "faiss"])
def store(request, tmp_path, monkeypatch):
    """The filled store, and a function that opens it as a collection."""
    fill, collection, module = request.param
    monkeypatch.setattr(module, "SCAN_PAGE", 40)
    vendor_store = fill(tmp_path / "store")
    return vendor_store, lambda **options: collection(tmp_path / "store", **options)


def test_rows_are_attached_with_their_sources_and_moments(store, tmp_path):
    index = AttachedIndex(store[1](), tmp_path / "attached.db")
    index.open("test", DIM)
    summary = index.attach()
    assert (summary.rows, summary.sources) == (N, N // 3)
    U = vectors().astype(np.float64)
    q = U[5].astype(np.float32)
    found = index.search(q, 3)
    assert found.similarity_stats.mean == pytest.approx(float((U @ q).mean()), abs=1e-6)
    assert found.similarity_stats.std == pytest.approx(float((U @ q).std()), abs=1e-6)
    assert found.hits[0].document.id == names()[5]
    assert (found.hits[0].document.source, found.hits[0].document.text) == ("d1", "text 5")
    assert index.check() == []
    index.close()
    with pytest.raises(BackendError, match="not open"):
        index.search(q, 1)


def test_only_rows_that_match_a_filter_are_attached(tmp_path):
    make_chroma(tmp_path / "chroma")
    make_lancedb(tmp_path / "lance")
    for even in (chroma(tmp_path / "chroma", only={"even": True}), lancedb(tmp_path / "lance", where="metadata.even")):
        even.open()
        assert even.count() == N // 2 == sum(len(page.documents) for page in even.scan())
        assert {int(hit.document.id[2:]) % 2 for hit in even.search(vectors()[5], 9)} == {0}
        assert [d.id for d in even.find(names()[:2]).documents] == names()[:1]
        even.close()
    two = chroma(tmp_path / "chroma", only={"even": True, "doc": "d0"})
    two.open()
    assert [d.id for page in two.scan() for d in page.documents] == [names()[0], names()[2]]


def test_a_resumed_scan_of_lancedb_reads_one_version(tmp_path, monkeypatch):
    monkeypatch.setattr(lancedb_table, "SCAN_PAGE", 40)
    table = make_lancedb(tmp_path / "lance")
    opened = lancedb(tmp_path / "lance")
    opened.open()
    first = next(opened.scan())
    table.delete("metadata.n < 50")
    rest = [d.id for page in opened.scan(first.after) for d in page.documents]
    assert [d.id for d in first.documents] + rest == names()
    assert opened.count() == N - 50
    assert not opened.find(names()[:1]).documents


def test_a_missing_store_or_column_is_an_error_and_is_not_created(tmp_path):
    pytest.importorskip("chromadb", reason="chromadb is not installed")
    with pytest.raises(DataError, match="holds no Chroma database"):
        chroma(tmp_path / "nowhere").open()
    make_chroma(tmp_path / "chroma")
    with pytest.raises(DataError, match="does not exist"):
        ChromaCollection(str(tmp_path / "chroma"), "others").open()
    make_lancedb(tmp_path / "lance")
    with pytest.raises(DataError, match="does not exist"):
        LancedbTable(str(tmp_path / "lance"), "others").open()
    with pytest.raises(DataError, match="has no column 'body'; it has id, vector, text, metadata"):
        lancedb(tmp_path / "lance", text="body").open()
    with pytest.raises(DataError, match="rejected the request; check where"):
        opened = lancedb(tmp_path / "lance", where="nonsense ===")
        opened.open()
        opened.count()
    with pytest.raises(DataError, match="cannot be read"):
        FaissFolder(tmp_path / "nowhere").open()
    with pytest.raises(ConfigError, match="file name without ending"):
        FaissFolder(tmp_path, "../x")
    assert not (tmp_path / "nowhere").exists()


class _CodeOnUnpickling:
    def __reduce__(self):
        return (eval, ("__import__('pathlib').Path('attacked').touch()",))


@pytest.mark.parametrize("value", [_CodeOnUnpickling(), ({"_dict": {}}, {}), "a text"])
def test_a_malicious_pickle_file_runs_no_code(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    make_faiss(tmp_path / "store")
    (tmp_path / "store" / "index.pkl").write_bytes(pickle.dumps(value))
    with pytest.raises(DataError, match="not what LangChain's save_local writes"):
        faiss_saved(tmp_path / "store").open()
    assert not (tmp_path / "attacked").exists()


def test_changed_faiss_files_are_reloaded_and_checked_for_consistency(tmp_path):
    from langchain_core.documents import Document as Native

    store = make_faiss(tmp_path / "store")
    opened = faiss_saved(tmp_path / "store")
    opened.open()
    store.docstore.add({"new": Native("new text", id="new")})
    store.index.add(vectors()[:1])
    store.index_to_docstore_id[N] = "new"
    store.save_local(str(tmp_path / "store"))
    assert opened.count() == N + 1
    assert [d.text for d in opened.find(["new"]).documents] == ["new text"]
    store.index.add(vectors()[:1])
    store.save_local(str(tmp_path / "store"))
    long_ago = time.time() - 2 * faiss_folder.SAVING_S  # otherwise a save might still be in progress
    for file in (tmp_path / "store").iterdir():
        os.utime(file, (long_ago, long_ago))
    with pytest.raises(DataError, match="do not belong together"):
        opened.count()
