"""Event stores for tests: fresh databases, and one in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.fakes import Memory
from tests.postgres import database


def fresh_url(request: pytest.FixtureRequest, tmp_path) -> Iterator[str]:
    """URL of an empty database; ``request.param`` is sqlite or postgres."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/new/events.db"
        return
    with database(request.getfixturevalue("postgres_url")) as url:
        yield url


@dataclass
class InMemoryEventStore(Memory):
    """An event store in memory. Like the real one, it keeps each id once and filters by time."""

    def append(self, event):
        if all(e.id != event.id for e in self.events):
            self.events.append(event)

    def scan(self, kind=None, since=None):
        return [e for e in super().scan(kind) if since is None or e.at >= since]
