"""How suspicious a new document is: one score, calibrated on the corpus it is to join, with its reasons.

Each signal says how far a document goes in one respect: by how much it beats all others for a watched question, how
many questions it enters, whether others that come with it are its near copies, whether it begins with a question and
answers it, speaks to the model, hides characters, or has a vector that is not its own. How far harmless documents go is
learnt from the corpus itself: some are taken out, and looked at as if they came in now. The surprise of a signal is
-log10 of the share of harmless documents that go as far. The score is the largest surprise; documents above the
threshold, which one in a hundred harmless ones passes, are held back (METHODS D4.1, D6).

Tried and left out: the sum of the surprises (less recall where a question is not watched), and the plain cosine to the
nearest question (nothing that the lift does not tell).
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
from casemate.monitor.poison.impact import NOTHING, Entry, Standings, best_scores
from casemate.monitor.poison.signs import asks_in_title, echo, hidden, orders
from casemate.protocols import Index
from casemate.stats import conformal_threshold
from casemate.types import DEFAULT_TENANT, Document, Float64, Vector

RATE = 0.01
"""Share of harmless documents that may be held back."""
LEAST = 500
"""Documents of a corpus below which nothing can be learnt at that rate."""
REFERENCE, SHARE, LAWS = 1000, 0.25, 0.5
"""Documents that are learnt from: at most so many, at most this share of the corpus; and the share of these that the
laws are learnt from, while the threshold is learnt from the rest."""
FEWEST = 240
"""... but no fewer than these, so that one in a hundred can be told."""
SEED = 7
"""Of the draw of documents that are learnt from."""
COMPANY = 30
"""Young documents that may be nearer to a document than any other, and are passed over."""
SHOWN = 5
"""Questions and companions that are named of each document."""
BODY, CAP = 0.9, 12.0
"""Beyond this quantile a tail is taken for exponential; no surprise is larger than that."""
ROUNDING = 1e-4
"""A vector that is given may be so much less than 1 from its own text's, by cosine."""

SAYS: Mapping[str, str] = {
    "lift": "comes before all documents held for a question, by {0:.2f}",
    "entries": "enters the context of {0:.0f} questions",
    "block": "has near copies among the new documents, nearer by {0:.2f} than any held",
    "echo": "begins with a question and answers it",
    "title": "has a question for a title and answers it",
    "orders": "speaks to the model",
    "hidden": "has {0:.0f} hidden characters",
    "mismatch": "came with a vector that is not its text's, off by {0:.3f}",
}
"""The signals, and what they say of a document."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is thought of one new document.

    Attributes:
        document: Which.
        score: The largest surprise: 2 is one harmless document in a hundred, 3 one in a thousand.
        threshold: Above it a document is held back.
        reasons: A sentence for each signal above the threshold, the most surprising first.
        surprises: Of every signal.
        entered: The questions that it enters, those with the highest lift first; ``SHOWN`` at most.
        entries: How many it enters.
        companions: Ids of the new documents that are its near copies, where that is a reason. Some may have come before
            and be in the index.
    """

    document: Document
    score: float
    threshold: float
    reasons: tuple[str, ...]
    surprises: Mapping[str, float]
    entered: tuple[Entry, ...] = ()
    entries: int = 0
    companions: tuple[str, ...] = ()

    @property
    def quarantine(self) -> bool:
        """Whether it is to be held back."""
        return self.score > self.threshold


class Law:
    """How far harmless documents go in one respect: their values as they are, and an exponential tail beyond.

    Args:
        values: Of harmless documents, at least one, finite.
    """

    def __init__(self, values: npt.ArrayLike) -> None:
        self._sorted: Float64 = np.sort(np.asarray(values, np.float64))
        self._body = float(np.quantile(self._sorted, BODY))
        above = self._sorted[self._sorted > self._body] - self._body
        self._mean = float(above.mean()) if len(above) else 0.0
        self._share = len(above) / len(self._sorted)

    def surprise(self, value: float) -> float:
        """-log10 of the share of harmless documents that go so far or farther, at most ``CAP``.

        What none of them does at all counts ten times as rare as it could have been seen.
        """
        n = len(self._sorted)
        if value <= self._body:
            return -math.log10((1 + n - int(np.searchsorted(self._sorted, value))) / (n + 1))
        if not self._mean:
            return math.log10(n + 1) + 1
        return min((value - self._body) / self._mean / math.log(10) - math.log10(self._share), CAP)


