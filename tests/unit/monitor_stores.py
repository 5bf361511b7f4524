"""Fresh event stores of both kinds."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.fakes import Memory


def fresh_url(request: pytest.FixtureRequest, tmp_path) -> Iterator[str]:
    """The URL of an empty database, in a folder yet to be made: ``request.param`` is sqlite or postgres."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/new/events.db"
        return
    import psycopg

    server, name = request.getfixturevalue("postgres_url"), f"t{uuid.uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield server.replace("/postgres?", f"/{name}?")
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@dataclass
class Kept(Memory):
    """A store in memory that keeps each id once and filters by time, as the real one does."""

    def append(self, event):
        if all(e.id != event.id for e in self.events):
            self.events.append(event)

    def scan(self, kind=None, since=None):
        return [e for e in super().scan(kind) if since is None or e.at >= since]
