"""From a corpus on disk to the index: only what changed is embedded, what is gone is removed.

Work is committed window by window, each with whole sources, so an interruption at any moment keeps every window that
was reported as done, and running again goes on from there.
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

from casemate.chunks import cut
from casemate.corpus import Corpus, Problem, Source
from casemate.errors import ConfigError, DataError
from casemate.guard import Guard
from casemate.monitor.poison.quarantine import Gate
from casemate.rag import require_tenant
from casemate.spread import SpreadEmbedder
from casemate.types import DEFAULT_TENANT, Document

WINDOW = 256
"""Chunks of one commit: some seconds of embedding, which is what a kill may cost."""
SUSPICIOUS_SHARE = 0.5
"""When more than this share of a corpus would be removed, the wrong folder is likelier than a purge."""

TAKEN = "the index has another source of this name, from elsewhere; rename one, or give a --tenant"

Gone: TypeAlias = Literal["auto", "remove", "keep"]
Window: TypeAlias = tuple[list[Source], list[Document]]
"""Whole sources, and their chunks."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is to do, known before anything is embedded."""

    todo: Mapping[str, str]  # source name -> digest
    bytes: int
    unchanged: int
    gone: tuple[str, ...]
    taken: tuple[str, ...]  # names that another corpus or a program has given to something else
    held: frozenset[str]  # all names in the index before


