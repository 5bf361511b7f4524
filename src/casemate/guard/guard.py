"""The guard: a ``Rag`` with defenses. It is itself a ``Target``, so clients and attacks use both in the same way.

A query passes ``ask`` (or ``stream``), ``retrieve``, every ``Defense.on_retrieve``, the generator, and every
``Defense.on_answer``. Each verdict is appended to the verdict log.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import combinations
from typing import ClassVar, Literal, TypeAlias

from casemate.errors import CapabilityError, CasemateError, ConfigError, describe_failure
from casemate.guard.audience import AudiencePolicy, ReleasedDocument
from casemate.guard.client_state.feed import question_arrived
from casemate.guard.turn import Turn, current_turn
from casemate.guard.verdict_log import append
from casemate.protocols import Defense, Embedder, EventStore, Generator, Index, Progress, Withheld, plug_in_name
from casemate.rag.pipeline import GROWTH, Rag, closing_stream, join_stream, require_tenant
from casemate.types import (
    DEFAULT_TENANT,
    UNKNOWN,
    Action,
    Answer,
    Document,
    Outcome,
    Query,
    Retrieval,
    T,
    Vector,
    Verdict,
)

OnStage: TypeAlias = Callable[[str, float], None]
"""Receives the name of a stage and its duration in seconds."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Mode:
    """The mode that all copies of a guard share."""

    enforce: bool


