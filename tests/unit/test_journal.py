"""An index by journal stays whole wherever a writer dies, whoever else writes, and whatever answer is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from casemate import journal
from casemate.errors import BackendError, DataError
from casemate.journal import Mark
from casemate.journal.heads import pieces, ranges
from casemate.journal.lease import HEADS
from casemate.stats import CorpusMoments
from casemate.testing import INDEX_OBLIGATIONS
from casemate.types import Document
from tests.unit.journal_store import MemoryIndex, Place

DIM = 8
SHORT = 0.01  # seconds that a call may take; three of them are a lease


class Killed(BaseException):
    """What a process that is gone does not catch."""


def unit(seed: int, n: int) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((n, DIM))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def documents(source: str, count: int, label: str = "") -> list[Document]:
    return [Document(f"{source}/{i}", f"text {i} {label}", "", source, label) for i in range(count)]


def opened(place: Place, timeout_s: float = SHORT) -> MemoryIndex:
    index = MemoryIndex(place, timeout_s)
    index.open("test", DIM)
    return index


def filled() -> Place:
    """Seven documents of three sources, in two tenants."""
    place = Place()
    with_all = opened(place)
    with_all.add([*documents("a", 3, "old"), *documents("b", 2, "old")], unit(1, 5))
    with_all.add(documents("a", 2, "other"), unit(2, 2), "other")
    return place


def held(index: MemoryIndex, tenant: str = "default") -> dict[str, str]:
    """Ids and texts that are found, after moments, scan, digests and background were compared with them."""
    q = unit(9, 1)[0]
    found = index.search(q, 100, tenant)
    scanned = [(d, v) for piece, vectors in index.scan(tenant) for d, v in zip(piece, vectors, strict=True)]
    s = np.array([h.score for h in found.hits])
    assert sorted(h.document.id for h in found.hits) == sorted(d.id for d, _ in scanned)
    assert found.background.n == len(s)
    if len(s):
        assert abs(found.background.mean - s.mean()) < 1e-9
        assert abs(found.background.std - s.std()) < 1e-9
        fresh, moments = CorpusMoments.of(np.array([v for _, v in scanned])), index.moments(tenant)
        assert np.abs(moments.scatter - fresh.scatter).max() < 1e-9
    assert dict(index.digests(tenant)) == {d.source: d.digest for d, _ in scanned}
    return {h.document.id: h.document.text for h in found.hits}


def replace_two(index: MemoryIndex) -> None:
    index.add([*documents("a", 4, "new"), *documents("c", 1, "new")], unit(3, 5))


def take_out(index: MemoryIndex) -> None:
    index.remove(["a", "b", "nothing"])


def grow(index: MemoryIndex) -> None:
    index.add(documents("d", 2, "new"), unit(4, 2), "third")


def compute_anew(index: MemoryIndex) -> None:
    index.rebuild()


@pytest.mark.parametrize("obligation", INDEX_OBLIGATIONS, ids=lambda o: o.__name__.strip("_"))
def test_it_is_an_index(obligation) -> None:
    places = [Place()]

    def make(fresh: bool) -> MemoryIndex:
        if fresh:
            places[0] = Place()
        return MemoryIndex(places[0])

    obligation(make, True)


@pytest.mark.parametrize("write", [replace_two, take_out, grow, compute_anew])
def test_a_writer_may_be_killed_anywhere(write: Callable[[MemoryIndex], None]) -> None:
    """At every call to the store in turn. Whoever reads sees all of the step or nothing; the next writer tidies up."""
    tenants = ("default", "other", "third")
    before = [held(opened(filled()), t) for t in tenants]
    whole = filled()
    write(opened(whole))
    after = [held(opened(whole), t) for t in tenants]
    outcomes = set()
    for number in range(1, 10_000):
        place = filled()
        victim = opened(place)
        calls = 0

        def die(call: str, last: int = number) -> None:
            nonlocal calls
            calls += 1
            if calls >= last:
                raise Killed

        victim.store.before = die
        try:
            write(victim)
        except Killed:
            pass
        if calls < number:
            break  # it came through: every call has been tried
        reader = opened(place)
        seen = [held(reader, t) for t in tenants]
        assert seen in (before, after), f"killed at call {number}, a reader sees a mixture"
        outcomes.add(seen == after)
        successor = opened(place)
        successor.add(documents("z", 1), unit(5, 1), "last")
        assert [held(reader, t) for t in tenants] == seen
        assert reader.check() == []
        rows = place.rows[reader.store.generation].values()
        heads = {row.source for row in rows if row.tenant == HEADS}
        assert len(rows) == sum(map(len, seen)) + 1 + len(heads), "something of the broken step is left"
    assert outcomes == {False, True} if write is not compute_anew else True
    assert number > 10


def test_the_next_writer_waits_until_the_lease_is_over() -> None:
    place = filled()
    victim = opened(place, timeout_s=0.1)

    def die(call: str) -> None:
        if call == "insert":
            raise Killed

    victim.store.before = die
    with pytest.raises(Killed):
        replace_two(victim)
    begin = time.monotonic()
    take_out(opened(place))  # whose own lease is shorter
    assert time.monotonic() - begin > 0.25
    assert held(opened(place)) == {}


def test_a_writer_who_sleeps_over_his_lease_changes_nothing() -> None:
    """He wakes up when he was to make his step count; another has written in between."""
    place = filled()
    sleeper, other, asleep, wake = opened(place), opened(place), threading.Event(), threading.Event()
    swaps, caught = [0], []

    def sleep(call: str) -> None:
        swaps[0] += call == "swap"
        if call == "swap" and swaps[0] == 2:
            asleep.set()
            wake.wait(20)

    def write() -> None:
        sleeper.store.before = sleep
        try:
            replace_two(sleeper)
        except BackendError as error:
            caught.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert asleep.wait(20)
    other.add(documents("b", 1, "newer"), unit(6, 1))
    expected = held(other)
    wake.set()
    thread.join()
    assert "lost the lease" in str(caught[0])
    assert caught[0].retryable
    assert held(other) == expected == {**{f"a/{i}": f"text {i} old" for i in range(3)}, "b/0": "text 0 newer"}
    assert other.check() == []
    replace_two(sleeper)  # and may try again
    assert len(held(other)) == 6


def test_rows_that_come_too_late_are_found_by_check_and_counted_by_rebuild() -> None:
    """The one thing that no lease prevents: a request that was on its way for longer than it."""
    place = filled()
    index = opened(place)
    rows = place.rows[index.store.generation]
    document = next(row for row in rows.values() if row.tenant != HEADS)
    rows[document.key + 500] = replace_row(document, key=document.key + 500, id="0" * 32)
    assert any("the moments count 5 documents, the index 6" in fault for fault in index.check())
    rows[document.key + 501] = replace_row(document, key=document.key + 501, tenant="1" * 32)
    assert any("1 rows belong to no tenant" in fault for fault in index.check())
    del rows[document.key + 501]
    index.rebuild()
    assert index.check() == []
    assert index.moments().n == 6


def replace_row(row, **changes):
    return row._replace(**changes)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_an_answer_that_is_lost_may_have_been_a_yes(lost: int) -> None:
    place = filled()
    index = opened(place)
    swap, count = index.store.swap, [0]

    def unsure(old: Mark, new: Mark) -> None:
        swap(old, new)
        count[0] += 1
        if count[0] == lost:
            raise BackendError("the answer was lost", backend="memory", retryable=True)

    index.store.swap = unsure
    replace_two(index)
    assert len(held(opened(place))) == 7
    assert index.check() == []


def test_a_store_that_fails_leaves_the_step_to_the_next_writer() -> None:
    place = filled()
    index = opened(place)
    before = held(index)

    def fail(call: str) -> None:
        if call == "insert":
            raise BackendError("no room", backend="memory", retryable=True)

    index.store.before = fail
    with pytest.raises(BackendError, match="no room"):
        replace_two(index)
    index.store.before = lambda call: None
    assert held(index) == before
    replace_two(index)
    assert index.check() == []


def test_what_is_refused_keeps_nobody_waiting() -> None:
    place = filled()
    index, begin = opened(place, timeout_s=100), time.monotonic()
    with pytest.raises(DataError, match="given twice"):
        index.add([Document("b/0", "", source="new")], unit(7, 1))
    assert time.monotonic() - begin < 30
    replace_two(index)
    assert index.check() == []


def test_others_who_write_for_too_long_are_named(monkeypatch) -> None:
    monkeypatch.setattr("casemate.journal.lease.PATIENCE", 0.03)
    place = filled()
    index = opened(place)
    done = threading.Event()

    def busy() -> None:  # another, who does move the mark
        while not done.is_set():
            with place.lock:
                mark = place.marks[index.store.generation]
                place.marks[index.store.generation] = Mark(mark.step, mark.beat + 1, "busy", 10_000)
            time.sleep(0.005)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        with pytest.raises(BackendError, match="another writer") as caught:
            take_out(index)
        assert caught.value.retryable
        assert len(held(index)) == 5  # who reads does not wait
    finally:
        done.set()
        thread.join()


def test_a_reader_who_finds_no_quiet_asks_the_writers_to_wait(monkeypatch) -> None:
    monkeypatch.setattr(journal, "TRIES", 0)
    index = opened(filled())
    assert len(index._seen_by_all(index._all_heads, tries=0)) == 2
    assert index.check() == []


def test_threads_of_one_handle_do_not_see_one_another_s_half_of_a_look() -> None:
    """While one reads the head, another asks."""
    for number in range(1, 4):
        index, seen, calls = opened(filled()), [], [0]

        def ask(call: str, number=number, index=index, seen=seen, calls=calls) -> None:
            calls[0] += call == "select"
            if call == "select" and calls[0] == number:
                seen.append(index.moments().n)

        index.store.before = ask
        assert len(held(index)) == 5
        assert seen == [5]


def test_a_place_built_anew_is_followed_by_the_same_embedder_only() -> None:
    place = filled()
    one, another, q = opened(place), opened(place), unit(9, 1)[0]
    assert len(held(another)) == 5
    one.clear()
    for call in (another.check, lambda: another.search(q, 1), lambda: replace_two(another)):
        with pytest.raises(DataError, match="of the embedder None"):
            call()
    one.open("test", DIM)
    one.add(documents("n", 2), unit(8, 2))
    assert set(held(another)) == {"n/0", "n/1"}


def test_documents_longer_than_a_row_come_back_whole() -> None:
    place = Place()
    index = opened(place)
    texts = ["x" * 200_000, "漢" * 50_000, "", "\0" * 30_000]
    long = [Document(f"i{i}" * 20_000, t, t, f"s{i}" * 20_000, t, {"m": t}) for i, t in enumerate(texts)]
    index.add(long, unit(1, 4))
    assert [d for piece, _ in index.scan() for d in piece] == long
    assert {h.document.id: h.document for h in index.search(unit(9, 1)[0], 9).hits} == {d.id: d for d in long}
    assert dict(index.digests()) == {d.source: d.digest for d in long}
    rows = place.rows[index.store.generation].values()
    assert max(len(text.encode()) for row in rows for text in (row.body, row.label)) <= 65_535
    assert index.remove([d.source for d in long]) == 4
    assert {row.tenant for row in rows} == {HEADS}


def test_a_tenant_needs_a_name_of_bearable_length() -> None:
    index = opened(Place())
    with pytest.raises(DataError, match="1000 is most"):
        index.add(documents("a", 1), unit(1, 1), "t" * 1001)
    index.add(documents("a", 1), unit(1, 1), "ä\0'\"" * 250)
    assert index.tenants() == ["ä\0'\"" * 250]


def test_heads_that_were_tampered_with_are_found_and_mended() -> None:
    place = filled()
    index = opened(place)
    rows = place.rows[index.store.generation]
    key, head = next((k, r) for k, r in rows.items() if r.tenant == HEADS)
    rows[key] = head._replace(body=head.body[:-40])
    other = opened(place)
    assert any("the moments are damaged" in fault for fault in other.check())
    with pytest.raises(DataError, match="damaged"):
        other.search(unit(9, 1)[0], 1)
    other.rebuild()
    assert other.check() == []
    assert len(held(opened(place))) == 5


def test_a_step_has_so_many_rows_and_no_more(monkeypatch) -> None:
    from casemate.journal import lease

    monkeypatch.setattr(lease, "BITS", 3)
    index = opened(Place())
    with pytest.raises(DataError, match="fewer documents at a time"):
        index.add(documents("a", 9), unit(1, 9))
    index.add(documents("a", 7), unit(1, 7))


def test_moments_of_real_size_take_several_rows() -> None:
    place, dim = Place(), 384
    index = MemoryIndex(place)
    index.open("test", dim)
    x = np.random.default_rng(0).standard_normal((50, dim))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    index.add(documents("a", 50), x)
    other = MemoryIndex(place)
    other.open("test", dim)
    fresh = CorpusMoments.of(x)
    assert np.array_equal(other.moments().mean, fresh.mean)
    assert np.abs(other.moments().scatter - fresh.scatter).max() < 1e-15


def test_pieces_and_ranges() -> None:
    for text in ("", "a" * 130_001, "ä" * 40_000):
        assert "".join(pieces(text)) == text
    rng = np.random.default_rng(0)
    for _ in range(50):
        keys = set(rng.integers(0, 60, 30).tolist())
        assert {k for a, b in ranges([*keys]) for k in range(a, b + 1)} == keys
    assert ranges([]) == []
