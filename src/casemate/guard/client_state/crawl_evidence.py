"""Evidence that clients are crawlers: chunks shown and words disclosed to each, and tests on their behavior.

The state is bounded, in memory and in the event store. Events record what happened, not conclusions: each process
computes the same sums in its order of arrival, its own events at once.
"""

from __future__ import annotations

import base64
import hashlib
import math
import threading
import time
import zlib
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import numpy as np

from casemate.guard.client_state.feed import RESET, ClientEventFeed
from casemate.guard.client_state.withheld_documents import key_of
from casemate.guard.client_state.word_quotas import WordBlock, quota_name
from casemate.protocols import EventStore
from casemate.runtime.bounded_dict import BoundedDict
from casemate.text.tokens import ngrams
from casemate.types import Document, Event, Query

KIND = "crawl"
"""Kind of the events."""
SHORTENED = "shortened"
"""Key of an event with the id of a request whose answer was cut, or would have been in observe mode."""
TENANT_RESET = "forgiven_tenant"
"""Key in the body of an event that discards the evidence about the clients of a tenant together."""
MAX_CLIENTS, MAX_CHUNKS, MAX_PHRASES, MAX_QUOTED, MAX_TENANT_PHRASES = 10_000, 5_000, 4_000, 1_000_000, 20_000
"""Clients; chunks and answer phrases per client; disclosed chunks per tenant, and answer phrases. The oldest are
forgotten first."""
ECHO_WORDS = 6
"""Length of a phrase by which a question repeats an earlier answer."""
MAX_CUSUM = 1e100
"""Largest CUSUM. An infinite one would keep the verdicts out of the event store: JSON has no infinite number."""


def text_name(document: Document) -> str:
    """Returns the key of the recorded words of a chunk: its id, and a digest of its title and text.

    Words are recorded by their positions. A replaced document may have the same id and other words at these positions.
    So may a document of another collection on the same event store.
    """
    content = document.content.encode(errors="surrogatepass")
    return f"{document.id}\n{hashlib.blake2b(content, digest_size=8).hexdigest()}"


def value_name(text: str) -> str:
    """Returns the key of the recorded words of a value beside the texts of chunks, such as a file name or an author.

    Equal values have one key, so a client is charged once for a value of many chunks.
    """
    return f"\n{hashlib.blake2b(text.encode(errors='surrogatepass'), digest_size=8).hexdigest()}"


def is_chunk(name: str) -> bool:
    """Whether a key of recorded words is a ``text_name``, not a ``value_name``."""
    return not name.startswith("\n")


def id_of(name: str) -> str:
    """Returns the id of the chunk that has a ``text_name``; events of earlier versions have the id alone."""
    return name.rpartition("\n")[0] or name


def is_limited(verdict: Mapping[str, Any]) -> bool:
    """Whether the verdict of an event gave its client less than whole chunks, or withheld chunks beyond its share."""
    if verdict.get("defense") != "crawl_limit" or not verdict.get("enforced", True):
        return False
    grade = verdict.get("evidence", {}).get("grade")
    return grade is not None and (grade != "full" or bool(verdict.get("hidden")))


class RecordedLimits:
    """What ``crawl_limit`` did to clients, by the events in a store.

    Args:
        store: The event store.
        since: Time from which events count.

    Raises:
        BackendError: If the store cannot be read.
    """

    def __init__(self, store: EventStore, since: datetime) -> None:
        self._cut, self._resets = set[str](), dict[str, datetime]()
        self._until: dict[str, datetime] = {}  # of each tenant, by its newest verdict
        for event in store.scan(KIND, since):
            if SHORTENED in event.body:
                self._cut.add(str(event.body[SHORTENED]))
            if event.body.get(TENANT_RESET):
                self._resets[str(event.body.get("tenant"))] = event.at

    def add(self, event: Event) -> bool:
        """Adds a verdict, in order of time; returns whether its client was limited, or its answer was cut."""
        body, tenant = event.body, str(event.body.get("tenant"))
        if body.get("defense") != "crawl_limit" or not body.get("enforced", True):
            return False
        evidence = body.get("evidence", {})
        if "grade" in evidence and (tenant not in self._resets or event.at > self._resets[tenant]):
            self._until[tenant] = datetime.fromtimestamp(evidence.get("tenant_until", 0.0), UTC)
        return is_limited(body) or body.get("request") in self._cut

    def restricted(self) -> dict[str, datetime]:
        """Returns the tenants of which all clients are restricted, and until when."""
        now = datetime.now(UTC)
        return {t: at for t, at in self._until.items() if at > now}

    def describe(self) -> list[str]:
        """Describes the tenants whose clients are all restricted, and how to end it."""
        return [
            f"{describe_restriction(tenant, until)}; to end it: 'casemate client reset --tenant {tenant}'"
            for tenant, until in sorted(self.restricted().items())
        ]


