"""Executes runs: asks canaries, repeats failures, analyzes the results, and records alerts and the end of the run.

Every step is recorded before the next depends on it, under ids derived from the run. A process that takes over repeats
at most the questions that were in progress; the store keeps the first result of each. All raise ``BackendError`` if the
store fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from casemate.errors import ConfigError
from casemate.monitor.alerts.alert import open_alerts
from casemate.monitor.alerts.rules import RunContext, alert_events, last_passes, new_documents, new_sources
from casemate.monitor.canaries.results import (
    CanaryResult,
    CanaryStatus,
    base_run_id,
    result_to_event,
)
from casemate.monitor.scheduler import schedule
from casemate.monitor.scheduler.schedule import Schedule, StartedRun
from casemate.monitor.trends.cusum import (
    AlarmLimits,
    CusumState,
    RunAnalysis,
    WatchedSet,
    analyze_run,
    canaries_to_repeat,
)
from casemate.monitor.trends.trend import read_results
from casemate.protocols import EventStore
from casemate.runtime.events import append_durably

log = logging.getLogger(__name__)

Ask: TypeAlias = Callable[[str, Mapping[str, Collection[str]], Callable[[CanaryResult], None]], Awaitable[object]]
"""Asks canaries: run id, their ids with the documents of their baselines, and a callback for each result. See
``CanaryRunner.ask``."""
CLOCK_SKEW = timedelta(hours=1)
"""Maximum difference between the clocks of processes that share a store."""
PASS_MEMORY = timedelta(days=30)
"""Age up to which the documents of passed answers count as known."""


class LostLease(Exception):
    """Another process is the leader now and continues the run."""


@dataclass(frozen=True, slots=True)
class RunExecutor:
    """Executes the runs of one set.

    Attributes:
        ask: Asks canaries. Its exceptions count as missing answers; ``ConfigError`` is raised.
        pause_s: Pause before failures are repeated, in seconds.
    """

    watched: WatchedSet
    ask: Ask
    store: EventStore
    limits: AlarmLimits = AlarmLimits()
    pause_s: float = 2.0
    log_text: bool = False
    on_result: Callable[[CanaryResult], None] = lambda result: None

    async def run_due(
        self, timetable: Schedule, clock: Callable[[], float], may_write: Callable[[], Awaitable[bool]]
    ) -> list[RunAnalysis]:
        """Finishes started runs, and executes the latest due one; returns the analyses in order.

        ``clock`` gives seconds since 1970. ``may_write`` tells whether this process is still the leader, before a run
        is started and before it ends.

        Raises:
            LostLease: If this process is no longer the leader.
        """
        history = await asyncio.to_thread(schedule.load_history, self.store, self.watched.name, _now(clock))
        latest = timetable.latest_slot(clock())
        found = [await self._execute(started, clock, may_write) for started in history.started]
        is_done = history.accounted is not None and latest <= history.accounted
        if is_done or any(run.slot is not None and run.slot >= latest for run in history.started):
            return found
        if not await may_write():
            raise LostLease
        gap = schedule.gap_event(timetable, history, latest, _now(clock))
        start = schedule.run_started_event(timetable, latest, history.last_slot, _now(clock))
        await asyncio.to_thread(append_durably, self.store, [gap, start] if gap else [start], "the monitor's events")
        started = StartedRun(latest, timetable.run_id(latest), tuple(start.body["canaries"]))
        return [*found, await self._execute(started, clock, may_write)]

    async def run_now(self, clock: Callable[[], float]) -> RunAnalysis:
        """Executes a run of all canaries outside the schedule; its results count like those of any run."""
        run = schedule.manual_run_id(self.watched, _now(clock))
        return await self._execute(StartedRun(None, run, tuple(self.watched.by_id)), clock, _always)

    async def _execute(
        self, started: StartedRun, clock: Callable[[], float], may_write: Callable[[], Awaitable[bool]]
    ) -> RunAnalysis:
        since = _now(clock) if started.slot is None else datetime.fromtimestamp(started.slot, UTC)
        by_id = self.watched.by_id
        ids: Sequence[str] = [i for i in started.canaries if i in by_id] or list(by_id)  # the set may have changed
        for number in range(self.limits.max_repeats + 1):
            run = f"{started.run}~{number}" if number else started.run
            results = await self._ask_missing(run, ids, since - CLOCK_SKEW)
            state = await asyncio.to_thread(self._last_state, _now(clock))
            ids = canaries_to_repeat(state, results, self.watched, self.limits)
            if not ids:
                break
            if number < self.limits.max_repeats:
                await asyncio.sleep(self.pause_s)
        if not await may_write():
            raise LostLease
        return await asyncio.to_thread(self._conclude, started, results, _now(clock))

    async def _ask_missing(self, run: str, ids: Sequence[str], since: datetime) -> list[CanaryResult]:
        """Asks the canaries that have no result in this repetition; returns all results of the run so far."""
        results = await asyncio.to_thread(self._results, run, since)
        done = {r.canary for r in results if r.run == run}
        missing = {i: self.watched.by_id[i].documents for i in ids if i not in done}
        if not missing:
            return results
        reason = "the canary was not asked"
        try:
            await self.ask(run, missing, self._record)
        except ConfigError:
            raise
        except Exception as error:
            reason = f"the run was interrupted ({type(error).__name__})"
            log.exception("the canary run %s was interrupted", run)
        await asyncio.to_thread(append_durably, self.store, [], "the monitor's events")
        done = {r.canary for r in await asyncio.to_thread(self._results, run, since) if r.run == run}
        for canary in (i for i in missing if i not in done):
            self._record(CanaryResult(canary, run, datetime.now(UTC), CanaryStatus.ERROR, error=reason))
        return await asyncio.to_thread(self._results, run, since)

    def _results(self, run: str, since: datetime) -> list[CanaryResult]:
        """Results of a run and of its repetitions up to this one."""
        found = read_results(self.store, self.watched.name, since)
        return [r for r in found if base_run_id(r.run) == base_run_id(run) and r.run <= run]

    def _record(self, result: CanaryResult) -> None:
        self.store.append(result_to_event(result, self.log_text))
        self.on_result(result)

    def _last_state(self, now: datetime) -> CusumState:
        return schedule.load_history(self.store, self.watched.name, now).state

    def _conclude(self, started: StartedRun, results: Sequence[CanaryResult], now: datetime) -> RunAnalysis:
        """Records the alerts and the end of the run; a process that takes over records the same events again."""
        state = self._last_state(now)  # read again: a manual run may have finished meanwhile
        analysis = analyze_run(state, results, self.watched, self.limits)
        documents, sources, passed = {}, {}, {}
        if analysis.alarmed:
            history = read_results(self.store, self.watched.name, now - PASS_MEMORY)
            earlier = [r for r in history if base_run_id(r.run) != started.run]
            documents = new_documents(earlier, results, self.watched)
            sources = new_sources(earlier, results, self.watched)
            passed = last_passes(earlier, results)
        states = open_alerts(self.store, self.watched.name)
        run = RunContext(state, analysis, results, documents, sources, passed)
        events = alert_events(states, run, self.watched, self.limits)
        end = schedule.run_finished_event(self.watched, analysis, started.slot, now)
        append_durably(self.store, [*events, end], "the monitor's events")
        return analysis


def _now(clock: Callable[[], float]) -> datetime:
    return datetime.fromtimestamp(clock(), UTC)


async def _always() -> bool:
    return True
