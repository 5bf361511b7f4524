"""Outbox and delivery queue: no loss, order per alert, rate limit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from casemate.errors import BackendError
from casemate.monitor.alerts.alert import Alert, AlertPhase, acknowledge_alert, alert_to_event
from casemate.monitor.alerts.delivery_queue import DELIVERY_KIND, backoff
from casemate.monitor.alerts.outbox import Outbox
from casemate.monitor.canaries.results import Severity
from casemate.protocols import Channel
from tests.unit.monitor_stores import InMemoryEventStore

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


class FakeChannel(Channel):
    """Receives notifications, or fails a given number of times."""

    def __init__(self, name="channel", failures=(), hangs=False):
        self.name, self.failures, self.hangs, self.received, self.attempts = name, list(failures), hangs, [], 0

    async def send(self, notification):
        self.attempts += 1
        if self.hangs:
            await asyncio.sleep(3600)
        if self.failures and (failure := self.failures.pop(0)):
            raise failure
        self.received.append(notification)


def unreachable(retryable=True):
    return BackendError("unreachable", backend="channel", retryable=retryable)


def alert(name="a", severity=Severity.HIGH, **fields):
    return replace(Alert(name, "changed", severity, "clinic", ("c0",), NOON, f"title of {name}"), **fields)


class OutboxHarness:
    """Outboxes of some channels, their store, and a settable clock."""

    def __init__(self, *channels, per_hour=20):
        self.store, self.channels, self.now = InMemoryEventStore(), channels, NOON
        self.per_hour = per_hour

    def record(self, alert_, phase=AlertPhase.OPENED, quiet=False):
        self.store.append(alert_to_event(alert_, phase, self.now, self.now.isoformat(), quiet))

    def deliver(self, may_send=lambda: True):
        async def main():
            boxes = [Outbox(self.store, channel, self.per_hour) for channel in self.channels]
            return await asyncio.gather(*(box.deliver(lambda: self.now, may_send) for box in boxes))

        return min((due for due in asyncio.run(main()) if due), default=None)

    def outcomes(self, channel="channel"):
        return [e.body["outcome"] for e in self.store.scan(DELIVERY_KIND) if e.body["channel"] == channel]


def test_delivers_each_change_to_each_channel_once():
    outbox = OutboxHarness(one := FakeChannel("one"), two := FakeChannel("two"))
    outbox.record(alert())
    for _ in range(3):
        assert outbox.deliver() is None
    outbox.now += SECOND
    outbox.record(alert(), AlertPhase.RECOVERED)
    outbox.deliver()
    for channel in (one, two):
        assert [(n.alert, n.action, n.severity) for n in channel.received] == [
            ("a", "opened", "high"),
            ("a", "recovered", "high"),
        ]
    assert {n.key for n in one.received}.isdisjoint(n.key for n in two.received)
    assert one.received[0].details == {
        "kind": "changed",
        "set": "clinic",
        "canaries": ["c0"],
        "since": NOON.isoformat(),
        "documents": [],
        "sources": [],
        "changed": [],
    }
    assert "title of a" in one.received[0].text and "**" in one.received[0].markdown


def test_does_not_send_quiet_changes_and_acknowledgments():
    outbox = OutboxHarness(channel := FakeChannel())
    assert outbox.deliver() is None
    outbox.record(alert())
    outbox.record(alert(), AlertPhase.UPDATED, quiet=True)
    acknowledge_alert(outbox.store, "a", "ada", NOON)
    outbox.deliver()
    assert [n.action for n in channel.received] == ["opened"]


def test_retries_with_exponential_backoff_until_delivery():
    outbox = OutboxHarness(
        channel := FakeChannel(failures=[unreachable(), unreachable(), RuntimeError("a password"), None])
    )
    outbox.record(alert())
    backoffs = []
    while (due := outbox.deliver()) is not None:
        assert outbox.deliver() == due  # too early: no attempt
        backoffs.append((due - outbox.now).total_seconds())
        outbox.now = due
    assert len(channel.received) == 1
    assert channel.attempts == 4
    assert outbox.outcomes() == ["failed", "failed", "failed", "delivered"]
    for pause, mean in zip(backoffs, (5, 10, 20), strict=True):
        assert 0.5 * mean <= pause <= 1.5 * mean
    assert "password" not in str(outbox.store.events)


def test_backoff_increases_to_one_hour_with_jitter_per_notification():
    pauses = [backoff("k", n).total_seconds() for n in range(1, 30)]
    assert max(pauses) <= 1.5 * 3600
    assert min(pauses[12:]) >= 0.5 * 3600
    assert len({backoff(f"k{i}", 3) for i in range(50)}) == 50
    assert backoff("k", 3) == backoff("k", 3)
    assert backoff("k", 1, retryable=False) >= timedelta(minutes=30)
    assert backoff("k", 10**6) <= timedelta(hours=1.5)


def test_retries_permanent_failures_after_an_hour():
    outbox = OutboxHarness(channel := FakeChannel(failures=[unreachable(retryable=False)]))
    outbox.record(alert())
    assert outbox.deliver() - NOON >= timedelta(minutes=30)
    outbox.now += timedelta(hours=2)
    outbox.deliver()
    assert len(channel.received) == 1


def test_notifications_of_one_alert_stay_in_order_and_do_not_delay_others():
    outbox = OutboxHarness(channel := FakeChannel(failures=[unreachable()]))
    outbox.record(alert("a"))
    outbox.deliver()
    outbox.now += SECOND
    outbox.record(alert("a"), AlertPhase.RECOVERED)
    outbox.record(alert("b"))
    due = outbox.deliver()
    assert [(n.alert, n.action) for n in channel.received] == [("b", "opened")]
    outbox.now = due
    outbox.deliver()
    assert [(n.alert, n.action) for n in channel.received[1:]] == [("a", "opened"), ("a", "recovered")]


def test_hanging_channel_does_not_delay_another(monkeypatch):
    monkeypatch.setattr("casemate.monitor.alerts.outbox.TIMEOUT_S", 0.05)
    outbox = OutboxHarness(slow := FakeChannel("slow", hangs=True), quick := FakeChannel("quick"))
    outbox.record(alert())
    assert outbox.deliver() is not None
    assert len(quick.received) == 1
    assert slow.attempts == 1
    assert "no answer within 0.05 s" in str(outbox.store.events)


def test_sends_again_with_the_same_key_after_a_crash_before_the_record():
    outbox = OutboxHarness(channel := FakeChannel())
    outbox.record(alert())
    append = outbox.store.append

    def interrupt(event_):
        raise KeyboardInterrupt

    outbox.store.append = interrupt
    with pytest.raises(KeyboardInterrupt):
        outbox.deliver()
    outbox.store.append = append
    outbox.deliver()
    outbox.deliver()
    assert len(channel.received) == 2
    assert len({n.key for n in channel.received}) == 1


def test_unconfirmed_write_is_an_error_and_is_sent_again(monkeypatch):
    outbox = OutboxHarness(FakeChannel())
    outbox.record(alert())
    monkeypatch.setattr(outbox.store, "flush", lambda timeout_s=10.0: False)
    with pytest.raises(BackendError, match="sent again"):
        outbox.deliver()


def test_sends_nothing_without_the_lease():
    outbox = OutboxHarness(channel := FakeChannel())
    outbox.record(alert())
    outbox.deliver(may_send=lambda: False)
    assert channel.received == []


def test_sends_one_summary_above_the_rate_limit():
    outbox = OutboxHarness(channel := FakeChannel(), per_hour=5)
    for i in range(12):
        outbox.record(alert(f"a{i}"))
    assert outbox.deliver() is None
    assert [n.action for n in channel.received] == ["opened"] * 3 + ["summary"]
    assert channel.received[-1].title.startswith("9 more notifications about 9 alerts")
    assert outbox.outcomes() == ["delivered"] * 12
    outbox.record(alert("late"))
    assert outbox.deliver() == NOON + timedelta(hours=1)
    assert len(channel.received) == 4
    outbox.now += timedelta(hours=1)
    outbox.deliver()
    assert channel.received[-1].alert == "late"


def test_one_notification_per_hour_is_reserved_for_critical_alerts():
    outbox = OutboxHarness(channel := FakeChannel(), per_hour=5)
    for i in range(12):
        outbox.record(alert(f"a{i}", Severity.LOW))
    outbox.deliver()
    outbox.now += timedelta(minutes=1)
    outbox.record(alert("grave", Severity.CRITICAL))
    outbox.deliver()
    assert len(channel.received) == 5
    assert channel.received[-1].alert == "grave"


def test_sends_the_most_severe_first():
    outbox = OutboxHarness(channel := FakeChannel(), per_hour=10)
    outbox.record(alert("low", Severity.LOW))
    outbox.record(alert("grave", Severity.CRITICAL))
    outbox.deliver()
    assert [n.alert for n in channel.received] == ["grave", "low"]


@pytest.mark.parametrize("per_hour", [1, 2, 3, 7])
def test_rate_limit_holds_in_every_hour_and_every_alert_is_reported(per_hour):
    outbox = OutboxHarness(channel := FakeChannel(), per_hour=per_hour)
    sent, reported = [], set()
    for minute in range(0, 360, 5):
        outbox.now = NOON + timedelta(minutes=minute)
        if minute < 200:
            outbox.record(alert(f"a{minute}", list(Severity)[minute % 4]))
        before = len(channel.received)
        outbox.deliver()
        sent += [outbox.now] * (len(channel.received) - before)
    for start in sent:
        assert sum(start <= at < start + timedelta(hours=1) for at in sent) <= per_hour
    for notification in channel.received:
        reported |= set(notification.details["alerts"] if notification.action == "summary" else [notification.alert])
    assert reported == {f"a{m}" for m in range(0, 200, 5)}


def test_old_notifications_of_recovered_alerts_expire():
    outbox = OutboxHarness(channel := FakeChannel(failures=[unreachable()] * 100))
    outbox.record(alert("over"))
    outbox.record(alert("open"))
    outbox.deliver()
    outbox.now += timedelta(hours=1)
    outbox.record(alert("over"), AlertPhase.RECOVERED)
    outbox.now += timedelta(hours=26)
    channel.failures = []
    outbox.deliver()
    assert [(n.alert, n.action) for n in channel.received] == [("open", "opened")]
    assert outbox.outcomes().count("expired") == 2
    assert outbox.deliver() is None


def test_latest_notification_of_an_open_alert_never_expires():
    outbox = OutboxHarness(channel := FakeChannel(failures=[unreachable()] * 50))
    outbox.record(alert())
    for hours in range(60):
        outbox.now = NOON + timedelta(hours=hours)
        outbox.deliver()
    channel.failures = []
    outbox.now += timedelta(hours=2)
    outbox.deliver()
    assert len(channel.received) == 1
