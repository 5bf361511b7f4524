"""The guard around a framework's store, shared by all wrappers of that store."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from casemate import config as configuration
from casemate import plugins
from casemate.backends.sidecar.sidecar_database import MEMORY
from casemate.config import Config, PluginSpec
from casemate.errors import CapabilityError, ConfigError
from casemate.guard.audience import ReleasedDocument
from casemate.guard.calibration.fitting import calibrated_defenses, calibration_due
from casemate.guard.guard import Guard
from casemate.guard.turn import turn
from casemate.integrations.adapters import (
    FrameworkCollection,
    FrameworkEmbedder,
    document_of,
    unit_vector,
    whole_document_of,
)
from casemate.integrations.attachment import FrameworkIndex
from casemate.integrations.event_loop import EventLoopPool
from casemate.integrations.guarded_query import (
    ANONYMOUS,
    CURRENT_QUERY,
    ClientIdentity,
    FrameworkDocument,
    Guarded,
    GuardedQuery,
    is_composing,
)
from casemate.integrations.text_lookup import TextLookup
from casemate.maths.moments import given_first
from casemate.monitor.alerts.alerting_store import AlertingEventStore
from casemate.monitor.poisoning.quarantine import Quarantine
from casemate.monitor.service import OWN, open_tenant_screening
from casemate.protocols import Defense, Embedder, EventStore, Generator, Index, Progress
from casemate.rag.pipeline import Rag, require_answerable
from casemate.system import audience_policy, calibrate_guard
from casemate.types import (
    ACL,
    DEFAULT_TENANT,
    UNKNOWN,
    Document,
    Hit,
    Outcome,
    Prompt,
    Query,
    Retrieval,
    Vector,
    access_labels,
)

log = logging.getLogger("casemate.integrations")
PROGRESS_S = 10.0  # seconds between two lines of progress
LIMITS = {
    "the answer": "the framework owns the model: Casemate does not see the answer",
    "other paths": "access to the store without this wrapper is not guarded; call sync() after changes elsewhere",
    "hybrid search and rerankers": "each document is judged by its vector, whichever leg found it; the order by "
    "keywords or a reranker is not judged, and a leg without this wrapper is not guarded (unguarded_legs names it)",
    "several queries for one question": "outside of casemate.guard.turn.turn, each query is judged alone",
    "scores": "they come from the store and are for the application: do not show them to clients",
}
"""What no wrapper protects. Logged at wiring."""
NO_CLIENT = (
    f"a question names no client. All such questions count as one client, {ANONYMOUS!r}: they share every budget, and "
    "what is withheld from one of them is withheld from all. Name the client of each question: with "
    "client_context(client=...) of casemate.integrations.guarded_query"
)
NO_LABEL = (
    f"a document names access labels ({ACL}) that the client of the question lacks, and is not returned. Name the "
    "labels of each client: with client_context(client=..., labels=[...]) of casemate.integrations.guarded_query"
)


@dataclass(frozen=True, slots=True)
class ProtectionReport:
    """What a wrapper protects, and what it does not.

    Attributes:
        acts: Defenses that act on retrieved documents.
        acts_not: What is not protected, with the reason.
        mode: ``enforce``, ``observe`` or ``off``.
    """

    acts: tuple[str, ...]
    acts_not: Mapping[str, str]
    mode: str

    def __str__(self) -> str:
        acts = ", ".join(self.acts) if self.mode != "off" and self.acts else "nothing"
        lacks = "; ".join(f"{what}: {why}" for what, why in self.acts_not.items())
        return f"{self.mode}: {acts} on retrieved documents. Not protected: {lacks}"


OPTIONS = ("config", "path", "fit")  # options of ``Protection`` that ``guarded`` of every framework takes


def refuse_unknown(options: Iterable[str], allowed: Sequence[str]) -> None:
    """Refuses (``ConfigError``) options of ``guarded`` that do not exist, or have no effect on what is guarded."""
    if unknown := sorted(set(options).difference(allowed)):
        raise ConfigError(f"guarded() has no option {unknown[0]!r} here; allowed: {', '.join(allowed) or 'none'}")


class Protection:
    """A guard in front of a framework's store.

    Args:
        store: The framework's store.
        embedder: The framework's embedder.
        config: A ``casemate.yaml``, the same as a mapping, or None for the defaults. Of it ``guard``, ``calibrate``,
            ``store``, ``privacy``, ``monitor.gate`` and ``monitor.gate_reader`` apply; retrieval and generation are the
            framework's.
        path: Folder for corpus moments, calibration and verdicts. None: they are kept in memory.
        fit: True calibrates on synthetic questions whenever the guard has no calibration that fits the store: now,
            or, if the store is still too small or grows, before the next question. A list of real benign questions
            calibrates on these. False leaves it to ``calibrate``; until then no document is returned.

    Raises:
        ConfigError: If the configuration is wrong, ``monitor.gate_reader`` is `own`, or the store cannot be enumerated.
        DataError: If its vectors are unusable.
    """

    def __init__(
        self,
        store: FrameworkCollection,
        embedder: FrameworkEmbedder,
        config: Config | Mapping[str, Any] | Path | str | None = None,
        path: Path | str | None = None,
        fit: bool | Sequence[str] = True,
    ) -> None:
        self.store, self.embedder, self.texts = store, embedder, TextLookup(store)
        self.config = Config() if config is None else configuration.resolve(config)
        _refuse_own_reader(self.config)
        with ExitStack() as opened:
            held = path if path is not None else opened.enter_context(tempfile.TemporaryDirectory(prefix="casemate-"))
            self.folder = Path(held).absolute()
            beside = self.folder / "attached.db" if path is not None else Path(MEMORY)
            self.index = opened.enter_context(closing(FrameworkIndex(store, beside)))
            self.events = self._events(opened, kept=path is not None)
            rag = _Rag(embedder, self.index, _NoGenerator())
            defenses = self._defenses(self.config.guard.defenses)
            self.guard = self._guard(rag, defenses)
            self.by_vector = self._guard(rag, [_BlockedSources(defenses), *(d.vector_only() for d in defenses)])
            self.screening = None
            if self.events is not None:
                self.screening = open_tenant_screening(self.guard, self.events, self.config)
            self.index.withhold_new = self.config.monitor.gate is True
            self.loops = EventLoopPool()
            opened.callback(self.loops.close)
            self.close = weakref.finalize(self, opened.pop_all().close)
        self._questions: Sequence[str] | None = None if fit is False else () if fit is True else fit
        self._acts, self._acts_not = self._scope()
        self._warned = set[str]()
        self._fitting, self._unfit = threading.Lock(), bool(self.due)
        log.info("%s: %s", store.name, self.protection_report)
        if path is None:
            log.info("%s: calibration and client state are kept in memory only; set path to keep them", store.name)
        self._fit()
        self._check()

    def _events(self, opened: ExitStack, kept: bool) -> EventStore | None:
        """The event store: as configured, else beside the moments if these are kept."""
        part = self.config.store
        if "store" not in self.config.model_fields_set:
            if not kept and not self.config.monitor.gate:
                return None
            part = PluginSpec.model_validate({"use": "sql", "path": str(self.folder / "events.db")})
        return opened.enter_context(closing(AlertingEventStore(plugins.build("store", part, self.config.folder))))

    def _defenses(self, parts: Sequence[PluginSpec]) -> list[Defense]:
        given: dict[Any, Any] = {Embedder: self.embedder, Index: self.index}
        if self.events is not None:
            given[EventStore] = self.events
        return [plugins.build("defense", self._placed(part), self.config.folder, given) for part in parts]

    def _placed(self, part: PluginSpec) -> PluginSpec:
        """The options of a defense, with its files in our folder unless configured otherwise."""
        files = {
            f.name: str(self.folder / f.default.name)
            for f in dataclasses.fields(plugins.load("defense", part.use))
            if isinstance(f.default, Path)
        }
        return PluginSpec.model_validate({"use": part.use, **files, **part.options})

    def _guard(self, rag: Rag, defenses: Sequence[Defense]) -> Guard:
        section = self.config.guard
        return Guard(
            rag,
            () if section.mode == "off" else defenses,
            enforce=section.mode == "enforce",
            on_error=section.on_error,
            store=self.events,
            log_text=self.config.privacy.log_text,
            audience=audience_policy(section, self.config.folder),
        )

    @property
    def protection_report(self) -> ProtectionReport:
        """What is protected here now, and what is not."""
        state = {"calibration": self._state} if self._state else {}
        return ProtectionReport(self._acts, {**self._acts_not, **state}, self.config.guard.mode)

    def _scope(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """The defenses that act on retrieved documents, and what is not protected whatever the store holds."""
        acts, acts_not = [], dict(LIMITS)
        for defense, part in zip(self.guard.defenses, self.config.guard.defenses, strict=False):
            kind = type(defense)
            if kind.on_retrieve is not Defense.on_retrieve:
                acts.append(part.use)
            elsewhere = [
                what
                for what, method in (("generator", "on_generate"), ("answer", "on_answer"), ("index", "on_index"))
                if getattr(kind, method) is not getattr(Defense, method)
            ]
            if elsewhere:
                acts_not[part.use] = f"its part on the {' and the '.join(elsewhere)} is not available here"
        return tuple(acts), acts_not

    @property
    def _state(self) -> str:
        """Why the guard returns or withholds nothing at present; empty if it judges."""
        if why := self.due:
            if self._questions is not None:
                return "no calibration fits the store; the guard makes one before the next question, which waits for it"
            return f"no document is returned until calibrate() is called: {why}"
        few = [d for d in calibrated_defenses(self.guard.defenses) if d.ready(DEFAULT_TENANT, self._count) is None]
        return f"{self._count} documents are too few to judge, so nothing is withheld yet" if few else ""

    @property
    def _count(self) -> int:
        return self.index.moments().n

    def _check(self) -> None:
        """Warns if the guard cannot judge; notes that a calibration is due."""
        self._unfit = bool(self.due)
        if why := self._state:
            log.warning("%s: %s", self.store.name, why)

    def _fit(self) -> None:
        """Calibrates if it is due, unless that is left to ``calibrate``. Concurrent questions wait for it."""
        if self._unfit and self._questions is not None:
            with self._fitting:
                if self.due:
                    self.calibrate(self._questions)
                self._unfit = False

    @property
    def due(self) -> str:
        """Why the guard needs a calibration before it allows documents; empty if it does not."""
        return calibration_due(self.guard.defenses, self.index)

    def calibrate(self, questions: Sequence[str] = (), progress: Progress = lambda count: None) -> None:
        """Calibrates the guard on real benign questions, else on synthetic ones. Progress counts embedded questions."""
        if questions and self._questions is not None:
            self._questions = questions
        began = told = time.monotonic()
        count, name = 0, self.store.name

        def advance(number: int) -> None:
            nonlocal count, told
            progress(number)
            count += number
            if (now := time.monotonic()) - told >= PROGRESS_S:
                told = now
                _tell(f"{name}: calibrating, {count:,} questions after {now - began:.0f} s")

        def show(title: str, total: int | None) -> AbstractContextManager[Progress]:
            return nullcontext(advance)

        kind = "your" if questions else "generated"
        _tell(f"{name}: calibrating the guard on {kind} questions and scripted attacks, often about a minute")
        found = self.loops.run(lambda: calibrate_guard(self.guard, self.config, questions, DEFAULT_TENANT, show))
        for defense, calibration in found.items():
            _tell(f"{name}: calibrated {defense} on {calibration.source} in {time.monotonic() - began:.0f} s")
        for fitted in calibrated_defenses(self.guard.defenses):
            made = found[fitted.name]
            if fitted.significance and made.benign:
                if why := made.shortage(f"{fitted.name}.significance", fitted.significance):
                    log.warning("%s: %s", name, why)

    def sync(self) -> None:
        """Reads the store again, after it was changed elsewhere. With ``monitor.gate``, new documents are screened."""
        self.texts.clear()
        self.index.attach(restart=True, screen=self.screening.screen_rows if self.screening else None)
        self._check()

    @property
    def quarantine(self) -> Quarantine | None:
        """Documents that the screening holds back; None without ``monitor.gate``."""
        return Quarantine(self.events) if self.screening and self.events is not None else None

    def screen(self, rows: Sequence[FrameworkDocument]) -> Collection[str]:
        """Screens documents that the application adds; returns the ids of those that may not be written."""
        if self.screening is None or not rows:
            return ()
        documents = [document_of(row) for row in rows]
        withheld = self.screening.screen_rows(
            DEFAULT_TENANT, documents, self.embedder.documents([d.content for d in documents])
        )
        if withheld:
            log.warning("%s: %d of %d new documents are in quarantine", self.store.name, len(withheld), len(rows))
        return withheld

    def retrieve(self, asked: GuardedQuery) -> list[FrameworkDocument]:
        """Retrieves the documents that the guard allows, best first; given ones in their order."""
        self._fit()
        return self.loops.run(lambda: self._retrieved(asked))

    async def aretrieve(self, asked: GuardedQuery) -> list[FrameworkDocument]:
        """``retrieve`` for asynchronous callers: the search runs in a worker thread."""
        asked.inline = False
        if self._unfit:
            await asyncio.to_thread(self._fit)
        return await self._retrieved(asked)

    async def _retrieved(self, asked: GuardedQuery) -> list[FrameworkDocument]:
        query = self._query_of(asked)
        found = await self._found(asked, query)
        return found if asked.candidates or is_composing() else await self._delivered(query, found)

    def deliver(self, asked: GuardedQuery, rows: Sequence[FrameworkDocument]) -> list[FrameworkDocument]:
        """Returns documents as a client may have them, if they are chosen otherwise than by ``retrieve``."""
        return self.loops.run(lambda: self.adeliver(asked, rows))

    async def adeliver(self, asked: GuardedQuery, rows: Sequence[FrameworkDocument]) -> list[FrameworkDocument]:
        """``deliver`` for asynchronous callers."""
        return await self._delivered(self._query_of(asked), rows)

    def _query_of(self, asked: GuardedQuery) -> Query:
        """The query of a question. Warns once, at the first question without a client."""
        if not asked.identity.client and self.config.guard.mode != "off":
            self._warn_once(NO_CLIENT)
        return _query(asked.identity, asked.text, asked.k)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s: %s", self.store.name, text)

    def _may_read(self, query: Query, document: Document) -> bool:
        """Whether the client's labels give access to a document. Warns at the first that they do not."""
        if query.may_read(document):
            return True
        self._warn_once(NO_LABEL)
        return False

    async def _delivered(self, query: Query, rows: Sequence[FrameworkDocument]) -> list[FrameworkDocument]:
        """The documents as the application may have them. Its model reads them whole, so the client may see all."""
        documents = [ReleasedDocument(r.id, r.text) if r.released else whole_document_of(r) for r in rows]
        documents = [d for d in documents if self._may_read(query, d)]  # parents may have labels that passages lack
        given = await self.guard.deliver(query, documents)
        texts = {(d.id, isinstance(d, ReleasedDocument)): d.text for d in given}  # both may have one id
        return [r._replace(text=texts[r.id, r.released]) for r in rows if (r.id, r.released) in texts]

    async def _found(self, asked: GuardedQuery, query: Query) -> list[FrameworkDocument]:
        await self.guard.judge_turn(query)  # outside of the framework's search, which is for this question only
        asked.vector = unit_vector(asked.native)
        if asked.given is not None:
            return await self._judged(asked, query, asked.given)
        if asked.whole is None:
            return await self._allowed(asked, query)
        with turn(query.text):  # what is withheld from the whole collection stays withheld, and others take its place
            await self._judge_unfiltered(asked, query, asked.whole)
            return await self._allowed(asked, query)

    async def _judge_unfiltered(self, asked: GuardedQuery, query: Query, whole: Mapping[str, Any]) -> None:
        """Judges the question on the whole collection: the few documents that pass a filter are not a basis."""
        filtered, asked.options = asked.options, whole
        await self._allowed(asked, query, delivered=False)
        asked.options = filtered

    async def _judged(
        self, asked: GuardedQuery, query: Query, given: Sequence[FrameworkDocument]
    ) -> list[FrameworkDocument]:
        """The allowed documents of another retriever, in its order, then as many others as replace withheld ones.

        The second retrieval alone composes an answer of unreadable sources, so budgets of units are charged once.
        """
        kept = await self._allowed(asked, query, delivered=False)
        left = {row.id for row in kept}
        gone = set(self.sources(row.id for row in given if row.id not in left).values())
        asked.given, asked.options = None, {}
        others = await self._allowed(asked, query)  # always: the duration must not reveal the decision
        mine, of = left.union(row.id for row in given), self.sources(row.id for row in others)
        stored = [row for row in others if row.native is not None]
        texts = [*kept, *(r for r in stored if r.id not in mine and of.get(r.id, "") not in gone)]
        released = [row for row in others if row.native is None and (row.text != UNKNOWN or not texts)]
        rows = {row.id: row for row in (*texts[: asked.k - len(released)], *released)}
        return [*(rows.pop(row.id) for row in given if row.id in rows), *rows.values()]

    async def _allowed(self, asked: GuardedQuery, query: Query, *, delivered: bool = True) -> list[FrameworkDocument]:
        """The documents that the guard allows.

        If nothing is ``delivered`` to the client, no budget of a unit is charged, and unreadable documents are removed
        without being replaced.
        """
        guard = self.guard if asked.text.strip() else self.by_vector
        guard = guard if delivered else guard.judging_only()
        token = CURRENT_QUERY.set(asked)
        try:
            found, _ = await guard.retrieve(query)
        finally:
            CURRENT_QUERY.reset(token)
        for row in asked.found.values():
            if access_labels(row.metadata) is not None:  # else no document is built
                self._may_read(query, document_of(row))  # warns: a search leaves such a document out
        return [_row_of(asked.found.get(h.document.id), h) for h in found.hits]

    def withheld(self, identity: ClientIdentity) -> Collection[str]:
        """Sources that are blocked for a client."""
        return self.loops.run(lambda: self.awithheld(identity))

    async def awithheld(self, identity: ClientIdentity) -> Collection[str]:
        """``withheld`` for asynchronous callers."""
        blocked_sources: set[str] = set()
        for defense in self.guard.defenses if self.guard.enforce else ():
            await asyncio.to_thread(defense.sync)
            blocked_sources.update(defense.blocked_sources(Query("", identity.name)))
        return blocked_sources

    def readable(self, identity: ClientIdentity, documents: Iterable[tuple[str, Mapping[str, Any]]]) -> frozenset[str]:
        """Ids of the documents, given with their metadata, that a client may read in full."""
        query, audience = _query(identity), self.guard.audience
        every = not self.guard.enforce or not audience.restricts(query)
        named = (Document(name, "", metadata=held) for name, held in documents)
        return frozenset(d.id for d in named if self._may_read(query, d) and (every or audience.entitles(query, d)))

    def sources(self, ids: Iterable[str]) -> dict[str, str]:
        """Source of each document, as grouped by the guard. Unknown ids are omitted."""
        page = self.store.find(list(dict.fromkeys(ids)))
        return {d.id: d.source for d in self.index.named(page.documents)}

    def given(self, rows: Iterable[FrameworkDocument]) -> tuple[FrameworkDocument, ...]:
        """Another retriever's documents that are in the store, in their order; the others are dropped.

        A document with no id, or with another id, is the one of the store that has the same text. Source and metadata
        are those of the store: the retriever may have been built from texts alone, without access labels.
        """
        rows = list(rows)
        there = self._stored_by_id(rows)
        unknown = [row for row in rows if row.id not in there]
        same_text = {row.text: row for row in self.texts.identify(unknown)} if unknown else {}
        known = [row if row.id in there else same_text.get(row.text) for row in rows]
        there |= self._stored_by_id(same_text.values())
        known = [row if row is not None and row.id in there else None for row in known]
        withheld = self.index.withheld()
        kept = {r.id: _as_stored(r, there[r.id]) for r in known if r is not None and r.id not in withheld}
        if dropped := sum(row is None or row.id in withheld for row in known):
            log.warning("%s: %d documents are not in it, and were dropped", self.store.name, dropped)
        return tuple(kept.values())

    def _stored_by_id(self, rows: Iterable[FrameworkDocument]) -> dict[str, Document]:
        return {d.id: d for d in self.store.find([row.id for row in rows if row.id]).documents}

    @contextmanager
    def writing(self, ids: Sequence[str] | None) -> Iterator[None]:
        """Wraps a change by the framework's own methods and updates the guard at its end.

        ``ids`` are added, replaced or removed. None: unknown, so the store is read again.
        """
        if ids is None:
            yield
            self.sync()
        else:
            with self.index.changing(ids):
                yield
            self.texts.update(ids)
            self._check()


