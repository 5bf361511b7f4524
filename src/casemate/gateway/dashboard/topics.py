"""The topic map: chunks of a tenant by similarity, with the withheld ones marked. Probing shows as a cluster.

The map is the plane of largest variance through a sample of the chunks: a projection of hundreds of dimensions. It is
computed once for each state of a tenant's index, at most every ``REFRESH_S`` seconds. A topic is labeled with words
that distinguish it (class-based TF-IDF, Grootendorst 2022, arXiv 2203.05794).

Deviation: a word of a label occurs in several sources, because a rare word may identify a person.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from casemate.errors import CasemateError
from casemate.gateway.dashboard.page import Page, PageRequest
from casemate.gateway.dashboard.records import withheld_phrase
from casemate.gateway.dashboard.table import Column
from casemate.guard.defenses.reindex import Reindex
from casemate.maths.clustering import NOISE, Labels, principal_components, spherical_kmeans
from casemate.reindexing.space import chunk_key
from casemate.reports.format import plural
from casemate.reports.svg import Drawing, share_bar, topic_map
from casemate.system import App
from casemate.text.markup import without_links
from casemate.text.tokens import STOP_WORDS, stem, words
from casemate.types import Document, Float64, Vector

MAX_DRAWN, MAX_READ = 1500, 50_000
"""Chunks that are drawn, and chunks that the sample is drawn from, the oldest first."""
TOPICS, MIN_CHUNKS = 8, 30
REFRESH_S = 60.0
SEED = 7
MAX_WORDS, MIN_SOURCES = 3, 3
"""Words of a topic's label, and sources that each of them occurs in."""


@dataclass(frozen=True, eq=False)
class TopicMap:
    """A sample of a tenant's chunks in the plane, with topics.

    Attributes:
        read: Chunks that the sample was drawn from.
        documents: Without texts.
        points: Coordinates, (n, 2).
        labels: Topics, (n,), 0 is the largest; ``NOISE`` for none.
        names: Label of each of the largest ``TOPICS`` topics, in words; empty if no word distinguishes it.
    """

    chunks: int
    read: int
    documents: Sequence[Document]
    points: Float64
    labels: Labels
    names: Sequence[str]
    method: str

    def draw(self, ring: Callable[[Document], tuple[float, str, str] | None]) -> Drawing:
        """Draws the map, with a ring around each chunk for which ``ring`` returns radius, title and address."""
        found = ((i, ring(d)) for i, d in enumerate(self.documents))
        names = [f"{i} {name.partition(',')[0]}".strip() for i, name in enumerate(self.names, 1)]
        return topic_map(self.points, self.labels.tolist(), [(i, *one) for i, one in found if one], names)


