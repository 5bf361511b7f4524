"""A tally: one row says how much of a shared allowance is used.

Each taking is one statement, so whoever takes at the same time, in however many processes, the sum of what is given
never exceeds the allowance. Time is the database's own. A row that somebody waits for keeps the later of two times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from casemate.backends.sql_events.leases import NOW
from casemate.backends.sql_events.rows import require_name
from casemate.types import Given, Wanted

if TYPE_CHECKING:
    from sqlalchemy import Connection, TextClause

LEAST = {"sqlite": ("min", "max", "CAST({} AS INTEGER)"), "postgresql": ("least", "greatest", "floor({})")}
"""How either database calls the smaller, the larger, and the whole part of a number that is not negative."""
NUMBER = "CAST(:{} AS double precision)"
USED = """CASE WHEN t.period = excluded.period
THEN {max}(0.0, t.used - {max}(0.0, excluded.at - t.at) * {rate}) ELSE 0.0 END"""
GIVEN = """CASE WHEN {amount} < 0 THEN {max}({amount}, -({used}))
ELSE {max}(0.0, {min}({amount}, {whole})) END"""
TAKE = """
INSERT INTO casemate_tallies AS t (name, period, used, given, at)
VALUES (:name, :period, {first}, {first}, {now})
ON CONFLICT (name) DO UPDATE SET
period = excluded.period, used = {used} + {given}, given = {given}, at = {max}(t.at, excluded.at)
RETURNING given, used
"""


def check(wanted: Wanted) -> None:
    """Refuses what is no tally.

    Raises:
        ValueError: If its name or period are not 1 to 200 printable characters, or a figure is below 0.
    """
    require_name("a tally's name", wanted.name)
    require_name("a tally's period", wanted.period)
    if not (wanted.most >= 0 and wanted.per_s >= 0):
        raise ValueError(f"an allowance is at least 0; got {wanted}")


def take(connection: Connection, wanted: Sequence[Wanted]) -> list[Given]:
    """What is given of each, in one transaction. Rows are locked in the order of their names, so never in a ring."""
    statement = _statement(connection.dialect.name)
    found = dict[int, Given]()
    for at in sorted(range(len(wanted)), key=lambda i: wanted[i].name):
        w = wanted[at]
        values = {"name": w.name, "period": w.period, "amount": w.amount, "most": w.most, "per_s": w.per_s}
        amount, used = connection.execute(statement, values).one()
        found[at] = Given(int(amount), float(used))
    return [found[i] for i in range(len(wanted))]


@cache
def _statement(dialect: str) -> TextClause:
    from sqlalchemy import text

    least, most, whole = LEAST[dialect]
    amount, limit, rate = (NUMBER.format(name) for name in ("amount", "most", "per_s"))
    used = USED.format(max=most, rate=rate)
    room = whole.format(f"{most}(0.0, {limit} - ({used}))")
    given = GIVEN.format(max=most, min=least, amount=amount, used=used, whole=room)
    first = f"{most}(0.0, {least}({amount}, {whole.format(limit)}))"
    return text(TAKE.format(first=first, now=NOW[dialect], used=used, given=given, max=most))
