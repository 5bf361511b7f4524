"""Notification channels over real HTTP: payloads, signatures and errors, without secrets in messages or logs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.app import open_app
from casemate.backends.channels.apprise import AppriseChannel
from casemate.backends.channels.webhook import WebhookChannel, signature, verify
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.config import PluginSpec
from casemate.errors import BackendError, ConfigError
from casemate.monitor.alerts import delivery_queue
from casemate.monitor.alerts.alert import Alert, raise_alert
from casemate.monitor.alerts.delivery_queue import DELIVERY_KIND
from casemate.monitor.alerts.outbox import Outbox
from casemate.monitor.canaries.results import Severity
from casemate.monitor.service import open_alert_dispatcher
from casemate.plugins import build
from casemate.types import Notification, Secret
from tests.unit.listener import Listener

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
KEY = Secret("both sides know it")


def notice(**fields):
    defaults = {
        "key": "alert:opened:a@webhook",
        "alert": "a",
        "action": "opened",
        "severity": "high",
        "at": NOON,
        "title": "[high] clinic: 1 of its canaries fails",
        "text": "What changed:\n- everything",
        "markdown": "**What changed**",
        "details": {"kind": "changed", "set": "clinic", "canaries": ["c0"], "documents": ["d"]},
    }
    return Notification(**defaults | fields)


def send(channel, what=None):
    asyncio.run(channel.send(what or notice()))


def send_headers_slowly(server):
    """Answers one request with one header per 0.1 s, for two seconds."""
    connection, _ = server.accept()
    with connection, contextlib.suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        for _ in range(20):
            connection.sendall(b"X-More: 1\r\n")
            time.sleep(0.1)
        connection.sendall(b"Content-Length: 0\r\n\r\n")


class TestWebhook:
    def test_posts_a_signed_notification(self):
        with Listener() as listener:
            send(WebhookChannel(Secret(listener.url), KEY))
        ((headers, body),) = listener.posts
        assert listener.bodies == [
            {
                "key": "alert:opened:a@webhook",
                "alert": "a",
                "action": "opened",
                "severity": "high",
                "at": "2026-03-01T12:00:00+00:00",
                "title": "[high] clinic: 1 of its canaries fails",
                "text": "What changed:\n- everything",
                "markdown": "**What changed**",
                "details": {"kind": "changed", "set": "clinic", "canaries": ["c0"], "documents": ["d"]},
            }
        ]
        at = headers["X-Casemate-Timestamp"]
        assert abs(int(at) - time.time()) < 60
        oracle = hmac.new(b"both sides know it", at.encode() + b"." + body, hashlib.sha256).hexdigest()
        assert headers["X-Casemate-Signature"] == f"sha256={oracle}"
        assert verify(KEY, at, body, headers["X-Casemate-Signature"])
        assert headers["Idempotency-Key"] == "alert:opened:a@webhook"
        assert headers["Content-Type"] == "application/json"

    @pytest.mark.parametrize(
        ("action", "event"), [("opened", "trigger"), ("updated", "trigger"), ("recovered", "resolve")]
    )
    def test_pagerduty_events_open_update_and_resolve_one_incident(self, action, event):
        with Listener([202]) as listener:
            channel = WebhookChannel(Secret(listener.url), format="pagerduty", routing_key=Secret("r0ute"))
            send(channel, notice(action=action, severity="medium"))
        (body,) = listener.bodies
        assert (body["routing_key"], body["event_action"], body["dedup_key"]) == ("r0ute", event, "a")
        payload = body["payload"]
        assert (payload["severity"], payload["source"], payload["class"]) == ("warning", "clinic", "changed")
        assert payload["summary"] == "[high] clinic: 1 of its canaries fails"
        assert payload["custom_details"]["documents"] == ["d"]
        assert "X-Casemate-Signature" not in listener.posts[0][0]

    def test_incident_of_a_test_notification_is_resolved(self):
        with Listener([202, 202]) as listener:
            channel = WebhookChannel(Secret(listener.url), format="pagerduty", routing_key=Secret("r0ute"))
            send(channel, notice(action="test", alert="test-1"))
        events = [(body["event_action"], body["dedup_key"]) for body in listener.bodies]
        assert events == [("trigger", "test-1"), ("resolve", "test-1")]

    @pytest.mark.parametrize(
        ("status", "retryable"),
        [(500, True), (503, True), (429, True), (408, True), (400, False), (401, False), (302, False)],
    )
    def test_http_errors_are_classified_and_redirects_not_followed(self, status, retryable):
        with Listener([status]) as listener, pytest.raises(BackendError, match=f"HTTP {status}") as caught:
            send(WebhookChannel(Secret(listener.url), KEY, name="ops"))
        assert caught.value.retryable is retryable
        assert "'ops'" in str(caught.value)
        assert len(listener.posts) == 1

    def test_connection_errors_are_retryable(self):
        with pytest.raises(BackendError, match="connection failed") as caught:
            send(WebhookChannel(Secret("http://127.0.0.1:9/hook/t0ken"), KEY))
        assert caught.value.retryable

    def test_timeouts_are_retryable(self):
        with Listener(hold=threading.Event()) as listener, pytest.raises(BackendError, match="Timeout") as caught:
            send(WebhookChannel(Secret(listener.url), KEY, timeout_s=0.2))
        assert caught.value.retryable

    def test_a_receiver_that_sends_headers_slowly_times_out(self):
        with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
            pool.submit(send_headers_slowly, server)
            url = Secret(f"http://127.0.0.1:{server.getsockname()[1]}/t0ken")
            with pytest.raises(BackendError, match="TimeoutError") as caught:
                send(WebhookChannel(url, KEY, timeout_s=0.3))
        assert caught.value.retryable

    def test_the_response_body_is_not_read(self):
        start_time = time.process_time()
        with Listener(answer=b"x" * 50_000_000) as listener:
            send(WebhookChannel(Secret(listener.url), KEY))
        assert time.process_time() - start_time < 2

    @pytest.mark.parametrize(
        "url",
        ["http://127.0.0.1:9/t0ken", "https://[bad/t0ken", "http://127.0.0.1:x/t0ken", "http://127.0.0.1/t0ken\x00"],
    )
    def test_the_url_is_in_no_error_or_log(self, url, caplog):
        caplog.set_level(logging.DEBUG)
        channel = WebhookChannel(Secret(url), KEY)
        with pytest.raises(BackendError) as caught:
            send(channel)
        shown = "".join([repr(channel), str(caught.value), repr(caught.value.__cause__), caplog.text])
        assert "t0ken" not in shown
        assert "both sides" not in shown

    def test_the_url_is_in_no_log_on_success(self, caplog):
        caplog.set_level(logging.DEBUG)
        with Listener() as listener:
            send(WebhookChannel(Secret(listener.url), KEY))
            send(WebhookChannel(Secret(listener.url + " \u00e9"), KEY))  # httpx logs it as %20%C3%A9
        assert len(listener.posts) == 2
        assert "t0ken" not in caplog.text
        assert not logging.getLogger("httpx").filters

    def test_a_non_ascii_key_becomes_a_valid_header(self):
        with Listener() as listener:
            send(WebhookChannel(Secret(listener.url), KEY), notice(key="Ä"))
            send(WebhookChannel(Secret(listener.url), KEY), notice(key="Ö"))
        assert len({headers["Idempotency-Key"] for headers, _ in listener.posts}) == 2

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"url": Secret("ftp://x"), "secret": KEY}, "must begin with https"),
            ({"url": Secret("https://x")}, "set secret"),
            ({"url": Secret("https://x"), "format": "pagerduty"}, "set routing_key"),
            ({"url": Secret("https://x"), "secret": KEY, "timeout_s": 0}, "timeout_s"),
        ],
    )
    def test_invalid_options_are_refused(self, options, says):
        with pytest.raises(ConfigError, match=says):
            WebhookChannel(**options)


@given(st.text(max_size=20), st.integers(0, 2**40), st.binary(max_size=50), st.binary(max_size=50))
def test_verify_accepts_recent_signatures_only(secret, at, body, other):
    signed = signature(secret, str(at), body)
    assert verify(secret, str(at), body, signed, now=at + 299)
    assert not verify(secret, str(at), body, signed, now=at + 301)
    assert not verify(secret, str(at), body, signed, now=at - 301)
    assert verify(secret, str(at), other, signed, now=at) == (other == body)
    assert not verify(secret + "x", str(at), body, signed, now=at)
    assert not verify(secret, str(at + 1), body, signed, now=at)


@pytest.mark.parametrize(("at", "signed"), [("", ""), ("nan", "sha256=00"), ("²", "sha256=ü"), ("1e9", "sha256=")])
def test_verify_refuses_malformed_input(at, signed):
    assert not verify("s", at, b"", signed, now=0)
    assert not verify("s", at, b"", signature("s", at, b""), now=0)


@pytest.mark.parametrize(
    ("at", "signed"), [("1\udcff", "sha256=00"), ("1", "sha256=\udcff"), ("9" * 5000, "sha256=00")]
)
def test_verify_refuses_headers_that_are_no_text_or_number(at, signed):
    assert not verify("s", at, b"", signed)  # aiohttp, for one, decodes other bytes to lone surrogates


class TestApprise:
    def test_sends_with_apprise(self):
        with Listener() as listener:
            send(AppriseChannel(Secret(listener.url.replace("http://", "json://"))))
        (body,) = listener.bodies
        assert body["title"] == "[high] clinic: 1 of its canaries fails"
        assert "What changed" in body["message"]
        assert "alert:opened:a@webhook" in body["message"]
        assert body["type"] == "warning"

    def test_recovery_is_sent_as_success(self):
        with Listener() as listener:
            send(AppriseChannel(Secret(listener.url.replace("http://", "json://"))), notice(action="recovered"))
        assert listener.bodies[0]["type"] == "success"

    def test_error_of_a_service_is_retryable_and_does_not_contain_its_url(self, caplog):
        caplog.set_level(logging.DEBUG)
        with Listener([500, 500, 500]) as listener:
            channel = AppriseChannel(Secret(listener.url.replace("http://", "json://user:passw0rd@")))
            with pytest.raises(BackendError, match="did not accept") as caught:
                send(channel)
        assert caught.value.retryable
        assert listener.posts
        for secret in ("t0ken", "passw0rd"):
            assert secret not in caplog.text + repr(channel) + str(caught.value)
        assert not logging.getLogger("apprise").filters

    def test_unsupported_urls_are_refused(self, caplog):
        with pytest.raises(ConfigError, match="apprise does not support this url") as caught:
            send(AppriseChannel(Secret("nonsense://t0ken")))
        assert "t0ken" not in str(caught.value) + caplog.text
        with pytest.raises(ConfigError, match="set url"):
            AppriseChannel(Secret(""))

    def test_service_without_a_response_times_out(self):
        with Listener(hold=threading.Event()) as listener:
            channel = AppriseChannel(Secret(listener.url.replace("http://", "json://")), timeout_s=0.2)

            async def send_until_timeout():
                with pytest.raises(BackendError, match=r"no answer within 0\.2 s"):
                    await channel.send(notice())
                listener.hold.set()  # the thread ends with the response

            asyncio.run(send_until_timeout())


def test_channels_are_built_from_configuration_and_secrets_from_the_environment():
    made = build("channel", PluginSpec(use="webhook", url=Secret("https://x"), secret=KEY, name="ops"))
    assert (made.name, made.format) == ("ops", "casemate")
    assert build("channel", PluginSpec(use="apprise", url=Secret("json://x"))).name == "apprise"
    with pytest.raises(ConfigError, match="is a secret"):
        build("channel", PluginSpec(use="webhook", url="https://x", secret=KEY))


def test_all_errors_of_all_channels_are_reported_at_once(tmp_path):
    (tmp_path / "casemate.yaml").write_text(
        "monitor: {channels: [{use: webhook, name: ops, url: '${TEST_URL}', timeout_s: 0}, {use: webhok}, "
        "{use: apprise, name: chat, url: '${TEST_URL}', wrong: 1}]}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_URL", "ftp://receiver")
        with open_app(tmp_path / "casemate.yaml") as app, pytest.raises(ConfigError) as raised:
            open_alert_dispatcher(app)
    message = str(raised.value)
    assert message.startswith("3 channels are configured wrongly: channel 'ops': ")
    for error in ("the url must begin", "set secret to", "timeout_s is 0", "webhok", "apprise' has no option 'wrong'"):
        assert error in message


def test_retried_deliveries_have_the_same_key(tmp_path, monkeypatch):
    monkeypatch.setattr(delivery_queue, "MAX_BACKOFF_S", 0.05)
    store = SqlEventStore(path=tmp_path / "events.db")
    alert = Alert("a", "changed", Severity.HIGH, "clinic", ("c0",), NOON, "c0 fails")
    raise_alert(store, alert, datetime.now(UTC))
    with Listener([503, 500, 429]) as listener:
        outbox = Outbox(store, WebhookChannel(Secret(listener.url), KEY))

        async def until_done():
            while (due := await outbox.deliver(lambda: datetime.now(UTC))) is not None:
                await asyncio.sleep(max((due - datetime.now(UTC)).total_seconds(), 0))

        asyncio.run(until_done())
    assert [e.body["outcome"] for e in store.scan(DELIVERY_KIND)] == ["failed", "failed", "failed", "delivered"]
    assert len({b["key"] for b in listener.bodies}) == 1 and len(listener.posts) == 4
    store.close()


SENDER = """
import asyncio, sys
from datetime import UTC, datetime
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.backends.channels.webhook import WebhookChannel
from casemate.monitor.alerts.outbox import Outbox
from casemate.types import Secret

