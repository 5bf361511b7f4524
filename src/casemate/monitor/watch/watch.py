"""The watch: a process that runs canaries when they are due, and tells people.

Any number of processes may watch the same set on the same store. One leads, the others wait. Whichever is stopped or
killed, no run is lost, and none is made twice.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime

from casemate.monitor.trends.gauges import Step
from casemate.monitor.trends.watched import Watched
from casemate.monitor.watch import schedule
from casemate.monitor.watch.leader import Leader, together
from casemate.monitor.watch.post import Post
from casemate.monitor.watch.rounds import Abandoned, Ask, Rounds
from casemate.monitor.watch.schedule import Timetable
from casemate.monitor.watch.settings import Settings
from casemate.protocols import Channel, EventStore

log = logging.getLogger(__name__)

LONGEST_S = 60.0
"""Longest sleep: a machine's clock may be set meanwhile."""


async def watch(  # noqa: PLR0913  all that a watch needs, in one call
    watched: Watched,
    ask: Ask,
    store: EventStore,
    channels: Sequence[Channel] = (),
    settings: Settings | None = None,
    *,
    current: Callable[[], Watched] | None = None,
    on_run: Callable[[Step], None] | None = None,
    on_lead: Callable[[bool], None] | None = None,
) -> None:
    """Watches a set until it is cancelled, or the process gets SIGTERM; then it ends cleanly and gives the lease back.

    Args:
        watched: The set.
        ask: How its canaries are asked.
        store: Where everything is noted, and where the lease is.
        channels: To whom alerts are told.
        settings: How; None: the defaults.
        current: Looked at before each run: the same canaries, with what is known of them by then, such as a baseline
            that was accepted meanwhile. None: nothing new is learnt.
        on_run: Called with what each run showed.
        on_lead: Called with True when this process begins to lead, with False when it does not any more.

    Raises:
        ConfigError: If canaries cannot be asked as they are configured, or two channels have the same name.
    """
    settings = settings or Settings()
    rounds = Rounds(watched, ask, store, settings.limits, settings.pause_s, settings.log_text)
    leader = Leader(store, f"canaries:{watched.name}", settings.lease_s, settings.holder)
    async with _until_terminated():
        runs = leader.whenever(lambda: _runs(leader, rounds, settings, current, on_run), on_lead)
        await together(runs, Post(store, channels, settings).run())


async def _runs(
    leader: Leader,
    rounds: Rounds,
    settings: Settings,
    current: Callable[[], Watched] | None,
    on_run: Callable[[Step], None] | None,
) -> None:
    """Runs what is due, for ever."""
    now = datetime.fromtimestamp(settings.clock(), UTC)
    name = rounds.watched.name
    timetable = Timetable(rounds.watched, await asyncio.to_thread(schedule.secret, rounds.store, name, now))
    while True:
        rounds = replace(rounds, watched=await asyncio.to_thread(current)) if current else rounds
        try:
            found = await rounds.catch_up(timetable, settings.clock, leader.take)
        except Abandoned:
            log.warning("the lease %s was lost in mid-run; another process goes on", leader.name)
            return
        if on_run:
            for step in found:
                on_run(step)
        due = timetable.due(timetable.following(timetable.latest(settings.clock())))
        await settings.sleep(min(max(due - settings.clock(), 0.0), LONGEST_S))


@asynccontextmanager
async def _until_terminated() -> AsyncIterator[None]:
    """Ends what is inside when the process gets SIGTERM, as if it had been cancelled, and goes on behind it."""
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
