"""Spreading work over the workers of a cluster, so that what comes out is the same as in one process.

Work is cut into pieces whose size does not depend on the workers; each piece is computed as it is in one process, and
results come back in the order of the pieces, whoever is done first. So sums are added in the same order, and on
processors of one kind all figures are equal to the last bit. Who computes them is a plug-in (``backends/ray.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from casemate.protocols import Embedder, Progress, Remembering
from casemate.types import Vector

Item = TypeVar("Item")
Result = TypeVar("Result")
Value = TypeVar("Value")
Sent_co = TypeVar("Sent_co", covariant=True)
Stopped: TypeAlias = Callable[[], bool]
"""Whether whoever waits for results has given up."""
PIECE = 256
"""Texts that a worker embeds at a time."""


class Shared(Protocol[Sent_co]):
    """A value that many tasks need, and that is sent to each worker once."""

    def get(self) -> Sent_co:
        """The value, wherever this is called."""
        ...

    def __hash__(self) -> int: ...


class Spread(Protocol):
    """Where independent tasks are done."""

    @property
    def workers(self) -> int:
        """How many tasks are done at a time, now."""
        ...

    @property
    def here(self) -> bool:
        """Whether all of them are done on this machine."""
        ...

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item], stopped: Stopped = lambda: False
    ) -> Iterator[Result]:
        """What a function makes of each item, in the order of the items.

        Items are taken as they are needed, a few more than there are workers. A task may be done more than once, when
        a worker dies over it, so it must not change anything.

        Args:
            function: Can be pickled: of a module, or a dataclass that is called.
            items: Can be pickled.
            stopped: Asked now and then; when true, the iterator ends early.

        Raises:
            BackendError: If the workers cannot be reached any more, or one piece of work kills one after another.
        """
        ...

    def share(self, value: Value) -> Shared[Value]:
        """A value for many tasks: given to them as part of the function or of the items."""
        ...

    def close(self) -> None:
        """Lets go of the workers."""
        ...


@dataclass(frozen=True, slots=True)
class Kept(Generic[Value]):
    """A shared value that has nowhere to go."""

    value: Value

    def get(self) -> Value:
        """See ``Shared``."""
        return self.value


class Alone:
    """One process does everything itself.

    >>> list(Alone().map(len, ["a", "bc"]))
    [1, 2]
    """

    workers = 1
    here = True

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item], stopped: Stopped = lambda: False
    ) -> Iterator[Result]:
        """See ``Spread.map``."""
        for item in items:
            if stopped():
                return
            yield function(item)

    def share(self, value: Value) -> Shared[Value]:
        """See ``Spread.share``."""
        return Kept(value)

    def close(self) -> None:
        """Nothing to let go of."""


ALONE = Alone()


def ahead(items: Iterable[Item], count: int = 2) -> Iterator[Item]:
    """The same items, read by a thread of their own so many before they are needed: reading goes on during work.

    Whoever stops early waits for what is being read, and a generator is closed.

    >>> list(ahead("abc"))
    ['a', 'b', 'c']
    """
    end = object()
    source = iter(items)

    def following() -> Any:
        return next(source, end)

    with ThreadPoolExecutor(1, "ahead") as reader:
        coming = deque(reader.submit(following) for _ in range(count))
        try:
            while (item := coming.popleft().result()) is not end:
                coming.append(reader.submit(following))
                yield item
        finally:
            for future in coming:
                future.cancel()
            if isinstance(source, Generator):
                reader.submit(source.close).result()


def in_pieces(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Parts of a list, all but the last of one size.

    >>> list(in_pieces("abcde", 2))
    ['ab', 'cd', 'e']
    """
    for start in range(0, len(items), size):
        yield items[start : start + size]


@dataclass(eq=False)
class SpreadEmbedder(Remembering):
    """An embedder with workers: short lists of texts are embedded here, long ones by them.

    Attributes:
        inner: Embeds here.
        spread: The workers.
        task: Embeds there: texts to vectors.
    """

    inner: Embedder
    spread: Spread
    task: Callable[[Sequence[str]], Vector]
    _known: dict[str, Vector] = field(default_factory=dict, init=False, repr=False)

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """See ``Embedder``. More than ``PIECE`` texts are embedded piece by piece."""
        known = self._known
        if texts and all(text in known for text in texts):
            if progress:
                progress(len(texts))
            return np.stack([known[text] for text in texts])
        if len(texts) <= PIECE:
            return self.inner.embed(texts, progress)
        found = []
        for vectors in self.spread.map(self.task, in_pieces(texts, PIECE)):
            found.append(vectors)
            if progress:
                progress(len(vectors))
        return np.concatenate(found)

    def ahead(
        self, work: Iterable[Item], texts: Callable[[Item], Sequence[str]], stopped: Stopped = lambda: False
    ) -> Iterator[Item]:
        """The same items, in order, each when the workers have embedded its texts.

        Until the next one is asked for, ``embed`` knows their vectors: as the task makes them of all of them together.
        """
        waiting: deque[tuple[Item, Sequence[str]]] = deque()

        def asked() -> Iterator[Sequence[str]]:
            for item in work:
                waiting.append((item, list(texts(item))))
                yield waiting[-1][1]

        try:
            for vectors in self.spread.map(self.task, asked(), stopped):
                item, known = waiting.popleft()
                self._known = dict(zip(known, vectors, strict=True))
                yield item
        finally:
            self._known = {}