def describe_restriction(tenant: str, until: datetime) -> str:
    """Describes the restriction of all clients of a tenant, with its reason."""
    when = f"{until:%Y-%m-%d %H:%M} UTC"
    return f"all clients of tenant {tenant!r} are restricted until {when}, since several appear to crawl together"


@dataclass(frozen=True, slots=True)
class SequentialTest:
    """CUSUMs of e-values for an event, one for each rate that crawlers may have; the evidence is their weighted mean.

    The mean has the false-alarm rate of one CUSUM. Several rates, because crawlers ask benign questions between the
    others, and colluders hide among other clients.

    Attributes:
        harmless: The highest rate of the event among benign clients.
        crawlers: For each rate among crawlers, its weight. The weights sum to 1.
    """

    harmless: float
    crawlers: Mapping[float, float]

    def start(self) -> list[float]:
        """Returns the CUSUMs before the first observation."""
        return [1.0] * len(self.crawlers)

    def step(self, cusums: Sequence[float], happened: bool, most: float = MAX_CUSUM) -> list[float]:
        """Returns the CUSUMs after one more observation, each at most ``most``."""
        p = self.harmless
        factors = [rate / p if happened else (1 - rate) / (1 - p) for rate in self.crawlers]
        return [min(max(1.0, c * factor), most) for c, factor in zip(cusums, factors, strict=True)]

    def evidence(self, cusums: Sequence[float]) -> float:
        """Returns the weighted mean of the CUSUMs."""
        return sum(weight * c for weight, c in zip(self.crawlers.values(), cusums, strict=True))


TESTS = {
    "quotes": SequentialTest(0.01, {0.05: 0.2, 0.2: 0.3, 0.6: 0.5}),
    "echoes": SequentialTest(0.02, {0.1: 0.2, 0.25: 0.3, 0.5: 0.5}),
}
"""The tests on each client."""
TENANT_TESTS = {
    "quotes": SequentialTest(0.01, {0.05: 1 / 3, 0.2: 1 / 3, 0.6: 1 / 3}),
    "echoes": SequentialTest(0.01, {0.05: 1 / 3, 0.2: 1 / 3, 0.6: 1 / 3}),
}
"""The tests on a tenant.

``quotes``: an answer is the first of some client to reach the quote limit. ``echoes``: a question is the first of some
client that repeats answers to other clients; answers to clients that were repeated before do not count.
"""
SUSPICION = 10.0
"""Evidence above which a client is suspected, and in a suspected tenant alarmed by its next event: one event that
benign clients seldom cause."""


class SuspicionLevel(Enum):
    """Classification of a client."""

    CLEAR = "clear"
    SUSPECTED = "suspected"
    ALARMED = "alarmed"


CLEAR, SUSPECTED, ALARMED = SuspicionLevel


