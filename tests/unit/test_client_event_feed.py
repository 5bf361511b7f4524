"""Coalescing of concurrent polls."""

from __future__ import annotations

import threading

import pytest

from casemate.errors import BackendError
from casemate.guard.client_state.feed import ClientEventFeed, question_arrived
from tests.fakes import Memory


class Slow(Memory):
    """A store whose reads block until released, and of which one read fails."""

    def __init__(self, failing):
        super().__init__()
        self.failing, self.readings = failing, 0
        self.begun, self.go = threading.Event(), threading.Event()

    def read_since(self, kind, after, since=None):
        self.readings += 1
        number, found = self.readings, super().read_since(kind, after, since)
        self.begun.set()
        assert self.go.wait(20)
        if number == self.failing:
            raise BackendError(f"reading {number} failed", backend="memory", retryable=True)
        return found


class Announced:
    """A lock that signals each arrival."""

    def __init__(self, lock):
        self.lock, self.coming = lock, threading.Semaphore(0)

    def __enter__(self):
        self.coming.release()
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


@pytest.mark.parametrize(
    ("failing", "rest"),
    [(0, [1]), (1, [1]), (2, "reading 2 failed")],  # the first started before their calls
)
def test_concurrent_polls_share_the_next_one_and_its_outcome(failing, rest):
    store, taken, heard = Slow(failing), [], {}
    here, there = (ClientEventFeed(store, "kind", 60.0, lambda *what: taken.append(what[2]["n"])) for _ in range(2))

    def ask(name):
        try:
            here.poll()
            heard[name] = list(taken)
        except BackendError as error:
            heard[name] = str(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(5)]
    threads[0].start()
    assert store.begun.wait(20)
    there.publish("t", "anna", {"n": 1})  # too late for the poll in progress
    here._lock = Announced(here._lock)
    for thread in threads[1:]:
        thread.start()
    for _ in threads[1:]:
        assert here._lock.coming.acquire(timeout=20)
    store.go.set()
    for thread in threads:
        thread.join(20)
    assert [heard[i] for i in range(1, 5)] == [rest] * 4
    assert store.readings == 2
    here.poll()
    assert taken == [1]


def test_questions_in_progress_share_a_poll_that_started_after_they_arrived():
    store, taken = Slow(0), []
    store.go.set()
    here, there = (ClientEventFeed(store, "kind", 60.0, lambda *what: taken.append(what[2]["n"])) for _ in range(2))
    here.poll()
    with question_arrived():
        there.publish("t", "anna", {"n": 1})  # after the last poll, before the next one
        here.poll()
        assert (taken, store.readings) == ([1], 2)
        there.publish("t", "anna", {"n": 2})  # after the question arrived: it need not see this
        here.poll()
        assert (taken, store.readings) == ([1], 2)
    with question_arrived():
        here.poll()
    assert (taken, store.readings) == ([1, 2], 3)
    here.poll()  # outside a question: each call is an arrival
    assert store.readings == 4


def test_a_failed_poll_is_not_shared_with_questions_that_come_later():
    store = Slow(1)
    store.go.set()
    feed = ClientEventFeed(store, "kind", 60.0, lambda *what: None)
    with question_arrived():
        with pytest.raises(BackendError, match="reading 1"):
            feed.poll()
        feed.poll()
    assert store.readings == 2
