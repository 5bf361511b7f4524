"""A first set of canaries, drafted from the owner's corpus, and tried out before it is proposed.

The corpus is parted into regions of like meaning, and each region gets canaries: sentinel documents with a private
question that finds them first, questions for a fact with its answer, the same with a trigger behind it. Questions about
what the corpus does not hold, and orders to break the rules, come beside them. A draft that the real system does not
meet, with something to spare, is dropped. So a set begins with canaries that pass, and that a document more or less in
the corpus does not make fail, unless it is the one that they are about.

Deviation: METHODS D6 has sentinels with any private query; here a query must also have its document first by a margin
(``MARGIN``), because other documents of the same kind come in every day.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import yaml

from casemate.errors import ConfigError, DataError
from casemate.monitor.canaries.canary import Canary, CanarySet, misfits
from casemate.monitor.canaries.drafts import FACT, INJECTION, REFUSAL, SENTINEL, TRIGGER, Draft, Drafter, entities
from casemate.monitor.canaries.regions import Corpus, Coverage, coverage
from casemate.monitor.canaries.results import Result, Status
from casemate.monitor.canaries.run import CLIENT, run
from casemate.protocols import Embedder, Index, Target
from casemate.reindexing.topics import NOISE
from casemate.remote import TELLS
from casemate.types import DEFAULT_TENANT, MAX_K, Vector

SHARES: Mapping[str, float] = {SENTINEL: 0.4, FACT: 0.3, TRIGGER: 0.16, REFUSAL: 0.1, INJECTION: 0.04}
"""Of the set, by kind."""
MARGIN, SLACK = 0.1, 0.08
"""Cosine by which a sentinel's document must be ahead of the next one, and by which the document of a fact must be
ahead of the first that is not read: what comes new has to beat that."""
BELOW = 0.02
"""A sentinel's document may lose so much cosine (METHODS D6)."""
STRICTER = 0.95, 0.4
"""How much alike a trigger's answers and contexts must be when it is drafted; when it is asked, less will do."""
TRIED, AT_ONCE, ROUNDS = 6, 4, 32
"""Documents of a region that are tried for one canary, its drafts that are tried at once, and how often."""


@dataclass(frozen=True)
class Settings:
    """What is drafted, and how it is tried.

    Attributes:
        count: Canaries wanted, at least 1.
        k: Documents read for an answer.
        tenant: Whose documents.
        seed: Decides all that is drawn.
        questions: Questions that people asked, to tell how much of them is covered; they do not enter the set.
        client: The name under which drafts are asked, as in ``run``.
        concurrency: Questions at the same time.
        timeout_s: Longest time for one.
        name: Of the set.
    """

    count: int = 50
    k: int = 5
    tenant: str = DEFAULT_TENANT
    seed: int = 7
    questions: Sequence[str] = ()
    client: str = f"{CLIENT}-{{canary}}-{{run}}"
    concurrency: int = 8
    timeout_s: float = 30.0
    name: str = "canaries"

    def __post_init__(self) -> None:
        if self.count < 1 or not 1 <= self.k <= MAX_K:
            raise ConfigError(f"count={self.count}, k={self.k}; count must be at least 1, k from 1 to {MAX_K}")


