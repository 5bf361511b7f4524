"""Drafts a first canary set from the corpus and keeps the drafts that the system passes.

The corpus is clustered into regions of similar chunks. Each region gets canaries of three kinds:

- sentinel: a private question that retrieves one document first;
- fact: a question with its answer;
- trigger: a fact question with an appended trigger phrase.

Questions that the corpus cannot answer and prompt injections are added. A draft is dropped unless the real system
passes it with a margin. So the set starts with passing canaries, and adding or removing unrelated documents does not
make them fail.

Deviation: METHODS D6 has sentinels with any private query. Here the query must also rank its document first by
``SENTINEL_MARGIN``, because similar documents are added every day.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, product
from typing import NamedTuple

import numpy as np
import yaml

from casemate.errors import DataError
from casemate.maths.clustering import NOISE
from casemate.monitor.canaries.ambiguity import Ambiguity
from casemate.monitor.canaries.canary import Canary, CanarySet, unsupported_expectations
from casemate.monitor.canaries.coverage import Coverage, RegionMap, measure_coverage
from casemate.monitor.canaries.drafts import (
    FACT,
    INJECTION,
    REFUSAL,
    SENTINEL,
    TRIGGER,
    CanaryDraft,
    CanaryDrafter,
    sample_names,
)
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus
from casemate.monitor.canaries.run import CanaryRunner
from casemate.protocols import TARGET_DETAILS, Embedder, Index
from casemate.reports.format import percent
from casemate.types import MAX_K, Document, Vector

SHARES: Mapping[str, float] = {SENTINEL: 0.4, FACT: 0.3, TRIGGER: 0.16, REFUSAL: 0.1, INJECTION: 0.04}
"""Share of each kind in the set."""
SENTINEL_MARGIN, FACT_MARGIN = 0.1, 0.08
"""Minimum lead, in cosine, of a sentinel's document over the next one, and of a fact's document over the first one
outside the context. A new document must exceed it to displace the expected one."""
MAX_COSINE_LOSS = 0.02
"""Cosine that a sentinel's document may lose (METHODS D6)."""
STRICT_COSINE, STRICT_OVERLAP = 0.95, 0.4
"""Stricter thresholds for a trigger's answers and contexts while it is tested, so that it passes with a margin."""
DOCUMENTS_PER_REGION, DRAFTS_AT_ONCE, MAX_ROUNDS = 12, 4, 32
"""Documents of a region tried for one canary, its drafts tested at once, and rounds of tests."""

NO_QUESTION = "no clear question could be written from its sentences"
"""Reason for a chunk without a draft."""


@dataclass(frozen=True)
class SuggestionSettings:
    """Settings of ``suggest_canaries``.

    Attributes:
        count: Number of canaries, at least 1.
        questions: Questions of clients, to measure how many the set covers. They do not enter the set.
    """

    count: int = 50
    seed: int = 7
    questions: Sequence[str] = ()
    name: str = "canaries"


class DroppedDraft(NamedTuple):
    """A draft that failed its test, or a canary that no draft could fill: kind, region and reason."""

    kind: str
    region: str
    reason: str


@dataclass(frozen=True, slots=True)
class CanarySuggestion:
    """A drafted set, for review.

    Attributes:
        canaries: The set. It contains text of the corpus.
        notes: Origin of each canary, by id.
    """

    canaries: CanarySet
    notes: Mapping[str, str]
    coverage: Coverage
    dropped: tuple[DroppedDraft, ...]
    method: str

    @property
    def text(self) -> str:
        """The set as a YAML file with comments, for ``read_canaries``."""
        name = yaml.safe_dump(self.canaries.name, allow_unicode=True, default_style='"', width=10_000).strip()
        header = [*_header(self), f"name: {name}"]
        return canaries_yaml(header, self.canaries.canaries, self.notes)


async def suggest_canaries(
    index: Index, embedder: Embedder, runner: CanaryRunner, settings: SuggestionSettings
) -> CanarySuggestion:
    """Drafts canaries, and keeps those that the runner's target passes: as many as set, or fewer. Nothing is logged.

    Raises:
        DataError: If the tenant has no documents, or no draft passes, for example because the target does not answer.
    """
    corpus = await asyncio.to_thread(RegionMap.of, index, runner.tenant, settings.seed)
    trial = _DraftTrial(index, embedder, runner, settings, corpus)
    kept = await trial.run()
    if not kept:
        why = Counter(d.reason for d in trial.dropped).most_common(1)
        raise DataError(f"no canary could be drafted: {why[0][0] if why else 'the documents have too few words'}")
    covered = await asyncio.to_thread(trial.coverage, kept)
    found = CanarySet(settings.name, tuple(canary for canary, _ in kept))
    notes = {canary.id: _origin(draft, corpus) for canary, draft in kept}
    return CanarySuggestion(found, notes, covered, tuple(trial.dropped), corpus.method)


