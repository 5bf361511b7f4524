"""The sidecar of an attached collection: its row inventory, moments and pending changes, within one transaction.

A scan builds a new epoch beside the active one, which stays in use until the new one is complete. Each row has a
vector checksum for two epochs, the active one and the one being built, so a scan writes each row once.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from casemate.backends import index_checks
from casemate.backends.sidecar.pending_change import PendingChange
from casemate.backends.sidecar.row_inventory import PageInventory, RowCounts, vector_checksums, vector_sketches
from casemate.backends.sidecar.sidecar_database import INDEXES, SidecarTables
from casemate.errors import DataError
from casemate.maths.moments import CorpusMoments
from casemate.types import Vector

PARAMETERS = 500  # values per IN list
NOT_SCANNED = "the collection has not been scanned completely: run 'casemate attach'"


class InventoryEntry(NamedTuple):
    """The inventory's record of a row.

    ``age`` is its number in the inventory; ``duplicate_of`` the source of the oldest near-duplicate, or empty;
    ``checksum`` that of its vector; ``ours`` 1 if it was added through Casemate, otherwise 0.
    """

    age: int
    source: str
    duplicate_of: str
    digest: str
    checksum: int
    ours: int


class IdentifiedEntry(NamedTuple):
    """A row id and its inventory entry."""

    id: str
    entry: InventoryEntry


class Sidecar:
    """The sidecar tables within one transaction."""

    def __init__(self, tables: SidecarTables, dim: int) -> None:
        self._tables, self._dim = tables, dim
        self.meta: Mapping[str, str] = dict(tables.query("SELECT name, value FROM @meta"))
        self.epoch = int(self.meta.get("epoch", "0"))
        self.next_epoch = int(self.meta.get("next_epoch", "0"))

    @property
    def within(self) -> Any:
        """The collection's own transaction, if the tables are in it."""
        return self._tables.within

    def set_meta(self, **values: object) -> None:
        """Stores values by name. None deletes one."""
        for name, value in values.items():
            self._tables.execute("DELETE FROM @meta WHERE name = ?", (name,))
            if value is not None:
                self._tables.execute("INSERT INTO @meta VALUES (?, ?)", (name, str(value)))
        self.meta = {n: str(v) for n, v in {**self.meta, **values}.items() if v is not None}

    def bind(self, collection: str, fingerprint: str, remedy: str) -> None:
        """Binds an empty sidecar to a collection and an embedder, or verifies the binding.

        Raises:
            DataError: If it belongs to another collection, embedder or dimension. ``remedy`` says what the user can do.
        """
        if "fingerprint" not in self.meta:
            self.set_meta(collection=collection, fingerprint=fingerprint, dim=self._dim)
        self.require_bound(collection, fingerprint, remedy)

    def require_bound(self, collection: str, fingerprint: str, remedy: str) -> None:
        """Verifies the binding. See ``bind``."""
        for what, stored, configured in (
            ("collection", self.meta.get("collection"), collection),
            ("embedder", self.meta.get("fingerprint"), fingerprint),
            ("dimension", self.meta.get("dim"), str(self._dim)),
        ):
            if stored != configured:
                raise DataError(
                    f"the sidecar database belongs to the {what} {stored!r}, not to {configured!r}; {remedy}"
                )

    def require_scanned(self) -> None:
        """Raises ``DataError`` unless a scan is complete."""
        if not self.epoch:
            raise DataError(NOT_SCANNED)

    def entries(self, tenant: str, ids: Collection[str]) -> dict[str, InventoryEntry]:
        """Inventory entries by id. Unknown ids are missing."""
        rows = self._select_in(f"{self._entry_query} AND k.id IN ", (self.epoch, tenant, self.epoch), ids)
        return {row[0]: InventoryEntry(*row[1:]) for row in rows}

    @property
    def _entry_query(self) -> str:
        """Selects ids and entries. Parameters: epoch, tenant, epoch."""
        p = self.epoch % 2
        return (
            f"SELECT k.id, k.age, k.source, coalesce(t.source, ''), k.digest, k.checksum{p}, k.ours FROM @inventory k "
            f"LEFT JOIN @near_duplicate t ON t.epoch = ? AND t.age = k.age WHERE k.tenant = ? AND k.epoch{p} = ?"
        )

    def ids_of(self, tenant: str, sources: Collection[str]) -> list[str]:
        """Ids of all rows of some sources."""
        query = f"SELECT id FROM @inventory WHERE tenant = ? AND epoch{self.epoch % 2} = ? AND source IN "
        return [identity for (identity,) in self._select_in(query, (tenant, self.epoch), sources)]

    def _select_in(self, query: str, values: Sequence[Any], options: Collection[Any]) -> Iterator[tuple[Any, ...]]:
        distinct = sorted(set(options))
        for start in range(0, len(distinct), PARAMETERS):
            some = distinct[start : start + PARAMETERS]
            yield from self._tables.query(f"{query}({', '.join('?' * len(some))})", (*values, *some))

    def entries_by_age(self, tenant: str, after: int, count: int) -> list[IdentifiedEntry]:
        """At most ``count`` rows of a tenant by age, starting after an age."""
        query = f"{self._entry_query} AND k.age > ? ORDER BY k.age LIMIT ?"
        rows = self._tables.query(query, (self.epoch, tenant, self.epoch, after, count))
        return [IdentifiedEntry(row[0], InventoryEntry(*row[1:])) for row in rows]

    def sample(self, tenant: str, count: int) -> list[IdentifiedEntry]:
        """A random sample of at most ``count`` rows of a tenant, drawn by age. All rows if there are not more."""
        query = "SELECT coalesce(min(age), 0), coalesce(max(age), -1) FROM @inventory WHERE tenant = ?"
        low, high = self._tables.query(query, (tenant,))[0]
        if high - low < 2 * count:
            return self.entries_by_age(tenant, 0, count)
        ages = np.random.default_rng().integers(low, high + 1, count).tolist()
        rows = {row.id: row for age in ages for row in self.entries_by_age(tenant, age - 1, 1)}
        return list(rows.values())

    def digests(self, tenant: str) -> dict[str, str]:
        """Content hash of each source. Empty for sources that other programs added."""
        query = f"SELECT DISTINCT source, digest FROM @inventory WHERE tenant = ? AND epoch{self.epoch % 2} = ?"
        return {source: digest for source, digest in self._tables.query(query, (tenant, self.epoch))}

    def tenants(self) -> list[str]:
        """All tenants with rows, sorted."""
        query = "SELECT name FROM @tenant WHERE epoch = ? AND n > 0"
        return sorted(name for (name,) in self._tables.query(query, (self.epoch,)))

    def revision(self, tenant: str) -> int:
        """Revision number of the tenant's moments: it changes whenever they change. 0 if the tenant has none."""
        query = "SELECT revision FROM @tenant WHERE epoch = ? AND name = ?"
        rows = self._tables.query(query, (self.epoch, tenant))
        return int(rows[0][0]) if rows else 0

    def size(self) -> int:
        """Number of rows in the moments of all tenants."""
        rows = self._tables.query("SELECT coalesce(sum(n), 0) FROM @tenant WHERE epoch = ?", (self.epoch,))
        return int(rows[0][0])

    def moments(self, tenant: str, epoch: int | None = None) -> CorpusMoments:
        """The moments of a tenant's rows, by default in the active epoch."""
        epoch = self.epoch if epoch is None else epoch
        query = "SELECT n, mean, scatter FROM @tenant WHERE epoch = ? AND name = ?"
        rows = self._tables.query(query, (epoch, tenant))
        return index_checks.decode_moments(tenant, rows[0] if rows else None, self._dim)

    def set_moments(self, tenant: str, m: CorpusMoments, epoch: int) -> None:
        """Replaces the moments of a tenant."""
        self._tables.execute(
            "INSERT INTO @tenant VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (epoch, name) DO UPDATE SET "
            "revision = excluded.revision, n = excluded.n, mean = excluded.mean, scatter = excluded.scatter",
            (epoch, tenant, secrets.randbits(62) + 1, m.n, m.mean.tobytes(), m.scatter.tobytes()),
        )

    # Rows withheld from retrieval

    def withheld(self) -> dict[str, frozenset[str]]:
        """Ids of rows that are withheld from retrieval, by tenant."""
        return {tenant: frozenset(ids) for tenant, ids in json.loads(self.meta.get("withheld", "{}")).items()}

    def set_withheld(self, tenant: str, ids: Collection[str], others: Collection[str]) -> int:
        """Withholds some rows of a tenant and admits others. Returns how many of the others were withheld."""
        held = self.withheld()
        before = held.get(tenant, frozenset())
        held[tenant] = (before - frozenset(others)) | frozenset(ids)
        values = {name: sorted(rows) for name, rows in held.items() if rows}
        self.set_meta(withheld=json.dumps(values) if values else None)
        return len(before & frozenset(others))

    # Changes through Casemate

    def log_change(self, change: PendingChange) -> int:
        """Logs a change before it is applied to the collection. Returns its number."""
        self._tables.execute(
            "INSERT INTO @pending_change (tenant, body) VALUES (?, ?)", (change.tenant, change.to_bytes())
        )
        return int(self._tables.query("SELECT max(seq) FROM @pending_change")[0][0])

    def pending_changes(self) -> list[tuple[int, PendingChange]]:
        """Logged changes that are not complete, in order."""
        rows = self._tables.query("SELECT seq, body FROM @pending_change ORDER BY seq")
        return [(int(seq), PendingChange.from_bytes(body, self._dim)) for seq, body in rows]

    def complete(self, number: int, change: PendingChange, stored: Vector) -> bool:
        """Records a change after it was applied to the collection. False: another process did so already."""
        if not self._tables.execute("DELETE FROM @pending_change WHERE seq = ?", (number,)):
            return False
        self.record(change, stored)
        return True

    def discard(self, number: int) -> None:
        """Deletes a logged change that the collection refused."""
        self._tables.execute("DELETE FROM @pending_change WHERE seq = ?", (number,))

    def record(self, change: PendingChange, stored: Vector) -> None:
        """Updates inventory and moments after a change, given its new vectors as stored, at unit length."""
        tenant, entries = change.tenant, self.entries(change.tenant, change.gone)
        current = dict(zip(change.found, vector_checksums(change.vectors).tolist(), strict=True))
        if foreign := sum(current.get(identity) != e.checksum for identity, e in entries.items()):
            self.set_meta(drifted=self.drifted + foreign)
        self._update_moments(self.epoch, change, stored, entries, {d.id for d in change.documents})
        scanned = self._scanned(tenant, change.gone) if self.next_epoch else set()
        if self.next_epoch:
            self._update_moments(self.next_epoch, change, stored, scanned, scanned)
            self._log_for_scan(change, stored, scanned)
            self.set_meta(changed_during_scan=1)
        for identity in {*change.gone, *(d.id for d in change.documents)}:
            self._tables.execute("DELETE FROM @inventory WHERE tenant = ? AND id = ?", (tenant, identity))
        p = self.epoch % 2
        insert = (
            f"INSERT INTO @inventory (tenant, id, source, digest, ours, sketch, epoch{p}, checksum{p}, epoch{1 - p}, "
            f"checksum{1 - p}) VALUES (?, ?, ?, ?, 1, ?, ?, ?, ?, ?)"
        )
        added = zip(change.documents, vector_sketches(stored), vector_checksums(stored).tolist(), strict=True)
        for d, sketch, checksum in added:
            next_epoch = self.next_epoch if d.id in scanned else 0
            values = (tenant, d.id, d.source, d.digest, sketch, self.epoch, checksum, next_epoch, checksum)
            self._tables.execute(insert, values)

    def _update_moments(
        self, epoch: int, change: PendingChange, stored: Vector, removed: Collection[str], added: Collection[str]
    ) -> None:
        """Subtracts the vectors of some ids from an epoch's moments and adds those of others."""
        old = change.vectors[[i for i, identity in enumerate(change.found) if identity in removed]]
        new = stored[[i for i, d in enumerate(change.documents) if d.id in added]]
        moments = index_checks.updated_moments(
            change.tenant, self.moments(change.tenant, epoch), CorpusMoments.of(old), CorpusMoments.of(new)
        )
        self.set_moments(change.tenant, moments, epoch)

    def _scanned(self, tenant: str, ids: Collection[str]) -> set[str]:
        """The ids that the running scan has counted already."""
        query = f"SELECT id FROM @inventory WHERE tenant = ? AND epoch{self.next_epoch % 2} = ? AND id IN "
        return {identity for (identity,) in self._select_in(query, (tenant, self.next_epoch), ids)}

    @property
    def drifted(self) -> int:
        """Rows that other programs changed or removed before Casemate did: the moments may contain their old state."""
        return int(self.meta.get("drifted", "0"))

    def _log_for_scan(self, change: PendingChange, stored: Vector, scanned: Collection[str]) -> None:
        """Logs old and new states of rows that the running scan may have read but not counted yet."""
        added = [d.id for d in change.documents]
        for ids, vectors, present in ((change.found, change.vectors, 0), (added, stored, 1)):
            for identity, checksum, vector in zip(ids, vector_checksums(vectors).tolist(), vectors, strict=True):
                if identity not in scanned:
                    self._tables.execute(
                        "INSERT INTO @changed_during_scan (tenant, id, checksum, vector, present) "
                        "VALUES (?, ?, ?, ?, ?)",
                        (change.tenant, identity, checksum, vector.tobytes(), present),
                    )

    # Scans

    def begin_scan(self, restart: bool) -> tuple[str, RowCounts, str]:
        """Begins a scan, or resumes an interrupted one: token of this run, counts so far, cursor to resume from."""
        token = secrets.token_hex(8)
        if restart or not self.next_epoch:
            self._abandon(self.epoch + 1)
            self.next_epoch = self.epoch + 1
            counts = json.dumps(RowCounts())
            self.set_meta(next_epoch=self.next_epoch, cursor="", counts=counts, changed_during_scan=None)
        self.set_meta(scanner=token)
        return token, RowCounts(*json.loads(self.meta["counts"])), self.meta["cursor"]

    def require_scanner(self, token: str) -> None:
        """Raises ``DataError`` if another process has taken over the scan."""
        if self.meta.get("scanner") != token:
            raise DataError("another 'casemate attach' continues or has completed this scan; wait for it")

    def add_pages(self, pages: Sequence[PageInventory], counts: RowCounts) -> None:
        """Adds scanned pages, in order, and the cursor behind them."""
        for tenant in dict.fromkeys(name for page in pages for name in page.moments):
            moments = self.moments(tenant, self.next_epoch)
            for page in pages:
                moments = moments + page.moments[tenant] if tenant in page.moments else moments
            self.set_moments(tenant, moments, self.next_epoch)
        self._tables.upsert_rows((row for page in pages for row in page.rows), self.next_epoch)
        self.set_meta(cursor=pages[-1].after, counts=json.dumps(counts))

    def scanned_sketches(self, after: int, count: int) -> list[tuple[int, bytes]]:
        """Age and sketch of rows of the running scan, by age, starting after an age."""
        p = self.next_epoch % 2
        query = f"SELECT age, sketch FROM @inventory WHERE age > ? AND epoch{p} = ? ORDER BY age LIMIT ?"
        return [(age, bytes(sketch)) for age, sketch in self._tables.query(query, (after, self.next_epoch, count))]

    def rows_by_age(self, ages: Collection[int]) -> dict[int, tuple[str, str, str]]:
        """Tenant, id and source of rows, by age."""
        rows = self._select_in("SELECT age, tenant, id, source FROM @inventory WHERE age IN ", (), ages)
        return {row[0]: (row[1], row[2], row[3]) for row in rows}

    def count_scanned(self) -> tuple[int, int]:
        """Numbers of rows and of sources that the running scan has seen."""
        p = self.next_epoch % 2
        rows = self._tables.query(f"SELECT count(*) FROM @inventory WHERE epoch{p} = ?", (self.next_epoch,))
        distinct = f"SELECT DISTINCT tenant, source FROM @inventory WHERE epoch{p} = ?"
        sources = self._tables.query(f"SELECT count(*) FROM ({distinct}) AS s", (self.next_epoch,))
        return int(rows[0][0]), int(sources[0][0])

    def finish_scan(self, duplicates: Iterable[tuple[int, str]], summary: Mapping[str, Any]) -> None:
        """Activates the scanned epoch, after merging the changes made through Casemate during the scan."""
        new = self.next_epoch
        self._merge_changes(new)
        for age, source in duplicates:
            self._tables.execute("INSERT INTO @near_duplicate VALUES (?, ?, ?)", (new, age, source))
        self._tables.execute(f"DELETE FROM @inventory WHERE epoch{new % 2} <> ?", (new,))
        for table in ("tenant", "near_duplicate"):
            self._tables.execute(f"DELETE FROM @{table} WHERE epoch <> ?", (new,))
        self._tables.execute("DELETE FROM @changed_during_scan")
        for statement in INDEXES:
            self._tables.execute(statement)
        self.set_meta(epoch=new, next_epoch=None, cursor=None, counts=None, scanner=None, changed_during_scan=None)
        self.set_meta(drifted=None, summary=json.dumps(summary))
        self.epoch, self.next_epoch = new, 0

    def _merge_changes(self, new: int) -> None:
        """Corrects what the scan counted of rows that were changed through Casemate during it."""
        p = new % 2
        changed: dict[tuple[str, str], list[tuple[int, Vector, bool]]] = {}
        for tenant, identity, checksum, blob, present in self._tables.query(
            "SELECT tenant, id, checksum, vector, present FROM @changed_during_scan ORDER BY seq"
        ):
            states = changed.setdefault((tenant, identity), [])
            states.append((checksum, np.frombuffer(bytes(blob), np.float32), bool(present)))
        for (tenant, identity), states in changed.items():
            query = f"SELECT checksum{p} FROM @inventory WHERE tenant = ? AND id = ? AND epoch{p} = ?"
            counted = self._tables.query(query, (tenant, identity, new))
            removed = [v for checksum, v, _ in states if counted and checksum == counted[0][0]][:1]
            last_checksum, vector, present = states[-1]
            added = [vector] if present and (removed or not counted) else []
            moments = index_checks.updated_moments(
                tenant, self.moments(tenant, new), self._moments_of(removed), self._moments_of(added)
            )
            self.set_moments(tenant, moments, new)
            if present:
                self._tables.execute(
                    f"UPDATE @inventory SET epoch{p} = ?, checksum{p} = ? WHERE tenant = ? AND id = ?",
                    (new, last_checksum, tenant, identity),
                )
            else:
                self._tables.execute("DELETE FROM @inventory WHERE tenant = ? AND id = ?", (tenant, identity))

    def _moments_of(self, vectors: Sequence[Vector]) -> CorpusMoments:
        return CorpusMoments.of(np.array(vectors, np.float32).reshape(-1, self._dim))

    def _abandon(self, epoch: int) -> None:
        """Deletes the rows of an interrupted scan."""
        p = epoch % 2
        self._tables.execute(f"DELETE FROM @inventory WHERE epoch{1 - p} <> ?", (self.epoch,))
        self._tables.execute(f"UPDATE @inventory SET epoch{p} = 0 WHERE epoch{p} = ?", (epoch,))
        self._tables.execute("DELETE FROM @tenant WHERE epoch <> ?", (self.epoch,))
        self._tables.execute("DELETE FROM @changed_during_scan")

    def clear(self) -> None:
        """Deletes everything, including the binding."""
        for table in ("tenant", "near_duplicate", "inventory", "pending_change", "changed_during_scan"):
            self._tables.execute(f"DELETE FROM @{table}")
        self._tables.execute("DELETE FROM @meta WHERE name <> 'format'")
        self.meta, self.epoch, self.next_epoch = {}, 0, 0
