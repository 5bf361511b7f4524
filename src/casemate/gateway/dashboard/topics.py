"""A map of the collection, with what the guard withheld on it: where somebody is probing shows as a cluster.

The map is the plane of largest variance through a sample of the chunks: a shadow of hundreds of dimensions. It is drawn
once for each state of a tenant's index, at most every ``AGAIN_S`` seconds.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from casemate.app import App
from casemate.defenses.reindex import Reindex
from casemate.errors import CasemateError
from casemate.gateway.dashboard.figures import level
from casemate.gateway.dashboard.page import Look, Page, cell, empty, facts, names, percent, table, url
from casemate.gateway.dashboard.verdicts import choice
from casemate.lab.charts import Markup, Scale, join, tag
from casemate.reindexing.space import key
from casemate.reindexing.topics import NOISE, Labels, principal, spherical_kmeans
from casemate.types import Document, Float64, Vector

SHOWN, READ = 1500, 50_000
"""Chunks that are drawn, and chunks that are read to draw them from, the oldest first."""
TOPICS, FEWEST = 8, 30
AGAIN_S = 60.0
SEED = 7
SIZE = 640.0


@dataclass(frozen=True, eq=False)
class Map:
    """Where the chunks of a tenant lie.

    Attributes:
        chunks: In the index.
        read: How many were looked at.
        documents: Those that are drawn; without their texts.
        places: Where, (n, 2).
        labels: Their topics, (n,), the largest is 0; ``NOISE``: none.
        made: How the topics were found.
    """

    chunks: int
    read: int
    documents: Sequence[Document]
    places: Float64
    labels: Labels
    made: str


class Maps:
    """The maps of all tenants, kept."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._held: dict[str, tuple[int, float, Map]] = {}
        self._lock = threading.Lock()

    def of(self, tenant: str) -> Map | None:
        """The map of a tenant; None if it has too few chunks for one. Blocks, for seconds where there are many.

        Raises:
            DataError: If the index is damaged.
        """
        with self._lock:
            n = self._app.index.moments(tenant).n
            if n < FEWEST:
                return None
            held = self._held.get(tenant)
            if held and (held[0] == n or time.monotonic() - held[1] < AGAIN_S):
                return held[2]
            made = _drawn(self._app, tenant, n)
            self._held[tenant] = (n, time.monotonic(), made)
            return made


def _drawn(app: App, tenant: str, n: int) -> Map:
    documents, vectors, read = _sample(app, tenant)
    labels, made = _topics(app, tenant, documents, vectors)
    sizes = Counter(int(label) for label in labels if label != NOISE)
    order = {label: i for i, (label, _) in enumerate(sizes.most_common())}
    ranked = np.array([order.get(int(label), NOISE) for label in labels], np.int64)
    bare = [replace(d, text="", metadata={}) for d in documents]
    return Map(n, read, bare, principal(vectors, 2), ranked, made)


def _sample(app: App, tenant: str) -> tuple[list[Document], Vector, int]:
    """Chunks drawn evenly from the first ``READ`` of a tenant: each has the same chance (reservoir)."""
    rng = np.random.default_rng(SEED)
    kept, rows, read = list[Document](), list[Vector](), 0
    for documents, E in app.index.scan(tenant):
        for document, vector in zip(documents, E, strict=True):
            place = read if read < SHOWN else int(rng.integers(read + 1))
            read += 1
            if place == len(kept):
                kept.append(document)
                rows.append(np.array(vector, np.float32))
            elif place < SHOWN:
                kept[place], rows[place] = document, np.array(vector, np.float32)
        if read >= READ:
            break
    return kept, np.array(rows, np.float32), read


