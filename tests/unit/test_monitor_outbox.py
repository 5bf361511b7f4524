"""From alerts to people: nothing is lost, nothing is out of order, and nobody is flooded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from casemate.errors import BackendError, ConfigError
from casemate.monitor.alerts.alert import Alert, Phase, acknowledge, event
from casemate.monitor.alerts.letters import KIND, Policy
from casemate.monitor.alerts.outbox import Outbox
from casemate.monitor.canaries.results import Severity
from casemate.protocols import Channel
from tests.unit.monitor_stores import Kept

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


class Ear(Channel):
    """Hears notices, or fails for a while."""

    def __init__(self, name="ear", failures=(), hangs=False):
        self.name, self.failures, self.hangs, self.heard, self.tries = name, list(failures), hangs, [], 0

    async def send(self, notice):
        self.tries += 1
        if self.hangs:
            await asyncio.sleep(3600)
        if self.failures and (failure := self.failures.pop(0)):
            raise failure
        self.heard.append(notice)


def away(retryable=True):
    return BackendError("away", backend="ear", retryable=retryable)


def alert(name="a", severity=Severity.HIGH, **fields):
    return replace(Alert(name, "changed", severity, "clinic", ("c0",), NOON, f"title of {name}"), **fields)


class Desk:
    """An outbox, its store, and a clock that is set."""

    def __init__(self, *channels, **policy):
        self.store, self.channels, self.now = Kept(), channels, NOON
        self.policy = Policy(**policy)

    def tell(self, alert_, phase=Phase.OPENED, quiet=False):
        self.store.append(event(alert_, phase, self.now, self.now.isoformat(), quiet))

    def deliver(self, may=lambda: True):
        async def main():
            boxes = [Outbox(self.store, channel, self.policy) for channel in self.channels]
            return await asyncio.gather(*(box.deliver(lambda: self.now, may) for box in boxes))

        return min((due for due in asyncio.run(main()) if due), default=None)

    def ends(self, channel="ear"):
        return [e.body["end"] for e in self.store.scan(KIND) if e.body["channel"] == channel]


def test_each_change_goes_to_each_channel_once():
    desk = Desk(one := Ear("one"), two := Ear("two"))
    desk.tell(alert())
    for _ in range(3):
        assert desk.deliver() is None
    desk.now += SECOND
    desk.tell(alert(), Phase.RECOVERED)
    desk.deliver()
    for ear in (one, two):
        assert [(n.alert, n.action, n.severity) for n in ear.heard] == [
            ("a", "opened", "high"),
            ("a", "recovered", "high"),
        ]
    assert {n.key for n in one.heard}.isdisjoint(n.key for n in two.heard)
    assert one.heard[0].details == {
        "kind": "changed",
        "set": "clinic",
        "canaries": ["c0"],
        "since": NOON.isoformat(),
        "documents": [],
    }
    assert "title of a" in one.heard[0].text and "**" in one.heard[0].markdown


def test_nothing_to_tell_is_nothing_sent():
    desk = Desk(ear := Ear())
    assert desk.deliver() is None
    desk.tell(alert())
    desk.tell(alert(), Phase.UPDATED, quiet=True)
    acknowledge(desk.store, "a", "ada", NOON)
    desk.deliver()
    assert [n.action for n in ear.heard] == ["opened"]


def test_a_channel_that_is_down_is_tried_again_later_and_later_and_nothing_is_lost():
    desk = Desk(ear := Ear(failures=[away(), away(), RuntimeError("a password"), None]))
    desk.tell(alert())
    waits = []
    while (due := desk.deliver()) is not None:
        assert desk.deliver() == due  # too early: nothing is tried
        waits.append((due - desk.now).total_seconds())
        desk.now = due
    assert len(ear.heard) == 1
    assert ear.tries == 4
    assert desk.ends() == ["failed", "failed", "failed", "delivered"]
    for wait, mean in zip(waits, (5, 10, 20), strict=True):
        assert 0.5 * mean <= wait <= 1.5 * mean
    assert "password" not in str(desk.store.events)


def test_pauses_grow_to_an_hour_and_differ_from_notice_to_notice():
    policy = Policy()
    pauses = [policy.pause("k", n).total_seconds() for n in range(1, 30)]
    assert max(pauses) <= 1.5 * 3600
    assert min(pauses[12:]) >= 0.5 * 3600
    assert len({policy.pause(f"k{i}", 3) for i in range(50)}) == 50
    assert policy.pause("k", 3) == policy.pause("k", 3)
    assert policy.pause("k", 1, retryable=False) >= timedelta(minutes=30)
    assert policy.pause("k", 10**6) <= timedelta(hours=1.5)


def test_what_trying_again_does_not_mend_is_tried_again_an_hour_later():
    desk = Desk(ear := Ear(failures=[away(retryable=False)]))
    desk.tell(alert())
    assert desk.deliver() - NOON >= timedelta(minutes=30)
    desk.now += timedelta(hours=2)
    desk.deliver()
    assert len(ear.heard) == 1


def test_of_one_alert_notices_arrive_in_order_and_another_is_not_held_up():
    desk = Desk(ear := Ear(failures=[away()]))
    desk.tell(alert("a"))
    desk.deliver()
    desk.now += SECOND
    desk.tell(alert("a"), Phase.RECOVERED)
    desk.tell(alert("b"))
    due = desk.deliver()
    assert [(n.alert, n.action) for n in ear.heard] == [("b", "opened")]
    desk.now = due
    desk.deliver()
    assert [(n.alert, n.action) for n in ear.heard[1:]] == [("a", "opened"), ("a", "recovered")]


def test_a_channel_that_hangs_does_not_hold_up_another():
    desk = Desk(slow := Ear("slow", hangs=True), quick := Ear("quick"), timeout_s=0.05)
    desk.tell(alert())
    assert desk.deliver() is not None
    assert len(quick.heard) == 1
    assert slow.tries == 1
    assert "no answer within 0.05 s" in str(desk.store.events)


def test_a_process_that_dies_between_sending_and_noting_sends_again_with_the_same_key():
    desk = Desk(ear := Ear())
    desk.tell(alert())
    append = desk.store.append

    def dies(event_):
        raise KeyboardInterrupt

    desk.store.append = dies
    with pytest.raises(KeyboardInterrupt):
        desk.deliver()
    desk.store.append = append
    desk.deliver()
    desk.deliver()
    assert len(ear.heard) == 2
    assert len({n.key for n in ear.heard}) == 1


def test_a_store_that_takes_nothing_is_an_error_and_the_notice_comes_again(monkeypatch):
    desk = Desk(Ear())
    desk.tell(alert())
    monkeypatch.setattr(desk.store, "flush", lambda timeout_s=10.0: False)
    with pytest.raises(BackendError, match="sent again"):
        desk.deliver()


def test_who_does_not_lead_sends_nothing():
    desk = Desk(ear := Ear())
    desk.tell(alert())
    desk.deliver(may=lambda: False)
    assert ear.heard == []


def test_too_many_in_an_hour_become_one_notice():
    desk = Desk(ear := Ear(), per_hour=5)
    for i in range(12):
        desk.tell(alert(f"a{i}"))
    assert desk.deliver() is None
    assert [n.action for n in ear.heard] == ["opened"] * 3 + ["summary"]
    assert ear.heard[-1].title.startswith("9 more notices about 9 alerts")
    assert desk.ends() == ["delivered"] * 12
    desk.tell(alert("late"))
    assert desk.deliver() == NOON + timedelta(hours=1)
    assert len(ear.heard) == 4
    desk.now += timedelta(hours=1)
    desk.deliver()
    assert ear.heard[-1].alert == "late"


def test_one_place_is_kept_for_what_is_critical():
    desk = Desk(ear := Ear(), per_hour=5)
    for i in range(12):
        desk.tell(alert(f"a{i}", Severity.LOW))
    desk.deliver()
    desk.now += timedelta(minutes=1)
    desk.tell(alert("grave", Severity.CRITICAL))
    desk.deliver()
    assert len(ear.heard) == 5
    assert ear.heard[-1].alert == "grave"


def test_the_gravest_go_first():
    desk = Desk(ear := Ear(), per_hour=10)
    desk.tell(alert("low", Severity.LOW))
    desk.tell(alert("grave", Severity.CRITICAL))
    desk.deliver()
    assert [n.alert for n in ear.heard] == ["grave", "low"]


@pytest.mark.parametrize("per_hour", [1, 2, 3, 7])
def test_no_hour_has_more_than_are_allowed_and_all_are_told_of(per_hour):
    desk = Desk(ear := Ear(), per_hour=per_hour)
    sent, told = [], set()
    for minute in range(0, 360, 5):
        desk.now = NOON + timedelta(minutes=minute)
        if minute < 200:
            desk.tell(alert(f"a{minute}", list(Severity)[minute % 4]))
        before = len(ear.heard)
        desk.deliver()
        sent += [desk.now] * (len(ear.heard) - before)
    for start in sent:
        assert sum(start <= at < start + timedelta(hours=1) for at in sent) <= per_hour
    for notice in ear.heard:
        told |= set(notice.details["alerts"] if notice.action == "summary" else [notice.alert])
    assert told == {f"a{m}" for m in range(0, 200, 5)}


def test_what_is_old_and_over_is_given_up_and_noted():
    desk = Desk(ear := Ear(failures=[away()] * 100))
    desk.tell(alert("over"))
    desk.tell(alert("open"))
    desk.deliver()
    desk.now += timedelta(hours=1)
    desk.tell(alert("over"), Phase.RECOVERED)
    desk.now += timedelta(hours=26)
    ear.failures = []
    desk.deliver()
    assert [(n.alert, n.action) for n in ear.heard] == [("open", "opened")]
    assert desk.ends().count("given_up") == 2
    assert desk.deliver() is None


def test_the_last_word_on_an_open_alert_is_never_given_up():
    desk = Desk(ear := Ear(failures=[away()] * 50))
    desk.tell(alert())
    for hours in range(60):
        desk.now = NOON + timedelta(hours=hours)
        desk.deliver()
    ear.failures = []
    desk.now += timedelta(hours=2)
    desk.deliver()
    assert len(ear.heard) == 1


@pytest.mark.parametrize("options", [{"per_hour": 0}, {"first_s": 0.0}, {"longest_s": 1.0}, {"give_up_s": 0.0}])
def test_a_policy_out_of_range(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Policy(**options)
