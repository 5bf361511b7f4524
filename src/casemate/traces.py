"""What is known of each client as a possible crawler: what he was shown and told, and what speaks against him.

Kept in memory, bounded, and in the event store, from which it comes back after a restart and to other processes.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from casemate.protocols import EventStore
from casemate.sessions import key_of
from casemate.types import Event, Query
from casemate.words import phrases

CLIENTS, CHUNKS, ECHOES = 10_000, 5_000, 4_000
"""How many clients are remembered, chunks of each, and runs of words of what he was told; the oldest go first."""
ECHO = 6
"""Words in a row by which a question repeats an earlier answer."""
FOLLOW_S = 5.0
"""How old another process's news may be."""
TESTS = {"quotes": (0.01, 0.6), "echoes": (0.02, 0.5)}
"""For each test, how often harmless clients do it at most, and how often crawlers do at least."""


class Level(Enum):
    """What a client is held to be."""

    CLEAR = "clear"
    SUSPECTED = "suspected"
    ALARMED = "alarmed"


CLEAR, SUSPECTED, ALARMED = Level


@dataclass(slots=True)
class _Client:
    chunks: OrderedDict[str, float] = field(default_factory=OrderedDict)  # id -> when last shown
    covered: dict[str, int] = field(default_factory=dict)  # id -> words told, a bit for each
    echoes: OrderedDict[int, None] = field(default_factory=OrderedDict)
    evidence: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TESTS, 1.0))
    alarmed: float = 0.0  # until when


