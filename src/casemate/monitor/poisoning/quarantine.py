"""Quarantine: suspicious new documents wait for an operator's decision.

A quarantined source is stored with all its chunks in the event store, and not in the index. The latest decision stays
in force as long as the content is the same: released content is indexed without screening, dropped content stays out.
The event store therefore contains texts of documents: protect it like the index.

All methods raise ``BackendError`` if the store fails. Those that take a key raise ``DataError`` if it matches no
source, or several.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter

from casemate.errors import DataError
from casemate.guard.guard import Guard
from casemate.monitor.poisoning.scoring import ScreeningResult
from casemate.protocols import EventStore, Index, WithholdingIndex
from casemate.runtime.events import append_durably, digest
from casemate.runtime.stored import read_stored
from casemate.types import Document, Event

QUARANTINE_KIND = "quarantine"
"""Kind of the events that store quarantined sources and the decisions about them."""
SCREENING_KIND = "screening"
"""Kind of the events about sources that observe mode indexed although they look poisoned. They contain no text."""
UPDATED = "updated"
"""Kind of change of an event with new metadata of a source about which was decided. The decision stays in force."""
QuarantineState: TypeAlias = Literal["held", "released", "dropped"]


@dataclass(frozen=True, slots=True)
class QuarantinedSource:
    """A quarantined source.

    Attributes:
        key: Identifies this content of this source of this tenant; a unique prefix of its 32 characters suffices.
        state: ``held`` (no decision yet), ``released`` or ``dropped``.
        score: Highest score of its chunks.
        companions: Ids of near-duplicates that came with it or shortly before; they may be in the index.
    """

    key: str
    tenant: str
    source: str
    state: QuarantineState
    at: datetime
    score: float
    reasons: tuple[str, ...]
    companions: tuple[str, ...]
    documents: tuple[Document, ...]


_SOURCE = TypeAdapter(QuarantinedSource)


class Quarantine:
    """Quarantined sources, stored as events."""

    def __init__(self, store: EventStore) -> None:
        self.store = store
        self._found: dict[str, QuarantinedSource] = {}
        self._position = 0
        self._lock = threading.Lock()

    def all(self) -> dict[str, QuarantinedSource]:
        """All sources ever quarantined, by key, oldest first. A later call reads only what is new."""
        with self._lock:
            events, position = self.store.read_since(QUARANTINE_KIND, self._position)
            for event in events:
                body, known = event.body, self._found.get(event.body["key"])
                if body["what"] in ("held", UPDATED):
                    new = _from_event(event)
                    self._found[new.key] = replace(known, documents=new.documents) if known else new
                elif known:
                    self._found[known.key] = replace(known, state=body["what"])
            self._position = position
            return dict(self._found)

    def pending(self) -> list[QuarantinedSource]:
        """Sources without a decision, of all tenants."""
        return [s for s in self.all().values() if s.state == "held"]

    def get(self, key: str) -> QuarantinedSource:
        """The source with this key, key prefix or name."""
        sources = self.all()
        if key in sources:  # first: an uploaded source may have any name, also the key of another
            return sources[key]
        found = [one for one in sources.values() if key and (one.key.startswith(key) or one.source == key)]
        if len(found) != 1:
            raise DataError(f"{key!r} matches {len(found)} quarantined sources; give the whole key of one")
        return found[0]

    def add(self, results: Sequence[ScreeningResult], tenant: str) -> QuarantinedSource:
        """Quarantines one source with all its chunks; if that fails, they are neither stored nor indexed."""
        return self._hold(_screened_source(results, tenant))

    def update(self, documents: Sequence[Document], tenant: str) -> bool:
        """Replaces the chunks of a known source that came again, if its metadata changed. Its content did not.

        Else a release would index it with the first metadata, such as without the access labels that it has now. A
        decision can be changed, so this includes sources that were dropped or released.

        Returns:
            Whether it is not released. One that was released meanwhile may be indexed with the old metadata.
        """
        key, new = quarantine_key(documents, tenant), [_document_as_json(d) for d in documents]
        known = self.all().get(key)
        if known is not None and new != [_document_as_json(d) for d in known.documents]:
            now, what = datetime.now(UTC), known.state if known.state == "held" else UPDATED
            self._hold(replace(known, documents=tuple(documents), at=now), what, f":{now.timestamp():.6f}")
            known = self.all()[key]  # again: an operator may have decided before the update was stored
        return known is None or known.state != "released"

    def record_observed(self, results: Sequence[ScreeningResult], tenant: str) -> QuarantinedSource:
        """Records a suspicious source without its text, and without quarantining it."""
        found = _screened_source(results, tenant)
        self._append(Event(f"{SCREENING_KIND}:{found.key}", found.at, SCREENING_KIND, _described(found)))
        return found

    def approve(self, key: str) -> QuarantinedSource:
        """Allows a source without indexing it: the application that owns the store adds it again."""
        source = self.get(key)
        self._decide(source, "released")
        return replace(source, state="released")

    async def release(self, key: str, guard: Guard) -> QuarantinedSource:
        """Indexes a quarantined or dropped source."""
        source = await asyncio.to_thread(self.get, key)
        # first: after a crash here, it is still in quarantine
        if not await asyncio.to_thread(_change_rows, guard.index, source, admit=True):
            await guard.add(source.documents, source.tenant)
        await asyncio.to_thread(self._decide, source, "released")
        latest = await asyncio.to_thread(self.get, source.key)
        if latest.documents != source.documents:  # updated meanwhile, such as by access labels
            return await self.release(source.key, guard)
        return latest

    async def drop(self, key: str, guard: Guard) -> QuarantinedSource:
        """Rejects a source, and removes it from the index if this content was released before."""
        source = await asyncio.to_thread(self.get, key)
        await asyncio.to_thread(self._decide, source, "dropped")
        if source.state == "released":
            if not await asyncio.to_thread(_change_rows, guard.index, source, admit=False):
                await guard.remove([source.source], source.tenant)
        return replace(source, state="dropped")

    def _hold(self, source: QuarantinedSource, what: str = "held", suffix: str = "") -> QuarantinedSource:
        """Stores a source as quarantined; ``suffix`` makes the event's id differ from that of the first storage."""
        documents = [_document_as_json(d) for d in source.documents]
        body = {"what": what, **_described(source), "companions": list(source.companions), "documents": documents}
        event = Event(f"{QUARANTINE_KIND}:{what}:{source.key}{suffix}", source.at, QUARANTINE_KIND, body)
        found = _from_event(event)  # first: what cannot be read again must not be stored
        self._append(event)
        return found

    def _decide(self, source: QuarantinedSource, decision: QuarantineState) -> None:
        now = datetime.now(UTC)
        body = {"what": decision, "key": source.key, "tenant": source.tenant, "source": source.source}
        event_id = f"{QUARANTINE_KIND}:{decision}:{source.key}:{now.timestamp():.6f}"
        self._append(Event(event_id, now, QUARANTINE_KIND, body))

    def _append(self, event: Event) -> None:
        append_durably(self.store, [event], "the change of the quarantine")


