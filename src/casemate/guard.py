"""The guard: a ``Rag`` with defenses. It is itself a ``Target``, so whoever asks or attacks need not know which."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from itertools import combinations
from typing import Literal

from casemate.errors import CasemateError, ConfigError
from casemate.protocols import Defense, EventStore, Progress
from casemate.rag import GROWTH, Rag, closing, join, require_tenant
from casemate.record import note
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

log = logging.getLogger(__name__)


class Guard:
    """Answers like the ``Rag`` inside, except for what its defenses take out.

    Args:
        rag: The system under protection.
        defenses: In the order in which they act.
        enforce: False is the shadow mode: everything is judged and noted, nothing is changed.
        on_error: What to do when a defense itself fails: ``closed`` answers without any context, ``open`` without
            that defense.
        store: Where verdicts are noted; None: nowhere.
        log_text: Whether the text of a query is noted beside its verdict.
    """

    def __init__(
        self,
        rag: Rag,
        defenses: Sequence[Defense],
        *,
        enforce: bool = True,
        on_error: Literal["closed", "open"] = "closed",
        store: EventStore | None = None,
        log_text: bool = False,
    ) -> None:
        self.rag = rag
        self.defenses = tuple(defenses)
        _require_order(self.defenses)
        self.enforce = enforce
        self.on_error = on_error
        self.store = store
        self.log_text = log_text
        wrapped = reduce(lambda generator, d: d.on_generate(generator), self.defenses, rag.generator)
        self.generator = wrapped if enforce else rag.generator
        self.watch: Callable[[str, float], None] = lambda stage, seconds: None
        """Told how long each stage took: ``embed``, with ``Defense.follow``, ``search``, and each defense."""

    async def add(
        self, documents: Sequence[Document], tenant: str = DEFAULT_TENANT, progress: Progress | None = None
    ) -> None:
        """Embeds documents and puts them into the index; what it held of the same sources is replaced."""
        require_tenant(tenant)
        await self.put(documents, await self.rag.embed(documents, progress), tenant)

    async def put(self, documents: Sequence[Document], vectors: Vector, tenant: str = DEFAULT_TENANT) -> None:
        """Puts documents that are embedded already into the index, as ``add`` does: (n, dim), a row for each."""
        for defense in self.defenses if self.enforce else ():
            documents, vectors = await defense.on_index(documents, vectors)
        await asyncio.to_thread(self.rag.index.add, documents, vectors, tenant)

    async def remove(self, sources: Sequence[str], tenant: str = DEFAULT_TENANT) -> int:
        """Takes all documents of these sources out of the index; returns how many there were."""
        return await asyncio.to_thread(self.rag.index.remove, sources, tenant)

    async def retrieve(self, query: Query) -> tuple[Retrieval, tuple[Verdict, ...]]:
        """The context a generator may see, at most k hits, and the verdicts about the query."""
        failed: dict[str, Exception] = {}
        with self._timed("embed"):
            vector = await self.rag.encode(query, lambda: self._follow(failed))
        looks = max((d.looks for d in self.defenses), default=0)
        wanted = query.k + looks + 2 * sum(d.hides for d in self.defenses)
        while True:
            with self._timed("search"):
                found = await self._fetch(query, vector, wanted)
            outcome = await self._judge(query, found, failed)
            if outcome is not None:
                break
            wanted = 2 * len(found.hits)
        seen, verdicts = outcome
        shown = seen if self.enforce else found
        noted = tuple(v for verdict in verdicts for v in self._noted(query, verdict))
        return replace(shown, hits=shown.hits[: query.k]), noted

    async def ask(self, query: Query) -> Answer:
        """Answers a query, whole."""
        retrieval, verdicts = await self.retrieve(query)
        text = await join(self.generator.stream(self.rag.prompt(query, retrieval)))
        return await self._finish(query, Answer(text, retrieval, verdicts))

    async def stream(self, query: Query) -> AsyncIterator[str]:
        """Answers a query, piece by piece; whole at the end when a defense must see the finished answer."""
        retrieval, verdicts = await self.retrieve(query)
        pieces = self.generator.stream(self.rag.prompt(query, retrieval))
        if any(type(d).on_answer is not Defense.on_answer for d in self.defenses):
            yield (await self._finish(query, Answer(await join(pieces), retrieval, verdicts))).text
            return
        async with closing(pieces):
            async for piece in pieces:
                yield piece

    async def _fetch(self, query: Query, vector: Vector, wanted: int) -> Retrieval:
        """At least so many hits, and enough that k are left whichever sources the defenses hide.

        The same work, flagged or not.
        """
        hides = sum(d.hides for d in self.defenses)
        barred = set[str]().union(*(d.barred(query) for d in self.defenses))
        needed = query.k + max((d.looks for d in self.defenses), default=0)
        while True:
            found = await self.rag.find(query, vector, wanted)
            sizes = Counter(h.document.source for h in found.hits if h.document.source not in barred)
            left = sizes.total() - sum(size for _, size in sizes.most_common(hides))
            if left >= needed or len(found.hits) < wanted:
                return replace(found, exhausted=len(found.hits) < wanted)
            wanted *= GROWTH

    def _follow(self, failed: dict[str, Exception]) -> None:
        """Each defense takes in what other processes know; who cannot, does not judge."""
        for defense in self.defenses:
            try:
                defense.follow()
            except Exception as error:
                failed[_name(defense)] = error

    async def _judge(
        self, query: Query, found: Retrieval, failed: Mapping[str, Exception]
    ) -> tuple[Retrieval, list[Verdict | None]] | None:
        """What the defenses leave, and their verdicts; None if one of them wants more hits to decide on."""
        seen, verdicts = found, []
        for defense in self.defenses:  # in observe mode, too, each judges what the ones before would have left
            outcome = await self._apply(defense, query, seen, failed.get(_name(defense)))
            if outcome.more and not found.exhausted:
                return None
            seen = outcome.value
            verdicts.append(outcome.verdict)
        return seen, verdicts

    async def _apply(
        self, defense: Defense, query: Query, retrieval: Retrieval, failed: Exception | None
    ) -> Outcome[Retrieval]:
        """One defense's opinion on what was found; if it fails, or did before, the context is withheld or left."""
        try:
            if failed is not None:
                raise failed
            with self._timed(_name(defense)):
                return _sane(await defense.on_retrieve(query, retrieval), Retrieval)
        except Exception as error:
            value = retrieval if self.on_error == "open" else replace(retrieval, hits=())
            return Outcome(value, self._failure(defense, error))

    async def _finish(self, query: Query, answer: Answer) -> Answer:
        """The finished answer after every defense's ``on_answer``."""
        for defense in self.defenses:
            try:
                with self._timed(_name(defense)):
                    value, verdict, _ = _sane(await defense.on_answer(query, answer), Answer)
            except Exception as error:
                value = answer if self.on_error == "open" else replace(answer, text=UNKNOWN)
                verdict = self._failure(defense, error)
            text = value.text if self.enforce else answer.text
            answer = replace(answer, text=text, verdicts=(*answer.verdicts, *self._noted(query, verdict)))
        return answer

    def _failure(self, defense: Defense, error: Exception) -> Verdict:
        name = _name(defense)
        said = {"message": str(error)} if isinstance(error, CasemateError) else {}  # others may quote a text
        what = said.get("message", type(error).__name__)
        log.error("defense %s failed (on_error is %s): %s", name, self.on_error, what)
        action = Action.NONE if self.on_error == "open" else Action.WITHHOLD
        return Verdict(name, False, action, 0.0, None, evidence={"error": type(error).__name__, **said})

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.watch(stage, time.perf_counter() - began)

    def _noted(self, query: Query, verdict: Verdict | None) -> list[Verdict]:
        """The verdict as it counts in this mode, handed to the store, which writes it off the request's path."""
        if verdict is None:
            return []
        verdict = replace(verdict, enforced=self.enforce)
        note(self.store, query, verdict, self.log_text)
        return [verdict]


def _require_order(defenses: Sequence[Defense]) -> None:
    """Refuses a defense that withholds or compares by similarity behind one that takes hits out of that order."""
    for before, behind in combinations(defenses, 2):
        if before.reorders and (behind.hides or behind.looks):
            names = [_name(d) for d in (before, behind)]
            raise ConfigError(
                f"guard.defenses: {names[0]} puts hits into another order, which misleads {names[1]}; "
                f"put {names[1]} in front of it"
            )


def _name(defense: Defense) -> str:
    """The name of a plug-in is its file."""
    return type(defense).__module__.rsplit(".", 1)[-1]


def _sane(outcome: Outcome[T], kind: type[T]) -> Outcome[T]:
    """What a defense returned, if it is what it must return."""
    value, verdict, more = outcome
    if not isinstance(value, kind) or not isinstance(verdict, Verdict | None):
        raise TypeError(f"a defense returned {type(value).__name__} and {type(verdict).__name__}")
    return Outcome(value, verdict, more)