def _as_stored(row: FrameworkDocument, stored: Document) -> FrameworkDocument:
    return row._replace(source=stored.source, metadata={**row.metadata, **stored.metadata})


def _query(identity: ClientIdentity, text: str = "", k: int = 1) -> Query:
    labels, groups = frozenset(identity.labels), frozenset(identity.groups)
    return Query(text, identity.name, k=k, labels=labels, groups=groups)


class Protected(Guarded):
    """A framework class with a guard of its own."""

    protection: Protection

    @property
    def protection_report(self) -> ProtectionReport:
        """What is protected here, and what is not."""
        return self.protection.protection_report

    def calibrate(self, questions: Sequence[str] = ()) -> None:
        """Calibrates the guard again, on these benign questions or on synthetic ones. The log says when it is due."""
        self.protection.calibrate(questions)

    def sync(self) -> None:
        """Reads the store again, after it was changed elsewhere."""
        self.protection.sync()


class _Rag(Rag):
    """The framework's retrieval as a ``Rag`` without a model."""

    embedder: FrameworkEmbedder
    index: FrameworkIndex

    async def embed(self, documents: Sequence[Document], progress: Progress | None = None) -> Vector:
        return await asyncio.to_thread(self.embedder.documents, [d.content for d in documents], progress)

    async def encode(self, query: Query, then: Callable[[], None] = lambda: None) -> Vector:
        asked = CURRENT_QUERY.get()
        if asked is None or asked.vector is None:
            return await super().encode(query, then)
        require_answerable(query if query.text.strip() else replace(query, text="?"))
        if asked.inline:
            then()
        else:
            await asyncio.to_thread(then)
        return asked.vector

    async def search(self, vector: Vector, k: int, tenant: str) -> Retrieval:
        asked = CURRENT_QUERY.get()
        if asked is None:
            return await super().search(vector, k, tenant)
        search = self.index.search if asked.given is None else partial(self._given, asked)
        if asked.inline:
            return search(vector, k, tenant)
        return await asyncio.to_thread(search, vector, k, tenant)

    def _given(self, asked: GuardedQuery, vector: Vector, k: int, tenant: str) -> Retrieval:
        """The other retriever's documents, then documents of the store."""
        assert asked.given is not None
        found = self.index.search(vector, k + len(asked.given), tenant)
        cosine = self.index.collection.cosines([row.id for row in asked.given], vector)
        documents = self.index.named([document_of(row) for row in asked.given])
        known = sorted((Hit(d, cosine[d.id]) for d in documents), key=lambda hit: -hit.score)
        asked.found.update((row.id, row) for row in asked.given)
        return given_first(found, known, k)


