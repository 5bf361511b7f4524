"""The trend of a canary set: findings of the sequential tests, and of the simpler page rules, over many runs.

The page rules are those of the wiki page "Canary Queries". It alerts on every failure, on every change from pass to
fail, on 8 failures in the last 10 runs, and on a run with more than 10 % failures. All are reported as findings. Only
the sequential tests of ``cusum`` alert, unless ``AlarmLimits.page_rules`` is set: with 50 canaries that each fail in 1
% of the runs, the first two rules fire in 39 % of the runs.

Deviation: the wiki page counts an unreachable target as a failure of every canary. Here such results carry no
information about a canary; an unreachable target is a finding of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime

from casemate.maths.stats import Estimate, proportion
from casemate.monitor.canaries.results import (
    RESULT_KIND,
    CanaryResult,
    CanaryStatus,
    Severity,
    base_run_id,
    group_by,
    result_from_event,
)
from casemate.monitor.trends import sequential_tests
from casemate.monitor.trends.change_point import estimate_change
from casemate.monitor.trends.cusum import (
    ERRORS_IN_A_ROW,
    RECENT,
    AlarmLimits,
    CanaryCusum,
    CusumState,
    RunAnalysis,
    WatchedCanary,
    WatchedSet,
    analyze_run,
)
from casemate.monitor.trends.pooled_evidence import PooledCounts
from casemate.monitor.trends.sequential_tests import FlakeCounts
from casemate.protocols import EventStore
from casemate.reports.format import percent

MAX_FAILURE_SHARE = 0.10
"""Page rule: share of failures in a run above which it alerts."""
SUDDEN, PERSISTENT, FAILURES = "sudden_failure", "persistent_failure", "failure_rate"
CHANGED, MANY, UNREACHABLE, BLIND, DECAY = "changed", "many_at_once", "unreachable", "blind", "decay"
WHOLE_SET = ""
"""Stands for all canaries together, where otherwise one is named."""


@dataclass(frozen=True, slots=True)
class TrendFinding:
    """Something that the history shows.

    Attributes:
        kind: By the page rules ``sudden_failure``, ``persistent_failure`` or ``failure_rate``; else ``changed``
            (evidence on single canaries), ``many_at_once`` (too many failures in one run), ``unreachable`` (the target
            does not answer) or ``blind`` (a canary gets no answer).
        canaries: Affected canaries; empty: all of the run.
    """

    kind: str
    severity: Severity
    canaries: tuple[str, ...]
    run: str
    at: datetime
    message: str
    alerts: bool


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run: canaries with a verdict, failed, and without; and the p-value of the number of failures."""

    run: str
    at: datetime
    judged: int
    failed: int
    errors: int
    p_value: float


@dataclass(frozen=True, slots=True)
class CanarySummary:
    """History of one canary.

    Attributes:
        recent: Its last runs, oldest first: ``P`` passed, ``F`` failed, ``E`` no verdict.
        flake_rate: Failure rate of the baseline with its 95 % interval; None without a baseline.
        assumed_flake_rate: Failure rate that the sequential test expects while nothing is wrong, from all baselines.
        evidence: Current evidence against that rate.
        since: First failure that contributes to the evidence; None: there is none.
    """

    canary: str
    judged: int
    failed: int
    errors: int
    last: CanaryStatus | None
    recent: str
    flakes: FlakeCounts
    flake_rate: Estimate | None
    assumed_flake_rate: float
    evidence: float
    since: datetime | None
    alarmed: bool


@dataclass(frozen=True, slots=True)
class AlarmEpisode:
    """An alarm of the sequential tests, from the estimated change to the recovery. Runs are positions in the trend.

    Attributes:
        canary: The alarmed canary; empty: the pooled test over the whole set.
        began: First run after the change, by ``estimate_change``.
        earliest: Lower end of its 90 % credible interval.
        latest: Its upper end.
        recovered: None: it has not ended.
    """

    canary: str
    began: int
    earliest: int
    latest: int
    alarmed: int
    recovered: int | None = None


@dataclass(frozen=True, slots=True)
class Trend:
    """History of a set.

    Attributes:
        findings: Findings in the order of the runs; persistent failures last.
    """

    runs: tuple[RunSummary, ...]
    canaries: tuple[CanarySummary, ...]
    findings: tuple[TrendFinding, ...]
    state: CusumState
    alarms: tuple[AlarmEpisode, ...] = ()


