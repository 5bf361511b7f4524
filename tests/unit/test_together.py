"""One call for all who wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from casemate.together import Together


def test_whoever_comes_while_a_call_runs_shares_the_next():
    calls, go = [], threading.Event()

    def call(asked):
        calls.append(list(asked))
        assert go.wait(20)
        return [x * 10 for x in asked]

    async def main():
        together = Together(call)
        first = asyncio.ensure_future(together.ask(1))
        while not calls:
            await asyncio.sleep(0.001)
        rest = [asyncio.ensure_future(together.ask(x)) for x in (2, 3, 4)]
        await asyncio.sleep(0)
        rest[1].cancel()
        go.set()
        assert await first == 10
        assert await asyncio.gather(rest[0], rest[2]) == [20, 40]
        assert await together.ask(5) == 50

    asyncio.run(main())
    assert calls == [[1], [2, 3, 4], [5]]


def test_all_who_shared_a_call_hear_of_its_failure_and_the_next_goes_on():
    fail = [True]

    def call(asked):
        if fail.pop() if fail else False:
            raise OSError("down")
        return asked

    async def main():
        together = Together(call)
        found = await asyncio.gather(*(together.ask(x) for x in range(3)), return_exceptions=True)
        assert [type(x) for x in found] == [OSError] * 3
        assert await together.ask(7) == 7

    asyncio.run(main())


def test_event_loops_do_not_wait_for_one_another():
    together = Together(lambda asked: asked)
    for x in range(3):
        assert asyncio.run(together.ask(x)) == x
    with pytest.raises(RuntimeError):
        together.ask(1).send(None)
