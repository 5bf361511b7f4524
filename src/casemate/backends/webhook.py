r"""Notices as signed JSON over HTTP, or as events for a pager.

``format: casemate`` posts the notice with two headers: ``X-Casemate-Timestamp``, the seconds since 1970 at which it was
sent, and ``X-Casemate-Signature``, ``sha256=`` and the hexadecimal HMAC-SHA256 of timestamp, a dot and the body, under
the secret that both sides know. ``Idempotency-Key`` is the same whenever the same notice comes again. A receiver takes
what ``genuine`` takes, and no key twice:

>>> secret, body = "both sides know it", b'{"title": "clinic: 2 canaries failed at once"}'
>>> signed = signature(secret, "1772366400", body)
>>> genuine(secret, "1772366400", body, signed, now=1772366409)
True
>>> genuine(secret, "1772366400", body + b" ", signed, now=1772366409)  # changed on the way
False
>>> genuine(secret, "1772366400", body, signed, now=1772369999)  # replayed an hour later
False

In another language it is the same three lines: join timestamp, ".", and the body as it came, before any parsing; take
the HMAC; compare in constant time.

``format: pagerduty`` posts events of the shape that PagerDuty's Events API v2 and its likes take: the alert's id is the
``dedup_key``, so that an update changes the incident and a recovery resolves it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from casemate.errors import BackendError, ConfigError, needs
from casemate.protocols import Channel
from casemate.types import Notice, Secret

TOLERANCE_S = 300.0
"""Age, in seconds, at which a signature is no longer taken."""
GRADES = {"low": "info", "medium": "warning", "high": "error", "critical": "critical"}
"""Our severities in the pager's words."""
LONGEST_TITLE = 1024
"""Characters of a pager's summary."""


@dataclass(eq=False)
class Webhook(Channel):
    """Posts each notice to an address, signed; or as an event for a pager.

    Attributes:
        url: The address; it often holds a token.
        secret: Key of the signature; needed unless ``format`` is ``pagerduty``.
        format: ``casemate``: the notice as JSON. ``pagerduty``: an event for an events API.
        routing_key: The integration's key; needed for ``pagerduty``.
        name: Under which deliveries are noted; different for each channel.
        timeout_s: How long the receiver may take.
    """

    url: Secret = field(repr=False)
    secret: Secret = field(default=Secret(""), repr=False)
    format: Literal["casemate", "pagerduty"] = "casemate"
    routing_key: Secret = field(default=Secret(""), repr=False)
    name: str = "webhook"
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("https://", "http://")):
            raise ConfigError(f"channel {self.name!r}: the url must begin with https:// or http://")
        if self.format == "casemate" and not self.secret:
            raise ConfigError(f"channel {self.name!r}: set secret, a text that only you and the receiver know")
        if self.format == "pagerduty" and not self.routing_key:
            raise ConfigError(f"channel {self.name!r}: set routing_key, that of the pager's integration")
        if not self.timeout_s > 0:
            raise ConfigError(f"channel {self.name!r}: timeout_s={self.timeout_s}; it must be above 0")

    async def send(self, notice: Notice) -> None:
        """Posts one notice. The receiver's answer is not read, only its status; it is not followed elsewhere.

        Raises:
            BackendError: If it was not taken, or nobody knows whether it was. The message does not hold the address.
        """
        with needs("casemate[notify]"):
            import httpx
        body = json.dumps(self._body(notice), ensure_ascii=True).encode()
        with _Unlogged(self.url):
            try:
                async with (
                    httpx.AsyncClient(timeout=self.timeout_s) as client,
                    client.stream("POST", self.url, content=body, headers=self._headers(notice, body)) as response,
                ):
                    status = response.status_code
            except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
                raise self._failure(f"its url is none ({type(error).__name__})", "correct it", False) from None
            except httpx.HTTPError as error:
                what = f"the connection failed ({type(error).__name__})"
                raise self._failure(what, "it is tried again", True) from None
        if not 200 <= status < 300:
            passing = status in {408, 425, 429} or status >= 500
            remedy = "it is tried again" if passing else "see that url and keys are right"
            raise self._failure(f"the receiver refused (HTTP {status})", remedy, passing)

    def _headers(self, notice: Notice, body: bytes) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Idempotency-Key": _ascii(notice.key)}
        if self.secret:
            at = str(int(time.time()))
            headers |= {"X-Casemate-Timestamp": at, "X-Casemate-Signature": signature(self.secret, at, body)}
        return headers

    def _body(self, notice: Notice) -> dict[str, Any]:
        return _event(notice, self.routing_key) if self.format == "pagerduty" else _plain(notice)

    def _failure(self, what: str, remedy: str, retryable: bool) -> BackendError:
        return BackendError(f"channel {self.name!r}: {what}; {remedy}", backend="webhook", retryable=retryable)


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """The signature of a body sent at a time: ``sha256=`` and 64 hexadecimal digits."""
    return "sha256=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def genuine(secret: str, timestamp: str, body: bytes, signed: str, *, now: float | None = None) -> bool:
    """Whether a body was signed with the secret, not more than five minutes ago: for whoever receives notices.

    Args:
        secret: The one both sides know.
        timestamp: The header ``X-Casemate-Timestamp``.
        body: As it came, before any parsing.
        signed: The header ``X-Casemate-Signature``.
        now: Seconds since 1970; None: by the clock.
    """
    good = hmac.compare_digest(signature(secret, timestamp, body).encode(), signed.encode())
    if not timestamp.isascii() or not timestamp.isdigit():
        return False
    return good and abs((time.time() if now is None else now) - int(timestamp)) <= TOLERANCE_S


def _plain(notice: Notice) -> dict[str, Any]:
    return {
        "key": notice.key,
        "alert": notice.alert,
        "action": notice.action,
        "severity": notice.severity,
        "at": notice.at.isoformat(),
        "title": notice.title,
        "text": notice.text,
        "markdown": notice.markdown,
        "details": dict(notice.details),
    }


def _event(notice: Notice, routing_key: str) -> dict[str, Any]:
    """An event for a pager: what opens, changes or ends an incident."""
    event: dict[str, Any] = {
        "routing_key": str(routing_key),
        "event_action": "resolve" if notice.action == "recovered" else "trigger",
        "dedup_key": notice.alert,
    }
    payload = {
        "summary": notice.title[:LONGEST_TITLE],
        "source": str(notice.details.get("set", "casemate")),
        "severity": GRADES.get(notice.severity, "error"),
        "timestamp": notice.at.isoformat(),
        "component": "casemate",
        "class": str(notice.details.get("kind", notice.action)),
        "custom_details": {"text": notice.text, "key": notice.key, **notice.details},
    }
    return event | {"payload": payload}


def _ascii(text: str) -> str:
    """A header's value; two keys do not become one."""
    return text if text.isascii() else hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


class _Unlogged(logging.Filter):
    """Keeps an address out of httpx's log, which else would tell it at level INFO."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    def filter(self, record: logging.LogRecord) -> bool:
        return self._url not in record.getMessage()

    def __enter__(self) -> None:
        logging.getLogger("httpx").addFilter(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("httpx").removeFilter(self)
