"""The watch: alone with a made-up clock, and as real processes on one store, of which some are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from casemate.backends.sql_events import SqlEvents
from casemate.errors import BackendError, ConfigError
from casemate.monitor.canaries.results import Result, Severity, Status, from_event
from casemate.monitor.trends.gauges import Limits
from casemate.monitor.trends.watched import Clean, Known, Watched
from casemate.monitor.watch import schedule
from casemate.monitor.watch.leader import Leader, together
from casemate.monitor.watch.settings import Settings
from casemate.monitor.watch.watch import watch
from tests.unit.monitor_stores import Kept, fresh_url
from tests.unit.test_monitor_outbox import Ear

url = pytest.fixture(params=["sqlite", "postgres"])(fresh_url)
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
HOUR = 3600
WORKER = """
import asyncio, os, signal, sys, time
from datetime import UTC, datetime
from casemate.backends.sql_events import SqlEvents
from casemate.monitor.canaries.results import Result, Status
from casemate.monitor.watch.settings import Settings
from casemate.monitor.watch.watch import watch
from casemate.monitor.trends.watched import Clean, Known, Watched

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is born deaf to it
url, log, every, lease = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
store = SqlEvents(url)
watched = Watched("clinic", tuple(Known(f"c{i:02}", clean=Clean(50, 0)) for i in range(20)), every)

async def ask(run, ids, note):
    for canary in ids:
        with open(log, "a") as file:
            file.write(f"{time.time()} {os.getpid()} {run} {canary}\\n")
        await asyncio.sleep(0.03)
        note(Result(canary, run, datetime.now(UTC), Status.PASS))