def read_results(store: EventStore, name: str, since: datetime | None = None) -> list[CanaryResult]:
    """Stored results of a set, in order of asking.

    Raises:
        BackendError: If the store cannot be read.
    """
    prefix = f"{name}@"
    with _gc_paused():
        return [
            result_from_event(event) for event in store.scan(RESULT_KIND, since) if event.body["run"].startswith(prefix)
        ]


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Pauses garbage collection, which takes a third of the time of reading many results."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def compute_trend(
    history: Sequence[CanaryResult],
    watched: WatchedSet,
    limits: AlarmLimits | None = None,
) -> Trend:
    """Analyzes a history: results of the set's runs and their repetitions, in order of asking."""
    limits, state = limits or AlarmLimits(), CusumState()
    analyses: list[RunAnalysis] = []
    findings: list[TrendFinding] = []
    with _gc_paused():
        for results in group_by(history, lambda r: base_run_id(r.run)).values():
            analysis = analyze_run(state, results, watched, limits)
            findings += run_findings(state, analysis, watched, limits)
            analyses.append(analysis)
            state = analysis.state
    if analyses:
        findings += persistent_failures(analyses[-1], watched, limits)
    runs = tuple(RunSummary(a.run, a.at, a.judged, len(a.failed), a.errors, a.p_value) for a in analyses)
    alarms = _alarm_episodes(analyses, history, watched)
    asked = group_by((r for r in history if "~" not in r.run), lambda r: r.canary)
    baselines = tuple(c.flakes for c in watched.canaries)
    canaries = (_summary(c, asked.get(c.id, ()), state.canaries.get(c.id), baselines) for c in watched.canaries)
    return Trend(runs, tuple(canaries), tuple(findings), state, alarms)


def run_findings(
    before: CusumState, analysis: RunAnalysis, watched: WatchedSet, limits: AlarmLimits
) -> list[TrendFinding]:
    """Findings of one run."""
    return [
        *_sudden_failures(before, analysis, watched, limits),
        *_failure_rate(analysis, limits),
        *_alarms(analysis, watched, limits),
        *_missing_answers(before, analysis),
    ]


def persistent_failures(last: RunAnalysis, watched: WatchedSet, limits: AlarmLimits) -> list[TrendFinding]:
    """Page rule: at least 8 of the last 10 runs failed."""
    by_id, findings = watched.by_id, []
    for canary, cusum in last.state.canaries.items():
        if cusum.persistent:
            counts = f"{cusum.recent.count('F')} of its last {len(cusum.recent)} runs"
            message = f"canary {canary} failed in {counts} (rule: 8 of 10)"
            alerts = limits.page_rules and by_id[canary].alerts
            findings.append(_finding(last, PERSISTENT, Severity.CRITICAL, (canary,), message, alerts))
    return findings


def _finding(
    analysis: RunAnalysis, kind: str, severity: Severity, canaries: tuple[str, ...], message: str, alerts: bool = True
) -> TrendFinding:
    return TrendFinding(kind, severity, canaries, analysis.run, analysis.at, message, alerts)


def _sudden_failures(
    before: CusumState, analysis: RunAnalysis, watched: WatchedSet, limits: AlarmLimits
) -> list[TrendFinding]:
    """Page rule: a canary failed that passed in its run before."""
    by_id, findings = watched.by_id, []
    for canary in analysis.failed:
        if canary in before.canaries and before.canaries[canary].recent.endswith("P"):
            message = f"canary {canary} failed; in its run before, it passed"
            alerts = limits.page_rules and by_id[canary].alerts
            findings.append(_finding(analysis, SUDDEN, Severity.HIGH, (canary,), message, alerts))
    return findings


def _failure_rate(analysis: RunAnalysis, limits: AlarmLimits) -> list[TrendFinding]:
    """Page rule: more than 10 % of a run failed."""
    share = len(analysis.failed) / analysis.judged if analysis.judged else 0.0
    if share <= MAX_FAILURE_SHARE:
        return []
    counts = f"{len(analysis.failed)} of {analysis.judged} canaries failed"
    message = f"{counts}: {percent(share)} (rule: more than {percent(MAX_FAILURE_SHARE)})"
    return [_finding(analysis, FAILURES, Severity.CRITICAL, analysis.failed, message, limits.page_rules)]


def _alarms(analysis: RunAnalysis, watched: WatchedSet, limits: AlarmLimits) -> list[TrendFinding]:
    pooled = _pooled_alarm(analysis)
    if not analysis.alarmed:
        return pooled
    if analysis.many_failed:
        message = (
            f"{len(analysis.failed)} of {analysis.judged} canaries failed at once; by chance "
            f"{describe_odds(analysis.p_value)} runs has as many (alarm from "
            f"{describe_odds(0.25 / limits.runs_per_false_alert)})"
        )
        return [_finding(analysis, MANY, Severity.CRITICAL, analysis.alarmed, message), *pooled]
    by_id = watched.by_id
    severity = max((by_id[i].severity for i in analysis.alarmed), key=lambda severity: severity.rank)
    message = f"{', '.join(analysis.alarmed)}: more failures than in the baseline"
    return [_finding(analysis, CHANGED, severity, analysis.alarmed, message), *pooled]


def _pooled_alarm(analysis: RunAnalysis) -> list[TrendFinding]:
    if not analysis.decayed:
        return []
    runs = analysis.state.pooled
    asked, failed = sum(r.asked for r in runs), sum(r.failed for r in runs)
    message = f"all canaries together failed {failed} of {asked} times in the last {len(runs)} runs"
    return [_finding(analysis, DECAY, Severity.HIGH, (), message)]