@dataclass(slots=True)
class Report:
    """What was done."""

    indexed: int = 0
    chunks: int = 0
    unchanged: int = 0
    removed: int = 0
    kept: int = 0
    ignored: int = 0
    seconds: float = 0.0
    problems: list[Problem] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether everything in the corpus was read."""
        return all(p.harmless for p in self.problems)

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {**asdict(self), "complete": self.complete}


@dataclass(frozen=True, slots=True)
class Ingest:
    """Indexes a corpus through a guard, so that defenses that act on the index do.

    Attributes:
        guard: Where documents go in; a gate holds the suspicious ones back.
        corpus: Where they come from.
        tokens: Tokens of a chunk; 0: as many as the embedder reads.
        overlap: Tokens that a chunk shares with the one before.
        tenant: Whose documents they are.
        gone: What to do with indexed sources that the corpus does not have. ``auto`` removes those that came from this
            very folder or file, but refuses to remove more than half of them; ``remove`` removes all that any corpus
            brought; ``keep`` none. What was added by ``Guard.add`` is never removed.

    Raises:
        ConfigError: If chunks would be longer than what the embedder reads.
    """

    guard: Guard | Gate
    corpus: Corpus
    tokens: int = 0
    overlap: int = 32
    tenant: str = DEFAULT_TENANT
    gone: Gone = "auto"

    def __post_init__(self) -> None:
        require_tenant(self.tenant)
        reads = self.guard.rag.embedder.max_tokens
        if self.tokens > reads:
            raise ConfigError(f"rag.chunk.tokens is {self.tokens}, and the embedder reads {reads} tokens at most")

    def plan(self) -> Plan:
        """Compares the corpus with the index by content hashes; reads everything, parses and embeds nothing.

        Raises:
            DataError: If more than half of what came from here would be removed and ``gone`` is ``auto``.
        """
        held = {name: digest.partition("@") for name, digest in self.guard.rag.index.digests(self.tenant).items()}
        content = {name: digest for name, (digest, _, _) in held.items()}
        found: dict[str, str] = {}
        size = 0
        for source in self.corpus.sources():
            digest = found[source.name] = self._digest(source)
            size += source.size if content.get(source.name) != digest else 0
        origins = self._origins(held, found)
        taken = {n for n in held.keys() & found.keys() if held[n][2] not in origins and content[n] != found[n]}
        taken = set() if self.gone == "remove" else taken
        todo = {n: digest for n, digest in found.items() if content.get(n) != digest and n not in taken}
        missing = held.keys() - found.keys() - self.corpus.unread
        here = [name for name, (_, _, origin) in held.items() if origin in origins]
        gone = missing.intersection(here) if self.gone == "auto" else {name for name in missing if content[name]}
        gone = set() if self.corpus.incomplete else gone
        if self.gone == "auto" and len(gone) > SUSPICIOUS_SHARE * len(here):
            raise DataError(
                f"{len(gone)} of {len(here)} sources that were indexed from {self.corpus.path} are not there any more; "
                "if that is right, run with --gone remove, else see to the folder"
            )
        unchanged = len(found) - len(todo) - len(taken)
        return Plan(todo, size, unchanged, tuple(sorted(gone)), tuple(sorted(taken)), frozenset(held))

    def _origins(self, held: Mapping[str, tuple[str, str, str]], found: Mapping[str, str]) -> set[str]:
        """This corpus's place, and places it seems to have been moved from: most of what came from there is here."""
        sizes = Counter(origin for digest, _, origin in held.values() if digest)
        same = Counter(origin for name, (digest, _, origin) in held.items() if found.get(name) == digest)
        return {self._origin} | {origin for origin, count in same.items() if count > SUSPICIOUS_SHARE * sizes[origin]}

    async def run(self, plan: Plan, progress: Callable[[float], None] = lambda size: None) -> Report:
        """Carries a plan out.

        Args:
            plan: From ``plan``.
            progress: Called with the bytes just embedded; they are safe at the end of their window.
        """
        began = time.monotonic()
        report = Report(unchanged=plan.unchanged)
        async for sources, documents in self._embedded(self._windows(plan, report)):
            share = sum(s.size for s in sources) / len(documents)
            await self._add(documents, lambda n, share=share: progress(n * share))  # type: ignore[misc]
            report.indexed += len(sources)
            report.chunks += len(documents)
        report.problems[:0] = self.corpus.problems
        report.problems += [Problem(name, TAKEN) for name in plan.taken]
        report.ignored = self.corpus.ignored
        if self.gone == "keep":
            report.kept = len(plan.gone)
        elif plan.gone:
            await self.guard.remove(plan.gone, self.tenant)
            report.removed = len(plan.gone)
        report.seconds = time.monotonic() - began
        return report

    async def _embedded(self, windows: Iterator[Window]) -> AsyncIterator[Window]:
        """The windows, in order; where workers share the work, some are embedded ahead of their turn."""
        stopped, embedder = threading.Event(), self.guard.rag.embedder
        if isinstance(embedder, SpreadEmbedder):
            windows = embedder.ahead(windows, lambda window: [d.content for d in window[1]], stopped.is_set)
        try:
            while (window := await asyncio.to_thread(next, windows, None)) is not None:
                yield window
        finally:
            stopped.set()

    async def _add(self, documents: list[Document], progress: Callable[[int], None]) -> None:
        """One window, embedded in a worker thread that gives up soon after this task is cancelled."""
        stopped = threading.Event()

        def tick(count: int) -> None:
            if stopped.is_set():
                raise asyncio.CancelledError
            progress(count)

        try:
            await self.guard.add(documents, self.tenant, tick)
        finally:
            stopped.set()

    def _windows(self, plan: Plan, report: Report) -> Iterator[Window]:
        """Whole sources, some ``WINDOW`` chunks at a time."""
        sources: list[Source] = []
        documents: list[Document] = []
        for source in self.corpus.sources():
            if source.name not in plan.todo:
                continue
            try:
                cuts = self._cut(source)
            except DataError as error:
                old = "; what was indexed of it before is still answered" if source.name in plan.held else ""
                report.problems.append(Problem(source.name, f"{error}{old}"))
                continue
            sources.append(source)
            documents += cuts
            if len(documents) >= WINDOW:
                yield sources, documents
                sources, documents = [], []
        if documents:
            yield sources, documents

    def _cut(self, source: Source) -> list[Document]:
        title, text, metadata = source.parse()
        embedder = self.guard.rag.embedder
        whole = Document(source.name, text, title, digest=f"{self._digest(source)}@{self._origin}", metadata=metadata)
        return cut(whole, embedder, self.tokens or embedder.max_tokens, self.overlap)

    @property
    def _origin(self) -> str:
        """Where this corpus is, without telling it."""
        return hashlib.sha256(str(self.corpus.path).encode(errors="surrogateescape")).hexdigest()[:16]

    def _digest(self, source: Source) -> str:
        """Content and recipe: cutting differently makes different documents."""
        recipe = f"{source.digest}\n{self.tokens}\n{self.overlap}"
        return hashlib.sha256(recipe.encode()).hexdigest()
