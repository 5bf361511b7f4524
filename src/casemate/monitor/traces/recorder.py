"""Records traces as events: what was asked about, whether it was flagged, and how the answer looked.

An event has no text, unless ``privacy.log_text`` is set; then it has the question. Instead it has the ids of the
documents nearest to the question. So coverage can be measured later, for any canary set. No vector of a question is
stored, because a text can be approximated from its vector.

The id of an event follows from tenant, trace and span. So a span that is sent twice, or to several gateways, is
recorded once. Spans of one trace may arrive in any order, in any number of requests; ``traffic`` joins them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from casemate.errors import QueryError
from casemate.guard.guard import Guard
from casemate.monitor.traces.span_content import Span, SpanContent, TracedDocument, read_content, safe_id, wording_order
from casemate.protocols import EventStore
from casemate.rag.pipeline import MAX_QUERY_CHARACTERS, Rag
from casemate.runtime.events import digest
from casemate.text.refusals import is_refusal
from casemate.text.tokens import words
from casemate.types import Event, Query

TRACE_KIND = "trace"
"""Kind of the events that record one span of one trace."""
MAX_JUDGED = 500
"""Questions of one batch whose nearest documents are searched; further ones are recorded without."""
AT_ONCE = 8
"""Questions that are searched in parallel."""


class JudgedQuestion(NamedTuple):
    """A question compared with the index.

    Attributes:
        nearest: The documents nearest to it, best first; empty: unknown.
        flagged: Whether the guard flags it; None: the guard is off or not ready, or could not judge.
    """

    nearest: tuple[TracedDocument, ...] = ()
    flagged: bool | None = None


QuestionJudge: TypeAlias = Callable[[str, str], Awaitable[JudgedQuestion]]
"""Judges a question, given with the id of its trace; raises ``BackendError`` if embedder or index fail."""
JudgeMaker: TypeAlias = Callable[[str], QuestionJudge]
"""Gives the judge for the questions of a tenant. Blocks."""


class RecordedSpans(NamedTuple):
    """Numbers of spans by outcome.

    Attributes:
        recorded: Recorded, now or before.
        ignored: Contain no question, answer, document or verdict.
        unjudged: Questions without nearest documents: too long, not plain text, or too many at once.
        untimed: Recorded with the time of arrival: their own is not usable.
    """

    recorded: int = 0
    ignored: int = 0
    unjudged: int = 0
    untimed: int = 0

    def plus(self, other: RecordedSpans) -> RecordedSpans:
        """The sums."""
        return RecordedSpans(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class TraceRecorder:
    """Records spans, and their questions if ``log_text`` is set."""

    store: EventStore
    make_judge: JudgeMaker
    log_text: bool = False

    async def record(self, spans: Sequence[Span], tenant: str, now: datetime) -> RecordedSpans:
        """Queues an event for each span with content. The caller waits until the store has written them.

        Raises:
            BackendError: If embedder or index fail; nothing of the batch is recorded then.
        """
        read = await asyncio.to_thread(lambda: [(span, read_content(span)) for span in spans])
        kept = [(span, content) for span, content in read if not content.empty]
        asked = _first_questions(kept)
        judged = await self._judge(asked, tenant)
        for span, content in kept:
            self.store.append(self._event(span, content, judged.get((span.trace, span.id)), tenant, now))
        untimed = sum(span.start is None for span, _ in kept)
        return RecordedSpans(len(kept), len(read) - len(kept), len(asked) - len(judged), untimed)

    async def _judge(
        self, questions: Sequence[tuple[Span, SpanContent]], tenant: str
    ) -> dict[tuple[str, str], JudgedQuestion]:
        """Judges the questions, by ids of trace and span."""
        asked = [(s, c) for s, c in questions if len(c.question) <= MAX_QUERY_CHARACTERS][:MAX_JUDGED]
        if not asked:
            return {}
        judge, slots = await asyncio.to_thread(self.make_judge, tenant), asyncio.Semaphore(AT_ONCE)

        async def one(span: Span, content: SpanContent) -> JudgedQuestion | None:
            async with slots:
                try:
                    return await judge(content.question, span.trace)
                except QueryError:  # no text that can be asked, such as NUL characters
                    return None

        found = await asyncio.gather(*(one(span, content) for span, content in asked))
        return {(s.trace, s.id): verdict for (s, _), verdict in zip(asked, found, strict=True) if verdict}

    def _event(
        self, span: Span, content: SpanContent, judged: JudgedQuestion | None, tenant: str, now: datetime
    ) -> Event:
        verdict, by = (
            (content.flagged, "trace") if content.flagged is not None else (judged and judged.flagged, "guard")
        )
        body: dict[str, Any] = {
            "trace": safe_id(span.trace),
            "tenant": tenant,
            "root": not span.parent,
            "place": int(content.place),
            "asked": len(words(content.question)) if content.question else None,
            "nearest": [list(d) for d in judged.nearest] if judged else [],
            "flagged": verdict,
            "flagged_by": by if verdict is not None else "",
            "refused": None if content.answer is None else is_refusal(content.answer),
            "words": None if content.answer is None else len(words(content.answer)),
            "documents": [list(d) for d in content.documents],
        }
        if self.log_text and content.question:
            text = content.question[:MAX_QUERY_CHARACTERS].replace("\0", " ")
            body["text"] = text.encode("utf-8", "replace").decode()
        return Event(_event_id(span, tenant), span.start or now, TRACE_KIND, body)


def _first_questions(kept: Sequence[tuple[Span, SpanContent]]) -> list[tuple[Span, SpanContent]]:
    """The span of each trace that most likely has the user's own wording."""
    best: dict[str, tuple[Span, SpanContent]] = {}
    for span, content in kept:
        if content.question:
            before = best.get(span.trace)
            if before is None or _order(span, content) < _order(*before):
                best[span.trace] = span, content
    return list(best.values())


def _order(span: Span, content: SpanContent) -> tuple[int, bool, float]:
    return wording_order(content.place, not span.parent, span.start)


def _event_id(span: Span, tenant: str) -> str:
    return f"{TRACE_KIND}:{digest(json.dumps([tenant, span.trace, span.id]), length=40)}"


@dataclass(frozen=True, slots=True)
class GuardJudge:
    """Judges questions with a guard of its own, which records nothing, or with the bare pipeline if it is not ready.

    None: the tenant has no documents.
    """

    target: Guard | Rag | None
    tenant: str
    k: int

    async def __call__(self, question: str, trace: str) -> JudgedQuestion:
        """See ``QuestionJudge``. Each trace is a client of its own."""
        if self.target is None:
            return JudgedQuestion()
        query = Query(question, f"trace-{safe_id(trace)}", self.tenant, self.k)
        if isinstance(self.target, Rag):
            retrieval, flagged = await self.target.retrieve(query), None
        else:
            retrieval, verdicts = await self.target.retrieve(query)
            failed = any("error" in verdict.evidence for verdict in verdicts)
            found = any(verdict.flagged for verdict in verdicts)
            flagged = None if (failed and not found) or not verdicts else found
        nearest = (TracedDocument(safe_id(h.document.id), safe_id(h.document.source)) for h in retrieval.hits)
        return JudgedQuestion(tuple(nearest), flagged)
