"""Screening of new documents on their way into the index: suspicious sources go into quarantine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from casemate.errors import BackendError
from casemate.guard.guard import Guard
from casemate.monitor.canaries.results import group_by
from casemate.monitor.poisoning.quarantine import Quarantine, QuarantinedSource, quarantine_key
from casemate.monitor.poisoning.scoring import PoisonScreener
from casemate.monitor.poisoning.screening_evidence import REASON, ScreeningEvidence
from casemate.protocols import DocumentSink, Embedder, Index, Progress, Withheld
from casemate.types import DEFAULT_TENANT, Document, Vector

REFIT_SHARE = 0.2
"""Change of the number of documents, as a share of it, after which a long-running process calibrates again."""
LOCK_S = 60.0
"""Longest wait for the check of other documents of the tenant, in seconds: each waiting upload occupies a thread."""


class _SinkBeforeGuard(DocumentSink):
    """A document sink that passes accepted documents to a guard, and removals as they are."""

    guard: Guard

    @property
    def embedder(self) -> Embedder:
        return self.guard.embedder

    @property
    def index(self) -> Index:
        """Contains the documents that passed."""
        return self.guard.index

    async def remove(self, sources: Sequence[str], tenant: str = DEFAULT_TENANT) -> int:
        return await self.guard.remove(sources, tenant)


class ScreeningGate(_SinkBeforeGuard):
    """A document sink in front of the guard: quarantines suspicious sources and passes on the others. Thread-safe.

    With ``enforce`` False, in observe mode, suspicious sources are recorded, and indexed like all others.

    Attributes:
        quarantined: Sources quarantined so far; in observe mode, those that would have been.
        skipped: Sources that were not screened again: in quarantine or dropped.
    """

    def __init__(self, guard: Guard, screener: PoisonScreener, quarantine: Quarantine, *, enforce: bool = True) -> None:
        self.guard, self.screener, self.quarantine, self.enforce = guard, screener, quarantine, enforce
        self.quarantined: list[QuarantinedSource] = []
        self.skipped: list[str] = []
        self.evidence = ScreeningEvidence(quarantine.store, screener.tenant)
        self._lock = threading.Lock()

    async def add(
        self,
        documents: Sequence[Document],
        tenant: str = DEFAULT_TENANT,
        progress: Progress | None = None,
        uploader: str = "",
    ) -> Mapping[str, Withheld]:
        """Screens documents, quarantines suspicious sources and indexes the others. See ``DocumentSink.add``."""
        decided = dict(await asyncio.to_thread(self.decided, documents, tenant))
        known = await asyncio.to_thread(self._states)
        for source, chunks in group_by(documents, lambda d: d.source).items():
            if quarantine_key(chunks, tenant) not in known:
                continue
            if not await asyncio.to_thread(self.quarantine.update, chunks, tenant) and source in decided:
                del decided[source]
                self.skipped.remove(source)
        open_ = [d for d in documents if d.source not in decided]
        vectors = await self.guard.rag.embed(open_, progress)
        found = await asyncio.to_thread(self.screen, open_, vectors, tenant, uploader)
        kept = [i for i, d in enumerate(open_) if d.source not in found]
        if kept:
            await self.guard.add_embedded([open_[i] for i in kept], vectors[kept], tenant)
            await asyncio.to_thread(self._admit, vectors[kept])
        return {**decided, **found}

    def decided(self, documents: Sequence[Document], tenant: str = DEFAULT_TENANT) -> Mapping[str, Withheld]:
        """Sources whose content is in quarantine or was dropped before. They are not screened again."""
        states = self._states()
        found: dict[str, Withheld] = {}
        for chunks in group_by(documents, lambda d: d.source).values():
            state = states.get(quarantine_key(chunks, tenant))
            if state in ("held", "dropped"):
                found[chunks[0].source] = "quarantined" if state == "held" else "rejected"
        self.skipped += found
        return found

    def screen(
        self,
        documents: Sequence[Document],
        vectors: Vector,
        tenant: str = DEFAULT_TENANT,
        uploader: str = "",
    ) -> Mapping[str, Withheld]:
        """Screens documents without indexing them, and quarantines suspicious sources. Blocks.

        The chunks come whole sources at a time; released content is not screened. ``vectors``: (n, dim). Returns the
        sources that may not be indexed: none in observe mode.

        Raises:
            BackendError: If the event store does not confirm the write, the gate's reader fails, or the check of other
                documents takes longer than ``LOCK_S``.
        """
        states = self._states()
        released = {
            chunks[0].source
            for chunks in group_by(documents, lambda d: d.source).values()
            if states.get(quarantine_key(chunks, tenant)) == "released"
        }
        new = [i for i, d in enumerate(documents) if d.source not in released]
        with self._alone():
            self.screener.recall(*self.evidence.sync())
            results = self.screener.screen([documents[i] for i in new], vectors[new])
            completed = self.evidence.judge(results, uploader)
            self.evidence.record(results, vectors[new], uploader)
            results = [
                replace(r, reasons=(*r.reasons, *(REASON.format(name) for name in groups)))
                for r, groups in zip(results, completed, strict=True)
            ]
            record = self.quarantine.add if self.enforce else self.quarantine.record_observed
            suspicious = sorted({r.document.source for r in results if r.suspicious})
            for source in suspicious:
                self.quarantined.append(record([r for r in results if r.document.source == source], tenant))
        return dict.fromkeys(suspicious, "quarantined") if self.enforce else {}

    def screen_rows(self, tenant: str, documents: Sequence[Document], vectors: Vector) -> set[str]:
        """Screens rows of another program's collection; returns ids of those to withhold from retrieval. Blocks."""
        decided = self.decided(documents, tenant)
        open_ = [i for i, d in enumerate(documents) if d.source not in decided]
        found = {**decided, **self.screen([documents[i] for i in open_], vectors[open_], tenant)}
        self._admit(vectors[[i for i, d in enumerate(documents) if d.source not in found]])
        return {d.id for d in documents if d.source in found}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Waits for the check of other documents, which a reader may make slow."""
        if not self._lock.acquire(timeout=LOCK_S):
            raise BackendError(
                f"the screening of other documents of tenant {self.screener.tenant!r} takes more than {LOCK_S:g} s; "
                "try again later, or send fewer documents at once",
                backend="screening",
                retryable=True,
            )
        try:
            yield
        finally:
            self._lock.release()

    def _admit(self, vectors: Vector) -> None:
        """Counts documents that are indexed already: waits as long as it takes, because an error would deny them."""
        with self._lock:
            self.screener.admit(vectors)

    def _states(self) -> dict[str, str]:
        """The decision about each source, also those of other processes."""
        return {key: source.state for key, source in self.quarantine.all().items()}


class TenantScreening(_SinkBeforeGuard):
    """A document sink for all tenants of a long-running process: a screening gate for each.

    A tenant's gate opens with its first documents, and again when the corpus has changed by ``REFIT_SHARE``.
    ``open_gate`` returns None for a corpus that is too small to compare with: it is not screened. ``enforced`` tells
    whether suspicious sources are quarantined at present; else they are recorded.
    """

    def __init__(
        self, guard: Guard, open_gate: Callable[[str], ScreeningGate | None], enforced: Callable[[], bool]
    ) -> None:
        self.guard, self._open_gate, self.enforced = guard, open_gate, enforced
        self._gates: dict[str, tuple[int, ScreeningGate]] = {}
        self._locks: dict[str, threading.Lock] = {}

    async def add(
        self,
        documents: Sequence[Document],
        tenant: str = DEFAULT_TENANT,
        progress: Progress | None = None,
        uploader: str = "",
    ) -> Mapping[str, Withheld]:
        """Adds documents through the gate of their tenant. See ``DocumentSink.add``."""
        gate = await asyncio.to_thread(self.gate, tenant)
        sink = self.guard if gate is None else gate
        return await sink.add(documents, tenant, progress, uploader)

    def screen_rows(self, tenant: str, documents: Sequence[Document], vectors: Vector) -> set[str]:
        """Screens rows of a collection of another program. See ``ScreeningGate.screen_rows``."""
        gate = self.gate(tenant)
        return set() if gate is None else gate.screen_rows(tenant, documents, vectors)

    def gate(self, tenant: str = DEFAULT_TENANT) -> ScreeningGate | None:
        """The gate of a tenant, opened if necessary; None if its corpus is too small. Blocks."""
        with self._locks.setdefault(tenant, threading.Lock()):
            n = self.index.moments(tenant).n
            size, gate = self._gates.get(tenant, (0, None))
            if gate is None or abs(n - size) > REFIT_SHARE * size:
                gate = self._open_gate(tenant) or gate
                if gate is not None:
                    self._gates[tenant] = n, gate
            if gate is not None:
                gate.enforce = self.enforced()
            return gate
