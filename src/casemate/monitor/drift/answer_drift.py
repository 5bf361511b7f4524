"""Answer drift: do answers of canaries, or of traffic, change over time?

Observations of answers are grouped into windows: a run of canaries, or a day of traffic. Each new window is compared
with all earlier ones in six signals:

- share of refusals;
- length;
- overlap of the context with that of the first window;
- concentration on few sources;
- a hub: a document in many answers that was in few before, as a backdoor creates it (METHODS D6 d);
- share of flagged questions.

The p-value is that of a permutation test: if all observations are exchangeable, it is chance which of them are in the
new window. So p-values of successive windows are independent, like those of ranks (Vovk, Gammerman and Shafer 2005).
They are combined as e-values in a CUSUM (Shin, Ramdas and Rinaldo 2022). Without a change, the first false alarm comes
after at least ``windows_per_false_alarm`` windows on average.

This requires exchangeable observations. Traffic has daily and weekly cycles: use windows of whole days. Observations of
the same questions are compared question by question (``paired``), which requires less.

Deviation: METHODS D6 judges a document's k-occurrence by its z-score. Here the permutation test decides, because
k-occurrence has a heavy tail, in which a z-score of 5 is common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.maths.stats import e_value
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, base_run_id, group_by
from casemate.monitor.drift.compare import rank_biased_overlap
from casemate.types import Event, Float64

Choices: TypeAlias = npt.NDArray[np.int64]
"""Indices of the observations assigned to the window, one row per permutation: (draws, size)."""
Statistic: TypeAlias = Callable[[Choices], Float64]
"""Test statistic of each choice, (draws,); higher is more unusual."""

REFUSALS, LENGTH, OVERLAP, CONCENTRATION, HUB, FLAGGED = "refusals length overlap concentration hub flagged".split()
SIGNALS = (REFUSALS, LENGTH, OVERLAP, CONCENTRATION, HUB, FLAGGED)
WINDOWS_PER_FALSE_ALARM = 1000.0
"""Minimum average number of windows before the first false alarm."""
MAX_DRAWS, ENOUGH_EXTREME, BATCH = 9_999, 20, 200
"""Permutations; as extreme ones after which sampling stops (Besag and Clifford 1991); permutations per batch."""
KAPPAS = (0.1, 0.5)
"""Exponents of the e-values: the first is sensitive to one large change, the second to many small ones."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One answer; None or empty where unknown.

    Attributes:
        question: Identifies the question; equal when it is asked again.
        documents: Ids in its context, best first.
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
class DriftReading:
    """One signal in one window.

    Attributes:
        value: Its value in the window: a share; of ``length`` the mean of ln(1 + words); of ``concentration`` the
            probability that two hits have the same source.
        evidence: CUSUM of the e-values over the windows.
        threshold: Evidence from which the signal alarms.
        documents: Of ``hub``: the documents in more answers than before.
    """

    signal: str
    value: float
    reference: float
    p: float
    evidence: float
    threshold: float
    documents: tuple[str, ...] = ()

    @property
    def alarm(self) -> bool:
        """Whether the evidence reaches the threshold."""
        return self.evidence >= self.threshold


def windows_by_run(results: Iterable[CanaryResult]) -> list[list[Observation]]:
    """Answers of canaries, one window per run, oldest first, without repetitions and errors."""
    kept = (r for r in results if r.run == base_run_id(r.run) and r.status is not CanaryStatus.ERROR)
    runs = group_by(kept, lambda r: r.run).values()
    return [[Observation(r.canary, r.at, r.refused, r.words, r.documents, r.sources) for r in run] for run in runs]


def observations_of_verdicts(events: Iterable[Event], without: str | tuple[str, ...] = "canary") -> list[Observation]:
    """Which questions of traffic were flagged, by verdict events; clients with these prefixes are not traffic."""
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


