"""Resets a client or a tenant: discards withheld documents and evidence, in every process on the event store."""

from __future__ import annotations

from datetime import datetime

from casemate.guard.client_state import crawl_evidence, withheld_documents
from casemate.guard.client_state.feed import RESET, ClientEventFeed
from casemate.guard.client_state.word_quotas import reset_quota
from casemate.protocols import EventStore
from casemate.runtime.events import append_durably
from casemate.types import Event

KINDS = (withheld_documents.KIND, crawl_evidence.KIND)
"""Kinds of events that contain client state."""


def reset_of(event: Event) -> tuple[tuple[str, str], datetime] | None:
    """Tenant and client that an event of `KINDS` resets, and when; None if it resets none."""
    body = event.body
    return ((str(body.get("tenant")), str(body.get("client"))), event.at) if body.get(RESET) else None


def reset_client(store: EventStore, tenant: str, client: str) -> None:
    """Discards the state of one client. Evidence about the tenant's clients together remains.

    Raises:
        BackendError: If the reset could not be written.
    """
    reset_quota(store, tenant, client)
    for kind in KINDS:
        ClientEventFeed(store, kind, 0.0, lambda *_: None).publish(tenant, client, {RESET: True})
    append_durably(store, (), "the reset")


def reset_tenant(store: EventStore, tenant: str) -> None:
    """Discards the evidence about the clients of a tenant together. The evidence against single clients remains.

    Raises:
        BackendError: If the reset could not be written.
    """
    feed = ClientEventFeed(store, crawl_evidence.KIND, 0.0, lambda *_: None)
    feed.publish(tenant, "", {crawl_evidence.TENANT_RESET: True})
    append_durably(store, (), "the reset")