class Guard:
    """Answers like the wrapped ``Rag``, except for what its defenses withhold.

    Args:
        enforce: False is observe mode: defenses judge and verdicts are logged, but no answer changes.
        on_error: Behavior when a defense fails: ``closed`` answers without any context, ``open`` without the defense.
        store: Receives the verdicts; None: they are not logged.
        log_text: Whether verdicts include the text of the query.
        on_stage: Called with the duration of each stage: ``embed`` (which includes ``Defense.sync``), ``search``, and
            each defense by its name.
        audience: Which sources a client may read in full; None: all. Text of the others never reaches its context.

    Raises:
        ConfigError: If a defense that withholds or compares follows one that reorders hits.
    """

    def __init__(  # noqa: PLR0913  one argument for each option of the configuration
        self,
        rag: Rag,
        defenses: Sequence[Defense],
        *,
        enforce: bool = True,
        on_error: Literal["closed", "open"] = "closed",
        store: EventStore | None = None,
        log_text: bool = False,
        on_stage: OnStage = lambda stage, seconds: None,
        audience: AudiencePolicy | None = None,
    ) -> None:
        self.rag = rag
        self.defenses = tuple(defenses)
        _require_order(self.defenses)
        self._mode = _Mode(enforce)
        self.on_error = on_error
        self.store = store
        self.log_text = log_text
        self.on_stage = on_stage
        self.audience = audience or AudiencePolicy()
        enforced = reduce(lambda generator, d: d.on_generate(generator), self.defenses, rag.generator)
        observed = reduce(lambda generator, d: d.on_observe(generator), self.defenses, rag.generator)
        self._generators = {True: enforced, False: observed}

    @property
    def enforce(self) -> bool:
        """Whether decisions are carried out. Setting it takes effect with the next question, in all copies."""
        return self._mode.enforce

    @enforce.setter
    def enforce(self, enforce: bool) -> None:
        self._mode.enforce = enforce

    @property
    def generator(self) -> Generator:
        """The generator with the wrappers of the defenses, for the present mode."""
        return self._generators[self.enforce]

    @generator.setter
    def generator(self, generator: Generator) -> None:
        self._generators = dict.fromkeys((True, False), generator)

    def instrumented(
        self,
        *,
        store: EventStore | None = None,
        wrap_generator: Callable[[Generator], Generator] | None = None,
        on_stage: OnStage | None = None,
    ) -> Guard:
        """Returns a copy of the guard with other instruments. The guard itself does not change.

        Both share the system, the mode and the defenses, so they share all client state.

        Args:
            store: Receives the verdicts; None: the store of this guard.
            wrap_generator: Wraps the generator, outside the wrappers of the defenses.
            on_stage: Receives the durations of stages; None: the callback of this guard.
        """
        guard = copy.copy(self)
        if store is not None:
            guard.store = store
        if wrap_generator is not None:
            guard._generators = {mode: wrap_generator(g) for mode, g in self._generators.items()}
        if on_stage is not None:
            guard.on_stage = on_stage
        return guard

    def judging_only(self) -> Guard:
        """Returns a copy of the guard for retrievals that are not delivered to a client.

        Instead of replacing unreadable hits, the copy removes them. So it spends no budget of a unit.
        """
        guard = copy.copy(self)
        guard.defenses = tuple(UnreadableRemoval() if d.replaces_unreadable else d for d in self.defenses)
        return guard

    @property
    def embedder(self) -> Embedder:
        """See ``DocumentSink``."""
        return self.rag.embedder

    @property
    def index(self) -> Index:
        """See ``DocumentSink``."""
        return self.rag.index

    async def ask(self, query: Query) -> Answer:
        """Answers a query.

        Raises:
            QueryError: If the query is invalid.
            BackendError: If embedder, index or generator fail.
        """
        retrieval, verdicts = await self.retrieve(query)
        text = await join_stream(self.generator.stream(self.rag.prompt(query, retrieval)))
        return await self._defend_answer(query, Answer(text, retrieval, verdicts))

    async def stream(self, query: Query) -> AsyncIterator[str]:
        """Streams the answer to a query; sends it whole at the end if a defense must see the finished answer."""
        retrieval, verdicts = await self.retrieve(query)
        pieces = self.generator.stream(self.rag.prompt(query, retrieval))
        if any(type(d).on_answer is not Defense.on_answer for d in self.defenses):
            yield (await self._defend_answer(query, Answer(await join_stream(pieces), retrieval, verdicts))).text
            return
        async with closing_stream(pieces):
            async for piece in pieces:
                yield piece

    async def retrieve(self, query: Query) -> tuple[Retrieval, tuple[Verdict, ...]]:
        """Returns the context, at most k hits, and the verdicts about the query.

        Fetches more hits until no defense requests further ones. Within a ``turn``, the user's question is judged
        first, and what is withheld for one query of the turn is withheld for all.
        """
        await self.judge_turn(query)
        found = await self._retrieve(query)
        if (current := current_turn()) is not None and query.text == current.question:
            self._mark_judged(current, query, found[1])
        return found

    async def excluded_sources(self, query: Query) -> tuple[str, ...] | None:
        """Sources among the k nearest chunks that the audience policy removes for the client: for the operator only.

        None if the policy removes nothing for this client, as in observe mode, or unless ``unentitled`` is ``nothing``.
        It searches once more, and records nothing.
        """
        if not self._excludes(query):
            return None
        found = await self.rag.retrieve(query)
        entitled = partial(self.audience.entitles, query)
        return tuple(dict.fromkeys(h.document.source for h in found.hits if not entitled(h.document)))

    async def label_restricted_sources(self, query: Query) -> tuple[str, ...]:
        """Sources among the k nearest chunks whose labels (``acl``) the client lacks: for the operator only.

        Empty for a client without restriction. It searches once more, and records nothing.
        """
        if query.labels is None:
            return ()
        found = await self.rag.retrieve(replace(query, labels=None))
        return tuple(dict.fromkeys(h.document.source for h in found.hits if not query.may_read(h.document)))

    def _excludes(self, query: Query) -> bool:
        """Whether sources that the client may not read in full are removed before the defenses judge."""
        return self.enforce and self.audience.unentitled == "nothing" and self.audience.restricts(query)

    async def judge_turn(self, query: Query) -> None:
        """Judges the user's question of the current turn, if there is one and it was not judged on this index yet.

        It is judged for the client and the number of documents of ``query``, a query of the turn.
        """
        current = current_turn()
        if current is None or query.text == current.question:
            return
        if not current.is_judged(self.index, query.tenant, query.client):
            _, verdicts = await self.judging_only()._retrieve(replace(query, text=current.question, id=current.id))
            self._mark_judged(current, query, verdicts)

    async def deliver(
        self, query: Query, documents: Sequence[Document], *, metadata: bool = True
    ) -> Sequence[Document]:
        """Returns retrieved documents as they may be handed to the client itself, in place of an answer.

        Call it once for each query whose documents leave Casemate, with exactly these.

        Args:
            query: The query.
            documents: The documents.
            metadata: Whether their metadata is handed over, too. If not, the documents are returned without.
        """
        documents = documents if metadata else [replace(document, metadata={}) for document in documents]
        given = documents
        for defense in self.defenses:
            try:
                with self._timed(plug_in_name(defense)):
                    given = tuple(await defense.on_deliver(query, given))
            except Exception as error:
                given = given if self.on_error == "open" else ()
                self._log(query, self._failure(defense, error))
        return given if self.enforce else documents

    def _mark_judged(self, current: Turn, query: Query, verdicts: Sequence[Verdict]) -> None:
        if self.enforce and any(v.action is Action.WITHHOLD for v in verdicts):
            current.refused = True
        current.mark_judged(self.index, query.tenant, query.client)

    async def _retrieve(self, query: Query) -> tuple[Retrieval, tuple[Verdict, ...]]:
        failed: dict[int, Exception] = {}
        with self._timed("embed"), question_arrived():
            vector = await self.rag.encode(query, lambda: self._sync(failed))
        wanted = query.k + self._lookahead + 2 * self._max_hidden
        while True:
            with self._timed("search"):
                found = await self._search(query, vector, wanted)
            defended = await self._defend_retrieval(query, found, failed)
            if defended is not None:
                break
            wanted = 2 * max(wanted, len(found.hits))
        kept, verdicts, hidden = defended
        context = _without_unreadable(kept, found) if self.enforce else found
        context = replace(context, hits=context.hits[: query.k])
        if (current := current_turn()) is not None:
            if self.enforce:
                context = self._without_withheld(current, query, found, context, hidden)
            current.show(context.hits, self.index, query.tenant)
        return context, tuple(self._log(query, v) for v in verdicts)

    def _without_withheld(
        self, current: Turn, query: Query, found: Retrieval, context: Retrieval, hidden: Collection[str]
    ) -> Retrieval:
        """The context without what this or another query of the turn withholds."""
        left, withheld = list[Document](), list[Document]()
        for hit in found.hits:
            (withheld if hit.document.id in hidden else left).append(hit.document)
        current.withhold(withheld, self.index, query.tenant, left)
        return replace(context, hits=()) if current.refused else current.visible(context, self.index, query.tenant)

    async def _search(self, query: Query, vector: Vector, wanted: int) -> Retrieval:
        """Fetches at least so many hits, and enough that k remain whichever sources the defenses hide.

        The amount of work does not depend on whether the query is flagged.
        """
        blocked = set[str]().union(*(d.blocked_sources(query) for d in self.defenses))
        restricted = self.audience.restricts(query)
        excluded = self._excludes(query)
        entitles: Callable[[Document], bool] | None = partial(self.audience.entitles, query) if restricted else None
        if any(d.denies_full_text(query) for d in self.defenses):
            entitles = _entitles_to_nothing
            if excluded:  # no hit could remain, however many are fetched
                found = await self.rag.search(vector, wanted, query.tenant)
                return replace(found, hits=(), exhausted=True, unreadable=frozenset())
        current = current_turn() if self.enforce else None
        while True:
            if excluded:
                found = await self.rag.find(query, vector, wanted, entitles)
            else:
                found = await self.rag.find(query, vector, wanted)
            exhausted = len(found.hits) < wanted
            if current is not None:
                found = current.visible(found, self.index, query.tenant)
            if entitles is not None and not excluded:
                unreadable = frozenset(h.document.id for h in found.hits if not entitles(h.document))
                found = replace(found, unreadable=unreadable)
            sizes = Counter(h.document.source for h in found.hits if h.document.source not in blocked)
            left = sizes.total() - sum(size for _, size in sizes.most_common(self._max_hidden))
            if left >= query.k + self._lookahead or exhausted:
                return replace(found, exhausted=exhausted)
            wanted *= GROWTH

    async def _defend_retrieval(
        self, query: Query, found: Retrieval, failed: Mapping[int, Exception]
    ) -> tuple[Retrieval, list[Verdict], set[str]] | None:
        """Runs the defenses; returns None if one of them requests more hits.

        Otherwise returns the remaining hits, the verdicts, and the ids of the documents that a turn must withhold. In
        observe mode, too, each defense judges what the preceding ones would have left. After a defense that replaced
        unreadable hits there are no more to request: to repeat it would charge the budgets of units again.
        """
        kept, verdicts, hidden = found, list[Verdict](), set[str]()
        for defense in self.defenses:
            outcome = await self._run(defense, query, kept, failed.get(id(defense)))
            if outcome.more and not (found.exhausted or kept.exhausted):
                return None
            kept = outcome.value
            if defense.replaces_unreadable and found.unreadable is not None:
                kept = replace(kept, exhausted=True)
            if outcome.verdict:
                verdicts.append(outcome.verdict)
                hidden.update(() if defense.replaces_unreadable else outcome.verdict.hidden)
        return kept, verdicts, hidden

    async def _run(
        self, defense: Defense, query: Query, retrieval: Retrieval, failed: Exception | None
    ) -> Outcome[Retrieval]:
        """Runs one defense. If it fails, or its ``sync`` failed, the context is withheld or left unchanged."""
        try:
            if failed is not None:
                raise failed
            with self._timed(plug_in_name(defense)):
                return _checked(await defense.on_retrieve(query, retrieval), Retrieval)
        except Exception as error:
            value = retrieval if self.on_error == "open" else replace(retrieval, hits=())
            return Outcome(value, self._failure(defense, error))

    async def _defend_answer(self, query: Query, answer: Answer) -> Answer:
        for defense in self.defenses:
            try:
                with self._timed(plug_in_name(defense)):
                    value, verdict, _ = _checked(await defense.on_answer(query, answer), Answer)
            except Exception as error:
                value = answer if self.on_error == "open" else replace(answer, text=UNKNOWN)
                verdict = self._failure(defense, error)
            verdicts = (self._log(query, verdict),) if verdict else ()
            answer = replace(
                answer, text=value.text if self.enforce else answer.text, verdicts=(*answer.verdicts, *verdicts)
            )
        return answer

    async def add(
        self,
        documents: Sequence[Document],
        tenant: str = DEFAULT_TENANT,
        progress: Progress | None = None,
        uploader: str = "",
    ) -> Mapping[str, Withheld]:
        """Embeds and indexes documents; they replace all documents of the same sources. See ``DocumentSink``."""
        require_tenant(tenant)
        await self.add_embedded(documents, await self.rag.embed(documents, progress), tenant)
        return {}

    async def add_embedded(self, documents: Sequence[Document], vectors: Vector, tenant: str = DEFAULT_TENANT) -> None:
        """Indexes documents with their vectors, (n, dim), as ``add`` does.

        Raises:
            CapabilityError: If a defense fails; nothing is indexed then.
        """
        for defense in self.defenses if self.enforce else ():
            try:
                documents, vectors = await defense.on_index(documents, vectors)
            except CasemateError:
                raise
            except Exception as error:
                failure = f"defense {plug_in_name(defense)} failed in on_index: {describe_failure(error)}"
                raise CapabilityError(failure) from error
        await asyncio.to_thread(self.rag.index.add, documents, vectors, tenant)

    async def remove(self, sources: Sequence[str], tenant: str = DEFAULT_TENANT) -> int:
        """Removes all documents of these sources; returns their number. See ``DocumentSink``."""
        return await asyncio.to_thread(self.rag.index.remove, sources, tenant)

    @property
    def _lookahead(self) -> int:
        return max((d.lookahead for d in self.defenses), default=0)

    @property
    def _max_hidden(self) -> int:
        return sum(d.max_hidden_sources for d in self.defenses)

    def _sync(self, failed: dict[int, Exception]) -> None:
        """Synchronizes the defenses with other processes; a defense whose ``sync`` fails does not judge."""
        for defense in self.defenses:
            try:
                defense.sync()
            except Exception as error:
                failed[id(defense)] = error

    def _failure(self, defense: Defense, error: Exception) -> Verdict:
        """The verdict of a failed defense. Only our own errors are quoted: others may contain text of documents."""
        name = plug_in_name(defense)
        message = str(error) if isinstance(error, CasemateError) else describe_failure(error)
        log.error("defense %s failed (on_error is %s): %s", name, self.on_error, message)
        action = Action.NONE if self.on_error == "open" else Action.WITHHOLD
        return Verdict(name, False, action, 0.0, None, evidence={"error": type(error).__name__, "message": message})

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.on_stage(stage, time.perf_counter() - began)

    def _log(self, query: Query, verdict: Verdict) -> Verdict:
        """Appends a verdict to the verdict log; returns it marked as enforced or not."""
        verdict = replace(verdict, enforced=self.enforce)
        append(self.store, query, verdict, self.log_text)
        return verdict