class Traces:
    """The memory of one crawl limit.

    Args:
        alarm: False alarms per question, in (0, 1).
        colluders: Alarmed clients of one tenant from which on all its clients are suspected; 0: never.
        seconds: How long anything is remembered.
        store: Where it is kept; None: in memory only.
    """

    def __init__(self, alarm: float, colluders: int, seconds: float, store: EventStore | None) -> None:
        self._alarm, self._colluders, self._seconds, self._store = alarm, colluders, seconds, store
        self._clients: OrderedDict[tuple[str, str], _Client] = OrderedDict()
        self._alarms: dict[str, dict[str, float]] = {}  # tenant -> client -> until when
        self._lock = threading.RLock()
        self._process = uuid.uuid4().hex
        self._followed = 0.0
        self._seen: set[str] = set()  # events of the last window that were taken in already

    def asked(self, query: Query) -> Level:
        """Weighs a new question, and says what its client is held to be."""
        with self._lock:
            client = self._client(query)
            self._expire(client)
            runs = _runs(query.text)
            if runs:
                self._weigh(query, client, "echoes", 2 * sum(run in client.echoes for run in runs) > len(runs))
            for run in runs:
                client.echoes.pop(run, None)  # from now on these are his own words, which he may say again
            return self.level(query)

    def level(self, query: Query) -> Level:
        """What a client is held to be."""
        with self._lock:
            client, now = self._client(query), time.time()
            if client.alarmed > now:
                return ALARMED
            alarmed = [until for until in self._alarms.get(query.tenant, {}).values() if until > now]
            told_on = self._colluders and len(alarmed) >= self._colluders
            return SUSPECTED if told_on or max(client.evidence.values()) > SUSPICION else CLEAR

    def score(self, query: Query) -> float:
        """The strongest evidence, to be compared with 1 / alarm."""
        return max(self._client(query).evidence.values()) / len(TESTS)

    def evidence(self, query: Query) -> dict[str, float]:
        """What speaks against a client, and how many different chunks he was shown."""
        client = self._client(query)
        return {**client.evidence, "chunks": len(client.chunks)}

    def knows(self, query: Query, chunk: str) -> bool:
        """Whether a client was shown a chunk before."""
        return chunk in self._client(query).chunks

    def count(self, query: Query) -> int:
        """How many different chunks a client was shown."""
        return len(self._client(query).chunks)

    def covered(self, query: Query, chunk: str) -> int:
        """The words of a chunk that a client was told, a bit for each."""
        return self._client(query).covered.get(chunk, 0)

    def shown(self, query: Query, chunks: Sequence[str]) -> None:
        """Notes what is shown."""
        new = [c for c in chunks if not self.knows(query, c)]
        with self._lock:
            self._take(query.tenant, query.client, {"shown": list(chunks)}, time.time())
        if new:
            self._keep(query, {"shown": new})

    def told(self, query: Query, text: str, covered: Mapping[str, int], cut: bool) -> None:
        """Notes what an answer told word for word, and whether it ran into the limit."""
        with self._lock:
            client = self._client(query)
            for run in set(_runs(text)).difference(_runs(query.text)):
                _put(client.echoes, run, None, ECHOES)
            self._weigh(query, client, "quotes", cut)
        quoted = {chunk: f"{bits:x}" for chunk, bits in covered.items() if bits & ~self.covered(query, chunk)}
        with self._lock:
            self._take(query.tenant, query.client, {"covered": quoted}, time.time())
        if quoted or cut:
            self._keep(query, {"covered": quoted, "evidence": dict(client.evidence)})

    def follow(self) -> None:
        """Takes in what other processes, or this one before a restart, have kept. Reads the store now and then."""
        now = time.time()
        if self._store is None or now - self._followed < FOLLOW_S:
            return
        with self._lock:
            if now - self._followed < FOLLOW_S:
                return
            since = max(self._followed - 2 * FOLLOW_S, now - self._seconds)
            for event in self._store.scan("crawl", datetime.fromtimestamp(since, UTC)):
                if event.body.get("process") != self._process and event.id not in self._seen:
                    self._seen.add(event.id)
                    body = event.body
                    self._take(str(body.get("tenant")), str(body.get("client")), body, event.at.timestamp())
            self._followed = now  # not before: a store that fails is asked again

    def _take(self, tenant: str, client: str, body: Mapping[str, Any], at: float) -> None:
        """Puts together what is known with what was noted; in any order it comes to the same."""
        held = self._named(tenant, client)
        for chunk in body.get("shown", ()):
            _put(held.chunks, str(chunk), max(at, held.chunks.get(str(chunk), 0.0)), CHUNKS)
        for chunk, bits in body.get("covered", {}).items():
            held.covered[chunk] = held.covered.get(chunk, 0) | int(bits, 16)
        for test, value in body.get("evidence", {}).items():
            if test in held.evidence:
                held.evidence[test] = max(held.evidence[test], float(value))
        if max(held.evidence.values()) >= len(TESTS) / self._alarm:
            held.alarmed = max(held.alarmed, at + self._seconds)
            self._alarms.setdefault(tenant, {})[client] = held.alarmed

    def _weigh(self, query: Query, client: _Client, test: str, happened: bool) -> None:
        """One step of a CUSUM of e-values."""
        harmless, crawler = TESTS[test]
        factor = crawler / harmless if happened else (1 - crawler) / (1 - harmless)
        client.evidence[test] = max(1.0, client.evidence[test] * factor)
        was = client.alarmed
        self._take(query.tenant, query.client, {}, time.time())
        if client.alarmed > was:
            self._keep(query, {"evidence": dict(client.evidence)})

    def _expire(self, client: _Client) -> None:
        """Forgets what is too old."""
        now = time.time()
        for chunk in [c for c, at in client.chunks.items() if at < now - self._seconds]:
            del client.chunks[chunk]
            client.covered.pop(chunk, None)
        if client.alarmed and client.alarmed <= now:
            client.alarmed, client.evidence = 0.0, dict.fromkeys(TESTS, 1.0)

    def _client(self, query: Query) -> _Client:
        return self._named(query.tenant, query.client)

    def _named(self, tenant: str, client: str) -> _Client:
        with self._lock:
            key = key_of(tenant, client)
            found = self._clients.setdefault(key, _Client())
            self._clients.move_to_end(key)
            if len(self._clients) > CLIENTS:
                self._clients.popitem(last=False)
            return found

    def _keep(self, query: Query, body: dict[str, Any]) -> None:
        if self._store is not None:
            about = {"tenant": query.tenant, "client": query.client, "process": self._process}
            self._store.append(Event(uuid.uuid4().hex, datetime.now(UTC), "crawl", {**about, **body}))


SUSPICION = 10.0
"""Evidence from which on a client is suspected: one event that harmless clients seldom cause."""


def _runs(text: str) -> list[int]:
    return [hash(run) for run in phrases(text, ECHO)]


def _put(held: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    held[key] = value
    held.move_to_end(key)
    if len(held) > most:
        held.popitem(last=False)
