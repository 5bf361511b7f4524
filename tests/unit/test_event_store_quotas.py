"""Shared quotas: concurrent requests never get more than the limit, on SQLite and Postgres."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing

import pytest

from casemate.backends.event_stores.sql import SqlEventStore, quotas
from casemate.errors import BackendError
from casemate.types import QuotaGrant, QuotaRequest
from tests.unit.monitor_stores import fresh_url

url = pytest.fixture(params=["sqlite", "postgres"])(fresh_url)


@pytest.fixture
def store(url):
    opened = SqlEventStore(url)
    yield opened
    opened.close()


def consume(store, *requests):
    return [tuple(grant) for grant in store.acquire(requests)]


def test_grants_up_to_the_limit(store):
    assert consume(store, QuotaRequest("b", 5, 10), QuotaRequest("a", 20, 10)) == [(5, 5), (10, 10)]
    assert consume(store, QuotaRequest("b", 7, 10)) == [(5, 10)]
    assert consume(store, QuotaRequest("b", 1, 10)) == [(0, 10)]
    assert consume(store, QuotaRequest("b", 0, 10)) == [(0, 10)]


def test_a_refund_is_limited_to_the_amount_used(store):
    consume(store, QuotaRequest("b", 5, 10))
    assert consume(store, QuotaRequest("b", -3, 10)) == [(-3, 2)]
    assert consume(store, QuotaRequest("b", -9, 10)) == [(-2, 0)]


def test_new_period_starts_with_zero_used(store):
    consume(store, QuotaRequest("b", 10, 10, period="monday"))
    assert consume(store, QuotaRequest("b", 4, 10, period="tuesday")) == [(4, 4)]


def test_limit_may_be_raised_and_lowered(store):
    consume(store, QuotaRequest("b", 10, 10))
    assert consume(store, QuotaRequest("b", 10, 15)) == [(5, 15)]
    assert consume(store, QuotaRequest("b", 1, 3)) == [(0, 15)]


def test_used_amounts_are_replenished_over_time(store):
    """At 1e9 per second the whole amount is replenished within a millisecond; at 1e-9 none is."""
    consume(store, QuotaRequest("b", 10, 10, 1e9))
    time.sleep(0.01)  # SQLite's clock has a resolution of a millisecond
    (amount, used) = consume(store, QuotaRequest("b", 10, 10, 1e9))[0]
    assert amount == 10
    assert used == 10
    assert consume(store, QuotaRequest("slow", 10, 10, 1e-9)) == [(10, 10)]
    assert consume(store, QuotaRequest("slow", 1, 10, 1e-9))[0][0] == 0


def test_concurrent_requests_share_the_limit(url):
    stores = [SqlEventStore(url) for _ in range(2)]
    grants = list[QuotaGrant]()

    def work(store, names):
        for _ in range(40):
            grants.extend(store.acquire([QuotaRequest(name, 3, 250) for name in names]))

    threads = [threading.Thread(target=work, args=(s, n)) for s in stores for n in (("x", "y"), ("y", "x"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        store.close()
    assert sum(grant.amount for grant in grants) == 500


def test_invalid_requests_are_refused(store):
    for request in (
        QuotaRequest("", 1, 1),
        QuotaRequest("a\n", 1, 1),
        QuotaRequest("a", 1, -1),
        QuotaRequest("a", 1, 1, -1.0),
    ):
        with pytest.raises(ValueError, match="quota"):
            store.acquire([request])


def test_a_closed_store_grants_nothing(store):
    store.close()
    with pytest.raises(BackendError, match="closed"):
        store.acquire([QuotaRequest("b", 1, 1)])


def test_quotas_with_a_prefix_are_found_by_the_primary_key(tmp_path):
    """SQLite does not scan the table. Prefixes have no wildcards and are case-sensitive."""
    store = SqlEventStore(path=tmp_path / "events.db")
    names = ["a%", "a% 1", "a%é", "a%\U0001f600", "ab", "A% 2", "a", "b"]
    consume(store, *(QuotaRequest(name, 1, 5) for name in names))
    assert set(store.quota_usage("a%")) == {"a%", "a% 1", "a%é", "a%\U0001f600"}
    assert set(store.quota_usage("")) == set(names)
    with closing(sqlite3.connect(tmp_path / "events.db")) as database:
        plan = database.execute(f"EXPLAIN QUERY PLAN {quotas.USAGE['sqlite']}", {"prefix": "a"}).fetchall()
    assert "SEARCH" in plan[0][3] and "SCAN" not in plan[0][3]
    store.close()