class TopicMapCache:
    """Computes and caches the maps of all tenants."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._maps: dict[str, tuple[int, float, TopicMap]] = {}
        self._lock = threading.Lock()

    def chunks(self, tenant: str, topic: str) -> frozenset[str]:
        """Ids of the sampled chunks of a topic, by its number from 1; empty if there is no such topic. Blocks."""
        found = self.get(tenant)
        wanted = int(topic) - 1 if topic.isdecimal() and len(topic) < 4 else NOISE
        if found is None or wanted < 0:
            return frozenset()
        return frozenset(d.id for d, label in zip(found.documents, found.labels, strict=True) if label == wanted)

    def get(self, tenant: str) -> TopicMap | None:
        """Returns the map of a tenant; None below ``MIN_CHUNKS`` chunks. Blocks, for seconds if there are many."""
        with self._lock:
            n = self._app.index.moments(tenant).n
            if n < MIN_CHUNKS:
                return None
            cached = self._maps.get(tenant)
            if cached and (cached[0] == n or time.monotonic() - cached[1] < REFRESH_S):
                return cached[2]
            computed = _compute(self._app, tenant, n)
            self._maps[tenant] = (n, time.monotonic(), computed)
            return computed


def _compute(app: App, tenant: str, n: int) -> TopicMap:
    documents, vectors, read = _sample(app, tenant)
    labels, method = _topics(app, tenant, documents, vectors)
    sizes = Counter(int(label) for label in labels if label != NOISE)
    order = {label: i for i, (label, _) in enumerate(sizes.most_common())}
    ranked = np.array([order.get(int(label), NOISE) for label in labels], np.int64)
    bare = [replace(d, text="", metadata={}) for d in documents]
    names = [topic_name(documents, ranked, topic) for topic in range(TOPICS)]
    return TopicMap(n, read, bare, principal_components(vectors, 2), ranked, names, method)


def topic_name(documents: Sequence[Document], labels: Labels, topic: int) -> str:
    """Labels a topic with at most ``MAX_WORDS`` words that are frequent in its chunks and rare in others.

    The most distinctive first; each occurs in at least ``MIN_SOURCES`` sources of the topic. Empty if there are none.
    """
    sources: defaultdict[str, set[str]] = defaultdict(set)
    inside, outside, size = Counter[str](), Counter[str](), 0
    for document, label in zip(documents, labels, strict=True):
        found = {
            w for w in words(without_links(document.content)) if len(w) > 2 and w.isalpha() and w not in STOP_WORDS
        }
        (inside if label == topic else outside).update(found)
        if label == topic:
            size += 1
            for word in found:
                sources[word].add(document.source)
    others = max(len(documents) - size, 1)
    scores = {
        word: count / size * math.log(1 + (count / size) / ((outside[word] + 1) / others))
        for word, count in inside.items()
        if len(sources[word]) >= MIN_SOURCES and count / size > (outside[word] / others)
    }
    named: dict[str, str] = {}
    for word in sorted(scores, key=lambda w: (-scores[w], w)):
        named.setdefault(stem(word), word)  # one form of each word
        if len(named) == MAX_WORDS:
            break
    return ", ".join(named.values())


def _sample(app: App, tenant: str) -> tuple[list[Document], Vector, int]:
    """A uniform sample of the first ``MAX_READ`` chunks of a tenant (reservoir sampling)."""
    rng = np.random.default_rng(SEED)
    kept, rows, read = list[Document](), list[Vector](), 0
    for documents, E in app.index.scan(tenant):
        for document, vector in zip(documents, E, strict=True):
            place = read if read < MAX_DRAWN else int(rng.integers(read + 1))
            read += 1
            if place == len(kept):
                kept.append(document)
                rows.append(np.array(vector, np.float32))
            elif place < MAX_DRAWN:
                kept[place], rows[place] = document, np.array(vector, np.float32)
        if read >= MAX_READ:
            break
    return kept, np.array(rows, np.float32), read


def _topics(app: App, tenant: str, documents: Sequence[Document], E: Vector) -> tuple[Labels, str]:
    """The topics of the active re-indexing; else clusters computed for this map."""
    defense = next((d for d in app.guard.defenses if isinstance(d, Reindex)), None)
    if defense is not None:
        try:
            active = defense.ready(tenant)
            keys = np.array([chunk_key(d) for d in documents], np.uint64)
            return active.topics(keys, E), f"topics of the active re-indexing (version {active.version})"
        except CasemateError:  # the overview shows that none is active
            pass
    classes = min(TOPICS, max(2, len(E) // 15))
    return spherical_kmeans(E, classes, SEED), f"{classes} k-means clusters, computed for this map"


def topics(request: PageRequest) -> Page:
    """Builds the page."""
    tenants = request.tenants
    tenant = request.tenant(tenants)
    maps: TopicMapCache = request.http.app.state.topic_maps
    found = maps.get(tenant)
    context: dict[str, Any] = {"tenants": tenants, "tenant": tenant, "min_chunks": MIN_CHUNKS, "map": found}
    if found is not None:
        verdicts = request.verdicts([tenant])
        hits, withheld = Counter(chunk for v in verdicts if v.flagged for chunk in v.hidden), withheld_phrase(verdicts)

        def ring(d: Document) -> tuple[float, str, str] | None:
            url = request.url("verdicts", document=d.id, tenant=tenant, asker="all")
            times = f"{d.source}: {withheld}, {plural(hits[d.id], 'time')}"
            return (min(6.0 + hits[d.id], 14.0), times, url) if hits[d.id] else None

        columns = (
            Column("Topic", lambda row: row["topic"], "topic"),
            Column("Share of chunks", lambda row: row["share"], "share", True),
            Column(withheld.capitalize(), lambda row: row["withheld"], "withheld", True),
        )
        context["withheld"] = withheld
        context["image"] = found.draw(ring)
        context["listing"] = request.table("Topics", columns, _rows(request, found, hits, tenant), order="topic")
    return Page("topics.html", context)


def _rows(request: PageRequest, found: TopicMap, hits: Counter[str], tenant: str) -> list[dict[str, Any]]:
    """The topics that have a color, with their label, share, withheld chunks and most frequent sources."""
    rows = []
    for topic in range(TOPICS):
        own = [d for d, label in zip(found.documents, found.labels, strict=True) if label == topic]
        if own:
            share = len(own) / len(found.documents)
            rows.append(
                {
                    "topic": topic,
                    "name": found.names[topic],
                    "share": share,
                    "bar": share_bar(share),
                    "chunks": len(own),
                    "withheld": sum(hits[d.id] > 0 for d in own),
                    "url": request.url("verdicts", topic=str(topic + 1), tenant=tenant, asker="all"),
                    "sources": [source for source, _ in Counter(d.source for d in own).most_common()],
                }
            )
    return rows
