"""Poison score of a new document, with reasons, calibrated on the corpus that it joins.

Each signal measures one aspect of a document:

- by how much it beats all others for a watched question, and how many contexts it enters;
- whether it changes the answer to a watched question, and no other document states the new one (``answer_change``);
- whether near-duplicates come with it;
- whether it begins with a question and answers it;
- whether it addresses the model, or contains hidden characters.

The distribution of each signal over benign documents is estimated from the corpus itself: a sample is held out and
scored as if it were new. Near-duplicates in it are collapsed first: texts that recur would else count as many
benign documents with the signals of poison. The surprise of a value is -log10 of the share of benign documents with at
least this value. The score is the largest surprise.

Each signal has a threshold of its own and a share of the false-alarm budget, one in a hundred benign documents
(METHODS D4.1, D6). So a signal that is common in a corpus raises its own threshold and no other. Some signals are rare
in most corpora and do not use their shares. So all shares grow by one factor, as far as the benign documents that no
distribution was estimated from allow.

Rejected alternatives: the sum of the surprises (lower recall for questions that are not watched), and the plain cosine
with the nearest question (adds nothing to the lift).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from casemate.errors import DataError
from casemate.maths.stats import conformal_threshold
from casemate.monitor.poisoning.answer_change import AnswerCheck, EnteredQuestion, specific_lifts
from casemate.monitor.poisoning.retrieval_impact import NO_SCORE, ContextEntry, QuestionScores, best_scores
from casemate.monitor.poisoning.text_signals import hidden_characters, model_instructions, question_echo, title_echo
from casemate.protocols import Index
from casemate.types import DEFAULT_TENANT, Document, Float64, Vector

FALSE_POSITIVE_RATE = 0.01
"""Share of benign documents that may be quarantined."""
SHARES: Mapping[str, float] = {
    "answer": 0.5,
    "lift": 0.06,
    "entries": 0.06,
    "block": 0.1,
    "echo": 0.15,
    "title": 0.02,
    "orders": 0.03,
    "hidden": 0.02,
    "evidence": 0.04,
}
"""Shares of the false-alarm budget, in sum at most 1; ``evidence`` is that of ``screening_evidence``."""
NEAR_COPY = 0.95
"""Cosine from which two documents of the sample count as one."""
MIN_DOCUMENTS = 500
"""Smallest corpus from which the threshold can be estimated."""
MAX_SAMPLE, MAX_SAMPLE_SHARE, DISTRIBUTION_SHARE = 1000, 0.25, 0.5
"""Size of the held-out sample: at most so many documents, and at most this share of the corpus; and the share of the
sample that estimates the distributions, while the rest estimates the threshold."""
MIN_SAMPLE = 240
"""Smallest sample, so that one in a hundred can be estimated."""
SEED = 7
"""Seed of the sample."""
MAX_COMPANIONS = 30
"""Recent documents that may be nearer to a document than any other, and are skipped."""
MAX_SHOWN = 5
"""Questions and near-duplicates reported per document."""
GROWTH = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Factors by which all shares may grow together."""
BODY_QUANTILE, MAX_SURPRISE = 0.9, 12.0
"""Quantile beyond which a tail is modeled as exponential; largest surprise."""

REASONS: Mapping[str, str] = {
    "answer": "changes the answer to a watched question, and no other document states the new answer",
    "lift": "ranks before all indexed documents for a watched question, by a cosine of {0:.2f}",
    "entries": "enters the contexts of {0:.0f} watched questions",
    "block": "has near-duplicates among the new documents, closer by a cosine of {0:.2f} than any indexed one",
    "echo": "begins with a question and answers it",
    "title": "has a question as its title and answers it",
    "orders": "addresses the model",
    "hidden": "contains {0:.0f} hidden characters",
}
"""Signals, and the reason that each reports."""


