"""The response interval: above 99.9 % of measured work, quantized to few values, and independent of the document."""

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


def interval_after(works, clock=None, shortest_s=0.1):
    interval = ResponseInterval(shortest_s, clock=clock or Clock())
    for work in works:
        interval.observe(work)
    return interval.seconds


works = st.tuples(st.integers(0, 2**32 - 1), st.floats(0.001, 1), st.floats(0, 2)).map(
    lambda drawn: drawn[1] * np.random.default_rng(drawn[0]).lognormal(0, drawn[2], 2300)
)


@given(works)
def test_interval_is_never_below_the_p999_of_the_last_block(works):
    """The oracle is numpy's p99.9 over the last completed block."""
    interval = ResponseInterval(0.1, clock=Clock())
    for number, work in enumerate(works, 1):
        interval.observe(work)
        if number >= BLOCK and number % 20 == 0:
            end = number - number % BLOCK
            block = works[end - BLOCK : end]
            assert interval.seconds >= min(np.quantile(block, 0.999, method="inverted_cdf"), LONGEST_S)


def test_interval_is_the_shortest_while_requests_are_fast():
    assert interval_after(np.linspace(0.001, 0.079, 3000)) == 0.1


@pytest.mark.parametrize("slow", [0.2, 3.0, 1e6])
def test_few_slow_requests_do_not_change_the_interval_immediately(slow):
    fast_block = [0.01] * BLOCK
    assert interval_after([*fast_block, *[slow] * (FEWEST - 1)]) == 0.1
    assert interval_after([*fast_block, slow, slow, *[0.01] * (FEWEST - 3)]) == 0.1
    assert interval_after([*fast_block, slow, slow, *[0.01] * (FEWEST - 2)]) > 0.1


def slower_than_interval(works):
    """Number of requests whose work takes longer than their interval, which a client can observe."""
    interval, found = ResponseInterval(0.1, clock=Clock()), 0
    for work in works:
        interval.observe(work)
        found += work > interval.seconds
    return found


def test_only_the_first_of_equal_requests_exceeds_its_interval():
    assert interval_after([0.2]) == 0.1
    assert interval_after([0.2, 0.2]) > 0.2
    assert slower_than_interval([0.2] * (FEWEST - 1)) == 1


@given(works, st.booleans(), st.booleans())
def test_at_most_12_of_the_first_requests_exceed_their_interval(works, ascending, spread):
    """Also if a client sends slower and slower requests: at most one for each value of the interval."""
    works = np.minimum(works[: FEWEST - 1], LONGEST_S)
    works = np.geomspace(0.05, LONGEST_S, FEWEST - 1) if spread else works
    assert slower_than_interval(sorted(works) if ascending else works) <= 12
    assert slower_than_interval([0.1 * STEP**n + 0.001 for n in range(11)]) <= 12


def spread_over(hours, hourly, work_s, interval, clock):
    """The intervals during hours with a given number of requests each."""
    for _ in range(hours * hourly):
        clock.now += 3600 / hourly
        interval.observe(work_s)
        yield interval.seconds


def test_the_interval_falls_after_two_blocks_with_few_requests_per_hour():
    """Two slow initial requests, then fast ones."""
    clock = Clock()
    interval = ResponseInterval(0.1, clock=clock)
    interval.observe(6.0)
    interval.observe(6.0)
    assert interval.seconds > 6
    values = list(spread_over(3, 290, 0.05, interval, clock))
    first_short = 2 * FEWEST - 2  # at the first request after two blocks; the first block contains the slow requests
    assert all(value > 6 for value in values[:first_short])
    assert all(value == 0.1 for value in values[first_short:])


