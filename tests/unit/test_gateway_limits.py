"""Rate limits, token budgets and concurrency, of one gateway and of several on one store."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import BackendError
from casemate.gateway.auth.keys import ApiKey, Grant
from casemate.gateway.auth.rate_limits import FIRST_BLOCK, RateLimits, Rejection, TokenBudget
from tests.fakes import Clock, Memory


def a_key(id_="k", **grant):
    return ApiKey(id_, Grant("n", **grant), "", datetime.now(UTC))


def admit(limits, key):
    return asyncio.run(limits.admit(key))


def test_requests_of_a_minute_may_arrive_at_once_and_later_ones_at_the_rate():
    clock = Clock()
    limits, key = RateLimits(Memory(clock=clock), 60, 100, 10), a_key(requests_per_minute=6)
    assert [admit(limits, key) for _ in range(6)] == [None] * 6
    assert admit(limits, key) == Rejection("rate", 10)
    clock.now = 9.9
    assert admit(limits, key) == Rejection("rate", 1)
    clock.now = 10.0
    assert admit(limits, key) is None
    assert admit(limits, key) is not None
    assert admit(limits, a_key("other")) is None


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2)), max_size=100), st.integers(1, 20))
def test_no_minute_has_more_than_twice_the_rate_over_all_gateways(requests, rate):
    clock = Clock()
    store = Memory(clock=clock)
    gateways, key, taken = [RateLimits(store, rate, 100, 10) for _ in range(3)], a_key(), []

    async def ask():
        for gap, which in requests:
            clock.now += gap
            if await gateways[which].admit(key) is None:
                taken.append(clock.now)

    asyncio.run(ask())
    for start in taken:
        assert sum(start <= at < start + 60 for at in taken) <= 2 * rate


def test_concurrent_requests_share_the_rate():
    limits, key = RateLimits(Memory(clock=Clock()), 5, 100, 10), a_key()

    async def concurrent_requests():
        return await asyncio.gather(*(limits.admit(key) for _ in range(8)))

    assert sorted(wait is None for wait in asyncio.run(concurrent_requests())) == [False] * 3 + [True] * 5


def test_an_exhausted_budget_is_reset_at_midnight():
    limits, key = RateLimits(Memory(), 60, 100, 10), a_key()
    assert asyncio.run(limits.consume_tokens(key, 99)) == 99
    assert admit(limits, key) is None
    assert asyncio.run(limits.consume_tokens(key, 5)) == 1
    wait = admit(limits, key)
    assert wait.reason == "budget"
    assert 0 < wait.retry_after_s <= 86400
    assert admit(limits, a_key(tokens_per_day=1000)) is None  # the budget of this key is larger


def test_new_day_starts_with_the_full_budget():
    days = [date(2026, 1, 1)]
    limits, key = RateLimits(Memory(), 60, 10, 10, today=lambda: days[0]), a_key()
    asyncio.run(limits.consume_tokens(key, 10))
    assert admit(limits, key)
    days[0] += timedelta(days=1)
    assert admit(limits, key) is None


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 400), st.integers(1, 900)), max_size=40))
def test_all_gateways_together_send_at_most_the_budget(answers):
    """Three gateways stream answers; each piece is charged before it is sent."""
    store = Memory()
    gateways, key = [RateLimits(store, 10**6, 1000, 10) for _ in range(3)], a_key()
    left = 0

    async def answer(which, piece, size):
        nonlocal left
        budget = TokenBudget(gateways[which], key)
        for _ in range(0, size, piece):
            if not await budget.use(piece):
                break
            left += piece
        assert budget.used <= size + piece
        await budget.close()

    async def all_gateways():
        await asyncio.gather(*(answer(*one) for one in answers))

    asyncio.run(all_gateways())
    assert left <= 1000
    assert store.tallies == {} or left <= store.tallies["tokens:k"][0] <= 1000


def test_unused_tokens_are_refunded():
    store = Memory()
    limits, key = RateLimits(store, 60, 1000, 10), a_key()

    async def answer():
        budget = TokenBudget(limits, key)
        assert await budget.use(10)
        assert store.tallies["tokens:k"][0] == FIRST_BLOCK
        await budget.close()
        await budget.close()

    asyncio.run(answer())
    assert store.tallies["tokens:k"][0] == 10


def test_failed_refund_is_logged_and_does_not_end_the_answer(caplog):
    class Down(Memory):
        def acquire(self, wanted):
            if wanted[0].amount < 0:
                raise BackendError("down", backend="memory", retryable=True)
            return super().acquire(wanted)

    async def answer():
        budget = TokenBudget(RateLimits(Down(), 60, 1000, 10), a_key())
        assert await budget.use(10)
        await budget.close()

    asyncio.run(answer())
    assert f"{FIRST_BLOCK - 10} tokens of key k were not refunded: down" in caplog.text


def test_a_request_that_cannot_be_counted_is_refused():
    class Down(Memory):
        def acquire(self, wanted):
            raise BackendError("down", backend="memory", retryable=True)

    with pytest.raises(BackendError):
        admit(RateLimits(Down(), 60, 100, 10), a_key())


def test_usage_is_recorded_once():
    store, key = Memory(), a_key()
    limits = RateLimits(store, 60, 100, 10)
    limits.record_usage()
    assert store.events == []
    admit(limits, key)
    asyncio.run(limits.consume_tokens(key, 60))
    limits.record_usage()
    limits.record_usage()
    assert [e.body["keys"] for e in store.events] == [{"k": {"tokens": 60, "requests": 1}}]


def test_slots_are_acquired_and_released():
    limits, first, second = RateLimits(Memory(), 60, 100, 2), a_key("a"), a_key("b")
    assert limits.acquire_slot(first) is None and limits.acquire_slot(second) is None
    assert limits.acquire_slot(second) == Rejection("busy", 1)
    limits.release_slot(first)
    assert limits.acquire_slot(second) == Rejection("busy", 1), "one key must not take every slot"
    assert limits.acquire_slot(first) is None


@pytest.mark.parametrize("greedy", [1, 2, 5, 10])
def test_keys_with_many_requests_leave_slots_for_other_keys(greedy):
    limits = RateLimits(Memory(), 60, 100, 1200)
    for _ in range(1300):
        for number in range(greedy):
            limits.acquire_slot(a_key(str(number)))
    free = 1200 - limits.in_progress
    assert free == pytest.approx(1200 / (5 * greedy + 1), abs=greedy)
    assert limits.acquire_slot(a_key("another")) is None


def test_keys_in_sequence_each_leave_a_slot_for_the_next_key():
    limits = RateLimits(Memory(), 60, 100, 1200)
    for number in range(3):
        while limits.acquire_slot(a_key(str(number))) is None:
            pass
        assert limits.acquire_slot(a_key("another")) is None


@pytest.mark.parametrize(("concurrency", "per_key", "granted"), [(12, None, 10), (1, None, 1), (12, 3, 3), (2, 9, 2)])
def test_one_key_gets_a_share_of_the_slots(concurrency, per_key, granted):
    limits, key = RateLimits(Memory(), 60, 100, concurrency, concurrency_per_key=per_key), a_key()
    assert [limits.acquire_slot(key) for _ in range(20)].count(None) == granted
    for _ in range(granted):
        limits.release_slot(key)
    assert limits.in_progress == 0 and limits.acquire_slot(key) is None
