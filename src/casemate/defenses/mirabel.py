"""Mirabel: detect-and-hide against membership inference.

Choi, Park, Byun, Lee and Park 2025, "Safeguarding Privacy of Retrieval Data against Membership Inference Attacks: Is
This Query Too Close to Home?", EMNLP Findings (arXiv 2505.22061). A query that carries a document of the corpus is
similar to that one document beyond what the best of n chance similarities would be. Mirabel tests the largest
similarity against that law, and answers without the document when it is beyond.

Modes ``paper``, ``gumbel`` and ``exact`` are that rule. Mode ``calibrated`` keeps the idea and replaces the law: how
close harmless questions come is learnt from the owner's own (``casemate calibrate``), closeness is more than similarity
(``closeness``), every document of the context is tested, and what was withheld from a client stays withheld.

Deviation: the paper scans the corpus for the mean and deviation of the similarities. Here they come exactly from the
corpus moments (``stats.CorpusMoments``), at a cost that does not depend on the corpus.
Deviation: the paper hides the nearest embedding. Here the whole source document goes, all its chunks, because the next
chunk of the same record would tell as much.
Deviation: below ``min_documents`` nothing is decided; the law of the maximum is asymptotic.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from casemate import stats
from casemate.calibration import Calibration, Calibrations
from casemate.closeness import LOOKS, Figures, Question, sources
from casemate.errors import ConfigError, DataError
from casemate.protocols import Defense, Embedder, EventStore, Index
from casemate.sessions import Once, Sessions
from casemate.types import Action, Document, Hit, Outcome, Query, Retrieval, Vector, Verdict
from casemate.words import sentences

CALIBRATED, PUBLISHED = 0.01, 0.05  # usual significance of each kind of mode
MOST = 64
"""A question that is too close to more documents is answered without any."""
PARTS = 8
"""Parts of a doubtful question that are looked at one by one: its sentences, or runs of them."""


@dataclass(eq=False)
class Mirabel(Defense):
    """Hides the source documents that a question is too close to.

    Attributes:
        mode: ``calibrated`` (learnt from harmless questions), or a published rule: ``paper`` (Algorithm 1 as printed),
            ``gumbel`` (textbook constants), ``exact`` (the quantile).
        significance: Share of harmless questions that may be flagged, in (0, 1). Unset: .01 when calibrated; .05
            otherwise, where it holds for normal similarities only.
        min_documents: With fewer chunks no statement is made, and the verdict says so.
        calibration: The file that ``casemate calibrate`` writes.
        session_hours: How long a document stays withheld from a client for whom it was flagged.
        session_alarm: Chance, per question, of a false alarm by evidence added up over a client's questions.
        readers: Key of a document's metadata that lists clients who may read it: nothing is withheld from them.
        embedder: The system's; looks at the sentences of doubtful questions.
        index: The system's.
        store: The system's; remembers over a restart, and for other processes on the same store.
    """

    mode: Literal["calibrated", "paper", "gumbel", "exact"] = "calibrated"
    significance: float | None = None
    min_documents: int = 30
    calibration: Path = Path(".casemate/calibration.json")
    session_hours: float = 24.0
    session_alarm: float = 0.001
    readers: str = "readers"
    embedder: Embedder | None = field(default=None, repr=False)
    index: Index | None = field(default=None, repr=False)
    store: EventStore | None = field(default=None, repr=False)

    paper: ClassVar[str] = "Choi et al. 2025, Algorithm 1 and Section 4.2, arXiv 2505.22061"
    hides: ClassVar[int] = 3
    looks: ClassVar[int] = LOOKS

    def __post_init__(self) -> None:
        if self.mode not in {"calibrated", *stats.THRESHOLDS}:
            known = ", ".join(("calibrated", *stats.THRESHOLDS))
            raise ConfigError(f"mirabel.mode is {self.mode!r}; known: {known}")
        if self.significance is None:
            self.significance = CALIBRATED if self.mode == "calibrated" else PUBLISHED
        for name, value in (("significance", self.significance), ("session_alarm", self.session_alarm)):
            if not 0 < value < 1:
                raise ConfigError(f"mirabel.{name} is {value}; it must lie between 0 and 1")
        if self.min_documents < 3 or not 0 <= self.session_hours < math.inf:
            what = f"min_documents={self.min_documents}, session_hours={self.session_hours}"
            raise ConfigError(f"mirabel needs min_documents of at least 3 and session_hours of at least 0, got {what}")
        self._calibrations = Calibrations(self.calibration)
        self.sessions, self.once = Sessions("mirabel", self.session_hours * 3600, self.store), Once()
        self.asked = Once()

    def follow(self) -> None:
        """Takes in what is withheld by other processes."""
        self.sessions.follow()

    def barred(self, query: Query) -> Collection[str]:
        """Sources that were flagged for this client before."""
        return self.sessions.barred(query.tenant, query.client) if self.mode == "calibrated" else ()

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Takes all hits of the documents that the question is too close to out."""
        calibration = self.ready(query.tenant, retrieval.background.n)
        if calibration is not None and retrieval.hits:
            return await _Decision(self, query, retrieval, calibration).outcome()
        verdict = self.judge(retrieval)
        sources = [retrieval.hits[0].document.source] if verdict.flagged else []
        return Outcome(replace(retrieval, hits=_without(retrieval, sources).hits), verdict)

    async def score(self, query: Query, retrieval: Retrieval, calibration: Calibration) -> Mapping[str, float]:
        """The score of every source in the context, before any threshold, jitter or memory: for calibrating."""
        return await _Decision(self, query, retrieval, calibration).scores()

    def judge(self, retrieval: Retrieval) -> Verdict:
        """The published rule: Algorithm 1, lines 8-13, on the best hit and the background."""
        few = _undecided(retrieval, self.min_documents)
        if few is not None:
            return few
        form: stats.Threshold = "paper" if self.mode == "calibrated" else self.mode
        n, best = retrieval.background.n, retrieval.hits[0]
        rest = stats.without(retrieval.background, best.score)
        std = max(rest.std, math.sqrt(stats.MIN_VARIANCE))  # among equal documents, rounding must flag nobody
        tau = rest.mean + std * stats.standard_threshold(n, self.significance or PUBLISHED, form)
        flagged = best.score > tau
        target = best.document.source
        hidden = _chunks(retrieval, [target] if flagged else [])
        evidence = {"target": target, "form": form, "n": n, "mean": rest.mean, "std": std}
        return Verdict("mirabel", flagged, Action.HIDE if flagged else Action.NONE, best.score, tau, hidden, evidence)

    def ready(self, tenant: str, documents: int) -> Calibration | None:
        """The calibration in force for a tenant; None where the mode or too few documents need none.

        Raises:
            DataError: If there is none, or it is stale; the message says what to do.
        """
        if self.mode != "calibrated" or documents < self.min_documents:
            return None
        found = self._calibrations.of(tenant)
        if found is None:
            raise DataError(
                f"mirabel has no calibration for tenant {tenant!r} in {self.calibration}: run 'casemate calibrate', "
                "or set its mode to paper"
            )
        if self.embedder is not None and (why := found.stale(self.embedder.fingerprint, documents)):
            raise DataError(f"the calibration of tenant {tenant!r} is stale: {why}; run 'casemate calibrate'")
        return found


