"""The embedded index under killed processes, full disks and damaged files."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from casemate.backends import index_checks
from casemate.backends.indexes import sqlite
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import BackendError, CasemateError, DataError, MissingExtra
from casemate.maths.moments import CorpusMoments
from casemate.maths.nearest import ApproximateSearch, ExactSearch
from casemate.types import Document
from tests import fakes

DIM = 16
unit = partial(fakes.unit, dim=DIM)
WORKER = """
import resource, signal, sys
import numpy as np
from pathlib import Path
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import CasemateError
from casemate.types import Document

path, name, count, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
rng = np.random.default_rng(len(name))
index = SqliteIndex(path)
index.open("test", 16)
print("ready", flush=True)
sys.stdin.readline()
try:
    for i in range(count):
        x = rng.standard_normal((7, 16))
        x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
        index.add([Document(f"{name}-{i}/{j}", "text " * 200, source=f"{name}-{i}") for j in range(7)], x)
        print(f"{name}-{i}", flush=True)
except CasemateError as error:
    print(type(error).__name__, error, flush=True)
"""


def documents(source: str, count: int, text: str = "text") -> list[Document]:
    return [Document(f"{source}/{i}", f"{text} {i}", source=source, digest=f"digest of {source}") for i in range(count)]


def opened(path: Path, **options: object) -> SqliteIndex:
    index = SqliteIndex(path, **options)
    index.open("test", DIM)
    return index


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.db"


@pytest.fixture
def filled(path: Path) -> Path:
    """The path of a closed index with 500 documents of 20 sources."""
    rng, index = np.random.default_rng(0), opened(path)
    for s in range(20):
        index.add(documents(f"s{s}", 25), unit(rng, 25))
    index.close()
    return path


def start(path: Path, name: str, count: int, limit: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, str(path), name, str(count), str(limit)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdout.readline() == "ready\n"
    return worker


def go(worker: subprocess.Popen[str]) -> None:
    worker.stdin.write("\n")
    worker.stdin.flush()


def finish(worker: subprocess.Popen[str]) -> list[str]:
    """The remaining lines. ``communicate`` would lose lines that ``readline`` has already buffered."""
    with worker.stdin, worker.stdout:
        lines = worker.stdout.read().splitlines()
    worker.wait(60)
    return lines


def test_a_kill_loses_no_acknowledged_document(path) -> None:
    acknowledged: set[str] = set()
    for round_ in range(4):
        worker = start(path, f"w{'x' * round_}", 10_000)
        go(worker)
        for _ in range(5 + 7 * round_):
            acknowledged.add(worker.stdout.readline().strip())
        worker.send_signal(signal.SIGKILL)
        acknowledged.update(line for line in finish(worker) if line)
        index = opened(path)
        stored = index.digests().keys()
        assert acknowledged <= stored
        assert len(stored) <= len(acknowledged) + round_ + 1  # the write in flight may have been committed
        assert index.moments().n == 7 * len(stored)
        assert index.check() == []
        index.close()


def test_two_processes_write_concurrently(path) -> None:
    workers = [start(path, name, 40) for name in ("one", "another")]
    for worker in workers:
        go(worker)
    outputs = [finish(worker) for worker in workers]
    assert [len(lines) for lines in outputs] == [40, 40]
    index = opened(path)
    assert index.moments().n == 2 * 40 * 7
    assert set(index.digests()) == set(outputs[0]) | set(outputs[1])
    assert index.check() == []
    index.close()


def test_the_next_search_sees_changes_of_another_process(path) -> None:
    rng = np.random.default_rng(1)
    index, q = opened(path), unit(rng, 1)[0]
    index.add(documents("mine", 2), unit(rng, 2))
    worker = start(path, "theirs", 3)
    assert index.search(q, 1000).similarity_stats.n == 2
    go(worker)
    assert len(finish(worker)) == 3
    found = index.search(q, 1000)
    assert found.similarity_stats.n == len(found.hits) == 2 + 3 * 7
    s = [h.score for h in found.hits]
    assert found.similarity_stats.mean == pytest.approx(np.mean(s), abs=1e-12)
    assert found.similarity_stats.std == pytest.approx(np.std(s), abs=1e-12)
    assert index.remove([f"theirs-{i}" for i in range(3)]) == 21
    index.close()


def garbage(data: bytes) -> bytes:
    return data[:100] + np.random.default_rng(0).bytes(len(data) - 100)


DAMAGES = {
    "random bytes": lambda data: np.random.default_rng(0).bytes(len(data)),
    "no database": lambda data: b"These are not the bytes that you look for. " * 100,
    "cut in half": lambda data: data[: len(data) // 2],
    "cut within a page": lambda data: data[: len(data) - 5000],
    "cut to a header": lambda data: data[:100],
    "garbage after the header": garbage,
    "garbage after the first page": lambda data: data[:8192] + garbage(data)[8192:],
    "a page of zeros": lambda data: data[: 8192 * 5] + bytes(8192) + data[8192 * 6 :],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_rejected_or_reported_and_not_changed(filled, damage) -> None:
    filled.write_bytes(damage(filled.read_bytes()))
    before, index = filled.read_bytes(), SqliteIndex(filled)
    try:
        index.open("test", DIM)
        problems = index.check()
    except (DataError, BackendError) as error:
        problems = [str(error)]
        assert str(filled) in str(error)
        assert "damaged" in str(error)
    finally:
        index.close()
    assert problems
    assert filled.read_bytes() == before


def test_a_damaged_page_of_vectors_fails_the_search(filled) -> None:
    data = bytearray(filled.read_bytes())
    data[8192 * 3 :] = np.random.default_rng(0).bytes(len(data) - 8192 * 3)
    filled.write_bytes(data)
    index = SqliteIndex(filled)
    with pytest.raises(DataError, match="damaged"):
        index.open("test", DIM)
        index.search(unit(np.random.default_rng(0), 1)[0], 5)
    index.close()


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_a_database_of_another_program_is_rejected_and_not_changed(path, mode) -> None:
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA journal_mode = {mode}")
    db.execute("CREATE TABLE document (key INTEGER PRIMARY KEY, text TEXT)")
    db.execute("INSERT INTO document VALUES (1, 'do not lose me')")
    db.commit()
    db.close()
    before, index = path.read_bytes(), SqliteIndex(path)
    for call in (lambda: index.open("test", DIM), index.clear):
        with pytest.raises(DataError, match="another program; choose another path"):
            call()
    index.close()
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_newer_format_is_rejected(filled) -> None:
    with sqlite3.connect(filled) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    index = SqliteIndex(filled)
    with pytest.raises(DataError, match="index format 99; this version reads 1"):
        index.open("test", DIM)
    index.close()


def test_documents_survive_a_full_disk_and_writing_works_afterwards(filled) -> None:
    rng, index = np.random.default_rng(2), opened(filled)
    pages = index._db.execute("PRAGMA page_count").fetchone()[0]
    index._db.execute(f"PRAGMA max_page_count = {pages + 3}")
    with pytest.raises(BackendError, match="disk is full") as caught:
        index.add(documents("big", 500, "long " * 100), unit(rng, 500))
    assert caught.value.retryable
    assert index.check() == []
    assert index.moments().n == 500
    index._db.execute("PRAGMA max_page_count = 1000000")
    index.add(documents("big", 500, "long " * 100), unit(rng, 500))
    index.close()
    index = opened(filled)
    assert index.moments().n == 1000
    assert index.check() == []
    index.close()


def test_a_file_size_limit_loses_no_acknowledged_document(path) -> None:
    worker = start(path, "w", 10_000, limit=400_000)
    go(worker)
    *acknowledged, error = finish(worker)
    assert len(acknowledged) > 1
    assert error.startswith("BackendError")
    index = opened(path)
    assert set(index.digests()) == set(acknowledged)
    assert index.check() == []
    index.add(documents("more", 3), unit(np.random.default_rng(0), 3))
    index.close()


def test_a_file_instead_of_a_folder_is_reported(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file/index.db", tmp_path / "file/deeper/index.db", tmp_path):
        with pytest.raises(BackendError, match=str(path)):
            SqliteIndex(path).open("test", DIM)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_reported(tmp_path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BackendError, match="cannot create the index"):
        SqliteIndex(tmp_path / "index.db").open("test", DIM)


def test_a_write_lock_that_is_never_released_is_reported(filled) -> None:
    index, other = opened(filled), sqlite3.connect(filled, isolation_level=None)
    index._db.execute("PRAGMA busy_timeout = 20")
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(BackendError, match="another process writes") as caught:
        index.remove(["s1"])
    assert caught.value.retryable
    assert index.moments().n == 500  # readers are not blocked
    other.execute("ROLLBACK")
    other.close()
    assert index.remove(["s1"]) == 25
    index.close()


def test_files_are_readable_by_the_owner_only(tmp_path) -> None:
    path = tmp_path / "new/folder/index.db"
    index = opened(path, approximate_above=10)
    index.add(documents("a", 50), unit(np.random.default_rng(0), 50))
    index.warm()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    files = {p.name: p.stat().st_mode & 0o777 for p in path.parent.iterdir()}
    assert set(files.values()) == {0o600}
    assert len(files) == 4  # including the log, the shared memory and the graph
    index.close()


def test_without_usearch_search_is_exact_and_an_explicit_limit_is_an_error(path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("casemate.backends.indexes.sqlite.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"casemate\[hnsw\]"):
        SqliteIndex(path, approximate_above=10)
    monkeypatch.setattr("casemate.backends.indexes.sqlite.APPROXIMATE_ABOVE", 10)
    index, vectors = opened(path, approximate_above=10), unit(np.random.default_rng(0), 50)
    index.add(documents("a", 50), vectors)
    assert [index.search(v, 1).hits[0].score for v in vectors] == pytest.approx([1] * 50)
    assert [r.getMessage() for r in caplog.records] == [
        "50 documents exceed approximate_above; pip install 'casemate[hnsw]' for approximate search"
    ]
    index.close()


@pytest.mark.parametrize("shape", ["one of many", "all", "replaced", "cleared"])
def test_a_removed_text_leaves_no_bytes_in_the_file(path, shape) -> None:
    rng, index = np.random.default_rng(3), opened(path)
    secret = "the patient Xanthippe Quuxwell"
    for s in range(40):
        text = f"{secret} {'long ' * 300}" if s in {7, 8, 20} else f"harmless {'long ' * int(rng.integers(1, 600))}"
        source = f"Quuxwell {s}" if s in {7, 8, 20} else f"s{s}"
        index.add(documents(source, 12, text), unit(rng, 12))
    removed_texts = [f"Quuxwell {s}" for s in (7, 8, 20)]
    if shape == "replaced":
        for source in removed_texts:
            index.add([Document(f"new {source[-2:]}", "nothing", source=source)], unit(rng, 1))
        index.remove(removed_texts)
    elif shape == "cleared":
        index.clear()
    else:
        index.remove(removed_texts if shape == "one of many" else list(index.digests()))
    index.close()  # merges the log into the file
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    data = path.read_bytes()
    assert b"Xanthippe" not in data
    assert b"Quuxwell" not in data


def tamper(path: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(path) as db:
        assert db.execute(statement, values).rowcount > 0
    db.close()


def scaled(blob: bytes, factor: float) -> bytes:
    return (np.frombuffer(blob) * factor).tobytes()


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("UPDATE tenant SET n = n + 1", "the moments count 501 documents, the index 500"),
        ("UPDATE tenant SET mean = scaled(mean, 1.01)", "the moments do not fit"),
        ("UPDATE tenant SET scatter = scaled(scatter, 1.0001)", "the squared lengths sum to "),
        ("UPDATE tenant SET scatter = scaled(scatter, 1e300)", "the squared lengths sum to "),
        ("UPDATE tenant SET mean = x'00'", "the moments are damaged"),
        ("UPDATE tenant SET n = 0", "the moments count 0 documents"),
        ("DELETE FROM tenant", "the moments count 0 documents"),
        ("INSERT INTO tenant SELECT 'ghost', 1, 5, mean, scatter FROM tenant", "'ghost': the moments count 5"),
    ],
)
def test_changed_moments_are_reported_and_rebuilt(filled, statement, complaint) -> None:
    with sqlite3.connect(filled) as db:
        db.create_function("scaled", 2, scaled)
        assert db.execute(statement).rowcount > 0
    db.close()
    index = opened(filled)
    found = index.check()
    assert any(complaint in sentence for sentence in found)
    assert all("casemate doctor --fix" in sentence for sentence in found)
    index.rebuild()
    assert index.check() == []
    found_now = index.search(unit(np.random.default_rng(4), 1)[0], 1000)
    scores = [h.score for h in found_now.hits]
    assert found_now.similarity_stats.n == 500
    assert found_now.similarity_stats.mean == pytest.approx(np.mean(scores), abs=1e-9)
    assert found_now.similarity_stats.std == pytest.approx(np.std(scores), abs=1e-9)
    index.close()


def test_rotated_moments_are_reported(filled) -> None:
    """The number and the squared lengths stay the same."""
    db = sqlite3.connect(filled)
    n, mean, scatter = db.execute("SELECT n, mean, scatter FROM tenant").fetchone()
    m, S = np.frombuffer(mean), np.frombuffer(scatter).reshape(DIM, DIM)
    turn, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((DIM, DIM)))
    with db:
        db.execute("UPDATE tenant SET mean = ?, scatter = ?", ((turn @ m).tobytes(), (turn @ S @ turn.T).tobytes()))
    db.close()
    index = opened(filled)
    assert ["do not fit" in sentence for sentence in index.check()] == [True]
    index.close()


def test_changed_vectors_are_reported(filled) -> None:
    rng = np.random.default_rng(5)
    for key, value, complaint in [
        (3, (unit(rng, 1) * 2).astype(np.float32), "the vector with key 3 is not of unit length"),
        (3, np.full(DIM, np.nan, np.float32), "the vector with key 3 is not of unit length"),
        (3, unit(rng, 1), "the moments do not fit the vectors"),
        (3, unit(rng, 1, dim=DIM - 1), "1 documents have no vector or an incomplete one"),
    ]:
        tamper(filled, "UPDATE vector SET value = ? WHERE key = ?", value.tobytes(), key)
        index = opened(filled)
        assert any(complaint in sentence for sentence in index.check()), complaint
        index.close()


def test_documents_without_a_vector_are_reported_and_can_be_indexed_again(filled) -> None:
    tamper(filled, "DELETE FROM vector WHERE key = 3")
    index = opened(filled)
    assert "1 documents have no vector or an incomplete one: run 'casemate index --rebuild'" in index.check()
    assert len(index.search(unit(np.random.default_rng(0), 1)[0], 1000).hits) == 499
    index.add(documents("s0", 25), unit(np.random.default_rng(6), 25))
    index.rebuild()
    assert index.check() == []
    assert len(index.search(unit(np.random.default_rng(0), 1)[0], 1000).hits) == 500
    index.close()


def test_a_scan_yields_pages_and_releases_its_lock_between_them(filled, monkeypatch) -> None:
    monkeypatch.setattr(index_checks, "SCAN_PAGE", 7)
    index = opened(filled)
    pages = index.scan()
    next(pages)  # not read to the end
    writer = threading.Thread(target=index.remove, args=(["s3"],))
    writer.start()
    writer.join(timeout=30)
    assert not writer.is_alive()
    sizes = [len(documents) for documents, _ in index.scan()]
    assert sizes == [7] * 67 + [6]
    assert sum(len(documents) for documents, _ in pages) == 475 - 7
    index.close()
    with pytest.raises(BackendError, match="not open"):
        next(index.scan())


def test_a_scan_yields_the_documents_that_a_search_finds(filled) -> None:
    tamper(filled, "DELETE FROM vector WHERE key = 3")
    index = opened(filled)
    found = [d.id for documents, _ in index.scan() for d in documents]
    assert set(found) == {h.document.id for h in index.search(unit(np.random.default_rng(0), 1)[0], 1000).hits}
    assert len(found) == 499
    index.close()
    tamper(filled, "UPDATE document SET metadata = '{' WHERE key = 5")
    index = opened(filled)
    with pytest.raises(DataError, match="'s0/4' is damaged"):
        list(index.scan())
    index.close()


def test_vectors_within_the_tolerance_of_unit_length_are_valid(path) -> None:
    index = opened(path)
    index.add(documents("a", 50), (unit(np.random.default_rng(0), 50) * (1 + 0.9e-4)).astype(np.float32))
    assert index.check() == []
    index.close()


def test_moments_stay_accurate_over_many_changes(path) -> None:
    rng, index, stored = np.random.default_rng(7), opened(path), {}
    index._db.execute("PRAGMA synchronous = OFF")  # this test does not need durability
    for _ in range(2000):
        source = f"s{rng.integers(60)}"
        if rng.random() < 0.45:
            index.remove([source])
            stored.pop(source, None)
        else:
            stored[source] = unit(rng, int(rng.integers(1, 4)))
            index.add(documents(source, len(stored[source])), stored[source])
    moments, fresh = index.moments(), CorpusMoments.of(np.concatenate(list(stored.values())))
    assert moments.n == fresh.n
    assert np.abs(moments.mean - fresh.mean).max() < 1e-9
    assert np.abs(moments.scatter - fresh.scatter).max() < 1e-9
    index.close()


# Large tenants: the graph


def clustered(seed: int, n: int) -> np.ndarray:
    rng, centres = np.random.default_rng(seed), np.random.default_rng(77).standard_normal((100, DIM))
    x = centres[rng.integers(100, size=n)] + 0.3 * rng.standard_normal((n, DIM))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """The folder of a closed approximate index with 3,000 documents of 30 sources, and its graph."""
    folder = tmp_path_factory.mktemp("large")
    index, vectors = opened(folder / "index.db", approximate_above=1000), clustered(0, 3000)
    for s in range(30):
        index.add(documents(f"s{s}", 100), vectors[s * 100 : s * 100 + 100])
    index.warm()
    index.close()
    return folder


@pytest.fixture
def copy(large: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(large, tmp_path / "copy")) / "index.db"


@pytest.fixture
def linked(monkeypatch) -> list[int]:
    """Numbers of vectors added to a graph, per call."""
    counts: list[int] = []
    add = ApproximateSearch.add

    def counted(self, keys, vectors):
        counts.append(len(keys))
        add(self, keys, vectors)

    monkeypatch.setattr(ApproximateSearch, "add", counted)
    return counts


def graphs(path: Path) -> list[Path]:
    return sorted(path.parent.glob("index.db-graph-*"))


def recall_at_1(path: Path) -> float:
    """Recall of the approximate search, relative to the exact one."""
    exact, approximate = opened(path), opened(path, approximate_above=1000)
    same = []
    for q in clustered(1, 200):
        true, found = exact.search(q, 1), approximate.search(q, 1)
        same.append(true.hits == found.hits)
        assert true.similarity_stats == found.similarity_stats
    assert isinstance(approximate._caches["default"].neighbors, ApproximateSearch)
    exact.close()
    approximate.close()
    return float(np.mean(same))


def test_the_saved_graph_is_loaded_and_finds_the_nearest_documents(copy, linked) -> None:
    (graph,) = graphs(copy)
    before = graph.stat().st_mtime_ns
    assert recall_at_1(copy) >= 0.99
    index = opened(copy, approximate_above=1000)
    index.warm()
    index.close()
    assert linked == []
    assert graphs(copy) == [graph]
    assert graph.stat().st_mtime_ns == before


def test_a_loaded_graph_is_updated_with_later_changes(copy, linked) -> None:
    index, vectors = opened(copy), clustered(2, 300)  # this handle does not use the graph
    index.remove([f"s{s}" for s in range(8)])
    index.add(documents("new", 150), vectors[:150])
    index.add(documents("s20", 100), vectors[150:250])
    index.add(documents("gone at once", 50), vectors[250:])
    index.remove(["gone at once"])
    index.close()
    assert recall_at_1(copy) >= 0.99
    assert sum(linked) == 250
    index = opened(copy, approximate_above=1000)
    assert [index.search(v, 1).hits[0].document.id for v in vectors[:3]] == ["new/0", "new/1", "new/2"]
    assert len(index.search(vectors[0], 5000).hits) >= 0.99 * index.moments().n
    index.remove(["new"])  # also updates a graph in use
    assert index.search(vectors[0], 1).hits[0].document.source != "new"
    index.warm()
    index.close()
    linked.clear()
    assert recall_at_1(copy) >= 0.99
    assert linked == []


def test_a_sparse_graph_is_rebuilt(copy, linked) -> None:
    index = opened(copy, approximate_above=1000)
    index.search(clustered(0, 1)[0], 1)
    index.remove([f"s{s}" for s in range(16)])
    for _ in range(2):  # the first search detects that it is sparse
        assert len(index.search(clustered(0, 1)[0], 2000).hits) >= 0.99 * 1400
    assert sum(linked) == 1400
    index.close()


def test_the_graph_of_another_embedder_is_deleted(copy, linked) -> None:
    index, vectors = SqliteIndex(copy, approximate_above=1000), clustered(3, 1500)
    index.clear()
    assert graphs(copy) == []
    index.open("another", DIM)
    index.add(documents("a", 1500), vectors)
    index.warm()
    assert [index.search(v, 1).hits[0].document.id for v in vectors[:5]] == [f"a/{i}" for i in range(5)]
    assert sum(linked) == 1500
    assert len(graphs(copy)) == 1
    index.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data[: len(data) // 2] + os.urandom(len(data) - len(data) // 2),  # would crash the library
    ],
)
def test_a_damaged_graph_is_rebuilt(copy, linked, damage) -> None:
    (graph,) = graphs(copy)
    graph.write_bytes(damage(graph.read_bytes()))
    index = opened(copy, approximate_above=1000)
    assert len(index.search(clustered(0, 1)[0], 10).hits) == 10
    assert sum(linked) == 3000
    index.warm()
    index.close()
    linked.clear()
    assert recall_at_1(copy) >= 0.99
    assert linked == []


def test_a_graph_newer_than_a_restored_index_is_not_used(copy, linked) -> None:
    backup = copy.read_bytes()
    index = opened(copy, approximate_above=1000)
    index.add(documents("later", 500), clustered(4, 500))
    index.warm()
    index.close()
    copy.write_bytes(backup)
    linked.clear()
    index, vectors = opened(copy, approximate_above=1000), clustered(5, 600)
    index.add(documents("instead", 600), vectors)  # the graph maps these keys to other vectors
    assert [index.search(v, 1).hits[0].document.id for v in vectors[:5]] == [f"instead/{i}" for i in range(5)]
    assert sum(linked) == 3600
    index.close()


def test_the_kind_of_search_follows_the_size_of_the_tenant(path) -> None:
    rng, index = np.random.default_rng(8), opened(path, approximate_above=100)
    vectors = unit(rng, 150)
    for low, high, kind in ((0, 100, ExactSearch), (100, 150, ApproximateSearch)):
        index.add(documents(f"s{low}", high - low), vectors[low:high])
        assert len(index.search(vectors[0], 1000).hits) == high
        assert type(index._caches["default"].neighbors) is kind
    index.remove(["s100"])
    assert [h.document.id for h in index.search(vectors[0], 1000).hits][0] == "s0/0"
    assert type(index._caches["default"].neighbors) is ExactSearch
    index.close()


def test_a_sparse_exact_cache_is_reloaded(path, monkeypatch) -> None:
    monkeypatch.setattr("casemate.maths.nearest.BLOCK", 10)
    rng, index = np.random.default_rng(9), opened(path)
    index.add(documents("a", 40), unit(rng, 40))
    index.add(documents("b", 10), vectors := unit(rng, 10))
    assert index.search(vectors[0], 1).hits[0].document.id == "b/0"
    index.remove(["a"])
    index.search(vectors[0], 1)
    assert [h.document.id for h in index.search(vectors[3], 100).hits][0] == "b/3"
    assert len(index._caches["default"].neighbors._keys) == 10
    index.close()


def test_a_graph_that_cannot_be_saved_is_reported(copy, monkeypatch) -> None:
    def full(self, path):
        raise OSError(28, "No space left on device")

    for graph in graphs(copy):
        graph.unlink()
    monkeypatch.setattr(ApproximateSearch, "save", full)
    index = opened(copy, approximate_above=1000)
    with pytest.raises(BackendError, match="cannot save the graph.*No space"):
        index.warm()
    assert len(index.search(clustered(0, 1)[0], 3).hits) == 3
    index.close()


def test_every_failure_raises_a_casemate_error(path) -> None:
    index = opened(path)
    for call in (lambda: index.search(np.zeros(3, np.float32), 1), lambda: index.search(np.full(DIM, np.nan), 1)):
        with pytest.raises(CasemateError, match="finite numbers"):
            call()
    assert sqlite.FORMAT == 1
    index.close()


@pytest.mark.parametrize("column", ["id", "source", "digest", "title", "text", "metadata", "checksum"])
def test_a_changed_bit_of_a_document_is_detected_and_not_returned(filled, column) -> None:
    bit = "UPDATE document SET {0} = {1} WHERE key = 7"
    change = "'[' || substr({0}, 2)" if column == "metadata" else "coalesce(nullif({0}, ''), 'x') || 'x'"
    tamper(filled, bit.format(column, change.format(column)))
    index = opened(filled)
    faults = index.check()
    assert [("do not fit their checksum" in fault) for fault in faults] == [True]
    with pytest.raises(DataError, match="is damaged in the index: run 'casemate index --rebuild'"):
        index.search(unit(np.random.default_rng(0), 1)[0], 500)
    with pytest.raises(DataError, match="is damaged"):
        list(index.scan())
    index.close()


def test_many_damaged_documents_are_counted(filled) -> None:
    tamper(filled, "UPDATE document SET text = 'other' WHERE key <= 30")
    index = opened(filled)
    assert index.check()[-1].startswith("25 more documents do not fit their checksums")
    assert len(index.check()) == 6
    index.close()


def test_an_index_of_a_version_without_checksums_is_read_and_reported(filled) -> None:
    db = sqlite3.connect(filled)
    db.execute("ALTER TABLE document DROP COLUMN checksum")
    db.close()
    index = opened(filled)
    assert len(index.search(unit(np.random.default_rng(0), 1)[0], 500).hits) == 500
    index.add(documents("s0", 25), unit(np.random.default_rng(6), 25))
    faults = index.check()
    assert [fault.partition(",")[0] for fault in faults] == ["475 documents have no checksum"]
    index.close()


def test_search_fails_if_the_file_is_deleted_while_open(tmp_path: Path) -> None:
    index = SqliteIndex(tmp_path / "index.db")
    index.open("test", DIM)
    x = np.eye(DIM, dtype=np.float32)[:2]
    index.add([Document("a", "one"), Document("b", "two")], x)
    assert len(index.search(x[0], 5).hits) == 2
    (tmp_path / "index.db").unlink()
    for use in (lambda: index.search(x[0], 5), lambda: index.add([Document("c", "three")], x[:1])):
        with pytest.raises(BackendError, match="deleted or replaced"):
            use()
    index.close()


def test_removed_texts_are_removed_from_the_write_ahead_log(tmp_path: Path) -> None:
    index = SqliteIndex(tmp_path / "index.db")
    index.open("test", DIM)
    x = np.eye(DIM, dtype=np.float32)[:1]
    for remove in (lambda: index.remove(["a"]), lambda: index.add([Document("a", "harmless")], x)):
        index.add([Document("a", "SECRETDISEASE")], x)
        remove()
        assert not any(b"SECRETDISEASE" in file.read_bytes() for file in tmp_path.iterdir())
    index.close()
