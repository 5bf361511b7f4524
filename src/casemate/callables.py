"""Systems outside that are reached by calling an object of this process, within limits.

What such a function raises may hold anything, so only the name of its kind is passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import math
import queue
import random
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from casemate.errors import BackendError, ConfigError
from casemate.remote import BACKOFF_S, Pace

Call: TypeAlias = Callable[[], Any]
_Job: TypeAlias = "tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Call]"


@dataclass(eq=False)
class Patience:
    """Calls functions, within limits.

    One that is not asynchronous runs in threads of its own, which end with the process: one that hangs blocks its
    thread, nothing else.

    Attributes:
        backend: Name for errors, and of the threads.
        what: What is called, for errors.
        timeout_s: Longest time for one try.
        retries: Further tries when it raises; not after a try that was too slow.
        requests_per_s: Most calls in a second, tries included; 0: no limit.
        threads: Calls at once of functions that are not asynchronous; more wait.
        requests: Calls so far, tries included.
    """

    backend: str
    what: str
    timeout_s: float
    retries: int
    requests_per_s: float
    threads: int
    requests: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        limits = (self.timeout_s, self.retries, self.requests_per_s)
        if not (0 < self.timeout_s < math.inf and self.retries >= 0 and 0 <= self.requests_per_s < math.inf):
            raise ConfigError(
                f"{self.backend}: timeout_s, retries, requests_per_s={limits}; timeout_s must be above 0, the others "
                "not below"
            )
        if self.threads < 1:
            raise ConfigError(f"{self.backend}: threads={self.threads}; threads must be at least 1")
        self._pace = Pace(self.requests_per_s)
        self._threads = _Threads(self.backend, self.threads)
        weakref.finalize(self, self._threads.close)

    async def returned(self, call: Call, asynchronous: bool) -> Any:
        """What a call returns, in the end.

        Raises:
            BackendError: If it raises in each try, or takes too long.
        """
        for tried in range(self.retries + 1):
            await self._pace.wait()
            self.requests += 1
            try:
                async with asyncio.timeout(self.timeout_s) as limit:
                    value = await (call() if asynchronous else self._threads.run(call))
                    return await value if inspect.isawaitable(value) else value
            except TimeoutError as error:
                if limit.expired():
                    raise self.error(f"gave no answer within {self.timeout_s:g} s", True) from None
                failed: Exception = error
            except Exception as error:
                failed = error
            if tried == self.retries:
                raise self.error(f"raised {type(failed.__cause__ or failed).__name__}") from failed
            await asyncio.sleep(BACKOFF_S * 2**tried * (0.5 + random.random()))
        raise AssertionError  # the last try returns or raises

    def error(self, what: str, retryable: bool = False) -> BackendError:
        """The error that says of what, and what."""
        return BackendError(f"{self.what} {what}", backend=self.backend, retryable=retryable)


class _Threads:
    """Runs calls in daemon threads, so that one that never returns keeps nobody from ending.

    Args:
        name: Of the threads.
        most: How many calls there are at once; more wait.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most, self._begun = name, most, 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def run(self, call: Call) -> Awaitable[Any]:
        """What the call returns."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((loop, future, call))
        if self._begun < self._most:
            self._begun += 1
            threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """Ends the threads that are not in a call."""
        for _ in range(self._begun):
            self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    """One thread: a call after the other."""
    while (job := jobs.get()) is not None:
        _call(*job)
        del job  # or it would be kept alive until the next one comes


def _call(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], call: Call) -> None:
    """One call. What nobody waits for any more is not made."""
    if future.cancelled():
        return
    value, failure = None, None
    try:
        value = call()
    except BaseException as error:  # not even SystemExit of the function ends the thread
        failure = RuntimeError()
        failure.__cause__ = error
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(_settle, future, value, failure)


def _settle(future: asyncio.Future[Any], value: Any, failure: Exception | None) -> None:
    if future.cancelled():
        return
    if failure is None:
        future.set_result(value)
    else:
        future.set_exception(failure)


def named(option: str, place: str, folder: Path) -> Any:
    """The object that is meant by ``module:name``.

    Args:
        option: For errors.
        place: The module, and the name in it, with dots.
        folder: Where the module may lie beside the installed ones.

    Raises:
        ConfigError: If there is none.
    """
    module, _, name = place.partition(":")
    if not module or not name:
        raise ConfigError(f"{option} is {place!r}; write module:function")
    beside = str(folder.resolve())
    if beside not in sys.path:
        sys.path.append(beside)
    try:
        found: Any = importlib.import_module(module)
        for step in name.split("."):
            found = getattr(found, step)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{option} is {place!r}: {error}; see that it lies in {beside} or is installed") from error
    return found


def is_async(function: Any) -> bool:
    """Whether calling it gives an awaitable that is to be awaited in the caller's loop."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def takes(function: Any) -> frozenset[str]:
    """Names of the parameters that may be given by name; none where that cannot be known."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(p.name for p in found if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY})
