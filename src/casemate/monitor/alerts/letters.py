"""What one channel still has to carry, and what goes next: pure, from the events of alerts and of attempts.

Of one alert, notices go in order: one that waits for another attempt holds up those behind it. The gravest alert goes
first. Beyond ``Policy.per_hour`` all that waits becomes one notice. Of the places in an hour one is kept for what is
critical: nobody can drown an alert in noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from casemate.errors import ConfigError
from casemate.monitor.alerts import wording
from casemate.monitor.alerts.alert import Alert, Phase, gravest, of_event, standings
from casemate.monitor.canaries.results import Severity
from casemate.types import Event, Notice

KIND = "delivery"
"""Events of this kind hold one attempt at one change of an alert, and how it ended."""
HOUR = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Policy:
    """How notices are sent.

    Attributes:
        per_hour: Notices that one channel takes in an hour, at least 1.
        first_s: Pause after the first failed attempt; it doubles from one to the next.
        longest_s: Longest pause, and the one after a failure that trying again does not mend.
        give_up_s: Age at which a notice is given up if its alert is over, or has newer ones. The newest of an alert
            that is open is never given up.
        timeout_s: Time that a channel has for one notice.
    """

    per_hour: int = 20
    first_s: float = 5.0
    longest_s: float = 3600.0
    give_up_s: float = 86_400.0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.per_hour < 1 or not 0 < self.first_s <= self.longest_s or not min(self.give_up_s, self.timeout_s) > 0:
            raise ConfigError(
                f"per_hour={self.per_hour}, first_s={self.first_s}, longest_s={self.longest_s}, give_up_s="
                f"{self.give_up_s}, timeout_s={self.timeout_s}: all must be above 0, and first_s at most longest_s"
            )

    def pause(self, key: str, number: int, retryable: bool = True) -> timedelta:
        """How long to wait after a failed attempt: exponential, times a chance between one half and one and a half.

        The chance follows from the key: the notices of one outage come back spread out, and always the same.
        """
        chance = int(_digest(key, str(number))[:8], 16) / 2**32
        length = min(self.first_s * 2.0 ** min(number - 1, 40), self.longest_s) if retryable else self.longest_s
        return timedelta(seconds=length * (0.5 + chance))


class End(StrEnum):
    """How an attempt ended."""

    DELIVERED = "delivered"
    FAILED = "failed"
    GIVEN_UP = "given_up"


class Attempt(NamedTuple):
    """The last attempt to carry a letter: which one it was, how it ended, when, when to try again, in which notice."""

    number: int
    end: End
    at: datetime
    retry_at: datetime
    notice: str


class Failure(NamedTuple):
    """Why a notice was not taken, and whether trying again soon may help."""

    reason: str
    retryable: bool = True


class Letter(NamedTuple):
    """One change of an alert, to be carried through one channel."""

    event: Event
    alert: Alert
    phase: Phase


class Sending(NamedTuple):
    """What goes out as one notice: one letter, or several put together."""

    letters: tuple[Letter, ...]
    notice: Notice


class Book:
    """What one channel has carried, and what waits.

    Args:
        alerts: Events of alerts, in the order written.
        tried: Events of attempts, of whatever channel, in the order written.
        channel: The name of this one.
        policy: How notices are sent.
    """

    def __init__(self, alerts: Sequence[Event], tried: Iterable[Event], channel: str, policy: Policy) -> None:
        self._channel, self._policy = channel, policy
        self._standing = standings(alerts)
        self._last = {e.body["event"]: _attempt(e) for e in tried if e.body["channel"] == channel}
        self._letters: dict[str, list[Letter]] = {}
        for event in alerts:
            phase = Phase(event.body["phase"])
            if phase is not Phase.ACKNOWLEDGED and not event.body["quiet"]:
                alert = of_event(event)
                self._letters.setdefault(alert.id, []).append(Letter(event, alert, phase))

    def next(self, now: datetime) -> Sending | None:
        """What goes out now; None: nothing, or nothing more in this hour."""
        waiting = [letter for letters in self._ready(now) for letter in letters]
        room = self._policy.per_hour - len(self._sent(now))
        if self._policy.per_hour > 1 and not any(x.alert.severity is Severity.CRITICAL for x in waiting):
            room -= 1
        if not waiting or room < 1:
            return None
        letters = tuple(waiting if room == 1 else waiting[:1])
        return Sending(
            letters, _notice(letters[0], self._channel) if len(letters) == 1 else _sum(letters, self._channel)
        )

    def next_due(self, now: datetime) -> datetime | None:
        """When something may go out next, if nothing may now; None: nothing waits."""
        held = [self._last[letters[0].event.id].retry_at for letters in self._waiting() if self._held(letters, now)]
        room = [at + HOUR for at in self._sent(now)] if self._ready(now) else []
        return min([*held, *room], default=None)

    def settle(self, sending: Sending, now: datetime, failure: Failure | None) -> list[Event]:
        """Notes how a sending ended; the events that tell it."""
        end = End.FAILED if failure else End.DELIVERED
        reason, retryable = failure or Failure("")
        return [self._noted(x, end, now, (sending.notice.key, reason, retryable)) for x in sending.letters]

    def give_up(self, now: datetime) -> list[Event]:
        """Gives up what is too old, and no longer the last word on an open alert; the events that tell it."""
        limit = now - timedelta(seconds=self._policy.give_up_s)
        old = [x for letters in self._waiting() for x in letters if x.event.at < limit and not self._last_word(x)]
        return [self._noted(x, End.GIVEN_UP, now, ("", "too old", False)) for x in old]

    def _last_word(self, letter: Letter) -> bool:
        standing = self._standing[letter.alert.id]
        return standing.open and letter is self._letters[letter.alert.id][-1]

    def _waiting(self) -> list[list[Letter]]:
        """Of each alert, what has not arrived, in order."""
        settled = {e for e, attempt in self._last.items() if attempt.end is not End.FAILED}
        left = ([x for x in letters if x.event.id not in settled] for letters in self._letters.values())
        return [letters for letters in left if letters]

    def _held(self, letters: Sequence[Letter], now: datetime) -> bool:
        """Whether the first letter of an alert waits for another attempt."""
        last = self._last.get(letters[0].event.id)
        return last is not None and last.retry_at > now

    def _ready(self, now: datetime) -> list[list[Letter]]:
        """Of each alert that may be told of now, what has not arrived; the gravest first."""
        order = list(Severity)
        ready = [letters for letters in self._waiting() if not self._held(letters, now)]
        return sorted(ready, key=lambda letters: -max(order.index(x.alert.severity) for x in letters))

    def _sent(self, now: datetime) -> list[datetime]:
        """When each notice of the last hour was delivered."""
        done = {a.notice: a.at for a in self._last.values() if a.end is End.DELIVERED and a.at > now - HOUR}
        return list(done.values())

    def _noted(self, letter: Letter, end: End, now: datetime, told: tuple[str, str, bool]) -> Event:
        """One attempt, noted here, and its event."""
        notice, reason, retryable = told
        last = self._last.get(letter.event.id)
        number = last.number + 1 if last else 1
        retry_at = now + self._policy.pause(letter.event.id, number, retryable)
        self._last[letter.event.id] = Attempt(number, end, now, retry_at, notice)
        body = {
            "event": letter.event.id,
            "alert": letter.alert.id,
            "channel": self._channel,
            "number": number,
            "end": end,
            "retry_at": retry_at.isoformat(),
            "notice": notice,
            "reason": reason,
        }
        return Event(f"{KIND}:{_digest(letter.event.id, self._channel)}:{number}", now, KIND, body)


def _attempt(event: Event) -> Attempt:
    body = event.body
    retry_at = datetime.fromisoformat(body["retry_at"])
    return Attempt(int(body["number"]), End(body["end"]), event.at, retry_at, body["notice"])


def _notice(letter: Letter, channel: str) -> Notice:
    """One letter, in words."""
    alert, words = letter.alert, wording.render(letter.alert, letter.phase)
    details = {
        "kind": alert.kind,
        "set": alert.set,
        "canaries": list(alert.canaries),
        "since": alert.since.isoformat(),
        "documents": list(alert.documents),
    }
    key = f"{letter.event.id}@{channel}"
    return Notice(key, alert.id, letter.phase, alert.severity, letter.event.at, *words, details)


def _sum(letters: Sequence[Letter], channel: str) -> Notice:
    """Several letters, in the words of one notice."""
    words = wording.summarise([(x.alert, x.phase) for x in letters])
    severity = gravest([x.alert.severity for x in letters])
    key = f"summary-{_digest(channel, *(x.event.id for x in letters))}"
    details = {"alerts": sorted({x.alert.id for x in letters})}
    return Notice(key, key, "summary", severity, max(x.event.at for x in letters), *words, details)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:32]
