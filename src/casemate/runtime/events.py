"""Ways to append to the event store: wait until events are durable, or log a failure. Digests for ids of events."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from casemate.errors import BackendError
from casemate.protocols import EventStore
from casemate.types import Event

log = logging.getLogger(__name__)


def append_durably(
    store: EventStore, events: Iterable[Event], what: str, remedy: str = "check the store and try again"
) -> None:
    """Appends events and waits until they are durable.

    Raises:
        BackendError: If the store does not confirm the write in time.
    """
    for event in events:
        store.append(event)
    if not store.flush():
        raise BackendError(f"the event store did not confirm {what}; {remedy}", backend="store", retryable=True)


def append_or_log(store: EventStore | None, kind: str, body: Mapping[str, Any], what: str) -> None:
    """Appends an event, which the store writes asynchronously. A failure is logged and does not cost the answer."""
    try:
        if store is not None:
            store.append(Event(uuid.uuid4().hex, datetime.now(UTC), kind, body))
    except Exception as error:
        log.error("%s was not appended to the event store: %s", what, type(error).__name__)


def digest(*parts: str, length: int = 16) -> str:
    """SHA-256 of some texts, shortened, in hexadecimal."""
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:length]
