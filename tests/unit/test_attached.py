"""A collection that belongs to somebody else: one pass over it, changes by us and by others, and whoever is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from casemate.attaching import run as scanning
from casemate.attaching.copies import WIDESPREAD, Copies
from casemate.attaching.run import Tallier, beside
from casemate.attaching.tally import Grouping, tally
from casemate.backends.attached import AttachedIndex
from casemate.collection import Piece, unit
from casemate.errors import BackendError, CapabilityError, ConfigError, DataError
from casemate.stats import CorpusMoments
from casemate.types import Document
from tests.unit.shelf_collection import ShelfCollection

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only runs and dies
DIM = 16


def vectors(seed: int, count: int) -> np.ndarray:
    """Not of unit length."""
    return (3 * np.random.default_rng(seed).standard_normal((count, DIM))).astype(np.float32)


def filled(folder: Path, count: int = 200, **options) -> ShelfCollection:
    shelf = ShelfCollection(folder / "shelf", DIM, **options)
    for i, v in enumerate(vectors(1, count)):
        shelf.put(Document(f"d{i // 4:03}#{i % 4}", f"text {i}", metadata={"doc": f"m{i // 4:03}"}), v)
    return shelf


def opened(shelf: ShelfCollection, folder: Path, **options) -> AttachedIndex:
    index = AttachedIndex(shelf, folder / "attached.db", **({"source_pattern": "^(.*)#"} | options))
    index.open("test", DIM)
    return index


@pytest.fixture
def attached(tmp_path: Path) -> AttachedIndex:
    index = opened(filled(tmp_path), tmp_path)
    index.attach()
    return index


def law(index: AttachedIndex) -> CorpusMoments:
    """The moments of all that the collection holds now, by the definition."""
    X = index.collection.find(index.collection._ids()).vectors.astype(np.float64)
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    m = X.mean(axis=0)
    return CorpusMoments(len(X), m, sum((np.outer(x - m, x - m) for x in X), np.zeros((DIM, DIM))))


def agrees(index: AttachedIndex, precision: float = 1e-6) -> bool:
    held, true = index.moments(), law(index)
    near = [np.abs(a - b).max() < precision * true.n for a, b in ((held.mean, true.mean), (held.scatter, true.scatter))]
    return held.n == true.n and all(near)


def test_one_pass_gives_moments_cosines_and_sources(attached) -> None:
    assert agrees(attached)
    about = attached.about()
    assert (about.rows, about.sources, about.rescaled, about.dim) == (200, 50, 200, DIM)
    q = unit(vectors(2, 1))[0][0]
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
    assert found.background.mean == pytest.approx(np.mean(list(cosine.values())), abs=1e-6)
    assert found.background.std == pytest.approx(np.std(list(cosine.values())), abs=1e-6)
    assert attached.check() == []


def test_nothing_is_written_into_the_collection(tmp_path) -> None:
    shelf = filled(tmp_path)
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in shelf.folder.iterdir()}
    index = opened(shelf, tmp_path)
    index.attach()
    index.search(unit(vectors(2, 1))[0][0], 5)
    index.rebuild()
    index.clear()
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in shelf.folder.iterdir()} == before


def test_sources_come_from_the_collection_or_a_field_or_the_id() -> None:
    document = Document("a#1", "", metadata={"doc": 7})
    assert Grouping("doc", "^(.*)#").source(document) == "7"
    assert Grouping("other", "^(.*)#").source(document) == "a"
    assert Grouping("doc").source(replace(document, source="its own")) == "its own"
    assert Grouping("", "nowhere").source(document) == "a#1"
    with pytest.raises(ConfigError, match="source_pattern"):
        Grouping("", "(")


def test_before_the_first_pass_a_search_is_refused(tmp_path) -> None:
    index = opened(filled(tmp_path), tmp_path)
    with pytest.raises(DataError, match="run 'casemate attach'"):
        index.search(vectors(2, 1)[0], 1)
    with pytest.raises(DataError, match="run 'casemate attach'"):
        index.remove(["d000"])
    assert "not scanned" in index.check()[0]


def test_the_order_of_pieces_makes_the_moments_wherever_they_are_tallied(tmp_path) -> None:
    pieces = list(filled(tmp_path).scan())
    one, other = (list(spread(Tallier(Grouping(), DIM), pieces)) for spread in (map, beside))
    assert [t.rows for t in one] == [t.rows for t in other]
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(a.moments["default"].scatter, b.moments["default"].scatter)


@pytest.mark.parametrize(
    ("bad", "says"),
    [(0.0, "'d001#1' are zero or not finite"), (np.nan, "'d001#1' are zero"), (np.inf, "'d001#1' are zero")],
)
def test_vectors_without_direction_are_refused_by_name(tmp_path, bad, says) -> None:
    shelf = filled(tmp_path, 20)
    shelf.put(Document("d001#1", "x"), np.full(DIM, bad, np.float32))
    with pytest.raises(DataError, match=says):
        opened(shelf, tmp_path).attach()


def test_other_lengths_are_refused(tmp_path) -> None:
    with pytest.raises(DataError, match="holds vectors of 16 numbers, the embedder makes 8"):
        AttachedIndex(filled(tmp_path), tmp_path / "a.db").open("test", 8)
    with pytest.raises(DataError, match="where 8 were expected"):
        tally(next(filled(tmp_path).scan()), Grouping(), 8)


def test_the_same_id_twice_is_refused(tmp_path, monkeypatch) -> None:
    shelf = filled(tmp_path, 20)
    piece = next(shelf.scan())
    monkeypatch.setattr(shelf, "scan", lambda after="": iter([piece, piece]))
    with pytest.raises(DataError, match="40 rows have only 20 different ids"):
        opened(shelf, tmp_path).attach()


def test_what_is_kept_belongs_to_one_collection_and_embedder(tmp_path) -> None:
    opened(filled(tmp_path), tmp_path).close()
    index = AttachedIndex(ShelfCollection(tmp_path / "shelf", DIM), tmp_path / "attached.db")
    with pytest.raises(DataError, match="the embedder 'test', not of 'another'"):
        index.open("another", DIM)
    (tmp_path / "other.db").write_bytes(b"no database at all, and longer than a header of SQLite is" * 20)
    with pytest.raises(DataError, match="damaged or none of ours"):
        AttachedIndex(ShelfCollection(tmp_path / "shelf", DIM), tmp_path / "other.db").open("test", DIM)
    assert os.stat(tmp_path / "attached.db").st_mode & 0o077 == 0


def test_options_are_checked(tmp_path) -> None:
    shelf = ShelfCollection(tmp_path / "shelf")
    for options, kind in (
        ({"schema": "s"}, CapabilityError),
        ({"schema": "a-b"}, ConfigError),
        ({"drift": 0}, ConfigError),
    ):
        with pytest.raises(kind):
            AttachedIndex(shelf, tmp_path / "a.db", **options)


# Near-copies


def near(rng: np.random.Generator, v: np.ndarray, cosine: float) -> np.ndarray:
    """A vector at just this cosine to another."""
    other = rng.standard_normal(v.shape)
    other -= v * (other @ v)
    return cosine * v + np.sqrt(1 - cosine**2) * other / np.linalg.norm(other)


def test_near_copies_are_of_one_source_and_hardly_any_is_missed(tmp_path, monkeypatch) -> None:
    """400 pairs among 20,000 rows of 64 dimensions, at the threshold and above; nothing else is near."""
    rng, dim, n = np.random.default_rng(3), 64, 20_000
    E = rng.standard_normal((n, dim))
    E /= np.linalg.norm(E, axis=1, keepdims=True)
    for cosine, start in ((0.951, 0), (0.98, 1000), (1.0, 2000)):
        for i in range(start, start + 400):
            E[i + n // 2] = near(rng, E[i], cosine)
    monkeypatch.setattr("casemate.attaching.copies.RANGE", 7000)  # more than one part
    rows = tally(Piece([Document(str(i), "") for i in range(n)], E.astype(np.float32)), Grouping(), dim).rows
    true = E.astype(np.float32).astype(np.float64)
    copies = Copies(lambda pairs: [float(true[a - 1] @ true[b - 1]) for a, b in pairs], 0.95)
    copies.look([[(i + 1, row.sketch) for i, row in enumerate(rows)]])
    found = {tuple(g) for g in copies.groups()}
    share = {
        cosine: np.mean([(i + 1, i + 1 + n // 2) in found for i in range(start, start + 400)])
        for cosine, start in ((0.951, 0), (0.98, 1000), (1.0, 2000))
    }
    assert share[1.0] == 1
    assert share[0.98] > 0.97
    assert share[0.951] > 0.8
    assert all(true[a - 1] @ true[b - 1] >= 0.95 for a, b in found)


def test_a_copy_is_judged_with_the_oldest_and_a_widespread_text_by_itself(tmp_path) -> None:
    shelf, rng = filled(tmp_path, 80), np.random.default_rng(4)
    common, one = unit(vectors(5, 2))[0]
    for i in range(WIDESPREAD + 1):
        shelf.put(Document(f"e{i}#0", "footer"), common)
    shelf.put(Document("a#0", "a"), one)
    shelf.put(Document("b#0", "b"), near(rng, one, 0.99))
    index = opened(shelf, tmp_path)
    about = index.attach()
    assert (about.copies, about.copied, about.widespread) == (1, 2, 1)
    assert [h.document.source for h in index.search(one, 2).hits] == ["a", "a"]
    assert len({h.document.source for h in index.search(common, WIDESPREAD + 1).hits}) == WIDESPREAD + 1
    assert index.remove(["b"]) == 1  # its own source is what it is removed by
    assert agrees(index)


# Going on


def killed(work: Callable[[], None]) -> bool:
    """Runs it in a process of its own; whether that was killed."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


