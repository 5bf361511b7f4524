"""Shares client state among the processes on one event store: written when it changes, read before each judgment.

A judgment therefore includes everything written before the question arrived, by any process, and after a restart.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from time import monotonic
from typing import Any, TypeAlias

from casemate.protocols import EventStore
from casemate.types import Event

RESET = "forgiven"
"""Key in the body of an event that discards the state of a client."""
MAX_HOURS = 876_000
"""Longest time that clients are remembered: a hundred years. A longer one begins before the year 1."""
_ARRIVAL: ContextVar[float] = ContextVar("casemate-question-arrival")
"""Arrival of the question that is judged, by the monotonic clock; not set outside ``question_arrived``."""
Apply: TypeAlias = Callable[[str, str, Mapping[str, Any], float], None]
"""Applies an event: tenant, client, body, and time in seconds since 1970."""


@contextmanager
def question_arrived() -> Iterator[None]:
    """Lets polls in the block share any poll that starts after now: questions in progress need one for all of them."""
    token = _ARRIVAL.set(monotonic())
    try:
        yield
    finally:
        _ARRIVAL.reset(token)


class ClientEventFeed:
    """Publishes and polls the client events of one kind.

    Args:
        store: The shared event store; None: no sharing.
        kind: Of the events.
        seconds: Maximum age of an event.
        apply: Applies the events of other processes.
    """

    def __init__(self, store: EventStore | None, kind: str, seconds: float, apply: Apply) -> None:
        self._store, self._kind, self._seconds, self._apply = store, kind, seconds, apply
        self._process, self._position = uuid.uuid4().hex, 0
        self._lock = threading.Lock()
        self._started, self._read_at = 0, -math.inf  # number of polls, and start of the last one that succeeded
        self._failed: tuple[int, Exception] = 0, Exception()  # number and error of the last failed poll

    def poll(self) -> None:
        """Applies the events that other processes wrote, and on the first call those from before a restart. Blocks.

        Concurrent calls are coalesced. A call does nothing if a poll that started after the call, or after its question
        arrived, has succeeded. Calls that arrive during a poll share the failure of the next one.

        Raises:
            BackendError: If the store cannot be read; the next call reads the missed events.
        """
        if self._store is None:
            return
        started, called = self._started, monotonic()
        with self._lock:
            if self._read_at > _ARRIVAL.get(called):
                return
            if self._failed[0] > started:  # it has failed: do not query an unreachable store once per caller
                raise self._failed[1]
            self._started += 1
            now = monotonic()
            try:
                self._read(self._store)
            except Exception as error:
                self._failed = self._started, error
                raise
            self._read_at = now

    def publish(self, tenant: str, client: str, body: Mapping[str, Any]) -> None:
        """Appends an event. The store writes it asynchronously."""
        if self._store is not None:
            whole = {"process": self._process, "tenant": tenant, "client": client, **body}
            at = datetime.fromtimestamp(time.time(), UTC)
            self._store.append(Event(uuid.uuid4().hex, at, self._kind, whole))

    def _read(self, store: EventStore) -> None:
        since = datetime.fromtimestamp(time.time() - self._seconds, UTC)
        events, position = store.read_since(self._kind, self._position, since)
        for event in (e for e in events if e.body.get("process") != self._process):
            body = event.body
            self._apply(str(body.get("tenant")), str(body.get("client")), body, event.at.timestamp())
        self._position = position  # last, so that a failed poll is repeated
