"""What an index by journal needs of a vector store, and what the two say to one another."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from casemate.types import Vector

BITS = 20
"""Of a key, those below the attempt's number. All keys fit into a float64, in which some servers compare them."""
EVERY = 1 << 62
"""Greater than any key."""
PAGE = 1024
"""Rows that are read, written or deleted at a time."""


class Anchor(NamedTuple):
    """What an index was made for. A new ``generation`` is as good as another place."""

    generation: str
    fingerprint: str
    dim: int


class Mark(NamedTuple):
    """The one value by which writers and readers agree.

    Attributes:
        step: The last attempt that counts.
        beat: Grows with every exchange; at intent it becomes the attempt's number.
        holder: Who writes; empty: nobody, and every row counts.
        lease_ms: After how long without a beat the holder is given up.
    """

    step: int
    beat: int
    holder: str
    lease_ms: int


class Row(NamedTuple):
    """One row. Tenant, source and id are hashes of fixed length, so that no text of a user is part of a condition."""

    key: int
    tenant: str
    source: str
    id: str
    label: str
    body: str
    vector: Vector


@dataclass(frozen=True)
class Which:
    """A condition on rows, of which all parts hold.

    Attributes:
        tenant: Of this tenant; empty: of any.
        above: Keys greater than this.
        below: Keys smaller than this.
        without: First and last key of ranges that are left out.
        sources: Of one of these.
        ids: With one of these.
        keys: These rows; no other part is given beside it.
    """

    tenant: str = ""
    above: int = -1
    below: int = EVERY
    without: Sequence[tuple[int, int]] = ()
    sources: Sequence[str] | None = None
    ids: Sequence[str] | None = None
    keys: Sequence[int] | None = None


class Store(Protocol):
    """What a vector store has to do. Every call raises ``BackendError`` or ``DataError``, and no other error.

    Attributes:
        backend: Its name.
        where: Names the place in messages.
        exact: Whether ``nearest`` misses none, but for the rounding of float32.
        reach: Most rows that ``nearest`` gives.
        overfetch: How many times more rows than wanted are fetched, to be scored again.
    """

    backend: str
    where: str
    exact: bool
    reach: int
    overfetch: float

    def connect(self) -> None:
        """Reaches the server; called again, does nothing."""
        ...

    def close(self) -> None:
        """Lets go of it."""
        ...

    def anchor(self) -> Anchor | None:
        """What the place was made for; None: it is empty."""
        ...

    def found(self, anchor: Anchor, mark: Mark) -> None:
        """Makes an index, with its first mark, in an empty place. Of several at once only the first one's stays."""
        ...

    def erase(self) -> None:
        """Takes everything away."""
        ...

    def use(self, anchor: Anchor) -> None:
        """All calls below mean this generation from now on, and fail if it is gone."""
        ...

    def mark(self) -> Mark | None:
        """The mark, as the last ``swap`` anywhere left it; None: the generation is gone."""
        ...

    def swap(self, old: Mark, new: Mark) -> None:
        """Exchanges the mark in one step if it is ``old``; else nothing happens. What came of it, ``mark`` tells."""
        ...

    def moment(self) -> Any:
        """What reads must be given in order to see all that was written before this call."""
        ...

    def insert(self, rows: Sequence[Row]) -> None:
        """Adds at most ``PAGE`` rows."""
        ...

    def delete(self, keys: Sequence[int]) -> None:
        """Deletes at most ``PAGE`` rows; unknown keys are ignored."""
        ...

    def select(self, which: Which, limit: int, moment: Any, columns: Collection[str]) -> list[Row]:
        """The first rows by key, at most ``limit``; columns that are not asked for may be empty."""
        ...

    def nearest(self, which: Which, q: Vector, limit: int, moment: Any) -> list[Row]:
        """The rows with the largest inner product, at most ``limit``: label, body and vector."""
        ...
