"""The verb of an event store: all that processes know of one another goes through one; and what stands before one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Protocol

from casemate.types import Event, Given, Wanted


class EventStore(Protocol):
    """An append-only record."""

    @property
    def dropped(self) -> int:
        """Events given up because they could not be written."""
        return 0

    def append(self, event: Event) -> None:
        """Takes an event in charge and returns at once; it is written soon after, off the request's path."""
        ...

    def scan(self, kind: str | None = None, since: datetime | None = None) -> Sequence[Event]:
        """Events in order of writing, after all that was appended before the call is written."""
        ...

    def latest(self, kind: str, count: int) -> Sequence[Event]:
        """The last so many events of a kind, in order of writing: what a large record can be looked at by."""
        return self.scan(kind)[-count:]

    def follow(self, kind: str, after: int, since: datetime | None = None) -> tuple[Sequence[Event], int]:
        """Events of a kind that were written behind a place, by whomever, and the place behind the last of them.

        Nothing is missed and nothing comes twice, whatever the clocks of the writers say. It does not wait for what
        this process has still to write.

        Args:
            kind: Which.
            after: What the call before returned; 0 at first.
            since: Leaves out what is older, which the first call may do.
        """
        held = self.scan(kind)
        return [e for e in held[after:] if since is None or e.at >= since], len(held)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Waits until everything appended so far is written; False if that takes longer."""
        ...

    def receipt(self) -> Callable[[], bool]:
        """Tells, when asked, whether all that was appended before this call is written. Neither ever waits."""
        return lambda: self.flush(0)

    def take(self, wanted: Sequence[Wanted]) -> Sequence[Given]:
        """Takes from allowances: of each as much as there is, never more than that among all who share the store.

        Raises:
            BackendError: If the store cannot be reached; what was wanted may have been taken.
        """
        ...

    def lease(self, name: str, holder: str, seconds: float) -> bool:
        """Takes or renews a lease: True if of all who share the store this holder alone has it, by the store's clock.

        Raises:
            BackendError: If the store cannot be reached; who held the lease before may hold it still.
        """
        ...

    def release(self, name: str, holder: str) -> None:
        """Gives a lease back before its time; nothing happens if this holder has it not."""
        ...

    def close(self) -> None:
        """Flushes, and lets go of the database."""
        ...


class Relay(EventStore):
    """Stands before another store and hands everything on. Whoever is to see what is written overrides ``append``.

    Args:
        store: The other.
    """

    def __init__(self, store: EventStore) -> None:
        self._store = store

    @property
    def dropped(self) -> int:
        """As the other's."""
        return self._store.dropped

    def append(self, event: Event) -> None:
        """As the other's."""
        self._store.append(event)

    def scan(self, kind: str | None = None, since: datetime | None = None) -> Sequence[Event]:
        """As the other's."""
        return self._store.scan(kind, since)

    def latest(self, kind: str, count: int) -> Sequence[Event]:
        """As the other's."""
        return self._store.latest(kind, count)

    def follow(self, kind: str, after: int, since: datetime | None = None) -> tuple[Sequence[Event], int]:
        """As the other's."""
        return self._store.follow(kind, after, since)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """As the other's."""
        return self._store.flush(timeout_s)

    def receipt(self) -> Callable[[], bool]:
        """As the other's."""
        return self._store.receipt()

    def take(self, wanted: Sequence[Wanted]) -> Sequence[Given]:
        """As the other's."""
        return self._store.take(wanted)

    def lease(self, name: str, holder: str, seconds: float) -> bool:
        """As the other's."""
        return self._store.lease(name, holder, seconds)

    def release(self, name: str, holder: str) -> None:
        """As the other's."""
        self._store.release(name, holder)

    def close(self) -> None:
        """As the other's."""
        self._store.close()
