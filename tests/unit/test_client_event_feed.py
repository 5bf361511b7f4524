"""Coalescing of concurrent polls."""

from __future__ import annotations

import threading

import pytest

from casemate.errors import BackendError
from casemate.guard.client_state.feed import ClientEventFeed, question_arrived
from tests.fakes import Memory


class BlockingStore(Memory):
    """A store whose reads block until they are released. One of its reads fails."""

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


class SignalingLock:
    """A lock that signals each arrival."""

    def __init__(self, lock):
        self.lock, self.arrivals = lock, threading.Semaphore(0)

    def __enter__(self):
        self.arrivals.release()
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


@pytest.mark.parametrize(
    ("failing", "rest"),
    [(0, [1]), (1, [1]), (2, "reading 2 failed")],  # the first read started before their calls
)
def test_concurrent_polls_share_the_next_poll_and_its_outcome(failing, rest):
    store, applied, outcomes = BlockingStore(failing), [], {}
    local_feed, remote_feed = (
        ClientEventFeed(store, "kind", 60.0, lambda *what: applied.append(what[2]["n"])) for _ in range(2)
    )

    def ask(name):
        try:
            local_feed.poll()
            outcomes[name] = list(applied)
        except BackendError as error:
            outcomes[name] = str(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(5)]
    threads[0].start()
    assert store.begun.wait(20)
    remote_feed.publish("t", "anna", {"n": 1})  # too late for the poll in progress
    local_feed._lock = SignalingLock(local_feed._lock)
    for thread in threads[1:]:
        thread.start()
    for _ in threads[1:]:
        assert local_feed._lock.arrivals.acquire(timeout=20)
    store.go.set()
    for thread in threads:
        thread.join(20)
    assert [outcomes[i] for i in range(1, 5)] == [rest] * 4
    assert store.readings == 2
    local_feed.poll()
    assert applied == [1]


def test_questions_in_progress_share_a_poll_that_started_after_they_arrived():
    store, applied = BlockingStore(0), []
    store.go.set()
    local_feed, remote_feed = (
        ClientEventFeed(store, "kind", 60.0, lambda *what: applied.append(what[2]["n"])) for _ in range(2)
    )
    local_feed.poll()
    with question_arrived():
        remote_feed.publish("t", "anna", {"n": 1})  # after the last poll, before the next one
        local_feed.poll()
        assert (applied, store.readings) == ([1], 2)
        remote_feed.publish("t", "anna", {"n": 2})  # after the question arrived, so the poll may miss it
        local_feed.poll()
        assert (applied, store.readings) == ([1], 2)
    with question_arrived():
        local_feed.poll()
    assert (applied, store.readings) == ([1, 2], 3)
    local_feed.poll()  # without a question, each call is an arrival
    assert store.readings == 4


def test_failed_poll_is_not_shared_with_later_questions():
    store = BlockingStore(1)
    store.go.set()
    feed = ClientEventFeed(store, "kind", 60.0, lambda *what: None)
    with question_arrived():
        with pytest.raises(BackendError, match="reading 1"):
            feed.poll()
        feed.poll()
    assert store.readings == 2
