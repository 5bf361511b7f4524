"""The long-running processes: canary runs when they are due, and delivery of alerts.

Any number of processes may watch the same set on the same store. One is elected leader, the others stand by. If any of
them stops or crashes, no run is lost and none is executed twice. Alert delivery elects one leader per channel, and
needs no canaries: every gateway runs an ``AlertDispatcher`` too.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

from casemate.errors import ConfigError
from casemate.monitor.alerts.alerting_store import MissedAlertScanner
from casemate.monitor.alerts.delivery_queue import PER_HOUR
from casemate.monitor.alerts.outbox import Outbox
from casemate.monitor.scheduler import schedule
from casemate.monitor.scheduler.leader_election import LeaderElection, new_holder_name, run_concurrently
from casemate.monitor.scheduler.run_executor import Ask, LostLease, RunExecutor
from casemate.monitor.scheduler.schedule import Schedule
from casemate.monitor.trends.cusum import AlarmLimits, RunAnalysis, WatchedSet
from casemate.protocols import Channel, EventStore
from casemate.runtime.events import digest

log = logging.getLogger(__name__)

MAX_SLEEP_S = 60.0
"""Longest sleep, since the machine's clock may be changed meanwhile."""


@dataclass(frozen=True)
class WatchSettings:
    """Settings of ``watch`` and ``AlertDispatcher``; times in seconds.

    Attributes:
        per_hour: Notifications per channel and hour, at least 1.
        lease_s: Time after a crash until another process takes over.
        pause_s: Pause before failures are repeated within a run.
        poll_s: Interval at which new alerts are looked for; other processes may open alerts.
        clock: Time since 1970, for schedule and notifications. Leases use the clock of the store.
    """

    limits: AlarmLimits = AlarmLimits()
    per_hour: int = PER_HOUR
    lease_s: float = 30.0
    pause_s: float = 2.0
    poll_s: float = 5.0
    log_text: bool = False
    holder: str = field(default_factory=new_holder_name)
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


async def watch(  # noqa: PLR0913  all that a watch needs, in one call
    watched: WatchedSet,
    ask: Ask,
    store: EventStore,
    channels: Sequence[Channel] = (),
    settings: WatchSettings | None = None,
    *,
    current: Callable[[], WatchedSet] | None = None,
    on_run: Callable[[RunAnalysis], None] | None = None,
    on_leader_change: Callable[[bool], None] | None = None,
) -> None:
    """Executes due runs and delivers alerts until cancelled or stopped by SIGTERM; then releases the leases.

    ``current`` returns the same set with the baseline in force before each run; None: the baseline never changes.
    ``on_run`` gets the analysis of each run. For ``ask`` and ``on_leader_change`` see ``CanaryRunner.ask`` and
    ``LeaderElection.run_whenever_leader``.

    Raises:
        ConfigError: If canaries cannot be asked as configured, or two channels have the same name.
    """
    settings = settings or WatchSettings()
    executor = RunExecutor(watched, ask, store, settings.limits, settings.pause_s, settings.log_text)
    election = LeaderElection(store, f"canaries:{watched.name}", settings.lease_s, settings.holder)
    async with _until_sigterm():
        runs = election.run_whenever_leader(
            lambda: _run_forever(election, executor, settings, current, on_run), on_leader_change
        )
        await run_concurrently(runs, AlertDispatcher(store, channels, settings).run())


async def _run_forever(
    election: LeaderElection,
    executor: RunExecutor,
    settings: WatchSettings,
    current: Callable[[], WatchedSet] | None,
    on_run: Callable[[RunAnalysis], None] | None,
) -> None:
    """Executes runs when they are due."""
    now = datetime.fromtimestamp(settings.clock(), UTC)
    name = executor.watched.name
    secret = await asyncio.to_thread(schedule.schedule_secret, executor.store, name, now)
    timetable = Schedule(executor.watched, secret)
    while True:
        executor = replace(executor, watched=await asyncio.to_thread(current)) if current else executor
        try:
            analyses = await executor.run_due(timetable, settings.clock, election.acquire)
        except LostLease:
            log.warning("the lease %s was lost during a run; another process continues it", election.name)
            return
        if on_run:
            for analysis in analyses:
                on_run(analysis)
        due = timetable.start_time(timetable.next_slot(timetable.latest_slot(settings.clock())))
        await settings.sleep(min(max(due - settings.clock(), 0.0), MAX_SLEEP_S))


