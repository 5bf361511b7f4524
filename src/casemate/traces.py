"""What is known of each client as a possible crawler: what he was shown and told, and what speaks against him.

Kept in memory, bounded, and in the event store: what happened, not what came of it. Each process on the store does the
same sums over it, in the order in which it learns of it, its own at once.
"""

from __future__ import annotations

import base64
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from casemate import sessions
from casemate.errors import BackendError
from casemate.events import EventStore
from casemate.news import FORGIVEN, News
from casemate.sessions import key_of
from casemate.types import Query
from casemate.words import phrases

CLIENTS, CHUNKS, ECHOES, TOLD = 10_000, 5_000, 4_000, 1_000_000
"""How many clients are remembered, chunks of each, runs of words of what he was told, and chunks that anybody
in a tenant was told of; the oldest go first."""
ECHO = 6
"""Words in a row by which a question repeats an earlier answer."""
KIND = "crawl"
TESTS = {"quotes": (0.01, 0.6), "echoes": (0.02, 0.5)}
"""For each test, how often harmless clients do it at most, and how often crawlers do at least."""
NEWCOMERS = (0.05, 0.2, 0.6)
"""How often an answer of a tenant whose clients collude is some client's first to run into the limit. That of harmless
tenants is as rarely as in the test ``quotes``; several colluders' shares are tried, since they hide among others."""


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
    whole: set[str] = field(default_factory=set)  # ids of chunks of which he was told more than a share
    topics: dict[int, float] = field(default_factory=dict)  # topic -> when a chunk of it was last shown
    echoes: OrderedDict[int, None] = field(default_factory=OrderedDict)
    evidence: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TESTS, 1.0))
    alarmed: float = 0.0  # until when
    cut: bool = False  # whether an answer ran into the limit before


@dataclass(slots=True)
class _Tenant:
    alarms: dict[str, float] = field(default_factory=dict)  # client -> until when
    evidence: list[float] = field(default_factory=lambda: [1.0] * len(NEWCOMERS))
    suspected: float = 0.0  # until when
    covered: OrderedDict[str, int] = field(default_factory=OrderedDict)  # id -> words told to any of its clients


