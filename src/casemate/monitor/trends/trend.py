"""How a set of canaries has fared: the page's rules, and what the sequential tests make of the same results.

The page ("Canary Queries") alerts on every failure, on every change from passing to failing, on 8 failures of the last
10 and on a run with more than 10 % failures. All of these are told here, as findings. Only the sequential tests of
``gauges`` alert somebody, unless ``Limits.page_rules`` says so, for 50 canaries that each fail in 1 % of the runs make
the first two rules strike in 39 % of the runs.

Deviation: the page counts a target that cannot be reached as a failure of every canary. Here such results say nothing
about a canary; a target that does not answer is a finding of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from casemate.monitor.canaries.results import KIND, Result, Severity, Status, base, by_canary, from_event
from casemate.monitor.trends import evidence
from casemate.monitor.trends.gauges import RECENT, Gauge, Limits, State, Step, step
from casemate.monitor.trends.watched import Known, Watched
from casemate.protocols import EventStore

RATE = 0.10
"""The page's share of failures in a run, above which it alerts."""
SUDDEN, PERSISTENT, FAILURES = "sudden_failure", "persistent_failure", "failure_rate"
CHANGED, MANY, UNREACHABLE, BLIND = "changed", "many_at_once", "unreachable", "blind"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that the histories show.

    Attributes:
        kind: ``sudden_failure``, ``persistent_failure`` or ``failure_rate``, by the page's rules; ``changed`` (the
            evidence on single canaries suffices), ``many_at_once`` (too many failures in one run for chance),
            ``unreachable`` (the target does not answer), ``blind`` (a canary gets no answer).
        severity: How grave it is.
        canaries: Which are concerned; all of the run where none is named.
        run: The run that showed it.
        at: When that was.
        message: A sentence, with the figures.
        pages: Whether it is one to alert somebody with.
    """

    kind: str
    severity: Severity
    canaries: tuple[str, ...]
    run: str
    at: datetime
    message: str
    pages: bool


@dataclass(frozen=True, slots=True)
class RunLine:
    """One run: how many were judged, failed, and could not be judged; and how likely as many failures are by chance."""

    run: str
    at: datetime
    judged: int
    failed: int
    errors: int
    chance: float


@dataclass(frozen=True, slots=True)
class CanaryLine:
    """One canary.

    Attributes:
        canary: Its id.
        judged: Runs in which it could be judged.
        failed: How many of these failed.
        errors: Runs in which it could not be judged.
        last: How the last run ended; None: it was never asked.
        recent: How its last runs ended, oldest first: ``P`` passed, ``F`` failed, ``E`` could not be judged.
        flake: The rate at which it is taken to fail though all is well.
        evidence: What has added up against that.
        since: First failure of what has added up; None: there is none.
        alarmed: Whether it has alarmed, and is not well again.
    """

    canary: str
    judged: int
    failed: int
    errors: int
    last: Status | None
    recent: str
    flake: float
    evidence: float
    since: datetime | None
    alarmed: bool


@dataclass(frozen=True, slots=True)
class Trend:
    """How a set has fared.

    Attributes:
        runs: Oldest first.
        canaries: In the order of the set.
        findings: In the order of the runs; persistent failures last.
        state: From which the next run goes on.
    """

    runs: tuple[RunLine, ...]
    canaries: tuple[CanaryLine, ...]
    findings: tuple[Finding, ...]
    state: State


def read(store: EventStore, name: str, since: datetime | None = None) -> list[Result]:
    """The results of a set that a store holds, in the order asked.

    Raises:
        BackendError: If the store cannot be read.
    """
    prefix = f"{name}@"
    with _uncollected():
        return [from_event(event) for event in store.scan(KIND, since) if event.body["run"].startswith(prefix)]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keeps Python from looking for garbage: among so much that is new and needed, that takes a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def trend(
    history: Sequence[Result], watched: Watched, limits: Limits | None = None, start: State | None = None
) -> Trend:
    """What the histories show.

    Args:
        history: Results in the order asked, of the set's runs and their repetitions.
        watched: The set.
        limits: When a trend becomes an alarm; None: the defaults.
        start: What was known before the history begins; None: nothing.
    """
    limits, state = limits or Limits(), start or State()
    steps: list[Step] = []
    findings: list[Finding] = []
    with _uncollected():
        for results in _by_run(history):
            found = step(state, results, watched, limits)
            findings += of_step(state, found, watched, limits)
            steps.append(found)
            state = found.state
    if steps:
        findings += persistent(steps[-1], watched, limits)
    runs = tuple(RunLine(s.run, s.at, s.asked, len(s.failed), s.errors, s.chance) for s in steps)
    return Trend(runs, _lines(history, watched, state), tuple(findings), state)


def of_step(before: State, found: Step, watched: Watched, limits: Limits) -> list[Finding]:
    """What one run shows.

    Args:
        before: What was known before it.
        found: The run.
        watched: The set.
        limits: When a trend becomes an alarm.
    """
    return [
        *_sudden(before, found, watched, limits),
        *_rate(found, limits),
        *_alarmed(found, watched),
        *_silent(before, found, limits),
    ]


def persistent(last: Step, watched: Watched, limits: Limits) -> list[Finding]:
    """The page's rule: 8 of the last 10 failed."""
    known = watched.known
    found = {i: g.recent for i, g in last.state.gauges.items() if g.persistent}
    return [
        Finding(
            PERSISTENT,
            Severity.CRITICAL,
            (canary,),
            last.run,
            last.at,
            f"canary {canary} failed in {recent.count('F')} of its last {len(recent)} runs",
            limits.page_rules and known[canary].pages,
        )
        for canary, recent in found.items()
    ]