store = SqlEventStore(sys.argv[1])
channel = WebhookChannel(Secret(sys.argv[2]), Secret("k"), timeout_s=30)
asyncio.run(Outbox(store, channel).deliver(lambda: datetime.now(UTC)))
store.close()
"""


@pytest.mark.slow
def test_a_delivery_killed_before_it_was_recorded_is_repeated_with_the_same_key(tmp_path):
    url = f"sqlite:///{tmp_path}/events.db"
    store = SqlEventStore(url)
    raise_alert(store, Alert("a", "changed", Severity.HIGH, "clinic", ("c0",), NOON, "c0 fails"), datetime.now(UTC))
    assert store.flush()
    hold = threading.Event()
    with Listener(hold=hold) as listener:
        command = [sys.executable, "-c", SENDER, url, listener.url]
        process = subprocess.Popen(command)
        give_up = time.monotonic() + 60
        while not listener.posts and time.monotonic() < give_up:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)  # delivered, but not recorded
        process.wait(30)
        hold.set()
        assert store.scan(DELIVERY_KIND) == []
        assert subprocess.run(command, check=False, timeout=60).returncode == 0
        assert subprocess.run(command, check=False, timeout=60).returncode == 0
    assert [b["key"] for b in listener.bodies] == ["alert:opened:a@webhook"] * 2
    assert [e.body["outcome"] for e in store.scan(DELIVERY_KIND)] == ["delivered"]
    store.close()
