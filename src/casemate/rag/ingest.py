"""Ingest: updates the index from a corpus on disk, embedding only new and changed sources.

Work is committed in batches of whole sources. After an interruption, every batch that was reported as done is kept, and
the next run continues from there.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from casemate.errors import ConfigError, DataError
from casemate.protocols import DocumentSink, Withheld
from casemate.rag.chunking import split_document
from casemate.rag.corpus import Corpus, Problem, Source
from casemate.rag.distributed_embedder import DistributedEmbedder
from casemate.rag.pipeline import require_tenant
from casemate.runtime.executor import Stopped
from casemate.types import DEFAULT_TENANT, Document

BATCH_CHUNKS = 256  # chunks per commit: some seconds of embedding, which is the most that a kill can lose
SUSPICIOUS_SHARE = 0.5
"""If more than this share of a corpus would be removed, a wrong path is likelier than an intended purge."""
CLASH = "the index has another source of this name, from elsewhere; rename one, or use another --tenant"

MissingPolicy: TypeAlias = Literal["auto", "remove", "keep"]
Batch: TypeAlias = tuple[list[Source], list[Document]]  # whole sources, and their chunks


@dataclass(frozen=True, slots=True)
class IngestPlan:
    """Difference between a corpus and the index.

    Attributes:
        todo: New and changed sources: name to digest.
        unchanged: Number of sources that are indexed as they are.
        clashing: Names that another corpus or a program has given to other content; not indexed.
        held: All names in the index.
        added: Indexed sources that a program added and the corpus lacks; never removed.
    """

    todo: Mapping[str, str]
    bytes: int
    unchanged: int
    gone: tuple[str, ...]
    clashing: tuple[str, ...]
    held: frozenset[str]
    added: tuple[str, ...]


@dataclass(slots=True)
class IngestReport:
    """Result of an ingest run; the counts are of sources, except ``chunks`` and ``ignored`` (files).

    ``quarantined`` sources wait for a decision, ``rejected`` ones were dropped by an operator; neither is indexed.
    """

    indexed: int = 0
    chunks: int = 0
    unchanged: int = 0
    removed: int = 0
    kept: int = 0
    ignored: int = 0
    ignored_types: dict[str, int] = field(default_factory=dict)
    quarantined: int = 0
    rejected: int = 0
    seconds: float = 0.0
    problems: list[Problem] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether everything in the corpus was read, and nothing waits in quarantine."""
        return not self.quarantined and all(p.harmless for p in self.problems)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON-serializable data."""
        return {**asdict(self), "complete": self.complete}


@dataclass(frozen=True, slots=True)
class Ingest:
    """Indexes a corpus through a sink, so that its defenses or its screening see every document.

    Attributes:
        sink: Receives the documents: a guard, or a screening gate that quarantines suspicious ones.
        tokens: Tokens per chunk; 0: the embedder's maximum.
        overlap: Tokens that a chunk shares with the previous one.
        missing: Treatment of indexed sources that the corpus lacks. ``auto`` removes those that were indexed from this
            path, and refuses to remove more than half of them. ``remove`` removes all sources that came from any
            corpus. ``keep`` removes none. Documents added by ``Guard.add`` are never removed.

    Raises:
        ConfigError: If chunks would exceed the embedder's maximum.
    """

    sink: DocumentSink
    corpus: Corpus
    tokens: int = 0
    overlap: int = 32
    tenant: str = DEFAULT_TENANT
    missing: MissingPolicy = "auto"

    def __post_init__(self) -> None:
        require_tenant(self.tenant)
        maximum = self.sink.embedder.max_tokens
        if self.tokens > maximum:
            raise ConfigError(f"rag.chunk.tokens is {self.tokens}; the embedder reads at most {maximum} tokens")

    def plan(self, see: Callable[[Source, str], object] = lambda source, digest: None) -> IngestPlan:
        """Compares the corpus with the index by content hash. Reads all files, but parses and embeds none.

        ``see`` is called with each new or changed source and its digest.

        Raises:
            DataError: If ``missing`` is ``auto`` and more than half of the sources from this path would be removed.
        """
        held = {name: digest.partition("@") for name, digest in self.sink.index.digests(self.tenant).items()}
        content = {name: digest for name, (digest, _, _) in held.items()}
        found: dict[str, str] = {}
        sizes: dict[str, int] = {}
        for source in self.corpus.sources():
            digest = found[source.name] = self._digest(source)
            if content.get(source.name) != digest:
                sizes[source.name] = source.size
                see(source, digest)
        origins = self._origins(held, found)
        clashing = {n for n in held.keys() & sizes.keys() if held[n][2] not in origins and self.missing != "remove"}
        todo = {n: found[n] for n in sizes if n not in clashing}
        missing = held.keys() - found.keys() - self.corpus.unread
        here = [name for name, (_, _, origin) in held.items() if origin in origins]
        gone = missing.intersection(here) if self.missing == "auto" else {name for name in missing if content[name]}
        gone = set() if self.corpus.incomplete else gone
        if self.missing == "auto" and len(gone) > SUSPICIOUS_SHARE * len(here):
            raise DataError(
                f"{len(gone)} of {len(here)} sources that were indexed from {self.corpus.path} no longer exist; check "
                "the path, or run with --missing remove to remove them from the index"
            )
        return IngestPlan(
            todo=todo,
            bytes=sum(sizes[name] for name in todo),
            unchanged=len(found) - len(sizes),
            gone=tuple(sorted(gone)),
            clashing=tuple(sorted(clashing)),
            held=frozenset(held),
            added=tuple(sorted(name for name in missing if not content[name])),
        )

    def _origins(self, held: Mapping[str, tuple[str, str, str]], found: Mapping[str, str]) -> set[str]:
        """Origin of this corpus, and origins that it was probably moved from: most of their sources are here."""
        sizes = Counter(origin for digest, _, origin in held.values() if digest)
        same = Counter(origin for name, (digest, _, origin) in held.items() if found.get(name) == digest)
        return {self._origin} | {origin for origin, count in same.items() if count > SUSPICIOUS_SHARE * sizes[origin]}

    async def run(self, plan: IngestPlan, progress: Callable[[float], None] = lambda size: None) -> IngestReport:
        """Executes a plan. Progress counts the bytes just embedded; they are committed at the end of their batch."""
        began = time.monotonic()
        report = IngestReport(unchanged=plan.unchanged)
        async for sources, documents in self._embedded(plan, report):
            share = sum(s.size for s in sources) / len(documents)
            withheld = await self._add(documents, lambda n, share=share: progress(n * share))  # type: ignore[misc]
            report.indexed += len(sources) - len(withheld)
            report.chunks += sum(d.source not in withheld for d in documents)
            report.quarantined += sum(why == "quarantined" for why in withheld.values())
            report.rejected += sum(why == "rejected" for why in withheld.values())
        report.problems[:0] = self.corpus.problems
        report.problems += [Problem(name, CLASH) for name in plan.clashing]
        report.ignored, report.ignored_types = self.corpus.ignored, dict(self.corpus.ignored_types)
        if self.missing == "keep":
            report.kept = len(plan.gone)
        elif plan.gone:
            await self.sink.remove(plan.gone, self.tenant)
            report.removed = len(plan.gone)
        report.seconds = time.monotonic() - began
        return report

    async def _embedded(self, plan: IngestPlan, report: IngestReport) -> AsyncIterator[Batch]:
        """Yields the batches in order. With a distributed embedder, workers embed the following ones meanwhile.

        The thread that parses stops after its current file when this task is cancelled.
        """
        stopped, embedder = threading.Event(), self.sink.embedder
        batches = self._batches(plan, report, stopped.is_set)
        if isinstance(embedder, DistributedEmbedder):
            batches = embedder.prefetch(batches, lambda batch: [d.content for d in batch[1]], stopped.is_set)
        try:
            while (batch := await asyncio.to_thread(next, batches, None)) is not None:
                yield batch
        finally:
            stopped.set()

    async def _add(self, documents: list[Document], progress: Callable[[int], None]) -> Mapping[str, Withheld]:
        """Adds one batch; returns the sources that were not indexed.

        The embedding thread stops soon after this task is cancelled.
        """
        stopped = threading.Event()

        def tick(count: int) -> None:
            if stopped.is_set():
                raise asyncio.CancelledError
            progress(count)

        try:
            return await self.sink.add(documents, self.tenant, tick)
        finally:
            stopped.set()

    def _batches(self, plan: IngestPlan, report: IngestReport, stopped: Stopped) -> Iterator[Batch]:
        """Yields whole sources, about ``BATCH_CHUNKS`` chunks at a time."""
        sources: list[Source] = []
        documents: list[Document] = []
        for source in self.corpus.sources():
            if stopped():
                return
            if source.name not in plan.todo:
                continue
            try:
                chunks = self._split(source)
            except DataError as error:
                stale = "; its previous version stays in the index" if source.name in plan.held else ""
                report.problems.append(Problem(source.name, f"{error}{stale}"))
                continue
            sources.append(source)
            documents += chunks
            if len(documents) >= BATCH_CHUNKS:
                yield sources, documents
                sources, documents = [], []
        if documents:
            yield sources, documents

    def _split(self, source: Source) -> list[Document]:
        title, text, metadata = source.parse()
        embedder = self.sink.embedder
        whole = Document(source.name, text, title, digest=f"{self._digest(source)}@{self._origin}", metadata=metadata)
        return split_document(whole, embedder, self.tokens or embedder.max_tokens, self.overlap)

    @property
    def _origin(self) -> str:
        """Hash of the corpus path, which does not reveal it."""
        return hashlib.sha256(str(self.corpus.path).encode(errors="surrogateescape")).hexdigest()[:16]

    def _digest(self, source: Source) -> str:
        """Hash of content and chunking options: other options give other documents."""
        recipe = f"{source.digest}\n{self.tokens}\n{self.overlap}"
        return hashlib.sha256(recipe.encode()).hexdigest()