def windows_by_time(observations: Sequence[Observation], seconds: float, now: datetime) -> list[list[Observation]]:
    """Windows of equal length above 0, counted from the first observation; empty ones are left out.

    So is a window that has not ended: it has only some hours of a day, and a test repeated while it fills is no longer
    one test of one window.
    """
    ordered = sorted(observations, key=lambda o: o.at)
    ended = (now - ordered[0].at).total_seconds() // seconds if ordered else 0
    windows = group_by(ordered, lambda o: (o.at - ordered[0].at).total_seconds() // seconds)
    return [window for number, window in windows.items() if number < ended]


def detect_drift(
    windows: Sequence[Sequence[Observation]],
    reference: int,
    *,
    paired: bool,
    windows_per_false_alarm: float = WINDOWS_PER_FALSE_ALARM,
    seed: int = 7,
) -> list[list[DriftReading]]:
    """Tests each window after the reference for drift; returns its readings, one per known signal.

    The first ``reference`` windows, at least 2 and not all empty, have no problem. A later one that alarms does not
    join them, and its signal restarts. ``paired`` windows contain the same questions: each is compared with itself. The
    first false alarm comes after ``windows_per_false_alarm`` windows or more, on average.
    """
    history = _History(
        [o for window in windows[1:reference] for o in window],
        {o.question: o.documents for o in windows[0] if o.documents},
        paired,
    )
    if not paired:
        history.observations = [*windows[0], *history.observations]
    rng = np.random.default_rng(seed)
    cusums = dict.fromkeys(SIGNALS, 0.0)
    threshold = windows_per_false_alarm * len(SIGNALS)
    found = []
    for window in windows[reference:]:
        readings = []
        for name in SIGNALS:
            measured = history.measure(name, window, rng)
            if measured is not None:
                e = sum(e_value(measured.p, kappa) for kappa in KAPPAS) / len(KAPPAS)
                evidence = max(cusums[name], 1.0) * e
                value, before, p, documents = measured
                reading = DriftReading(name, value, before, p, evidence, threshold, documents)
                cusums[name] = 0.0 if reading.alarm else evidence
                readings.append(reading)
        found.append(readings)
        if not any(r.alarm for r in readings):
            history.observations += window
    return found


class _Measured(NamedTuple):
    value: float
    reference: float
    p: float = 1.0
    documents: tuple[str, ...] = ()


@dataclass
class _History:
    """Observations before the current window."""

    observations: list[Observation]
    first_contexts: Mapping[str, Sequence[str]]  # context of each question in the first window
    paired: bool

    def measure(self, signal: str, window: Sequence[Observation], rng: np.random.Generator) -> _Measured | None:
        """A signal in a window and before it, with its p-value; None if it is unknown in one of them."""
        old = [o for o in self.observations if self._is_known(signal, o)]
        new = [o for o in window if self._is_known(signal, o)]
        if not old or not new:
            return None
        both = [*new, *old]
        found, statistic = self._statistic(signal, both, len(new))
        strata = _strata(both) if self.paired else np.zeros(len(both), np.int64)
        return found._replace(p=_permutation_p(statistic, np.arange(len(new))[None], strata, rng))

    def _is_known(self, signal: str, o: Observation) -> bool:
        return {
            REFUSALS: o.refused is not None,
            LENGTH: o.words is not None,
            OVERLAP: self.paired and bool(o.documents) and o.question in self.first_contexts,
            CONCENTRATION: bool(o.sources),
            HUB: bool(o.documents),
            FLAGGED: o.flagged is not None,
        }[signal]

    def _statistic(self, signal: str, both: Sequence[Observation], size: int) -> tuple[_Measured, Statistic]:
        """Reported values and test statistic. The first ``size`` observations are the window's."""
        own, rest = np.arange(size)[None], np.arange(size, len(both))[None]
        if signal in (CONCENTRATION, HUB):
            table = _IdTable.of([o.sources if signal == CONCENTRATION else o.documents for o in both])
            if signal == HUB:
                return table.hub(size), lambda choices: table.excess(choices).max(axis=1)
            value, before = (float(table.herfindahl(part)[0]) for part in (own, rest))
            return _Measured(value, before), table.herfindahl
        values = np.array([self._value(signal, o) for o in both])
        middle = values.mean()

        def mean(choices: Choices) -> Float64:
            found: Float64 = values[choices].mean(axis=1)
            return found

        measured = _Measured(float(values[:size].mean()), float(values[size:].mean()))
        return measured, (lambda c: -mean(c)) if signal == OVERLAP else (lambda c: np.abs(mean(c) - middle))

    def _value(self, signal: str, o: Observation) -> float:
        if signal == LENGTH:
            return math.log1p(o.words or 0)
        if signal == OVERLAP:
            return rank_biased_overlap(self.first_contexts[o.question], o.documents)
        return float(bool(o.refused if signal == REFUSALS else o.flagged))


@dataclass(frozen=True, slots=True)
class _IdTable:
    """Ids of each observation, as numbers."""

    rows: npt.NDArray[np.int64]  # (n, longest), padded with the number of names
    names: tuple[str, ...]

    @classmethod
    def of(cls, found: Sequence[Sequence[str]]) -> _IdTable:
        number = {name: i for i, name in enumerate(dict.fromkeys(name for row in found for name in row))}
        rows = np.full((len(found), max(map(len, found))), len(number), np.int64)
        for i, row in enumerate(found):
            rows[i, : len(row)] = [number[name] for name in row]
        return cls(rows, tuple(number))

    def counts(self, choices: Choices) -> npt.NDArray[np.int64]:
        """How often each id occurs in each choice, (draws, ids)."""
        ids = len(self.names) + 1
        found = self.rows[choices].reshape(len(choices), -1) + ids * np.arange(len(choices))[:, None]
        return np.bincount(found.ravel(), minlength=ids * len(choices)).reshape(-1, ids)[:, :-1]

    def herfindahl(self, choices: Choices) -> Float64:
        """Probability that two hits have the same source: the Herfindahl index without its size bias."""
        counts = self.counts(choices).astype(np.float64)
        total = counts.sum(axis=1)
        found: Float64 = (counts * (counts - 1)).sum(axis=1) / np.maximum(total * (total - 1), 1)
        return found

    def excess(self, choices: Choices) -> Float64:
        """Surprise at a document's count in each choice: c ln(c / expected), (draws, ids)."""
        counts = self.counts(choices).astype(np.float64)
        expected = self.counts(np.arange(len(self.rows))[None])[0] * (choices.shape[1] / len(self.rows))
        found: Float64 = np.where(counts > expected, counts * np.log(np.maximum(counts, 1) / expected), 0.0)
        return found

    def hub(self, size: int) -> _Measured:
        """Share of answers with the most surprising document, in the window and before."""
        own, rest = np.arange(size)[None], np.arange(size, len(self.rows))[None]
        excess = self.excess(own)[0]
        top = int(excess.argmax())
        documents = tuple(self.names[i] for i in np.flatnonzero(excess >= excess[top] - 1e-9)[:3])
        value, before = (float(self.counts(part)[0][top]) / part.shape[1] for part in (own, rest))
        return _Measured(value, before, documents=documents if excess[top] > 0 else ())


def _permutation_p(
    statistic: Statistic, own: Choices, strata: npt.NDArray[np.int64], rng: np.random.Generator
) -> float:
    """Share of permutations at least as extreme as the window, which is one of them.

    Each stratum contributes as many observations as it has in the window. Sampling stops after ``ENOUGH_EXTREME``
    extreme permutations; the p-value remains valid (Besag and Clifford 1991).
    """
    limit = float(statistic(own)[0]) - 1e-12
    blocks = np.argsort(strata, kind="stable")
    sorted_strata = strata[blocks]
    size = np.bincount(strata[own[0]], minlength=int(strata.max()) + 1)
    starts = np.searchsorted(sorted_strata, np.arange(len(size)))
    columns = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, size, strict=True)])
    extreme = drawn = 0
    while drawn < MAX_DRAWS:
        rows = min(BATCH, MAX_DRAWS - drawn)
        order = np.argsort(strata + rng.random((rows, len(strata))), axis=1)
        hit = statistic(order[:, columns]) >= limit
        if extreme + int(hit.sum()) >= ENOUGH_EXTREME:
            last = int(np.flatnonzero(np.cumsum(hit) + extreme >= ENOUGH_EXTREME)[0])
            return ENOUGH_EXTREME / (drawn + last + 1)
        extreme, drawn = extreme + int(hit.sum()), drawn + rows
    return (extreme + 1) / (MAX_DRAWS + 1)


def _strata(observations: Sequence[Observation]) -> npt.NDArray[np.int64]:
    number = {name: i for i, name in enumerate(dict.fromkeys(o.question for o in observations))}
    return np.array([number[o.question] for o in observations], np.int64)
