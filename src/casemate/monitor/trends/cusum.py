"""CUSUM state of a canary set: one run at a time, which canaries alarm and which recover.

``analyze_run`` is a fold: it maps the state before a run and the results of the run to the state after it. It reads no
clock and no store, so repeating it in another process after a crash gives the same result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from casemate.errors import DataError
from casemate.monitor.canaries.results import RESULT_KIND, CanaryResult, CanaryStatus, Severity, base_run_id
from casemate.monitor.trends import sequential_tests
from casemate.monitor.trends.pooled_evidence import LONGEST_WINDOW, PooledCounts, pooled_evidence
from casemate.monitor.trends.sequential_tests import ZERO_CUSUMS, Cusums, FlakeCounts
from casemate.runtime.stored import read_stored

WEIGHTS = {Severity.LOW: 0.5, Severity.MEDIUM: 1.0, Severity.HIGH: 2.0, Severity.CRITICAL: 4.0}
"""Relative shares of the false-alarm budget: a severe canary needs less evidence, at the expense of the others."""
RECENT = 10
"""Length of the recent history of each canary."""
MIN_POOLED = 3
"""Canaries from which on the pooled test says more than the tests of single canaries."""
REPEAT_FAILURE_RATE = 0.1
"""Failure rate of immediate repetitions after a chance failure, whose cause may last some seconds. It is used where it
exceeds the flake rate and the measured ``FlakeCounts.repeat_bound``.
"""
ERRORS_IN_A_ROW = 3
"""Consecutive runs without an answer after which the target is unreachable, or a canary blind."""
MIN_PASSES = 3
"""Minimum number of consecutive passes after which an alarmed canary is recovered."""
MAX_EVENT_ID = 200
"""Longest event id that the event store accepts."""
_RUN_SUFFIX = "2026-01-01T00:00:00Z.000000~9"


@dataclass(frozen=True, slots=True)
class WatchedCanary:
    """What the sequential tests need of one canary.

    Attributes:
        flakes: Baseline counts; without a baseline the canary is assumed to fail often.
        interval_s: Seconds between two queries; 0: the interval of the set.
        alerts: Whether failures may alert; otherwise they are only shown.
        changed: Sources of its baseline that were changed or removed since.
        outdated: Whether the operator changed sources that it depends on; then it does not alert.
    """

    id: str
    severity: Severity = Severity.HIGH
    flakes: FlakeCounts = FlakeCounts()
    interval_s: float = 0.0
    alerts: bool = True
    documents: frozenset[str] = frozenset()
    changed: tuple[str, ...] = ()
    outdated: bool = False


@dataclass(frozen=True, slots=True)
class WatchedSet:
    """A monitored set of at least one canary, with unique ids.

    Attributes:
        name: Name of the set; part of each run id and alert.
        interval_s: Whole seconds between two runs, at least 1.
        external: Whether the target is another system, of which only the answers are known.

    Raises:
        DataError: If a name cannot be part of an event id.
    """

    name: str
    canaries: tuple[WatchedCanary, ...]
    interval_s: float = 3600.0
    external: bool = False

    def __post_init__(self) -> None:
        ids = [canary.id for canary in self.canaries]
        if not self.name or not self.name.isprintable() or "@" in self.name or "~" in self.name:
            raise DataError(f"invalid name of a canary set {self.name!r}: use printable characters except '@' and '~'")
        if invalid := [i for i in ids if not i or not i.isprintable()]:
            raise DataError(f"invalid id {invalid[0]!r} in the canary set {self.name!r}: use printable characters")
        longest = max(ids, key=len)
        limit = MAX_EVENT_ID - len(f"{RESULT_KIND}:{self.name}@{_RUN_SUFFIX}:")
        if len(longest) > limit:
            raise DataError(
                f"the canary id {longest!r} has {len(longest)} characters; with this name of the set, at most {limit} "
                "are allowed"
            )

    @property
    def by_id(self) -> dict[str, WatchedCanary]:
        """The canaries by id."""
        return {canary.id: canary for canary in self.canaries}


@dataclass(frozen=True, slots=True)
class AlarmLimits:
    """When failures become an alarm.

    Attributes:
        runs_per_false_alert: Runs per allowed false alarm, above 0. Half of the budget goes to the tests of single
            canaries, a quarter each to that of many failures in one run and to that of all canaries together.
        max_repeats: How often a failed canary is asked again within the run, 0 to 9.
        page_rules: Whether the rules of the wiki page "Canary Queries" alert too.
    """

    runs_per_false_alert: float = 1000.0
    max_repeats: int = 5
    page_rules: bool = False


@dataclass(frozen=True, slots=True)
class CanaryCusum:
    """CUSUM state of one canary.

    Attributes:
        flakes: The baseline counts in use; another baseline resets the state.
        cusums: Its CUSUMs; zero while it is alarmed.
        recent: Its last runs with a verdict, oldest first: ``P`` passed, ``F`` failed.
        errors: Consecutive runs without a verdict.
        since: Time of the first failure that contributes to the evidence; None: there is none.
        asked: Runs with a verdict since then, of which ``failed`` failed.
    """

    flakes: FlakeCounts = FlakeCounts()
    cusums: Cusums = ZERO_CUSUMS
    recent: str = ""
    errors: int = 0
    since: datetime | None = None
    asked: int = 0
    failed: int = 0
    alarmed: bool = False

    @property
    def passes_in_a_row(self) -> int:
        """Consecutive passes at the end."""
        return len(self.recent) - len(self.recent.rstrip("P"))

    @property
    def failing(self) -> bool:
        """Whether it failed in its last run, which before the first one is the last of the baseline."""
        return self.recent.endswith("F") if self.recent else self.flakes.ended_failing

    @property
    def settled(self) -> bool:
        """Whether another pass would change nothing."""
        return self.recent == RECENT * "P" and not (self.errors or self.alarmed or max(self.cusums) > 1)

    @property
    def persistent(self) -> bool:
        """Page rule: at least 8 of the last 10 runs failed."""
        return self.recent.count("F") >= 8


@dataclass(frozen=True, slots=True)
class CusumState:
    """State of a set after a run.

    Attributes:
        unanswered_runs: Consecutive runs in which at least half of the canaries got no answer.
        pooled: Counts of the last runs over all canaries, oldest first.
        decayed: Whether the pooled test has alarmed and not recovered.
    """

    canaries: Mapping[str, CanaryCusum] = field(default_factory=dict)
    unanswered_runs: int = 0
    unanswered_since: datetime | None = None
    pooled: tuple[PooledCounts, ...] = ()
    decayed: bool = False

    def to_json(self) -> dict[str, Any]:
        """The state as JSON, for an event."""
        body: dict[str, Any] = _STATE.dump_python(self, mode="json")
        return body

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> CusumState:
        """Inverse of ``to_json``."""
        return read_stored(_STATE, body, "state of the canaries")


_STATE = TypeAdapter(CusumState)


class AlarmEvidence(NamedTuple):
    """Evidence of an alarmed canary, and the threshold that it reached."""

    value: float
    threshold: float


@dataclass(frozen=True, slots=True)
class RunAnalysis:
    """What one run has shown.

    Attributes:
        many_failed: Whether too many canaries failed at once to be chance.
        p_value: Probability that chance alone makes as many canaries fail.
        blind: Canaries without an answer for several runs although the target is reachable.
        evidence: Evidence of each canary that alarmed by its own failures.
    """

    run: str
    at: datetime
    state: CusumState
    alarmed: tuple[str, ...]
    recovered: tuple[str, ...]
    failed: tuple[str, ...]
    judged: int
    errors: int
    many_failed: bool
    p_value: float
    unreachable: bool
    blind: tuple[str, ...]
    evidence: Mapping[str, AlarmEvidence] = field(default_factory=dict)
    decayed: bool = False


def analyze_run(
    state: CusumState, results: Sequence[CanaryResult], watched: WatchedSet, limits: AlarmLimits
) -> RunAnalysis:
    """Updates the state by one run: results with its repetitions, in order of asking; at least one.

    Results of canaries that are not in the set are ignored.
    """
    by_id = watched.by_id
    verdicts = _verdicts(results, by_id)
    canaries = {i: _with_baseline(state.canaries.get(i), by_id[i].flakes) for i in by_id}
    before = {i: c.alarmed for i, c in canaries.items()}
    unanswered = _unanswered_runs(state, verdicts, len(by_id))
    baselines = tuple(c.flakes for c in watched.canaries)
    lasting = {i for i, c in canaries.items() if c.failing}
    for canary, (at, passed) in verdicts.items():
        if passed or not unanswered:  # an unreachable target is not an error of the canary
            canaries[canary] = _update_canary(canaries[canary], at, passed, baselines)
    judged = {i: passed for i, (_, passed) in verdicts.items() if passed}
    p_value, together = _test_failure_count(judged, {i for i in by_id if before[i]} | lasting, by_id, limits)
    evidence = _test_single_canaries(judged, canaries, by_id, limits)
    alarmed = evidence.keys() | together
    canaries |= {i: replace(canaries[i], alarmed=True, cusums=ZERO_CUSUMS) for i in alarmed}
    at = max(r.at for r in results)
    uncounted = {i for i in by_id if before[i] or i in alarmed} | lasting
    pooled, decayed = _test_pooled(state, judged, uncounted, by_id, limits)
    return RunAnalysis(
        base_run_id(results[0].run),
        at,
        CusumState(canaries, unanswered, (state.unanswered_since or at) if unanswered else None, pooled, decayed),
        tuple(i for i in by_id if i in alarmed),
        tuple(i for i in verdicts if before[i] and not canaries[i].alarmed),
        tuple(i for i, passed in judged.items() if not passed[0]),
        len(judged),
        len(verdicts) - len(judged),
        bool(together),
        p_value,
        unanswered >= ERRORS_IN_A_ROW,
        tuple(i for i, c in canaries.items() if c.errors >= ERRORS_IN_A_ROW and unanswered < ERRORS_IN_A_ROW),
        evidence,
        decayed and not state.decayed,
    )


def canaries_to_repeat(
    state: CusumState, results: Sequence[CanaryResult], watched: WatchedSet, limits: AlarmLimits
) -> tuple[str, ...]:
    """Canaries to ask again within the run: they failed, and neither were alarmed before nor are alarmed now.

    If many failed at once they are repeated once, since the cause may be over in a moment.
    """
    if not results:
        return ()
    found = analyze_run(state, results, watched, limits)
    by_id, asked = watched.by_id, Counter(r.canary for r in results)
    before = {i for i, c in state.canaries.items() if c.alarmed}
    decided = {i for i, c in found.state.canaries.items() if c.alarmed and not (found.many_failed and asked[i] == 1)}
    return tuple(i for i in found.failed if by_id[i].alerts and i not in before | decided)


def _verdicts(results: Sequence[CanaryResult], ids: Collection[str]) -> dict[str, tuple[datetime, list[bool]]]:
    """For each canary asked: time of the first query, and which answers passed; errors are left out."""
    found: dict[str, tuple[datetime, list[bool]]] = {}
    for result in results:
        if result.canary in ids:
            passed = found.setdefault(result.canary, (result.at, []))[1]
            if result.status is not CanaryStatus.ERROR:
                passed.append(result.status is CanaryStatus.PASS)
    return found


def _with_baseline(cusum: CanaryCusum | None, flakes: FlakeCounts) -> CanaryCusum:
    """The state if it uses this baseline, else a new one."""
    return cusum if cusum and cusum.flakes == flakes else CanaryCusum(flakes)


def _update_canary(
    cusum: CanaryCusum,
    at: datetime,
    passed: Sequence[bool],
    baselines: tuple[FlakeCounts, ...],
) -> CanaryCusum:
    """State of a canary after one more run; the answers after the first are repetitions."""
    if not passed:
        return replace(cusum, errors=cusum.errors + 1)
    if cusum.settled and len(passed) == 1 and passed[0]:
        return cusum  # the usual case: keeps long histories fast
    failed = not passed[0]
    cusums = ZERO_CUSUMS if cusum.alarmed else _updated_cusums(cusum, passed, baselines)
    since, asked, count = cusum.since, cusum.asked + 1, cusum.failed + failed
    if not cusum.alarmed and sequential_tests.evidence(cusums) <= 1:
        since, asked, count = None, 0, 0
    elif since is None:
        since, asked, count = at, 1, int(failed)
    recent = (cusum.recent + ("F" if failed else "P"))[-RECENT:]
    after = CanaryCusum(cusum.flakes, cusums, recent, 0, since, asked, count, cusum.alarmed)
    return CanaryCusum(cusum.flakes, recent=recent) if after.alarmed and _has_recovered(after) else after


def _updated_cusums(cusum: CanaryCusum, passed: Sequence[bool], baselines: tuple[FlakeCounts, ...]) -> Cusums:
    """CUSUMs after one more run. After a failed answer, the rate at which failures last applies."""
    flake_rate = sequential_tests.flake_rate_bound(cusum.flakes)
    after = sequential_tests.answers_after_failures(baselines)
    chance = sequential_tests.failure_chance(cusum.flakes, baselines, cusum.failed, cusum.asked - cusum.failed)
    rate = max(chance, after.next_bound) if cusum.failing else chance
    first = sequential_tests.likelihood_ratios(rate, int(not passed[0]), int(passed[0]), flake_rate)
    if len(passed) == 1:
        return sequential_tests.update_cusums(cusum.cusums, first)
    failed = list(passed[1:]).count(False)
    counts = (failed, len(passed) - 1 - failed)
    assumed = max(REPEAT_FAILURE_RATE, sequential_tests.MIN_FLAKE_RATE)
    if after.repeats_failed or flake_rate > assumed:
        repeats = sequential_tests.likelihood_ratios(max(flake_rate, after.repeat_bound, assumed), *counts)
    else:
        repeats = sequential_tests.repeat_ratios(assumed, after.repeats, *counts)
    return sequential_tests.update_cusums(cusum.cusums, first, repeats)


def _has_recovered(cusum: CanaryCusum) -> bool:
    """Whether an alarmed canary has passed often enough in a row."""
    passes = cusum.passes_in_a_row
    return passes >= sequential_tests.passes_to_recover(
        cusum.failed, max(cusum.asked - passes, cusum.failed), MIN_PASSES, RECENT
    )


def _test_failure_count(
    judged: Mapping[str, Sequence[bool]],
    uncounted: Collection[str],
    by_id: Mapping[str, WatchedCanary],
    limits: AlarmLimits,
) -> tuple[float, frozenset[str]]:
    """P-value of the number of failures in this run; and the failed canaries if chance is rejected.

    A failure counts if at least half of its repetitions failed too. Canaries that are already alarmed, or that failed
    in their last run, are left out: the same failure may last.
    """
    counted = [i for i in judged if by_id[i].alerts and i not in uncounted]
    failed = [i for i in counted if not judged[i][0] and 2 * list(judged[i][1:]).count(False) >= len(judged[i]) - 1]
    if not failed:
        return 1.0, frozenset()
    flake_rates = tuple(sequential_tests.flake_rate_mean(by_id[i].flakes) for i in counted)
    p_value = float(sequential_tests.failures_tail(flake_rates)[len(failed)])
    return p_value, frozenset(failed if p_value * 4 * limits.runs_per_false_alert <= 1 else ())


def _test_pooled(
    state: CusumState,
    judged: Mapping[str, Sequence[bool]],
    uncounted: Collection[str],
    by_id: Mapping[str, WatchedCanary],
    limits: AlarmLimits,
) -> tuple[tuple[PooledCounts, ...], bool]:
    """Counts of the last runs, and whether the pooled test is alarmed. A canary counts once, by its first answer.

    Canaries that alarmed by themselves are left out, so that one cause has one alarm. So are canaries that failed in
    their last run: a failure that lasts counts once. The alarm ends when the evidence is below 1.
    """
    counted = [i for i in judged if by_id[i].alerts and by_id[i].flakes.fresh[0] and i not in uncounted]
    if len(counted) < MIN_POOLED:
        return state.pooled, state.decayed
    failed = sum(not judged[i][0] for i in counted)
    runs = (*state.pooled, PooledCounts(len(counted), failed))[-LONGEST_WINDOW:]
    if not failed and not state.decayed:
        return runs, False  # a run without failures never raises the evidence
    flakes = [by_id[i].flakes.fresh for i in counted]
    found = pooled_evidence(runs, PooledCounts(sum(asked for asked, _ in flakes), sum(failed for _, failed in flakes)))
    return runs, found >= (1 if state.decayed else 4 * limits.runs_per_false_alert)


def _test_single_canaries(
    judged: Mapping[str, Sequence[bool]],
    canaries: Mapping[str, CanaryCusum],
    by_id: Mapping[str, WatchedCanary],
    limits: AlarmLimits,
) -> dict[str, AlarmEvidence]:
    """Canaries that failed in this run and whose own evidence suffices, by e-BH."""
    failing = [i for i, passed in judged.items() if by_id[i].alerts and not all(passed)]
    total = sum(WEIGHTS[c.severity] for c in by_id.values() if c.alerts)
    found = {i: sequential_tests.evidence(canaries[i].cusums) for i in failing}
    weights = {i: WEIGHTS[by_id[i].severity] / total for i in failing}
    budget = 2 * limits.runs_per_false_alert
    rejected = sequential_tests.ebh_rejections({i: found[i] * weights[i] for i in failing}, budget)
    return {i: AlarmEvidence(found[i], budget / len(rejected) / weights[i]) for i in failing if i in rejected}


def _unanswered_runs(state: CusumState, verdicts: Mapping[str, tuple[datetime, Sequence[bool]]], canaries: int) -> int:
    """Consecutive runs with hardly any answer. A run without any answer counts as all that are needed for an alarm."""
    silent = sum(not passed for _, passed in verdicts.values())
    if not verdicts or 2 * silent < len(verdicts):
        return 0
    none_answered = silent == len(verdicts) and len(verdicts) >= min(3, canaries)
    return max(state.unanswered_runs + 1, ERRORS_IN_A_ROW if none_answered else 0)
