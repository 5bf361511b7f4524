"""Calibrates a defense: learns how close benign questions come, and measures recall at each false-alarm rate.

1. Benign questions come from the owner's query log, or are generated from the corpus. One half, and probes that the
   published attacks write about indexed documents, fit the weights of the score.
2. The other half gives the distribution of the score among benign questions. A share of at most ``rate`` of further
   ones is then flagged, whatever the distribution (split conformal prediction). Beside it, this half gives only the
   scale of the jitter and ``doubt``, the score from which sentences are scored one by one.
3. Probes about other documents measure the recall of every attack at every rate.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from casemate.errors import ConfigError, DataError, QueryError
from casemate.guard.calibration.closeness import FEATURES, LOOKAHEAD, FeatureExtractor, Features, unique_sources
from casemate.guard.calibration.log_review import AS_CLOSE, UNFAMILIAR, as_close_as_attacks, unfamiliar_share
from casemate.maths.calibration import Calibration
from casemate.maths.logistic import logistic_regression
from casemate.maths.stats import Estimate, clustered_rate, proportion
from casemate.protocols import CalibratedDefense, Defense, Index, MembershipAttack, Progress, Steps
from casemate.rag.pipeline import Rag, require_answerable
from casemate.text.sentences import sentences
from casemate.text.stored_questions import question_labels, stored_question
from casemate.text.synthetic_questions import FEW_WORDS, generate_questions
from casemate.text.tokens import STOP_WORDS
from casemate.types import DEFAULT_TENANT, Document, Query, Retrieval, Vector

RATES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
"""False-alarm rates at which recall is reported."""
MIN_DOCUMENTS = 20
"""Sources (files, or lines of jsonl) below which nothing is learned."""
MORE_SOURCES = "split long files into one file per record, or add documents"
MIN_LOG = 200
"""Logged questions from which on half of them fits the weights; with fewer, synthetic questions do."""
SYNTHETIC_QUESTIONS = 800
STORED_SHARE = 0.75
"""Share of the synthetic questions that are taken from documents, where these contain users' questions. The rate of
false alarms among users who ask such questions alone is then at most 1 / ``STORED_SHARE`` of the significance."""
QUESTIONS_PER_ATTACK = 4
"""Maximum number of questions of one attack about one document."""
REWORDED = "reworded"
"""Our own probe beside the published ones: the text reordered and with words left out. Without it the weights would
depend on verbatim repetition, which an attacker gives up first."""
JITTER = 0.3  # of a standard deviation (METHODS F2.6)
MIN_SCALE = 1e-6
PENALTY = 1e-3
"""L2 penalty of the weights."""
DOUBT = 0.75
"""Share of benign questions whose sentences are not scored one by one."""


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """Settings of a calibration.

    Attributes:
        documents: Number of probed documents: one half for the weights, the other for the recall.
        questions: Number of synthetic questions; with a log, the maximum number of logged questions.
    """

    tenant: str = DEFAULT_TENANT
    k: int = 5
    documents: int = 120
    questions: int = SYNTHETIC_QUESTIONS
    seed: int = 7


class _RetrievedQuestion(NamedTuple):
    attack: str  # empty for a benign question
    source: str
    text: str
    retrieval: Retrieval


def calibrated_defenses(defenses: Iterable[Defense]) -> tuple[CalibratedDefense, ...]:
    """Selects the defenses that use a calibration; of several with the same name and file, the first.

    Raises:
        ConfigError: If two different defenses share a calibration file.
    """
    by_file: dict[Path, CalibratedDefense] = {}
    for defense in defenses:
        if isinstance(defense, CalibratedDefense) and defense.uses_calibration:
            other = by_file.setdefault(defense.calibration.absolute(), defense)
            if other.name != defense.name:
                raise ConfigError(
                    f"guard.defenses: {other.name} and {defense.name} share the calibration file "
                    f"{defense.calibration}; set the option 'calibration' of one to another file"
                )
    return tuple(by_file.values())


def calibration_due(defenses: Iterable[Defense], index: Index, tenant: str = DEFAULT_TENANT, added: int = 0) -> str:
    """Reason why a guard must be calibrated before it can answer a tenant's queries; empty if it is ready.

    Args:
        defenses: The defenses of the guard.
        index: The index.
        tenant: The tenant.
        added: Number of chunks that would be added before.
    """
    try:
        for defense in calibrated_defenses(defenses):
            defense.ready(tenant, index.moments(tenant).n + added)
    except DataError as error:
        return str(error)
    return ""


def calibration_possible(defenses: Iterable[Defense], index: Index, tenant: str = DEFAULT_TENANT) -> str:
    """Reason to repeat a calibration that had too few sources and withholds nothing; empty if there is none.

    The number of chunks need not change: a file may have been split. The guard answers meanwhile.
    """
    if len(index.digests(tenant)) < MIN_DOCUMENTS:
        return ""
    for defense in calibrated_defenses(defenses):
        found = defense.ready(tenant, index.moments(tenant).n)
        if found and not found.benign and (had := found.notes.get("documents", MIN_DOCUMENTS)) < MIN_DOCUMENTS:
            return f"the calibration of tenant {tenant!r} had too few sources ({had}): run 'casemate calibrate'"
    return ""


async def calibrate(
    defense: CalibratedDefense,
    rag: Rag,
    attacks: Mapping[str, MembershipAttack],
    log: Sequence[str] = (),
    settings: CalibrationSettings = CalibrationSettings(),
    steps: Steps = lambda title, total: nullcontext(lambda count: None),
) -> Calibration:
    """Fits and validates a calibration on the documents of one tenant.

    With fewer than ``MIN_DOCUMENTS`` sources, or if no question retrieves anything, the calibration flags nothing and
    its ``source`` gives the reason.

    Args:
        defense: The defense to calibrate; only its ``score`` is used.
        rag: The system; its index is only read.
        attacks: By name; they write probes without asking questions.
        log: Benign questions from a query log; empty: questions are generated from the corpus.
        settings: Settings.
        steps: Opens a display that counts the questions that were embedded or scored.
    """
    fitter = _Fitter(defense, rag, settings)
    documents = await asyncio.to_thread(whole_documents, rag.index, settings.tenant, settings.documents, settings.seed)
    if len(documents) < MIN_DOCUMENTS:
        return fitter.too_few(len(documents))
    fitter.labels = question_labels(d.content for d in documents)
    synthetic = fitter.synthetic_questions(documents, stored := [] if log else await fitter.stored_questions())
    harmless = (logged := fitter.drawn(log)) or synthetic
    few = log and len(harmless) < MIN_LOG
    to_fit, to_judge = (synthetic, harmless) if few else (harmless[::2], harmless[1::2])
    written = await fitter.probes(attacks, documents)
    fitted_on = {d.source for d in documents[: len(documents) // 2]}
    scored = sum(source not in fitted_on for _, source, _ in written) + 2 * len(to_judge)
    work = len(written) + len(to_fit) + len(to_judge) + scored
    with steps(f"calibrating {defense.name}: benign questions and scripted attack questions", work) as fitter.progress:
        probes, fitting, judged = await fitter.retrieve(
            written, [("", "", text) for text in to_fit], [("", "", text) for text in to_judge]
        )
        weighted = fitter.fit_weights(fitting, [p for p in probes if p.source in fitted_on])
        if weighted is None or not judged:
            return fitter.empty(fitter.why_not_fitted(fitting if judged else ()))
        calibration = await fitter.add_distribution(weighted, judged)
        scores = await fitter.probe_scores(calibration, [p for p in probes if p.source not in fitted_on])
    of_them = f", {len(stored)} of them from the documents" if stored else ""
    source = f"{len(logged)} questions of a query log" if log else f"{len(synthetic)} synthetic questions{of_them}"
    known = {attack: _by_document(found) for attack, found in sorted(scores.items())}
    notes = {"seed": settings.seed, "documents": len(documents), "judged": len(judged), "probes": known}
    notes["recall"] = recall_of_probes(replace(calibration, notes=notes))
    if logged:
        plain = {attack: [score for _, score in found] for attack, found in scores.items()}
        unfamiliar = unfamiliar_share((q.text, q.retrieval) for q in judged)
        notes["log"] = {AS_CLOSE: as_close_as_attacks(calibration.benign, plain), UNFAMILIAR: unfamiliar}
    return replace(calibration, source=source, notes=notes)


def whole_documents(index: Index, tenant: str, count: int, seed: int) -> list[Document]:
    """Draws documents of an index at random, each joined from its chunks."""
    names = sorted(index.digests(tenant))
    rng = np.random.default_rng(seed)
    drawn = names if len(names) <= count else [names[i] for i in rng.choice(len(names), count, replace=False)]
    parts: dict[str, list[Document]] = {name: [] for name in drawn}
    for documents, _ in index.scan(tenant):
        for document in documents:
            if document.source in parts:
                parts[document.source].append(document)
    return [replace(p[0], id=name, text="\n".join(d.text for d in p)) for name, p in parts.items() if p]


class _Fitter:
    def __init__(self, defense: CalibratedDefense, rag: Rag, settings: CalibrationSettings) -> None:
        self.defense, self.rag, self.settings = defense, rag, settings
        self.progress: Progress = lambda count: None
        self.rng = np.random.default_rng(settings.seed)
        self.salt = secrets.token_hex(32)  # secret, so it does not depend on the seed
        self.labels: tuple[str, ...] = ()

    def empty(self, why: str) -> Calibration:
        """Returns a calibration that flags nothing."""
        zero, one = (0.0,) * len(FEATURES), (1.0,) * len(FEATURES)
        return replace(self._calibration(centre=zero, scale=one, weights=zero), source=why)

    def too_few(self, documents: int) -> Calibration:
        """Returns the calibration of fewer than ``MIN_DOCUMENTS`` sources."""
        why = f"too few sources ({documents}; a calibration needs at least {MIN_DOCUMENTS}); {MORE_SOURCES}"
        return replace(self.empty(why), notes={"documents": documents})

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
            labels=self.labels,
        )

    def drawn(self, log: Sequence[str]) -> list[str]:
        """Returns the questions of a log; if there are too many, some of them at random, in their order."""
        if len(log) <= self.settings.questions:
            return list(log)
        return [log[i] for i in sorted(self.rng.choice(len(log), self.settings.questions, replace=False))]

    async def stored_questions(self) -> list[str]:
        """Returns questions that random documents contain, at most a share ``STORED_SHARE`` of all."""
        if not self.labels:
            return []
        tenant, count = self.settings.tenant, int(STORED_SHARE * self.settings.questions)
        documents = await asyncio.to_thread(whole_documents, self.rag.index, tenant, count, self.settings.seed)
        found = (stored_question(d.content, self.labels) for d in documents)
        return list(dict.fromkeys(text for text in found if self._is_answerable(text)))

    def synthetic_questions(self, documents: Sequence[Document], stored: Sequence[str]) -> list[str]:
        """Returns generated questions, and stored ones in random order.

        With stored questions, no generated question takes most words of a sentence. Users ask the stored questions
        instead, and such a question would be as close as a probe to the rest of a short document.
        """
        if not stored:
            return generate_questions(documents, self.settings.questions, self.rng)
        count = round(len(stored) * (1 - STORED_SHARE) / STORED_SHARE)
        mixed = [*stored, *generate_questions(documents, count, self.rng, FEW_WORDS)]
        return [mixed[i] for i in self.rng.permutation(len(mixed))]

    async def probes(
        self, attacks: Mapping[str, MembershipAttack], documents: Sequence[Document]
    ) -> list[tuple[str, str, str]]:
        """Returns the questions of each attack about each document: attack, source, question."""
        texts = [d.content for d in documents]
        found = [(REWORDED, d.source, text) for d in documents for text in reworded(d, self.rng)]
        for name, attack in attacks.items():
            attack.study(texts)
            for document in documents:
                questions = (await attack.prepare(document, self.rng)).questions
                order = self.rng.permutation(len(questions))[:QUESTIONS_PER_ATTACK]
                found += [(name, document.source, questions[i]) for i in order]
        return found

    async def retrieve(self, *groups: Sequence[tuple[str, str, str]]) -> list[list[_RetrievedQuestion]]:
        """Embeds and searches groups of questions; those that the system refuses are dropped.

        All are embedded in one call, so that the progress is even: groups differ in the length of questions.
        """
        usable = [[question for question in questions if self._is_answerable(question[2])] for questions in groups]
        texts = [text for questions in usable for _, _, text in questions]
        vectors = iter(await asyncio.to_thread(self.rag.embedder.embed, texts, self.progress))
        return [
            [_RetrievedQuestion(*question, await self._search(next(vectors))) for question in questions]
            for questions in usable
        ]

    def _is_answerable(self, text: str) -> bool:
        try:
            require_answerable(Query(text, tenant=self.settings.tenant, k=self.settings.k))
        except QueryError:
            return False
        return True

    async def _search(self, vector: Vector) -> Retrieval:
        """Fetches enough hits to compare every document of the context with those below, as the guard does."""
        lookahead = max(LOOKAHEAD, self.defense.lookahead)
        wanted = self.settings.k + lookahead + 2 * self.defense.max_hidden_sources
        while True:
            found = await self.rag.search(vector, wanted, self.settings.tenant)
            context = unique_sources(found.hits[: self.settings.k])
            below = sum(h.document.source not in context for h in found.hits)
            if below >= lookahead or len(found.hits) < wanted:
                return replace(found, exhausted=len(found.hits) < wanted)
            wanted *= 2

    def fit_weights(
        self, harmless: Sequence[_RetrievedQuestion], probes: Sequence[_RetrievedQuestion]
    ) -> Calibration | None:
        """Fits the weights: logistic regression of benign questions against probes, attacks weighted equally.

        Weights are non-negative: a question that is closer in any feature must not score lower. Returns None if the
        classes cannot be separated.
        """
        N = np.array([next(iter(f.values())) for q in harmless if (f := self._features(q))])
        P, attacks = [], []
        for probe in probes:
            own = self._features(probe).get(probe.source)
            if own is not None:
                P.append(own)
                attacks.append(probe.attack)
        if not (len(N) and P):
            return None
        counts = {attack: attacks.count(attack) for attack in set(attacks)}
        both = np.vstack([np.array(P), N])
        centre, scale = N.mean(axis=0), N.std(axis=0)
        for other in (both.std(axis=0), 1.0):  # for a feature that is constant among benign questions
            scale = np.where(scale < MIN_SCALE, other, scale)
        X = (both - centre) / scale
        y = np.r_[np.ones(len(P)), -np.ones(len(N))]
        w = np.r_[[1 / len(counts) / counts[attack] for attack in attacks], np.full(len(N), 1 / len(N))]
        weights, _ = logistic_regression(X, y, w, PENALTY, non_negative=True)  # a threshold replaces the intercept
        if not weights.any():
            return None
        return self._calibration(centre=centre, scale=scale, weights=weights)

    def _features(self, question: _RetrievedQuestion) -> dict[str, Features]:
        extractor, found = FeatureExtractor(question.text, self.labels), question.retrieval
        order = unique_sources(found.hits[: self.settings.k])
        features = {s: extractor.extract(s, found, order[:i]) for i, s in enumerate(order)}
        return {s: f for s, f in features.items() if f is not None}

    async def add_distribution(self, weighted: Calibration, judged: Sequence[_RetrievedQuestion]) -> Calibration:
        """Adds the scores of benign questions, with jitter per document as the guard draws it."""
        plain = [max((await self._scores(weighted, q)).values()) for q in judged]
        doubting = replace(weighted, doubt=float(np.quantile(plain, DOUBT)), jitter=JITTER * float(np.std(plain)))
        full = [list((await self._scores(doubting, q)).values()) for q in judged]
        benign = [float(np.max(scores + doubting.jitter * self.rng.random(len(scores)))) for scores in full]
        return replace(doubting, benign=tuple(sorted(benign)))

    async def _scores(self, calibration: Calibration, question: _RetrievedQuestion) -> Mapping[str, float]:
        query = Query(question.text, tenant=self.settings.tenant, k=self.settings.k)
        found = await self.defense.score(query, question.retrieval, calibration)
        self.progress(1)
        return found

    def why_not_fitted(self, harmless: Sequence[_RetrievedQuestion]) -> str:
        """Returns the reason why ``fit_weights`` found no weights."""
        if any(self._features(question) for question in harmless):
            return "the benign questions are as close to single documents as attack questions; review the query log"
        return "no benign question retrieves its document; there is nothing to learn from"

    async def probe_scores(
        self, calibration: Calibration, probes: Sequence[_RetrievedQuestion]
    ) -> dict[str, list[tuple[str, float]]]:
        """Returns source and score of each probe by attack; -inf if the probed document is not in the context."""
        scores: dict[str, list[tuple[str, float]]] = {}
        for probe in probes:
            found = await self._scores(calibration, probe)
            scores.setdefault(probe.attack, []).append((probe.source, found.get(probe.source, -math.inf)))
        return scores


def _by_document(found: Iterable[tuple[str, float]]) -> list[list[float | None]]:
    """The scores of probes by document, without its name; None: the document was not in the context."""
    scores: dict[str, list[float | None]] = {}
    for source, score in found:
        scores.setdefault(source, []).append(round(score, 4) if math.isfinite(score) else None)
    return list(scores.values())


def recall_of_probes(calibration: Calibration) -> dict[str, dict[str, dict[str, Estimate]]]:
    """Returns the recall of each attack by question and by document (any of its questions), at each rate.

    From ``notes["probes"]``, the scores of probes about documents that the weights were not fitted on.
    """
    return {
        attack: {str(share): _recall(found, calibration.threshold(share)) for share in RATES}
        for attack, found in calibration.notes.get("probes", {}).items()
    }


def _recall(found: Sequence[Sequence[float | None]], threshold: float) -> dict[str, Estimate]:
    """Questions about one document are correlated, so the documents are the sampling unit; each has a question."""
    caught = [[score is not None and score > threshold for score in document] for document in found]
    by_question = clustered_rate([*map(sum, caught)], [*map(len, caught)])
    assert by_question is not None
    return {"question": by_question, "document": proportion(sum(map(any, caught)), len(caught))}


def reworded(document: Document, rng: np.random.Generator) -> list[str]:
    """Returns two probes: the text without four words of ten; one sentence after shuffled key words of the title."""
    kept = [w for w in document.text.split() if w.lower() not in STOP_WORDS and rng.random() < 0.6]
    head = [w for w in (document.title or document.text[:100]).split() if w.lower() not in STOP_WORDS][:10]
    whole = [s for s in sentences(document.text) if len(s.split()) > 5] or [document.text]
    one = [w for w in str(rng.choice(whole)).split() if w.lower() not in STOP_WORDS and rng.random() < 0.7][:12]
    return [" ".join(kept)[:2000], f"{' '.join(rng.permutation(head))}: {' '.join(one)}?"]
