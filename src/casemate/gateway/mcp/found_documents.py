"""Judges the results of another retriever: they select documents of the index, and the guard decides about these.

Only the index has the similarity statistics for a decision, and only its documents have sources and labels. So a result
is replaced by the documents of the index that have its text. Results without such a document are dropped. The number of
returned documents does not depend on the results: it would reveal whether the other retriever has a text.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from casemate.guard.audience import ReleasedDocument
from casemate.guard.guard import Guard, UnreadableRemoval
from casemate.guard.verdict_log import append
from casemate.maths.moments import given_first, without_documents
from casemate.rag.pipeline import Rag
from casemate.types import Action, Document, Hit, Query, Retrieval, Vector, Verdict

DEPTH = 1000
"""Nearest documents to a query among which a result is looked for."""
MIN_PART = 30
"""Minimum number of characters of a part of a document that identifies it."""
_log = logging.getLogger(__name__)


async def judge_found(guard: Guard, query: Query, texts: Sequence[str], *, off: bool = False) -> list[Document]:
    """Returns the documents that the guard allows: those that another retriever found, then those of its own retrieval.

    There are k, whatever was found and withheld; fewer only if the client may not have more of the index. Both
    retrievals are judged; the log gets one verdict of each defense (``merge_verdicts``). A defense that replaces
    unreadable documents acts on the guard's own retrieval only, and what it releases is always delivered. The texts
    come best first. If the guard is off, only the access labels decide.
    """
    rag = guard.rag
    if not off:
        await guard.judge_turn(query)
    vector = await rag.encode(query)
    nearest = await rag.search(vector, DEPTH, query.tenant)
    found = await asyncio.to_thread(find_documents, texts, [hit.document for hit in nearest.hits])
    named = {d.id: d for d in found[: query.k]}
    if off:
        kept = [d for d in named.values() if query.may_read(d)]
        others = await rag.find(query, vector, query.k)
    else:
        given = tuple(hit for hit in nearest.hits if hit.document.id in named)
        verdicts: list[Verdict] = []
        try:
            judging = _unlogged(guard.judging_only(), _FoundRag(rag, vector, given))
            judged, first = await judging.retrieve(query)
            verdicts += first
            allowed = {hit.document.id: hit.document for hit in judged.hits}
            kept = [allowed[name] for name in named if name in allowed]
            replaced = frozenset[str]().union(
                *(d.removed for d in judging.defenses if isinstance(d, UnreadableRemoval))
            )
            gone = frozenset(d.source for d in named.values() if d.id not in replaced and d.id not in allowed)
            others, second = await _unlogged(guard, _FoundRag(rag, vector, gone=gone)).retrieve(query)
            verdicts += second
        finally:
            for verdict in merge_verdicts(verdicts):
                append(guard.store, query, verdict, guard.log_text)
    ids = {d.id for d in kept}
    fill = [hit.document for hit in others.hits if hit.document.id not in ids]
    released = [d for d in fill if isinstance(d, ReleasedDocument)]
    whole = [*kept, *(d for d in fill if not isinstance(d, ReleasedDocument))]
    chosen = [*whole[: query.k - len(released)], *released]
    return chosen if off else list(await guard.deliver(query, chosen, metadata=False))


def find_documents(texts: Sequence[str], documents: Sequence[Document]) -> list[Document]:
    """The documents that have these texts, contain them, or are contained in them; in the order of the texts.

    Differences in white space do not count. A text without such a document is dropped, with a line in the log.
    """
    known = [(_plain(d.text), d) for d in documents]
    equal = {form: d for d in reversed(documents) for form in (_plain(d.text), _plain(d.content))}
    found: dict[str, Document] = {}
    dropped = 0
    for text in map(_plain, texts):
        if text in equal:
            same = [equal[text]]
        else:
            same = [d for part, d in known if len(part) >= MIN_PART and part in text]
            same = same or [d for whole, d in known if len(text) >= MIN_PART and text in whole][:1]
        dropped += not same
        found.update((d.id, d) for d in same)
    if dropped:
        _log.warning(
            "%d of %d results of the upstream server are not in the index; index or attach the same collection",
            dropped,
            len(texts),
        )
    return list(found.values())


class _FoundRag(Rag):
    """A ``Rag`` for one query whose vector is known, over documents found for it, by decreasing score; none: all.

    The sources ``gone`` are left out, as if they were not in the index.
    """

    def __init__(
        self, rag: Rag, vector: Vector, given: tuple[Hit, ...] = (), gone: frozenset[str] = frozenset()
    ) -> None:
        vars(self).update(vars(rag))  # the index is open
        self._vector, self._given, self._gone = vector, given, gone

    async def encode(self, query: Query, then: Callable[[], None] = lambda: None) -> Vector:
        await asyncio.to_thread(then)
        return self._vector

    async def search(self, vector: Vector, k: int, tenant: str) -> Retrieval:
        if not self._given:
            found = await super().search(vector, k + DEPTH, tenant)  # constant: otherwise latency would reveal it
            left = without_documents(found, lambda document: document.source in self._gone)
            return replace(left, hits=left.hits[:k])
        found = await super().search(vector, k + len(self._given), tenant)
        return given_first(found, self._given, k)


def merge_verdicts(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """One verdict of each defense about a query that was judged several times.

    It is the most severe one (a failure, then flagged, then the highest score), with the hidden documents of all.
    """
    by_defense: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_defense.setdefault(verdict.defense, []).append(verdict)
    return [
        replace(
            max(several, key=lambda v: (v.action is Action.WITHHOLD, v.flagged, v.score)),
            hidden=tuple(dict.fromkeys(name for v in several for name in v.hidden)),
        )
        for several in by_defense.values()
    ]


def _unlogged(guard: Guard, rag: Rag) -> Guard:
    """A copy of the guard that retrieves from another system, and does not log its verdicts."""
    guard = copy.copy(guard)
    guard.rag, guard.store = rag, None
    return guard


def _plain(text: str) -> str:
    return " ".join(text.split())
