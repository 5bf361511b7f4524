"""Rates, budgets and places: one gateway's, and several gateways' on one store."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import BackendError
from casemate.gateway.keys import Grant, Key
from casemate.gateway.limits import BLOCK, Limits, Purse, Wait
from tests.fakes import Memory


def a_key(id_="k", **grant):
    return Key(id_, Grant("n", **grant), "", datetime.now(UTC))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def admit(limits, key):
    return asyncio.run(limits.admit(key))


def test_a_minute_s_requests_may_come_at_once_and_then_as_time_goes():
    clock = Clock()
    limits, key = Limits(Memory(clock=clock), 60, 100, 10), a_key(requests_per_minute=6)
    assert [admit(limits, key) for _ in range(6)] == [None] * 6
    assert admit(limits, key) == Wait("rate", 10)
    clock.now = 9.9
    assert admit(limits, key) == Wait("rate", 1)
    clock.now = 10.0
    assert admit(limits, key) is None
    assert admit(limits, key) is not None
    assert admit(limits, a_key("other")) is None


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2)), max_size=100), st.integers(1, 20))
def test_no_minute_sees_more_than_twice_the_rate_whichever_gateway_is_asked(requests, rate):
    clock = Clock()
    store = Memory(clock=clock)
    gateways, key, taken = [Limits(store, rate, 100, 10) for _ in range(3)], a_key(), []

    async def ask():
        for gap, which in requests:
            clock.now += gap
            if await gateways[which].admit(key) is None:
                taken.append(clock.now)

    asyncio.run(ask())
    for start in taken:
        assert sum(start <= at < start + 60 for at in taken) <= 2 * rate


def test_those_who_come_together_share_what_there_is():
    limits, key = Limits(Memory(clock=Clock()), 5, 100, 10), a_key()

    async def together():
        return await asyncio.gather(*(limits.admit(key) for _ in range(8)))

    assert sorted(wait is None for wait in asyncio.run(together())) == [False] * 3 + [True] * 5


def test_a_budget_that_is_used_up_waits_for_midnight():
    limits, key = Limits(Memory(), 60, 100, 10), a_key()
    assert asyncio.run(limits.take(key, 99)) == 99
    assert admit(limits, key) is None
    assert asyncio.run(limits.take(key, 5)) == 1
    wait = admit(limits, key)
    assert wait.why == "budget"
    assert 0 < wait.seconds <= 86400
    assert admit(limits, a_key(tokens_per_day=1000)) is None  # its own budget is larger


def test_a_new_day_begins_with_nothing_spent():
    days = [date(2026, 1, 1)]
    limits, key = Limits(Memory(), 60, 10, 10, today=lambda: days[0]), a_key()
    asyncio.run(limits.take(key, 10))
    assert admit(limits, key)
    days[0] += timedelta(days=1)
    assert admit(limits, key) is None


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 400), st.integers(1, 900)), max_size=40))
def test_no_more_leaves_than_the_budget_from_however_many_gateways(answers):
    """Answers in the making at three gateways, piece by piece, each paid for before it leaves."""
    store = Memory()
    gateways, key = [Limits(store, 10**6, 1000, 10) for _ in range(3)], a_key()
    left = 0

    async def answer(which, piece, size):
        nonlocal left
        purse = Purse(gateways[which], key)
        for _ in range(0, size, piece):
            if not await purse.pay(piece):
                break
            left += piece
        assert purse.paid <= size + piece
        await purse.close()

    async def all_of_them():
        await asyncio.gather(*(answer(*one) for one in answers))

    asyncio.run(all_of_them())
    assert left <= 1000
    assert store.tallies == {} or left <= store.tallies["tokens:k"][0] <= 1000


def test_what_was_taken_and_not_used_is_given_back():
    store = Memory()
    limits, key = Limits(store, 60, 1000, 10), a_key()

    async def answer():
        purse = Purse(limits, key)
        assert await purse.pay(10)
        assert store.tallies["tokens:k"][0] == BLOCK
        await purse.close()

    asyncio.run(answer())
    assert store.tallies["tokens:k"][0] == 10


def test_what_cannot_be_counted_is_not_let_in():
    class Down(Memory):
        def take(self, wanted):
            raise BackendError("down", backend="memory", retryable=True)

    with pytest.raises(BackendError):
        admit(Limits(Down(), 60, 100, 10), a_key())


def test_what_was_used_is_noted_once():
    store, key = Memory(), a_key()
    limits = Limits(store, 60, 100, 10)
    limits.save({})
    assert store.events == []
    admit(limits, key)
    asyncio.run(limits.take(key, 60))
    limits.save({"routes": {}})
    limits.save({})
    assert [e.body["keys"] for e in store.events] == [{"k": {"tokens": 60, "requests": 1}}]


def test_places_are_given_and_given_back():
    limits = Limits(Memory(), 60, 100, 2)
    assert [limits.enter(), limits.enter()] == [None, None]
    assert limits.enter() == Wait("busy", 1)
    limits.leave()
    assert limits.enter() is None
