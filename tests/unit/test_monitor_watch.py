"""The watch, with a simulated clock and as real processes on one store, some of which are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.errors import BackendError, ConfigError
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, Severity, result_from_event
from casemate.monitor.scheduler import schedule
from casemate.monitor.scheduler.leader_election import LeaderElection, run_concurrently
from casemate.monitor.scheduler.watch import WatchSettings, watch
from casemate.monitor.trends.cusum import AlarmLimits, WatchedCanary, WatchedSet
from casemate.monitor.trends.sequential_tests import FlakeCounts
from tests.unit.monitor_stores import InMemoryEventStore, fresh_url
from tests.unit.test_monitor_outbox import FakeChannel
from tests.waiting import wait_for

url = pytest.fixture(params=["sqlite", "postgres"])(fresh_url)
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
HOUR = 3600
WORKER = """
import asyncio, os, signal, sys, time
from datetime import UTC, datetime
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus
from casemate.monitor.scheduler.watch import WatchSettings, watch
from casemate.monitor.trends.cusum import WatchedCanary, WatchedSet
from casemate.monitor.trends.sequential_tests import FlakeCounts

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
url, log, interval, lease = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
store = SqlEventStore(url)
canaries = tuple(WatchedCanary(f"c{i:02}", flakes=FlakeCounts(50, 0)) for i in range(20))
watched = WatchedSet("clinic", canaries, interval)

async def ask(run, canaries, on_result):
    for canary in canaries:
        with open(log, "a") as file:
            file.write(f"{time.time()} {os.getpid()} {run} {canary}\\n")
        await asyncio.sleep(0.03)
        on_result(CanaryResult(canary, run, datetime.now(UTC), CanaryStatus.PASS))

