"""A FAISS folder that another program replaces during reads."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from casemate.backends.collections import faiss_folder
from casemate.backends.collections.faiss_folder import FaissFolder
from casemate.errors import DataError

faiss = pytest.importorskip("faiss", reason="faiss-cpu is not installed")
DIM = 4
SAVED_AS = {"Document": b"langchain_core.documents.base", "InMemoryDocstore": b"langchain.docstore.in_memory"}


class Document:
    """Pickled under the name of LangChain's class."""

    def __init__(self, text):
        self.page_content, self.metadata = text, {}


class InMemoryDocstore:
    """See ``Document``."""

    def __init__(self, held):
        self._dict = held


def save(folder, ids, time):
    """Saves documents as LangChain does. Their text is their id; ``time`` is the modification time in seconds."""
    folder.mkdir(exist_ok=True)
    index = faiss.IndexFlatL2(DIM)
    if ids:
        index.add(np.eye(DIM, dtype=np.float32)[[int(name[1]) for name in ids]])
    faiss.write_index(index, str(folder / "index.faiss"))
    data = pickle.dumps((InMemoryDocstore({name: Document(name) for name in ids}), dict(enumerate(ids))), protocol=2)
    for name, module in SAVED_AS.items():
        data = data.replace(b"c%b\n%b\n" % (__name__.encode(), name.encode()), b"c%b\n%b\n" % (module, name.encode()))
    (folder / "index.pkl").write_bytes(data)
    for file in folder.iterdir():
        os.utime(file, (time, time))


def opened_folder(folder):
    opened = FaissFolder(folder)
    opened.open()
    return opened


def test_a_scan_reads_one_snapshot_while_the_files_change(tmp_path, monkeypatch):
    monkeypatch.setattr(faiss_folder, "SCAN_PAGE", 2)
    save(tmp_path / "store", ["a0", "a1", "a2", "a3"], 1)
    opened = opened_folder(tmp_path / "store")
    pages = opened.scan()
    first = next(pages)
    save(tmp_path / "store", ["b3"], 2)
    assert opened.count() == 1
    found = [first, *pages]
    assert [d.id for page in found for d in page.documents] == ["a0", "a1", "a2", "a3"]
    assert [d.text for page in found for d in page.documents] == ["a0", "a1", "a2", "a3"]
    assert np.array_equal(np.concatenate([page.vectors for page in found]), np.eye(DIM))


def test_a_search_reads_one_snapshot_while_the_files_change(tmp_path, monkeypatch):
    save(tmp_path / "store", ["a0", "a1", "a2"], 1)
    opened = opened_folder(tmp_path / "store")
    search = faiss.IndexFlatL2.search

    def changed(index, *given):
        save(tmp_path / "store", ["b2", "b1", "b0"], 2)
        assert opened.count() == 3
        return search(index, *given)

    monkeypatch.setattr(faiss.IndexFlatL2, "search", changed)
    (hit,) = opened.search(np.eye(DIM, dtype=np.float32)[0], 1)
    assert (hit.document.id, hit.document.text, hit.score) == ("a0", "a0", 1.0)


def test_a_search_during_a_save_reads_the_previous_snapshot(tmp_path, monkeypatch):
    store, new = tmp_path / "store", tmp_path / "new"
    save(store, ["a0", "a1", "a2"], 1)
    save(new, ["a2", "b1", "b0"], 1)
    opened = opened_folder(store)

    def found():
        (hit,) = opened.search(np.eye(DIM, dtype=np.float32)[0], 1)
        return hit.document.id, hit.document.text, hit.score

    vectors, documents = ((new / name).read_bytes() for name in ("index.faiss", "index.pkl"))
    for name, written in [
        ("index.faiss", vectors[:-9]),  # as LangChain writes them: first the vectors
        ("index.faiss", vectors),
        ("index.pkl", documents[:-9]),
    ]:
        (store / name).write_bytes(written)
        assert found() == ("a0", "a0", 1.0)
    (store / "index.pkl").write_bytes(documents)
    assert found() == ("b0", "b0", 1.0)
    (store / "index.pkl").write_bytes(documents[:-9])
    assert found() == ("b0", "b0", 1.0)
    monkeypatch.setattr(faiss_folder, "SAVING_S", 0)  # the writer was killed
    with pytest.raises(DataError, match="save_local"):
        found()


def test_an_emptied_folder_has_no_hits(tmp_path):
    save(tmp_path / "store", ["a0"], 1)
    opened = opened_folder(tmp_path / "store")
    save(tmp_path / "store", [], 2)
    assert list(opened.search(np.eye(DIM, dtype=np.float32)[0], 3)) == []
