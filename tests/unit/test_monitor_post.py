"""The post: whoever is there brings alerts to people, and of several only one."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from datetime import UTC, datetime

import pytest

from casemate.backends.sql_events import SqlEvents
from casemate.errors import BackendError, ConfigError
from casemate.monitor.alerts.alert import Alert, open_alerts, raise_alert
from casemate.monitor.canaries.results import Severity
from casemate.monitor.watch.leader import together
from casemate.monitor.watch.post import Post
from casemate.monitor.watch.settings import Settings
from casemate.types import Event
from tests.unit.monitor_stores import Kept
from tests.unit.test_monitor_outbox import Ear

QUICK = Settings(lease_s=0.3, poll_s=0.02)


def now():
    return datetime.now(UTC)


def raised(store, name="a"):
    return raise_alert(store, Alert(name, "changed", Severity.HIGH, "clinic", (name,), now(), f"{name} fails"), now())


def leak():
    evidence = {"what": "leaked", "form": "url", "generation": 1, "disguise": "plain"}
    body = {"defense": "honeytoken", "flagged": True, "client": "c", "tenant": "t", "request": "r"}
    return Event("v", now(), "verdict", body | {"evidence": evidence})


async def until(holds, *work):
    """Works until something holds."""
    task, give_up = asyncio.ensure_future(together(*work)), time.monotonic() + 60
    while not holds():
        assert not task.done(), task.exception()
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_what_is_due_is_sent_once_unless_another_process_does_it():
    store, ear, other = Kept(), Ear(), Ear("other")
    raised(store)
    assert asyncio.run(Post(store, [ear]).once()) is True
    assert len(ear.heard) == 1 and store.leases == {}
    post = Post(store, [other])
    assert store.lease(post._leader("other").name, "another", 60)
    assert asyncio.run(post.once()) is False and not other.heard


def test_what_was_missed_is_opened_and_sent_also_without_channels():
    store, ear = Kept(), Ear()
    store.append(leak())
    assert asyncio.run(Post(store).once()) is True
    assert [s.alert.kind for s in open_alerts(store)] == ["honey_leak"]
    asyncio.run(Post(store, [ear]).once())
    assert [n.severity for n in ear.heard] == ["critical"]


def test_for_ever_it_opens_and_sends_what_comes(tmp_path):
    ear = Ear()
    with closing(SqlEvents(path=tmp_path / "e.db")) as store:

        async def story():
            await until(lambda: len(ear.heard) == 1, Post(store, [ear], QUICK).run(), asyncio.to_thread(raised, store))
            await until(lambda: len(ear.heard) == 2, Post(store, [ear], QUICK).run(), _later(store.append, leak()))

        asyncio.run(story())
        assert [n.details["kind"] for n in ear.heard] == ["changed", "honey_leak"]


async def _later(call, *arguments):
    await asyncio.sleep(0.1)
    call(*arguments)


def test_of_several_that_share_a_store_one_sends(tmp_path):
    ears = [Ear(), Ear(), Ear()]
    with closing(SqlEvents(path=tmp_path / "e.db")) as store:
        for name in "abcdefgh":
            raised(store, name)
        posts = [Post(store, [ear], Settings(lease_s=5, poll_s=0.02)) for ear in ears]
        asyncio.run(until(lambda: sum(len(ear.heard) for ear in ears) >= 8, *(post.run() for post in posts)))
    assert sorted(len(ear.heard) for ear in ears) == [0, 0, 8]


def test_a_channel_that_hangs_holds_up_no_other():
    store, ear = Kept(), Ear()
    raised(store)
    post = Post(store, [Ear("deaf", hangs=True), ear], QUICK)
    asyncio.run(until(lambda: ear.heard, post.run()))
    assert store.leases == {}


def test_a_store_that_fails_for_a_while_is_tried_again(monkeypatch):
    store, ear = Kept(), Ear()
    raised(store)
    scan, failed = store.scan, []

    def fails(kind=None, since=None):
        if len(failed) < 3:
            failed.append(kind)
            raise BackendError("away", backend="kept", retryable=True)
        return scan(kind, since)

    monkeypatch.setattr(store, "scan", fails)
    asyncio.run(until(lambda: ear.heard, Post(store, [ear], QUICK).run()))


def test_channels_need_names_of_their_own():
    with pytest.raises(ConfigError, match="same name: ear, ear"):
        Post(Kept(), (Ear(), Ear()))
    Post(Kept(), (Ear(), Ear("x" * 500)))


def test_what_one_raises_ends_the_others():
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
        asyncio.run(together(waits(), fails()))
    assert ended == [True]
