"""Converts events to rows and back, and defines the tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from casemate.types import Event

if TYPE_CHECKING:
    from sqlalchemy import Table

EventRow: TypeAlias = dict[str, Any]

PARSED_TOGETHER = 1000  # bodies per JSON parse


def events_table() -> Table:
    """The events table. Its metadata is the newest schema that the migrations create."""
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
        "casemate_quotas",
        schema,
        Column("name", Text, primary_key=True),
        Column("period", Text),
        Column("used", Double),
        Column("granted", Double),
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


def encode_event(event: Event) -> EventRow:
    """An event as a row; errors as for ``SqlEventStore.append``."""
    for name, value in (("id", event.id), ("kind", event.kind)):
        require_name(f"an event's {name}", value)
    return {"id": event.id, "at": utc(event.at, "at"), "kind": event.kind, "body": _json(event)}


def require_name(what: str, value: str) -> None:
    """Validates a name: the database would refuse it later, and block the events queued behind it.

    Raises:
        ValueError: If it is not 1 to 200 printable characters.
    """
    if not (0 < len(value) <= 200 and value.isprintable()):
        raise ValueError(f"{what} must be 1 to 200 printable characters; got {value[:200]!r}")


def utc(at: datetime, name: str) -> datetime:
    """A time in UTC.

    Raises:
        ValueError: If it has no time zone.
    """
    if at.utcoffset() is None:
        raise ValueError(f"{name!r} has no time zone: {at.isoformat()}; use datetime.now(UTC)")
    return at.astimezone(UTC)


def decode_events(rows: Sequence[Any]) -> list[Event]:
    """Events from rows (id, time, kind, body as JSON, ...).

    Parses many bodies at once: one by one takes twice as long.
    """
    events = []
    for start in range(0, len(rows), PARSED_TOGETHER):
        batch = rows[start : start + PARSED_TOGETHER]
        bodies = json.loads(f"[{','.join([row[3] for row in batch])}]")
        events += [Event(r[0], _aware(r[1]), r[2], body) for r, body in zip(batch, bodies, strict=True)]
    return events


def _aware(at: datetime) -> datetime:
    """A time from the database in UTC: SQLite returns it without a zone, Postgres in the session's zone."""
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