@dataclass(frozen=True, slots=True)
class ScreeningResult:
    """Screening of one new document.

    Attributes:
        score: The largest surprise: 2 is one benign document in a hundred, 3 one in a thousand.
        p_value: Share of benign documents with at least this score.
        reasons: One sentence per signal above its threshold, most surprising first.
        companions: Ids of its near-duplicates among recent documents, if these are a reason; some may be indexed.
    """

    document: Document
    score: float
    p_value: float
    reasons: tuple[str, ...]
    companions: tuple[str, ...] = ()

    @property
    def suspicious(self) -> bool:
        """Whether a signal exceeds its threshold."""
        return bool(self.reasons)


class SignalDistribution:
    """Distribution of one signal over benign documents: empirical, with an exponential tail.

    Needs one value or more, all finite.
    """

    def __init__(self, values: npt.ArrayLike) -> None:
        self._sorted: Float64 = np.sort(np.asarray(values, np.float64))
        self._body = float(np.quantile(self._sorted, BODY_QUANTILE))
        above = self._sorted[self._sorted > self._body] - self._body
        self._mean = float(above.mean()) if len(above) else 0.0
        self._share = len(above) / len(self._sorted)

    def surprise(self, value: float) -> float:
        """-log10 of the share of benign documents with at least this value, at most ``MAX_SURPRISE``.

        A value above a constant sample counts as ten times rarer than the sample could show. Larger values get up to
        a hundredth more, so that one benign document above the sample does not raise the threshold to the largest.
        """
        n = len(self._sorted)
        if value <= self._body:
            return -math.log10((1 + n - int(np.searchsorted(self._sorted, value))) / (n + 1))
        if not self._mean:
            above = value - self._body
            return math.log10(n + 1) + 1 + above / (1 + above) / 100
        return min((value - self._body) / self._mean / math.log(10) - math.log10(self._share), MAX_SURPRISE)