@dataclass(slots=True)
class _ClientEvidence:
    block: WordBlock
    shown: BoundedDict[str, float] = field(default_factory=lambda: BoundedDict(MAX_CHUNKS))
    """Chunk id -> time last shown."""
    disclosed: dict[str, int] = field(default_factory=dict)  # chunk id -> disclosed words, one bit each
    disclosed_words: int = 0  # their number
    disclosed_at: dict[str, float] = field(default_factory=dict)  # chunk id -> time words of it were last disclosed
    exposed: set[str] = field(default_factory=set)  # ids of chunks disclosed above the allowed share
    topics: dict[int, float] = field(default_factory=dict)  # topic -> time a chunk of it was last shown
    phrases: BoundedDict[int, None] = field(default_factory=lambda: BoundedDict(MAX_PHRASES))
    """Hashed phrases of answers."""
    cusums: dict[str, list[float]] = field(default_factory=lambda: {name: test.start() for name, test in TESTS.items()})
    alarmed_until: float = 0.0
    counted: set[str] = field(default_factory=set)  # tests of the tenant that have counted an event of the client
    repeated: bool = False  # whether the tenant's test of echoes has counted an answer to the client
    limit_chunks: set[str] = field(default_factory=set)  # ids of the chunks of answers at the quote limit

    def evidence(self) -> dict[str, float]:
        """Returns the evidence of each test."""
        return {name: test.evidence(self.cusums[name]) for name, test in TESTS.items()}

    @property
    def strongest(self) -> float:
        """The evidence of the strongest test."""
        return max(self.evidence().values())


@dataclass(slots=True)
class _TenantEvidence:
    block: WordBlock
    alarms: dict[str, float] = field(default_factory=dict)  # client -> end of its alarm
    cusums: dict[str, list[float]] = field(
        default_factory=lambda: {name: test.start() for name, test in TENANT_TESTS.items()}
    )
    suspected_until: float = 0.0
    restricted_since: float = 0.0
    phrases: BoundedDict[int, tuple[str, float]] = field(default_factory=lambda: BoundedDict(MAX_TENANT_PHRASES))
    """Phrase of an answer -> client and time of the last answer that contained it."""
    disclosed: BoundedDict[str, tuple[int, float]] = field(default_factory=lambda: BoundedDict(MAX_QUOTED))
    """Chunk id -> words disclosed to any client, one bit each, and the time words of it were last disclosed."""
    limit_at: BoundedDict[str, float] = field(default_factory=lambda: BoundedDict(MAX_QUOTED))
    """Chunk id -> time of a counted limit event."""
    disclosed_at: deque[tuple[float, int]] = field(default_factory=deque)  # time, number of words new to the tenant
    disclosed_words: int = 0  # their sum

    def reset(self) -> None:
        """Ends the restriction of all clients. What was disclosed still counts."""
        self.alarms.clear()
        self.limit_at.clear()
        self.cusums = {name: test.start() for name, test in TENANT_TESTS.items()}
        self.suspected_until = self.restricted_since = 0.0


