"""The verdict explorer: decisions of the guard with margin, withheld documents and reason."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException

from casemate.gateway.dashboard.page import Page, PageRequest, url
from casemate.gateway.dashboard.records import VerdictRecord, by_request, flagged_share
from casemate.gateway.dashboard.table import Column
from casemate.gateway.dashboard.time_range import by_bin
from casemate.gateway.dashboard.topics import TopicMapCache
from casemate.reports.format import plural
from casemate.reports.svg import Drawing, FramedChart, score_meter, score_scatter
from casemate.reports.verdicts import evidence_items, reason, score_figures, score_position

OUTCOMES = (
    ("", "all"),
    ("flagged", "flagged"),
    ("again", "withheld again"),
    ("passed", "passed"),
    ("undecided", "undecided"),
    ("failed", "defense failed"),
)
"""Values of the filter by outcome, and their labels."""
ASKERS = (("", "clients"), ("canaries", "canaries"), ("all", "all"))


def explorer(request: PageRequest) -> Page:
    """Builds the list of verdicts, with its filters."""
    tenants = request.tenants
    visible = request.verdicts(tenants)
    filters = _Filters.of(request, tenants)
    found = [v for v in visible if filters.match(v, request)]
    requests = by_request(found)
    rate, about = flagged_share(requests)
    rows = partial(_row, _spans(found))
    columns = (
        Column("Time", lambda v: v.at, "at", True),
        Column("Outcome", lambda v: (v.outcome_chip[0], v.defense), "outcome"),
        request.client_column,
        Column("Score and threshold", lambda v: v.score, "score", True),
        Column("Withheld", lambda v: len(v.hidden), "withheld", True),
        Column("Reason", lambda v: ", ".join(_texts(v.evidence.get("reasons"))) or None, "reason"),
    )
    context = {
        "missing": request.missing_events,
        "log_text": request.app.config.privacy.log_text,
        "filters": filters,
        "outcomes": OUTCOMES,
        "askers": ASKERS,
        "defenses": sorted({v.defense for v in visible}),
        "tenants": tenants,
        "any": bool(request.records.verdicts.all),
        "rate": rate,
        "rate_about": about,
        "scatter": _scatter(request, found),
        "listing": request.table("Verdicts", columns, found[::-1], order="-at", show=rows),
    }
    return Page("verdicts.html", context)


def detail(request: PageRequest) -> Page:
    """Builds the page of one verdict."""
    tenants = request.tenants
    visible = [v for v in request.records.verdicts.all if v.tenant in tenants]
    found = next((v for v in visible if v.id == request.http.path_params["id"]), None)
    if found is None:
        raise HTTPException(404, "There is no such verdict, or it is too old to be loaded.")
    similar = [v for v in visible if v.defense == found.defense and v.threshold is not None]
    others = [v for v in visible if v.request == found.request and v is not found and found.request]
    context = {
        "verdict": found,
        "meter": _meter(found, _span([*similar, found])),
        "figures": score_figures(found.defense, found.score, found.threshold),
        "reason": reason(found.defense, found.evidence),
        "evidence": evidence_items(found.evidence),
        "log_text": request.app.config.privacy.log_text,
        "client_key": json.dumps([found.tenant, found.client]),
        "recorded": any(r.id == found.request for r in request.records.requests.all),
        "others": others,
    }
    return Page("verdict.html", context)


@dataclass(frozen=True, slots=True)
class _Filters:
    """The filters of the list, as the address has them.

    Attributes:
        client: Part of an id or name.
        document: Part of the id or source of a withheld document.
        search: Part of anything that is shown.
        topic: Number of a topic on the map, from 1.
        chunks: Ids of the chunks of the topic; None without a topic.
    """

    outcome: str
    asker: str
    defense: str
    client: str
    document: str
    search: str
    topic: str
    tenant: str
    chunks: frozenset[str] | None

    @classmethod
    def of(cls, request: PageRequest, tenants: Sequence[str]) -> _Filters:
        """Reads the filters of a request."""
        names = ("outcome", "asker", "defense", "client", "document", "search", "topic")
        given = {name: request.parameter(name) for name in names}
        tenant = request.parameter("tenant") if request.parameter("tenant") in tenants else ""
        maps: TopicMapCache = request.http.app.state.topic_maps
        chunks = maps.chunks(tenant or tenants[0], given["topic"]) if given["topic"] else None
        return cls(**given, tenant=tenant, chunks=chunks)

    def match(self, v: VerdictRecord, request: PageRequest) -> bool:
        """Whether a verdict passes all filters."""
        return (
            self.defense in ("", v.defense)
            and self.tenant in ("", v.tenant)
            and _contains(self.client, v.client, *(request.client_name(v.client) if self.client else ()))
            and _contains(self.document, *v.hidden, *v.sources)
            and (not self.search or _contains(self.search, *_shown(v), *request.client_name(v.client)))
            and (self.chunks is None or not self.chunks.isdisjoint(v.hidden))
            and self.outcome in ("", v.outcome)
            and (
                self.asker == "all"
                or (self.client and not self.asker)
                or request.is_canary(v.client) is (self.asker == "canaries")
            )
        )


def _contains(part: str, *texts: str) -> bool:
    return not part or any(part.lower() in text.lower() for text in texts)


def _shown(v: VerdictRecord) -> list[str]:
    """The texts of a verdict that a search finds."""
    return [
        v.request,
        v.defense,
        v.text,
        *v.hidden,
        *v.sources,
        *_texts(v.evidence.get("reasons")),
    ]


def _scatter(request: PageRequest, found: Sequence[VerdictRecord]) -> FramedChart | None:
    decided = [v for v in found if v.threshold is not None]
    if len(decided) < 2:
        return None
    points, ends = _distances(decided)
    bins = request.time.bins
    kept = {name: value for name, value in request.query.items() if not name.endswith("page")}
    links = [
        b.link(
            url("verdicts", **(kept | b.parameters)),
            f"{plural(len(own), 'verdict')}, {sum(decided[i].newly_flagged for i in own)} flagged",
        )
        for b, own in zip(bins, by_bin(bins, [v.at for v in decided]), strict=True)
        if own
    ]
    said = "Score minus threshold of each verdict over time; above the line means flagged"
    return score_scatter(points, (bins[0].start, bins[-1].end), links, said, ends)


def _distances(decided: Sequence[VerdictRecord]) -> tuple[list[tuple[datetime, float, bool]], tuple[str, str] | None]:
    """Time, score minus threshold, and whether it was flagged; and labels for both ends of the axis.

    The scores of two defenses have no common unit. With several defenses, each distance is a share of the largest one
    of its defense. Both ends have numbers only for one defense without a logarithmic scale.
    """
    distances = [score - threshold for score, threshold in map(_position, decided)]
    largest: dict[str, float] = defaultdict(float)
    for v, distance in zip(decided, distances, strict=True):
        largest[v.defense] = max(largest[v.defense], abs(distance))
    if len(largest) > 1:
        distances = [d / (largest[v.defense] or 1.0) for v, d in zip(decided, distances, strict=True)]
    points = [(v.at, distance, v.flagged) for v, distance in zip(decided, distances, strict=True)]
    if len(largest) > 1 or "crawl_limit" in largest:
        return points, ("far above", "far below")
    return points, None


def _position(v: VerdictRecord) -> tuple[float, float]:
    """Where score and threshold are drawn; a missing threshold at 0."""
    return score_position(v.defense, v.score, v.threshold or 0.0)


def _meter(v: VerdictRecord, span: tuple[float, float]) -> Drawing:
    score, threshold = _position(v)
    return score_meter(score, None if v.threshold is None else threshold, span, v.flagged)


def _span(verdicts: Sequence[VerdictRecord]) -> tuple[float, float]:
    values = [x for v in verdicts for x in _position(v)[: 1 if v.threshold is None else 2]]
    return min(values, default=0.0), max(values, default=1.0)


def _spans(verdicts: Sequence[VerdictRecord]) -> dict[str, tuple[float, float]]:
    """The span of each defense: the scores of two have no common unit."""
    return {name: _span([v for v in verdicts if v.defense == name]) for name in {v.defense for v in verdicts}}


def _row(spans: Mapping[str, tuple[float, float]], v: VerdictRecord) -> dict[str, Any]:
    withheld = ", ".join([plural(len(v.sources), "source")] * bool(v.sources) + [plural(len(v.hidden), "chunk")])
    return {
        "verdict": v,
        "meter": _meter(v, spans[v.defense]),
        "withheld": withheld if v.hidden else "",
        "reasons": ", ".join(_texts(v.evidence.get("reasons"))),
    }


def _texts(value: Any) -> list[str]:
    return [str(x) for x in value] if isinstance(value, list | tuple) else []