class _Decision:
    """One question, judged in mode ``calibrated``.

    From the last document of the context to the first, each is compared with what stands below it and stays, and with
    the law of what does not stand above. Whoever is withheld is compared with nobody, so no decision depends on him.
    The context ends at the first hit down to which k are left: it is that of a collection without the withheld.
    """

    def __init__(self, mirabel: Mirabel, query: Query, retrieval: Retrieval, calibration: Calibration) -> None:
        self.mirabel, self.query, self.given, self.calibration = mirabel, query, retrieval, calibration
        assert mirabel.significance is not None
        rate = mirabel.significance * min(1.0, calibration.k / query.k)  # a larger context has more to be close to
        self.threshold = calibration.threshold(calibration.attainable(rate))
        self.question = Question(query.text)
        self.who = (query.tenant, query.client)
        readable = {h.document.source for h in retrieval.hits if self._may_read(h.document)}
        self.barred = frozenset(mirabel.barred(query)) - readable
        self.before = [source for source in sources(retrieval.hits) if source in self.barred]
        self.found = _without(retrieval, self.before)
        self.scored: dict[tuple[str, frozenset[str]], float] = {}
        self.parts: list[_Part] | None = None
        self.allowances: dict[str, float] = {}

    async def outcome(self) -> Outcome[Retrieval]:
        """What is left, and why."""
        hits, k = self.found.hits, self.query.k
        for end in range(min(k, len(hits)), len(hits) + 1):
            judged = await self._judged(sources(hits[:end]))
            if judged is None:
                return Outcome(self.given, more=True)
            scores, suspects = judged
            left = [h for h in hits[:end] if h.document.source not in suspects]
            if len(suspects) > MOST:
                return self._concluded([], scores, suspects)
            if len(left) >= k or (end == len(hits) and self.found.exhausted):
                return self._concluded(left[:k], scores, suspects)
        return Outcome(self.given, more=True)

    async def scores(self) -> dict[str, float]:
        """The score of every source in the context if nobody is withheld; nothing if there are too few hits."""
        judged = await self._judged(sources(self.found.hits[: self.query.k]), withhold=False)
        return judged[0] if judged else {}

    async def _judged(
        self, order: Sequence[str], withhold: bool = True
    ) -> tuple[dict[str, float], dict[str, str]] | None:
        """Scores of some sources, and who of them is withheld, and why; None if there are too few hits."""
        out, scores, suspects = set(order), dict[str, float](), dict[str, str]()
        for source in reversed(order):
            out.discard(source)
            score = await self._score(source, frozenset(out), frozenset(suspects))
            if score is None:
                return None
            scores[source] = score
            if withhold and (why := self._why(source, score)):
                suspects[source] = why
                out.add(source)
        return scores, suspects

    async def _score(self, source: str, out: frozenset[str], withheld: frozenset[str]) -> float | None:
        """The score of a source as if others were not there; None if there are too few hits.

        Args:
            source: Whose.
            out: The others: those above, and the withheld.
            withheld: Those below that are withheld; who stands above is always the same.
        """
        key = source, withheld
        if key not in self.scored:
            figures = self.question.figures(source, _law_without(self.found, out), out)
            if figures is None:
                return None
            score = self.calibration.score(figures)
            if not math.isfinite(score):
                raise DataError(f"the calibration gives no score ({score}); run 'casemate calibrate'")
            if self.calibration.doubt < score <= self.threshold:
                for part in await self._parts():
                    figures = await asyncio.to_thread(part.figures, source, out)
                    score = max(score, self.calibration.score(figures) if figures else score)
            self.scored[key] = score
        return self.scored[key]

    async def _parts(self) -> list[_Part]:
        """The sentences of the question, each with what is found for it alone."""
        if self.parts is None:
            embedder, index = self.mirabel.embedder, self.mirabel.index
            texts = _grouped([s for s in sentences(self.query.text) if len(s.split()) > 2], PARTS)
            self.parts = []
            if embedder is not None and index is not None and len(texts) > 1:
                vectors = await asyncio.to_thread(embedder.embed, texts)
                self.parts = [_Part(t, v, index, self.query, self.barred) for t, v in zip(texts, vectors, strict=True)]
        return self.parts

    def _why(self, source: str, score: float) -> str:
        """By what a question is too close to a source; empty if it is not."""
        if any(self._may_read(h.document) for h in self.found.hits if h.document.source == source):
            return ""
        if score + self._allowance(source) > self.threshold:
            return "closeness"
        held = self.mirabel.sessions.evidence(*self.who, source)
        return "session" if held * self._e_value(score) >= 1 / self.mirabel.session_alarm else ""

    def _allowance(self, source: str) -> float:
        if source not in self.allowances:
            self.allowances[source] = self.calibration.allowance(*self.who, source)
        return self.allowances[source]

    def _may_read(self, document: Document) -> bool:
        named = document.metadata.get(self.mirabel.readers, ())
        if not named:  # on every request's path, for every hit
            return False
        return self.query.client in (
            [named] if isinstance(named, str) else named if isinstance(named, Sequence) else ()
        )

    def _unheard(self) -> bool:
        """Whether the client asks this for the first time: to ask it again says no more about him than once."""
        said = " ".join(self.query.text.lower().split())
        return self.mirabel.asked.first(str(hash((*self.who, said))))

    def _e_value(self, score: float) -> float:
        return stats.e_value(self.calibration.p_value(score))

    def _concluded(
        self, context: Sequence[Hit], scores: Mapping[str, float], suspects: Mapping[str, str]
    ) -> Outcome[Retrieval]:
        new = self.mirabel.once.first(self.query.id) and self._unheard()
        for source in sources(context[:1]) if new else ():  # whom a session is about is mostly found first
            self.mirabel.sessions.add(*self.who, source, self._e_value(scores[source]))
        flagged = [s for s in sources(self.found.hits) if s in suspects]
        for source in flagged:
            self.mirabel.sessions.bar(*self.who, source)
        gone = [*self.before, *flagged]
        hits = _without(self.given, gone).hits if context else ()
        why = {*suspects.values(), *("before" for _ in self.before)}
        return Outcome(replace(self.given, hits=hits), self._verdict(scores, flagged, gone, sorted(why)))

    def _verdict(
        self, scores: Mapping[str, float], flagged: Sequence[str], gone: Sequence[str], why: Sequence[str]
    ) -> Verdict:
        limits = {s: self.threshold - self._allowance(s) for s in scores}
        target = max(scores, key=lambda s: scores[s] - limits[s], default="")
        score, limit = scores.get(target, 0.0), limits.get(target, self.threshold)
        evidence = {
            "target": target,
            "form": "calibrated",
            "flagged": list(flagged),
            "withheld": list(gone),
            "why": list(why),
            "p": self.calibration.p_value(score),
            "n": self.given.background.n,
        }
        if not math.isfinite(limit):
            evidence["undecided"] = self.calibration.source  # it says what it lacks
        action, hidden = Action.HIDE if gone else Action.NONE, _chunks(self.given, gone)
        return Verdict("mirabel", bool(gone), action, score, limit if math.isfinite(limit) else None, hidden, evidence)