class CrawlEvidence:
    """The evidence of one crawl limit.

    Args:
        alarm: False alarms per question, in (0, 1).
        colluders: Number of alarmed clients from which all clients of a tenant are suspected; 0: never.
        seconds: How long evidence is remembered.
        store: The shared event store; None: in memory only.
    """

    def __init__(self, alarm: float, colluders: int, seconds: float, store: EventStore | None) -> None:
        self._alarm, self._colluders, self._seconds = alarm, colluders, seconds
        self._clients: BoundedDict[tuple[str, str], _ClientEvidence] = BoundedDict(MAX_CLIENTS)
        self._tenants: dict[str, _TenantEvidence] = {}
        self._lock = threading.RLock()
        self._feed = ClientEventFeed(store, KIND, seconds, self._apply)
        self.sync = self._feed.poll

    def record_question(self, query: Query) -> SuspicionLevel:
        """Tests a new question for phrases of earlier answers, also to other clients; returns the client's level."""
        with self._lock:
            client = self._client(query)
            self._expire(client)
            asked = _phrase_hashes(query.text, query.tenant)
            echoed = [phrase for phrase in asked if phrase in client.phrases]
            others = self._told_to_others(query, [phrase for phrase in asked if phrase not in client.phrases])
            told = [others[phrase] for phrase in asked if phrase in others]
            new = [name for name in told if not self._named(query.tenant, name).repeated]
            if asked:
                body: dict[str, Any] = {"echo": 2 * len(echoed) > len(asked), "repeated": _pack({*echoed, *others})}
                body["from"] = sorted(set(new)) if 2 * len(new) > len(asked) else []
                self._record(query, body, idle=not (echoed or others))
            return self.level(query)

    def _told_to_others(self, query: Query, phrases: Sequence[int]) -> dict[int, str]:
        """Returns those phrases that an answer to another client contained, with that client. Forgets expired ones."""
        told, since = self._tenant(query.tenant).phrases, time.time() - self._seconds
        while told and next(iter(told.values()))[1] < since:
            told.popitem(last=False)
        name = key_of(query.tenant, query.client)[1]
        found = {phrase: told[phrase] for phrase in phrases if phrase in told}
        return {phrase: client for phrase, (client, at) in found.items() if client != name and at >= since}

    def level(self, query: Query) -> SuspicionLevel:
        """Returns the client's level."""
        with self._lock:
            client, now = self._client(query), time.time()
            if client.alarmed_until > now:
                return ALARMED
            suspected = self.is_colluding(query.tenant) or client.strongest > SUSPICION
            return SUSPECTED if suspected else CLEAR

    def is_colluding(self, tenant: str) -> bool:
        """Whether several clients of a tenant appear to crawl together."""
        with self._lock:
            return self._restricted_until(self._tenant(tenant)) > time.time()

    def _restricted_until(self, tenant: _TenantEvidence) -> float:
        """Time until which all clients of a tenant are suspected."""
        if not self._colluders:
            return 0.0
        ends = sorted(tenant.alarms.values(), reverse=True)
        return max(tenant.suspected_until, *ends[self._colluders - 1 : self._colluders], 0.0)

    def score(self, query: Query) -> float:
        """Returns the strongest evidence."""
        return self._client(query).strongest

    def alarm_limit(self, query: Query) -> float:
        """Returns the least evidence at which an alarm is raised for the client.

        In a suspected tenant it is lower, but only for later events of the client. A client with more evidence before
        has the usual limit until its next event.
        """
        with self._lock:
            limit = self._alarm_limit(self._tenant(query.tenant), time.time())
            before = self.score(query) >= limit and self.level(query) is not ALARMED
            return len(TESTS) / self._alarm if before else limit

    def _alarm_limit(self, tenant: _TenantEvidence, at: float) -> float:
        colluding = bool(self._colluders) and tenant.suspected_until > at
        return SUSPICION if colluding else len(TESTS) / self._alarm

    def summary(self, query: Query) -> dict[str, float]:
        """Returns the evidence of each test with its limits, and the number of distinct chunks shown, for a verdict.

        If all clients of the tenant are restricted, also since when and until when.
        """
        with self._lock:
            client, tenant = self._client(query), self._tenant(query.tenant)
            limits = {"suspected_above": SUSPICION, "alarmed_from": self.alarm_limit(query)}
            found = {**client.evidence(), **limits, "chunks": len(client.shown)}
            if (until := self._restricted_until(tenant)) > time.time():
                found |= {"tenant_since": tenant.restricted_since, "tenant_until": until}
            return found

    def was_shown(self, query: Query, chunk: str) -> bool:
        """Whether a chunk, given by its id, was shown to the client before."""
        return chunk in self._client(query).shown

    def shown_count(self, query: Query) -> int:
        """Returns the number of distinct chunks shown to the client."""
        return len(self._client(query).shown)

    def disclosed(self, query: Query, chunk: str) -> int:
        """Returns the words of a chunk, given by its ``text_name``, disclosed to the client, one bit each."""
        return self._client(query).disclosed.get(chunk, 0)

    def disclosed_to_tenant(self, tenant: str, chunk: str) -> int:
        """Returns the same for any client of a tenant."""
        return self._disclosed_to(self._tenant(tenant), chunk, time.time())

    def disclosed_words(self, query: Query) -> int:
        """Returns the number of words disclosed to the client."""
        return self._client(query).disclosed_words

    def blocks(self, query: Query) -> tuple[WordBlock, WordBlock]:
        """Returns what is left of the words acquired for the client, and for its tenant; a reset begins a new one."""
        return self._client(query).block, self._tenant(query.tenant).block

    def tenant_words(self, tenant: str) -> int:
        """Returns the number of words that were new to a tenant."""
        with self._lock:
            state, since = self._tenant(tenant), time.time() - self._seconds
            while state.disclosed_at and state.disclosed_at[0][0] < since:
                state.disclosed_words -= state.disclosed_at.popleft()[1]
            return state.disclosed_words

    def shown_topics(self, query: Query) -> frozenset[int]:
        """Returns the topics of the chunks shown to the client."""
        return frozenset(self._client(query).topics)

    def exposed_chunks(self, query: Query) -> frozenset[str]:
        """Returns the names of the chunks disclosed to the client above the allowed share."""
        return frozenset(self._client(query).exposed)

    def record_shown(self, query: Query, chunks: Sequence[str], topics: Sequence[int] = ()) -> None:
        """Records the chunks in a context, and their topics."""
        with self._lock:
            new = [c for c in chunks if not self.was_shown(query, c)]
            self._record(query, {"shown": list(chunks), "topics": list(topics)}, idle=not new)

    def record_answer(
        self,
        query: Query,
        text: str,
        disclosed: Mapping[str, int],
        exposed: Sequence[str],
        limit_reached: bool,
        shortened: bool = False,
    ) -> None:
        """Records an answer.

        An answer that reaches the limit is evidence. Exception: its chunks are from such answers, and it discloses
        nothing new. The same question, asked again, is cut at the same word.

        Args:
            query: The question.
            text: The text that was sent.
            disclosed: Disclosed words of each chunk of the context, one bit each, by ``text_name``.
            exposed: Names of the chunks disclosed above the allowed share.
            limit_reached: Whether the answer reached the limit, or copied as much, with words disclosed before.
            shortened: Whether the answer was cut; in observe mode, whether it would have been.
        """
        with self._lock:
            client = self._client(query)
            said = set(_phrase_hashes(text, query.tenant)).difference(_phrase_hashes(query.text, query.tenant))
            new = {chunk: f"{bits:x}" for chunk, bits in disclosed.items() if bits & ~client.disclosed.get(chunk, 0)}
            body: dict[str, Any] = {"said": _pack(said), "covered": new, "whole": list(exposed)}
            if not limit_reached:
                body["cut"] = False
            elif new or not client.limit_chunks.issuperset(disclosed):
                body |= {"cut": True, "limit": list(disclosed)}
            body |= {SHORTENED: query.id} if shortened else {}
            self._record(query, body, idle=not (said or new or shortened))

    def expire(self, query: Query) -> None:
        """Removes what was shown or disclosed to the client too long ago, as each question does."""
        with self._lock:
            self._expire(self._client(query))

    def record_given(self, query: Query, disclosed: Mapping[str, int], shortened: bool) -> None:
        """Records documents that the client itself was given. They are not evidence: what it copies is not seen.

        Args:
            query: The question.
            disclosed: Words of each chunk that the client was given, one bit each, by ``text_name``.
            shortened: Whether a text was shortened or left out.
        """
        with self._lock:
            client = self._client(query)
            new = {chunk: f"{bits:x}" for chunk, bits in disclosed.items() if bits & ~client.disclosed.get(chunk, 0)}
            body = {"covered": new} | ({SHORTENED: query.id} if shortened else {})
            self._record(query, body, idle=not (new or shortened))

    def _record(self, query: Query, body: Mapping[str, Any], *, idle: bool) -> None:
        """Applies an event of this process, and publishes it unless it changes nothing. Requires the lock."""
        client, tenant = self._client(query), self._tenant(query.tenant)
        before = dict(client.cusums), client.alarmed_until, dict(tenant.cusums)
        self._update(query.tenant, query.client, body, time.time())
        changed = before != (client.cusums, client.alarmed_until, tenant.cusums)
        if changed or not idle:
            self._feed.publish(query.tenant, query.client, body)

    def _apply(self, tenant: str, client: str, body: Mapping[str, Any], at: float) -> None:
        with self._lock:
            self._update(tenant, client, body, at)

    def _update(self, tenant: str, client: str, body: Mapping[str, Any], at: float) -> None:
        """Updates the state by an event."""
        if body.get(RESET):
            self._clients.pop(key_of(tenant, client), None)
            self._tenant(tenant).alarms.pop(client, None)
            return
        if body.get(TENANT_RESET):
            self._reset_tenant(tenant)
            return
        state, together = self._named(tenant, client), self._tenant(tenant)
        for phrase in _unpack(body.get("repeated", "")):
            state.phrases.pop(phrase, None)  # the client used it, so repeating it is not further evidence
            together.phrases.pop(phrase, None)
        told = key_of(tenant, client)[1], at
        for phrase in _unpack(body.get("said", "")):
            state.phrases[phrase] = None
            together.phrases[phrase] = told
        for chunk in body.get("shown", ()):
            state.shown[str(chunk)] = max(at, state.shown.get(str(chunk), 0.0))
        for topic in body.get("topics", ()):
            state.topics[int(topic)] = max(at, state.topics.get(int(topic), 0.0))
        for chunk, bits in body.get("covered", {}).items():
            self._tell(state, together, str(chunk), int(bits, 16), at)
        for name, chunks in (("whole", state.exposed), ("limit", state.limit_chunks)):
            for chunk in map(str, body.get(name, ())):
                chunks.add(chunk)
                state.disclosed_at.setdefault(chunk, at)
        if "from" in body and "echoes" not in state.counted:
            others = [self._named(tenant, str(name)) for name in body["from"]]
            self._test_repeating(state, others, together, at)
        self._test(client, state, together, body, at)

    def _reset_tenant(self, tenant: str) -> None:
        """Discards the evidence about the clients together; the next event of each client counts again."""
        self._tenant(tenant).reset()
        for (of, _), client in self._clients.items():
            if of == tenant:
                client.counted.clear()
                client.repeated = False

    def _test(
        self, name: str, state: _ClientEvidence, together: _TenantEvidence, body: Mapping[str, Any], at: float
    ) -> None:
        """Updates the tests by an event, and raises the client's alarm.

        Among clients who crawl together, one event that benign clients seldom cause is enough. It must happen then:
        what a client did before the tenant was suspected alarms it no sooner.
        """
        if "echo" in body:
            state.cusums["echoes"] = TESTS["echoes"].step(state.cusums["echoes"], bool(body["echo"]))
        if "cut" in body:
            state.cusums["quotes"] = TESTS["quotes"].step(state.cusums["quotes"], bool(body["cut"]))
            if "quotes" not in state.counted:
                self._test_tenant("quotes", state, together, self._count_limit_event(together, body, at), at)
        event = bool(body.get("echo") or body.get("cut"))
        if state.strongest >= (self._alarm_limit(together, at) if event else len(TESTS) / self._alarm):
            state.alarmed_until = max(state.alarmed_until, at + self._seconds)
            if event or name in together.alarms:  # after a reset of the tenant, an alarm needs a new event to count
                together.alarms[name] = state.alarmed_until
        restricted = self._restricted_until(together) > at
        together.restricted_since = (together.restricted_since or at) if restricted else 0.0

    def _test_repeating(
        self, client: _ClientEvidence, others: Sequence[_ClientEvidence], tenant: _TenantEvidence, at: float
    ) -> None:
        """One step of the tenant's test ``echoes``: whether a question repeats answers to other clients.

        An answer to each of these counts once, too: a client can have the questions of others put into its answers.
        """
        happened = bool(others) and not any(other.repeated for other in others)
        self._test_tenant("echoes", client, tenant, happened, at)
        for other in others:
            other.repeated |= happened

    def _test_tenant(
        self, name: str, client: _ClientEvidence, tenant: _TenantEvidence, happened: bool | None, at: float
    ) -> None:
        """One step of a test of the tenant; none if ``happened`` is None.

        Only the first event of each client counts, so that a single client cannot incriminate others.
        """
        if happened is not False:
            client.counted.add(name)
        if happened is None:
            return
        test = TENANT_TESTS[name]
        most = len(TENANT_TESTS) * len(test.crawlers) / self._alarm  # capped, so that it can fall again
        tenant.cusums[name] = test.step(tenant.cusums[name], happened, most)
        if test.evidence(tenant.cusums[name]) >= len(TENANT_TESTS) / self._alarm:
            tenant.suspected_until = max(tenant.suspected_until, at + self._seconds)

    def _count_limit_event(self, tenant: _TenantEvidence, body: Mapping[str, Any], at: float) -> bool | None:
        """Records the chunks of an answer at the limit. Returns whether it reached it; None if it counts for nothing.

        That is, if all of its chunks were in counted answers before: many clients ask the same question.
        """
        chunks = [*map(str, body.get("covered", {}))]
        if not body["cut"]:
            return False
        if chunks and all(at - tenant.limit_at.get(chunk, -math.inf) <= self._seconds for chunk in chunks):
            return None
        for chunk in chunks:
            tenant.limit_at[chunk] = at
        return True

    def _tenant(self, name: str) -> _TenantEvidence:
        with self._lock:
            if name not in self._tenants:
                self._tenants[name] = _TenantEvidence(WordBlock(quota_name(name, None)))
            return self._tenants[name]

    def _tell(self, client: _ClientEvidence, tenant: _TenantEvidence, chunk: str, bits: int, at: float) -> None:
        """Adds disclosed words of a chunk.

        Their age counts from the last event that disclosed new ones, not from the last showing. Only new showings are
        published, so other processes would expire the words earlier.
        """
        client.disclosed_words += (bits & ~client.disclosed.get(chunk, 0)).bit_count()
        client.disclosed[chunk] = client.disclosed.get(chunk, 0) | bits
        client.disclosed_at[chunk] = max(at, client.disclosed_at.get(chunk, 0.0))
        before, last = self._disclosed_to(tenant, chunk, at), tenant.disclosed.get(chunk, (0, 0.0))[1]
        if new := (bits & ~before).bit_count():
            tenant.disclosed_at.append((at, new))
            tenant.disclosed_words += new
        tenant.disclosed[chunk] = before | bits, max(at, last)

    def _disclosed_to(self, tenant: _TenantEvidence, chunk: str, at: float) -> int:
        """The words of a chunk that were disclosed to any client and have not expired at some time."""
        bits, last = tenant.disclosed.get(chunk, (0, -math.inf))
        return bits if at - last <= self._seconds else 0

    def _expire(self, client: _ClientEvidence) -> None:
        """Removes outdated state."""
        now = time.time()
        since = now - self._seconds
        for chunk in [c for c, at in client.shown.items() if at < since]:
            del client.shown[chunk]
        for chunk in [c for c, at in client.disclosed_at.items() if at < since]:
            del client.disclosed_at[chunk]
            client.disclosed_words -= client.disclosed.pop(chunk, 0).bit_count()
            client.exposed.discard(chunk)
            client.limit_chunks.discard(chunk)
        client.topics = {topic: at for topic, at in client.topics.items() if at >= since}
        if client.alarmed_until and client.alarmed_until <= now:
            client.alarmed_until, client.repeated = 0.0, False
            client.counted.clear()
            client.cusums = {name: test.start() for name, test in TESTS.items()}

    def _client(self, query: Query) -> _ClientEvidence:
        return self._named(query.tenant, query.client)

    def _named(self, tenant: str, client: str) -> _ClientEvidence:
        with self._lock:
            key = key_of(tenant, client)
            state = self._clients.get(key) or _ClientEvidence(WordBlock(quota_name(tenant, client)))
            self._clients[key] = state
            return state


def _phrase_hashes(text: str, tenant: str) -> list[int]:
    """Hashes the phrases of a text, salted by tenant; equal in every process."""
    salt = zlib.crc32(tenant.encode(errors="surrogatepass"))
    return [zlib.crc32(" ".join(words).encode(errors="surrogatepass"), salt) for words in ngrams(text, ECHO_WORDS)]


def _pack(hashes: Collection[int]) -> str:
    return base64.b64encode(np.array(sorted(hashes), "<u4").tobytes()).decode()


def _unpack(text: str) -> list[int]:
    hashes: list[int] = np.frombuffer(base64.b64decode(text), "<u4").tolist()
    return hashes
