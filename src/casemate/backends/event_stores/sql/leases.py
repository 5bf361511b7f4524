"""Leases: one row per lease, with its holder and expiry.

Each call is one statement, so at most one process acquires a lease. The database's clock decides: a process with a
wrong clock neither keeps a lease too long nor loses it too early.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from casemate.backends.event_stores.sql.event_rows import require_name

if TYPE_CHECKING:
    from sqlalchemy import Connection

NOW = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400",
    "postgresql": "extract(epoch from clock_timestamp())",  # unlike now(), advances during a lock wait
}
"""Seconds since 1970 by the database's clock; in SQLite to a millisecond."""
ACQUIRE = """
INSERT INTO casemate_leases (name, holder, until)
VALUES (:name, :holder, {now} + CAST(:seconds AS double precision))
ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, until = excluded.until
WHERE casemate_leases.holder = excluded.holder OR casemate_leases.until <= {now}
"""
RELEASE = "DELETE FROM casemate_leases WHERE name = :name AND holder = :holder"


def require_valid(name: str, holder: str, seconds: float) -> None:
    """Validates the arguments of a lease; errors as for ``SqlEventStore.lease``."""
    require_name("a lease's name", name)
    require_name("a lease's holder", holder)
    if not seconds > 0:
        raise ValueError(f"a lease lasts more than 0 seconds; got {seconds}")


def acquire(connection: Connection, name: str, holder: str, seconds: float) -> bool:
    """Acquires or renews a lease. Returns whether this holder has it now."""
    from sqlalchemy import text

    statement = text(ACQUIRE.format(now=NOW[connection.dialect.name]))
    done = connection.execute(statement, {"name": name, "holder": holder, "seconds": seconds})
    return done.rowcount == 1


def release(connection: Connection, name: str, holder: str) -> None:
    """Ends the lease if this holder has it."""
    from sqlalchemy import text

    connection.execute(text(RELEASE), {"name": name, "holder": holder})
