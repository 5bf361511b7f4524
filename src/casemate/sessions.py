"""What a defense remembers of each client: which documents are withheld from him, and what evidence has added up.

Kept in memory, bounded, and in the event store: from there it comes back after a restart, and is known to every other
process on the store that follows before it judges.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from casemate.events import EventStore
from casemate.news import FORGIVEN, News

KIND = "session"
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
        seconds: How long a document stays withheld from a client; 0: only in the answer at hand, and nothing is shared.
        store: Where it is kept; None: in memory only.
    """

    def __init__(self, defense: str, seconds: float, store: EventStore | None = None) -> None:
        self._defense, self._seconds = defense, seconds
        self._clients: OrderedDict[tuple[str, str], _Client] = OrderedDict()
        self._lock = threading.Lock()
        self._news = News(store if seconds else None, KIND, seconds, self._take)
        self.follow = self._news.follow

    def barred(self, tenant: str, client: str) -> frozenset[str]:
        """Sources that are withheld from a client now."""
        with self._lock:
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
        self._bar(tenant, client, source, time.time() + self._seconds)
        self._tell(tenant, client, {"barred": [source]})

    def evidence(self, tenant: str, client: str, source: str) -> float:
        """What has added up against a client about a source; 1 at first."""
        with self._lock:
            found = self._clients.get(key_of(tenant, client))
            return found.evidence.get(source, 1.0) if found else 1.0

    def add(self, tenant: str, client: str, source: str, e_value: float) -> None:
        """Multiplies the evidence by that of one more question.

        The CUSUM of e-values: at 1 or below it begins anew, and it reaches 1 / alarm in one of 1 / alarm harmless
        questions at most, in the long run (Shin et al. 2022). Each process multiplies in the order in which it learns
        of the questions, its own at once.
        """
        if self._add(tenant, client, source, e_value):
            self._tell(tenant, client, {"evidence": {source: e_value}})

    def _bar(self, tenant: str, client: str, source: str, until: float) -> None:
        with self._lock:
            bars = self._client(tenant, client).bars
            _put(bars, source, max(until, bars.get(source, 0.0)))

    def _add(self, tenant: str, client: str, source: str, e_value: float) -> bool:
        """Whether that changed anything."""
        with self._lock:
            found = self._clients.get(key_of(tenant, client))
            before = found.evidence.get(source, 1.0) if found else 1.0
            if e_value * before > 1:
                _put(self._client(tenant, client).evidence, source, e_value * before)
            elif found:
                found.evidence.pop(source, None)
            return max(1.0, e_value * before) != before

    def _client(self, tenant: str, client: str) -> _Client:
        """A client of whom there is something to remember: whoever only asks displaces nobody."""
        key = key_of(tenant, client)
        found = self._clients.setdefault(key, _Client())
        self._clients.move_to_end(key)
        if len(self._clients) > CLIENTS:
            self._clients.popitem(last=False)
        return found

    def _tell(self, tenant: str, client: str, what: Mapping[str, Any]) -> None:
        self._news.tell(tenant, client, {"defense": self._defense, **what})

    def _take(self, tenant: str, client: str, body: Mapping[str, Any], at: float) -> None:
        """What another process told."""
        if body.get(FORGIVEN):
            with self._lock:
                self._clients.pop(key_of(tenant, client), None)
        elif body.get("defense") == self._defense:
            for source in body.get("barred", ()):
                self._bar(tenant, client, str(source), at + self._seconds)
            for source, e_value in body.get("evidence", {}).items():
                self._add(tenant, client, str(source), float(e_value))


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
