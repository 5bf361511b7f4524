"""What processes on one event store tell one another about clients: written when it happens, read before judging.

So whoever judges knows all that was written when the question came, by whichever process, and after a restart.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeAlias

from casemate.events import EventStore
from casemate.types import Event

FORGIVEN = "forgiven"
"""In the body of news: what was known of the client counts no more."""
Take: TypeAlias = Callable[[str, str, Mapping[str, Any], float], None]


class News:
    """News of one kind, by tenant and client.

    Args:
        store: Where they are; None: nobody is told, and nobody tells.
        kind: Of the events.
        seconds: How old they may be.
        take: Gets what others told: tenant, client, what, and when, in seconds since 1970.
    """

    def __init__(self, store: EventStore | None, kind: str, seconds: float, take: Take) -> None:
        self._store, self._kind, self._seconds, self._take = store, kind, seconds, take
        self._process, self._place = uuid.uuid4().hex, 0
        self._lock = threading.Lock()
        self._begun, self._read_through = 0, 0  # numbers of readings
        self._failed: tuple[int, Exception] = 0, Exception()  # the last that did, and why

    def follow(self) -> None:
        """Takes in what others wrote by now, or this process before a restart. Blocks.

        Raises:
            BackendError: If the store cannot be read; what was missed comes the next time.
        """
        if self._store is None:
            return
        begun = self._begun
        with self._lock:
            if self._read_through > begun:  # somebody else's reading began after this call, and went well
                return
            if self._failed[0] > begun:  # or failed: a store that is away is not asked by one after the other
                raise self._failed[1]
            self._begun += 1
            try:
                self._read(self._store)
            except Exception as error:
                self._failed = self._begun, error
                raise
            self._read_through = self._begun

    def tell(self, tenant: str, client: str, what: Mapping[str, Any]) -> None:
        """Writes something down. The store takes a moment."""
        if self._store is not None:
            body = {"process": self._process, "tenant": tenant, "client": client, **what}
            at = datetime.fromtimestamp(time.time(), UTC)
            self._store.append(Event(uuid.uuid4().hex, at, self._kind, body))

    def _read(self, store: EventStore) -> None:
        since = datetime.fromtimestamp(time.time() - self._seconds, UTC)
        events, place = store.follow(self._kind, self._place, since)
        for event in (e for e in events if e.body.get("process") != self._process):
            body = event.body
            self._take(str(body.get("tenant")), str(body.get("client")), body, event.at.timestamp())
        self._place = place  # not before: a store that fails is asked again