@dataclass(eq=False)
class UnreadableRemoval(Defense):
    """Removes unreadable hits, in the place of a defense that replaces them. See ``Guard.judging_only``.

    Attributes:
        removed: Ids of the documents that it removed last.
    """

    removed: frozenset[str] = frozenset()

    replaces_unreadable: ClassVar[bool] = True

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        self.removed = frozenset(h.document.id for h in retrieval.hits).intersection(retrieval.unreadable or ())
        return Outcome(_without_unreadable(retrieval, retrieval))


def _entitles_to_nothing(document: Document) -> bool:
    return False


def _without_unreadable(kept: Retrieval, found: Retrieval) -> Retrieval:
    """The hits that defenses left, without documents that the client may not read in full.

    Defenses replace these. If one is missing or fails, its hits must not remain, whatever ``on_error`` is.
    """
    if not found.unreadable:
        return kept
    unreadable = found.unreadable
    return replace(
        kept,
        hits=tuple(h for h in kept.hits if h.document.id not in unreadable or isinstance(h.document, ReleasedDocument)),
    )


def _require_order(defenses: Sequence[Defense]) -> None:
    """Refuses a defense that withholds or compares by similarity after one that reorders hits."""
    for before, after in combinations(defenses, 2):
        if before.reorders and (after.max_hidden_sources or after.lookahead):
            first, second = plug_in_name(before), plug_in_name(after)
            raise ConfigError(
                f"guard.defenses: {first} reorders hits, which misleads {second}; place {second} before {first}"
            )


def _checked(outcome: Outcome[T], kind: type[T]) -> Outcome[T]:
    """Checks the types of a defense's result."""
    if not isinstance(outcome, Outcome):
        raise CapabilityError(f"a defense must return an Outcome, not {type(outcome).__name__}")
    value, verdict, more = outcome
    if not isinstance(value, kind) or not isinstance(verdict, Verdict | None):
        found = f"{type(value).__name__} and {type(verdict).__name__}"
        raise CapabilityError(f"a defense must return an Outcome of {kind.__name__} and Verdict or None, not {found}")
    return Outcome(value, verdict, more)
