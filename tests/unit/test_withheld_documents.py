"""State per client: expiry, size limits, sharing between processes, and restarts."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.errors import BackendError
from casemate.guard.client_state import feed, withheld_documents
from casemate.guard.client_state.reset import reset_client
from casemate.guard.client_state.withheld_documents import WithheldDocuments
from casemate.types import Event
from tests.fakes import Memory

HOUR = 3600.0


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = SimpleNamespace(time=lambda: now.at, at=1_800_000_000.0)
    monkeypatch.setattr(withheld_documents, "time", now)
    monkeypatch.setattr(feed, "time", now)
    return now


def event(clock, blocked_sources, client="anna", tenant="t", defense="mirabel", ago=0.0, **body):
    at = datetime.fromtimestamp(clock.at, UTC) - timedelta(seconds=ago)
    about = {"process": "another", "defense": defense, "client": client, "tenant": tenant, "barred": blocked_sources}
    return Event(f"{client}{ago}{blocked_sources}", at, "session", about | body)


def follow(state):
    state.sync()


def test_source_is_withheld_from_that_client_of_that_tenant_only(clock):
    state = WithheldDocuments("mirabel", HOUR)
    state.add("t", "anna", "d1")
    state.add("t", "anna", "d2")
    assert state.sources("t", "anna") == {"d1", "d2"}
    assert state.sources("t", "otto") == state.sources("u", "anna") == frozenset()
    state.add("t", f"{'long' * 50} a", "d1")
    assert [len(state.sources("t", f"{'long' * 50} {name}")) for name in "ab"] == [1, 0]


def test_withholding_ends_with_the_session_and_questions_do_not_extend_it(clock):
    state = WithheldDocuments("mirabel", HOUR)
    state.add("t", "anna", "d1")
    clock.at += HOUR / 2
    state.add("t", "anna", "d2")
    clock.at += HOUR / 2 - 1
    assert state.sources("t", "anna") == {"d1", "d2"}
    clock.at += 1
    assert state.sources("t", "anna") == {"d2"}
    state.add("t", "anna", "d2")
    clock.at += HOUR - 1
    assert state.sources("t", "anna") == {"d2"}
    clock.at += 1
    assert state.sources("t", "anna") == frozenset()


def test_with_zero_session_hours_no_document_stays_withheld(clock):
    store = Memory()
    state = WithheldDocuments("mirabel", 0.0, store)
    state.add("t", "anna", "d1")
    assert state.sources("t", "anna") == frozenset() and store.events == []


@given(st.lists(st.sampled_from((0.5, 2.0)) | st.floats(0.01, 100), max_size=30))
def test_evidence_is_the_cusum_of_e_values_in_every_process(e_values):
    store = Memory()
    state, peer = WithheldDocuments("mirabel", HOUR, store), WithheldDocuments("mirabel", HOUR, store)
    total = 1.0
    for e in e_values:
        state.add_evidence("t", "anna", "d1", e)
        total = max(total, 1.0) * e
    follow(peer)
    assert state.evidence("t", "anna", "d1") == peer.evidence("t", "anna", "d1") == pytest.approx(max(total, 1.0))
    assert (
        state.evidence("t", "anna", "d2") == state.evidence("t", "otto", "d1") == state.evidence("u", "anna", "d1") == 1
    )


def test_concurrent_evidence_is_not_lost():
    state = WithheldDocuments("mirabel", HOUR)

    def add():
        for _ in range(50):
            state.add_evidence("t", "anna", "d1", 1.01)

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert state.evidence("t", "anna", "d1") == pytest.approx(1.01**400)


@pytest.mark.parametrize("use", [lambda state: state.sources("t", "a"), lambda state: state.add("t", "a", "d1")])
def test_the_least_recently_used_client_is_evicted_first(use, clock, monkeypatch):
    monkeypatch.setattr(withheld_documents, "MAX_CLIENTS", 3)
    state = WithheldDocuments("mirabel", HOUR)
    for client in ("a", "b", "c"):
        state.add("t", client, "d1")
    use(state)
    state.add("t", "d", "d1")
    assert [bool(state.sources("t", c)) for c in "abcd"] == [True, False, True, True]


def test_questions_without_withheld_documents_evict_no_client(clock, monkeypatch):
    """Otherwise an attacker could evict its own state with questions under many client names."""
    monkeypatch.setattr(withheld_documents, "MAX_CLIENTS", 3)
    state = WithheldDocuments("mirabel", HOUR)
    state.add("t", "anna", "d1")
    for i in range(100):
        assert state.sources("t", f"made up {i}") == frozenset()
        assert state.evidence("t", f"made up {i}", "d1") == 1
        state.add_evidence("t", f"made up {i}", "d1", 0.5)
    assert state.sources("t", "anna") == {"d1"}


def test_number_of_sources_per_client_is_bounded(clock, monkeypatch):
    monkeypatch.setattr(withheld_documents, "MAX_SOURCES", 3)
    state = WithheldDocuments("mirabel", HOUR)
    for i in range(5):
        state.add("t", "anna", f"d{i}")
        state.add_evidence("t", "anna", f"d{i}", 2.0)
    assert state.sources("t", "anna") == {"d2", "d3", "d4"}
    assert [state.evidence("t", "anna", f"d{i}") for i in range(5)] == [1, 1, 2, 2, 2]


def test_state_is_shared_with_other_processes(clock):
    store = Memory()
    here, peer = WithheldDocuments("mirabel", HOUR, store), WithheldDocuments("mirabel", HOUR, store)
    another = WithheldDocuments("honeytoken", HOUR, store)
    here.add("t", "anna", "d1")
    here.add_evidence("t", "anna", "d2", 7.0)
    peer.add_evidence("t", "anna", "d2", 3.0)
    assert peer.sources("t", "anna") == frozenset()
    for state in (here, peer, another):
        follow(state)
        follow(state)  # each event is applied once
    assert peer.sources("t", "anna") == here.sources("t", "anna") == {"d1"}
    assert peer.evidence("t", "anna", "d2") == here.evidence("t", "anna", "d2") == pytest.approx(21.0)
    assert another.sources("t", "anna") == frozenset()


def test_reset_applies_to_one_client_in_every_process(clock):
    store = Memory()
    here, peer = WithheldDocuments("mirabel", HOUR, store), WithheldDocuments("mirabel", HOUR, store)
    for client in ("anna", "otto"):
        here.add("t", client, "d1")
        here.add_evidence("t", client, "d2", 7.0)
    follow(peer)
    reset_client(store, "t", "anna")
    for state in (here, peer, WithheldDocuments("mirabel", HOUR, store)):
        follow(state)
        assert state.sources("t", "anna") == frozenset()
        assert state.evidence("t", "anna", "d2") == 1
        assert state.sources("t", "otto") == {"d1"}
    peer.add("t", "anna", "d3")
    for state in (here, peer):
        follow(state)
        assert state.sources("t", "anna") == {"d3"}


def test_unchanged_state_is_not_written(clock):
    store = Memory()
    state = WithheldDocuments("mirabel", HOUR, store)
    state.add_evidence("t", "anna", "d1", 0.5)
    assert store.events == []
    state.add_evidence("t", "anna", "d1", 2.0)
    state.add_evidence("t", "anna", "d1", 0.9)
    assert len(store.events) == 2


def test_withheld_sources_are_restored_after_a_restart(clock):
    store = Memory()
    store.append(event(clock, ["d1", "d2"], ago=HOUR - 10))
    store.append(event(clock, ["d2"], ago=HOUR / 2))
    store.append(event(clock, ["d3"], client="otto"))
    store.append(event(clock, ["d4"], tenant="u"))
    store.append(event(clock, ["d5"], defense="another"))
    store.append(event(clock, [], ago=1, evidence={"d6": 5.0}))
    store.append(Event("x", datetime.fromtimestamp(clock.at, UTC), "session", {"defense": "mirabel"}))
    state = WithheldDocuments("mirabel", HOUR, store)
    follow(state)
    assert state.sources("t", "anna") == {"d1", "d2"}
    assert state.sources("t", "otto") == {"d3"}
    assert state.sources("u", "anna") == {"d4"}
    assert state.evidence("t", "anna", "d6") == 5
    clock.at += 11
    assert state.sources("t", "anna") == {"d2"}  # relative to the time of the flag, not of the restart


def test_poll_reads_one_session_and_then_new_events_only(clock):
    class CountingStore(Memory):
        asked = []

        def read_since(self, kind, after, since=None):
            self.asked.append((kind, after, since.timestamp()))
            return [], 5

    state = WithheldDocuments("mirabel", HOUR, CountingStore())
    for _ in range(2):
        follow(state)
    assert CountingStore.asked == [("session", 0, clock.at - HOUR), ("session", 5, clock.at - HOUR)]


def test_failed_poll_is_repeated(clock):
    """Lost state would reveal withheld documents without an error."""

    class FailsOnce(Memory):
        failures = 2

        def read_since(self, kind, after, since=None):
            if self.failures:
                self.failures -= 1
                raise BackendError("locked", backend="memory", retryable=True)
            return super().read_since(kind, after, since)

    store = FailsOnce()
    store.append(event(clock, ["d1"]))
    state = WithheldDocuments("mirabel", HOUR, store)
    for _ in range(2):
        with pytest.raises(BackendError, match="locked"):
            follow(state)
    follow(state)
    assert state.sources("t", "anna") == {"d1"}


def test_state_is_restored_after_a_restart_with_a_sql_store(tmp_path):
    store = SqlEventStore(path=tmp_path / "events.db")
    before = WithheldDocuments("mirabel", HOUR, store)
    before.add("t", "anna", "d1")
    store.append(event(SimpleNamespace(at=datetime.now(UTC).timestamp()), ["d2"], ago=2 * HOUR))
    store.close()
    again = SqlEventStore(path=tmp_path / "events.db")
    state = WithheldDocuments("mirabel", HOUR, again)
    follow(state)
    assert state.sources("t", "anna") == {"d1"}
    again.close()
