"""Quarantine: new documents that are held back until somebody has looked at them.

What is held back is in the event store, whole, and not in the index; a source is held back with all of its chunks. The
last word on it stays: what was released comes in without being judged again, what was dropped stays out, as long as its
content is the same. So the store holds texts of documents, and is to be kept like the index.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Literal, TypeAlias, get_args

from casemate.errors import BackendError, DataError
from casemate.guard import Guard
from casemate.monitor.poison.suspicion import Judgement, Suspicion
from casemate.protocols import EventStore, Progress
from casemate.rag import Rag
from casemate.types import DEFAULT_TENANT, Document, Event

KIND = "quarantine"
"""Events of this kind tell what was held back, released and dropped."""
State: TypeAlias = Literal["held", "released", "dropped"]
STATES: tuple[str, ...] = get_args(State)


@dataclass(frozen=True, slots=True)
class Held:
    """A source that was held back.

    Attributes:
        key: Names this content of this source of this tenant: eight or more of its 32 characters will do.
        tenant: Whose.
        source: Its name.
        state: What became of it.
        at: When it was held back.
        score: The highest of its chunks.
        reasons: Why, a sentence each.
        companions: Ids of documents that came with it, or before, and look like it. See whether they are in the index.
        documents: Its chunks.
    """

    key: str
    tenant: str
    source: str
    state: State
    at: datetime
    score: float
    reasons: tuple[str, ...]
    companions: tuple[str, ...]
    documents: tuple[Document, ...]


class Quarantine:
    """The list, as the event store has it.

    Args:
        store: Where it is kept.
    """

    def __init__(self, store: EventStore) -> None:
        self._store = store

    def all(self) -> dict[str, Held]:
        """Everything that was ever held back, by key, the oldest first."""
        found: dict[str, Held] = {}
        for event in self._store.scan(KIND):
            body = event.body
            if body["what"] == "held":
                found.setdefault(body["key"], _held(event))
            elif body["key"] in found:
                found[body["key"]] = replace(found[body["key"]], state=body["what"])
        return found

    def waiting(self, tenant: str | None = None) -> list[Held]:
        """What nobody has decided about yet; None: of all tenants."""
        return [h for h in self.all().values() if h.state == "held" and tenant in (None, h.tenant)]

    def get(self, key: str) -> Held:
        """What a key, or its beginning, names.

        Raises:
            DataError: If it names nothing, or more than one.
        """
        found = [held for name, held in self.all().items() if key and name.startswith(key)]
        if len(found) != 1:
            raise DataError(f"{key!r} names {len(found) or 'nothing'} of what is in quarantine; give the whole key")
        return found[0]

    def hold(self, judgements: Sequence[Judgement], tenant: str) -> Held:
        """Takes one source in, all of its chunks.

        Raises:
            BackendError: If it could not be written down; the documents are then neither here nor in the index.
        """
        documents = [j.document for j in judgements]
        body = {
            "what": "held",
            "key": key_of(documents, tenant),
            "tenant": tenant,
            "source": documents[0].source,
            "score": max(j.score for j in judgements),
            "reasons": list(dict.fromkeys(reason for j in judgements for reason in j.reasons)),
            "companions": sorted({c for j in judgements for c in j.companions}),
            "documents": [asdict(d) | {"metadata": dict(d.metadata)} for d in documents],
        }
        event = Event(f"{KIND}:held:{body['key']}", datetime.now(UTC), KIND, body)
        self._append(event)
        return _held(event)

    async def release(self, key: str, guard: Guard) -> Held:
        """Lets what was held back into the index, also what was dropped.

        Raises:
            DataError: If the key names nothing, or more than one.
            BackendError: If it could not be written down.
        """
        held = await asyncio.to_thread(self.get, key)
        await guard.add(held.documents, held.tenant)  # first: killed here, it is still in quarantine
        await asyncio.to_thread(self._decide, held, "released")
        return replace(held, state="released")

    async def drop(self, key: str, guard: Guard) -> Held:
        """Leaves it out for good, and takes it out again if this very content was released before.

        Raises:
            DataError: If the key names nothing, or more than one.
            BackendError: If it could not be written down.
        """
        held = await asyncio.to_thread(self.get, key)
        await asyncio.to_thread(self._decide, held, "dropped")
        if held.state == "released":
            await guard.remove([held.source], held.tenant)
        return replace(held, state="dropped")

    def _decide(self, held: Held, what: State) -> None:
        now = datetime.now(UTC)
        body = {"what": what, "key": held.key, "tenant": held.tenant, "source": held.source}
        self._append(Event(f"{KIND}:{what}:{held.key}:{now.timestamp():.6f}", now, KIND, body))

    def _append(self, event: Event) -> None:
        self._store.append(event)
        if not self._store.flush():
            what = "the quarantine was not written down; see to the event store, and do it again"
            raise BackendError(what, backend="quarantine", retryable=True)


class Gate:
    """The way in for new documents: those that are suspicious go into quarantine, the others through the guard.

    Has the methods of ``Guard`` that indexing needs, and may stand in its place there.

    Args:
        guard: Where documents go in.
        suspicion: What harmless documents are like, of one tenant.
        quarantine: Where the others go.

    Attributes:
        held: What was held back so far.
        skipped: Sources that were not looked at again: they wait, or were dropped.
    """

    def __init__(self, guard: Guard, suspicion: Suspicion, quarantine: Quarantine) -> None:
        self.guard, self.suspicion, self.quarantine = guard, suspicion, quarantine
        self.held: list[Held] = []
        self.skipped: list[str] = []
        self._decided = {key: held.state for key, held in quarantine.all().items()}

    @property
    def rag(self) -> Rag:
        """The system that documents go into."""
        return self.guard.rag

    async def add(
        self, documents: Sequence[Document], tenant: str = DEFAULT_TENANT, progress: Progress | None = None
    ) -> None:
        """Judges documents that come together, and lets in those that are not suspicious."""
        new, sure = list[Document](), list[Document]()
        for chunks in _by_source(documents):
            state = self._decided.get(key_of(chunks, tenant))
            if state in ("held", "dropped"):
                self.skipped.append(chunks[0].source)
            else:
                (sure if state == "released" else new).extend(chunks)
        vectors = await self.rag.embed([*new, *sure], progress)
        judged = await asyncio.to_thread(self.suspicion.judge, new, vectors[: len(new)])
        bad = {j.document.source for j in judged if j.quarantine}
        for source in sorted(bad):
            held = await asyncio.to_thread(
                self.quarantine.hold, [j for j in judged if j.document.source == source], tenant
            )
            self.held.append(held)
            self._decided[held.key] = "held"
        kept = [i for i, d in enumerate([*new, *sure]) if d.source not in bad]
        if kept:
            await self.guard.put([[*new, *sure][i] for i in kept], vectors[kept], tenant)
            self.suspicion.admit(vectors[kept])

    async def remove(self, sources: Sequence[str], tenant: str = DEFAULT_TENANT) -> int:
        """As ``Guard.remove``."""
        return await self.guard.remove(sources, tenant)


def key_of(documents: Sequence[Document], tenant: str) -> str:
    """Names the content of a source of a tenant: by its digest, or by its texts where it has none."""
    first = documents[0]
    content = [first.digest] if first.digest else [[d.id, d.title, d.text] for d in documents]
    return hashlib.sha256(json.dumps([tenant, first.source, content]).encode()).hexdigest()[:32]


def _by_source(documents: Iterable[Document]) -> list[list[Document]]:
    found: dict[str, list[Document]] = {}
    for document in documents:
        found.setdefault(document.source, []).append(document)
    return list(found.values())


def _held(event: Event) -> Held:
    body = event.body
    return Held(
        body["key"],
        body["tenant"],
        body["source"],
        "held",
        event.at,
        body["score"],
        tuple(body["reasons"]),
        tuple(body["companions"]),
        tuple(Document(**d) for d in body["documents"]),
    )