class Death:
    """Kills the process before the n-th step."""

    def __init__(self, after: int, steps: Sequence[str] = ()) -> None:
        self.left, self.steps = after, steps

    def __call__(self, step: str) -> None:
        if not self.steps or step.partition(" ")[0] in self.steps:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def test_a_pass_that_is_killed_goes_on_where_it_was(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(scanning, "FLUSH_ROWS", 50)
    filled(tmp_path, 1000)
    pieces: list[str] = []

    def run(before: Callable[[str], None]) -> None:
        index = opened(ShelfCollection(tmp_path / "shelf", DIM, before), tmp_path)
        index.attach()
        index.close()

    for after in (15, 3, 0):
        assert killed(lambda after=after: run(Death(after, ["piece"])))
    run(lambda step: pieces.append(step) if step.startswith("piece") else None)
    assert len(pieces) < 20  # of 20, some had been seen
    index = opened(ShelfCollection(tmp_path / "shelf", DIM), tmp_path)
    assert agrees(index)
    assert index.about().rows == 1000
    assert index.check() == []
    index.close()


def test_until_a_second_pass_is_through_the_first_is_in_force(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(scanning, "FLUSH_ROWS", 50)
    index = opened(filled(tmp_path), tmp_path, drift=1)
    index.attach()
    q, before = unit(vectors(2, 1))[0][0], index.moments()
    for i, v in enumerate(vectors(6, 100)):
        index.collection.put(Document(f"f{i}#0", "new"), v)
    work = lambda: opened(ShelfCollection(tmp_path / "shelf", DIM, Death(4, ["piece"])), tmp_path).attach()  # noqa: E731
    assert killed(work)
    assert np.array_equal(index.moments().scatter, before.scatter)
    assert index.search(q, 3).background.n == 200
    index.attach()
    assert agrees(index)
    assert index.search(q, 3).background.n == 300


def test_changes_by_us_during_a_pass_are_in_what_it_puts_in_force(tmp_path, monkeypatch) -> None:
    """Replaced, removed and added on either side of where the pass is, before and after it is kept."""
    monkeypatch.setattr(scanning, "FLUSH_ROWS", 50)
    index = opened(filled(tmp_path, 400), tmp_path)
    index.attach()
    other = opened(ShelfCollection(tmp_path / "shelf", DIM), tmp_path)
    fresh, at = unit(vectors(7, 12))[0], iter(range(99))

    def meanwhile(step: str) -> None:
        if step.startswith("piece"):
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


def test_two_passes_at_once_end_in_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(scanning, "FLUSH_ROWS", 50)
    index = opened(filled(tmp_path), tmp_path)
    other = opened(ShelfCollection(tmp_path / "shelf", DIM), tmp_path)
    index.collection.before = lambda step: other.attach() if step == "piece 2" else None
    with pytest.raises(DataError, match="another 'casemate attach'"):
        index.attach()
    assert agrees(other)


# Changes by us, in two stores


def test_whoever_is_killed_while_changing_leaves_nothing_half_done(tmp_path) -> None:
    """At every step of replacing a source of four rows by one of three, and of removing one."""
    steps = 0
    while True:
        folder = tmp_path / str(steps)
        index = opened(filled(folder, 40), folder)
        index.attach()
        index.close()

        def work(folder: Path = folder, steps: int = steps) -> None:
            index = opened(ShelfCollection(folder / "shelf", DIM, Death(steps)), folder)
            new = [Document(f"d003#{i}", "new", source="d003") for i in (2, 3, 7)]
            index.add(new, unit(vectors(8, 3))[0])
            index.remove(["d005"])

        died = killed(work)
        index = opened(ShelfCollection(folder / "shelf", DIM), folder)
        assert agrees(index), steps
        assert index.check() == []
        three = [i for i in index.collection._ids() if i.startswith("d003")]
        assert three in (["d003#0", "d003#1", "d003#2", "d003#3"], ["d003#2", "d003#3", "d003#7"])
        index.close()
        if not died:
            break
        steps += 1
    assert steps > 12


def test_a_store_that_is_down_is_finished_by_the_next_change(attached, monkeypatch) -> None:
    shelf = attached.collection
    shelf.before = lambda step: (
        (_ for _ in ()).throw(BackendError("down", backend="shelf", retryable=True)) if step == "removed one" else None
    )
    with pytest.raises(BackendError):
        attached.remove(["d001"])
    assert "half done" in attached.check()[0]
    shelf.before = lambda step: None
    assert attached.remove(["d002"]) == 4
    assert agrees(attached)
    assert attached.check() == []


def test_a_change_that_is_refused_is_forgotten(attached) -> None:
    def refuse(documents, vectors) -> None:
        raise CapabilityError("read only")

    attached.collection.add = refuse
    for _ in range(2):
        with pytest.raises(CapabilityError):
            attached.add([Document("new", "x")], unit(vectors(8, 1))[0])
    assert attached.check() == []
    with pytest.raises(CapabilityError, match="knows no tenants"):
        attached.add([Document("new", "x")], unit(vectors(8, 1))[0], "other")


def test_a_row_of_somebody_else_is_not_overwritten(attached) -> None:
    attached.collection.put(Document("theirs", "x"), vectors(9, 1)[0])
    with pytest.raises(DataError, match="'theirs' that somebody else put in"):
        attached.add([Document("theirs", "y")], unit(vectors(8, 1))[0])
    assert attached.collection.find(["theirs"]).documents[0].text == "x"


# Changes by others


@pytest.mark.parametrize("share", [0.01, 0.04])
def test_between_a_foreign_write_and_the_next_pass_the_law_is_off_by_a_bounded_amount(tmp_path, share) -> None:
    """With a share p of rows unknown, the mean is off by 2p at most and the variance by 4p, whatever the rows are."""
    index, rng = opened(filled(tmp_path), tmp_path), np.random.default_rng(10)
    index.attach()
    q = unit(vectors(11, 1))[0][0]
    count = round(200 * share / (1 - share))
    for i in range(count):  # the worst there is: all at the question itself, as poison would be
        index.collection.put(Document(f"p{i}#0", "poison"), near(rng, q.astype(np.float64), 0.999))
    found = index.search(q, 3)
    p = count / (200 + count)
    true = law(index).background(q)
    assert found.background.n == 200
    assert abs(found.background.mean - true.mean) <= 2 * p
    assert abs(found.background.std**2 - true.std**2) <= 4 * p
    assert found.hits[0].document.source == found.hits[0].document.id.partition("#")[0]  # by the rule for sources
    assert found.hits[0].document.id.startswith("p")
    withheld = opened(ShelfCollection(tmp_path / "shelf", DIM), tmp_path, unknown="withhold").search(q, 3)
    assert len(withheld.hits) == 3
    assert not any(h.document.id.startswith("p") for h in withheld.hits)
    assert count / 200 == pytest.approx(index.drifted().share)
    index.attach()
    assert index.search(q, 3).background.mean == pytest.approx(true.mean, abs=1e-6)
    assert index.drifted().share == 0


@pytest.mark.parametrize("what", ["come", "gone"])
def test_beyond_the_limit_searches_are_refused_until_the_next_pass(attached, what) -> None:
    q = unit(vectors(11, 1))[0][0]
    attached.search(q, 3)
    ids = attached.collection._ids()
    if what == "gone":
        attached.collection.remove(ids[:11])
    else:
        for i, v in enumerate(vectors(12, 11)):
            attached.collection.put(Document(f"f{i}", "x"), v)
    attached._look._due = 0.0  # the next look is due
    for _ in range(2):
        with pytest.raises(DataError, match=r"more than attached.drift = 0.05 allows; run 'casemate attach'"):
            attached.search(q, 3)
    assert "run 'casemate attach'" in attached.check()[0]
    attached.attach()
    assert len(attached.search(q, 3).hits) == 3
    assert attached.check() == []


def test_vectors_changed_by_others_are_noticed_and_do_not_break_the_count(attached) -> None:
    for i in range(8):
        identity = f"d{i:03}#1"
        attached.collection.put(Document(identity, "embedded again"), vectors(20 + i, 1)[0])
    drift = attached.drifted()
    assert (drift.changed, drift.missing, drift.sampled) == (8, 0, 200)
    assert attached.check() == [f"{drift.told()}: run 'casemate attach' or 'casemate doctor --fix'"]
    assert attached.remove(["d000"]) == 4
    assert attached.moments().n == 196
    assert attached.drifted().noticed == 1
    attached.rebuild()
    assert agrees(attached)
    assert attached.check() == []


def test_rows_written_over_with_other_records_are_judged_as_those_and_not_removed_as_the_old(tmp_path) -> None:
    index, q = opened(filled(tmp_path), tmp_path, source_field="doc"), unit(vectors(11, 1))[0][0]
    index.attach()
    for i in range(8):  # as many gone as come: no count shows it
        index.collection.put(Document(f"d{i:03}#1", "another's", metadata={"doc": "other"}), 3 * q)
    found, p, true = index.search(q, 8), 8 / 200, law(index).background(q)
    assert {h.document.source for h in found.hits} == {"other"}
    assert abs(found.background.mean - true.mean) <= 2 * p
    assert abs(found.background.std**2 - true.std**2) <= 4 * p
    with pytest.raises(DataError, match="'d000#1' that somebody else put in"):
        index.remove(["m000"])
    shelf = ShelfCollection(tmp_path / "shelf", DIM)
    withheld = opened(shelf, tmp_path, source_field="doc", unknown="withhold").search(q, 8)
    assert len(withheld.hits) == 8
    assert "other" not in {h.document.source for h in withheld.hits}
    index.attach()
    assert index.remove(["m000"]) == 3
    assert index.remove(["other"]) == 8
    assert agrees(index)


def test_a_store_that_is_down_is_an_error_and_no_empty_answer(attached) -> None:
    attached.collection.broken = True
    with pytest.raises(BackendError, match="down"):
        attached.search(vectors(2, 1)[0], 3)
