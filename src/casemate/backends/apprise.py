"""Notices by the apprise library: mail, Slack, Teams, Matrix, Telegram, SMS, PagerDuty and many more, by one URL.

For example ``mailto://user:password@example.com?to=ops@example.com`` or ``slack://TokenA/TokenB/TokenC/#alerts``; see
https://github.com/caronc/apprise/wiki. The URL holds the password, so it comes from the environment and is written
nowhere: what the library logs while it sends is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from dataclasses import dataclass, field

from casemate.errors import BackendError, ConfigError, needs
from casemate.protocols import Channel
from casemate.types import Notice, Secret

TALKATIVE = ("apprise", "requests", "urllib3", "urllib3.connectionpool", "urllib3.util.retry", "paho", "slixmpp")
"""Loggers that may tell an address with its password."""
KINDS = {"recovered": "success", "low": "info", "medium": "warning", "high": "warning", "critical": "failure"}
"""Apprise's kind of notice, for an action or a severity."""


@dataclass(eq=False)
class Apprise(Channel):
    """Sends each notice through any service that the apprise library knows.

    Attributes:
        url: Apprise's URL of the service.
        name: Under which deliveries are noted; different for each channel.
        timeout_s: How long the service may take.
    """

    url: Secret = field(repr=False)
    name: str = "apprise"
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.url or not self.timeout_s > 0:
            raise ConfigError(f"channel {self.name!r}: it needs a url, and a timeout_s above 0; got {self.timeout_s}")

    async def send(self, notice: Notice) -> None:
        """Sends one notice, in a thread.

        Raises:
            BackendError: If the service did not take it. The message does not hold the URL.
            ConfigError: If the URL is none that apprise knows.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                taken = await asyncio.to_thread(self._send, notice)
        except TimeoutError:
            raise self._failure(f"no answer within {self.timeout_s:g} s") from None
        if not taken:
            raise self._failure("the service did not take the notice")

    def _send(self, notice: Notice) -> bool:
        with needs("casemate[notify]"):
            import apprise

        with _SILENCE:
            service = apprise.Apprise()
            with warnings.catch_warnings():  # the library looks for old modules as it loads its services
                warnings.simplefilter("ignore", DeprecationWarning)
                known = service.add(str(self.url))
            if not known:
                raise ConfigError(f"channel {self.name!r}: apprise knows no such url; see its wiki for the right form")
            try:
                return bool(
                    service.notify(
                        body=f"{notice.markdown}\n\nRef. {notice.key}",
                        title=notice.title,
                        notify_type=apprise.NotifyType(KINDS.get(notice.action, KINDS.get(notice.severity, "warning"))),
                        body_format=apprise.NotifyFormat.MARKDOWN,
                    )
                )
            except Exception as error:  # its words may hold the url
                raise self._failure(f"the library failed ({type(error).__name__})") from None

    def _failure(self, what: str) -> BackendError:
        return BackendError(f"channel {self.name!r}: {what}; it is tried again", backend="apprise", retryable=True)


class _Silence(logging.Filter):
    """Drops all that the talkative say while a notice is on its way: the library sends from threads of its own."""

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
                for name in TALKATIVE:
                    logging.getLogger(name).addFilter(self)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._sending -= 1
            if not self._sending:
                for name in TALKATIVE:
                    logging.getLogger(name).removeFilter(self)


_SILENCE = _Silence()