def _topics(app: App, tenant: str, documents: Sequence[Document], E: Vector) -> tuple[Labels, str]:
    """Topics of the re-indexing in force; else groups made for this map."""
    defense = next((d for d in app.guard.defenses if isinstance(d, Reindex)), None)
    if defense is not None:
        try:
            learnt = defense.ready(tenant)
            keys = np.array([key(d) for d in documents], np.uint64)
            return learnt.topics(keys, E), f"the topics of the re-indexing in force (version {learnt.version})"
        except CasemateError:  # that nothing is in force shows on the first page
            pass
    classes = min(TOPICS, max(2, len(E) // 15))
    return spherical_kmeans(E, classes, SEED), f"{classes} groups by k-means, made for this map only"


def topics(look: Look) -> Page:
    """The page."""
    tenants = look.tenants
    tenant = look.tenant(tenants)
    maps: Maps = look.request.app.state.maps
    found = maps.of(tenant)
    chooser = _chooser(tenants, tenant)
    if found is None:
        what = f"Tenant {tenant} has fewer than {FEWEST} chunks: too few for a map."
        return Page("Topics", join([chooser, empty(what, "Add documents with 'casemate index FOLDER'.")]))
    hits = Counter(h for v in look.records.verdicts.all if v.tenant == tenant and v.flagged for h in v.hidden)
    side = tag("div", tag("h2", "Topics"), _list(found, hits), _about(found), class_="side")
    body = tag("div", tag("figure", _picture(found, hits), _legend(), class_="map"), side, class_="mapped")
    lead = (
        "Each dot is a chunk; near dots are alike. A ring marks one that was withheld: many in one place are a probe."
    )
    return Page("Topics", join([chooser, body]), lead=lead)


def _chooser(tenants: Sequence[str], tenant: str) -> Markup:
    if len(tenants) < 2:
        return Markup("")
    options = choice("Tenant", "tenant", tenant, [(t, t) for t in tenants])
    return tag("form", options, tag("button", "Show"), method="get", class_="filters")


def _picture(found: Map, hits: Counter[str]) -> Markup:
    low, high = found.places.min(axis=0), found.places.max(axis=0)
    x = Scale(float(low[0]), float(high[0]), 14.0, SIZE - 14)
    y = Scale(float(low[1]), float(high[1]), SIZE - 14, 14.0)
    at = [(x(float(a)), y(float(b))) for a, b in found.places]
    marks = [_dots([p for p, c in zip(at, found.labels, strict=True) if not 0 <= c < TOPICS], "other")]
    for topic in range(TOPICS):
        marks.append(_dots([p for p, c in zip(at, found.labels, strict=True) if c == topic], f"t{topic}"))
    for document, (a, b) in zip(found.documents, at, strict=True):
        if hits[document.id]:
            title = tag("title", f"{document.source}: withheld {hits[document.id]} times")
            marks.append(tag("circle", title, class_="ring", cx=a, cy=b, r=min(6.0 + hits[document.id], 14.0)))
    for topic in range(TOPICS):
        own = found.places[found.labels == topic]
        if len(own):
            a, b = np.median(own, axis=0)
            marks.append(tag("text", str(topic + 1), x=x(float(a)), y=y(float(b)) + 6))
    said = f"{len(at)} chunks in {len(set(found.labels.tolist()) - {NOISE})} topics"
    return tag("svg", *marks, viewBox=f"0 0 {SIZE:g} {SIZE:g}", role="img", aria_label=said)


def _dots(places: Sequence[tuple[float, float]], kind: str) -> Markup:
    return tag("path", class_=f"topic {kind}", d=" ".join(f"M{a:.1f},{b:.1f}h.01" for a, b in places))


def _legend() -> Markup:
    ring = tag(
        "svg",
        tag("circle", class_="ring", cx=8.0, cy=8.0, r=5.0),
        viewBox="0 0 16 16",
        class_="key-ring",
        aria_hidden="true",
    )
    return tag("figcaption", ring, "withheld from an answer, as far as verdicts are kept here; larger: more often")


def _list(found: Map, hits: Counter[str]) -> Markup:
    rows = []
    for topic in range(TOPICS):
        own = [d for d, c in zip(found.documents, found.labels, strict=True) if c == topic]
        if not own:
            continue
        gone = sum(hits[d.id] > 0 for d in own)
        sources = [source for source, _ in Counter(d.source for d in own).most_common()]
        part = len(own) / len(found.documents)
        number = tag("span", str(topic + 1), class_=f"swatch t{topic}")
        rows.append(
            tag(
                "tr",
                cell("Topic", number),
                cell("Share of chunks", level(part), tag("small", percent(part))),
                cell("Withheld", f"{gone} of {len(own)} chunks" if gone else "none"),
                cell("For example", names(sources, 2), kind="wrap"),
            )
        )
    return table(("Topic", "Share of chunks", "Withheld", "For example"), rows, "Topics", "cards")


def _about(found: Map) -> Markup:
    read = "all" if found.read >= found.chunks else f"the {found.read:,} oldest"
    drawn = f"{len(found.documents):,} of {found.chunks:,}, drawn from {read}"
    return facts(
        [("Chunks drawn", drawn), ("Topics", found.made), ("Documents", tag("a", "the list", href=url("documents")))]
    )