@pytest.mark.parametrize("hourly", [1, 17, 290])
def test_only_the_first_299_requests_of_a_key_change_the_interval_immediately(hourly):
    """Later, two slow requests change the interval only after further requests, at any hourly rate."""
    clock = Clock()
    interval = ResponseInterval(0.1, clock=clock)
    list(spread_over(-(-2 * FEWEST // hourly), hourly, 0.05, interval, clock))
    while interval._count != 1:  # advances to the start of a block
        list(spread_over(1, 1, 0.05, interval, clock))
    for _ in range(FEWEST - 2):
        clock.now += 3600 / hourly
        interval.observe(6.0)
        assert interval.seconds == 0.1


def test_one_slow_request_of_a_block_does_not_change_the_interval():
    assert interval_after([0.01, 3.0, *[0.01] * (BLOCK - 2)]) == 0.1


@given(works)
def test_interval_changes_at_most_twice_in_a_block(works):
    interval, values = ResponseInterval(0.1, clock=Clock()), []
    for work in works:
        interval.observe(work)
        values.append(interval.seconds)
    changed = {number for number in range(1, len(values)) if values[number] != values[number - 1]}
    assert {(number + 1) % BLOCK for number in changed if number >= FEWEST} <= {0, FEWEST}
    assert all(values[n] > values[n - 1] for n in changed if (n + 1) % BLOCK == FEWEST or n < FEWEST)


def test_interval_is_one_of_few_values_up_to_the_longest(monkeypatch):
    monkeypatch.setattr(response_timing, "FEWEST", 2)
    found = {interval_after([work, work]) for work in np.linspace(0.001, 100, 5000)}
    allowed = {0.1 * STEP**n for n in range(12)} | {LONGEST_S}
    assert all(min(abs(value - a) for a in allowed) < 1e-9 for value in found)
    assert max(found) == LONGEST_S
    assert interval_after([1.0, 1.0], shortest_s=20.0) == 20.0  # a configured interval may be longer


def test_interval_falls_only_after_a_block_of_fast_requests():
    slow, fast = [0.5, 0.5], [0.01]
    assert interval_after(slow + fast * (2 * BLOCK - 3)) > 0.5
    assert interval_after(slow + fast * (2 * BLOCK - 2)) == 0.1


def test_a_block_that_ends_by_time_has_at_least_300_requests():
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


def test_requests_of_one_key_do_not_change_the_interval_of_another(monkeypatch):
    monkeypatch.setattr(response_timing, "FEWEST", 2)
    monkeypatch.setattr(response_timing, "MAX_OWNERS", 2)
    pacer = response_timing.ResponsePacer(0.01, 120.0)

    async def request(owner, work_s):
        REQUEST_START.set(time.monotonic() - work_s)
        began = time.monotonic()
        await pacer.wait(owner)
        return time.monotonic() - began + work_s

    async def run_requests():
        for _ in range(2):
            await request("slow", 0.06)
        return await request("slow", 0.001), await request("other", 0.001)

    slow, other = asyncio.run(run_requests())
    assert slow >= 0.075
    assert pacer.longest_s() > 0.07
    assert pacer._intervals["other"].seconds == 0.01
    assert other >= 0.01
    for owner in ("slow", "third"):
        asyncio.run(request(owner, 0.001))
    assert list(pacer._intervals) == ["slow", "third"]


def test_interval_is_at_most_half_of_the_answer_timeout(monkeypatch):
    monkeypatch.setattr(response_timing, "FEWEST", 2)

    async def run_requests():
        pacer = response_timing.ResponsePacer(0.01, timeout_s=0.08)
        for _ in range(2):
            REQUEST_START.set(time.monotonic() - 60)
            await pacer.wait("a key")
        return pacer.longest_s()

    assert asyncio.run(run_requests()) == 0.04


def test_fast_and_slow_questions_of_a_key_have_the_same_minimum_latency(tmp_path, monkeypatch):
    """Judgment takes 1 or 70 ms and the shortest interval is 40 ms, so every answer takes at least 90 ms."""
    monkeypatch.setattr(response_timing, "FEWEST", 2)

    @dataclass
    class SlowDefense(Defense):
        async def on_retrieve(self, query, retrieval):
            await asyncio.sleep(float(query.text) / 1000)
            return Outcome(retrieval)

    app = make(tmp_path, defenses=(SlowDefense(),), pace_ms=40)
    with client(app, key(app)) as http:
        for _ in range(2):
            http.post("/v1/chat/completions", json=chat("70"))
        for judged in ("1", "70", "1"):
            began = time.monotonic()
            assert http.post("/v1/chat/completions", json=chat(judged)).status_code == 200
            assert time.monotonic() - began >= 0.09
