"""How a verdict goes into the event store: in one form, whichever part of the system reached it."""

from __future__ import annotations

import logging
import uuid
from dataclasses import fields
from datetime import UTC, datetime

from casemate.protocols import EventStore
from casemate.types import Event, Query, Verdict

FIELDS = tuple(field.name for field in fields(Verdict))
log = logging.getLogger(__name__)


def note(store: EventStore | None, query: Query, verdict: Verdict, log_text: bool = False) -> None:
    """Hands a verdict to the store, which writes it off the request's path. A failure is logged, and costs no answer.

    Args:
        store: The record; None: nothing is noted.
        query: What it is about.
        verdict: What was decided.
        log_text: Whether the text of the query is noted beside it.
    """
    if store is None:
        return
    body = {name: getattr(verdict, name) for name in FIELDS}
    body |= {"request": query.id, "client": query.client, "tenant": query.tenant, "k": query.k}
    body |= {"text": query.text} if log_text else {}
    try:
        store.append(Event(uuid.uuid4().hex, datetime.now(UTC), "verdict", body))
    except Exception as error:  # a record that cannot be kept must not cost anybody an answer
        log.error("the verdict of %s was not noted: %s", verdict.defense, type(error).__name__)