print("ready", flush=True)
asyncio.run(watch(watched, ask, store, settings=Settings(lease_s=lease, poll_s=0.5)))
store.close()
print("ended", flush=True)
"""


class Time:
    """A clock that jumps to the next wake-up when all who sleep by it do so."""

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
    return Watched("clinic", tuple(Known(f"c{i}", Severity.HIGH, Clean(100, 0)) for i in range(n)), HOUR)


def asker(time_, fails=lambda now: False):
    async def ask(run, ids, note):
        for canary in ids:
            failed = canary == "c1" and fails(time_.now)
            status = Status.FAIL if failed else Status.PASS
            note(Result(canary, run, datetime.fromtimestamp(time_.now, UTC), status))

    return ask


def watch_until(hours, store, channels=(), fails=lambda now: False, **more):
    time_ = Time(2 + len(channels), NOON + hours * HOUR)

    async def main():
        settings = Settings(Limits(confirm=1), pause_s=0, poll_s=600, lease_s=60, clock=time_.clock, sleep=time_.sleep)
        task = asyncio.ensure_future(watch(watched(), asker(time_, fails), store, channels, settings, **more))
        await time_.run(task)

    asyncio.run(main())


def test_every_slot_has_one_run_at_a_moment_of_its_own():
    store, runs, led = Kept(), [], []
    watch_until(24, store, on_run=runs.append, on_lead=led.append)
    begun = [e for e in store.scan(schedule.SLOT)]
    slots = [e.body["slot"] for e in begun]
    assert slots == list(range(slots[0], slots[0] + HOUR * len(slots), HOUR))
    assert len(slots) >= 23
    assert [e.body["run"] for e in store.scan(schedule.RUN)] == [r.run for r in runs] == [e.body["run"] for e in begun]
    late = [e.at.timestamp() - e.body["slot"] for e in begun[1:]]
    assert all(0 <= x < HOUR for x in late)
    assert len({round(x / 60) for x in late}) > 10
    assert led == [True, False]
    assert store.leases == {}


def test_work_side_by_side_is_cancelled_once_and_ends_cleanly():
    ended = []

    async def work(seconds):
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(seconds)  # as when it writes down what it found, and gives its lease back
            ended.append(seconds)

    async def main():
        task = asyncio.ensure_future(together(work(0.0), work(0.05)))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(main())
    assert ended == [0.0, 0.05]


def test_from_the_failure_to_the_people_and_back():
    store, ear = Kept(), Ear()
    watch_until(24, store, [ear], fails=lambda now: NOON + 5 * HOUR < now < NOON + 12 * HOUR)
    assert [n.action for n in ear.heard] == ["opened", "recovered"]
    opened, recovered = ear.heard
    assert opened.details["canaries"] == ["c1"]
    assert opened.at.timestamp() < NOON + 8 * HOUR
    assert recovered.at.timestamp() > NOON + 12 * HOUR


def test_what_is_learnt_of_canaries_while_it_runs_counts_in_the_next_run():
    def current():  # as when the owner replaces a document: its canary pages nobody from then on
        known = watched()
        aside = tuple(replace(canary, pages=canary.id != "c1") for canary in known.canaries)
        return replace(known, canaries=aside) if store.scan(schedule.RUN) else known

    store, ear, runs = Kept(), Ear(), []
    watch_until(12, store, [ear], fails=lambda now: now > NOON + 2 * HOUR, current=current, on_run=runs.append)
    assert any(step.failed == ("c1",) for step in runs)
    assert ear.heard == []


def test_stopped_and_started_again_it_goes_on_where_it_was():
    store = Kept()
    watch_until(5, store)
    first = len(store.scan(schedule.RUN))
    watch_until(10, store)
    runs = [e.body["slot"] for e in store.scan(schedule.RUN)]
    assert len(runs) > first
    assert runs == sorted(set(runs))
    assert schedule.gaps(store, "clinic") == []


def test_a_store_that_fails_for_a_while_stops_nothing(monkeypatch):
    store, calls = Kept(), []
    scan = store.scan

    def fails(kind=None, since=None):
        calls.append(kind)
        if len(calls) == 4:
            raise BackendError("away", backend="kept", retryable=True)
        return scan(kind, since)

    monkeypatch.setattr(store, "scan", fails)
    time_ = Time(2, NOON + 2 * HOUR)

    async def main():
        settings = Settings(pause_s=0, poll_s=600, lease_s=0.3, clock=time_.clock, sleep=time_.sleep)
        await time_.run(asyncio.ensure_future(watch(watched(), asker(time_), store, (), settings)))

    asyncio.run(main())
    assert len(scan(schedule.RUN)) >= 1


def test_a_configuration_that_cannot_work_ends_the_watch_and_frees_the_lease():
    async def wrong(run, ids, note):
        raise ConfigError("k is too small")

    store = Kept()
    with pytest.raises(ConfigError, match="too small"):
        asyncio.run(watch(watched(), wrong, store, settings=Settings(lease_s=60)))
    assert store.leases == {}


class TestLeader:
    def test_of_two_one_leads_and_the_other_after_its_release(self):
        store = Kept()
        one, other = Leader(store, "w", 60), Leader(store, "w", 60)

        async def story():
            assert await one.take() and one.held
            assert not await other.take() and not other.held
            await one.release()
            assert not one.held
            assert await other.take()

        asyncio.run(story())
        assert one.holder != other.holder

    def test_work_is_broken_off_when_the_lease_is_lost(self):
        store = Kept()
        leader, broken = Leader(store, "w", 0.15), []

        async def work():
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                broken.append(True)
                raise

        async def story():
            assert await leader.take()
            store.leases["w"] = ("somebody else", time.monotonic() + 60)
            return await leader.lead(work())

        begun = time.monotonic()
        assert asyncio.run(story()) is False
        assert broken == [True]
        assert time.monotonic() - begun < 30

    def test_a_store_that_cannot_be_reached_is_waited_for_until_the_lease_would_end(self):
        store, asked = Kept(), []
        leader = Leader(store, "w", 0.3)

        def away(*_):
            asked.append(1)
            raise BackendError("away", backend="kept", retryable=True)

        async def story():
            assert await leader.take()
            store.lease = away
            begun = time.monotonic()
            kept = await leader.lead(asyncio.sleep(30))
            return kept, time.monotonic() - begun

        kept, seconds = asyncio.run(story())
        assert not kept
        assert seconds >= 0.25
        assert len(asked) >= 2

    def test_what_the_work_raises_comes_through_and_its_end_ends_the_leading(self):
        leader = Leader(Kept(), "w", 60)

        async def fails():
            raise ValueError("no")

        async def story():
            await leader.take()
            assert await leader.lead(asyncio.sleep(0)) is True
            with pytest.raises(ValueError, match="no"):
                await leader.lead(fails(), asyncio.sleep(30))

        asyncio.run(story())

    def test_an_asking_that_is_on_its_way_does_not_take_back_what_was_given(self):
        store = Kept()
        leader, lease = Leader(store, "w", 60), store.lease

        def slow(*args):
            time.sleep(0.2)
            return lease(*args)

        store.lease = slow

        async def story():
            task = asyncio.ensure_future(leader.take())
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await leader.release()

        asyncio.run(story())
        assert store.leases == {}


@pytest.mark.parametrize("options", [{"lease_s": 0.0}, {"poll_s": 0.0}, {"pause_s": -1.0}])
def test_settings_out_of_range(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Settings(**options)


@contextmanager
def workers(url, log, count, every=2, lease=2.0):
    """Processes that watch the same set on the same store."""
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
    """What was asked so far: (time, process, run, canary)."""
    if not log.exists():
        return []
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(float(at), int(pid), run, canary) for at, pid, run, canary in lines]


def until(holds, seconds=60):
    give_up = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < give_up, "it took too long"
        time.sleep(0.02)
    return found


def in_mid_run(log, ended):
    """The last question asked, if its run is under way."""
    found = asked(log)
    if not found or found[-1][2] in ended():
        return None
    of_run = [line for line in found if line[2] == found[-1][2]]
    return found[-1] if 4 <= len(of_run) <= 14 else None


def check_nothing_is_lost_or_twice(store, log, every=2):
    runs = store.scan(schedule.RUN)
    slots = [e.body["slot"] for e in runs]
    assert slots == sorted(set(slots))
    missed = {
        s
        for gap in schedule.gaps(store, "clinic")
        for s in range(int(gap.first.timestamp()), int(gap.last.timestamp()) + 1, every)
    }
    assert set(range(slots[0], slots[-1] + 1, every)) == set(slots) | missed
    assert not set(slots) & missed
    results = [from_event(e) for e in store.scan("canary")]
    for run in runs:
        assert sorted(r.canary for r in results if r.run == run.body["run"]) == [f"c{i:02}" for i in range(20)]
    assert all(r.status is Status.PASS for r in results)
    twice = {pair: n for pair, n in Counter((run, canary) for _, _, run, canary in asked(log)).items() if n > 1}
    assert len({run for run, _ in twice}) <= 1  # the one that was broken off: what was not yet on disk is asked again
    assert set(twice.values()) <= {2, 3}


@pytest.mark.slow
def test_the_leader_is_killed_in_mid_run_and_another_ends_the_same_run(url, tmp_path):
    store, log = SqlEvents(url), tmp_path / "asked"

    def ended():
        return {e.body["run"] for e in store.scan(schedule.RUN)}

    with workers(url, log, 2) as processes:
        until(lambda: len(ended()) >= 1)
        _, leader, killed_run, _ = until(lambda: in_mid_run(log, ended))
        assert {pid for _, pid, _, _ in asked(log)} == {leader}  # the other only waited
        os.kill(leader, signal.SIGKILL)
        done = len(asked(log))
        until(lambda: killed_run in ended())
        until(lambda: len([r for r in ended() if r > killed_run]) >= 1)
        other = next(p.pid for p in processes if p.pid != leader)
        assert {pid for _, pid, _, _ in asked(log)[done + 1 :]} == {other}
    by = Counter((run == killed_run, pid) for _, pid, run, _ in asked(log))
    assert by[True, leader] >= 4 and by[True, other] >= 6
    check_nothing_is_lost_or_twice(store, log)
    store.close()


@pytest.mark.slow
def test_ended_by_a_signal_it_frees_the_lease_and_started_again_it_goes_on(tmp_path):
    url, log = f"sqlite:///{tmp_path}/events.db", tmp_path / "asked"
    store = SqlEvents(url)
    for _ in range(2):
        with workers(url, log, 1, lease=60.0) as (process,):
            before = len(asked(log))
            until(lambda before=before: len(asked(log)) > before + 5)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert process.stdout.readline() == "ended\n"
        assert store.lease("canaries:clinic", "the test", 0.01)
    with workers(url, log, 1) as (process,):
        before = len(store.scan(schedule.RUN))
        until(lambda: len(store.scan(schedule.RUN)) > before + 1)
        process.send_signal(signal.SIGINT)
        process.wait(30)
    check_nothing_is_lost_or_twice_but_stopped(store, log)
    store.close()


def check_nothing_is_lost_or_twice_but_stopped(store, log):
    """As above; each stop may have cut one question short."""
    results = [from_event(e) for e in store.scan("canary")]
    for run in store.scan(schedule.RUN):
        assert sorted(r.canary for r in results if r.run == run.body["run"]) == [f"c{i:02}" for i in range(20)]
    twice = [n for n in Counter((run, canary) for _, _, run, canary in asked(log)).values() if n > 1]
    assert len(twice) <= 3 and set(twice) <= {2}


@pytest.mark.slow
def test_a_leader_that_lost_its_lease_does_not_end_its_run(tmp_path):
    url, log = f"sqlite:///{tmp_path}/events.db", tmp_path / "asked"
    store = SqlEvents(url)

    def ended():
        return {e.body["run"] for e in store.scan(schedule.RUN)}

    with workers(url, log, 1, every=3):
        _, _, run, _ = until(lambda: in_mid_run(log, ended))
        with closing(sqlite3.connect(tmp_path / "events.db", timeout=10)) as thief, thief:
            thief.execute("UPDATE casemate_leases SET holder = 'thief'")  # as if the leader had slept through its end
        assert not store.lease("canaries:clinic", "the test", 60)
        kept = time.monotonic() + 2.5
        while time.monotonic() < kept:
            assert store.lease("canaries:clinic", "thief", 2)
            time.sleep(0.1)
        stopped = len(asked(log))
        assert run not in ended()
        time.sleep(0.5)
        assert len(asked(log)) == stopped
        until(lambda: run in ended())
    check_nothing_is_lost_or_twice(store, log, every=3)
    store.close()
