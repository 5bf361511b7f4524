"""Distributes work over the workers of a cluster, with the results of a single process.

Work is cut into batches whose size does not depend on the workers. Each batch is computed as in one process, and
results arrive in the order of the batches. So sums are added in the same order, and on processors of one kind all
figures are equal to the last bit. Clusters are plug-ins (``backends/clusters/``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Value = TypeVar("Value")
Value_co = TypeVar("Value_co", covariant=True)
Stopped: TypeAlias = Callable[[], bool]  # whether the caller no longer needs the results
EMBEDDING_BATCH = 256  # texts that a worker embeds at a time


class Shared(Protocol[Value_co]):
    """A value for many tasks that is sent to each worker once."""

    def get(self) -> Value_co:
        """The value, in any process."""
        ...

    def __hash__(self) -> int: ...


class Executor(Protocol):
    """Runs independent tasks."""

    @property
    def workers(self) -> int:
        """Tasks that run concurrently at present."""
        ...

    @property
    def local(self) -> bool:
        """Whether all tasks run on this machine."""
        ...

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item], stopped: Stopped = lambda: False
    ) -> Iterator[Result]:
        """Applies a function to each item; results keep the order of the items.

        Items are read as needed, a few more than there are workers. A task whose worker dies runs again, so it must
        have no side effects.

        Args:
            function: Picklable: a module's function, or a callable dataclass.
            items: Picklable.
            stopped: Polled; once true, the iterator ends early.

        Raises:
            BackendError: If the workers are lost, or one task kills one after another.
        """
        ...

    def share(self, value: Value) -> Shared[Value]:
        """Prepares a value for many tasks, to be part of the function or the items."""
        ...

    def close(self) -> None:
        """Releases the workers."""
        ...


@dataclass(frozen=True, slots=True)
class LocalValue(Generic[Value]):
    """A shared value of a single process."""

    value: Value

    def get(self) -> Value:
        """See ``Shared``."""
        return self.value


class LocalExecutor:
    """Runs all tasks in the calling process, one after the other.

    >>> list(LocalExecutor().map(len, ["a", "bc"]))
    [1, 2]
    """

    workers = 1
    local = True

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item], stopped: Stopped = lambda: False
    ) -> Iterator[Result]:
        """See ``Executor.map``."""
        for item in items:
            if stopped():
                return
            yield function(item)

    def share(self, value: Value) -> Shared[Value]:
        """See ``Executor.share``."""
        return LocalValue(value)

    def close(self) -> None:
        """Does nothing."""


LOCAL = LocalExecutor()


def prefetch(items: Iterable[Item], count: int = 2) -> Iterator[Item]:
    """Yields the same items, read in a thread up to ``count`` ahead, so that reading and processing overlap.

    If the consumer stops early, the current read completes and a generator is closed.

    >>> list(prefetch("abc"))
    ['a', 'b', 'c']
    """
    end = object()
    source = iter(items)

    def read() -> Any:
        return next(source, end)

    with ThreadPoolExecutor(1, "prefetch") as reader:
        pending = deque(reader.submit(read) for _ in range(count))
        try:
            while (item := pending.popleft().result()) is not end:
                pending.append(reader.submit(read))
                yield item
        finally:
            for future in pending:
                future.cancel()
            if isinstance(source, Generator):
                reader.submit(source.close).result()


def batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Cuts a sequence into parts of one size; the last one may be shorter.

    >>> list(batches("abcde", 2))
    ['ab', 'cd', 'e']
    """
    for start in range(0, len(items), size):
        yield items[start : start + size]
