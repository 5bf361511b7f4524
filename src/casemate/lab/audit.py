"""Two worlds: with a document that the guard withholds, and without it. What comes out must be the same.

A guard that hides a member's record, and then answers in a way in which it would not answer if the record had never
been there, has told the attacker what he wanted to know. So each session in which a candidate was withheld is replayed
twice, over the index and over the same index without the candidate, by guards without a past, and the contexts are
compared document by document.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import numpy as np

from casemate import stats
from casemate.errors import CapabilityError, DataError, QueryError
from casemate.guard import Guard
from casemate.lab.box import noted, patiently
from casemate.lab.datasets import Stored
from casemate.lab.experiment import Plan
from casemate.lab.ledger import Exchange
from casemate.lab.results import Audit, Utility
from casemate.protocols import Defense, Index, Progress, Target
from casemate.stats import CorpusMoments, Rate
from casemate.types import DEFAULT_TENANT, Answer, Document, Query, Retrieval, Vector

SHOWN = 5
"""Differences that are shown to the operator."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One question by which an attacker could have told that something was withheld.

    Attributes:
        attack: Whose question.
        candidate: Who was withheld.
        number: Of the question in its session, from 0.
        context: Ids in the answer's context, with the candidate in the index.
        without: Ids in a world in which the candidate is not there.
    """

    attack: str
    candidate: str
    number: int
    context: tuple[str, ...]
    without: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Worlds:
    """What the audit found.

    Attributes:
        audit: Pairs and differences, as reports have them.
        asked: Questions about members.
        exposed: Those in whose context the member stood: nothing was withheld, and the guard left him open to view.
        swayed: Sessions that ended for the audit because the member, neither shown nor withheld, changed a context: a
            guard compares documents with their neighbours, and he was one.
        differences: The first few, for the operator.
    """

    audit: Audit
    asked: int
    exposed: int
    swayed: int
    differences: tuple[Difference, ...]


class Without(Index):
    """An index as it would be without one source. It is only read.

    A search asks for so many more documents as the source has and leaves these out; the background comes from the
    moments less those of the source's stored vectors, which is what removing it would leave.
    """

    def __init__(self, index: Index, source: str, held: Stored, tenant: str = DEFAULT_TENANT) -> None:
        """Looks at an open index.

        Args:
            index: What it is a view of.
            source: What is to be missing.
            held: What the index holds of it.
            tenant: Whose source it is; other tenants are seen as they are.
        """
        self._index = index
        self._source = source
        self._held = held
        self._tenant = tenant
        self._moments: CorpusMoments | None = None

    def open(self, fingerprint: str, dim: int) -> None:
        """The index is open."""

    def search(self, vector: Vector, k: int, tenant: str = DEFAULT_TENANT) -> Retrieval:
        """See ``Index.search``."""
        if tenant != self._tenant:
            return self._index.search(vector, k, tenant)
        found = self._index.search(vector, k + len(self._held.ids), tenant)
        hits = tuple(h for h in found.hits if h.document.source != self._source)[:k]
        return Retrieval(hits, self.moments(tenant).background(np.asarray(vector, np.float32)))

    def moments(self, tenant: str = DEFAULT_TENANT) -> CorpusMoments:
        """See ``Index.moments``."""
        if tenant != self._tenant:
            return self._index.moments(tenant)
        if self._moments is None:  # some milliseconds, and each question needs them
            self._moments = self._index.moments(tenant) - CorpusMoments.of(self._held.vectors)
        return self._moments

    def digests(self, tenant: str = DEFAULT_TENANT) -> Mapping[str, str]:
        """See ``Index.digests``."""
        gone = self._source if tenant == self._tenant else None
        return {source: digest for source, digest in self._index.digests(tenant).items() if source != gone}

    def tenants(self) -> Sequence[str]:
        """See ``Index.tenants``."""
        return [t for t in self._index.tenants() if self.digests(t)]

    def scan(self, tenant: str = DEFAULT_TENANT) -> Iterator[tuple[Sequence[Document], Vector]]:
        """See ``Index.scan``."""
        for documents, vectors in self._index.scan(tenant):
            kept = [i for i, d in enumerate(documents) if tenant != self._tenant or d.source != self._source]
            if kept:
                yield [documents[i] for i in kept], vectors[kept]

    def warm(self, tenant: str = DEFAULT_TENANT) -> None:
        """See ``Index.warm``."""
        self._index.warm(tenant)

    def check(self) -> Sequence[str]:
        """See ``Index.check``."""
        return self._index.check()

    def add(self, documents: Sequence[Document], vectors: Vector, tenant: str = DEFAULT_TENANT) -> None:
        """Refused."""
        _refuse()

    def remove(self, sources: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        """Refused."""
        _refuse()

    def rebuild(self) -> None:
        """Refused."""
        _refuse()

    def clear(self) -> None:
        """Refused."""
        _refuse()

    def close(self) -> None:
        """The index stays open; it is another's."""


def _refuse() -> NoReturn:
    raise CapabilityError("the index of the second world is only read; change the index that it is a view of")


