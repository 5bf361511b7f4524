"""Appends verdicts to the event store: in one format, whichever component decided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace

from casemate.protocols import EventStore, Target
from casemate.runtime.events import append_or_log
from casemate.types import Answer, Query, Verdict

FIELDS = tuple(field.name for field in fields(Verdict))
_COLLECTED: ContextVar[list[Verdict] | None] = ContextVar("casemate_verdicts", default=None)


@contextmanager
def collect_verdicts() -> Iterator[list[Verdict]]:
    """Collects the verdicts of the block, also those about an answer while it is written."""
    found = list[Verdict]()
    token = _COLLECTED.set(found)
    try:
        yield found
    finally:
        _COLLECTED.reset(token)


async def ask(target: Target, query: Query) -> Answer:
    """Answers a query; the verdicts include those about the answer, such as that a limit cut it."""
    with collect_verdicts() as found:
        answer = await target.ask(query)
    return replace(answer, verdicts=(*answer.verdicts, *(v for v in found if v not in answer.verdicts)))


def append(store: EventStore | None, query: Query, verdict: Verdict, log_text: bool = False) -> None:
    """Appends a verdict; the store writes it asynchronously. A failure is logged and does not cost the answer.

    Args:
        store: The event store; None: verdicts are not logged.
        query: The query that the verdict is about.
        verdict: The verdict.
        log_text: Whether to include the text of the query.
    """
    if (collected := _COLLECTED.get()) is not None:
        collected.append(verdict)
    if store is None:
        return
    body = {name: getattr(verdict, name) for name in FIELDS}
    body |= {"request": query.id, "client": query.client, "tenant": query.tenant, "k": query.k}
    body |= {"text": query.text} if log_text else {}
    append_or_log(store, "verdict", body, f"a verdict of {verdict.defense}")
