"""Appends verdicts to the event store: in one format, whichever component decided."""

from __future__ import annotations

from dataclasses import fields

from casemate.protocols import EventStore
from casemate.runtime.events import append_or_log
from casemate.types import Query, Verdict

FIELDS = tuple(field.name for field in fields(Verdict))


def append(store: EventStore | None, query: Query, verdict: Verdict, log_text: bool = False) -> None:
    """Appends a verdict; the store writes it asynchronously. A failure is logged and does not cost the answer.

    Args:
        store: The event store; None: verdicts are not logged.
        query: The query that the verdict is about.
        verdict: The verdict.
        log_text: Whether to include the text of the query.
    """
    if store is None:
        return
    body = {name: getattr(verdict, name) for name in FIELDS}
    body |= {"request": query.id, "client": query.client, "tenant": query.tenant, "k": query.k}
    body |= {"text": query.text} if log_text else {}
    append_or_log(store, "verdict", body, f"a verdict of {verdict.defense}")
