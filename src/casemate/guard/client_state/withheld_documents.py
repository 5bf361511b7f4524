"""Remembers sources per client: documents withheld from the client, and the evidence accumulated about them.

The state is bounded, in memory and in the event store. It survives restarts, and every other process on the store reads
it before it judges.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from casemate.guard.client_state.feed import RESET, ClientEventFeed
from casemate.protocols import EventStore
from casemate.runtime.bounded_dict import BoundedDict

KIND = "session"
"""Kind of the events."""
MAX_CLIENTS, MAX_SOURCES = 10_000, 200
"""Clients remembered, and sources per client; the least recently used are forgotten first."""


@dataclass(slots=True)
class _ClientSources:
    expiry: BoundedDict[str, float] = field(default_factory=lambda: BoundedDict(MAX_SOURCES))
    """Source -> time at which it expires."""
    evidence: BoundedDict[str, float] = field(default_factory=lambda: BoundedDict(MAX_SOURCES))


class ClientSources:
    """Sources remembered per client for a limited time.

    Args:
        defense: Name of the defense, as in its verdicts.
        seconds: How long a source is remembered; 0: within one answer only, and nothing is shared.
        store: The shared event store; None: in memory only.
    """

    def __init__(self, defense: str, seconds: float, store: EventStore | None = None) -> None:
        self._defense, self._seconds = defense, seconds
        self._clients: BoundedDict[tuple[str, str], _ClientSources] = BoundedDict(MAX_CLIENTS)
        self._lock = threading.Lock()
        self._feed = ClientEventFeed(store if seconds else None, KIND, seconds, self._apply)
        self.sync = self._feed.poll

    def sources(self, tenant: str, client: str) -> frozenset[str]:
        """Returns the sources that have not expired."""
        with self._lock:
            state = self._clients.get(key_of(tenant, client))
            if state is None:
                return frozenset()
            self._clients.move_to_end(key_of(tenant, client))
            now = time.time()
            for source in [s for s, until in state.expiry.items() if until <= now]:
                del state.expiry[source]
            return frozenset(state.expiry)

    def add(self, tenant: str, client: str, source: str) -> None:
        """Remembers a source from now on."""
        self._add_until(tenant, client, source, time.time() + self._seconds)
        self._publish(tenant, client, {"barred": [source]})

    def _add_until(self, tenant: str, client: str, source: str, until: float) -> None:
        with self._lock:
            expiry = self._state(tenant, client).expiry
            expiry[source] = max(until, expiry.get(source, 0.0))

    def _state(self, tenant: str, client: str) -> _ClientSources:
        """Returns the state to change. Reading creates none, so that questions alone displace no client."""
        key = key_of(tenant, client)
        state = self._clients[key] = self._clients.get(key) or _ClientSources()
        return state

    def _publish(self, tenant: str, client: str, body: Mapping[str, Any]) -> None:
        self._feed.publish(tenant, client, {"defense": self._defense, **body})

    def _apply(self, tenant: str, client: str, body: Mapping[str, Any], at: float) -> None:
        """Applies an event of another process."""
        if body.get(RESET):
            with self._lock:
                self._clients.pop(key_of(tenant, client), None)
        elif body.get("defense") == self._defense:
            for source in body.get("barred", ()):
                self._add_until(tenant, client, str(source), at + self._seconds)
            self._apply_evidence(tenant, client, body.get("evidence", {}))

    def _apply_evidence(self, tenant: str, client: str, evidence: Mapping[str, Any]) -> None:
        """Applies the evidence of another process; none here."""


class WithheldDocuments(ClientSources):
    """Sources withheld from each client, and the sequential evidence about sources that are not yet withheld."""

    def evidence(self, tenant: str, client: str, source: str) -> float:
        """Returns the evidence that a client targets a source; 1 at first."""
        with self._lock:
            state = self._clients.get(key_of(tenant, client))
            return state.evidence.get(source, 1.0) if state else 1.0

    def add_evidence(self, tenant: str, client: str, source: str, e_value: float) -> None:
        """Multiplies the evidence by the e-value of one more question.

        This is a CUSUM of e-values (Shin et al. 2022). It restarts at 1. In the long run it reaches 1 / alarm in at
        most one of 1 / alarm benign questions. Each process multiplies its own e-values at once, others on arrival.
        """
        if self._multiply(tenant, client, source, e_value):
            self._publish(tenant, client, {"evidence": {source: e_value}})

    def _multiply(self, tenant: str, client: str, source: str, e_value: float) -> bool:
        """Updates the evidence; returns whether it changed."""
        with self._lock:
            state = self._clients.get(key_of(tenant, client))
            before = state.evidence.get(source, 1.0) if state else 1.0
            if e_value * before > 1:
                self._state(tenant, client).evidence[source] = e_value * before
            elif state:
                state.evidence.pop(source, None)
            return max(1.0, e_value * before) != before

    def _apply_evidence(self, tenant: str, client: str, evidence: Mapping[str, Any]) -> None:
        for source, e_value in evidence.items():
            self._multiply(tenant, client, str(source), float(e_value))


class SeenRequests:
    """Recognizes repeated requests: the guard runs all defenses again when one of them needs more hits."""

    def __init__(self) -> None:
        self._seen: BoundedDict[str, None] = BoundedDict(MAX_CLIENTS)
        self._lock = threading.Lock()

    def is_first(self, request: str) -> bool:
        """Whether a request was not seen before; from now on it was."""
        with self._lock:
            if request in self._seen:
                return False
            self._seen[request] = None
            return True


def key_of(tenant: str, client: str) -> tuple[str, str]:
    """Returns the key of a client's state, with long names hashed to bound the memory."""
    if len(client) <= 64:
        return tenant, client
    return tenant, "sha256:" + hashlib.sha256(client.encode(errors="surrogatepass")).hexdigest()
