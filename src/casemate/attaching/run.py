"""One pass over a foreign collection: what it is made of, its moments, its near-copies. Interrupt at will and go on."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeAlias

import numpy as np

from casemate.attaching.copies import Copies, canonical
from casemate.attaching.places import Place
from casemate.attaching.sidecar import Sidecar
from casemate.attaching.tally import Counts, Grouping, Tally, tally
from casemate.collection import Collection, Piece, Transactional, unit
from casemate.errors import DataError
from casemate.spread import ahead
from casemate.types import DEFAULT_TENANT, Float64

FLUSH_ROWS, FLUSH_S = 32_768, 2.0
"""After so many rows or seconds what came out is kept, and a run that is killed goes on from there."""
PAGE = 8192

AHEAD = 4
"""Pieces that are read ahead of the one that is tallied."""

Spread: TypeAlias = Callable[[Callable[[Piece], Tally], Iterable[Piece]], Iterable[Tally]]
"""Carries out a function on pieces, results in the order of the pieces: ``beside``, or workers elsewhere."""


def beside(work: Callable[[Piece], Tally], pieces: Iterable[Piece]) -> Iterator[Tally]:
    """Tallies in a thread of its own while the next pieces are read; in order, and few at a time."""
    waiting: deque[Future[Tally]] = deque()
    with ThreadPoolExecutor(1, "tally") as thread:
        for piece in pieces:
            waiting.append(thread.submit(work, piece))
            while waiting and (len(waiting) > AHEAD or waiting[0].done()):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@dataclass(frozen=True, slots=True)
class About:
    """What a scan found, for people and programs.

    Attributes:
        rows: Rows with text and vector: what the moments count.
        dim: Length of a vector.
        rescaled: Rows whose vectors were not of unit length.
        textless: Rows without text, left out.
        vectorless: Rows without vector, left out.
        sources: Sources that the rows are grouped to.
        grouped: How; empty: each row is its own source.
        copies: Groups of near-copies of several sources, which are hidden together.
        copied: Rows in them.
        widespread: Groups of more sources than are worth hiding: left as they are.
        threshold: Cosine from which two rows are near-copies; 0: not looked for.
        at: When, in seconds since 1970.
        seconds: How long the last run took.
    """

    rows: int
    dim: int
    rescaled: int
    textless: int
    vectorless: int
    sources: int
    grouped: str
    copies: int
    copied: int
    widespread: int
    threshold: float
    at: float
    seconds: float

    @classmethod
    def read(cls, meta: Mapping[str, str]) -> Self | None:
        """From our tables; None: there was no scan."""
        return cls(**json.loads(meta["about"])) if "about" in meta else None

    def as_json(self) -> dict[str, Any]:
        """For ``--json`` and our tables."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Scan:
    """What is scanned, and how.

    Attributes:
        collection: Open.
        place: Open; bound to the collection.
        dim: Length of a vector.
        grouping: How documents find their source.
        threshold: Cosine from which two rows are near-copies; 0: they are not looked for.
        spread: Where pieces are tallied.
    """

    collection: Collection
    place: Place
    dim: int
    grouping: Grouping
    threshold: float
    spread: Spread = beside

    def run(self, progress: Callable[[int], None], anew: bool = False) -> About:
        """Scans to the end, from where the last run was broken off; then all of it is in force at once.

        Args:
            progress: Called with the number of rows seen so far.
            anew: Forget what a broken run has seen.

        Raises:
            DataError: If vectors or ids cannot be used; the message names documents.
            BackendError: If the collection fails; what was seen is kept.
        """
        begin = time.monotonic()
        with self.place.session(write=True) as tables:
            token, counts, after = Sidecar(tables, self.dim).begin(anew)
        progress(counts.rows)
        waiting, kept = list[Tally](), time.monotonic()
        for found in self.tallies(after):
            waiting.append(found)
            counts = counts.plus(found.counts)
            if sum(len(t.rows) for t in waiting) >= FLUSH_ROWS or time.monotonic() - kept > FLUSH_S:
                self._keep(token, waiting, counts)
                waiting, kept = [], time.monotonic()
                progress(counts.rows)
        self._keep(token, waiting, counts)
        progress(counts.rows)
        copies = Copies(self._cosines, self.threshold or 1.0)
        if self.threshold:
            copies.look(self._sketches())
        return self._finish(token, counts, copies, begin)

    def tallies(self, after: str) -> Iterable[Tally]:
        """What is kept of each piece, in order: the only part that may go to workers."""
        return self.spread(Tallier(self.grouping, self.dim), ahead(self.collection.scan(after)))

    def _keep(self, token: str, waiting: list[Tally], counts: Counts) -> None:
        if waiting:
            with self.place.session(write=True) as tables:
                sidecar = Sidecar(tables, self.dim)
                sidecar.require_scanner(token)
                sidecar.absorb(waiting, counts)

    def _sketches(self) -> Iterator[list[tuple[int, bytes]]]:
        after = 0
        while True:
            with self.place.session(write=False) as tables:
                rows = Sidecar(tables, self.dim).sketches_of_scan(after, PAGE)
            if not rows:
                return
            yield rows
            after = rows[-1][0]

    def _cosines(self, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """The true cosines of pairs of rows of one tenant."""
        with self.place.session(write=False) as tables:
            known = Sidecar(tables, self.dim).of_ages({age for pair in pairs for age in pair})
        wanted: dict[str, list[str]] = {}
        for tenant, identity, _ in known.values():
            wanted.setdefault(tenant, []).append(identity)
        vectors = {t: self._vectors(t, ids) for t, ids in wanted.items()}

        def cosine(a: int, b: int) -> float:
            (tenant, one, _), (other_tenant, other, _) = known[a], known[b]
            x, y = vectors[tenant].get(one), vectors[other_tenant].get(other)
            return float(x @ y) if tenant == other_tenant and x is not None and y is not None else math.nan

        return [cosine(a, b) if a in known and b in known else math.nan for a, b in pairs]

    def _vectors(self, tenant: str, ids: Sequence[str]) -> dict[str, Float64]:
        piece = found(self.collection, tenant, ids)
        stored = unit(piece.vectors)[0].astype(np.float64) if len(piece.documents) else ()
        return {d.id: x for d, x in zip(piece.documents, stored, strict=True)}

    def _finish(self, token: str, counts: Counts, copies: Copies, begin: float) -> About:
        with self.place.session(write=True) as tables:
            sidecar = Sidecar(tables, self.dim)
            sidecar.require_scanner(token)
            rows, sources = sidecar.seen()
            if rows < counts.rows and "meanwhile" not in sidecar.meta:
                raise DataError(
                    f"{self.collection.name}: {counts.rows} rows have only {rows} different ids; "
                    "name a column or field as id that is unique"
                )
            twins, groups, widespread = canonical(
                copies.groups(), lambda ages: {age: row[2] for age, row in sidecar.of_ages(ages).items()}
            )
            about = About(
                rows=rows, dim=self.dim, rescaled=counts.rescaled, textless=counts.textless,
                vectorless=counts.vectorless, sources=sources, grouped=self.grouping.told(), copies=groups,
                copied=len(twins), widespread=widespread, threshold=self.threshold, at=time.time(),
                seconds=time.monotonic() - begin,
            )  # fmt: skip
            sidecar.finish(twins, about.as_json())
        return about


@dataclass(frozen=True, slots=True)
class Tallier:
    """``tally`` with its options: a value, so that it can be sent to workers."""

    grouping: Grouping
    dim: int

    def __call__(self, piece: Piece) -> Tally:
        """See ``tally``."""
        return tally(piece, self.grouping, self.dim)


def found(collection: Collection, tenant: str, ids: Sequence[str], within: Any | None = None) -> Piece:
    """Rows of a tenant by id, of a collection that may or may not know of tenants and transactions."""
    if isinstance(collection, Transactional):
        return collection.find(ids, tenant, within)
    return collection.find(ids) if tenant == DEFAULT_TENANT else Piece((), np.empty((0, 0), np.float32))
