"""Runs what is due: asks, asks failures again, draws conclusions, and ends the run, in this order and for good.

Every step is noted before the next depends on it, under ids that follow from the run. A process that takes over repeats
at most the questions that were being asked when the other died; the store keeps the first result of each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from casemate.errors import ConfigError
from casemate.monitor.alerts.alert import Standing, open_alerts
from casemate.monitor.alerts.alerting import Round, events_after, new_documents
from casemate.monitor.canaries.results import Result, Status, base, to_event, write
from casemate.monitor.trends.gauges import Limits, State, Step, step, suspects
from casemate.monitor.trends.trend import read
from casemate.monitor.trends.watched import Watched
from casemate.monitor.watch import schedule
from casemate.monitor.watch.schedule import Begun, Timetable
from casemate.protocols import EventStore

log = logging.getLogger(__name__)

Ask: TypeAlias = Callable[[str, Sequence[str], Callable[[Result], None]], Awaitable[object]]
"""Asks canaries, by their ids, in a run of this name, and hands each result over as soon as it is there."""
MARGIN = timedelta(hours=1)
"""How much the clocks of processes that share a store may differ."""
MEMORY = timedelta(days=30)
"""How far back passes are looked at, to know which documents are new."""


class Abandoned(Exception):
    """Another process has taken over; this one leaves its run to it."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The runs of one set.

    Attributes:
        watched: The set.
        ask: How canaries are asked. What it raises is taken as an answer that never came; ``ConfigError`` goes through.
        store: Where everything is noted.
        limits: When a trend becomes an alarm.
        pause_s: Pause before failures are asked again.
        log_text: Whether the texts of answers are kept.
    """

    watched: Watched
    ask: Ask
    store: EventStore
    limits: Limits = Limits()
    pause_s: float = 2.0
    log_text: bool = False

    async def catch_up(
        self, timetable: Timetable, clock: Callable[[], float], mine: Callable[[], Awaitable[bool]]
    ) -> list[Step]:
        """Runs all that is due.

        Args:
            timetable: Of the set.
            clock: Seconds since 1970.
            mine: Whether this process may still write; asked before a run is begun, and before it is ended.

        Returns:
            What the runs showed, in order.

        Raises:
            Abandoned: If this process may not write any more.
            BackendError: If the store fails.
        """
        before = await asyncio.to_thread(schedule.past, self.store, self.watched.name, _time(clock))
        latest = timetable.latest(clock())
        found = [await self._work(begun, clock, mine) for begun in before.begun]
        if before.accounted is not None and latest <= before.accounted or any(b.slot >= latest for b in before.begun):
            return found
        if not await mine():
            raise Abandoned
        last = max([s for s in (before.finished, *(b.slot for b in before.begun)) if s is not None], default=None)
        gap = schedule.missed(timetable, before, latest, _time(clock))
        begin = schedule.begin(timetable, latest, last, _time(clock))
        await asyncio.to_thread(write, self.store, [gap, begin] if gap else [begin])
        begun = Begun(latest, timetable.run(latest), tuple(begin.body["canaries"]))
        return [*found, await self._work(begun, clock, mine)]

    async def by_hand(self, clock: Callable[[], float]) -> Step:
        """Runs all canaries now, out of turn; what it shows counts like any other run.

        Raises:
            BackendError: If the store fails.
        """
        run = schedule.by_hand(self.watched, _time(clock))
        everything = tuple(self.watched.known)
        return await self._work(Begun(-1, run, everything), clock, _always)

    async def _work(self, begun: Begun, clock: Callable[[], float], mine: Callable[[], Awaitable[bool]]) -> Step:
        """A run that was begun, to its end."""
        since = _time(clock) if begun.slot < 0 else datetime.fromtimestamp(begun.slot, UTC)
        known = self.watched.known
        ids: Sequence[str] = [i for i in begun.canaries if i in known] or list(known)  # the set may be another by now
        for number in range(self.limits.confirm + 1):
            run = f"{begun.run}~{number}" if number else begun.run
            results = await self._asked(run, ids, since - MARGIN)
            state = await asyncio.to_thread(self._state, _time(clock))
            ids = suspects(state, results, self.watched, self.limits)
            if not ids:
                break
            if number < self.limits.confirm:
                await asyncio.sleep(self.pause_s)
        if not await mine():
            raise Abandoned
        return await asyncio.to_thread(self._conclude, begun, results, _time(clock))

    async def _asked(self, run: str, ids: Sequence[str], since: datetime) -> list[Result]:
        """The results of a run up to this repetition; what has none yet is asked."""
        done = {r.canary for r in await asyncio.to_thread(self._results, run, since) if r.run == run}
        if missing := [i for i in ids if i not in done]:
            reason = "the canary was not asked"
            try:
                await self.ask(run, missing, self._note)
            except ConfigError:
                raise
            except Exception as error:
                reason = f"the run broke off ({type(error).__name__})"
                log.exception("the canary run %s broke off", run)
            await asyncio.to_thread(write, self.store, [])
            found = {r.canary for r in await asyncio.to_thread(self._results, run, since) if r.run == run}
            for canary in (i for i in missing if i not in found):
                self._note(Result(canary, run, datetime.now(UTC), Status.ERROR, error=reason))
        return await asyncio.to_thread(self._results, run, since)

    def _results(self, run: str, since: datetime) -> list[Result]:
        """The results of a run and of its repetitions, up to this one."""
        return [r for r in read(self.store, self.watched.name, since) if base(r.run) == base(run) and r.run <= run]

    def _note(self, result: Result) -> None:
        self.store.append(to_event(result, self.log_text))

    def _state(self, now: datetime) -> State:
        """What the run that ended last left known."""
        return schedule.past(self.store, self.watched.name, now).state

    def _conclude(self, begun: Begun, results: Sequence[Result], now: datetime) -> Step:
        """Alerts, and the end of the run: either both are noted, or whoever takes over notes them anew."""
        state = self._state(now)  # a run by hand may have ended while this one asked
        found = step(state, results, self.watched, self.limits)
        documents = {}
        if found.alarmed:
            history = [r for r in read(self.store, self.watched.name, now - MEMORY) if base(r.run) != begun.run]
            documents = new_documents(history, results, self.watched)
        standing: list[Standing] = open_alerts(self.store, self.watched.name)
        events = events_after(standing, Round(state, found, results, documents), self.watched, self.limits)
        slot = None if begun.slot < 0 else begun.slot
        write(self.store, [*events, schedule.finish(self.watched, found, slot, now)])
        return found


def _time(clock: Callable[[], float]) -> datetime:
    return datetime.fromtimestamp(clock(), UTC)


async def _always() -> bool:
    return True