def describe_odds(p: float) -> str:
    """A small probability in words. Models are not accurate beyond one in a million.

    >>> describe_odds(0.0123), describe_odds(2.9e-14)
    ('one in 81', 'less than one in a million')
    """
    return f"one in {1 / p:,.0f}" if p >= 1e-6 else "less than one in a million"


def _missing_answers(before: CusumState, analysis: RunAnalysis) -> list[TrendFinding]:
    """Targets and canaries without answers, reported in the run in which that begins to count."""
    findings = []
    if analysis.unreachable and before.unanswered_runs < ERRORS_IN_A_ROW:
        asked = analysis.errors + analysis.judged
        message = f"the target did not answer {analysis.errors} of {asked} canaries in the last run"
        findings.append(_finding(analysis, UNREACHABLE, Severity.HIGH, (), message))
    blind = [i for i in analysis.blind if i not in before.canaries or before.canaries[i].errors < ERRORS_IN_A_ROW]
    if blind:
        runs = f"no answer in {ERRORS_IN_A_ROW} consecutive runs"
        message = f"{', '.join(blind)}: {runs}, while other canaries got answers"
        findings.append(_finding(analysis, BLIND, Severity.MEDIUM, tuple(blind), message))
    return findings


def _alarm_episodes(
    analyses: Sequence[RunAnalysis], history: Iterable[CanaryResult], watched: WatchedSet
) -> tuple[AlarmEpisode, ...]:
    """Each alarm with its change and its end. Runs before the end of an earlier alarm do not count for the change."""
    counts = _counts_by_run(analyses, history)
    baselines = {c.id: PooledCounts(*c.flakes.fresh) for c in watched.canaries}
    alerting = [baselines[c.id] for c in watched.canaries if c.alerts]
    baselines[WHOLE_SET] = PooledCounts(sum(b.asked for b in alerting), sum(b.failed for b in alerting))
    found: dict[tuple[str, int], AlarmEpisode] = {}
    current: dict[str, tuple[str, int]] = {}
    first: dict[str, int] = {}
    decayed = False
    for run, analysis in enumerate(analyses):
        for canary in (*analysis.alarmed, *((WHOLE_SET,) if analysis.decayed else ())):
            since = first.get(canary, 0)
            positions = [at for at in counts[canary] if since <= at <= run]
            change = estimate_change([counts[canary][at] for at in positions], baselines[canary])
            began, earliest, latest = (positions[i] for i in change)
            current[canary] = (canary, run)
            found[canary, run] = AlarmEpisode(canary, began, earliest, latest, run)
        ended = decayed and not analysis.state.decayed
        for canary in (*analysis.recovered, *((WHOLE_SET,) if ended else ())):
            first[canary] = run + 1
            if alarm := current.pop(canary, None):
                found[alarm] = replace(found[alarm], recovered=run)
        decayed = analysis.state.decayed
    return tuple(found.values())


def _counts_by_run(
    analyses: Sequence[RunAnalysis], history: Iterable[CanaryResult]
) -> dict[str, dict[int, PooledCounts]]:
    """Counts by canary and run: of each canary with its repetitions, of the set those of the pooled test."""
    position = {analysis.run: i for i, analysis in enumerate(analyses)}
    found: dict[str, dict[int, PooledCounts]] = {WHOLE_SET: {}}
    for result in history:
        if result.status is not CanaryStatus.ERROR:
            of_canary, run = found.setdefault(result.canary, {}), position[base_run_id(result.run)]
            asked, failed = of_canary.get(run, (0, 0))
            of_canary[run] = PooledCounts(asked + 1, failed + (result.status is CanaryStatus.FAIL))
    before = CusumState().pooled
    for i, analysis in enumerate(analyses):
        if analysis.state.pooled is not before:  # the run counted for the pooled test
            found[WHOLE_SET][i] = analysis.state.pooled[-1]
        before = analysis.state.pooled
    return found


def _summary(
    canary: WatchedCanary,
    results: Sequence[CanaryResult],
    cusum: CanaryCusum | None,
    baselines: tuple[FlakeCounts, ...],
) -> CanarySummary:
    statuses = [r.status for r in results]
    return CanarySummary(
        canary.id,
        len(statuses) - statuses.count(CanaryStatus.ERROR),
        statuses.count(CanaryStatus.FAIL),
        statuses.count(CanaryStatus.ERROR),
        statuses[-1] if statuses else None,
        "".join(status.name[0] for status in statuses[-RECENT:]),
        canary.flakes,
        proportion(canary.flakes.failed, canary.flakes.asked) if canary.flakes.asked else None,
        sequential_tests.failure_chance(canary.flakes, baselines, 0, 0),
        sequential_tests.evidence(cusum.cusums) if cusum else 0.0,
        cusum.since if cusum else None,
        cusum.alarmed if cusum else False,
    )
