"""Schedule and run executor: each due run is executed once, across stops, crashes and takeovers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import BackendError, ConfigError
from casemate.monitor.alerts.alert import open_alerts
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, Severity, result_from_event
from casemate.monitor.scheduler import schedule
from casemate.monitor.scheduler.run_executor import LostLease, RunExecutor
from casemate.monitor.scheduler.schedule import Schedule
from casemate.monitor.trends.cusum import AlarmLimits, WatchedCanary, WatchedSet
from casemate.monitor.trends.sequential_tests import FlakeCounts
from tests.unit.monitor_stores import InMemoryEventStore

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
HOUR = 3600


def watched(n=3, interval_s=HOUR, **others):
    own = tuple(
        WatchedCanary(name, Severity.MEDIUM, FlakeCounts(100, 0), interval_s=seconds)
        for name, seconds in others.items()
    )
    return WatchedSet(
        "clinic", (*(WatchedCanary(f"c{i}", Severity.MEDIUM, FlakeCounts(100, 0)) for i in range(n)), *own), interval_s
    )


class Clock:
    """A settable clock."""

    def __init__(self, now=NOON + HOUR - 1):
        self.now = now

    def __call__(self):
        return self.now


class Asker:
    """Answers, and records run and canary. Can stop at a canary like a killed process."""

    def __init__(self, clock, fails=(), die_at=None):
        self.clock, self.fails, self.die_at, self.asked = clock, set(fails), die_at, []

    async def __call__(self, run, canaries, on_result):
        for canary in canaries:
            if (run.partition("@")[2], canary) == self.die_at:
                raise asyncio.CancelledError
            self.asked.append((run, canary))
            status = CanaryStatus.FAIL if canary in self.fails else CanaryStatus.PASS
            at = datetime.fromtimestamp(self.clock(), UTC)
            on_result(CanaryResult(canary, run, at, status, documents=("d1",)))


async def always():
    return True


def run_due(store, asker, set_=None, may_write=always, limits=None):
    set_ = set_ or watched()
    executor = RunExecutor(set_, asker, store, limits or AlarmLimits(max_repeats=2), pause_s=0)
    return asyncio.run(executor.run_due(Schedule(set_, "salt"), asker.clock, may_write))


def finished_runs(store):
    return [e.body["run"] for e in store.scan(schedule.RUN_KIND)]


def run_id_of(hour):
    return f"clinic@{datetime.fromtimestamp(hour, UTC):%Y-%m-%dT%H:%M:%SZ}"


class TestSchedule:
    @given(st.integers(0, 10**6), st.sampled_from([60, 3600, 86400]), st.text(max_size=5))
    def test_run_starts_within_its_slot(self, number, every, secret):
        table = Schedule(watched(interval_s=every), secret)
        slot = number * every
        assert slot <= table.start_time(slot) < slot + every
        assert table.latest_slot(table.start_time(slot)) == slot
        assert table.latest_slot(np.nextafter(table.start_time(slot), 0)) == slot - every
        assert table.next_slot(slot) == slot + every

    def test_start_times_depend_on_the_secret_and_are_uniform(self):
        table, other = Schedule(watched(), "a"), Schedule(watched(), "b")
        slots = range(0, 5000 * HOUR, HOUR)
        moments = np.array([(table.start_time(s) - s) / HOUR for s in slots])
        assert [table.start_time(s) for s in slots] == [Schedule(watched(), "a").start_time(s) for s in slots]
        assert abs(np.corrcoef(moments, [(other.start_time(s) - s) / HOUR for s in slots])[0, 1]) < 0.05
        assert abs(np.corrcoef(moments[1:], moments[:-1])[0, 1]) < 0.05
        assert np.abs(np.sort(moments) - np.arange(5000) / 5000).max() < 1.63 / np.sqrt(5000)  # Kolmogorov test, 1 %

    def test_canaries_are_due_when_their_own_interval_starts(self):
        table = Schedule(watched(2, HOUR, daily=86400, third=3 * HOUR))
        day = 20_000 * 86400
        assert table.canaries_due(day, day - HOUR) == ("c0", "c1", "daily", "third")
        assert table.canaries_due(day + HOUR, day) == ("c0", "c1")
        assert table.canaries_due(day + 3 * HOUR, day + 2 * HOUR) == ("c0", "c1", "third")
        assert table.canaries_due(day + 9 * HOUR, day - HOUR) == ("c0", "c1", "daily", "third")  # overdue
        assert table.canaries_due(day, None) == ("c0", "c1", "daily", "third")

    def test_shortest_interval_defines_the_slots(self):
        assert Schedule(watched(1, 86400, often=900)).interval == 900
        assert Schedule(watched(1, 86400, seldom=9 * 86400)).interval == 86400


def test_creates_the_secret_once_per_set():
    store, now = InMemoryEventStore(), datetime.fromtimestamp(NOON, UTC)
    first = schedule.schedule_secret(store, "clinic", now)
    assert len(first) == 32
    assert schedule.schedule_secret(store, "clinic", now) == first != schedule.schedule_secret(store, "other", now)


def test_first_run_asks_all_canaries_and_the_next_starts_when_due():
    store, clock = InMemoryEventStore(), Clock()
    asker = Asker(clock)
    (found,) = run_due(store, asker)
    assert found.run == run_id_of(NOON)
    assert [c for _, c in asker.asked] == ["c0", "c1", "c2"]
    assert run_due(store, asker) == []
    clock.now += HOUR
    assert [s.run for s in run_due(store, asker)] == [run_id_of(NOON + HOUR)]
    assert finished_runs(store) == [run_id_of(NOON), run_id_of(NOON + HOUR)]
    assert len(asker.asked) == 6


def test_continues_an_interrupted_run_without_repeated_questions():
    store, clock = InMemoryEventStore(), Clock()
    killed = Asker(clock, die_at=("2026-03-01T12:00:00Z", "c1"))
    with pytest.raises(asyncio.CancelledError):
        run_due(store, killed)
    assert finished_runs(store) == []
    second = Asker(clock)
    (found,) = run_due(store, second)
    assert [c for _, c in second.asked] == ["c1", "c2"]
    assert found.judged == 3
    assert finished_runs(store) == [run_id_of(NOON)]


def test_continues_a_run_that_was_interrupted_during_repetitions():
    store, clock = InMemoryEventStore(), Clock()
    with pytest.raises(asyncio.CancelledError):
        run_due(store, Asker(clock, fails=["c0", "c2"], die_at=("2026-03-01T12:00:00Z~1", "c2")))
    second = Asker(clock, fails=["c0", "c2"])
    run_due(store, second)
    run = run_id_of(NOON)
    assert second.asked == [(f"{run}~1", "c2")]  # both failed twice, which is sufficient for an alarm
    assert open_alerts(store)[0].alert.canaries == ("c0", "c2")


def test_runs_the_latest_missed_slot_and_records_the_others():
    store, clock = InMemoryEventStore(), Clock()
    run_due(store, Asker(clock))
    clock.now += 5 * HOUR
    asker = Asker(clock)
    assert [s.run for s in run_due(store, asker)] == [run_id_of(NOON + 5 * HOUR)]
    (gap,) = schedule.load_gaps(store, "clinic")
    assert (gap.first.timestamp(), gap.last.timestamp(), gap.slots) == (NOON + HOUR, NOON + 4 * HOUR, 4)
    clock.now += HOUR
    run_due(store, asker)
    assert len(schedule.load_gaps(store, "clinic")) == 1
    assert schedule.load_gaps(store, "other") == []


def test_records_slots_missed_after_an_unfinished_first_run():
    store, clock = InMemoryEventStore(), Clock()
    with pytest.raises(asyncio.CancelledError):
        run_due(store, Asker(clock, die_at=("2026-03-01T12:00:00Z", "c2")))
    clock.now += 4 * HOUR
    run_due(store, Asker(clock))
    assert finished_runs(store) == [run_id_of(NOON), run_id_of(NOON + 4 * HOUR)]
    (gap,) = schedule.load_gaps(store, "clinic")
    assert (gap.first.timestamp(), gap.last.timestamp()) == (NOON + HOUR, NOON + 3 * HOUR)


def test_finishes_an_old_started_run_and_runs_the_latest_slot():
    store, clock = InMemoryEventStore(), Clock()
    run_due(store, Asker(clock))
    clock.now += HOUR
    with pytest.raises(asyncio.CancelledError):
        run_due(store, Asker(clock, die_at=("2026-03-01T13:00:00Z", "c2")))
    clock.now += 4 * HOUR
    asker = Asker(clock)
    found = run_due(store, asker)
    assert [s.run for s in found] == [run_id_of(NOON + HOUR), run_id_of(NOON + 5 * HOUR)]
    assert asker.asked[0] == (run_id_of(NOON + HOUR), "c2")
    assert schedule.load_gaps(store, "clinic")[0].slots == 3


def test_hourly_run_asks_a_missed_daily_canary():
    store, clock = InMemoryEventStore(), Clock()
    set_ = watched(1, HOUR, daily=86400)
    run_due(store, Asker(clock), set_)
    clock.now += 14 * HOUR  # past midnight
    asker = Asker(clock)
    run_due(store, asker, set_)
    assert [c for _, c in asker.asked] == ["c0", "daily"]
    clock.now += HOUR
    run_due(store, asker, set_)
    assert [c for _, c in asker.asked[2:]] == ["c0"]


def test_starts_and_finishes_no_run_without_the_lease():
    async def never():
        return False

    store, clock = InMemoryEventStore(), Clock()
    with pytest.raises(LostLease):
        run_due(store, Asker(clock), may_write=never)
    assert store.scan() == []
    answers = iter([True, False])

    async def first_only():
        return next(answers)

    with pytest.raises(LostLease):
        run_due(store, Asker(clock), may_write=first_only)
    assert finished_runs(store) == []
    assert len(store.scan("canary")) == 3
    second = Asker(clock)
    run_due(store, second)
    assert second.asked == []
    assert finished_runs(store) == [run_id_of(NOON)]


def test_exception_gives_errors_and_finishes_the_run():
    async def broken(run, canaries, on_result):
        on_result(CanaryResult(next(iter(canaries)), run, datetime.fromtimestamp(NOON, UTC), CanaryStatus.PASS))
        raise RuntimeError("secret words")

    store, clock = InMemoryEventStore(), Clock()
    broken.clock = clock
    (found,) = run_due(store, broken)
    assert (found.judged, found.errors) == (1, 2)
    errors = [result_from_event(e).error for e in store.scan("canary")]
    assert errors == ["", *["the run was interrupted (RuntimeError)"] * 2]


def test_canaries_that_were_not_asked_are_errors():
    async def ask_none(run, canaries, on_result):
        return None

    store = InMemoryEventStore()
    ask_none.clock = Clock()
    (found,) = run_due(store, ask_none)
    assert found.unreachable
    assert [s.alert.kind for s in open_alerts(store)] == ["unreachable"]


def test_raises_config_errors():
    async def wrong(run, canaries, on_result):
        raise ConfigError("k is too small")

    wrong.clock = Clock()
    with pytest.raises(ConfigError):
        run_due(InMemoryEventStore(), wrong)


def test_unconfirmed_write_finishes_no_run(monkeypatch):
    store, clock = InMemoryEventStore(), Clock()
    monkeypatch.setattr(store, "flush", lambda timeout_s=10.0: False)
    with pytest.raises(BackendError, match="did not confirm"):
        run_due(store, Asker(clock))
    assert finished_runs(store) == []


def test_failures_alarm_and_the_state_persists_over_runs_and_processes():
    store, clock = InMemoryEventStore(), Clock()
    run_due(store, Asker(clock))
    for _ in range(2):
        clock.now += HOUR
        run_due(store, Asker(clock, fails=["c1"]))
    (state,) = open_alerts(store, "clinic")
    assert state.alert.canaries == ("c1",)
    assert state.alert.since.timestamp() == NOON + HOUR + HOUR - 1
    for _ in range(4):
        clock.now += HOUR
        run_due(store, Asker(clock))
    assert open_alerts(store, "clinic") == []
    phases = [e.body["phase"] for e in store.scan("alert")]
    assert phases == ["opened", "recovered"]


def test_does_not_repeat_an_alarmed_canary():
    store, clock = InMemoryEventStore(), Clock()
    for _ in range(4):
        asker = Asker(clock, fails=["c1"])
        run_due(store, asker)
        clock.now += HOUR
    assert len(asker.asked) == 3


def test_crash_before_the_end_of_a_run_gives_one_alert(monkeypatch):
    store, clock = InMemoryEventStore(), Clock()
    run_due(store, Asker(clock, fails=["c1"]), limits=AlarmLimits(max_repeats=1))
    clock.now += HOUR
    append = store.append

    def interrupt(event):
        if event.kind == schedule.RUN_KIND:
            raise KeyboardInterrupt
        append(event)

    monkeypatch.setattr(store, "append", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_due(store, Asker(clock, fails=["c1"]), limits=AlarmLimits(max_repeats=1))
    assert [e.body["phase"] for e in store.scan("alert")] == ["opened"]
    monkeypatch.setattr(store, "append", append)
    run_due(store, Asker(clock, fails=["c1"]), limits=AlarmLimits(max_repeats=1))
    assert [e.body["phase"] for e in store.scan("alert")] == ["opened"]
    assert len(finished_runs(store)) == 2


def test_manual_run_counts_and_does_not_shift_the_schedule():
    store, clock = InMemoryEventStore(), Clock()
    run_due(store, Asker(clock))
    clock.now += 60
    asker = Asker(clock, fails=["c0"])
    executor = RunExecutor(watched(), asker, store, AlarmLimits(max_repeats=2), pause_s=0)
    found = asyncio.run(executor.run_now(clock))
    assert found.run == "clinic@2026-03-01T13:00:59Z.000000"
    assert len(asker.asked) == 5
    assert schedule.load_history(store, "clinic", datetime.fromtimestamp(clock.now, UTC)).finished == NOON
    clock.now = NOON + 2 * HOUR - 1
    (regular,) = run_due(store, Asker(clock, fails=["c0"]))
    assert regular.alarmed == ("c0",)


def test_both_of_two_concurrent_runs_count():
    store, clock, within = InMemoryEventStore(), Clock(), []

    async def slow(run, canaries, on_result):
        if not within:  # another manual run starts and ends during this one
            clock.now += 1
            within.append(await RunExecutor(watched(), Asker(clock, fails=["c1"]), store, pause_s=0).run_now(clock))
        await Asker(clock, fails=["c1", "c2"])(run, canaries, on_result)

    run_due(store, Asker(clock))
    found = asyncio.run(RunExecutor(watched(), slow, store, pause_s=0).run_now(clock))
    assert (within[0].alarmed, found.alarmed) == (("c1",), ("c2",))
    assert [s.alert.canaries for s in open_alerts(store, "clinic")] == [("c1",), ("c2",)]
    assert {i for i, g in found.state.canaries.items() if g.alarmed} == {"c1", "c2"}


def test_sets_on_one_store_are_independent():
    store, clock = InMemoryEventStore(), Clock()
    run_due(store, Asker(clock))
    other = WatchedSet("ward", (WatchedCanary("x"),))
    (found,) = run_due(store, Asker(clock), other)
    assert found.run.startswith("ward@")
    assert found.judged == 1


def test_set_may_change_between_runs():
    store, clock = InMemoryEventStore(), Clock()
    run_due(store, Asker(clock), watched(3))
    clock.now += HOUR
    (found,) = run_due(store, Asker(clock), watched(2, HOUR, new=60))
    assert set(found.state.canaries) == {"c0", "c1", "new"}
    clock.now += HOUR
    assert run_due(store, Asker(clock), watched(2, 4 * HOUR)) == []  # the slot from 12 to 16 has its run


def test_finishes_a_started_run_of_a_replaced_set_with_the_current_canaries():
    store, clock = InMemoryEventStore(), Clock()
    with pytest.raises(asyncio.CancelledError):
        run_due(store, Asker(clock, die_at=("2026-03-01T12:00:00Z", "c0")))
    (found,) = run_due(store, Asker(clock), WatchedSet("clinic", (WatchedCanary("other"),)))
    assert found.judged == 1


def test_finds_the_last_run_after_months():
    store, clock = InMemoryEventStore(), Clock()
    run_due(store, Asker(clock))
    clock.now += 90 * 86400
    run_due(store, Asker(clock))
    assert schedule.load_gaps(store, "clinic")[0].slots == 90 * 24 - 1
    assert schedule.load_gaps(store, "clinic", datetime.fromtimestamp(clock.now, UTC) + timedelta(days=1)) == []


class TestCurrentGap:
    def test_gap_contains_slots_that_passed_without_a_run(self):
        hours = int(NOON // HOUR)
        before = schedule.RunHistory(accounted=(hours - 5) * HOUR)
        gap = schedule.current_gap(watched(), before, hours * HOUR + 60.0)
        assert (gap.slots, gap.recorded) == (4, None)
        assert [gap.first.timestamp() / HOUR, gap.last.timestamp() / HOUR] == [hours - 4, hours - 1]

    @pytest.mark.parametrize(
        ("before", "late"),
        [
            (schedule.RunHistory(), 9.5),  # no run so far
            (schedule.RunHistory(accounted=0), 1.9),  # slot 1 has not passed
            (schedule.RunHistory(accounted=0, started=(schedule.StartedRun(HOUR, "r", ()),)), 2.5),  # in progress
        ],
    )
    def test_gap_excludes_slots_that_may_still_run(self, before, late):
        assert schedule.current_gap(watched(), before, late * HOUR) is None

    def test_reads_recorded_gaps(self):
        store, now = InMemoryEventStore(), datetime.fromtimestamp(NOON, UTC)
        table = Schedule(watched(), "a")
        latest = table.latest_slot(NOON)
        store.append(schedule.gap_event(table, schedule.RunHistory(accounted=latest - 4 * HOUR), latest, now))
        store.append(schedule.run_started_event(table, latest, None, now))
        (gap,) = schedule.load_gaps(store, "clinic")
        assert (gap.set, gap.slots, gap.recorded) == ("clinic", 3, now)
        assert schedule.load_gaps(store, "other") == []