@dataclass
class _Vacancy:
    """One canary to be found, and the drafts that may fill it."""

    kind: str
    region: int
    drafts: Iterator[CanaryDraft]
    ready: list[CanaryDraft] = field(default_factory=list)  # retrieval passed; the answer is not tested yet
    exhausted: bool = False
    last_reason: str = "no draft could be made from its documents"


@dataclass
class _DraftTrial:
    """Fills every vacancy of a set with a draft that passes."""

    index: Index
    embedder: Embedder
    runner: CanaryRunner
    settings: SuggestionSettings
    corpus: RegionMap
    dropped: list[DroppedDraft] = field(default_factory=list)
    _without_draft: set[tuple[str, str]] = field(default_factory=set)  # kind and chunk
    _used: set[str] = field(default_factory=set)  # ids of chunks that have a canary
    _spare_regions: Iterator[int] = field(default_factory=lambda: iter(()))

    def __post_init__(self) -> None:
        self._tells: Collection[str] = getattr(self.runner.target, "tells", TARGET_DETAILS)
        rng = np.random.default_rng(self.settings.seed)
        names = sample_names(self.corpus.documents, self.corpus.genre, rng)
        self._drafter = CanaryDrafter(self.corpus.genre, rng, names)
        self._ambiguity = Ambiguity(self.corpus.documents, self.corpus.genre)
        self._sources = {d.id: d.source for d in self.corpus.documents}

    async def run(self) -> list[tuple[Canary, CanaryDraft]]:
        """The canaries that passed, each with its draft, in the order of the vacancies."""
        vacancies = self._vacancies()
        filled: dict[int, CanaryDraft] = {}
        for number in range(MAX_ROUNDS):
            open_ = {i: v for i, v in enumerate(vacancies) if i not in filled and not v.exhausted}
            if not open_:
                break
            drafts = await asyncio.to_thread(self._next_drafts, open_)
            for i, draft, result in await self._test_answers(drafts, number):
                if result.status is CanaryStatus.PASS:
                    filled[i] = draft
                    continue
                self._used.discard(draft.document)
                vacancies[i].last_reason = result.error or ", ".join(d.kind for d in result.deviations)
                self._drop(draft.kind, draft.region, vacancies[i].last_reason)
        for vacancy in (v for i, v in enumerate(vacancies) if i not in filled):
            self._drop(vacancy.kind, vacancy.region, f"not filled: {vacancy.last_reason}")
        counts: Counter[str] = Counter()
        found = []
        for _, draft in sorted(filled.items()):
            counts[draft.kind] += 1
            found.append((Canary(id=f"{draft.kind}-{counts[draft.kind]:02d}", **draft.fields), draft))
        return found

    def coverage(self, kept: Sequence[tuple[Canary, CanaryDraft]]) -> Coverage:
        """Coverage of these canaries. Questions that the corpus cannot answer cover no region."""
        return measure_coverage(
            self.corpus,
            self.index,
            self.embedder,
            {canary.id: canary.query for canary, draft in kept if draft.document},
            k=self.runner.k,
            tenant=self.runner.tenant,
            questions=self.settings.questions,
            seed=self.settings.seed,
        )

    def _vacancies(self) -> list[_Vacancy]:
        """Vacancies of the set: regions in turn, largest first, and kinds spread evenly over them."""
        shares = dict(SHARES)
        if not {"ids", "scores"} <= set(self._tells):
            del shares[SENTINEL]
        counts = allocate(self.settings.count, shares)
        order = np.argsort(-self.corpus.sizes, kind="stable").tolist()
        kinds_in_turn = _interleave({k: n for k, n in counts.items() if k not in (REFUSAL, INJECTION)})
        self._spare_regions = iter(order[len(kinds_in_turn) :])
        found = []
        for position, kind in enumerate(kinds_in_turn):
            region = order[position % len(order)]
            fallback = FACT if kind != FACT or SENTINEL not in shares else SENTINEL
            found.append(_Vacancy(kind, region, self._drafts_of([kind, fallback], region)))
        unanswerable = [k for k in (REFUSAL, INJECTION) for _ in range(counts.get(k, 0))]
        drafts = {k: self._drafter.unanswerable(k) for k in (REFUSAL, INJECTION)}
        return found + [_Vacancy(k, NOISE, drafts[k]) for k in unanswerable]

    def _drafts_of(self, kinds: Sequence[str], region: int) -> Iterator[CanaryDraft]:
        """Drafts of the first kind for a region, then of the next kind; then for an unused region."""
        for here, kind in ((here, kind) for here in chain([region], self._spare_regions) for kind in kinds):
            for document in self.corpus.documents_of(here)[:DOCUMENTS_PER_REGION]:
                if document.id not in self._used:
                    yield from self._drafts_about(kind, document, here)

    def _drafts_about(self, kind: str, document: Document, region: int) -> list[CanaryDraft]:
        """Drafts about a document; records once per kind that there are none."""
        found = list(self._drafter.about(kind, document, region))
        if not found and (kind, document.id) not in self._without_draft:
            self._without_draft.add((kind, document.id))
            self._drop(kind, region, NO_QUESTION)
        return found

    def _next_drafts(self, vacancies: Mapping[int, _Vacancy]) -> dict[int, CanaryDraft]:
        """The next draft of each vacancy that passes the retrieval test; vacancies without a draft are left out."""
        untested: list[tuple[int, CanaryDraft]] = []
        for i, vacancy in vacancies.items():
            if not vacancy.ready:
                new = list(islice(vacancy.drafts, DRAFTS_AT_ONCE if vacancy.region != NOISE else 1))
                vacancy.exhausted = not new
                untested += [(i, draft) for draft in new]
        tested = self._test_retrieval([draft for _, draft in untested])
        for (i, draft), found in zip(untested, tested, strict=True):
            if isinstance(found, CanaryDraft):
                vacancies[i].ready.append(found)
            else:
                vacancies[i].last_reason = found
                self._drop(draft.kind, draft.region, found)
        chosen: dict[int, CanaryDraft] = {}
        for i, vacancy in vacancies.items():
            while vacancy.ready and i not in chosen:
                draft = vacancy.ready.pop(0)
                if draft.document not in self._used:
                    chosen[i] = draft
                    self._used |= {draft.document} - {""}
        return chosen

    def _doubt(self, draft: CanaryDraft) -> str:
        """Why a draft may have several right answers; empty if it has one."""
        if not draft.document:
            return ""
        source = self._sources[draft.document]
        if draft.fact is not None:
            return self._ambiguity.of_fact(draft.fact, source)
        return self._ambiguity.of_topic(draft.query, source)

    def _test_retrieval(self, drafts: Sequence[CanaryDraft]) -> list[CanaryDraft | str]:
        """Each draft with its measured margin, or the reason why it is dropped."""
        doubts = [self._doubt(draft) for draft in drafts]
        clear = [draft.query for draft, doubt in zip(drafts, doubts, strict=True) if not doubt]
        vectors = iter(self.embedder.embed(clear) if clear else ())
        return [doubt or self._with_margin(draft, next(vectors)) for draft, doubt in zip(drafts, doubts, strict=True)]

    def _with_margin(self, draft: CanaryDraft, vector: Vector) -> CanaryDraft | str:
        if not draft.document:
            return draft
        k = 1 if draft.kind == SENTINEL else self.runner.k
        hits = self.index.search(vector, k + 1, self.runner.tenant).hits
        score = next((h.score for h in hits[:k] if h.document.id == draft.document), None)
        if score is None:
            return "other documents rank before its own"
        margin = score - (hits[k].score if len(hits) > k else -1.0)
        if margin < (SENTINEL_MARGIN if draft.kind == SENTINEL else FACT_MARGIN):
            return "another document is almost as close to its question"
        fields = dict(draft.fields)
        if draft.kind == SENTINEL:
            fields["min_cosine"] = float(np.floor((score - MAX_COSINE_LOSS) * 1000) / 1000)
        elif "ids" not in self._tells:
            del fields["expected_documents"]
        return replace(draft, fields=fields, margin=float(margin))

    async def _test_answers(
        self, drafts: Mapping[int, CanaryDraft], number: int
    ) -> list[tuple[int, CanaryDraft, CanaryResult]]:
        """The worst result of each draft over several context sizes."""
        k = self.runner.k
        strict = {i: _stricter(Canary(id=f"draft-{number}-{i}", **draft.fields)) for i, draft in drafts.items()}
        sizes = [k, max(k // 2, 1), min(2 * k, MAX_K)]  # simulates a corpus that shrinks or grows
        for canary, size in product(strict.values(), sizes):
            if errors := unsupported_expectations(canary, k=size, tells=self._tells):
                raise DataError(f"this target cannot be monitored with these canaries: {errors[0]}")
        runner = replace(self.runner, canaries=tuple(strict.values()))
        found = await run_with_contexts(runner, sizes, f"suggest-{number}")
        if found and all(result.status is CanaryStatus.ERROR for result in found.values()):
            why = next(iter(found.values())).error
            raise DataError(f"the target answered none of {len(found)} drafts: {why}")
        return [(i, drafts[i], found[canary.id]) for i, canary in strict.items()]

    def _drop(self, kind: str, region: int, reason: str) -> None:
        self.dropped.append(DroppedDraft(kind, self.corpus.names[region] if region != NOISE else "", reason))


async def run_with_contexts(runner: CanaryRunner, sizes: Iterable[int], run: str) -> dict[str, CanaryResult]:
    """Asks canaries with several sizes of the context, so that those that pass do so with a margin.

    Returns the first failure of each canary, or its last result, by id.
    """
    found: dict[str, CanaryResult] = {}
    for k in sizes:
        passing = [c for c in runner.canaries if c.id not in found or found[c.id].status is CanaryStatus.PASS]
        if passing:
            done = await replace(runner, canaries=passing, k=k).run(f"{run}-{k}")
            found |= {result.canary: result for result in done.results}
    return found


def canaries_yaml(header: Iterable[str], canaries: Sequence[Canary], notes: Mapping[str, str]) -> str:
    """Canaries as a YAML file for ``read_canaries``, each below its note (by id)."""
    lines = [*header, "canaries:" if canaries else "canaries: []"]
    for canary in canaries:
        row = canary.model_dump(mode="json", exclude_unset=True)
        dumped = yaml.safe_dump([row], sort_keys=False, allow_unicode=True, width=110)
        lines += ["", f"# {' '.join(notes[canary.id].split())}", dumped.rstrip()]
    return "\n".join(lines) + "\n"


def allocate(count: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Splits a count by shares; the largest remainders are rounded up.

    >>> allocate(5, {"a": 0.5, "b": 0.3, "c": 0.2}), allocate(1, {"a": 0.5, "b": 0.3})
    ({'a': 3, 'b': 1, 'c': 1}, {'a': 1, 'b': 0})
    """
    exact = {kind: count * share / sum(shares.values()) for kind, share in shares.items()}
    found = {kind: int(value) for kind, value in exact.items()}
    for kind in sorted(exact, key=lambda k: found[k] - exact[k])[: count - sum(found.values())]:
        found[kind] += 1
    return found


def _interleave(counts: Mapping[str, int]) -> list[str]:
    """Each kind as often as its count, spread evenly."""
    positions = [((i + 0.5) / count, kind) for kind, count in counts.items() for i in range(count)]
    return [kind for _, kind in sorted(positions, key=lambda p: p[0])]


def _stricter(canary: Canary) -> Canary:
    if canary.baseline_query is None:
        return canary
    overlap = STRICT_OVERLAP if canary.min_overlap else 0.0
    return canary.model_copy(update={"similarity_threshold": STRICT_COSINE, "min_overlap": overlap})


def _origin(draft: CanaryDraft, corpus: RegionMap) -> str:
    if not draft.document:
        return "not answerable from the corpus"
    return f"region: {corpus.names[draft.region]}; margin {draft.margin:.2f}"


def _header(found: CanarySuggestion) -> list[str]:
    covered = len(found.coverage.regions) - len(found.coverage.uncovered)
    lines = [
        "# Canaries drafted by casemate. This file contains text of your documents: protect it like them, and hide",
        "# it from clients, since it shows which questions are asked. Review it, then run 'casemate canary baseline'.",
        f"# Regions of the corpus covered: {covered} of {len(found.coverage.regions)} ({found.method}).",
    ]
    if found.coverage.traffic is not None:
        lines.append(f"# Given questions covered: {percent(found.coverage.traffic.value)}.")
    return lines + [f"# Not covered: {region.name} ({region.chunks} chunks)" for region in found.coverage.uncovered]
