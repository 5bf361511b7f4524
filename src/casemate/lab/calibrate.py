"""Fits a guard to its owner: how close harmless questions come, and what each error rate costs.

1. Harmless questions are taken from the owner's log, or made from the corpus. Half of them, and probes that the
   published attacks write about documents of the index, give the weights of the score.
2. The other half gives the law of the score among harmless questions, so that a share of at most ``rate`` of further
   ones is flagged, whatever the law (split conformal prediction). It was used for nothing else.
3. Probes about other documents tell the recall of every attack at every rate.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from casemate.calibration import Calibration
from casemate.closeness import FEATURES, LOOKS, Question, sources
from casemate.defenses.mirabel import Mirabel
from casemate.errors import QueryError
from casemate.lab.questions import made_questions
from casemate.protocols import Index, MembershipAttack, Progress
from casemate.rag import Rag, require_answerable
from casemate.stats import Rate, rate
from casemate.types import DEFAULT_TENANT, Document, Float64, Query, Retrieval, Vector
from casemate.words import STOP_WORDS, sentences

RATES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
"""Shares of harmless questions flagged, for which the recall is told."""
FEWEST = 20
"""Documents below which nothing can be learnt."""
ENOUGH = 200
"""Harmless questions of a log from which on half of it is spent on the weights."""
MADE = 800
PER_ATTACK = 4
"""Questions of one attack about one document that are looked at."""
REWORDED = "reworded"
"""Our own probe beside the published ones: the text in other order and with words left out. Without it the weights
would rest on word for word repetition alone, which is the first thing that an attacker gives up."""
JITTER = 0.3  # of a standard deviation (METHODS F2.6)
MIN_SCALE = 1e-6
DOUBT = 0.75
"""Share of harmless questions whose sentences are not looked at one by one."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a calibration is made.

    Attributes:
        tenant: Whose documents.
        k: Hits that make a context.
        documents: Documents that are probed: one half for the weights, the other for the recall.
        questions: Harmless questions that are made or, at most, taken from the log.
        seed: Of everything that is drawn.
    """

    tenant: str = DEFAULT_TENANT
    k: int = 5
    documents: int = 120
    questions: int = MADE
    seed: int = 7


class _Looked(NamedTuple):
    """A question with what is found for it."""

    kind: str  # the attack, or empty for a harmless question
    source: str
    text: str
    retrieval: Retrieval


async def calibrate(
    rag: Rag,
    attacks: Mapping[str, MembershipAttack],
    log: Sequence[str] = (),
    settings: Settings = Settings(),
    progress: Progress = lambda count: None,
) -> Calibration:
    """Fits and validates a calibration on the documents of one tenant.

    Args:
        rag: The system; its index is read, nothing is written.
        attacks: By name; they write their probes without asking anybody.
        log: Harmless questions that people asked; empty: questions are made from the corpus.
        settings: How.
        progress: Called with the number of questions just embedded.

    With fewer than ``FEWEST`` documents, or where no question finds anything, the calibration flags nothing, and its
    ``source`` says why.
    """
    work = _Work(rag, settings, progress)
    documents = await asyncio.to_thread(whole_documents, rag.index, settings.tenant, settings.documents, settings.seed)
    if len(documents) < FEWEST:
        return work.nothing(f"{len(documents)} documents, too few to fit a guard (at least {FEWEST} are needed)")
    half = len(documents) // 2
    made = made_questions(documents, settings.questions, work.rng)
    harmless = list(log)
    if len(harmless) > settings.questions:
        harmless = [harmless[i] for i in sorted(work.rng.choice(len(harmless), settings.questions, replace=False))]
    asked = harmless or made
    to_fit, to_judge = (made, asked) if log and len(asked) < ENOUGH else (asked[::2], asked[1::2])
    probes = await work.look(await work.probes(attacks, documents))
    known = {d.source for d in documents[:half]}
    fitting = await work.look([("", "", text) for text in to_fit])
    blank = work.fit(fitting, [p for p in probes if p.source in known])
    judged = await work.look([("", "", text) for text in to_judge])
    if blank is None or not judged:
        return work.nothing("no questions that could be asked, or none that finds its document: nothing to learn from")
    ready = await work.law(blank, judged)
    source = f"{len(harmless)} questions of a log" if log else f"{len(made)} questions made from the corpus"
    table = await work.recall(ready, [p for p in probes if p.source not in known])
    notes = {"seed": settings.seed, "documents": len(documents), "judged": len(judged), "recall": table}
    return replace(ready, source=source, notes=notes)


def whole_documents(index: Index, tenant: str, count: int, seed: int) -> list[Document]:
    """Some documents of an index, drawn at random, each put together from its chunks."""
    sources = sorted(index.digests(tenant))
    rng = np.random.default_rng(seed)
    drawn = sources if len(sources) <= count else [sources[i] for i in rng.choice(len(sources), count, replace=False)]
    parts: dict[str, list[Document]] = {name: [] for name in drawn}
    for documents, _ in index.scan(tenant):
        for document in documents:
            if document.source in parts:
                parts[document.source].append(document)
    return [replace(p[0], id=name, text="\n".join(d.text for d in p)) for name, p in parts.items() if p]


class _Work:
    """The steps, and what they share."""

    def __init__(self, rag: Rag, settings: Settings, progress: Progress) -> None:
        self.rag, self.settings, self.progress = rag, settings, progress
        self.rng = np.random.default_rng(settings.seed)
        self.salt = secrets.token_hex(32)  # a secret: not from the seed
        # Only its way of scoring is used; a threshold has yet to be found.
        self.mirabel = Mirabel(embedder=rag.embedder, index=rag.index)

    def nothing(self, why: str) -> Calibration:
        """A calibration that flags nothing."""
        zero, one = (0.0,) * len(FEATURES), (1.0,) * len(FEATURES)
        return replace(self._calibration(centre=zero, scale=one, weights=zero), source=why)

    def _calibration(self, *, centre: Iterable[float], scale: Iterable[float], weights: Iterable[float]) -> Calibration:
        return Calibration(
            fingerprint=self.rag.embedder.fingerprint,
            documents=self.rag.index.moments(self.settings.tenant).n,
            k=self.settings.k,
            features=FEATURES,
            centre=tuple(map(float, centre)),
            scale=tuple(map(float, scale)),
            weights=tuple(map(float, weights)),
            benign=(),
            source="",
            salt=self.salt,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    async def probes(
        self, attacks: Mapping[str, MembershipAttack], documents: Sequence[Document]
    ) -> list[tuple[str, str, str]]:
        """What each attack asks about each document: attack, source, question."""
        texts = [d.content for d in documents]
        found = [(REWORDED, d.source, text) for d in documents for text in reworded(d, self.rng)]
        for name, attack in attacks.items():
            attack.study(texts)
            for document in documents:
                questions = (await attack.prepare(document, self.rng)).questions
                order = self.rng.permutation(len(questions))[:PER_ATTACK]
                found += [(name, document.source, questions[i]) for i in order]
        return found

    async def look(self, asked: Sequence[tuple[str, str, str]]) -> list[_Looked]:
        """Embeds and searches."""
        usable = [question for question in asked if self._answerable(question[2])]
        embed = self.rag.embedder.embed
        vectors = await asyncio.to_thread(embed, [text for _, _, text in usable], self.progress)
        found = [await self._search(vector) for vector in vectors]
        return [_Looked(*question, retrieval) for question, retrieval in zip(usable, found, strict=True)]

    def _answerable(self, text: str) -> bool:
        """Whether the system would take it for a question: what it refuses tells nothing about what it answers."""
        try:
            require_answerable(Query(text, tenant=self.settings.tenant, k=self.settings.k))
        except QueryError:
            return False
        return True

    async def _search(self, vector: Vector) -> Retrieval:
        """Enough to compare every document of the context with what is below, as the guard does."""
        wanted = self.settings.k + LOOKS + 2 * Mirabel.hides
        while True:
            found = await self.rag.search(vector, wanted, self.settings.tenant)
            context = sources(found.hits[: self.settings.k])
            below = sum(h.document.source not in context for h in found.hits)
            if below >= LOOKS or len(found.hits) < wanted:
                return replace(found, exhausted=len(found.hits) < wanted)
            wanted *= 2

    def fit(self, harmless: Sequence[_Looked], probes: Sequence[_Looked]) -> Calibration | None:
        """The weights: logistic regression, harmless against probes, each attack counting the same.

        No weight is negative: a question that is closer in any figure must not look more harmless for it. None if there
        is nothing to tell apart.
        """
        N = np.array([next(iter(f.values())) for q in harmless if (f := self._figures(q))])
        P, kinds = [], []
        for probe in probes:
            own = self._figures(probe).get(probe.source)
            if own is not None:
                P.append(own)
                kinds.append(probe.kind)
        if not (len(N) and P):
            return None
        counts = {kind: kinds.count(kind) for kind in set(kinds)}
        both = np.vstack([np.array(P), N])
        centre, scale = N.mean(axis=0), N.std(axis=0)
        for other in (both.std(axis=0), 1.0):  # a figure that is the same for all harmless questions has no scale there
            scale = np.where(scale < MIN_SCALE, other, scale)
        X = (both - centre) / scale
        y = np.r_[np.ones(len(P)), -np.ones(len(N))]
        w = np.r_[[1 / len(counts) / counts[kind] for kind in kinds], np.full(len(N), 1 / len(N))]
        weights = monotone_logistic(X, y, w)
        if not weights.any():
            return None
        return self._calibration(centre=centre, scale=scale, weights=weights)

    def _figures(self, looked: _Looked) -> dict[str, tuple[float, ...]]:
        question, found = Question(looked.text), looked.retrieval
        order = sources(found.hits[: self.settings.k])
        figures = {s: question.figures(s, found, order[:i]) for i, s in enumerate(order)}
        return {s: f for s, f in figures.items() if f is not None}

    async def law(self, blank: Calibration, judged: Sequence[_Looked]) -> Calibration:
        """The scores of harmless questions, jitter included: a share for each document, as the guard draws it."""
        plain = [max((await self._scores(blank, q)).values()) for q in judged]
        doubting = replace(blank, doubt=float(np.quantile(plain, DOUBT)), jitter=JITTER * float(np.std(plain)))
        full = [list((await self._scores(doubting, q)).values()) for q in judged]
        benign = [float(np.max(scores + doubting.jitter * self.rng.random(len(scores)))) for scores in full]
        return replace(doubting, benign=tuple(sorted(benign)))

    async def _scores(self, calibration: Calibration, looked: _Looked) -> Mapping[str, float]:
        query = Query(looked.text, tenant=self.settings.tenant, k=self.settings.k)
        return await self.mirabel.score(query, looked.retrieval, calibration)

    async def recall(self, ready: Calibration, probes: Sequence[_Looked]) -> dict[str, Any]:
        """For each attack and rate: how often the probed document would have been withheld."""
        scores: dict[str, list[tuple[str, float]]] = {}
        for probe in probes:
            found = await self._scores(ready, probe)
            scores.setdefault(probe.kind, []).append((probe.source, found.get(probe.source, -math.inf)))
        return {kind: dict(_recalls(ready, found)) for kind, found in sorted(scores.items())}


def _recalls(ready: Calibration, found: Collection[tuple[str, float]]) -> Iterator[tuple[str, dict[str, Rate]]]:
    """By rate: recall by question, and by document (any of its questions)."""
    documents = {source for source, _ in found}
    for share in RATES:
        threshold = ready.threshold(share)
        caught = [source for source, score in found if score > threshold]
        yield (
            str(share),
            {"question": rate(len(caught), len(found)), "document": rate(len(set(caught)), len(documents))},
        )


def reworded(document: Document, rng: np.random.Generator) -> list[str]:
    """The text with four words of ten left out, and one sentence of it after key words of the title, out of order."""
    kept = [w for w in document.text.split() if w.lower() not in STOP_WORDS and rng.random() < 0.6]
    head = [w for w in (document.title or document.text[:100]).split() if w.lower() not in STOP_WORDS][:10]
    whole = [s for s in sentences(document.text) if len(s.split()) > 5] or [document.text]
    one = [w for w in str(rng.choice(whole)).split() if w.lower() not in STOP_WORDS and rng.random() < 0.7][:12]
    return [" ".join(kept)[:2000], f"{' '.join(rng.permutation(head))}: {' '.join(one)}?"]


def monotone_logistic(X: Float64, y: Float64, w: Float64, penalty: float = 1e-3) -> Float64:
    """Weights of a logistic regression with none below 0.

    Args:
        X: Standardised figures, (n, f).
        y: 1 for a probe, -1 for a harmless question, (n,).
        w: How much each counts, (n,).
        penalty: Of the squared weights.

    Returns:
        (f,), without the intercept: a threshold takes its place.
    """
    from scipy.optimize import minimize
    from scipy.special import expit

    def loss(t: Float64) -> tuple[float, Float64]:
        margin = y * (X @ t[1:] + t[0])
        pull = -y * w * expit(-margin)
        value = float(w @ np.logaddexp(0, -margin)) + penalty * float(t[1:] @ t[1:]) / 2
        return value, np.concatenate(([pull.sum()], X.T @ pull + penalty * t[1:]))

    bounds = [(None, None)] + [(0, None)] * X.shape[1]
    found = minimize(loss, np.zeros(X.shape[1] + 1), jac=True, method="L-BFGS-B", bounds=bounds)
    weights: Float64 = found.x[1:]
    return weights
