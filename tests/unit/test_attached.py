"""Attached collections: scans, changes through Casemate and by other programs, and killed processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from casemate import plugins
from casemate.backends.indexes.attached import AttachedIndex
from casemate.backends.sidecar import attach_scan as scanning
from casemate.backends.sidecar.attach_scan import PageInventoryTask, map_in_thread
from casemate.backends.sidecar.near_duplicates import MAX_GROUP_SOURCES, NearDuplicateFinder
from casemate.backends.sidecar.row_inventory import SourceGrouping, inventory_page
from casemate.cli import cli
from casemate.cli.attach import AttachReport
from casemate.errors import BackendError, CapabilityError, ConfigError, DataError
from casemate.maths.moments import CorpusMoments, without_documents
from casemate.maths.vectors import normalize
from casemate.protocols import CollectionPage
from casemate.types import Document
from tests.fakes import BAG, BagOfWords, documents, entry_points
from tests.unit.folder_collection import FolderCollection

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only runs and is killed
DIM = 16


def vectors(seed: int, count: int) -> np.ndarray:
    """Random vectors without unit length."""
    return (3 * np.random.default_rng(seed).standard_normal((count, DIM))).astype(np.float32)


def filled(folder: Path, count: int = 200, **options) -> FolderCollection:
    collection = FolderCollection(folder / "collection", DIM, **options)
    for i, v in enumerate(vectors(1, count)):
        collection.put(Document(f"d{i // 4:03}#{i % 4}", f"text {i}", metadata={"doc": f"m{i // 4:03}"}), v)
    return collection


def opened(collection: FolderCollection, folder: Path, **options) -> AttachedIndex:
    index = AttachedIndex(collection, folder / "attached.db", **({"source_pattern": "^(.*)#"} | options))
    index.open("test", DIM)
    return index


@pytest.fixture
def attached(tmp_path: Path) -> AttachedIndex:
    index = opened(filled(tmp_path), tmp_path)
    index.attach()
    return index


def true_moments(index: AttachedIndex) -> CorpusMoments:
    """The moments of the current rows of the collection, by definition."""
    X = index.collection.find(index.collection._ids()).vectors.astype(np.float64)
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    m = X.mean(axis=0)
    return CorpusMoments(len(X), m, sum((np.outer(x - m, x - m) for x in X), np.zeros((DIM, DIM))))


def agrees(index: AttachedIndex, precision: float = 1e-6) -> bool:
    stored, true = index.moments(), true_moments(index)
    near = [
        np.abs(a - b).max() < precision * true.n for a, b in ((stored.mean, true.mean), (stored.scatter, true.scatter))
    ]
    return stored.n == true.n and all(near)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, ""),
        ({"source_pattern": "^(.*)@"}, "each row is its own source by"),
        ({"source_pattern": ""}, "each row is its own source: if"),
    ],
)
def test_report_warns_if_each_row_is_its_own_source(tmp_path, options, why) -> None:
    """For example with a misspelled field or pattern: hiding one row would not hide the other rows of its document."""
    index = opened(filled(tmp_path), tmp_path, **options)
    limits = AttachReport(index, index.attach(), 1.0, 1.0, False).lacking()
    found = [limit for limit in limits if "its own source" in limit]
    assert [limit.startswith(why) for limit in found] == [True] * bool(why)


def test_a_scan_provides_moments_cosines_and_sources(attached) -> None:
    assert agrees(attached)
    summary = attached.summary()
    assert (summary.rows, summary.sources, summary.rescaled, summary.dim) == (200, 50, 200, DIM)
    q = normalize(vectors(2, 1))[0][0]
    found = attached.search(q, 5)
    X = attached.collection.find(attached.collection._ids())
    cosine = {
        d.id: float(v.astype(float) @ q / np.linalg.norm(v.astype(float)))
        for d, v in zip(X.documents, X.vectors, strict=True)
    }
    best = sorted(cosine, key=cosine.__getitem__, reverse=True)[:5]
    assert [h.document.id for h in found.hits] == best
    assert [h.score for h in found.hits] == pytest.approx([cosine[i] for i in best], abs=1e-6)
    assert [h.document.source for h in found.hits] == [i.partition("#")[0] for i in best]
    assert found.similarity_stats.mean == pytest.approx(np.mean(list(cosine.values())), abs=1e-6)
    assert found.similarity_stats.std == pytest.approx(np.std(list(cosine.values())), abs=1e-6)
    assert attached.check() == []


def test_nothing_is_written_into_the_collection(tmp_path) -> None:
    collection = filled(tmp_path)
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in collection.folder.iterdir()}
    index = opened(collection, tmp_path)
    index.attach()
    index.search(normalize(vectors(2, 1))[0][0], 5)
    index.rebuild()
    index.clear()
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in collection.folder.iterdir()} == before


def test_sources_come_from_collection_field_or_id() -> None:
    document = Document("a#1", "", metadata={"doc": 7})
    assert SourceGrouping("doc", "^(.*)#").source(document) == "7"
    assert SourceGrouping("other", "^(.*)#").source(document) == "a"
    assert SourceGrouping("doc").source(replace(document, source="its own")) == "its own"
    assert SourceGrouping("", "nowhere").source(document) == "a#1"
    with pytest.raises(ConfigError, match="source_pattern"):
        SourceGrouping("", "(")


def test_searches_are_refused_before_the_first_scan(tmp_path) -> None:
    index = opened(filled(tmp_path), tmp_path)
    with pytest.raises(DataError, match="run 'casemate attach'"):
        index.search(vectors(2, 1)[0], 1)
    with pytest.raises(DataError, match="run 'casemate attach'"):
        index.remove(["d000"])
    assert "has not been scanned completely" in index.check()[0]


def test_moments_do_not_depend_on_the_thread_that_processes_pages(tmp_path) -> None:
    pages = list(filled(tmp_path).scan())
    one, other = (list(page_map(PageInventoryTask(SourceGrouping(), DIM), pages)) for page_map in (map, map_in_thread))
    assert [t.rows for t in one] == [t.rows for t in other]
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(a.moments["default"].scatter, b.moments["default"].scatter)


@pytest.mark.parametrize(
    ("bad", "says"),
    [(0.0, "'d001#1' are zero or not finite"), (np.nan, "'d001#1' are zero"), (np.inf, "'d001#1' are zero")],
)
def test_zero_and_infinite_vectors_are_refused_with_their_ids(tmp_path, bad, says) -> None:
    collection = filled(tmp_path, 20)
    collection.put(Document("d001#1", "x"), np.full(DIM, bad, np.float32))
    with pytest.raises(DataError, match=says):
        opened(collection, tmp_path).attach()


def test_vectors_of_other_dimensions_are_refused(tmp_path) -> None:
    with pytest.raises(DataError, match="has vectors of 16 dimensions, the embedder 8"):
        AttachedIndex(filled(tmp_path), tmp_path / "a.db").open("test", 8)
    with pytest.raises(DataError, match="expected 8 dimensions"):
        inventory_page(next(filled(tmp_path).scan()), SourceGrouping(), 8)


def test_duplicate_ids_are_refused(tmp_path, monkeypatch) -> None:
    collection = filled(tmp_path, 20)
    page = next(collection.scan())
    monkeypatch.setattr(collection, "scan", lambda after="": iter([page, page]))
    with pytest.raises(DataError, match="40 rows have only 20 different ids"):
        opened(collection, tmp_path).attach()


def test_a_sidecar_belongs_to_one_collection_and_embedder(tmp_path) -> None:
    opened(filled(tmp_path), tmp_path).close()
    index = AttachedIndex(FolderCollection(tmp_path / "collection", DIM), tmp_path / "attached.db")
    with pytest.raises(DataError, match="the embedder 'test', not to 'another'"):
        index.open("another", DIM)
    (tmp_path / "other.db").write_bytes(b"no database at all, and longer than a header of SQLite is" * 20)
    with pytest.raises(DataError, match="damaged, or not a sidecar database"):
        AttachedIndex(FolderCollection(tmp_path / "collection", DIM), tmp_path / "other.db").open("test", DIM)
    assert os.stat(tmp_path / "attached.db").st_mode & 0o077 == 0


def test_collections_selected_by_different_options_are_different(tmp_path) -> None:
    """Otherwise the state of the second collection would replace that of the first."""
    collection = filled(tmp_path)
    collection.only = {"tenant": "a"}
    opened(collection, tmp_path).attach()
    other = FolderCollection(tmp_path / "collection", DIM)
    other.only = {"tenant": "b"}
    with pytest.raises(DataError, match=r'the folder, only {"tenant": "a"}.*"b".*move this casemate.yaml to another'):
        opened(other, tmp_path)


@dataclass(eq=False)
class FolderPlugin(FolderCollection):
    folder: Path
    dim: ClassVar[int] = BagOfWords.dim

    def __post_init__(self) -> None:
        super().__init__(self.folder, self.dim)

    @property
    def name(self) -> str:
        return str(self.folder)


@pytest.fixture
def casemate(tmp_path, monkeypatch) -> Callable[..., Result]:
    """Runs a command in a folder with two collections, ``a`` and ``b``. Each has a configuration."""
    folders = ("collection", "folder", f"{__name__}:FolderPlugin")
    monkeypatch.setattr(plugins, "entry_points", entry_points(BAG, folders))
    monkeypatch.chdir(tmp_path)
    for name, path in (("a", ".casemate/attached.db"), ("b", "b.db")):
        rows = documents(40, seed=ord(name))
        collection = FolderPlugin(tmp_path / name)
        for document, vector in zip(rows, BagOfWords().embed([d.text for d in rows]), strict=True):
            collection.put(document, vector)
        index = f"{{use: attached, path: {path}, collection: {{use: folder, folder: {name}}}}}"
        fitting = "calibrate: {questions: 20, documents: 20}"
        (tmp_path / f"{name}.yaml").write_text(f"rag:\n  embedder: bag\n  index: {index}\n{fitting}\n")
    return lambda *arguments: CliRunner().invoke(cli, arguments)


def test_attach_calibrates_the_guard_for_one_of_two_collections_in_a_folder(casemate, tmp_path) -> None:
    done = casemate("attach", "-c", "a.yaml", "--no-calibrate")
    assert done.exit_code == 0, done.output
    (why,) = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert "run 'casemate calibrate'" in why
    found = json.loads(casemate("doctor", "-c", "a.yaml", "--json").stdout)["findings"]
    assert ["guard", False, why.removeprefix("warning: ")] in [[f["name"], f["ok"], f["detail"]] for f in found]
    assert "calibrat" not in casemate("attach", "-c", "a.yaml", "--dry-run").stderr
    done = casemate("attach", "-c", "a.yaml")
    assert done.exit_code == 0, done.output
    assert "calibrating the guard; often about a minute" in done.stderr and "has no calibration" not in done.stderr
    assert "mirabel is calibrated on 20 synthetic questions" in done.stderr
    assert "calibrat" not in casemate("attach", "-c", "a.yaml").stderr
    calibrated = (tmp_path / ".casemate/calibration.json").read_bytes()
    refusal = r"calibration.json is the calibration of '.*a', not of '.*b'; a folder holds the state of one"
    with pytest.raises(DataError, match=refusal):
        raise casemate("attach", "-c", "b.yaml").exception
    assert (tmp_path / ".casemate/calibration.json").read_bytes() == calibrated


def test_invalid_options_are_refused(tmp_path) -> None:
    collection = FolderCollection(tmp_path / "collection")
    for options, kind in (
        ({"schema": "s"}, CapabilityError),
        ({"schema": "a-b"}, ConfigError),
        ({"drift": 0}, ConfigError),
    ):
        with pytest.raises(kind):
            AttachedIndex(collection, tmp_path / "a.db", **options)


# Near-duplicates


def near(rng: np.random.Generator, v: np.ndarray, cosine: float) -> np.ndarray:
    """Returns a vector with the given cosine to another vector."""
    other = rng.standard_normal(v.shape)
    other -= v * (other @ v)
    return cosine * v + np.sqrt(1 - cosine**2) * other / np.linalg.norm(other)


def test_near_duplicates_are_found_with_high_recall_and_without_false_pairs(tmp_path, monkeypatch) -> None:
    """400 pairs among 20,000 rows of 64 dimensions, at the threshold and above it. No other rows are similar."""
    rng, dim, n = np.random.default_rng(3), 64, 20_000
    E = rng.standard_normal((n, dim))
    E /= np.linalg.norm(E, axis=1, keepdims=True)
    for cosine, start in ((0.951, 0), (0.98, 1000), (1.0, 2000)):
        for i in range(start, start + 400):
            E[i + n // 2] = near(rng, E[i], cosine)
    monkeypatch.setattr("casemate.backends.sidecar.near_duplicates.SORT_ROWS", 7000)  # more than one part
    rows = inventory_page(
        CollectionPage([Document(str(i), "") for i in range(n)], E.astype(np.float32)), SourceGrouping(), dim
    ).rows
    true = E.astype(np.float32).astype(np.float64)
    duplicate_finder = NearDuplicateFinder(lambda pairs: [float(true[a - 1] @ true[b - 1]) for a, b in pairs], 0.95)
    duplicate_finder.search([[(i + 1, row.sketch) for i, row in enumerate(rows)]])
    found = {tuple(g) for g in duplicate_finder.groups()}
    share = {
        cosine: np.mean([(i + 1, i + 1 + n // 2) in found for i in range(start, start + 400)])
        for cosine, start in ((0.951, 0), (0.98, 1000), (1.0, 2000))
    }
    assert share[1.0] == 1
    assert share[0.98] > 0.97
    assert share[0.951] > 0.8
    assert all(true[a - 1] @ true[b - 1] >= 0.95 for a, b in found)


def test_near_duplicates_share_the_oldest_source_but_widespread_texts_do_not(tmp_path) -> None:
    collection, rng = filled(tmp_path, 80), np.random.default_rng(4)
    common, one = normalize(vectors(5, 2))[0]
    for i in range(MAX_GROUP_SOURCES + 1):
        collection.put(Document(f"e{i}#0", "footer"), common)
    collection.put(Document("a#0", "a"), one)
    collection.put(Document("b#0", "b"), near(rng, one, 0.99))
    index = opened(collection, tmp_path)
    summary = index.attach()
    assert (summary.copies, summary.copied, summary.widespread) == (1, 2, 1)
    assert [h.document.source for h in index.search(one, 2).hits] == ["a", "a"]
    assert len({h.document.source for h in index.search(common, MAX_GROUP_SOURCES + 1).hits}) == MAX_GROUP_SOURCES + 1
    assert index.remove(["b"]) == 1  # removed by its own source
    assert agrees(index)


# Resuming


def killed_by_signal(work: Callable[[], None]) -> bool:
    """Runs ``work`` in a forked process. Returns whether a signal killed the process."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


