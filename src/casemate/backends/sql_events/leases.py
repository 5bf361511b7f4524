"""A lease: one row says who may do a thing, and until when.

Each call is one statement, so that of any number of processes one at most is told yes. Time is the database's own: a
process whose clock is wrong neither keeps a lease for longer nor loses it earlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from casemate.backends.sql_events.rows import require_name

if TYPE_CHECKING:
    from sqlalchemy import Connection

NOW = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400",
    "postgresql": "extract(epoch from clock_timestamp())",  # now() would stand still while the row is locked
}
"""Seconds since 1970 as the database sees them; SQLite's to a millisecond."""
TAKE = """
INSERT INTO casemate_leases (name, holder, until)
VALUES (:name, :holder, {now} + CAST(:seconds AS double precision))
ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, until = excluded.until
WHERE casemate_leases.holder = excluded.holder OR casemate_leases.until <= {now}
"""
GIVE_BACK = "DELETE FROM casemate_leases WHERE name = :name AND holder = :holder"


def check(name: str, holder: str, seconds: float) -> None:
    """Refuses what is no lease.

    Raises:
        ValueError: If the time is not above 0, or name or holder are not 1 to 200 printable characters.
    """
    require_name("a lease's name", name)
    require_name("a lease's holder", holder)
    if not seconds > 0:
        raise ValueError(f"a lease is held for more than 0 seconds; got {seconds}")


def take(connection: Connection, name: str, holder: str, seconds: float) -> bool:
    """Takes the lease if nobody else holds it, or renews it; whether it is held now."""
    from sqlalchemy import text

    statement = text(TAKE.format(now=NOW[connection.dialect.name]))
    done = connection.execute(statement, {"name": name, "holder": holder, "seconds": seconds})
    return done.rowcount == 1


def give_back(connection: Connection, name: str, holder: str) -> None:
    """Ends the lease, if this holder has it."""
    from sqlalchemy import text

    connection.execute(text(GIVE_BACK), {"name": name, "holder": holder})
