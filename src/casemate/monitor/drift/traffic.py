"""Drift: whether a system has begun to behave otherwise, by what passes through it and by replaying questions.

Observations of answers come in windows: a run of canaries, a day of traffic. Each new window is compared with all that
came before, in six signals: how many answers decline, how long they are, how much their contexts overlap with the
first, how few sources they draw on, whether one document is in many answers that was in few (METHODS D6 d: the hub that
a backdoor makes), how many questions the guard flags. The p-value is that of a permutation test: were all observations
alike, it would be chance which of them are in the new window. So the p-values of successive windows are independent, as
those of ranks are (Vovk, Gammerman and Shafer 2005), and may be added up as e-values in a CUSUM (Shin, Ramdas and
Rinaldo 2022): where nothing changes, the first false alarm comes after ``budget`` windows or more, on average.

That holds for observations that could come in any order. Traffic has hours and weekdays: let a window be whole days.
Observations of the same questions are compared question by question (``paired``), which needs less.

Deviation: METHODS D6 gives a document's k-occurrence as a z-score. Here ``hubs`` gives it, and the permutation test
judges it, for k-occurrence has a heavy tail and a z-score of 5 is nothing unusual.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.errors import DataError
from casemate.monitor.canaries.results import Result, Status, base
from casemate.monitor.drift.compare import rank_biased_overlap
from casemate.stats import e_value
from casemate.types import Event, Float64

Chosen: TypeAlias = npt.NDArray[np.int64]
"""Which observations are taken for the window, (draws, size)."""
Statistic: TypeAlias = Callable[[Chosen], Float64]
"""What a signal measures of each choice, (draws,); higher is farther from the usual."""

REFUSALS, LENGTH, OVERLAP, CONCENTRATION, HUB, FLAGGED = "refusals length overlap concentration hub flagged".split()
SIGNALS = (REFUSALS, LENGTH, OVERLAP, CONCENTRATION, HUB, FLAGGED)
BUDGET = 1000.0
"""Windows until the first false alarm, on average, at least."""
DRAWS, ENOUGH, BATCH = 9_999, 20, 200
"""Permutations at most; of these, as many as far as the window after which it is clear that nothing is unusual (Besag
and Clifford 1991); and those computed at once."""
KAPPAS = (0.1, 0.5)
"""Of the e-values: the first bets on one large change, the second on many small ones."""
LEAST = 2
"""Windows of a reference."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One answer, as far as it is known; None or nothing: not known.

    Attributes:
        question: Names the question: the same for the same one asked again.
        at: When.
        refused: Whether the answer declines.
        words: Its length.
        documents: Ids in its context, best first.
        sources: Theirs.
        flagged: Whether the guard flagged the question.
    """

    question: str
    at: datetime
    refused: bool | None = None
    words: int | None = None
    documents: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    flagged: bool | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One signal of one window.

    Attributes:
        signal: Which.
        value: In the window: a share; of ``length`` the mean of ln(1 + words); of ``concentration`` the probability
            that two hits are of one source.
        usual: Before it.
        p: How likely as much is by chance.
        evidence: What has added up over the windows.
        alarm: Whether that is enough.
        documents: Of ``hub``: those that are in more answers than before.
    """

    signal: str
    value: float
    usual: float
    p: float
    evidence: float
    alarm: bool
    documents: tuple[str, ...] = ()


class Hub(NamedTuple):
    """A document, how many answers have it in their context, and the z-score of that."""

    document: str
    answers: int
    z: float


def by_run(results: Iterable[Result]) -> list[list[Observation]]:
    """What canaries showed, a window for each run, oldest first. Repetitions, and those in error, are left out."""
    found: dict[str, list[Observation]] = {}
    for r in results:
        if r.run == base(r.run) and r.status is not Status.ERROR:
            told = (r.refused, r.words, r.documents, r.sources)
            found.setdefault(r.run, []).append(Observation(r.canary, r.at, *told))
    return list(found.values())


def flags(events: Iterable[Event], without: str | tuple[str, ...] = "canary") -> list[Observation]:
    """What is known of traffic from the record: which questions were flagged.

    Args:
        events: Of kind ``verdict``; others are passed over.
        without: Clients whose names begin so are no traffic.
    """
    found: dict[str, Observation] = {}
    for event in events:
        body = event.body
        if event.kind != "verdict" or str(body.get("client", "")).startswith(without):
            continue
        name = str(body.get("request", event.id))
        before = found.get(name)
        flagged = bool(body.get("flagged")) or (before is not None and before.flagged is True)
        found[name] = Observation(name, event.at, flagged=flagged)
    return list(found.values())


