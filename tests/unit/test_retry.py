"""Retries and client-side rate limits."""

import asyncio
import time

import pytest

from casemate.runtime import retry as module
from casemate.runtime.retry import RateLimiter, exponential_backoff, retry


def retry_failing_call(failures, retries, delay):
    """Retries a call that fails a given number of times. Returns its value or its error's number, and the calls."""
    calls = []

    async def call():
        calls.append(len(calls))
        if len(calls) <= failures:
            raise OSError(len(calls))
        return "done"

    try:
        return asyncio.run(retry(call, retries, delay)), calls
    except OSError as error:
        return error.args[0], calls


@pytest.mark.parametrize(
    ("failures", "retries", "result", "count"), [(0, 3, "done", 1), (2, 2, "done", 3), (3, 2, 3, 3), (1, 0, 1, 1)]
)
def test_a_call_is_repeated_until_success_or_the_last_retry(failures, retries, result, count):
    found, calls = retry_failing_call(failures, retries, lambda error, attempt: 0.0)
    assert (found, len(calls)) == (result, count)


def test_retry_stops_without_a_delay_and_passes_error_and_attempt():
    seen = []

    def delay(error, attempt):
        seen.append((error.args[0], attempt))
        return 0.0 if attempt < 1 else None

    found, calls = retry_failing_call(5, 4, delay)
    assert (found, len(calls)) == (2, 2)
    assert seen == [(1, 0), (2, 1)]


def test_backoff_doubles_and_is_jittered(monkeypatch):
    for attempt in range(4):
        waits = [exponential_backoff(attempt) for _ in range(200)]
        assert 0.25 * 2**attempt <= min(waits) < max(waits) <= 0.75 * 2**attempt
    monkeypatch.setattr(module, "BACKOFF_S", 0.0)
    assert exponential_backoff(3) == 0


def test_the_rate_limit_holds_for_concurrent_callers():
    async def run():
        limiter, starts = RateLimiter(100), []

        async def one():
            await limiter.acquire()
            starts.append(time.monotonic())

        await asyncio.gather(*(one() for _ in range(8)))
        return sorted(starts)

    starts = asyncio.run(run())
    assert min(b - a for a, b in zip(starts, starts[1:], strict=False)) >= 0.01 - 1e-4


def test_a_canceled_waiter_consumes_no_slot():
    async def run():
        limiter = RateLimiter(5)
        await limiter.acquire()
        waiting = asyncio.ensure_future(limiter.acquire())
        await asyncio.sleep(0.01)
        waiting.cancel()
        start = time.monotonic()
        await limiter.acquire()
        return time.monotonic() - start

    assert asyncio.run(run()) < 0.35
