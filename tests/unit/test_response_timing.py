"""The response interval: above nearly all measured work, one of few values, and the same for every document."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.gateway import response_timing
from casemate.gateway.response_timing import BLOCK, BLOCK_S, FEWEST, LONGEST_S, REQUEST_START, STEP, ResponseInterval
from casemate.protocols import Defense
from casemate.types import Outcome
from tests.fakes import Clock
from tests.gateways import chat, client, key, make


def after(works, clock=None, shortest_s=0.1):
    interval = ResponseInterval(shortest_s, clock=clock or Clock())
    for work in works:
        interval.observe(work)
    return interval.seconds


works = st.tuples(st.integers(0, 2**32 - 1), st.floats(0.001, 1), st.floats(0, 2)).map(
    lambda drawn: drawn[1] * np.random.default_rng(drawn[0]).lognormal(0, drawn[2], 2300)
)


@given(works)
def test_it_is_never_below_the_p999_of_the_last_block(works):
    """The p99.9 is numpy's, over the last block that ended."""
    interval = ResponseInterval(0.1, clock=Clock())
    for number, work in enumerate(works, 1):
        interval.observe(work)
        if number >= BLOCK and number % 20 == 0:
            end = number - number % BLOCK
            block = works[end - BLOCK : end]
            assert interval.seconds >= min(np.quantile(block, 0.999, method="inverted_cdf"), LONGEST_S)


def test_it_is_the_shortest_one_while_requests_are_fast():
    assert after(np.linspace(0.001, 0.079, 3000)) == 0.1


@pytest.mark.parametrize("slow", [0.2, 3.0, 1e6])
def test_few_slow_requests_do_not_change_it_at_once(slow):
    known = [0.01] * BLOCK
    assert after([*known, *[slow] * (FEWEST - 1)]) == 0.1
    assert after([*known, slow, slow, *[0.01] * (FEWEST - 3)]) == 0.1
    assert after([*known, slow, slow, *[0.01] * (FEWEST - 2)]) > 0.1


def beyond(works):
    """Requests whose work takes longer than their interval: a client can see that."""
    interval, found = ResponseInterval(0.1, clock=Clock()), 0
    for work in works:
        interval.observe(work)
        found += work > interval.seconds
    return found


def test_of_equal_first_requests_one_takes_longer_than_its_interval():
    assert after([0.2]) == 0.1
    assert after([0.2, 0.2]) > 0.2
    assert beyond([0.2] * (FEWEST - 1)) == 1


@given(works, st.booleans(), st.booleans())
def test_few_of_the_first_requests_take_longer_than_their_interval(works, ascending, spread):
    """Also where a client sends slower and slower ones: at most one for each of the values."""
    works = np.minimum(works[: FEWEST - 1], LONGEST_S)
    works = np.geomspace(0.05, LONGEST_S, FEWEST - 1) if spread else works
    assert beyond(sorted(works) if ascending else works) <= 12
    assert beyond([0.1 * STEP**n + 0.001 for n in range(11)]) <= 12


def spread_over(hours, hourly, work_s, interval, clock):
    """The intervals while a key has so many requests an hour."""
    for _ in range(hours * hourly):
        clock.now += 3600 / hourly
        interval.observe(work_s)
        yield interval.seconds


def test_a_key_with_few_requests_an_hour_returns_to_what_its_requests_need():
    """Two slow requests at its start, then fast ones."""
    clock = Clock()
    interval = ResponseInterval(0.1, clock=clock)
    interval.observe(6.0)
    interval.observe(6.0)
    assert interval.seconds > 6
    values = list(spread_over(3, 290, 0.05, interval, clock))
    fell = 2 * FEWEST - 2  # at the first request after two blocks, of which the first has the slow ones
    assert all(value > 6 for value in values[:fell])
    assert all(value == 0.1 for value in values[fell:])