def _change_rows(index: Index, source: QuarantinedSource, *, admit: bool) -> int:
    """Admits or withholds rows that another program stores; returns their number."""
    if not isinstance(index, WithholdingIndex):
        return 0
    return (index.admit if admit else index.withhold)([d.id for d in source.documents], source.tenant)


def quarantine_key(documents: Sequence[Document], tenant: str) -> str:
    """Key of the content of a source: from the digest of its file, or from its texts if it has none."""
    first = documents[0]
    content = [first.digest] if first.digest.partition("@")[0] else [[d.id, d.title, d.text] for d in documents]
    return digest(json.dumps([tenant, first.source, content]), length=32)


def _screened_source(results: Sequence[ScreeningResult], tenant: str) -> QuarantinedSource:
    """One source with all its chunks, from their screening."""
    documents = tuple(r.document for r in results)
    return QuarantinedSource(
        key=quarantine_key(documents, tenant),
        tenant=tenant,
        source=documents[0].source,
        state="held",
        at=datetime.now(UTC),
        score=max(r.score for r in results),
        reasons=tuple(dict.fromkeys(reason for r in results for reason in r.reasons)),
        companions=tuple(sorted({c for r in results for c in r.companions})),
        documents=documents,
    )


def _described(source: QuarantinedSource) -> dict[str, Any]:
    """The fields without text of a document, as JSON."""
    fields = {name: getattr(source, name) for name in ("key", "tenant", "source", "score")}
    return {**fields, "reasons": list(source.reasons)}


def _document_as_json(document: Document) -> dict[str, Any]:
    """A document as JSON. Frameworks put any object into metadata: what JSON lacks becomes text."""
    names = ("id", "text", "title", "source", "digest")
    fields: dict[str, Any] = {name: str(getattr(document, name) or "") for name in names}
    return fields | {"metadata": json.loads(json.dumps(dict(document.metadata), default=str))}


def _from_event(event: Event) -> QuarantinedSource:
    return read_stored(_SOURCE, {**event.body, "state": "held", "at": event.at}, "quarantined source")
