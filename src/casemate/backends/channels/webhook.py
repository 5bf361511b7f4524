r"""Notifications as signed JSON over HTTP, or as PagerDuty events.

``format: casemate`` posts the notification with two headers. ``X-Casemate-Timestamp`` is the time of sending in seconds
since 1970. ``X-Casemate-Signature`` is ``sha256=`` and the hexadecimal HMAC-SHA256 of timestamp, a dot and the body,
keyed by the shared secret. ``Idempotency-Key`` is the same for repeated deliveries of one notification. A receiver
verifies with ``verify``, and then ignores a body whose ``key`` it has seen. The signature does not cover the header:

>>> secret, body = "a shared secret", b'{"title": "clinic: 2 canaries failed at once"}'
>>> signed = signature(secret, "1772366400", body)
>>> verify(secret, "1772366400", body, signed, now=1772366409)
True
>>> verify(secret, "1772366400", body + b" ", signed, now=1772366409)  # changed in transit
False
>>> verify(secret, "1772366400", body, signed, now=1772369999)  # replayed an hour later
False

In another language: join timestamp, ".", and the raw body; compute the HMAC; compare in constant time.

``format: pagerduty`` posts events for PagerDuty's Events API v2 or a compatible one. The alert's id is the
``dedup_key``, so an update changes the incident and a recovery resolves it. A test opens an incident and resolves it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from casemate.errors import BackendError, ConfigError, needs
from casemate.protocols import Channel
from casemate.types import Notification, Secret

TOLERANCE_S = 300.0  # largest age of a valid signature, in seconds
PAGERDUTY_SEVERITIES = {"low": "info", "medium": "warning", "high": "error", "critical": "critical"}
"""PagerDuty's names of the severities."""
MAX_SUMMARY = 1024  # largest length of PagerDuty's summary, in characters


