"""The alert dispatcher: one of several processes delivers."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from datetime import UTC, datetime

import pytest

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.errors import BackendError, ConfigError
from casemate.monitor.alerts.alert import Alert, open_alerts, raise_alert
from casemate.monitor.canaries.results import Severity
from casemate.monitor.scheduler.leader_election import run_concurrently
from casemate.monitor.scheduler.watch import AlertDispatcher, WatchSettings
from casemate.types import Event
from tests.unit.monitor_stores import InMemoryEventStore
from tests.unit.test_monitor_outbox import FakeChannel

QUICK = WatchSettings(lease_s=0.3, poll_s=0.02)


def now():
    return datetime.now(UTC)


def raise_test_alert(store, name="a"):
    return raise_alert(store, Alert(name, "changed", Severity.HIGH, "clinic", (name,), now(), f"{name} fails"), now())


def leak_event():
    evidence = {"what": "leaked", "form": "url", "generation": 1, "disguise": "plain"}
    body = {"defense": "honeytoken", "flagged": True, "client": "c", "tenant": "t", "request": "r"}
    return Event("v", now(), "verdict", body | {"evidence": evidence})


async def run_until(condition, *work):
    """Runs coroutines until a condition is true."""
    task, deadline = asyncio.ensure_future(run_concurrently(*work)), time.monotonic() + 60
    while not condition():
        assert not task.done(), task.exception()
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_sends_due_notifications_unless_another_process_holds_the_lease():
    store, channel, other = InMemoryEventStore(), FakeChannel(), FakeChannel("other")
    raise_test_alert(store)
    assert asyncio.run(AlertDispatcher(store, [channel]).dispatch_once()) is True
    assert len(channel.received) == 1 and store.leases == {}
    dispatcher = AlertDispatcher(store, [other])
    assert store.lease(dispatcher._election("other").name, "another", 60)
    assert asyncio.run(dispatcher.dispatch_once()) is False and not other.received


def test_opens_missed_alerts_even_without_channels():
    store, channel = InMemoryEventStore(), FakeChannel()
    store.append(leak_event())
    assert asyncio.run(AlertDispatcher(store).dispatch_once()) is True
    assert [s.alert.kind for s in open_alerts(store)] == ["honeytoken_leak"]
    asyncio.run(AlertDispatcher(store, [channel]).dispatch_once())
    assert [n.severity for n in channel.received] == ["critical"]


def test_opens_and_sends_alerts_until_cancelled(tmp_path):
    channel = FakeChannel()

    def kinds():
        return [notification.details["kind"] for notification in channel.received]

    with closing(SqlEventStore(path=tmp_path / "e.db")) as store:

        async def dispatch_two_alerts():
            await run_until(
                lambda: kinds() == ["changed"],
                AlertDispatcher(store, [channel], QUICK).run(),
                asyncio.to_thread(raise_test_alert, store),
            )
            await run_until(
                lambda: "honeytoken_leak" in kinds(),
                AlertDispatcher(store, [channel], QUICK).run(),
                _later(store.append, leak_event()),
            )

        asyncio.run(dispatch_two_alerts())
        # A delivery that was cancelled before it was recorded is repeated.
        assert kinds() in (["changed", "honeytoken_leak"], ["changed", "changed", "honeytoken_leak"])


async def _later(call, *arguments):
    await asyncio.sleep(0.1)
    call(*arguments)


def test_one_of_several_processes_on_a_store_sends(tmp_path):
    channels = [FakeChannel(), FakeChannel(), FakeChannel()]
    with closing(SqlEventStore(path=tmp_path / "e.db")) as store:
        for name in "abcdefgh":
            raise_test_alert(store, name)
        dispatchers = [AlertDispatcher(store, [channel], WatchSettings(lease_s=5, poll_s=0.02)) for channel in channels]
        asyncio.run(
            run_until(
                lambda: sum(len(channel.received) for channel in channels) >= 8,
                *(dispatcher.run() for dispatcher in dispatchers),
            )
        )
    assert sorted(len(channel.received) for channel in channels) == [0, 0, 8]


def test_hanging_channel_does_not_delay_others():
    store, channel = InMemoryEventStore(), FakeChannel()
    raise_test_alert(store)
    dispatcher = AlertDispatcher(store, [FakeChannel("deaf", hangs=True), channel], QUICK)
    asyncio.run(run_until(lambda: channel.received, dispatcher.run()))
    assert store.leases == {}


def test_retries_a_failing_store(monkeypatch):
    store, channel = InMemoryEventStore(), FakeChannel()
    raise_test_alert(store)
    scan, failed = store.scan, []

    def fails(kind=None, since=None):
        if len(failed) < 3:
            failed.append(kind)
            raise BackendError("unreachable", backend="kept", retryable=True)
        return scan(kind, since)

    monkeypatch.setattr(store, "scan", fails)
    asyncio.run(run_until(lambda: channel.received, AlertDispatcher(store, [channel], QUICK).run()))


def test_channel_names_must_be_unique():
    with pytest.raises(ConfigError, match="same name: channel, channel; .* set `name:`"):
        AlertDispatcher(InMemoryEventStore(), (FakeChannel(), FakeChannel()))
    AlertDispatcher(InMemoryEventStore(), (FakeChannel(), FakeChannel("x" * 500)))


def test_first_exception_cancels_the_other_tasks():
    ended = []

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def fails():
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(run_concurrently(waits(), fails()))
    assert ended == [True]
