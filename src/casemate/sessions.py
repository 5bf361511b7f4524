"""What a defense remembers of each client: which documents are withheld from him, and what evidence has added up.

Kept in memory, bounded; what was withheld comes back after a restart from the record of verdicts.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from casemate.protocols import EventStore

CLIENTS, SOURCES = 10_000, 200
"""How many clients are remembered, and how many documents of each; the longest unheard of are forgotten first."""


@dataclass(slots=True)
class _Client:
    bars: OrderedDict[str, float] = field(default_factory=OrderedDict)  # source -> until when
    evidence: OrderedDict[str, float] = field(default_factory=OrderedDict)


class Sessions:
    """The memory of one defense.

    Args:
        defense: Its name, as in the record.
        seconds: How long a document stays withheld from a client; 0: only in the answer at hand.
        store: The record of verdicts; None: nothing is remembered over a restart.
    """

    def __init__(self, defense: str, seconds: float, store: EventStore | None = None) -> None:
        self._defense, self._seconds, self._store = defense, seconds, store
        self._clients: OrderedDict[tuple[str, str], _Client] = OrderedDict()
        self._lock = threading.Lock()
        self._recalled = store is None or not seconds

    def barred(self, tenant: str, client: str) -> frozenset[str]:
        """Sources that are withheld from a client now."""
        with self._lock:
            if not self._recalled:
                self._recall()
                self._recalled = True  # not before: a store that fails is asked again
            found = self._clients.get(key_of(tenant, client))
            if found is None:
                return frozenset()
            self._clients.move_to_end(key_of(tenant, client))
            now = time.time()
            for source in [s for s, until in found.bars.items() if until <= now]:
                del found.bars[source]
            return frozenset(found.bars)

    def bar(self, tenant: str, client: str, source: str) -> None:
        """Withholds a source from a client from now on, for the time of a session."""
        with self._lock:
            _put(self._client(tenant, client).bars, source, time.time() + self._seconds)

    def evidence(self, tenant: str, client: str, source: str) -> float:
        """What has added up against a client about a source; 1 at first."""
        with self._lock:
            found = self._clients.get(key_of(tenant, client))
            return found.evidence.get(source, 1.0) if found else 1.0

    def add(self, tenant: str, client: str, source: str, e_value: float) -> None:
        """Multiplies the evidence by that of one more question.

        The CUSUM of e-values: at 1 or below it begins anew, and it reaches 1 / alarm in one of 1 / alarm harmless
        questions at most, in the long run (Shin et al. 2022).
        """
        with self._lock:
            found = self._clients.get(key_of(tenant, client))
            total = e_value * (found.evidence.get(source, 1.0) if found else 1.0)
            if total > 1:
                _put(self._client(tenant, client).evidence, source, total)
            elif found:
                found.evidence.pop(source, None)

    def _client(self, tenant: str, client: str) -> _Client:
        """A client of whom there is something to remember: whoever only asks displaces nobody."""
        key = key_of(tenant, client)
        found = self._clients.setdefault(key, _Client())
        self._clients.move_to_end(key)
        if len(self._clients) > CLIENTS:
            self._clients.popitem(last=False)
        return found

    def _recall(self) -> None:
        for tenant, client, source, at in self._recorded():
            _put(self._client(tenant, client).bars, source, at + self._seconds)

    def _recorded(self) -> Iterator[tuple[str, str, str, float]]:
        assert self._store is not None
        since = datetime.fromtimestamp(time.time() - self._seconds, UTC)
        for event in self._store.scan("verdict", since):
            body = event.body
            if body.get("defense") == self._defense and body.get("enforced"):
                for source in body.get("evidence", {}).get("flagged", ()):
                    yield str(body.get("tenant")), str(body.get("client")), str(source), event.at.timestamp()


class Once:
    """Tells requests that are looked at again: the guard asks all defenses anew when one of them wants more hits."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def first(self, request: str) -> bool:
        """Whether a request comes for the first time."""
        with self._lock:
            if request in self._seen:
                return False
            self._seen[request] = None
            if len(self._seen) > CLIENTS:
                self._seen.popitem(last=False)
            return True


def key_of(tenant: str, client: str) -> tuple[str, str]:
    """Names of any length in little memory."""
    if len(client) <= 64:
        return tenant, client
    return tenant, "sha256:" + hashlib.sha256(client.encode(errors="surrogatepass")).hexdigest()


def _put(held: OrderedDict[str, float], source: str, value: float) -> None:
    held[source] = value
    held.move_to_end(source)
    if len(held) > SOURCES:
        held.popitem(last=False)