@dataclass(eq=False)
class WebhookChannel(Channel):
    """Posts notifications to a URL: signed, or as PagerDuty events.

    Attributes:
        url: The address, which often contains a token.
        secret: Key of the signature. Required unless ``format`` is ``pagerduty``.
        format: ``casemate``: the notification as JSON. ``pagerduty``: an event for an events API.
        routing_key: Key of the PagerDuty integration. Required for ``pagerduty``.
        name: Name of the channel in the delivery log, unique among channels.
        timeout_s: Limit of one delivery, in seconds, from the connection to the status of the response.
    """

    url: Secret = field(repr=False)
    secret: Secret = field(default=Secret(""), repr=False)
    format: Literal["casemate", "pagerduty"] = "casemate"
    routing_key: Secret = field(default=Secret(""), repr=False)
    name: str = "webhook"
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        wrong = {
            "the url must begin with https:// or http://": not self.url.startswith(("https://", "http://")),
            "set secret to a text that only you and the receiver have": self.format == "casemate" and not self.secret,
            "set routing_key to the key of the PagerDuty integration": (
                self.format == "pagerduty" and not self.routing_key
            ),
            f"timeout_s is {self.timeout_s}; it must be above 0": not self.timeout_s > 0,
        }
        if any(wrong.values()):
            errors = ", and ".join(error for error, is_wrong in wrong.items() if is_wrong)
            raise ConfigError(f"channel {self.name!r}: {errors}")

    async def send(self, notification: Notification) -> None:
        """Posts one notification. Reads only the status of the response, and follows no redirect.

        Raises:
            BackendError: If it was not accepted, or the outcome is unknown. The message does not contain the URL.
        """
        with needs("casemate[notify]"):
            import httpx
        pagerduty = self.format == "pagerduty"
        event = _pagerduty_event(notification, self.routing_key) if pagerduty else _json(notification)
        body = json.dumps(event, ensure_ascii=True).encode()
        try:
            written = httpx.URL(self.url)
            with _RedactUrl(self.url, str(written)):
                async with (
                    asyncio.timeout(self.timeout_s),  # httpx limits each read, and a receiver can send many small parts
                    httpx.AsyncClient(timeout=self.timeout_s) as client,
                    client.stream("POST", written, content=body, headers=self._headers(notification, body)) as response,
                ):
                    status = response.status_code
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
            raise self._failure(f"invalid url ({type(error).__name__})", "correct it", False) from None
        except (httpx.HTTPError, TimeoutError) as error:
            problem = f"the connection failed ({type(error).__name__})"
            raise self._failure(problem, "it will be retried", True) from None
        self._require_success(status)
        if pagerduty and notification.action == "test":
            await self.send(replace(notification, action="recovered"))

    def _require_success(self, status: int) -> None:
        if not 200 <= status < 300:
            transient = status in {408, 425, 429} or status >= 500
            remedy = "it will be retried" if transient else "check url and keys"
            raise self._failure(f"the receiver refused it (HTTP {status})", remedy, transient)

    def _headers(self, notification: Notification, body: bytes) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Idempotency-Key": _ascii(notification.key)}
        if self.secret:
            at = str(int(time.time()))
            headers |= {"X-Casemate-Timestamp": at, "X-Casemate-Signature": signature(self.secret, at, body)}
        return headers

    def _failure(self, problem: str, remedy: str, retryable: bool) -> BackendError:
        return BackendError(f"channel {self.name!r}: {problem}; {remedy}", backend="webhook", retryable=retryable)


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """The signature of timestamp and body: ``sha256=`` and 64 hexadecimal digits."""
    return "sha256=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def verify(secret: str, timestamp: str, body: bytes, signed: str, *, now: float | None = None) -> bool:
    """Verifies a signature that is at most five minutes old. For receivers of notifications.

    Args:
        secret: The shared secret.
        timestamp: The header ``X-Casemate-Timestamp``.
        body: The raw body.
        signed: The header ``X-Casemate-Signature``.
        now: Seconds since 1970. None: the current time.
    """
    if not timestamp.isascii() or not timestamp.isdigit():
        return False
    valid = hmac.compare_digest(signature(secret, timestamp, body).encode(), signed.encode(errors="replace"))
    return valid and abs((time.time() if now is None else now) - int(timestamp)) <= TOLERANCE_S


def _json(notification: Notification) -> dict[str, Any]:
    return {
        "key": notification.key,
        "alert": notification.alert,
        "action": notification.action,
        "severity": notification.severity,
        "at": notification.at.isoformat(),
        "title": notification.title,
        "text": notification.text,
        "markdown": notification.markdown,
        "details": dict(notification.details),
    }


def _pagerduty_event(notification: Notification, routing_key: str) -> dict[str, Any]:
    event: dict[str, Any] = {
        "routing_key": str(routing_key),
        "event_action": "resolve" if notification.action == "recovered" else "trigger",
        "dedup_key": notification.alert,
    }
    payload = {
        "summary": notification.title[:MAX_SUMMARY],
        "source": str(notification.details.get("set", "casemate")),
        "severity": PAGERDUTY_SEVERITIES.get(notification.severity, "error"),
        "timestamp": notification.at.isoformat(),
        "component": "casemate",
        "class": str(notification.details.get("kind", notification.action)),
        "custom_details": {"text": notification.text, "key": notification.key, **notification.details},
    }
    return event | {"payload": payload}


def _ascii(text: str) -> str:
    """An ASCII header value. Different keys stay different."""
    return text if text.isascii() else hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


class _RedactUrl(logging.Filter):
    """Drops httpx's log records, which it writes at level INFO, with the URL as configured or as httpx writes it."""

    def __init__(self, *urls: str) -> None:
        super().__init__()
        self._urls = urls

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(url in record.getMessage() for url in self._urls)

    def __enter__(self) -> None:
        logging.getLogger("httpx").addFilter(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("httpx").removeFilter(self)
