"""Functions of the operator, given as ``module:name``: import, inspection, and calls within limits."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import queue
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from casemate.errors import BackendError, ConfigError, require_range
from casemate.runtime.retry import RateLimiter, exponential_backoff, retry

Call: TypeAlias = Callable[[], Any]
_Job: TypeAlias = "tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Call]"


def import_attribute(option: str, location: str, folder: Path) -> Any:
    """Imports the object at ``module:name``, also from a folder; the name may contain dots.

    Raises:
        ConfigError: If the module or the name does not exist. The message names the configuration key.
    """
    module, _, name = location.partition(":")
    if not module or not name:
        raise ConfigError(f"{option} is {location!r}; write module:function")
    beside = str(folder.resolve())
    if beside not in sys.path:
        sys.path.append(beside)
    try:
        found: Any = importlib.import_module(module)
        for step in name.split("."):
            found = getattr(found, step)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{option} is {location!r}: {error}; install the module, or put it into {beside}") from error
    return found


def is_async(function: Any) -> bool:
    """Whether a call returns an awaitable for the caller's event loop."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def parameter_names(function: Any) -> frozenset[str]:
    """Names of the parameters that accept keywords; empty where the signature cannot be read."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(p.name for p in found if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY})


class _NoReply(Exception):
    """An attempt exceeded its timeout."""


@dataclass(eq=False)
class FunctionCaller:
    """Calls functions with timeout, retries and rate limit.

    A function that is not asynchronous runs in daemon threads of its own, so one that hangs blocks its thread and
    nothing else. An exception may contain anything, so errors repeat only its class name.

    Attributes:
        timeout_s: Longest time of one attempt.
        retries: Further attempts after an exception; none after a timeout.
        requests_per_s: Calls a second, retries included; 0: no limit.
        threads: Concurrent calls of functions that are not asynchronous; more wait.
        requests: Calls so far, retries included.
    """

    backend: str
    name: str
    timeout_s: float
    retries: int
    requests_per_s: float
    threads: int
    requests: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        require_range(self.backend, self, "timeout_s", above=0)
        require_range(self.backend, self, "retries requests_per_s", at_least=0)
        require_range(self.backend, self, "threads", at_least=1)
        self._rate_limiter = RateLimiter(self.requests_per_s)
        self._threads = _DaemonThreads(self.backend, self.threads)
        weakref.finalize(self, self._threads.close)

    async def call(self, function: Call, asynchronous: bool) -> Any:
        """Returns the function's value; awaits it if it is awaitable.

        Raises:
            BackendError: If it raises in each attempt, or exceeds the timeout.
        """
        try:
            return await retry(lambda: self._attempt(function, asynchronous), self.retries, _delay)
        except _NoReply:
            raise self.error(f"gave no answer within {self.timeout_s:g} s", True) from None
        except Exception as error:
            raise self.error(f"raised {type(error.__cause__ or error).__name__}") from error

    async def _attempt(self, function: Call, asynchronous: bool) -> Any:
        await self._rate_limiter.acquire()
        self.requests += 1
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                value = await (function() if asynchronous else self._threads.run(function))
                return await value if inspect.isawaitable(value) else value
        except TimeoutError:
            if limit.expired():
                raise _NoReply from None
            raise  # the function's own

    def error(self, what: str, retryable: bool = False) -> BackendError:
        """An error with the called object's name."""
        return BackendError(f"{self.name} {what}", backend=self.backend, retryable=retryable)


def _delay(error: Exception, attempt: int) -> float | None:
    return None if isinstance(error, _NoReply) else exponential_backoff(attempt)


class _DaemonThreads:
    """Runs up to ``limit`` calls in daemon threads, so a call that never returns does not keep the process alive."""

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit, self._started = name, limit, 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def run(self, call: Call) -> Awaitable[Any]:
        """Queues a call; the result is its value."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((loop, future, call))
        if self._started < self._limit:
            self._started += 1
            threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        for _ in range(self._started):
            self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        _run(*job)
        del job  # or it would stay alive until the next one arrives


def _run(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], call: Call) -> None:
    """Runs one call, unless its caller has been canceled."""
    if future.cancelled():
        return
    value, failure = None, None
    try:
        value = call()
    except BaseException as error:  # SystemExit of the function must not end the thread either
        failure = RuntimeError()
        failure.__cause__ = error
    with contextlib.suppress(RuntimeError):  # the loop is closed: there is no caller left
        loop.call_soon_threadsafe(_settle, future, value, failure)


def _settle(future: asyncio.Future[Any], value: Any, failure: Exception | None) -> None:
    if future.cancelled():
        return
    if failure is None:
        future.set_result(value)
    else:
        future.set_exception(failure)
