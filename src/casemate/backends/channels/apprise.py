"""Notifications by the apprise library: mail, Slack, Teams, Matrix, Telegram, SMS, PagerDuty and others, by one URL.

For example ``mailto://user:password@example.com?to=ops@example.com`` or ``slack://TokenA/TokenB/TokenC/#alerts``; see
https://github.com/caronc/apprise/wiki. The URL contains the password, so set it from the environment. Log records of
the library during a delivery are dropped, because they may contain it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from dataclasses import dataclass, field

from casemate.errors import BackendError, ConfigError, needs
from casemate.protocols import Channel
from casemate.types import Notification, Secret

SILENCED_LOGGERS = ("apprise", "requests", "urllib3", "urllib3.connectionpool", "urllib3.util.retry", "paho", "slixmpp")
"""Loggers that may log a URL with its password."""
NOTIFY_TYPES = {"recovered": "success", "low": "info", "medium": "warning", "high": "warning", "critical": "failure"}
"""Apprise's notification type, by action or severity."""


@dataclass(eq=False)
class AppriseChannel(Channel):
    """Sends notifications through a service that apprise supports.

    Attributes:
        url: Apprise URL of the service.
        name: Name of the channel in the delivery log, unique among channels.
        timeout_s: Limit of one delivery.
    """

    url: Secret = field(repr=False)
    name: str = "apprise"
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.url or not self.timeout_s > 0:
            raise ConfigError(f"channel {self.name!r}: set url, and timeout_s above 0; timeout_s is {self.timeout_s}")

    async def send(self, notification: Notification) -> None:
        """Sends one notification, in a thread.

        Raises:
            BackendError: If the service did not accept it. The message does not contain the URL.
            ConfigError: If apprise does not support the URL.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                accepted = await asyncio.to_thread(self._send, notification)
        except TimeoutError:
            raise self._failure(f"no answer within {self.timeout_s:g} s") from None
        if not accepted:
            raise self._failure("the service did not accept the notification")

    def _send(self, notification: Notification) -> bool:
        with needs("casemate[notify]"):
            import apprise

        with _DROP_LOGS:
            service = apprise.Apprise()
            with warnings.catch_warnings():  # the library imports deprecated modules when it loads its services
                warnings.simplefilter("ignore", DeprecationWarning)
                supported = service.add(str(self.url))
            if not supported:
                raise ConfigError(
                    f"channel {self.name!r}: apprise does not support this url; see its wiki for the form"
                )
            try:
                return bool(
                    service.notify(
                        body=f"{notification.markdown}\n\nRef. {notification.key}",
                        title=notification.title,
                        notify_type=apprise.NotifyType(
                            NOTIFY_TYPES.get(notification.action, NOTIFY_TYPES.get(notification.severity, "warning"))
                        ),
                        body_format=apprise.NotifyFormat.MARKDOWN,
                    )
                )
            except Exception as error:  # its message may contain the url
                raise self._failure(f"the library failed ({type(error).__name__})") from None

    def _failure(self, problem: str) -> BackendError:
        return BackendError(f"channel {self.name!r}: {problem}; it will be retried", backend="apprise", retryable=True)


class _DropLogs(logging.Filter):
    """Drops all records of ``SILENCED_LOGGERS`` during deliveries. Global, because the library sends from threads."""

    def __init__(self) -> None:
        super().__init__()
        self._sending = 0
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        return False

    def __enter__(self) -> None:
        with self._lock:
            self._sending += 1
            if self._sending == 1:
                for name in SILENCED_LOGGERS:
                    logging.getLogger(name).addFilter(self)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._sending -= 1
            if not self._sending:
                for name in SILENCED_LOGGERS:
                    logging.getLogger(name).removeFilter(self)


_DROP_LOGS = _DropLogs()