class _Part:
    """A sentence of a question, and what is found for it alone."""

    def __init__(self, text: str, vector: Vector, index: Index, query: Query, barred: Collection[str]) -> None:
        self.question, self.vector, self.index, self.query, self.barred = Question(text), vector, index, query, barred
        self.wanted = query.k + LOOKS
        self.found: Retrieval | None = None

    def _search(self) -> Retrieval:
        self.wanted *= 2
        found = self.index.search(self.vector, self.wanted, self.query.tenant)
        found = replace(found, exhausted=len(found.hits) < self.wanted)
        return stats.without_documents(found, lambda d: d.source in self.barred or not self.query.may_read(d))

    def figures(self, source: str, out: Collection[str]) -> Figures | None:
        """Of a source, as if others were not there; None if it is not among the first k then. Takes a thread's time."""
        while True:
            self.found = self.found or self._search()
            found = _without(self.found, out)
            first = any(h.document.source == source for h in found.hits[: self.query.k])
            figures = self.question.figures(source, found) if first else None
            if found.exhausted or (figures if first else len(found.hits) >= self.query.k):
                return figures
            self.found = None


def _undecided(retrieval: Retrieval, least: int) -> Verdict | None:
    """The verdict when there are too few documents for a statement."""
    n = retrieval.background.n
    if n >= least and retrieval.hits:
        return None
    score = retrieval.hits[0].score if retrieval.hits else 0.0
    why = f"{n} documents; {least} are needed for a statement"
    return Verdict("mirabel", False, Action.NONE, score, None, evidence={"undecided": why})


def _without(retrieval: Retrieval, sources: Collection[str]) -> Retrieval:
    """What was found without all chunks of some sources."""
    if not sources:
        return retrieval
    return stats.without_documents(retrieval, lambda document: document.source in sources)


def _law_without(retrieval: Retrieval, sources: Collection[str]) -> Retrieval:
    """What was found, with the background of a collection without some sources."""
    return Retrieval(retrieval.hits, _without(retrieval, sources).background, retrieval.exhausted)


def _grouped(texts: Sequence[str], most: int) -> list[str]:
    """Neighbours joined, in at most so many groups of equal length."""
    size = -(-len(texts) // most)
    return [" ".join(texts[i : i + size]) for i in range(0, len(texts), max(size, 1))]


def _chunks(retrieval: Retrieval, sources: Collection[str]) -> tuple[str, ...]:
    return tuple(h.document.id for h in retrieval.hits if h.document.source in sources)
