"""Shared allowances: never more than there is, in either database, whoever takes at the same time."""

from __future__ import annotations

import threading
import time

import pytest

from casemate.backends.sql_events import SqlEvents
from casemate.errors import BackendError
from casemate.types import Given, Wanted
from tests.unit.monitor_stores import fresh_url

url = pytest.fixture(params=["sqlite", "postgres"])(fresh_url)


@pytest.fixture
def store(url):
    opened = SqlEvents(url)
    yield opened
    opened.close()


def take(store, *wanted):
    return [tuple(given) for given in store.take(wanted)]


def test_as_much_is_given_as_there_is(store):
    assert take(store, Wanted("b", 5, 10), Wanted("a", 20, 10)) == [(5, 5), (10, 10)]
    assert take(store, Wanted("b", 7, 10)) == [(5, 10)]
    assert take(store, Wanted("b", 1, 10)) == [(0, 10)]
    assert take(store, Wanted("b", 0, 10)) == [(0, 10)]


def test_it_can_be_given_back_and_no_more_than_was_taken(store):
    take(store, Wanted("b", 5, 10))
    assert take(store, Wanted("b", -3, 10)) == [(-3, 2)]
    assert take(store, Wanted("b", -9, 10)) == [(-2, 0)]


def test_another_period_begins_with_nothing_used(store):
    take(store, Wanted("b", 10, 10, period="monday"))
    assert take(store, Wanted("b", 4, 10, period="tuesday")) == [(4, 4)]


def test_an_allowance_may_grow_and_shrink(store):
    take(store, Wanted("b", 10, 10))
    assert take(store, Wanted("b", 10, 15)) == [(5, 15)]
    assert take(store, Wanted("b", 1, 3)) == [(0, 15)]


def test_what_was_used_flows_back_with_time(store):
    """A whole second's worth of 1000 a second: whatever the machine does meanwhile, all has flowed back."""
    take(store, Wanted("b", 10, 10, 1e9))
    time.sleep(0.01)  # SQLite's clock counts milliseconds
    (amount, used) = take(store, Wanted("b", 10, 10, 1e9))[0]
    assert amount == 10
    assert used == 10
    assert take(store, Wanted("slow", 10, 10, 1e-9)) == [(10, 10)]
    assert take(store, Wanted("slow", 1, 10, 1e-9))[0][0] == 0


def test_together_no_more_is_taken_than_there_is(url):
    stores = [SqlEvents(url) for _ in range(2)]
    got = list[Given]()

    def work(store, names):
        for _ in range(40):
            got.extend(store.take([Wanted(name, 3, 250) for name in names]))

    threads = [threading.Thread(target=work, args=(s, n)) for s in stores for n in (("x", "y"), ("y", "x"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        store.close()
    assert sum(given.amount for given in got) == 500


def test_what_is_no_tally_is_refused(store):
    for wanted in (Wanted("", 1, 1), Wanted("a\n", 1, 1), Wanted("a", 1, -1), Wanted("a", 1, 1, -1.0)):
        with pytest.raises(ValueError, match="tally|allowance"):
            store.take([wanted])


def test_a_closed_store_gives_nothing(store):
    store.close()
    with pytest.raises(BackendError, match="closed"):
        store.take([Wanted("b", 1, 1)])
