"""``MvccIndex`` is consistent after kills of writers, concurrent writers and lost replies."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from casemate.backends.mvcc import index as mvcc_index
from casemate.backends.mvcc.manifest import key_ranges
from casemate.backends.mvcc.row_codec import MANIFEST, split_body
from casemate.backends.mvcc.versioned_store import CommitRecord
from casemate.errors import BackendError, DataError
from casemate.maths.moments import CorpusMoments
from casemate.testing import INDEX_OBLIGATIONS
from casemate.types import Document
from tests.fakes import unit
from tests.unit.memory_versioned_store import MemoryIndex, MemoryServer

DIM = 8
SHORT = 0.01  # timeout_s; the lease is three times as long


class Killed(BaseException):
    """The code under test does not catch it, like SIGKILL."""


def documents(source: str, count: int, label: str = "") -> list[Document]:
    return [Document(f"{source}/{i}", f"text {i} {label}", "", source, label) for i in range(count)]


def opened(server: MemoryServer, timeout_s: float = SHORT) -> MemoryIndex:
    index = MemoryIndex(server, timeout_s)
    index.open("test", DIM)
    return index


def filled() -> MemoryServer:
    """Seven documents of three sources, in two tenants."""
    server = MemoryServer()
    with_all = opened(server)
    with_all.add([*documents("a", 3, "old"), *documents("b", 2, "old")], unit(1, 5))
    with_all.add(documents("a", 2, "other"), unit(2, 2), "other")
    return server


def contents(index: MemoryIndex, tenant: str = "default") -> dict[str, str]:
    """Ids and texts found by a search, after a comparison with moments, scan, digests and similarity statistics."""
    q = unit(9, 1)[0]
    found = index.search(q, 100, tenant)
    scanned = [(d, v) for page, vectors in index.scan(tenant) for d, v in zip(page, vectors, strict=True)]
    s = np.array([h.score for h in found.hits])
    assert sorted(h.document.id for h in found.hits) == sorted(d.id for d, _ in scanned)
    assert found.similarity_stats.n == len(s)
    if len(s):
        assert abs(found.similarity_stats.mean - s.mean()) < 1e-9
        assert abs(found.similarity_stats.std - s.std()) < 1e-9
        fresh, moments = CorpusMoments.of(np.array([v for _, v in scanned])), index.moments(tenant)
        assert np.abs(moments.scatter - fresh.scatter).max() < 1e-9
    assert dict(index.digests(tenant)) == {d.source: d.digest for d, _ in scanned}
    return {h.document.id: h.document.text for h in found.hits}


def test_modified_text_is_reported_and_not_served() -> None:
    server = filled()
    rows = next(iter(server.rows.values()))
    key = next(k for k, row in rows.items() if '"text 1 old"' in row.body)
    rows[key] = rows[key]._replace(body=rows[key].body.replace("text 1", "text 9"))
    index = opened(server)
    assert [("do not fit their checksum" in fault) for fault in index.check()] == [True]
    with pytest.raises(DataError, match="is damaged in the index"):
        index.search(unit(9, 1)[0], 100)


def test_reads_and_reports_rows_without_checksums() -> None:
    server = filled()
    rows = next(iter(server.rows.values()))
    for key, row in rows.items():
        if row.tenant != MANIFEST:
            rows[key] = row._replace(body=json.dumps(json.loads(row.body)[:6]))
    index = opened(server)
    assert len(contents(index)) == 5
    assert [fault.partition(",")[0] for fault in index.check()] == ["7 documents have no checksum"]


def replace_two(index: MemoryIndex) -> None:
    index.add([*documents("a", 4, "new"), *documents("c", 1, "new")], unit(3, 5))


def remove_two(index: MemoryIndex) -> None:
    index.remove(["a", "b", "nothing"])


def add_two(index: MemoryIndex) -> None:
    index.add(documents("d", 2, "new"), unit(4, 2), "third")


def rebuild(index: MemoryIndex) -> None:
    index.rebuild()


@pytest.mark.parametrize("obligation", INDEX_OBLIGATIONS, ids=lambda o: o.__name__.strip("_"))
def test_fulfills_the_obligations_of_an_index(obligation) -> None:
    servers = [MemoryServer()]

    def make(fresh: bool) -> MemoryIndex:
        if fresh:
            servers[0] = MemoryServer()
        return MemoryIndex(servers[0])

    obligation(make, True)


@pytest.mark.parametrize("write", [replace_two, remove_two, add_two, rebuild])
def test_kill_at_any_call_leaves_the_state_before_or_after_the_write(write: Callable[[MemoryIndex], None]) -> None:
    """Kills the writer at each store call. Readers see the whole change or nothing; the next writer cleans up."""
    tenants = ("default", "other", "third")
    before = [contents(opened(filled()), t) for t in tenants]
    whole = filled()
    write(opened(whole))
    after = [contents(opened(whole), t) for t in tenants]
    outcomes = set()
    for number in range(1, 10_000):
        server = filled()
        killed_writer = opened(server)
        calls = 0

        def kill(call: str, last: int = number) -> None:
            nonlocal calls
            calls += 1
            if calls >= last:
                raise Killed

        killed_writer.store.before = kill
        try:
            write(killed_writer)
        except Killed:
            pass
        if calls < number:
            break  # the write completed, so each call was tested
        reader = opened(server)
        seen = [contents(reader, t) for t in tenants]
        assert seen in (before, after), f"killed at call {number}, a reader sees a partial change"
        outcomes.add(seen == after)
        successor = opened(server)
        successor.add(documents("z", 1), unit(5, 1), "last")
        assert [contents(reader, t) for t in tenants] == seen
        assert reader.check() == []
        rows = server.rows[reader.store.generation].values()
        manifests = {row.source for row in rows if row.tenant == MANIFEST}
        assert len(rows) == sum(map(len, seen)) + 1 + len(manifests), "rows of the killed writer are left"
    assert outcomes == {False, True} if write is not rebuild else True
    assert number > 10


def test_next_writer_waits_until_the_lease_expires() -> None:
    server = filled()
    killed_writer = opened(server, timeout_s=0.1)

    def kill(call: str) -> None:
        if call == "insert":
            raise Killed

    killed_writer.store.before = kill
    with pytest.raises(Killed):
        replace_two(killed_writer)
    begin = time.monotonic()
    remove_two(opened(server))  # its own lease is shorter
    assert time.monotonic() - begin > 0.25
    assert contents(opened(server)) == {}


def test_writer_suspended_past_its_lease_changes_nothing() -> None:
    """It resumes at its commit after another writer has committed."""
    server = filled()
    suspended, other, paused, resume = opened(server), opened(server), threading.Event(), threading.Event()
    exchanges, caught = [0], []

    def sleep(call: str) -> None:
        exchanges[0] += call == "compare_and_swap"
        if call == "compare_and_swap" and exchanges[0] == 2:
            paused.set()
            resume.wait(20)

    def write() -> None:
        suspended.store.before = sleep
        try:
            replace_two(suspended)
        except BackendError as error:
            caught.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert paused.wait(20)
    other.add(documents("b", 1, "newer"), unit(6, 1))
    expected = contents(other)
    resume.set()
    thread.join()
    assert "lost the lease" in str(caught[0])
    assert caught[0].retryable
    assert contents(other) == expected == {**{f"a/{i}": f"text {i} old" for i in range(3)}, "b/0": "text 0 newer"}
    assert other.check() == []
    replace_two(suspended)  # a second attempt is allowed
    assert len(contents(other)) == 6


def test_check_reports_and_rebuild_counts_rows_of_a_request_delayed_past_the_lease() -> None:
    """A lease does not prevent this case."""
    server = filled()
    index = opened(server)
    rows = server.rows[index.store.generation]
    document = next(row for row in rows.values() if row.tenant != MANIFEST)
    rows[document.key + 500] = replace_row(document, key=document.key + 500, id="0" * 32)
    assert any("the moments count 5 documents, the index 6" in fault for fault in index.check())
    rows[document.key + 501] = replace_row(document, key=document.key + 501, tenant="1" * 32)
    assert any("1 rows belong to no known tenant" in fault for fault in index.check())
    del rows[document.key + 501]
    index.rebuild()
    assert index.check() == []
    assert index.moments().n == 6


def replace_row(row, **changes):
    return row._replace(**changes)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_write_succeeds_if_the_reply_to_its_commit_is_lost(lost: int) -> None:
    server = filled()
    index = opened(server)
    exchange, count = index.store.compare_and_swap, [0]

    def lose_reply(old: CommitRecord, new: CommitRecord) -> None:
        exchange(old, new)
        count[0] += 1
        if count[0] == lost:
            raise BackendError("the reply was lost", backend="memory", retryable=True)

    index.store.compare_and_swap = lose_reply
    replace_two(index)
    assert len(contents(opened(server))) == 7
    assert index.check() == []


def test_next_writer_cleans_up_after_a_store_error() -> None:
    server = filled()
    index = opened(server)
    before = contents(index)

    def fail(call: str) -> None:
        if call == "insert":
            raise BackendError("no room", backend="memory", retryable=True)

    index.store.before = fail
    with pytest.raises(BackendError, match="no room"):
        replace_two(index)
    index.store.before = lambda call: None
    assert contents(index) == before
    replace_two(index)
    assert index.check() == []


def test_rejected_change_releases_the_lease_immediately() -> None:
    server = filled()
    index, begin = opened(server, timeout_s=100), time.monotonic()
    with pytest.raises(DataError, match="duplicate document id 'b/0'"):
        index.add([Document("b/0", "", source="new")], unit(7, 1))
    assert time.monotonic() - begin < 30
    replace_two(index)
    assert index.check() == []


def test_writer_raises_if_others_hold_the_lease_for_too_long(monkeypatch) -> None:
    monkeypatch.setattr("casemate.backends.mvcc.transaction.MAX_WAIT", 0.03)
    server = filled()
    index = opened(server)
    done = threading.Event()

    def busy() -> None:  # simulates another writer that renews its lease
        while not done.is_set():
            with server.lock:
                record = server.records[index.store.generation]
                server.records[index.store.generation] = CommitRecord(
                    record.committed, record.sequence + 1, "busy", 10_000
                )
            time.sleep(0.005)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        with pytest.raises(BackendError, match="another writer") as caught:
            remove_two(index)
        assert caught.value.retryable
        assert len(contents(index)) == 5  # readers do not wait
    finally:
        done.set()
        thread.join()


def test_reader_blocks_writers_after_too_many_conflicts(monkeypatch) -> None:
    monkeypatch.setattr(mvcc_index, "READ_ATTEMPTS", 0)
    index = opened(filled())
    assert len(index._read(index._all_manifests, attempts=0)) == 2
    assert index.check() == []


def test_index_shared_by_threads_has_no_partial_reads() -> None:
    """One thread reads the moments while another reads the manifest."""
    for number in range(1, 4):
        index, seen, calls = opened(filled()), [], [0]

        def ask(call: str, number=number, index=index, seen=seen, calls=calls) -> None:
            calls[0] += call == "select"
            if call == "select" and calls[0] == number:
                seen.append(index.moments().n)

        index.store.before = ask
        assert len(contents(index)) == 5
        assert seen == [5]


def test_handle_follows_a_recreated_index_only_with_the_same_embedder() -> None:
    server = filled()
    one, another, q = opened(server), opened(server), unit(9, 1)[0]
    assert len(contents(another)) == 5
    one.clear()
    for call in (another.check, lambda: another.search(q, 1), lambda: replace_two(another)):
        with pytest.raises(DataError, match="of the embedder None"):
            call()
    one.open("test", DIM)
    one.add(documents("n", 2), unit(8, 2))
    assert set(contents(another)) == {"n/0", "n/1"}


def test_restores_documents_longer_than_a_row() -> None:
    server = MemoryServer()
    index = opened(server)
    texts = ["x" * 200_000, "漢" * 50_000, "", "\0" * 30_000]
    long = [Document(f"i{i}" * 20_000, t, t, f"s{i}" * 20_000, t, {"m": t}) for i, t in enumerate(texts)]
    index.add(long, unit(1, 4))
    assert [d for page, _ in index.scan() for d in page] == long
    assert {h.document.id: h.document for h in index.search(unit(9, 1)[0], 9).hits} == {d.id: d for d in long}
    assert dict(index.digests()) == {d.source: d.digest for d in long}
    rows = server.rows[index.store.generation].values()
    assert max(len(text.encode()) for row in rows for text in (row.body, row.label)) <= 65_535
    assert index.remove([d.source for d in long]) == 4
    assert {row.tenant for row in rows} == {MANIFEST}


def test_limits_the_length_of_tenant_names() -> None:
    index = opened(MemoryServer())
    with pytest.raises(DataError, match="has 1001 characters; allowed: 1000"):
        index.add(documents("a", 1), unit(1, 1), "t" * 1001)
    index.add(documents("a", 1), unit(1, 1), "ä\0'\"" * 250)
    assert index.tenants() == ["ä\0'\"" * 250]


def test_reports_and_rebuilds_damaged_manifests() -> None:
    server = filled()
    index = opened(server)
    rows = server.rows[index.store.generation]
    key, head = next((k, r) for k, r in rows.items() if r.tenant == MANIFEST)
    rows[key] = head._replace(body=head.body[:-40])
    other = opened(server)
    assert any("the moments are damaged" in fault for fault in other.check())
    with pytest.raises(DataError, match="damaged"):
        other.search(unit(9, 1)[0], 1)
    other.rebuild()
    assert other.check() == []
    assert len(contents(opened(server))) == 5


def test_reads_hits_in_pages_above_the_limit_of_the_store(monkeypatch) -> None:
    monkeypatch.setattr(mvcc_index, "PAGE", 3)
    index = opened(filled())
    index.add(documents("c", 6, "x" * 70_000), unit(3, 6))  # texts with continuation rows
    q, expected = unit(9, 1)[0], index.search(unit(9, 1)[0], 11)
    index.store.max_hits, calls = 4, len(index.store.calls)
    for k in (5, 11, 1000):
        found = index.search(q, k)
        assert found.hits == expected.hits[:k] and found.similarity_stats == expected.similarity_stats
    assert "nearest" not in index.store.calls[calls:]
    assert index.search(q, 4).hits == expected.hits[:4] and "nearest" in index.store.calls[calls:]


def test_search_in_pages_does_not_serve_a_row_removed_meanwhile() -> None:
    server = filled()
    index, other = opened(server), opened(server)
    index.store.max_hits, selects = 2, iter(range(100))

    def remove_before_the_texts_are_read(call: str) -> None:
        if call == "select" and next(selects) == 2:  # after the pages of vectors
            other.remove(["a"])
            other.add(documents("n", 1), unit(4, 1))  # deletes outdated rows

    index.store.before = remove_before_the_texts_are_read
    found = index.search(unit(9, 1)[0], 5)
    assert {h.document.source for h in found.hits} in ({"b"}, {"b", "n"})


def test_limits_the_rows_of_a_transaction(monkeypatch) -> None:
    from casemate.backends.mvcc import transaction

    monkeypatch.setattr(transaction, "ROW_BITS", 3)
    index = opened(MemoryServer())
    with pytest.raises(DataError, match="fewer documents at a time"):
        index.add(documents("a", 9), unit(1, 9))
    index.add(documents("a", 7), unit(1, 7))


def test_moments_with_384_dimensions_span_several_rows() -> None:
    server, dim = MemoryServer(), 384
    index = MemoryIndex(server)
    index.open("test", dim)
    x = unit(0, 50, dim)
    index.add(documents("a", 50), x)
    other = MemoryIndex(server)
    other.open("test", dim)
    fresh = CorpusMoments.of(x)
    assert np.array_equal(other.moments().mean, fresh.mean)
    assert np.abs(other.moments().scatter - fresh.scatter).max() < 1e-15


def test_split_body_and_key_ranges() -> None:
    for text in ("", "a" * 130_001, "ä" * 40_000):
        assert "".join(split_body(text)) == text
    rng = np.random.default_rng(0)
    for _ in range(50):
        keys = set(rng.integers(0, 60, 30).tolist())
        assert {k for a, b in key_ranges([*keys]) for k in range(a, b + 1)} == keys
    assert key_ranges([]) == []
