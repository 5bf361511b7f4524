"""What we know of a collection that is not ours: its rows by name, their moments, and changes under way.

A scan makes a new epoch beside the one in force, which goes on answering until the new one is whole. Of a row we keep
64 bits of its vector for each of two epochs, the one in force and the one in the making, so nothing is written twice.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from casemate import indexing
from casemate.attaching.change import Change
from casemate.attaching.places import INDEXES, Tables
from casemate.attaching.tally import Counts, Tally, marks, sketches
from casemate.errors import DataError
from casemate.stats import CorpusMoments
from casemate.types import Vector

IN_LIST = 500
"""Values of one statement."""
NOT_YET = "casemate has not seen this collection yet, or not to its end: run 'casemate attach'"


class Known(NamedTuple):
    """What we know of a row: its age among ours, its source, the source it is a copy of ("": none), the digest.

    ``ours`` is 0 for a row that somebody else put in.
    """

    age: int
    source: str
    twin: str
    digest: str
    mark: int
    ours: int


class Named(NamedTuple):
    """A row's id, and what we know of it."""

    id: str
    known: Known


class Sidecar:
    """Our tables, within one transaction.

    Args:
        tables: Of the transaction.
        dim: Length of a vector.
    """

    def __init__(self, tables: Tables, dim: int) -> None:
        self._tables, self._dim = tables, dim
        self.meta: Mapping[str, str] = dict(tables.all("SELECT name, value FROM @meta"))
        self.epoch = int(self.meta.get("epoch", "0"))
        self.coming = int(self.meta.get("coming", "0"))

    @property
    def within(self) -> Any:
        """The collection's own transaction, if our tables are in it."""
        return self._tables.within

    def note(self, **values: object) -> None:
        """Keeps values by name; None takes one away."""
        for name, value in values.items():
            self._tables.run("DELETE FROM @meta WHERE name = ?", (name,))
            if value is not None:
                self._tables.run("INSERT INTO @meta VALUES (?, ?)", (name, str(value)))
        self.meta = {n: str(v) for n, v in {**self.meta, **values}.items() if v is not None}

    def bind(self, collection: str, fingerprint: str) -> None:
        """Ties the tables to a collection and an embedder, or verifies that they are.

        Raises:
            DataError: If they belong to another collection, embedder or length of vectors.
        """
        if "fingerprint" not in self.meta:
            self.note(collection=collection, fingerprint=fingerprint, dim=self._dim)
        self.require(collection, fingerprint)

    def require(self, collection: str, fingerprint: str) -> None:
        """See ``bind``."""
        for what, held, wanted in (
            ("collection", self.meta.get("collection"), collection),
            ("embedder", self.meta.get("fingerprint"), fingerprint),
            ("length of vectors", self.meta.get("dim"), str(self._dim)),
        ):
            if held != wanted:
                raise DataError(
                    f"what is kept beside the collection is of the {what} {held!r}, not of {wanted!r}: "
                    "give rag.index another path, or run 'casemate attach --anew'"
                )

    def require_whole(self) -> None:
        """Refuses to go on before a scan came to its end.

        Raises:
            DataError: If none has.
        """
        if not self.epoch:
            raise DataError(NOT_YET)

    def known(self, tenant: str, ids: Collection[str]) -> dict[str, Known]:
        """What is known of some rows, by id; those that are not known are lacking."""
        rows = self._among(f"{self._known} AND k.id IN ", (self.epoch, tenant, self.epoch), ids)
        return {row[0]: Known(*row[1:]) for row in rows}

    @property
    def _known(self) -> str:
        """Asks for rows; wants the epoch, the tenant, and the epoch again."""
        p = self.epoch % 2
        return (
            f"SELECT k.id, k.age, k.source, coalesce(t.source, ''), k.digest, k.mark{p}, k.ours FROM @known k "
            f"LEFT JOIN @twin t ON t.epoch = ? AND t.age = k.age WHERE k.tenant = ? AND k.epoch{p} = ?"
        )

    def ids_of(self, tenant: str, sources: Collection[str]) -> list[str]:
        """Ids of all rows of some sources."""
        query = f"SELECT id FROM @known WHERE tenant = ? AND epoch{self.epoch % 2} = ? AND source IN "
        return [identity for (identity,) in self._among(query, (tenant, self.epoch), sources)]

    def _among(self, query: str, values: Sequence[Any], some: Collection[Any]) -> Iterator[tuple[Any, ...]]:
        wanted = sorted(set(some))
        for start in range(0, len(wanted), IN_LIST):
            part = wanted[start : start + IN_LIST]
            yield from self._tables.all(f"{query}({', '.join('?' * len(part))})", (*values, *part))

    def by_age(self, tenant: str, after: int, count: int) -> list[Named]:
        """A tenant's rows, by age, from behind one."""
        query = f"{self._known} AND k.age > ? ORDER BY k.age LIMIT ?"
        rows = self._tables.all(query, (self.epoch, tenant, self.epoch, after, count))
        return [Named(row[0], Known(*row[1:])) for row in rows]

    def draw(self, tenant: str, count: int) -> list[Named]:
        """So many of a tenant's rows at most, each drawn by a random age: all of them, if there are not more."""
        query = "SELECT coalesce(min(age), 0), coalesce(max(age), -1) FROM @known WHERE tenant = ?"
        low, high = self._tables.all(query, (tenant,))[0]
        if high - low < 2 * count:
            return self.by_age(tenant, 0, count)
        ages = np.random.default_rng().integers(low, high + 1, count).tolist()
        rows = {row.id: row for age in ages for row in self.by_age(tenant, age - 1, 1)}
        return list(rows.values())

    def digests(self, tenant: str) -> dict[str, str]:
        """Content hash of each source, empty where somebody else put it there."""
        query = f"SELECT DISTINCT source, digest FROM @known WHERE tenant = ? AND epoch{self.epoch % 2} = ?"
        return {source: digest for source, digest in self._tables.all(query, (tenant, self.epoch))}

    def tenants(self) -> list[str]:
        """All tenants that have rows, sorted."""
        query = "SELECT name FROM @tenant WHERE epoch = ? AND n > 0"
        return sorted(name for (name,) in self._tables.all(query, (self.epoch,)))

    def revision(self, tenant: str) -> int:
        """Another number whenever the tenant's moments are others."""
        query = "SELECT revision FROM @tenant WHERE epoch = ? AND name = ?"
        rows = self._tables.all(query, (self.epoch, tenant))
        return int(rows[0][0]) if rows else 0

    def size(self) -> int:
        """How many rows the moments count, of all tenants."""
        rows = self._tables.all("SELECT coalesce(sum(n), 0) FROM @tenant WHERE epoch = ?", (self.epoch,))
        return int(rows[0][0])

    def moments(self, tenant: str, epoch: int | None = None) -> CorpusMoments:
        """The moments of a tenant's rows."""
        epoch = self.epoch if epoch is None else epoch
        query = "SELECT n, mean, scatter FROM @tenant WHERE epoch = ? AND name = ?"
        rows = self._tables.all(query, (epoch, tenant))
        return indexing.moments_of(tenant, rows[0] if rows else None, self._dim)

    def store(self, tenant: str, m: CorpusMoments, epoch: int) -> None:
        """Puts moments in the place of those held."""
        self._tables.run(
            "INSERT INTO @tenant VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (epoch, name) DO UPDATE SET "
            "revision = excluded.revision, n = excluded.n, mean = excluded.mean, scatter = excluded.scatter",
            (epoch, tenant, secrets.randbits(62) + 1, m.n, m.mean.tobytes(), m.scatter.tobytes()),
        )

    # Guarded changes

    def intend(self, change: Change) -> int:
        """Writes a change down before it is carried out; its number."""
        self._tables.run("INSERT INTO @pending (tenant, body) VALUES (?, ?)", (change.tenant, change.written()))
        return int(self._tables.all("SELECT max(seq) FROM @pending")[0][0])

    def pending(self) -> list[tuple[int, Change]]:
        """Changes under way, in order."""
        rows = self._tables.all("SELECT seq, body FROM @pending ORDER BY seq")
        return [(int(seq), Change.read(body, self._dim)) for seq, body in rows]

    def settle(self, number: int, change: Change, stored: Vector) -> bool:
        """Brings moments and rows up to a change that was carried out, once: whoever comes second finds it done."""
        if not self._tables.run("DELETE FROM @pending WHERE seq = ?", (number,)):
            return False
        self.apply(change, stored)
        return True

    def drop(self, number: int) -> None:
        """Takes back a change that was written down and refused."""
        self._tables.run("DELETE FROM @pending WHERE seq = ?", (number,))

    def apply(self, change: Change, stored: Vector) -> None:
        """Brings moments and rows up to a change that was carried out.

        Args:
            change: What went and what came.
            stored: Vectors of what came, as the collection gives them back, at length 1.
        """
        tenant, known = change.tenant, self.known(change.tenant, change.gone)
        seen = dict(zip(change.found, marks(change.vectors).tolist(), strict=True))
        if foreign := sum(seen.get(identity) != k.mark for identity, k in known.items()):
            self.note(drifted=self.drifted + foreign)
        self._move(self.epoch, change, stored, known, {d.id for d in change.documents})
        scanned = self._scanned(tenant, change.gone) if self.coming else set()
        if self.coming:
            self._move(self.coming, change, stored, scanned, scanned)
            self._touch(change, stored, scanned)
            self.note(meanwhile=1)
        for identity in {*change.gone, *(d.id for d in change.documents)}:
            self._tables.run("DELETE FROM @known WHERE tenant = ? AND id = ?", (tenant, identity))
        p = self.epoch % 2
        insert = (
            f"INSERT INTO @known (tenant, id, source, digest, ours, sketch, epoch{p}, mark{p}, epoch{1 - p}, "
            f"mark{1 - p}) VALUES (?, ?, ?, ?, 1, ?, ?, ?, ?, ?)"
        )
        arrived = zip(change.documents, sketches(stored), marks(stored).tolist(), strict=True)
        for d, sketch, mark in arrived:
            next_epoch = self.coming if d.id in scanned else 0
            self._tables.run(insert, (tenant, d.id, d.source, d.digest, sketch, self.epoch, mark, next_epoch, mark))

    def _move(self, epoch: int, change: Change, stored: Vector, out: Collection[str], come: Collection[str]) -> None:
        """Takes the vectors of some ids out of an epoch's moments, and puts those of others in."""
        gone = change.vectors[[i for i, identity in enumerate(change.found) if identity in out]]
        new = stored[[i for i, d in enumerate(change.documents) if d.id in come]]
        held = self.moments(change.tenant, epoch)
        held = indexing.changed(change.tenant, held, CorpusMoments.of(gone), CorpusMoments.of(new))
        self.store(change.tenant, held, epoch)

    def _scanned(self, tenant: str, ids: Collection[str]) -> set[str]:
        """Which of some rows the scan under way has counted already."""
        query = f"SELECT id FROM @known WHERE tenant = ? AND epoch{self.coming % 2} = ? AND id IN "
        return {identity for (identity,) in self._among(query, (tenant, self.coming), ids)}

    @property
    def drifted(self) -> int:
        """Rows that somebody else changed or took away before we did: the moments may hold them as they were."""
        return int(self.meta.get("drifted", "0"))

    def _touch(self, change: Change, stored: Vector, scanned: Collection[str]) -> None:
        """Remembers what rows were and are that the scan under way may have read, and not yet counted."""
        came = [d.id for d in change.documents]
        for ids, vectors, stays in ((change.found, change.vectors, 0), (came, stored, 1)):
            for identity, mark, vector in zip(ids, marks(vectors).tolist(), vectors, strict=True):
                if identity not in scanned:
                    self._tables.run(
                        "INSERT INTO @touched (tenant, id, mark, vector, stays) VALUES (?, ?, ?, ?, ?)",
                        (change.tenant, identity, mark, vector.tobytes(), stays),
                    )

    # A scan

    def begin(self, anew: bool) -> tuple[str, Counts, str]:
        """Begins a scan, or goes on with one that was broken off.

        Returns:
            What tells this run from any other; what was counted so far; where to go on.
        """
        token = secrets.token_hex(8)
        if anew or not self.coming:
            self._drop(self.coming)
            self.coming = self.epoch + 1
            self.note(coming=self.coming, cursor="", counts=json.dumps(Counts()), meanwhile=None)
        self.note(scanner=token)
        return token, Counts(*json.loads(self.meta["counts"])), self.meta["cursor"]

    def require_scanner(self, token: str) -> None:
        """Refuses to go on with a scan that another process has taken over.

        Raises:
            DataError: If one has.
        """
        if self.meta.get("scanner") != token:
            raise DataError("another 'casemate attach' has taken this scan over, or ended it; let it run")

    def absorb(self, tallies: Sequence[Tally], counts: Counts) -> None:
        """Keeps what came out of some pieces, in their order, and where the scan goes on."""
        for tenant in dict.fromkeys(name for t in tallies for name in t.moments):
            held = self.moments(tenant, self.coming)
            for t in tallies:
                held = held + t.moments[tenant] if tenant in t.moments else held
            self.store(tenant, held, self.coming)
        self._tables.put_rows((row for t in tallies for row in t.rows), self.coming)
        self.note(cursor=tallies[-1].after, counts=json.dumps(counts))

    def sketches_of_scan(self, after: int, count: int) -> list[tuple[int, bytes]]:
        """Age and sketch of the rows that the scan under way has seen, by age, from behind one."""
        query = f"SELECT age, sketch FROM @known WHERE age > ? AND epoch{self.coming % 2} = ? ORDER BY age LIMIT ?"
        return [(age, bytes(sketch)) for age, sketch in self._tables.all(query, (after, self.coming, count))]

    def of_ages(self, ages: Collection[int]) -> dict[int, tuple[str, str, str]]:
        """Tenant, id and source of rows, by age."""
        rows = self._among("SELECT age, tenant, id, source FROM @known WHERE age IN ", (), ages)
        return {row[0]: (row[1], row[2], row[3]) for row in rows}

    def seen(self) -> tuple[int, int]:
        """How many rows, and of how many sources, the scan under way has seen."""
        p = self.coming % 2
        rows = self._tables.all(f"SELECT count(*) FROM @known WHERE epoch{p} = ?", (self.coming,))
        query = f"SELECT count(*) FROM (SELECT DISTINCT tenant, source FROM @known WHERE epoch{p} = ?) AS s"
        return int(rows[0][0]), int(self._tables.all(query, (self.coming,))[0][0])

    def finish(self, twins: Iterable[tuple[int, str]], about: Mapping[str, Any]) -> None:
        """Puts the scan in force, with what was changed by way of us meanwhile."""
        new = self.coming
        self._reconcile(new)
        for age, source in twins:
            self._tables.run("INSERT INTO @twin VALUES (?, ?, ?)", (new, age, source))
        self._tables.run(f"DELETE FROM @known WHERE epoch{new % 2} <> ?", (new,))
        for table in ("tenant", "twin"):
            self._tables.run(f"DELETE FROM @{table} WHERE epoch <> ?", (new,))
        self._tables.run("DELETE FROM @touched")
        for statement in INDEXES:
            self._tables.run(statement)
        self.note(epoch=new, coming=None, cursor=None, counts=None, scanner=None, meanwhile=None, drifted=None)
        self.note(about=json.dumps(about))
        self.epoch, self.coming = new, 0

    def _reconcile(self, new: int) -> None:
        """Puts right what the scan counted of rows that were changed by way of us while it went on."""
        p = new % 2
        touched: dict[tuple[str, str], list[tuple[int, Vector, bool]]] = {}
        for tenant, identity, mark, blob, stays in self._tables.all(
            "SELECT tenant, id, mark, vector, stays FROM @touched ORDER BY seq"
        ):
            states = touched.setdefault((tenant, identity), [])
            states.append((mark, np.frombuffer(bytes(blob), np.float32), bool(stays)))
        for (tenant, identity), states in touched.items():
            query = f"SELECT mark{p} FROM @known WHERE tenant = ? AND id = ? AND epoch{p} = ?"
            counted = self._tables.all(query, (tenant, identity, new))
            out = [v for mark, v, _ in states if counted and mark == counted[0][0]][:1]
            _, vector, stays = states[-1]
            held = indexing.changed(
                tenant,
                self.moments(tenant, new),
                self._of(out),
                self._of([vector] if stays and (out or not counted) else []),
            )
            self.store(tenant, held, new)
            if stays:
                self._tables.run(
                    f"UPDATE @known SET epoch{p} = ?, mark{p} = ? WHERE tenant = ? AND id = ?",
                    (new, states[-1][0], tenant, identity),
                )
            else:
                self._tables.run("DELETE FROM @known WHERE tenant = ? AND id = ?", (tenant, identity))

    def _of(self, vectors: Sequence[Vector]) -> CorpusMoments:
        return CorpusMoments.of(np.array(vectors, np.float32).reshape(-1, self._dim))

    def _drop(self, epoch: int) -> None:
        """Forgets a scan that is not gone on with."""
        p = epoch % 2
        self._tables.run(f"DELETE FROM @known WHERE epoch{1 - p} <> ?", (self.epoch,))
        self._tables.run(f"UPDATE @known SET epoch{p} = 0 WHERE epoch{p} = ?", (epoch,))
        self._tables.run("DELETE FROM @tenant WHERE epoch <> ?", (self.epoch,))
        self._tables.run("DELETE FROM @touched")

    def forget(self) -> None:
        """Forgets everything: the next ``open`` binds anew."""
        for table in ("tenant", "twin", "known", "pending", "touched"):
            self._tables.run(f"DELETE FROM @{table}")
        self._tables.run("DELETE FROM @meta WHERE name <> 'format'")
        self.meta, self.epoch, self.coming = {}, 0, 0
