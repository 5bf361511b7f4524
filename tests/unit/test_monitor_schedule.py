"""When canaries are due, and that each due run is made once, whoever stops or takes over; without waiting."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import BackendError, ConfigError
from casemate.monitor.alerts.alert import open_alerts
from casemate.monitor.canaries.results import Result, Severity, Status, from_event
from casemate.monitor.trends.gauges import Limits
from casemate.monitor.trends.watched import Clean, Known, Watched
from casemate.monitor.watch import schedule
from casemate.monitor.watch.rounds import Abandoned, Rounds
from casemate.monitor.watch.schedule import Timetable
from tests.unit.monitor_stores import Kept

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
HOUR = 3600


def watched(n=3, every=HOUR, **others):
    own = tuple(Known(name, Severity.MEDIUM, Clean(100, 0), every=seconds) for name, seconds in others.items())
    return Watched("clinic", (*(Known(f"c{i}", Severity.MEDIUM, Clean(100, 0)) for i in range(n)), *own), every)


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self, now=NOON + HOUR - 1):
        self.now = now

    def __call__(self):
        return self.now


class Asker:
    """Answers, and notes who was asked in which run; may stop at a canary as a process that is killed."""

    def __init__(self, clock, fails=(), die_at=None):
        self.clock, self.fails, self.die_at, self.asked = clock, set(fails), die_at, []

    async def __call__(self, run, ids, note):
        for canary in ids:
            if (run.partition("@")[2], canary) == self.die_at:
                raise asyncio.CancelledError
            self.asked.append((run, canary))
            status = Status.FAIL if canary in self.fails else Status.PASS
            note(Result(canary, run, datetime.fromtimestamp(self.clock(), UTC), status, documents=("d1",)))


async def yes():
    return True


def catch_up(store, asker, set_=None, mine=yes, limits=None):
    set_ = set_ or watched()
    rounds = Rounds(set_, asker, store, limits or Limits(confirm=2), pause_s=0)
    return asyncio.run(rounds.catch_up(Timetable(set_, "salt"), asker.clock, mine))


def ended(store):
    return [e.body["run"] for e in store.scan(schedule.RUN)]


def run_of(hour):
    return f"clinic@{datetime.fromtimestamp(hour, UTC):%Y-%m-%dT%H:%M:%SZ}"


class TestTimetable:
    @given(st.integers(0, 10**6), st.sampled_from([60, 3600, 86400]), st.text(max_size=5))
    def test_a_run_is_due_within_its_slot_and_the_latest_is_the_latest(self, number, every, secret):
        table = Timetable(watched(every=every), secret)
        slot = number * every
        assert slot <= table.due(slot) < slot + every
        assert table.latest(table.due(slot)) == slot
        assert table.latest(np.nextafter(table.due(slot), 0)) == slot - every
        assert table.following(slot) == slot + every

    def test_moments_follow_from_the_secret_and_are_spread_evenly(self):
        table, other = Timetable(watched(), "a"), Timetable(watched(), "b")
        slots = range(0, 5000 * HOUR, HOUR)
        moments = np.array([(table.due(s) - s) / HOUR for s in slots])
        assert [table.due(s) for s in slots] == [Timetable(watched(), "a").due(s) for s in slots]
        assert abs(np.corrcoef(moments, [(other.due(s) - s) / HOUR for s in slots])[0, 1]) < 0.05
        assert abs(np.corrcoef(moments[1:], moments[:-1])[0, 1]) < 0.05
        assert np.abs(np.sort(moments) - np.arange(5000) / 5000).max() < 1.63 / np.sqrt(5000)  # Kolmogorov, 1 %

    def test_canaries_of_another_interval_are_due_when_theirs_begins_anew(self):
        table = Timetable(watched(2, HOUR, daily=86400, third=3 * HOUR))
        day = 20_000 * 86400
        assert table.canaries(day, day - HOUR) == ("c0", "c1", "daily", "third")
        assert table.canaries(day + HOUR, day) == ("c0", "c1")
        assert table.canaries(day + 3 * HOUR, day + 2 * HOUR) == ("c0", "c1", "third")
        assert table.canaries(day + 9 * HOUR, day - HOUR) == ("c0", "c1", "daily", "third")  # made up for
        assert table.canaries(day, None) == ("c0", "c1", "daily", "third")

    def test_the_shortest_interval_is_that_of_the_slots(self):
        assert Timetable(watched(1, 86400, often=900)).interval == 900
        assert Timetable(watched(1, 86400, seldom=9 * 86400)).interval == 86400


def test_the_secret_is_made_once_for_all_who_share_the_store():
    store, now = Kept(), datetime.fromtimestamp(NOON, UTC)
    first = schedule.secret(store, "clinic", now)
    assert len(first) == 32
    assert schedule.secret(store, "clinic", now) == first != schedule.secret(store, "other", now)


def test_the_first_run_asks_all_at_once_and_the_next_when_it_is_due():
    store, clock = Kept(), Clock()
    asker = Asker(clock)
    (found,) = catch_up(store, asker)
    assert found.run == run_of(NOON)
    assert [c for _, c in asker.asked] == ["c0", "c1", "c2"]
    assert catch_up(store, asker) == []
    clock.now += HOUR
    assert [s.run for s in catch_up(store, asker)] == [run_of(NOON + HOUR)]
    assert ended(store) == [run_of(NOON), run_of(NOON + HOUR)]
    assert len(asker.asked) == 6


def test_a_run_that_was_broken_off_is_gone_on_with_and_nothing_is_asked_twice():
    store, clock = Kept(), Clock()
    dying = Asker(clock, die_at=("2026-03-01T12:00:00Z", "c1"))
    with pytest.raises(asyncio.CancelledError):
        catch_up(store, dying)
    assert ended(store) == []
    second = Asker(clock)
    (found,) = catch_up(store, second)
    assert [c for _, c in second.asked] == ["c1", "c2"]
    assert found.asked == 3
    assert ended(store) == [run_of(NOON)]


def test_a_run_that_died_while_failures_were_asked_again_is_gone_on_with_there():
    store, clock = Kept(), Clock()
    with pytest.raises(asyncio.CancelledError):
        catch_up(store, Asker(clock, fails=["c0", "c2"], die_at=("2026-03-01T12:00:00Z~1", "c2")))
    second = Asker(clock, fails=["c0", "c2"])
    catch_up(store, second)
    run = run_of(NOON)
    assert second.asked == [(f"{run}~1", "c2")]  # both failed twice, which is enough
    assert open_alerts(store)[0].alert.canaries == ("c0", "c2")


def test_of_missed_slots_the_latest_is_made_up_for_and_the_others_are_told():
    store, clock = Kept(), Clock()
    catch_up(store, Asker(clock))
    clock.now += 5 * HOUR
    asker = Asker(clock)
    assert [s.run for s in catch_up(store, asker)] == [run_of(NOON + 5 * HOUR)]
    (gap,) = schedule.gaps(store, "clinic")
    assert (gap.first.timestamp(), gap.last.timestamp(), gap.slots) == (NOON + HOUR, NOON + 4 * HOUR, 4)
    clock.now += HOUR
    catch_up(store, asker)
    assert len(schedule.gaps(store, "clinic")) == 1
    assert schedule.gaps(store, "other") == []


def test_a_run_begun_before_a_long_silence_is_ended_and_the_latest_made_up_for():
    store, clock = Kept(), Clock()
    catch_up(store, Asker(clock))
    clock.now += HOUR
    with pytest.raises(asyncio.CancelledError):
        catch_up(store, Asker(clock, die_at=("2026-03-01T13:00:00Z", "c2")))
    clock.now += 4 * HOUR
    asker = Asker(clock)
    found = catch_up(store, asker)
    assert [s.run for s in found] == [run_of(NOON + HOUR), run_of(NOON + 5 * HOUR)]
    assert asker.asked[0] == (run_of(NOON + HOUR), "c2")
    assert schedule.gaps(store, "clinic")[0].slots == 3


def test_a_daily_canary_is_made_up_for_in_an_hourly_run():
    store, clock = Kept(), Clock()
    set_ = watched(1, HOUR, daily=86400)
    catch_up(store, Asker(clock), set_)
    clock.now += 14 * HOUR  # past midnight
    asker = Asker(clock)
    catch_up(store, asker, set_)
    assert [c for _, c in asker.asked] == ["c0", "daily"]
    clock.now += HOUR
    catch_up(store, asker, set_)
    assert [c for _, c in asker.asked[2:]] == ["c0"]


def test_whoever_lost_the_lease_neither_begins_nor_ends_a_run():
    async def no():
        return False

    store, clock = Kept(), Clock()
    with pytest.raises(Abandoned):
        catch_up(store, Asker(clock), mine=no)
    assert store.scan() == []
    answers = iter([True, False])

    async def then_no():
        return next(answers)

    with pytest.raises(Abandoned):
        catch_up(store, Asker(clock), mine=then_no)
    assert ended(store) == []
    assert len(store.scan("canary")) == 3
    second = Asker(clock)
    catch_up(store, second)
    assert second.asked == []
    assert ended(store) == [run_of(NOON)]


def test_what_breaks_a_run_makes_errors_and_the_run_is_ended():
    async def broken(run, ids, note):
        note(Result(ids[0], run, datetime.fromtimestamp(NOON, UTC), Status.PASS))
        raise RuntimeError("secret words")

    store, clock = Kept(), Clock()
    broken.clock = clock
    (found,) = catch_up(store, broken)
    assert (found.asked, found.errors) == (1, 2)
    errors = [from_event(e).error for e in store.scan("canary")]
    assert errors == ["", *["the run broke off (RuntimeError)"] * 2]


def test_whom_nobody_asked_is_in_error():
    async def lazy(run, ids, note):
        return None

    store = Kept()
    lazy.clock = Clock()
    (found,) = catch_up(store, lazy)
    assert found.unreachable
    assert [s.alert.kind for s in open_alerts(store)] == ["unreachable"]


def test_a_wrong_configuration_is_not_taken_for_a_dead_target():
    async def wrong(run, ids, note):
        raise ConfigError("k is too small")

    wrong.clock = Clock()
    with pytest.raises(ConfigError):
        catch_up(Kept(), wrong)


def test_a_store_that_takes_nothing_ends_no_run(monkeypatch):
    store, clock = Kept(), Clock()
    monkeypatch.setattr(store, "flush", lambda timeout_s=10.0: False)
    with pytest.raises(BackendError, match="did not take"):
        catch_up(store, Asker(clock))
    assert ended(store) == []


def test_failures_alarm_and_what_is_known_goes_over_to_the_next_run_and_process():
    store, clock = Kept(), Clock()
    catch_up(store, Asker(clock))
    for _ in range(2):
        clock.now += HOUR
        catch_up(store, Asker(clock, fails=["c1"]))
    (standing,) = open_alerts(store, "clinic")
    assert standing.alert.canaries == ("c1",)
    assert standing.alert.since.timestamp() == NOON + HOUR + HOUR - 1
    for _ in range(4):
        clock.now += HOUR
        catch_up(store, Asker(clock))
    assert open_alerts(store, "clinic") == []
    phases = [e.body["phase"] for e in store.scan("alert")]
    assert phases == ["opened", "recovered"]


def test_an_alarmed_canary_is_not_asked_again_and_again():
    store, clock = Kept(), Clock()
    for _ in range(4):
        asker = Asker(clock, fails=["c1"])
        catch_up(store, asker)
        clock.now += HOUR
    assert len(asker.asked) == 3


def test_a_process_that_died_before_it_could_end_the_run_leaves_one_alert_not_two(monkeypatch):
    store, clock = Kept(), Clock()
    catch_up(store, Asker(clock, fails=["c1"]), limits=Limits(confirm=1))
    clock.now += HOUR
    append = store.append

    def dies(event):
        if event.kind == schedule.RUN:
            raise KeyboardInterrupt
        append(event)

    monkeypatch.setattr(store, "append", dies)
    with pytest.raises(KeyboardInterrupt):
        catch_up(store, Asker(clock, fails=["c1"]), limits=Limits(confirm=1))
    assert [e.body["phase"] for e in store.scan("alert")] == ["opened"]
    monkeypatch.setattr(store, "append", append)
    catch_up(store, Asker(clock, fails=["c1"]), limits=Limits(confirm=1))
    assert [e.body["phase"] for e in store.scan("alert")] == ["opened"]
    assert len(ended(store)) == 2


def test_a_run_by_hand_counts_like_any_other_and_does_not_move_the_schedule():
    store, clock = Kept(), Clock()
    catch_up(store, Asker(clock))
    clock.now += 60
    asker = Asker(clock, fails=["c0"])
    rounds = Rounds(watched(), asker, store, Limits(confirm=2), pause_s=0)
    found = asyncio.run(rounds.by_hand(clock))
    assert found.run == "clinic@2026-03-01T13:00:59Z.000000"
    assert len(asker.asked) == 5
    assert schedule.past(store, "clinic", datetime.fromtimestamp(clock.now, UTC)).finished == NOON
    clock.now = NOON + 2 * HOUR - 1
    (regular,) = catch_up(store, Asker(clock, fails=["c0"]))
    assert regular.alarmed == ("c0",)


def test_two_runs_at_the_same_time_are_one_alert_and_neither_is_forgotten():
    store, clock, within = Kept(), Clock(), []

    async def slow(run, ids, note):
        if not within:  # somebody asks by hand, and is done first
            clock.now += 1
            within.append(await Rounds(watched(), Asker(clock, fails=["c1"]), store, pause_s=0).by_hand(clock))
        await Asker(clock, fails=["c1", "c2"])(run, ids, note)

    catch_up(store, Asker(clock))
    found = asyncio.run(Rounds(watched(), slow, store, pause_s=0).by_hand(clock))
    assert (within[0].alarmed, found.alarmed) == (("c1",), ("c2",))
    assert [s.alert.canaries for s in open_alerts(store, "clinic")] == [("c1",), ("c2",)]
    assert {i for i, g in found.state.gauges.items() if g.alarmed} == {"c1", "c2"}


def test_another_set_on_the_same_store_is_another_matter():
    store, clock = Kept(), Clock()
    catch_up(store, Asker(clock))
    other = Watched("ward", (Known("x"),))
    (found,) = catch_up(store, Asker(clock), other)
    assert found.run.startswith("ward@")
    assert found.asked == 1


def test_a_set_that_changed_between_two_runs_goes_on():
    store, clock = Kept(), Clock()
    catch_up(store, Asker(clock), watched(3))
    clock.now += HOUR
    (found,) = catch_up(store, Asker(clock), watched(2, HOUR, new=60))
    assert set(found.state.gauges) == {"c0", "c1", "new"}
    clock.now += HOUR
    assert catch_up(store, Asker(clock), watched(2, 4 * HOUR)) == []  # the slot of 12 to 16 has had its run


def test_a_run_begun_by_a_set_that_is_no_more_is_ended_with_the_canaries_there_are():
    store, clock = Kept(), Clock()
    with pytest.raises(asyncio.CancelledError):
        catch_up(store, Asker(clock, die_at=("2026-03-01T12:00:00Z", "c0")))
    (found,) = catch_up(store, Asker(clock), Watched("clinic", (Known("other"),)))
    assert found.asked == 1


def test_after_a_silence_of_months_the_last_run_is_still_known():
    store, clock = Kept(), Clock()
    catch_up(store, Asker(clock))
    clock.now += 90 * 86400
    catch_up(store, Asker(clock))
    assert schedule.gaps(store, "clinic")[0].slots == 90 * 24 - 1
    assert schedule.gaps(store, "clinic", datetime.fromtimestamp(clock.now, UTC) + timedelta(days=1)) == []


class TestUnwatched:
    def test_slots_that_are_over_since_the_watch_ended(self):
        hours = int(NOON // HOUR)
        before = schedule.Past(accounted=(hours - 5) * HOUR)
        gap = schedule.unwatched(watched(), before, hours * HOUR + 60.0)
        assert (gap.slots, gap.noted) == (4, None)
        assert [gap.first.timestamp() / HOUR, gap.last.timestamp() / HOUR] == [hours - 4, hours - 1]

    @pytest.mark.parametrize(
        ("before", "late"),
        [
            (schedule.Past(), 9.5),  # never watched
            (schedule.Past(accounted=0), 1.9),  # slot 1 is not over
            (schedule.Past(accounted=0, begun=(schedule.Begun(HOUR, "r", ()),)), 2.5),  # it is at work
        ],
    )
    def test_nothing_is_said_of_what_may_still_come(self, before, late):
        assert schedule.unwatched(watched(), before, late * HOUR) is None

    def test_what_was_missed_is_read_back(self):
        store, now = Kept(), datetime.fromtimestamp(NOON, UTC)
        table = Timetable(watched(), "a")
        latest = table.latest(NOON)
        store.append(schedule.missed(table, schedule.Past(accounted=latest - 4 * HOUR), latest, now))
        store.append(schedule.begin(table, latest, None, now))
        (gap,) = schedule.gaps(store, "clinic")
        assert (gap.set, gap.slots, gap.noted) == ("clinic", 3, now)
        assert schedule.gaps(store, "other") == []