def by_time(observations: Sequence[Observation], seconds: float) -> list[list[Observation]]:
    """Windows of equal length, counted from the first observation; empty ones are left out.

    Args:
        observations: In any order.
        seconds: Length of a window, above 0.
    """
    found: dict[int, list[Observation]] = {}
    ordered = sorted(observations, key=lambda o: o.at)
    for one in ordered:
        found.setdefault(int((one.at - ordered[0].at).total_seconds() // seconds), []).append(one)
    return list(found.values())


def drift(
    windows: Sequence[Sequence[Observation]],
    reference: int,
    *,
    paired: bool,
    budget: float = BUDGET,
    seed: int = 7,
) -> list[list[Reading]]:
    """What each window shows, after those of the reference.

    A window that alarms is not counted among what is usual, and its signal begins anew.

    Args:
        windows: In order of time.
        reference: How many of them, from the first, are known to be good; at least ``LEAST``.
        paired: Whether the windows hold the same questions: each is then compared with itself.
        budget: Windows until the first false alarm, on average, at least.
        seed: Of the permutations.

    Returns:
        For each window after the reference, one reading for each signal that is known.

    Raises:
        DataError: If the reference is too short.
    """
    if reference < LEAST or not any(windows[:reference]):
        raise DataError(f"a reference of {reference} windows is too short; at least {LEAST}, with observations")
    past = _Past([o for window in windows[1:reference] for o in window], _contexts(windows[0]), paired)
    if not paired:
        past.held = [*windows[0], *past.held]
    rng = np.random.default_rng(seed)
    sums = dict.fromkeys(SIGNALS, 0.0)
    found = []
    for window in windows[reference:]:
        readings = []
        for name in SIGNALS:
            measured = past.measured(name, window, rng)
            if measured is not None:
                bet = sum(e_value(measured.p, kappa) for kappa in KAPPAS) / len(KAPPAS)
                evidence = max(sums[name], 1.0) * bet
                alarm = evidence >= budget * len(SIGNALS)
                sums[name] = 0.0 if alarm else evidence
                readings.append(
                    Reading(name, measured.value, measured.usual, measured.p, evidence, alarm, measured.documents)
                )
        found.append(readings)
        if not any(r.alarm for r in readings):
            past.held += window
    return found


def hubs(observations: Sequence[Observation], documents: int, most: int = 5) -> list[Hub]:
    """The documents that are in the context of most answers (k-occurrence), with their z-scores.

    Args:
        observations: Of questions that have little to do with one another.
        documents: How many there are in the index, at least one.
        most: How many are named.
    """
    counts = Counter(d for o in observations for d in set(o.documents))
    mean = counts.total() / documents
    std = math.sqrt(max(sum(c * c for c in counts.values()) / documents - mean**2, 0.0))
    return [Hub(d, c, (c - mean) / std if std else 0.0) for d, c in counts.most_common(most)]


class _Measured(NamedTuple):
    value: float
    usual: float
    p: float = 1.0
    documents: tuple[str, ...] = ()


@dataclass
class _Past:
    """What was observed so far."""

    held: list[Observation]
    first: Mapping[str, Sequence[str]]  # the context of each question in the first window
    paired: bool

    def measured(self, signal: str, window: Sequence[Observation], rng: np.random.Generator) -> _Measured | None:
        """A signal in a window and before it, with its p-value; None: it is not known of both."""
        old = [o for o in self.held if self._known(signal, o)]
        new = [o for o in window if self._known(signal, o)]
        if not old or not new:
            return None
        both = [*new, *old]
        found, statistic = self._statistic(signal, both, len(new))
        strata = _strata(both) if self.paired else np.zeros(len(both), np.int64)
        return found._replace(p=_p_value(statistic, np.arange(len(new))[None], strata, rng))

    def _known(self, signal: str, o: Observation) -> bool:
        return {
            REFUSALS: o.refused is not None,
            LENGTH: o.words is not None,
            OVERLAP: self.paired and bool(o.documents) and o.question in self.first,
            CONCENTRATION: bool(o.sources),
            HUB: bool(o.documents),
            FLAGGED: o.flagged is not None,
        }[signal]

    def _statistic(self, signal: str, both: Sequence[Observation], size: int) -> tuple[_Measured, Statistic]:
        """What is told of a signal, and what is tested. The first so many observations are the window's."""
        own, rest = np.arange(size)[None], np.arange(size, len(both))[None]
        if signal in (CONCENTRATION, HUB):
            table = _Table.of([o.sources if signal == CONCENTRATION else o.documents for o in both])
            if signal == HUB:
                return table.hub(size), lambda chosen: table.excess(chosen).max(axis=1)
            value, usual = (float(table.herfindahl(part)[0]) for part in (own, rest))
            return _Measured(value, usual), table.herfindahl
        values = np.array([self._value(signal, o) for o in both])
        middle = values.mean()

        def mean(chosen: Chosen) -> Float64:
            found: Float64 = values[chosen].mean(axis=1)
            return found

        told = _Measured(float(values[:size].mean()), float(values[size:].mean()))
        return told, (lambda c: -mean(c)) if signal == OVERLAP else (lambda c: np.abs(mean(c) - middle))

    def _value(self, signal: str, o: Observation) -> float:
        if signal == LENGTH:
            return math.log1p(o.words or 0)
        if signal == OVERLAP:
            return rank_biased_overlap(self.first[o.question], o.documents)
        return float(bool(o.refused if signal == REFUSALS else o.flagged))


@dataclass(frozen=True, slots=True)
class _Table:
    """The ids of each observation, as numbers."""

    rows: npt.NDArray[np.int64]  # (n, longest), filled up with the number of names
    names: tuple[str, ...]

    @classmethod
    def of(cls, found: Sequence[Sequence[str]]) -> _Table:
        number = {name: i for i, name in enumerate(dict.fromkeys(name for row in found for name in row))}
        rows = np.full((len(found), max(map(len, found))), len(number), np.int64)
        for i, row in enumerate(found):
            rows[i, : len(row)] = [number[name] for name in row]
        return cls(rows, tuple(number))

    def counts(self, chosen: Chosen) -> npt.NDArray[np.int64]:
        """How often each id is in each choice, (draws, ids)."""
        ids = len(self.names) + 1
        found = self.rows[chosen].reshape(len(chosen), -1) + ids * np.arange(len(chosen))[:, None]
        return np.bincount(found.ravel(), minlength=ids * len(chosen)).reshape(-1, ids)[:, :-1]

    def herfindahl(self, chosen: Chosen) -> Float64:
        """The probability that two hits are of one source: Herfindahl's index, without its bias by size."""
        counts = self.counts(chosen).astype(np.float64)
        total = counts.sum(axis=1)
        found: Float64 = (counts * (counts - 1)).sum(axis=1) / np.maximum(total * (total - 1), 1)
        return found

    def excess(self, chosen: Chosen) -> Float64:
        """How surprisingly many of a document's answers are in each choice: c ln(c / expected), (draws, ids)."""
        counts = self.counts(chosen).astype(np.float64)
        expected = self.counts(np.arange(len(self.rows))[None])[0] * (chosen.shape[1] / len(self.rows))
        found: Float64 = np.where(counts > expected, counts * np.log(np.maximum(counts, 1) / expected), 0.0)
        return found

    def hub(self, size: int) -> _Measured:
        """Of the document that came up most, its share in the answers of the window, and in those before."""
        own, rest = np.arange(size)[None], np.arange(size, len(self.rows))[None]
        excess = self.excess(own)[0]
        top = int(excess.argmax())
        documents = tuple(self.names[i] for i in np.flatnonzero(excess >= excess[top] - 1e-9)[:3])
        value, usual = (float(self.counts(part)[0][top]) / part.shape[1] for part in (own, rest))
        return _Measured(value, usual, documents=documents if excess[top] > 0 else ())


def _p_value(statistic: Statistic, own: Chosen, strata: npt.NDArray[np.int64], rng: np.random.Generator) -> float:
    """Share of the permutations that go as far as the window itself, which is one of them.

    Within each stratum as many are chosen as the window has of it. Ends early where enough go as far: the p-value is
    then valid all the same (Besag and Clifford 1991).
    """
    limit = float(statistic(own)[0]) - 1e-12
    blocks = np.argsort(strata, kind="stable")
    sorted_strata = strata[blocks]
    size = np.bincount(strata[own[0]], minlength=int(strata.max()) + 1)
    starts = np.searchsorted(sorted_strata, np.arange(len(size)))
    columns = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, size, strict=True)])
    far = drawn = 0
    while drawn < DRAWS:
        rows = min(BATCH, DRAWS - drawn)
        order = np.argsort(strata + rng.random((rows, len(strata))), axis=1)
        hit = statistic(order[:, columns]) >= limit
        if far + int(hit.sum()) >= ENOUGH:
            last = int(np.flatnonzero(np.cumsum(hit) + far >= ENOUGH)[0])
            return ENOUGH / (drawn + last + 1)
        far, drawn = far + int(hit.sum()), drawn + rows
    return (far + 1) / (DRAWS + 1)


def _strata(observations: Sequence[Observation]) -> npt.NDArray[np.int64]:
    number = {name: i for i, name in enumerate(dict.fromkeys(o.question for o in observations))}
    return np.array([number[o.question] for o in observations], np.int64)


def _contexts(window: Sequence[Observation]) -> dict[str, Sequence[str]]:
    return {o.question: o.documents for o in window if o.documents}