def _sudden(before: State, found: Step, watched: Watched, limits: Limits) -> list[Finding]:
    """The page's rule: it passed the time before, and failed."""
    known = watched.known
    return [
        Finding(
            SUDDEN,
            Severity.HIGH,
            (canary,),
            found.run,
            found.at,
            f"canary {canary} failed; the time before, it passed",
            limits.page_rules and known[canary].pages,
        )
        for canary in found.failed
        if canary in before.gauges and before.gauges[canary].recent.endswith("P")
    ]


def _rate(found: Step, limits: Limits) -> list[Finding]:
    """The page's rule: more than 10 % of a run failed."""
    share = len(found.failed) / found.asked if found.asked else 0.0
    if share <= RATE:
        return []
    message = f"{len(found.failed)} of {found.asked} canaries failed: {share:.0%}"
    return [Finding(FAILURES, Severity.CRITICAL, found.failed, found.run, found.at, message, limits.page_rules)]


def _alarmed(found: Step, watched: Watched) -> list[Finding]:
    """The sequential tests."""
    if not found.alarmed:
        return []
    known = watched.known
    severity = max((known[i].severity for i in found.alarmed), key=list(Severity).index)
    if found.many:
        odds = f"by chance as many fail in one run of {1 / found.chance:,.0f}"
        message = f"{len(found.failed)} of {found.asked} canaries failed at once; {odds}"
        return [Finding(MANY, Severity.CRITICAL, found.alarmed, found.run, found.at, message, True)]
    message = f"{', '.join(found.alarmed)}: more failures than such canaries have when all is well"
    return [Finding(CHANGED, severity, found.alarmed, found.run, found.at, message, True)]


def _silent(before: State, found: Step, limits: Limits) -> list[Finding]:
    """Who gets no answer, since this run."""
    findings = []
    if found.unreachable and before.down < limits.errors:
        message = f"the target gave no answer to {found.errors} of {found.errors + found.asked} canaries"
        findings.append(Finding(UNREACHABLE, Severity.HIGH, (), found.run, found.at, message, True))
    blind = [i for i in found.blind if i not in before.gauges or before.gauges[i].errors < limits.errors]
    if blind:
        message = f"{', '.join(blind)}: no answer for {limits.errors} runs, while others got theirs"
        findings.append(Finding(BLIND, Severity.MEDIUM, tuple(blind), found.run, found.at, message, True))
    return findings


def _by_run(history: Iterable[Result]) -> list[list[Result]]:
    """The results of each run with its repetitions, in the order of the runs."""
    found: dict[str, list[Result]] = {}
    for result in history:
        found.setdefault(base(result.run), []).append(result)
    return list(found.values())


def _lines(history: Sequence[Result], watched: Watched, state: State) -> tuple[CanaryLine, ...]:
    asked: Mapping[str, Sequence[Result]] = by_canary(r for r in history if "~" not in r.run)
    return tuple(_line(known, asked.get(known.id, ()), state.gauges.get(known.id)) for known in watched.canaries)


def _line(known: Known, results: Sequence[Result], gauge: Gauge | None) -> CanaryLine:
    statuses = [r.status for r in results]
    return CanaryLine(
        known.id,
        len(statuses) - statuses.count(Status.ERROR),
        statuses.count(Status.FAIL),
        statuses.count(Status.ERROR),
        statuses[-1] if statuses else None,
        "".join(status.name[0] for status in statuses[-RECENT:]),
        evidence.flake_bound(known.clean),
        evidence.evidence(gauge.sums) if gauge else 0.0,
        gauge.since if gauge else None,
        gauge.alarmed if gauge else False,
    )