class Traces:
    """The memory of one crawl limit.

    Args:
        alarm: False alarms per question, in (0, 1).
        colluders: Alarmed clients of one tenant from which on all its clients are suspected; 0: never.
        seconds: How long anything is remembered.
        store: Where it is kept; None: in memory only.
    """

    def __init__(self, alarm: float, colluders: int, seconds: float, store: EventStore | None) -> None:
        self._alarm, self._colluders, self._seconds = alarm, colluders, seconds
        self._clients: OrderedDict[tuple[str, str], _Client] = OrderedDict()
        self._tenants: dict[str, _Tenant] = {}
        self._lock = threading.RLock()
        self._news = News(store, KIND, seconds, self._learn)
        self.follow = self._news.follow

    def asked(self, query: Query) -> Level:
        """Weighs a new question, and says what its client is held to be."""
        with self._lock:
            client = self._client(query)
            self._expire(client)
            runs = _runs(query.text, query.client)
            echoed = [run for run in runs if run in client.echoes]
            if runs:
                self._happened(query, {"echo": 2 * len(echoed) > len(runs), "own": _packed(echoed)}, not echoed)
            return self.level(query)

    def level(self, query: Query) -> Level:
        """What a client is held to be."""
        with self._lock:
            client, now = self._client(query), time.time()
            if client.alarmed > now:
                return ALARMED
            told_on = self.collude(query.tenant)
            return SUSPECTED if told_on or max(client.evidence.values()) > SUSPICION else CLEAR

    def collude(self, tenant: str) -> bool:
        """Whether several clients of a tenant are held to crawl together."""
        with self._lock:
            found, now = self._tenant(tenant), time.time()
            alarmed = sum(until > now for until in found.alarms.values())
            return bool(self._colluders) and (alarmed >= self._colluders or found.suspected > now)

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
        """The words of a chunk that a client was told, a bit for each; he, or whoever he is held to crawl with."""
        if self.collude(query.tenant):
            return self._tenant(query.tenant).covered.get(chunk, 0)
        return self._client(query).covered.get(chunk, 0)

    def topics(self, query: Query) -> frozenset[int]:
        """The topics that a client was shown chunks of."""
        return frozenset(self._client(query).topics)

    def whole(self, query: Query) -> frozenset[str]:
        """The chunks that a client was told more than a share of."""
        return frozenset(self._client(query).whole)

    def shown(self, query: Query, chunks: Sequence[str], topics: Sequence[int] = ()) -> None:
        """Notes what is shown."""
        with self._lock:
            new = [c for c in chunks if not self.knows(query, c)]
            self._happened(query, {"shown": list(chunks), "topics": list(topics)}, not new)

    def told(self, query: Query, text: str, covered: Mapping[str, int], whole: Sequence[str], cut: bool) -> None:
        """Notes what an answer told word for word, of which chunks more than a share, and whether it met the limit."""
        with self._lock:
            client = self._client(query)
            said = set(_runs(text, query.client)).difference(_runs(query.text, query.client))
            quoted = {chunk: f"{bits:x}" for chunk, bits in covered.items() if bits & ~client.covered.get(chunk, 0)}
            body = {"told": _packed(said), "covered": quoted, "whole": list(whole), "cut": cut}
            self._happened(query, body, not (said or quoted or cut))

    def _happened(self, query: Query, body: Mapping[str, Any], idle: bool) -> None:
        """Takes in what happened here, and writes it down unless it changes nothing. The lock is held."""
        client, owner = self._client(query), self._tenant(query.tenant)
        before = dict(client.evidence), client.alarmed, list(owner.evidence)
        self._take(query.tenant, query.client, body, time.time())
        changed = before != (client.evidence, client.alarmed, owner.evidence)
        if changed or not idle:
            self._news.tell(query.tenant, query.client, body)

    def _learn(self, tenant: str, client: str, body: Mapping[str, Any], at: float) -> None:
        with self._lock:
            self._take(tenant, client, body, at)

    def _take(self, tenant: str, client: str, body: Mapping[str, Any], at: float) -> None:
        """Puts together what is known with what happened."""
        if body.get(FORGIVEN):
            self._clients.pop(key_of(tenant, client), None)
            self._tenant(tenant).alarms.pop(client, None)
            return
        held, owner = self._named(tenant, client), self._tenant(tenant)
        for run in _unpacked(body.get("own", "")):
            held.echoes.pop(run, None)  # from now on these are his own words, which he may say again
        for run in _unpacked(body.get("told", "")):
            _put(held.echoes, run, None, ECHOES)
        for chunk in body.get("shown", ()):
            _put(held.chunks, str(chunk), max(at, held.chunks.get(str(chunk), 0.0)), CHUNKS)
        for topic in body.get("topics", ()):
            held.topics[int(topic)] = max(at, held.topics.get(int(topic), 0.0))
        for chunk, bits in body.get("covered", {}).items():
            held.covered[chunk] = held.covered.get(chunk, 0) | int(bits, 16)
            _put(owner.covered, chunk, owner.covered.get(chunk, 0) | int(bits, 16), TOLD)
        held.whole.update(map(str, body.get("whole", ())))
        if "echo" in body:
            self._weigh(held, "echoes", bool(body["echo"]))
        if "cut" in body:
            self._weigh(held, "quotes", bool(body["cut"]))
            self._weigh_together(held, owner, bool(body["cut"]), at)
        if max(held.evidence.values()) >= len(TESTS) / self._alarm:
            held.alarmed = max(held.alarmed, at + self._seconds)
            owner.alarms[client] = held.alarmed

    def _weigh(self, client: _Client, test: str, happened: bool) -> None:
        """One step of a CUSUM of e-values."""
        harmless, crawler = TESTS[test]
        factor = crawler / harmless if happened else (1 - crawler) / (1 - harmless)
        client.evidence[test] = max(1.0, client.evidence[test] * factor)

    def _weigh_together(self, client: _Client, owner: _Tenant, cut: bool, at: float) -> None:
        """One step for the tenant. Of each client only the first cut counts: no single one can bring others down.

        The mean of CUSUMs is as rarely wrong as one.
        """
        if client.cut:
            return
        client.cut, harmless = cut, TESTS["quotes"][0]
        factors = [p / harmless if cut else (1 - p) / (1 - harmless) for p in NEWCOMERS]
        most = len(NEWCOMERS) / self._alarm  # no more than alarms: it is to fall again when all is well
        owner.evidence = [min(max(1.0, e * f), most) for e, f in zip(owner.evidence, factors, strict=True)]
        if sum(owner.evidence) / len(owner.evidence) >= 1 / self._alarm:
            owner.suspected = max(owner.suspected, at + self._seconds)

    def _tenant(self, name: str) -> _Tenant:
        with self._lock:
            return self._tenants.setdefault(name, _Tenant())

    def _expire(self, client: _Client) -> None:
        """Forgets what is too old."""
        now = time.time()
        for chunk in [c for c, at in client.chunks.items() if at < now - self._seconds]:
            del client.chunks[chunk]
            client.covered.pop(chunk, None)
            client.whole.discard(chunk)
        client.topics = {topic: at for topic, at in client.topics.items() if at >= now - self._seconds}
        if client.alarmed and client.alarmed <= now:
            client.alarmed, client.evidence, client.cut = 0.0, dict.fromkeys(TESTS, 1.0), False

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


def forgive(store: EventStore, tenant: str, client: str) -> None:
    """Lets a client begin anew, in every process on the store.

    Nothing is withheld from him for what he asked before, and no evidence counts against him. What a tenant's clients
    did together still counts against them all.

    Raises:
        BackendError: If it could not be written.
    """
    for kind in (sessions.KIND, KIND):
        News(store, kind, 0.0, lambda *_: None).tell(tenant, client, {FORGIVEN: True})
    if not store.flush():
        raise BackendError("the event store does not take what was forgiven", backend="store", retryable=True)


SUSPICION = 10.0
"""Evidence from which on a client is suspected: one event that harmless clients seldom cause."""


def _runs(text: str, client: str) -> list[int]:
    """The runs of words of a text as numbers, of each client others, and the same in every process."""
    salt = zlib.crc32(client.encode(errors="surrogatepass"))
    return [zlib.crc32(" ".join(run).encode(errors="surrogatepass"), salt) for run in phrases(text, ECHO)]


def _packed(runs: Collection[int]) -> str:
    return base64.b64encode(np.array(sorted(runs), "<u4").tobytes()).decode()


def _unpacked(text: str) -> list[int]:
    found: list[int] = np.frombuffer(base64.b64decode(text), "<u4").tolist()
    return found


def _put(held: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    held[key] = value
    held.move_to_end(key)
    if len(held) > most:
        held.popitem(last=False)