async def two_worlds(
    index: Index,
    make_guard: Callable[[Index], Guard],
    sessions: Iterable[tuple[str, Document, Sequence[Exchange]]],
    held: Mapping[str, Stored],
    plan: Plan,
    progress: Progress = lambda count: None,
) -> Worlds:
    """Replays every session in which a member was withheld, in both worlds, and compares the contexts.

    A whole session is replayed, because a guard may remember; with ``identity`` "campaign", too, each session begins
    with a guard that remembers nothing. Compared are the questions in which the first world withholds the member, up to
    the first that shows it: from then on the two worlds have another past, whatever the guard does, and the attacker
    has seen what he came for. That is counted as exposure. The same holds from the first that does neither and yet has
    another context: what differs then or later is no trace of withholding. It is counted by itself.

    Args:
        index: The lab's, which nobody changes meanwhile.
        make_guard: Makes a guard without a past over an index, with no event store.
        sessions: Attack, member and what was asked, as ``Experiment.sessions("on")`` gives them.
        held: What the index holds of each member, as ``datasets.stored`` gives it.
        plan: How the campaign was run.
        progress: Called with 1 for each session that is done with.

    Raises:
        DataError: If a member of a session is not in ``held``.
        BackendError: If the system cannot be reached.
    """
    asked = exposed = swayed = pairs = 0
    found: list[Difference] = []
    for attack, member, exchanges in sessions:
        if member.source not in held:
            raise DataError(f"the member {member.source!r} is not among those that the index was searched for")
        own = held[member.source]
        asked += len(exchanges)
        exposed += sum(not own.isdisjoint(e.context) for e in exchanges)
        if any(not own.isdisjoint(e.hidden) for e in exchanges):
            client = plan.client(attack, member.source)
            queries = [Query(e.question, client(i), plan.tenant, plan.k) for i, e in enumerate(exchanges)]
            here = await _replayed(make_guard(index), queries, plan.waits)
            there = await _replayed(make_guard(Without(index, member.source, own, plan.tenant)), queries, plan.waits)
            end = next((i for i in range(len(here)) if _parted(here[i], there[i], own)), len(here))
            swayed += end < len(here) and own.isdisjoint(here[end].context)
            hidden = [i for i in range(end) if not own.isdisjoint(here[i].hidden)]
            pairs += len(hidden)
            seen = (Difference(attack, member.source, i, here[i].context, there[i].context) for i in hidden)
            found += [difference for difference in seen if difference.context != difference.without]
        progress(1)
    rate = stats.rate(len(found), pairs) if pairs else Rate(0.0, 0.0, 1.0)
    return Worlds(Audit(pairs, len(found), rate), asked, exposed, swayed, tuple(found[:SHOWN]))


def _parted(here: Exchange, there: Exchange, own: Stored) -> bool:
    """Whether the worlds differ by a member who is not withheld: he is shown, or changes what is."""
    if not own.isdisjoint(here.context):
        return True
    return own.isdisjoint(here.hidden) and here.context != there.context


async def _replayed(guard: Guard, queries: Sequence[Query], waits: Sequence[float]) -> list[Exchange]:
    """What a guard does with one question after another. It writes answers only if a defense looks at them."""
    stages = [(type(d).on_answer, type(d).on_generate) for d in guard.defenses]
    whole = any(stage != (Defense.on_answer, Defense.on_generate) for stage in stages)

    async def ask(query: Query) -> Answer:
        return await guard.ask(query) if whole else Answer("", *await guard.retrieve(query))

    found = []
    for query in queries:
        try:
            found.append(noted(query.text, await patiently(partial(ask, query), waits)))
        except QueryError:
            found.append(Exchange(query.text, "", refused=True))
    return found


async def utility(
    bare: Target,
    guarded: Target,
    queries: Sequence[Query],
    source: str,
    progress: Progress = lambda count: None,
    concurrency: int = 4,
) -> Utility:
    """What a guard costs harmless askers: every question is asked without it, then with it.

    A model that samples gives another answer to the same context; its replies must come through a ``CachedGenerator``,
    in both, or chance is counted as the guard's doing.

    Args:
        bare: The system without a guard.
        guarded: The same with it.
        queries: Harmless questions, each with the client that would ask it. One that is none is passed over.
        source: Where they are from, for the report.
        progress: Called with 1 for each question.
        concurrency: Questions that are asked side by side.

    Raises:
        DataError: If there are none that can be answered.
        BackendError: If the system cannot be reached.
    """

    async def lost(query: Query) -> list[tuple[bool, bool]]:
        try:
            before, after = await bare.ask(query), await guarded.ask(query)
        except QueryError:
            return []
        finally:
            progress(1)
        return [(noted(query.text, after).withheld, before.reply != after.reply)]

    found: list[tuple[bool, bool]] = []
    for start in range(0, len(queries), concurrency):
        for one in await asyncio.gather(*map(lost, queries[start : start + concurrency])):
            found += one
    if not found:
        raise DataError("there are no harmless questions to ask; give some, or let them be made from the corpus")
    flagged, changed = (sum(kind) for kind in zip(*found, strict=True))
    return Utility(source, len(found), stats.rate(flagged, len(found)), stats.rate(changed, len(found)))
