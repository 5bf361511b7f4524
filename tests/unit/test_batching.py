"""Coalescing of concurrent calls into batches."""

from __future__ import annotations

import asyncio
import threading

import pytest

from casemate.runtime.batching import Coalescer, ContinuousBatch


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


def test_exception_fails_the_whole_batch_and_the_next_batch_runs():
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


def test_request_is_added_to_a_running_batch():
    go = threading.Event()
    batches = []

    def serve(get_arrived):
        batches.append([])
        pending = []
        while pending := [*pending, *get_arrived()]:
            batches[-1].append([request for _, request in pending])
            if go.wait(20) and len(batches[-1]) > 1:
                number, request = pending.pop(0)
                yield number, request.upper()

    async def main():
        batch = ContinuousBatch(serve)
        first = asyncio.ensure_future(batch.submit("a"))
        while not batches or not batches[0]:
            await asyncio.sleep(0.001)
        second = asyncio.ensure_future(batch.submit("b"))
        await asyncio.sleep(0)
        go.set()
        assert await asyncio.gather(first, second) == ["A", "B"]

    asyncio.run(main())
    assert batches == [[["a"], ["a", "b"], ["b"]]]


def test_replies_are_matched_by_number_for_many_threads_and_loops():
    def serve(get_arrived):
        while new := get_arrived():
            for number, request in reversed(new):
                yield number, request * 10

    batch = ContinuousBatch(serve)

    async def many(first):
        return await asyncio.gather(*(batch.submit(x) for x in range(first, first + 50)))

    found = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: asyncio.run(many(100 * n))})) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [10 * x for x in range(100 * n, 100 * n + 50)] for n in range(8)}


def test_exception_fails_the_requests_of_its_batch_and_later_ones_succeed():
    first_batch_started, go = threading.Event(), threading.Event()

    def serve(get_arrived):
        new = get_arrived()
        if not first_batch_started.is_set():
            first_batch_started.set()
            assert go.wait(20)
            raise OSError("down")
        yield from new

    async def main():
        batch = ContinuousBatch(serve)
        first = asyncio.ensure_future(batch.submit(1))
        while not first_batch_started.is_set():
            await asyncio.sleep(0.001)
        second = asyncio.ensure_future(batch.submit(2))
        await asyncio.sleep(0)
        go.set()
        found = await asyncio.gather(first, second, return_exceptions=True)
        assert type(found[0]) is OSError and found[1] == 2
        assert await batch.submit(3) == 3

    asyncio.run(main())


def test_canceled_request_is_not_processed():
    served, go = [], threading.Event()

    def serve(get_arrived):
        while new := get_arrived():
            served.extend(request for _, request in new)
            assert go.wait(20)
            yield from new

    async def main():
        batch = ContinuousBatch(serve)
        first = asyncio.ensure_future(batch.submit(1))
        while not served:
            await asyncio.sleep(0.001)
        second, third = (asyncio.ensure_future(batch.submit(x)) for x in (2, 3))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        go.set()
        assert await asyncio.gather(first, third) == [1, 3]

    asyncio.run(main())
    assert served == [1, 3]


def test_a_batch_that_ends_without_a_reply_is_an_error():
    async def main():
        with pytest.raises(RuntimeError, match="without a reply"):
            await ContinuousBatch(lambda get_arrived: iter([] if get_arrived() else [])).submit(1)

    asyncio.run(main())


def test_ended_event_loop_does_not_affect_others():
    go = threading.Event()

    def serve(get_arrived):
        while new := get_arrived():
            assert go.wait(20)
            yield from new

    batch = ContinuousBatch(serve)

    async def submit_and_end():
        asyncio.ensure_future(batch.submit(1))
        await asyncio.sleep(0.01)

    asyncio.run(submit_and_end())
    go.set()
    assert asyncio.run(batch.submit(2)) == 2