class _NoGenerator(Generator):
    """Placeholder generator: the framework has its own model."""

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        raise CapabilityError("this guard only retrieves; the framework generates the answer")
        yield ""


@dataclass(eq=False)
class _BlockedSources(Defense):
    """Blocks the sources that other defenses already withhold from a client. It makes no decision of its own."""

    others: Sequence[Defense]

    def sync(self) -> None:
        for defense in self.others:
            defense.sync()

    def blocked_sources(self, query: Query) -> Collection[str]:
        return set[str]().union(*(d.blocked_sources(query) for d in self.others))

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        blocked_sources = self.blocked_sources(query)
        return Outcome(
            replace(retrieval, hits=tuple(h for h in retrieval.hits if h.document.source not in blocked_sources))
        )


def _tell(text: str) -> None:
    """Logs what takes long, at level INFO; prints it to stderr if the application has not configured logging."""
    if log.hasHandlers():
        log.info(text)
    else:
        print(text, file=sys.stderr, flush=True)


def _row_of(row: FrameworkDocument | None, hit: Hit) -> FrameworkDocument:
    """A document with its text as changed by defenses; a new one if a defense composed it."""
    document = hit.document
    if row is None or isinstance(document, ReleasedDocument):  # a stored document may have the same id
        released = isinstance(document, ReleasedDocument)
        return FrameworkDocument(document.id, document.text, score=hit.score, released=released)
    return row if document.text == row.text else row._replace(text=document.text)


def _refuse_own_reader(config: Config) -> None:
    reader = config.monitor.gate_reader
    if config.monitor.gate and reader is not None and reader.use == OWN.use:
        raise ConfigError(
            f"monitor.gate_reader: {OWN.use!r} is the system's generator, and a framework wrapper has none; "
            "name another generator, or remove the line to quote sentences without a model"
        )