@dataclass(frozen=True)
class AlertDispatcher:
    """Delivers alerts: opens missed ones, and sends through every channel whose lease it holds.

    Raises:
        ConfigError: If two channels have the same name.
    """

    store: EventStore
    channels: Sequence[Channel] = ()
    settings: WatchSettings = field(default_factory=WatchSettings)

    def __post_init__(self) -> None:
        names = [channel.name for channel in self.channels]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"channels with the same name: {', '.join(sorted(names))}; names must be unique, so set `name:` of "
                "each channel in monitor.channels"
            )

    async def run(self) -> None:
        """Delivers alerts until cancelled."""
        sending = [
            (election := self._election(c.name)).run_whenever_leader(partial(self._send_forever, election, c))
            for c in self.channels
        ]
        await run_concurrently(self._election().run_whenever_leader(self._open_missed_forever), *sending)

    async def dispatch_once(self) -> bool:
        """Delivers what is due now, through channels whose lease is free; returns whether every lease was.

        Raises:
            BackendError: If the store fails.
        """
        await asyncio.to_thread(MissedAlertScanner(self.store).open_missed, self._now())
        return all(await asyncio.gather(*(self._send_once(channel) for channel in self.channels)))

    async def send_test(self) -> dict[str, str]:
        """Sends a test notification through every channel, without a lease; returns why each failed, by name, or "".

        Raises:
            BackendError: If the store cannot be written.
        """
        boxes = [Outbox(self.store, channel, self.settings.per_hour) for channel in self.channels]
        reasons = await asyncio.gather(*(box.send_test(self._now()) for box in boxes))
        names = [channel.name for channel in self.channels]
        return {name: why.removeprefix(f"channel {name!r}: ") for name, why in zip(names, reasons, strict=True)}

    async def _open_missed_forever(self) -> None:
        scanner = MissedAlertScanner(self.store)
        while True:
            await asyncio.to_thread(scanner.open_missed, self._now())
            await self.settings.sleep(self.settings.poll_s)

    async def _send_forever(self, election: LeaderElection, channel: Channel) -> None:
        outbox = Outbox(self.store, channel, self.settings.per_hour)
        while True:
            await outbox.deliver(self._now, lambda: election.is_leader)
            await self.settings.sleep(self.settings.poll_s)

    async def _send_once(self, channel: Channel) -> bool:
        election = self._election(channel.name)
        if not await election.acquire():
            return False
        try:
            outbox = Outbox(self.store, channel, self.settings.per_hour)
            return await election.run_while_leader(outbox.deliver(self._now, lambda: election.is_leader))
        finally:
            await election.release()

    def _election(self, channel: str | None = None) -> LeaderElection:
        """Election for one channel, whose name may be long; None: for opening missed alerts."""
        suffix = "" if channel is None else f":{digest(channel)}"
        return LeaderElection(self.store, f"alerts{suffix}", self.settings.lease_s, self.settings.holder)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self.settings.clock(), UTC)


@asynccontextmanager
async def _until_sigterm() -> AsyncIterator[None]:
    """Cancels the body on SIGTERM, and continues after it."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    terminated = False

    def end() -> None:
        nonlocal terminated
        terminated = True
        assert task is not None
        task.cancel()

    try:
        loop.add_signal_handler(signal.SIGTERM, end)
    except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or not Unix
        yield
        return
    try:
        yield
    except asyncio.CancelledError:
        if not terminated or task is None:
            raise
        task.uncancel()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
