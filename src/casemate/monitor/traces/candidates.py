"""Drafts canaries for the topics that users ask about and no canary watches, and keeps those that the system passes.

A candidate asks about the document that is nearest to most questions of its topic. If the questions were recorded
(``privacy.log_text``), it is one of them; else rules write its question from the document.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from casemate.monitor.canaries.canary import Canary
from casemate.monitor.canaries.coverage import RegionMap
from casemate.monitor.canaries.drafts import SENTINEL, CanaryDrafter
from casemate.monitor.canaries.results import CanaryStatus
from casemate.monitor.canaries.run import CanaryRunner
from casemate.monitor.canaries.suggest import canaries_yaml, run_with_contexts
from casemate.monitor.traces.traffic import TracedQuestion, TrafficCoverage
from casemate.protocols import TARGET_DETAILS
from casemate.reports.format import plural
from casemate.types import Document

CATEGORY = "real_traffic"
PER_TOPIC, DRAFTS = 2, 4
"""Candidates of one topic, and questions that are tried for each."""


@dataclass(frozen=True, slots=True)
class CanaryCandidates:
    """Candidates for review.

    Attributes:
        notes: Topic and number of questions of each, by id.
        dropped: Topics of the documents for which no question passed.
    """

    canaries: tuple[Canary, ...]
    notes: dict[str, str]
    dropped: tuple[str, ...]

    @property
    def text(self) -> str:
        """The candidates as a YAML file with comments, for ``read_canaries``."""
        lines = [
            "# Canaries drafted by casemate from recorded traffic. This file may contain questions of your users and",
            "# text of your documents: protect it like them. Review it, then add its canaries to your set.",
        ]
        return canaries_yaml(lines, self.canaries, self.notes)


@dataclass
class _Slot:
    """One document that a canary is drafted for."""

    topic: str
    document: Document
    asked: int
    drafts: Iterator[str]


async def draft_candidates(
    corpus: RegionMap,
    coverage: TrafficCoverage,
    questions: Sequence[TracedQuestion],
    runner: CanaryRunner,
    count: int = 20,
    seed: int = 7,
) -> CanaryCandidates:
    """Drafts at most ``count`` candidates, and tests them with the runner; the regions are those of the coverage."""
    slots = dict(enumerate(_slots(corpus, coverage, questions, seed)[:count]))
    tells, k = getattr(runner.target, "tells", TARGET_DETAILS), runner.k
    kept: dict[int, Canary] = {}
    for number in range(DRAFTS):
        drafts = {i: query for i, slot in slots.items() if i not in kept and (query := next(slot.drafts, ""))}
        canaries = {i: _canary(i, query, slots[i].document, tells) for i, query in drafts.items()}
        asked = replace(runner, canaries=tuple(canaries.values()))
        found = await run_with_contexts(asked, {k, max(k // 2, 1)}, f"traffic-{number}")
        kept |= {i: canary for i, canary in canaries.items() if found[canary.id].status is CanaryStatus.PASS}
    notes = {
        canary.id: f"topic: {slots[i].topic}; its document is the nearest to {plural(slots[i].asked, 'question')}"
        for i, canary in kept.items()
    }
    dropped = tuple(slot.topic for i, slot in slots.items() if i not in kept)
    return CanaryCandidates(tuple(kept[i] for i in sorted(kept)), notes, dropped)


def _slots(corpus: RegionMap, coverage: TrafficCoverage, questions: Sequence[TracedQuestion], seed: int) -> list[_Slot]:
    """The most asked documents of each topic without a canary, most asked topics first."""
    asking = defaultdict[str, list[TracedQuestion]](list)
    held = {document.id for document in corpus.documents}
    for question in questions:
        if (nearest := question.nearest_among(held)) is not None:
            asking[nearest].append(question)
    drafter = CanaryDrafter(corpus.genre, np.random.default_rng(seed))
    found: list[_Slot] = []
    for topic in coverage.unwatched:
        documents = [d for d in corpus.documents_of(topic.region) if d.id in asking]
        for document in sorted(documents, key=lambda d: -len(asking[d.id]))[:PER_TOPIC]:
            asked = asking[document.id]
            found.append(_Slot(topic.name, document, len(asked), _drafts(drafter, document, asked)))
    return found


def _drafts(drafter: CanaryDrafter, document: Document, asked: Sequence[TracedQuestion]) -> Iterator[str]:
    """Questions about a document: recorded ones, the most frequent wordings first; then those that rules write."""
    yield from (text for text, _ in Counter(q.text for q in asked if q.text).most_common(DRAFTS))
    yield from (draft.query for draft in islice(drafter.about(SENTINEL, document, 0), DRAFTS))


def _canary(number: int, query: str, document: Document, tells: Collection[str]) -> Canary:
    """A canary with the strictest expectation that the target supports."""
    expected: dict[str, Any] = {"expected_refusal": False}
    if "ids" in tells:
        expected = {"expected_documents": (document.id,)}
    elif "sources" in tells:
        expected = {"expected_sources": (document.source,)}
    return Canary(id=f"traffic-{number + 1:02d}", category=CATEGORY, query=query, **expected)
