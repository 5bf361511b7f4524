"""The two-world audit: the guard's contexts with a unit that it withholds, and without that unit.

A guard that hides a member's record, but answers differently than if the record did not exist, reveals membership. So
each session in which a candidate was withheld is replayed twice by guards without client state: over the index, and
over the same index without the candidate's unit. The contexts must be equal, document by document.

The unit is the candidate with its edited copies in the whole index, and sources with a common value of the guard's
``unit_keys``. A copy in the context counts as exposure: it states the same facts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from casemate.errors import CapabilityError, DataError
from casemate.guard.guard import Guard
from casemate.guard.units import unit_sources
from casemate.maths import stats
from casemate.maths.calibration import MAX_SIZE_RATIO
from casemate.maths.moments import CorpusMoments
from casemate.protocols import CalibratedDefense, Defense, Index, Progress, Target
from casemate.redteam.lab.black_box import TargetSession
from casemate.redteam.lab.datasets import IndexedSource, indexed_sources
from casemate.redteam.lab.experiment import ExperimentPlan
from casemate.redteam.lab.results import TwoWorldAudit
from casemate.redteam.lab.store import Exchange
from casemate.types import DEFAULT_TENANT, Answer, Document, Query, Retrieval, Vector


@dataclass(frozen=True, slots=True)
class TwoWorldFindings:
    """Result of the audit.

    Attributes:
        audit: Pairs and differences, for the report.
        asked: Questions about members.
        exposed: Questions with the member, or a copy, in the context: the guard did not withhold it.
        ended_early: Sessions whose comparison ended because the member changed a context, although it was neither shown
            nor withheld: the guard compares documents with their neighbors, and the member was a neighbor.
    """

    audit: TwoWorldAudit
    asked: int
    exposed: int
    ended_early: int


class IndexWithout(Index):
    """Read-only view of an index as if some sources had been removed.

    A search fetches as many additional documents as the sources have and drops these. The similarity statistics come
    from the moments minus those of the sources' vectors, exactly as after a removal.
    """

    def __init__(self, index: Index, sources: Mapping[str, IndexedSource], tenant: str = DEFAULT_TENANT) -> None:
        """Wraps an open index without some sources of a tenant, at least one, given with their chunks."""
        self._index = index
        self._sources = sources
        self._chunks = IndexedSource.joined(sources.values())
        self._tenant = tenant
        self._moments: CorpusMoments | None = None

    def open(self, fingerprint: str, dim: int) -> None:
        """Does nothing: the index is open."""

    def search(self, vector: Vector, k: int, tenant: str = DEFAULT_TENANT) -> Retrieval:
        if tenant != self._tenant:
            return self._index.search(vector, k, tenant)
        found = self._index.search(vector, k + len(self._chunks.ids), tenant)
        hits = tuple(h for h in found.hits if h.document.source not in self._sources)[:k]
        return Retrieval(hits, self.moments(tenant).similarity_stats(np.asarray(vector, np.float32)))

    def moments(self, tenant: str = DEFAULT_TENANT) -> CorpusMoments:
        if tenant != self._tenant:
            return self._index.moments(tenant)
        if self._moments is None:  # takes milliseconds, and each question needs them
            self._moments = self._index.moments(tenant) - CorpusMoments.of(self._chunks.vectors)
        return self._moments

    def digests(self, tenant: str = DEFAULT_TENANT) -> Mapping[str, str]:
        removed = self._sources if tenant == self._tenant else ()
        return {source: digest for source, digest in self._index.digests(tenant).items() if source not in removed}

    def tenants(self) -> Sequence[str]:
        return [t for t in self._index.tenants() if self.digests(t)]

    def scan(self, tenant: str = DEFAULT_TENANT) -> Iterator[tuple[Sequence[Document], Vector]]:
        for documents, vectors in self._index.scan(tenant):
            kept = [i for i, d in enumerate(documents) if tenant != self._tenant or d.source not in self._sources]
            if kept:
                yield [documents[i] for i in kept], vectors[kept]

    def warm(self, tenant: str = DEFAULT_TENANT) -> None:
        self._index.warm(tenant)

    def check(self) -> Sequence[str]:
        return self._index.check()

    def add(self, documents: Sequence[Document], vectors: Vector, tenant: str = DEFAULT_TENANT) -> None:
        """Raises `CapabilityError`."""
        _refuse()

    def remove(self, sources: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        """Raises `CapabilityError`."""
        _refuse()

    def rebuild(self) -> None:
        """Raises `CapabilityError`."""
        _refuse()

    def clear(self) -> None:
        """Raises `CapabilityError`."""
        _refuse()

    def close(self) -> None:
        """Does nothing: the caller owns the index."""


def _refuse() -> NoReturn:
    raise CapabilityError("the index of the two-world audit is read-only; change the underlying index")


@dataclass(frozen=True, slots=True)
class _ContextTarget(Target):
    """A guard as a target that generates answers only if a defense acts on generation or on answers."""

    guard: Guard

    async def ask(self, query: Query) -> Answer:
        stages = [(type(d).on_answer, type(d).on_generate) for d in self.guard.defenses]
        if any(stage != (Defense.on_answer, Defense.on_generate) for stage in stages):
            return await self.guard.ask(query)
        return Answer("", *await self.guard.retrieve(query))


async def two_world_audit(
    index: Index,
    make_guard: Callable[[Index], Guard],
    sessions: Iterable[tuple[str, Document, Sequence[Exchange]]],
    indexed: Mapping[str, IndexedSource],
    plan: ExperimentPlan,
    progress: Progress = lambda count: None,
) -> TwoWorldFindings:
    """Replays every session in which a member was withheld, in both worlds, and compares the contexts.

    Whole sessions are replayed because a guard may keep client state. Each starts with a guard without state, also with
    `identity` "campaign". The audit compares the questions in which the first world withholds the member, up to the
    first question that shows the member. From then on the client's history differs for any guard, and the attacker has
    seen the member: that counts as exposure. The comparison also ends at the first question that neither shows nor
    withholds the member but has a different context: later differences are not a trace of withholding. This is counted
    separately.
    A member is counted, but not compared, if no calibration fits both worlds, or a defense has too few chunks in one.
    The interval of the rate has members as its sampling unit: questions about one member are correlated.

    The index must not change during the audit. Guards have neither client state nor an event store. Sessions come from
    `Experiment.member_sessions("on")`, the indexed members from `datasets.indexed_sources`.

    Raises:
        DataError: If a member has no indexed chunks.
        BackendError: If the system fails.
    """
    asked = exposed = ended_early = failed = not_compared = 0
    pairs, differing = Counter[str](), Counter[str]()  # by member
    units = _units(index, make_guard(index), indexed.keys(), plan.tenant)
    for attack, member, exchanges in sessions:
        if member.source not in indexed:
            raise DataError(f"the member {member.source!r} has no indexed chunks; copy the index again")
        unit = units[member.source]
        own = IndexedSource.joined(unit.values())
        asked += len(exchanges)
        exposed += sum(not own.isdisjoint(e.context) for e in exchanges)
        if any(not own.isdisjoint(e.hidden) for e in exchanges):
            guards = [make_guard(i) for i in (index, IndexWithout(index, unit, plan.tenant))]
            if not _comparable(index.moments(plan.tenant).n, len(own.ids), guards[0]):
                not_compared += 1
                progress(1)
                continue
            client = plan.client(attack, member.source)
            present, absent = [await _replay(guard, client, exchanges, plan) for guard in guards]
            failed += sum(e.failed for e in (*present, *absent))
            end = next((i for i in range(len(present)) if _diverged(present[i], absent[i], own)), len(present))
            ended_early += end < len(present) and own.isdisjoint(present[end].context)
            hidden = [i for i in range(end) if not own.isdisjoint(present[i].hidden)]
            pairs[member.source] += len(hidden)
            differing[member.source] += sum(present[i].context != absent[i].context for i in hidden)
        progress(1)
    rate = stats.clustered_rate([differing[m] for m in pairs], list(pairs.values())) or stats.Estimate(0.0, 0.0, 1.0)
    audit = TwoWorldAudit(pairs.total(), differing.total(), rate, failed, not_compared)
    return TwoWorldFindings(audit, asked, exposed, ended_early)


def _units(index: Index, guard: Guard, members: Collection[str], tenant: str) -> dict[str, dict[str, IndexedSource]]:
    """The sources of each member's unit, with their chunks."""
    keys = tuple(dict.fromkeys(key for defense in guard.defenses for key in defense.unit_keys))
    units = unit_sources(index, members, tenant, keys)
    chunks = indexed_sources(index, frozenset[str]().union(*units.values()), tenant)
    return {member: {source: chunks[source] for source in unit} for member, unit in units.items()}


def _comparable(chunks: int, removed: int, guard: Guard) -> bool:
    """Whether each defense decides in an index of so many chunks as it does without the removed ones."""
    left = chunks - removed
    fits = chunks <= left * MAX_SIZE_RATIO
    if not fits and any(isinstance(d, CalibratedDefense) and d.uses_calibration for d in guard.defenses):
        return False
    return not any(left < getattr(d, "min_documents", 0) <= chunks for d in guard.defenses)


def _diverged(present: Exchange, absent: Exchange, own: IndexedSource) -> bool:
    """Whether the worlds differ because of a member that is not withheld: it is shown, or changes what is shown."""
    if not own.isdisjoint(present.context):
        return True
    return own.isdisjoint(present.hidden) and present.context != absent.context


async def _replay(
    guard: Guard, client: Callable[[int], str], exchanges: Sequence[Exchange], plan: ExperimentPlan
) -> tuple[Exchange, ...]:
    session = TargetSession(_ContextTarget(guard), client, k=plan.k, tenant=plan.tenant, waits=plan.waits)
    for exchange in exchanges:
        await session.ask(exchange.question)
    return session.exchanges
