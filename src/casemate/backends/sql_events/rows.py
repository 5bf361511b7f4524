"""Events as rows: the table, what is written of an event, and what is refused before others wait behind it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from casemate.types import Event

if TYPE_CHECKING:
    from sqlalchemy import Table

Row: TypeAlias = dict[str, Any]

TOGETHER = 1000
"""Bodies that are read in one go."""


def table() -> Table:
    """The events; its metadata is the newest schema, as ``casemate.migrations`` makes it."""
    from sqlalchemy import JSON, BigInteger, Column, DateTime, Double, MetaData, Table, Text

    schema = MetaData()
    Table(
        "casemate_leases",
        schema,
        Column("name", Text, primary_key=True),
        Column("holder", Text),
        Column("until", Double),
    )
    Table(
        "casemate_tallies",
        schema,
        Column("name", Text, primary_key=True),
        Column("period", Text),
        Column("used", Double),
        Column("given", Double),
        Column("at", Double),
    )
    return Table(
        "casemate_events",
        schema,
        Column("seq", BigInteger, primary_key=True),
        Column("id", Text),
        Column("at", DateTime(timezone=True)),
        Column("kind", Text),
        Column("body", JSON),
    )


def row_of(event: Event) -> Row:
    """What is written of an event.

    Raises:
        ValueError: If the time has no zone, or id or kind are not 1 to 200 printable characters.
        TypeError: If the body cannot be written as JSON; the message names the key.
    """
    for name, value in (("id", event.id), ("kind", event.kind)):
        require_name(f"an event's {name}", value)
    return {"id": event.id, "at": utc(event.at, "at"), "kind": event.kind, "body": _json(event)}


def require_name(what: str, value: str) -> None:
    """Refuses what is no name: it would be refused by the database, and hold up what waits behind it.

    Raises:
        ValueError: If it is not 1 to 200 printable characters.
    """
    if not (0 < len(value) <= 200 and value.isprintable()):
        raise ValueError(f"{what} must be 1 to 200 printable characters; got {value[:200]!r}")


def utc(at: datetime, name: str) -> datetime:
    """A time with a zone, in UTC.

    Raises:
        ValueError: If it has no zone.
    """
    if at.utcoffset() is None:
        raise ValueError(f"{name!r} has no time zone: {at.isoformat()}; use datetime.now(UTC)")
    return at.astimezone(UTC)


def events_of(rows: Sequence[Any]) -> list[Event]:
    """The events of some rows, each an id, a time, a kind and a body as it is written; what follows is left alone.

    Many bodies are read in one go: one by one takes twice as long.
    """
    found = []
    for start in range(0, len(rows), TOGETHER):
        piece = rows[start : start + TOGETHER]
        bodies = json.loads(f"[{','.join([row[3] for row in piece])}]")
        found += [Event(r[0], _aware(r[1]), r[2], body) for r, body in zip(piece, bodies, strict=True)]
    return found


def _aware(at: datetime) -> datetime:
    """A time read from the database: SQLite keeps UTC without saying so, Postgres answers in the session's zone."""
    return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)


def _json(event: Event) -> str:
    try:
        return json.dumps(dict(event.body), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        keys = [key for key, value in event.body.items() if not (isinstance(key, str) and _is_json(value))]
        raise TypeError(f"event {event.id!r}: cannot write the body's {keys} as JSON: {error}") from error


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
