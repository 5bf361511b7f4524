"""A collection that is already there, guarded where it stands: an index made of it and of what we keep beside it.

The collection stays the owner's. Searches go to it; the moments, which a guard needs, and what groups documents to
sources are in a file or schema of ours, fitted by one pass (``casemate attach``). What is added and removed by way of
us changes both together. What somebody else writes is found by search at once and in the moments after the next pass;
when too much has changed meanwhile, searches are refused, and the guard answers without context.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from casemate import indexing
from casemate.attaching.change import Change
from casemate.attaching.drift import Drift, Look, measure
from casemate.attaching.places import MEMORY, FilePlace, Place, SchemaPlace
from casemate.attaching.run import About, Scan, Spread, beside, found
from casemate.attaching.sidecar import Known, Sidecar
from casemate.attaching.tally import Grouping, checked
from casemate.collection import Collection as Foreign
from casemate.collection import Transactional
from casemate.errors import BackendError, CapabilityError, ConfigError, DataError
from casemate.protocols import Index
from casemate.stats import CorpusMoments
from casemate.types import DEFAULT_TENANT, Document, Hit, Retrieval, Vector

CACHED = 64
"""Tenants whose moments are kept in memory: 1.2 MB each at 384 dimensions."""


@dataclass(eq=False)
class AttachedIndex(Index):
    """Moments, sources and near-copies of a foreign collection, beside it.

    Attributes:
        collection: Whose.
        path: What is kept beside it: a file, readable by its owner only. ``:memory:`` for nothing beyond this process;
            the collection is then scanned when it is opened.
        schema: Keep it in a schema of this name in the collection's own database instead: several processes share it,
            and a guarded change of rows and moments is one transaction. Empty: in the file.
        source_field: Field of the metadata that names a document's source.
        source_pattern: Regular expression; its first group in a document's id, or all it matches, names the source.
        near_copies: Cosine from which documents are copies, hidden together; 0: they are not looked for.
        unknown: Documents that were put in behind our back since the last scan: `judge` them by moments that lack
            them, or `withhold` them until the next.
        drift: Share of rows that may have changed behind our back before searches are refused.
    """

    collection: Foreign
    path: Path = Path(".casemate/attached.db")
    schema: str = ""
    source_field: str = ""
    source_pattern: str = ""
    near_copies: float = 0.95
    unknown: Literal["judge", "withhold"] = "judge"
    drift: float = 0.05

    def __post_init__(self) -> None:
        if self.schema and not re.fullmatch("[a-z_][a-z0-9_]{0,62}", self.schema):
            raise ConfigError(f"attached.schema is {self.schema!r}; allowed are a-z, 0-9 and _, no digit first")
        if self.schema and not isinstance(self.collection, Transactional):
            raise CapabilityError(
                f"{self.collection.name} has no transactions for attached.schema; give a path instead"
            )
        if not (0 <= self.near_copies <= 1 and 0 < self.drift <= 1):
            said = f"attached: near_copies={self.near_copies}, drift={self.drift}"
            raise ConfigError(f"{said}; allowed are 0 to 1, and above 0 to 1")
        self._grouping = Grouping(self.source_field, self.source_pattern)
        self._place: Place | None = None
        self._cache: dict[str, tuple[int, CorpusMoments]] = {}
        self._fingerprint, self._dim = "", 0
        self._look = Look(self.drift)

    def open(self, fingerprint: str, dim: int) -> None:
        """See ``Index.open``. What a process that died left half done is finished here."""
        self.close()
        try:
            self._opened(fingerprint, dim)
        except BaseException:
            self._place = None
            self.collection.close()
            raise

    def _opened(self, fingerprint: str, dim: int) -> None:
        length = self.collection.open()
        if length != dim:
            raise DataError(
                f"{self.collection.name} holds vectors of {length} numbers, the embedder makes {dim}: "
                "configure the embedder that made the collection"
            )
        self._fingerprint, self._dim = fingerprint, dim
        place = self._made()
        place.open()
        with place.session(write=True) as tables:
            side = Sidecar(tables, dim)
            side.bind(self.collection.name, fingerprint)
            seen, half_done = side.epoch, bool(side.pending())
        self._place = place
        if half_done:
            with place.alone():
                self._repair(place)
        if not seen and (self.path.name == MEMORY or not self.collection.count()):
            self.attach()

    def attach(
        self, progress: Callable[[int], None] = lambda rows: None, anew: bool = False, spread: Spread = beside
    ) -> About:
        """Scans the whole collection; until that is done, what is known of it stays in force.

        Args:
            progress: Called with the number of rows seen so far.
            anew: Forget what a run that was broken off has seen.
            spread: Where pieces are tallied.

        Raises:
            DataError: If vectors or ids cannot be used; the message names documents.
            BackendError: If the collection fails; what was seen is kept.
        """
        scan = Scan(self.collection, self._open(), self._dim, self._grouping, self.near_copies, spread)
        done = scan.run(progress, anew)
        self._look = Look(self.drift)
        return done

    def about(self) -> About | None:
        """What the last whole scan found; None: there was none."""
        with self._session() as side:
            return About.read(side.meta)

    def drifted(self) -> Drift:
        """How far collection and moments have come apart since the last scan, measured on a sample."""
        with self._session() as side:
            side.require_whole()
        return measure(self.collection, self._open(), self._dim)

    def add(self, documents: Sequence[Document], vectors: Vector, tenant: str = DEFAULT_TENANT) -> None:
        """See ``Index.add``."""
        vectors = indexing.require_fit(documents, vectors, self._dim)
        for document in documents:
            indexing.columns(document)
        self._change({d.source for d in documents}, documents, vectors, tenant)

    def remove(self, sources: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        """See ``Index.remove``."""
        return self._change(sources, (), np.empty((0, self._dim), np.float32), tenant)

    def search(self, vector: Vector, k: int, tenant: str = DEFAULT_TENANT) -> Retrieval:
        """See ``Index.search``.

        Raises:
            DataError: If the collection was never scanned to its end, or has changed too much since.
        """
        self._open()
        q, reach = indexing.require_query(vector, self._dim), max(k, 0)
        self._look.require(self.collection.name, self._counted)
        while True:
            hits, known, law = self._found(q, reach, tenant)
            kept = [
                h for h in hits if self.unknown == "judge" or not self._strange(h.document, known.get(h.document.id))
            ]
            kept.sort(key=lambda h: (-h.score, known[h.document.id].age if h.document.id in known else 1 << 62))
            if len(kept) >= k or len(hits) < reach:
                named = tuple(
                    Hit(self._named(h.document, known.get(h.document.id)), h.score) for h in kept[: max(k, 0)]
                )
                return Retrieval(named, law.background(q))
            reach *= 4

    def moments(self, tenant: str = DEFAULT_TENANT) -> CorpusMoments:
        """See ``Index.moments``."""
        with self._session() as side:
            return self._moments(side, tenant)

    def digests(self, tenant: str = DEFAULT_TENANT) -> dict[str, str]:
        """See ``Index.digests``. Empty for what somebody else put in."""
        with self._session() as side:
            return side.digests(tenant)

    def tenants(self) -> list[str]:
        """See ``Index.tenants``."""
        with self._session() as side:
            return side.tenants()

    def scan(self, tenant: str = DEFAULT_TENANT) -> Iterator[tuple[list[Document], Vector]]:
        """See ``Index.scan``: what the moments count, as the collection has it now."""
        after = 0
        while True:
            with self._session() as side:
                rows = side.by_age(tenant, after, indexing.SCAN)
            if not rows:
                return
            after = rows[-1].known.age
            piece = found(self.collection, tenant, [row.id for row in rows])
            stored, _ = checked(piece, self._dim)
            held = {d.id: i for i, d in enumerate(piece.documents)}
            there = [row for row in rows if row.id in held]
            if there:
                order = [held[row.id] for row in there]
                yield [self._named(piece.documents[held[r.id]], r.known) for r in there], stored[order]

    def warm(self, tenant: str = DEFAULT_TENANT) -> None:
        """See ``Index.warm``."""
        self.moments(tenant)

    def check(self) -> list[str]:
        """See ``Index.check``."""
        with self._session() as side:
            if not side.epoch:
                return ["the collection was not scanned to its end: run 'casemate attach'"]
            waiting = len(side.pending())
        wrong = [f"{waiting} changes were left half done: the next change finishes them"] if waiting else []
        return wrong + self.drifted().complaints(self.drift)

    def rebuild(self) -> None:
        """See ``Index.rebuild``: scans the collection anew."""
        self.attach(anew=True)

    def clear(self) -> None:
        """Forgets what is kept beside the collection. The collection is the owner's, and stays as it is."""
        if self._place is None:
            self.collection.open()
        place = self._place or self._made()
        place.open()
        with place.session(write=True) as tables:
            Sidecar(tables, self._dim).forget()
        self._cache.clear()

    def close(self) -> None:
        """See ``Index.close``."""
        place, self._place = self._place, None
        self._cache.clear()
        if place is not None:
            place.close()
            self.collection.close()

    def _made(self) -> Place:
        if self.schema and isinstance(self.collection, Transactional):
            return SchemaPlace(self.schema, self.collection.transaction, self.collection.name)
        return FilePlace(self.path)

    def _open(self) -> Place:
        if self._place is None:
            raise BackendError(f"{self.collection.name} is not open", backend="attached", retryable=False)
        return self._place

    @contextmanager
    def _session(self, *, write: bool = False) -> Iterator[Sidecar]:
        """What is kept of this collection for this embedder, in one transaction."""
        with self._open().session(write) as tables:
            side = Sidecar(tables, self._dim)
            side.require(self.collection.name, self._fingerprint)
            yield side

    def _found(self, q: Vector, k: int, tenant: str) -> tuple[Sequence[Hit], dict[str, Known], CorpusMoments]:
        """What the collection finds, what we know of it, and the moments: of one state, where they share a database."""
        hits = () if self.schema else self._nearest(q, k, tenant)
        with self._session() as side:
            side.require_whole()
            if self.schema:
                hits = self._nearest(q, k, tenant, side.within)
            return hits, side.known(tenant, [h.document.id for h in hits]), self._moments(side, tenant)

    def _nearest(self, q: Vector, k: int, tenant: str, within: Any = None) -> Sequence[Hit]:
        if k < 1:
            return ()
        if isinstance(self.collection, Transactional):
            return self.collection.search(q, k, tenant, within)
        return self.collection.search(q, k) if tenant == DEFAULT_TENANT else ()

    def _named(self, document: Document, known: Known | None) -> Document:
        """The document with the source that it is judged by: of one we do not know, by the rule alone."""
        if known is None or self._strange(document, known):
            return replace(document, source=self._grouping.source(document))
        return replace(document, source=known.twin or known.source, digest=known.digest)

    def _strange(self, document: Document, known: Known | None) -> bool:
        """Whether somebody else has put this row in since the last scan, or another record's in its place."""
        return known is None or (not known.ours and self._grouping.source(document) != known.source)

    def _moments(self, side: Sidecar, tenant: str) -> CorpusMoments:
        """The tenant's moments, from memory while their revision is the same."""
        revision, held = side.revision(tenant), self._cache.get(tenant)
        if held is None or held[0] != revision:
            if len(self._cache) >= CACHED:
                self._cache.clear()
            held = self._cache[tenant] = revision, side.moments(tenant)
        return held[1]

    def _counted(self) -> tuple[int, int, int]:
        """Rows of the collection, of them scanned, and changed since."""
        with self._session() as side:
            side.require_whole()
            size, drifted, about = side.size(), side.drifted, About.read(side.meta)
        return self.collection.count() - (about.textless + about.vectorless if about else 0), size, drifted

    def _change(self, sources: Collection[str], documents: Sequence[Document], vectors: Vector, tenant: str) -> int:
        """Puts documents in the place of all that is held of some sources; how many there were."""
        if tenant != DEFAULT_TENANT and not getattr(self.collection, "tenanted", False):
            if documents:
                raise CapabilityError(f"{self.collection.name} knows no tenants but {DEFAULT_TENANT!r}")
            return 0
        place = self._open()
        with place.alone():
            write = self._change_at_once if self.schema else self._change_by_steps
            return write(partial(self._planned, sources, documents, vectors, tenant))

    def _change_at_once(self, plan: Callable[[Sidecar], Change]) -> int:
        """In one transaction."""
        with self._session(write=True) as side:
            change = plan(side)
            if change.gone or change.documents:
                side.apply(change, self._carried_out(change, side.within))
        return len(change.gone)

    def _change_by_steps(self, plan: Callable[[Sidecar], Change]) -> int:
        """Written down, carried out, then in the moments: whoever dies between is finished by the next."""
        place = self._open()
        self._repair(place)
        with self._session() as side:
            change = plan(side)
        if change.gone or change.documents:
            with self._session(write=True) as side:
                number = side.intend(change)
            self._settle(place, number, change)
        return len(change.gone)

    def _planned(
        self, sources: Collection[str], documents: Sequence[Document], vectors: Vector, tenant: str, side: Sidecar
    ) -> Change:
        side.require_whole()
        gone, new = side.ids_of(tenant, sources), [d.id for d in documents]
        if clash := side.known(tenant, set(new) - set(gone)):
            raise indexing.given_twice(next(iter(clash)))
        piece = found(self.collection, tenant, [*dict.fromkeys([*gone, *new])], side.within)
        known = side.known(tenant, gone)
        foreign = {d.id for d in piece.documents if self._strange(d, known.get(d.id))}
        if foreign:
            raise DataError(
                f"{self.collection.name} holds a row {min(foreign)!r} that somebody else put in: "
                "choose another id, or run 'casemate attach' and replace its source"
            )
        stored, _ = checked(piece, self._dim)
        return Change(tenant, gone, [d.id for d in piece.documents], stored, documents, vectors)

    def _carried_out(self, change: Change, within: Any = None) -> Vector:
        """Does to the collection what a change says, as often as one likes; what came, as the collection holds it."""
        if isinstance(self.collection, Transactional):
            self.collection.add(change.documents, change.new, change.tenant, within)
            self.collection.remove(change.removed, change.tenant, within)
        else:
            self.collection.add(change.documents, change.new)
            self.collection.remove(change.removed)
        piece = found(self.collection, change.tenant, [d.id for d in change.documents], within)
        held = {d.id: i for i, d in enumerate(piece.documents)}
        if lost := [d.id for d in change.documents if d.id not in held]:
            what = f"{self.collection.name} took {lost[0]!r} and does not give it back; see to the store and try again"
            raise BackendError(what, backend="attached", retryable=True)
        stored, _ = checked(piece, self._dim)
        return stored[[held[d.id] for d in change.documents]]

    def _settle(self, place: Place, number: int, change: Change) -> None:
        """Carries out a change that was written down, then brings the moments up to it; once, whoever does it."""
        try:
            stored = self._carried_out(change)
        except (CapabilityError, DataError):  # refused, before anything was changed: documents come before others go
            with place.session(write=True) as tables:
                Sidecar(tables, self._dim).drop(number)
            raise
        with place.session(write=True) as tables:
            Sidecar(tables, self._dim).settle(number, change, stored)

    def _repair(self, place: Place) -> None:
        """Finishes what processes that died left half done. Nobody else is at it: see ``Place.alone``."""
        with place.session(write=False) as tables:
            waiting = Sidecar(tables, self._dim).pending()
        for number, change in waiting:
            self._settle(place, number, change)
