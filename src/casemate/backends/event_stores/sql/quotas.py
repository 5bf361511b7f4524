"""Quotas shared between processes: one row per quota, with the amount used.

Each request is one statement, so concurrent requests never get more than the limit in total. The database's clock
decides. A statement that waited for the row lock keeps the later of the two times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from casemate.backends.event_stores.sql.event_rows import require_name
from casemate.backends.event_stores.sql.leases import NOW
from casemate.types import QuotaGrant, QuotaRequest

if TYPE_CHECKING:
    from sqlalchemy import Connection, TextClause

FUNCTIONS = {"sqlite": ("min", "max", "CAST({} AS INTEGER)"), "postgresql": ("least", "greatest", "floor({})")}
"""Minimum, maximum, and floor of a non-negative number, per dialect."""
NUMBER = "CAST(:{} AS double precision)"
USED = """CASE WHEN t.period = excluded.period
THEN {max}(0.0, t.used - {max}(0.0, excluded.at - t.at) * {rate}) ELSE 0.0 END"""
GRANTED = """CASE WHEN {amount} < 0 THEN {max}({amount}, -({used}))
ELSE {max}(0.0, {min}({amount}, {whole})) END"""
CONSUME = """
INSERT INTO casemate_quotas AS t (name, period, used, granted, at)
VALUES (:name, :period, {first}, {first}, {now})
ON CONFLICT (name) DO UPDATE SET
period = excluded.period, used = {used} + {granted}, granted = {granted}, at = {max}(t.at, excluded.at)
RETURNING granted, used
"""
DISCARD = "DELETE FROM casemate_quotas WHERE name = :name"
USAGE = {
    "sqlite": "SELECT name, used FROM casemate_quotas WHERE name >= :prefix AND name < :prefix || char(1114111)",
    "postgresql": "SELECT name, used FROM casemate_quotas WHERE substr(name, 1, length(:prefix)) = :prefix",
}
"""Quotas whose names begin with a prefix, per dialect. SQLite compares bytes, so its primary key finds the range. The
order of names in PostgreSQL depends on its locale, so there all rows are read."""


def require_valid(request: QuotaRequest) -> None:
    """Validates a quota request; errors as for ``SqlEventStore.acquire``."""
    require_name("a quota's name", request.name)
    require_name("a quota's period", request.period)
    if not (request.most >= 0 and request.per_s >= 0):
        raise ValueError(f"limit and rate of a quota must be at least 0; got {request}")


def consume(connection: Connection, requests: Sequence[QuotaRequest]) -> list[QuotaGrant]:
    """Grants requests in one transaction. Rows are locked in order of their names, which prevents deadlocks."""
    statement = _statement(connection.dialect.name)
    grants = dict[int, QuotaGrant]()
    for at in sorted(range(len(requests)), key=lambda i: requests[i].name):
        r = requests[at]
        values = {"name": r.name, "period": r.period, "amount": r.amount, "most": r.most, "per_s": r.per_s}
        amount, used = connection.execute(statement, values).one()
        grants[at] = QuotaGrant(int(amount), float(used))
    return [grants[i] for i in range(len(requests))]


@cache
def _statement(dialect: str) -> TextClause:
    from sqlalchemy import text

    least, most, whole = FUNCTIONS[dialect]
    amount, limit, rate = (NUMBER.format(name) for name in ("amount", "most", "per_s"))
    used = USED.format(max=most, rate=rate)
    room = whole.format(f"{most}(0.0, {limit} - ({used}))")
    granted = GRANTED.format(max=most, min=least, amount=amount, used=used, whole=room)
    first = f"{most}(0.0, {least}({amount}, {whole.format(limit)}))"
    return text(CONSUME.format(first=first, now=NOW[dialect], used=used, granted=granted, max=most))
