"""Real traffic from recorded traces: which topics users ask about, which of them no canary watches, and drift."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

from casemate.maths.stats import Estimate, proportion
from casemate.monitor.canaries.coverage import CorpusRegion, RegionMap
from casemate.monitor.canaries.results import group_by
from casemate.monitor.drift.answer_drift import Observation
from casemate.monitor.traces.recorder import TRACE_KIND
from casemate.monitor.traces.span_content import QuestionPlace, TracedDocument, wording_order
from casemate.protocols import Embedder, EventStore, Index
from casemate.types import Event

Contexts: TypeAlias = Mapping[str, frozenset[str]]
"""Ids of the documents in the context of each canary."""


@dataclass(frozen=True, slots=True)
class TracedQuestion:
    """One question of real traffic, from all spans of its trace; None or empty where unknown.

    Attributes:
        asked: Number of its words.
        nearest: Documents nearest to it when it was recorded, best first.
        flagged_by: ``trace`` if the traced system's guard did, ``guard`` if this system's guard judged it.
        text: The question, where ``privacy.log_text`` was set.
    """

    trace: str
    at: datetime
    asked: int
    nearest: tuple[TracedDocument, ...] = ()
    flagged: bool | None = None
    flagged_by: str = ""
    refused: bool | None = None
    words: int | None = None
    documents: tuple[TracedDocument, ...] = ()
    text: str = ""

    def nearest_among(self, ids: Container[str]) -> str | None:
        """Id of the nearest document that is one of these; None if there is none."""
        return next((d.id for d in self.nearest if d.id in ids), None)


@dataclass(frozen=True, slots=True)
class TrafficTopic(CorpusRegion):
    """A region of the corpus with the questions about it.

    Attributes:
        questions: Questions whose nearest document, of those still in the index, is in it.
    """

    region: int
    questions: int


@dataclass(frozen=True, slots=True)
class TrafficCoverage:
    """How much of the traffic a canary set watches.

    Attributes:
        topics: Topics with questions, most asked first.
        watched: Share of the placed questions whose nearest document, of those still in the index, is in a canary's
            context; None: there are none.
        unplaced: Questions without a topic: recorded without nearest documents, or these are gone.
    """

    topics: tuple[TrafficTopic, ...]
    watched: Estimate | None
    placed: int
    unplaced: int

    @property
    def unwatched(self) -> tuple[TrafficTopic, ...]:
        """The topics that no canary covers."""
        return tuple(topic for topic in self.topics if not topic.canaries)


def read_traffic(store: EventStore, tenant: str, since: datetime | None = None) -> list[TracedQuestion]:
    """The recorded questions of a tenant, oldest first.

    Raises:
        BackendError: If the store cannot be read.
    """
    return join_spans(event for event in store.scan(TRACE_KIND, since) if event.body.get("tenant") == tenant)


def join_spans(events: Iterable[Event]) -> list[TracedQuestion]:
    """Joins the spans of each trace, in whatever order they were recorded. A trace without a question is left out."""
    traces = group_by(events, lambda event: str(event.body.get("trace", "")))
    found = (_question_of(name, spans) for name, spans in traces.items())
    return sorted((one for one in found if one), key=lambda one: one.at)


def _question_of(trace: str, spans: Sequence[Event]) -> TracedQuestion | None:
    ordered = sorted(spans, key=_order)
    asking = next((e for e in ordered if e.body.get("asked") is not None), None)
    if asking is None:
        return None
    answering = next((e for e in [asking, *ordered] if e.body.get("refused") is not None), None)
    flagged, by = _verdict(ordered)
    in_time = sorted(ordered, key=lambda e: e.at)
    return TracedQuestion(
        trace,
        asking.at,
        int(asking.body["asked"]),
        next((d for e in ordered if (d := _documents(e.body.get("nearest")))), ()),
        flagged,
        by,
        bool(answering.body["refused"]) if answering else None,
        int(answering.body["words"]) if answering else None,
        tuple(dict.fromkeys(d for e in in_time for d in _documents(e.body.get("documents")))),
        str(asking.body.get("text", "")),
    )


def _verdict(ordered: Sequence[Event]) -> tuple[bool | None, str]:
    """The verdict of the traced system's guard on any query of the trace; else that about the user's own wording."""
    judged = [e.body for e in ordered if e.body.get("flagged") is not None]
    if own := [body for body in judged if body.get("flagged_by") == "trace"]:
        return any(body["flagged"] for body in own), "trace"
    return (bool(judged[0]["flagged"]), "guard") if judged else (None, "")


def _order(event: Event) -> tuple[int, bool, float]:
    place = int(event.body.get("place", QuestionPlace.MODEL))
    return wording_order(place, bool(event.body.get("root")), event.at)


def _documents(raw: Any) -> tuple[TracedDocument, ...]:
    rows = raw if isinstance(raw, list) else []
    return tuple(TracedDocument(str(row[0]), str(row[1])) for row in rows if isinstance(row, list) and len(row) == 2)


def answers(questions: Iterable[TracedQuestion]) -> list[Observation]:
    """The answers, as observations for drift: refusals, lengths, contexts and verdicts."""
    return [
        Observation(
            q.trace,
            q.at,
            q.refused,
            q.words,
            tuple(d.id for d in q.documents if d.id),
            tuple(d.source or d.id for d in q.documents),
            q.flagged,
        )
        for q in questions
    ]


def topics_asked(questions: Iterable[TracedQuestion]) -> list[Observation]:
    """The questions, as observations for drift: their lengths, and the documents nearest to them."""
    return [
        Observation(
            q.trace, q.at, None, q.asked, tuple(d.id for d in q.nearest), tuple(d.source or d.id for d in q.nearest)
        )
        for q in questions
    ]


def canary_contexts(
    index: Index, embedder: Embedder, queries: Mapping[str, str], k: int, tenant: str
) -> dict[str, frozenset[str]]:
    """The documents that are retrieved for the question of each canary, by id."""
    vectors = embedder.embed(list(queries.values())) if queries else ()
    return {
        name: frozenset(hit.document.id for hit in index.search(vector, k, tenant).hits)
        for name, vector in zip(queries, vectors, strict=True)
    }


def measure_traffic(corpus: RegionMap, contexts: Contexts, questions: Sequence[TracedQuestion]) -> TrafficCoverage:
    """Counts questions by topic, and the share that canaries watch."""
    region_of, covering = corpus.region_of, corpus.covering(contexts)
    watched = frozenset[str]().union(*contexts.values())
    asked, hits = Counter[int](), 0
    for question in questions:
        document = question.nearest_among(region_of)
        if document is not None:
            asked[region_of[document]] += 1
            hits += document in watched
    sizes, placed = corpus.sizes, asked.total()
    topics = [
        TrafficTopic(corpus.names[region], int(sizes[region]), covering.get(region, ()), region, count)
        for region, count in asked.most_common()
    ]
    share = proportion(hits, placed) if placed else None
    return TrafficCoverage(tuple(topics), share, placed, len(questions) - placed)
