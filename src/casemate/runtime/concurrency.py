"""Runs asynchronous functions concurrently, with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def map_concurrently(
    function: Callable[[Item], Awaitable[Result]], items: Iterable[Item], limit: int
) -> list[Result]:
    """Calls a function on each item, at most `limit` at a time; returns the results in the order of the items.

    Items are drawn lazily. When one call raises, the others are cancelled and awaited before the error propagates.
    """
    results: dict[int, Result] = {}
    pending = enumerate(items)

    async def work() -> None:
        for number, item in pending:
            results[number] = await function(item)

    workers = [asyncio.create_task(work()) for _ in range(max(1, limit))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[number] for number in sorted(results)]