class KillAtStep:
    """Kills the process before the n-th step."""

    def __init__(self, after: int, steps: Sequence[str] = ()) -> None:
        self.left, self.steps = after, steps

    def __call__(self, step: str) -> None:
        if not self.steps or step.partition(" ")[0] in self.steps:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def test_killed_scan_is_resumed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(scanning, "FLUSH_ROWS", 50)
    filled(tmp_path, 1000)
    pages: list[str] = []

    def run(before: Callable[[str], None]) -> None:
        index = opened(FolderCollection(tmp_path / "collection", DIM, before), tmp_path)
        index.attach()
        index.close()

    for after in (15, 3, 0):
        assert killed_by_signal(lambda after=after: run(KillAtStep(after, ["page"])))
    run(lambda step: pages.append(step) if step.startswith("page") else None)
    assert len(pages) < 20  # of 20; some were processed before
    index = opened(FolderCollection(tmp_path / "collection", DIM), tmp_path)
    assert agrees(index)
    assert index.summary().rows == 1000
    assert index.check() == []
    index.close()


def test_the_previous_scan_is_active_until_the_next_is_complete(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(scanning, "FLUSH_ROWS", 50)
    index = opened(filled(tmp_path), tmp_path, drift=1)
    index.attach()
    q, before = normalize(vectors(2, 1))[0][0], index.moments()
    for i, v in enumerate(vectors(6, 100)):
        index.collection.put(Document(f"f{i}#0", "new"), v)
    work = lambda: opened(FolderCollection(tmp_path / "collection", DIM, KillAtStep(4, ["page"])), tmp_path).attach()  # noqa: E731
    assert killed_by_signal(work)
    assert np.array_equal(index.moments().scatter, before.scatter)
    found = index.search(q, 3)
    assert found.similarity_stats.n == 200 + sum(h.document.text == "new" for h in found.hits)
    index.attach()
    assert agrees(index)
    assert index.search(q, 3).similarity_stats.n == 300


def test_changes_through_casemate_during_a_scan_are_merged(tmp_path, monkeypatch) -> None:
    """Rows are replaced, removed and added on both sides of the cursor, before and after flushes."""
    monkeypatch.setattr(scanning, "FLUSH_ROWS", 50)
    index = opened(filled(tmp_path, 400), tmp_path)
    index.attach()
    other = opened(FolderCollection(tmp_path / "collection", DIM), tmp_path)
    fresh, at = normalize(vectors(7, 12))[0], iter(range(99))

    def meanwhile(step: str) -> None:
        if step.startswith("page"):
            i = next(at)
            one, two = fresh[[i]], fresh[[-i - 1]]
            other.add([Document(f"d{i * 6:03}#0", "new", source=f"d{i * 6:03}")], one)
            other.add([Document(f"d{99 - i:03}#9", "new", source=f"d{99 - i:03}")], two)
            other.remove([f"d{50 - i:03}", f"d{i * 3 + 1:03}"])

    index.collection.before = meanwhile
    index.attach()
    index.collection.before = lambda step: None
    assert next(at) > 4
    assert agrees(index)
    assert index.check() == []
    assert sum(len(d) for d, _ in index.scan()) == index.moments().n == index.collection.count()
    index.rebuild()
    assert agrees(index)


def test_one_of_two_concurrent_scans_completes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(scanning, "FLUSH_ROWS", 50)
    index = opened(filled(tmp_path), tmp_path)
    other = opened(FolderCollection(tmp_path / "collection", DIM), tmp_path)
    index.collection.before = lambda step: other.attach() if step == "page 2" else None
    with pytest.raises(DataError, match="another 'casemate attach'"):
        index.attach()
    assert agrees(other)


# Changes through Casemate, in two stores


def test_a_change_killed_at_any_step_is_completed_or_undone(tmp_path) -> None:
    """Kills at every step of replacing a source of four rows by three, and of removing a source."""
    steps = 0
    while True:
        folder = tmp_path / str(steps)
        index = opened(filled(folder, 40), folder)
        index.attach()
        index.close()

        def work(folder: Path = folder, steps: int = steps) -> None:
            index = opened(FolderCollection(folder / "collection", DIM, KillAtStep(steps)), folder)
            new = [Document(f"d003#{i}", "new", source="d003") for i in (2, 3, 7)]
            index.add(new, normalize(vectors(8, 3))[0])
            index.remove(["d005"])

        was_killed = killed_by_signal(work)
        index = opened(FolderCollection(folder / "collection", DIM), folder)
        assert agrees(index), steps
        assert index.check() == []
        three = [i for i in index.collection._ids() if i.startswith("d003")]
        assert three in (["d003#0", "d003#1", "d003#2", "d003#3"], ["d003#2", "d003#3", "d003#7"])
        index.close()
        if not was_killed:
            break
        steps += 1
    assert steps > 12


def test_next_change_completes_a_failed_change(attached, monkeypatch) -> None:
    collection = attached.collection
    collection.before = lambda step: (
        (_ for _ in ()).throw(BackendError("down", backend="folder", retryable=True)) if step == "removed one" else None
    )
    with pytest.raises(BackendError):
        attached.remove(["d001"])
    assert "1 changes are incomplete" in attached.check()[0]
    collection.before = lambda step: None
    assert attached.remove(["d002"]) == 4
    assert agrees(attached)
    assert attached.check() == []


def test_a_refused_change_is_discarded(attached) -> None:
    def refuse(documents, vectors) -> None:
        raise CapabilityError("read only")

    attached.collection.add = refuse
    for _ in range(2):
        with pytest.raises(CapabilityError):
            attached.add([Document("new", "x")], normalize(vectors(8, 1))[0])
    assert attached.check() == []
    with pytest.raises(CapabilityError, match="has no tenants"):
        attached.add([Document("new", "x")], normalize(vectors(8, 1))[0], "other")


def test_rows_of_other_programs_are_not_overwritten(attached) -> None:
    attached.collection.put(Document("theirs", "x"), vectors(9, 1)[0])
    with pytest.raises(DataError, match="'theirs' of another program"):
        attached.add([Document("theirs", "y")], normalize(vectors(8, 1))[0])
    assert attached.collection.find(["theirs"]).documents[0].text == "x"


# Changes by other programs


def test_statistics_without_an_unknown_row_equal_those_of_the_other_rows(tmp_path) -> None:
    """Also if the row is far from all others: a variance near 0 would make every document seem too close."""
    collection, q = FolderCollection(tmp_path / "collection", DIM), normalize(np.ones((1, DIM), np.float32))[0][0]
    others = vectors(1, 40)
    others = normalize(others - 0.95 * (others @ q)[:, None] * q)[0]  # none is similar to the question
    for i, v in enumerate(others):
        collection.put(Document(f"d{i:03}#0", f"text {i}"), v)
    index = opened(collection, tmp_path)
    index.attach()
    collection.put(Document("theirs#0", "new"), q)
    found = without_documents(index.search(q, 5), lambda document: document.id == "theirs#0").similarity_stats
    assert (found.n, found.mean) == (40, pytest.approx((others @ q).mean(), abs=1e-6))
    assert found.std == pytest.approx((others @ q).std(), abs=1e-6)


@pytest.mark.parametrize("share", [0.01, 0.04])
def test_writes_by_other_programs_bias_the_moments_by_a_bounded_amount(tmp_path, share) -> None:
    """With a share p of unknown rows, the mean is off by at most 2p and the variance by 4p."""
    index, rng = opened(filled(tmp_path), tmp_path), np.random.default_rng(10)
    index.attach()
    q = normalize(vectors(11, 1))[0][0]
    count = round(200 * share / (1 - share))
    for i in range(count):  # the worst case: all rows at the query itself, as poisoned documents would be
        index.collection.put(Document(f"p{i}#0", "poison"), near(rng, q.astype(np.float64), 0.999))
    found = index.search(q, 3)
    p = count / (200 + count)
    true = true_moments(index).similarity_stats(q)
    assert found.similarity_stats.n == 200 + min(count, 3)  # the rows that were retrieved
    assert abs(found.similarity_stats.mean - true.mean) <= 2 * p
    assert abs(found.similarity_stats.std**2 - true.std**2) <= 4 * p
    assert found.hits[0].document.source == found.hits[0].document.id.partition("#")[0]  # by the source rules
    assert found.hits[0].document.id.startswith("p")
    withheld = opened(FolderCollection(tmp_path / "collection", DIM), tmp_path, unknown="withhold").search(q, 3)
    assert len(withheld.hits) == 3
    assert not any(h.document.id.startswith("p") for h in withheld.hits)
    assert count / 200 == pytest.approx(index.measure_drift().share)
    index.attach()
    assert index.search(q, 3).similarity_stats.mean == pytest.approx(true.mean, abs=1e-6)
    assert index.measure_drift().share == 0


@pytest.mark.parametrize("what", ["added", "removed"])
def test_searches_beyond_the_drift_limit_are_refused_until_the_next_scan(attached, what) -> None:
    q = normalize(vectors(11, 1))[0][0]
    attached.search(q, 3)
    ids = attached.collection._ids()
    if what == "removed":
        attached.collection.remove(ids[:11])
    else:
        for i, v in enumerate(vectors(12, 11)):
            attached.collection.put(Document(f"f{i}", "x"), v)
    attached._limit._due = 0.0  # the next count is due
    for _ in range(2):
        with pytest.raises(DataError, match=r"more than 5 % \(attached.drift\) .* run 'casemate attach'"):
            attached.search(q, 3)
    assert "run 'casemate attach'" in attached.check()[0]
    attached.attach()
    assert len(attached.search(q, 3).hits) == 3
    assert attached.check() == []


def test_vectors_changed_by_other_programs_are_detected_and_counts_stay_correct(attached) -> None:
    for i in range(8):
        identity = f"d{i:03}#1"
        attached.collection.put(Document(identity, "embedded again"), vectors(20 + i, 1)[0])
    drift = attached.measure_drift()
    assert (drift.changed, drift.missing, drift.sampled) == (8, 0, 200)
    assert attached.check() == [f"{drift.describe()}: run 'casemate attach' or 'casemate doctor --fix'"]
    assert attached.remove(["d000"]) == 4
    assert attached.moments().n == 196
    assert attached.measure_drift().noticed == 1
    attached.rebuild()
    assert agrees(attached)
    assert attached.check() == []


def test_rows_replaced_by_other_programs_have_their_new_source(tmp_path) -> None:
    index, q = opened(filled(tmp_path), tmp_path, source_field="doc"), normalize(vectors(11, 1))[0][0]
    index.attach()
    for i in range(8):  # the number of rows stays the same
        index.collection.put(Document(f"d{i:03}#1", "another's", metadata={"doc": "other"}), 3 * q)
    found, p, true = index.search(q, 8), 8 / 200, true_moments(index).similarity_stats(q)
    assert {h.document.source for h in found.hits} == {"other"}
    assert abs(found.similarity_stats.mean - true.mean) <= 2 * p
    assert abs(found.similarity_stats.std**2 - true.std**2) <= 4 * p
    with pytest.raises(DataError, match="'d000#1' of another program"):
        index.remove(["m000"])
    collection = FolderCollection(tmp_path / "collection", DIM)
    withheld = opened(collection, tmp_path, source_field="doc", unknown="withhold").search(q, 8)
    assert len(withheld.hits) == 8
    assert "other" not in {h.document.source for h in withheld.hits}
    index.attach()
    assert index.remove(["m000"]) == 3
    assert index.remove(["other"]) == 8
    assert agrees(index)


def test_failing_store_raises_an_error(attached) -> None:
    attached.collection.broken = True
    with pytest.raises(BackendError, match="down"):
        attached.search(vectors(2, 1)[0], 3)


@pytest.mark.parametrize("scans", [1, 2, 3])
def test_the_previous_inventory_stays_active_while_the_next_scan_runs(tmp_path, scans) -> None:
    index = opened(filled(tmp_path), tmp_path)
    for _ in range(scans):
        index.attach()
    seen = []
    index.collection.before = lambda step: seen.append(len(index.digests())) if step == "page 1" else None
    index.attach()
    assert seen == [50]
