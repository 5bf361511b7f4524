"""The disclosure page: disclosed chunks by client over time, as counted by ``crawl_limit``.

The events contain ids of chunks and bit masks of words, no text. A word is new to a client if no earlier answer in the
time range disclosed it to this client.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from typing import Any

from casemate.gateway.dashboard.page import Page, PageRequest
from casemate.gateway.dashboard.table import Column, Table
from casemate.gateway.dashboard.time_range import by_bin
from casemate.gateway.dashboard.topics import TopicMap, TopicMapCache
from casemate.guard.client_state.crawl_evidence import KIND, SHORTENED, id_of, is_chunk
from casemate.guard.client_state.feed import RESET
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.reports.format import plural
from casemate.reports.svg import Drawing, FramedChart, request_bars
from casemate.types import Document, Event

MAX_EVENTS = 20_000
"""Events that are read, the newest."""


@dataclass(slots=True)
class ClientDisclosure:
    """What answers disclosed to one client.

    Attributes:
        chunks: Disclosed words of each chunk, one bit each, by its name (``crawl_evidence.text_name``), and of the
            values of fetched chunks (``value_name``).
        exposed: Names of the chunks disclosed above the allowed share.
        shortened: Number of answers that were cut; in observe mode, that would have been.
    """

    tenant: str
    client: str
    last: datetime
    chunks: dict[str, int] = field(default_factory=dict)
    exposed: set[str] = field(default_factory=set)
    shortened: int = 0

    @property
    def chunk_count(self) -> int:
        """Number of chunks of which words were disclosed."""
        return sum(map(is_chunk, self.chunks))

    @property
    def words(self) -> int:
        """Number of words disclosed."""
        return sum(bits.bit_count() for bits in self.chunks.values())

    def add(self, at: datetime, body: Mapping[str, Any]) -> int:
        """Adds an answer; returns the number of words that are new to the client."""
        before = self.words
        for chunk, bits in body.get("covered", {}).items():
            self.chunks[chunk] = self.chunks.get(chunk, 0) | int(bits, 16)
        self.exposed.update(body.get("whole", ()))
        self.shortened += SHORTENED in body
        self.last = max(self.last, at)
        return self.words - before


def by_client(events: Iterable[Event]) -> tuple[list[ClientDisclosure], list[tuple[datetime, int]]]:
    """Sums up events by client since its last reset.

    Returns the clients, and the time and number of words of each event with new words, by time.
    """
    found: dict[tuple[str, str], ClientDisclosure] = {}
    new: dict[tuple[str, str], list[tuple[datetime, int]]] = {}
    for event in events:
        key = (_tenant(event), str(event.body.get("client", "")))
        if event.body.get(RESET):
            found.pop(key, None)
            new.pop(key, None)
            continue
        one = found.setdefault(key, ClientDisclosure(*key, event.at))
        if words := one.add(event.at, event.body):
            new.setdefault(key, []).append((event.at, words))
    return [one for one in found.values() if one.chunks or one.shortened], sorted(chain.from_iterable(new.values()))


def _tenant(event: Event) -> str:
    return str(event.body.get("tenant", ""))


def disclosure(request: PageRequest) -> Page:
    """Builds the page."""
    tenants = request.tenants
    tenant = request.tenant(tenants)
    read = request.app.store.latest(KIND, MAX_EVENTS)
    found, new = by_client(
        e
        for e in read
        if _tenant(e) == tenant and e.at in request.time and not request.is_canary(str(e.body.get("client", "")))
    )
    limit = next((d for d in request.app.guard.defenses if isinstance(d, CrawlLimit)), None)
    maps: TopicMapCache = request.http.app.state.topic_maps
    drawn = maps.get(tenant) if found else None
    words: dict[str, int] = {}
    for client in found:
        for chunk, bits in client.chunks.items():
            words[chunk] = words.get(chunk, 0) | bits
    counts = Counter[str]()  # by the ids of the chunks, as on the map
    for name, bits in words.items():
        if is_chunk(name):
            counts[id_of(name)] += bits.bit_count()
    context = {
        "tenants": tenants,
        "tenant": tenant,
        "missing": len(read) == MAX_EVENTS and read[0].at > request.time.start,
        "limit": limit,
        "chunks": len(counts),
        "total": request.app.index.moments(tenant).n,
        "words": sum(bits.bit_count() for bits in words.values()),
        "trend": _trend(request, new),
        "image": drawn and _map(request, drawn, counts, tenant),
        "map": drawn,
        "listing": _table(request, found),
    }
    return Page("disclosure.html", context)


def _table(request: PageRequest, found: list[ClientDisclosure]) -> Table:
    """The clients, those with most words first."""
    columns = (
        request.client_column,
        Column("Words", lambda c: c.words, "words", True),
        Column("Chunks", lambda c: c.chunk_count, "chunks", True),
        Column("Above the share", lambda c: len(c.exposed), "exposed", True),
        Column("Cut answers", lambda c: c.shortened, "cut", True),
        Column("Last answer", lambda c: c.last, "last", True),
    )
    return request.table("Clients", columns, found, order="-words")


def _trend(request: PageRequest, new: list[tuple[datetime, int]]) -> FramedChart | None:
    """Newly disclosed words in each bin of the range; None if there were none."""
    if not new:
        return None
    bins = request.time.bins
    counts = [sum(new[i][1] for i in own) for own in by_bin(bins, [at for at, _ in new])]
    links = [
        b.link(request.url("disclosure", **b.parameters), plural(count, "new word"))
        for b, count in zip(bins, counts, strict=True)
    ]
    return request_bars([(count, 0) for count in counts], links, f"{plural(sum(counts), 'word')} disclosed over time")


def _map(request: PageRequest, found: TopicMap, words: Mapping[str, int], tenant: str) -> Drawing:
    """The map of topics with a ring around each disclosed chunk; its area grows with the disclosed words."""

    def ring(d: Document) -> tuple[float, str, str] | None:
        if not (count := words.get(d.id)):
            return None
        title = f"{d.source}: {plural(count, 'word')} disclosed"
        return min(4.0 + math.sqrt(count), 14.0), title, request.url("documents", tenant=tenant)

    return found.draw(ring)
