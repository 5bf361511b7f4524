"""What is remembered of clients: for how long, of how many, and over a restart."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate import news, sessions, traces
from casemate.backends.sql_events import SqlEvents
from casemate.errors import BackendError
from casemate.sessions import Sessions
from casemate.types import Event
from tests.fakes import Memory

HOUR = 3600.0


@pytest.fixture
def clock(monkeypatch):
    """Time as the test sets it."""
    now = SimpleNamespace(time=lambda: now.at, at=1_800_000_000.0)
    monkeypatch.setattr(sessions, "time", now)
    monkeypatch.setattr(news, "time", now)
    return now


def event(clock, barred, client="anna", tenant="t", defense="mirabel", ago=0.0, **body):
    at = datetime.fromtimestamp(clock.at, UTC) - timedelta(seconds=ago)
    about = {"process": "another", "defense": defense, "client": client, "tenant": tenant, "barred": barred}
    return Event(f"{client}{ago}{barred}", at, "session", about | body)


def follow(held):
    held.follow()


def test_who_is_barred_is_barred_for_that_client_of_that_tenant_alone(clock):
    held = Sessions("mirabel", HOUR)
    held.bar("t", "anna", "d1")
    held.bar("t", "anna", "d2")
    assert held.barred("t", "anna") == {"d1", "d2"}
    assert held.barred("t", "otto") == held.barred("u", "anna") == frozenset()


def test_a_bar_ends_with_the_session_and_is_not_prolonged_by_asking(clock):
    held = Sessions("mirabel", HOUR)
    held.bar("t", "anna", "d1")
    clock.at += HOUR / 2
    held.bar("t", "anna", "d2")
    clock.at += HOUR / 2 - 1
    assert held.barred("t", "anna") == {"d1", "d2"}
    clock.at += 1
    assert held.barred("t", "anna") == {"d2"}
    held.bar("t", "anna", "d2")
    clock.at += HOUR - 1
    assert held.barred("t", "anna") == {"d2"}
    clock.at += 1
    assert held.barred("t", "anna") == frozenset()


def test_with_no_time_nothing_is_barred_after_the_answer_at_hand(clock):
    held = Sessions("mirabel", 0.0, Memory())
    held.bar("t", "anna", "d1")
    assert held.barred("t", "anna") == frozenset()


@given(st.lists(st.floats(0.01, 100), max_size=30))
def test_evidence_is_the_cusum_of_what_is_added(e_values):
    held, total = Sessions("mirabel", HOUR), 1.0
    for e in e_values:
        held.add("t", "anna", "d1", e)
        total = max(total, 1.0) * e
    assert held.evidence("t", "anna", "d1") == pytest.approx(max(total, 1.0))
    assert held.evidence("t", "anna", "d2") == held.evidence("t", "otto", "d1") == held.evidence("u", "anna", "d1") == 1


def test_evidence_added_at_once_is_not_lost():
    held = Sessions("mirabel", HOUR)

    def add():
        for _ in range(50):
            held.add("t", "anna", "d1", 1.01)

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held.evidence("t", "anna", "d1") == pytest.approx(1.01**400)


def test_the_longest_unheard_of_client_is_forgotten_first(clock, monkeypatch):
    monkeypatch.setattr(sessions, "CLIENTS", 3)
    held = Sessions("mirabel", HOUR)
    for client in ("a", "b", "c"):
        held.bar("t", client, "d1")
    assert held.barred("t", "a") == {"d1"}  # heard of again
    held.bar("t", "d", "d1")
    assert [bool(held.barred("t", c)) for c in "abcd"] == [True, False, True, True]


def test_whoever_only_asks_displaces_nobody(clock, monkeypatch):
    """Or an attacker would ask under many names until his own bars are forgotten."""
    monkeypatch.setattr(sessions, "CLIENTS", 3)
    held = Sessions("mirabel", HOUR)
    held.bar("t", "anna", "d1")
    for i in range(100):
        assert held.barred("t", f"made up {i}") == frozenset()
        assert held.evidence("t", f"made up {i}", "d1") == 1
        held.add("t", f"made up {i}", "d1", 0.5)
    assert held.barred("t", "anna") == {"d1"}


def test_of_a_client_so_many_documents_are_remembered(clock, monkeypatch):
    monkeypatch.setattr(sessions, "SOURCES", 3)
    held = Sessions("mirabel", HOUR)
    for i in range(5):
        held.bar("t", "anna", f"d{i}")
        held.add("t", "anna", f"d{i}", 2.0)
    assert held.barred("t", "anna") == {"d2", "d3", "d4"}
    assert [held.evidence("t", "anna", f"d{i}") for i in range(5)] == [1, 1, 2, 2, 2]


def test_what_others_withhold_and_have_seen_is_known_here(clock):
    store = Memory()
    here, there = Sessions("mirabel", HOUR, store), Sessions("mirabel", HOUR, store)
    another = Sessions("honeytoken", HOUR, store)
    here.bar("t", "anna", "d1")
    here.add("t", "anna", "d2", 7.0)
    there.add("t", "anna", "d2", 3.0)
    assert there.barred("t", "anna") == frozenset()
    for held in (here, there, another):
        follow(held)
        follow(held)  # nothing comes twice
    assert there.barred("t", "anna") == here.barred("t", "anna") == {"d1"}
    assert there.evidence("t", "anna", "d2") == here.evidence("t", "anna", "d2") == pytest.approx(21.0)
    assert another.barred("t", "anna") == frozenset()


def test_a_client_who_is_forgiven_begins_anew_everywhere_and_no_other_does(clock):
    store = Memory()
    here, there = Sessions("mirabel", HOUR, store), Sessions("mirabel", HOUR, store)
    for client in ("anna", "otto"):
        here.bar("t", client, "d1")
        here.add("t", client, "d2", 7.0)
    follow(there)
    traces.forgive(store, "t", "anna")
    for held in (here, there, Sessions("mirabel", HOUR, store)):
        follow(held)
        assert held.barred("t", "anna") == frozenset()
        assert held.evidence("t", "anna", "d2") == 1
        assert held.barred("t", "otto") == {"d1"}
    there.bar("t", "anna", "d3")
    for held in (here, there):
        follow(held)
        assert held.barred("t", "anna") == {"d3"}


def test_what_changes_nothing_is_not_written(clock):
    store = Memory()
    held = Sessions("mirabel", HOUR, store)
    held.add("t", "anna", "d1", 0.5)
    assert store.events == []
    held.add("t", "anna", "d1", 2.0)
    held.add("t", "anna", "d1", 0.9)
    assert len(store.events) == 2


def test_what_was_withheld_comes_back_after_a_restart(clock):
    store = Memory()
    store.append(event(clock, ["d1", "d2"], ago=HOUR - 10))
    store.append(event(clock, ["d2"], ago=HOUR / 2))
    store.append(event(clock, ["d3"], client="otto"))
    store.append(event(clock, ["d4"], tenant="u"))
    store.append(event(clock, ["d5"], defense="another"))
    store.append(event(clock, [], ago=1, evidence={"d6": 5.0}))
    store.append(Event("x", datetime.fromtimestamp(clock.at, UTC), "session", {"defense": "mirabel"}))
    held = Sessions("mirabel", HOUR, store)
    follow(held)
    assert held.barred("t", "anna") == {"d1", "d2"}
    assert held.barred("t", "otto") == {"d3"}
    assert held.barred("u", "anna") == {"d4"}
    assert held.evidence("t", "anna", "d6") == 5
    clock.at += 11
    assert held.barred("t", "anna") == {"d2"}  # from the time when it was flagged, not from the restart


def test_the_store_is_asked_for_the_time_of_a_session_and_then_for_what_is_new(clock):
    class Counting(Memory):
        asked = []

        def follow(self, kind, after, since=None):
            self.asked.append((kind, after, since.timestamp()))
            return [], 5

    held = Sessions("mirabel", HOUR, Counting())
    for _ in range(2):
        follow(held)
    assert Counting.asked == [("session", 0, clock.at - HOUR), ("session", 5, clock.at - HOUR)]


def test_a_store_that_cannot_be_read_is_asked_again(clock):
    """Forgetting in silence would show what was withheld."""

    class Late(Memory):
        failures = 2

        def follow(self, kind, after, since=None):
            if self.failures:
                self.failures -= 1
                raise BackendError("locked", backend="memory", retryable=True)
            return super().follow(kind, after, since)

    store = Late()
    store.append(event(clock, ["d1"]))
    held = Sessions("mirabel", HOUR, store)
    for _ in range(2):
        with pytest.raises(BackendError, match="locked"):
            follow(held)
    follow(held)
    assert held.barred("t", "anna") == {"d1"}


def test_a_restart_with_a_real_store(tmp_path):
    store = SqlEvents(path=tmp_path / "events.db")
    before = Sessions("mirabel", HOUR, store)
    before.bar("t", "anna", "d1")
    store.append(event(SimpleNamespace(at=datetime.now(UTC).timestamp()), ["d2"], ago=2 * HOUR))
    store.close()
    again = SqlEvents(path=tmp_path / "events.db")
    held = Sessions("mirabel", HOUR, again)
    follow(held)
    assert held.barred("t", "anna") == {"d1"}
    again.close()