class _Young:
    """New documents, the latest of them, by which company is told.

    Args:
        size: How many each is compared with: as many as when the law was learnt, for among more, nearer ones are found.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.ids: frozenset[str] = frozenset()
        self._documents: list[Document] = []
        self._vectors: list[Vector] = []

    def joined(self, documents: Sequence[Document], vectors: Vector) -> list[list[tuple[float, str]]]:
        """Takes more in, and gives for each of them the nearest young ones of other sources: cosines and ids.

        Each is compared with those that came shortly before and shortly after it.
        """
        first = len(self._documents)
        every, E = [*self._documents, *documents], [*self._vectors, *vectors]
        found, step, more = list[list[tuple[float, str]]](), max(self.size // 2, 1), self.size // 4
        for start in range(first, len(every), step):
            around = slice(max(start - more, 0), start + step + more)
            found += _nearest(every[start : start + step], E[start : start + step], every[around], E[around])
        self._documents, self._vectors = every[-self.size :], E[-self.size :]
        self.ids = frozenset(d.id for d in self._documents)
        return found


def _nearest(
    documents: Sequence[Document], vectors: Sequence[Vector], others: Sequence[Document], among: Sequence[Vector]
) -> list[list[tuple[float, str]]]:
    """For each document the others, of other sources, that are nearest to it: cosines and ids, ``SHOWN`` at most."""
    cosines = np.stack(vectors) @ np.stack(among).T  # (n, others)
    sources = np.array([d.source for d in others], object)
    found = []
    for document, row in zip(documents, cosines, strict=True):
        order = np.argsort(-np.where(sources == document.source, -2, row), kind="stable")[:SHOWN]
        found.append([(float(row[i]), others[i].id) for i in order if sources[i] != document.source])
    return found


class _Figures(NamedTuple):
    """How far a document goes in each respect, and which young documents are nearest to it."""

    values: dict[str, float]
    companions: tuple[str, ...]


class Suspicion:
    """Judges new documents of one tenant, one batch after another.

    Attributes:
        standings: The watched questions.
        threshold: Of the score.
        learnt_from: How many harmless documents the threshold was learnt from.
    """

    def __init__(self, index: Index, standings: Standings, tenant: str) -> None:
        self.standings, self.threshold, self.learnt_from = standings, math.inf, 0
        self._index, self._tenant = index, tenant
        self._laws: dict[str, Law] = {}
        self._young = _Young(REFERENCE)

    @classmethod
    def learnt(
        cls,
        index: Index,
        questions: Sequence[str],
        vectors: Vector,
        *,
        k: int = 5,
        tenant: str = DEFAULT_TENANT,
        rate: float = RATE,
    ) -> Suspicion:
        """Learns from a tenant's documents what harmless ones are like. Reads the whole index twice.

        Args:
            index: Where they are.
            questions: To be watched: asked by people, by canaries, or made; some thousands, at least one.
            vectors: A row for each, (m, dim).
            k: Documents that are read for an answer.
            tenant: Whose documents.
            rate: Share of harmless documents that may be held back, in (0, 1).

        Raises:
            DataError: If there are fewer than ``LEAST`` documents, or no question.
        """
        n = index.moments(tenant).n
        if n < LEAST or not len(questions):
            raise DataError(
                f"tenant {tenant!r} has {n} documents, and {len(questions)} questions are watched: to tell unusual "
                f"documents from usual ones, {LEAST} documents and one question are the least"
            )
        count = min(REFERENCE, max(int(SHARE * n), FEWEST))
        documents, held = _drawn(index, tenant, count, np.random.default_rng(SEED))
        best = best_scores(index, np.concatenate([vectors, held]), max(k, 2), tenant, {d.source for d in documents})
        made = cls(index, Standings(tuple(questions), vectors, best[: len(vectors), :k]), tenant)
        old, cut = best[len(vectors) :, 1].astype(np.float64), int(LAWS * len(documents))
        made._young = _Young(cut)
        first = made._figures(documents[:cut], held[:cut], old[:cut], _Young(cut))
        made._laws = {name: Law([f.values[name] for f in first]) for name in SAYS}
        rest = made._figures(documents[cut:], held[cut:], old[cut:], _Young(cut))
        made.learnt_from = len(rest)  # of too few rather more false alarms than no alarm at all
        scores = [max(made._surprises(f).values()) for f in rest]
        made.threshold = conformal_threshold(scores, max(rate, 1 / (len(rest) + 1)))
        made.standings.admit(held)
        return made

    def judge(self, documents: Sequence[Document], vectors: Vector, given: Vector | None = None) -> list[Judgement]:
        """What is thought of some new documents, which come together; they count as young from then on.

        Args:
            documents: Not in the index yet, but for an older state of the same sources.
            vectors: Of their texts, (n, dim), embedded here.
            given: Vectors that they came with, where somebody else has embedded them.
        """
        old = np.array([self._second(v) for v in vectors])
        off = None if given is None else 1 - (np.asarray(given, np.float64) * vectors).sum(axis=1)
        figures = self._figures(documents, vectors, old, self._young, off)
        return [self._judged(d, v, f) for d, v, f in zip(documents, vectors, figures, strict=True)]

    def afresh(self) -> Suspicion:
        """What was learnt, as if nothing had been judged or let in since: a copy that goes its own way."""
        made = copy.copy(self)
        made.standings, made._young = copy.copy(self.standings), _Young(self._young.size)
        return made

    def admit(self, vectors: Vector) -> None:
        """Counts documents as held from now on, those that were let in: (n, dim)."""
        self.standings.admit(vectors)

    def _second(self, vector: Vector) -> float:
        """Cosine of the second nearest document held that is not young itself."""
        hits = self._index.search(vector, 2 + COMPANY, self._tenant).hits
        scores = [h.score for h in hits if h.document.id not in self._young.ids] or [NOTHING]
        return scores[min(1, len(scores) - 1)]

    def _figures(
        self, documents: Sequence[Document], vectors: Vector, old: Float64, young: _Young, off: Float64 | None = None
    ) -> list[_Figures]:
        """Every signal of every document.

        Args:
            documents: Which come together.
            vectors: Theirs, (n, dim).
            old: Cosine of the second nearest document held, (n,).
            young: Those that came before; these are added.
            off: By how much less than 1 the cosine of each vector and the one it came with is, (n,).
        """
        companions = young.joined(documents, vectors)
        lifts, entries = self.standings.lifts(vectors) if documents else (np.empty(0), np.empty(0))
        found = []
        for i, document in enumerate(documents):
            near = companions[i]
            values = {
                "lift": float(lifts[i]),
                "entries": math.log1p(entries[i]),  # few enter very many, harmlessly
                "block": near[1][0] - float(old[i]) if len(near) > 1 else -1.0,  # one other: two versions of a text
                "echo": echo(document),
                "title": asks_in_title(document),
                "orders": float(len(orders(document))),
                "hidden": float(hidden(document)),
                "mismatch": float(off[i]) if off is not None and off[i] > ROUNDING else 0.0,
            }
            found.append(_Figures(values, tuple(name for _, name in near)))
        return found

    def _surprises(self, figures: _Figures) -> dict[str, float]:
        return {name: law.surprise(figures.values[name]) for name, law in self._laws.items()}

    def _judged(self, document: Document, vector: Vector, figures: _Figures) -> Judgement:
        surprises = self._surprises(figures)
        above = sorted((n for n in surprises if surprises[n] > self.threshold), key=lambda n: -surprises[n])
        entered = self.standings.entered(vector)
        return Judgement(
            document,
            max(surprises.values()),
            self.threshold,
            tuple(_said(name, figures.values[name], document) for name in above),
            surprises,
            tuple(entered[:SHOWN]),
            len(entered),
            figures.companions if "block" in above else (),
        )


def _said(name: str, figure: float, document: Document) -> str:
    """What a signal says of a document."""
    sentence = SAYS[name].format(math.expm1(figure) if name == "entries" else figure)
    return f"{sentence}: {', '.join(orders(document))}" if name == "orders" else sentence


def _drawn(index: Index, tenant: str, count: int, rng: np.random.Generator) -> tuple[list[Document], Vector]:
    """Documents of whole sources drawn at random, about so many, in random order."""
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
