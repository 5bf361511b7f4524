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
from casemate.closeness import LOOKS, Question
from casemate.errors import ConfigError, DataError
from casemate.protocols import Defense, Embedder, EventStore, Index
from casemate.sessions import Sessions
from casemate.types import Action, Outcome, Query, Retrieval, Verdict
from casemate.words import sentences

CALIBRATED, PUBLISHED = 0.01, 0.05  # usual significance of each kind of mode
MOST = 64
"""When so many documents are too close to one question, it is answered without any."""
PARTS = 8
"""Sentences of a doubtful question that are looked at one by one."""


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
        store: The system's; remembers what was withheld over a restart.
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
        self.sessions = Sessions("mirabel", self.session_hours * 3600, self.store)

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
        return await _Decision(self, query, retrieval, calibration).score(retrieval, ())

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

    Documents are withheld one by one, the closest first, and what is left is judged each time as if the others had
    never been there. So the final context is that of a collection without them.
    """

    def __init__(self, mirabel: Mirabel, query: Query, retrieval: Retrieval, calibration: Calibration) -> None:
        self.mirabel, self.query, self.found, self.calibration = mirabel, query, retrieval, calibration
        assert mirabel.significance is not None
        rate = mirabel.significance * min(1.0, calibration.k / query.k)  # a larger context has more to be close to
        self.threshold = calibration.threshold(calibration.attainable(rate))
        self.question = Question(query.text)
        self.who = (query.tenant, query.client)
        self.notes: dict[str, float] = {}  # source -> evidence with this question
        self.parts: list[tuple[Question, Retrieval]] | None = None

    async def outcome(self) -> Outcome[Retrieval]:
        """What is left, and why."""
        sessions = self.mirabel.sessions
        before = sorted({h.document.source for h in self.found.hits} & set(self.mirabel.barred(self.query)))
        gone, flagged = list(before), list[str]()
        why = ["before"] if before else []
        first: tuple[str, float] | None = None
        while True:
            left = _without(self.found, gone)
            scores = await self.score(left, gone)
            first = first or max(scores.items(), key=lambda pair: pair[1], default=None)
            suspect, reason = self._suspect(scores)
            if not suspect:
                break
            gone.append(suspect)
            flagged.append(suspect)
            why.append(reason)
            if len(flagged) == MOST:
                left = replace(left, hits=(), exhausted=True)
                break
        if len(left.hits) < self.query.k + LOOKS and not left.exhausted:
            return Outcome(self.found, more=True)
        for source, evidence in self.notes.items():
            sessions.note(*self.who, source, evidence)
        for source in flagged:
            sessions.bar(*self.who, source)
        return Outcome(replace(self.found, hits=left.hits), self._verdict(first, gone, flagged, why))

    async def score(self, left: Retrieval, gone: Sequence[str]) -> dict[str, float]:
        """The score of every source in the context, by the whole question or, in doubt, by one of its sentences."""
        scores = self._scores(self.question, left)
        best = max(scores.values(), default=-math.inf)
        if not self.calibration.doubt < best <= self.threshold:
            return scores
        for question, found in await self._parts():
            part = self._scores(question, _without(found, gone))
            scores = {source: max(score, part.get(source, score)) for source, score in scores.items()}
        return scores

    def _scores(self, question: Question, left: Retrieval) -> dict[str, float]:
        open_to_him = {
            h.document.source
            for h in left.hits[: self.query.k]
            if self.query.client in h.document.metadata.get(self.mirabel.readers, ())
        }
        figures = question.observe(left.hits, left.background, self.query.k)
        return {s: self.calibration.score(f) for s, f in figures.items() if s not in open_to_him}

    async def _parts(self) -> list[tuple[Question, Retrieval]]:
        """The sentences of the question, each with what is found for it alone."""
        if self.parts is None:
            embedder, index = self.mirabel.embedder, self.mirabel.index
            texts = [s for s in sentences(self.query.text) if len(s.split()) > 2][:PARTS]
            if embedder is None or index is None or len(texts) < 2:
                self.parts = []
            else:
                vectors = await asyncio.to_thread(embedder.embed, texts)
                k = self.query.k + 3 * self.mirabel.hides + LOOKS
                found = [await asyncio.to_thread(index.search, v, k, self.query.tenant) for v in vectors]
                self.parts = list(zip(map(Question, texts), found, strict=True))
        return self.parts

    def _suspect(self, scores: dict[str, float]) -> tuple[str, str]:
        """The source that is closest beyond its limit, and by what; nothing if there is none."""
        worst, reason, excess = "", "", 0.0
        for source, score in scores.items():
            over = score + self.calibration.allowance(*self.who, source) - self.threshold
            if over > excess:
                worst, reason, excess = source, "closeness", over
        if worst:
            return worst, reason
        alarm = 1 / self.mirabel.session_alarm
        for source, score in scores.items():
            held = self.mirabel.sessions.evidence(*self.who, source)
            # The CUSUM of e-values: a false alarm in 1 / alarm questions at most, in the long run (Shin et al. 2022).
            self.notes[source] = stats.e_value(self.calibration.p_value(score)) * max(held, 1.0)
        worst = max(scores, key=lambda s: self.notes[s], default="")
        return (worst, "session") if worst and self.notes[worst] >= alarm else ("", "")

    def _verdict(
        self, first: tuple[str, float] | None, gone: Sequence[str], flagged: Sequence[str], why: Sequence[str]
    ) -> Verdict:
        target, score = first or ("", 0.0)
        evidence = {
            "target": target,
            "form": "calibrated",
            "flagged": list(flagged),
            "withheld": list(gone),
            "why": sorted(set(why)),
            "p": self.calibration.p_value(score),
            "n": self.found.background.n,
        }
        action = Action.HIDE if gone else Action.NONE
        hidden = _chunks(self.found, gone)
        return Verdict("mirabel", bool(gone), action, score, self.threshold, hidden, evidence)


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
    kept = tuple(h for h in retrieval.hits if h.document.source not in sources)
    background = retrieval.background
    for hit in retrieval.hits:
        if hit.document.source in sources and background.n > 2:
            background = stats.without(background, hit.score)
    return replace(retrieval, hits=kept, background=background)


def _chunks(retrieval: Retrieval, sources: Collection[str]) -> tuple[str, ...]:
    return tuple(h.document.id for h in retrieval.hits if h.document.source in sources)