print("ready", flush=True)
asyncio.run(watch(watched, ask, store, settings=WatchSettings(lease_s=lease, poll_s=0.5)))
store.close()
print("finished", flush=True)
"""


class SimulatedClock:
    """A clock that jumps to the next wake-up when all tasks sleep."""

    def __init__(self, sleepers, end):
        self.now, self.sleepers, self.end, self.waiting = NOON, sleepers, end, []

    def clock(self):
        return self.now

    async def sleep(self, seconds):
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((self.now + seconds, future))
        await future

    async def run(self, task):
        while self.now < self.end and not task.done():
            self.waiting = [(at, f) for at, f in self.waiting if not f.done()]
            if len(self.waiting) < self.sleepers:
                await asyncio.sleep(0.001)
                continue
            at, future = min(self.waiting, key=lambda w: w[0])
            self.now = max(self.now, at)
            future.set_result(None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def watched(n=3):
    return WatchedSet(
        "clinic", tuple(WatchedCanary(f"c{i}", Severity.HIGH, FlakeCounts(100, 0)) for i in range(n)), HOUR
    )


def asker(time_, fails=lambda now: False):
    async def ask(run, canaries, on_result):
        for canary in canaries:
            failed = canary == "c1" and fails(time_.now)
            status = CanaryStatus.FAIL if failed else CanaryStatus.PASS
            on_result(CanaryResult(canary, run, datetime.fromtimestamp(time_.now, UTC), status))

    return ask


def watch_until(hours, store, channels=(), fails=lambda now: False, **more):
    time_ = SimulatedClock(2 + len(channels), NOON + hours * HOUR)

    async def main():
        settings = WatchSettings(
            AlarmLimits(max_repeats=1), pause_s=0, poll_s=600, lease_s=60, clock=time_.clock, sleep=time_.sleep
        )
        task = asyncio.ensure_future(watch(watched(), asker(time_, fails), store, channels, settings, **more))
        await time_.run(task)

    asyncio.run(main())


def test_each_slot_has_one_run_at_a_random_time():
    store, runs, leader_changes = InMemoryEventStore(), [], []
    watch_until(24, store, on_run=runs.append, on_leader_change=leader_changes.append)
    begun = [e for e in store.scan(schedule.SLOT_KIND)]
    slots = [e.body["slot"] for e in begun]
    assert slots == list(range(slots[0], slots[0] + HOUR * len(slots), HOUR))
    assert len(slots) >= 23
    assert (
        [e.body["run"] for e in store.scan(schedule.RUN_KIND)]
        == [r.run for r in runs]
        == [e.body["run"] for e in begun]
    )
    late = [e.at.timestamp() - e.body["slot"] for e in begun[1:]]
    assert all(0 <= x < HOUR for x in late)
    assert len({round(x / 60) for x in late}) > 10
    assert leader_changes == [True]  # a stopped process does not become a standby
    assert store.leases == {}


def test_leader_that_loses_its_lease_becomes_a_standby():
    store, leader_changes = InMemoryEventStore(), []
    leader = LeaderElection(store, "w", 0.15)

    async def work():
        store.leases["w"] = ("another process", time.time() + 60)
        await asyncio.sleep(30)

    async def main():
        with suppress(TimeoutError):
            await asyncio.wait_for(leader.run_whenever_leader(work, leader_changes.append), 1)

    asyncio.run(main())
    assert leader_changes == [True, False]


def test_cancellation_waits_for_the_cleanup_of_concurrent_tasks():
    finished = []

    async def work(seconds):
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(seconds)  # like recording results and releasing the lease
            finished.append(seconds)

    async def main():
        task = asyncio.ensure_future(run_concurrently(work(0.0), work(0.05)))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(main())
    assert finished == [0.0, 0.05]


def test_notifies_of_a_failure_and_its_recovery():
    store, channel = InMemoryEventStore(), FakeChannel()
    watch_until(24, store, [channel], fails=lambda now: NOON + 5 * HOUR < now < NOON + 12 * HOUR)
    assert [n.action for n in channel.received] == ["opened", "recovered"]
    opened, recovered = channel.received
    assert opened.details["canaries"] == ["c1"]
    assert opened.at.timestamp() < NOON + 8 * HOUR
    assert recovered.at.timestamp() > NOON + 12 * HOUR


def test_changes_of_the_set_apply_to_the_next_run():
    def current():  # simulates a replaced document: its canary no longer alerts
        before = watched()
        after = tuple(replace(canary, alerts=canary.id != "c1") for canary in before.canaries)
        return replace(before, canaries=after) if store.scan(schedule.RUN_KIND) else before

    store, channel, runs = InMemoryEventStore(), FakeChannel(), []
    watch_until(12, store, [channel], fails=lambda now: now > NOON + 2 * HOUR, current=current, on_run=runs.append)
    assert any(step.failed == ("c1",) for step in runs)
    assert channel.received == []


def test_continues_after_a_restart():
    store = InMemoryEventStore()
    watch_until(5, store)
    first = len(store.scan(schedule.RUN_KIND))
    watch_until(10, store)
    runs = [e.body["slot"] for e in store.scan(schedule.RUN_KIND)]
    assert len(runs) > first
    assert runs == sorted(set(runs))
    assert schedule.load_gaps(store, "clinic") == []


def test_retries_a_failing_store(monkeypatch):
    store, calls = InMemoryEventStore(), []
    scan = store.scan

    def fails(kind=None, since=None):
        calls.append(kind)
        if len(calls) == 4:
            raise BackendError("unreachable", backend="kept", retryable=True)
        return scan(kind, since)

    monkeypatch.setattr(store, "scan", fails)
    time_ = SimulatedClock(2, NOON + 2 * HOUR)

    async def main():
        settings = WatchSettings(pause_s=0, poll_s=600, lease_s=0.3, clock=time_.clock, sleep=time_.sleep)
        await time_.run(asyncio.ensure_future(watch(watched(), asker(time_), store, (), settings)))

    asyncio.run(main())
    assert len(scan(schedule.RUN_KIND)) >= 1


def test_config_error_ends_the_watch_and_releases_the_lease():
    async def wrong(run, canaries, on_result):
        raise ConfigError("k is too small")

    store = InMemoryEventStore()
    with pytest.raises(ConfigError, match="too small"):
        asyncio.run(watch(watched(), wrong, store, settings=WatchSettings(lease_s=60)))
    assert store.leases == {}


class TestLeaderElection:
    def test_one_of_two_processes_is_the_leader_until_it_releases_the_lease(self):
        store = InMemoryEventStore()
        one, other = LeaderElection(store, "w", 60), LeaderElection(store, "w", 60)

        async def scenario():
            assert await one.acquire() and one.is_leader
            assert not await other.acquire() and not other.is_leader
            await one.release()
            assert not one.is_leader
            assert await other.acquire()

        asyncio.run(scenario())
        assert one.holder != other.holder

    def test_cancels_work_if_the_lease_is_lost(self):
        store = InMemoryEventStore()
        leader, cancelled = LeaderElection(store, "w", 0.15), []

        async def work():
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        async def scenario():
            assert await leader.acquire()
            store.leases["w"] = ("another process", time.monotonic() + 60)
            return await leader.run_while_leader(work())

        begun = time.monotonic()
        assert asyncio.run(scenario()) is False
        assert cancelled == [True]
        assert time.monotonic() - begun < 30

    def test_retries_an_unreachable_store_until_the_lease_expires(self):
        store, asked = InMemoryEventStore(), []
        leader = LeaderElection(store, "w", 0.3)

        def unreachable(*_):
            asked.append(1)
            raise BackendError("unreachable", backend="kept", retryable=True)

        async def scenario():
            assert await leader.acquire()
            store.lease = unreachable
            begun = time.monotonic()
            kept = await leader.run_while_leader(asyncio.sleep(30))
            return kept, time.monotonic() - begun

        kept, seconds = asyncio.run(scenario())
        assert not kept
        assert seconds >= 0.25
        assert len(asked) >= 2

    def test_raises_exceptions_of_the_work(self):
        leader = LeaderElection(InMemoryEventStore(), "w", 60)

        async def fails():
            raise ValueError("no")

        async def scenario():
            await leader.acquire()
            assert await leader.run_while_leader(asyncio.sleep(0)) is True
            with pytest.raises(ValueError, match="no"):
                await leader.run_while_leader(fails(), asyncio.sleep(30))

        asyncio.run(scenario())

    def test_pending_request_does_not_acquire_a_released_lease(self):
        store = InMemoryEventStore()
        leader, lease = LeaderElection(store, "w", 60), store.lease

        def slow(*args):
            time.sleep(0.2)
            return lease(*args)

        store.lease = slow

        async def scenario():
            task = asyncio.ensure_future(leader.acquire())
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await leader.release()

        asyncio.run(scenario())
        assert store.leases == {}


@contextmanager
def workers(url, log, count, every=2, lease=2.0):
    """Starts processes that watch the same set on the same store."""
    command = [sys.executable, "-c", WORKER, url, str(log), str(every), str(lease)]
    processes = [subprocess.Popen(command, text=True, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def asked(log):
    """Questions so far: (time, process, run, canary)."""
    if not log.exists():
        return []
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(float(at), int(pid), run, canary) for at, pid, run, canary in lines]


def question_in_progress(log, finished):
    """The last question, if its run is in progress."""
    found = asked(log)
    if not found or found[-1][2] in finished():
        return None
    of_run = [line for line in found if line[2] == found[-1][2]]
    return found[-1] if 4 <= len(of_run) <= 8 else None


def check_each_run_once(store, log, every=2):
    runs = store.scan(schedule.RUN_KIND)
    slots = [e.body["slot"] for e in runs]
    assert slots == sorted(set(slots))
    missed = {
        s
        for gap in schedule.load_gaps(store, "clinic")
        for s in range(int(gap.first.timestamp()), int(gap.last.timestamp()) + 1, every)
    }
    last = max(slots[-1], *missed, 0)  # the last runs may have been missed
    assert set(range(slots[0], last + 1, every)) == set(slots) | missed
    assert not set(slots) & missed
    results = [result_from_event(e) for e in store.scan("canary")]
    for run in runs:
        assert sorted(r.canary for r in results if r.run == run.body["run"]) == [f"c{i:02}" for i in range(20)]
    assert all(r.status is CanaryStatus.PASS for r in results)
    twice = {pair: n for pair, n in Counter((run, canary) for _, _, run, canary in asked(log)).items() if n > 1}
    assert len({run for run, _ in twice}) <= 1  # the interrupted run: questions without durable results are repeated
    assert set(twice.values()) <= {2, 3}


@pytest.mark.slow
def test_another_process_finishes_the_run_after_a_kill_of_the_leader(url, tmp_path):
    store, log = SqlEventStore(url), tmp_path / "asked"

    def finished():
        return {e.body["run"] for e in store.scan(schedule.RUN_KIND)}

    with workers(url, log, 2) as processes:
        wait_for(lambda: len(finished()) >= 1)
        _, leader, killed_run, _ = wait_for(lambda: question_in_progress(log, finished))
        assert {pid for _, pid, _, _ in asked(log)} == {leader}  # the other was on standby
        os.kill(leader, signal.SIGKILL)
        done = len(asked(log))
        wait_for(lambda: killed_run in finished())
        wait_for(lambda: len([r for r in finished() if r > killed_run]) >= 1)
        other = next(p.pid for p in processes if p.pid != leader)
        assert {pid for _, pid, _, _ in asked(log)[done + 1 :]} == {other}
    by = Counter((run == killed_run, pid) for _, pid, run, _ in asked(log))
    assert by[True, leader] >= 4 and by[True, other] >= 6
    check_each_run_once(store, log)
    store.close()


@pytest.mark.slow
def test_signal_releases_the_lease_and_a_restart_continues(tmp_path):
    url, log = f"sqlite:///{tmp_path}/events.db", tmp_path / "asked"
    store = SqlEventStore(url)
    for _ in range(2):
        with workers(url, log, 1, lease=60.0) as (process,):
            before = len(asked(log))
            wait_for(lambda before=before: len(asked(log)) > before + 5)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert process.stdout.readline() == "finished\n"
        assert store.lease("canaries:clinic", "the test", 0.01)
    with workers(url, log, 1) as (process,):
        before = len(store.scan(schedule.RUN_KIND))
        wait_for(lambda: len(store.scan(schedule.RUN_KIND)) > before + 1)
        process.send_signal(signal.SIGINT)
        process.wait(30)
    check_each_run_once_after_stops(store, log)
    store.close()


def check_each_run_once_after_stops(store, log):
    """Like `check_each_run_once`; each stop may have interrupted one question."""
    results = [result_from_event(e) for e in store.scan("canary")]
    for run in store.scan(schedule.RUN_KIND):
        assert sorted(r.canary for r in results if r.run == run.body["run"]) == [f"c{i:02}" for i in range(20)]
    twice = [n for n in Counter((run, canary) for _, _, run, canary in asked(log)).values() if n > 1]
    assert len(twice) <= 3 and set(twice) <= {2}


@pytest.mark.slow
def test_leader_that_lost_its_lease_does_not_finish_its_run(tmp_path):
    url, log = f"sqlite:///{tmp_path}/events.db", tmp_path / "asked"
    store = SqlEventStore(url)

    def finished():
        return {e.body["run"] for e in store.scan(schedule.RUN_KIND)}

    with workers(url, log, 1, every=3):
        _, _, run, _ = wait_for(lambda: question_in_progress(log, finished))
        with closing(sqlite3.connect(tmp_path / "events.db", timeout=10)) as connection, connection:
            connection.execute("UPDATE casemate_leases SET holder = 'thief'")  # simulates a suspended leader
        assert not store.lease("canaries:clinic", "the test", 60)
        kept = time.monotonic() + 2.5
        while time.monotonic() < kept:
            assert store.lease("canaries:clinic", "thief", 2)
            time.sleep(0.1)
        stopped = len(asked(log))
        assert run not in finished()
        time.sleep(0.5)
        assert len(asked(log)) == stopped
        wait_for(lambda: run in finished())
    check_each_run_once(store, log, every=3)
    store.close()
