"""An index in a store that has no transactions over several rows, made exact by one value that can be exchanged.

A store of this kind keeps rows with a vector, finds the nearest, and can do one thing in one step: exchange its *mark*
for another if it still is what the writer believes (``Store.swap``). All else may be cut off anywhere.

A write is an attempt with a number of its own. (1) Intent: the writer exchanges the mark for one that names him. (2) He
adds his rows; their keys carry the attempt's number, and the mark does not count it yet, so nobody sees them. The last
rows are the *head* of the tenant: its moments, and the keys that are no longer to count. (3) He exchanges the mark for
one that counts the attempt: that is the moment of change, for rows and moments alike. (4) He deletes what no longer
counts, and (5) gives the mark back. Killed before (3), he leaves rows that never count; killed after it, rows that
count no more. Either are deleted by the next writer, who may take the mark over when its holder has not moved it for
the time of its lease.

Readers wait for nobody. While nobody holds the mark, all rows count; else only those that it counts, less those that
the head names. Then they look at the mark again, and read anew if another attempt counts meanwhile.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from casemate import indexing
from casemate.errors import BackendError, CasemateError, DataError
from casemate.journal.heads import Head, Ranges, ranges, written
from casemate.journal.lease import HEADS, MORE, Attempt, Lease, attempt, first_key
from casemate.journal.rows import columns_of, hashed, rest_of, rows_of, source_of
from casemate.journal.store import PAGE, Anchor, Mark, Row, Store, Which
from casemate.neighbors import SPARE, Keys, best, rounding, scores
from casemate.protocols import Index
from casemate.stats import CorpusMoments
from casemate.types import DEFAULT_TENANT, Document, Float64, Hit, Retrieval, Vector

Result = TypeVar("Result")

TRIES = 8
"""How often a reader begins anew before he has the writers wait."""
CACHED = 64
"""Tenants whose moments are kept in memory: 1.2 MB each at 384 dimensions."""
LONGEST_TENANT = 1000
HEADS_AT_A_TIME = 64
LEASE = 3
"""Times the longest that one call may take: after so long a writer is given up."""


@dataclass(frozen=True)
class _Sight:
    """What a read may see: by which mark, and what it must be given for it."""

    mark: Mark
    moment: Callable[[], Any]


class JournaledIndex(Index):
    """All verbs of an index over a ``Store``; a plug-in calls ``_begin`` with its own."""

    def _begin(self, store: Store, timeout_s: float) -> None:
        self._store, self._lease = store, Lease(store, LEASE * timeout_s)
        self._writing = threading.Lock()
        self._anchor: Anchor | None = None
        self._seen: tuple[Mark, Any] | None = None  # a mark, and what reads need to see all that it counts
        self._heads: tuple[int, dict[str, Head | None]] = (-1, {})  # of a step
        self._moments: dict[tuple[str, int], CorpusMoments] = {}  # by hash of the tenant, and attempt

    def open(self, fingerprint: str, dim: int) -> None:
        """See ``Index.open``. What a killed writer left is put right by the next write; nobody sees it before."""
        self._store.connect()
        if self._store.anchor() is None:
            begin = secrets.randbits(28)  # no number is used again in this place, whatever was erased
            self._store.found(Anchor(secrets.token_hex(4), fingerprint, int(dim)), Mark(begin, begin, "", 0))
        self._follow(fingerprint, dim)

    def add(self, documents: Sequence[Document], vectors: Vector, tenant: str = DEFAULT_TENANT) -> None:
        """See ``Index.add``."""
        vectors = indexing.require_fit(documents, vectors, self._opened().dim)
        if len(tenant) > LONGEST_TENANT:
            raise DataError(f"tenant {tenant[:80]!r} has a name of {len(tenant)} characters; {LONGEST_TENANT} is most")
        if not len(documents):
            return
        with self._attempt() as (work, sight):
            pairs = zip(documents, vectors, strict=True)
            rows = [row for document, v in pairs for row in rows_of(work.keys, document, v, tenant)]
            gone, dying = self._taken_out(sight, {d.source for d in documents}, tenant)
            self._require_new(sight, documents, set(dying), tenant)
            work.insert(rows)
            moments = indexing.changed(tenant, self._held(sight, tenant), gone, CorpusMoments.of(vectors))
            self._commit(work, sight, {tenant: moments}, dying)

    def remove(self, sources: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        """See ``Index.remove``."""
        if not self._seen_by_all(lambda sight: self._head(sight, tenant)):
            return 0
        with self._attempt() as (work, sight):
            gone, dying = self._taken_out(sight, sources, tenant)
            if gone.n:
                self._commit(work, sight, {tenant: indexing.changed(tenant, self._held(sight, tenant), gone)}, dying)
        return gone.n

    def search(self, vector: Vector, k: int, tenant: str = DEFAULT_TENANT) -> Retrieval:
        """See ``Index.search``."""

        def read(sight: _Sight) -> Retrieval:
            q = indexing.require_query(vector, self._opened().dim)
            rows, found = self._nearest(sight, q, max(k, 0), tenant)
            documents = map(indexing.document_of, self._columns(sight, rows))
            hits = tuple(Hit(d, float(s)) for d, s in zip(documents, found, strict=True))
            return Retrieval(hits, self._held(sight, tenant).background(q))

        return self._seen_by_all(read)

    def moments(self, tenant: str = DEFAULT_TENANT) -> CorpusMoments:
        """See ``Index.moments``."""
        return self._seen_by_all(lambda sight: self._held(sight, tenant))

    def digests(self, tenant: str = DEFAULT_TENANT) -> dict[str, str]:
        """See ``Index.digests``."""

        def read(sight: _Sight) -> dict[str, str]:
            found: dict[str, str] = {}
            for rows in self._pages(sight, self._view(sight, tenant), ("label",)):
                found.update(label for label in map(source_of, rows) if label)
                if long := [row.key for row in rows if not source_of(row)]:
                    whole = self._store.select(Which(keys=long), len(long), sight.moment(), ("label", "body"))
                    found.update((source, digest) for _, source, digest, *_ in self._columns(sight, whole))
            return found

        return self._seen_by_all(read)

    def tenants(self) -> list[str]:
        """See ``Index.tenants``."""
        return self._seen_by_all(lambda sight: sorted(head.tenant for head in self._all_heads(sight) if head.n))

    def scan(self, tenant: str = DEFAULT_TENANT) -> Iterator[tuple[list[Document], Vector]]:
        """See ``Index.scan``."""

        def read(after: int, count: int) -> list[tuple[Any, ...]]:
            def page(sight: _Sight) -> list[tuple[Any, ...]]:
                view = replace(self._view(sight, tenant), above=after)
                rows = self._store.select(view, count, sight.moment(), ("label", "body", "vector"))
                return [(r.key, r.vector, *c) for r, c in zip(rows, self._columns(sight, rows), strict=True)]

            return self._seen_by_all(page)

        return indexing.scanned(read, np.stack)

    def warm(self, tenant: str = DEFAULT_TENANT) -> None:
        """See ``Index.warm``. Only the moments are kept here; the vectors are the server's to cache."""
        self.moments(tenant)

    def check(self) -> list[str]:
        """See ``Index.check``."""

        def read(sight: _Sight) -> list[str]:
            heads = {head.tenant: head for head in self._all_heads(sight)}
            dim = self._opened().dim
            found = indexing.compare_all(
                sorted(heads), lambda t: heads[t].moments(dim), lambda t: self._vectors(sight, t)
            )
            if not sight.mark.holder and (strays := self._strays(sight, heads)):
                found.append(f"{strays} rows belong to no tenant that the index knows: 'casemate index --rebuild'")
            return found

        return self._seen_by_all(read, tries=2)

    def rebuild(self) -> None:
        """See ``Index.rebuild``. Writers wait meanwhile."""
        with self._attempt() as (work, sight):
            dim = self._opened().dim
            known = [head.tenant for head in self._all_heads(sight)]
            moments = {t: indexing.moments_from(self._vectors(sight, t), dim) for t in known}
            self._commit(work, sight, moments, [])

    def clear(self) -> None:
        """See ``Index.clear``."""
        self._store.connect()
        with self._writing:
            self._forget(None)
            self._store.erase()

    def close(self) -> None:
        """See ``Index.close``."""
        self._forget(None)
        self._store.close()

    def _opened(self) -> Anchor:
        if self._anchor is None:
            say = f"{self._store.where}: the index is not open"
            raise BackendError(say, backend=self._store.backend, retryable=False)
        return self._anchor

    def _forget(self, anchor: Anchor | None) -> None:
        self._anchor, self._seen, self._heads, self._moments = anchor, None, (-1, {}), {}

    def _follow(self, fingerprint: str, dim: int) -> None:
        """Opens the generation that is there now; DataError if it is another embedder's, or none."""
        anchor = self._store.anchor()
        if anchor is None or (anchor.fingerprint, anchor.dim) != (fingerprint, dim):
            raise indexing.another_embedder(self._store.where, anchor.fingerprint if anchor else None, fingerprint)
        if not self._writing.acquire(blocking=False):  # no write may go on in a generation it did not begin in
            say = f"{self._store.where} was emptied and built anew meanwhile; try again"
            raise BackendError(say, backend=self._store.backend, retryable=True)
        try:
            self._store.use(anchor)
            self._forget(anchor)
        finally:
            self._writing.release()

    def _current(self) -> Mark:
        """The mark as it is now, of this embedder's index."""
        anchor = self._opened()
        mark = self._store.mark()
        if mark is None:
            self._follow(anchor.fingerprint, anchor.dim)
            mark = self._store.mark()
        if mark is None:
            raise DataError(
                f"{self._store.where}: parts of the index were deleted or renamed; put them back, or rebuild"
            )
        return mark

    def _seen_by_all(self, read: Callable[[_Sight], Result], tries: int = TRIES) -> Result:
        """What is read of one state of the index; of the last resort, while writers wait."""
        for _ in range(tries):
            mark, failed = self._current(), None
            try:
                result = read(_Sight(mark, partial(self._moment, mark)))
            except CasemateError as error:
                failed = error
            now = self._current()
            if now == mark or (mark.holder and now.step == mark.step):
                if failed:
                    raise failed
                return result
        with self._attempt() as (_, sight):
            return read(sight)

    @contextmanager
    def _attempt(self) -> Iterator[tuple[Attempt, _Sight]]:
        """To write, and to read what counts before the attempt does."""
        self._opened()
        with self._writing, attempt(self._store, self._lease, self._current, self._heads_of) as work:
            yield work, _Sight(self._lease.mark, lambda: work.moment)

    def _moment(self, mark: Mark) -> Any:
        """What reads need to see all that the mark counts: asked for once, because the first such read may wait."""
        seen = self._seen
        if seen is None or seen[0].step != mark.step or not (mark.holder or seen[0] == mark):
            seen = self._seen = mark, self._store.moment()
        return seen[1]

    def _view(self, sight: _Sight, tenant: str) -> Which:
        """The documents of a tenant that count."""
        mark = sight.mark
        if not mark.holder:
            return Which(hashed(tenant))
        head = self._head(sight, tenant)
        dying = head.dying if head and head.born == mark.step else []
        return Which(hashed(tenant), below=first_key(mark.step + 1), without=dying)

    def _pages(self, sight: _Sight, which: Which, columns: Collection[str]) -> Iterator[list[Row]]:
        """All rows, by key, in pieces of constant memory."""
        while rows := self._store.select(which, PAGE, sight.moment(), columns):
            yield rows
            which = replace(which, above=rows[-1].key)

    def _vectors(self, sight: _Sight, tenant: str) -> Iterator[tuple[Keys, Vector]]:
        for rows in self._pages(sight, self._view(sight, tenant), ("vector",)):
            yield np.array([row.key for row in rows], np.int64), np.stack([row.vector for row in rows])

    def _strays(self, sight: _Sight, heads: Collection[str]) -> int:
        """How many rows count though no tenant that is known has them."""
        known = {HEADS, MORE, *map(hashed, heads)}
        return sum(r.tenant not in known for rows in self._pages(sight, Which(), ("tenant",)) for r in rows)

    def _nearest(self, sight: _Sight, q: Vector, k: int, tenant: str) -> tuple[list[Row], Float64]:
        """The k nearest with float64 scores. The server's float32 order is trusted only as far as it can be."""
        store, view = self._store, self._view(sight, tenant)
        limit = min(max(k + SPARE, round(k * store.overfetch)), store.reach)
        while True:
            rows = store.nearest(view, q, limit, sight.moment()) if k else []
            s = scores(np.array([row.vector for row in rows], np.float32).reshape(-1, len(q)), q)
            keys, found = best(np.array([row.key for row in rows], np.int64), s, k)
            enough = len(rows) < limit or limit == store.reach or not store.exact
            if enough or s.min() < found[-1] - rounding(q):
                held = {row.key: row for row in rows}
                return [held[key] for key in keys.tolist()], found
            limit = min(4 * limit, store.reach)  # more are alike than float32 can tell apart

    def _columns(self, sight: _Sight, rows: Sequence[Row]) -> list[list[str]]:
        """The columns of documents; what was too long for a row is fetched."""
        texts: dict[int, str] = {}
        more = [key for row in rows for key in rest_of(row)]
        for i in range(0, len(more), PAGE):
            found = self._store.select(Which(keys=more[i : i + PAGE]), PAGE, sight.moment(), ("body",))
            texts.update((row.key, row.body) for row in found)
        return [columns_of(row, [texts.get(key, "") for key in rest_of(row)]) for row in rows]

    def _head(self, sight: _Sight, tenant: str) -> Head | None:
        """The tenant's head that counts; None: it never had a document."""
        step, heads = self._heads
        if step != sight.mark.step or len(heads) >= CACHED:
            step, heads = self._heads = sight.mark.step, {}
        if tenant not in heads:
            which = Which(HEADS, below=first_key(step + 1), sources=[hashed(tenant)], ids=["0"])
            found = [*self._heads_of(which, sight.moment())]
            heads[tenant] = found[-1] if found else None  # at once: others look here, too
        return heads[tenant]

    def _all_heads(self, sight: _Sight) -> list[Head]:
        """The head of each tenant that counts."""
        which = Which(HEADS, below=first_key(sight.mark.step + 1), ids=["0"])
        return list({head.tenant: head for head in self._heads_of(which, sight.moment())}.values())

    def _heads_of(self, which: Which, moment: Any = None) -> Iterator[Head]:
        """Some of the heads, oldest first."""
        moment = self._store.moment() if moment is None else moment

        def read(keys: Sequence[int]) -> list[str]:
            rows = self._store.select(Which(keys=keys), len(keys), moment, ("body",))
            return [row.body for row in rows]

        while rows := self._store.select(which, HEADS_AT_A_TIME, moment, ("body",)):
            yield from (Head(row.key, row.body, read) for row in rows)
            which = replace(which, above=rows[-1].key)

    def _held(self, sight: _Sight, tenant: str) -> CorpusMoments:
        """The moments that count, from memory where they are known."""
        dim, head = self._opened().dim, self._head(sight, tenant)
        if head is None:
            return CorpusMoments.empty(dim)
        key, known = (tenant, head.born), self._moments
        if key not in known:
            if len(known) >= CACHED:
                known.clear()
            known[key] = head.moments(dim)
        return known[key]

    def _taken_out(self, sight: _Sight, sources: Collection[str], tenant: str) -> tuple[CorpusMoments, list[int]]:
        """Moments of the stored vectors of the sources, bit by bit, and the keys of their rows."""
        gone, keys, names = CorpusMoments.empty(self._opened().dim), [], [hashed(source) for source in set(sources)]
        for i in range(0, len(names), PAGE):
            which = replace(self._view(sight, tenant), sources=names[i : i + PAGE])
            for rows in self._pages(sight, which, ("label", "vector")):
                gone += CorpusMoments.of(np.stack([row.vector for row in rows]))
                keys += [key for row in rows for key in (row.key, *rest_of(row))]
        return gone, keys

    def _require_new(self, sight: _Sight, documents: Sequence[Document], gone: Collection[int], tenant: str) -> None:
        """DataError if another source has one of the ids."""
        names = {hashed(d.id): d.id for d in documents}
        hashes = list(names)
        for i in range(0, len(hashes), PAGE):
            which = replace(self._view(sight, tenant), ids=hashes[i : i + PAGE])
            held = [row for rows in self._pages(sight, which, ("id",)) for row in rows if row.key not in gone]
            if held:
                raise indexing.given_twice(names[held[0].id])

    def _commit(self, work: Attempt, sight: _Sight, moments: Mapping[str, CorpusMoments], dying: Sequence[int]) -> None:
        """Writes the heads of the attempt, and makes it count; its rows are in already."""
        vector = np.eye(1, self._opened().dim, dtype=np.float32)[0]
        every: Ranges = []
        for tenant, m in moments.items():
            old = self._head(sight, tenant)
            gone = ranges([*dying, *(old.keys if old else ())])
            texts = written(tenant, m, gone)
            rows = [
                Row(key, HEADS, hashed(tenant), str(i), "", text, vector)
                for i, (key, text) in enumerate(zip(work.keys(len(texts)), texts, strict=True))
            ]
            work.insert(rows)
            every += gone
        work.commit(every)
