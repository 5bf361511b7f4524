"""Coalescing of concurrent calls."""

from __future__ import annotations

import asyncio
import threading

import pytest

from casemate.runtime.batching import Coalescer


def test_requests_during_a_batch_form_the_next_batch():
    calls, go = [], threading.Event()

    def call(requests):
        calls.append(list(requests))
        assert go.wait(20)
        return [x * 10 for x in requests]

    async def main():
        coalescer = Coalescer(call)
        first = asyncio.ensure_future(coalescer.submit(1))
        while not calls:
            await asyncio.sleep(0.001)
        rest = [asyncio.ensure_future(coalescer.submit(x)) for x in (2, 3, 4)]
        await asyncio.sleep(0)
        rest[1].cancel()
        go.set()
        assert await first == 10
        assert await asyncio.gather(rest[0], rest[2]) == [20, 40]
        assert await coalescer.submit(5) == 50

    asyncio.run(main())
    assert calls == [[1], [2, 3, 4], [5]]


def test_an_exception_reaches_the_whole_batch_and_the_next_batch_runs():
    fail = [True]

    def call(requests):
        if fail.pop() if fail else False:
            raise OSError("down")
        return requests

    async def main():
        coalescer = Coalescer(call)
        found = await asyncio.gather(*(coalescer.submit(x) for x in range(3)), return_exceptions=True)
        assert [type(x) for x in found] == [OSError] * 3
        assert await coalescer.submit(7) == 7

    asyncio.run(main())


def test_event_loops_are_independent():
    coalescer = Coalescer(lambda requests: requests)
    for x in range(3):
        assert asyncio.run(coalescer.submit(x)) == x
    with pytest.raises(RuntimeError):
        coalescer.submit(1).send(None)
