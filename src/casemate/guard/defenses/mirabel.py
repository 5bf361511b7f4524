"""Mirabel: detect-and-hide against membership inference.

Choi, Park, Byun, Lee and Park 2025, "Safeguarding Privacy of Retrieval Data against Membership Inference Attacks: Is
This Query Too Close to Home?", EMNLP Findings (arXiv 2505.22061). A query that contains a document of the corpus is
more similar to this document than the maximum of n chance similarities would be. Mirabel tests the largest similarity
against the distribution of that maximum, and answers without the document when it is too large.

Modes ``paper``, ``gumbel`` and ``exact`` implement that rule. Mode ``calibrated`` replaces the distribution by the
closeness of the owner's own benign questions (``casemate calibrate``). Closeness has more features than similarity
(``calibration.closeness``). Every document of the context is tested, and a document withheld from a client stays
withheld.

Deviation: the paper scans the corpus for mean and standard deviation of the similarities. Here they are computed
exactly from the corpus moments (``maths.moments.CorpusMoments``), at a cost independent of the corpus size.

Deviation: the paper hides the nearest embedding. Here all chunks of the source document are hidden, because the next
chunk of the same record would reveal as much.

Deviation: below ``min_documents`` there is no decision; the distribution of the maximum is asymptotic.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from casemate.errors import ConfigError, DataError, require_range
from casemate.guard.calibration.closeness import LOOKAHEAD, FeatureExtractor, Features, unique_sources
from casemate.guard.calibration.file import CalibrationFile
from casemate.guard.client_state.feed import MAX_HOURS
from casemate.guard.client_state.withheld_documents import SeenRequests, WithheldDocuments
from casemate.guard.turn import current_turn
from casemate.guard.units import SourceRelations
from casemate.maths import moments, stats
from casemate.maths.calibration import Calibration
from casemate.protocols import CalibratedDefense, Defense, Embedder, EventStore, Index
from casemate.text.sentences import sentences
from casemate.types import Action, Document, Hit, Outcome, Query, Retrieval, Vector, Verdict, metadata_names

CALIBRATED_SIGNIFICANCE, PUBLISHED_SIGNIFICANCE = 0.01, 0.05
"""Defaults of ``significance`` by kind of mode."""
MAX_HIDDEN = 64
"""A question that is too close to more documents is answered without any."""
MAX_PARTS = 8
"""Parts of a doubtful question that are scored one by one: its sentences, or runs of sentences."""


@dataclass(eq=False)
class Mirabel(CalibratedDefense):
    """Hides the source documents that a question is too close to.

    Attributes:
        mode: ``calibrated`` (learned from benign questions), or a published rule: ``paper`` (Algorithm 1 as printed),
            ``gumbel`` (textbook constants), ``exact`` (the quantile).
        significance: Share of benign questions that may be flagged, in (0, 1). Unset: .01 when calibrated; .05
            otherwise, where it holds for normal similarities only.
        min_documents: Number of chunks below which there is no decision; the verdict says so.
        calibration: The file written by ``casemate calibrate``.
        session_hours: How long a document stays withheld from the client for which it was flagged.
        session_alarm: Probability, per question, of a false alarm by evidence accumulated over a client's questions, at
            most, if these are independent and like those of the calibration.
        readers: Metadata key of a document that lists the clients allowed to read it: it is never withheld from them.
        edited_copies: Withhold edited copies of a withheld document, too: words dropped, sentences in another order.
        unit_keys: Metadata keys, such as ``subject``: sources with a common value are withheld together.
        embedder: The system's; embeds the sentences of doubtful questions.
        index: The system's.
        store: The system's; shares withheld documents with other processes and keeps them over a restart.
    """

    mode: Literal["calibrated", "paper", "gumbel", "exact"] = "calibrated"
    significance: float | None = None
    min_documents: int = 30
    calibration: Path = Path(".casemate/calibration.json")
    session_hours: float = 24.0
    session_alarm: float = 0.001
    readers: str = "readers"
    edited_copies: bool = True
    unit_keys: tuple[str, ...] = ()
    embedder: Embedder | None = field(default=None, repr=False)
    index: Index | None = field(default=None, repr=False)
    store: EventStore | None = field(default=None, repr=False)

    name: ClassVar[str] = "mirabel"
    paper: ClassVar[str] = "Choi et al. 2025, Algorithm 1 and Section 4.2, arXiv 2505.22061"
    max_hidden_sources: ClassVar[int] = 3
    lookahead: ClassVar[int] = LOOKAHEAD

    def __post_init__(self) -> None:
        if self.mode not in {"calibrated", *stats.THRESHOLD_FORMS}:
            known = ", ".join(("calibrated", *stats.THRESHOLD_FORMS))
            raise ConfigError(f"mirabel.mode is {self.mode!r}; known: {known}")
        if self.significance is None:
            self.significance = CALIBRATED_SIGNIFICANCE if self.mode == "calibrated" else PUBLISHED_SIGNIFICANCE
        require_range("mirabel", self, "significance session_alarm", above=0, below=1)
        require_range("mirabel", self, "min_documents", at_least=3)
        require_range("mirabel", self, "session_hours", at_least=0, at_most=MAX_HOURS)
        self._calibrations = CalibrationFile(self.calibration)
        self.withheld = WithheldDocuments("mirabel", self.session_hours * 3600, self.store)
        self.seen_requests, self.seen_questions = SeenRequests(), SeenRequests()

    @property
    def uses_calibration(self) -> bool:
        """False for the published rules."""
        return self.mode == "calibrated"

    def vector_only(self) -> Defense:
        """The exact published rule instead of the calibrated one.

        The calibrated rule also compares words. Without them it would miss attacks; the published rule needs none and
        is stricter.
        """
        return replace(self, mode="exact", significance=None) if self.uses_calibration else self

    def sync(self) -> None:
        """Applies the decisions of other processes."""
        self.withheld.sync()

    def blocked_sources(self, query: Query) -> Collection[str]:
        """Returns the sources that were flagged for this client before."""
        return self.withheld.sources(query.tenant, query.client) if self.uses_calibration else ()

    def may_read(self, query: Query, document: Document) -> bool:
        """Whether the document's ``readers`` list the client, so that it is never withheld."""
        return query.client in (metadata_names(document.metadata, self.readers) or ())

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Removes all hits of the documents that the question is too close to."""
        calibration = self.ready(query.tenant, retrieval.documents)
        if calibration is not None and retrieval.hits:
            assert self.significance is not None
            blocked = self.blocked_sources(query)
            return await _Decision(self, query, retrieval, calibration, self.significance, blocked).outcome()
        verdict = self.judge(retrieval)
        hidden = [retrieval.hits[0].document.source] if verdict.flagged else []
        return Outcome(replace(retrieval, hits=_without(retrieval, hidden).hits), verdict)

    async def score(self, query: Query, retrieval: Retrieval, calibration: Calibration) -> Mapping[str, float]:
        """See ``CalibratedDefense``.

        Computed at the default significance, so it does not depend on the operating point.
        """
        return await _Decision(self, query, retrieval, calibration, CALIBRATED_SIGNIFICANCE, ()).scores()

    def judge(self, retrieval: Retrieval) -> Verdict:
        """The published rule: Algorithm 1, lines 8-13, on the best hit and the similarity statistics."""
        undecided = _undecided(retrieval, self.min_documents)
        if undecided is not None:
            return undecided
        form: stats.ThresholdForm = "paper" if self.mode == "calibrated" else self.mode
        n, best = retrieval.similarity_stats.n, retrieval.hits[0]
        rest = moments.leave_one_out(retrieval.similarity_stats, best.score)
        std = max(rest.std, math.sqrt(moments.MIN_VARIANCE))  # with equal documents, rounding alone must not flag
        tau = rest.mean + std * stats.extreme_value_threshold(n, self.significance or PUBLISHED_SIGNIFICANCE, form)
        flagged = best.score > tau
        target = best.document.source
        hidden = _chunks(retrieval, [target] if flagged else [])
        evidence = {"target": target, "form": form, "n": n, "mean": rest.mean, "std": std}
        return Verdict("mirabel", flagged, Action.HIDE if flagged else Action.NONE, best.score, tau, hidden, evidence)

    def ready(self, tenant: str, documents: int) -> Calibration | None:
        """See ``CalibratedDefense``. None in the published modes and below ``min_documents``."""
        if not self.uses_calibration or documents < self.min_documents:
            return None
        found = self._calibrations.of(tenant)
        if found is None:
            raise DataError(
                f"mirabel has no calibration for tenant {tenant!r} in {self.calibration}: run 'casemate calibrate', "
                "or set its mode to paper"
            )
        if self.embedder is not None and (reason := found.staleness(self.embedder.fingerprint, documents)):
            raise DataError(f"the calibration of tenant {tenant!r} is stale: {reason}; run 'casemate calibrate'")
        return found


class _Decision:
    """One question, judged in mode ``calibrated``.

    Documents are judged from the last one of the context to the first. Each is compared with the remaining documents
    below it, under the similarity statistics without the documents above it. A withheld document takes part in no
    comparison, so no decision depends on it. The context ends at the first hit at which k documents remain: it equals
    the context of a collection without the withheld documents.
    """

    def __init__(
        self,
        mirabel: Mirabel,
        query: Query,
        retrieval: Retrieval,
        calibration: Calibration,
        significance: float,
        blocked: Collection[str],
    ) -> None:
        self.mirabel, self.query, self.given, self.calibration = mirabel, query, retrieval, calibration
        rate = significance * min(1.0, calibration.k / query.k)  # a larger context has more documents to be close to
        self.threshold = calibration.threshold(calibration.attainable_rate(rate))
        self.question = FeatureExtractor(query.text, calibration.labels)
        self.client = (query.tenant, query.client)
        self.readable = self._readable(retrieval.hits)
        self.relations: SourceRelations | None = None
        related = self._related(blocked)
        self.short = related is None  # too few hits to form the units
        self.found_related = related or frozenset()
        self.blocked = frozenset(blocked) | self.found_related
        still_blocked = self.blocked - self.readable
        self.before = [source for source in unique_sources(retrieval.hits) if source in still_blocked]
        self.found = _without(retrieval, self.before)
        self.scored: dict[tuple[str, frozenset[str]], float] = {}
        self.parts: list[_Part] | None = None
        self.allowances: dict[str, float] = {}

    async def outcome(self) -> Outcome[Retrieval]:
        """Returns the remaining hits and the verdict."""
        if self.short:
            return Outcome(self.given, more=True)
        hits, k = self.found.hits, self.query.k
        for end in range(min(k, len(hits)), len(hits) + 1):
            judged = await self._judge(unique_sources(hits[:end]))
            if judged is None:
                return Outcome(self.given, more=True)
            scores, reasons = judged
            left = [h for h in hits[:end] if h.document.source not in reasons]
            if len(reasons) > MAX_HIDDEN:
                return self._conclude([], scores, reasons)
            if len(left) >= k or (end == len(hits) and self.found.exhausted):
                return self._conclude(left[:k], scores, reasons)
        return Outcome(self.given, more=True)

    async def scores(self) -> dict[str, float]:
        """Returns the score of every source in the context with none withheld; empty if there are too few hits."""
        judged = await self._judge(unique_sources(self.found.hits[: self.query.k]), withhold=False)
        return judged[0] if judged else {}

    async def _judge(
        self, order: Sequence[str], withhold: bool = True
    ) -> tuple[dict[str, float], dict[str, str]] | None:
        """Returns the scores of sources, and the reasons for those withheld; None if there are too few hits.

        The whole unit of a withheld source is withheld. The other sources are then judged as if it were absent.
        """
        related = frozenset[str]()
        while True:
            judged = await self._judge_without(related, order, withhold)
            if judged is None or not withhold:
                return judged
            found = self._related({*judged[1], *self.before})
            if found is None:
                return None
            if found <= related:
                return judged
            related |= found

    async def _judge_without(
        self, related: frozenset[str], order: Sequence[str], withhold: bool
    ) -> tuple[dict[str, float], dict[str, str]] | None:
        out, scores, reasons = {*order, *related}, dict[str, float](), dict.fromkeys(related, "unit")
        for source in reversed(order):
            if source in related:
                continue
            out.discard(source)
            score = await self._score(source, frozenset(out), frozenset(reasons))
            if score is None:
                return None
            scores[source] = score
            if withhold and (reason := self._reason(source, score)):
                reasons[source] = reason
                out.add(source)
        return scores, reasons

    def _related(self, withheld: Collection[str]) -> frozenset[str] | None:
        """Other sources in the units of withheld ones; None if there are too few hits. Readable sources are left out.

        Only hits that a comparison can reach count (``_compared``). So the result does not depend on the number of
        fetched hits, and a withheld unit that is absent changes nothing.
        """
        if not withheld or not (self.mirabel.edited_copies or self.mirabel.unit_keys):
            return frozenset()
        if self.relations is None:  # most questions need none
            documents = (hit.document for hit in self.given.hits)
            self.relations = SourceRelations(documents, self.mirabel.unit_keys, copies=self.mirabel.edited_copies)
        readable, found = self.readable.difference(withheld), frozenset(withheld)
        while True:
            near = self._compared(found)
            if near is None:
                return None
            related = self.relations.related_to(found, len(near), readable)
            if not related:
                return found.difference(withheld)
            found |= related

    def _compared(self, withheld: frozenset[str]) -> Sequence[Hit] | None:
        """The hits up to the last one that a comparison of the context reaches; None if there are too few hits.

        A comparison skips the withheld sources, and those of the context that are ranked above.
        """
        left = [i for i, hit in enumerate(self.given.hits) if hit.document.source not in withheld]
        context = {self.given.hits[i].document.source for i in left[: self.query.k]}
        below = [i for i in left if self.given.hits[i].document.source not in context]
        if len(below) >= LOOKAHEAD:
            return self.given.hits[: below[LOOKAHEAD - 1] + 1]
        return self.given.hits if self.given.exhausted else None

    async def _score(self, source: str, out: frozenset[str], withheld: frozenset[str]) -> float | None:
        """Returns the score of a source as if others were absent; None if there are too few hits.

        Args:
            source: The source.
            out: The absent ones: those above, and the withheld.
            withheld: The withheld ones below; those above are always the same, so this is the cache key.
        """
        key = source, withheld
        if key not in self.scored:
            features = self.question.extract(source, _with_stats_without(self.found, out), out)
            if features is None:
                return None
            score = self.calibration.score(features)
            if not math.isfinite(score):
                raise DataError(f"the calibration gives no finite score ({score}); run 'casemate calibrate'")
            if self.calibration.doubt < score <= self.threshold:
                for part in await self._parts():
                    features = await asyncio.to_thread(part.features, source, out)
                    score = max(score, self.calibration.score(features) if features else score)
            self.scored[key] = score
        return self.scored[key]

    async def _parts(self) -> list[_Part]:
        """Returns the sentences of the question, each with its own retrieval."""
        if self.parts is None:
            embedder, index = self.mirabel.embedder, self.mirabel.index
            texts = _grouped([s for s in sentences(self.query.text) if len(s.split()) > 2], MAX_PARTS)
            self.parts = []
            if embedder is not None and index is not None and len(texts) > 1:
                vectors = await asyncio.to_thread(embedder.embed, texts)
                self.parts = [_Part(self, text, v, index) for text, v in zip(texts, vectors, strict=True)]
        return self.parts

    def visible(self, found: Retrieval) -> Retrieval:
        """Removes the documents that are withheld from the client or that its labels do not permit."""
        blocked = self.blocked - self._readable(found.hits)
        return moments.without_documents(found, lambda d: d.source in blocked or not self.query.may_read(d))

    def _readable(self, hits: Iterable[Hit]) -> set[str]:
        """Returns the sources that are never withheld from the client."""
        return {hit.document.source for hit in hits if self.mirabel.may_read(self.query, hit.document)}

    def _reason(self, source: str, score: float) -> str:
        """Returns why a source is withheld; empty if it stays."""
        if source in self.readable:
            return ""
        if score + self._allowance(source) > self.threshold:
            return "closeness"
        evidence = self.mirabel.withheld.evidence(*self.client, source)
        return "session" if evidence * self._e_value(score) >= 1 / self.mirabel.session_alarm else ""

    def _allowance(self, source: str) -> float:
        if source not in self.allowances:
            self.allowances[source] = self.calibration.threshold_reduction(*self.client, source)
        return self.allowances[source]

    def _is_new_question(self) -> bool:
        """Whether the client asks this for the first time: a repeated question is not further evidence."""
        text = " ".join(self.query.text.lower().split())
        return self.mirabel.seen_questions.is_first(str(hash((*self.client, text))))

    def _e_value(self, score: float) -> float:
        return stats.e_value(self.calibration.p_value(score))

    def _conclude(
        self, context: Sequence[Hit], scores: Mapping[str, float], reasons: Mapping[str, str]
    ) -> Outcome[Retrieval]:
        """Updates the client's state, and returns the outcome.

        Evidence is about the first source of the context, usually the subject of a session. A source that the client
        may read gathers none.
        """
        current = current_turn()
        request = self.query.id if current is None else current.id  # a turn is one question of the client
        new = self.mirabel.seen_requests.is_first(request) and self._is_new_question()
        for source in set(unique_sources(context[:1])) - self._readable(context[:1]) if new else ():
            self.mirabel.withheld.add_evidence(*self.client, source, self._e_value(scores[source]))
        flagged = [s for s in unique_sources(self.found.hits) if s in reasons]
        for source in (
            *flagged,
            *sorted(self.found_related),
        ):  # a copy is remembered for questions without the original
            self.mirabel.withheld.add(*self.client, source)
        withheld = [*self.before, *flagged]
        hits = _without(self.given, withheld).hits if context else ()
        all_reasons = sorted({*reasons.values(), *("before" for _ in self.before)})
        return Outcome(replace(self.given, hits=hits), self._verdict(scores, flagged, withheld, all_reasons))

    def _verdict(
        self, scores: Mapping[str, float], flagged: Sequence[str], withheld: Sequence[str], reasons: Sequence[str]
    ) -> Verdict:
        limits = {s: self.threshold - self._allowance(s) for s in scores}
        target = max(scores, key=lambda s: scores[s] - limits[s], default="")
        score, limit = scores.get(target, 0.0), limits.get(target, self.threshold)
        evidence = {
            "target": target,
            "form": "calibrated",
            "flagged": list(flagged),
            "withheld": list(withheld),
            "scores": {s: scores[s] for s in withheld if s in scores},
            "reasons": list(reasons),
            "p": self.calibration.p_value(score),
            "n": self.given.similarity_stats.n,
        }
        if not math.isfinite(limit):
            evidence["undecided"] = self.calibration.source  # names the missing part
        action, hidden = Action.HIDE if withheld else Action.NONE, _chunks(self.given, withheld)
        threshold = limit if math.isfinite(limit) else None
        return Verdict("mirabel", bool(withheld), action, score, threshold, hidden, evidence)


class _Part:
    """A sentence of a question with its own retrieval."""

    def __init__(self, decision: _Decision, text: str, vector: Vector, index: Index) -> None:
        self.decision, self.query, self.vector, self.index = decision, decision.query, vector, index
        self.question = FeatureExtractor(text, decision.calibration.labels)
        self.wanted = self.query.k + LOOKAHEAD
        self.found: Retrieval | None = None

    def _search(self) -> Retrieval:
        self.wanted *= 2
        found = self.index.search(self.vector, self.wanted, self.query.tenant)
        return self.decision.visible(replace(found, exhausted=len(found.hits) < self.wanted))

    def features(self, source: str, out: Collection[str]) -> Features | None:
        """Returns the features of a source as if others were absent; None if it is then not in the context. Blocks."""
        while True:
            self.found = self.found or self._search()
            found = _without(self.found, out)
            first = any(h.document.source == source for h in found.hits[: self.query.k])
            features = self.question.extract(source, found) if first else None
            if found.exhausted or (features if first else len(found.hits) >= self.query.k):
                return features
            self.found = None


def _undecided(retrieval: Retrieval, least: int) -> Verdict | None:
    """Returns the verdict for too few chunks, or for a search that found none."""
    n = retrieval.similarity_stats.n
    if n >= least and retrieval.hits:
        return None
    score = retrieval.hits[0].score if retrieval.hits else 0.0
    readable = min(n, len(retrieval.hits)) if retrieval.exhausted else n  # the statistics keep at least two chunks
    chunks = f"{readable} readable of {retrieval.documents}" if retrieval.left_out else str(n)
    reason = f"too few chunks ({chunks}; a decision needs at least {least})" if n < least else "no chunk was found"
    return Verdict("mirabel", False, Action.NONE, score, None, evidence={"undecided": reason})


def _without(retrieval: Retrieval, sources: Collection[str]) -> Retrieval:
    """Removes all chunks of some sources."""
    if not sources:
        return retrieval
    return moments.without_documents(retrieval, lambda document: document.source in sources)


def _with_stats_without(retrieval: Retrieval, sources: Collection[str]) -> Retrieval:
    """Returns the same hits with the similarity statistics of a collection without some sources."""
    similarity_stats = retrieval.similarity_stats
    for hit in retrieval.hits if sources else ():  # on the path of every question: builds no new hits
        if hit.document.source in sources and similarity_stats.n > 2:
            similarity_stats = moments.leave_one_out(similarity_stats, hit.score)
    return Retrieval(retrieval.hits, similarity_stats, retrieval.exhausted)


def _grouped(texts: Sequence[str], most: int) -> list[str]:
    """Joins neighbors into at most ``most`` groups of equal length."""
    size = -(-len(texts) // most)
    return [" ".join(texts[i : i + size]) for i in range(0, len(texts), max(size, 1))]


def _chunks(retrieval: Retrieval, sources: Collection[str]) -> tuple[str, ...]:
    return tuple(h.document.id for h in retrieval.hits if h.document.source in sources)