@pytest.mark.parametrize("hourly", [1, 17, 290])
def test_only_the_first_299_requests_of_a_key_change_it_at_once(hourly):
    """Later, two slow requests change it after further requests only, however few there are an hour."""
    clock = Clock()
    interval = ResponseInterval(0.1, clock=clock)
    list(spread_over(-(-2 * FEWEST // hourly), hourly, 0.05, interval, clock))
    while interval._count != 1:  # to the start of a block
        list(spread_over(1, 1, 0.05, interval, clock))
    for _ in range(FEWEST - 2):
        clock.now += 3600 / hourly
        interval.observe(6.0)
        assert interval.seconds == 0.1


def test_one_slow_request_of_a_block_does_not_change_it():
    assert after([0.01, 3.0, *[0.01] * (BLOCK - 2)]) == 0.1


@given(works)
def test_it_changes_at_most_twice_in_a_block(works):
    interval, values = ResponseInterval(0.1, clock=Clock()), []
    for work in works:
        interval.observe(work)
        values.append(interval.seconds)
    changed = {number for number in range(1, len(values)) if values[number] != values[number - 1]}
    assert {(number + 1) % BLOCK for number in changed if number >= FEWEST} <= {0, FEWEST}
    assert all(values[n] > values[n - 1] for n in changed if (n + 1) % BLOCK == FEWEST or n < FEWEST)


def test_it_is_one_of_few_values_up_to_the_longest(monkeypatch):
    monkeypatch.setattr(response_timing, "FEWEST", 2)
    found = {after([work, work]) for work in np.linspace(0.001, 100, 5000)}
    allowed = {0.1 * STEP**n for n in range(12)} | {LONGEST_S}
    assert all(min(abs(value - a) for a in allowed) < 1e-9 for value in found)
    assert max(found) == LONGEST_S
    assert after([1.0, 1.0], shortest_s=20.0) == 20.0  # a configured one may be longer


def test_it_falls_after_a_block_of_fast_requests_and_not_before():
    slow, fast = [0.5, 0.5], [0.01]
    assert after(slow + fast * (2 * BLOCK - 3)) > 0.5
    assert after(slow + fast * (2 * BLOCK - 2)) == 0.1


def test_a_block_that_ends_by_time_has_at_least_300_requests_and_changes_it_either_way():
    clock = Clock()
    interval = ResponseInterval(0.1, clock=clock)

    def requests(count, work_s):
        for _ in range(count):
            interval.observe(work_s)
        return interval.seconds

    requests(FEWEST, 0.01)
    assert requests(2, 0.5) == 0.1
    clock.now += BLOCK_S + 1
    assert requests(1, 0.01) > 0.5, "the block has ended, and this request is in the next one"
    clock.now += BLOCK_S + 1
    assert requests(FEWEST - 1, 0.01) > 0.5
    assert requests(1, 0.01) == 0.1


def test_the_requests_of_a_key_do_not_change_the_interval_of_another(monkeypatch):
    monkeypatch.setattr(response_timing, "FEWEST", 2)
    monkeypatch.setattr(response_timing, "MAX_OWNERS", 2)
    pacer = response_timing.ResponsePacer(0.01, 120.0)

    async def request(owner, work_s):
        REQUEST_START.set(time.monotonic() - work_s)
        began = time.monotonic()
        await pacer.wait(owner)
        return time.monotonic() - began + work_s

    async def story():
        for _ in range(2):
            await request("slow", 0.06)
        return await request("slow", 0.001), await request("other", 0.001)

    slow, other = asyncio.run(story())
    assert slow >= 0.075
    assert pacer.longest_s() > 0.07
    assert pacer._intervals["other"].seconds == 0.01
    assert other >= 0.01
    for owner in ("slow", "third"):
        asyncio.run(request(owner, 0.001))
    assert list(pacer._intervals) == ["slow", "third"]


def test_it_takes_at_most_half_of_the_time_of_an_answer(monkeypatch):
    monkeypatch.setattr(response_timing, "FEWEST", 2)

    async def story():
        pacer = response_timing.ResponsePacer(0.01, timeout_s=0.08)
        for _ in range(2):
            REQUEST_START.set(time.monotonic() - 60)
            await pacer.wait("a key")
        return pacer.longest_s()

    assert asyncio.run(story()) == 0.04


def test_fast_and_slow_questions_of_a_key_are_answered_at_the_same_multiple(tmp_path, monkeypatch):
    """Questions that take 1 or 70 ms to judge, with a shortest interval of 40 ms: all after the same 90 ms or more."""
    monkeypatch.setattr(response_timing, "FEWEST", 2)

    @dataclass
    class Thoughtful(Defense):
        async def on_retrieve(self, query, retrieval):
            await asyncio.sleep(float(query.text) / 1000)
            return Outcome(retrieval)

    app = make(tmp_path, defenses=(Thoughtful(),), pace_ms=40)
    with client(app, key(app)) as http:
        for _ in range(2):
            http.post("/v1/chat/completions", json=chat("70"))
        for judged in ("1", "70", "1"):
            began = time.monotonic()
            assert http.post("/v1/chat/completions", json=chat(judged)).status_code == 200
            assert time.monotonic() - began >= 0.09
