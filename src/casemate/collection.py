"""A collection of vectors that belongs to somebody else: what is needed of it, so that a guard can stand before it.

A vendor's or framework's adapter implements ``Collection``, or ``Transactional`` if its store has transactions;
``backends/attached.py`` makes an ``Index`` of it, with the moments and whatever else is ours in a file or schema of our
own. Nothing of ours is written into the collection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from casemate.types import DEFAULT_TENANT, Document, Float64, Hit, Vector

UNIT = 1e-6
"""A float32 vector whose length is nearer to 1 than this is of unit length, and taken bit by bit as it is."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a collection, as a scan comes by them. Rows without text or vector are left out, and counted.

    Attributes:
        documents: With the ids that the collection gave them.
        vectors: (n, dim), as they are stored: whoever reads them checks finiteness and length.
        after: Where a scan goes on behind this piece: a text that only the collection understands.
        tenants: Whose each document is; empty: all are the default tenant's.
        textless: Rows left out because they have no text.
        vectorless: Rows left out because they have no vector.
    """

    documents: Sequence[Document]
    vectors: Vector
    after: str = ""
    tenants: Sequence[str] = ()
    textless: int = 0
    vectorless: int = 0


class Collection(Protocol):
    """Rows of id, text, vector and metadata in a foreign store. Thread-safe, synchronous.

    Attributes:
        by_cosine: Whether a search finds the nearest by cosine, whatever the vectors' lengths; known when it is open.
    """

    by_cosine: bool = True

    @property
    def name(self) -> str:
        """What messages call it; no password."""
        ...

    def open(self) -> int:
        """Connects, and says how long a vector is.

        Raises:
            BackendError: If it cannot be reached.
            DataError: If it does not exist, or holds no vectors, or of several lengths.
        """
        ...

    def count(self) -> int:
        """How many rows there are, or nearly."""
        ...

    def scan(self, after: str = "") -> Iterator[Piece]:
        """All rows in a fixed order, in pieces of constant memory; from behind a piece that was seen, if one is named.

        What stays is seen once; what is added or removed meanwhile may be seen or not.
        """
        ...

    def search(self, vector: Vector, k: int) -> Sequence[Hit]:
        """The k nearest rows, or what the store takes for them, by decreasing exact cosine (see ``cosines``).

        There may be more than k: rows as near as the last of them.
        """
        ...

    def find(self, ids: Sequence[str]) -> Piece:
        """The rows of these ids, as far as there are such, in any order; ``after`` is empty."""
        ...

    def add(self, documents: Sequence[Document], vectors: Vector) -> None:
        """Puts rows in, in place of those of the same ids. Doing it twice is doing it once.

        Raises:
            CapabilityError: If this collection is only read here.
        """
        ...

    def remove(self, ids: Sequence[str]) -> None:
        """Takes rows out, as far as there are such; see ``add``."""
        ...

    def close(self) -> None:
        """Lets go of connections."""
        ...


@runtime_checkable
class Transactional(Collection, Protocol):
    """A collection in a SQL database, in which its rows and tables of our own change in one transaction.

    ``within`` is what ``transaction`` gave: a connection with ``execute`` and ``cursor`` as psycopg has them. None: a
    transaction of its own.

    Attributes:
        tenanted: Whether rows belong to tenants. If not, all are the default tenant's.
    """

    tenanted: bool

    def transaction(self, write: bool) -> AbstractContextManager[Any]:
        """A transaction, kept whole or not at all; without ``write`` read-only, on one snapshot."""
        ...

    def search(self, vector: Vector, k: int, tenant: str = DEFAULT_TENANT, within: Any | None = None) -> Sequence[Hit]:
        """See ``Collection.search``."""
        ...

    def find(self, ids: Sequence[str], tenant: str = DEFAULT_TENANT, within: Any | None = None) -> Piece:
        """See ``Collection.find``."""
        ...

    def add(
        self,
        documents: Sequence[Document],
        vectors: Vector,
        tenant: str = DEFAULT_TENANT,
        within: Any | None = None,
    ) -> None:
        """See ``Collection.add``."""
        ...

    def remove(self, ids: Sequence[str], tenant: str = DEFAULT_TENANT, within: Any | None = None) -> None:
        """See ``Collection.remove``."""
        ...


def unit(vectors: Vector) -> tuple[Vector, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """The vectors with length 1: what is of that length keeps its bits, the others are divided by theirs.

    Args:
        vectors: (n, dim), as a foreign store holds them.

    Returns:
        The vectors, contiguous float32; which were divided; and which have no direction: zero, or not finite. Those are
        zero in what is returned.

    >>> unit(np.array([[3, 4], [0, 1], [0, 0]], np.float32))[0].tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 1.0], [0.0, 0.0]]
    """
    X = np.ascontiguousarray(vectors, np.float32)
    length = np.sqrt(np.einsum("ij,ij->i", X, X, dtype=np.float64))  # float32 squares do not overflow in float64
    none = ~(np.isfinite(length) & (length > 0))
    divided = ~none & (np.abs(length - 1) >= UNIT)
    if divided.any() or none.any():
        X = X.copy()
        X[divided] = X[divided].astype(np.float64) / length[divided, None]
        X[none] = 0
    return X, divided, none


def cosines(vectors: Vector, q: Vector) -> Float64:
    """Similarities (n,) of stored vectors (n, dim) to a question's, in float64, row by row: equal rows get equal ones.

    >>> cosines(np.array([[3, 4]], np.float32), np.array([0, 1], np.float32)).round(6).tolist()
    [0.8]
    """
    s: Float64 = (unit(vectors)[0].astype(np.float64) * q.astype(np.float64)).sum(axis=1)
    return s