class Dropped(NamedTuple):
    """A draft that did not hold, or a place in the set that no draft could fill: its kind, region and the reason."""

    kind: str
    region: str
    reason: str


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A set of canaries to look through.

    Attributes:
        canaries: The set. It holds text of the corpus.
        notes: For each canary, where it comes from.
        coverage: What it watches.
        dropped: Drafts that did not hold.
        method: How the regions were found, in words.
    """

    canaries: CanarySet
    notes: Mapping[str, str]
    coverage: Coverage
    dropped: tuple[Dropped, ...]
    method: str

    @property
    def text(self) -> str:
        """The set as a YAML file with comments, as ``canary.read`` reads it."""
        found = [*_head(self), f"name: {_plain(self.canaries.name)}", "canaries:"]
        for canary in self.canaries.canaries:
            row = canary.model_dump(mode="json", exclude_unset=True)
            dumped = yaml.safe_dump([row], sort_keys=False, allow_unicode=True, width=110)
            found += ["", f"# {self.notes[canary.id]}", dumped.rstrip()]
        return "\n".join(found) + "\n"


async def suggest(
    index: Index, embedder: Embedder, target: Target | None = None, settings: Settings | None = None
) -> Suggestion:
    """Drafts a set of canaries, and keeps those that hold.

    Nothing is logged. The result holds text of the corpus, and is for its owner.

    Args:
        index: Where the documents are; they are only read.
        embedder: That of the index.
        target: The system as users see it. Without one, only retrieval can be tried: all canaries are sentinels.
        settings: What is drafted.

    Returns:
        As many canaries as were wanted, or fewer, with the reasons.

    Raises:
        DataError: If the tenant has no documents, or none of the drafts holds, as when the target gives no answer.
    """
    settings = settings or Settings()
    corpus = await asyncio.to_thread(Corpus.of, index, settings.tenant, settings.seed)
    trial = _Trial(index, embedder, target, settings, corpus)
    kept = await trial.all()
    if not kept:
        why = Counter(d.reason for d in trial.dropped).most_common(1)
        raise DataError(f"no canary could be drafted: {why[0][0] if why else 'the documents have too few words'}")
    covered = await asyncio.to_thread(trial.coverage, kept)
    found = CanarySet(settings.name, tuple(canary for canary, _ in kept))
    notes = {canary.id: _note(draft, corpus) for canary, draft in kept}
    return Suggestion(found, notes, covered, tuple(trial.dropped), corpus.method)


@dataclass
class _Place:
    """A place in the set, and drafts that may take it."""

    kind: str
    region: int
    drafts: Iterator[Draft]
    ready: list[Draft] = field(default_factory=list)  # their documents are found as they should be
    spent: bool = False  # no draft is left
    last: str = "no draft could be made of its documents"


@dataclass
class _Trial:
    """Fills the places of a set with drafts that hold."""

    index: Index
    embedder: Embedder
    target: Target | None
    settings: Settings
    corpus: Corpus
    dropped: list[Dropped] = field(default_factory=list)
    _used: set[str] = field(default_factory=set)  # ids of chunks that have a canary
    _spare: Iterator[int] = field(default_factory=lambda: iter(()))  # regions that no place was given

    def __post_init__(self) -> None:
        self._tells: Collection[str] = TELLS
        if self.target is not None:
            self._tells = getattr(self.target, "tells", TELLS)
        rng = np.random.default_rng(self.settings.seed)
        called = entities(self.corpus.documents, self.corpus.genre, rng)
        self._drafter = Drafter(self.corpus.genre, rng, called)

    async def all(self) -> list[tuple[Canary, Draft]]:
        """The canaries that hold, each with its draft, in the order of the places."""
        places = self._places()
        held: dict[int, Draft] = {}
        for number in range(ROUNDS):
            open_ = [i for i, place in enumerate(places) if i not in held and not place.spent]
            if not open_:
                break
            drawn = await asyncio.to_thread(self._drawn, {i: places[i] for i in open_})
            for i, draft, result in await self._asked(drawn, number):
                if result is None or _passed(result):
                    held[i] = draft
                    continue
                self._used.discard(draft.document)
                places[i].last = result.error or ", ".join(d.kind for d in result.deviations)
                self._drop(draft.kind, draft.region, places[i].last)
        for i in (i for i in range(len(places)) if i not in held):
            self._drop(places[i].kind, places[i].region, f"its place stays empty: {places[i].last}")
        counts: Counter[str] = Counter()
        found = []
        for _, draft in sorted(held.items()):
            counts[draft.kind] += 1
            found.append((Canary(id=f"{draft.kind}-{counts[draft.kind]:02d}", **draft.fields), draft))
        return found

    def coverage(self, kept: Sequence[tuple[Canary, Draft]]) -> Coverage:
        """What these canaries watch. Those about nothing that the corpus holds watch no region."""
        return coverage(
            self.corpus,
            self.index,
            self.embedder,
            {canary.id: canary.query for canary, draft in kept if draft.document},
            k=self.settings.k,
            tenant=self.settings.tenant,
            questions=self.settings.questions,
            seed=self.settings.seed,
        )

    def _places(self) -> list[_Place]:
        """The places of the set: regions in turn, the largest first, and kinds evenly among them."""
        shares = SHARES if self.target is not None else {SENTINEL: 1.0}
        if not {"ids", "scores"} <= set(self._tells):
            shares = {kind: share for kind, share in shares.items() if kind != SENTINEL}
        counts = allotted(self.settings.count, shares)
        order = np.argsort(-self.corpus.sizes, kind="stable").tolist()
        kinds_in_turn = _mixed({k: n for k, n in counts.items() if k not in (REFUSAL, INJECTION)})
        self._spare = iter(order[len(kinds_in_turn) :])
        found = []
        for place, kind in enumerate(kinds_in_turn):
            region = order[place % len(order)]
            fallback = FACT if kind != FACT or SENTINEL not in shares else SENTINEL
            kinds = [kind, fallback] if self.target is not None else [kind]
            found.append(_Place(kind, region, self._about(kinds, region)))
        nothing = [k for k in (REFUSAL, INJECTION) for _ in range(counts.get(k, 0))]
        made = {k: self._drafter.about_nothing(k) for k in (REFUSAL, INJECTION)}
        return found + [_Place(k, NOISE, made[k]) for k in nothing]

    def _about(self, kinds: Sequence[str], region: int) -> Iterator[Draft]:
        """Drafts of the first kind on the documents of a region, then of the next; then on a region that is left."""
        for here, kind in ((here, kind) for here in chain([region], self._spare) for kind in kinds):
            for document in self.corpus.near(here)[:TRIED]:
                if document.id not in self._used:
                    yield from self._drafter.about(kind, document, here)

    def _drawn(self, places: Mapping[int, _Place]) -> dict[int, Draft]:
        """For each place, the next draft whose document is found as it should be; none: there is no draft left."""
        looked: list[tuple[int, Draft]] = []
        for i, place in places.items():
            if not place.ready:
                new = list(islice(place.drafts, AT_ONCE if place.region != NOISE else 1))
                place.spent = not new
                looked += [(i, draft) for draft in new]
        measured = self._measured([draft for _, draft in looked])
        for (i, draft), found in zip(looked, measured, strict=True):
            if isinstance(found, Draft):
                places[i].ready.append(found)
            else:
                places[i].last = found
                self._drop(draft.kind, draft.region, found)
        taken: dict[int, Draft] = {}
        for i, place in places.items():
            while place.ready and i not in taken:
                draft = place.ready.pop(0)
                if draft.document not in self._used:
                    taken[i] = draft
                    self._used |= {draft.document} - {""}
        return taken

    def _measured(self, drafts: Sequence[Draft]) -> list[Draft | str]:
        """The drafts with what was measured of them, or why they do not hold."""
        if not drafts:
            return []
        vectors = self.embedder.embed([draft.query for draft in drafts])
        return [self._placed(draft, vector) for draft, vector in zip(drafts, vectors, strict=True)]

    def _placed(self, draft: Draft, vector: Vector) -> Draft | str:
        if not draft.document:
            return draft
        k = 1 if draft.kind == SENTINEL else self.settings.k
        hits = self.index.search(vector, k + 1, self.settings.tenant).hits
        score = next((h.score for h in hits[:k] if h.document.id == draft.document), None)
        if score is None:
            return "other documents come before its own"
        margin = score - (hits[k].score if len(hits) > k else -1.0)
        if margin < (MARGIN if draft.kind == SENTINEL else SLACK):
            return "another document comes nearly as near to its question"
        fields = dict(draft.fields)
        if draft.kind == SENTINEL:
            fields["min_cosine"] = float(np.floor((score - BELOW) * 1000) / 1000)
        elif "ids" not in self._tells:
            del fields["expected_documents"]
        return replace(draft, fields=fields, margin=float(margin))

    async def _asked(self, drawn: Mapping[int, Draft], number: int) -> list[tuple[int, Draft, Result | None]]:
        """How the target answers the drafts; of several results the worst. Without a target there is nothing to ask."""
        if self.target is None:
            return [(i, draft, None) for i, draft in drawn.items()]
        strict = {i: _stricter(Canary(id=f"draft-{number}-{i}", **draft.fields)) for i, draft in drawn.items()}
        found: dict[str, Result] = {}
        for k in self._depths:
            done = await self._run([c for c in strict.values() if _passed(found.get(c.id))], self.target, number, k)
            found |= {result.canary: result for result in done}
            if done and all(result.status is Status.ERROR for result in done):
                raise DataError(f"the target answers none of {len(done)} drafts: {done[0].error}")
        return [(i, drawn[i], found[canary.id]) for i, canary in strict.items()]

    @property
    def _depths(self) -> list[int]:
        """Documents that are read when a draft is asked: as usual, fewer and more, as if some had come or gone."""
        k = self.settings.k
        return [k, max(k // 2, 1), min(2 * k, MAX_K)]

    async def _run(self, canaries: Sequence[Canary], target: Target, number: int, k: int) -> Sequence[Result]:
        for canary in canaries:
            if faults := misfits(canary, k=k, tells=self._tells):
                raise DataError(f"this target cannot be watched so: {faults[0]}")
        if not canaries:
            return ()
        done = await run(
            canaries,
            target,
            run_id=f"suggest-{number}-{k}",
            k=k,
            embedder=self.embedder,
            concurrency=self.settings.concurrency,
            timeout_s=self.settings.timeout_s,
            tenant=self.settings.tenant,
            client=self.settings.client,
        )
        return done.results

    def _drop(self, kind: str, region: int, reason: str) -> None:
        self.dropped.append(Dropped(kind, self.corpus.names[region] if region != NOISE else "", reason))


def allotted(count: int, shares: Mapping[str, float]) -> dict[str, int]:
    """So many places by shares, the largest remainders rounded up.

    >>> allotted(5, {"a": 0.5, "b": 0.3, "c": 0.2}), allotted(1, {"a": 0.5, "b": 0.3})
    ({'a': 3, 'b': 1, 'c': 1}, {'a': 1, 'b': 0})
    """
    exact = {kind: count * share / sum(shares.values()) for kind, share in shares.items()}
    found = {kind: int(value) for kind, value in exact.items()}
    for kind in sorted(exact, key=lambda k: found[k] - exact[k])[: count - sum(found.values())]:
        found[kind] += 1
    return found


def _mixed(counts: Mapping[str, int]) -> list[str]:
    """Each kind as often as it says, evenly among the others."""
    places = [((i + 0.5) / count, kind) for kind, count in counts.items() for i in range(count)]
    return [kind for _, kind in sorted(places, key=lambda p: p[0])]


def _stricter(canary: Canary) -> Canary:
    """The canary with more demanded, so that it passes with something to spare."""
    if canary.baseline_query is None:
        return canary
    alike, overlap = STRICTER
    return canary.model_copy(
        update={"similarity_threshold": alike, "min_overlap": overlap if canary.min_overlap else 0.0}
    )


def _passed(result: Result | None) -> bool:
    return result is None or result.status is Status.PASS


def _note(draft: Draft, corpus: Corpus) -> str:
    if not draft.document:
        return "about nothing that the corpus holds"
    return f"region: {corpus.names[draft.region]}; ahead by {draft.margin:.2f}"


def _head(found: Suggestion) -> list[str]:
    covered = len(found.coverage.regions) - len(found.coverage.bare)
    lines = [
        "# Canaries drafted by casemate. This file holds text of your documents: keep it like them, and let nobody see",
        "# it who is not to know which questions are asked. Look it through; `canary baseline` comes next.",
        f"# Regions of the corpus with a canary: {covered} of {len(found.coverage.regions)} ({found.method}).",
    ]
    if found.coverage.traffic is not None:
        lines.append(f"# Of the questions given, {found.coverage.traffic.value:.0%} lie near a canary.")
    return lines + [f"# Without one: {region.name} ({region.chunks} chunks)" for region in found.coverage.bare]


def _plain(text: str) -> str:
    """A text on one line of YAML."""
    return yaml.safe_dump(text, allow_unicode=True, default_style='"', width=10_000).strip()