class _RecentDocuments:
    """The latest ``size`` new documents, among which near-duplicates are searched: as many as in the sample."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ids: frozenset[str] = frozenset()
        self._documents: list[Document] = []
        self._vectors: list[Vector] = []

    def add(self, documents: Sequence[Document], vectors: Vector) -> list[list[tuple[float, str]]]:
        """Adds documents; returns for each the nearest recent ones of other sources, as cosines and ids.

        Each is compared with those that came shortly before and shortly after it.
        """
        first = len(self._documents)
        every, E = [*self._documents, *documents], [*self._vectors, *vectors]
        found, step, margin = list[list[tuple[float, str]]](), max(self.size // 2, 1), self.size // 4
        for start in range(first, len(every), step):
            around = slice(max(start - margin, 0), start + step + margin)
            found += _nearest_others(every[start : start + step], E[start : start + step], every[around], E[around])
        self._keep(every, E)
        return found

    def recall(self, documents: Sequence[Document], vectors: Sequence[Vector]) -> None:
        """Adds documents that were screened before, by this process or another."""
        self._keep([*self._documents, *documents], [*self._vectors, *vectors])

    def _keep(self, documents: Sequence[Document], vectors: Sequence[Vector]) -> None:
        self._documents, self._vectors = list(documents[-self.size :]), list(vectors[-self.size :])
        self.ids = frozenset(d.id for d in self._documents)


def _nearest_others(
    documents: Sequence[Document], vectors: Sequence[Vector], others: Sequence[Document], among: Sequence[Vector]
) -> list[list[tuple[float, str]]]:
    """For each document the nearest ones of other sources: cosines and ids, at most ``MAX_SHOWN``."""
    cosines = np.stack(vectors) @ np.stack(among).T  # (n, others)
    sources = np.array([d.source for d in others], object)
    found = []
    for document, row in zip(documents, cosines, strict=True):
        order = np.argsort(-np.where(sources == document.source, -2, row), kind="stable")[:MAX_SHOWN]
        found.append([(float(row[i]), others[i].id) for i in order if sources[i] != document.source])
    return found


class _Signals(NamedTuple):
    """Signals of a document.

    Attributes:
        companions: Its nearest recent documents: by how much each is nearer than the indexed ones, and its id.
        entered: Contexts that it enters, highest lift first.
        specific: ``specific_lifts`` of the first ``MAX_SHOWN`` of them in which it ranks first.
    """

    values: dict[str, float]
    companions: tuple[tuple[float, str], ...]
    compared: int
    entered: Sequence[ContextEntry] = ()
    specific: Sequence[float] = ()


class PoisonScreener:
    """Screens new documents of one tenant, batch by batch.

    Attributes:
        thresholds: Surprise above which each signal makes a document suspicious.
        answers: Leave-one-out check of documents above the threshold of ``answer``. Replace it for another reader.
    """

    def __init__(self, index: Index, question_scores: QuestionScores, answers: AnswerCheck) -> None:
        self.question_scores, self.answers = question_scores, answers
        self.thresholds: dict[str, float] = dict.fromkeys(REASONS, math.inf)
        self._index, self.tenant = index, answers.tenant
        self._distributions: dict[str, SignalDistribution] = {}
        self._scores = SignalDistribution([0.0])
        self._recent = _RecentDocuments(MAX_SAMPLE)

    @classmethod
    def fit(
        cls,
        index: Index,
        questions: Sequence[str] | Mapping[str, str],
        vectors: Vector,
        *,
        k: int = 5,
        tenant: str = DEFAULT_TENANT,
        rate: float = FALSE_POSITIVE_RATE,
    ) -> PoisonScreener:
        """Estimates distributions and thresholds from a tenant's documents. Reads the whole index twice.

        The watched questions are logged, of canaries, or synthetic; some thousands, at least one. A mapping has the
        source that each was generated from, or "". Their embeddings are (m, dim). ``rate`` is the share of benign
        documents that may be quarantined, in (0, 1).

        Raises:
            DataError: If there are fewer than ``MIN_DOCUMENTS`` documents, or no questions.
        """
        n = index.moments(tenant).n
        if n < MIN_DOCUMENTS or not len(questions):
            raise DataError(
                f"cannot screen documents of tenant {tenant!r}: {n} documents and {len(questions)} watched questions; "
                f"at least {MIN_DOCUMENTS} documents and one question are needed"
            )
        count = min(MAX_SAMPLE, max(int(MAX_SAMPLE_SHARE * n), MIN_SAMPLE))
        documents, held = _sample_sources(index, tenant, count, np.random.default_rng(SEED))
        held_out, sources = held, {d.source for d in documents}
        distinct = _distinct(held)
        documents, held = [documents[i] for i in distinct], held[distinct]
        best = best_scores(index, np.concatenate([vectors, held]), max(k, 2), tenant, sources)
        made_from = np.array(list(questions.values()), object) if isinstance(questions, Mapping) else None
        scores = QuestionScores(tuple(questions), vectors, best[: len(vectors), :k], made_from)
        made = cls(index, scores, AnswerCheck(index, tenant, k))
        second, cut = best[len(vectors) :, 1].astype(np.float64), int(DISTRIBUTION_SHARE * len(documents))
        made._recent = _RecentDocuments(cut)
        first = made._signals(documents[:cut], held[:cut], second[:cut], _RecentDocuments(cut))
        made._distributions = {name: SignalDistribution([s.values[name] for s in first]) for name in REASONS}
        rest = made._signals(documents[cut:], held[cut:], second[cut:], _RecentDocuments(cut))
        surprises = [made._surprises(s) for s in rest]
        made._scores = SignalDistribution([max(s.values()) for s in surprises])
        made.thresholds = _joint_thresholds(surprises, len(first), rate)
        made.question_scores.admit(held_out)
        return made

    def screen(self, documents: Sequence[Document], vectors: Vector) -> list[ScreeningResult]:
        """Scores new documents that come together; they count as recent afterwards.

        The index may contain an older version of their sources. ``vectors``: (n, dim).
        """
        second = np.array([self._second_nearest(v) for v in vectors])
        signals = self._signals(documents, vectors, second, self._recent)
        above = [self._above(self._surprises(s)) for s in signals]
        asked = [i for i, names in enumerate(above) if "answer" in names]
        changing = self._changing([documents[i] for i in asked], vectors[asked], [signals[i] for i in asked])
        for i, changes in zip(asked, changing, strict=True):
            if not changes:
                above[i].remove("answer")
        return [self._result(d, s, names) for d, s, names in zip(documents, signals, above, strict=True)]

    def fresh_copy(self) -> PoisonScreener:
        """An independent copy in the state after ``fit``, without recent documents."""
        made = copy.copy(self)
        made.question_scores, made._recent = copy.copy(self.question_scores), _RecentDocuments(self._recent.size)
        return made

    def recall(self, documents: Sequence[Document], vectors: Sequence[Vector]) -> None:
        """Adds documents that were screened before to the recent ones, oldest first; ids and sources suffice."""
        self._recent.recall(documents, vectors)

    def admit(self, vectors: Vector) -> None:
        """Updates the watched questions after documents were indexed, (n, dim)."""
        self.question_scores.admit(vectors)

    def _second_nearest(self, vector: Vector) -> float:
        """Cosine of the second nearest indexed document that is not recent."""
        hits = self._index.search(vector, 2 + MAX_COMPANIONS, self.tenant).hits
        scores = [h.score for h in hits if h.document.id not in self._recent.ids] or [NO_SCORE]
        return scores[min(1, len(scores) - 1)]

    def _signals(
        self, documents: Sequence[Document], vectors: Vector, second: Float64, recent: _RecentDocuments
    ) -> list[_Signals]:
        """All signals of each document; adds them to the recent ones.

        ``second``: cosine of the second nearest indexed document, (n,).
        """
        companions = recent.add(documents, vectors)
        sources = [d.source for d in documents]
        lifts, contexts = self.question_scores.impact(vectors, sources)
        found = []
        for i, (document, entered) in enumerate(zip(documents, contexts, strict=True)):
            near = tuple((cosine - float(second[i]), name) for cosine, name in companions[i])
            first = [e for e in entered[:MAX_SHOWN] if e.lift > 0]
            questions = [self.question_scores.questions[e.question] for e in first]
            specific = specific_lifts(questions, document.content, [e.lift for e in first])
            values = {
                "answer": max(specific, default=0.0),
                "lift": float(lifts[i]),
                "entries": math.log1p(len(entered)),  # a few benign documents enter very many
                "block": near[1][0] if len(near) > 1 else -1.0,  # one copy may be another version
                "echo": question_echo(document),
                "title": title_echo(document),
                "orders": float(len(model_instructions(document))),
                "hidden": float(hidden_characters(document)),
            }
            size = min(len(recent.ids), recent.size)
            found.append(_Signals(values, near, size, entered, specific))
        return found

    def _surprises(self, signals: _Signals) -> dict[str, float]:
        found = {name: d.surprise(signals.values[name]) for name, d in self._distributions.items()}
        return found | {"block": self._block_surprise(signals.values["block"], signals.compared)}

    def _block_surprise(self, nearer: float, compared: int) -> float:
        """Surprise of ``block``. Near-duplicates by chance are rarer, the fewer recent documents there are."""
        found = self._distributions["block"].surprise(nearer)
        return found + math.log10(max(self._recent.size / max(compared, 1), 1.0)) if nearer > 0 else found

    def _above(self, surprises: Mapping[str, float]) -> list[str]:
        """Signals above their thresholds, most surprising first."""
        return sorted((n for n in surprises if surprises[n] > self.thresholds[n]), key=lambda n: -surprises[n])

    def _result(self, document: Document, signals: _Signals, above: Sequence[str]) -> ScreeningResult:
        score = max(self._surprises(signals).values())
        limit = self.thresholds["block"] if "block" in above else math.inf
        return ScreeningResult(
            document,
            score,
            min(1.0, 10 ** -self._scores.surprise(score)),
            tuple(_reason(name, signals.values[name], document) for name in above),
            tuple(
                name for nearer, name in signals.companions if self._block_surprise(nearer, signals.compared) > limit
            ),
        )

    def _changing(self, documents: Sequence[Document], vectors: Vector, signals: Sequence[_Signals]) -> list[bool]:
        """Whether each document gives an answer above the threshold that no other one supports, in one batch."""
        scores, surprise = self.question_scores, self._distributions["answer"].surprise
        owners, entered = list[int](), list[EnteredQuestion]()
        for i, (document, vector, found) in enumerate(zip(documents, vectors, signals, strict=True)):
            for entry, lift in zip(found.entered, found.specific, strict=False):
                if surprise(lift) > self.thresholds["answer"]:
                    asked = scores.questions[entry.question], scores.vectors[entry.question]
                    entered.append(EnteredQuestion(*asked, document, vector))
                    owners.append(i)
        changing = [False] * len(documents)
        for i, change in zip(owners, self.answers.check(entered), strict=True):
            changing[i] |= change.changed and not change.supporters
        return changing


def _reason(name: str, value: float, document: Document) -> str:
    sentence = REASONS[name].format(math.expm1(value) if name == "entries" else value)
    return f"{sentence}: {', '.join(model_instructions(document))}" if name == "orders" else sentence


def _joint_thresholds(surprises: Sequence[Mapping[str, float]], modeled: int, rate: float) -> dict[str, float]:
    """Thresholds of all signals that together flag at most this share of benign documents, by a conformal count.

    The shares grow while the count allows it; without growth each signal keeps to its own share. The surprises are
    those of documents that the model was not fitted to; ``modeled`` counts the others.
    """
    found = _signal_thresholds(surprises, modeled, rate)
    for factor in GROWTH[1:]:
        wider = _signal_thresholds(surprises, modeled, rate * factor)
        flagged = sum(any(s[name] > threshold for name, threshold in wider.items()) for s in surprises)
        if flagged + 1 > rate * (len(surprises) + 1):
            break
        found = wider
    return found


def _signal_thresholds(surprises: Sequence[Mapping[str, float]], modeled: int, rate: float) -> dict[str, float]:
    """Threshold of each signal's surprise. Arguments as for ``_joint_thresholds``.

    The tail model and the counts of other documents must both agree that a value is rare enough. With few documents
    neither can: then what the sample does not show at all suffices, rather than no alarm.
    """
    unseen, attainable = math.log10(modeled + 1) + 0.99, 1 / (len(surprises) + 1)
    return {
        name: max(
            min(-math.log10(rate * SHARES[name]), unseen),
            conformal_threshold([s[name] for s in surprises], max(rate * SHARES[name], attainable)),
        )
        for name in REASONS
    }


def _distinct(vectors: Vector) -> list[int]:
    """Rows that are not near-duplicates of an earlier one, in order. At least two are left."""
    kept: list[int] = []
    for i, row in enumerate(vectors @ vectors.T):
        if not kept or row[kept].max() < NEAR_COPY:
            kept.append(i)
    return kept if len(kept) > 1 else list(range(len(vectors)))


def _sample_sources(index: Index, tenant: str, count: int, rng: np.random.Generator) -> tuple[list[Document], Vector]:
    """Documents of randomly drawn whole sources, about ``count``, in random order."""
    sources = sorted(index.digests(tenant))
    each = index.moments(tenant).n / len(sources)
    wanted = {sources[i] for i in rng.permutation(len(sources))[: max(int(count / each), 2)]}
    found = [
        (document, vector)
        for documents, vectors in index.scan(tenant)
        for document, vector in zip(documents, vectors, strict=True)
        if document.source in wanted
    ]
    order = rng.permutation(len(found))
    return [found[i][0] for i in order], np.stack([found[i][1] for i in order])
