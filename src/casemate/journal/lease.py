"""Who may write: the lease on the mark, and the attempt of whoever holds it."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from casemate.errors import BackendError, CasemateError, DataError
from casemate.journal.heads import Head, Ranges
from casemate.journal.store import BITS, PAGE, Mark, Row, Store, Which

HEADS, MORE = "heads", "more"
"""Under these instead of a tenant: rows of heads, and rows that hold the rest of a long document."""
PATIENCE = 3
"""Times the longer lease, its own or the holder's, that a writer waits."""


def first_key(attempt: int) -> int:
    """The smallest key of an attempt."""
    return attempt << BITS


class Lease:
    """The mark in the hands of one writer, who moves it from time to time so that nobody takes it over.

    Time is measured by each waiting writer's own clock, from when he first saw the mark as it is, so clocks need not
    agree. A holder whose process was halted for longer than his lease, between looking at the clock and a write's
    arrival, could write rows that then count though no moments have them (``check`` finds the count wrong); he cannot
    make an attempt count, because the mark is no longer his.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._ms = store, round(1000 * seconds)
        self._mark = Mark(0, 0, "", 0)
        self._moved = 0.0

    @property
    def mark(self) -> Mark:
        """As it was when last moved."""
        return self._mark

    def take(self, current: Callable[[], Mark]) -> bool:
        """Waits until the mark is ours; returns whether the last holder left his work undone.

        Raises:
            BackendError: If others hold it for too long.
        """
        holder, begin = secrets.token_hex(6), time.monotonic()
        seen, since = current(), begin
        while True:
            now, mark = time.monotonic(), current()
            if mark != seen:
                seen, since = mark, now
            over = now - since > mark.lease_ms / 1000
            if not mark.holder or over:
                new = Mark(mark.step, mark.beat + 1, holder, self._ms)
                if self._exchanged(mark, new, current):
                    return bool(mark.holder)
            if now - begin > PATIENCE * max(self._ms, mark.lease_ms) / 1000:
                raise self._failure("another writer has been at it for too long; try again")
            time.sleep(random.uniform(0.002, 0.03))

    def keep(self, current: Callable[[], Mark]) -> None:
        """Moves the mark when a third of the lease is over.

        Raises:
            BackendError: If it is no longer ours: we were silent for too long.
        """
        if time.monotonic() - self._moved > self._ms / 3000:
            self.move(self._mark.step, current)

    def move(self, step: int, current: Callable[[], Mark]) -> None:
        """Exchanges the mark for one with this step; raises as ``keep``."""
        if not self._exchanged(self._mark, Mark(step, self._mark.beat + 1, self._mark.holder, self._ms), current):
            raise self._failure("lost the lease: this writer was silent for too long, and nothing of its step counts")

    def give_back(self) -> None:
        """Lets the next one write. If this fails, he waits until the lease is over."""
        with suppress(CasemateError):
            self._store.swap(self._mark, Mark(self._mark.step, self._mark.beat + 1, "", self._ms))

    def _exchanged(self, old: Mark, new: Mark, current: Callable[[], Mark]) -> bool:
        moved = time.monotonic()
        with suppress(CasemateError):  # an answer that was lost may have been a yes: only the mark itself tells
            self._store.swap(old, new)
        if current() != new:
            return False
        self._mark, self._moved = new, moved
        return True

    def _failure(self, say: str) -> BackendError:
        return BackendError(f"{self._store.where}: {say}", backend=self._store.backend, retryable=True)


class Attempt:
    """A write under way: rows that count together, or never."""

    def __init__(self, store: Store, lease: Lease, current: Callable[[], Mark]) -> None:
        self._store, self._lease, self._current = store, lease, current
        self.number = lease.mark.beat
        self._next = first_key(self.number)
        self._moment: Any = None

    @property
    def moment(self) -> Any:
        """For reads that see all that counts, which nobody else changes; moves the mark when it is time."""
        self._lease.keep(self._current)
        if self._moment is None:
            self._moment = self._store.moment()
        return self._moment

    def keys(self, count: int) -> range:
        """Fresh keys, growing.

        Raises:
            DataError: If the step has too many rows.
        """
        self._next += count
        if self._next > first_key(self.number + 1):
            raise DataError(f"a step of more than {first_key(1):,} rows; add or remove fewer documents at a time")
        return range(self._next - count, self._next)

    def insert(self, rows: Sequence[Row]) -> None:
        """Adds rows that do not count yet."""
        for i in range(0, len(rows), PAGE):
            self._lease.keep(self._current)
            self._store.insert(rows[i : i + PAGE])

    def commit(self, dying: Ranges) -> None:
        """From here on all that was inserted counts, and what is dying does not; then deletes what is dying."""
        self._lease.move(self.number, self._current)
        self.delete(dying)

    def delete(self, gone: Ranges) -> None:
        """Deletes ranges of keys."""
        keys = [key for first, last in gone for key in range(first, last + 1)]
        for i in range(0, len(keys), PAGE):
            self._lease.keep(self._current)
            self._store.delete(keys[i : i + PAGE])

    def mend(self, heads: Callable[[Which], Iterable[Head]]) -> None:
        """Finishes, or undoes, what a killed writer left."""
        step = self._lease.mark.step
        self.discard(step + 1)
        for head in heads(Which(HEADS, above=first_key(step) - 1, below=first_key(step + 1), ids=["0"])):
            self.delete(head.dying)

    def discard(self, attempt: int) -> None:
        """Deletes the rows of this attempt and of all after it, none of which counts."""
        which = Which(above=first_key(attempt) - 1)
        while rows := self._store.select(which, PAGE, self._store.moment(), ()):
            self._lease.keep(self._current)
            self._store.delete([row.key for row in rows])


@contextmanager
def attempt(
    store: Store, lease: Lease, current: Callable[[], Mark], heads: Callable[[Which], Iterable[Head]]
) -> Iterator[Attempt]:
    """Holds the lease meanwhile; what a killed writer left is put right before.

    What is refused is undone. Where the store fails, a request may still be on its way: the mark stays as it is, and
    whoever writes next waits until the lease is over.
    """
    undone = lease.take(current)
    work = Attempt(store, lease, current)
    try:
        if undone:
            work.mend(heads)
        yield work
    except DataError:
        if lease.mark.step != work.number:
            with suppress(CasemateError):
                lease.move(lease.mark.step, current)  # from here on, no request that is late makes the attempt count
                work.discard(work.number)
                lease.give_back()
        raise
    lease.give_back()
